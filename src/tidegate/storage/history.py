"""What has happened to a pipeline, kept in its root: pages of events, as bytes. What an event is, others know.

    history/<first>-<writer>.json                     a page that its writer still adds to
    history/<first>-<writer>-<last>-<count>.json      one that is whole, and never changes

`first` and `last` are times, in ms since 1970: of the first event of a page and, where it is whole, of all of them the
earliest and the latest. So one list tells which page holds what, and one read brings a page.

Nothing here is needed by a restart, and nothing is in order but by the times of events. A page that is added to is
written whole each time. A page that takes the place of others is written before those are deleted: whoever is killed in
between leaves events twice, which are told apart by their ids.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from tidegate.storage.files import Files
from tidegate.storage.paths import RootPaths

_log = logging.getLogger("tidegate")

MOST_EVENTS: Final = 64
MOST_BYTES: Final = 256 * 1024
"""Of a page that is added to: it is written whole each time."""
MOST_MERGED_EVENTS: Final = 512
MOST_MERGED_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"(?P<first>\d{13})-(?P<writer>[0-9a-f]{8})(-(?P<last>\d{13})-(?P<count>\d{1,5}))?\.json")


class Event(msgspec.Struct, frozen=True):
    """One that is kept: by its id, when it happened, and all there is of it."""

    id: str
    at_ms: int
    data: bytes


class Page(msgspec.Struct, frozen=True):
    """A page by its name. `last_ms`, `count`: of one that is whole; None: its writer may add to it."""

    first_ms: int
    writer: str
    last_ms: int | None = None
    count: int | None = None

    @property
    def name(self) -> str:
        whole = "" if self.last_ms is None else f"-{self.last_ms:013d}-{self.count}"
        return f"{RootPaths.HISTORY}/{self.first_ms:013d}-{self.writer}{whole}.json"

    @property
    def is_whole(self) -> bool:
        return self.last_ms is not None


class _Head(msgspec.Struct, frozen=True):
    """What every event has, whatever else there is of it."""

    id: str
    at: datetime


_raws: Final = msgspec.json.Decoder(list[msgspec.Raw])
_head: Final = msgspec.json.Decoder(_Head)


def new_writer() -> str:
    """By what name somebody writes pages: another one each time."""
    return uuid.uuid4().hex[:8]


def as_event(data: bytes) -> Event:
    """An event by what there is of it."""
    head = _head.decode(data)
    at = head.at if head.at.tzinfo is not None else head.at.replace(tzinfo=UTC)
    return Event(head.id, int(at.timestamp() * 1000), data)


class StoredHistory:
    def __init__(self, files: Files) -> None:
        self._files = files
        self._told: set[str] = set()
        """Damaged pages, each of which is told of once."""

    def pages(self) -> list[Page]:
        """All that are there, in the order of their first events. What has another name is none of them."""
        found = (_NAME.fullmatch(name) for name in self._files.names_in(RootPaths.HISTORY))
        return [
            Page(
                int(each["first"]),
                each["writer"],
                None if each["last"] is None else int(each["last"]),
                None if each["count"] is None else int(each["count"]),
            )
            for each in found
            if each is not None
        ]

    def read(self, pages: Iterable[Page]) -> dict[Page, list[Event] | None]:
        """What is in these. None: it cannot be understood. One that is gone by now is left out: another has its
        events, or they were too many or too old."""
        by_name = {page.name: page for page in pages}
        found = self._files.read_all(by_name)
        return {page: self._decoded(name, found[name]) for name, page in by_name.items() if name in found}

    def _decoded(self, name: str, data: bytes) -> list[Event] | None:
        try:
            return [as_event(bytes(each)) for each in _raws.decode(data)]
        except (ValueError, OverflowError, msgspec.MsgspecError) as error:
            if name not in self._told:
                self._told.add(name)
                _log.warning("%s is damaged, and is passed over: %s", self._files.location(name), error)
            return None

    def write(self, page: Page, events: Sequence[Event]) -> None:
        self._files.write(page.name, encoded(events))

    def write_whole(self, events: Sequence[Event]) -> Page:
        """A page that never changes. Returns which."""
        times = [event.at_ms for event in events]
        page = Page(max(0, min(times)), new_writer(), max(0, *times), len(events))
        self.write(page, events)
        return page

    def delete(self, pages: Iterable[Page]) -> None:
        self._files.delete([page.name for page in pages])

    def compact(self, *, oldest_ms: int, most_events: int, but: Page | None = None, added: int = 0) -> None:
        """Keep no event of before a time, no more events than these, and few pages. `but`: the page that is added to
        right now, which has `added` of them. All others that are not whole are of writers that have ended; one that has
        not writes its page again, and its events are there twice until the next time."""
        pages = [page for page in self.pages() if page != but]
        old = [page for page in pages if page.last_ms is not None and page.last_ms < oldest_ms]
        kept = [page for page in pages if page not in old]
        large = merged_events(most_events) // 2
        whole = [page for page in kept if page.count is not None and page.count > large]
        rest = [page for page in kept if page not in whole]
        if len(rest) > 1 or any(not page.is_whole for page in rest):
            rest = self._merged(rest, oldest_ms, most_events)
        self.delete([*old, *_too_many([*whole, *rest], most_events - added)])

    def _merged(self, pages: Sequence[Page], oldest_ms: int, most_events: int) -> list[Page]:
        """Pages in the place of others. Returns what is there then."""
        read = self.read(pages)
        damaged = [page for page, events in read.items() if events is None]
        # Who cannot be understood stays where it is until it is too old, for whoever wants to look at it.
        gone = [page for page in damaged if page.first_ms < oldest_ms]
        unique: dict[str, Event] = {}
        for event in (each for events in read.values() for each in events or () if each.at_ms >= oldest_ms):
            if event.id not in unique or unique[event.id].at_ms <= event.at_ms:  # the later word counts
                unique[event.id] = event
        in_order = sorted(unique.values(), key=lambda event: event.at_ms)
        made = [self.write_whole(each) for each in parted(in_order, merged_events(most_events), MOST_MERGED_BYTES)]
        self.delete([*(page for page, events in read.items() if events is not None and page not in made), *gone])
        return made


def merged_events(most_events: int) -> int:
    """How many a page takes up that is made of others. Whole pages are dropped where there are too many events, and
    what is kept is to be no less than three quarters of what may be."""
    return max(1, min(MOST_MERGED_EVENTS, most_events // 4))


def encoded(events: Iterable[Event]) -> bytes:
    return b"[" + b",\n".join(event.data for event in events) + b"]\n"


def parted(events: Sequence[Event], most_events: int, most_bytes: int) -> list[list[Event]]:
    """Events in as few lists as may be, each of no more than so many and, but for one that is larger itself, so many
    bytes."""
    parts: list[list[Event]] = []
    size = 0
    for event in events:
        if not parts or len(parts[-1]) >= most_events or size + len(event.data) > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append(event)
        size += len(event.data)
    return parts


def _too_many(pages: Iterable[Page], most_events: int) -> list[Page]:
    """The oldest of whole pages, from the one on with which there are more events than may be."""
    dropped: list[Page] = []
    total = 0
    for page in sorted(pages, key=lambda page: page.last_ms or 0, reverse=True):
        total += page.count or 0
        if total > most_events:
            dropped.append(page)
    return dropped
