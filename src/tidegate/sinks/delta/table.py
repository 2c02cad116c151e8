"""A Delta table as a user writes it down."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tidegate.errors import InvalidConfig
from tidegate.protocol.config import as_ms, size_in_bytes
from tidegate.sinks.contract import SinkPlace
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.sinks.staging import as_names
from tidegate.storage.manifest import TableAddress
from tidegate.storage.user_paths import local_path, plain_path


class DeltaTable:
    """A Delta table that a sink stage appends to or, with a `key`, inserts into and updates.

    `partition_by` names its partition columns. `key` names the columns by which a new row replaces an old one, and
    `newest_by` those that tell which of them is the newer one, whenever it comes; without it the later one is.

    `target_file_size` is what a commit makes of an epoch's small files; with None they are shown as they were staged.

    With `optimize`, that often, small files of several epochs become few, in the background, and files are deleted that
    were removed from the table longer ago than `vacuum` and that no retained checkpoint needs; with None none is.
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
    ) -> None:
        self._given = local_path(path)
        self.path = plain_path(path)
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
        return f"DeltaTable({str(self.path)!r})"

    def describe(self) -> str:
        return f"Delta table {self.path}"

    @property
    def table(self) -> TableAddress:
        return TableAddress("delta", str(self.path))

    def seen_from(self, folder: Path) -> Self:
        if self._given.is_absolute():
            return self
        seen = copy.copy(self)
        seen.path = plain_path(folder / self._given)
        return seen

    def at(self, address: str) -> Self:
        """The same sink for a table at another address."""
        moved = copy.copy(self)
        moved._given = moved.path = Path(address)
        moved.turn = threading.RLock()
        return moved

    @property
    def needs_order(self) -> bool:
        return bool(self.key) and not self.newest_by

    def bind(self, place: SinkPlace) -> BoundDeltaTable:
        return BoundDeltaTable(self, place)
