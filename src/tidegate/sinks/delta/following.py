"""A Delta table in a bucket, followed from one commit to the next.

To open it anew for each, and to look for each record in all versions since the last checkpoint of its log, took some 70
requests. So the table that was opened is kept with the records that were asked for, and only what is new is read.

A table may be put back to an older state, or made anew, and then have other versions of the same numbers. So it goes on
only where the last version that was read, or made, is still there and the same; else it is opened anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import deltalake
import msgspec
from deltalake import Transaction

from tidegate.sinks.delta.home import name_of

if TYPE_CHECKING:
    from tidegate.sinks.delta.log import TableLog

_OPEN_FOR_S: Final = 300.0
"""After that it is opened anew, because credentials may have been renewed."""


class Following:
    """By one thread at a time."""

    def __init__(self, log: TableLog) -> None:
        self._log = log
        self._table: deltalake.DeltaTable | None = None
        self._opened_s = 0.0
        self._version = -1
        """Up to which all is known. The table may be behind it, where that is one of ours."""
        self._sign = b""
        """What the file of that version holds, and no other one does."""
        self._records: dict[str, int] = {}
        """As of that version, those that were asked for or came since."""

    def newest(self) -> deltalake.DeltaTable:
        table = self._gone_on() if self._is_the_same() else None
        if table is None:
            table = self._open()
            self._records = {}
            self._version = table.version()
            self._sign = self._log.files.read(name_of(self._version)) or b""
        return table

    def recorded(self, table: deltalake.DeltaTable, name: str) -> int:
        """By any table; 0: nothing is."""
        if table is self._table and name in self._records:
            return self._records[name]
        home = self._log.home
        with home.telling("be read"):
            found = home.patiently(lambda: table.transaction_version(name) or 0)
        if table is self._table:
            self._records[name] = found
        return found

    def made(self, table: deltalake.DeltaTable, version: int, mark: str, records: Iterable[Transaction]) -> None:
        """A version, on this table: that need not be read."""
        if table is self._table:
            self._version, self._sign = version, mark.encode()
            self._records |= {each.app_id: each.version for each in records}

    def _open(self) -> deltalake.DeltaTable:
        self._table = None
        self._opened_s = time.monotonic()
        self._table = self._log.opened()
        return self._table

    def _is_the_same(self) -> bool:
        if self._table is None or not self._sign:
            return False
        written = self._log.files.read(name_of(self._version))
        return written is not None and self._sign in written

    def _gone_on(self) -> deltalake.DeltaTable | None:
        """To the newest version. None: that is not possible."""
        table = self._table
        if table is None or time.monotonic() - self._opened_s > _OPEN_FOR_S:
            table = self._open()
        else:
            try:
                table.update_incremental()
            except self._log.home.failures:
                return None  # what is wrong is told when it is opened
        for version in range(self._version + 1, table.version() + 1):
            written = self._log.files.read(name_of(version))
            if written is None:
                return None
            actions = (msgspec.json.decode(line) for line in written.splitlines() if line)
            found = (action.get("txn") for action in actions)
            self._records |= {each["appId"]: each["version"] for each in found if each}
            self._version, self._sign = version, written
        return table if table.version() == self._version else None
