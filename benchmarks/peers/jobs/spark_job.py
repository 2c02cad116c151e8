"""The same queries in plain PySpark. Runs until it is killed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.peers.job import COUNTS, DELAY_S, TABLES, Job, read_job
from benchmarks.spark_chain import chain
from benchmarks.spark_runs import PlainRun, Variant, plain_session

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

SCHEMA = "id long, key long, country string, amount double, ts timestamp"
LOOK_EVERY_S = 1


def start_counts(job: Job) -> StreamingQuery:
    session = plain_session(Variant.TUNED)
    reader = session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", job.files_per_batch)
    counts = reader.parquet(job.input).groupBy("key").agg(F.count("*").alias("n"))

    def write(batch: DataFrame, number: int) -> None:
        # A batch that is run again overwrites what it wrote: that makes it exactly once.
        batch.write.mode("overwrite").parquet(f"{job.table('counts')}/batch={number}")

    writer = counts.writeStream.outputMode("update").foreachBatch(write)
    return writer.option("checkpointLocation", f"{job.state}/counts").start()


def start_chain(job: Job) -> StreamingQuery:
    pipeline = chain(Path(job.input), Path(job.output), job.files_per_batch, delay=f"{DELAY_S} seconds")
    outputs = {name: Path(job.table(name)) for name in TABLES[job.work]}
    run = PlainRun(pipeline, Path(job.state), Variant.TUNED, outputs)
    run.start()
    return run.queries["totals"]


def record(query: StreamingQuery, job: Job, last: int) -> int:
    """Write down what the batches since the last one say of their commits. Returns the last one."""
    lines = []
    for progress in query.recentProgress:
        took = progress["durationMs"]
        if progress["batchId"] <= last or "commitOffsets" not in took:
            continue
        last = progress["batchId"]
        # Of the state Spark tells the sum over its partitions, which are committed side by side.
        state = sum(each["commitTimeMs"] / max(1, each["numShufflePartitions"]) for each in progress["stateOperators"])
        spent = took.get("walCommit", 0) + took["commitOffsets"] + state
        lines.append(json.dumps({"ended_ms": time.time() * 1_000, "took_ms": spent}) + "\n")
    with Path(job.record + ".progress").open("a", encoding="utf-8") as file:
        file.writelines(lines)
    return last


def main() -> None:
    job = read_job()
    query = start_counts(job) if job.work == COUNTS else start_chain(job)
    last = -1
    while not query.awaitTermination(LOOK_EVERY_S):
        last = record(query, job, last)


if __name__ == "__main__":
    main()
