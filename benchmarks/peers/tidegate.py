"""Tidegate itself, as a user runs it: `tidegate run`."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import sys
from pathlib import Path
from typing import ClassVar

import msgspec
from deltalake import DeltaTable

from benchmarks.peers.environments import CannotRun, need_java
from benchmarks.peers.job import Job
from benchmarks.peers.peer import ROOT, Peer, Taken


class Tidegate(Peer):
    name: ClassVar = "tidegate"

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[str, list[Path]]] = {}

    def install(self) -> None:
        if not _command().exists():
            raise CannotRun("the command tidegate is not beside this Python: ./dev bench makes it")
        need_java()

    def version(self) -> str:
        return f"{importlib.metadata.version('tidegate')} on PySpark {importlib.metadata.version('pyspark')}"

    def settings(self) -> str:
        return (
            "tidegate run --checkpoint-interval 1s, all else as it comes: checkpoints aligned and forced to the disk "
            "(fsync), Spark in one JVM with local[*]. Counts: a source and a sink, two queries, every update appended "
            "to a Delta table. Chain: five queries with channels between them, into two Delta tables. Checkpoint: from "
            "its trigger until it is decided (duration_ms of tidegate run --json); tables show it just after."
        )

    def commands(self, job: Job) -> list[list[str]]:
        pipeline = ROOT / "benchmarks" / "peers" / "jobs" / "tidegate_job.py"
        interval = f"{job.checkpoint_s}s"
        run = [str(_command()), "run", str(pipeline), "--root", job.state]
        return [[*run, "--checkpoint-interval", interval, "--json"]]

    def environment(self, job: Job) -> dict[str, str]:
        # The pipeline's file is loaded by a command, which does not look for modules where it is called.
        return {**job.environment(), "PYTHONPATH": str(ROOT)}

    def visible(self, job: Job, table: str) -> list[Path]:
        path = Path(job.table(table))
        newest = max((version.name for version in path.glob("_delta_log/*.json")), default=None)
        if newest is None:
            return []
        if self._seen.get(path, ("", []))[0] != newest:
            # Read when there is a version more, not at every look: it takes the cores from those who are measured.
            files = [path / file.removeprefix("file://") for file in DeltaTable(path).file_uris()]
            self._seen[path] = newest, files
        return self._seen[path][1]

    def checkpoints(self, job: Job) -> list[Taken]:
        """From the events that it printed. A checkpoint is told when it is decided, again when it is shown."""
        taken: dict[str, Taken] = {}
        for line in Path(job.record).read_text("utf-8", "replace").splitlines():
            if not line.startswith("{"):
                continue
            event = msgspec.json.decode(line)
            told = event.get("checkpoint")
            if event.get("event") != "checkpoint" or told["state"] not in ("committing", "complete"):
                continue
            begun = dt.datetime.fromisoformat(told["triggered_at"]).timestamp() * 1_000
            taken.setdefault(told["checkpoint"], Taken(begun + told["duration_ms"], told["duration_ms"]))
        return list(taken.values())


def _command() -> Path:
    return Path(sys.executable).with_name("tidegate")
