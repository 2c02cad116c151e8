"""Ctrl-C and SIGTERM before a run has begun: it ends at once and quietly, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.harness import tidegate, wait_until
from tests.test_documents import example

MARK = "TIDEGATE_TEST_MARK"


def _heeds_ctrl_c() -> None:
    """Tests that run in the background of a shell ignore it, and so would what they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Started:
    """`tidegate run` in a process that is known by its environment, and so are its children."""

    def __init__(self, folder: Path) -> None:
        (folder / "orders.py").write_text(example(), encoding="utf-8")
        (folder / "orders").mkdir()
        self.root = folder / "root"
        self._mark = f"{MARK}={uuid.uuid4()}"
        environment = {**os.environ, MARK: self._mark.partition("=")[2], "PYTHONFAULTHANDLER": "1"}
        command = [sys.executable, "-m", "tidegate", "run", "orders.py", "--root", str(self.root)]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_heeds_ctrl_c,  # noqa: PLW1509 - it only sets a signal
        )

    @property
    def is_awake(self) -> bool:
        """Whether it is past Python's own start: it then handles SIGTERM, as Python by itself does not."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
        return False

    @property
    def has_jvm(self) -> bool:
        return any(name == "java" for name in self._names())

    @property
    def is_gone(self) -> bool:
        return not self._names()

    def ended(self) -> str:
        """What it has said when it has ended, and its children with it. If they hang, that tells where."""
        try:
            return self.process.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            alive = self._processes()
            self.process.send_signal(signal.SIGABRT)
            for process in alive.keys() - {self.process.pid}:
                os.kill(process, signal.SIGKILL)
            raise AssertionError(f"{alive} are alive; {self.process.communicate()[0]}") from None

    def remove(self) -> None:
        """End all of it, so that a test that fails leaves nothing behind either."""
        for process in self._processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def _names(self) -> list[str]:
        return list(self._processes().values())

    def _processes(self) -> dict[int, str]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "comm").read_text(encoding="utf-8").strip()
            except OSError:
                continue  # it is gone, or another user's
        return found


MOMENTS: dict[str, Callable[[Started], bool]] = {
    "it imports": lambda run: run.is_awake,
    "it has the root": lambda run: (run.root / "status.json").exists(),
    "the JVM starts": lambda run: run.has_jvm,
    "the JVM is about to answer": lambda run: (run.root / "spark.log").exists() and run.has_jvm,
}


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_while_a_run_starts_ends_it_at_once_and_leaves_nothing_behind(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    run = Started(tmp_path)
    try:
        wait_until(lambda: MOMENTS[moment](run))
        if "answer" in moment:
            time.sleep(0.7)
        run.process.send_signal(number)
        said = run.ended()
        wait_until(lambda: run.is_gone)
    finally:
        run.remove()
    assert run.process.returncode == 130, said
    assert "Traceback" not in said
    assert "Exception" not in said
    if moment == "it imports":
        assert said == ""
        assert not run.root.exists()
    else:
        *steps, last = said.splitlines()
        assert last == "stopped while it was starting; the next run goes on from the newest checkpoint, if there is one"
        assert all(" INFO " in line for line in steps), said
        status = tidegate("status", "--root", run.root)
        assert status.returncode == 6
        assert "the last run was interrupted at" in status.stdout
        assert "stopped while it was starting" in status.stdout
