"""The sinks in pipelines on real Spark: what their tables show, and the tables as they were at a checkpoint."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import deltalake
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import as_rows, oracle, run_to_end, stream, table_rows, write_input
from tidegate.engine.upkeep import TableUpkeep
from tidegate.errors import CheckpointNotVisible, InvalidPipeline, NoRoot, StageFailed, TidegateError, UnknownCheckpoint
from tidegate.flows.requests import Patience
from tidegate.protocol.commit import CommitPermit
from tidegate.sinks.contract import CommitAnswer, Committable, Sink, SinkPlace
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.storage.inspection import InspectedRoot

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def one_sink(folder: Path, sink: Sink, files_per_batch: int = 2) -> tg.Pipeline:
    pipeline = tg.Pipeline("one")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in", files_per_batch)

    @pipeline.sink(sink)
    def table(rows: DataFrame) -> DataFrame:
        return rows.select("id", "key", "value")

    return pipeline


# -- upserts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "partition_by", [pytest.param([], marks=pytest.mark.soak, id="flat"), pytest.param(["key"], id="partitioned")]
)
def test_a_delta_table_with_a_key_shows_the_newest_row_of_each(
    partition_by: list[str], tmp_path: Path, spark: SparkSession
) -> None:
    pipeline = tg.Pipeline("upserts")
    table = tmp_path / "lake" / "totals of keys"

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in", 1)

    @pipeline.sink(tg.DeltaTable(table, partition_by, key=["key", "odd"]), output_mode="update")
    def totals(rows: DataFrame) -> DataFrame:
        odd = F.when(F.col("id") % 3 != 0, F.col("id") % 2 == 1)  # null is a key too
        return rows.groupBy("key", odd.alias("odd")).agg(F.count("*").alias("n"), F.sum("value").alias("value"))

    for first_file in (0, 8):
        write_input(tmp_path / "in", 8, 20, first_file=first_file)
        run_to_end(pipeline, tmp_path / "root", spark)
        assert table_rows(table, ["key", "odd", "n", "value"]) == oracle(pipeline, spark)["totals"]
    shown = {Path(uri).name for uri in deltalake.DeltaTable(table).file_uris()}
    history = deltalake.DeltaTable(table)
    ever: set[str] = set()
    for version in range(history.version() + 1):
        history.load_as_version(version)
        ever |= {Path(uri).name for uri in history.file_uris()}
    on_disk = {
        path.name
        for path in table.rglob("*.parquet")
        if "_tidegate" not in path.parts and "_delta_log" not in path.parts
    }
    assert shown <= on_disk <= ever, "no file lies there that no version of the table has"
    assert not list((table / "_tidegate").rglob("*.parquet"))


@pytest.mark.parametrize("key", [[], ["id", "key"]], ids=["appended", "merged"])
def test_a_text_that_is_the_name_of_null_in_folders_is_refused_before_a_checkpoint_has_it(
    key: list[str], tmp_path: Path, spark: SparkSession
) -> None:
    pipeline = tg.Pipeline("partitions")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in", 1)

    @pipeline.sink(tg.DeltaTable(tmp_path / "table", "key", key=key))
    def table(rows: DataFrame) -> DataFrame:
        named = F.when(F.col("id") == 12, "__HIVE_DEFAULT_PARTITION__").when(F.col("id") > 3, F.col("key"))
        return rows.select("id", named.alias("key"))

    write_input(tmp_path / "in", 1, 10)
    run_to_end(pipeline, tmp_path / "root", spark)
    before = table_rows(tmp_path / "table", ["id", "key"])
    assert before == Counter((n, f"k{n % 5}" if n > 3 else None) for n in range(10))
    write_input(tmp_path / "in", 1, 10, first_file=1)
    with pytest.raises(
        StageFailed, match=r"stage 'table' failed: .*'key' is '__HIVE_DEFAULT_PARTITION__', .* mean null"
    ):
        run_to_end(pipeline, tmp_path / "root", spark)
    assert table_rows(tmp_path / "table", ["id", "key"]) == before


def test_complete_mode_without_a_key_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    pipeline = tg.Pipeline("complete")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake"), output_mode="complete")
    def totals(rows: DataFrame) -> DataFrame:
        return rows.groupBy("key").count()

    (tmp_path / "in").mkdir()
    with pytest.raises(InvalidPipeline, match="give the table a key"):
        run_to_end(pipeline, tmp_path / "root", spark)
    assert not (tmp_path / "lake").exists()


# -- functions ----------------------------------------------------------------------------------------


def test_a_function_gets_every_row_with_its_epoch(tmp_path: Path, spark: SparkSession) -> None:
    calls: list[tuple[int, Counter[Any]]] = []

    def remember(rows: DataFrame, epoch: int) -> None:
        calls.append((epoch, as_rows(rows.collect())))

    pipeline = one_sink(tmp_path, tg.ForeachBatch(remember), 1)
    for first_file in (0, 4):
        write_input(tmp_path / "in", 4, 10, first_file=first_file)
        run_to_end(pipeline, tmp_path / "root", spark)
    epochs = [epoch for epoch, _ in calls]
    assert epochs == sorted(set(epochs))
    assert sum((rows for _, rows in calls), Counter()) == oracle(pipeline, spark)["table"]


def test_a_function_that_fails_is_called_again_with_the_same_epoch_and_rows(
    tmp_path: Path, spark: SparkSession
) -> None:
    calls: list[tuple[int, Counter[Any]]] = []

    def fail_at_first(rows: DataFrame, epoch: int) -> None:
        calls.append((epoch, as_rows(rows.collect())))
        if len(calls) <= 2:
            raise ConnectionError("the other side is not there")

    write_input(tmp_path / "in", 3, 10)
    pipeline = one_sink(tmp_path, tg.ForeachBatch(fail_at_first))
    run_to_end(pipeline, tmp_path / "root", spark)
    assert calls[0] == calls[1] == calls[2]
    assert sum((rows for _, rows in calls[2:]), Counter()) == oracle(pipeline, spark)["table"]


def test_a_function_that_always_fails_ends_the_run_with_the_sinks_name_and_the_cause(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.engine.generation.Patience", lambda: Patience(sink_tries=3))

    def fail(rows: DataFrame, epoch: int) -> None:  # noqa: ARG001
        raise ConnectionError("the other side is not there")

    write_input(tmp_path / "in", 3, 10)
    with pytest.raises(TidegateError, match=r"sink 'table' .*the other side is not there"):
        run_to_end(one_sink(tmp_path, tg.ForeachBatch(fail)), tmp_path / "root", spark)


def test_memory_and_the_console_show_what_was_committed(
    tmp_path: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(tmp_path / "in", 3, 10)
    memory = tg.Memory()
    run_to_end(one_sink(tmp_path, memory), tmp_path / "memory", spark)
    assert Counter(row["id"] for row in memory.rows) == Counter(range(30))
    assert sum(len(rows) for rows in memory.epochs.values()) == 30
    run_to_end(one_sink(tmp_path, tg.Console(rows=3)), tmp_path / "console", spark)
    printed = capsys.readouterr().out
    assert "epoch " in printed
    assert "only showing top 3 rows" in printed


# -- tables at a checkpoint ---------------------------------------------------------------------------


def two_tables(folder: Path, sink: Callable[[Path], tg.DeltaTable] = tg.DeltaTable) -> tg.Pipeline:
    pipeline = tg.Pipeline("two")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in", 1)

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "all", partition_by="key", optimize="1s", vacuum="0s"))
    def everything(rows: DataFrame) -> DataFrame:
        return rows.select("id", "key")

    @pipeline.sink(sink(folder / "lake" / "even"))
    def even(rows: DataFrame) -> DataFrame:
        return rows.where("id % 2 = 0").select("id")

    return pipeline


def test_at_every_checkpoint_all_tables_show_the_same_prefix_though_one_is_compacted_and_vacuumed(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tidegate")
    stop = TableUpkeep.stop

    def stop_later(self: TableUpkeep) -> None:
        """The runs are short: they end no pass before it has come to its end."""
        wait(self._under_way.values())
        stop(self)

    monkeypatch.setattr(TableUpkeep, "stop", stop_later)
    pipeline = two_tables(tmp_path)
    found = {}
    for first_file in range(0, 12, 4):
        write_input(tmp_path / "in", 4, 10, first_file=first_file)
        run_to_end(pipeline, tmp_path / "root", spark, checkpoint_interval="1h")  # one at the end of each run
        tables = tg.read(tmp_path / "root")
        assert set(tables) == {"everything", "even"}
        assert tables.is_consistent
        found[tables.checkpoint] = (first_file + 4) * 10
        assert set(tables["everything"].to_arrow()["id"].to_pylist()) == set(range((first_file + 4) * 10))
    assert len(found) == 3
    for checkpoint, count in found.items():
        tables = tg.read(tmp_path / "root", checkpoint=checkpoint)
        assert sorted(row["id"] for row in tables["even"].to_spark(spark).collect()) == list(range(0, count, 2))
        shown = tables["everything"].to_spark(spark).select("id", "key").collect()
        assert as_rows(shown) == Counter((each, f"k{each % 5}") for each in range(count))
        assert sorted(tables["everything"].to_pandas()["id"]) == list(range(count))
    assert re.search(r"sink everything: upkeep of Delta table .*all: before: \d+ files, after: 5; ", caplog.text)
    assert "failed" not in caplog.text


class Late(tg.DeltaTable):
    """A table whose commits fail after an epoch."""

    last_epoch = 10**9

    def bind(self, place: SinkPlace) -> BoundDeltaTable:
        return BoundLate(self, place)


class BoundLate(BoundDeltaTable):
    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        if permit.epoch > Late.last_epoch:
            raise ConnectionError("no route")
        return super().commit(permit, committable)


def test_a_checkpoint_that_a_table_does_not_show_yet_is_not_read(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.engine.generation.Patience", lambda: Patience(sink_tries=2))
    pipeline = two_tables(tmp_path, Late)
    write_input(tmp_path / "in", 4, 10)
    run_to_end(pipeline, tmp_path / "root", spark)
    before = tg.read(tmp_path / "root")
    monkeypatch.setattr(Late, "last_epoch", before.epoch)
    write_input(tmp_path / "in", 4, 10, first_file=4)
    with pytest.raises(TidegateError, match="no route"):
        # Only the last checkpoint: one before the first batch would bring nothing that a table could lack.
        run_to_end(pipeline, tmp_path / "root", spark, checkpoint_interval="1h")
    assert tg.read(tmp_path / "root").checkpoint == before.checkpoint
    assert sorted(tg.read(tmp_path / "root")["everything"].to_pandas()["id"]) == list(range(40))
    newest = InspectedRoot(tmp_path / "root").retained()[-1]
    with pytest.raises(CheckpointNotVisible, match="does not show it yet"):
        tg.read(tmp_path / "root", newest.checkpoint_id)


def test_what_cannot_be_read_is_said(tmp_path: Path, spark: SparkSession) -> None:
    with pytest.raises(NoRoot):
        tg.read(tmp_path / "nowhere")
    write_input(tmp_path / "in", 2, 10)
    run_to_end(two_tables(tmp_path), tmp_path / "root", spark)
    with pytest.raises(UnknownCheckpoint, match="it retains ckpt-"):
        tg.read(tmp_path / "root", "ckpt-000999")
    with pytest.raises(UnknownCheckpoint, match="names no checkpoint"):
        tg.read(tmp_path / "root", "yesterday")
    with pytest.raises(KeyError, match="even"):
        tg.read(tmp_path / "root")["odd"]
