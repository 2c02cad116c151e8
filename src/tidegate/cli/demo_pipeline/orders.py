"""The pipeline that `tidegate demo` runs: orders and payments meet in a join, and three tables come out of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

import tidegate as tg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER = Path(os.environ["TIDEGATE_DEMO_FOLDER"])

pipeline = tg.Pipeline("demo")


def _files(spark: SparkSession, name: str, schema: str) -> DataFrame:
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", "1")
    return reader.json(str(FOLDER / name))


@pipeline.source
def orders(spark: SparkSession) -> DataFrame:
    return _files(spark, "orders", "id long, ts timestamp, country string, amount long")


@pipeline.source
def payments(spark: SparkSession) -> DataFrame:
    return _files(spark, "payments", "order_id long, paid_at timestamp")


@pipeline.stage
def paid(orders: DataFrame, payments: DataFrame) -> DataFrame:
    ordered = orders.withWatermark("ts", "1 day")
    payed = payments.withWatermark("paid_at", "1 day")
    soon = F.expr("id = order_id AND paid_at >= ts AND paid_at <= ts + INTERVAL 1 HOUR")
    return ordered.join(payed, soon).select("id", "ts", "country", "amount")


@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "order_log"))
def order_log(orders: DataFrame) -> DataFrame:
    return orders.select("id", "country", "amount")


@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "paid_orders", partition_by=["country"]))
def paid_orders(paid: DataFrame) -> DataFrame:
    return paid.select("id", "country", "amount")


@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "revenue"))
def revenue(paid: DataFrame) -> DataFrame:
    per_minute = paid.withWatermark("ts", "10 minutes").groupBy(F.window("ts", "1 minute"), "country")
    return per_minute.agg(F.sum("amount").alias("amount")).select(
        F.col("window.start").alias("minute"), "country", "amount"
    )
