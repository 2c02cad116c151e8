"""The pipeline that `tidegate run` is given."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from benchmarks.peers.job import COUNTS, DELAY_S, Job, read_job
from benchmarks.spark_chain import chain

SCHEMA = "id long, key long, country string, amount double, ts timestamp"


def counts(job: Job) -> tg.Pipeline:
    counting = tg.Pipeline("counts")

    @counting.source
    def keys(spark: SparkSession) -> DataFrame:
        reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", job.files_per_batch)
        return reader.parquet(job.input).select("key")

    @counting.sink(tg.DeltaTable(job.table("counts")), output_mode="update")
    def counts(keys: DataFrame) -> DataFrame:
        return keys.groupBy("key").agg(F.count("*").alias("n"))

    return counting


def pipeline_of(job: Job) -> tg.Pipeline:
    if job.work == COUNTS:
        return counts(job)
    return chain(Path(job.input), Path(job.output), job.files_per_batch, delay=f"{DELAY_S} seconds")


pipeline = pipeline_of(read_job())
