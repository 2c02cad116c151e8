"""What a run on Spark leaves in the history of its root, also one that was killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.spark.kills import KilledRuns
from tidegate.engine.events import CheckpointEnded, Ended, Started
from tidegate.engine.history import Past
from tidegate.engine.kill_points import Step

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.soak  # it takes long; the history of several drivers that are killed is in CI
def test_a_run_that_is_killed_leaves_records_of_all_its_checkpoints(tmp_path: Path) -> None:
    """Killed between the manifest of its third checkpoint and the decision, and not a second after the second one."""
    runs = KilledRuns(tmp_path)
    runs.feed()
    process = runs.start(kill_at=f"{Step.MANIFEST_WRITTEN.value}:3")
    assert runs.finish(process) == -signal.SIGKILL
    runs.feed()
    assert runs.finish(runs.start("--available-now")) == 0, runs.output[-1]
    told = Past(runs.store).everything()
    events = told[::-1]
    first, again = (each for each in events if isinstance(each, Started))
    assert (first.because, first.base, first.generation) == ("first", None, 1)
    assert (again.because, again.base) == ("killed", "ckpt-000002")
    assert again.why is not None
    assert f"process {process.pid} on" in again.why
    assert {"starting_spark", "calling_functions", "starting_queries"} <= {each.step for each in again.steps}
    assert sum(each.took_ms for each in again.steps) <= again.took_ms + len(again.steps)
    assert again.settings["available-now"] == "yes"
    checkpoints = {each.checkpoint.checkpoint: each.checkpoint for each in events if isinstance(each, CheckpointEnded)}
    assert len(checkpoints) == sum(isinstance(each, CheckpointEnded) for each in events)
    names = sorted(checkpoints)
    assert names == [f"ckpt-{number:06d}" for number in range(1, len(names) + 1)], "each of them, once"
    assert checkpoints["ckpt-000003"].state == "aborted"
    assert "killed" in (checkpoints["ckpt-000003"].why or "")
    assert {each.state for name, each in checkpoints.items() if name != "ckpt-000003"} == {"complete"}
    last = checkpoints[names[-1]]
    assert last.commits.keys() == {each.name for each in runs.lake.iterdir()}
    assert all(each.took_ms is not None for each in last.commits.values())
    assert last.shown_ms is not None
    assert last.waited_for is not None
    assert None not in (last.begun_ms, last.prepared_ms, last.decided_ms)
    assert (last.begun_ms or 0) <= (last.prepared_ms or 0) <= (last.decided_ms or 0) <= last.shown_ms
    ended = told[0]
    assert isinstance(ended, Ended)
    assert (ended.state, ended.why) == ("finished", "all its input is consumed")
