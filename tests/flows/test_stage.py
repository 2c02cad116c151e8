"""What a stage does for its part of a checkpoint."""

from __future__ import annotations

from tests.flows.by_hand import PATIENCE, ByHand, Heard, Query, stage
from tests.mutants import flow_properties
from tidegate.errors import ConflictingRows, DamagedCheckpoint, StageFailed
from tidegate.flows.requests import CheckSealed, Sleep, Stored, StoreSnapshot
from tidegate.flows.stage import StageCheckpoints, StartsAt
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.protocol.messages import Barrier, Flag

FIRST, SECOND = Barrier(1, 1), Barrier(2, 2)


def test_the_barrier_is_forwarded_before_anything_is_stored() -> None:
    host, query = ByHand(), Query()
    source = stage(host, query)
    source.inject(FIRST)
    assert query.barriers == [FIRST]
    assert [asked.standing.output_sequence for asked in host.asked(StoreSnapshot)] == [1]


def test_snapshots_are_stored_one_after_the_other() -> None:
    flow_properties.snapshots_are_stored_one_after_the_other()


def test_a_snapshot_that_fails_is_tried_again_after_a_pause() -> None:
    host = ByHand()
    source = stage(host)
    heard = Heard(source)
    source.inject(FIRST)
    host.fail(StoreSnapshot)
    assert host.sleep() == PATIENCE.pause.first_ms
    host.answer(StoreSnapshot, Stored(("state",)))
    assert [report.files for report in heard.reports] == [("state",)]


def test_one_that_fails_too_often_is_declined_and_the_next_is_stored() -> None:
    host = ByHand()
    source = stage(host)
    heard = Heard(source)
    source.inject(FIRST)
    source.inject(SECOND)
    for _ in range(PATIENCE.snapshot_tries - 1):
        host.fail(StoreSnapshot)
        host.sleep()
    host.fail(StoreSnapshot)
    assert heard.declined == [(1, "the snapshot could not be stored: the disk is full")]
    assert not source.has_cut(1)
    host.answer(StoreSnapshot, Stored(("state",)))
    assert [report.checkpoint_id for report in heard.reports] == [2]


def test_what_trying_again_would_not_mend_is_declined_at_once() -> None:
    host = ByHand()
    source = stage(host)
    heard = Heard(source)
    source.inject(FIRST)
    host.fail(StoreSnapshot, DamagedCheckpoint("batch 3 is gone"))
    assert not host.asked(Sleep)
    assert heard.declined == [(1, "the snapshot could not be stored: batch 3 is gone")]


def test_a_failed_stage_is_told_as_such() -> None:
    host = ByHand()
    source = stage(host)
    heard = Heard(source)
    source.inject(FIRST)
    host.fail(StoreSnapshot, StageFailed("stage", "its folder is gone"))
    assert [type(error) for error in heard.failures] == [StageFailed]
    assert not heard.declined


def test_the_snapshot_of_an_aborted_checkpoint_is_stored_and_not_reported() -> None:
    """The next one may build on it."""
    host = ByHand()
    source = stage(host)
    heard = Heard(source)
    source.inject(FIRST)
    source.inject(SECOND)
    source.on_aborted(FIRST)
    assert [asked.cut.barrier.checkpoint_id for asked in host.asked(StoreSnapshot)] == [1]
    host.answer(StoreSnapshot, Stored(("state-1",)))
    host.answer(StoreSnapshot, Stored(("state-2", "state-1")))
    assert [report.checkpoint_id for report in heard.reports] == [2]


def test_what_a_table_refuses_is_declined() -> None:
    flow_properties.what_a_table_refuses_is_declined()


def test_rows_of_which_nothing_tells_the_newest_fail_the_stage() -> None:
    host = ByHand()
    sink = stage(host, Query(committable="rows"))
    heard = Heard(sink)
    sink.inject(FIRST)
    host.answer(StoreSnapshot, Stored(("state",)))
    host.fail(CheckSealed, ConflictingRows("two rows of one key"))
    assert [type(error) for error in heard.failures] == [ConflictingRows]
    assert not heard.reports


def test_after_a_drain_nothing_flows_unless_it_is_aborted() -> None:
    host, query = ByHand(), Query()
    reader = stage(host, query, "reader", "input")
    drain = Barrier(1, 1, int(Flag.DRAIN))
    reader.on_barrier("input", drain)
    flows = [reader.is_drained, reader.is_open("input")]
    reader.on_aborted(drain)
    assert [*flows, reader.is_drained] == [True, False, False]
    assert query.opened == ["input"]


def test_an_aligned_stage_is_cut_when_the_last_barrier_has_come_and_all_is_consumed() -> None:
    host, query = ByHand(), Query()
    reader = stage(host, query, "reader", "left", "right")
    reader.on_segment("left", 1, 10)
    reader.on_barrier("left", FIRST)
    assert not reader.is_open("left")
    reader.on_barrier("right", FIRST)
    assert not query.barriers
    reader.on_committed(0, {"left": 1})
    assert query.barriers == [FIRST]
    assert set(query.opened) == {"left", "right"}


def test_a_barrier_that_comes_late_to_what_was_declined_changes_nothing() -> None:
    host = ByHand()
    config = CheckpointConfig(alignment=AlignmentConfig(unaligned="always"))
    join = StageCheckpoints("join", ("left", "right"), host, Query(), config, PATIENCE, StartsAt(1), is_sink=False)
    heard = Heard(join)
    unaligned = Barrier(1, 1, flags=Flag.UNALIGNED)
    join.on_barrier("left", unaligned)
    assert join.has_cut(1)
    host.fail(StoreSnapshot, DamagedCheckpoint("batch 3 is gone"))
    join.on_barrier("right", unaligned)  # before whoever leads elsewhere has aborted it
    join.on_aborted(unaligned)
    assert [checkpoint_id for checkpoint_id, _ in heard.declined] == [1]
    assert not heard.reports
