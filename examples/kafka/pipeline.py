"""Payments from a Kafka topic into a Delta table and, summed up per account, into a PostgreSQL table."""

import os

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg

SERVERS = os.environ.get("KAFKA_SERVERS", "localhost:9092")

pipeline = tg.Pipeline("payments")


@pipeline.source
def messages(spark: SparkSession) -> DataFrame:
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", SERVERS).option("subscribe", "payments")
    # Where a first run begins; later ones go on from their checkpoint, whatever stands here.
    reader = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "1000")
    return reader.load().selectExpr("partition", "offset", "timestamp", "CAST(value AS string) AS text")


@pipeline.stage
def parsed(messages: DataFrame) -> DataFrame:
    payment = F.from_json("text", "id long, account string, amount long")
    return messages.withColumn("payment", payment)


@pipeline.sink(tg.DeltaTable("lake/payments"))
def payments(parsed: DataFrame) -> DataFrame:
    return parsed.where("payment.id IS NOT NULL").select("partition", "offset", "timestamp", "payment.*")


# What is no payment is kept where it can be found: one that is dropped is lost, one that fails stops the pipeline.
@pipeline.sink(tg.DeltaTable("lake/refused"))
def refused(parsed: DataFrame) -> DataFrame:
    return parsed.where("payment.id IS NULL").select("partition", "offset", "timestamp", "text")


# No connection string: where the server is and who we are comes from PGHOST, PGUSER, PGPASSWORD and so on.
@pipeline.sink(tg.PostgresTable("balances", key="account"), output_mode="update")
def balances(parsed: DataFrame) -> DataFrame:
    per_account = parsed.where("payment.id IS NOT NULL").groupBy("payment.account")
    return per_account.agg(F.count("*").alias("payments"), F.sum("payment.amount").alias("balance"))
