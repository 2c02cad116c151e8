"""What of a checkpoint is looked at before Spark reads it. tests/spark/test_inspecting.py has what that finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spark.played import PlayedPipeline, Queries, played
from tidegate.engine.inspecting import CheckpointInside
from tidegate.errors import DamagedCheckpoint, UnknownCheckpoint, UnknownState
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.scratch import scratch
from tidegate.testing.played.spark import Plan

STATEFUL = Queries({"middle": Plan(has_state=True)})


def checkpoint(pipeline: PlayedPipeline) -> CheckpointInside:
    pipeline.one_batch_each()
    pipeline.checkpoint()
    return CheckpointInside(InspectedRoot(pipeline.root.paths.root), "latest")


def restore(inside: CheckpointInside) -> list[str]:
    """The files that Spark would see."""
    session: Any = None  # it is not used before something is read
    with scratch() as files:
        inside.stored("middle", session, files)
        return files.list()


def test_a_checkpoint_that_the_run_removes_meanwhile_is_unknown_and_not_damaged(tmp_path: Path) -> None:
    with played(tmp_path, queries=STATEFUL) as pipeline:
        inside = checkpoint(pipeline)
        assert inside.has_state("middle")
        assert any(name.startswith("state/") for name in restore(inside))
        for _ in range(4):
            newest = checkpoint(pipeline)
        with pytest.raises(UnknownCheckpoint, match="retains no ckpt-000001; it retains ckpt-000003"):
            restore(inside)
        assert restore(newest)


def test_a_file_that_is_gone_is_named_and_only_where_it_is_needed(tmp_path: Path) -> None:
    with played(tmp_path, queries=STATEFUL) as pipeline:
        inside = checkpoint(pipeline)
        root = pipeline.root.paths.root
        lost = next(path for path in (root / "generations").rglob("snapshots/middle/*/state/**/*") if path.is_file())
        lost.unlink()
        with pytest.raises(DamagedCheckpoint, match=f"{lost.relative_to(root)} of stage 'middle' is gone; `tidegate"):
            restore(inside)
        with pytest.raises(UnknownState, match="stage 'table' keeps no state at ckpt-000001"):
            inside.check_has_state("table")
