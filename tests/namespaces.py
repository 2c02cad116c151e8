"""A network namespace of its own for a process of a test, whose only link to this one can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Final, Self

_HERE: Final = "10.213.7.1"
_THERE: Final = "10.213.7.2"


class Namespace:
    """As a context. What runs in it reaches this machine as `HOST`, and nothing else."""

    HOST: Final = _HERE

    def __init__(self) -> None:
        self._name = f"tidegate-{os.getpid()}"
        self._link = f"tg{os.getpid()}"

    @staticmethod
    def why_not() -> str | None:
        """Why there can be none here; None: there can."""
        if shutil.which("ip") is None:
            return "there is no ip command here"
        name = f"tidegate-try-{os.getpid()}"
        tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
        if tried.returncode:
            return f"no network namespace can be made here: {tried.stderr.strip()}"
        _ip("netns", "del", name)
        return None

    @property
    def command(self) -> list[str]:
        """Runs what follows it in there."""
        return ["ip", "netns", "exec", self._name, "env", "SPARK_LOCAL_IP=127.0.0.1"]

    def __enter__(self) -> Self:
        _ip("netns", "add", self._name)
        try:
            _ip("link", "add", self._link, "type", "veth", "peer", "name", "there", "netns", self._name)
            _ip("addr", "add", f"{_HERE}/30", "dev", self._link)
            self.mend()
            for inside in (("addr", "add", f"{_THERE}/30", "dev", "there"), ("link", "set", "there", "up")):
                _ip("-n", self._name, *inside)
            _ip("-n", self._name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ip("netns", "del", self._name)
        subprocess.run(["ip", "link", "del", self._link], capture_output=True, check=False)

    def cut(self) -> None:
        _ip("link", "set", self._link, "down")

    def mend(self) -> None:
        _ip("link", "set", self._link, "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
