from __future__ import annotations

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocol.logs import complete, log_with, open_generation
from tests.protocol.search import Step, search, steps
from tests.protocol.unchanged import state_of, unchanged
from tidegate.errors import InvariantViolation
from tidegate.protocol.commit import CommitPermit, RetryPause, SinkCommits, permit_commit
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.coordinator import Coordinator, StageReport
from tidegate.protocol.decision_log import DecisionLog

PAUSE = RetryPause(first_ms=10, longest_ms=50)


def permits(*epochs: int) -> list[CommitPermit]:
    """One permit for each, of checkpoints with the same numbers."""
    log = log_with(*epochs, max_retained=99)
    return [permit_commit(log, epoch, 1) for epoch in epochs]


def names(calls: list[tuple[str, CommitPermit]]) -> list[tuple[str, int]]:
    return [(name, permit.epoch) for name, permit in calls]


class TestPermits:
    def test_a_record_of_the_decision_log_yields_a_permit(self) -> None:
        log = log_with()
        complete(log, 7, epoch=70)
        permit = permit_commit(log, 7, 1)
        assert (permit.checkpoint_id, permit.epoch, permit.generation) == (7, 70, 1)
        assert repr(permit) == "CommitPermit(7, epoch 70, generation 1)"

    def test_a_later_generation_commits_what_an_earlier_one_decided(self) -> None:
        log = log_with(7)
        open_generation(log, base=7)
        assert permit_commit(log, 7, 2).generation == 2

    @pytest.mark.parametrize("checkpoint_id", [1, 3, 4])
    def test_without_a_record_there_is_no_permit(self, checkpoint_id: int) -> None:
        log = log_with(2)
        with pytest.raises(InvariantViolation, match=f"checkpoint {checkpoint_id} was not decided"):
            permit_commit(log, checkpoint_id, 1)
        with pytest.raises(InvariantViolation):
            permit_commit(DecisionLog(), checkpoint_id, 1)

    def test_there_is_no_permit_for_a_checkpoint_that_was_skipped(self) -> None:
        log = log_with(1, 2)
        open_generation(log, base=1)
        with pytest.raises(InvariantViolation):
            permit_commit(log, 2, 2)

    @pytest.mark.parametrize("proof", [None, True, object(), "proof"])
    def test_a_permit_cannot_be_made_by_hand(self, proof: object) -> None:
        with pytest.raises(InvariantViolation, match="from the decision log and from nowhere else"):
            CommitPermit(1, 1, 1, _proof=proof)

    @pytest.mark.parametrize("name", ["checkpoint_id", "epoch", "generation", "anything"])
    def test_a_permit_cannot_be_changed(self, name: str) -> None:
        (permit,) = permits(1)
        with pytest.raises(AttributeError):
            setattr(permit, name, 2)


class TestRetryPause:
    def test_pauses_double_up_to_the_longest(self) -> None:
        pause = RetryPause(first_ms=10, longest_ms=55)
        assert [pause.after(failures) for failures in (1, 2, 3, 4, 5)] == [10, 20, 40, 55, 55]

    def test_a_hundred_thousand_failures_pause_as_long_as_any(self) -> None:
        assert RetryPause().after(100_000) == 30_000
        assert RetryPause().after(1) == 100


class TestSinkCommits:
    def test_with_nothing_permitted_nothing_is_due(self) -> None:
        commits = SinkCommits(["revenue", "audit"])
        assert commits.due(10**9) == []
        assert commits.pending == {}

    def test_a_permit_is_due_at_every_sink_and_is_called_once(self) -> None:
        commits = SinkCommits(["revenue", "audit"])
        commits.on_permit(permits(1)[0], now_ms=5)
        assert names(commits.due(5)) == [("revenue", 1), ("audit", 1)]
        assert commits.due(10**9) == []

    def test_the_last_sink_of_a_checkpoint_ends_it(self) -> None:
        commits = SinkCommits(["revenue", "audit"])
        commits.on_permit(permits(7)[0], now_ms=0)
        commits.due(0)
        assert commits.on_committed("audit", 0) is None
        assert commits.pending == {"revenue": (7, "")}
        assert commits.on_committed("revenue", 0) == 7
        assert commits.pending == {}

    def test_each_sink_commits_its_epochs_in_order_and_one_at_a_time(self) -> None:
        commits = SinkCommits(["revenue"])
        for permit in permits(1, 2, 3):
            commits.on_permit(permit, now_ms=0)
        committed = []
        for _ in range(3):
            ((name, permit),) = commits.due(0)
            assert commits.due(0) == []
            committed.append(permit.epoch)
            assert commits.on_committed(name, 0) == permit.checkpoint_id
        assert committed == [1, 2, 3]
        assert commits.due(10**9) == []

    def test_a_permit_that_comes_while_a_sink_commits_waits_behind(self) -> None:
        first, second = permits(1, 2)
        commits = SinkCommits(["revenue"])
        commits.on_permit(first, now_ms=0)
        commits.due(0)
        commits.on_permit(second, now_ms=0)
        assert commits.due(0) == []
        commits.on_committed("revenue", 0)
        assert names(commits.due(0)) == [("revenue", 2)]

    def test_a_fast_sink_does_not_wait_for_a_slow_one(self) -> None:
        first, second = permits(1, 2)
        commits = SinkCommits(["slow", "fast"])
        commits.on_permit(first, now_ms=0)
        commits.due(0)
        commits.on_permit(second, now_ms=0)
        assert commits.on_committed("fast", 0) is None
        assert names(commits.due(0)) == [("fast", 2)]
        assert commits.on_committed("fast", 0) is None
        assert commits.pending == {"slow": (1, "")}
        assert commits.on_committed("slow", 0) == 1
        commits.due(0)
        assert commits.on_committed("slow", 0) == 2

    @pytest.mark.parametrize("epoch", [1, 2])
    def test_an_epoch_out_of_order_is_refused(self, epoch: int) -> None:
        known = dict(zip((1, 2), permits(1, 2), strict=True))
        commits = SinkCommits(["revenue"])
        commits.on_permit(known[2], now_ms=0)
        with unchanged(commits), pytest.raises(InvariantViolation, match=f"epoch {epoch} permitted out of"):
            commits.on_permit(known[epoch], now_ms=0)

    @pytest.mark.parametrize("sinks", [["revenue"], ["audit", "revenue"], ["revenue", "audit"]])
    def test_an_epoch_out_of_order_is_refused_also_where_sinks_have_settled(self, sinks: list[str]) -> None:
        first, second = permits(1, 2)
        commits = SinkCommits(sinks)
        commits.on_permit(second, now_ms=0)
        commits.due(0)
        commits.on_committed("revenue", 0)
        with unchanged(commits), pytest.raises(InvariantViolation, match="epoch 1 permitted out of order, after 2"):
            commits.on_permit(first, now_ms=0)

    def test_where_there_are_sinks_a_permit_ends_nothing(self) -> None:
        assert SinkCommits(["revenue"]).on_permit(permits(1)[0], now_ms=0) is None

    def test_a_pipeline_without_sinks_has_nothing_to_commit_and_nothing_to_wait_for(self) -> None:
        commits = SinkCommits([])
        assert [commits.on_permit(permit, now_ms=0) for permit in permits(1, 2, 3)] == [1, 2, 3]
        assert commits.due(0) == []
        assert commits.pending == {}

    def test_without_sinks_checkpoints_go_on(self) -> None:
        coordinator = Coordinator(["orders"], CheckpointConfig(), generation=1, now_ms=0)
        commits = SinkCommits([])
        for permit in permits(*range(1, 6)):
            begin = coordinator.trigger(0)
            coordinator.on_report(StageReport("orders", permit.checkpoint_id, begin.attempt, 1, cut=1))
            coordinator.decide(permit.checkpoint_id)
            coordinator.on_slot_won(permit.checkpoint_id, 0)
            ended = commits.on_permit(permit, now_ms=0)
            assert ended is not None
            coordinator.on_sinks_committed(ended)

    @pytest.mark.parametrize("sinks", [[], ["revenue"], ["revenue", "audit"]])
    def test_what_every_sink_has_committed_leaves_nothing_behind(self, sinks: list[str]) -> None:
        many, one = SinkCommits(sinks), SinkCommits(sinks)
        *earlier, last = permits(*range(1, 20))
        for commits, permitted in ((many, [*earlier, last]), (one, [last])):
            for permit in permitted:
                commits.on_permit(permit, now_ms=0)
                for name, _ in commits.due(0):
                    commits.on_committed(name, 0)
        assert state_of(many) == state_of(one)


class TestFailedCommits:
    def test_unless_told_otherwise_the_first_pause_is_a_tenth_of_a_second(self) -> None:
        commits = SinkCommits(["revenue"])
        commits.on_permit(permits(1)[0], now_ms=0)
        commits.due(0)
        commits.on_failed("revenue", "no route", 0)
        assert commits.due(99) == []
        assert names(commits.due(100)) == [("revenue", 1)]

    def test_one_that_failed_is_tried_again_with_the_same_permit_after_growing_pauses(self) -> None:
        commits = SinkCommits(["revenue"], PAUSE)
        (permit,) = permits(1)
        commits.on_permit(permit, now_ms=0)
        now_ms = 0
        for failures, pause_ms in enumerate([10, 20, 40, 50, 50, 50], start=1):
            assert commits.due(now_ms) == [("revenue", permit)]
            assert commits.on_failed("revenue", "no route", now_ms) == failures
            assert commits.due(now_ms + pause_ms - 1) == []
            now_ms += pause_ms
        assert commits.due(now_ms) == [("revenue", permit)]

    def test_it_is_never_given_up(self) -> None:
        commits = SinkCommits(["revenue"], PAUSE)
        commits.on_permit(permits(1)[0], now_ms=0)
        now_ms = 0
        for _ in range(500):
            assert names(commits.due(now_ms)) == [("revenue", 1)]
            commits.on_failed("revenue", "no route", now_ms)
            now_ms += 50
        assert commits.pending == {"revenue": (1, "no route")}
        commits.due(now_ms)
        assert commits.on_committed("revenue", now_ms) == 1

    def test_who_is_behind_and_why_is_told(self) -> None:
        commits = SinkCommits(["revenue", "audit"], PAUSE)
        for permit in permits(1, 2):
            commits.on_permit(permit, now_ms=0)
        commits.due(0)
        commits.on_failed("audit", "no route", 0)
        commits.on_failed("revenue", "locked", 0)
        commits.due(10)
        commits.on_failed("audit", "denied", 0)
        assert commits.pending == {"revenue": (1, "locked"), "audit": (1, "denied")}

    def test_why_an_epoch_failed_that_was_committed_since_is_not_told_of_the_next(self) -> None:
        commits = SinkCommits(["revenue"], PAUSE)
        for permit in permits(1, 2):
            commits.on_permit(permit, now_ms=0)
        commits.due(0)
        commits.on_failed("revenue", "no route", 0)
        commits.due(10)
        commits.on_committed("revenue", 10)
        assert commits.pending == {"revenue": (2, "")}

    def test_a_failure_of_one_sink_does_not_delay_another(self) -> None:
        commits = SinkCommits(["revenue", "audit"], PAUSE)
        for permit in permits(1, 2):
            commits.on_permit(permit, now_ms=0)
        commits.due(0)
        commits.on_failed("revenue", "no route", 0)
        commits.on_committed("audit", 0)
        assert names(commits.due(0)) == [("audit", 2)]
        assert names(commits.due(10)) == [("revenue", 1)]

    def test_a_new_permit_does_not_cut_the_pause_short(self) -> None:
        first, second = permits(1, 2)
        commits = SinkCommits(["revenue"], PAUSE)
        commits.on_permit(first, now_ms=0)
        commits.due(0)
        commits.on_failed("revenue", "no route", 0)
        commits.on_permit(second, now_ms=1)
        assert commits.due(9) == []
        assert names(commits.due(10)) == [("revenue", 1)]

    def test_a_success_sets_the_pause_back(self) -> None:
        commits = SinkCommits(["revenue"], PAUSE)
        for permit in permits(1, 2):
            commits.on_permit(permit, now_ms=0)
        for now_ms in (0, 10):
            commits.due(now_ms)
            commits.on_failed("revenue", "no route", now_ms)
        commits.due(30)
        commits.on_committed("revenue", 30)
        assert names(commits.due(30)) == [("revenue", 2)]
        assert commits.on_failed("revenue", "no route", 30) == 1
        assert commits.due(39) == []
        assert names(commits.due(40)) == [("revenue", 2)]

    def test_only_a_commit_that_was_called_can_end(self) -> None:
        commits = SinkCommits(["revenue"], PAUSE)
        for _ in ("settled", "due"):
            with unchanged(commits), pytest.raises(InvariantViolation):
                commits.on_committed("revenue", 0)
            with unchanged(commits), pytest.raises(InvariantViolation):
                commits.on_failed("revenue", "why", 0)
            if not commits.pending:
                commits.on_permit(permits(1)[0], now_ms=0)


which = st.integers(0, 2)
STEPS = steps(
    (2, "a_checkpoint_is_decided", {"gap": st.integers(1, 3)}),
    (3, "time_passes", {"ms": st.sampled_from([0, 5, 10, 50])}),
    (4, "a_commit_succeeds", {"number": which}),
    (2, "a_commit_fails", {"number": which}),
    (1, "an_answer_comes_that_nobody_asked_for", {"number": which}),
)


class SinkCommitsAgainstAModel(RuleBasedStateMachine):
    """The model is a queue of epochs for each sink, with the time before which it is not tried."""

    @initialize(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        self.sinks = [f"sink{number}" for number in range(count)]
        self.commits = SinkCommits(self.sinks, PAUSE)
        self.log = log_with()
        self.now_ms = 0
        self.permitted: list[int] = []
        self.queue: dict[str, deque[int]] = {name: deque() for name in self.sinks}
        self.shown: dict[str, list[int]] = {name: [] for name in self.sinks}
        self.calling: set[str] = set()
        self.not_before_ms = dict.fromkeys(self.sinks, 0)
        self.failures = dict.fromkeys(self.sinks, 0)
        self.ended: list[int] = []

    @rule(step=STEPS)
    def something_happens(self, step: Step) -> None:
        name, drawn = step
        getattr(self, name)(**drawn)

    def a_checkpoint_is_decided(self, gap: int) -> None:
        checkpoint_id = self.log.last_checkpoint_id + gap
        record = complete(self.log, checkpoint_id, epoch=self.log.last_epoch + 1)
        self.commits.on_permit(permit_commit(self.log, checkpoint_id, 1), self.now_ms)
        self.permitted.append(record.epoch)
        for name in self.sinks:
            self.queue[name].append(record.epoch)

    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        expected = [
            (name, self.queue[name][0])
            for name in self.sinks
            if self.queue[name] and name not in self.calling and self.now_ms >= self.not_before_ms[name]
        ]
        assert names(self.commits.due(self.now_ms)) == expected
        self.calling |= {name for name, _ in expected}

    def a_commit_succeeds(self, number: int) -> None:
        if not self.calling:
            return
        name = sorted(self.calling)[number % len(self.calling)]
        epoch = self.queue[name].popleft()
        self.shown[name].append(epoch)
        self.calling.remove(name)
        self.failures[name] = self.not_before_ms[name] = 0
        ended = self.commits.on_committed(name, self.now_ms)
        is_last = all(epoch in shown for shown in self.shown.values())
        assert (ended is not None) is is_last
        if ended is not None:
            self.ended.append(ended)

    def a_commit_fails(self, number: int) -> None:
        if not self.calling:
            return
        name = sorted(self.calling)[number % len(self.calling)]
        self.calling.remove(name)
        self.failures[name] += 1
        assert self.commits.on_failed(name, "no route", self.now_ms) == self.failures[name]
        self.not_before_ms[name] = self.now_ms + min(10 * 2 ** (self.failures[name] - 1), 50)

    def an_answer_comes_that_nobody_asked_for(self, number: int) -> None:
        name = self.sinks[number % len(self.sinks)]
        if name not in self.calling:
            with unchanged(self.commits), pytest.raises(InvariantViolation):
                self.commits.on_committed(name, self.now_ms)

    @invariant()
    def every_sink_shows_the_epochs_in_order_and_lacks_only_what_is_pending(self) -> None:
        for name in self.sinks:
            assert [*self.shown[name], *self.queue[name]] == self.permitted
        pending = {name: epoch for name, (epoch, _) in self.commits.pending.items()}
        assert pending == {name: queue[0] for name, queue in self.queue.items() if queue}

    @invariant()
    def checkpoints_end_in_order_each_once(self) -> None:
        assert self.ended == sorted(set(self.ended))
        assert len(self.ended) == min(len(shown) for shown in self.shown.values())


TestSinkCommitsAgainstAModel = SinkCommitsAgainstAModel.TestCase
TestSinkCommitsAgainstAModel.settings = search(80, steps=40)
