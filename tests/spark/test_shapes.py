"""Every shape of DAG, end to end on real Spark: what the tables show is what one batch job would have made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import tidegate as tg
from tests.spark.harness import oracle, run_to_end, stream, table_rows, write_input

pytestmark = [pytest.mark.matrix, pytest.mark.spark, pytest.mark.slow]


def check(pipeline: tg.Pipeline, spark: SparkSession, lake: Path, columns: dict[str, list[str]]) -> None:
    expected = oracle(pipeline, spark)
    for sink, names in columns.items():
        found = table_rows(lake / sink, names)
        assert found == expected[sink], f"{sink}: lost {expected[sink] - found}, doubled {found - expected[sink]}"


def test_a_chain(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "in", 8, 50)
    pipeline = tg.Pipeline("chain")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.stage
    def doubled(rows: DataFrame) -> DataFrame:
        return rows.withColumn("value", F.col("value") * 2)

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "kept"))
    def kept(doubled: DataFrame) -> DataFrame:
        return doubled.where("value % 3 = 0").select("id", "value")

    run_to_end(pipeline, tmp_path / "root", spark)
    check(pipeline, spark, tmp_path / "lake", {"kept": ["id", "value"]})
    # Started again with more input, it goes on where it was.
    write_input(tmp_path / "in", 4, 50, first_file=8)
    run_to_end(pipeline, tmp_path / "root", spark)
    check(pipeline, spark, tmp_path / "lake", {"kept": ["id", "value"]})


@pytest.mark.soak  # it takes long; other shapes are in CI
def test_a_chain_of_many_batches_is_restored_again_and_again(tmp_path: Path, spark: SparkSession) -> None:
    """More batches than Spark's logs keep: a restored stage must not ask for what was trimmed."""
    pipeline = tg.Pipeline("many_batches")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in", files_per_batch=1)

    @pipeline.stage
    def counted(rows: DataFrame) -> DataFrame:
        return rows.withWatermark("ts", "1 day").dropDuplicates(["id", "ts"])

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "table"))
    def table(counted: DataFrame) -> DataFrame:
        return counted.select("id", "value")

    # The first run ends after one batch: its stages are restored at batch 0, which has none before it.
    for first_file, files in ((0, 1), (1, 29), (30, 5), (35, 5)):
        write_input(tmp_path / "in", files, 5, first_file=first_file)
        run_to_end(pipeline, tmp_path / "root", spark)
        check(pipeline, spark, tmp_path / "lake", {"table": ["id", "value"]})
    stages = next(iter(sorted((tmp_path / "root" / "generations").iterdir(), reverse=True))) / "stages"
    assert len(list((stages / "counted" / "spark" / "sources" / "0").glob("[0-9]*"))) < 30


@pytest.mark.soak
def test_one_channel_with_three_readers_of_different_speed(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "in", 10, 40)
    pipeline = tg.Pipeline("fan_out")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in", files_per_batch=1)

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "fast"))
    def fast(rows: DataFrame) -> DataFrame:
        return rows.select("id", "value")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "grouped", partition_by=["key"]))
    def grouped(rows: DataFrame) -> DataFrame:
        return rows.select("id", "key")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "slow"))
    def slow(rows: DataFrame) -> DataFrame:
        # Keeps a task busy for a few milliseconds a row.
        return rows.select("id", F.length(F.sha2(F.repeat(F.col("key"), 2_000_000), 512)).alias("digits"))

    run_to_end(pipeline, tmp_path / "root", spark)
    check(
        pipeline,
        spark,
        tmp_path / "lake",
        {"fast": ["id", "value"], "grouped": ["id", "key"], "slow": ["id", "digits"]},
    )


def test_streams_meet_in_a_union_and_in_a_join(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "left", 6, 50)
    write_input(tmp_path / "right", 6, 50)
    pipeline = tg.Pipeline("fan_in")

    @pipeline.source
    def left(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "left")

    @pipeline.source
    def right(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "right", files_per_batch=1)

    @pipeline.stage
    def both(left: DataFrame, right: DataFrame) -> DataFrame:
        return left.unionByName(right)

    @pipeline.stage
    def joined(left: DataFrame, right: DataFrame) -> DataFrame:
        # Longer than the input: a stream that is late by more than its watermark loses rows in plain Spark too.
        ours = left.withWatermark("ts", "1 hour").alias("l")
        theirs = right.withWatermark("ts", "1 hour").alias("r")
        near = F.expr("l.id = r.id AND r.ts BETWEEN l.ts - INTERVAL 30 SECONDS AND l.ts + INTERVAL 30 SECONDS")
        return ours.join(theirs, near).select("l.id", (F.col("l.value") + F.col("r.value")).alias("total"))

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "union_table"))
    def union_table(both: DataFrame) -> DataFrame:
        return both.select("id", "value")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "join_table"))
    def join_table(joined: DataFrame) -> DataFrame:
        return joined

    run_to_end(pipeline, tmp_path / "root", spark)
    check(pipeline, spark, tmp_path / "lake", {"union_table": ["id", "value"], "join_table": ["id", "total"]})


def test_a_diamond_of_seven_stages(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "in", 8, 50)
    pipeline = tg.Pipeline("diamond")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.stage
    def even(rows: DataFrame) -> DataFrame:
        return rows.where("id % 2 = 0")

    @pipeline.stage
    def odd(rows: DataFrame) -> DataFrame:
        return rows.where("id % 2 = 1")

    @pipeline.stage
    def unique(odd: DataFrame) -> DataFrame:
        return odd.withWatermark("ts", "1 hour").dropDuplicates(["id", "ts"])

    @pipeline.stage(inputs=["even", "unique"])
    def again(one: DataFrame, other: DataFrame) -> DataFrame:
        return one.unionByName(other)

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "all_rows"))
    def all_rows(again: DataFrame) -> DataFrame:
        return again.select("id", "key", "value")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "even_rows"))
    def even_rows(even: DataFrame) -> DataFrame:
        return even.select("id")

    run_to_end(pipeline, tmp_path / "root", spark)
    check(pipeline, spark, tmp_path / "lake", {"all_rows": ["id", "key", "value"], "even_rows": ["id"]})


@pytest.mark.only_matrix
def test_an_input_that_is_read_twice(tmp_path: Path, spark: SparkSession) -> None:
    """A union with itself is one source to Spark, a join with itself two."""
    pipeline = tg.Pipeline("twice")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in", files_per_batch=1)

    @pipeline.source
    def others(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "others", files_per_batch=1)

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "united"))
    def united(rows: DataFrame, others: DataFrame) -> DataFrame:
        return rows.union(rows.where("id % 2 = 0")).union(others).select("id", "value")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "joined"))
    def joined(rows: DataFrame, others: DataFrame) -> DataFrame:
        left = rows.withWatermark("ts", "1 day").alias("left")
        right = rows.withWatermark("ts", "1 day").alias("right")
        pairs = left.join(right, F.expr("left.id = right.id + 1 AND left.ts <= right.ts + INTERVAL 1 HOUR"))
        return pairs.select("left.id", "right.value").union(others.select("id", "value"))

    for first_file in (0, 6):
        write_input(tmp_path / "in", 6, 20, first_file=first_file)
        write_input(tmp_path / "others", 3, 5, first_file=first_file)
        run_to_end(pipeline, tmp_path / "root", spark)
        check(pipeline, spark, tmp_path / "lake", {"united": ["id", "value"], "joined": ["id", "value"]})


def test_an_idle_source_does_not_hold_the_others_back(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "busy", 6, 50)
    (tmp_path / "idle").mkdir()
    pipeline = tg.Pipeline("idle")

    @pipeline.source
    def busy(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "busy")

    @pipeline.source
    def idle(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "idle")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "both"))
    def both(busy: DataFrame, idle: DataFrame) -> DataFrame:
        return busy.unionByName(idle).select("id", "value")

    run_to_end(pipeline, tmp_path / "root", spark)
    check(pipeline, spark, tmp_path / "lake", {"both": ["id", "value"]})
    # The idle one wakes up after a restart, the busy one has ended.
    write_input(tmp_path / "idle", 3, 50, first_file=100)
    run_to_end(pipeline, tmp_path / "root", spark)
    check(pipeline, spark, tmp_path / "lake", {"both": ["id", "value"]})


def test_an_aggregation_in_update_mode_in_the_middle(tmp_path: Path, spark: SparkSession) -> None:
    """Each batch emits the keys that changed; the largest total of a key is its final one."""
    write_input(tmp_path / "in", 6, 50)
    pipeline = tg.Pipeline("update_mode")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.stage(output_mode="update")
    def totals(rows: DataFrame) -> DataFrame:
        return rows.groupBy("key").agg(F.sum("value").alias("total"), F.count("*").alias("n"))

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "changes"))
    def changes(totals: DataFrame) -> DataFrame:
        return totals

    run_to_end(pipeline, tmp_path / "root", spark)
    write_input(tmp_path / "in", 2, 50, first_file=6)
    run_to_end(pipeline, tmp_path / "root", spark)
    final = oracle(pipeline, spark)["changes"]
    shown = table_rows(tmp_path / "lake" / "changes", ["key", "total", "n"])
    newest: dict[str, tuple[int, int]] = {}
    for key, total, count in shown:
        newest[key] = max(newest.get(key, (0, 0)), (count, total))
    assert {(key, total, count): 1 for key, (count, total) in newest.items()} == dict(final)


@pytest.mark.only_matrix
def test_custom_state_is_taken_up_in_a_new_folder(tmp_path: Path, spark: SparkSession) -> None:
    """transformWithState keeps absolute paths in its metadata; they must follow it into the new generation."""
    write_input(tmp_path / "in", 4, 30)
    pipeline = tg.Pipeline("custom_state")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in", files_per_batch=1)

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "running"))
    def running(rows: DataFrame) -> DataFrame:
        return rows.groupBy("key").transformWithStateInPandas(
            statefulProcessor=RunningCount(),
            outputStructType="key string, seen long",
            outputMode="Append",
            timeMode="None",
        )

    run_to_end(pipeline, tmp_path / "root", spark)
    write_input(tmp_path / "in", 4, 30, first_file=4)
    run_to_end(pipeline, tmp_path / "root", spark)
    shown = table_rows(tmp_path / "lake" / "running", ["key", "seen"])
    # Rows per key are counted through: state that was lost at the restart would count from the start again.
    largest = {key: max(seen for each, seen in shown if each == key) for key, _ in shown}
    assert largest == {f"k{number}": 8 * 30 // 5 for number in range(5)}
    assert sum(shown.values()) == len(shown)


class RunningCount(StatefulProcessor):
    """Emits, for each batch of a key, how many of its rows were seen so far."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getValueState("seen", "n long")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame] | Iterator[Row], timerValues: object
    ) -> Iterator[pd.DataFrame]:
        del timerValues
        stored = self._seen.get()
        seen: int = 0 if stored is None else stored[0]
        seen += sum(len(frame) for frame in rows)
        self._seen.update((seen,))
        yield pd.DataFrame({"key": [key[0]], "seen": [seen]})

    def close(self) -> None:
        pass
