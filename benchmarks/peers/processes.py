"""The processes of a peer: all that it started, whatever they became."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.measure import WrongWork

_PROC: Final = Path("/proc")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_END_S: Final = 30.0


class Processes:
    """What was started by a few commands. Each has a session of its own, by which its descendants are known even
    where one between them has ended; those that took another session are known by their parents."""

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], folder: Path, log: Path):
        with log.open("ab") as out:
            self._started = [
                subprocess.Popen(
                    list(command),
                    cwd=folder,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command in commands
            ]
        self._log = log

    def cpu_s(self) -> float:
        """User and system time of all that live, and of those that have ended and were waited for by them."""
        return sum(ticks for _, ticks in self._living()) / _TICKS

    def ended(self) -> bool:
        return any(process.poll() is not None for process in self._started)

    def check(self) -> None:
        if self.ended():
            raise WrongWork(f"its process ended: {self.last_words()}")

    def last_words(self) -> str:
        lines = self._log.read_text("utf-8", "replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        telling = [line for line in said if "Error" in line or "Exception" in line]
        return (telling or said or ["it said nothing"])[-1][:300]

    def kill(self) -> None:
        """SIGKILL to all, until none is left."""
        deadline = time.monotonic() + _END_S
        while living := [pid for pid, _ in self._living()]:
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.poll()
            if time.monotonic() > deadline:
                raise WrongWork(f"processes {living} did not end")
            time.sleep(0.01)
        for process in self._started:
            process.wait(_END_S)

    def _living(self) -> list[tuple[int, int]]:
        """(pid, ticks) of each."""
        roots = {process.pid for process in self._started}
        known: dict[int, tuple[int, int, int]] = {}
        for folder in _PROC.iterdir():
            if folder.name.isdigit() and (read := _read_stat(folder)) is not None:
                known[int(folder.name)] = read
        ours = {pid for pid, (_, session, _) in known.items() if session in roots or pid in roots}
        while more := {pid for pid, (parent, _, _) in known.items() if parent in ours} - ours:
            ours |= more
        return [(pid, known[pid][2]) for pid in ours]


def _read_stat(folder: Path) -> tuple[int, int, int] | None:
    """(parent, session, ticks) of a process, or None if it is gone or only waits to be reaped."""
    try:
        # What comes before the last bracket is the command's name, which may hold anything.
        fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZX":
        return None
    return int(fields[1]), int(fields[3]), sum(int(field) for field in fields[11:15])
