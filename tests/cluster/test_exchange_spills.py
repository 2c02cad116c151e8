"""Entries of channels that are too large for what is shared: wherever that is, they are heard as all others are, and
nothing of them is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cluster.places import KINDS, Place
from tidegate.cluster.kv import MAX_VALUE_BYTES
from tidegate.cluster.spills import MOST_BYTES
from tidegate.errors import MaybeWritten, StoreUnavailable
from tidegate.flows.boards import MemberBoard
from tidegate.protocol.messages import Segment, SegmentFile, encode

CHANNEL = (3, "orders")
LARGE = b"[" + b"x" * 300
SMALL = b"[]"


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(request.param)
    yield made
    made.close()


def test_a_batch_that_writes_thousands_of_files_is_handed_on_and_what_is_behind_it_too(place: Place) -> None:
    place.most_bytes = MOST_BYTES
    files = tuple(
        SegmentFile(f"generations/000003/stages/orders/output/part-{i:05d}-{'0' * 60}.parquet", i) for i in range(4_000)
    )
    backfill = encode(Segment(1, 0, files))
    assert len(backfill) > MAX_VALUE_BYTES
    a, b = place.joined("a"), place.joined("b")
    b.follow([CHANNEL])
    a.append(CHANNEL, 0, backfill)
    a.append(CHANNEL, 1, SMALL)
    board = MemberBoard(3, "a", "a1")
    a.follow_up(board)
    a.send()
    b.receive()
    assert b.entries() == [(CHANNEL, backfill), (CHANNEL, SMALL)]
    assert b.heard.members == {"a": board}


def test_a_large_entry_lies_in_the_root_until_it_is_trimmed(place: Place) -> None:
    a, b = place.joined("a"), place.joined("b")
    b.follow([CHANNEL])
    for index, value in enumerate((LARGE, SMALL, LARGE + b"2")):
        a.append(CHANNEL, index, value)
    a.send()
    b.receive()
    assert b.entries() == [(CHANNEL, LARGE), (CHANNEL, SMALL), (CHANNEL, LARGE + b"2")]
    assert len(place.spilled("channels")) == 2
    a.trim(CHANNEL, range(1))
    a.send()
    assert [name.rpartition("-")[0] for name in place.spilled("channels")] == [
        "spilled/channels/000003/orders/000000000002"
    ]
    a.trim(CHANNEL, range(1, 3))
    a.send()
    assert not place.spilled("channels")
    assert not place.keys("channels")


@pytest.mark.parametrize("who", ["writer", "reader", "leader"])
def test_what_is_left_of_large_entries_goes_with_whoever_has_written_or_read_them(place: Place, who: str) -> None:
    a, b, c = (place.joined(each) for each in "abc")
    b.follow([CHANNEL])
    a.append(CHANNEL, 0, LARGE)
    a.send()
    acts: dict[str, Callable[[], None]] = {
        "writer": lambda: a.follow([]),
        "reader": lambda: b.follow([(4, "orders")]),
        "leader": lambda: c.forget_before(4),
    }
    acts[who]()
    for _ in range(2):
        for each in (a, b, c):
            each.send()
    assert not place.spilled("channels")
    assert not place.keys("channels")


class Killed(Exception):
    """Here the process ends."""


def test_what_a_process_has_written_that_was_killed_before_it_said_where_goes_with_the_generation(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = place.joined("a"), place.joined("b")
    a.append(CHANNEL, 0, LARGE)

    def killed(*_: object) -> bool:
        raise Killed

    monkeypatch.setattr(a._session, "create", killed)
    with pytest.raises(Killed):
        a.send()
    assert place.spilled("channels"), "it is there before a key names it"
    assert not place.keys("channels")
    b.forget_before(3)
    b.send()
    assert place.spilled("channels"), "its generation is not over"
    b.forget_before(4)
    b.send()
    assert not place.spilled("channels")


def test_an_entry_whose_file_is_gone_is_none(place: Place) -> None:
    a, b = place.joined("a"), place.joined("b")
    b.follow([CHANNEL])
    a.append(CHANNEL, 0, SMALL)
    a.append(CHANNEL, 1, LARGE)
    a.append(CHANNEL, 2, SMALL)
    a.send()
    [spilled] = place.spilled("channels")
    content = place.root.read(spilled)
    assert content is not None
    place.root.delete([spilled])
    b.receive()
    assert b.entries() == [(CHANNEL, SMALL)]
    assert b.taken(CHANNEL) == 1
    place.root.write(spilled, content)
    b.receive()
    assert b.entries() == [(CHANNEL, LARGE), (CHANNEL, SMALL)]


def test_a_large_entry_that_was_made_by_a_try_without_an_answer_is_ones_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = place.joined("a"), place.joined("b")
    b.follow([CHANNEL])
    create = a._session.create

    def unanswered(key: str, value: bytes) -> bool:
        create(key, value)
        raise MaybeWritten("it was not answered")

    a.append(CHANNEL, 0, LARGE)
    with monkeypatch.context() as patched:
        patched.setattr(a._session, "create", unanswered)
        with pytest.raises(MaybeWritten):
            a.send()
    a.send()
    b.receive()
    assert b.entries() == [(CHANNEL, LARGE)]


def test_what_the_root_does_not_delete_is_deleted_later(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    a = place.joined("a")
    a.append(CHANNEL, 0, LARGE)
    a.send()
    a.trim(CHANNEL, range(1))

    def fails(_: object) -> None:
        raise StoreUnavailable("it does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(a._spills._files, "delete", fails)
        with pytest.raises(StoreUnavailable):
            a.send()
    a.send()
    assert not place.spilled("channels")
    assert not place.keys("channels")


def test_a_value_that_looks_like_the_name_of_a_file_is_heard_as_it_is(place: Place) -> None:
    a, b = place.joined("a"), place.joined("b")
    b.follow([CHANNEL])
    a.append(CHANNEL, 0, b"@spilled/elsewhere#1")
    a.send()
    b.receive()
    assert b.entries() == [(CHANNEL, b"@spilled/elsewhere#1")]
