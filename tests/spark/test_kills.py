"""Real processes, really killed: nothing lost, nothing twice, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.kills import STEPS, KilledRuns, at_steps, kill_often
from tidegate.engine.kill_points import Step

pytestmark = [pytest.mark.matrix, pytest.mark.spark, pytest.mark.slow]

# The step, and how often a run has passed it when its first batches are under way.
_WITH_ROWS_IN_FLIGHT = {
    Step.STAGE_CUT: 20,
    Step.MANIFEST_WRITTEN: 3,
    Step.SINK_COMMITTED: 2,
}


@pytest.mark.parametrize(
    ("every", "random_kills", "kills"),
    [
        pytest.param(1, 3, 10, marks=pytest.mark.soak, id="at all steps"),  # those of a root in a bucket are in CI
        pytest.param(2, 3, 7, id="at some steps"),
    ],
)
def test_runs_that_are_killed_at_many_steps_and_at_random_lose_and_double_nothing(
    tmp_path: Path, every: int, random_kills: int, kills: int
) -> None:
    runs = KilledRuns(tmp_path)
    assert kill_often(runs, at_steps(STEPS)[::every], random_kills=random_kills, seed=1) == kills
    runs.check_tables()
    assert runs.check_every_epoch() >= 3  # each that is killed at random has shown one
    runs.check_no_orphans()


@pytest.mark.soak
def test_runs_that_cut_unaligned_lose_and_double_nothing_either(tmp_path: Path) -> None:
    runs = KilledRuns(tmp_path, "--unaligned-after", "0s")
    steps = at_steps(_WITH_ROWS_IN_FLIGHT)
    assert kill_often(runs, steps, random_kills=0, seed=2) == 3
    runs.check_tables()
    assert runs.check_every_epoch() >= 2
    runs.check_no_orphans()
    assert any("unaligned" in said for said in runs.output), "nothing was in flight at any checkpoint"
