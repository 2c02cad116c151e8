"""Readings of sensors, a slow stage and a slow sink: how what is fast is held back by what is not."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from pyspark.sql import DataFrame, SparkSession

import tidegate as tg

OUTBOX = Path(__file__).parent / "outbox"

pipeline = tg.Pipeline("backpressure")


@pipeline.source
def measured(spark: SparkSession) -> DataFrame:
    schema = "sensor string, number long, value long"
    # The bound of a backlog can be passed by a batch: so batches are small.
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", "1").json("input/readings")


@pipeline.sink(tg.DeltaTable("lake/readings"))
def readings(measured: DataFrame) -> DataFrame:
    """Fast. It sees no more than the source reads, though, and that waits for the slowest."""
    return measured


@pipeline.stage
def scored(measured: DataFrame) -> DataFrame:
    """Slow: a model is asked about every reading."""
    return measured.mapInPandas(ask_the_model, "sensor string, number long, value long, score long")


def ask_the_model(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    for frame in frames:
        time.sleep(0.02 * len(frame))
        yield frame.assign(score=frame["value"] % 100)


@pipeline.sink(tg.DeltaTable("lake/scores"))
def scores(scored: DataFrame) -> DataFrame:
    return scored


def send(alerts: DataFrame, epoch: int) -> None:
    """Slow too: a service that takes one alert at a time.

    It is called once an epoch, and again with the same rows after a crash. What it writes has the epoch's number for a
    name, so that a second call replaces it.
    """
    sent = []
    for alert in alerts.collect():
        time.sleep(0.05)
        sent.append(alert.asDict())
    OUTBOX.mkdir(exist_ok=True)
    hidden = OUTBOX / f".{epoch:06d}.json"
    hidden.write_text(json.dumps(sent), encoding="utf-8")
    hidden.replace(OUTBOX / f"{epoch:06d}.json")


@pipeline.sink(tg.ForeachBatch(send))
def alerts(scored: DataFrame) -> DataFrame:
    return scored.where("score >= 50")
