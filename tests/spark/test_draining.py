"""A run that drains before it ends: what its sources have read is in the tables, and nothing is on its way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.draining import ALL, FAILS, FILES, UNALIGNED, Drained
from tests.spark.harness import Crash, run_to_end
from tidegate.engine.requests import StopRun
from tidegate.engine.run import run_pipeline
from tidegate.engine.status import RunStatus
from tidegate.protocol.messages import Flag

pytestmark = [pytest.mark.spark, pytest.mark.slow]

OPTIONS: dict[str, Any] = {"checkpoint": UNALIGNED, "checkpoint_interval": "300ms"}


@pytest.mark.parametrize("chain", [pytest.param(True, marks=pytest.mark.soak), False])
def test_what_was_read_is_consumed_before_the_last_checkpoint(tmp_path: Path, spark: SparkSession, chain: bool) -> None:
    runs = Drained(tmp_path)
    seen = []
    view = runs.asking(StopRun(drain=True, full=True), lambda status: seen.append(status.stopping))
    run_pipeline(runs.pipeline, runs.root, spark, view=view, chain=chain, available_now=not chain, **OPTIONS)
    assert "draining" in seen
    assert runs.answer().outcome == "done"
    read = runs.check_drained(spark)
    assert max(read.values()) < FILES, "the sources have stopped"
    assert runs.last.flags == Flag.DRAIN | Flag.FULL_SNAPSHOT
    # Whoever goes on from there reads the rest.
    run_to_end(runs.faster, runs.root, spark, chain=chain)
    runs.check_drained(spark, ALL)


@pytest.mark.soak
def test_a_run_that_is_killed_or_fails_while_it_drains_has_lost_nothing(tmp_path: Path, spark: SparkSession) -> None:
    runs = Drained(tmp_path)

    def crash(status: RunStatus) -> None:
        if status.stopping == "draining":
            raise Crash

    with pytest.raises(Crash):
        run_pipeline(runs.pipeline, runs.root, spark, view=runs.asking(StopRun(drain=True), crash), **OPTIONS)

    def fail(status: RunStatus) -> None:
        """A query dies while it drains: the run starts again, and its sources do not."""
        if status.stopping == "draining" and status.generation == 2:
            (tmp_path / FAILS).touch()
        else:
            (tmp_path / FAILS).unlink(missing_ok=True)

    run_pipeline(
        runs.pipeline, runs.root, spark, view=runs.asking(StopRun(drain=True), fail), restart_pause="10ms", **OPTIONS
    )
    assert runs.last.generation == 3
    assert runs.answer().outcome == "done"
    runs.check_drained(spark)


@pytest.mark.soak
def test_a_signal_ends_a_drain_with_an_ordinary_last_checkpoint(tmp_path: Path, spark: SparkSession) -> None:
    runs = Drained(tmp_path)
    is_sent = False

    def interrupt(status: RunStatus) -> None:
        nonlocal is_sent
        if status.stopping == "draining" and not is_sent:
            is_sent = True
            runs.ask(StopRun(), "plain")
            os.kill(os.getpid(), signal.SIGTERM)

    run_pipeline(runs.pipeline, runs.root, spark, view=runs.asking(StopRun(drain=True), interrupt), **OPTIONS)
    answer = runs.answer()
    assert (answer.outcome, answer.why) == (
        "failed",
        "it ended after a last checkpoint, because it was told to stop, but has not drained",
    )
    assert runs.last.flags == Flag.DRAIN
    run_to_end(runs.faster, runs.root, spark)
    runs.check_drained(spark, ALL)
