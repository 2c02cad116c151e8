"""Keys and values as files, for processes that share a root and nothing else.

A version of a key is a file `<key>@<version>`, which never changes: one list of a folder tells all keys and versions,
and what has not changed is not read again. The highest version counts. What is in a file begins with what tells it from
all others, so that a try whose answer was lost is known for one's own.

- *Own* keys: a version above those that were there, and above the time in nanoseconds, so that it is also above those
  that were deleted; the ones before it are deleted then. A machine whose clock is behind that of an earlier owner could
  take a lower one, where the key was deleted: that is done to keys of instances that do not come back (`leftovers.py`).
  If one does after all, who reads sees another version, and takes it for what is there.
- *Shared* keys: `create` makes version 1, and a swap the one after that which it was given. Of all that make the same
  file one does. Versions 1 and 2 stay until the key is deleted: so nobody creates a key twice, and whoever finds
  version 1 and no version 2 need not list. Of the others the last few stay. So a swap that finds its version to be the
  last, then makes the next, and finds few above it, knows that nobody has made that one before: it was not deleted yet.
  One that finds many above it does not know what it has done, and says so.

Who waits lists the folders, often at first, then less so.

In a bucket each of it is a request. There one list is of all folders, and serves whoever looks within a moment
(`listing.py`); and versions that count no more are deleted when there are a few of them.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

from tidegate.cluster.beats import Beats, Listed
from tidegate.cluster.keys import check_folder, check_key, check_name, check_value
from tidegate.cluster.kv import Entry, Presence
from tidegate.cluster.listing import Listing
from tidegate.cluster.seen import Seen
from tidegate.errors import CoordinationUnavailable, MaybeWritten, NotWritten, StoreUnavailable
from tidegate.storage.files import Files

_PRESENT: Final = "@present"  # no key leads through it
_FIRST: Final = 1
_SECOND: Final = 2
_STAYING: Final = 8
_TOKEN_BYTES: Final = 16
_TRIES: Final = 50
_GROWTH: Final = 1.3
_FAR_GROWTH: Final = 2.5
_FEW: Final = 8
BETWEEN_LOOKS_S: Final = (0.005, 0.025)


class _Owned:
    """The versions of an own key that may be there."""

    def __init__(self, versions: Iterable[int]) -> None:
        self.versions = set(versions)
        self.newest = max(self.versions, default=0)
        self.written = 0


class _View:
    """A folder as it was last read."""

    def __init__(self) -> None:
        self.reading = threading.Lock()
        self.entries: dict[str, Entry] = {}


class FilesSession:
    """A `Session` over `Files`. `poll_s`: how long who waits lets pass between two looks, at first and at most.
    `is_far`: each call is a request, and takes its time."""

    def __init__(
        self,
        files: Files,
        *,
        lease_s: float = 10.0,
        poll_s: tuple[float, float] = BETWEEN_LOOKS_S,
        is_far: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._poll_s = poll_s
        self._listing = Listing(files, poll_s[0] if is_far else None)
        self._deletes_from = _FEW if is_far else 1
        self._pause_s = poll_s[0]
        self._growth = _FAR_GROWTH if is_far else _GROWTH
        self._beats = Beats(
            files.at(_PRESENT), lease_s, clock, Listed(self._listing, _PRESENT), leaves=self._deletes_from - 1
        )
        self._seen = Seen()
        self._owned: dict[str, _Owned] = {}
        self._views: dict[str, _View] = {}
        self._changing = threading.Lock()
        self._closing = threading.Event()

    # -- who is there -----------------------------------------------------------------------------

    def join(self, instance: str, incarnation: str, value: bytes) -> None:
        self._fail_if_closed(NotWritten)
        self._beats.join(check_name(instance), check_name(incarnation), check_value(instance, value))

    def leave(self) -> None:
        self._beats.leave()

    def present(self) -> Mapping[str, Presence]:
        with self._doing(CoordinationUnavailable):
            found = self._beats.present()
            self._beats.check()
            self._seen.present(_incarnations(found))
            return found

    # -- reading ----------------------------------------------------------------------------------

    def read(self, key: str) -> Entry | None:
        folder, name = check_key(key)
        with self._doing(CoordinationUnavailable):
            data = None if self._listing.is_of_all else self._files.read(_file(key, _FIRST))
            if data is not None and not self._files.exists(_file(key, _SECOND)):
                entry: Entry | None = Entry(data[_TOKEN_BYTES:], _FIRST)
            else:
                entry = self._read_listed(folder, only=name).get(name)
            self._seen.key(folder, name, None if entry is None else entry.version)
            return entry

    def read_folder(self, folder: str) -> Mapping[str, Entry]:
        with self._doing(CoordinationUnavailable):
            found = self._read_listed(check_folder(folder))
            self._seen.folder(folder, {name: entry.version for name, entry in found.items()})
            return found

    def _read_listed(self, folder: str, only: str | None = None) -> dict[str, Entry]:
        with self._changing:
            view = self._views.setdefault(folder, _View())
        with view.reading:
            for tries in range(_TRIES):
                versions = self._list_twice_if_in_doubt(folder, view, only, anew=tries > 0)
                found = {name: self._read_version(folder, name, versions[name], view) for name in versions}
                whole = {name: entry for name, entry in found.items() if entry is not None}
                view.entries |= whole
                if len(whole) == len(versions):
                    for name in view.entries.keys() - whole.keys() if only is None else {only} - whole.keys():
                        view.entries.pop(name, None)
                    return whole
        raise CoordinationUnavailable(f"what is in {folder!r} keeps changing while it is read")

    def _list_twice_if_in_doubt(self, folder: str, view: _View, only: str | None, *, anew: bool) -> dict[str, int]:
        """A list of many files may miss one that was made meanwhile, and no longer have the one before it: what was
        there, and seems to be gone or older, is looked for again."""
        names = view.entries.keys() if only is None else view.entries.keys() & {only}
        versions = self._list(folder, anew=anew)
        if any(versions.get(name, 0) < view.entries[name].version for name in names):
            versions = self._list(folder, anew=True)
        return versions if only is None else {name: version for name, version in versions.items() if name == only}

    def _read_version(self, folder: str, name: str, version: int, view: _View) -> Entry | None:
        """None: it is gone already, as there is a newer one."""
        known = view.entries.get(name)
        if known is not None and known.version == version:
            return known
        data = self._files.read(_file(_key(folder, name), version))
        return None if data is None else Entry(data[_TOKEN_BYTES:], version)

    def _list(self, folder: str, *, anew: bool = False) -> dict[str, int]:
        return _newest(self._list_all(folder, anew=anew))

    def _list_all(self, folder: str, *, anew: bool = False) -> Iterator[tuple[str, int]]:
        for listed in self._listing.names_in(folder, anew=anew):
            name, _, version = listed.rpartition("@")
            if name and version.isdigit():
                yield name, int(version)

    # -- writing ----------------------------------------------------------------------------------

    def write(self, key: str, value: bytes) -> None:
        folder, name = check_key(key)
        data = _tokened(check_value(key, value))
        with self._doing(NotWritten):
            owned = self._owned.get(key)
            if owned is None:
                there = [version for each, version in self._list_all(folder, anew=True) if each == name]
                owned = self._owned.setdefault(key, _Owned(there))
        with self._changing:
            version = owned.newest = max(owned.newest + 1, time.time_ns())
            owned.versions.add(version)
        with self._doing(MaybeWritten):
            try:
                self._files.write(_file(key, version), data)
            except StoreUnavailable:
                self._listing.changed()
                raise
        self._know(folder, name, Entry(value, version))
        with self._changing:
            owned.written = max(owned.written, version)
            older = sorted(each for each in owned.versions if each < owned.written)
        if len(older) < self._deletes_from:
            return
        with suppress(StoreUnavailable), self._noting_changes():  # the next write tries again
            self._files.delete([_file(key, each) for each in older])
            with self._changing:
                owned.versions.difference_update(older)

    def _know(self, folder: str, name: str, entry: Entry) -> None:
        """What was written here need not be listed, nor read, and is no news to who waits."""
        if self._listing.is_of_all:
            self._listing.added(folder, f"{name}@{entry.version}")
            self._seen.key(folder, name, entry.version)
            with self._changing:
                view = self._views.setdefault(folder, _View())
            with view.reading:
                known = view.entries.get(name)
                if known is None or known.version < entry.version:
                    view.entries[name] = entry

    def create(self, key: str, value: bytes) -> bool:
        check_key(key)
        data = _tokened(check_value(key, value))
        with self._doing(MaybeWritten), self._noting_changes():
            return self._make(_file(key, _FIRST), data)

    def swap(self, key: str, value: bytes, version: int) -> bool:
        folder, name = check_key(key)
        data = _tokened(check_value(key, value))
        with self._doing(NotWritten):
            if self._list(folder, anew=True).get(name) != version:
                return False
        with self._doing(MaybeWritten), self._noting_changes():
            if not self._make(_file(key, version + 1), data):
                return False
            if self._list(folder, anew=True).get(name, 0) > version + 1 + _STAYING:
                raise MaybeWritten(f"{key!r} was changed too often meanwhile to know whether this has changed it")
        if version - _STAYING > _SECOND:
            with suppress(StoreUnavailable), self._noting_changes():  # it is in nobody's way
                self._files.delete([_file(key, version - _STAYING)])
        return True

    def _make(self, file: str, data: bytes) -> bool:
        return self._files.create(file, data) or self._files.read(file) == data

    def delete(self, keys: Iterable[str]) -> None:
        names: dict[str, set[str]] = {}
        for folder, name in map(check_key, keys):
            names.setdefault(folder, set()).add(name)
        older: list[str] = []
        newest: list[str] = []
        with self._doing(NotWritten):
            for folder, wanted in names.items():
                there = [each for each in self._list_all(folder, anew=True) if each[0] in wanted]
                last = _newest(there)
                older += [_file(_key(folder, name), version) for name, version in there if version < last[name]]
                newest += [_file(_key(folder, name), version) for name, version in last.items()]
        with self._doing(MaybeWritten), self._noting_changes():
            self._files.delete(older)
            self._files.delete(newest)  # last, so that at no time an older one seems to count

    def folders(self, folder: str) -> list[str]:
        with self._doing(CoordinationUnavailable):
            return [name for name in self._listing.names_in(check_folder(folder)) if "@" not in name]

    def clear(self, folder: str) -> None:
        with self._doing(MaybeWritten), self._noting_changes():
            self._files.delete(self._files.list(check_folder(folder)))
            self._files.prune(folder)

    # -- changes ----------------------------------------------------------------------------------

    def wait(self, folders: Collection[str], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        shortest_s, longest_s = self._poll_s
        # Where a look is a request, who has waited in vain does not begin again with looking often.
        pause_s = self._pause_s if self._listing.is_of_all else shortest_s
        begin = None
        while True:
            with self._doing(CoordinationUnavailable):
                found = {folder: self._list(check_folder(folder)) for folder in folders}
                present = _incarnations(self._beats.present())
                self._beats.check()
            now = (self._of_others(found), present)
            if self._seen.is_news(found, present) or (begin is not None and begin != now):
                self._pause_s = shortest_s
                return
            begin = begin or now
            left_s = until - time.monotonic()
            if left_s <= 0 or self._closing.wait(min(pause_s, left_s)):
                return
            pause_s = self._pause_s = min(pause_s * self._growth, longest_s)

    def _of_others(self, found: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """Where looks are dear, nobody looks more often because of what he has said himself."""
        if not self._listing.is_of_all:
            return found
        own = self._owned.keys()
        return {
            folder: {name: version for name, version in versions.items() if _key(folder, name) not in own}
            for folder, versions in found.items()
        }

    def close(self) -> None:
        self._closing.set()
        self._beats.leave()

    # -- what fails -------------------------------------------------------------------------------

    @contextmanager
    def _doing(self, kind: type[CoordinationUnavailable]) -> Iterator[None]:
        self._fail_if_closed(kind)
        self._beats.check()
        try:
            yield
        except StoreUnavailable as error:
            raise kind(str(error)) from error

    @contextmanager
    def _noting_changes(self) -> Iterator[None]:
        """Whether or not it comes to something."""
        try:
            yield
        finally:
            self._listing.changed()

    def _fail_if_closed(self, kind: type[CoordinationUnavailable]) -> None:
        if self._closing.is_set():
            raise kind("this session is closed")


def _key(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _file(key: str, version: int) -> str:
    return f"{key}@{version}"


def _newest(versions: Iterable[tuple[str, int]]) -> dict[str, int]:
    newest: dict[str, int] = {}
    for name, version in versions:
        newest[name] = max(version, newest.get(name, 0))
    return newest


def _tokened(value: bytes) -> bytes:
    return uuid.uuid4().bytes + value


def _incarnations(present: Mapping[str, Presence]) -> dict[str, str]:
    """Who is there; that somebody is seen to live, and was only listed before, is news as well."""
    return {name: f"{each.incarnation}{'' if each.is_sure else '?'}" for name, each in present.items()}
