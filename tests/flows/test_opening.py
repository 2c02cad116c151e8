"""How a run comes to a generation of its own, request by request."""

from __future__ import annotations

from tests.flows.by_hand import PATIENCE, ByHand
from tests.protocol.logs import complete, log_with
from tidegate.errors import StoreUnavailable, Superseded, UnknownCheckpoint
from tidegate.flows.opening import Above, Opened, Opening
from tidegate.flows.requests import (
    Bring,
    Claim,
    Examine,
    Fence,
    Fit,
    HasLeftovers,
    LargestMarked,
    Mark,
    ReadLog,
    ReadSinks,
    SetTablesBack,
)
from tidegate.protocol.decision_log import Brought, DecisionLog, GenerationOpened
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


# -- bringing a checkpoint from elsewhere -----------------------------------------------------------


class BroughtByHand(OpenedByHand):
    def __init__(self, log: DecisionLog, above: Above | None = None) -> None:
        self._above = above or Above()
        self.decided: GenerationOpened | None = None
        super().__init__(log)

    async def _open(self) -> None:
        self.decided = await Opening(self.host, "me", PATIENCE).bring(self._above, left=("mine",))

    def look(self, marked: int = 0) -> None:
        self.read()
        self.host.answer(LargestMarked, marked)

    def store(self) -> Bring:
        """What is asked for is done."""
        (asked,) = self.host.asked(Bring)
        number = asked.checkpoint_id
        self.host.answer(Bring, Brought(number, number, "manifest", "0" * 64, aligned=True))
        return asked


def test_an_id_is_marked_before_anything_is_stored_and_all_is_stored_before_it_is_decided() -> None:
    by_hand = BroughtByHand(log_with(1, 2, 3))
    by_hand.look(marked=5)
    assert by_hand.host.asked(Mark) == [Mark(6)]
    assert not by_hand.host.asked(Bring)
    by_hand.host.answer(Mark)
    assert not by_hand.host.asked(Claim)
    assert by_hand.store() == Bring(2, 6)
    (claim,) = by_hand.host.asked(Claim)
    assert isinstance(claim.record, GenerationOpened)
    assert (claim.record.base, claim.record.sets_back, claim.record.left) == (6, True, ("mine",))
    assert not by_hand.host.asked(SetTablesBack)
    by_hand.win()
    (asked,) = by_hand.host.asked(SetTablesBack)
    assert asked.checkpoint == by_hand.log.completed(6)
    by_hand.host.answer(SetTablesBack)
    assert by_hand.decided == by_hand.log.setting_back
    assert by_hand.log.retained == (1, 2, 3, 6)


def test_its_numbers_are_above_all_that_are_in_use_here_and_elsewhere() -> None:
    by_hand = BroughtByHand(DecisionLog(), Above(checkpoint_id=40, generation=12))
    by_hand.look()
    by_hand.host.answer(Mark)
    assert by_hand.store() == Bring(13, 41)
    log = log_with(1, 2)
    log.append(log.opening("another", 2))
    by_hand = BroughtByHand(log, Above(checkpoint_id=1, generation=1))
    by_hand.look(marked=1)
    by_hand.host.answer(Mark)
    assert by_hand.store() == Bring(3, 3)


def test_one_that_loses_to_a_checkpoint_is_stored_anew_under_another_id() -> None:
    by_hand = BroughtByHand(log_with(1, 2))
    by_hand.look()
    by_hand.host.answer(Mark)
    assert by_hand.store() == Bring(2, 3)
    complete(by_hand.log, 4)
    by_hand.host.answer(Claim, False)
    by_hand.read()
    by_hand.look(marked=4)
    by_hand.host.answer(Mark)
    assert by_hand.store() == Bring(2, 5)
    by_hand.win()
    by_hand.host.answer(SetTablesBack)
    assert by_hand.decided is not None
    assert by_hand.decided.base == 5


def test_one_that_loses_to_a_run_gives_way() -> None:
    by_hand = BroughtByHand(log_with(1, 2))
    by_hand.look()
    by_hand.host.answer(Mark)
    by_hand.store()
    by_hand.log.append(by_hand.log.opening("another", 2))
    by_hand.host.answer(Claim, False)
    by_hand.read()
    assert [type(error) for error in by_hand.failures] == [Superseded]
    assert not by_hand.host.asked(SetTablesBack)


def test_what_could_not_be_stored_is_stored_again_under_the_same_numbers_and_nothing_is_decided() -> None:
    by_hand = BroughtByHand(log_with(1, 2))
    by_hand.look()
    by_hand.host.fail(Mark)
    by_hand.host.sleep()
    by_hand.host.answer(Mark)
    asked = by_hand.host.asked(Bring)
    for _ in range(30):
        by_hand.host.fail(Bring)
        if by_hand.failures:
            break
        by_hand.host.sleep()
        assert by_hand.host.asked(Bring) == asked
    assert [type(error) for error in by_hand.failures] == [StoreUnavailable]
    assert not by_hand.host.asked(Claim)


def test_whoever_comes_next_finishes_what_was_brought() -> None:
    log = log_with(1, 2)
    brought = Brought(9, 9, "manifest", "0" * 64, aligned=True)
    log.append(log.opening("somebody", 9, sets_back=True, brings=brought))
    opening = OpenedByHand(log)
    opening.host.answer(ReadSinks, {"table": SinkFacts(2, fence=1)})
    opening.read()
    (asked,) = opening.host.asked(SetTablesBack)
    assert (asked.checkpoint, asked.decided) == (log.completed(9), log.setting_back)
