"""Upserts into a Delta table by Spark, where other writers and odd names make it hard."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deltalake
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace, StagedFile
from tidegate.sinks.delta import DeltaTable
from tidegate.sinks.reading import TableAt
from tidegate.sinks.scan import as_pattern
from tidegate.testing.sinks import permit

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

Row = dict[str, Any]


def by_id(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: int(row["id"]))


@pytest.mark.spark
@pytest.mark.parametrize("little", [1 << 20, 0], ids=["all written again", "looked for"])
def test_rows_are_replaced_in_files_of_other_writers_whatever_names_and_values_are(
    little: int, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.sinks.upsert._LITTLE_BYTES", little)
    path = tmp_path / "größe 50%+"
    place = SinkPlace("shop", "orders", tmp_path / "unused", spark)
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
    sink = DeltaTable(path, "k", key=["id", "k"])
    sink.check_table(place, schema, "update")
    sink.prepare_table(place, schema)

    def table(rows: Sequence[Row]) -> Any:
        return pyarrow.Table.from_pylist(list(rows), schema=arrow)

    def upsert(batch: int, rows: Sequence[Row]) -> None:
        file = sink.staging_folder(place, 1) / f"part-{batch}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table(rows), file)
        staged = Committable(batch, (StagedFile(batch, str(file), file.stat().st_size, len(rows)),))
        assert sink.commit(place, permit(batch + 1), staged) is CommitAnswer.COMMITTED

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


def test_a_path_with_characters_of_patterns_is_read_as_it_is() -> None:
    assert as_pattern(Path("/lake/we[i]rd {a,b}* ?\\/part-0.parquet")) == (
        "/lake/we\\[i\\]rd \\{a,b\\}\\* \\?\\\\/part-0.parquet"
    )
