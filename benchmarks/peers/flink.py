"""PyFlink's Table API, set up as its documentation says for exactly-once with RocksDB."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, ClassVar, Final

import pyspark

from benchmarks.peers.environments import CannotRun, jar_of, need_java, python_of, version_in
from benchmarks.peers.job import Job
from benchmarks.peers.peer import Peer, Taken

_PYTHONS: Final = ("3.11", "3.12")
_WANTED: Final = "apache-flink==2.3.*"
_ASK_S: Final = 5.0


class Flink(Peer):
    """`unaligned`: whether its checkpoints are."""

    name: ClassVar = "flink"
    unaligned: ClassVar = False
    _python: Path
    _jars: tuple[Path, ...]

    def install(self) -> None:
        try:
            self._python = python_of("flink", [_WANTED], _PYTHONS)
        except CannotRun:
            # The newest that there is; the report tells which.
            self._python = python_of("flink", ["apache-flink"], _PYTHONS)
        hadoop = sorted((Path(pyspark.__file__).parent / "jars").glob("hadoop-client-*.jar"))
        if not hadoop:
            raise CannotRun("its Parquet format needs Hadoop's client, and PySpark's jars have none")
        need_java()
        self._jars = (jar_of("flink", f"org.apache.flink:flink-sql-parquet:{self.number()}"), *hadoop)

    def number(self) -> str:
        return version_in(self._python, "apache-flink")

    def version(self) -> str:
        return f"PyFlink {self.number()}, Table API"

    def settings(self) -> str:
        aligned = "unaligned" if self.unaligned else "aligned"
        return (
            f"RocksDB, incremental checkpoints, EXACTLY_ONCE, {aligned}, every second, retained; a mini cluster in one "
            "JVM with a slot per core, 512 MB of managed memory, the JVM's own limit of heap. Mini-batches of up to "
            "100,000 rows or 1 s with local and global aggregation, as its tuning guide advises. One job: hops are "
            "operators, nothing is written between them. Files: its filesystem connector, watched every 100 ms. "
            "Counts: a changelog in Debezium JSON, rolled every second (its Parquet files take no updates). Chain: "
            "Parquet. Checkpoint: end_to_end_duration of its REST interface. After a kill it starts from the newest "
            "retained checkpoint."
        )

    def commands(self, job: Job) -> list[list[str]]:
        del job
        return [[str(self._python), "-m", "benchmarks.peers.jobs.flink_job"]]

    def environment(self, job: Job) -> dict[str, str]:
        temporary = Path(job.state) / "temporary"
        temporary.mkdir(parents=True, exist_ok=True)
        return {
            **job.environment(),
            "HADOOP_CLASSPATH": ":".join(map(str, self._jars)),
            "TMPDIR": str(temporary),
            "FLINK_LOG_DIR": str(temporary),
        }

    def prepare(self, job: Job) -> None:
        super().prepare(job)
        job.settings["execution.checkpointing.unaligned.enabled"] = str(self.unaligned).lower()

    def restored(self, job: Job) -> Job:
        # A checkpoint is whole when it has its metadata.
        whole = [path.parent for path in Path(job.state).glob("checkpoints/*/chk-*/_metadata")]
        newest = max(whole, key=lambda path: (path / "_metadata").stat().st_mtime_ns, default=None)
        fields = {name: getattr(job, name) for name in Job.__dataclass_fields__}
        return Job(**{**fields, "restore": "" if newest is None else newest.as_uri()})

    def visible(self, job: Job, table: str) -> list[Path]:
        folder = Path(job.table(table))
        # What is not committed has a name with a dot before it.
        return [path for path in folder.glob("[!._]*") if path.is_file()] if folder.is_dir() else []

    def checkpoints(self, job: Job) -> list[Taken]:
        base = f"http://localhost:{job.port}/jobs"
        taken = []
        for listed in _ask(base)["jobs"]:
            for each in _ask(f"{base}/{listed['id']}/checkpoints")["history"]:
                if each["status"] == "COMPLETED":
                    ended = each["trigger_timestamp"] + each["end_to_end_duration"]
                    taken.append(Taken(ended, each["end_to_end_duration"]))
        return taken


class UnalignedFlink(Flink):
    name: ClassVar = "flink-unaligned"
    unaligned: ClassVar = True


def _ask(address: str) -> Any:
    try:
        with urllib.request.urlopen(address, timeout=_ASK_S) as answer:
            return json.load(answer)
    except urllib.error.URLError:
        return {"jobs": [], "history": []}
