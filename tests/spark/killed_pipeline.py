"""The pipeline that the kill tests run in processes of its own, and kill.

Two tables derive from one source alone, so that they can be compared at every checkpoint; a third comes out of a
join and a deduplication, so that there is state to lose; a fourth is updated by key. These two are looked after all the
time, and keep nothing that no retained checkpoint needs. Two of its stages are chained to what they read, in every
other run.
"""

from __future__ import annotations

import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import stream

FOLDER = Path(os.environ["TIDEGATE_TEST_FOLDER"])
LAKE = os.environ.get("TIDEGATE_TEST_LAKE") or str(FOLDER / "lake")

pipeline = tg.Pipeline("killed")


@pipeline.source
def orders(spark: SparkSession) -> DataFrame:
    return stream(spark, FOLDER / "orders")


@pipeline.source
def payments(spark: SparkSession) -> DataFrame:
    return stream(spark, FOLDER / "payments", files_per_batch=3)


@pipeline.stage
def unique(orders: DataFrame) -> DataFrame:
    return orders.withWatermark("ts", "1 day").dropDuplicates(["id", "ts"])


@pipeline.stage
def checked(payments: DataFrame) -> DataFrame:
    return payments.where("value >= 0")


@pipeline.stage
def paid(unique: DataFrame, checked: DataFrame) -> DataFrame:
    ours = unique.withWatermark("ts", "1 day").alias("o")
    theirs = checked.withWatermark("ts", "1 day").alias("p")
    return ours.join(theirs, F.expr("o.id = p.id AND o.ts = p.ts")).select("o.id", "o.key", "p.value")


@pipeline.sink(tg.DeltaTable(f"{LAKE}/order_table"))
def order_table(orders: DataFrame) -> DataFrame:
    return orders.select("id")


@pipeline.sink(tg.DeltaTable(f"{LAKE}/unique_table"))
def unique_table(unique: DataFrame) -> DataFrame:
    return unique.select("id")


@pipeline.sink(tg.DeltaTable(f"{LAKE}/paid_table", partition_by=["key"], optimize="2s", vacuum="0s"))
def paid_table(paid: DataFrame) -> DataFrame:
    return paid


@pipeline.sink(tg.DeltaTable(f"{LAKE}/total_table", key="key", optimize="2s", vacuum="0s"), output_mode="update")
def total_table(orders: DataFrame) -> DataFrame:
    return orders.groupBy("key").agg(F.count("*").alias("orders"), F.sum("value").alias("value"))
