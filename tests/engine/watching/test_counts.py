"""What is counted of a run, with numbers that were worked out by hand."""

from __future__ import annotations

import pytest

from tests.engine.watching.told import AT, AT_S, checkpoint, ended, instance, stage, status
from tidegate.engine.events import AnyEvent, Ended, Failed, SavepointTaken, Started, StartedBecause
from tidegate.engine.status import SinkCommit
from tidegate.engine.watching.counts import Distribution, SinkCounts, StageCounts, Tally, cumulated, decided_s


def counting(*events: AnyEvent) -> Tally:
    tally = Tally()
    for each in events:
        tally.on_event(each)
    return tally


# -- distributions ----------------------------------------------------------------------------------


def test_a_value_is_counted_at_the_first_bound_that_it_does_not_exceed() -> None:
    found = Distribution((1.0, 2.0), (0, 0, 0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.001, 100.0):
        found = found.with_one(value)
    assert found.counts == (2, 2, 2)
    assert found.total == pytest.approx(107.001)
    assert cumulated(found) == [(1.0, 2), (2.0, 4), (float("inf"), 6)]


# -- stages -----------------------------------------------------------------------------------------


def test_rows_go_on_where_stages_start_again() -> None:
    tally = Tally()
    seen = []
    for generation, rows in ((1, 10), (1, 25), (2, 0), (2, 7), (3, 0), (3, 1)):
        tally.on_status(status(generation, stages={"totals": stage(rows, batches=rows, batches_ms=2 * rows)}))
        seen.append(tally.counted().stages["totals"])
    assert [each.rows for each in seen] == [10, 25, 25, 32, 32, 33]
    assert seen[-1] == StageCounts(33, 33, 66)


def test_a_generation_is_another_one_in_another_run() -> None:
    """As one of a root that was removed and made anew has the same number."""
    tally = Tally()
    tally.on_status(status(1, stages={"totals": stage(10)}))
    tally.on_status(status(1, started_at="2026-01-02T04:00:00.000+00:00", stages={"totals": stage(3)}))
    assert tally.counted().stages == {"totals": StageCounts(13)}


def test_what_is_told_late_takes_nothing_back() -> None:
    tally = Tally()
    for rows in (10, 4, 12):
        tally.on_status(status(1, stages={"totals": stage(rows)}))
    assert tally.counted().stages == {"totals": StageCounts(12)}


def test_while_nothing_runs_what_was_counted_stays() -> None:
    tally = Tally()
    tally.on_status(status(1, stages={"totals": stage(10)}))
    tally.on_status(status(None, state="starting"))
    tally.on_status(None)
    assert tally.counted().stages == {"totals": StageCounts(10)}
    assert tally.counted().status is None


def test_stages_that_the_pipeline_no_longer_has_are_forgotten() -> None:
    """So that no label grows without bound, however often a pipeline is changed."""
    tally = Tally()
    for generation in range(1, 100):
        stages = {f"totals_{generation}": stage(1), f"table_{generation}": stage(1, kind="sink")}
        tally.on_status(status(generation, stages=stages))
    found = tally.counted()
    assert found.stages == {"totals_99": StageCounts(1), "table_99": StageCounts(1)}
    assert found.sinks == {"table_99": SinkCounts()}


def test_what_was_counted_of_stages_elsewhere_stays_until_their_instance_tells_again() -> None:
    """The first word of a generation is of whoever leads: of what runs elsewhere nothing is known yet."""
    tally = Tally()
    here, there = {"totals": stage(10)}, {"read": stage(500, kind="source"), "paid": stage(20, kind="sink")}
    placed = (instance("a", *here), instance("b", *there))
    tally.on_status(status(1, stages={**here, **there}, instances=placed))
    tally.on_event(ended(1, commits={"paid": SinkCommit(begun_ms=3, took_ms=700)}))
    for stages in (here, {**here, "read": stage(7, kind="source"), "paid": stage(1, kind="sink")}, here):
        tally.on_status(status(2, stages=stages, instances=placed))
        found = tally.counted()
        is_told = "read" in stages or found.stages["read"].rows > 500
        assert {name: each.rows for name, each in found.stages.items()} == {
            "totals": 20,
            "read": 507 if is_told else 500,
            "paid": 21 if is_told else 20,
        }
        assert found.sinks["paid"].committed == 1


def test_stages_elsewhere_that_the_pipeline_no_longer_has_are_forgotten() -> None:
    tally = Tally()
    for generation in range(1, 100):
        elsewhere = {f"totals_{generation}": stage(1), f"table_{generation}": stage(1, kind="sink")}
        placed = (instance("a", "read"), instance("b", *elsewhere))
        for stages in ({"read": stage(1)}, {"read": stage(1), **elsewhere}):
            tally.on_status(status(generation, stages=stages, instances=placed))
    found = tally.counted()
    assert found.stages == {"read": StageCounts(99), "totals_99": StageCounts(1), "table_99": StageCounts(1)}
    assert found.sinks == {"table_99": SinkCounts()}


def test_a_stage_elsewhere_that_is_chained_from_now_on_is_no_longer_counted_by_itself() -> None:
    tally = Tally()
    placed = (instance("a", "read"), instance("b", "clean", "totals"))
    tally.on_status(status(1, stages={"clean": stage(5), "totals": stage(5)}, instances=placed))
    chained = {"clean": stage(0, chained_into="totals"), "totals": stage(2)}
    tally.on_status(status(2, stages={"read": stage(1), **chained}, instances=placed))
    assert tally.counted().stages == {"totals": StageCounts(7), "read": StageCounts(1)}


def test_a_stage_in_the_query_of_another_is_counted_there() -> None:
    tally = Tally()
    tally.on_status(status(1, stages={"clean": stage(0, chained_into="totals"), "totals": stage(5)}))
    assert tally.counted().stages == {"totals": StageCounts(5)}


# -- checkpoints ------------------------------------------------------------------------------------


def test_checkpoints_are_counted_by_how_they_ended() -> None:
    tally = counting(ended(1), ended(2, "aborted"), ended(3, "aborted"), ended(4), ended(5, "aborted"))
    found = tally.counted()
    assert found.checkpoints == {"complete": 2, "aborted": 3}
    assert found.aborted_in_a_row == 1
    assert found.last is not None
    assert found.last.checkpoint == "ckpt-000004"


def test_nothing_that_has_ended_is_zero_and_not_missing() -> None:
    """Else the first abort would not be seen to be one: a rate needs two values."""
    found = Tally().counted()
    assert found.checkpoints == {"complete": 0, "aborted": 0}
    assert found.recoveries == {"failure": 0, "killed": 0, "instances": 0}


def test_what_took_how_long_is_of_checkpoints_that_are_complete() -> None:
    tally = counting(
        ended(1, duration_ms=80, alignment_ms=0),
        ended(2, duration_ms=3_000, alignment_ms=400),
        ended(3, "aborted", duration_ms=600_000, alignment_ms=600_000),
        ended(4, duration_ms=None, alignment_ms=None),
    )
    found = tally.counted()
    assert found.durations.total == pytest.approx(3.08)
    assert dict(cumulated(found.durations)) == {
        **dict.fromkeys((0.05,), 0),
        **dict.fromkeys((0.1, 0.25, 0.5, 1.0, 2.5), 1),
        **dict.fromkeys((5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, float("inf")), 2),
    }
    assert found.alignments.total == pytest.approx(0.4)
    assert cumulated(found.alignments)[-1] == (float("inf"), 2)


def test_a_checkpoint_is_as_old_as_its_decision() -> None:
    assert decided_s(checkpoint(1, duration_ms=1_500)) == AT_S + 1.5
    assert decided_s(checkpoint(1, triggered_at=None)) is None


def test_the_last_checkpoint_is_the_one_that_was_decided_last_whenever_it_is_told() -> None:
    """What one generation has decided, the next may show after its own first."""
    found = counting(ended(2, duration_ms=900), ended(1, duration_ms=500)).counted()
    assert found.last is not None
    assert found.last.checkpoint == "ckpt-000002"


def test_whoever_no_longer_leads_knows_nothing_of_the_last_checkpoints_but_keeps_what_it_has_counted() -> None:
    tally = Tally()
    tally.on_status(status(1, stages={"totals": stage(10)}))
    for event in (ended(1), ended(2, "aborted"), ended(3, "aborted")):
        tally.on_event(event)
    assert tally.counted().aborted_in_a_row == 2
    tally.step_down()
    tally.on_base(checkpoint(4))  # was looked for meanwhile
    found = tally.counted()
    assert (found.status, found.aborted_in_a_row, found.last) == (None, None, None)
    assert found.checkpoints == {"complete": 1, "aborted": 2}
    assert found.stages == {"totals": StageCounts(10)}
    tally.on_status(status(2, started_at=AT))
    assert tally.counted().aborted_in_a_row == 0


def test_what_it_goes_on_from_is_the_last_checkpoint_until_there_is_a_newer_one() -> None:
    tally = Tally()
    tally.on_status(status(1))
    tally.on_base(checkpoint(7, duration_ms=500))
    found = tally.counted()
    assert found.last == checkpoint(7, duration_ms=500)
    assert found.checkpoints["complete"] == 0
    tally.on_event(ended(8, duration_ms=900))
    tally.on_base(checkpoint(7, duration_ms=500))  # found late
    assert tally.counted().last == checkpoint(8, duration_ms=900)


def test_what_is_told_again_counts_once_but_for_what_is_new_in_it() -> None:
    first = ended(1, duration_ms=10, commits={"a": SinkCommit(begun_ms=1, took_ms=5)})
    both = {"a": SinkCommit(begun_ms=1, took_ms=5), "b": SinkCommit(begun_ms=1, took_ms=9)}
    again = type(first)(at=AT, id=first.id, checkpoint=checkpoint(1, duration_ms=10, commits=both))
    failed = Failed(at=AT, why="no room")
    found = counting(first, again, again, failed, failed).counted()
    assert found.checkpoints["complete"] == 1
    assert found.durations.counts[0] == 1
    assert {sink: each.committed for sink, each in found.sinks.items()} == {"a": 1, "b": 1}
    assert found.failures == 1


# -- commits ----------------------------------------------------------------------------------------


def test_commits_are_counted_with_every_try_that_failed() -> None:
    commits = {"paid": SinkCommit(begun_ms=3, took_ms=700, failures=2, why="no room"), "open": SinkCommit(begun_ms=3)}
    found = counting(ended(1, commits=commits), ended(2, commits={"paid": SinkCommit(begun_ms=1, took_ms=50)}))
    paid = found.counted().sinks["paid"]
    assert (paid.committed, paid.failed) == (2, 2)
    assert paid.durations.total == pytest.approx(0.75)
    assert "open" not in found.counted().sinks


def test_a_commit_that_fails_is_counted_at_once_and_not_again_when_its_checkpoint_ends() -> None:
    tally = Tally()

    def failing(failures: int) -> None:
        commits = {"paid": SinkCommit(begun_ms=3, failures=failures, why="no room")}
        stages = {"paid": stage(1, kind="sink")}
        tally.on_status(status(1, stages=stages, checkpoints=(checkpoint(1, "committing", commits=commits),)))

    seen = []
    for failures in (0, 1, 1, 3):
        failing(failures)
        seen.append(tally.counted().sinks["paid"].failed)
    tally.on_event(ended(1, commits={"paid": SinkCommit(begun_ms=3, took_ms=9, failures=4)}))
    assert seen == [0, 1, 1, 3]
    assert (tally.counted().sinks["paid"].failed, tally.counted().sinks["paid"].committed) == (4, 1)


def test_what_is_remembered_of_checkpoints_is_bounded() -> None:
    tally = Tally()
    for number in range(12_000):
        tally.on_event(ended(number, commits={"paid": SinkCommit(begun_ms=0, took_ms=1, failures=1)}))
    assert len(tally._failures_seen) == 256
    assert len(tally._known) == 10_000
    assert tally.counted().sinks["paid"].failed == 12_000


# -- starts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("because", "counted"),
    [("first", 0), ("again", 0), ("windows", 0), ("killed", 1), ("failure", 1), ("instances", 1)],
)
def test_a_recovery_is_a_start_that_nobody_asked_for(because: StartedBecause, counted: int) -> None:
    found = counting(Started(at=AT, because=because)).counted()
    assert sum(found.recoveries.values()) == counted


def test_failures_are_counted_and_what_is_none_is_not() -> None:
    others = (Ended(at=AT, state="finished"), SavepointTaken(at=AT, checkpoint="ckpt-000001", name="a", place="/x"))
    found = counting(Failed(at=AT, why="a"), Failed(at=AT, why="b", stage="totals"), *others).counted()
    assert found.failures == 2
