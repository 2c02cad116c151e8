"""A pipeline that is scraped and traced while it runs: a stage fails once, and a table refuses a commit once, when a
test puts a file for it."""

from __future__ import annotations

import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

import tidegate as tg
from tests.spark.harness import stream

FOLDER = Path(os.environ["TIDEGATE_TEST_FOLDER"])

pipeline = tg.Pipeline("watched")


def fail_once(wanted: str) -> bool:
    """Not at all, mostly."""
    try:
        (FOLDER / wanted).unlink()
    except FileNotFoundError:
        return False
    raise ValueError(f"as {wanted} wants it")


@pipeline.source
def orders(spark: SparkSession) -> DataFrame:
    return stream(spark, FOLDER / "orders", files_per_batch=1).withWatermark("ts", "1 minute")


@pipeline.stage(output_mode="update")
def totals(orders: DataFrame) -> DataFrame:
    checked = F.udf(lambda value: fail_once("fail-stage") or value, LongType())
    counted = orders.withColumn("value", checked("value"))
    return counted.groupBy("key").agg(F.sum("value").alias("value"))


def refused_once(_rows: DataFrame, _epoch: int) -> None:
    fail_once("fail-commit")


@pipeline.sink(tg.ForeachBatch(refused_once))
def told(totals: DataFrame) -> DataFrame:
    return totals


@pipeline.sink(tg.DeltaTable(FOLDER / "order_table"))
def order_table(orders: DataFrame) -> DataFrame:
    return orders.select("id")
