"""Files in memory: for tests, and for a simulator that runs everything but Spark."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterable
from io import BufferedIOBase, BytesIO
from typing import Self
from urllib.parse import quote, unquote

from tidegate.errors import StoreUnavailable
from tidegate.storage.files import AtHand, Files


class Memory(AtHand):
    """`Files` that are gone with the process. Nothing is copied: bytes do not change."""

    def __init__(self, label: str = "root") -> None:
        """`label`: what tells its locations from those of other memories."""
        self._data: dict[str, bytes] = {}
        self._inside: dict[str, dict[str, None]] = {}
        """What is directly in each folder: to list one costs what is in it, not what is in all of them."""
        self._changing = threading.Lock()
        self._label = f"memory://{label}/"
        self._folder = ""

    def __repr__(self) -> str:
        return f"Memory({self.location()!r})"

    @property
    def fsync(self) -> bool:
        return True

    def at(self, folder: str, *, durable: bool = True) -> Self:  # noqa: ARG002 - all of it lives as long
        below = copy.copy(self)
        if folder:
            below._folder = f"{self._folder}{folder}/"
        return below

    # -- reading ----------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        return self._data.get(self._folder + name)

    def open(self, name: str) -> BufferedIOBase | None:
        data = self._data.get(self._folder + name)
        return None if data is None else BytesIO(data)

    def exists(self, name: str) -> bool:
        return self._folder + name in self._data

    def size(self, name: str) -> int | None:
        data = self._data.get(self._folder + name)
        return None if data is None else len(data)

    def names_in(self, folder: str = "") -> list[str]:
        return sorted(self._inside.get(self._path(folder), ()))

    # -- writing ----------------------------------------------------------------------------------

    def write(self, name: str, data: bytes) -> None:
        with self._changing:
            self._put(self._folder + name, data)

    def create(self, name: str, data: bytes) -> bool:
        with self._changing:
            if self._folder + name in self._data:
                return False
            self._put(self._folder + name, data)
            return True

    def overwrite(self, name: str, data: bytes) -> None:
        with self._changing:
            before = self._data.get(self._folder + name)
            if before is None:
                raise StoreUnavailable(f"could not write {self.location(name)}: there is no such file")
            self._data[self._folder + name] = data + before[len(data) :]

    def keep(self, name: str, source: Files, source_name: str) -> None:
        if not self.exists(name):
            self.copy(name, source, source_name)

    def copy(self, name: str, source: Files, source_name: str) -> None:
        data = source.read(source_name)
        if data is None:
            raise StoreUnavailable(
                f"could not copy {source.location(source_name)} to {self.location(name)}: it is gone"
            )
        self.write(name, data)

    def make_folder(self, folder: str) -> None:
        """Folders are but names."""

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self._changing:
                if self._data.pop(self._folder + name, None) is not None:
                    self._leave_out(self._folder + name)

    def _put(self, path: str, data: bytes) -> None:
        if path not in self._data:
            self._note(path)
        self._data[path] = data

    def _note(self, path: str) -> None:
        """That it is in its folder, and that in its own, as far up as that was not known."""
        if path in self._inside:
            raise StoreUnavailable(f"could not write {path}: it is a folder")
        rest = path
        while rest:
            folder, _, last = rest.rpartition("/")
            if folder in self._data:
                raise StoreUnavailable(f"could not write {path}: {folder} is no folder")
            inside = self._inside.setdefault(folder, {})
            if last in inside:
                return
            inside[last] = None
            rest = folder

    def _leave_out(self, path: str) -> None:
        while path:
            folder, _, last = path.rpartition("/")
            inside = self._inside[folder]
            del inside[last]
            if inside:
                return
            del self._inside[folder]
            path = folder

    def prune(self, folder: str) -> None:
        """Folders are but names."""

    def prune_above(self, names: Iterable[str], top: str) -> None:
        """Folders are but names."""

    def forget_unwritten(self) -> None:
        """Nothing is ever half written."""

    def sync(
        self, names: Iterable[str], known: Collection[object] = frozenset(), *, missing_ok: bool = False
    ) -> frozenset[object]:
        wanted = frozenset(names)
        gone = [name for name in wanted if name not in known and not self.exists(name)]
        if gone and not missing_ok:
            raise StoreUnavailable(f"could not sync {self.location(min(gone))}: there is no such file")
        return wanted

    # -- where they are ---------------------------------------------------------------------------

    def _path(self, folder: str) -> str:
        return (self._folder + folder).rstrip("/")

    def location(self, name: str = "") -> str:
        return (self._label + self._folder + name).rstrip("/")

    def name_at(self, location: str) -> str | None:
        base = self._label + self._folder
        return location.removeprefix(base) if location.startswith(base) else None

    def uri(self, name: str) -> str:
        return self._label + quote(self._folder + name)

    def name_of(self, uri: str) -> str | None:
        return self.name_at(unquote(uri))

    def strays(self, names: Iterable[str]) -> frozenset[str]:  # noqa: ARG002 - there are no links
        return frozenset()

    def list(self, folder: str = "", *, but: Collection[str] = ()) -> list[str]:
        found: list[str] = []
        waiting = [self._path(folder)]
        while waiting:
            at = waiting.pop()
            for last in tuple(self._inside.get(at, ())):
                path = f"{at}/{last}" if at else last
                if path in self._data:
                    found.append(path)
                elif last not in but:
                    waiting.append(path)
        start = len(self._folder)
        return sorted(path[start:] for path in found)
