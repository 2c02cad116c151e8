"""A pipeline with a backlog before one of its stages, and a checkpoint that is triggered behind it."""

from __future__ import annotations

import importlib
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import functions as F

import tidegate as tg
from benchmarks.measure import WrongWork
from benchmarks.spark_runs import Input, TidegateRun, base_session, temporary_folder
from tidegate.engine.generation import Generation
from tidegate.protocol.names import checkpoint_name
from tidegate.spark.session import forget_yarn
from tidegate.storage.manifest import Manifest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROW_S: Final = 0.05
_SEGMENTS: Final = 20
_PAYLOAD: Final = 2_000
_WARM_UP_S: Final = 1


class Behind(msgspec.Struct, frozen=True):
    """What a checkpoint took that was triggered behind a backlog."""

    checkpoint_ms: float
    stages_ms: float
    rows_per_s: float
    in_flight_bytes: int

    @property
    def sinks_add_ms(self) -> float:
        return max(0.0, self.checkpoint_ms - self.stages_ms)


def backlogged(source: Path, tables: Path) -> tg.Pipeline:
    """A source that is much faster than the stage that reads it."""
    pipeline = tg.Pipeline("backlogged")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        reader = spark.readStream.schema("id long, payload binary").option("maxFilesPerTrigger", 1)
        return reader.parquet(str(source))

    @pipeline.stage
    def slow(rows: DataFrame) -> DataFrame:
        slept = F.udf(lambda value: __import__("time").sleep(_ROW_S) or value, "long")
        return rows.coalesce(1).select(slept("id").alias("id"), "payload")

    @pipeline.stage
    def digits(slow: DataFrame) -> DataFrame:
        return slow.select("id", F.sha2("payload", 256).alias("digits"))

    @pipeline.sink(tg.DeltaTable(tables / "table"))
    def table(digits: DataFrame) -> DataFrame:
        return digits

    return pipeline


class _OnDemand(TidegateRun):
    """Takes a checkpoint when it is told to, and no other."""

    def __init__(self, pipeline: tg.Pipeline, folder: Path, *, unaligned: bool) -> None:
        super().__init__(pipeline, folder, "1h")
        if unaligned:
            self._options["unaligned_after"] = "0s"
        self._is_wanted = False
        self.triggered: int | None = None
        self.reported_ms: dict[str, int] = {}
        """When each stage was seen to have reported, after the trigger."""
        self.read_rows = 0
        self.written_rows = 0

    def _look(self, generation: Generation) -> None:
        super()._look(generation)
        self.read_rows = generation.stages["rows"].progress.rows
        self.written_rows = generation.stages["table"].progress.rows
        coordinator = generation.coordinator
        for each in (*coordinator.active, *coordinator.history):
            if each.checkpoint_id == self.triggered:
                for stage in each.reports:
                    self.reported_ms.setdefault(stage, generation.now_ms - each.triggered_ms)
        if self._is_wanted and self.triggered is None:
            self.triggered = generation.trigger()

    def take_checkpoint(self) -> None:
        """On the control thread, in its next round."""
        self._is_wanted = True
        self.await_that(lambda: self.triggered is not None)

    def taken(self) -> Manifest:
        assert self.triggered is not None
        path = self.manifests() / f"{checkpoint_name(self.triggered)}.json"
        return msgspec.json.decode(path.read_bytes(), type=Manifest)


def measure_behind(backlog_s: int, *, unaligned: bool) -> Behind:
    _warm_up()
    return _measure(backlog_s, unaligned=unaligned)


@cache
def _warm_up() -> None:
    """The first run of a JVM takes seconds for each step."""
    forget_yarn(base_session())
    _measure(_WARM_UP_S, unaligned=False)


def _measure(backlog_s: int, *, unaligned: bool) -> Behind:
    rows_per_segment = max(1, round(backlog_s / _ROW_S / _SEGMENTS))
    rows = rows_per_segment * _SEGMENTS
    with temporary_folder() as folder:
        source = Input(folder / "input")
        with _OnDemand(backlogged(source.folder, folder / "tables"), folder, unaligned=unaligned) as run:
            _offer(source, folder, 0, 1)  # it passes through all queries, before anything is timed
            run.await_that(lambda: run.written_rows == 1)
            for number in range(_SEGMENTS):
                _offer(source, folder, 1 + number * rows_per_segment, rows_per_segment)
            run.await_that(lambda: run.read_rows == rows + 1)
            before, began = run.written_rows, time.perf_counter()
            run.take_checkpoint()
            run.await_that(lambda: run.triggered in run.durations_ms)
            manifest = run.taken()
            run.await_that(lambda: run.written_rows == rows + 1)
            took_s = time.perf_counter() - began
            checkpoint_ms = run.durations_ms[manifest.checkpoint_id]
    if manifest.aligned is unaligned:
        raise WrongWork(f"a checkpoint behind {backlog_s} s of work is {'' if manifest.aligned else 'un'}aligned")
    return Behind(
        checkpoint_ms=checkpoint_ms,
        stages_ms=max(run.reported_ms[name] for name in ("rows", "slow", "digits")),
        rows_per_s=(rows + 1 - before) / took_s,
        in_flight_bytes=manifest.in_flight_bytes,
    )


def _offer(source: Input, folder: Path, first: int, rows: int) -> None:
    numpy, pyarrow, parquet = (importlib.import_module(name) for name in ("numpy", "pyarrow", "pyarrow.parquet"))
    payloads = [numpy.random.default_rng(number).bytes(_PAYLOAD) for number in range(first, first + rows)]
    ids = pyarrow.array(range(first, first + rows), pyarrow.int64())
    path = folder / f"{first}.parquet"
    parquet.write_table(pyarrow.table({"id": ids, "payload": pyarrow.array(payloads, pyarrow.binary())}), path)
    source.offer(path)
    path.unlink()
