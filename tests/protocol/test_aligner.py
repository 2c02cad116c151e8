from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from tests.protocol.unchanged import unchanged
from tidegate.errors import BarrierConflict, ProtocolViolation, UnknownInput
from tidegate.protocol.aligner import (
    Abandoned,
    Action,
    Aligner,
    AlignmentEvent,
    AlignmentPhase,
    AlignmentProgress,
    Arrival,
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

DRAIN = int(Flag.DRAIN)
CANCEL = int(Flag.CANCEL)
FULL = int(Flag.FULL_SNAPSHOT)
UNALIGNED = int(Flag.UNALIGNED)

ALL_MODES: list[UnalignedMode] = ["never", "on_timeout", "always"]


class Stage:
    """An aligner with the clock, the batch counter and the channel positions that a runner keeps."""

    def __init__(
        self,
        *inputs: str,
        unaligned: UnalignedMode = "never",
        timeout_ms: int = 100,
        max_inflight_bytes: int = 1000,
        is_sink: bool = False,
        after_checkpoint: int = 0,
    ) -> None:
        config = AlignmentConfig(unaligned, timeout_ms, max_inflight_bytes)
        self.aligner = Aligner("joined", inputs, config, is_sink=is_sink, after_checkpoint=after_checkpoint)
        self.now_ms = 1_000
        self.batch = -1
        self.released = dict.fromkeys(inputs, 0)
        self.arrivals: dict[int, Arrival | None] = {}

    def segments(self, name: str, count: int = 1, size_bytes: int = 10) -> list[Action]:
        actions: list[Action] = []
        for _ in range(count):
            actions += self.aligner.on_segment(name, self.released[name] + 1, size_bytes)
            self.released[name] += 1
        return actions

    def barrier(self, name: str, checkpoint_id: int, flags: int = 0) -> list[Action]:
        return self._done(self.aligner.on_barrier(name, Barrier(checkpoint_id, checkpoint_id, flags), self.now_ms))

    def inject(self, checkpoint_id: int, flags: int = 0) -> list[Action]:
        return self._done(self.aligner.on_injected(Barrier(checkpoint_id, checkpoint_id, flags), self.now_ms))

    def commit(self, **positions: int) -> list[Action]:
        self.batch += 1
        return self._done(self.aligner.on_committed(self.batch, positions, self.now_ms))

    def wait(self, ms: int) -> list[Action]:
        self.now_ms += ms
        return self._done(self.aligner.on_time(self.now_ms))

    def _done(self, actions: Iterable[Action]) -> list[Action]:
        """How barriers came is kept aside: few tests are about that."""
        done = list(actions)
        self.arrivals.update((each.checkpoint_id, each.arrival) for each in captured(done))
        return [msgspec.structs.replace(each, arrival=None) if isinstance(each, Captured) else each for each in done]

    def cancel(self, checkpoint_id: int) -> list[Action]:
        return self.aligner.on_cancelled(Barrier(checkpoint_id, checkpoint_id))

    def under_way(self) -> list[int]:
        return list(self.aligner.checkpoints)

    @property
    def closed(self) -> set[str]:
        return {name for name in self.released if not self.aligner.is_open(name)}


def cuts(actions: list[Action]) -> list[Cut]:
    return [action for action in actions if isinstance(action, Cut)]


def captured(actions: list[Action]) -> list[Captured]:
    return [action for action in actions if isinstance(action, Captured)]


class TestAligned:
    def test_the_first_barrier_closes_its_input_and_no_other(self) -> None:
        stage = Stage("a", "b")
        assert stage.barrier("a", 1) == [Close("a")]
        assert stage.closed == {"a"}
        assert stage.under_way() == [1]
        assert stage.aligner.phase_of(1) is AlignmentPhase.ALIGNING
        assert stage.aligner.waiting_for(1) == {"b"}

    def test_when_all_are_at_the_barrier_and_all_is_consumed_the_stage_is_cut_and_flows_again(self) -> None:
        stage = Stage("a", "b")
        stage.segments("a", 2)
        stage.segments("b", 3)
        stage.commit(a=2, b=3)
        stage.barrier("a", 7, FULL)
        stage.now_ms += 30
        assert stage.barrier("b", 7, FULL) == [
            Close("b"),
            Cut(Barrier(7, 7, FULL), 0, {"a": 2, "b": 3}, CutCause.ALIGNED, 30),
            Captured(7, ()),
            Open("a"),
            Open("b"),
        ]
        assert stage.closed == set()
        assert stage.under_way() == []
        assert stage.aligner.phase_of(7) is None
        assert stage.aligner.waiting_for(7) == frozenset()

    def test_the_cut_waits_for_the_batch_that_consumed_everything_before_the_barrier(self) -> None:
        stage = Stage("a", "b")
        stage.segments("a", 2)
        stage.segments("b", 1)
        stage.barrier("a", 1)
        assert stage.barrier("b", 1) == [Close("b")]
        assert stage.commit(a=1, b=1) == []
        assert stage.closed == {"a", "b"}
        assert stage.commit(a=2) == [
            Cut(Barrier(1, 1), 1, {"a": 2, "b": 1}, CutCause.ALIGNED, 0),
            Captured(1, ()),
            Open("a"),
            Open("b"),
        ]

    def test_a_stage_with_one_input_follows_the_same_rule(self) -> None:
        stage = Stage("a")
        stage.segments("a")
        assert stage.barrier("a", 1) == [Close("a")]
        (cut,) = cuts(stage.commit(a=1))
        assert (cut.batch, cut.positions, cut.cause) == (0, {"a": 1}, CutCause.ALIGNED)

    def test_a_stage_that_never_committed_a_batch_is_cut_at_nothing_yet(self) -> None:
        stage = Stage("a")
        (cut,) = cuts(stage.barrier("a", 1))
        assert cut.batch is None
        assert cut.positions == {"a": 0}

    def test_an_input_that_is_ahead_waits_while_the_others_flow(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1)
        with unchanged(stage.aligner), pytest.raises(ProtocolViolation, match="it is closed"):
            stage.segments("a")
        assert stage.segments("b", 5) == []

    def test_two_checkpoints_are_cut_one_after_the_other(self) -> None:
        stage = Stage("a", "b")
        assert len(cuts(stage.barrier("a", 1) + stage.barrier("b", 1))) == 1
        stage.segments("a")
        stage.barrier("b", 2)
        assert stage.aligner.waiting_for(2) == {"a"}
        stage.barrier("a", 2)
        (cut,) = cuts(stage.commit(a=1))
        assert cut.barrier.checkpoint_id == 2

    def test_a_thousand_inputs_align(self) -> None:
        names = [f"input{number}" for number in range(1000)]
        stage = Stage(*names)
        for name in names:
            stage.segments(name)
        stage.commit(**dict.fromkeys(names, 1))
        for name in names[:-1]:
            assert stage.barrier(name, 1) == [Close(name)]
        assert stage.aligner.waiting_for(1) == {names[-1]}
        actions = stage.barrier(names[-1], 1)
        (cut,) = cuts(actions)
        assert cut.positions == dict.fromkeys(names, 1)
        assert actions[-1000:] == [Open(name) for name in names]

    def test_in_aligned_mode_a_silent_input_is_waited_for_however_long(self) -> None:
        stage = Stage("a", "b", unaligned="never", timeout_ms=1)
        stage.barrier("a", 1)
        assert stage.wait(10**9) == []
        assert stage.aligner.phase_of(1) is AlignmentPhase.ALIGNING

    def test_time_alone_does_nothing_where_nothing_aligns(self) -> None:
        stage = Stage("a", unaligned="always")
        assert stage.wait(10**9) == []
        assert stage.commit() == []


class TestUnalignedOnTimeout:
    def test_before_its_timeout_the_stage_aligns(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout", timeout_ms=100)
        stage.barrier("a", 1)
        assert stage.wait(99) == []
        stage.segments("b")
        assert stage.commit() == []
        (cut,) = cuts(stage.barrier("b", 1) + stage.commit(b=1))
        assert cut.cause is CutCause.ALIGNED
        assert not cut.barrier.is_unaligned

    def test_when_alignment_outlasts_its_timeout_the_stage_is_cut_at_its_latest_batch(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout", timeout_ms=100)
        stage.segments("a", 4)
        stage.segments("b", 3)
        stage.commit(a=1)
        stage.barrier("a", 1, FULL)
        stage.barrier("b", 1, FULL)
        assert stage.wait(100) == [
            Cut(Barrier(1, 1, FULL | UNALIGNED), 0, {"a": 1, "b": 0}, CutCause.TIMEOUT, 100),
            Captured(1, (InFlight("a", 1, 4, 30), InFlight("b", 0, 3, 30))),
            Open("a"),
            Open("b"),
        ]

    def test_a_silent_input_does_not_hold_the_checkpoint_up(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout", timeout_ms=100)
        stage.barrier("a", 1)
        assert stage.wait(100) == [
            Cut(Barrier(1, 1, UNALIGNED), None, {"a": 0, "b": 0}, CutCause.TIMEOUT, 100),
            Open("a"),
        ]
        assert stage.aligner.phase_of(1) is AlignmentPhase.RECORDING
        assert stage.aligner.waiting_for(1) == {"b"}

    @pytest.mark.parametrize("event", ["barrier", "batch"])
    def test_the_timeout_is_noticed_whatever_happens_after_it(self, event: str) -> None:
        stage = Stage("a", "b", "c", unaligned="on_timeout", timeout_ms=100)
        stage.segments("a", 2)
        stage.barrier("a", 1)
        stage.now_ms += 100
        happened = {
            "barrier": lambda: stage.barrier("b", 1),
            "batch": lambda: stage.commit(a=1),
        }
        (cut,) = cuts(happened[event]())
        assert cut.cause is CutCause.TIMEOUT

    def test_a_timeout_of_zero_cuts_at_the_first_barrier(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout", timeout_ms=0)
        (cut,) = cuts(stage.barrier("a", 1))
        assert cut.cause is CutCause.TIMEOUT

    def test_the_timeout_counts_from_the_first_barrier_of_each_checkpoint(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout", timeout_ms=100)
        stage.barrier("a", 1)
        stage.wait(90)
        stage.barrier("b", 1)
        stage.barrier("a", 2)
        assert stage.wait(99) == []
        (cut,) = cuts(stage.wait(1))
        assert cut.alignment_ms == 100

    def test_what_was_consumed_in_full_is_not_in_flight(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout")
        stage.segments("a", 2)
        stage.segments("b", 2)
        stage.commit(a=2)
        stage.barrier("a", 1)
        stage.barrier("b", 1)
        assert captured(stage.wait(100)) == [Captured(1, (InFlight("b", 0, 2, 20),))]


class TestForcedUnaligned:
    def test_the_config_forces_a_cut_at_the_first_barrier(self) -> None:
        stage = Stage("a", "b", unaligned="always", timeout_ms=10**6)
        stage.segments("a", 2)
        assert stage.barrier("a", 1) == [
            Close("a"),
            Cut(Barrier(1, 1, UNALIGNED), None, {"a": 0, "b": 0}, CutCause.ALWAYS, 0),
            Open("a"),
        ]

    def test_the_flag_forces_a_cut_at_the_first_barrier(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout", timeout_ms=10**6)
        (cut,) = cuts(stage.barrier("a", 1, UNALIGNED))
        assert cut.cause is CutCause.FORCED
        assert cut.barrier == Barrier(1, 1, UNALIGNED)

    def test_the_flag_on_a_later_barrier_forces_the_cut_when_it_comes(self) -> None:
        stage = Stage("a", "b", "c", unaligned="on_timeout", timeout_ms=10**6)
        assert cuts(stage.barrier("a", 1)) == []
        (cut,) = cuts(stage.barrier("b", 1, UNALIGNED))
        assert cut.cause is CutCause.FORCED
        assert stage.aligner.waiting_for(1) == {"c"}

    def test_a_stage_that_may_never_cut_unaligned_aligns_in_spite_of_the_flag_and_passes_it_on(self) -> None:
        stage = Stage("a", "b", unaligned="never")
        stage.segments("a")
        stage.barrier("a", 1, UNALIGNED)
        assert stage.wait(10**9) == []
        assert stage.barrier("b", 1) == [Close("b")]
        (cut,) = cuts(stage.commit(a=1))
        assert cut.cause is CutCause.ALIGNED
        assert cut.barrier.is_unaligned

    def test_a_stage_that_is_aligned_anyway_says_so(self) -> None:
        stage = Stage("a", unaligned="always")
        stage.segments("a")
        stage.commit(a=1)
        (cut,) = cuts(stage.barrier("a", 1))
        assert cut.cause is CutCause.ALIGNED
        assert not cut.barrier.is_unaligned


class TestSinksAndDrains:
    @pytest.mark.parametrize("unaligned", ALL_MODES)
    @pytest.mark.parametrize("flags", [0, UNALIGNED])
    def test_a_sink_never_cuts_unaligned(self, unaligned: UnalignedMode, flags: int) -> None:
        stage = Stage("a", "b", unaligned=unaligned, timeout_ms=0, is_sink=True)
        stage.segments("b", 2)
        assert stage.barrier("a", 1, flags) == [Close("a")]
        assert stage.wait(10**9) == []
        assert stage.barrier("b", 1, flags) == [Close("b")]
        assert stage.commit(b=1) == []
        actions = stage.commit(b=2)
        assert [cut.cause for cut in cuts(actions)] == [CutCause.ALIGNED]
        assert captured(actions) == [Captured(1, ())]

    @pytest.mark.parametrize("unaligned", ALL_MODES)
    def test_a_drain_is_never_cut_unaligned(self, unaligned: UnalignedMode) -> None:
        stage = Stage("a", "b", unaligned=unaligned, timeout_ms=0)
        stage.segments("b", 2)
        assert stage.barrier("a", 1, DRAIN) == [Close("a")]
        assert stage.wait(10**9) == []
        assert stage.barrier("b", 1, DRAIN) == [Close("b")]
        assert not stage.aligner.is_drained
        assert stage.commit(b=2) == [
            Cut(Barrier(1, 1, DRAIN), 0, {"a": 0, "b": 2}, CutCause.ALIGNED, 10**9),
            Captured(1, ()),
        ]
        assert stage.aligner.is_drained

    def test_after_a_drain_nothing_flows(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1, DRAIN)
        stage.barrier("b", 1, DRAIN)
        assert stage.closed == {"a", "b"}
        with unchanged(stage.aligner), pytest.raises(ProtocolViolation, match="it is closed"):
            stage.segments("a")
        with unchanged(stage.aligner), pytest.raises(ProtocolViolation, match="behind the one"):
            stage.barrier("a", 2)
        assert stage.wait(10**9) == []
        assert stage.closed == {"a", "b"}

    def test_a_drain_that_is_cancelled_flows_again(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1, DRAIN)
        stage.barrier("b", 1, DRAIN)
        assert stage.cancel(1) == [
            Abandoned(1, AlignmentEvent.CANCELLED),
            Open("a"),
            Open("b"),
            Forward(Barrier(1, 1, CANCEL)),
        ]
        assert not stage.aligner.is_drained
        stage.segments("a")
        stage.barrier("a", 2)
        stage.barrier("b", 2)
        (cut,) = cuts(stage.commit(a=1))
        assert cut.barrier == Barrier(2, 2)
        assert stage.closed == set()

    def test_a_drain_that_is_cancelled_while_it_aligns_flows_again(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1, DRAIN)
        assert stage.cancel(1)[0] == Open("a")
        assert stage.closed == set()
        assert not stage.aligner.is_drained

    def test_cancelling_an_older_checkpoint_does_not_open_what_a_drain_closed(self) -> None:
        stage = Stage("a")
        stage.barrier("a", 1)
        stage.barrier("a", 2, DRAIN)
        assert stage.cancel(1) == [Abandoned(1, AlignmentEvent.CANCELLED), Forward(Barrier(1, 1, CANCEL))]
        assert stage.closed == {"a"}
        assert stage.aligner.is_drained

    def test_a_drained_source_is_drained(self) -> None:
        stage = Stage()
        (cut,) = cuts(stage.inject(1, DRAIN))
        assert cut.barrier.is_drain
        assert stage.aligner.is_drained

    def test_a_drained_source_is_not_cut_again_unless_the_drain_is_cancelled(self) -> None:
        stage = Stage()
        stage.inject(1, DRAIN)
        with unchanged(stage.aligner), pytest.raises(ProtocolViolation, match="barrier 2 behind the drain 1"):
            stage.inject(2)
        stage.cancel(1)
        assert cuts(stage.inject(2))


class TestCancel:
    def test_a_cancel_in_the_channel_abandons_the_checkpoint_opens_the_gates_and_is_forwarded(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1)
        assert stage.barrier("b", 1, CANCEL) == [
            Open("a"),
            Abandoned(1, AlignmentEvent.CANCELLED),
            Forward(Barrier(1, 1, CANCEL)),
        ]
        assert stage.closed == set()
        assert stage.under_way() == []

    def test_a_cancel_out_of_band_does_the_same(self) -> None:
        by_channel, out_of_band = Stage("a", "b"), Stage("a", "b")
        by_channel.barrier("a", 1)
        out_of_band.barrier("a", 1)
        assert out_of_band.cancel(1) == by_channel.barrier("b", 1, CANCEL)

    def test_a_cancel_while_recording_abandons_the_recording(self) -> None:
        stage = Stage("a", "b", unaligned="always")
        stage.barrier("a", 1)
        assert stage.cancel(1) == [Abandoned(1, AlignmentEvent.CANCELLED), Forward(Barrier(1, 1, CANCEL))]
        assert stage.under_way() == []
        assert stage.segments("b", 1, size_bytes=10**9) == []

    def test_a_cancel_of_a_checkpoint_that_was_cut_here_is_told_and_forwarded(self) -> None:
        stage = Stage("a")
        stage.barrier("a", 1)
        assert stage.cancel(1) == [Abandoned(1, AlignmentEvent.CANCELLED), Forward(Barrier(1, 1, CANCEL))]

    def test_a_cancel_is_forwarded_once_however_many_inputs_bring_it(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1)
        stage.cancel(1)
        with unchanged(stage.aligner):
            assert stage.barrier("a", 1, CANCEL) == [Ignored(None, 1, IgnoreReason.CANCELLED)]
            assert stage.barrier("b", 1, CANCEL) == [Ignored(None, 1, IgnoreReason.CANCELLED)]
            assert stage.cancel(1) == [Ignored(None, 1, IgnoreReason.CANCELLED)]

    def test_a_barrier_that_comes_after_its_cancel_is_ignored_and_closes_nothing(self) -> None:
        stage = Stage("a", "b")
        stage.cancel(1)
        with unchanged(stage.aligner):
            assert stage.barrier("a", 1) == [Ignored("a", 1, IgnoreReason.CANCELLED)]
        assert stage.closed == set()
        assert cuts(stage.barrier("a", 2) + stage.barrier("b", 2))

    def test_a_cancel_leaves_other_checkpoints_alone(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout", timeout_ms=100)
        stage.barrier("a", 1)
        stage.wait(100)
        stage.barrier("a", 2)
        assert stage.under_way() == [1, 2]
        stage.cancel(1)
        assert stage.under_way() == [2]
        assert stage.closed == {"a"}
        stage.cancel(2)
        assert stage.under_way() == []

    def test_the_newest_thousand_cancels_are_remembered(self) -> None:
        stage = Stage("a", "b")
        for number in range(1, 3001):
            stage.cancel(number)
        for number in range(2001, 3001):
            assert stage.barrier("a", number) == [Ignored("a", number, IgnoreReason.CANCELLED)]
        # One that was forgotten starts an alignment in vain, which the next barrier overtakes.
        assert stage.barrier("a", 1) == [Close("a")]
        assert stage.barrier("b", 3001) == [
            Open("a"),
            Abandoned(1, AlignmentEvent.OVERTAKEN),
            Close("b"),
        ]


class TestBarriersThatDoNotFit:
    def test_a_duplicate_does_not_count_twice(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1)
        with unchanged(stage.aligner):
            assert stage.barrier("a", 1) == [Ignored("a", 1, IgnoreReason.DUPLICATE)]
        assert stage.aligner.waiting_for(1) == {"b"}

    def test_a_duplicate_while_recording_does_not_count_either(self) -> None:
        stage = Stage("a", "b", unaligned="always")
        stage.barrier("a", 1)
        with unchanged(stage.aligner):
            assert stage.barrier("a", 1) == [Ignored("a", 1, IgnoreReason.DUPLICATE)]

    def test_a_barrier_of_a_checkpoint_that_has_ended_is_stale(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1)
        stage.barrier("b", 1)
        with unchanged(stage.aligner):
            assert stage.barrier("a", 1) == [Ignored("a", 1, IgnoreReason.STALE)]

    def test_a_barrier_older_than_the_one_that_aligns_is_stale_and_leaves_its_input_open(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 5)
        with unchanged(stage.aligner):
            assert stage.barrier("b", 4) == [Ignored("b", 4, IgnoreReason.STALE)]
        assert stage.closed == {"a"}
        assert cuts(stage.barrier("b", 5))

    def test_an_unknown_input_is_refused_whatever_it_sends(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1)
        aligner = stage.aligner
        with unchanged(aligner), pytest.raises(UnknownInput, match=r"'joined' has no input 'c' .*a, b"):
            aligner.on_barrier("c", Barrier(1, 1), 0)
        with unchanged(aligner), pytest.raises(UnknownInput):
            aligner.on_barrier("c", Barrier(1, 1, CANCEL), 0)
        with unchanged(aligner), pytest.raises(UnknownInput):
            aligner.on_segment("c", 1, 1)
        with unchanged(aligner), pytest.raises(UnknownInput):
            aligner.on_committed(0, {"c": 0}, 0)
        with unchanged(aligner), pytest.raises(UnknownInput):
            aligner.is_open("c")

    @pytest.mark.parametrize(
        "conflicting",
        [Barrier(1, 2), Barrier(1, 1, FULL), Barrier(1, 1, DRAIN)],
        ids=["another epoch", "a full snapshot", "a drain"],
    )
    @pytest.mark.parametrize("unaligned", ALL_MODES)
    def test_barriers_of_one_checkpoint_must_agree(self, conflicting: Barrier, unaligned: UnalignedMode) -> None:
        stage = Stage("a", "b", unaligned=unaligned)
        stage.barrier("a", 1)
        with unchanged(stage.aligner), pytest.raises(BarrierConflict, match="'b' sent"):
            stage.aligner.on_barrier("b", conflicting, stage.now_ms)

    def test_a_barrier_that_overtakes_another_abandons_it_because_it_can_no_longer_complete(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1)
        assert stage.barrier("b", 2) == [Open("a"), Abandoned(1, AlignmentEvent.OVERTAKEN), Close("b")]
        assert stage.under_way() == [2]
        assert stage.aligner.waiting_for(2) == {"a"}
        assert cuts(stage.barrier("a", 2))

    def test_a_barrier_behind_a_closed_gate_is_refused(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1)
        with unchanged(stage.aligner), pytest.raises(ProtocolViolation, match="behind the one"):
            stage.barrier("a", 2)

    def test_barriers_of_two_checkpoints_never_mix(self) -> None:
        stage = Stage("a", "b")
        stage.barrier("a", 1)
        assert cuts(stage.barrier("b", 2)) == []
        assert stage.aligner.waiting_for(1) == frozenset()
        assert stage.aligner.waiting_for(2) == {"a"}

    @pytest.mark.parametrize("sequence", [0, 2, 4, 5])
    def test_segments_come_in_order_without_gaps(self, sequence: int) -> None:
        stage = Stage("a")
        stage.segments("a", 2)
        with unchanged(stage.aligner), pytest.raises(ProtocolViolation, match="after 2"):
            stage.aligner.on_segment("a", sequence, 10)
        assert stage.segments("a") == []

    def test_inputs_are_named_once(self) -> None:
        with pytest.raises(ProtocolViolation, match="names an input twice"):
            Stage("a", "b", "a")


class TestCommittedBatches:
    @pytest.mark.parametrize("batch", [3, 4])
    def test_batches_only_grow(self, batch: int) -> None:
        stage = Stage("a")
        stage.aligner.on_committed(4, {}, 0)
        with (
            unchanged(stage.aligner),
            pytest.raises(ProtocolViolation, match=f"batch {batch} committed after 4"),
        ):
            stage.aligner.on_committed(batch, {}, 0)

    def test_a_batch_consumes_no_more_than_was_released(self) -> None:
        stage = Stage("a", "b")
        stage.segments("a", 2)
        stage.segments("b", 2)
        with unchanged(stage.aligner), pytest.raises(ProtocolViolation, match="'b' up to 3"):
            stage.commit(a=1, b=3)

    def test_a_batch_does_not_take_back_what_was_consumed(self) -> None:
        stage = Stage("a", "b")
        stage.segments("a", 2)
        stage.segments("b", 2)
        stage.commit(a=2)
        with unchanged(stage.aligner), pytest.raises(ProtocolViolation, match="'a' up to 1, but it was at 2"):
            stage.commit(b=1, a=1)

    def test_inputs_that_a_batch_did_not_move_may_be_left_out(self) -> None:
        stage = Stage("a", "b")
        stage.segments("a", 2)
        stage.commit(a=1)
        stage.commit()
        stage.commit(a=2)
        stage.barrier("a", 1)
        (cut,) = cuts(stage.barrier("b", 1))
        assert (cut.batch, cut.positions) == (2, {"a": 2, "b": 0})


class TestInFlight:
    def test_each_range_names_its_input_its_numbers_and_its_bytes(self) -> None:
        stage = Stage("a", "b", "c", unaligned="on_timeout", max_inflight_bytes=10**6)
        for size_bytes in (1, 2, 4, 8):
            stage.segments("a", size_bytes=size_bytes)
        for size_bytes in (100, 200):
            stage.segments("b", size_bytes=size_bytes)
        stage.segments("c", size_bytes=1000)
        stage.commit(a=2, c=1)
        for name in "abc":
            stage.barrier(name, 1)
        assert captured(stage.wait(100)) == [
            Captured(1, (InFlight("a", 2, 4, 12), InFlight("b", 0, 2, 300))),
        ]

    def test_what_a_late_input_delivers_before_its_barrier_is_in_flight_too(self) -> None:
        stage = Stage("a", "b", unaligned="always")
        stage.segments("b", 1, size_bytes=7)
        stage.barrier("a", 1)
        assert stage.segments("a", 3) == []
        assert stage.segments("b", 2, size_bytes=11) == []
        # What is consumed meanwhile was not consumed at the cut.
        assert stage.commit(a=3, b=2) == []
        assert stage.barrier("b", 1) == [Captured(1, (InFlight("b", 0, 3, 29),))]
        assert stage.under_way() == []
        assert stage.closed == set()

    def test_several_late_barriers_close_the_recording_when_the_last_has_come(self) -> None:
        stage = Stage("a", "b", "c", unaligned="always")
        stage.barrier("a", 1)
        stage.segments("b")
        assert stage.barrier("b", 1) == []
        assert stage.aligner.waiting_for(1) == {"c"}
        stage.segments("b", 4)
        stage.segments("c", 2)
        assert stage.barrier("c", 1) == [Captured(1, (InFlight("b", 0, 1, 10), InFlight("c", 0, 2, 20)))]

    def test_it_is_told_how_late_the_last_barrier_was_and_in_which_input(self) -> None:
        stage = Stage("a", "b", "c", unaligned="always")
        stage.segments("b", 2)
        stage.barrier("a", 1)
        stage.now_ms += 40
        stage.barrier("b", 1)
        stage.now_ms += 60
        stage.barrier("a", 2)  # another one that is recorded meanwhile
        stage.barrier("c", 1)
        stage.now_ms += 5
        stage.barrier("b", 2)
        stage.barrier("c", 2)
        assert stage.arrivals == {1: Arrival("c", 100, 2), 2: Arrival("c", 5, 2)}
        source = Stage(unaligned="always")
        source.inject(1)
        assert source.arrivals == {1: None}

    def test_a_late_input_that_delivered_nothing_has_nothing_in_flight(self) -> None:
        stage = Stage("a", "b", unaligned="always")
        stage.segments("b", 2)
        stage.commit(b=2)
        stage.barrier("a", 1)
        assert stage.barrier("b", 1) == [Captured(1, ())]

    def test_a_new_checkpoints_barrier_is_not_swallowed_while_recording(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout", timeout_ms=100)
        stage.barrier("a", 1)
        stage.wait(100)
        assert stage.barrier("a", 2) == [Close("a")]
        assert stage.under_way() == [1, 2]
        assert stage.aligner.phase_of(1) is AlignmentPhase.RECORDING
        assert stage.aligner.phase_of(2) is AlignmentPhase.ALIGNING
        stage.segments("b")
        assert stage.barrier("b", 1) == [Captured(1, (InFlight("b", 0, 1, 10),))]
        assert stage.barrier("b", 2) == [Close("b")]
        (cut,) = cuts(stage.commit(b=1))
        assert (cut.barrier.checkpoint_id, cut.cause) == (2, CutCause.ALIGNED)

    def test_two_checkpoints_record_at_once_each_its_own(self) -> None:
        stage = Stage("a", "b", unaligned="always")
        stage.segments("b")
        stage.barrier("a", 1)
        stage.segments("b")
        stage.commit(b=1)
        stage.barrier("a", 2)
        stage.segments("b")
        assert stage.under_way() == [1, 2]
        assert stage.barrier("b", 1) == [Captured(1, (InFlight("b", 0, 3, 30),))]
        stage.segments("b")
        assert stage.barrier("b", 2) == [Captured(2, (InFlight("b", 1, 4, 30),))]

    def test_a_recording_that_is_overtaken_is_abandoned(self) -> None:
        stage = Stage("a", "b", unaligned="always")
        stage.barrier("a", 1)
        actions = stage.barrier("b", 2)
        assert actions[0] == Abandoned(1, AlignmentEvent.OVERTAKEN)
        assert stage.under_way() == [2]

    def test_a_newer_barrier_of_an_input_that_delivered_the_older_overtakes_nothing(self) -> None:
        stage = Stage("a", "b", unaligned="always")
        stage.barrier("a", 1)
        stage.barrier("a", 2)
        assert stage.under_way() == [1, 2]


class TestTheBound:
    def test_over_the_bound_the_stage_keeps_aligning_and_says_so_once(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout", timeout_ms=100, max_inflight_bytes=25)
        stage.segments("a", 3)
        stage.barrier("a", 1)
        assert stage.wait(99) == []
        assert stage.wait(1) == [KeepsAligning(1, 30)]
        assert stage.wait(1) == []
        stage.segments("b")
        assert stage.wait(1) == []
        assert stage.aligner.phase_of(1) is AlignmentPhase.ALIGNING
        assert stage.closed == {"a"}

    def test_it_is_cut_when_its_backlog_has_drained_to_the_bound(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout", timeout_ms=100, max_inflight_bytes=20)
        stage.segments("a", 4)
        stage.barrier("a", 1)
        stage.wait(100)
        assert stage.commit(a=1) == []
        actions = stage.commit(a=2)
        (cut,) = cuts(actions)
        assert (cut.cause, cut.positions) == (CutCause.TIMEOUT, {"a": 2, "b": 0})
        assert (cut.alignment_ms, cut.over_bound) == (100, True)
        assert stage.barrier("b", 1) == [Captured(1, (InFlight("a", 2, 4, 20),))]

    def test_it_is_cut_aligned_where_that_comes_first(self) -> None:
        stage = Stage("a", unaligned="always", max_inflight_bytes=0)
        stage.segments("a", 2)
        assert stage.barrier("a", 1) == [Close("a"), KeepsAligning(1, 20)]
        assert stage.commit(a=1) == []
        (cut,) = cuts(stage.commit(a=2))
        assert cut.cause is CutCause.ALIGNED

    def test_how_much_is_in_flight_and_since_when_it_aligns_can_be_asked_all_the_while(self) -> None:
        stage = Stage("a", "b", unaligned="on_timeout", timeout_ms=100, max_inflight_bytes=40)
        assert stage.aligner.progress_of(1) is None
        stage.segments("a", 4)
        stage.barrier("a", 1)
        stage.segments("b")
        assert stage.aligner.progress_of(1) == AlignmentProgress(frozenset("b"), 1_000, 50, False)
        stage.wait(100)
        assert stage.aligner.progress_of(1) == AlignmentProgress(frozenset("b"), 1_000, 50, True)
        stage.commit(a=3)
        stage.segments("b")
        # It is cut, and records what comes before the barrier that is late.
        assert stage.aligner.progress_of(1) == AlignmentProgress(frozenset("b"), 1_000, 30, True)
        stage.commit(a=4, b=2)
        assert stage.barrier("b", 1) == [Captured(1, (InFlight("a", 3, 4, 10), InFlight("b", 0, 2, 20)))]
        assert stage.aligner.progress_of(1) is None

    def test_each_checkpoint_says_it_for_itself(self) -> None:
        stage = Stage("a", unaligned="always", max_inflight_bytes=0)
        stage.segments("a")
        assert KeepsAligning(1, 10) in stage.barrier("a", 1)
        stage.cancel(1)
        assert KeepsAligning(2, 10) in stage.barrier("a", 2)

    def test_the_bound_counts_all_inputs_together(self) -> None:
        stage = Stage("a", "b", unaligned="always", max_inflight_bytes=15)
        stage.segments("a")
        stage.segments("b")
        assert KeepsAligning(1, 20) in stage.barrier("a", 1)

    def test_a_recording_up_to_the_bound_goes_on_and_over_it_is_abandoned(self) -> None:
        stage = Stage("a", "b", unaligned="always", max_inflight_bytes=30)
        stage.segments("a", 1)
        stage.barrier("a", 1)
        assert stage.segments("b", 2) == []
        with_one_more = stage.segments("b", 1, size_bytes=1)
        assert with_one_more == [Abandoned(1, AlignmentEvent.OVER_BOUND)]
        assert stage.under_way() == []
        # The segment itself was released all the same.
        assert stage.commit(b=3) == []
        with unchanged(stage.aligner):
            assert stage.barrier("b", 1) == [Ignored("b", 1, IgnoreReason.STALE)]

    def test_a_recording_over_the_bound_does_not_abandon_a_younger_one(self) -> None:
        stage = Stage("a", "b", unaligned="always", max_inflight_bytes=30)
        stage.barrier("a", 1)
        stage.segments("b", 2)
        stage.commit(b=2)
        stage.barrier("a", 2)
        assert stage.segments("b", 2) == [Abandoned(1, AlignmentEvent.OVER_BOUND)]
        assert stage.under_way() == [2]

    def test_after_a_recording_outgrew_the_bound_the_next_checkpoint_waits_for_every_barrier(self) -> None:
        stage = Stage("a", "b", unaligned="always", max_inflight_bytes=30)
        stage.segments("a")
        stage.barrier("a", 1)
        assert stage.segments("b", 3) == [Abandoned(1, AlignmentEvent.OVER_BOUND)]
        assert stage.barrier("a", 2) == [Close("a")]
        assert stage.wait(10**9) == []
        stage.commit(b=2)
        # The bound that was too small has cost one checkpoint and not all of them.
        actions = stage.barrier("b", 2)
        assert [cut.cause for cut in cuts(actions)] == [CutCause.ALWAYS]
        assert captured(actions) == [Captured(2, (InFlight("a", 0, 1, 10), InFlight("b", 2, 3, 10)))]

    def test_once_that_one_was_cut_the_stage_need_not_wait_for_every_barrier_any_more(self) -> None:
        stage = Stage("a", "b", unaligned="always", max_inflight_bytes=30)
        stage.barrier("a", 1)
        stage.segments("b", 4)
        stage.commit(b=4)
        stage.barrier("a", 2)
        assert cuts(stage.barrier("b", 2))
        assert cuts(stage.barrier("a", 3))
        assert stage.aligner.waiting_for(3) == {"b"}

    def test_nor_once_that_one_was_given_up_because_an_input_is_silent(self) -> None:
        stage = Stage("a", "b", unaligned="always", max_inflight_bytes=30)
        stage.barrier("a", 1)
        stage.segments("b", 4)
        stage.commit(b=4)
        assert cuts(stage.barrier("a", 2)) == []
        stage.cancel(2)
        assert cuts(stage.barrier("a", 3))

    def test_it_says_so_where_the_bound_is_exceeded_once_every_barrier_is_there(self) -> None:
        stage = Stage("a", "b", unaligned="always", max_inflight_bytes=30)
        stage.barrier("a", 1)
        stage.segments("b", 4)
        assert stage.barrier("a", 2) == [Close("a")]
        assert stage.barrier("b", 2) == [Close("b"), KeepsAligning(2, 40)]

    def test_segments_of_an_input_that_is_not_late_do_not_count(self) -> None:
        stage = Stage("a", "b", unaligned="always", max_inflight_bytes=30)
        stage.barrier("a", 1)
        assert stage.segments("a", 10) == []
        assert stage.under_way() == [1]


class TestASource:
    def test_it_is_cut_at_once_at_its_latest_batch(self) -> None:
        stage = Stage()
        stage.commit()
        stage.commit()
        assert stage.inject(1, FULL) == [
            Cut(Barrier(1, 1, FULL), 1, {}, CutCause.ALIGNED, 0),
            Captured(1, ()),
        ]

    def test_one_that_never_ran_a_batch_is_cut_at_nothing_yet(self) -> None:
        (cut,) = cuts(Stage().inject(1))
        assert cut.batch is None

    @pytest.mark.parametrize("unaligned", ALL_MODES)
    def test_it_is_always_aligned(self, unaligned: UnalignedMode) -> None:
        (cut,) = cuts(Stage(unaligned=unaligned).inject(1))
        assert cut.cause is CutCause.ALIGNED

    def test_a_barrier_that_it_has_taken_or_that_is_older_is_stale(self) -> None:
        stage = Stage()
        stage.inject(2)
        with unchanged(stage.aligner):
            assert stage.inject(2) == [Ignored(None, 2, IgnoreReason.STALE)]
            assert stage.inject(1) == [Ignored(None, 1, IgnoreReason.STALE)]

    def test_a_cancel_is_forwarded_and_its_barrier_ignored_afterwards(self) -> None:
        stage = Stage()
        assert stage.inject(1, CANCEL) == [
            Abandoned(1, AlignmentEvent.CANCELLED),
            Forward(Barrier(1, 1, CANCEL)),
        ]
        with unchanged(stage.aligner):
            assert stage.inject(1) == [Ignored(None, 1, IgnoreReason.CANCELLED)]


class TestARestoredStage:
    def restored(self) -> Aligner:
        return Aligner(
            "joined",
            ["a", "b"],
            AlignmentConfig("on_timeout", 100),
            batch=41,
            positions={"a": 10, "b": 20},
            after_checkpoint=7,
        )

    def test_it_continues_at_its_positions_and_batch(self) -> None:
        aligner = self.restored()
        with unchanged(aligner), pytest.raises(ProtocolViolation, match="after 10"):
            aligner.on_segment("a", 1, 1)
        aligner.on_segment("a", 11, 5)
        aligner.on_segment("b", 21, 5)
        with unchanged(aligner), pytest.raises(ProtocolViolation, match="after 41"):
            aligner.on_committed(41, {}, 0)
        aligner.on_committed(42, {"a": 11, "b": 21}, 0)
        aligner.on_barrier("a", Barrier(8, 8), 0)
        (cut,) = cuts(aligner.on_barrier("b", Barrier(8, 8), 0))
        assert (cut.batch, cut.positions) == (42, {"a": 11, "b": 21})

    def test_before_its_first_batch_it_is_cut_where_it_was_restored(self) -> None:
        aligner = self.restored()
        aligner.on_barrier("a", Barrier(8, 8), 0)
        (cut,) = cuts(aligner.on_barrier("b", Barrier(8, 8), 0))
        assert (cut.batch, cut.positions) == (41, {"a": 10, "b": 20})

    def test_what_was_in_flight_is_released_to_it_and_may_be_in_flight_again(self) -> None:
        aligner = self.restored()
        aligner.on_segment("a", 11, 5)
        aligner.on_segment("a", 12, 6)
        aligner.on_barrier("a", Barrier(8, 8), 0)
        aligner.on_barrier("b", Barrier(8, 8), 0)
        assert captured(aligner.on_time(100)) == [Captured(8, (InFlight("a", 10, 12, 11),), Arrival("b", 0, 2))]

    def test_a_position_of_an_unknown_input_is_refused(self) -> None:
        with pytest.raises(UnknownInput, match="no input 'b'"):
            Aligner("joined", ["a"], AlignmentConfig(), positions={"a": 1, "b": 3})

    def test_barriers_of_before_its_restore_are_stale(self) -> None:
        aligner = self.restored()
        with unchanged(aligner):
            assert aligner.on_barrier("a", Barrier(7, 7), 0) == [Ignored("a", 7, IgnoreReason.STALE)]
