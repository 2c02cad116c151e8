"""A run that closes its windows before it ends: its tables are those of the batch job over what was read by then."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.cli.harness import wait_until
from tests.spark.draining import ALL, FILES, UNALIGNED, Drained
from tests.spark.harness import Crash, run_to_end, stream
from tidegate.engine import run
from tidegate.engine.ending import Ending
from tidegate.engine.requests import StopRun
from tidegate.engine.run import run_pipeline
from tidegate.engine.status import RunStatus, StartingStep
from tidegate.protocol.messages import Flag

pytestmark = [pytest.mark.spark, pytest.mark.slow]

OPTIONS: dict[str, Any] = {"checkpoint": UNALIGNED, "checkpoint_interval": "300ms"}
CLOSE = StopRun(close_windows=True, full=True)


@pytest.mark.parametrize("chain", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_what_is_open_is_written_out_of_just_the_rows_that_were_read(
    tmp_path: Path, spark: SparkSession, chain: bool
) -> None:
    runs = Drained(tmp_path)
    seen: list[str | None] = []
    view = runs.asking(CLOSE, lambda status: seen.append(status.stopping))
    run_pipeline(runs.pipeline, runs.root, spark, view=view, chain=chain, **OPTIONS)
    assert [each for each in dict.fromkeys(seen) if each] == ["draining", "closing_windows", "last_checkpoint"]
    assert runs.answer().outcome == "done"
    last = runs.last
    assert last.flags == Flag.DRAIN | Flag.FULL_SNAPSHOT
    assert last.generation == 3, "one that drained, and one for each level"
    read = runs.read_by(last)
    assert max(read.values()) < FILES
    assert runs.tables() == runs.batch_job(spark, read)


class Killed(Ending):
    """Dies at a moment of a generation that closes the windows of some stage."""

    closes = ""
    at: Literal["begun", "written", "over"] | None = None

    def look(self) -> None:
        super().look()
        if self._is_due and (self.at == "begun" or (self.at == "written" and self.has_consumed_all)):
            raise Crash

    def is_over(self) -> bool:
        is_over = super().is_over()
        if is_over and self._is_due and self.at == "over":
            raise Crash
        return is_over

    @property
    def _is_due(self) -> bool:
        return self.closes in self._generation.closes


@pytest.mark.soak
def test_after_a_kill_while_windows_are_closed_the_rest_is_closed_and_nothing_twice(
    tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "Ending", Killed)
    runs = Drained(tmp_path)
    Killed.at, Killed.closes = "begun", "windows"
    with pytest.raises(Crash):
        run_pipeline(runs.pipeline, runs.root, spark, view=runs.asking(CLOSE), **OPTIONS)
    read = runs.read_by(runs.last)
    moments: tuple[tuple[Literal["written", "over"], str], ...] = (
        ("written", "windows"),
        ("over", "windows"),
        ("written", "sum_table"),
    )
    for Killed.at, Killed.closes in moments:
        with pytest.raises(Crash):
            run_held(runs, spark)
    Killed.at = None
    run_held(runs, spark)
    assert runs.answer().outcome == "done"
    assert runs.read_by(runs.last) == read
    closed = runs.batch_job(spark, read)
    assert runs.tables() == closed
    # Who goes on from there, of all things, is told; a stage that had nothing open misses nothing.
    run_to_end(runs.faster, runs.root, spark)
    assert "every row that comes from now on is late, and is dropped, at windows, " in caplog.text
    assert runs.tables() == {**closed, "slow_table": runs.batch_job(spark, ALL)["slow_table"]}


def run_held(runs: Drained, spark: SparkSession) -> None:
    """A run that is told to drain before its sources are started, and to close windows as soon as that can be told."""

    def ask_first(step: StartingStep) -> None:
        if step.step == "reading_checkpoint" and not runs.is_asked("first"):
            runs.ask(StopRun(drain=True), "first")
            wait_until(lambda: runs.has_answered("first"))

    def ask_then(_status: RunStatus) -> None:
        if not runs.is_asked():
            runs.ask(CLOSE)

    run_pipeline(runs.pipeline, runs.root, spark, view=ask_then, on_step=ask_first, checkpoint_interval="1h")


def test_windows_of_a_source_cannot_be_closed_and_the_run_goes_on(tmp_path: Path, spark: SparkSession) -> None:
    pipeline = tg.Pipeline("windowed")
    runs = Drained(tmp_path)

    @pipeline.source
    def windows(spark: SparkSession) -> DataFrame:
        rows = stream(spark, tmp_path / "in" / "orders").withWatermark("ts", "10 seconds")
        return rows.groupBy(F.window("ts", "10 seconds")).agg(F.sum("value").alias("value")).select("value")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "table"))
    def table(windows: DataFrame) -> DataFrame:
        return windows

    def view(_status: RunStatus) -> None:
        if not runs.is_asked():
            runs.ask(CLOSE)
        elif runs.has_answered("asked") and not runs.has_answered("plain"):
            runs.ask(StopRun(), "plain")

    run_pipeline(pipeline, runs.root, spark, view=view, checkpoint_interval="300ms")
    assert runs.answer().outcome == "refused"
    assert "source 'windows' has windows, or other state by event time, of its own" in (runs.answer().why or "")
    assert runs.answer("plain").outcome == "done"
