"""The aligner against channels that are written out in full.

The model knows every message of every channel, so at each cut it can tell what lies before the barrier. It
does not predict what the aligner does next: it checks that each action is right and that none is missing.
"""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocol.search import Step, search, steps
from tests.protocol.unchanged import unchanged
from tidegate.errors import BarrierConflict, ProtocolViolation, UnknownInput
from tidegate.protocol.aligner import (
    Abandoned,
    Action,
    Aligner,
    AlignmentEvent,
    AlignmentPhase,
    AlignmentProgress,
    Captured,
    Close,
    Cut,
    CutCause,
    Forward,
    Ignored,
    IgnoreReason,
    InFlight,
    KeepsAligning,
    Open,
)
from tidegate.protocol.config import AlignmentConfig, UnalignedMode
from tidegate.protocol.messages import Barrier, Flag

TIMEOUT_MS = 20
DRAIN, UNALIGNED = int(Flag.DRAIN), int(Flag.UNALIGNED)
FLAGS = [0] * 12 + [int(Flag.FULL_SNAPSHOT), DRAIN, UNALIGNED]

which = st.integers(0, 11)  # taken modulo the number of inputs or checkpoints
sizes = st.sampled_from([0, 1, 10, 30])

coins = st.booleans()
STEPS = steps(
    (
        6,
        "an_upstream_sends_segments",
        {"number": which, "sent": st.lists(sizes, min_size=1, max_size=4), "is_read": coins},
    ),
    (
        6,
        "an_upstream_sends_its_next_barrier",
        {
            "number": which,
            "skipped": st.sampled_from([0, 0, 0, 0, 1]),
            "flags": st.sampled_from(FLAGS),
            "is_fallen_back": st.sampled_from([False] * 7 + [True]),
            "is_read": coins,
        },
    ),
    (4, "the_stage_reads", {"number": which}),
    (4, "spark_commits_a_batch", {"shares": st.tuples(*[st.integers(0, 4)] * 3), "jump": st.integers(1, 2)}),
    (4, "time_passes", {"ms": st.sampled_from([1, 9, TIMEOUT_MS, 50])}),
    (1, "the_coordinator_aborts_a_checkpoint", {"older": st.integers(0, 2)}),
    (1, "an_upstream_sends_a_cancel", {"number": which, "older": st.integers(0, 2)}),
    (1, "somebody_breaks_the_protocol", {"number": which, "what": st.integers(0, 3)}),
    (1, "a_checkpoint_that_every_upstream_sends_ends", {}),
)


class Channel:
    """All that an upstream ever wrote: sizes of segments, and barriers. The reader is at `cursor`."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.messages: list[int | Barrier] = []
        self.cursor = 0
        self.newest_barrier = 0
        self.consumed = start

    def count(self, through: int) -> int:
        """The number of the last segment among the first `through` messages."""
        return self.start + sum(isinstance(message, int) for message in self.messages[:through])

    @property
    def released(self) -> int:
        return self.count(self.cursor)

    def before(self, checkpoint_id: int) -> int | None:
        """The last segment before the barrier of this checkpoint; None if there is no such barrier."""
        for index, message in enumerate(self.messages):
            if isinstance(message, Barrier) and message.checkpoint_id == checkpoint_id and not message.is_cancel:
                return self.count(index)
        return None

    def size_bytes(self, after: int, through: int) -> int:
        segments = [message for message in self.messages if isinstance(message, int)]
        return sum(segments[after - self.start : through - self.start])


class Part:
    """A checkpoint at the stage, as the model sees it."""

    def __init__(self, barrier: Barrier, started_ms: int) -> None:
        self.barrier = barrier
        self.started_ms = started_ms
        self.is_unaligned = barrier.is_unaligned
        self.arrived: set[str] = set()
        self.cut_at: dict[str, int] | None = None
        self.has_said_over_bound = False
        self.end: Captured | Abandoned | None = None


class AlignerAgainstAModel(RuleBasedStateMachine):
    @initialize(
        starts=st.sampled_from([[0], [0, 7], [0, 0], [7, 0, 0], [0, 0, 0]]),
        mode=st.sampled_from(["on_timeout", "on_timeout", "always", "always", "never"]),
        bound=st.sampled_from([10**6, 60, 25, 0]),
        is_sink=st.sampled_from([False] * 5 + [True]),
        batch=st.sampled_from([None, 5]),
    )
    def start(self, starts: list[int], mode: UnalignedMode, bound: int, is_sink: bool, batch: int | None) -> None:
        self.channels = {f"input{number}": Channel(start) for number, start in enumerate(starts)}
        self.names = list(self.channels)
        self.mode = mode
        self.bound = bound
        self.is_sink = is_sink
        self.batch = batch
        self.now_ms = 0
        self.triggered: list[Barrier] = []
        self.newest_started = 0
        self.told_cancelled: set[int] = set()
        self.parts: dict[int, Part] = {}
        self.closed: set[str] = set()
        self.has_outgrown_bound = False
        self.drained_by: int | None = None
        self.aligner = Aligner(
            "joined",
            self.names,
            AlignmentConfig(mode, TIMEOUT_MS, bound),
            is_sink=is_sink,
            batch=batch,
            positions={name: channel.start for name, channel in self.channels.items()},
        )

    # -- what the model can tell ------------------------------------------------------------------

    @property
    def active(self) -> dict[int, Part]:
        return {number: part for number, part in self.parts.items() if part.end is None}

    @property
    def aligning(self) -> Part | None:
        return next((part for part in self.active.values() if part.cut_at is None), None)

    def missing(self, part: Part) -> set[str]:
        return set(self.names) - part.arrived

    @property
    def unconsumed_bytes(self) -> int:
        return sum(channel.size_bytes(channel.consumed, channel.released) for channel in self.channels.values())

    @property
    def everything_is_consumed(self) -> bool:
        return all(channel.consumed == channel.released for channel in self.channels.values())

    def unaligned_cause(self, part: Part) -> CutCause | None:
        if self.is_sink or self.mode == "never" or part.barrier.is_drain:
            return None
        if self.mode == "always":
            return CutCause.ALWAYS
        if part.is_unaligned:
            return CutCause.FORCED
        return CutCause.TIMEOUT if self.now_ms - part.started_ms >= TIMEOUT_MS else None

    def in_flight(self, part: Part) -> tuple[InFlight, ...]:
        """What lies between the cut and the barrier, or as far as the input has been read."""
        assert part.cut_at is not None
        found = []
        for name, channel in self.channels.items():
            after, before = part.cut_at[name], channel.before(part.barrier.checkpoint_id)
            arrived = name in part.arrived and before is not None
            through = before if arrived and before is not None else channel.released
            if through > after:
                found.append(InFlight(name, after, through, channel.size_bytes(after, through)))
        return tuple(found)

    # -- what the aligner wants -------------------------------------------------------------------

    def obey(self, actions: list[Action], about: Barrier | None = None, input_: str | None = None) -> None:
        """Check and do what is asked. `about`, `input_`: the barrier that was told, and by whom."""
        for action in actions:
            match action:
                case Close(name):
                    assert name == input_
                    self.closed.add(name)
                case Open(name):
                    assert name in self.closed
                    self.closed.remove(name)
                case Cut():
                    self.on_cut(action)
                case Captured():
                    self.on_captured(action)
                case KeepsAligning():
                    self.on_keeps_aligning(action)
                case Abandoned():
                    self.on_abandoned(action, about, input_)
                case Forward(barrier):
                    assert about is not None
                    assert barrier == about.as_cancel()
                    assert barrier.checkpoint_id not in self.told_cancelled
                case Ignored():
                    raise AssertionError(f"{about} of {input_} was ignored: {action}")

    def on_cut(self, cut: Cut) -> None:
        part = self.active[cut.barrier.checkpoint_id]
        assert part is self.aligning
        assert cut.batch == self.batch
        assert cut.positions == {name: channel.consumed for name, channel in self.channels.items()}
        assert cut.alignment_ms == self.now_ms - part.started_ms
        is_aligned = not self.missing(part) and self.everything_is_consumed
        assert cut.cause is (CutCause.ALIGNED if is_aligned else self.unaligned_cause(part))
        assert cut.over_bound == part.has_said_over_bound
        may_say_unaligned = part.is_unaligned or not is_aligned
        assert cut.barrier.flags == part.barrier.flags | (UNALIGNED if may_say_unaligned else 0)
        if not is_aligned:
            assert self.unconsumed_bytes <= self.bound
            assert not (self.has_outgrown_bound and self.missing(part))
        self.has_outgrown_bound = False
        for name, channel in self.channels.items():
            before = channel.before(cut.barrier.checkpoint_id)
            assert before is None or channel.consumed <= before, f"{name} was consumed past the barrier"
        part.cut_at = cut.positions
        if cut.barrier.is_drain:
            self.drained_by = cut.barrier.checkpoint_id

    def on_captured(self, captured: Captured) -> None:
        part = self.active[captured.checkpoint_id]
        assert not self.missing(part)
        assert captured.in_flight == self.in_flight(part)
        assert sum(found.size_bytes for found in captured.in_flight) <= self.bound
        assert not (self.is_sink and captured.in_flight)
        assert not (part.barrier.is_drain and captured.in_flight)
        part.end = captured

    def on_keeps_aligning(self, said: KeepsAligning) -> None:
        part = self.active[said.checkpoint_id]
        assert part is self.aligning
        assert self.unaligned_cause(part) is not None
        assert said.inflight_bytes == self.unconsumed_bytes > self.bound
        assert not part.has_said_over_bound
        part.has_said_over_bound = True

    def on_abandoned(self, abandoned: Abandoned, about: Barrier | None, input_: str | None) -> None:
        part = self.active.get(abandoned.checkpoint_id)
        if abandoned.why is AlignmentEvent.CANCELLED:
            assert about is not None
            assert about.checkpoint_id == abandoned.checkpoint_id
            if self.drained_by == abandoned.checkpoint_id:
                self.drained_by = None
            part = part or self.parts.get(abandoned.checkpoint_id)
        elif abandoned.why is AlignmentEvent.OVERTAKEN:
            assert part is not None
            assert about is not None
            assert about.checkpoint_id > abandoned.checkpoint_id
            assert input_ in self.missing(part)
        else:
            assert part is not None
            assert sum(found.size_bytes for found in self.in_flight(part)) > self.bound
            self.has_outgrown_bound = True
        if part is not None:
            if part is self.aligning:
                self.has_outgrown_bound = False
            part.end = abandoned

    @rule(step=STEPS)
    def something_happens(self, step: Step) -> None:
        name, drawn = step
        getattr(self, name)(**drawn)

    # -- what upstreams write ---------------------------------------------------------------------

    def channel(self, number: int) -> Channel:
        return self.channels[self.names[number % len(self.names)]]

    def an_upstream_sends_segments(self, number: int, sent: list[int], is_read: bool) -> None:
        self.channel(number).messages += sent
        if is_read:
            self.the_stage_reads(number)

    def an_upstream_sends_its_next_barrier(
        self, number: int, skipped: int, flags: int, is_fallen_back: bool, is_read: bool
    ) -> None:
        """Of a checkpoint that others have sent already, or of a new one. It may have missed some."""
        channel = self.channel(number)
        while len(ahead := self.not_sent(channel)) <= skipped:
            self.trigger(flags)
        barrier = ahead[skipped]
        channel.newest_barrier = barrier.checkpoint_id
        falls_back = is_fallen_back and self.mode != "never" and not barrier.is_drain
        channel.messages.append(barrier.as_unaligned() if falls_back else barrier)
        if is_read:
            self.the_stage_reads(number)

    def not_sent(self, channel: Channel) -> list[Barrier]:
        return [each for each in self.triggered if each.checkpoint_id > channel.newest_barrier]

    def trigger(self, flags: int) -> Barrier:
        newest = self.triggered[-1].checkpoint_id if self.triggered else 0
        self.triggered.append(Barrier(newest + 1, newest + 1, flags))
        return self.triggered[-1]

    def an_upstream_sends_a_cancel(self, number: int, older: int) -> None:
        channel = self.channel(number)
        if self.triggered:
            barrier = self.triggered[-1 - older % len(self.triggered)]
            channel.messages.append(barrier.as_cancel())
            channel.newest_barrier = max(channel.newest_barrier, barrier.checkpoint_id)

    # -- what the stage does ----------------------------------------------------------------------

    def the_stage_reads(self, number: int) -> None:
        while self.read(self.names[number % len(self.names)]):
            pass

    def read(self, name: str) -> bool:
        """Whether there was anything to be read."""
        channel = self.channels[name]
        if channel.cursor == len(channel.messages):
            return False
        message = channel.messages[channel.cursor]
        if not self.aligner.is_open(name):
            self.refuses_behind_a_closed_gate(name, message)
            return False
        channel.cursor += 1
        if isinstance(message, int):
            self.obey(list(self.aligner.on_segment(name, channel.released, message)))
        elif message.is_cancel:
            self.cancel(message, name)
        else:
            self.deliver(name, message)
        return True

    def refuses_behind_a_closed_gate(self, name: str, message: int | Barrier) -> None:
        if isinstance(message, int):
            with unchanged(self.aligner), pytest.raises(ProtocolViolation):
                self.aligner.on_segment(name, self.channels[name].released + 1, message)
        elif not message.is_cancel and self.why_ignored(message.checkpoint_id) is None:
            with unchanged(self.aligner), pytest.raises(ProtocolViolation):
                self.aligner.on_barrier(name, message, self.now_ms)

    def deliver(self, name: str, barrier: Barrier) -> None:
        number = barrier.checkpoint_id
        why = self.why_ignored(number)
        if why is not None:
            with unchanged(self.aligner):
                assert self.aligner.on_barrier(name, barrier, self.now_ms) == [Ignored(name, number, why)]
            return
        overtaken = {older for older, part in self.active.items() if older < number and name in self.missing(part)}
        actions = self.aligner.on_barrier(name, barrier, self.now_ms)
        assert overtaken == {
            action.checkpoint_id
            for action in actions
            if isinstance(action, Abandoned) and action.why is AlignmentEvent.OVERTAKEN
        }
        # First the older ones are given up, then the new one starts.
        split = len(list(takewhile(lambda action: isinstance(action, Open | Abandoned), actions)))
        self.obey(actions[:split], barrier, name)
        part = self.parts.setdefault(number, Part(barrier, self.now_ms))
        part.is_unaligned |= barrier.is_unaligned and part.cut_at is None
        part.arrived.add(name)
        self.newest_started = max(self.newest_started, number)
        self.obey(actions[split:], barrier, name)

    def why_ignored(self, number: int) -> IgnoreReason | None:
        if number in self.active:
            return None
        if number in self.told_cancelled:
            return IgnoreReason.CANCELLED
        return IgnoreReason.STALE if number <= self.newest_started else None

    def spark_commits_a_batch(self, shares: tuple[int, ...], jump: int) -> None:
        """Of what was released of each input it has consumed so many quarters."""
        positions = {}
        for (name, channel), quarters in zip(self.channels.items(), shares, strict=False):
            waiting = channel.released - channel.consumed
            taken = (waiting * quarters + 3) // 4
            if taken or quarters == 1:
                positions[name] = channel.consumed + taken
                channel.consumed += taken
        self.batch = (-1 if self.batch is None else self.batch) + jump
        self.obey(self.aligner.on_committed(self.batch, positions, self.now_ms))

    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        self.obey(self.aligner.on_time(self.now_ms))

    def the_coordinator_aborts_a_checkpoint(self, older: int) -> None:
        if self.triggered:
            self.cancel(self.triggered[-1 - older % len(self.triggered)], None)

    def cancel(self, barrier: Barrier, name: str | None) -> None:
        number = barrier.checkpoint_id
        was_told = number in self.told_cancelled
        tell = self.aligner
        actions = tell.on_cancelled(barrier) if name is None else tell.on_barrier(name, barrier, self.now_ms)
        if was_told:
            assert actions == [Ignored(None, number, IgnoreReason.CANCELLED)]
            return
        assert [each for each in actions if isinstance(each, Abandoned)] == [
            Abandoned(number, AlignmentEvent.CANCELLED)
        ]
        assert actions[-1] == Forward(barrier.as_cancel())
        self.obey(actions, barrier, name)
        self.told_cancelled.add(number)

    # -- what nobody may do -----------------------------------------------------------------------

    def somebody_breaks_the_protocol(self, number: int, what: int) -> None:
        tried = [
            self.a_segment_comes_out_of_order,
            self.a_stranger_sends,
            self.a_batch_consumes_what_was_not_released_or_takes_back,
            self.a_barrier_comes_twice_or_in_conflict,
        ]
        tried[what](number)

    def a_segment_comes_out_of_order(self, number: int) -> None:
        name = self.names[number % len(self.names)]
        released = self.channels[name].released
        for sequence in (released - 1, released, released + 2):
            with unchanged(self.aligner), pytest.raises(ProtocolViolation):
                self.aligner.on_segment(name, sequence, 1)

    def a_stranger_sends(self, number: int) -> None:
        with unchanged(self.aligner), pytest.raises(UnknownInput):
            self.aligner.on_segment("stranger", 1, 1)
        with unchanged(self.aligner), pytest.raises(UnknownInput):
            self.aligner.on_barrier("stranger", Barrier(self.newest_started + 1 + number, 1), self.now_ms)

    def a_batch_consumes_what_was_not_released_or_takes_back(self, number: int) -> None:
        name = self.names[number % len(self.names)]
        channel = self.channels[name]
        batch = 0 if self.batch is None else self.batch + 1
        for position in (channel.released + 1, channel.consumed - 1):
            with unchanged(self.aligner), pytest.raises(ProtocolViolation):
                self.aligner.on_committed(batch, {name: position}, self.now_ms)
        if self.batch is not None:
            with unchanged(self.aligner), pytest.raises(ProtocolViolation):
                self.aligner.on_committed(self.batch, {}, self.now_ms)

    def a_barrier_comes_twice_or_in_conflict(self, number: int) -> None:
        if not self.active:
            return
        part = list(self.active.values())[number % len(self.active)]
        checkpoint_id = part.barrier.checkpoint_id
        for name in self.names:
            if name in part.arrived:
                with unchanged(self.aligner):
                    assert self.aligner.on_barrier(name, part.barrier, self.now_ms) == [
                        Ignored(name, checkpoint_id, IgnoreReason.DUPLICATE)
                    ]
            else:
                other = Barrier(checkpoint_id, part.barrier.epoch + 1, part.barrier.flags)
                with unchanged(self.aligner), pytest.raises(BarrierConflict):
                    self.aligner.on_barrier(name, other, self.now_ms)

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def the_same_checkpoints_are_under_way(self) -> None:
        assert self.aligner.checkpoints == tuple(sorted(self.active))
        for number, part in self.active.items():
            recording = part.cut_at is not None
            phase = AlignmentPhase.RECORDING if recording else AlignmentPhase.ALIGNING
            assert self.aligner.phase_of(number) is phase
            assert self.aligner.waiting_for(number) == self.missing(part)
            captured = sum(found.size_bytes for found in self.in_flight(part)) if recording else self.unconsumed_bytes
            late = frozenset(self.missing(part))
            progress = AlignmentProgress(late, part.started_ms, captured, part.has_said_over_bound)
            assert self.aligner.progress_of(number) == progress

    @invariant()
    def gates_are_closed_exactly_where_the_barrier_of_the_aligning_checkpoint_has_arrived(self) -> None:
        assert {name for name in self.names if not self.aligner.is_open(name)} == self.closed
        assert self.aligner.is_drained == (self.drained_by is not None)
        if self.drained_by is not None:
            assert self.closed == set(self.names)
        else:
            assert self.closed == (set() if self.aligning is None else self.aligning.arrived)

    @invariant()
    def nothing_is_left_to_be_cut_that_could_be(self) -> None:
        part = self.aligning
        if part is not None:
            assert self.missing(part) or not self.everything_is_consumed
            waits_for_all = self.has_outgrown_bound and self.missing(part)
            if self.unaligned_cause(part) is not None and not waits_for_all:
                assert self.unconsumed_bytes > self.bound
                assert part.has_said_over_bound

    @invariant()
    def no_recording_outgrows_the_bound(self) -> None:
        for part in self.active.values():
            if part.cut_at is not None:
                assert sum(found.size_bytes for found in self.in_flight(part)) <= self.bound

    def a_checkpoint_that_every_upstream_sends_ends(self) -> None:
        """Liveness: whatever went before, the next checkpoint is captured, or given up by its bound alone."""
        if self.drained_by is not None:
            self.cancel(Barrier(self.drained_by, self.drained_by), None)
        barrier = self.trigger(0)
        for channel in self.channels.values():
            channel.messages.append(barrier)
            channel.newest_barrier = barrier.checkpoint_id
        while self.parts.get(barrier.checkpoint_id) is None or self.active:
            if self.drained_by is not None:
                self.cancel(Barrier(self.drained_by, self.drained_by), None)
            moved = [self.read(name) for name in self.names]
            waited = not self.everything_is_consumed
            self.spark_commits_a_batch((4, 4, 4), 1)
            assert any(moved) or waited, "the stage is stuck"
        end = self.parts[barrier.checkpoint_id].end
        assert isinstance(end, Captured) or (end is not None and end.why is AlignmentEvent.OVER_BOUND)


TestAlignerAgainstAModel = AlignerAgainstAModel.TestCase
TestAlignerAgainstAModel.settings = search(250, steps=50)
