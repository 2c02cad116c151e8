"""How long batches take, by when Spark planned them and when their commits were seen."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.spark.played import played
from tidegate.engine.status import Observer
from tidegate.testing.played import spark


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_a_batch_lasts_from_its_plan_until_it_was_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = spark._BatchMetadata
    with played(tmp_path) as pipeline:
        planned_ms = now_ms()
        monkeypatch.setattr(spark, "_BatchMetadata", lambda watermark, _, conf: metadata(watermark, planned_ms, conf))
        pipeline.one_batch_each()
        seen = Observer("played").observe(pipeline.generation).stages
        lasted_ms = now_ms() - planned_ms
    assert {name: each.batches for name, each in seen.items()} == {"rows": 1, "middle": 1, "table": 1}
    assert all(0 <= each.batches_ms <= lasted_ms for each in seen.values())


@pytest.mark.parametrize("off_ms", [-3_600_000, 3_600_000])
def test_a_batch_that_was_planned_before_its_stage_or_after_now_is_not_measured(tmp_path: Path, off_ms: int) -> None:
    """By another process, or by a clock that has jumped."""
    with played(tmp_path) as pipeline:
        stage = pipeline.generation.stages["middle"]
        stage._measure(now_ms() + off_ms)
        assert (stage.progress.batches, stage.progress.batches_ms) == (0, 0)
        stage._measure(now_ms())
        assert stage.progress.batches == 1
