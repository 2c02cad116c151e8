"""Another pipeline that is killed: counts that are updated by key over two hops, slow sinks, PostgreSQL tables.

With a small bound of its channels its source is paused again and again.
"""

from __future__ import annotations

import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import stream

FOLDER = Path(os.environ["TIDEGATE_TEST_FOLDER"])
DSN = os.environ["TIDEGATE_TEST_DSN"]

pipeline = tg.Pipeline("slow")


def slowly(rows: DataFrame, row_seconds: float) -> DataFrame:
    waited = F.udf(lambda value: __import__("time").sleep(row_seconds) or value, "long")
    return rows.withColumn("value", waited("value"))


@pipeline.source
def orders(spark: SparkSession) -> DataFrame:
    return stream(spark, FOLDER / "orders", files_per_batch=1)


@pipeline.stage(output_mode="update")
def counts(orders: DataFrame) -> DataFrame:
    return orders.groupBy("key").agg(F.count("*").alias("orders"), F.sum("value").alias("value"))


@pipeline.stage
def passed(counts: DataFrame) -> DataFrame:
    return counts


@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "total_table", key="key"))
def total_table(passed: DataFrame) -> DataFrame:
    return slowly(passed, 0.1)


@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "order_table"))
def order_table(orders: DataFrame) -> DataFrame:
    return orders.select("id")


@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "slow_table"))
def slow_table(orders: DataFrame) -> DataFrame:
    return slowly(orders, 0.02).select("id", "value")


@pipeline.sink(tg.PostgresTable("order_table", DSN))
def order_rows(orders: DataFrame) -> DataFrame:
    return orders.select("id")


@pipeline.sink(tg.PostgresTable("total_table", DSN, key="key", newest_by="orders"))
def total_rows(passed: DataFrame) -> DataFrame:
    return passed
