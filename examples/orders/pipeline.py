"""Orders and payments: two streams meet in a join, and four tables come out of it that agree at every checkpoint."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg

pipeline = tg.Pipeline("orders")


@pipeline.source
def orders(spark: SparkSession) -> DataFrame:
    schema = "id long, ts timestamp, country string, amount long"
    # A few files a batch: without a limit the first batch would be all that lies there.
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", "5").json("input/orders")


@pipeline.source
def payments(spark: SparkSession) -> DataFrame:
    schema = "order_id long, paid_at timestamp"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", "5").json("input/payments")


@pipeline.stage
def paid(orders: DataFrame, payments: DataFrame) -> DataFrame:
    """Orders that were paid within the hour."""
    # The watermarks bound the state of the join: what is two hours old is forgotten on both sides.
    ordered = orders.withWatermark("ts", "1 hour")
    payed = payments.withWatermark("paid_at", "1 hour")
    in_time = F.expr("id = order_id AND paid_at BETWEEN ts AND ts + INTERVAL 1 HOUR")
    return ordered.join(payed, in_time).select("id", "ts", "country", "amount")


@pipeline.sink(tg.DeltaTable("lake/all_orders"))
def all_orders(orders: DataFrame) -> DataFrame:
    return orders


@pipeline.sink(tg.DeltaTable("lake/paid_orders"))
def paid_orders(paid: DataFrame) -> DataFrame:
    return paid


# Update mode gives a new row for every country that changed; with a key it takes the place of the old one.
@pipeline.sink(tg.DeltaTable("lake/by_country", key="country"), output_mode="update")
def by_country(paid: DataFrame) -> DataFrame:
    return paid.groupBy("country").agg(F.count("*").alias("orders"), F.sum("amount").alias("amount"))


# Append mode, the default, gives a window once: when the watermark says that nothing more comes for it.
@pipeline.sink(tg.DeltaTable("lake/revenue"))
def revenue(paid: DataFrame) -> DataFrame:
    per_minute = paid.withWatermark("ts", "10 minutes").groupBy(F.window("ts", "1 minute"), "country")
    return per_minute.agg(F.sum("amount").alias("amount")).select(
        F.col("window.start").alias("minute"), "country", "amount"
    )
