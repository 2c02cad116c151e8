"""The history of a root: what has happened to its pipeline, written by the run that lives there, read by whoever asks.

`Recorder` is a run's own. `note` is for its control thread: it never waits and never raises. A thread beside it writes,
and makes few pages of many when the run starts and now and then. What cannot be written is a log line, and is tried
again; what has not been written when the process is killed is made up for by the next run, from what the killed one has
said of itself (`catching_up.py`).

`Past` reads, from anywhere. What it has read of pages that never change it does not read again.

Importing this brings no PySpark.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal, TypeVar

import msgspec

from tidegate.engine.carrier import Clock
from tidegate.engine.events import AnyEvent, CheckpointEnded, Rewound
from tidegate.engine.status import moment_ms, now
from tidegate.errors import StoreUnavailable
from tidegate.protocol.names import checkpoint_name
from tidegate.storage import history as stored
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files
from tidegate.storage.history import (
    MOST_BYTES,
    MOST_EVENTS,
    Page,
    StoredHistory,
    as_event,
    merged_events,
    new_writer,
    parted,
)

_log = logging.getLogger("tidegate")

# What waits to be written while the store fails: so much of it is kept, the newest.
_MOST_PENDING: Final = 1_000
_COMPACT_EVERY_MS: Final = 60 * 60 * 1000
_COMPACT_EVERY_PAGES: Final = 8
_LAST_WORDS_S: Final = 10.0
_LOOKS: Final = 10
T = TypeVar("T")

CatchUp = Callable[[], Iterable[AnyEvent]]
_decoder: Final = msgspec.json.Decoder(AnyEvent)


class Bounds(msgspec.Struct, frozen=True):
    """How much of the history is kept."""

    age_ms: int = 30 * 24 * 3_600_000
    count: int = 10_000


def as_data(event: AnyEvent) -> bytes:
    """An event as it is kept: without what is not known, or is empty."""
    return msgspec.json.encode(_without_nothing(msgspec.to_builtins(event)))


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_nothing(each) for key, each in value.items()}
        return {key: each for key, each in kept.items() if each is not None and each not in ({}, [])}
    return [_without_nothing(each) for each in value] if isinstance(value, list | tuple) else value


# -- writing ----------------------------------------------------------------------------------------


class Recorder:
    """Of one run."""

    def __init__(self, files: Files, bounds: Bounds | None = None, every_s: float = 1.0) -> None:
        """`every_s`: how soon what was noted is written, at the latest."""
        self._store = StoredHistory(files)
        self._bounds = Bounds() if bounds is None else bounds
        self._every_s = every_s
        self._noted: deque[AnyEvent] = deque(maxlen=_MOST_PENDING)
        # No event: a signal that interrupts the control thread inside of one could leave it locked.
        self._bell: SimpleQueue[bool] = SimpleQueue()
        self._missed: SimpleQueue[CatchUp] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._page: Page | None = None
        self._events: list[stored.Event] = []
        """What is in that page, or is to be."""
        self._left: list[Page] = []
        """Pages whose events are in whole ones by now."""
        self._is_dirty = False
        self._is_failing = False
        self._is_behind = False
        self._is_silent = False
        self._full_pages = 0
        self._compacted_ms: int | None = None
        self._clock = Clock()

    # -- for the control thread -------------------------------------------------------------------

    def note(self, event: AnyEvent) -> None:
        """It has happened. What is no checkpoint comes seldom, and is written at once."""
        self._noted.append(event)
        if not isinstance(event, CheckpointEnded):
            self._bell.put(True)

    def begin(self, catch_up: CatchUp | None = None) -> None:
        """From now on it may write: the root stays. `catch_up` tells, beside the control thread, what nobody has noted
        yet of the runs before."""
        if catch_up is not None:
            self._missed.put(catch_up)
            self._bell.put(True)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tidegate-history", daemon=True)
            self._thread.start()

    def close(self, patience_s: float = _LAST_WORDS_S) -> None:
        """Write what is left, and wait for that so long at most. Where it has not begun, nothing has happened to the
        pipeline: a run that is refused changes nothing."""
        if self._is_silent or self._thread is None:
            return
        self._bell.put(False)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            _log.warning("what happened last is not in the history yet, after %.0f s", patience_s)

    def forget(self) -> None:
        """Write nothing, whatever is noted: the root is about to be removed."""
        self._is_silent = True

    # -- on its own thread ------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            goes_on = self._waited()
            self._is_behind = self._guarded(self._catch_up, is_told=not self._is_behind) is not None
            self._flush_or_tell()
            if not goes_on:
                return
            if not self._is_failing:
                self._guarded(self._compact_if_due)

    def _catch_up(self) -> None:
        with suppress(Empty):
            while True:
                catch_up = self._missed.get_nowait()
                try:
                    found = list(catch_up())
                except StoreUnavailable:
                    self._missed.put(catch_up)
                    raise
                self._take(found)

    def _waited(self) -> bool:
        """Until there is something to write. False: for the last time."""
        goes_on = True
        try:
            goes_on = self._bell.get(timeout=self._every_s)
            while goes_on:
                goes_on = self._bell.get_nowait()
        except Empty:
            pass
        return goes_on

    def _flush_or_tell(self) -> None:
        """Once, until it succeeds again."""
        error = self._guarded(self.flush, is_told=not self._is_failing)
        self._is_failing = error is not None

    def _guarded(self, act: Callable[[], None], *, is_told: bool = True) -> Exception | None:
        try:
            act()
        except Exception as error:
            if is_told:
                is_known = isinstance(error, StoreUnavailable)
                _log.warning("the history could not be written, the run goes on: %s", error, exc_info=not is_known)
            return error
        return None

    def flush(self) -> None:
        """Write what was noted."""
        while self._noted:
            self._take([self._noted.popleft()])
        most = min(MOST_EVENTS, merged_events(self._bounds.count))
        for full in parted(self._events, most, MOST_BYTES)[:-1]:
            self._store.write_whole(full)
            del self._events[: len(full)]
            self._full_pages += 1
            if self._page is not None:
                self._left.append(self._page)
                self._page = None
        if self._is_dirty:
            if self._page is None:
                self._page = Page(max(0, self._events[0].at_ms), new_writer())
            self._store.write(self._page, self._events)
            self._is_dirty = False
        if self._left:
            self._store.delete(self._left)
            self._left = []

    def _take(self, events: Iterable[AnyEvent]) -> None:
        self._events += (as_event(as_data(event)) for event in events)
        del self._events[:-_MOST_PENDING]  # there are so many only where nothing can be written
        self._is_dirty = bool(self._events)

    def _compact_if_due(self) -> None:
        now_ms = self._clock.now_ms
        is_due = self._compacted_ms is None or now_ms - self._compacted_ms >= _COMPACT_EVERY_MS
        if is_due or self._full_pages >= _COMPACT_EVERY_PAGES:
            self._compacted_ms, self._full_pages = now_ms, 0
            self.compact()

    def compact(self) -> None:
        """Drop what is too old or too much, and make few pages of many."""
        oldest_ms = int(self._clock.utc().timestamp() * 1000) - self._bounds.age_ms
        self._store.compact(
            oldest_ms=oldest_ms, most_events=self._bounds.count, but=self._page, added=len(self._events)
        )


def record(files: Files, event: AnyEvent) -> None:
    """What a command has done to a root, as a page of its own. Whether that succeeds changes nothing of what was done:
    if it does not, it is a log line."""
    try:
        StoredHistory(files).write_whole([as_event(as_data(event))])
    except Exception as error:
        _tell_unrecorded(error)


def record_rewind(
    files: Files, how: Literal["restore", "savepoint", "fork", "promote"], source: str | None = None
) -> None:
    """The same of a pipeline that was brought to a checkpoint, which the log tells."""
    try:
        log = StoredDecisions(files).read()
        name = "" if log.newest is None else checkpoint_name(log.newest.checkpoint_id)
    except Exception as error:
        _tell_unrecorded(error)
    else:
        record(files, Rewound(at=now(), generation=log.generation, checkpoint=name, how=how, source=source))


def _tell_unrecorded(error: Exception) -> None:
    _log.warning("it is done, but could not be written to the history of the root: %s", error)


# -- reading ----------------------------------------------------------------------------------------


class _Moved(Exception):
    """A page that was listed is gone."""


class Kept(msgspec.Struct, frozen=True):
    """An event as it was found."""

    at_ms: int
    event: AnyEvent

    @property
    def order(self) -> tuple[int, str]:
        return self.at_ms, self.event.id


class Past:
    """What is in the history of a root, newest first, each event once. For one thread."""

    def __init__(self, files: Files) -> None:
        self._store = StoredHistory(files)
        self._whole: dict[Page, list[Kept]] = {}

    def newest(
        self, count: int, before: str | None = None, kinds: Collection[type[Any]] | None = None
    ) -> tuple[list[AnyEvent], str | None]:
        """The newest events, of these kinds, and by what to ask for those before them; None: there are none.

        `before`: what the last answer said. What has come since does not shift anything.
        """
        return self._settled(lambda: self._newest(count, None if before is None else order_of(before), kinds))

    def _newest(
        self, count: int, before: tuple[int, str] | None, kinds: Collection[type[Any]] | None
    ) -> tuple[list[AnyEvent], str | None]:
        found: list[Kept] = []
        for each in self._newest_first():
            if (before is not None and each.order >= before) or (kinds is not None and type(each.event) not in kinds):
                continue
            if len(found) == count:
                return [kept.event for kept in found], cursor_of(found[-1].event)
            found.append(each)
        return [kept.event for kept in found], None

    def everything(self) -> list[AnyEvent]:
        """All of it, newest first."""
        return self._settled(lambda: [each.event for each in self._newest_first()])

    def _settled(self, look: Callable[[], T]) -> T:
        """Look again where pages were made one meanwhile. One run does so, when it starts and seldom later."""
        for _ in range(_LOOKS):
            with suppress(_Moved):
                return look()
        raise StoreUnavailable("the history is being put in order all the time; ask again")

    def checkpoint(self, name: str, since: str | None = None) -> CheckpointEnded | None:
        """How a checkpoint ended, by its name. `since`: when it was triggered, before which nothing is looked at."""
        return self._settled(lambda: self._checkpoint(name, 0 if since is None else moment_ms(since)))

    def _checkpoint(self, name: str, since_ms: int) -> CheckpointEnded | None:
        found: CheckpointEnded | None = None
        for page in self._pages():  # in order: it is soon after it was triggered
            is_over = found is not None and found.checkpoint.state in ("complete", "aborted")
            if page.last_ms is not None and (page.last_ms < since_ms or is_over):
                continue  # only one that is added to may have a later word of it
            for each in self._events_in([page])[page]:
                if isinstance(each.event, CheckpointEnded) and each.event.checkpoint.checkpoint == name:
                    found = each.event if found is None or each.event.at >= found.at else found
        return found

    def _pages(self) -> list[Page]:
        pages = self._store.pages()
        there = set(pages)
        self._whole = {page: events for page, events in self._whole.items() if page in there}
        return pages

    def _newest_first(self) -> Iterator[Kept]:
        """One page after the other, by their last events: what is later than all that is unread is told."""
        pages = self._pages()
        pages.sort(key=lambda page: (page.is_whole, -(page.last_ms or 0)))
        open_pages = [page for page in pages if not page.is_whole]
        waiting = [each for events in self._events_in(open_pages).values() for each in events]
        seen: set[str] = set()
        for page in pages[len(open_pages) :]:
            assert page.last_ms is not None
            waiting.sort(key=lambda each: each.order)
            while waiting and waiting[-1].at_ms > page.last_ms:
                yield from _once(waiting.pop(), seen)
            waiting += self._events_in([page])[page]
        waiting.sort(key=lambda each: each.order)
        while waiting:
            yield from _once(waiting.pop(), seen)

    def _events_in(self, pages: Collection[Page]) -> dict[Page, list[Kept]]:
        found = {page: self._whole[page] for page in pages if page in self._whole}
        read = self._store.read([page for page in pages if page not in found])
        for page, events in read.items():
            found[page] = [kept for each in events or () if (kept := _understood(each)) is not None]
            if page.is_whole:
                self._whole[page] = found[page]
        if len(found) < len(pages):
            raise _Moved
        return found


def _once(kept: Kept, seen: set[str]) -> Iterator[Kept]:
    if kept.event.id not in seen:
        seen.add(kept.event.id)
        yield kept


def _understood(event: stored.Event) -> Kept | None:
    """None: it is of another version, that knows more than this one."""
    try:
        return Kept(event.at_ms, _decoder.decode(event.data))
    except (msgspec.MsgspecError, ValueError) as error:
        _log.debug("an event of the history cannot be understood: %s", error)
        return None


def cursor_of(event: AnyEvent) -> str:
    """By what to ask for those before it."""
    return f"{moment_ms(event.at)}-{event.id}"


def order_of(cursor: str) -> tuple[int, str]:
    """Where a cursor stands; a `ValueError` where it is none."""
    at_ms, _, event_id = cursor.partition("-")
    return int(at_ms), event_id
