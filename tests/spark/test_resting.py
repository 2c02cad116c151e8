"""Queries that rest while there is nothing to read: when they do, and that they go on at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import LongType, StructField, StructType

from tests.spark.played import PlayedPipeline, played
from tests.spark.test_gate import Channel
from tidegate.engine.stage.running import RunningStage
from tidegate.spark.filelog import is_committed
from tidegate.spark.gate import Gate
from tidegate.spark.queries import read_gate
from tidegate.spark.resting import WAITING, QueryRest
from tidegate.spark.session import StageSessions
from tidegate.storage.folder import Folder

pytestmark = pytest.mark.matrix

# -- when a stage lets its query rest, and when it wakes it ------------------------------------------


class NotedRest(QueryRest):
    """Of a query that is played. `waits`: what Spark would say of it."""

    def __init__(self) -> None:
        self.is_resting = False
        self.waits = True
        self.asked = 0

    def begin(self) -> None:
        self.asked += 1
        self.is_resting = self.waits

    def end(self) -> None:
        self.is_resting = False

    def close(self) -> None:
        self.end()


def resting_stage(pipeline: PlayedPipeline) -> tuple[RunningStage, NotedRest]:
    """The stage in the middle, when all that is there has come to rest."""
    stage, rest = pipeline.generation.stages["middle"], NotedRest()
    stage.progress.rest = rest
    pipeline.poll_until(lambda: rest.is_resting)
    return stage, rest


def test_a_query_rests_while_its_gates_are_empty_and_is_woken_by_what_it_may_see(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        stage, rest = resting_stage(pipeline)
        assert stage.progress.is_idle
        pipeline.played["rows"].run_batch()
        pipeline.poll_until(lambda: not rest.is_resting)
        assert not stage.inputs.shows_nothing
        until = time.monotonic() + 0.2
        while time.monotonic() < until:  # it has a batch to run, however long that takes
            pipeline.generation.poll()
        assert not rest.is_resting
        pipeline.played["middle"].run_batch()
        pipeline.poll_until(lambda: rest.is_resting)
        assert stage.progress.batch == 0


def test_a_query_that_does_not_wait_is_asked_again_and_does_not_rest(tmp_path: Path) -> None:
    """It may have a batch without data to run, which a watermark makes it do."""
    with played(tmp_path) as pipeline:
        _, rest = resting_stage(pipeline)
        rest.end()
        rest.waits, before = False, rest.asked
        pipeline.poll_until(lambda: rest.asked >= before + 2)
        assert not rest.is_resting
        rest.waits = True
        pipeline.poll_until(lambda: rest.is_resting)


def test_a_barrier_passes_a_query_that_rests(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        stage, rest = resting_stage(pipeline)
        checkpoint_id = pipeline.generation.trigger()
        pipeline.poll_until(lambda: stage.checkpoints.has_cut(checkpoint_id))
        assert rest.is_resting
        assert rest.asked == 1


def test_a_query_is_woken_before_it_is_stopped(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        _, rest = resting_stage(pipeline)
        pipeline.generation.stop()
        assert not rest.is_resting


# -- what it does to a query of Spark's ---------------------------------------------------------------


class Reader:
    """A query that reads a gate, as a stage does."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.channel = Channel(folder)
        self.gate: Gate = self.channel.gate()
        self._checkpoint = Folder(folder / "spark")
        session = StageSessions(spark).of_stages
        rows = read_gate(session, self.gate.files, StructType([StructField("id", LongType())]))
        writer = rows.writeStream.queryName("rests").option("checkpointLocation", str(folder / "spark"))
        self.query: StreamingQuery = writer.format("parquet").option("path", str(folder / "output")).start()
        self.rest = QueryRest(self.query, session)

    def release(self) -> None:
        self.gate.release(self.channel.write())
        assert self.gate.flush()

    def has_committed(self, batch: int) -> bool:
        return is_committed(self._checkpoint, batch)

    def come_to_rest(self) -> None:
        def rests() -> bool:
            self.rest.begin()
            return self.rest.is_resting

        eventually(rests)
        # It was asleep, and now stands before its next look.
        eventually(lambda: self.query.status["message"] == "Waiting for next trigger")


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.spark
def test_a_query_that_rests_sees_nothing_until_it_is_woken(tmp_path: Path, spark: SparkSession) -> None:
    reader = Reader(spark, tmp_path)
    try:
        for batch in range(3):
            reader.come_to_rest()
            reader.release()
            time.sleep(0.3)  # far less than its longest rest
            assert not reader.has_committed(batch)
            assert reader.query.isActive
            reader.rest.end()
            eventually(lambda: reader.has_committed(batch))  # noqa: B023 - it is called at once
            reader.gate.on_consumed(reader.channel.written)
    finally:
        reader.rest.close()
        reader.query.stop()


@pytest.mark.spark
def test_a_query_with_a_batch_under_way_does_not_rest(tmp_path: Path, spark: SparkSession) -> None:
    """It could not commit."""
    reader = Reader(spark, tmp_path)
    try:
        eventually(lambda: reader.query.status["message"] == WAITING)
        reader.release()
        eventually(lambda: reader.query.status["message"] not in (WAITING, "Waiting for next trigger"))
        for _ in range(1000):
            reader.rest.begin()
            if reader.rest.is_resting:
                break
            time.sleep(0.005)
        assert reader.has_committed(0)
    finally:
        reader.rest.close()
        reader.query.stop()


@pytest.mark.spark
def test_a_query_that_rests_is_woken_by_any_thread_and_stops_at_once(tmp_path: Path, spark: SparkSession) -> None:
    reader = Reader(spark, tmp_path)
    reader.come_to_rest()
    closing = threading.Thread(target=reader.rest.close)
    closing.start()
    closing.join(20)
    began = time.monotonic()
    reader.query.stop()
    assert time.monotonic() - began < 15  # Spark itself would give up after 30
    assert not reader.query.isActive


@pytest.mark.spark
def test_a_query_that_nobody_wakes_looks_now_and_then_and_can_be_stopped(tmp_path: Path, spark: SparkSession) -> None:
    """Whoever has put it to rest may be busy, or gone."""
    reader = Reader(spark, tmp_path)
    reader.come_to_rest()
    reader.release()
    eventually(lambda: reader.has_committed(0))
    began = time.monotonic()
    reader.query.stop()
    assert time.monotonic() - began < 15
    reader.rest.close()


class _Stalled:
    """What holds the lock, for a process that is stopped for a while between two of its calls."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("schedule"):
            time.sleep(2.5)
        return getattr(self._holder, name)


@pytest.mark.spark
def test_a_query_goes_on_though_who_let_it_rest_was_stopped_meanwhile(tmp_path: Path, spark: SparkSession) -> None:
    reader = Reader(spark, tmp_path)
    try:
        reader.rest._make_holder()
        reader.rest._holder = _Stalled(reader.rest._holder)
        reader.come_to_rest()
        time.sleep(2.5)
        reader.rest.end()
        reader.release()
        eventually(lambda: reader.has_committed(0))
    finally:
        reader.rest.close()
        reader.query.stop()
