"""What processes say to each other through what they share, and hear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster import exchange_properties
from tests.cluster.exchange_properties import board
from tests.cluster.shared import Shared
from tests.protocol.search import search
from tidegate.cluster.exchange import BOARDS, ELECTION, ORDERS
from tidegate.cluster.spills import MOST_BYTES
from tidegate.errors import ProtocolViolation, SessionLost
from tidegate.flows.boards import LeaderBoard, MemberBoard
from tidegate.protocol.membership import Attendance, LeaderClaim
from tidegate.testing.simulator.world import Faults

CHANNEL = (3, "stage")


@pytest.mark.parametrize(
    "holds",
    [
        exchange_properties.what_could_not_be_written_is_written_again,
        exchange_properties.a_late_write_hides_nothing_for_long,
        exchange_properties.a_claim_that_was_made_meanwhile_is_left_alone,
        exchange_properties.entries_that_were_followed_before_are_not_heard,
        exchange_properties.entries_that_are_heard_while_it_begins_to_follow_are_kept,
        exchange_properties.a_board_whose_file_is_gone_is_the_one_that_was_read_before,
        exchange_properties.what_was_spilled_is_deleted_when_it_is_not_needed,
        exchange_properties.a_large_entry_whose_file_is_gone_is_not_taken,
        exchange_properties.a_large_entry_is_in_the_root_before_its_key_names_it,
        exchange_properties.boards_stay_until_they_were_nobodys_twice,
        exchange_properties.boards_stay_of_who_is_there_or_has_a_part,
        exchange_properties.boards_of_the_last_generation_stay_until_the_next_is_told,
        exchange_properties.boards_stay_where_somebody_has_taken_over,
        exchange_properties.a_board_that_was_deleted_wrongly_is_said_again,
    ],
    ids=lambda holds: holds.__name__,
)
def test_it_holds(holds: object) -> None:
    assert callable(holds)
    holds()


def test_who_is_there_with_what_it_asks_for() -> None:
    shared = Shared()
    a = shared.joined("a", "1", "s1", "s2")
    shared.joined("b", "7")
    a.receive()
    assert a.heard.present == {"a": Attendance("1", ("s1", "s2")), "b": Attendance("7")}
    assert a.heard.profiles["a"].stages == ("s1", "s2")


def test_who_leaves_is_seen_to_leave_and_its_next_incarnation_is_not() -> None:
    shared = Shared()
    a, b = shared.joined("a"), shared.joined("b")
    b.follow_up(MemberBoard(1, "b", "1", is_leaving=True))
    b.send()
    a.receive()
    assert a.heard.present["b"].is_leaving
    shared.joined("b", "2")
    a.receive()
    assert not a.heard.present["b"].is_leaving


def test_who_was_replaced_is_lost_and_says_nothing_more() -> None:
    shared = Shared()
    old = shared.joined("a", "1")
    old.receive()
    new = shared.joined("a", "2")
    old.follow_up(board(5))
    with pytest.raises(SessionLost):
        old.send()
    old.receive()
    assert old.heard.is_lost
    new.receive()
    assert new.heard.members == {}
    assert not new.heard.is_lost


def test_one_of_several_that_campaign_leads() -> None:
    shared = Shared()
    several = [shared.joined(name) for name in "abc"]
    for each in several:
        each.receive()
        each.campaign()
    for each in several:
        each.send()
    for each in several:
        each.receive()
        assert each.heard.claim == LeaderClaim("a", "1")


def test_a_claim_is_taken_over() -> None:
    shared = Shared()
    a, b = shared.joined("a"), shared.joined("b")
    a.campaign()
    a.send()
    b.receive()
    b.campaign()
    b.send()
    a.receive()
    assert a.heard.claim == LeaderClaim("b", "1")


def test_nothing_new_is_not_told() -> None:
    shared = Shared()
    a = shared.joined("a")
    told: list[int] = []
    a.on_heard = lambda: told.append(1)
    for _ in range(3):
        a.receive()
    assert len(told) == 1
    a.follow_up(board(1))
    a.follow_up(board(1))
    a.send()
    a.said.clear()
    a.follow_up(board(1))
    assert not a.said.is_set(), "it was said before"


def test_what_cannot_be_understood_hides_nobody_else() -> None:
    shared = Shared()
    a, b = shared.joined("a"), shared.joined("b")
    b.lead(LeaderBoard(1, "b"))
    b.send()
    shared.kv.put(f"{ORDERS}/newer", b'{"much":"newer"}')
    a.receive()
    assert a.heard.leaders == {"b": LeaderBoard(1, "b")}


def test_an_entry_that_somebody_else_has_made_is_told() -> None:
    shared = Shared()
    a, b = shared.joined("a"), shared.joined("b")
    b.append(CHANNEL, 0, b"theirs")
    b.send()
    a.append(CHANNEL, 0, b"ours")
    with pytest.raises(ProtocolViolation):
        a.send()


def test_it_listens_where_something_may_change() -> None:
    a = Shared().joined("a")
    a.follow([CHANNEL])
    assert list(a.folders) == [ELECTION, ORDERS, BOARDS, "channels/000003/stage"]


moves = st.lists(st.sampled_from(("append", "say", "send", "hear", "trim", "time")), max_size=60)


@search(300)
@given(st.integers(0, 10**6), moves, st.sampled_from((MOST_BYTES, 30, 1)))
def test_entries_are_heard_once_and_in_order_and_what_was_said_last_in_the_end(
    seed: int, happens: list[str], most_bytes: int
) -> None:
    """Whether all of it fits where it is shared, or boards do not, or entries do not either."""
    shared = Shared(seed, most_bytes)
    a, b = shared.joined("a"), shared.joined("b")
    b.follow([CHANNEL])
    shared.world.faults = Faults(kv_fails=0.4, kv_lags=0.4)
    appended: list[bytes] = []
    heard: list[bytes] = []
    said = trimmed = 0

    def hear() -> None:
        shared.try_to(b.receive)
        heard.extend(value for _, value in b.entries())
        assert heard == appended[: len(heard)]
        assert b.taken(CHANNEL) == len(heard)

    for each in happens:
        if each == "append":
            appended.append(f"entry {len(appended)}".encode())
            a.append(CHANNEL, len(appended) - 1, appended[-1])
        elif each == "say":
            said += 1
            a.follow_up(board(said))
        elif each == "send":
            shared.try_to(a.send)
        elif each == "hear":
            shared.try_to(a.receive)
            hear()
        elif each == "trim":
            a.trim(CHANNEL, range(trimmed, len(heard)))
            trimmed = len(heard)
        else:
            shared.world.run(shared.world.now + 40)
    shared.world.run(shared.world.now + 1_000)
    shared.world.faults = Faults()
    for _ in range(4):
        a.receive()
        a.send()
        hear()
    assert heard == appended
    a.trim(CHANNEL, range(trimmed, len(heard)))
    a.send()
    assert not shared.files.list("spilled/channels")
    assert not said or b.heard.members["a"] == board(said)
