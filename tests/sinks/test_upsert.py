"""Upserts into a Delta table by Spark, where other writers and odd names make it hard."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deltalake
import pytest
from deltalake.transaction import AddAction
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from tidegate.errors import SinkFailed
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace, StagedFile, staged_by
from tidegate.sinks.delta.reading import TableAt
from tidegate.sinks.delta.scan import active_files
from tidegate.sinks.delta.table import DeltaTable
from tidegate.sinks.delta.upsert import _comparable
from tidegate.sinks.function import ForeachBatch
from tidegate.sinks.staging import as_pattern
from tidegate.storage.folder import Folder
from tidegate.storage.memory import Memory
from tidegate.testing.sinks import permit

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")
Py4JJavaError: Any = importlib.import_module("py4j.protocol").Py4JJavaError

Row = dict[str, Any]


def by_id(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: int(row["id"]))


@pytest.mark.spark
@pytest.mark.parametrize("little", [1 << 20, 0], ids=["all written again", "looked for"])
def test_rows_are_replaced_in_files_of_other_writers_whatever_names_and_values_are(
    little: int, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.sinks.delta.upsert._LITTLE_BYTES", little)
    path = tmp_path / "größe 50%+"
    place = SinkPlace("shop", "orders", Memory(), spark)
    schema = StructType(
        [
            StructField("id", LongType()),
            StructField("k", StringType()),
            StructField("a`b", StringType()),
            StructField("_metadata", IntegerType()),
        ]
    )
    arrow = pyarrow.schema(
        [("id", pyarrow.int64()), ("k", pyarrow.string()), ("a`b", pyarrow.string()), ("_metadata", pyarrow.int32())]
    )
    sink = DeltaTable(path, "k", key=["id", "k"]).bind(place)
    sink.check_table(schema, "update")
    sink.prepare_table(schema)

    def table(rows: Sequence[Row]) -> Any:
        return pyarrow.Table.from_pylist(list(rows), schema=arrow)

    def upsert(batch: int, rows: Sequence[Row]) -> None:
        file = Path(staged_by(sink, 1).location()) / f"part-{batch}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table(rows), file)
        staged = Committable(batch, (StagedFile(batch, str(file), file.stat().st_size, len(rows)),))
        assert sink.commit(permit(batch + 1), staged) is CommitAnswer.COMMITTED

    values = ["ü", "a b", "a/b", "100 %", "a+b", "}", "", None]
    old: list[Row] = [{"id": n, "k": k, "a`b": "old", "_metadata": n} for n, k in enumerate(values)]
    new: list[Row] = [{**row, "a`b": "new"} for row in old[::2]]
    other: list[Row] = [{"id": 100 + n, "k": k, "a`b": "other", "_metadata": n} for n, k in enumerate(values)]
    upsert(0, old)
    deltalake.write_deltalake(path, table(other), mode="append")
    deltalake.DeltaTable(path).optimize.compact()
    upsert(1, new)
    # Delta has no empty partition values: they are null, and so is such a key.
    expected = by_id([{**row, "k": row["k"] or None} for row in (*new, *old[1::2], *other)])
    found = deltalake.DeltaTable(path)
    assert by_id(found.to_pyarrow_table().to_pylist()) == expected
    by_spark = TableAt(path, found.version()).to_spark(spark)
    assert by_spark.columns == schema.names
    assert by_id([row.asDict() for row in by_spark.collect()]) == expected


@pytest.mark.spark
def test_a_text_that_is_the_name_of_null_in_folders_is_not_merged_as_null(tmp_path: Path, spark: SparkSession) -> None:
    """Another writer may well have written it: Delta's log tells it from null."""
    place = SinkPlace("shop", "orders", Memory(), spark)
    schema = StructType([StructField("id", LongType()), StructField("k", StringType())])
    sink = DeltaTable(tmp_path / "table", "k", key="id").bind(place)
    sink.check_table(schema, "update")
    sink.prepare_table(schema)
    parquet.write_table(pyarrow.table({"id": [1, 4]}), sink.path / "theirs.parquet")
    table = deltalake.DeltaTable(sink.path)
    size = (sink.path / "theirs.parquet").stat().st_size
    theirs = AddAction("theirs.parquet", size, {"k": "__HIVE_DEFAULT_PARTITION__"}, 0, True, "{}")
    table.create_write_transaction([theirs], "append", table.schema(), partition_by=["k"])
    before = by_id(deltalake.DeltaTable(sink.path).to_pyarrow_table().to_pylist())
    file = Path(staged_by(sink, 1).location()) / "part-0.parquet"
    file.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.table({"id": [3], "k": ["a"]}), file)
    staged = Committable(0, (StagedFile(0, str(file), file.stat().st_size, 1),))
    with pytest.raises(
        SinkFailed, match="'k' is '__HIVE_DEFAULT_PARTITION__', by which folders of partitions mean null"
    ):
        sink.commit(permit(1), staged)
    assert by_id(deltalake.DeltaTable(sink.path).to_pyarrow_table().to_pylist()) == before


@pytest.mark.spark
def test_maps_with_the_same_entries_are_the_same_in_whatever_order(spark: SparkSession) -> None:
    rows = spark.sql(
        "SELECT map('a', map(1, 2, 3, 4), 'b', NULL) AS m UNION ALL SELECT map('b', NULL, 'a', map(3, 4, 1, 2))"
    )
    compared = _comparable(F.col("m"), rows.schema["m"].dataType)
    assert rows.select(F.min(compared) < F.max(compared)).first() == (False,)


def test_a_path_with_characters_of_patterns_is_read_as_it_is() -> None:
    assert as_pattern(Path("/lake/we[i]rd {a,b}* ?\\/part-0.parquet")) == (
        "/lake/we\\[i\\]rd \\{a,b\\}\\* \\?\\\\/part-0.parquet"
    )


# -- damaged files -------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


@pytest.fixture
def lenient(spark: SparkSession) -> SparkSession:
    """A user's session that leaves out what it cannot read."""
    session = spark.newSession()
    session.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    session.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    return session


@pytest.mark.spark
@pytest.mark.parametrize(
    ("ruin", "little"), [(damage, 1 << 20), (Path.unlink, 0)], ids=["damaged, all written again", "gone, looked for"]
)
def test_a_file_that_cannot_be_read_is_no_file_without_rows(
    ruin: Callable[[Path], None], little: int, tmp_path: Path, lenient: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the user's session does with such files: a commit would remove the rows that it cannot read."""
    monkeypatch.setattr("tidegate.sinks.delta.upsert._LITTLE_BYTES", little)
    place = SinkPlace("shop", "orders", Folder(tmp_path), lenient)
    schema = StructType([StructField("id", LongType()), StructField("name", StringType())])
    sink = DeltaTable(tmp_path / "table", key="id").bind(place)
    sink.check_table(schema, "update")
    sink.prepare_table(schema)

    def stage(batch: int, *ids: int) -> Committable:
        file = Path(staged_by(sink, 1).location()) / f"part-{batch}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table({"id": ids, "name": [str(batch)] * len(ids)}), file)
        return Committable(batch, (StagedFile(batch, str(file), file.stat().st_size, len(ids)),))

    first, second = stage(0, 1, 2, 3), stage(1, 2, 4)
    sink.commit(permit(1), first)
    table = deltalake.DeltaTable(sink.path)
    rows = TableAt(sink.path, table.version()).to_spark(lenient)  # before the damage: Spark reads it late
    for file in active_files(table):
        ruin(sink.path / file.path)
    with pytest.raises(Py4JJavaError, match="FAILED_READ_FILE"):
        rows.collect()
    with pytest.raises(SinkFailed, match=r"its rows cannot be merged: \[(FAILED_READ_FILE|PATH_NOT_FOUND).*part-"):
        sink.commit(permit(2), second)
    assert deltalake.DeltaTable(sink.path).version() == table.version()
    assert sink.facts().committed_epoch == 1

    function = ForeachBatch(lambda rows, _epoch: rows.collect()).bind(place)
    function.prepare_table(schema)
    ruin(Path(second.files[0].path))
    with pytest.raises((SinkFailed, PySparkException, Py4JJavaError), match=r"part-1\.parquet"):
        function.commit(permit(2), second)
    assert function.facts().committed_epoch == 0
