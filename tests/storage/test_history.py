"""The history of a root as pages: what is read is what was written, whatever was killed in between."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from tidegate.errors import StoreUnavailable
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.history import (
    Event,
    Page,
    StoredHistory,
    as_event,
    merged_events,
    parted,
)
from tidegate.storage.memory import Memory

T0 = 1_800_000_000_000


def event(number: int, size: int = 0) -> Event:
    """The how manieth, a second after the one before."""
    at_ms = T0 + number * 1000
    at = f"2027-01-15T{8 + (number // 3600):02d}:{number // 60 % 60:02d}:{number % 60:02d}.000+00:00"
    found = as_event(msgspec.json.encode({"id": f"e{number:05d}", "at": at, "what": "x" * size}))
    assert found.at_ms == at_ms
    return found


def ids(store: StoredHistory) -> list[str]:
    """Of all events that are there, in the order of their times, as often as they are."""
    found = store.read(store.pages())
    return [each.id for each in sorted((e for events in found.values() for e in events or ()), key=lambda e: e.at_ms)]


@pytest.fixture(params=["memory", "folder"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return Memory() if request.param == "memory" else Folder(tmp_path / "root", fsync=False)


def test_a_name_tells_what_a_page_holds(files: Files) -> None:
    store = StoredHistory(files)
    added = Page(T0, "0123abcd")
    store.write(added, [event(0), event(1)])
    whole = store.write_whole([event(5), event(3)])
    assert store.pages() == [added, whole]
    assert (whole.first_ms, whole.last_ms, whole.count) == (T0 + 3000, T0 + 5000, 2)
    assert (added.is_whole, whole.is_whole) == (False, True)
    files.write("history/notes.txt", b"mine")
    assert store.pages() == [added, whole], "what has another name is not ours"
    assert {page: [each.id for each in events or ()] for page, events in store.read([added, whole]).items()} == {
        added: ["e00000", "e00001"],
        whole: ["e00005", "e00003"],
    }


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"[1]", b'[{"id": "a"}]', b'[{"id": "a", "at": "then"}]', b"\xff\xfe", b'[{"id"']
)
def test_a_damaged_page_is_passed_over_and_told_of_once(
    files: Files, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = StoredHistory(files)
    whole, damaged = store.write_whole([event(0)]), store.write_whole([event(1)])
    files.write(damaged.name, damage)
    with caplog.at_level(logging.WARNING, "tidegate"):
        assert store.read([damaged]) == {damaged: None}
        assert store.read([damaged]) == {damaged: None}
    assert [files.location(damaged.name) in each.getMessage() for each in caplog.records] == [True]
    store.compact(oldest_ms=T0, most_events=100)
    assert ids(store) == ["e00000"]
    assert damaged in store.pages(), "it is not thrown away"
    assert whole in store.pages() or len(store.pages()) == 2
    store.compact(oldest_ms=T0 + 3_600_000, most_events=100)
    assert store.pages() == [], "but for when it is too old"


def test_what_is_gone_by_now_is_left_out(files: Files) -> None:
    store = StoredHistory(files)
    gone, there = store.write_whole([event(0)]), store.write_whole([event(1)])
    store.delete([gone])
    assert list(store.read([gone, there])) == [there]


def test_compacting_makes_few_pages_and_loses_nothing(files: Files) -> None:
    store = StoredHistory(files)
    for number in range(30):
        store.write_whole([event(number)])
    left = Page(T0 + 30_000, "00000001")
    store.write(left, [event(30), event(31)])
    own = Page(T0 + 40_000, "00000002")
    store.write(own, [event(40)])
    store.compact(oldest_ms=0, most_events=1000, but=own, added=1)
    assert ids(store) == [f"e{number:05d}" for number in (*range(32), 40)]
    assert len(store.pages()) == 2
    assert own in store.pages(), "the one that is added to stays"
    before = store.pages()
    store.compact(oldest_ms=0, most_events=1000, but=own, added=1)
    assert store.pages() == before, "there is nothing more to do"


def test_of_one_event_the_later_word_is_kept_whichever_page_it_is_in(files: Files) -> None:
    store = StoredHistory(files)
    later = Event(event(7).id, T0 + 60_000, event(7).data.replace(b"08:00:07", b"08:01:00"))
    store.write_whole([later, event(1)])  # so the page begins earlier
    store.write_whole([event(7), event(8)])
    store.compact(oldest_ms=0, most_events=1000)
    assert ids(store) == ["e00001", "e00008", "e00007"]


def test_a_merged_page_is_bounded(files: Files) -> None:
    store = StoredHistory(files)
    for number in range(0, 60, 2):
        store.write_whole([event(number, 100_000), event(number + 1)])
    store.compact(oldest_ms=0, most_events=10_000)
    assert ids(store) == [f"e{number:05d}" for number in range(60)]
    assert all((files.size(page.name) or 0) <= 1 << 20 for page in store.pages())
    assert len(store.pages()) == 3


def test_what_is_too_old_goes(files: Files) -> None:
    store = StoredHistory(files)
    store.write_whole([event(number) for number in range(10)])
    store.write(Page(T0 + 10_000, "00000001"), [event(number) for number in range(10, 20)])
    store.compact(oldest_ms=T0 + 15_000, most_events=100)
    assert ids(store) == [f"e{number:05d}" for number in range(15, 20)]


@pytest.mark.parametrize("most", [1, 3, 10, 100, 1000])
def test_there_are_never_more_than_may_be_and_most_of_them(files: Files, most: int) -> None:
    store = StoredHistory(files)
    for number in range(0, 300, 3):
        store.write_whole([event(number), event(number + 1), event(number + 2)])
        if number % 30 == 0:
            store.compact(oldest_ms=0, most_events=most)
    store.compact(oldest_ms=0, most_events=most)
    kept = ids(store)
    assert len(kept) <= most
    assert len(kept) >= min(300, most - merged_events(most) - 3)
    assert kept == [f"e{number:05d}" for number in range(300 - len(kept), 300)], "the newest"


class Killed(BaseException):
    pass


class KilledFiles(Memory):
    """Killed at the how manieth change."""

    left = -1

    def write(self, name: str, data: bytes) -> None:
        self._live()
        super().write(name, data)

    def delete(self, names: object) -> None:
        for name in names:  # type: ignore[attr-defined]
            self._live()
            super().delete([name])

    def _live(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1


@pytest.mark.parametrize("killed_at", range(9))
def test_a_kill_in_the_middle_of_compacting_loses_nothing(killed_at: int) -> None:
    files = KilledFiles()
    store = StoredHistory(files)
    for number in range(6):
        store.write_whole([event(number)])
    files.left = killed_at
    try:
        store.compact(oldest_ms=0, most_events=1000)
        assert killed_at >= 7
    except Killed:
        assert killed_at < 7
    files.left = -1
    assert sorted(set(ids(store))) == [f"e{number:05d}" for number in range(6)]
    store.compact(oldest_ms=0, most_events=1000)
    assert sorted(set(ids(store))) == [f"e{number:05d}" for number in range(6)]
    assert len(store.pages()) <= 2


def test_parts_are_as_few_as_may_be() -> None:
    events = [event(number, 10) for number in range(10)]
    size = len(events[0].data)
    assert [len(each) for each in parted(events, 4, 1 << 20)] == [4, 4, 2]
    assert [len(each) for each in parted(events, 100, 3 * size)] == [3, 3, 3, 1]
    assert [len(each) for each in parted(events, 100, size - 1)] == [1] * 10, "one that is larger is alone"
    assert parted([], 4, 100) == []


def test_a_store_that_fails_says_so() -> None:
    class Failing(Memory):
        def names_in(self, folder: str = "") -> list[str]:
            raise StoreUnavailable(f"no {folder}")

    with pytest.raises(StoreUnavailable):
        StoredHistory(Failing()).pages()
