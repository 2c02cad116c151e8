"""Streams of other kinds than files as sources: what they have given is neither given again nor skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import deltalake
import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.types import StructType

import tidegate as tg
from tests.spark.harness import Crash, at_most, run_to_end, stream, table_rows, write_input
from tidegate.engine.status import RunStatus
from tidegate.errors import PipelineChanged
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder
from tidegate.storage.paths import RootPaths

pytestmark = [pytest.mark.matrix, pytest.mark.spark, pytest.mark.slow]

ROWS_PER_BATCH = 7


class NumbersReader(SimpleDataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"next": 0}

    def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[int]], dict[str, int]]:
        end = {"next": start["next"] + ROWS_PER_BATCH}
        return self.readBetweenOffsets(start, end), end

    def readBetweenOffsets(  # noqa: N802
        self, start: dict[str, int], end: dict[str, int]
    ) -> Iterator[tuple[int]]:
        return iter([(each,) for each in range(start["next"], end["next"])])


class Numbers(DataSource):
    """A user's own source, in Python."""

    @classmethod
    def name(cls) -> str:
        return "numbers"

    def schema(self) -> str:
        return "value long"

    def simpleStreamReader(self, schema: StructType) -> NumbersReader:  # noqa: N802, ARG002
        return NumbersReader()


def python_source(spark: SparkSession) -> DataFrame:
    spark.dataSource.register(Numbers)
    return spark.readStream.format("numbers").load()


def rate_source(spark: SparkSession) -> DataFrame:
    reader = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS_PER_BATCH)
    return reader.option("advanceMillisPerBatch", 1000).load().select("value")


@pytest.mark.parametrize("source", [python_source, rate_source])
def test_it_goes_on_where_the_last_checkpoint_was(
    source: Callable[[SparkSession], DataFrame], tmp_path: Path, spark: SparkSession
) -> None:
    pipeline = tg.Pipeline("numbered")
    table = tmp_path / "lake" / "table"

    @pipeline.source
    def numbers(spark: SparkSession) -> DataFrame:
        return source(spark)

    @pipeline.sink(tg.DeltaTable(table))
    def kept(numbers: DataFrame) -> DataFrame:
        return numbers.where("value % 2 = 0")

    def crash_at(version: int) -> Callable[[RunStatus], None]:
        def look(_status: RunStatus) -> None:
            if deltalake.DeltaTable(table).version() >= version:
                raise Crash

        return look

    for version in (2, 4, 6):
        with pytest.raises(Crash):
            run_to_end(
                pipeline,
                tmp_path / "root",
                spark,
                available_now=False,
                checkpoint_interval="300ms",
                view=crash_at(version),
            )
    shown = table_rows(table, ["value"])
    assert set(shown.values()) == {1}
    assert sorted(value for (value,) in shown) == list(range(0, 2 * len(shown), 2))
    assert len(shown) > ROWS_PER_BATCH


def test_a_source_starts_where_it_first_stood_though_no_checkpoint_has_seen_a_batch_of_it(
    tmp_path: Path, spark: SparkSession
) -> None:
    """Such as Kafka's "latest". A rate source too notes when it was first started, before its first batch."""
    root = tmp_path / "root"

    def counting(**options: int) -> tg.Pipeline:
        pipeline = tg.Pipeline("numbered")

        @pipeline.source
        def numbers(spark: SparkSession) -> DataFrame:
            return spark.readStream.format("rate").options(**options).load()

        @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "table"))
        def kept(numbers: DataFrame) -> DataFrame:
            return numbers

        return pipeline

    crash_before_a_checkpoint(counting(rowsPerSecond=1), root, spark, "numbers", 1)
    # How it is read has changed, and now what is read.
    crash_before_a_checkpoint(counting(rowsPerSecond=1, numPartitions=1), root, spark, "numbers", 2)
    with pytest.raises(PipelineChanged, match=r"when it first started: .*rowsPerSecond=1\).*rowsPerSecond=2\)"):
        run_to_end(counting(rowsPerSecond=2), root, spark, view=at_most(60))
    assert StoredDecisions(Folder(root)).read().generation == 2
    assert first_position(root, "numbers", 2).read_bytes() == first_position(root, "numbers", 1).read_bytes()
    for generation in (1, 2):
        note = root / RootPaths.source_streams(generation, "numbers")
        assert msgspec.json.decode(note.read_bytes()) == [
            {"format": "rate", "reads": {"rowsPerSecond": "1"}, "ids": {}}
        ]


def first_position(root: Path, source: str, generation: int) -> Path:
    return root / "generations" / f"{generation:06d}" / "stages" / source / "spark" / "sources" / "0" / "0"


def crash_before_a_checkpoint(
    pipeline: tg.Pipeline, root: Path, spark: SparkSession, source: str, generation: int
) -> None:
    def crash_early(_status: RunStatus) -> None:
        if first_position(root, source, generation).exists():
            raise Crash

    with pytest.raises(Crash):
        run_to_end(pipeline, root, spark, available_now=False, checkpoint_interval="1h", view=crash_early)


def test_a_source_of_files_that_was_changed_before_the_first_checkpoint_reads_nothing_of_the_old_one(
    tmp_path: Path, spark: SparkSession
) -> None:
    """It has no position yet that could be of another folder."""

    def reading(folder: Path) -> tg.Pipeline:
        pipeline = tg.Pipeline("changed")

        @pipeline.source
        def rows(spark: SparkSession) -> DataFrame:
            return stream(spark, folder)

        @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "table"))
        def table(rows: DataFrame) -> DataFrame:
            return rows.select("id")

        return pipeline

    write_input(tmp_path / "wrong", 1, 5)
    write_input(tmp_path / "right", 1, 5, first_file=3)
    crash_before_a_checkpoint(reading(tmp_path / "wrong"), tmp_path / "root", spark, "rows", 1)
    run_to_end(reading(tmp_path / "right"), tmp_path / "root", spark)
    assert sorted(table_rows(tmp_path / "lake" / "table", ["id"])) == [(each,) for each in range(15, 20)]
