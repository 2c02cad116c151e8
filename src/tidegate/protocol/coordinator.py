"""The life of a checkpoint, from its trigger to the commit of its sinks.

Guarantees:
- Ids and epochs only grow, over restarts too: the edge marks an id as used before it announces it (`Begin`),
  and the coordinator starts behind the largest that was ever marked.
- A checkpoint is decided only when every stage has reported, once, for this id, attempt and generation.
  Duplicates and strangers are refused and change nothing.
- A timeout is found by `on_time` alone, whoever reports or stays silent. It aborts; nothing waits for ever.
- From DECIDING on a checkpoint cannot be aborted: its slot in the decision log may have been claimed. Only
  the log tells how it ended; a coordinator that was superseded before it heard does not guess.
- Checkpoints are decided in the order of their ids.
- The pause after a checkpoint that ended is cut short by a user alone, and for that user's checkpoint alone.
- A checkpoint that a user wants unaligned is refused where no stage would be cut so.
- After `FailPipeline` nothing is begun in the same answer.
- Sinks that lag hold new checkpoints back: no more than `max_concurrent` + 1 completed ones wait.
- What holds back a checkpoint that is due is told by what decides it (`held_back`).
- A superseded coordinator answers every call with `Superseded`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from tidegate.errors import (
    CheckpointError,
    CheckpointIncomplete,
    CheckpointInProgress,
    NoCheckpointInProgress,
    ProtocolViolation,
    Superseded,
)
from tidegate.protocol.aligner import Arrival, CutCause, InFlight
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.messages import Barrier, Flag
from tidegate.protocol.transitions import step


class Phase(enum.Enum):
    PREPARING = "preparing"
    PREPARED = "prepared"
    DECIDING = "deciding"
    COMPLETED = "completed"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Event(enum.Enum):
    ALL_STAGES_REPORTED = "all stages reported"
    CLAIM = "claim a slot of the decision log"
    SLOT_WON = "slot won"
    SLOT_LOST = "slot lost"
    SINKS_COMMITTED = "sinks committed"
    ABORT = "abort"


TRANSITIONS: Final[Mapping[tuple[Phase, Event], Phase]] = {
    (Phase.PREPARING, Event.ALL_STAGES_REPORTED): Phase.PREPARED,
    (Phase.PREPARING, Event.ABORT): Phase.ABORTED,
    (Phase.PREPARED, Event.CLAIM): Phase.DECIDING,
    (Phase.PREPARED, Event.ABORT): Phase.ABORTED,
    (Phase.DECIDING, Event.SLOT_WON): Phase.COMPLETED,
    (Phase.DECIDING, Event.SLOT_LOST): Phase.ABORTED,
    (Phase.COMPLETED, Event.SINKS_COMMITTED): Phase.COMMITTED,
}


class AbortReason(enum.Enum):
    TIMED_OUT = "timed out"
    STAGE_DECLINED = "a stage declined"
    QUORUM_FAILED = "the instances did not agree"
    STORE_FAILED = "the store failed"
    CANCELLED = "cancelled by the user"
    SUPERSEDED = "superseded by a newer generation"
    INSTANCE_LOST = "an instance was lost"

    @property
    def is_failure(self) -> bool:
        """Whether it counts against `tolerable_failures`."""
        return self not in (AbortReason.CANCELLED, AbortReason.SUPERSEDED, AbortReason.INSTANCE_LOST)


class ReportAnswer(enum.Enum):
    ACCEPTED = "accepted"
    DUPLICATE = "this stage has reported already"
    UNKNOWN_STAGE = "the pipeline has no such stage"
    UNKNOWN_CHECKPOINT = "no such checkpoint is being prepared"
    WRONG_ATTEMPT = "it is of another attempt"
    WRONG_GENERATION = "it is of another generation"


class StageReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stage says when its part of a checkpoint is stored.

    `output_sequence` is the number of the last segment it had appended at the cut, so it is where the barrier
    stands in its channel. `files` is what the snapshot refers to, but for files that tell themselves which checkpoints
    refer to them (see `StoredFile`), `committable` what a sink has sealed. A stage with event time whose `watermark_ms`
    is None has none yet. `arrival`: how its barriers came, late ones too. `stored_after_ms`: how long after it was cut
    all of it was stored, and its table had not refused what it sealed. Neither is known of a checkpoint that is read.
    `detail` is for who writes the manifest, and of no meaning here.
    """

    stage: str
    checkpoint_id: int
    attempt: int
    generation: int
    cut: int | None
    positions: dict[str, int] = {}
    output_sequence: int = 0
    files: tuple[str, ...] = ()
    committable: str | None = None
    source_position: str | None = None
    in_flight: tuple[InFlight, ...] = ()
    has_event_time: bool = False
    watermark_ms: int | None = None
    cause: CutCause = CutCause.ALIGNED
    over_bound: bool = False
    new_bytes: int = 0
    total_bytes: int = 0
    barrier_ms: int = 0
    alignment_ms: int = 0
    snapshot_ms: int = 0
    arrival: Arrival | None = None
    stored_after_ms: int | None = None
    detail: Any = None


class StageDecline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stage says when it cannot do its part."""

    stage: str
    checkpoint_id: int
    attempt: int
    generation: int
    why: str


class Checkpoint(msgspec.Struct):
    """One checkpoint as the coordinator knows it. Its facts stay readable after it has ended."""

    barrier: Barrier
    attempt: int
    generation: int
    triggered_ms: int
    deadline_ms: int
    phase: Phase = Phase.PREPARING
    reports: dict[str, StageReport] = msgspec.field(default_factory=dict)
    ended_ms: int | None = None
    abort_reason: AbortReason | None = None
    abort_detail: str = ""

    @property
    def checkpoint_id(self) -> int:
        return self.barrier.checkpoint_id

    @property
    def is_aligned(self) -> bool:
        """Whether nothing was in flight anywhere: then all sinks show the same source prefix."""
        return not any(report.in_flight for report in self.reports.values())

    @property
    def new_bytes(self) -> int:
        return sum(report.new_bytes for report in self.reports.values())

    @property
    def total_bytes(self) -> int:
        return sum(report.total_bytes for report in self.reports.values())

    @property
    def duration_ms(self) -> int | None:
        return None if self.ended_ms is None else self.ended_ms - self.triggered_ms


class Begin(msgspec.Struct, frozen=True):
    """Mark the id as used, durably; check in the log that this generation is still open, so that the next one
    will see the mark; then announce Prepare and inject the barrier at every source."""

    barrier: Barrier
    attempt: int


class Abort(msgspec.Struct, frozen=True):
    """Announce Abort and cancel the barrier; the stages open their gates."""

    barrier: Barrier
    reason: AbortReason
    detail: str


class FailPipeline(msgspec.Struct, frozen=True):
    """More checkpoints failed in a row than tolerated: stop the pipeline and say why."""

    failures: int
    detail: str


Action = Begin | Abort | FailPipeline
Actions = list[Action]


class Obstacle(enum.Enum):
    IN_PROGRESS = "as many as allowed are in progress"
    SINKS_LAG = "the sinks are behind with those that are complete"
    PAUSE = "the pause after the last one is not over"
    INSTANCE = "an instance is missing"


class HeldBack(msgspec.Struct, frozen=True):
    """A checkpoint that is due since a moment and is not begun: by what, and for the sake of which others.

    `until_ms` is when a pause ends; nobody knows when the others do.
    """

    since_ms: int
    by: Obstacle
    checkpoints: tuple[int, ...]
    until_ms: int | None = None


class Coordinator:
    """One per generation, at the leader. Methods return what is to be done; nothing is done here."""

    def __init__(
        self,
        stages: Collection[str],
        config: CheckpointConfig,
        *,
        generation: int,
        now_ms: int,
        after_checkpoint: int = 0,
        after_epoch: int = 0,
        history: int = 16,
    ) -> None:
        """`after_checkpoint`, `after_epoch`: the largest ever marked as used in this pipeline."""
        self._stages = frozenset(stages)
        self._config = config
        self._generation = generation
        self._next_id = after_checkpoint + 1
        self._next_epoch = after_epoch + 1
        self._due_ms = now_ms + config.interval_ms
        self._pause_ends_ms = now_ms
        self._active: dict[int, Checkpoint] = {}
        self._completed: dict[int, Checkpoint] = {}
        self._history: deque[Checkpoint] = deque(maxlen=history)
        self._failures_in_row = 0
        self._aborts_in_row = 0
        self._draining = False
        self._missing_instances: set[str] = set()
        self._superseded_by: int | None = None

    # -- what one may ask -------------------------------------------------------------------------

    @property
    def active(self) -> tuple[Checkpoint, ...]:
        """Checkpoints that are not decided yet, oldest first."""
        return tuple(self._active.values())

    @property
    def history(self) -> tuple[Checkpoint, ...]:
        """The last checkpoints that are not active any more, in the order in which they ended."""
        return tuple(self._history)

    @property
    def next_checkpoint_id(self) -> int:
        return self._next_id

    def missing(self, checkpoint_id: int) -> frozenset[str]:
        """The stages that have not reported for this checkpoint."""
        return self._stages - self._find(checkpoint_id).reports.keys()

    def ready_to_decide(self) -> Checkpoint | None:
        """The oldest undecided checkpoint, if all its stages have reported."""
        oldest = next(iter(self._active.values()), None)
        return oldest if oldest is not None and oldest.phase is Phase.PREPARED else None

    def held_back(self, now_ms: int) -> HeldBack | None:
        """Why no checkpoint is begun, though one is due; None if none is, or it is begun at the next `on_time`."""
        if self._draining or now_ms < self._due_ms:
            return None
        obstacle = self._obstacle()
        if obstacle is Obstacle.IN_PROGRESS:
            return HeldBack(self._due_ms, obstacle, tuple(self._active))
        if obstacle is Obstacle.SINKS_LAG:
            return HeldBack(self._due_ms, obstacle, tuple(self._completed))
        if obstacle is Obstacle.INSTANCE:
            return HeldBack(self._due_ms, obstacle, ())
        if now_ms < self._pause_ends_ms:
            return HeldBack(self._due_ms, Obstacle.PAUSE, (self._history[-1].checkpoint_id,), self._pause_ends_ms)
        return None

    @property
    def missing_instances(self) -> tuple[str, ...]:
        """Without which no checkpoint is begun."""
        return tuple(sorted(self._missing_instances))

    # -- what happened ----------------------------------------------------------------------------

    def hold(self, instance: str) -> None:
        """An instance is missing: no checkpoint could be complete without it."""
        self._missing_instances.add(instance)

    def release(self, instance: str) -> None:
        """It is back."""
        self._missing_instances.discard(instance)

    def on_time(self, now_ms: int) -> Actions:
        """Time passed: abort what is overdue, trigger what is due."""
        self._check_not_superseded()
        actions: Actions = []
        for checkpoint in tuple(self._active.values()):
            if checkpoint.phase is not Phase.DECIDING and now_ms >= checkpoint.deadline_ms:
                actions += self._abort(checkpoint, AbortReason.TIMED_OUT, self._who_is_late(checkpoint), now_ms)
        has_failed = any(isinstance(action, FailPipeline) for action in actions)
        is_due = not self._draining and now_ms >= self._due_ms
        if not has_failed and is_due and self.held_back(now_ms) is None:
            actions.append(self._trigger(Flag.NONE, now_ms))
        return actions

    def trigger(self, now_ms: int, flags: Flag = Flag.NONE) -> Begin:
        """The user wants a checkpoint now."""
        self._check_not_superseded()
        if self._draining:
            raise CheckpointError("the pipeline is draining: its last checkpoint is under way or was taken")
        if flags & Flag.UNALIGNED and self._config.alignment.unaligned == "never":
            raise CheckpointError("every stage of this run aligns; only one with unaligned_after can cut unaligned")
        if self._missing_instances:
            raise CheckpointInProgress(f"instance {', '.join(sorted(self._missing_instances))} is missing")
        if self._obstacle() is not None:
            under_way = ", ".join(str(checkpoint_id) for checkpoint_id in (*self._completed, *self._active))
            raise CheckpointInProgress(
                f"checkpoint {under_way} is in progress and max_concurrent is {self._config.max_concurrent}"
            )
        return self._trigger(flags, now_ms)

    def on_report(self, report: StageReport) -> ReportAnswer:
        """A stage stored its part. Look at `ready_to_decide` after an accepted one."""
        self._check_not_superseded()
        answer = self._judge(report)
        if answer is not ReportAnswer.ACCEPTED:
            return answer
        checkpoint = self._active[report.checkpoint_id]
        checkpoint.reports[report.stage] = report
        if len(checkpoint.reports) == len(self._stages):
            checkpoint.phase = step(TRANSITIONS, checkpoint.phase, Event.ALL_STAGES_REPORTED)
        return ReportAnswer.ACCEPTED

    def on_decline(self, decline: StageDecline, now_ms: int) -> Actions:
        """A stage cannot do its part: there is no point in waiting for the others."""
        self._check_not_superseded()
        if self._judge(decline) is not ReportAnswer.ACCEPTED:
            return []
        checkpoint = self._active[decline.checkpoint_id]
        detail = f"stage {decline.stage!r}: {decline.why}"
        return self._abort(checkpoint, AbortReason.STAGE_DECLINED, detail, now_ms)

    def abort(self, checkpoint_id: int, reason: AbortReason, detail: str, now_ms: int) -> Actions:
        """End a checkpoint that is not being decided yet."""
        self._check_not_superseded()
        checkpoint = self._find(checkpoint_id)
        if checkpoint.phase is Phase.DECIDING:
            raise CheckpointError(f"checkpoint {checkpoint_id} is being decided and cannot be aborted any more")
        return self._abort(checkpoint, reason, detail, now_ms)

    def decide(self, checkpoint_id: int) -> Checkpoint:
        """All is stored and every instance agreed: the manifest and the claim of a slot come next."""
        self._check_not_superseded()
        checkpoint = self._find(checkpoint_id)
        if checkpoint.phase is Phase.PREPARING:
            raise CheckpointIncomplete(checkpoint_id, self.missing(checkpoint_id))
        oldest = next(iter(self._active))
        if oldest != checkpoint_id:
            raise CheckpointError(f"checkpoint {oldest} is decided before {checkpoint_id}")
        checkpoint.phase = step(TRANSITIONS, checkpoint.phase, Event.CLAIM)
        return checkpoint

    def on_slot_won(self, checkpoint_id: int, now_ms: int) -> None:
        """The decision log has it: the checkpoint is complete."""
        self._check_not_superseded()
        checkpoint = self._find(checkpoint_id)
        checkpoint.phase = step(TRANSITIONS, checkpoint.phase, Event.SLOT_WON)
        self._end(checkpoint, now_ms)
        self._completed[checkpoint_id] = checkpoint
        self._failures_in_row = 0
        self._aborts_in_row = 0

    def on_superseded(self, newer_generation: int, now_ms: int, *, lost: int | None = None) -> None:
        """A newer generation is in the log: whatever was under way here is void.

        One that was being decided may be in the log before it, and stays as it is, unless it is `lost`: the log,
        read after its claim, does not have it.
        """
        self._superseded_by = newer_generation
        for checkpoint in tuple(self._active.values()):
            is_deciding = checkpoint.phase is Phase.DECIDING
            if not is_deciding or checkpoint.checkpoint_id == lost:
                event = Event.SLOT_LOST if is_deciding else Event.ABORT
                checkpoint.phase = step(TRANSITIONS, checkpoint.phase, event)
                checkpoint.abort_reason = AbortReason.SUPERSEDED
            self._end(checkpoint, now_ms)

    def on_sinks_committed(self, checkpoint_id: int) -> None:
        """Every sink shows the checkpoint's epoch."""
        self._check_not_superseded()
        checkpoint = self._completed.pop(checkpoint_id, None)
        if checkpoint is None:
            raise NoCheckpointInProgress(f"checkpoint {checkpoint_id} does not wait for its sinks")
        checkpoint.phase = step(TRANSITIONS, checkpoint.phase, Event.SINKS_COMMITTED)

    # -- inside -----------------------------------------------------------------------------------

    def _check_not_superseded(self) -> None:
        if self._superseded_by is not None:
            raise Superseded(self._generation, self._superseded_by)

    def _find(self, checkpoint_id: int) -> Checkpoint:
        try:
            return self._active[checkpoint_id]
        except KeyError:
            raise NoCheckpointInProgress(f"checkpoint {checkpoint_id} is not in progress") from None

    def _obstacle(self) -> Obstacle | None:
        """What forbids any checkpoint, also one that a user wants now."""
        if self._missing_instances:
            return Obstacle.INSTANCE
        most = self._config.max_concurrent
        if len(self._active) >= most:
            return Obstacle.IN_PROGRESS
        under_way = len(self._active) + len(self._completed)
        return Obstacle.SINKS_LAG if under_way > most else None

    def _trigger(self, flags: Flag, now_ms: int) -> Begin:
        if flags & Flag.CANCEL:
            raise ProtocolViolation("a checkpoint cannot be triggered as cancelled; abort it instead")
        if not self._config.incremental:
            flags |= Flag.FULL_SNAPSHOT
        try:
            barrier = Barrier(self._next_id, self._next_epoch, int(flags))
        except ValueError as error:
            raise ProtocolViolation(f"a checkpoint cannot be triggered like this: {error}") from error
        self._next_id += 1
        self._next_epoch += 1
        self._due_ms = max(self._due_ms, now_ms + self._config.interval_ms)
        self._draining = self._draining or barrier.is_drain
        attempt = self._aborts_in_row + 1
        deadline_ms = now_ms + self._config.timeout_ms
        self._active[barrier.checkpoint_id] = Checkpoint(barrier, attempt, self._generation, now_ms, deadline_ms)
        return Begin(barrier, attempt)

    def _judge(self, said: StageReport | StageDecline) -> ReportAnswer:
        if said.generation != self._generation:
            return ReportAnswer.WRONG_GENERATION
        if said.stage not in self._stages:
            return ReportAnswer.UNKNOWN_STAGE
        checkpoint = self._active.get(said.checkpoint_id)
        if checkpoint is None:
            return ReportAnswer.UNKNOWN_CHECKPOINT
        if said.attempt != checkpoint.attempt:
            return ReportAnswer.WRONG_ATTEMPT
        if said.stage in checkpoint.reports or checkpoint.phase is not Phase.PREPARING:
            return ReportAnswer.DUPLICATE
        return ReportAnswer.ACCEPTED

    def _who_is_late(self, checkpoint: Checkpoint) -> str:
        missing = sorted(self._stages - checkpoint.reports.keys())
        if not missing:
            return "all stages reported, but not all instances acknowledged"
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        return f"no report from {', '.join(missing[:5])}{more}"

    def _abort(self, checkpoint: Checkpoint, reason: AbortReason, detail: str, now_ms: int) -> Actions:
        checkpoint.phase = step(TRANSITIONS, checkpoint.phase, Event.ABORT)
        checkpoint.abort_reason = reason
        checkpoint.abort_detail = detail
        self._end(checkpoint, now_ms)
        self._aborts_in_row += 1
        if checkpoint.barrier.is_drain:
            self._draining = False
        actions: Actions = [Abort(checkpoint.barrier, reason, detail)]
        if reason.is_failure:
            self._failures_in_row += 1
            if self._failures_in_row > self._config.tolerable_failures:
                actions.append(FailPipeline(self._failures_in_row, f"checkpoint {reason.value}: {detail}"))
        return actions

    def _end(self, checkpoint: Checkpoint, now_ms: int) -> None:
        checkpoint.ended_ms = now_ms
        del self._active[checkpoint.checkpoint_id]
        self._history.append(checkpoint)
        self._pause_ends_ms = max(self._pause_ends_ms, now_ms + self._config.min_pause_ms)
