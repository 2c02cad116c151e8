"""Real processes, really killed: nothing lost, nothing twice, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.kills import KilledRuns, kill_often
from tidegate.spark.steps import Step

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_runs_that_are_killed_at_every_step_and_at_random_lose_and_double_nothing(tmp_path: Path) -> None:
    runs = KilledRuns(tmp_path)
    steps = [f"{step.value}:{1 + index % 2}" for index, step in enumerate(Step)]
    kills = kill_often(runs, steps, random_kills=3, seed=1)
    assert kills >= 15
    runs.check_tables()
    assert runs.check_every_epoch() >= 3
    runs.check_no_orphans()
