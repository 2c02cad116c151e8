"""What holds of an exchange, and not of a mutant. See `tests/mutants/properties.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.cluster.shared import Shared
from tidegate.cluster.exchange import Exchange
from tidegate.errors import NotWritten
from tidegate.flows.boards import LeaderBoard, MemberBoard
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
    following = b._following
    b.follow([(2, "s")])
    b._read_on(following, (1, "s"))  # what another thread was about to do
    b.receive()
    assert b.entries() == [((2, "s"), b"new")]


def entries_that_are_heard_while_it_begins_to_follow_are_kept() -> None:
    """Whichever line it has come to when the other thread reads."""
    line, lines = 0, 1
    while line < lines:
        shared = Shared()
        a, b = shared.joined("a"), shared.joined("b")
        a.append((2, "s"), 0, b"new")
        a.send()
        b.follow([(1, "s")])
        lines = _interrupted(line, b.receive, lambda b=b: b.follow([(2, "s")]), Exchange.follow)  # type: ignore[misc]
        b.receive()
        assert b.entries() == [((2, "s"), b"new")], f"it was read at line {line} of {lines}"
        assert b.taken((2, "s")) == 1
        line += 1
    assert lines > 3


def _interrupted(at: int, by: Callable[[], None], call: Callable[[], None], function: Callable[..., Any]) -> int:
    """Call something, and something else before a line of a function that it calls, as another thread could. Returns
    how many lines that has come to."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code is not function.__code__:
            return None
        if event in ("line", "return"):
            if lines == at:
                by()
            lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


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


def a_large_entry_whose_file_is_gone_is_not_taken() -> None:
    shared = Shared(most_bytes=5)
    a, b = shared.joined("a"), shared.joined("b")
    b.follow([(1, "s")])
    for index, value in enumerate((b"small", b"larger", b"small")):
        a.append((1, "s"), index, value)
    a.send()
    [name] = shared.files.list("spilled")
    shared.files.delete([name])
    b.receive()
    assert b.taken((1, "s")) == 1
    shared.files.write(name, b"larger")
    b.receive()
    assert [value for _, value in b.entries()] == [b"small", b"larger", b"small"]


def a_large_entry_is_in_the_root_before_its_key_names_it() -> None:
    shared = Shared(most_bytes=5)
    a, b = shared.joined("a"), shared.joined("b")
    b.follow([(1, "s")])
    a.append((1, "s"), 0, b"larger")
    shared.sessions["a"].next = "late"
    assert not shared.try_to(a.send)
    shared.sessions["a"].land()
    b.receive()
    assert b.entries() == [((1, "s"), b"larger")]
    a.send()
    a.trim((1, "s"), [0])
    a.send()
    assert not shared.files.list("spilled")


def _leads(shared: Shared, generation: int) -> Exchange:
    leader = shared.joined("leader")
    leader.lead(LeaderBoard(generation, "leader"))
    leader.send()
    return leader


def _said_by(shared: Shared, name: str, generation: int, *, is_gone: bool) -> Exchange:
    """As a leader of a generation, and as a member."""
    exchange = shared.joined(name)
    exchange.lead(LeaderBoard(generation, name))
    exchange.follow_up(MemberBoard(generation, name, "1"))
    exchange.send()
    if is_gone:
        shared.kv.expire(shared.sessions[name])
    return exchange


def _looks(leader: Exchange, generation: int, *but: str) -> None:
    leader.receive()
    leader.forget_boards(generation, but)
    leader.send()


def boards_stay_until_they_were_nobodys_twice() -> None:
    shared = Shared()
    leader = _leads(shared, 9)
    _said_by(shared, "gone", 1, is_gone=True)
    _looks(leader, 9)
    assert "gone" in shared.kv.folder("orders")
    assert "gone" in shared.kv.folder("boards")
    _looks(leader, 9)
    assert "gone" not in shared.kv.folder("orders")
    assert "gone" not in shared.kv.folder("boards")


def boards_stay_of_who_is_there_or_has_a_part() -> None:
    shared = Shared()
    leader = _leads(shared, 9)
    _said_by(shared, "idle", 1, is_gone=False)
    _said_by(shared, "awaited", 1, is_gone=True)
    for _ in range(3):
        _looks(leader, 9, "awaited")
    assert {"idle", "awaited"} <= shared.kv.folder("orders").keys()
    assert {"idle", "awaited"} <= shared.kv.folder("boards").keys()


def boards_of_the_last_generation_stay_until_the_next_is_told() -> None:
    shared = Shared()
    _said_by(shared, "gone", 8, is_gone=True)
    leader = shared.joined("leader")
    for _ in range(3):
        _looks(leader, 9)
    assert "gone" in shared.kv.folder("orders")
    assert "gone" in shared.kv.folder("boards")


def boards_stay_where_somebody_has_taken_over() -> None:
    shared = Shared()
    leader = _leads(shared, 9)
    _said_by(shared, "newer", 10, is_gone=True)
    _said_by(shared, "gone", 8, is_gone=True)
    for _ in range(3):
        _looks(leader, 9)
    assert {"newer", "gone"} <= shared.kv.folder("orders").keys()
    assert {"newer", "gone"} <= shared.kv.folder("boards").keys()


def a_board_that_was_deleted_wrongly_is_said_again() -> None:
    shared = Shared()
    a, b = _said_by(shared, "a", 3, is_gone=False), shared.joined("b")
    a.receive()
    shared.kv.delete(["orders/a", "boards/a"])
    a.receive()
    assert a.said.is_set()
    a.send()
    b.receive()
    assert b.heard.leaders.keys() == b.heard.members.keys() == {"a"}
