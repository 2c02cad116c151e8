"""Spark Declarative Pipelines. It runs a pipeline to its end and stops, so it is run again and again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import ClassVar, Final

from benchmarks.peers.environments import need_java, python_of, version_in
from benchmarks.peers.job import COUNTS, DELAY_S, WINDOW_S, Job
from benchmarks.peers.peer import Peer
from benchmarks.peers.plain_spark import read_sink_log

_PYTHONS: Final = ("3.11", "3.12", "3.13")
_STATE: Final = "spark.sql.streaming.stateStore"

_SPEC: Final = """\
name: chain
storage: file://{state}/storage
libraries:
  - glob:
      include: definitions/**
"""

_ORDERS: Final = """\
from pyspark import pipelines
from pyspark.sql import SparkSession

spark = SparkSession.active()


@pipelines.table
def orders():
    reader = spark.readStream.schema("id long, country string, amount double, ts timestamp")
    return reader.option("maxFilesPerTrigger", {files_per_batch}).parquet({input!r})
"""

_HOPS: Final = """\
CREATE STREAMING TABLE priced AS SELECT *, round(amount * 1.19D, 2) AS price FROM STREAM(orders) WHERE id % 10 <> 9;
CREATE STREAMING TABLE banded AS
  SELECT *, CASE WHEN price > 500 THEN 'high' ELSE 'low' END AS band FROM STREAM(priced);
CREATE STREAMING TABLE paid AS SELECT id, country, ts, price, band FROM STREAM(banded);
CREATE STREAMING TABLE totals AS
  SELECT country, band, sum(price) AS revenue, count(*) AS orders
  FROM STREAM(banded) WATERMARK ts DELAY OF INTERVAL {delay} SECONDS
  GROUP BY window(ts, '{window} seconds'), country, band;
"""


class Declarative(Peer):
    name: ClassVar = "declarative"
    _python: Path

    def install(self) -> None:
        need_java()
        self._python = python_of("declarative", ["pyspark[pipelines]==4.3.*", "pandas<3"], _PYTHONS)

    def version(self) -> str:
        return f"Spark Declarative Pipelines of PySpark {version_in(self._python, 'pyspark')}"

    def settings(self) -> str:
        return (
            "spark-pipelines run, in a loop: a run takes what is there, commits and ends, so each starts a JVM anew, "
            "which is counted, and none is warm. A metastore in Derby keeps its tables between runs. As many shuffle "
            "partitions as cores, RocksDB with change logs. Five streaming tables in Parquet, one per query. "
            "Checkpoint: it tells no times."
        )

    def refuses(self, work: str) -> str | None:
        if work != COUNTS:
            return None
        return (
            "a streaming table only appends, so counts without windows must be a materialized view, which every run "
            "computes anew from all input"
        )

    def prepare(self, job: Job) -> None:
        state = Path(job.state)
        definitions = state / "definitions"
        definitions.mkdir(parents=True)
        (state / "spark-pipeline.yml").write_text(_SPEC.format(state=state), "utf-8")
        orders = _ORDERS.format(files_per_batch=job.files_per_batch, input=job.input)
        (definitions / "orders.py").write_text(orders, "utf-8")
        (definitions / "hops.sql").write_text(_HOPS.format(delay=DELAY_S, window=WINDOW_S), "utf-8")

    def commands(self, job: Job) -> list[list[str]]:
        settings = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.catalogImplementation": "hive",
            "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={job.state}/meta;create=true",
            "spark.sql.warehouse.dir": job.output,
            "spark.sql.shuffle.partitions": str(job.cores),
            f"{_STATE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
            f"{_STATE}.rocksdb.changelogCheckpointing.enabled": "true",
        }
        run = [str(self._python.with_name("spark-pipelines")), "run"]
        for key, value in settings.items():
            run += ["--conf", f"{key}={value}"]
        run += ["--spec", f"{job.state}/spark-pipeline.yml"]
        # Derby's own log and Spark's folders go where the shell is.
        return [["bash", "-c", f"cd {shlex.quote(job.state)} && while {shlex.join(run)}; do :; done; exit 1"]]

    def environment(self, job: Job) -> dict[str, str]:
        # Its commands look for the interpreter, and by that for Spark, on the path.
        folder = str(self._python.parent)
        temporary = Path(job.state) / "temporary"
        temporary.mkdir(parents=True, exist_ok=True)
        return {
            **job.environment(),
            "PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin",
            "PYSPARK_PYTHON": str(self._python),
            "PYSPARK_DRIVER_PYTHON": str(self._python),
            "TMPDIR": str(temporary),
        }

    def visible(self, job: Job, table: str) -> list[Path]:
        return read_sink_log(Path(job.table(table)) / "_spark_metadata")

    def checkpoints(self, job: Job) -> None:
        del job
