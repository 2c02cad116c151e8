"""Three hops and two sinks: throughput, latency and restart of the same queries under Tidegate and without."""

from __future__ import annotations

import importlib
import random
import statistics
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql import functions as F

import tidegate as tg
from benchmarks.measure import WrongWork
from benchmarks.spark_runs import Input, Run, TidegateRun, Variant, cpu_s, open_run, temporary_folder, workspace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HOPS: Final = 3
_ROW_SINK: Final = "paid"
_SCHEMA: Final = "id long, country string, amount double, ts timestamp"
_COUNTRIES: Final = 20
_WARM_UP_FILES: Final = 20
_BEFORE_IDLE_FILES: Final = 3
_SETTLES_S: Final = 2.0
_ROWS_PER_EVENT_SECOND: Final = 5_000
_START_US: Final = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000


class Feed(msgspec.Struct, frozen=True):
    """Input of some size: files, their rows, and how many of them a batch of the source takes."""

    files: int
    rows_per_file: int
    files_per_batch: int

    @property
    def rows(self) -> int:
        return self.files * self.rows_per_file

    def part(self, share: float) -> Feed:
        return Feed(max(1, round(self.files * share)), self.rows_per_file, self.files_per_batch)


_WARM_UP_FEED: Final = Feed(4, 100_000, 4)


def chain(source: Path, tables: Path, files_per_batch: int, delay: str = "10 seconds") -> tg.Pipeline:
    """source → stage → stage → two sinks, one of rows and one of totals in windows. `delay` is the watermark's."""
    pipeline = tg.Pipeline("chain")

    @pipeline.source
    def orders(spark: SparkSession) -> DataFrame:
        reader = spark.readStream.schema(_SCHEMA).option("maxFilesPerTrigger", files_per_batch)
        return reader.parquet(str(source))

    @pipeline.stage
    def priced(orders: DataFrame) -> DataFrame:
        return orders.where("id % 10 != 9").withColumn("price", F.round(F.col("amount") * 1.19, 2))

    @pipeline.stage
    def banded(priced: DataFrame) -> DataFrame:
        return priced.withColumn("band", F.when(F.col("price") > 500, "high").otherwise("low"))

    @pipeline.sink(tg.DeltaTable(tables / "paid"))
    def paid(banded: DataFrame) -> DataFrame:
        return banded.drop("amount")

    @pipeline.sink(tg.DeltaTable(tables / "totals"))
    def totals(banded: DataFrame) -> DataFrame:
        windows = banded.withWatermark("ts", delay).groupBy(F.window("ts", "10 seconds"), "country", "band")
        return windows.agg(F.sum("price").alias("revenue"), F.count("*").alias("orders")).drop("window")

    return pipeline


def paid_of(first: int, rows: int) -> int:
    return sum(1 for number in range(first, first + rows) if number % 10 != 9)


@cache
def input_files(files: int, rows_per_file: int) -> tuple[Path, ...]:
    numpy, pyarrow, parquet = (importlib.import_module(name) for name in ("numpy", "pyarrow", "pyarrow.parquet"))
    folder = workspace() / f"rows-{files}x{rows_per_file}"
    folder.mkdir()
    chance = numpy.random.default_rng(0)
    paths = []
    for number in range(files):
        ids: Any = numpy.arange(number * rows_per_file, (number + 1) * rows_per_file, dtype="int64")
        moments = _START_US + ids * (1_000_000 // _ROWS_PER_EVENT_SECOND)
        table = pyarrow.table(
            {
                "id": ids,
                "country": pyarrow.array([f"country-{each}" for each in range(_COUNTRIES)]).take(ids % _COUNTRIES),
                "amount": numpy.round(chance.random(rows_per_file) * 1_000, 2),
                "ts": pyarrow.array(moments).cast(pyarrow.timestamp("us", tz="UTC")),
            }
        )
        path = folder / f"{number:06d}.parquet"
        parquet.write_table(table, path)
        paths.append(path)
    return tuple(paths)


@cache
def warm_up() -> None:
    """The JVM runs a query's code several times faster once it has run it for a while: not to be measured."""
    for variant in (Variant.TUNED, Variant.TIDEGATE, Variant.CHAINED):
        _drop_files(variant, _WARM_UP_FILES)
        _run_through(variant, _WARM_UP_FEED)


class Throughput(msgspec.Struct, frozen=True):
    rows_per_s: float
    control_share: float
    """Of a core: how long Tidegate's control thread was busy."""


def measure_throughput(variant: Variant, feed: Feed) -> Throughput:
    """From the moment that all input is there until every query has committed all of it."""
    warm_up()
    return _run_through(variant, feed)


def _run_through(variant: Variant, feed: Feed) -> Throughput:
    files = input_files(feed.files, feed.rows_per_file)
    (first,) = input_files(1, 100)
    with temporary_folder() as folder:
        source = Input(folder / "input")
        with open_run(variant, chain(source.folder, folder / "tables", feed.files_per_batch), folder) as run:
            source.offer(first)
            run.await_consumed(100, paid_of(0, 100))
            busy_before = run.poll_s if isinstance(run, TidegateRun) else 0.0
            started = time.perf_counter()
            for file in files:
                source.offer(file)
            run.await_consumed(100 + feed.rows, paid_of(0, 100) + paid_of(0, feed.rows))
            elapsed_s = time.perf_counter() - started
            busy_s = (run.poll_s if isinstance(run, TidegateRun) else 0.0) - busy_before
            _check_rows(run, paid_of(0, 100) + paid_of(0, feed.rows))
    return Throughput(feed.rows / elapsed_s, busy_s / elapsed_s)


def _check_rows(run: Run, expected: int) -> None:
    found = run.rows_at(_ROW_SINK)
    if found != expected:
        raise WrongWork(f"{found} rows came to {_ROW_SINK}, not {expected}")


def measure_latency(variant: Variant, files: int) -> float:
    """Milliseconds per hop, p50: from a file's appearance to the commit of its row by the last hop's batch."""
    warm_up()
    return statistics.median(_drop_files(variant, files)) * 1_000 / HOPS


def _drop_files(variant: Variant, files: int) -> list[float]:
    """Seconds that each of some files of one row takes through the chain, one after the other."""
    (file,) = input_files(1, 1)
    chance = random.Random(0)
    took: list[float] = []
    with temporary_folder() as folder:
        source = Input(folder / "input")
        with open_run(variant, chain(source.folder, folder / "tables", 1), folder) as run:
            source.offer(file)
            run.await_consumed(1)
            for number in range(files):
                # So that files meet checkpoints and pauses of the queries at all their phases.
                time.sleep(0.1 + 0.1 * chance.random())
                awaited = run.last_batch(_ROW_SINK) + 1
                started = time.perf_counter()
                source.offer(file)
                run.await_batch(_ROW_SINK, awaited)
                took.append(time.perf_counter() - started)
                run.await_consumed(number + 2)
    return took


def measure_restart(variant: Variant, restarts: int) -> float:
    """Seconds from a start in a warm JVM to the first batch that every query has committed; a file waits for them."""
    warm_up()
    (file,) = input_files(1, 100)
    took: list[float] = []
    with temporary_folder() as folder:
        source = Input(folder / "input")

        def prepared() -> Run:
            return open_run(variant, chain(source.folder, folder / "tables", 1), folder, checkpoint_interval="1s")

        source.offer(file)
        with prepared() as run:
            run.await_consumed(100, paid_of(0, 100))
            if isinstance(run, TidegateRun):
                run.await_checkpoint_of_all()
            last = {name: run.last_batch(name) for name in run.query_names}
        for _ in range(restarts):
            source.offer(file)
            run = prepared()
            started = time.perf_counter()
            with run:
                for name in run.query_names:
                    before = run.restored_batch(name) if isinstance(run, TidegateRun) else last[name]
                    run.await_batch(name, before + 1)
                took.append(time.perf_counter() - started)
                run.await_consumed(100, paid_of(0, 100))
                if isinstance(run, TidegateRun):
                    run.await_checkpoint_of_all()
                last = {name: run.last_batch(name) for name in run.query_names}
    return statistics.median(took)


def measure_idle(variant: Variant, counted_s: float) -> float:
    """Cores that all queries take while nothing comes, with all that drives them."""
    warm_up()
    (file,) = input_files(1, 100)
    with temporary_folder() as folder:
        source = Input(folder / "input")
        with open_run(variant, chain(source.folder, folder / "tables", 1), folder) as run:
            for number in range(_BEFORE_IDLE_FILES):
                source.offer(file)
                run.await_consumed(100 * (number + 1))
            time.sleep(_SETTLES_S)
            before_s, started = cpu_s(), time.perf_counter()
            time.sleep(counted_s)
            return (cpu_s() - before_s) / (time.perf_counter() - started)
