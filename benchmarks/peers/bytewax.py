"""Bytewax with its recovery."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import ClassVar, Final

from benchmarks.peers.environments import CannotRun, python_of, version_in
from benchmarks.peers.job import TABLES, Job
from benchmarks.peers.peer import Peer

_PYTHONS: Final = ("3.11", "3.12")
_ASK_S: Final = 60.0


class Bytewax(Peer):
    name: ClassVar = "bytewax"
    share: ClassVar = 0.1  # every row passes through Python: all of them would take minutes
    _python: Path

    def install(self) -> None:
        self._python = python_of("bytewax", ["bytewax==0.21.*", "pyarrow"], _PYTHONS)
        works = subprocess.run(
            [str(self._python), "-c", "import bytewax.run, pyarrow.parquet"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_ASK_S,
        )
        if works.returncode != 0:
            raise CannotRun(f"it does not start: {works.stderr.strip().splitlines()[-1]}")

    def version(self) -> str:
        return f"Bytewax {version_in(self._python, 'bytewax')}"

    def settings(self) -> str:
        return (
            "A process per core, recovery into as many SQLite partitions, a snapshot every second (-s 1 -b 0). It has "
            "no source of Parquet: one of ours reads a folder with pyarrow, a row group at a time, a partition per "
            "process. Counts: key_on and stateful_batch, a line per key and batch. Files: its own DirSink, lines of "
            "JSON, which it truncates to the last snapshot after a kill: until then a reader may see rows that come "
            "again. Checkpoint: it records no times. It gets a tenth of the files."
        )

    def prepare(self, job: Job) -> None:
        super().prepare(job)
        for table in TABLES[job.work]:
            Path(job.table(table)).mkdir(parents=True)
        subprocess.run(
            [str(self._python), "-m", "bytewax.recovery", job.state, str(job.cores)], check=True, timeout=_ASK_S
        )

    def commands(self, job: Job) -> list[list[str]]:
        run = [str(self._python), "-m", "bytewax.run", "benchmarks.peers.jobs.bytewax_job:flow"]
        run += ["-r", job.state, "-s", str(job.checkpoint_s), "-b", "0"]
        if job.cores == 1:
            return [run]
        addresses = ";".join(f"localhost:{port}" for port in _free_ports(job.cores))
        return [[*run, "-i", str(number), "-a", addresses] for number in range(job.cores)]

    def visible(self, job: Job, table: str) -> list[Path]:
        return sorted(Path(job.table(table)).glob("*.jsonl"))

    def checkpoints(self, job: Job) -> None:
        del job


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
