from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mutants import cluster_properties
from tests.protocol.search import search
from tidegate.protocol.membership import Attendance, Crew, Gathering, LeaderClaim, Standing, standing, staying

OWN = LeaderClaim("a", "1")
GRACE_MS = 1_000

names = st.sampled_from("abcd")
attendances = st.builds(Attendance, st.sampled_from("12"), is_leaving=st.booleans())
presences = st.dictionaries(names, attendances)
claims = st.none() | st.builds(LeaderClaim, names, st.sampled_from("12"))


def here(*names: str, incarnation: str = "1") -> dict[str, Attendance]:
    return dict.fromkeys(names, Attendance(incarnation))


class TestStanding:
    @pytest.mark.parametrize(
        ("claim", "present", "expected"),
        [
            (OWN, here("a", "b"), Standing.LEADS),
            (LeaderClaim("b", "1"), here("a", "b"), Standing.FOLLOWS),
            (None, here("a"), Standing.CAMPAIGNS),
            (LeaderClaim("b", "1"), here("a"), Standing.CAMPAIGNS),
            (LeaderClaim("a", "0"), here("a"), Standing.CAMPAIGNS),
            (OWN, here("b"), Standing.FOLLOWS),
            (OWN, here("a", incarnation="2"), Standing.FOLLOWS),
            (None, {}, Standing.FOLLOWS),
        ],
    )
    def test_by_what_it_sees(
        self, claim: LeaderClaim | None, present: dict[str, Attendance], expected: Standing
    ) -> None:
        assert standing(OWN, claim, present) is expected

    @search(200)
    @given(claims, presences)
    def test_of_all_that_see_the_same_at_most_one_leads_and_where_none_does_all_campaign(
        self, claim: LeaderClaim | None, present: dict[str, Attendance]
    ) -> None:
        everybody = [LeaderClaim(name, each.incarnation) for name, each in present.items()]
        found = [standing(each, claim, present) for each in everybody]
        assert found.count(Standing.LEADS) <= 1
        assert (Standing.LEADS in found) != (Standing.CAMPAIGNS in found) or not found
        assert Standing.CAMPAIGNS not in found or set(found) == {Standing.CAMPAIGNS}


class TestGathering:
    def test_it_is_not_over_before_it_is_known_who_lives(self) -> None:
        gathering = Gathering(("b",), 1, GRACE_MS, 0)
        doubted = {"a": Attendance("1"), "b": Attendance("1", is_sure=False)}
        assert not gathering.is_over(doubted, 10 * GRACE_MS)
        assert gathering.is_over({"a": Attendance("1")}, GRACE_MS)
        assert gathering.is_over({"a": Attendance("1"), "b": Attendance("2")}, 1)

    def test_it_waits_for_how_many_are_to_be_there(self) -> None:
        gathering = Gathering((), 2, GRACE_MS, 0)
        assert not gathering.is_over(here("a"), GRACE_MS - 1)
        assert gathering.is_over(here("a", "b"), 1)

    def test_it_waits_for_the_expected_by_name(self) -> None:
        gathering = Gathering(("a", "b"), 1, GRACE_MS, 0)
        assert not gathering.is_over(here("a", "c"), 1)
        assert gathering.missing(here("a", "c")) == ("b",)
        assert gathering.is_over(here("a", "b", incarnation="9"), 1), "another incarnation will do"

    def test_it_does_not_wait_for_longer_than_the_grace_but_for_somebody(self) -> None:
        gathering = Gathering(("a", "b"), 3, GRACE_MS, 50)
        assert not gathering.is_over(here("a"), 50 + GRACE_MS - 1)
        assert gathering.is_over(here("a"), 50 + GRACE_MS)
        assert not gathering.is_over({}, 50 + GRACE_MS)

    def test_who_leaves_is_not_waited_for(self) -> None:
        cluster_properties.who_leaves_is_not_waited_for()


class TestCrew:
    def test_a_member_that_was_started_again_is_not_waited_for(self) -> None:
        cluster_properties.a_member_that_was_started_again_is_not_waited_for()

    def test_a_missing_member_is_waited_for_as_long_as_the_grace_and_no_longer(self) -> None:
        cluster_properties.a_missing_member_is_waited_for_as_long_as_the_grace_and_no_longer()

    def test_where_all_want_to_leave_nobody_makes_way(self) -> None:
        cluster_properties.where_all_want_to_leave_nobody_makes_way()

    def test_who_comes_waits_for_a_checkpoint(self) -> None:
        cluster_properties.who_comes_waits_for_a_checkpoint()

    def test_it_is_missing_since_it_was_not_seen_first(self) -> None:
        crew = Crew({"a": "1", "b": "1"}, GRACE_MS)
        for now_ms in (10, 20, 30):
            crew.on_present(here("a"), now_ms, 0)
        assert crew.missing == {"b": 10}
        crew.on_present(here("a", "b"), 40, 0)
        assert not crew.missing
        crew.on_present(here("a"), 50, 0)
        assert crew.missing == {"b": 50}

    def test_who_has_no_part_is_not_missed(self) -> None:
        crew = Crew({"a": "1"}, GRACE_MS)
        crew.on_present(here("a", "spare"), 0, 0)
        crew.on_present(here("a"), 10, 0)
        assert not crew.missing
        assert crew.why_reopen(10**9, 9) is None

    def test_who_leaves_is_let_go_after_a_checkpoint(self) -> None:
        crew = Crew({"a": "1", "b": "1"}, GRACE_MS)
        crew.on_present({**here("a"), "b": Attendance("1", is_leaving=True)}, 0, 2)
        assert crew.wants_checkpoint(2)
        assert crew.why_reopen(0, 2) is None
        assert crew.why_reopen(0, 3) == "instance b leaves"

    def test_one_that_comes_while_another_waits_is_waited_for(self) -> None:
        """Else each of several that are started one after the other would cost a restart."""
        crew = Crew({"a": "1"}, GRACE_MS)
        crew.on_present(here("a", "b"), 0, 2, {"b"})
        crew.on_present(here("a", "b", "c"), 0, 3, {"b", "c"})
        assert crew.why_reopen(0, 3) is None
        assert crew.why_reopen(0, 4) == "instances b, c have come"

    def test_who_has_come_and_gone_is_nobody(self) -> None:
        crew = Crew({"a": "1"}, GRACE_MS)
        crew.on_present(here("a", "b"), 0, 2, {"b"})
        crew.on_present(here("a"), 0, 3)
        assert not crew.wants_checkpoint(3)
        assert crew.why_reopen(0, 3) is None

    @search(300)
    @given(st.lists(st.tuples(presences, st.integers(0, 400)), max_size=12))
    def test_who_is_missing_is_who_is_not_seen_now(self, seen: list[tuple[dict[str, Attendance], int]]) -> None:
        members = {"a": "1", "b": "1", "c": "2"}
        crew = Crew(members, GRACE_MS)
        now_ms = 0
        since: dict[str, int] = {}
        for present, passed_ms in seen:
            now_ms += passed_ms
            crew.on_present(present, now_ms, 0)
            gone = {name for name, each in members.items() if name not in present or present[name].incarnation != each}
            since = {name: since.get(name, now_ms) for name in gone}
            assert crew.missing == since
            is_over = any(now_ms - each >= GRACE_MS for each in since.values())
            replaced = crew._replaced
            assert (crew.why_reopen(now_ms, 0) is not None) == bool(is_over or replaced)


@search(100)
@given(presences)
def test_those_who_stay_are_some_of_those_who_are_there(present: dict[str, Attendance]) -> None:
    found = staying(present)
    assert bool(found) == bool(present)
    assert found.items() <= present.items()
    assert not any(each.is_leaving for each in found.values()) or found == present
