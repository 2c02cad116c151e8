"""A pipeline whose stages keep state of every kind. It works beside its file, of which tests make copies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

import tidegate as tg

FOLDER = Path(__file__).parent
FAR_FUTURE_MS = 4_102_444_800_000

pipeline = tg.Pipeline("inspected")


@pipeline.source
def rows(spark: SparkSession) -> DataFrame:
    schema = "id long, key string, ts timestamp, value long"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", "4").json(str(FOLDER / "in"))


@pipeline.stage
def per_minute(rows: DataFrame) -> DataFrame:
    windows = rows.withWatermark("ts", "1 minute").groupBy(F.window("ts", "1 minute"), "key")
    return windows.agg(F.sum("value").alias("value"), F.sum("id").alias("ids"))


@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "totals"))
def totals(per_minute: DataFrame) -> DataFrame:
    return per_minute.select("window.start", "key", "value", "ids")


@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "matched"))
def matched(rows: DataFrame) -> DataFrame:
    """Two operators: a join, and what comes out of it, once for each key."""
    evens = rows.where("id % 2 = 0").withWatermark("ts", "1 day").select("id", "key", "ts")
    thirds = rows.where("id % 3 = 0").withWatermark("ts", "1 day").selectExpr("id AS third", "ts AS at")
    joined = evens.join(thirds, F.expr("id = third AND at >= ts AND at <= ts + INTERVAL 1 HOUR"))
    return joined.dropDuplicates(["key"]).select("id", "key")


@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "visits"))
def visits(rows: DataFrame) -> DataFrame:
    grouped = rows.withWatermark("ts", "1 minute").groupBy("key")
    return grouped.transformWithState(Visits(), "key string, seen long", "append", "eventTime")


class Visits(StatefulProcessor):
    """Remembers what it has seen of each key: in a value, in a list and in a map, and a timer that is never due."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "seen long")
        self._ids = handle.getListState("ids", "id long")
        self._thirds = handle.getMapState("thirds", "rest long", "id long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:
        ids = sorted(row.id for row in rows)
        stored = self._count.get()
        seen = (0 if stored is None else stored[0]) + len(ids)
        self._count.update((seen,))
        self._ids.appendList([(each,) for each in ids])
        for each in ids:
            self._thirds.updateValue((each % 3,), (each,))
        if timerValues.getCurrentWatermarkInMs() < FAR_FUTURE_MS:
            self._handle.registerTimer(FAR_FUTURE_MS)
        yield Row(key=key[0], seen=seen)

    def close(self) -> None:
        pass
