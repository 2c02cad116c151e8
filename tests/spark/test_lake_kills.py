"""Runs whose root and tables are in a bucket, really killed, on two machines by turns, behind a network that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.s3_server import S3Server
from tests.spark.bucket_runs import LakeRuns
from tests.spark.kills import at_steps, kill_often
from tidegate.engine.kill_points import Step

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.s3]

_STEPS = {
    Step.STAGE_CUT: 2,
    Step.MANIFEST_WRITTEN: 2,
    Step.SLOT_CLAIMED: 1,
    Step.SINK_COMMITTED: 3,
    Step.ALL_SINKS_COMMITTED: 1,
}


@pytest.mark.soak  # it takes long; kills with a root in a bucket, and on a cluster with tables in one, are in CI
def test_tables_in_a_bucket_lose_and_double_nothing_though_runs_are_killed(tmp_path: Path, s3_server: S3Server) -> None:
    with LakeRuns(tmp_path, s3_server, seed=7) as runs:
        assert kill_often(runs, at_steps(_STEPS), random_kills=3, seed=7) == 8
        runs.check_tables()
        assert runs.check_every_epoch() >= 3
        runs.check_no_orphans()
        plan = runs.proxy.plan
        assert plan is not None
        assert plan.happened.total() > 10, "the network has hardly failed"
