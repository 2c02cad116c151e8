"""The pipeline whose runs lose their power: state, a table that is appended to, one with a key, and a function."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import stream
from tidegate.storage.disk import sync

FOLDER = Path(os.environ["TIDEGATE_TEST_FOLDER"])

pipeline = tg.Pipeline("powerless")


@pipeline.source
def orders(spark: SparkSession) -> DataFrame:
    return stream(spark, FOLDER / "orders")


@pipeline.stage
def unique(orders: DataFrame) -> DataFrame:
    return orders.withWatermark("ts", "1 day").dropDuplicates(["id", "ts"])


@pipeline.sink(tg.DeltaTable(FOLDER / "durable" / "order_table", partition_by=["key"]))
def order_table(unique: DataFrame) -> DataFrame:
    return unique.select("id", "key")


@pipeline.sink(tg.DeltaTable(FOLDER / "durable" / "total_table", key="key"), output_mode="update")
def total_table(orders: DataFrame) -> DataFrame:
    return orders.groupBy("key").agg(F.count("*").alias("orders"))


def remember(rows: DataFrame, epoch: int) -> None:
    """As a user would who wants it to be durable: whole, under the number of the epoch."""
    (FOLDER / "calls").mkdir(exist_ok=True)
    path = FOLDER / "calls" / f"{epoch}.json"
    path.write_text(json.dumps([row.id for row in rows.collect()]), encoding="utf-8")
    sync([path])


@pipeline.sink(tg.ForeachBatch(remember))
def calls(unique: DataFrame) -> DataFrame:
    return unique.select("id")
