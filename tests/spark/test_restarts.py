"""How often a run starts again: until it comes no further."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.spark.played import played
from tidegate.engine import run
from tidegate.engine.options import Bounds, RunOptions
from tidegate.engine.requests import StopRun
from tidegate.engine.root import Root
from tidegate.errors import SinkFailed, StageFailed
from tidegate.protocol.config import CheckpointConfig


class Failing(run.Run):
    """Every generation fails at once, or after a checkpoint with something more consumed."""

    def __init__(self, folder: Path, advances: Iterator[bool], restarts: int, restart_pause: str = "0ms") -> None:
        options = RunOptions(restarts=restarts, restart_pause=restart_pause)
        self.pauses_s: list[float] = []
        anything: Any = SimpleNamespace(
            is_soon=False, wait=self.pauses_s.append, restarting=lambda _: None, check=lambda _: None
        )
        super().__init__(anything, [], Root(folder, "failing"), anything, options, None, anything, anything)
        self._advances = advances
        self.opened = 0

    def _open(self) -> Any:
        self.opened += 1
        return SimpleNamespace(
            generation=0, has_advanced=next(self._advances), has_stuck_queries=False, stop=lambda: None
        )

    def _drive(self, _generation: Any) -> StopRun:
        raise StageFailed("stage", "again")


@pytest.mark.parametrize(
    ("advances", "opened"),
    [([False] * 9, 3), ([True, False, False, False], 3), ([False, False, True, False, False, False], 5)],
)
def test_failures_are_counted_until_a_checkpoint_has_come_further(
    tmp_path: Path, advances: list[bool], opened: int
) -> None:
    failing = Failing(tmp_path / "root", iter(advances), restarts=2)
    with pytest.raises(StageFailed):
        failing.run()
    assert failing.opened == opened


def test_pauses_grow_up_to_a_minute_however_often_a_run_has_failed(tmp_path: Path) -> None:
    failing = Failing(tmp_path / "root", repeat(False), restarts=1_200, restart_pause="1s")
    with pytest.raises(StageFailed):
        failing.run()
    assert failing.pauses_s == [1, 2, 4, 8, 16, 32, *[60] * 1_194]


def test_an_idle_checkpoint_comes_no_further_and_one_with_rows_does(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        pipeline.checkpoint()
        assert not pipeline.generation.has_advanced
        pipeline.one_batch_each()
        assert not pipeline.generation.has_advanced
        pipeline.checkpoint()
        assert pipeline.generation.has_advanced


def test_a_commit_that_does_not_end_is_a_failure_of_its_sink_and_a_stop_does_not_wait_for_it(tmp_path: Path) -> None:
    config = CheckpointConfig(interval_ms=3_600_000)
    with played(tmp_path, config=config, bounds=Bounds(commit_ms=50)) as pipeline:
        pipeline.one_batch_each()
        pipeline.table.may_commit.clear()
        pipeline.generation.trigger()
        with pytest.raises(SinkFailed, match=r"Delta table .*table: the commit of epoch 1 has not ended in 0\.05 s"):
            pipeline.poll_until(lambda: False)
        pipeline.generation.stop()
        assert not pipeline.table.may_commit.is_set()
        pipeline.table.may_commit.set()


def test_a_stop_does_not_wait_for_a_check_that_does_not_end(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        pipeline.one_batch_each()
        pipeline.table.may_check.clear()
        checkpoint_id = pipeline.generation.trigger()
        pipeline.poll_until(pipeline.table.is_checking.is_set)
        pipeline.generation.stop()
        assert pipeline.table.is_checking.is_set()
        assert not pipeline.generation.completed(checkpoint_id), "its rows were not found to fit"
