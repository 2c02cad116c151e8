"""Keys and values in memory: for tests, and for a simulator that drives time, and all that can go wrong, by hand.

Nothing happens by itself: whatever is due by the clock that is given takes effect with the next call. A session beats
unless it is cut off; when it was for a lease, others see it no longer, and it is lost.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from tidegate.cluster.keys import check_folder, check_key, check_name, check_value
from tidegate.cluster.kv import Entry, Presence
from tidegate.errors import CoordinationUnavailable, MaybeWritten, NotWritten, SessionLost

_PRESENCE: Final = "@"
"""What notices call it: no folder has this name."""
_LOOK_S: Final = 0.01
"""The clock may be one that does not move by itself: who waits looks at it this often."""


class MemoryKV:
    """What the sessions that it opens share."""

    def __init__(self, now_ms: Callable[[], int], *, lease_ms: int = 10_000) -> None:
        self.notice_delays_ms: Callable[[], Sequence[int]] = lambda: (0,)
        """Asked for each notice to each session: after how long it comes, each time that it does. None: it is lost."""
        self._now_ms = now_ms
        self._lease_ms = lease_ms
        self._changing = threading.Condition()
        self._folders: dict[str, dict[str, Entry]] = {}
        self._version = 0
        """Of all keys, so that a key's grows also where it was deleted."""
        self._present: dict[str, tuple[MemorySession, Presence]] = {}
        self._sessions: list[MemorySession] = []
        self._due: list[tuple[int, int, Callable[[], object]]] = []
        self._planned = 0

    def open(self) -> MemorySession:
        session = MemorySession(self)
        with self._changing:
            self._sessions.append(session)
        return session

    def next_due_ms(self) -> int | None:
        """When something takes effect that has not yet: a simulator may let that much time pass."""
        with self._changing:
            return self._due[0][0] if self._due else None

    def forget_all(self) -> None:
        """All that is here is lost, and everybody with it."""
        with self._changing:
            for session, _ in self._present.values():
                session._lose("what was shared is lost")
            self._folders.clear()
            self._present.clear()

    def keys_in(self, folder: str) -> list[str]:
        """All that is there, in folders below it too."""
        with self._changing:
            return sorted(
                f"{each}/{name}"
                for each, keys in self._folders.items()
                if f"{each}/".startswith(f"{folder}/")
                for name in keys
            )

    # -- what happens, and when -------------------------------------------------------------------

    @contextmanager
    def _up_to_now(self) -> Iterator[None]:
        with self._changing:
            while self._due and self._due[0][0] <= self._now_ms():
                heapq.heappop(self._due)[2]()
            yield

    def _plan(self, after_ms: int, what: Callable[[], object]) -> None:
        self._planned += 1
        heapq.heappush(self._due, (self._now_ms() + after_ms, self._planned, what))

    def _notify(self, about: str) -> None:
        for session in self._sessions:
            for delay_ms in self.notice_delays_ms():
                if delay_ms:
                    self._plan(delay_ms, lambda session=session: session._hear(about))  # type: ignore[misc]
                else:
                    session._hear(about)

    def _put(self, key: str, value: bytes) -> bool:
        folder, name = check_key(key)
        self._version += 1
        self._folders.setdefault(folder, {})[name] = Entry(value, self._version)
        self._notify(folder)
        return True

    def _get(self, key: str) -> Entry | None:
        folder, name = check_key(key)
        return self._folders.get(folder, {}).get(name)

    def _remove(self, keys: Iterable[str]) -> bool:
        for folder, name in map(check_key, keys):
            if self._folders.get(folder, {}).pop(name, None) is not None:
                self._notify(folder)
        return True

    def _arrive(self, session: MemorySession, presence: Presence) -> bool:
        before, _ = self._present.get(presence.instance, (session, presence))
        if before is not session:
            before._lose("another incarnation has joined by its name")
        self._present[presence.instance] = session, presence
        self._notify(_PRESENCE)
        return True

    def _depart(self, session: MemorySession) -> None:
        gone = [name for name, (each, _) in self._present.items() if each is session]
        for name in gone:
            del self._present[name]
        if gone:
            self._notify(_PRESENCE)


class MemorySession:
    """A `Session`, and what a test or a simulator may do to it."""

    def __init__(self, kv: MemoryKV) -> None:
        self._kv = kv
        self._lost: str | None = None
        self._is_closed = False
        self._cuts = 0
        self._is_cut_off = False
        self._doubts: list[int | None] = []
        self._heard: dict[str, int] = {}
        self._known: dict[str, int] = {}
        """How many notices have come, and how many of them there were when it was read, or a wait returned."""

    # -- what may be done to it -------------------------------------------------------------------

    def cut_off(self) -> None:
        """Nothing comes through any more. As with a process that was killed, others see it for a lease longer."""
        with self._kv._up_to_now():
            self._is_cut_off = True
            self._cuts += 1
            cut = self._cuts
            self._kv._plan(self._kv._lease_ms, lambda: self._expire_if_still(cut))

    def heal(self) -> None:
        """What was done before its lease was over has not happened, for others."""
        with self._kv._up_to_now():
            self._is_cut_off = False
            self._cuts += 1

    def expire(self) -> None:
        """Others see it no longer, from now on."""
        with self._kv._up_to_now():
            self._kv._depart(self)
            self._lose("its lease has expired")

    def doubt_next(self, after_ms: int | None) -> None:
        """The next write is `MaybeWritten`: it takes effect after this time, which may be none, or never."""
        with self._kv._up_to_now():
            self._doubts.append(after_ms)

    def _expire_if_still(self, cut: int) -> None:
        if self._cuts == cut and any(session is self for session, _ in self._kv._present.values()):
            self._kv._depart(self)
            self._lose("it was cut off for longer than its lease")

    def _lose(self, why: str) -> None:
        self._lost = why
        self._kv._changing.notify_all()

    def _hear(self, about: str) -> None:
        self._heard[about] = self._heard.get(about, 0) + 1
        self._kv._changing.notify_all()

    # -- who is there -----------------------------------------------------------------------------

    def join(self, instance: str, incarnation: str, value: bytes) -> None:
        presence = Presence(check_name(instance), check_name(incarnation), check_value(instance, value))
        with self._kv._up_to_now():
            self._fail_if_cut_off(NotWritten)
            self._kv._depart(self)
            self._lost = "it could not join"
            self._write(lambda: self._kv._arrive(self, presence))
            self._lost = None

    def leave(self) -> None:
        with self._kv._up_to_now():
            if not self._is_cut_off:
                self._kv._depart(self)
            self._lost = None

    def present(self) -> Mapping[str, Presence]:
        with self._reading():
            self._known[_PRESENCE] = self._heard.get(_PRESENCE, 0)
            return {name: presence for name, (_, presence) in self._kv._present.items()}

    # -- keys -------------------------------------------------------------------------------------

    def read(self, key: str) -> Entry | None:
        with self._reading():
            return self._kv._get(key)

    def read_folder(self, folder: str) -> Mapping[str, Entry]:
        with self._reading():
            self._known[check_folder(folder)] = self._heard.get(folder, 0)
            return dict(self._kv._folders.get(folder, {}))

    def write(self, key: str, value: bytes) -> None:
        check_value(key, value)
        check_key(key)
        with self._writing():
            self._write(lambda: self._kv._put(key, value))

    def create(self, key: str, value: bytes) -> bool:
        check_value(key, value)
        with self._writing():
            if self._kv._get(key) is not None:
                return False
            return self._write(lambda: self._kv._get(key) is None and self._kv._put(key, value))

    def swap(self, key: str, value: bytes, version: int) -> bool:
        check_value(key, value)

        def is_as_it_was() -> bool:
            found = self._kv._get(key)
            return found is not None and found.version == version

        with self._writing():
            if not is_as_it_was():
                return False
            return self._write(lambda: is_as_it_was() and self._kv._put(key, value))

    def delete(self, keys: Iterable[str]) -> None:
        these = list(keys)
        for key in these:
            check_key(key)
        with self._writing():
            self._write(lambda: self._kv._remove(these))

    def folders(self, folder: str) -> list[str]:
        top = f"{check_folder(folder)}/"
        with self._reading():
            below = [each.removeprefix(top) for each in self._kv._folders if each.startswith(top)]
        return sorted({each.partition("/")[0] for each in below})

    def clear(self, folder: str) -> None:
        check_folder(folder)

        def gone() -> bool:
            below = [each for each in self._kv._folders if f"{each}/".startswith(f"{folder}/")]
            self._kv._remove([f"{each}/{name}" for each in below for name in self._kv._folders[each]])
            for each in below:
                del self._kv._folders[each]
            return True

        with self._writing():
            self._write(gone)

    def _write(self, take_effect: Callable[[], bool]) -> bool:
        if not self._doubts:
            return take_effect()
        after_ms = self._doubts.pop(0)
        if after_ms == 0:
            take_effect()
        elif after_ms is not None:
            self._kv._plan(after_ms, take_effect)
        raise MaybeWritten("the answer was lost")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._kv._up_to_now():
            self._fail_if_lost()
            self._fail_if_cut_off(CoordinationUnavailable)
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._kv._up_to_now():
            self._fail_if_lost()
            self._fail_if_cut_off(NotWritten)
            yield

    def _fail_if_lost(self) -> None:
        if self._lost is not None:
            raise SessionLost(f"this session is lost: {self._lost}; it has to join anew")

    def _fail_if_cut_off(self, kind: type[CoordinationUnavailable]) -> None:
        if self._is_closed:
            raise kind("this session is closed")
        if self._is_cut_off:
            raise kind("the memory does not answer")

    # -- changes ----------------------------------------------------------------------------------

    def has_news(self, folders: Collection[str]) -> bool:
        """Whether a wait would return at once. If so it is told once, as by a wait that returns."""
        about = [*map(check_folder, folders), _PRESENCE]
        with self._reading():
            return self._take_news(about)

    def wait(self, folders: Collection[str], timeout_s: float) -> None:
        about = [*map(check_folder, folders), _PRESENCE]
        until = time.monotonic() + timeout_s
        with self._reading():
            heard = self._heard_of(about)
            if self._take_news(about):
                return
        while (left := until - time.monotonic()) > 0:
            with self._kv._up_to_now():
                if self._is_closed:
                    return
                self._fail_if_lost()
                self._fail_if_cut_off(CoordinationUnavailable)
                if self._heard_of(about) != heard:
                    self._take_news(about)
                    return
                self._kv._changing.wait(min(left, _LOOK_S))

    def _heard_of(self, about: Collection[str]) -> dict[str, int]:
        return {each: self._heard.get(each, 0) for each in about}

    def _take_news(self, about: Collection[str]) -> bool:
        heard = self._heard_of(about)
        is_news = any(self._known.get(each, 0) != count for each, count in heard.items())
        self._known |= heard
        return is_news

    def close(self) -> None:
        with self._kv._up_to_now():
            if not self._is_cut_off:
                self._kv._depart(self)
            self._is_closed = True
            if self in self._kv._sessions:
                self._kv._sessions.remove(self)
            self._kv._changing.notify_all()
