"""What holds of an exchange, and not of a mutant. See `tests/mutants/properties.py`."""

from __future__ import annotations

import pytest

from tests.cluster.shared import Shared
from tidegate.errors import NotWritten
from tidegate.flows.boards import MemberBoard
from tidegate.protocol.membership import LeaderClaim


def board(seen: int, told: object = None) -> MemberBoard:
    return MemberBoard(1, "a", "1", seen=seen, told=told)


def what_could_not_be_written_is_written_again() -> None:
    shared = Shared()
    a, b = shared.joined("a"), shared.joined("b")
    a.follow_up(board(1))
    shared.sessions["a"].next = "not_written"
    assert not shared.try_to(a.send)
    a.send()
    b.receive()
    assert b.heard.members == {"a": board(1)}


def a_late_write_hides_nothing_for_long() -> None:
    shared = Shared()
    a, b = shared.joined("a"), shared.joined("b")
    a.follow_up(board(1))
    shared.sessions["a"].next = "late"
    assert not shared.try_to(a.send)
    a.follow_up(board(2))
    a.send()
    a.receive()
    shared.sessions["a"].land()
    b.receive()
    assert b.heard.members["a"].seen == 1, "it is there, and hides what was said since"
    a.receive()
    assert a.said.is_set()
    a.send()
    b.receive()
    assert b.heard.members["a"].seen == 2


def a_claim_that_was_made_meanwhile_is_left_alone() -> None:
    shared = Shared()
    a, b = shared.joined("a"), shared.joined("b")
    a.receive()
    a.campaign()
    b.receive()
    b.campaign()
    b.send()
    a.receive()  # it hears of the claim of b after it has decided to campaign
    a.send()
    a.receive()
    assert a.heard.claim == LeaderClaim("b", "1")


def entries_that_were_followed_before_are_not_heard() -> None:
    shared = Shared()
    a, b = shared.joined("a"), shared.joined("b")
    a.append((1, "s"), 0, b"old")
    a.append((2, "s"), 0, b"new")
    a.send()
    b.follow([(1, "s")])
    followed = b._followed
    b.follow([(2, "s")])
    b._read_on(followed, (1, "s"))  # what another thread was about to do
    b.receive()
    assert b.entries() == [((2, "s"), b"new")]


def a_board_whose_file_is_gone_is_the_one_that_was_read_before() -> None:
    shared = Shared()
    a, b = shared.joined("a"), shared.joined("b")
    a.follow_up(board(1))
    a.send()
    b.receive()
    a.follow_up(board(2, "x" * 200_000))
    a.send()
    shared.files.delete(shared.files.list("spilled"))
    b.receive()
    assert [each.seen for each in b.heard.members.values()] == [1]


def what_was_spilled_is_deleted_when_it_is_not_needed() -> None:
    shared = Shared()
    a, b = shared.joined("a"), shared.joined("b")
    for number in range(1, 5):
        a.follow_up(board(number, "x" * 200_000))
        shared.sessions["a"].next = "not_written"
        with pytest.raises(NotWritten):
            a.send()
        a.send()
        b.receive()
        assert b.heard.members["a"].seen == number
        assert len(shared.files.list("spilled")) == 1
    a.follow_up(board(9))
    a.send()
    b.receive()
    assert b.heard.members["a"].seen == 9
    assert not shared.files.list("spilled")
