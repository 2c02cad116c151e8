"""Visits of a web site, made out of clicks with `transformWithState`: state per visitor, timers, two tables."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

import tidegate as tg

SILENCE_MS = 10 * 60 * 1000
"""A visit is over when its visitor was silent for that long."""

pipeline = tg.Pipeline("sessions")


@pipeline.source
def clicks(spark: SparkSession) -> DataFrame:
    schema = "visitor string, ts timestamp, page string"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", "5").json("input/clicks")


@pipeline.stage
def visits(clicks: DataFrame) -> DataFrame:
    # The watermark moves the timers: one is due when no click can come any more that is earlier.
    return (
        clicks.withWatermark("ts", "5 minutes")
        .groupBy("visitor")
        .transformWithState(
            statefulProcessor=Visits(),
            outputStructType="visitor string, visit long, started timestamp, ended timestamp, clicks long",
            outputMode="append",
            timeMode="eventTime",
        )
    )


@pipeline.sink(tg.DeltaTable("lake/sessions"))
def sessions(visits: DataFrame) -> DataFrame:
    return visits


@pipeline.sink(tg.DeltaTable("lake/visitors", key="visitor", newest_by="visit"))
def visitors(visits: DataFrame) -> DataFrame:
    """One row a visitor: how many visits there were, and when the last one ended."""
    return visits.select("visitor", "visit", "ended")


class Visits(StatefulProcessor):
    """Keeps a visitor's clicks until the visit that they belong to is over.

    Within a batch, and from batch to batch, clicks have no order that one could rely on: so they are kept, and sorted
    when a timer is due.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._open = handle.getListState("open", "at_ms long")
        self._count = handle.getValueState("count", "visits long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:
        self._open.appendList([(_milliseconds(row.ts),) for row in rows])
        for visit in _visits(self._open.get()):
            self._handle.registerTimer(visit[-1] + SILENCE_MS)
        return iter(())

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        # One that was set before a later click of the same visit came finds nothing that is over, and does no harm.
        over_ms = expiredTimerInfo.getExpiryTimeInMs() - SILENCE_MS
        found = _visits(self._open.get())
        over = [visit for visit in found if visit[-1] <= over_ms]
        if not over:
            return
        left = [(at_ms,) for visit in found if visit not in over for at_ms in visit]
        if left:
            self._open.put(left)
        else:
            self._open.clear()
        stored = self._count.get()
        count = 0 if stored is None else stored[0]
        self._count.update((count + len(over),))
        for number, visit in enumerate(over, start=count + 1):
            yield Row(
                visitor=key[0], visit=number, started=_moment(visit[0]), ended=_moment(visit[-1]), clicks=len(visit)
            )

    def close(self) -> None:
        pass


def _visits(clicks: Iterable[tuple[int]]) -> list[list[int]]:
    """The moments of clicks, those of a visit together."""
    found: list[list[int]] = []
    for (at_ms,) in sorted(clicks):
        if found and at_ms - found[-1][-1] <= SILENCE_MS:
            found[-1].append(at_ms)
        else:
            found.append([at_ms])
    return found


def _milliseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _moment(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)
