from __future__ import annotations

import pytest

from tests.protocol.logs import complete, log_with, open_generation
from tests.protocol.unchanged import unchanged
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import (
    Examine,
    Facts,
    FenceSinks,
    RecoveryDecision,
    Refuse,
    Restore,
    SetTablesBack,
    SinkFacts,
    StartFresh,
    StartOver,
    recover,
)


def asked(
    log: DecisionLog,
    sinks: dict[str, SinkFacts] | None = None,
    *,
    intact: tuple[int, ...] = (),
    damaged: dict[int, str] | None = None,
    unreadable: tuple[str, ...] = (),
    has_leftovers: bool = False,
) -> RecoveryDecision:
    health: dict[int, str | None] = {**dict.fromkeys(intact), **(damaged or {})}
    facts = Facts(log, sinks or {}, health, unreadable, has_leftovers)
    with unchanged(facts):
        return recover(facts)


def refused(decision: RecoveryDecision) -> tuple[str, str]:
    assert isinstance(decision, Refuse)
    return decision.why, decision.way_out


class TestWithoutALog:
    def test_where_nothing_was_ever_stored_the_run_starts_fresh(self) -> None:
        assert asked(DecisionLog(), {"revenue": SinkFacts()}) == StartFresh()
        assert asked(DecisionLog()) == StartFresh()

    def test_files_without_a_log_are_no_fresh_start(self) -> None:
        why, way_out = refused(asked(DecisionLog(), has_leftovers=True))
        assert "no decision log" in why
        assert "backup" in way_out
        assert "empty root" in way_out

    def test_a_log_whose_only_record_is_torn_is_no_lost_log(self) -> None:
        torn = DecisionLog.from_records([], {1})
        assert asked(torn, {"revenue": SinkFacts()}, has_leftovers=True) == StartOver()
        why, _ = refused(asked(torn, {"revenue": SinkFacts(42)}, has_leftovers=True))
        assert "sink 'revenue' holds epoch 42" in why

    def test_a_sink_that_holds_rows_is_no_fresh_start(self) -> None:
        sinks = {"audit": SinkFacts(0), "revenue": SinkFacts(42)}
        why, way_out = refused(asked(DecisionLog(), sinks))
        assert "sink 'revenue' holds epoch 42" in why
        assert "twice" in why
        assert "the root that the pipeline ran on" in way_out
        assert "new table" in way_out


class TestWithoutACheckpoint:
    def test_where_earlier_runs_ended_before_their_first_checkpoint_the_run_starts_over(self) -> None:
        assert asked(log_with(), {"revenue": SinkFacts()}, has_leftovers=True) == StartOver()

    def test_a_sink_that_holds_rows_is_no_start(self) -> None:
        why, way_out = refused(asked(log_with(), {"audit": SinkFacts(), "revenue": SinkFacts(3)}))
        assert "sink 'revenue' holds epoch 3" in why
        assert "ends at 0" in why
        assert "the root that the sink was written from" in way_out


class TestUnreadable:
    @pytest.mark.parametrize("log", [DecisionLog(), log_with(), log_with(1)], ids=["empty", "open", "one"])
    def test_what_could_not_be_read_is_named_and_nothing_is_started(self, log: DecisionLog) -> None:
        why, way_out = refused(asked(log, intact=(1,), unreadable=("log/000007", "log/000008")))
        assert "log/000007" in why
        assert "make it readable" in way_out
        assert "nothing was changed" in way_out


class TestTheNewestCheckpoint:
    def test_it_is_examined_first(self) -> None:
        assert asked(log_with(1, 2, 3)) == Examine(3)
        assert asked(log_with(1, 2, 3), intact=(1, 2)) == Examine(3)

    @pytest.mark.parametrize("committed", [0, 1, 2, 3])
    def test_an_intact_one_is_restored_however_far_the_sinks_are(self, committed: int) -> None:
        log = log_with(1, 2, 3)
        newest = log.completed(3)
        assert newest is not None
        assert asked(log, {"revenue": SinkFacts(committed)}, intact=(3,)) == Restore(newest)

    def test_an_intact_one_needs_no_fence(self) -> None:
        log = log_with(1)
        decision = asked(log, {"revenue": SinkFacts(1, fence=0)}, intact=(1,))
        assert isinstance(decision, Restore)
        assert decision.skipped == ()

    def test_it_is_that_of_the_current_lineage(self) -> None:
        log = log_with(1, 2)
        open_generation(log, base=1)
        assert asked(log) == Examine(1)
        third = complete(log, 3)
        assert asked(log, intact=(3,)) == Restore(third)

    def test_sinks_that_are_ahead_of_the_log_are_refused(self) -> None:
        sinks = {"audit": SinkFacts(3), "revenue": SinkFacts(4)}
        why, way_out = refused(asked(log_with(1, 2, 3), sinks, intact=(3,)))
        assert "sink 'revenue' holds epoch 4" in why
        assert "the decision log ends at 3" in why
        assert "lost records" in way_out

    def test_a_sink_that_committed_an_epoch_of_a_lineage_that_was_left_is_refused(self) -> None:
        log = log_with(1, 2)
        open_generation(log, base=1)
        why, _ = refused(asked(log, {"revenue": SinkFacts(2)}, intact=(1,)))
        assert "sink 'revenue' holds epoch 2" in why


class TestADamagedCheckpoint:
    def test_the_one_before_it_is_examined(self) -> None:
        assert asked(log_with(1, 2, 3), damaged={3: "gone"}) == Examine(2)
        assert asked(log_with(1, 2, 3), damaged={3: "gone", 2: "gone"}) == Examine(1)

    def test_before_it_is_skipped_every_sink_is_fenced_by_the_next_generation(self) -> None:
        log = log_with(1, 2)
        sinks = {"audit": SinkFacts(1, fence=2), "revenue": SinkFacts(1, fence=1)}
        assert asked(log, sinks, intact=(1,), damaged={2: "gone"}) == FenceSinks(2)
        open_generation(log, base=2)
        assert asked(log, sinks, intact=(1,), damaged={2: "gone"}) == FenceSinks(3)

    @pytest.mark.parametrize("committed", [0, 1])
    def test_it_is_skipped_where_no_fenced_sink_has_committed_past_the_older_one(self, committed: int) -> None:
        log = log_with(1, 2)
        older = log.completed(1)
        assert older is not None
        sinks = {"revenue": SinkFacts(committed, fence=2)}
        assert asked(log, sinks, intact=(1,), damaged={2: "gone"}) == Restore(older, (2,))

    def test_a_fence_that_is_higher_than_needed_is_as_good(self) -> None:
        sinks = {"revenue": SinkFacts(1, fence=7)}
        assert isinstance(asked(log_with(1, 2), sinks, intact=(1,), damaged={2: "gone"}), Restore)

    def test_without_sinks_there_is_nothing_to_fence(self) -> None:
        log = log_with(1, 2, 3)
        oldest = log.completed(1)
        assert oldest is not None
        assert asked(log, intact=(1,), damaged={3: "gone", 2: "gone"}) == Restore(oldest, (3, 2))

    @pytest.mark.parametrize("fence", [0, 2])
    def test_it_is_not_skipped_where_a_sink_has_committed_past_the_older_one(self, fence: int) -> None:
        sinks = {"audit": SinkFacts(1, fence), "revenue": SinkFacts(2, fence)}
        why, way_out = refused(asked(log_with(1, 2), sinks, intact=(1,), damaged={2: "manifest-2 is gone"}))
        assert "ckpt-000002 is damaged (manifest-2 is gone)" in why
        assert "sink 'revenue' shows rows past ckpt-000001" in why
        assert "restore the damaged files from a backup, or set the pipeline and its tables back to it" in way_out

    def test_a_sink_that_committed_while_it_was_fenced_is_seen_afterwards(self) -> None:
        log = log_with(1, 2)
        before = asked(log, {"revenue": SinkFacts(1)}, intact=(1,), damaged={2: "gone"})
        assert before == FenceSinks(2)
        after = asked(log, {"revenue": SinkFacts(2, fence=2)}, intact=(1,), damaged={2: "gone"})
        assert isinstance(after, Refuse)

    def test_a_file_that_several_need_is_told_once(self) -> None:
        damaged = {3: "a is gone", 2: "a is gone", 1: "c is gone"}
        why, _ = refused(asked(log_with(1, 2, 3), {"revenue": SinkFacts(0)}, damaged=damaged))
        assert "ckpt-000003, ckpt-000002 are damaged (a is gone); ckpt-000001 is damaged (c is gone)" in why

    def test_where_none_is_intact_the_damage_is_told_and_nothing_is_started(self) -> None:
        damaged = {3: "a is gone", 2: "b is gone", 1: "c is gone"}
        why, way_out = refused(asked(log_with(1, 2, 3), {"revenue": SinkFacts(0)}, damaged=damaged))
        assert "no retained checkpoint is intact" in why
        for checkpoint_id, damage in damaged.items():
            assert f"{checkpoint_name(checkpoint_id)} is damaged ({damage})" in why
        assert "backup" in way_out
        assert "backup" in way_out

    def test_one_that_is_not_retained_any_more_is_no_way_out(self) -> None:
        log = log_with(1, 2, 3, max_retained=2)
        decision = asked(log, intact=(1,), damaged={3: "gone", 2: "gone"})
        assert isinstance(decision, Refuse)


def test_a_checkpoint_is_named_by_its_number_in_six_digits_or_more() -> None:
    assert checkpoint_name(42) == "ckpt-000042"
    assert checkpoint_name(12_345_678) == "ckpt-12345678"


class TestTablesThatAreToBeSetBack:
    def decided(self) -> DecisionLog:
        log = log_with(1, 2, 3)
        log.append(log.opening("somebody", 1, sets_back=True))
        return log

    def test_that_comes_before_anything_else_however_far_tables_are(self) -> None:
        log = self.decided()
        for committed in (0, 1, 3):
            decision = recover(Facts(log, {"table": SinkFacts(committed)}))
            assert isinstance(decision, SetTablesBack)
            assert decision.checkpoint_id == 1

    def test_when_it_is_done_the_run_goes_on_from_there(self) -> None:
        log = self.decided()
        facts = Facts(log, {"table": SinkFacts(1, fence=2)}, {1: None}, set_back=log.generation)
        decision = recover(facts)
        assert isinstance(decision, Restore)
        assert decision.checkpoint.checkpoint_id == 1

    def test_another_one_that_is_decided_later_is_to_be_done_too(self) -> None:
        log = self.decided()
        done = log.generation
        log.append(log.opening("somebody", 3, sets_back=True))
        decision = recover(Facts(log, {"table": SinkFacts(1, fence=2)}, set_back=done))
        assert isinstance(decision, SetTablesBack)
        assert decision.checkpoint_id == 3

    def test_it_is_the_way_out_where_a_table_shows_rows_past_what_is_intact(self) -> None:
        facts = Facts(log_with(1, 2), {"table": SinkFacts(2)}, {2: "a file is gone", 1: None})
        decision = recover(facts)
        assert isinstance(decision, Refuse)
        assert "`tidegate restore --to ckpt-000001`" in decision.way_out
