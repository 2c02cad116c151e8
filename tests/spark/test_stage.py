"""What a stage makes of batches that Spark has committed. Spark is played."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pyspark.errors import StreamingQueryException

from tests.spark.played import Played, PlayedPipeline, Queries, played
from tidegate.engine import generation
from tidegate.engine.options import Bounds
from tidegate.engine.stage.running import RunningStage
from tidegate.errors import StageFailed
from tidegate.flows.requests import StoreSnapshot
from tidegate.protocol.aligner import Cut, CutCause
from tidegate.protocol.backpressure import BacklogBound
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.protocol.coordinator import Obstacle
from tidegate.protocol.messages import Barrier
from tidegate.sinks.contract import decode_committable
from tidegate.spark.output import batch_folder, written_files
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import examine, references
from tidegate.storage.manifest import SourceStream
from tidegate.testing.played import Plan, Step


def waiting(*, is_active: bool = True, message: str = "Waiting for data to arrive") -> Any:
    """What a stage sees of a query that waits for data, or has ended."""
    status = {"message": message}
    return SimpleNamespace(isActive=is_active, status=status, exception=lambda: None, stop=lambda: None)


def test_a_segment_that_one_of_two_sources_has_consumed_is_not_consumed(tmp_path: Path) -> None:
    """A join of an input with itself: the segment arrived after the first source had looked. There is no cut there:
    restored from it, one side of the join would lose the segment, or the other would see it twice."""

    def poll(pipeline: PlayedPipeline) -> None:
        for _ in range(5):
            pipeline.generation.poll()

    with played(tmp_path, queries=Queries(times_read=2)) as pipeline:
        stage = pipeline.generation.stages["middle"]
        joined = pipeline.played["middle"]
        while joined.query.step() is not Step.LOOKED:
            pass
        pipeline.played["rows"].run_batch()
        poll(pipeline)
        joined.run_batch()
        checkpoint_id = pipeline.generation.trigger()
        pipeline.poll_until(lambda: stage.part_of(checkpoint_id, 0).progress == "catching_up")
        poll(pipeline)
        assert stage.part_of(checkpoint_id, 0).progress == "catching_up"
        assert stage.progress.batch == -1
        assert stage.channel.sequence == 0
        joined.run_batch()
        poll(pipeline)
        assert stage.progress.batch == 1
        assert stage.channel.sequence == 2
        assert stage.checkpoints.has_cut(checkpoint_id)
        assert stage.inputs.lag == 0


def test_a_checkpoint_under_way_keeps_its_files_while_another_is_cleaned_up_after(tmp_path: Path) -> None:
    with played(tmp_path, config=CheckpointConfig(interval_ms=3_600_000, max_concurrent=2)) as pipeline:
        generation = pipeline.generation
        pipeline.one_batch_each()
        pipeline.checkpoint()
        pipeline.table.may_commit.clear()
        consumed = pipeline.one_batch_each()["rows"]
        slow = generation.trigger()
        pipeline.poll_until(lambda: generation.completed(slow))
        under_way: list[int] = []
        for _ in range(2):  # the source has done its part of both when the clean-up begins
            for _ in range(3):
                pipeline.played["rows"].run_batch()
            generation.poll()
            under_way.append(generation.trigger())
            pipeline.poll_until(lambda: "rows" not in generation.coordinator.missing(under_way[-1]))
        pipeline.table.may_commit.set()
        pipeline.poll_until(lambda: pipeline.table.batches == [0, 1] and not consumed.exists())
        for _ in range(6):
            pipeline.played["middle"].run_batch()
            generation.poll()
            pipeline.played["table"].run_batch()
            generation.poll()
        pipeline.poll_until(lambda: generation.completed(under_way[1]))
        log = pipeline.root.decisions.read()
        for checkpoint_id in under_way:
            examine(pipeline.root.store, log, checkpoint_id)


@pytest.mark.parametrize("polled", [0, 1])
def test_a_stage_that_spark_has_overrun_says_so(tmp_path: Path, polled: int) -> None:
    """The control thread did not run for a hundred batches, and Spark has deleted the entries that it would look at."""
    with played(tmp_path) as pipeline:
        for _ in range(polled):
            pipeline.one_batch_each()
        for _ in range(150):
            pipeline.played["rows"].run_batch()
        pipeline.generation.stages["rows"].progress.query = waiting(is_active=False)
        pipeline.generation.poll()
        with pytest.raises(StageFailed, match=f"'rows' failed: batch {polled} was committed and deleted"):
            pipeline.generation.check_queries()


def test_a_stage_whose_batch_has_lost_its_offsets_was_overrun_too(tmp_path: Path) -> None:
    """Spark deletes them before the entry that says that the batch is committed."""
    with played(tmp_path) as pipeline:
        for _ in range(100):
            pipeline.played["rows"].run_batch()
        (pipeline.played["rows"].checkpoint / "offsets" / "0").unlink()
        with pytest.raises(StageFailed, match="'rows' failed: batch 0 was committed and deleted"):
            pipeline.generation.poll()


def test_what_is_wrong_with_the_files_of_a_query_fails_its_stage(tmp_path: Path) -> None:
    """No checkpoint is damaged by it: a restart lays them anew."""
    with played(tmp_path / "log") as pipeline:
        pipeline.played["rows"].run_batch()
        log = pipeline.played["rows"].output / "_spark_metadata" / "0"
        log.unlink()
        with pytest.raises(StageFailed, match=r"'rows' failed: Spark's sink log in .* lacks batch 0"):
            pipeline.generation.poll()
    with played(tmp_path / "folder") as pipeline:
        pipeline.played["rows"].run_batch()
        log = pipeline.played["rows"].output / "_spark_metadata" / "0"
        log.unlink()
        log.symlink_to(log)
        with pytest.raises(
            StageFailed, match=r"'rows' failed: could not read /.*/output/_spark_metadata/0: Too many levels"
        ):
            pipeline.generation.poll()
    with played(tmp_path / "rows") as pipeline:
        written = pipeline.played["rows"].run_batch()
        written.unlink()
        written.write_bytes(b"torn")
        with pytest.raises(StageFailed, match=r"'rows' failed: .*part-00000-[^/]*.parquet is no whole Parquet file"):
            pipeline.generation.poll()


STOPPED = "failed: its query ended without an error and without being done"


@pytest.mark.parametrize("name", ["rows", "middle", "table"])
def test_a_query_that_ends_without_an_error_has_failed_its_stage(tmp_path: Path, name: str) -> None:
    """Somebody has stopped it. Checkpoints would go on, and its input would never be read."""
    with played(tmp_path) as pipeline:
        pipeline.one_batch_each()
        stage = pipeline.generation.stages[name]
        stage.progress.query = waiting(is_active=False)
        pipeline.generation.poll()
        with pytest.raises(StageFailed, match=f"'{name}' {STOPPED}"):
            pipeline.generation.check_queries()
        assert not stage.progress.has_ended


def test_a_source_may_end_when_all_that_is_available_is_consumed_but_not_within_a_batch(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        source, spark = pipeline.generation.stages["rows"].progress, pipeline.played["rows"]
        source.may_end = True
        source.query = waiting(is_active=False)
        spark.run_batch()
        pipeline.generation.check_queries()
        assert not source.has_ended  # its last batch is not taken up yet
        pipeline.generation.poll()
        begun = spark.checkpoint / "offsets" / "1"
        begun.touch()
        with pytest.raises(StageFailed, match=f"'rows' {STOPPED}"):
            pipeline.generation.check_queries()
        begun.unlink()
        pipeline.generation.check_queries()
        assert source.has_ended


def after_one_batch(pipeline: PlayedPipeline) -> tuple[RunningStage, Played]:
    """The stage in the middle, and its query, which has read all there is."""
    for name in ("rows", "middle"):
        pipeline.played[name].run_batch()
        pipeline.generation.poll()
    return pipeline.generation.stages["middle"], pipeline.played["middle"]


def test_a_query_that_has_committed_a_batch_since_is_not_done(tmp_path: Path) -> None:
    """Such as one without data, which a watermark that has moved makes Spark run."""
    with played(tmp_path, queries=Queries({"middle": Plan(has_state=True, holds_back=True)})) as pipeline:
        stage, spark = after_one_batch(pipeline)
        stage.progress.query = waiting()
        idle = [stage.progress.is_idle]
        spark.run_batch()
        idle.append(stage.progress.is_idle)
        pipeline.generation.poll()
        assert [*idle, stage.progress.is_idle] == [True, False, True]
        assert stage.channel.sequence == 1


def test_a_barrier_that_waits_in_a_channel_is_nothing_to_consume(tmp_path: Path) -> None:
    """Else a run with `available_now` goes on for as long as checkpoints follow closely."""
    with played(tmp_path) as pipeline:
        stage, _ = after_one_batch(pipeline)
        pipeline.generation.trigger()
        deadline = time.monotonic() + 60
        while (message := pipeline.generation.channels["rows"].at(stage.inputs.cursor("rows"))) is None:
            assert time.monotonic() < deadline
            pipeline.generation.poll()
        assert isinstance(message, Barrier)
        assert stage.has_consumed_all
        pipeline.played["rows"].run_batch()
        pipeline.generation.poll()
        assert not stage.has_consumed_all


def test_a_query_that_never_waits_is_done_when_its_batches_are_in_vain(tmp_path: Path) -> None:
    """Timers in processing time make Spark run one batch after the other."""
    with played(tmp_path, queries=Queries({"middle": Plan(has_timers=True)})) as pipeline:
        stage, spark = after_one_batch(pipeline)
        stage.progress.query = waiting(message="Processing new data")
        useful = stage.progress.last_useful_batch
        idle = [stage.progress.is_idle]
        for _ in range(3):
            spark.run_batch()
            pipeline.generation.poll()
            idle.append(stage.progress.is_idle)
        assert idle == [False, False, False, True]
        assert stage.progress.last_useful_batch == useful


def test_a_segment_that_was_deleted_while_it_was_read_fails_the_stage(tmp_path: Path) -> None:
    """Spark reads on without it, and without a word."""
    with played(tmp_path) as pipeline:
        written = pipeline.played["rows"].run_batch()
        pipeline.generation.poll()
        pipeline.played["middle"].run_batch()
        written.unlink()
        with pytest.raises(StageFailed, match=r"'middle' failed: .*part-00000-[^/]*.parquet is gone"):
            pipeline.generation.poll()


def test_a_backlog_that_is_too_large_to_be_captured_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alignment = AlignmentConfig(unaligned="always", max_inflight_bytes=1)
    with played(tmp_path, config=CheckpointConfig(interval_ms=3_600_000, alignment=alignment)) as pipeline:
        for _ in range(2):
            pipeline.played["rows"].run_batch()
        pipeline.generation.poll()
        checkpoint_id = pipeline.generation.trigger()
        pipeline.poll_until(lambda: "in flight" in caplog.text)
        for _ in range(5):
            pipeline.generation.poll()
        assert pipeline.generation.is_under_way(checkpoint_id)
    (told,) = [each.getMessage() for each in caplog.records if "in flight" in each.getMessage()]
    assert "stage middle" in told
    assert "ckpt-000001 waits until it is aligned" in told


def test_what_a_decision_names_is_on_the_disk_before_it_also_what_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: set[Path] = set()
    before: dict[str, frozenset[Path]] = {}
    real_fsync, real_link = os.fsync, os.link

    def fsync(handle: int) -> None:
        real_fsync(handle)
        forced.add(Path(f"/proc/self/fd/{handle}").readlink())

    def link(source: Path, target: Path) -> None:
        if Path(target).parent.name == "decisions":
            before[target.name] = frozenset(forced)
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    alignment = AlignmentConfig(unaligned="always")
    with played(tmp_path, config=CheckpointConfig(interval_ms=3_600_000, alignment=alignment)) as pipeline:
        pipeline.one_batch_each()
        flying = [pipeline.played["rows"].run_batch() for _ in range(2)]
        pipeline.generation.poll()
        pipeline.checkpoint()
        log = pipeline.root.decisions.read()
        assert log.newest is not None
        manifest = examine(pipeline.root.store, log, log.newest.checkpoint_id)
        named = {tmp_path / "root" / name for name in (*references(pipeline.root.store, manifest), log.newest.manifest)}
        sealed = manifest.stages["table"].committable
        assert sealed is not None
        named |= {Path(file.path) for file in decode_committable(sealed).files}
    assert set(flying) <= named
    on_disk = before[f"{log.newest.slot:012d}.json"]
    contents = {path for path in named if not path.match("manifests/*")}  # which got its name when it was there
    assert contents <= on_disk
    assert {path.parent for path in named} <= on_disk


def test_a_stage_whose_files_the_disk_does_not_take_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declined, the next checkpoint would name the same files, and forcing them again would seem to succeed."""
    with played(tmp_path) as pipeline:
        pipeline.one_batch_each()
        real = os.fsync

        def fsync(handle: int) -> None:
            if Path(f"/proc/self/fd/{handle}").readlink().match("snapshots/middle/ckpt-000001/offsets/0"):
                raise OSError(errno.EIO, "Input/output error")
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(StageFailed, match=r"'middle' failed: what is in .* forced to the disk: .*offsets/0"):
            pipeline.checkpoint()


def test_an_attempt_is_needed_until_the_snapshot_of_its_last_cut_is_stored(tmp_path: Path) -> None:
    """It may name files where they lie: nobody else knows of them before."""
    with played(tmp_path) as pipeline:
        pipeline.one_batch_each()
        stage = pipeline.generation.stages["rows"]
        _given_up, standing = stage.standing(), stage.standing()
        stage.move_to(2, stage.progress.checkpoint, stage.output_folder, waiting())
        cut = Cut(Barrier(1, 1), 0, {}, CutCause.ALIGNED, 0)
        storing = stage.storing_snapshot(StoreSnapshot("rows", cut, standing))
        assert stage.oldest_attempt == 1
        storing()
        assert stage.oldest_attempt == 2


def test_a_batch_without_rows_leaves_no_folder_behind(tmp_path: Path) -> None:
    assert written_files(Folder(tmp_path), 7, "update") == []
    (tmp_path / batch_folder(7) / "_temporary").mkdir(parents=True)
    assert written_files(Folder(tmp_path), 7, "update") == []
    assert not list(tmp_path.iterdir())


def test_a_table_that_would_refuse_the_rows_stops_the_checkpoint_and_not_the_next(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        pipeline.one_batch_each()
        pipeline.table.refusal = "the table refuses a row"
        refused = pipeline.generation.trigger()
        pipeline.poll_until(lambda: not pipeline.generation.is_under_way(refused))
        (ended,) = pipeline.generation.coordinator.history
        assert ended.abort_detail == "stage 'table': the table refuses a row"
        assert not pipeline.generation.completed(refused)
        assert pipeline.table.batches == []
        pipeline.table.refusal = ""
        pipeline.one_batch_each()
        pipeline.checkpoint()
        assert pipeline.table.batches == [0, 1]


def test_a_source_that_fails_while_it_is_being_paused_is_told_by_its_own_cause(tmp_path: Path) -> None:
    said = "[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted\nTraceback (most recent call last):\n"
    failure = StreamingQueryException(message=f'{said}  File "a.py", line 1\nValueError: a row cannot be read\n')
    with played(tmp_path, bounds=Bounds(BacklogBound(max_segments=1))) as pipeline:
        failing = waiting()
        failing.exception = lambda: failure
        pipeline.generation.stages["rows"].progress.query = failing
        pipeline.generation.may_pause("rows", lambda _checkpoint, _output: waiting())
        pipeline.played["rows"].run_batch()
        pipeline.played["rows"].run_batch()
        with pytest.raises(StageFailed, match=r"^stage 'rows' failed: ValueError: a row cannot be read$"):
            pipeline.poll_until(lambda: False)


def test_a_checkpoint_that_is_due_and_not_begun_says_what_holds_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_TELL_DUE_AFTER_MS", 0)
    with played(tmp_path, config=CheckpointConfig(interval_ms=1)) as pipeline:
        pipeline.table.may_check.clear()
        pipeline.poll_until(lambda: pipeline.generation.is_under_way(1))
        pipeline.poll_until(lambda: pipeline.generation.coordinator.missing(1) == {"table"})
        held = pipeline.generation.held_back()
        assert held is not None
        assert held.why == "ckpt-000001 is in progress: table is storing"
        pipeline.table.may_commit.clear()
        pipeline.table.may_check.set()
        # While one is being committed, one more may be completed behind it.
        pipeline.poll_until(lambda: pipeline.generation.completed(2))
        held = pipeline.generation.held_back()
        assert held is not None
        assert re.fullmatch(r"the commit of ckpt-000001 to table is under way for \d+ s", held.why)
        assert held.by is Obstacle.SINKS_LAG
        pipeline.table.may_commit.set()
        pipeline.poll_until(lambda: pipeline.generation.completed(3))


def test_a_topic_that_came_to_a_source_is_known_to_the_next_manifest(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        pipeline.checkpoint()
        shape = pipeline.generation.shape
        grown = SourceStream("kafka", {"subscribePattern": "visit-.*"}, {"visit-1": "an id", "visit-2": "another"})
        shape["rows"] = msgspec.structs.replace(shape["rows"], streams=(grown,))
        pipeline.checkpoint()
        assert pipeline.newest().shape["rows"].streams == (grown,)
