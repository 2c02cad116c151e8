"""How a run comes to a generation of its own, request by request."""

from __future__ import annotations

from tests.flows.by_hand import PATIENCE, ByHand
from tests.protocol.logs import log_with
from tidegate.errors import Superseded
from tidegate.flows.opening import Opened, Opening
from tidegate.flows.requests import Claim, Examine, Fence, Fit, HasLeftovers, LargestMarked, ReadLog, ReadSinks
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.recovery import Refuse, SinkFacts


class OpenedByHand:
    def __init__(self, log: DecisionLog) -> None:
        self.host = ByHand()
        self.log = log
        self.outcome: Opened | Refuse | None = None
        self.failures: list[Exception] = []
        self.host.start(self._open(), self.failures.append)

    async def _open(self) -> None:
        self.outcome = await Opening(self.host, "me", PATIENCE).open()

    def read(self) -> None:
        self.host.answer(ReadLog, DecisionLog.from_records(self.log))

    def win(self) -> None:
        record = self.host.asked(Claim)[0].record
        self.host.answer(Claim, True)
        self.log.append(record)
        self.read()


def test_a_new_root_is_opened() -> None:
    opening = OpenedByHand(DecisionLog())
    opening.host.answer(ReadSinks, {})
    opening.read()
    opening.host.answer(HasLeftovers, False)
    opening.host.answer(Fit, True)
    opening.win()
    opening.host.answer(LargestMarked, 0)
    assert isinstance(opening.outcome, Opened)
    assert (opening.outcome.generation, opening.outcome.base) == (1, None)


def test_what_no_log_tells_of_is_refused() -> None:
    opening = OpenedByHand(DecisionLog())
    opening.host.answer(ReadSinks, {})
    opening.read()
    opening.host.answer(HasLeftovers, True)
    opening.read()
    assert isinstance(opening.outcome, Refuse)


def test_what_another_run_writes_meanwhile_is_not_left_over() -> None:
    opening = OpenedByHand(DecisionLog())
    opening.host.answer(ReadSinks, {})
    opening.read()
    opening.log.append(opening.log.opening("another", None))
    opening.host.answer(HasLeftovers, True)
    opening.read()
    opening.host.answer(Fit, True)
    opening.host.answer(Claim, False)
    opening.read()
    assert [type(error) for error in opening.failures] == [Superseded]


def test_tables_are_asked_before_the_log_and_what_it_starts_from_is_looked_at() -> None:
    opening = OpenedByHand(log_with(1, 2))
    assert not opening.host.asked(ReadLog)
    opening.host.answer(ReadSinks, {"table": SinkFacts(2, fence=1)})
    opening.read()
    assert [asked.record.checkpoint_id for asked in opening.host.asked(Examine)] == [2]
    opening.host.answer(Examine, None)
    opening.host.answer(ReadSinks, {"table": SinkFacts(2, fence=1)})
    opening.read()
    opening.host.answer(Fit, True)
    opening.win()
    opening.host.answer(LargestMarked, 5)
    assert isinstance(opening.outcome, Opened)
    assert opening.outcome.base is not None
    assert (opening.outcome.base.checkpoint_id, opening.outcome.largest_id) == (2, 5)


def test_one_is_damaged_only_if_the_log_has_not_moved_on_and_tables_are_fenced_before_it_is_passed_over() -> None:
    opening = OpenedByHand(log_with(1, 2))
    sinks = {"table": SinkFacts(1, fence=1)}
    opening.host.answer(ReadSinks, sinks)
    opening.read()
    opening.host.answer(Examine, "a file is gone")
    opening.read()
    opening.host.answer(ReadSinks, sinks)
    opening.read()
    opening.host.answer(Examine, None)
    opening.host.answer(ReadSinks, sinks)
    opening.read()
    assert opening.host.asked(Fence) == [Fence(2)]
    opening.host.answer(Fence)
    opening.host.answer(ReadSinks, {"table": SinkFacts(1, fence=2)})
    opening.read()
    (fit,) = opening.host.asked(Fit)
    assert fit.skipped == {2: "a file is gone"}
    assert fit.base is not None
    assert fit.base.checkpoint_id == 1


def test_what_does_not_fit_now_is_looked_at_again() -> None:
    opening = OpenedByHand(DecisionLog())
    opening.host.answer(ReadSinks, {})
    opening.read()
    opening.host.answer(HasLeftovers, False)
    opening.host.answer(Fit, False)
    assert opening.host.asked(ReadSinks)
    assert not opening.host.asked(Claim)
