"""When an instance campaigns, opens a generation and ends it."""

from __future__ import annotations

import pytest

from tests.flows.by_hand import Led
from tests.mutants import cluster_properties
from tests.mutants.cluster_properties import GRACE_MS, HERE, OWN, leading
from tidegate.flows.instance import Cue, Instance, had_part
from tidegate.flows.requests import Mark, ReadLog
from tidegate.protocol.membership import Attendance, LeaderClaim

ALONE = {"a": Attendance("1")}


@pytest.mark.parametrize(
    "holds",
    [
        cluster_properties.a_member_that_is_not_seen_aborts_at_once_and_holds_the_next,
        cluster_properties.who_leads_on_takes_a_void_claim_back,
        cluster_properties.who_sees_another_one_lead_ends_its_generation,
        cluster_properties.who_has_left_is_not_expected,
        cluster_properties.who_is_cut_off_does_not_take_the_pipeline_back,
    ],
    ids=lambda holds: holds.__name__,
)
def test_it_holds(holds: object) -> None:
    assert callable(holds)
    holds()


def test_from_nothing_to_a_generation() -> None:
    instance = Instance(OWN, how_many=2, grace_ms=GRACE_MS)
    assert instance.look({}, None, 0) is Cue.WAIT, "it does not see itself yet"
    assert instance.look(ALONE, None, 10) is Cue.CAMPAIGN
    assert instance.look(ALONE, OWN, 20) is Cue.WAIT
    assert instance.look(HERE, OWN, 30) is Cue.OPEN


def test_who_follows_opens_nothing() -> None:
    instance = Instance(OWN, how_many=1, grace_ms=0)
    assert instance.look(HERE, LeaderClaim("b", "1"), 10**9) is Cue.WAIT


def test_it_opens_with_whoever_is_there_when_the_grace_is_over() -> None:
    instance = Instance(OWN, how_many=2, grace_ms=GRACE_MS)
    assert instance.look(ALONE, OWN, 100, expected=("a", "b")) is Cue.WAIT
    assert instance.waits_for(ALONE) == ("b",)
    assert instance.look(ALONE, OWN, 100 + GRACE_MS) is Cue.OPEN


def test_the_grace_begins_anew_when_it_leads_anew() -> None:
    instance = Instance(OWN, how_many=2, grace_ms=GRACE_MS)
    instance.look(ALONE, OWN, 0)
    instance.look(HERE, LeaderClaim("b", "1"), 500)
    assert instance.look(ALONE, OWN, 900) is Cue.WAIT
    assert instance.look(ALONE, OWN, GRACE_MS) is Cue.WAIT
    assert instance.look(ALONE, OWN, 900 + GRACE_MS) is Cue.OPEN


def test_after_its_first_generation_it_does_not_wait_for_as_many_again() -> None:
    instance = Instance(OWN, how_many=3, grace_ms=GRACE_MS)
    instance.on_opened(Led().leader, {"a": "1"}, ())
    instance.on_ended()
    assert instance.look(ALONE, OWN, 0, expected=("a",)) is Cue.OPEN


def test_a_member_that_is_missing_for_too_long_ends_the_generation() -> None:
    instance = leading(Led())
    assert instance.look(ALONE, OWN, 0) is Cue.WAIT
    assert instance.missing == {"member": 0}
    assert instance.look(ALONE, OWN, GRACE_MS) is Cue.END
    assert instance.why == "instance member is missing for 1 s"


def test_who_comes_is_let_in_behind_a_checkpoint_that_is_asked_for() -> None:
    led = Led()
    instance = leading(led, {"a": "1"})
    present = {**ALONE, "b": Attendance("1")}
    assert instance.look(present, OWN, 0) is Cue.WAIT
    assert [each.checkpoint_id for each in led.leader.coordinator.active] == [1]
    assert instance.look(present, OWN, 10) is Cue.WAIT, "one that is under way will do"
    led.host.answer(Mark)
    led.host.answer(ReadLog, led._as_read())
    led.acknowledge(1)
    led.claim()
    assert instance.look(present, OWN, 20) is Cue.END
    assert instance.why == "instance b has come"


def test_who_would_have_nothing_to_run_is_not_let_in() -> None:
    led = Led()
    instance = leading(led, {"a": "1", "member": "0"})
    present = {**ALONE, "member": Attendance("0"), "z": Attendance("1")}
    assert instance.look(present, OWN, 0) is Cue.WAIT
    assert not led.leader.coordinator.active


def test_without_a_board_nobody_is_expected() -> None:
    assert had_part({}, {}) == frozenset()
