"""The pipeline with state that runs for hundreds of batches, each of one small file."""

from __future__ import annotations

import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import tidegate as tg
from tests.spark.harness import stream

FOLDER = Path(os.environ["TIDEGATE_TEST_FOLDER"])

pipeline = tg.Pipeline("long")


@pipeline.source
def orders(spark: SparkSession) -> DataFrame:
    """Here, where each file is a batch: what reads it takes as many at once as there are."""
    return stream(spark, FOLDER / "orders", files_per_batch=1).withWatermark("ts", "1 day").dropDuplicates(["id", "ts"])


@pipeline.sink(tg.DeltaTable(f"{FOLDER}/lake/order_table"))
def order_table(orders: DataFrame) -> DataFrame:
    return orders.select("id")
