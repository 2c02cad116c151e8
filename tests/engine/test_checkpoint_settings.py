"""The settings of checkpoints at work, on a played Spark: what a user sees in the status, the log and manifests."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from tests.cli.harness import live_run, said, speaking, tidegate, wait_until
from tests.spark.played import ON_DEMAND, played
from tidegate.engine.requests import TakeCheckpoint, ask_for_checkpoint
from tidegate.engine.status import CheckpointStatus, StageStatus
from tidegate.errors import CheckpointsFailed, RequestFailed
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import as_given


def ended(root: Path) -> tuple[CheckpointStatus, ...]:
    status = said(root)
    return () if status is None else status.checkpoints


def in_progress(root: Path) -> list[str]:
    status = said(root)
    return [] if status is None else [each.checkpoint for each in status.in_progress]


def stages(root: Path) -> dict[str, StageStatus]:
    status = said(root)
    return {} if status is None else status.stages


def test_after_a_checkpoint_has_ended_the_pipeline_is_left_alone_for_the_pause(tmp_path: Path) -> None:
    pause = timedelta(milliseconds=300)
    config = CheckpointConfig(interval_ms=1, min_pause_ms=300)
    with live_run(tmp_path, config=config) as run:
        wait_until(lambda: len(ended(run.root)) >= 3)
        found = ended(run.root)
    for one, next_one in pairwise(found):
        began, duration_ms = one.triggered_at, one.duration_ms
        assert began is not None
        assert duration_ms is not None
        assert next_one.triggered_at is not None
        over = datetime.fromisoformat(began) + timedelta(milliseconds=duration_ms)
        # Less what a clock that tells milliseconds leaves out.
        assert datetime.fromisoformat(next_one.triggered_at) - over > pause - timedelta(milliseconds=20)


def test_with_full_snapshots_every_checkpoint_stores_all_anew(tmp_path: Path) -> None:
    with live_run(tmp_path, config=CheckpointConfig(interval_ms=20, incremental=False)) as run:
        wait_until(lambda: len([each for each in ended(run.root) if each.state == "complete"]) >= 2)
        for each in ended(run.root):
            assert each.full
            assert each.new_bytes == each.total_bytes
            assert each.total_bytes


def test_two_checkpoints_may_be_in_progress_at_once_and_are_completed_in_order(tmp_path: Path) -> None:
    with live_run(tmp_path, config=msgspec.structs.replace(ON_DEMAND, max_concurrent=2)) as run:
        place, files = as_given(run.root), Folder(run.root)
        run.hold_up()
        with ThreadPoolExecutor(3) as askers:
            first = askers.submit(ask_for_checkpoint, place, 60)
            wait_until(lambda: in_progress(run.root) == ["ckpt-000001"])
            second = askers.submit(ask_for_checkpoint, place, 60, TakeCheckpoint(full=True))
            wait_until(lambda: in_progress(run.root) == ["ckpt-000001", "ckpt-000002"])
            third = askers.submit(ask_for_checkpoint, place, 60)
            wait_until(lambda: len(files.names_in(RootPaths.REQUESTS)) == 3)
            assert in_progress(run.root) == ["ckpt-000001", "ckpt-000002"], "a third one waits"
            run.let_go()
            taken = [each.result() for each in (first, second, third)]
        assert [each.checkpoint for each in taken] == ["ckpt-000001", "ckpt-000002", "ckpt-000003"]
        assert [each.full for each in taken] == [False, True, False]
        log = InspectedRoot(run.root).log()
        assert log.last_checkpoint_id == 3


def test_a_checkpoint_that_takes_too_long_is_aborted_and_the_next_one_is_another_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = msgspec.structs.replace(ON_DEMAND, timeout_ms=1_000, tolerable_failures=1_000)
    with live_run(tmp_path, config=config) as run:
        place = as_given(run.root)
        run.hold_up()
        with pytest.raises(RequestFailed, match=r"ckpt-000001 was aborted: timed out: no report from .*table; the run"):
            ask_for_checkpoint(place, 60)
        assert "ckpt-000001 aborted: timed out (no report from " in caplog.text
        wait_until(lambda: len(ended(run.root)) == 1)
        (aborted,) = ended(run.root)
        assert (aborted.state, aborted.attempt) == ("aborted", 1)
        assert aborted.stages["table"].progress == "waiting"
        run.let_go()
        taken = None
        while taken is None:  # a machine that is busy may need more than one
            try:
                taken = ask_for_checkpoint(place, 60)
            except RequestFailed:
                continue
        assert (taken.attempt or 0) >= 2
        inspected = InspectedRoot(run.root)
        assert inspected.manifest(inspected.retained()[-1]).attempt == taken.attempt


def test_when_more_checkpoints_fail_in_a_row_than_tolerated_the_run_fails_and_says_what_the_last_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tidegate")
    config = CheckpointConfig(interval_ms=1, timeout_ms=100, tolerable_failures=2)
    root = tmp_path / "root"
    with played(tmp_path, config=config) as pipeline:

        def drive() -> None:
            with speaking(root) as remote:
                pipeline.played["rows"].run_batch()  # nobody consumes it
                while True:
                    remote.update(pipeline.generation)
                    pipeline.generation.poll()
                    remote.serve(pipeline.generation)

        with pytest.raises(CheckpointsFailed) as failed:
            drive()
    why = str(failed.value)
    assert why.startswith("3 checkpoints failed in a row; the last: checkpoint timed out: no report from ")
    told = tidegate("status", "--root", root)
    assert told.returncode == 6
    assert "the last run failed at" in told.stdout
    assert why in told.stdout
    assert [each.split(":")[0] for each in caplog.messages] == [f"ckpt-00000{each} aborted" for each in (1, 2, 3)]
    status = said(root)
    assert status is not None
    assert {each.state for each in status.checkpoints} == {"aborted"}


def test_a_stage_that_aligns_for_too_long_captures_what_is_in_flight(tmp_path: Path) -> None:
    alignment = AlignmentConfig(unaligned="on_timeout", timeout_ms=100)
    with live_run(tmp_path, config=msgspec.structs.replace(ON_DEMAND, alignment=alignment)) as run:
        segment = run.hold_up()
        taken = ask_for_checkpoint(as_given(run.root), 60)
        assert taken.aligned is False
        assert (taken.alignment_ms or 0) >= 100
        assert taken.stages["middle"].in_flight_bytes == taken.in_flight_bytes
        assert taken.in_flight_bytes
        assert taken.stages["table"].in_flight_bytes == 0, "a sink never does"
        inspected = InspectedRoot(run.root)
        (record,) = inspected.retained()
        manifest = inspected.manifest(record)
        assert not record.aligned
        assert not manifest.aligned
        (in_flight,) = manifest.stages["middle"].in_flight["rows"]
        assert Path(in_flight.files[0].path).name == segment.name
        run.let_go()
        wait_until(lambda: (table := stages(run.root).get("table")) is not None and table.batch == 1)
        assert ask_for_checkpoint(as_given(run.root), 60).aligned, "which need not wait"
