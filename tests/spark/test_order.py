"""Rows of one key come in order to a table with a key, however far a reader lags behind. Real Spark, real tables."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.postgres_server import PostgresServer
from tests.spark.harness import Crash, as_rows, at_most, oracle, run_to_end, stream, table_rows, write_rows
from tidegate.engine.order import in_order
from tidegate.engine.status import RunStatus
from tidegate.errors import ConflictingRows
from tidegate.spark.gate import Gate
from tidegate.spark.queries import _aggregates
from tidegate.storage.inspection import InspectedRoot

KEYS = 20
FILES = 4


def write_files(folder: Path, first: int) -> None:
    """Each file has every key once."""
    for number in range(first, first + FILES):
        write_rows(folder, number, range(number * KEYS, (number + 1) * KEYS), key_count=KEYS)


def counting(folder: Path, dsn: str) -> tg.Pipeline:
    pipeline = tg.Pipeline("counting")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in", 1)

    @pipeline.stage(output_mode="update")
    def counts(rows: DataFrame) -> DataFrame:
        totals = rows.groupBy("key").agg(F.count("*").alias("n"), F.sum("value").alias("value"))
        # Spark packs files into tasks by their size: older segments are larger.
        bulk = F.expr("repeat(sha2(key, 256), greatest(1, 400 - 60 * cast(n as int)))")
        return totals.withColumn("bulk", bulk)

    @pipeline.stage
    def relay(counts: DataFrame) -> DataFrame:
        # And here newer ones are.
        return counts.withColumn("bulk", F.expr("repeat(sha2(key, 256), 60 * cast(n as int))"))

    @pipeline.sink(tg.PostgresTable("direct", dsn, key="key"))
    def direct(counts: DataFrame) -> DataFrame:
        return counts

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "chained", key="key"))
    def chained(relay: DataFrame) -> DataFrame:
        return relay

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "newest", key="key", newest_by="n"))
    def newest(relay: DataFrame) -> DataFrame:  # it may read all that waits in one batch
        return relay

    return pipeline


def input_of(gate: Gate) -> str:
    return gate.files.location().rpartition("/")[2]


class Slow:
    """Readers that come late: a gate shows nothing before this segment waits too. The source's come one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.until: dict[str, int] = {}
        """By the gate's input, or by its reader."""
        flush = Gate.flush

        def late(gate: Gate, most: int | None = None) -> None:
            waiting = list(gate._waiting)
            if input_of(gate) == "rows":
                if not gate._unconsumed:
                    gate._waiting = deque(waiting[:1])
                    flush(gate, most)
                    gate._waiting = deque(waiting[1:])
                return
            reader = gate.files.location().split("/")[-3]
            if waiting and waiting[-1].sequence >= self.until.get(reader, self.until.get(input_of(gate), 0)):
                flush(gate, most)

        monkeypatch.setattr(Gate, "flush", late)


class CrashBehindABacklog:
    """Ends a run when a checkpoint is complete that was begun after the last segment of the counts."""

    def __init__(self) -> None:
        self._before: str | None = None

    def __call__(self, status: RunStatus) -> None:
        if status.stages["counts"].batch != FILES - 1 or not status.checkpoints:
            return
        last = status.checkpoints[-1]
        self._before = self._before or max(each.checkpoint for each in (*status.checkpoints, *status.in_progress))
        if last.checkpoint > self._before and last.state == "complete":
            assert not last.aligned
            raise Crash


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.soak  # the simulator's RowsInOrder sees it in each of its runs
def test_a_table_with_a_key_never_ends_with_an_older_row(
    tmp_path: Path, spark: SparkSession, postgres_server: PostgresServer, slow: Slow
) -> None:
    pipeline = counting(tmp_path, postgres_server.dsn)
    write_files(tmp_path / "in", 0)
    slow.until = {"relay": 10**9}

    crash = CrashBehindABacklog()
    with pytest.raises(Crash):
        run_to_end(pipeline, tmp_path / "root", spark, view=crash, unaligned_after="0s", available_now=False)
    write_files(tmp_path / "in", FILES)
    slow.until = {"counts": 2 * FILES, "relay": 2 * FILES}
    run_to_end(pipeline, tmp_path / "root", spark, checkpoint_interval="1h", view=at_most(300))
    expected = as_rows(row[:3] for row in oracle(pipeline, spark)["chained"])
    for name in ("chained", "newest"):
        assert table_rows(tmp_path / "lake" / name, ["key", "n", "value"]) == expected, name
    with psycopg.connect(postgres_server.dsn) as connection:
        assert as_rows(connection.execute("SELECT key, n, value FROM direct").fetchall()) == expected
    assert batches(tmp_path / "root", "chained") == 2 * FILES
    assert batches(tmp_path / "root", "newest") == 1


def batches(root: Path, stage: str) -> int:
    """How many a stage has run since the restore."""
    return len(list((root / "generations" / "000002" / "stages" / stage / "spark" / "commits").glob("[0-9]*")))


# -- rows of changes -----------------------------------------------------------------------------------


def changing(folder: Path, dsn: str) -> tg.Pipeline:
    """Rows that take the place of earlier ones, though no stage is in update mode."""
    pipeline = tg.Pipeline("changing")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in", 1)

    @pipeline.stage
    def cleaned(rows: DataFrame) -> DataFrame:
        return rows.where("value >= 0").select("key", "value")

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "last", key="key"))
    def last(cleaned: DataFrame) -> DataFrame:
        return cleaned

    @pipeline.sink(tg.PostgresTable("last_there", dsn, key="key"))
    def last_there(cleaned: DataFrame) -> DataFrame:
        return cleaned

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "all"))
    def everything(rows: DataFrame) -> DataFrame:
        return rows.select("id")

    return pipeline


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.slow
def test_changes_come_in_order_and_two_of_one_key_at_once_end_the_run_before_anything_is_shown(
    tmp_path: Path, spark: SparkSession, postgres_server: PostgresServer, slow: Slow
) -> None:
    def shown() -> dict[str, Counter[Any]]:
        with psycopg.connect(postgres_server.dsn) as connection:
            there = as_rows(connection.execute("SELECT key, value FROM last_there").fetchall())
        here = table_rows(tmp_path / "lake" / "last", ["key", "value"])
        return {"here": here, "there": there, "all": table_rows(tmp_path / "lake" / "all", ["id"])}

    pipeline = changing(tmp_path, postgres_server.dsn)
    write_files(tmp_path / "in", 0)
    slow.until = {"cleaned": FILES}
    run_to_end(pipeline, tmp_path / "root", spark, checkpoint_interval="1h", view=at_most(300))
    before = shown()
    expected = Counter((f"k{each % KEYS}", each) for each in range((FILES - 1) * KEYS, FILES * KEYS))
    assert before["here"] == before["there"] == expected
    assert before["all"] == Counter((each,) for each in range(FILES * KEYS))
    slow.until = {}
    write_rows(tmp_path / "in", FILES, [*range(1000, 1003), 1001 + KEYS], key_count=KEYS)
    with pytest.raises(ConflictingRows, match=r"changing/last.* rows of the key key = 'k1' in one batch.*newest_by"):
        # It would fail again and again: it is not tried again.
        run_to_end(pipeline, tmp_path / "root", spark, restarts=3, view=at_most(300))
    assert shown() == before
    assert InspectedRoot(tmp_path / "root").log().generation == 2


# -- who must keep order -------------------------------------------------------------------------------


def test_where_no_stage_aggregates_all_of_them_keep_the_order_of_the_source(tmp_path: Path) -> None:
    definitions = changing(tmp_path, "").validated()
    assert in_order(definitions, ()) == {"cleaned", "last", "last_there"}


@pytest.mark.spark
def test_a_stage_aggregates_if_all_that_it_reads_goes_into_groups(spark: SparkSession) -> None:
    def aggregates(frame: DataFrame) -> bool:
        return _aggregates(frame._jdf.queryExecution().analyzed())

    rows = spark.readStream.format("rate").load()
    totals = rows.withWatermark("timestamp", "1 minute").groupBy("value").count()
    assert aggregates(totals)
    assert aggregates(totals.where("count > 1").select("value"))
    assert aggregates(totals.join(spark.range(3).groupBy("id").count(), F.col("id") == F.col("value")))
    assert not aggregates(rows.select("value"))
    assert not aggregates(rows.dropDuplicates(["value"]))
    assert not aggregates(totals.select("value").union(rows.select("value")))
