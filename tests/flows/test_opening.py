"""How a run comes to a generation of its own, request by request."""

from __future__ import annotations

from tests.flows.by_hand import PATIENCE, ByHand
from tests.protocol.logs import complete, log_with
from tidegate.errors import Superseded, UnknownCheckpoint
from tidegate.flows.opening import Opened, Opening
from tidegate.flows.requests import (
    Claim,
    Examine,
    Fence,
    Fit,
    HasLeftovers,
    LargestMarked,
    ReadLog,
    ReadSinks,
    SetTablesBack,
)
from tidegate.protocol.decision_log import DecisionLog, GenerationOpened
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


# -- setting tables back ----------------------------------------------------------------------------


def test_tables_that_were_to_be_set_back_are_before_anything_else_and_then_everything_is_looked_at_anew() -> None:
    log = log_with(1, 2, 3)
    log.append(log.opening("somebody", 2, sets_back=True))
    opening = OpenedByHand(log)
    opening.host.answer(ReadSinks, {"table": SinkFacts(3, fence=1)})
    opening.read()
    (asked,) = opening.host.asked(SetTablesBack)
    assert asked.checkpoint.checkpoint_id == 2
    assert asked.decided == log.setting_back
    opening.host.answer(SetTablesBack)
    opening.host.answer(ReadSinks, {"table": SinkFacts(2, fence=2)})
    opening.read()
    opening.host.answer(Examine, None)
    opening.host.answer(ReadSinks, {"table": SinkFacts(2, fence=2)})
    opening.read()
    opening.host.answer(Fit, True)
    opening.win()
    opening.host.answer(LargestMarked, 3)
    assert isinstance(opening.outcome, Opened)
    assert opening.outcome.base is not None
    assert (opening.outcome.base.checkpoint_id, opening.outcome.generation) == (2, 3)
    assert log.setting_back is None, "what was opened since has done it"


class SetBackByHand(OpenedByHand):
    def __init__(self, log: DecisionLog, checkpoint_id: int) -> None:
        self._checkpoint_id = checkpoint_id
        self.decided: GenerationOpened | None = None
        super().__init__(log)

    async def _open(self) -> None:
        self.decided = await Opening(self.host, "me", PATIENCE).set_back(self._checkpoint_id, left=("mine",))


def test_it_is_decided_before_the_first_table_changes() -> None:
    by_hand = SetBackByHand(log_with(1, 2, 3), 1)
    by_hand.read()
    assert not by_hand.host.asked(SetTablesBack)
    by_hand.win()
    (asked,) = by_hand.host.asked(SetTablesBack)
    assert (asked.checkpoint.checkpoint_id, asked.decided.left) == (1, ("mine",))
    by_hand.host.answer(SetTablesBack)
    assert by_hand.decided == by_hand.log.setting_back
    assert by_hand.log.retained == (1, 2, 3), "newer ones stay until the next one is complete"
    assert [each.checkpoint_id for each in by_hand.log.lineage()] == [1]


def test_a_checkpoint_that_is_completed_meanwhile_makes_it_look_again() -> None:
    by_hand = SetBackByHand(log_with(1, 2), 1)
    by_hand.read()
    complete(by_hand.log, 3, retained=(2, 3))
    by_hand.host.answer(Claim, False)
    by_hand.read()
    by_hand.read()
    assert [type(error) for error in by_hand.failures] == [UnknownCheckpoint], "it is no longer retained"


def test_a_run_that_takes_over_first_wins() -> None:
    by_hand = SetBackByHand(log_with(1, 2), 1)
    by_hand.read()
    by_hand.log.append(by_hand.log.opening("another", 2))
    by_hand.host.answer(Claim, False)
    by_hand.read()
    assert [type(error) for error in by_hand.failures] == [Superseded]
    assert not by_hand.host.asked(SetTablesBack)
