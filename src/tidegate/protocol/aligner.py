"""Which input of a stage may flow, and at which batch the stage is cut. One per stage.

Theory of operation. Inputs deliver segments and barriers in channel order. The first barrier of a
checkpoint closes the gate of its input: what comes after it waits in the channel, nothing is buffered here.
The stage is cut *aligned* once every input is at the barrier and a committed batch has consumed all that
was released. Where the config allows it, the stage is cut *unaligned* instead, when alignment outlasts its
timeout or at once: at the latest committed batch, naming the segments between its position and the barrier
as in flight. Barriers that have not arrived by then are late: what their inputs deliver before them is
recorded as in flight too, and the gates are open meanwhile.

Guarantees:
- Each input's order is kept, and each in-flight range says which input it is of. Nothing is dropped.
- Everything consumed at a cut lies before the barrier; everything before the barrier is consumed or named
  as in flight.
- Barriers of different checkpoints never mix: the first one is the checkpoint's, later ones must agree.
- Duplicate, stale and cancelled barriers are answered with `Ignored`; an unknown input, a conflicting
  barrier or a message behind a closed gate raises and leaves the state unchanged.
- A barrier that overtakes another (its upstream never sent the older one) abandons the older one, because
  it can no longer complete. So does a CANCEL, which is forwarded once.
- In-flight bytes are bounded: over the bound the stage goes on aligning and says so; a range that outgrows
  the bound while it is recorded abandons the checkpoint, and the next one is cut only when every barrier is
  there, so that a bound that is too small costs one checkpoint and not all of them. Where that one ends uncut,
  because an input is silent, the one after it does not wait again.
- A sink and a DRAIN barrier are never cut unaligned. After a DRAIN cut nothing flows and nothing is cut.
- A message costs O(1), but for the one that starts, cuts or ends a checkpoint: O(inputs). A commit costs what
  it consumed.

The stage tells a committed batch only after its output segment was appended, so a barrier that is
forwarded on a `Cut` stands right behind the output of the batch that is the cut.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tidegate.errors import BarrierConflict, ProtocolViolation, UnknownInput
from tidegate.protocol.config import AlignmentConfig
from tidegate.protocol.messages import Barrier
from tidegate.protocol.transitions import step


class AlignmentPhase(enum.Enum):
    ALIGNING = "aligning"
    RECORDING = "recording"
    CAPTURED = "captured"
    ABANDONED = "abandoned"


class AlignmentEvent(enum.Enum):
    CUT_WITH_ALL_BARRIERS = "cut with all barriers there"
    CUT_WITH_LATE_BARRIERS = "cut with barriers late"
    LAST_LATE_BARRIER = "last late barrier"
    CANCELLED = "cancelled"
    OVERTAKEN = "overtaken by a newer barrier"
    OVER_BOUND = "in-flight bytes over the bound"


TRANSITIONS: Final[Mapping[tuple[AlignmentPhase, AlignmentEvent], AlignmentPhase]] = {
    (AlignmentPhase.ALIGNING, AlignmentEvent.CUT_WITH_ALL_BARRIERS): AlignmentPhase.CAPTURED,
    (AlignmentPhase.ALIGNING, AlignmentEvent.CUT_WITH_LATE_BARRIERS): AlignmentPhase.RECORDING,
    (AlignmentPhase.ALIGNING, AlignmentEvent.CANCELLED): AlignmentPhase.ABANDONED,
    (AlignmentPhase.ALIGNING, AlignmentEvent.OVERTAKEN): AlignmentPhase.ABANDONED,
    (AlignmentPhase.RECORDING, AlignmentEvent.LAST_LATE_BARRIER): AlignmentPhase.CAPTURED,
    (AlignmentPhase.RECORDING, AlignmentEvent.CANCELLED): AlignmentPhase.ABANDONED,
    (AlignmentPhase.RECORDING, AlignmentEvent.OVERTAKEN): AlignmentPhase.ABANDONED,
    (AlignmentPhase.RECORDING, AlignmentEvent.OVER_BOUND): AlignmentPhase.ABANDONED,
}


# A forgotten cancel costs one alignment in vain, until the next barrier overtakes it; never a wrong cut.
_CANCELLED_REMEMBERED: Final = 1024


class CutCause(enum.Enum):
    """Why a stage was cut when it was: all barriers were there and all before them consumed; that took too long; the
    config has no stage wait; the barrier says so, as it was triggered or by a stage upstream that fell back."""

    ALIGNED = "aligned"
    TIMEOUT = "timeout"
    ALWAYS = "always"
    FORCED = "forced"


class IgnoreReason(enum.Enum):
    DUPLICATE = "this input has delivered it already"
    STALE = "a newer checkpoint has started, or this one has ended"
    CANCELLED = "the checkpoint was cancelled"


class InFlight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Segments `after < sequence <= through` of one input: before the barrier, not yet consumed."""

    input: str
    after: int
    through: int
    size_bytes: int


class Close(msgspec.Struct, frozen=True, gc=False):
    """Release nothing more from this input."""

    input: str


class Open(msgspec.Struct, frozen=True, gc=False):
    """Release again from this input, from where it was closed."""

    input: str


class Cut(msgspec.Struct, frozen=True):
    """Forward `barrier`, then snapshot the stage at `batch` (None: it has not committed any).

    `over_bound`: it might have been cut unaligned before, had not too much been in flight.
    """

    barrier: Barrier
    batch: int | None
    positions: dict[str, int]
    cause: CutCause
    alignment_ms: int
    over_bound: bool = False


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """How a checkpoint came to a stage: in which input its last barrier was, how long after the first one, and how many
    segments of what came before barriers were yet to be consumed then."""

    last_input: str
    after_ms: int
    unconsumed: int


class Captured(msgspec.Struct, frozen=True):
    """All that was in flight at the cut is known: the stage may report once its snapshot is stored. `arrival`: how its
    barriers came, late ones too; None: of a source."""

    checkpoint_id: int
    in_flight: tuple[InFlight, ...]
    arrival: Arrival | None = None


class KeepsAligning(msgspec.Struct, frozen=True, gc=False):
    """An unaligned cut was due but would pin more in-flight bytes than allowed. Said once a checkpoint."""

    checkpoint_id: int
    inflight_bytes: int


class AlignmentProgress(msgspec.Struct, frozen=True):
    """How far a checkpoint has come at a stage that is aligning or recording it.

    `waits_for`: the inputs whose barriers are late. `inflight_bytes`: what an unaligned cut would capture now, or has
    captured so far. `over_bound`: such a cut is due, and that was more than allowed.
    """

    waits_for: frozenset[str]
    since_ms: int
    inflight_bytes: int
    over_bound: bool


class Abandoned(msgspec.Struct, frozen=True, gc=False):
    """Forget this stage's part of the checkpoint. Unless it was cancelled, tell the coordinator why."""

    checkpoint_id: int
    why: AlignmentEvent


class Forward(msgspec.Struct, frozen=True, gc=False):
    """Append this CANCEL barrier to the stage's own channel."""

    barrier: Barrier


class Ignored(msgspec.Struct, frozen=True, gc=False):
    input: str | None
    checkpoint_id: int
    why: IgnoreReason


Action = Close | Open | Cut | Captured | KeepsAligning | Abandoned | Forward | Ignored
Actions = list[Action]


class _Input:
    """What is known of one input. `unconsumed` holds (sequence, bytes) of released segments."""

    __slots__ = ("closed", "last_sequence", "name", "position", "unconsumed", "unconsumed_bytes")

    def __init__(self, name: str, position: int) -> None:
        self.name = name
        self.closed = False
        self.position = position
        self.last_sequence = position
        self.unconsumed: deque[tuple[int, int]] = deque()
        self.unconsumed_bytes = 0


class _Alignment:
    """One checkpoint at this stage, while it is aligning or recording."""

    __slots__ = (
        "arrival",
        "barrier",
        "in_flight",
        "inflight_bytes",
        "missing",
        "phase",
        "said_over_bound",
        "started_ms",
    )

    def __init__(self, barrier: Barrier, missing: set[str], now_ms: int) -> None:
        self.barrier = barrier
        self.missing = missing
        self.started_ms = now_ms
        self.phase = AlignmentPhase.ALIGNING
        self.said_over_bound = False
        self.arrival: Arrival | None = None
        self.in_flight: dict[str, InFlight] = {}
        self.inflight_bytes = 0

    def on_barrier(self, name: str, now_ms: int, unconsumed: int) -> None:
        self.missing.discard(name)
        if not self.missing:
            self.arrival = Arrival(name, now_ms - self.started_ms, unconsumed)

    def move(self, event: AlignmentEvent) -> None:
        self.phase = step(TRANSITIONS, self.phase, event)


class Aligner:
    """See the head of this file. All methods are to be called from one thread."""

    def __init__(
        self,
        stage: str,
        inputs: Sequence[str],
        config: AlignmentConfig,
        *,
        is_sink: bool = False,
        batch: int | None = None,
        positions: Mapping[str, int] | None = None,
        after_checkpoint: int = 0,
    ) -> None:
        """`batch`, `positions`, `after_checkpoint`: where a restored stage stands."""
        if len(set(inputs)) != len(inputs):
            raise ProtocolViolation(f"stage {stage!r} names an input twice: {', '.join(inputs)}")
        self._stage = stage
        self._config = config
        self._may_cut_unaligned = not is_sink and config.unaligned != "never"
        self._inputs = {name: _Input(name, 0) for name in inputs}
        for name, position in (positions or {}).items():
            restored = self._input(name)
            restored.position = restored.last_sequence = position
        self._batch = batch
        self._newest_id = after_checkpoint
        self._cancelled: dict[int, None] = {}
        self._unconsumed = 0
        self._unconsumed_bytes = 0
        self._aligning: _Alignment | None = None
        self._recording: list[_Alignment] = []
        self._drained_by: int | None = None
        self._outgrew_bound = False

    # -- what the stage may ask -------------------------------------------------------------------

    def is_open(self, name: str) -> bool:
        """Whether the next message of this input may be taken from its channel."""
        return not self._input(name).closed

    @property
    def is_drained(self) -> bool:
        """Whether a DRAIN barrier was cut: nothing flows any more."""
        return self._drained_by is not None

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The checkpoints under way at this stage, oldest first."""
        active = [*self._recording] if self._aligning is None else [*self._recording, self._aligning]
        return tuple(alignment.barrier.checkpoint_id for alignment in active)

    def phase_of(self, checkpoint_id: int) -> AlignmentPhase | None:
        alignment = self._active(checkpoint_id)
        return None if alignment is None else alignment.phase

    def waiting_for(self, checkpoint_id: int) -> frozenset[str]:
        """The inputs whose barrier of this checkpoint has not arrived."""
        alignment = self._active(checkpoint_id)
        return frozenset() if alignment is None else frozenset(alignment.missing)

    def progress_of(self, checkpoint_id: int) -> AlignmentProgress | None:
        """None: it has not come here yet, or nothing is left to do for it but to store what was cut."""
        alignment = self._active(checkpoint_id)
        if alignment is None:
            return None
        inflight_bytes = self._unconsumed_bytes if alignment is self._aligning else alignment.inflight_bytes
        return AlignmentProgress(
            frozenset(alignment.missing), alignment.started_ms, inflight_bytes, alignment.said_over_bound
        )

    def arrival_of(self, checkpoint_id: int) -> Arrival | None:
        """How a checkpoint came that is being aligned. None: not all of its barriers have."""
        alignment = self._active(checkpoint_id)
        return None if alignment is None else alignment.arrival

    # -- what happened ----------------------------------------------------------------------------

    def on_segment(self, name: str, sequence: int, size_bytes: int) -> tuple[Action, ...]:
        """The next segment of an open input is released to the stage."""
        source = self._input(name)
        if source.closed:
            raise ProtocolViolation(
                f"stage {self._stage!r}: segment {sequence} of {name!r} waits in its channel, it is closed"
            )
        if sequence != source.last_sequence + 1:
            raise ProtocolViolation(
                f"stage {self._stage!r}: segment {sequence} of {name!r} after {source.last_sequence}"
            )
        source.last_sequence = sequence
        source.unconsumed.append((sequence, size_bytes))
        source.unconsumed_bytes += size_bytes
        self._unconsumed += 1
        self._unconsumed_bytes += size_bytes
        if self._recording:
            return tuple(self._record(name, size_bytes))
        return ()

    def on_barrier(self, name: str, barrier: Barrier, now_ms: int) -> Actions:
        """The next message of this input is a barrier."""
        source = self._input(name)
        if barrier.is_cancel:
            return self._cancel(barrier)
        checkpoint_id = barrier.checkpoint_id
        alignment = self._active(checkpoint_id)
        if alignment is None and (ignored := self._why_ignored(checkpoint_id)) is not None:
            return [Ignored(name, checkpoint_id, ignored)]
        if alignment is not None and name not in alignment.missing:
            return [Ignored(name, checkpoint_id, IgnoreReason.DUPLICATE)]
        if source.closed:
            raise ProtocolViolation(
                f"stage {self._stage!r}: barrier {checkpoint_id} of {name!r} behind the one it is stopped at"
            )
        if alignment is not None and not alignment.barrier.agrees_with(barrier):
            raise BarrierConflict(
                f"stage {self._stage!r}: {name!r} sent {barrier}, but the first of it was {alignment.barrier}"
            )
        actions: Actions = []
        if self._recording or alignment is not self._aligning:
            actions += self._overtake(name, checkpoint_id)
        if alignment is None:
            alignment = self._start(barrier, now_ms)
        elif barrier.is_unaligned:
            alignment.barrier = alignment.barrier.as_unaligned()
        alignment.on_barrier(name, now_ms, self._unconsumed)
        if alignment.phase is AlignmentPhase.RECORDING:
            actions += self._finish_recorded(alignment)
        else:
            source.closed = True
            actions.append(Close(name))
            actions += self._try_cut(now_ms)
        return actions

    def on_injected(self, barrier: Barrier, now_ms: int) -> Actions:
        """A barrier for a stage without inputs: a source."""
        if self._inputs:
            raise ProtocolViolation(f"stage {self._stage!r} takes its barriers from its inputs")
        if barrier.is_cancel:
            return self._cancel(barrier)
        if (ignored := self._why_ignored(barrier.checkpoint_id)) is not None:
            return [Ignored(None, barrier.checkpoint_id, ignored)]
        if self._drained_by is not None:
            raise ProtocolViolation(
                f"stage {self._stage!r}: barrier {barrier.checkpoint_id} behind the drain {self._drained_by}"
            )
        self._start(barrier, now_ms)
        return self._try_cut(now_ms)

    def on_committed(self, batch: int, positions: Mapping[str, int], now_ms: int) -> Actions:
        """Spark committed a batch that consumed up to `positions` (inputs that did not move may be left
        out), and its output was appended to the stage's channel."""
        if self._batch is not None and batch <= self._batch:
            raise ProtocolViolation(f"stage {self._stage!r}: batch {batch} committed after {self._batch}")
        for name, position in positions.items():
            source = self._input(name)
            if not source.position <= position <= source.last_sequence:
                raise ProtocolViolation(
                    f"stage {self._stage!r}: batch {batch} consumed {name!r} up to {position}, but it was at "
                    f"{source.position} and {source.last_sequence} was released"
                )
        self._batch = batch
        for name, position in positions.items():
            source = self._inputs[name]
            source.position = position
            unconsumed = source.unconsumed
            while unconsumed and unconsumed[0][0] <= position:
                size_bytes = unconsumed.popleft()[1]
                source.unconsumed_bytes -= size_bytes
                self._unconsumed_bytes -= size_bytes
                self._unconsumed -= 1
        return [] if self._aligning is None else self._try_cut(now_ms)

    def on_time(self, now_ms: int) -> Actions:
        """Time passed. Call it at least as often as the alignment timeout matters."""
        return [] if self._aligning is None else self._try_cut(now_ms)

    def on_cancelled(self, barrier: Barrier) -> Actions:
        """The coordinator aborted the checkpoint of this barrier."""
        return self._cancel(barrier)

    # -- inside -----------------------------------------------------------------------------------

    def _input(self, name: str) -> _Input:
        try:
            return self._inputs[name]
        except KeyError:
            known = ", ".join(sorted(self._inputs)) or "none"
            raise UnknownInput(f"stage {self._stage!r} has no input {name!r} (it has: {known})") from None

    def _active(self, checkpoint_id: int) -> _Alignment | None:
        if self._aligning is not None and self._aligning.barrier.checkpoint_id == checkpoint_id:
            return self._aligning
        for alignment in self._recording:
            if alignment.barrier.checkpoint_id == checkpoint_id:
                return alignment
        return None

    def _start(self, barrier: Barrier, now_ms: int) -> _Alignment:
        self._newest_id = barrier.checkpoint_id
        self._aligning = _Alignment(barrier, set(self._inputs), now_ms)
        return self._aligning

    def _overtake(self, name: str, checkpoint_id: int) -> Actions:
        """Channels are in order: what this input has not delivered before `checkpoint_id` never comes."""
        actions: Actions = []
        older = self._recording if self._aligning is None else [*self._recording, self._aligning]
        for alignment in tuple(older):
            if alignment.barrier.checkpoint_id < checkpoint_id and name in alignment.missing:
                self._abandon(alignment, AlignmentEvent.OVERTAKEN, actions)
        return actions

    def _why_ignored(self, checkpoint_id: int) -> IgnoreReason | None:
        if checkpoint_id in self._cancelled:
            return IgnoreReason.CANCELLED
        return IgnoreReason.STALE if checkpoint_id <= self._newest_id else None

    def _cancel(self, barrier: Barrier) -> Actions:
        checkpoint_id = barrier.checkpoint_id
        if checkpoint_id in self._cancelled:
            return [Ignored(None, checkpoint_id, IgnoreReason.CANCELLED)]
        self._cancelled[checkpoint_id] = None
        if len(self._cancelled) > _CANCELLED_REMEMBERED:
            del self._cancelled[next(iter(self._cancelled))]
        actions: Actions = []
        alignment = self._active(checkpoint_id)
        if alignment is not None:
            self._abandon(alignment, AlignmentEvent.CANCELLED, actions)
        else:
            # It may have been cut here already; and a reader downstream may still wait for its barrier.
            actions.append(Abandoned(checkpoint_id, AlignmentEvent.CANCELLED))
        if self._drained_by == checkpoint_id:
            self._drained_by = None
            self._reopen(actions)
        actions.append(Forward(barrier.as_cancel()))
        return actions

    def _abandon(self, alignment: _Alignment, why: AlignmentEvent, actions: Actions) -> None:
        alignment.move(why)
        if alignment is self._aligning:
            self._aligning = None
            self._outgrew_bound = False
            self._reopen(actions)
        else:
            self._recording.remove(alignment)
        actions.append(Abandoned(alignment.barrier.checkpoint_id, why))

    def _reopen(self, actions: Actions) -> None:
        for source in self._inputs.values():
            if source.closed:
                source.closed = False
                actions.append(Open(source.name))

    def _try_cut(self, now_ms: int) -> Actions:
        """Cut the checkpoint that is aligning if it may be cut now."""
        alignment = self._aligning
        if alignment is None:
            return []
        if not alignment.missing and not self._unconsumed:
            return self._cut(alignment, CutCause.ALIGNED, now_ms)
        cause = self._unaligned_cause(alignment, now_ms)
        if cause is None or (self._outgrew_bound and alignment.missing):
            return []
        if self._unconsumed_bytes > self._config.max_inflight_bytes:
            if alignment.said_over_bound:
                return []
            alignment.said_over_bound = True
            return [KeepsAligning(alignment.barrier.checkpoint_id, self._unconsumed_bytes)]
        return self._cut(alignment, cause, now_ms)

    def _unaligned_cause(self, alignment: _Alignment, now_ms: int) -> CutCause | None:
        if not self._may_cut_unaligned or alignment.barrier.is_drain:
            return None
        if self._config.unaligned == "always":
            return CutCause.ALWAYS
        if alignment.barrier.is_unaligned:
            return CutCause.FORCED
        if now_ms - alignment.started_ms >= self._config.timeout_ms:
            return CutCause.TIMEOUT
        return None

    def _cut(self, alignment: _Alignment, cause: CutCause, now_ms: int) -> Actions:
        barrier = alignment.barrier if cause is CutCause.ALIGNED else alignment.barrier.as_unaligned()
        positions = {name: source.position for name, source in self._inputs.items()}
        alignment_ms = now_ms - alignment.started_ms
        actions: Actions = [Cut(barrier, self._batch, positions, cause, alignment_ms, alignment.said_over_bound)]
        self._aligning = None
        self._outgrew_bound = False
        for name, source in self._inputs.items():
            if source.unconsumed or name in alignment.missing:
                alignment.in_flight[name] = InFlight(
                    name, source.position, source.last_sequence, source.unconsumed_bytes
                )
                alignment.inflight_bytes += source.unconsumed_bytes
        if alignment.missing:
            alignment.move(AlignmentEvent.CUT_WITH_LATE_BARRIERS)
            self._recording.append(alignment)
        else:
            alignment.move(AlignmentEvent.CUT_WITH_ALL_BARRIERS)
            actions.append(_captured(alignment))
        if barrier.is_drain:
            self._drained_by = barrier.checkpoint_id
        else:
            self._reopen(actions)
        return actions

    def _record(self, name: str, size_bytes: int) -> Iterable[Action]:
        """A segment came from an input whose barrier is late: it is in flight for those checkpoints."""
        actions: Actions = []
        for alignment in tuple(self._recording):
            if name not in alignment.missing:
                continue
            known = alignment.in_flight[name]
            alignment.in_flight[name] = InFlight(name, known.after, known.through + 1, known.size_bytes + size_bytes)
            alignment.inflight_bytes += size_bytes
            if alignment.inflight_bytes > self._config.max_inflight_bytes:
                self._outgrew_bound = True
                self._abandon(alignment, AlignmentEvent.OVER_BOUND, actions)
        return actions

    def _finish_recorded(self, alignment: _Alignment) -> Actions:
        if alignment.missing:
            return []
        alignment.move(AlignmentEvent.LAST_LATE_BARRIER)
        self._recording.remove(alignment)
        return [_captured(alignment)]


def _captured(alignment: _Alignment) -> Captured:
    ranges = tuple(found for found in alignment.in_flight.values() if found.through > found.after)
    return Captured(alignment.barrier.checkpoint_id, ranges, alignment.arrival)
