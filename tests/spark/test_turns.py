"""One root, run by one version of Spark after the other, forward and back, and killed in between.

It needs environments of several versions, which `./dev matrix` makes.
"""

from __future__ import annotations

import re
from itertools import cycle
from pathlib import Path

import pyspark
import pytest

from tests.spark.kills import ROOT, KilledRuns
from tidegate.engine.kill_points import Step

pytestmark = [pytest.mark.matrix, pytest.mark.spark, pytest.mark.slow]

_STEPS = {Step.MANIFEST_WRITTEN: 2, Step.SINK_COMMITTED: 2, Step.STAGE_CUT: 2, Step.SLOT_CLAIMED: 1}


def environments() -> dict[str, Path]:
    """Of each version of Spark that is installed here, a Python that has it; the oldest first."""
    found: dict[str, Path] = {}
    for made in sorted(ROOT.glob(".venv*/.dev-stamp")):
        for installed in made.parent.glob("lib/*/site-packages/pyspark-*.dist-info"):
            found[re.findall(r"pyspark-(\d+\.\d+)", installed.name)[0]] = made.parent / "bin" / "python"
    return dict(sorted(found.items()))


def test_a_root_that_versions_of_spark_run_by_turns_loses_and_doubles_nothing(tmp_path: Path) -> None:
    found = environments()
    if len(found) < 2 or not pyspark.__version__.startswith(f"{list(found)[-1]}."):
        pytest.skip("needs environments of two versions of Spark (./dev matrix makes them), and is run by the newest")
    runs = KilledRuns(tmp_path)
    turns = cycle(found.items())
    used = []
    for step, times in _STEPS.items():
        version, runs.python = next(turns)
        used.append(version)
        runs.feed()
        runs.kill_at_step(f"{step.value}:{times}")
    runs.feed()
    _, runs.python = next(turns)
    runs.run_to_the_end()
    runs.check_tables()
    assert runs.check_every_epoch() >= 2
    runs.check_no_orphans()
    assert set(used) == set(found)
