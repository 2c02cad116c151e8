"""What a process says to others and hears from them, over keys in memory."""

from __future__ import annotations

from tidegate.cluster.exchange import Exchange, Profile
from tidegate.cluster.memory import MemoryKV
from tidegate.flows.boards import LeaderBoard, MemberBoard
from tidegate.storage.memory import Memory


class Table:
    """Around which instances sit."""

    def __init__(self, most_bytes: int = 10**6) -> None:
        self.now_ms = 0
        self.kv = MemoryKV(lambda: self.now_ms)
        self.root = Memory("root")
        self._most_bytes = most_bytes
        self._incarnations = 0

    def joined(self, instance: str) -> Exchange:
        self._incarnations += 1
        incarnation = f"incarnation{self._incarnations}"
        exchange = Exchange(self.kv.open(), self.root, instance, incarnation, Profile(), self._most_bytes)
        exchange.join()
        return exchange

    @property
    def spilled(self) -> list[str]:
        return self.root.list("spilled")


def said(exchange: Exchange, why: str) -> MemberBoard:
    board = MemberBoard(1, exchange.own.instance, exchange.own.incarnation, failed=why)
    exchange.follow_up(board)
    exchange.send()
    return board


def test_a_large_board_is_heard_from_the_root_and_takes_space_once() -> None:
    table = Table(most_bytes=200)
    a, b = table.joined("a"), table.joined("b")
    for each in range(3):
        board = said(a, f"{each}" * 300)
        b.receive()
        assert b.heard.members == {"a": board}
        assert len(table.spilled) == 1
    board = said(a, "it is short again")
    b.receive()
    assert b.heard.members == {"a": board}
    assert not table.spilled


def test_what_an_incarnation_before_has_left_in_the_root_goes() -> None:
    table = Table(most_bytes=200)
    said(table.joined("a"), "x" * 300)
    said(table.joined("a-b"), "x" * 300)
    board = said(table.joined("a"), "y" * 300)
    assert len(table.spilled) == 2
    b = table.joined("b")
    b.receive()
    assert b.heard.members["a"] == board
    said(table.joined("a"), "short")
    assert [name.partition("-incarnation")[0] for name in table.spilled] == ["spilled/boards/a-b"]


def test_a_channel_is_heard_in_order_and_each_entry_once() -> None:
    table = Table()
    a, b = table.joined("a"), table.joined("b")
    b.follow([(1, "stage")])
    for index in range(3):
        a.append((1, "stage"), index, f"{index}".encode())
    a.send()
    b.receive()
    b.receive()
    assert b.entries() == [((1, "stage"), each) for each in (b"0", b"1", b"2")]
    assert b.taken((1, "stage")) == 3
    a.trim((1, "stage"), range(2))
    a.send()
    assert table.kv.keys_in("channels") == ["channels/000001/stage/000000000002"]


def test_what_is_left_of_channels_goes_with_whoever_has_written_or_read_them() -> None:
    for who in ("writer", "reader", "leader"):
        table = Table()
        a, b, c = (table.joined(each) for each in "abc")
        b.follow([(1, "stage")])
        a.append((1, "stage"), 0, b"x")
        a.send()
        match who:
            case "writer":
                a.follow([])
            case "reader":
                b.follow([(2, "stage")])
            case _:
                c.forget_before(2)
        for each in (a, b, c):
            each.send()
        assert not table.kv.keys_in("channels"), who


def test_a_new_generation_hears_nothing_of_what_was_on_its_way() -> None:
    table = Table()
    a, b = table.joined("a"), table.joined("b")
    b.follow([(1, "stage")])
    a.append((1, "stage"), 0, b"x")
    a.send()
    b.receive()
    b.follow([(2, "stage")])
    assert not b.entries()
    assert b.taken((2, "stage")) == 0


def test_boards_of_a_leader_are_beside_those_of_members() -> None:
    table = Table()
    a, b = table.joined("a"), table.joined("b")
    a.lead(LeaderBoard(1, "a#1"))
    board = said(a, "why")
    a.send()
    b.receive()
    assert b.heard.leaders == {"a": LeaderBoard(1, "a#1")}
    assert b.heard.members == {"a": board}
