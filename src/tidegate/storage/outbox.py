"""Files of a folder in a bucket, for whoever writes them on this machine first.

Spark writes into a folder here, by the same names, and `sync` sends what it is given. What lies here and was not sent
is nobody's but this process's: it is listed, so that it can be removed, and is otherwise not there.

Guarantees:
- What `sync` returns from is in the bucket.
- Read is what the bucket has, or what this process has itself sent. What lay here before is not trusted, and never
  sent: a loss of power may have torn it, and the bucket has what of it counts.
- What is written durably goes to the bucket at once; what need not be durable stays here until it is synced.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterable, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Self

from tidegate.errors import StoreUnavailable
from tidegate.storage.bucket import Bucket
from tidegate.storage.files import Files, checksum
from tidegate.storage.folder import Folder
from tidegate.storage.transfer import download, upload
from tidegate.storage.transfers import Transfers


class _Known:
    """What lies here, for all handles on one folder."""

    def __init__(self, before: Iterable[str]) -> None:
        self._before = set(before)
        self._same: dict[str, int] = {}
        self._changing = threading.Lock()

    def size(self, name: str) -> int | None:
        """Of what is the same here and in the bucket; None: that is not known of it."""
        return self._same.get(name)

    def is_old(self, name: str) -> bool:
        return name in self._before

    def add(self, sizes: Mapping[str, int]) -> None:
        with self._changing:
            self._before.difference_update(sizes)
            self._same.update(sizes)

    def drop(self, names: Iterable[str]) -> None:
        with self._changing:
            for name in names:
                self._same.pop(name, None)
                self._before.discard(name)


class Outbox:
    """`Files` in a bucket that are written here first."""

    def __init__(self, there: Bucket, here: Folder, transfers: Transfers | None = None) -> None:
        """`transfers`: what is told how far those of it are."""
        self.transfers = Transfers() if transfers is None else transfers
        self._there = there
        self._here = here.at("", durable=False)
        self._folder = ""
        self._is_durable = True
        self._known = _Known(self._here.list())

    def __repr__(self) -> str:
        return f"Outbox({self.location()!r}, {self._here.location()!r})"

    @property
    def fsync(self) -> bool:
        return True

    @property
    def here(self) -> Folder:
        """The same names, on this machine."""
        return self._here

    @property
    def there(self) -> Bucket:
        """The same names, in the bucket."""
        return self._there

    def at(self, folder: str, *, durable: bool = True) -> Self:
        below = copy.copy(self)
        below._is_durable = self._is_durable and durable
        if folder:
            below._there, below._here = self._there.at(folder), self._here.at(folder, durable=False)
            below._folder = f"{self._folder}{folder}/"
        return below

    def _same_size(self, name: str) -> int | None:
        return self._known.size(self._folder + name)

    # -- reading ----------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        found = None if self._same_size(name) is None else self._here.read(name)
        return self._there.read(name) if found is None else found

    def open(self, name: str) -> BufferedIOBase | None:
        found = None if self._same_size(name) is None else self._here.open(name)
        return self._there.open(name) if found is None else found

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        known = self._same_size(name)
        return self._there.size(name) if known is None else known

    def sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        wanted = list(names)
        known = {name: size for name in wanted if (size := self._same_size(name)) is not None}
        return {**known, **self._there.sizes([name for name in wanted if name not in known])}

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        return self._there.read_all(names)

    def etag(self, name: str) -> tuple[int, str] | None:
        return self._there.etag(name)

    def described(self, name: str) -> tuple[int, str] | None:
        return checksum(self, name)

    def names_in(self, folder: str = "") -> list[str]:
        return sorted({*self._here.names_in(folder), *self._there.names_in(folder)})

    def list(self, folder: str = "", *, but: Collection[str] = ()) -> list[str]:
        return sorted({*self._here.list(folder, but=but), *self._there.list(folder, but=but)})

    # -- writing ----------------------------------------------------------------------------------

    def write(self, name: str, data: bytes) -> None:
        self._known.drop([self._folder + name])
        (self._there if self._is_durable else self._here).write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        return self._there.create(name, data)

    def overwrite(self, name: str, data: bytes) -> None:
        self._there.overwrite(name, data)

    def keep(self, name: str, source: Files, source_name: str) -> None:
        """Written once more if it is there, and the same: whether it is there would be one more request."""
        self.copy(name, source, source_name)

    def hold(self, name: str, source: Files, source_name: str) -> str:
        self.keep(name, source, source_name)
        return name

    def copy(self, name: str, source: Files, source_name: str) -> None:
        self._there.copy(name, source._there if isinstance(source, Outbox) else source, source_name)

    def delete(self, names: Iterable[str]) -> None:
        """In the bucket first: what is left here is but room that the next clean-up frees."""
        wanted = list(names)
        with self.transfers.under_way("deleting", len(wanted)):
            self._there.delete(wanted)
        self._known.drop(self._folder + name for name in wanted)
        self._here.delete(wanted)

    def make_folder(self, folder: str) -> None:
        self._here.make_folder(folder)

    def prune(self, folder: str) -> None:
        self._here.prune(folder)

    def prune_above(self, names: Iterable[str], top: str) -> None:
        self._here.prune_above(names, top)

    def forget_unwritten(self) -> None:
        self._here.forget_unwritten()

    def sync(
        self, names: Iterable[str], known: Collection[object] = frozenset(), *, missing_ok: bool = False
    ) -> frozenset[object]:
        """Send what this process has written here."""
        wanted = list(dict.fromkeys(names))
        unknown = [name for name in wanted if self._same_size(name) is None]
        fresh = (name for name in unknown if not self._known.is_old(self._folder + name))
        unsent = {name: size for name in fresh if (size := self._here.size(name)) is not None}
        if unsent:
            paths = {name: Path(self._here.location(name)) for name in unsent}
            try:
                with self.transfers.under_way("uploading", len(unsent), sum(unsent.values())) as told:
                    upload(self._there, paths.items(), told)
            except StoreUnavailable:
                if not (missing_ok and any(not path.exists() for path in paths.values())):
                    raise
                return self.sync(wanted, known, missing_ok=missing_ok)  # without what is gone by now
            self._known.add({self._folder + name: size for name, size in unsent.items()})
        self._there.sync([name for name in unknown if name not in unsent], known, missing_ok=missing_ok)
        return frozenset(wanted)

    # -- what lies here ---------------------------------------------------------------------------

    def bring(self, names: Iterable[str]) -> None:
        wanted = [name for name in dict.fromkeys(names) if self._same_size(name) is None]
        with self.transfers.under_way("downloading", len(wanted)) as told:
            download(self._there, ((name, Path(self._here.location(name))) for name in wanted), told)
        sizes = ((name, self._here.size(name)) for name in wanted)
        self._known.add({self._folder + name: size for name, size in sizes if size is not None})

    def has_another(self, name: str) -> bool:
        if self._same_size(name) is None:
            return False
        self._known.drop([self._folder + name])
        return self._there.exists(name)

    # -- where they are ---------------------------------------------------------------------------

    def location(self, name: str = "") -> str:
        return self._there.location(name)

    def name_at(self, location: str) -> str | None:
        return self._there.name_at(location) or self._here.name_at(location)

    def uri(self, name: str) -> str:
        """Spark reads what lies here."""
        return self._here.uri(name)

    def name_of(self, uri: str) -> str | None:
        return self._here.name_of(uri)

    def strays(self, names: Iterable[str]) -> frozenset[str]:
        return self._here.strays(names)
