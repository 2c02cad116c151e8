"""A Delta table as a user writes it down."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tidegate.errors import InvalidConfig
from tidegate.protocol.config import as_ms, size_in_bytes
from tidegate.sinks.contract import SinkPlace
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.sinks.delta.home import InFolder, home_of
from tidegate.sinks.staging import as_names
from tidegate.storage.manifest import TableAddress
from tidegate.storage.user_paths import is_bucket_url, local_path, plain_path


class DeltaTable:
    """A Delta table that a sink stage appends to or, with a `key`, inserts into and updates.

    `partition_by` names its partition columns. `key` names the columns by which a new row replaces an old one, and
    `newest_by` those that tell which of them is the newer one, whenever it comes; without it the later one is.

    `target_file_size` is what a commit makes of an epoch's small files; with None they are shown as they were staged.

    With `optimize`, that often, small files of several epochs become few, in the background, and files are deleted that
    were removed from the table longer ago than `vacuum` and that no retained checkpoint needs; with None none is.

    `path` may be that of a folder in a bucket of S3, `s3://bucket/lake/orders`. Credentials, region and endpoint are
    taken from the environment and the AWS files or, by the names that delta-rs has for them, from `storage_options`.
    """

    is_exactly_once = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        partition_by: str | Sequence[str] = (),
        *,
        key: str | Sequence[str] = (),
        newest_by: str | Sequence[str] = (),
        target_file_size: str | None = "32MB",
        optimize: str | None = None,
        vacuum: str | None = "7d",
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self._storage_options = dict(storage_options or {})
        self.home = home_of(path, self._storage_options)
        self._given = local_path(path) if isinstance(self.home, InFolder) else None
        self.partition_by = as_names(partition_by)
        self.key = as_names(key)
        self.newest_by = as_names(newest_by)
        self.target_size = None if target_file_size is None else size_in_bytes("target_file_size", target_file_size)
        if self.target_size == 0:
            raise InvalidConfig("target_file_size is 0; write a size such as 32MB, or None to leave files as they are")
        self.optimize_ms = None if optimize is None else as_ms("optimize", optimize)
        if self.optimize_ms is not None and self.target_size is None:
            raise InvalidConfig("optimize needs a target_file_size: that is what it makes of small files")
        self.vacuum_ms = None if vacuum is None else as_ms("vacuum", vacuum)
        self.turn = threading.RLock()
        """Commits and the short part of upkeep that moves the table on take turns, so that none is in vain."""

    def __repr__(self) -> str:
        return f"DeltaTable({self.home.address!r})"

    @property
    def path(self) -> Path:
        """Of a table in a folder."""
        if not isinstance(self.home, InFolder):
            raise InvalidConfig(f"{self.describe()} is in a bucket: it has no path on this machine")
        return self.home.path

    def describe(self) -> str:
        return f"Delta table {self.home.address}"

    @property
    def table(self) -> TableAddress:
        return TableAddress("delta", self.home.address)

    def seen_from(self, folder: Path) -> Self:
        if self._given is None or self._given.is_absolute():
            return self
        seen = copy.copy(self)
        seen.home = InFolder(plain_path(folder / self._given))
        return seen

    def at(self, address: str) -> Self:
        """The same sink for a table at another address."""
        moved = copy.copy(self)
        moved.home = home_of(address, self._storage_options if is_bucket_url(address) else None)
        moved._given = moved.home.path if isinstance(moved.home, InFolder) else None
        moved.turn = threading.RLock()
        return moved

    @property
    def needs_order(self) -> bool:
        return bool(self.key) and not self.newest_by

    def bind(self, place: SinkPlace) -> BoundDeltaTable:
        return BoundDeltaTable(self, place)
