"""Plain PySpark: the same queries without Tidegate, with the settings that Tidegate gives its own."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import ClassVar

import msgspec

from benchmarks.peers.environments import need_java
from benchmarks.peers.job import COUNTS, Job
from benchmarks.peers.peer import Peer, Taken


class PlainSpark(Peer):
    name: ClassVar = "spark"

    def install(self) -> None:
        need_java()

    def version(self) -> str:
        return f"PySpark {importlib.metadata.version('pyspark')}"

    def settings(self) -> str:
        return (
            "The session that Tidegate gives its stages (RocksDB with change logs, as many shuffle partitions as "
            "cores, plain renames), but Spark's own compaction of logs; as it comes, Spark is slower (./dev bench "
            "spark). Its logs are not forced to the disk. Counts: one query in update mode, foreachBatch overwrites a "
            "Parquet folder per batch. Chain: five queries with Parquet folders between them and at the end; each "
            "recovers alone. Checkpoint: Spark has none of a pipeline, every batch commits; what of a batch of the "
            "last query goes into that: walCommit, commitOffsets and the state's commit, by its progress."
        )

    def commands(self, job: Job) -> list[list[str]]:
        del job
        return [[sys.executable, "-m", "benchmarks.peers.jobs.spark_job"]]

    def environment(self, job: Job) -> dict[str, str]:
        # A kill leaves Spark's temporary files behind: they go with the job's folder.
        temporary = Path(job.state) / "temporary"
        temporary.mkdir(parents=True, exist_ok=True)
        return {**job.environment(), "TMPDIR": str(temporary)}

    def visible(self, job: Job, table: str) -> list[Path]:
        folder = Path(job.table(table))
        if job.work == COUNTS:
            return [path for done in folder.glob("batch=*/_SUCCESS") for path in done.parent.glob("*.parquet")]
        return read_sink_log(folder / "_spark_metadata")

    def checkpoints(self, job: Job) -> list[Taken]:
        record = Path(job.record + ".progress")
        lines = record.read_text("utf-8").splitlines() if record.exists() else []
        return [msgspec.json.decode(line, type=Taken) for line in lines]


def read_sink_log(log: Path) -> list[Path]:
    """The files that Spark's file sink has committed. A `.compact` entry repeats all before it."""
    if not log.is_dir():
        return []
    entries = {int(path.stem): path for path in log.iterdir() if path.stem.isdigit()}
    first = max((number for number, path in entries.items() if path.suffix == ".compact"), default=0)
    return [
        Path(msgspec.json.decode(line)["path"].removeprefix("file://"))
        for number in sorted(entries)
        if number >= first
        for line in entries[number].read_bytes().splitlines()[1:]
    ]
