from __future__ import annotations

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocol.search import Step, search, steps
from tests.protocol.unchanged import unchanged
from tidegate.errors import CheckpointInProgress, ProtocolViolation
from tidegate.protocol.injector import Injector
from tidegate.protocol.messages import MAX_U64, Barrier, Flag

CANCEL = int(Flag.CANCEL)


def test_with_nothing_pending_a_poll_takes_nothing() -> None:
    injector = Injector("orders")
    assert injector.poll() is None
    assert injector.pending == ()


def test_a_barrier_is_taken_once_with_the_coordinators_id_epoch_and_flags() -> None:
    injector = Injector("orders")
    barrier = Barrier(MAX_U64, 2**40, int(Flag.FULL_SNAPSHOT | Flag.DRAIN))
    injector.inject(barrier)
    assert injector.poll() == barrier
    assert injector.poll() is None


def test_each_source_has_its_own_injector_and_takes_its_own_barrier() -> None:
    injectors = [Injector("orders"), Injector("payments")]
    for injector in injectors:
        injector.inject(Barrier(1, 1))
    assert [injector.poll() for injector in injectors] == [Barrier(1, 1), Barrier(1, 1)]


def test_a_second_barrier_queues_behind_the_first() -> None:
    injector = Injector("orders", max_pending=2)
    injector.inject(Barrier(1, 1))
    injector.inject(Barrier(2, 2))
    assert injector.pending == (Barrier(1, 1), Barrier(2, 2))
    assert [injector.poll(), injector.poll(), injector.poll()] == [Barrier(1, 1), Barrier(2, 2), None]


def test_unless_told_otherwise_one_barrier_may_be_pending() -> None:
    injector = Injector("orders")
    injector.inject(Barrier(1, 1))
    with unchanged(injector), pytest.raises(CheckpointInProgress):
        injector.inject(Barrier(2, 2))


@pytest.mark.parametrize("max_pending", [1, 2, 3])
def test_one_more_than_may_be_pending_is_refused_and_replaces_nothing(max_pending: int) -> None:
    injector = Injector("orders", max_pending=max_pending)
    barriers = [Barrier(number, number) for number in range(1, max_pending + 1)]
    for barrier in barriers:
        injector.inject(barrier)
    with unchanged(injector), pytest.raises(CheckpointInProgress, match=r"'orders'.*checkpoint 1"):
        injector.inject(Barrier(9, 9))
    assert [injector.poll() for _ in barriers] == barriers
    injector.inject(Barrier(9, 9))
    assert injector.poll() == Barrier(9, 9)


@pytest.mark.parametrize("checkpoint_id", [4, 5])
def test_ids_only_grow_also_after_the_last_was_taken(checkpoint_id: int) -> None:
    injector = Injector("orders", max_pending=3)
    injector.inject(Barrier(5, 5))
    with unchanged(injector), pytest.raises(ProtocolViolation, match="ids only grow"):
        injector.inject(Barrier(checkpoint_id, 6))
    injector.poll()
    with unchanged(injector), pytest.raises(ProtocolViolation, match="ids only grow"):
        injector.inject(Barrier(checkpoint_id, 6))
    injector.inject(Barrier(6, 6))


def test_a_restored_source_takes_no_barrier_of_before_its_restore() -> None:
    injector = Injector("orders", after_checkpoint=7)
    with unchanged(injector), pytest.raises(ProtocolViolation, match="checkpoint 7 after 7"):
        injector.inject(Barrier(7, 7))
    injector.inject(Barrier(8, 8))
    assert injector.poll() == Barrier(8, 8)


def test_a_cancel_is_not_injected() -> None:
    injector = Injector("orders")
    with unchanged(injector), pytest.raises(ProtocolViolation, match=r"cancel\(1\)"):
        injector.inject(Barrier(1, 1, CANCEL))


def test_a_cancelled_barrier_that_was_not_taken_is_never_taken() -> None:
    injector = Injector("orders")
    injector.inject(Barrier(1, 1, int(Flag.DRAIN)))
    injector.cancel(Barrier(1, 1, int(Flag.DRAIN)))
    assert [injector.poll(), injector.poll()] == [Barrier(1, 1, CANCEL), None]


def test_a_cancelled_barrier_that_was_taken_is_followed_by_a_cancel() -> None:
    injector = Injector("orders")
    injector.inject(Barrier(1, 1))
    assert injector.poll() == Barrier(1, 1)
    injector.cancel(Barrier(1, 1))
    assert [injector.poll(), injector.poll()] == [Barrier(1, 1, CANCEL), None]


def test_a_cancelled_barrier_that_this_source_never_had_is_told_to_its_readers_and_not_taken_later() -> None:
    injector = Injector("orders")
    injector.cancel(Barrier(3, 3))
    with unchanged(injector), pytest.raises(ProtocolViolation, match="ids only grow"):
        injector.inject(Barrier(3, 3))
    assert [injector.poll(), injector.poll()] == [Barrier(3, 3, CANCEL), None]


def test_a_cancel_comes_before_the_barriers_of_later_checkpoints() -> None:
    injector = Injector("orders", max_pending=3)
    for number in (1, 2, 3):
        injector.inject(Barrier(number, number))
    assert injector.poll() == Barrier(1, 1)
    injector.cancel(Barrier(2, 2))
    injector.cancel(Barrier(1, 1))
    assert injector.pending == (Barrier(1, 1, CANCEL), Barrier(2, 2, CANCEL), Barrier(3, 3))


def test_a_barrier_that_is_cancelled_twice_while_pending_is_cancelled_once() -> None:
    injector = Injector("orders")
    injector.inject(Barrier(1, 1))
    injector.cancel(Barrier(1, 1))
    injector.cancel(Barrier(1, 1))
    assert injector.pending == (Barrier(1, 1, CANCEL),)


def test_cancels_that_wait_do_not_keep_new_barriers_out() -> None:
    injector = Injector("orders", max_pending=1)
    for number in (1, 2, 3):
        injector.inject(Barrier(number, number))
        injector.cancel(Barrier(number, number))
    injector.inject(Barrier(4, 4))
    assert injector.pending[-1] == Barrier(4, 4)
    assert [barrier.is_cancel for barrier in injector.pending] == [True, True, True, False]


STEPS = steps(
    (3, "inject", {"ahead": st.sampled_from([1, 1, 1, 2, 0, -1])}),
    (1, "cancel", {"ahead": st.integers(-3, 1)}),
    (2, "poll", {}),
)


class InjectorAgainstAModel(RuleBasedStateMachine):
    """The model is what the source's channel will hold: every barrier once, in order, or its CANCEL."""

    @initialize(max_pending=st.integers(1, 3), after=st.sampled_from([0, 5]))
    def start(self, max_pending: int, after: int) -> None:
        self.injector = Injector("orders", max_pending=max_pending, after_checkpoint=after)
        self.max_pending = max_pending
        self.largest = after
        self.queue: deque[Barrier] = deque()

    @rule(step=STEPS)
    def something_happens(self, step: Step) -> None:
        name, drawn = step
        getattr(self, name)(**drawn)

    def inject(self, ahead: int) -> None:
        barrier = Barrier(max(1, self.largest + ahead), 1)
        waiting = sum(not pending.is_cancel for pending in self.queue)
        if barrier.checkpoint_id <= self.largest or waiting == self.max_pending:
            with unchanged(self.injector), pytest.raises((ProtocolViolation, CheckpointInProgress)):
                self.injector.inject(barrier)
        else:
            self.injector.inject(barrier)
            self.queue.append(barrier)
            self.largest = barrier.checkpoint_id

    def cancel(self, ahead: int) -> None:
        barrier = Barrier(max(1, self.largest + ahead), 1)
        self.injector.cancel(barrier)
        older = [each for each in self.queue if each.checkpoint_id < barrier.checkpoint_id]
        newer = [each for each in self.queue if each.checkpoint_id > barrier.checkpoint_id]
        self.queue = deque([*older, Barrier(barrier.checkpoint_id, 1, CANCEL), *newer])
        self.largest = max(self.largest, barrier.checkpoint_id)

    def poll(self) -> None:
        assert self.injector.poll() == (self.queue.popleft() if self.queue else None)

    @invariant()
    def what_is_pending_is_in_order(self) -> None:
        assert self.injector.pending == tuple(self.queue)


TestInjectorAgainstAModel = InjectorAgainstAModel.TestCase
TestInjectorAgainstAModel.settings = search(60, steps=30)
