"""The coordinator against a model that counts.

Stages, strangers and the clock say what they like, in any order; the model keeps for each checkpoint what was
accepted, and works out from that what may happen next.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocol.search import Step, search, steps
from tests.protocol.unchanged import unchanged
from tidegate.errors import (
    CheckpointError,
    CheckpointIncomplete,
    CheckpointInProgress,
    InvariantViolation,
    NoCheckpointInProgress,
    Superseded,
)
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.protocol.coordinator import (
    Abort,
    AbortReason,
    Action,
    Begin,
    Coordinator,
    FailPipeline,
    Phase,
    ReportAnswer,
    StageDecline,
    StageReport,
)
from tidegate.protocol.messages import Barrier, Flag

STAGES = ("orders", "paid", "revenue")
GENERATION = 4
INTERVAL_MS, TIMEOUT_MS = 50, 120

which = st.sampled_from([0, 0, 0, 1, 1, 2, 3, -1])  # a checkpoint, counted back from the newest; -1: none
slightly = st.sampled_from([0] * 8 + [1, -1])
names = st.sampled_from([*STAGES * 3, "stranger"])
reasons = st.sampled_from([AbortReason.CANCELLED, AbortReason.QUORUM_FAILED])
flags = st.sampled_from([Flag.NONE] * 6 + [Flag.FULL_SNAPSHOT, Flag.UNALIGNED, Flag.DRAIN])
STEPS = steps(
    (6, "time_passes", {"ms": st.sampled_from([0, 1, 10, 20, INTERVAL_MS, TIMEOUT_MS])}),
    (4, "the_user_triggers", {"flags": flags}),
    (8, "a_stage_reports", {"stage": names, "number": which, "g": slightly, "a": slightly}),
    (1, "a_stage_declines", {"stage": names, "number": which, "g": slightly, "a": slightly}),
    (1, "a_checkpoint_is_aborted", {"number": which, "reason": reasons}),
    (3, "a_checkpoint_is_decided", {"number": which}),
    (3, "a_slot_is_won", {"number": which}),
    (4, "the_oldest_goes_all_the_way", {}),
    (4, "the_sinks_have_committed", {"number": which}),
    (1, "a_newer_generation_would_void_all_that_is_under_way", {}),
)


class Known:
    """A checkpoint as the model sees it."""

    def __init__(self, begin: Begin, now_ms: int) -> None:
        self.barrier = begin.barrier
        self.attempt = begin.attempt
        self.deadline_ms = now_ms + TIMEOUT_MS
        self.reported: set[str] = set()
        self.phase = Phase.PREPARING


class CoordinatorAgainstAModel(RuleBasedStateMachine):
    @initialize(
        most=st.integers(1, 3),
        tolerable=st.integers(0, 2),
        min_pause_ms=st.sampled_from([0, 30, 80]),
        after=st.sampled_from([0, 41]),
    )
    def start(self, most: int, tolerable: int, min_pause_ms: int, after: int) -> None:
        config = CheckpointConfig(
            interval_ms=INTERVAL_MS,
            timeout_ms=TIMEOUT_MS,
            min_pause_ms=min_pause_ms,
            max_concurrent=most,
            tolerable_failures=tolerable,
            alignment=AlignmentConfig(unaligned="on_timeout", timeout_ms=10),
        )
        self.coordinator = Coordinator(
            STAGES,
            config,
            generation=GENERATION,
            now_ms=0,
            after_checkpoint=after,
            after_epoch=after * 2,
            history=1000,
        )
        self.config = config
        self.after = after
        self.now_ms = 0
        self.known: list[Known] = []
        self.ended: list[Known] = []
        self.pause_until_ms = 0
        self.due_ms = INTERVAL_MS
        self.failures = 0
        self.aborts = 0

    # -- what the model can tell ------------------------------------------------------------------

    def in_phase(self, *phases: Phase) -> list[Known]:
        return [each for each in self.known if each.phase in phases]

    @property
    def active(self) -> list[Known]:
        return self.in_phase(Phase.PREPARING, Phase.PREPARED, Phase.DECIDING)

    @property
    def is_draining(self) -> bool:
        return any(each.barrier.is_drain and each.phase is not Phase.ABORTED for each in self.known)

    def pick(self, number: int) -> Known | None:
        """One of the checkpoints so far; None for one that never was."""
        return self.known[-1 - number % len(self.known)] if self.known and number >= 0 else None

    def may_trigger(self) -> bool | None:
        """None where sinks lag so far that it is a matter of degree."""
        most = self.config.max_concurrent
        waiting = len(self.in_phase(Phase.COMPLETED))
        if self.is_draining or len(self.active) >= most or waiting > most:
            return False
        return True if waiting + len(self.active) <= most else None

    def begun(self, begin: Begin, flags: Flag) -> None:
        assert self.may_trigger() is not False
        number = self.after + len(self.known) + 1
        assert begin.barrier == Barrier(number, number + self.after, int(flags))
        assert begin.attempt == self.aborts + 1
        self.known.append(Known(begin, self.now_ms))
        self.due_ms = self.now_ms + INTERVAL_MS

    def aborted(self, known: Known, reason: AbortReason, actions: list[Action]) -> bool:
        """The first actions are those of this abort. Tells whether it fails the pipeline."""
        abort = actions.pop(0)
        assert isinstance(abort, Abort)
        assert (abort.barrier, abort.reason) == (known.barrier, reason)
        self.end(known, Phase.ABORTED)
        self.aborts += 1
        if reason is not AbortReason.CANCELLED:
            self.failures += 1
            if self.failures > self.config.tolerable_failures:
                failure = actions.pop(0)
                assert isinstance(failure, FailPipeline)
                assert failure.failures == self.failures
                return True
        return False

    def end(self, known: Known, phase: Phase) -> None:
        known.phase = phase
        self.ended.append(known)
        self.pause_until_ms = self.now_ms + self.config.min_pause_ms

    @rule(step=STEPS)
    def something_happens(self, step: Step) -> None:
        name, drawn = step
        getattr(self, name)(**drawn)

    # -- what happens -----------------------------------------------------------------------------

    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        actions = self.coordinator.on_time(self.now_ms)
        has_failed = False
        for known in self.in_phase(Phase.PREPARING, Phase.PREPARED):
            if self.now_ms >= known.deadline_ms:
                has_failed |= self.aborted(known, AbortReason.TIMED_OUT, actions)
        if has_failed:
            assert actions == []
        elif actions:
            assert self.now_ms >= max(self.due_ms, self.pause_until_ms)
            (begin,) = actions
            assert isinstance(begin, Begin)
            self.begun(begin, Flag.NONE)
        elif self.now_ms >= max(self.due_ms, self.pause_until_ms):
            assert self.may_trigger() is not True

    def the_user_triggers(self, flags: Flag) -> None:
        if self.may_trigger() is False:
            expected = CheckpointError if self.is_draining else CheckpointInProgress
            with unchanged(self.coordinator), pytest.raises(expected):
                self.coordinator.trigger(self.now_ms, flags)
        elif self.may_trigger():
            self.begun(self.coordinator.trigger(self.now_ms, flags), flags)

    def a_stage_reports(self, stage: str, number: int, g: int, a: int) -> None:
        known = self.pick(number)
        checkpoint_id, attempt = (999, 1) if known is None else (known.barrier.checkpoint_id, known.attempt)
        said = StageReport(stage, checkpoint_id, attempt + a, GENERATION + g, cut=1)
        if self.is_new(known, said):
            assert known is not None
            assert self.coordinator.on_report(said) is ReportAnswer.ACCEPTED
            known.reported.add(stage)
            if known.reported == set(STAGES):
                known.phase = Phase.PREPARED
            return
        with unchanged(self.coordinator):
            answer = self.coordinator.on_report(said)
        if g:
            assert answer is ReportAnswer.WRONG_GENERATION
        elif stage == "stranger":
            assert answer is ReportAnswer.UNKNOWN_STAGE
        elif known is None or known not in self.active:
            assert answer is ReportAnswer.UNKNOWN_CHECKPOINT
        else:
            assert answer is (ReportAnswer.WRONG_ATTEMPT if a else ReportAnswer.DUPLICATE)

    def is_new(self, known: Known | None, said: StageReport | StageDecline) -> bool:
        return (
            known is not None
            and known.phase is Phase.PREPARING
            and (said.generation, said.attempt) == (GENERATION, known.attempt)
            and said.stage in STAGES
            and said.stage not in known.reported
        )

    def a_stage_declines(self, stage: str, number: int, g: int, a: int) -> None:
        known = self.pick(number)
        checkpoint_id, attempt = (999, 1) if known is None else (known.barrier.checkpoint_id, known.attempt)
        said = StageDecline(stage, checkpoint_id, attempt + a, GENERATION + g, "disk full")
        if self.is_new(known, said):
            assert known is not None
            actions = self.coordinator.on_decline(said, self.now_ms)
            self.aborted(known, AbortReason.STAGE_DECLINED, actions)
            assert actions == []
        else:
            with unchanged(self.coordinator):
                assert self.coordinator.on_decline(said, self.now_ms) == []

    def a_checkpoint_is_aborted(self, number: int, reason: AbortReason) -> None:
        known = self.pick(number)
        checkpoint_id = 999 if known is None else known.barrier.checkpoint_id
        if known in self.in_phase(Phase.PREPARING, Phase.PREPARED):
            assert known is not None
            actions = self.coordinator.abort(checkpoint_id, reason, "because", self.now_ms)
            self.aborted(known, reason, actions)
            assert actions == []
        else:
            with unchanged(self.coordinator), pytest.raises(CheckpointError) as caught:
                self.coordinator.abort(checkpoint_id, reason, "because", self.now_ms)
            is_deciding = known is not None and known.phase is Phase.DECIDING
            assert isinstance(caught.value, NoCheckpointInProgress) is not is_deciding

    def a_checkpoint_is_decided(self, number: int) -> None:
        known = self.pick(number)
        if known is None:
            return
        checkpoint_id = known.barrier.checkpoint_id
        if known.phase is Phase.PREPARED and known is self.active[0]:
            checkpoint = self.coordinator.decide(checkpoint_id)
            assert checkpoint.reports.keys() == set(STAGES)
            known.phase = Phase.DECIDING
        else:
            expected: type[Exception] = {
                Phase.PREPARING: CheckpointIncomplete,
                Phase.PREPARED: CheckpointError,
                Phase.DECIDING: InvariantViolation,
            }.get(known.phase, NoCheckpointInProgress)
            with unchanged(self.coordinator), pytest.raises(expected):
                self.coordinator.decide(checkpoint_id)

    def a_slot_is_won(self, number: int) -> None:
        known = self.pick(number)
        if known is None:
            return
        if known.phase is Phase.DECIDING:
            self.coordinator.on_slot_won(known.barrier.checkpoint_id, self.now_ms)
            self.end(known, Phase.COMPLETED)
            self.failures = self.aborts = 0
        else:
            with (
                unchanged(self.coordinator),
                pytest.raises((InvariantViolation, NoCheckpointInProgress)),
            ):
                self.coordinator.on_slot_won(known.barrier.checkpoint_id, self.now_ms)

    def the_oldest_goes_all_the_way(self) -> None:
        """What mostly happens, and what seldom comes about by chance."""
        if not self.active:
            return
        known = self.active[0]
        for stage in STAGES:
            if stage not in known.reported:
                self.a_stage_reports(stage, len(self.known) - 1 - self.known.index(known), 0, 0)
        number = len(self.known) - 1 - self.known.index(known)
        if known.phase is Phase.PREPARED:
            assert self.coordinator.ready_to_decide() is not None
            self.a_checkpoint_is_decided(number)
        self.a_slot_is_won(number)

    def the_sinks_have_committed(self, number: int) -> None:
        known = self.pick(number)
        if known is None:
            return
        if known.phase is Phase.COMPLETED:
            self.coordinator.on_sinks_committed(known.barrier.checkpoint_id)
            known.phase = Phase.COMMITTED
        else:
            with unchanged(self.coordinator), pytest.raises(NoCheckpointInProgress):
                self.coordinator.on_sinks_committed(known.barrier.checkpoint_id)

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def the_same_checkpoints_are_under_way_in_the_same_phase(self) -> None:
        assert [(each.barrier, each.attempt, each.phase) for each in self.coordinator.active] == [
            (known.barrier, known.attempt, known.phase) for known in self.active
        ]
        for known in self.active:
            missing = self.coordinator.missing(known.barrier.checkpoint_id)
            assert missing == set(STAGES) - known.reported
        assert len(self.active) <= self.config.max_concurrent

    @invariant()
    def the_history_tells_how_each_ended(self) -> None:
        assert [(each.checkpoint_id, each.phase) for each in self.coordinator.history] == [
            (known.barrier.checkpoint_id, known.phase) for known in self.ended
        ]

    @invariant()
    def checkpoints_complete_in_the_order_of_their_ids(self) -> None:
        completed = [known for known in self.ended if known.phase is not Phase.ABORTED]
        ids = [known.barrier.checkpoint_id for known in completed]
        assert ids == sorted(ids)
        assert all(known.reported == set(STAGES) for known in completed)

    @invariant()
    def what_is_ready_is_the_oldest_and_has_all_reports(self) -> None:
        ready = self.coordinator.ready_to_decide()
        oldest = self.active[0] if self.active else None
        is_ready = oldest is not None and oldest.phase is Phase.PREPARED
        assert (ready is not None) is is_ready
        assert ready is None or (oldest is not None and ready.barrier == oldest.barrier)

    def a_newer_generation_would_void_all_that_is_under_way(self) -> None:
        """Tried on a copy, so that the run can go on."""
        copy = deepcopy(self.coordinator)
        copy.on_superseded(GENERATION + 1, self.now_ms)
        assert copy.active == ()
        with pytest.raises(Superseded):
            copy.on_time(self.now_ms)
        with pytest.raises(Superseded):
            copy.trigger(self.now_ms)
        void = copy.history[len(self.ended) :]
        assert [each.barrier for each in void] == [known.barrier for known in self.active]
        for each, known in zip(void, self.active, strict=True):
            is_deciding = known.phase is Phase.DECIDING
            assert each.phase is (Phase.DECIDING if is_deciding else Phase.ABORTED)
            assert each.abort_reason is (None if is_deciding else AbortReason.SUPERSEDED)


TestCoordinatorAgainstAModel = CoordinatorAgainstAModel.TestCase
TestCoordinatorAgainstAModel.settings = search(200, steps=50)
