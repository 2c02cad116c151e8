"""What holds of a generation whose Spark is played, and not of a mutant. See `properties.py`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from tests.mutants.properties import refused
from tests.spark.played import PlayedPipeline, Queries, played
from tests.storage.test_manifest import naming
from tidegate.engine.options import Bounds
from tidegate.engine.status import CheckpointStatus, Observer, status_in, status_of, with_course
from tidegate.engine.tables import goes_on_from_rows, with_staged_in
from tidegate.errors import DamagedCheckpoint, StageFailed
from tidegate.protocol.aligner import CutCause
from tidegate.protocol.backpressure import BacklogBound, Backpressure
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig, UnalignedMode
from tidegate.protocol.messages import Flag, SegmentFile
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import decode_committable
from tidegate.spark.filelog import METADATA
from tidegate.spark.gate import Gate
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import InspectedRoot, SeenSinks, references, retained_manifests
from tidegate.storage.manifest import TableAddress, decode_manifest, encode_manifest
from tidegate.testing.played import Plan, Step

_BOUND = 4
_ROUNDS = 500
_SECONDS = 3


@contextmanager
def bounded() -> Iterator[PlayedPipeline]:
    bounds = Bounds(BacklogBound(max_segments=_BOUND))
    with tempfile.TemporaryDirectory(prefix="tidegate-played-") as folder, played(Path(folder), bounds=bounds) as found:
        yield found


def comes_true(pipeline: PlayedPipeline, condition: Callable[[], bool], what: str) -> None:
    """Not by the clock alone, which runs on where a machine stands still, nor by rounds alone: threads beside may be
    late on a busy one."""
    deadline = time.monotonic() + _SECONDS
    rounds = 0
    while rounds < _ROUNDS or time.monotonic() < deadline:
        if condition():
            return
        pipeline.generation.poll()
        time.sleep(0.001)
        rounds += 1
    raise AssertionError(f"it never came true that {what}")


def run_ahead(pipeline: PlayedPipeline, batches: int) -> list[Path]:
    """The source commits batches that nobody has read yet."""
    return [pipeline.played["rows"].run_batch() for _ in range(batches)]


def a_barrier_is_nothing_to_consume() -> None:
    with plain() as pipeline:
        middle = pipeline.generation.stages["middle"]
        pipeline.one_batch_each()
        pipeline.generation.trigger()

        def waits() -> bool:
            return pipeline.generation.channels["rows"].at(middle.inputs.cursor("rows")) is not None

        comes_true(pipeline, waits, "a barrier waits in the channel")
        assert middle.has_consumed_all


def a_writer_goes_on_only_when_its_readers_are_down_to_half() -> None:
    backpressure = Backpressure(BacklogBound(max_bytes=100, max_segments=10))
    backpressure.on_backlog(11, 1)
    backpressure.on_backlog(10, 1)
    assert backpressure.is_held_back


def a_stage_that_is_held_back_gets_nothing_more_to_read() -> None:
    with bounded() as pipeline:
        middle = pipeline.generation.stages["middle"]
        run_ahead(pipeline, 2 * _BOUND)
        pipeline.generation.poll()
        for _ in range(_BOUND + 1):  # which the sink does not read
            pipeline.played["middle"].run_batch()
        pipeline.generation.poll()
        assert middle.is_held_back
        before = middle.inputs.gates["rows"].files.names_in(METADATA)
        run_ahead(pipeline, 3)
        pipeline.generation.poll()
        pipeline.generation.poll()
        assert middle.inputs.gates["rows"].files.names_in(METADATA) == before


def a_barrier_passes_a_sink_whose_table_is_late() -> None:
    with bounded() as pipeline:
        sink = pipeline.generation.stages["table"]
        pipeline.one_batch_each()
        pipeline.table.may_commit.clear()
        first = pipeline.generation.trigger()
        comes_true(pipeline, lambda: pipeline.generation.completed(first), "the first checkpoint is complete")
        for _ in range(_BOUND):
            pipeline.one_batch_each()
        pipeline.generation.poll()
        assert pipeline.generation.held_back_by("table") == "its table"
        pipeline.played["rows"].run_batch()
        pipeline.generation.poll()
        pipeline.played["middle"].run_batch()
        pipeline.generation.poll()
        second = pipeline.generation.trigger()
        pipeline.generation.poll()
        assert not sink.is_held_back, "only a checkpoint makes visible what it has staged"
        pipeline.played["table"].run_batch()
        comes_true(pipeline, lambda: pipeline.generation.completed(second), "the second checkpoint is complete")
        pipeline.table.may_commit.set()


def a_sink_whose_table_is_late_waits_behind_a_barrier() -> None:
    """The worst moment: its part of the checkpoint is not stored before the table has taken the epoch before."""
    with bounded() as pipeline:
        generation, table = pipeline.generation, pipeline.table
        pipeline.one_batch_each()
        table.may_commit.clear()
        first = generation.trigger()
        comes_true(pipeline, lambda: generation.completed(first), "the first checkpoint is complete")
        for _ in range(_BOUND):
            pipeline.one_batch_each()
        table.may_check.clear()
        second = generation.trigger()
        comes_true(
            pipeline, lambda: generation.stages["table"].checkpoints.has_cut(second), "the sink has passed the barrier"
        )
        generation.poll()
        assert generation.stages["table"].is_held_back
        table.may_check.set()
        table.may_commit.set()
        comes_true(pipeline, lambda: generation.is_settled, "the table shows all")


def pause_once(pipeline: PlayedPipeline) -> list[tuple[Files, Files]]:
    """The source is paused, in a batch that is in the sink's log and not committed, and goes on. Returns where."""
    generation, rows = pipeline.generation, pipeline.generation.stages["rows"]
    first, progress = pipeline.played["rows"], rows.progress
    started: list[tuple[Files, Files]] = []

    def start(checkpoint: Files, output: Files) -> Any:
        started.append((checkpoint, output))
        return query()

    def query() -> Any:
        return SimpleNamespace(isActive=True, stop=lambda: None, exception=lambda: None)

    progress.query = query()
    generation.may_pause("rows", start)
    run_ahead(pipeline, _BOUND + 1)
    first.begin()
    while first.query.step() is not Step.LOGGED:
        pass
    comes_true(pipeline, lambda: progress.query is None, "the source is paused")
    for _ in range(_BOUND + 1):
        pipeline.played["middle"].run_batch()
    comes_true(pipeline, lambda: progress.query is not None, "the source goes on")
    return started


def an_interrupted_batch_is_left_behind_by_a_pause() -> None:
    """The worst moment: its outcome is in the sink's log, and it is not committed."""
    with bounded() as pipeline:
        rows, first = pipeline.generation.stages["rows"], pipeline.played["rows"]
        started = pause_once(pipeline)
        number = first.batches
        assert len(started) == 1
        checkpoint, output = started[0]
        assert checkpoint.location() != str(first.checkpoint)
        assert set(checkpoint.names_in("offsets")) == {str(number - 2), str(number - 1)}
        assert checkpoint.exists(f"commits/{number - 1}")
        assert output.names_in(METADATA) == [str(number - 1)]
        assert rows.progress.checkpoint.location() == checkpoint.location()
        assert rows.output_folder.location() == output.location()


def what_is_written_late_into_an_abandoned_attempt_is_removed() -> None:
    """As Spark's upkeep of state does, a minute after its query was stopped."""
    with bounded() as pipeline:
        abandoned = pipeline.played["rows"].checkpoint
        pause_once(pipeline)
        sink = pipeline.played["table"]
        while sink.query.run_batch() is Step.COMMITTED:
            pipeline.generation.poll()
        for _ in range(3):
            pipeline.checkpoint()
        assert not abandoned.exists()
        (abandoned / "state").mkdir(parents=True)
        (abandoned / "state" / "late.zip").touch()
        for _ in range(3):
            pipeline.checkpoint()
        assert not abandoned.exists(), "what a stage that is paused often leaves would grow for ever"


def a_checkpoint_goes_on_after_what_its_table_was_seen_to_show() -> None:
    """Also one without rows, and one of a run that was restored."""
    with tempfile.TemporaryDirectory() as folder:
        with played(Path(folder) / "first") as pipeline:
            pipeline.checkpoint()
            assert pipeline.sealed().shown_through == -1
            pipeline.one_batch_each()
            pipeline.checkpoint()
            assert pipeline.sealed().shown_through == -1, "its rows were not shown yet when it was sealed"
            pipeline.checkpoint()
            assert pipeline.sealed().shown_through == 0
        with played(Path(folder) / "restored", after_batches=5) as pipeline:
            pipeline.one_batch_each()
            pipeline.checkpoint()
            assert pipeline.sealed().shown_through == 4


def a_run_comes_no_further_while_a_table_refuses_what_it_started_from() -> None:
    with plain(after_batches=5, may_commit=False) as pipeline:
        generation = pipeline.generation
        pipeline.one_batch_each()
        checkpoint_id = generation.trigger()
        comes_true(pipeline, lambda: generation.completed(checkpoint_id), "the checkpoint is complete")
        assert not generation.has_advanced
        pipeline.table.may_commit.set()
        comes_true(pipeline, lambda: generation.has_advanced, "it has come further, when the table shows all")


def a_query_that_was_stopped_has_failed_its_stage() -> None:
    with bounded() as pipeline:
        query: Any = SimpleNamespace(isActive=False, exception=lambda: None, stop=lambda: None)
        pipeline.generation.stages["middle"].progress.query = query
        refused(StageFailed, pipeline.generation.check_queries)


def an_input_that_has_delivered_nothing_can_be_nudged() -> None:
    with tempfile.TemporaryDirectory(prefix="tidegate-played-") as folder:
        try:
            Gate(Folder(folder).at("gate", durable=False), Folder(folder), 0).nudge(SegmentFile("nothing.parquet", 1))
        except ValueError as error:
            raise AssertionError("a stage that reads it can never be restored") from error


def what_the_next_run_will_skip_is_not_said_to_be_gone_on_from() -> None:
    with bounded() as pipeline:
        for _ in range(2):
            pipeline.one_batch_each()
            pipeline.checkpoint()
        inspected = InspectedRoot(pipeline.root.paths.root)
        newest = inspected.manifest(inspected.retained()[-1])
        pipeline.root.paths.absolute(newest.stages["rows"].files.added[-1].stored).unlink()
        assert inspected.outlook(lambda _: SeenSinks({})).checkpoint != checkpoint_name(newest.checkpoint_id)


def a_manifest_names_nothing_outside_of_its_root() -> None:
    data, sha256 = encode_manifest(naming("../../victim", "in flight"))
    refused(DamagedCheckpoint, lambda: decode_manifest(data, sha256, "ckpt-000007.json"))


def what_a_table_would_refuse_is_not_decided() -> None:
    with bounded() as pipeline:
        pipeline.one_batch_each()
        pipeline.table.refusal = "the table refuses a row"
        checkpoint_id = pipeline.generation.trigger()
        comes_true(pipeline, lambda: not pipeline.generation.is_under_way(checkpoint_id), "the checkpoint has ended")
        assert not pipeline.generation.completed(checkpoint_id)


@contextmanager
def plain(**arguments: Any) -> Iterator[PlayedPipeline]:
    with tempfile.TemporaryDirectory(prefix="tidegate-played-") as folder, played(Path(folder), **arguments) as found:
        yield found


def a_checkpoint_is_told_as_its_manifest_has_it() -> None:
    with plain() as pipeline:
        pipeline.one_batch_each()
        pipeline.checkpoint()
        generation = pipeline.generation
        manifest = next(retained_manifests(pipeline.root.store, pipeline.root.decisions.read()))
        told = status_of(generation, generation.coordinator.history[0])
        assert told == with_course(status_in(manifest), told)
        assert None not in (told.begun_ms, told.prepared_ms, told.decided_ms, told.shown_ms, told.waited_for)


def an_aborted_checkpoint_tells_how_far_each_stage_had_come() -> None:
    with plain() as pipeline:
        generation = pipeline.generation
        pipeline.played["rows"].run_batch()  # which nobody reads
        generation.trigger()
        (checkpoint,) = generation.coordinator.active

        def progress() -> list[str]:
            return [part.progress for part in status_of(generation, checkpoint).stages.values()]

        came = ["done", "catching_up", "waiting"]
        comes_true(pipeline, lambda: progress() == came, "the barrier is on its way to the second stage")
        generation.cancel()
        for _ in range(3):
            generation.poll()
        assert progress() == came


def what_was_decided_before_a_restart_is_complete_once_tables_show_it() -> None:
    with plain(after_batches=3, may_commit=False) as pipeline:
        generation, observer = pipeline.generation, Observer("flat")
        observer.status = msgspec.structs.replace(observer.status, generation=generation.generation - 1)
        observer._ended = (CheckpointStatus(checkpoint="ckpt-000003", state="committing", generation=1, epoch=3),)
        assert [each.state for each in observer.observe(generation).checkpoints] == ["committing"]
        pipeline.table.may_commit.set()
        comes_true(pipeline, lambda: generation.shown_base == 3, "tables show what it started from")
        assert [each.state for each in observer.observe(generation).checkpoints] == ["complete"]


def a_table_is_not_made_anew_where_rows_were_sealed_for_it() -> None:
    with bounded() as pipeline:
        pipeline.checkpoint()
        assert not goes_on_from_rows(pipeline.newest(), "table")
        pipeline.one_batch_each()
        pipeline.checkpoint()
        assert goes_on_from_rows(pipeline.newest(), "table")


def what_was_staged_moves_with_its_table() -> None:
    with bounded() as pipeline:
        pipeline.one_batch_each()
        pipeline.checkpoint()
        moved = with_staged_in({"table": TableAddress("delta", "/moved")}, pipeline.newest())
        sealed = moved.stages["table"].committable
        assert sealed is not None
        assert all(file.path.startswith("/moved/_tidegate/") for file in decode_committable(sealed).files)


def a_full_snapshot_vouches_for_nothing_that_is_damaged() -> None:
    """Its files are its own: damage to another checkpoint's is none to it. And it looks at what it copies."""
    with plain() as pipeline:
        pipeline.one_batch_each()
        pipeline.checkpoint()
        before = pipeline.newest()
        full = pipeline.generation.trigger(Flag.FULL_SNAPSHOT)
        comes_true(pipeline, lambda: pipeline.generation.is_settled, "the full snapshot is taken")
        assert pipeline.generation.completed(full)
        assert not references(pipeline.root.store, before) & references(pipeline.root.store, pipeline.newest())
        damaged = pipeline.newest().stages["rows"].files.added[0]
        for path in (pipeline.root.paths.absolute(damaged.stored), pipeline.played["rows"].checkpoint / damaged.name):
            path.write_bytes(b"damaged")
        again = pipeline.generation.trigger(Flag.FULL_SNAPSHOT)
        comes_true(pipeline, lambda: not pipeline.generation.is_under_way(again), "the next one has ended")
        assert not pipeline.generation.completed(again)


def the_pipelines_watermark_is_held_back_by_those_with_event_time() -> None:
    holds_back = Plan(has_state=True, holds_back=True)
    with plain(queries=Queries(dict.fromkeys(("middle", "table"), holds_back))) as pipeline:
        for watermark_ms in (None, 1):
            # A batch that reads a row moves the watermark by one, and the next one hands the row on.
            for name in ("rows", "middle", "middle", "table"):
                pipeline.played[name].run_batch()
                pipeline.generation.poll()
            pipeline.checkpoint()
            assert pipeline.newest().stages["middle"].watermark_ms == (watermark_ms or 0) + 1
            assert pipeline.newest().min_watermark_ms == watermark_ms
            assert Observer("flat").observe(pipeline.generation).min_watermark_ms == watermark_ms


@contextmanager
def backlogged(
    unaligned: UnalignedMode, max_inflight_bytes: int = 1 << 30, queries: Queries | None = None
) -> Iterator[tuple[PlayedPipeline, Path]]:
    """The stage in the middle has a segment to consume, and is cut unaligned as soon as it may be."""
    config = CheckpointConfig(
        interval_ms=3_600_000, alignment=AlignmentConfig(unaligned, timeout_ms=0, max_inflight_bytes=max_inflight_bytes)
    )
    with plain(config=config, queries=queries or Queries()) as pipeline:
        pipeline.one_batch_each()
        (path,) = run_ahead(pipeline, 1)
        pipeline.generation.poll()
        yield pipeline, path


def why_a_stage_was_cut_unaligned_is_told_by_its_manifest() -> None:
    modes: list[tuple[UnalignedMode, Flag, CutCause, str]] = [
        ("on_timeout", Flag.NONE, CutCause.TIMEOUT, "unaligned (timeout at middle)"),
        ("on_timeout", Flag.UNALIGNED, CutCause.FORCED, "unaligned (as asked for)"),
        ("always", Flag.NONE, CutCause.ALWAYS, "unaligned (no stage waits)"),
    ]
    for unaligned, flag, cause, said in modes:
        with backlogged(unaligned) as (pipeline, path):
            pipeline.generation.trigger(flag)
            comes_true(pipeline, lambda: pipeline.generation.is_settled, "the checkpoint is complete")
            manifest = pipeline.newest()
            assert manifest.stages["middle"].cause is cause
            assert manifest.in_flight_bytes == path.stat().st_size
            assert status_in(manifest).alignment == said
            told = status_of(pipeline.generation, pipeline.generation.coordinator.history[-1])
            assert told == with_course(status_in(manifest), told)


def that_a_stage_keeps_aligning_over_the_bound_is_told() -> None:
    with backlogged("on_timeout", max_inflight_bytes=0) as (pipeline, path):
        generation = pipeline.generation
        generation.trigger()
        (checkpoint,) = generation.coordinator.active
        told = partial(status_of, generation, checkpoint)
        comes_true(
            pipeline, lambda: bool(told().stages["middle"].over_bound), "it is told that the stage keeps aligning"
        )
        part = told().stages["middle"]
        assert (part.progress, part.cut_because) == ("catching_up", None)
        assert part.in_flight_bytes == path.stat().st_size
        assert part.alignment_ms is not None
        pipeline.played["middle"].run_batch()
        generation.poll()
        pipeline.played["table"].run_batch()
        comes_true(pipeline, lambda: generation.is_settled, "the checkpoint is complete")
        assert pipeline.newest().stages["middle"].over_bound
        assert status_in(pipeline.newest()).stages["middle"].over_bound
        assert pipeline.newest().aligned
