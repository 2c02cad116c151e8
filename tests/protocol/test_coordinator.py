from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest

from tests.protocol.unchanged import unchanged
from tidegate.errors import (
    CheckpointError,
    CheckpointIncomplete,
    CheckpointInProgress,
    InvariantViolation,
    NoCheckpointInProgress,
    ProtocolViolation,
    Superseded,
)
from tidegate.protocol.aligner import InFlight
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.protocol.coordinator import (
    Abort,
    AbortReason,
    Action,
    Begin,
    Checkpoint,
    Coordinator,
    FailPipeline,
    HeldBack,
    Obstacle,
    Phase,
    ReportAnswer,
    StageDecline,
    StageReport,
)
from tidegate.protocol.messages import Barrier, Flag

STAGES = ("orders", "paid", "revenue")
GENERATION = 4
MAY_CUT_UNALIGNED = CheckpointConfig(alignment=AlignmentConfig(unaligned="on_timeout"))


class Leader:
    """A coordinator with the clock that its leader keeps."""

    def __init__(
        self, config: CheckpointConfig, *, after_checkpoint: int = 0, after_epoch: int = 0, history: int = 16
    ) -> None:
        self.now_ms = 0
        self.coordinator = Coordinator(
            STAGES,
            config,
            generation=GENERATION,
            now_ms=0,
            after_checkpoint=after_checkpoint,
            after_epoch=after_epoch,
            history=history,
        )

    def wait(self, ms: int) -> list[Action]:
        self.now_ms += ms
        return self.coordinator.on_time(self.now_ms)

    def trigger(self, flags: Flag = Flag.NONE) -> Begin:
        return self.coordinator.trigger(self.now_ms, flags)

    def report(self, begin: Begin, *stages: str, **facts: int) -> list[ReportAnswer]:
        return [self.coordinator.on_report(report(begin, stage, **facts)) for stage in stages or STAGES]

    def decline(self, begin: Begin, stage: str = "paid", why: str = "disk full") -> list[Action]:
        return self.coordinator.on_decline(
            StageDecline(stage, begin.barrier.checkpoint_id, begin.attempt, GENERATION, why), self.now_ms
        )

    def abort(self, begin: Begin, reason: AbortReason = AbortReason.CANCELLED) -> list[Action]:
        return self.coordinator.abort(begin.barrier.checkpoint_id, reason, "because", self.now_ms)

    def complete(self, begin: Begin) -> Checkpoint:
        self.report(begin)
        checkpoint = self.coordinator.decide(begin.barrier.checkpoint_id)
        self.coordinator.on_slot_won(begin.barrier.checkpoint_id, self.now_ms)
        return checkpoint

    def commit(self, begin: Begin) -> None:
        self.coordinator.on_sinks_committed(begin.barrier.checkpoint_id)

    def active(self) -> list[int]:
        return [checkpoint.checkpoint_id for checkpoint in self.coordinator.active]


def report(begin: Begin, stage: str, **facts: int) -> StageReport:
    said = StageReport(stage, begin.barrier.checkpoint_id, begin.attempt, GENERATION, cut=3)
    return msgspec.structs.replace(said, **facts)


def begun(actions: list[Action]) -> list[int]:
    return [action.barrier.checkpoint_id for action in actions if isinstance(action, Begin)]


class TestTriggers:
    def test_a_checkpoint_begins_when_the_interval_has_passed(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100))
        assert leader.wait(99) == []
        assert leader.wait(1) == [Begin(Barrier(1, 1), 1)]
        assert leader.active() == [1]

    def test_the_interval_counts_from_the_last_trigger(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100))
        (first,) = leader.wait(130)
        assert isinstance(first, Begin)
        leader.complete(first)
        assert leader.wait(99) == []
        assert begun(leader.wait(1)) == [2]

    def test_a_late_tick_triggers_once_and_not_once_an_interval(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100, max_concurrent=3))
        assert begun(leader.wait(1000)) == [1]
        assert leader.wait(99) == []

    def test_the_user_need_not_wait_for_the_interval_and_starts_it_anew(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100))
        leader.wait(90)
        begin = leader.trigger()
        assert begin == Begin(Barrier(1, 1), 1)
        leader.complete(begin)
        assert leader.wait(99) == []
        assert begun(leader.wait(1)) == [2]

    def test_after_a_checkpoint_has_ended_there_is_a_pause(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100, min_pause_ms=60))
        (first,) = leader.wait(100)
        assert isinstance(first, Begin)
        leader.now_ms += 95
        leader.complete(first)
        assert leader.wait(59) == []
        assert begun(leader.wait(1)) == [2]

    def test_after_an_abort_there_is_the_same_pause(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100, min_pause_ms=60))
        (first,) = leader.wait(100)
        assert isinstance(first, Begin)
        leader.now_ms += 95
        leader.abort(first)
        assert leader.wait(59) == []
        assert begun(leader.wait(1)) == [2]

    def test_a_pause_that_is_over_before_the_interval_delays_nothing(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100, min_pause_ms=60))
        (first,) = leader.wait(100)
        assert isinstance(first, Begin)
        leader.complete(first)
        assert leader.wait(99) == []
        assert begun(leader.wait(1)) == [2]

    def test_a_user_who_does_not_wait_for_the_pause_does_not_cut_it_short_for_others(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=50, min_pause_ms=80, max_concurrent=2))
        leader.abort(leader.trigger())
        leader.trigger()
        assert leader.wait(79) == []
        assert begun(leader.wait(1)) == [3]

    def test_what_is_due_and_not_begun_says_by_what_it_is_held_back_and_since_when(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100, min_pause_ms=250))
        coordinator = leader.coordinator
        assert coordinator.held_back(99) is None, "not due"
        leader.wait(100)
        assert coordinator.held_back(199) is None, "not due"
        assert leader.wait(150) == []
        assert coordinator.held_back(250) == HeldBack(200, Obstacle.IN_PROGRESS, (1,))
        coordinator.abort(1, AbortReason.CANCELLED, "", 250)
        assert leader.wait(50) == []
        assert coordinator.held_back(300) == HeldBack(200, Obstacle.PAUSE, (1,), until_ms=500)
        assert leader.wait(200)
        assert coordinator.held_back(500) is None, "begun"

    def test_nothing_is_held_back_once_the_last_one_is_taken(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100))
        leader.coordinator.trigger(0, Flag.DRAIN)
        assert leader.coordinator.held_back(1000) is None

    @pytest.mark.parametrize("most", [1, 2, 3])
    def test_no_more_than_max_concurrent_are_under_way(self, most: int) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100, max_concurrent=most))
        begins = [leader.trigger() for _ in range(most)]
        with (
            unchanged(leader.coordinator),
            pytest.raises(CheckpointInProgress, match=f"max_concurrent is {most}"),
        ):
            leader.trigger()
        assert leader.wait(100) == []
        leader.complete(begins[0])
        assert begun(leader.wait(0)) == [most + 1]

    def test_without_incremental_checkpoints_every_snapshot_is_full(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100, incremental=False, max_concurrent=2))
        assert leader.wait(100) == [Begin(Barrier(1, 1, int(Flag.FULL_SNAPSHOT)), 1)]
        assert leader.trigger(Flag.DRAIN).barrier.flags == Flag.FULL_SNAPSHOT | Flag.DRAIN

    @pytest.mark.parametrize("flag", [Flag.NONE, Flag.FULL_SNAPSHOT, Flag.UNALIGNED, Flag.DRAIN])
    def test_the_users_flags_are_those_of_the_barrier(self, flag: Flag) -> None:
        assert Leader(MAY_CUT_UNALIGNED).trigger(flag).barrier.flags == flag

    def test_one_that_no_stage_would_cut_unaligned_is_not_triggered_as_such(self) -> None:
        leader = Leader(CheckpointConfig())
        with unchanged(leader.coordinator), pytest.raises(CheckpointError, match="every stage of this run aligns"):
            leader.trigger(Flag.UNALIGNED | Flag.FULL_SNAPSHOT)

    def test_a_checkpoint_cannot_be_triggered_as_cancelled(self) -> None:
        leader = Leader(CheckpointConfig())
        with unchanged(leader.coordinator), pytest.raises(ProtocolViolation, match="abort it instead"):
            leader.trigger(Flag.CANCEL)

    @pytest.mark.parametrize(
        ("flags", "why"), [(Flag.DRAIN | Flag.UNALIGNED, "nothing in flight"), (Flag(16), "unknown")]
    )
    def test_flags_that_no_barrier_can_have_are_refused(self, flags: Flag, why: str) -> None:
        leader = Leader(MAY_CUT_UNALIGNED)
        with unchanged(leader.coordinator), pytest.raises(ProtocolViolation, match=why):
            leader.trigger(flags)

    def test_the_first_checkpoint_of_a_pipeline_is_1_of_epoch_1(self) -> None:
        coordinator = Coordinator(STAGES, CheckpointConfig(), generation=1, now_ms=0)
        assert coordinator.next_checkpoint_id == 1
        assert coordinator.trigger(0).barrier == Barrier(1, 1)

    def test_ids_and_epochs_go_on_after_a_restart(self) -> None:
        leader = Leader(CheckpointConfig(max_concurrent=2), after_checkpoint=41, after_epoch=70)
        assert leader.coordinator.next_checkpoint_id == 42
        assert leader.trigger().barrier == Barrier(42, 71)
        assert leader.trigger().barrier == Barrier(43, 72)
        assert leader.coordinator.next_checkpoint_id == 44

    def test_ids_and_epochs_of_aborted_checkpoints_are_not_used_again(self) -> None:
        leader = Leader(CheckpointConfig())
        leader.abort(leader.trigger())
        assert leader.trigger().barrier == Barrier(2, 2)


class TestReports:
    def test_when_every_stage_has_reported_it_is_ready_to_be_decided(self) -> None:
        leader = Leader(CheckpointConfig())
        begin = leader.trigger()
        assert leader.report(begin, "orders", "paid") == [ReportAnswer.ACCEPTED] * 2
        assert leader.coordinator.missing(1) == {"revenue"}
        assert leader.coordinator.ready_to_decide() is None
        assert leader.report(begin, "revenue") == [ReportAnswer.ACCEPTED]
        ready = leader.coordinator.ready_to_decide()
        assert ready is not None
        assert (ready.checkpoint_id, ready.phase) == (1, Phase.PREPARED)
        assert leader.coordinator.missing(1) == frozenset()

    @pytest.mark.parametrize(
        ("wrong", "answer"),
        [
            ({"generation": GENERATION - 1}, ReportAnswer.WRONG_GENERATION),
            ({"generation": GENERATION + 1}, ReportAnswer.WRONG_GENERATION),
            ({"stage": "stranger"}, ReportAnswer.UNKNOWN_STAGE),
            ({"checkpoint_id": 2}, ReportAnswer.UNKNOWN_CHECKPOINT),
            ({"attempt": 2}, ReportAnswer.WRONG_ATTEMPT),
            ({"stage": "orders"}, ReportAnswer.DUPLICATE),
            ({"stage": "orders", "cut": 9}, ReportAnswer.DUPLICATE),
        ],
    )
    def test_duplicates_and_strangers_are_refused_and_change_nothing(
        self, wrong: dict[str, object], answer: ReportAnswer
    ) -> None:
        leader = Leader(CheckpointConfig())
        begin = leader.trigger()
        leader.report(begin, "orders")
        with unchanged(leader.coordinator):
            said = msgspec.structs.replace(report(begin, "paid"), **wrong)
            assert leader.coordinator.on_report(said) is answer
        assert leader.coordinator.missing(1) == {"paid", "revenue"}

    def test_a_duplicate_after_all_have_reported_changes_nothing(self) -> None:
        leader = Leader(CheckpointConfig())
        begin = leader.trigger()
        leader.report(begin)
        with unchanged(leader.coordinator):
            assert leader.report(begin) == [ReportAnswer.DUPLICATE] * 3
        leader.coordinator.decide(1)
        with unchanged(leader.coordinator):
            assert leader.report(begin) == [ReportAnswer.DUPLICATE] * 3

    @pytest.mark.parametrize("end", ["completed", "aborted"])
    def test_a_report_for_a_checkpoint_that_has_ended_is_refused(self, end: str) -> None:
        leader = Leader(CheckpointConfig())
        begin = leader.trigger()
        if end == "completed":
            leader.complete(begin)
        else:
            leader.abort(begin)
        with unchanged(leader.coordinator):
            assert leader.report(begin) == [ReportAnswer.UNKNOWN_CHECKPOINT] * 3

    def test_reports_of_two_checkpoints_do_not_mix(self) -> None:
        leader = Leader(CheckpointConfig(max_concurrent=2))
        first, second = leader.trigger(), leader.trigger()
        leader.report(first, "orders", "paid")
        leader.report(second, "revenue")
        assert leader.coordinator.missing(1) == {"revenue"}
        assert leader.coordinator.missing(2) == {"orders", "paid"}

    def test_who_is_missing_is_asked_of_a_checkpoint_under_way_alone(self) -> None:
        leader = Leader(CheckpointConfig())
        with pytest.raises(NoCheckpointInProgress, match="checkpoint 1 is not in progress"):
            leader.coordinator.missing(1)

    def test_a_report_survives_json_with_its_64_bit_numbers(self) -> None:
        said = StageReport(
            "paid",
            2**64 - 1,
            1,
            2,
            cut=3,
            positions={"orders": 2**60},
            files=("a", "b"),
            in_flight=(InFlight("orders", 1, 2, 3),),
        )
        assert msgspec.json.decode(msgspec.json.encode(said), type=StageReport) == said
        with pytest.raises(msgspec.ValidationError, match="unknown field"):
            msgspec.json.decode(msgspec.json.encode(said)[:-1] + b',"note":1}', type=StageReport)


class TestDeciding:
    def test_it_takes_the_manifest_and_the_slot_to_complete_a_checkpoint(self) -> None:
        leader = Leader(CheckpointConfig())
        begin = leader.trigger()
        leader.report(begin)
        checkpoint = leader.coordinator.decide(1)
        assert checkpoint.phase is Phase.DECIDING
        assert leader.active() == [1]
        leader.now_ms += 70
        leader.coordinator.on_slot_won(1, leader.now_ms)
        assert leader.active() == []
        assert [(each.phase, each.duration_ms) for each in leader.coordinator.history] == [(Phase.COMPLETED, 70)]
        leader.commit(begin)
        assert leader.coordinator.history[0].phase is Phase.COMMITTED

    def test_one_that_lacks_stages_is_not_decided(self) -> None:
        leader = Leader(CheckpointConfig())
        leader.report(leader.trigger(), "paid")
        with unchanged(leader.coordinator), pytest.raises(CheckpointIncomplete) as caught:
            leader.coordinator.decide(1)
        assert caught.value.missing == {"orders", "revenue"}

    def test_one_that_is_not_in_progress_is_not_decided(self) -> None:
        leader = Leader(CheckpointConfig())
        with unchanged(leader.coordinator), pytest.raises(NoCheckpointInProgress):
            leader.coordinator.decide(1)
        with unchanged(leader.coordinator), pytest.raises(NoCheckpointInProgress):
            leader.coordinator.on_slot_won(1, 0)

    def test_a_slot_is_won_only_by_one_that_claimed_it(self) -> None:
        leader = Leader(CheckpointConfig())
        leader.report(leader.trigger())
        with unchanged(leader.coordinator), pytest.raises(InvariantViolation):
            leader.coordinator.on_slot_won(1, 0)
        leader.coordinator.decide(1)
        with unchanged(leader.coordinator), pytest.raises(InvariantViolation):
            leader.coordinator.decide(1)

    def test_checkpoints_are_decided_in_the_order_of_their_ids(self) -> None:
        leader = Leader(CheckpointConfig(max_concurrent=2))
        first, second = leader.trigger(), leader.trigger()
        leader.report(second)
        assert leader.coordinator.ready_to_decide() is None
        with unchanged(leader.coordinator), pytest.raises(CheckpointError, match="1 is decided before 2"):
            leader.coordinator.decide(2)
        leader.report(first)
        ready = leader.coordinator.ready_to_decide()
        assert ready is not None
        assert ready.checkpoint_id == 1
        leader.coordinator.decide(1)
        assert leader.coordinator.ready_to_decide() is None
        with unchanged(leader.coordinator), pytest.raises(CheckpointError, match="1 is decided before 2"):
            leader.coordinator.decide(2)
        leader.coordinator.on_slot_won(1, 0)
        ready = leader.coordinator.ready_to_decide()
        assert ready is not None
        assert ready.checkpoint_id == 2

    def test_an_abort_of_the_older_one_lets_the_younger_be_decided(self) -> None:
        leader = Leader(CheckpointConfig(max_concurrent=2))
        first, second = leader.trigger(), leader.trigger()
        leader.report(second)
        leader.abort(first)
        assert leader.coordinator.decide(2).checkpoint_id == 2

    def test_sinks_commit_what_is_complete_and_once(self) -> None:
        leader = Leader(CheckpointConfig())
        begin = leader.trigger()
        with unchanged(leader.coordinator), pytest.raises(NoCheckpointInProgress, match="does not wait"):
            leader.commit(begin)
        leader.complete(begin)
        leader.commit(begin)
        with unchanged(leader.coordinator), pytest.raises(NoCheckpointInProgress, match="does not wait"):
            leader.commit(begin)


class TestAborts:
    def test_a_decline_aborts_at_once_and_says_who_and_why(self) -> None:
        leader = Leader(CheckpointConfig())
        begin = leader.trigger()
        leader.report(begin, "orders")
        assert leader.decline(begin) == [Abort(Barrier(1, 1), AbortReason.STAGE_DECLINED, "stage 'paid': disk full")]
        assert leader.active() == []
        (ended,) = leader.coordinator.history
        assert (ended.phase, ended.abort_reason) == (Phase.ABORTED, AbortReason.STAGE_DECLINED)
        assert ended.abort_detail == "stage 'paid': disk full"

    @pytest.mark.parametrize(
        "wrong",
        [
            {"generation": GENERATION - 1},
            {"stage": "stranger"},
            {"checkpoint_id": 2},
            {"attempt": 2},
            {"stage": "orders"},
        ],
    )
    def test_a_decline_that_is_about_something_else_changes_nothing(self, wrong: dict[str, object]) -> None:
        leader = Leader(CheckpointConfig())
        begin = leader.trigger()
        leader.report(begin, "orders")
        said = msgspec.structs.replace(StageDecline("paid", 1, begin.attempt, GENERATION, "why"), **wrong)
        with unchanged(leader.coordinator):
            assert leader.coordinator.on_decline(said, 0) == []

    def test_one_that_is_prepared_can_still_be_aborted(self) -> None:
        leader = Leader(CheckpointConfig())
        begin = leader.trigger()
        leader.report(begin)
        assert leader.abort(begin, AbortReason.QUORUM_FAILED) == [
            Abort(Barrier(1, 1), AbortReason.QUORUM_FAILED, "because")
        ]

    def test_one_that_is_being_decided_cannot_be_aborted(self) -> None:
        leader = Leader(CheckpointConfig(timeout_ms=100))
        begin = leader.trigger()
        leader.report(begin)
        leader.coordinator.decide(1)
        with (
            unchanged(leader.coordinator),
            pytest.raises(CheckpointError, match="cannot be aborted any more"),
        ):
            leader.abort(begin)
        with unchanged(leader.coordinator):
            assert leader.decline(begin) == []
            assert leader.wait(10**6) == []

    def test_one_that_is_not_in_progress_cannot_be_aborted(self) -> None:
        leader = Leader(CheckpointConfig())
        begin = leader.trigger()
        leader.complete(begin)
        with unchanged(leader.coordinator), pytest.raises(NoCheckpointInProgress):
            leader.abort(begin)

    def test_a_timeout_is_found_by_time_alone_and_names_who_is_late(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=10**6, timeout_ms=100))
        begin = leader.trigger()
        leader.report(begin, "paid")
        assert leader.wait(99) == []
        assert leader.wait(1) == [Abort(Barrier(1, 1), AbortReason.TIMED_OUT, "no report from orders, revenue")]
        assert leader.active() == []

    def test_a_prepared_one_times_out_too(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=10**6, timeout_ms=100))
        leader.report(leader.trigger())
        (abort,) = leader.wait(100)
        assert isinstance(abort, Abort)
        assert abort.detail == "all stages reported, but not all instances acknowledged"

    @pytest.mark.parametrize(("count", "more"), [(5, ""), (6, " and 1 more"), (8, " and 3 more")])
    def test_a_timeout_names_no_more_than_five_stages(self, count: int, more: str) -> None:
        names = [f"stage{number}" for number in range(count)]
        coordinator = Coordinator(names, CheckpointConfig(timeout_ms=100), generation=1, now_ms=0)
        coordinator.trigger(0)
        (abort,) = coordinator.on_time(100)
        assert isinstance(abort, Abort)
        assert abort.detail == f"no report from stage0, stage1, stage2, stage3, stage4{more}"

    def test_each_checkpoint_has_its_own_deadline(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=10**6, timeout_ms=100, max_concurrent=3))
        leader.trigger()
        leader.wait(30)
        leader.trigger()
        leader.wait(30)
        leader.trigger()
        leader.wait(40)
        assert leader.active() == [2, 3]
        leader.wait(60)
        assert leader.active() == []

    def test_the_attempt_counts_the_aborts_since_the_last_success(self) -> None:
        leader = Leader(CheckpointConfig(tolerable_failures=9))
        attempts = []
        for _ in range(3):
            begin = leader.trigger()
            attempts.append(begin.attempt)
            leader.abort(begin)
        last = leader.trigger()
        leader.complete(last)
        assert [*attempts, last.attempt, leader.trigger().attempt] == [1, 2, 3, 4, 1]

    def test_a_report_of_an_aborted_attempt_does_not_count_for_the_next(self) -> None:
        leader = Leader(CheckpointConfig())
        leader.abort(leader.trigger())
        begin = leader.trigger()
        said = msgspec.structs.replace(report(begin, "paid"), attempt=1)
        with unchanged(leader.coordinator):
            assert leader.coordinator.on_report(said) is ReportAnswer.WRONG_ATTEMPT


class TestTolerableFailures:
    def failing(self, leader: Leader) -> list[Action]:
        return leader.decline(leader.trigger())

    @pytest.mark.parametrize("tolerable", [0, 1, 3])
    def test_one_failure_more_in_a_row_than_tolerable_fails_the_pipeline(self, tolerable: int) -> None:
        leader = Leader(CheckpointConfig(tolerable_failures=tolerable))
        for _ in range(tolerable):
            assert len(self.failing(leader)) == 1
        abort, failure = self.failing(leader)
        assert isinstance(abort, Abort)
        assert failure == FailPipeline(tolerable + 1, "checkpoint a stage declined: stage 'paid': disk full")

    def test_a_success_sets_the_count_back(self) -> None:
        leader = Leader(CheckpointConfig(tolerable_failures=1))
        for _ in range(5):
            assert len(self.failing(leader)) == 1
            begin = leader.trigger()
            leader.complete(begin)
            leader.commit(begin)
        assert len(self.failing(leader)) == 1
        assert len(self.failing(leader)) == 2

    @pytest.mark.parametrize(
        ("reason", "counts"),
        [
            (AbortReason.TIMED_OUT, True),
            (AbortReason.STAGE_DECLINED, True),
            (AbortReason.QUORUM_FAILED, True),
            (AbortReason.CANCELLED, False),
            (AbortReason.SUPERSEDED, False),
        ],
    )
    def test_what_the_user_cancelled_is_no_failure(self, reason: AbortReason, counts: bool) -> None:
        leader = Leader(CheckpointConfig(tolerable_failures=0))
        actions = leader.abort(leader.trigger(), reason)
        assert any(isinstance(action, FailPipeline) for action in actions) is counts
        assert reason.is_failure is counts

    def test_a_cancelled_one_among_failures_does_not_set_the_count_back(self) -> None:
        leader = Leader(CheckpointConfig(tolerable_failures=1))
        self.failing(leader)
        leader.abort(leader.trigger(), AbortReason.CANCELLED)
        assert len(self.failing(leader)) == 2

    def test_timeouts_count(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=10**6, timeout_ms=10, tolerable_failures=0))
        leader.trigger()
        actions = leader.wait(10)
        assert actions[1:] == [FailPipeline(1, "checkpoint timed out: no report from orders, paid, revenue")]

    def test_when_the_pipeline_fails_nothing_is_begun(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=50, timeout_ms=50, tolerable_failures=0))
        leader.trigger()
        assert [type(action) for action in leader.wait(50)] == [Abort, FailPipeline]


class TestDrain:
    def test_after_a_drain_was_triggered_nothing_else_is(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100, max_concurrent=3))
        begin = leader.trigger(Flag.DRAIN)
        assert begin.barrier.is_drain
        assert leader.wait(10_000) == []
        with unchanged(leader.coordinator), pytest.raises(CheckpointError, match="draining"):
            leader.trigger()
        leader.complete(begin)
        leader.commit(begin)
        assert leader.wait(10_000) == []
        with unchanged(leader.coordinator), pytest.raises(CheckpointError, match="draining"):
            leader.trigger(Flag.DRAIN)

    def test_a_drain_that_was_aborted_lets_others_be_triggered_again(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100))
        leader.decline(leader.trigger(Flag.DRAIN))
        assert begun(leader.wait(100)) == [2]

    def test_an_abort_of_another_checkpoint_does_not_end_the_drain(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100, max_concurrent=2))
        other = leader.trigger()
        leader.trigger(Flag.DRAIN)
        leader.abort(other)
        assert leader.wait(10_000) == []
        assert leader.active() == [2]

    def test_a_drain_waits_its_turn_like_any_other(self) -> None:
        leader = Leader(CheckpointConfig())
        leader.trigger()
        with unchanged(leader.coordinator), pytest.raises(CheckpointInProgress):
            leader.trigger(Flag.DRAIN)


class TestLaggingSinks:
    def test_they_hold_new_checkpoints_back(self) -> None:
        leader = Leader(CheckpointConfig(interval_ms=100, max_concurrent=1))
        first = leader.trigger()
        leader.complete(first)
        second = leader.trigger()
        leader.complete(second)
        assert leader.wait(100) == []
        assert leader.coordinator.held_back(leader.now_ms) == HeldBack(100, Obstacle.SINKS_LAG, (1, 2))
        with (
            unchanged(leader.coordinator),
            pytest.raises(CheckpointInProgress, match=r"checkpoint 1, 2 is in"),
        ):
            leader.trigger()
        leader.commit(first)
        assert begun(leader.wait(0)) == [3]

    @pytest.mark.parametrize("most", [1, 2, 3])
    def test_no_more_than_one_above_max_concurrent_wait_for_them(self, most: int) -> None:
        leader = Leader(CheckpointConfig(max_concurrent=most))
        for _ in range(4):
            begins = []
            with suppress(CheckpointInProgress):
                while True:
                    begins.append(leader.trigger())
            for begin in begins:
                leader.complete(begin)
        assert [each.phase for each in leader.coordinator.history] == [Phase.COMPLETED] * (most + 1)

    def test_an_abort_is_not_something_that_sinks_wait_for(self) -> None:
        leader = Leader(CheckpointConfig(tolerable_failures=99))
        for _ in range(5):
            leader.abort(leader.trigger())
        assert leader.trigger().barrier.checkpoint_id == 6


class TestHistory:
    def test_it_has_positions_sizes_and_durations(self) -> None:
        leader = Leader(CheckpointConfig())
        leader.now_ms = 1_000
        begin = leader.trigger()
        sizes = {"orders": (1, 10), "paid": (2, 20), "revenue": (4, 40)}
        for stage, (new_bytes, total_bytes) in sizes.items():
            said = report(begin, stage, new_bytes=new_bytes, total_bytes=total_bytes)
            said = msgspec.structs.replace(said, positions={"in": 7}, source_position=f"{stage}@9")
            leader.coordinator.on_report(said)
        leader.coordinator.decide(1)
        leader.coordinator.on_slot_won(1, 1_250)
        (checkpoint,) = leader.coordinator.history
        assert (checkpoint.triggered_ms, checkpoint.ended_ms, checkpoint.duration_ms) == (1_000, 1_250, 250)
        assert (checkpoint.new_bytes, checkpoint.total_bytes) == (7, 70)
        assert checkpoint.reports.keys() == set(STAGES)
        assert checkpoint.reports["orders"].source_position == "orders@9"
        assert checkpoint.reports["paid"].positions == {"in": 7}
        assert (checkpoint.generation, checkpoint.attempt) == (GENERATION, 1)

    def test_while_it_is_under_way_a_checkpoint_has_no_duration(self) -> None:
        leader = Leader(CheckpointConfig(timeout_ms=50))
        leader.now_ms = 7
        leader.trigger()
        (checkpoint,) = leader.coordinator.active
        assert checkpoint.duration_ms is None
        assert (checkpoint.triggered_ms, checkpoint.deadline_ms) == (7, 57)

    def test_a_checkpoint_is_aligned_if_nothing_was_in_flight_anywhere(self) -> None:
        leader = Leader(CheckpointConfig(max_concurrent=2))
        aligned, unaligned = leader.trigger(), leader.trigger()
        leader.report(aligned)
        leader.report(unaligned, "orders", "revenue")
        flying = msgspec.structs.replace(report(unaligned, "paid"), in_flight=(InFlight("orders", 1, 2, 10),))
        leader.coordinator.on_report(flying)
        assert [checkpoint.is_aligned for checkpoint in leader.coordinator.active] == [True, False]

    def test_it_holds_the_last_ones_in_the_order_in_which_they_ended(self) -> None:
        leader = Leader(CheckpointConfig(max_concurrent=2, tolerable_failures=99), history=3)
        for _ in range(3):
            leader.abort(leader.trigger())
        fourth, fifth = leader.trigger(), leader.trigger()
        leader.abort(fifth)
        leader.complete(fourth)
        assert [checkpoint.checkpoint_id for checkpoint in leader.coordinator.history] == [3, 5, 4]


class TestSuperseded:
    def test_whatever_was_under_way_is_void(self) -> None:
        leader = Leader(CheckpointConfig(max_concurrent=3))
        first, second, _ = leader.trigger(), leader.trigger(), leader.trigger()
        leader.report(first)
        leader.report(second)
        leader.coordinator.decide(1)
        leader.coordinator.on_superseded(9, 77, lost=1)
        assert leader.active() == []
        assert [
            (each.checkpoint_id, each.phase, each.abort_reason, each.ended_ms) for each in leader.coordinator.history
        ] == [(number, Phase.ABORTED, AbortReason.SUPERSEDED, 77) for number in (1, 2, 3)]

    def test_how_one_that_was_being_decided_ended_is_not_made_up(self) -> None:
        leader = Leader(CheckpointConfig(max_concurrent=2))
        first, _ = leader.trigger(), leader.trigger()
        leader.report(first)
        leader.coordinator.decide(1)
        # Its slot may have been won, and the newer generation opened from it, before anyone here has heard.
        leader.coordinator.on_superseded(9, 77)
        assert leader.active() == []
        assert [(each.phase, each.abort_reason) for each in leader.coordinator.history] == [
            (Phase.DECIDING, None),
            (Phase.ABORTED, AbortReason.SUPERSEDED),
        ]

    def test_what_was_completed_stays_completed(self) -> None:
        leader = Leader(CheckpointConfig())
        leader.complete(leader.trigger())
        leader.coordinator.on_superseded(9, 77)
        assert [each.phase for each in leader.coordinator.history] == [Phase.COMPLETED]

    @pytest.mark.parametrize(
        "call",
        [
            lambda leader, _: leader.wait(10**9),
            lambda leader, _: leader.trigger(),
            lambda leader, begin: leader.report(begin),
            lambda leader, begin: leader.decline(begin),
            lambda leader, begin: leader.abort(begin),
            lambda leader, begin: leader.coordinator.decide(begin.barrier.checkpoint_id),
            lambda leader, begin: leader.coordinator.on_slot_won(begin.barrier.checkpoint_id, 0),
            lambda leader, _: leader.coordinator.on_sinks_committed(1),
        ],
        ids=["time", "trigger", "report", "decline", "abort", "decide", "slot won", "sinks committed"],
    )
    def test_every_call_that_would_go_on_is_answered_with_superseded(
        self, call: Callable[[Leader, Begin], object]
    ) -> None:
        leader = Leader(CheckpointConfig())
        begin = leader.trigger()
        leader.report(begin)
        leader.coordinator.on_superseded(9, 0)
        with unchanged(leader.coordinator), pytest.raises(Superseded) as caught:
            call(leader, begin)
        assert (caught.value.own_generation, caught.value.newer_generation) == (GENERATION, 9)
