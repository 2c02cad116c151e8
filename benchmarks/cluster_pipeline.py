"""A source and a table, as two queries: what the benchmark of several drivers hands from one process to another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import tidegate as tg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER = Path(os.environ["TIDEGATE_BENCH_FOLDER"])

pipeline = tg.Pipeline("hop")


@pipeline.source
def rows(spark: SparkSession) -> DataFrame:
    return spark.readStream.schema("id long").json(str(FOLDER / "rows"))


@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "table"))
def table(rows: DataFrame) -> DataFrame:
    return rows
