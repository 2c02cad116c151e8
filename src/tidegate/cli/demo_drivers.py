"""`tidegate demo --drivers 3`: several drivers run the demo's pipeline together, and the one that leads is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import typer
from rich.console import Group, RenderableType
from rich.rule import Rule

from tidegate.cli.exits import Exit
from tidegate.cli.tables import run_lines
from tidegate.engine.status import RunStatus
from tidegate.engine.status_files import read_status
from tidegate.storage.places import Place

_PATIENCE_S: Final = 300
_LEASE: Final = ("--lease", "4s", "--grace", "3s")


class Teller(Protocol):
    @property
    def width(self) -> int: ...

    def say(self, what: RenderableType) -> None: ...


class Feed(Protocol):
    def share(self, run: int, runs: int) -> None: ...

    def put_if_due(self) -> None: ...

    def put_all(self) -> None: ...


class DemoDrivers:
    """As a context: all of them are gone in the end."""

    def __init__(
        self, folder: Path, command: list[str], how_many: int, feed: Feed, teller: Teller, root: Place
    ) -> None:
        """`command` runs the pipeline, but for what makes it one of several."""
        self._folder = folder
        self._root = root
        self._command = command
        self._names = [f"i{number}" for number in range(1, how_many + 1)]
        self._feed = feed
        self._teller = teller
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> DemoDrivers:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def show(self) -> int:
        """Returns how often one was killed."""
        say, feed = self._teller.say, self._feed
        say(Rule(f"{len(self._names)} drivers run the pipeline together; the one that leads is to be killed"))
        say("each starts a Spark of its own: that takes a while")
        feed.share(1, 3)
        self._start()
        self._wait(self._has_worked, "a checkpoint with new rows")
        self._tell()
        leader = self._leader()
        assert leader is not None
        self._running[leader].send_signal(signal.SIGKILL)
        self._running.pop(leader).wait()
        killed_s = time.monotonic()
        say(f"[yellow]{leader}, which led, was killed with SIGKILL[/]; the others wait for it for 3 s, then go on")
        feed.share(2, 3)
        self._wait(lambda status: self._leader() not in (None, leader) and self._has_worked(status), "another to lead")
        say(
            f"{self._leader()} leads, and has completed a checkpoint {time.monotonic() - killed_s:.0f} s after the kill"
        )
        self._tell()
        self._stop()
        feed.put_all()
        say(Rule(f"all {len(self._names)} again, to the end of the input"))
        self._start("--available-now")
        self._wait_for_all()
        return 1

    def _start(self, *arguments: str) -> None:
        together = ("--instances", str(len(self._names)), *_LEASE, *arguments)
        for name in self._names:
            with (self._folder / f"{name}.log").open("ab") as said:
                command = [*self._command, "--instance", name, *together]
                self._running[name] = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)

    def _status(self) -> RunStatus | None:
        return read_status(self._root.files)

    def _leader(self) -> str | None:
        status = self._status()
        leads = () if status is None else [each.name for each in status.instances if each.leads]
        return next((name for name in leads if name in self._running), None)

    @staticmethod
    def _has_worked(status: RunStatus) -> bool:
        own = (each for each in status.checkpoints if each.generation == status.generation)
        return status.state == "running" and any(each.state == "complete" and each.new_bytes for each in own)

    def _wait(self, is_so: Callable[[RunStatus], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while (status := self._status()) is None or not is_so(status):
            self._feed.put_if_due()
            self._check_alive()
            if time.monotonic() > deadline:
                typer.echo(f"waited for {what}, in vain; what they said is in {self._folder}", err=True)
                raise typer.Exit(Exit.FAILED)
            time.sleep(0.1)

    def _check_alive(self) -> None:
        for name, process in self._running.items():
            if process.poll() not in (None, 0):
                self._tell_last_words(name)
                raise typer.Exit(process.returncode or Exit.FAILED)

    def _tell_last_words(self, name: str) -> None:
        words = (self._folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        typer.echo(f"driver {name} has ended:\n{words[-2000:]}", err=True)

    def _tell(self) -> None:
        status = self._status()
        if status is not None:
            self._teller.say(Group(*run_lines(status, self._teller.width)))

    def _stop(self) -> None:
        """Whichever leads hears it."""
        command = [sys.executable, "-m", "tidegate", "stop", "--root", str(self._root)]
        stopped = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
        self._teller.say(f"$ tidegate stop: {stopped.stdout.strip() or stopped.stderr.strip()}")
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        for name, process in self._running.items():
            if process.wait(_PATIENCE_S) != 0:
                self._tell_last_words(name)
                raise typer.Exit(process.returncode)
        self._running.clear()
