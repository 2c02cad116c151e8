"""Looking after a Delta table beside its commits: small files of several epochs made few, and files deleted that nobody
needs any more.

What is made of some files takes their place in one transaction that changes no row (`dataChange` is false) and no
record of an epoch: to those who look for the version of a checkpoint, the version before and the one after show the
same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final

import deltalake
from deltalake.transaction import RemoveAction

from tidegate.sinks.contract import SinkPlace, Upkeep
from tidegate.sinks.delta.checks import check_keepable
from tidegate.sinks.delta.compacting import Rewritten, rewrite, small_files
from tidegate.sinks.delta.log import TRIES, TableLog
from tidegate.sinks.delta.reading import versions_of
from tidegate.sinks.delta.scan import TableFile, active_files, columns_of
from tidegate.sinks.delta.staged import Staged, remove
from tidegate.sinks.delta.vacuum import retention_s, unneeded_files
from tidegate.sinks.staging import spark_fails
from tidegate.storage.manifest import Manifest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidegate.sinks.delta.table import DeltaTable

_FOLDER: Final = "upkeep"
_AT_ONCE_BYTES: Final = 1 << 30
"""What is replaced in one transaction."""


class Keeper:
    """Of the table of one stage."""

    def __init__(self, sink: DeltaTable, place: SinkPlace, log: TableLog, staged: Staged) -> None:
        self._sink = sink
        self._place = place
        self._log = log
        self._staged = staged

    def due_in_ms(self) -> int:
        try:
            last = self._mark.stat().st_mtime
        except FileNotFoundError:
            return 0
        since_ms = max(0, round((time.time() - last) * 1000))
        return max(0, (self._sink.optimize_ms or 0) - since_ms)

    @property
    def _mark(self) -> Path:
        """A file whose time tells when a pass has come to its end."""
        return self._staged.folder / "upkeep"

    def keep_up(self, generation: int, retained: Callable[[], Sequence[Manifest]], is_stopping: Event) -> Upkeep | None:
        table, session, target = self._log.open(), self._place.session, self._sink.target_size
        if table is None or session is None or target is None:
            return None
        before = after = len(active_files(table))
        folder = self._staged.folder / f"{generation:06d}" / _FOLDER
        remove([folder])  # of a pass that failed
        try:
            after -= self._compact(table, target, self._rewriting(session, table, folder), is_stopping)
        finally:
            remove([folder])
        deleted = [] if is_stopping.is_set() else self._vacuum(retained)
        if not is_stopping.is_set():
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()
        return Upkeep(before, after, len(deleted), sum(deleted)) if deleted or after < before else None

    # -- small files made few ---------------------------------------------------------------------

    def _compact(
        self,
        table: deltalake.DeltaTable,
        target: int,
        rewritten: Callable[[Sequence[TableFile]], Rewritten],
        is_stopping: Event,
    ) -> int:
        """Returns by how many files there are fewer."""
        check_keepable(self._sink, table)
        done: list[Rewritten] = []
        fewer = 0
        for files in small_files(table, self._sink.path, target):
            if is_stopping.is_set():
                break
            done.append(rewritten(files))
            if sum(each.size for each in done) >= _AT_ONCE_BYTES:
                fewer += self._replace(table.schema(), done)
                done = []
        return fewer + self._replace(table.schema(), done)

    def _rewriting(
        self, session: SparkSession, table: deltalake.DeltaTable, folder: Path
    ) -> Callable[[Sequence[TableFile]], Rewritten]:
        """Writes some files of one partition again, as one, each time to a folder of its own below this one."""
        from tidegate.sinks.sessions import table_session

        own, schema, numbers = table_session(session), columns_of(table.schema()), count()

        def rewritten(files: Sequence[TableFile]) -> Rewritten:
            with spark_fails("its small files cannot be made few"):
                path, by = self._sink.path, self._sink.partition_by
                return rewrite(own, path, schema, files, by, folder / str(next(numbers)))

        return rewritten

    def _replace(self, schema: deltalake.Schema, done: list[Rewritten]) -> int:
        """Let what was written take the place of what it was made of, where the table still shows all of that."""
        with self._sink.turn:
            for _ in range(TRIES):
                if not done:
                    return 0
                table = self._log.open()
                active = set() if table is None else {file.path for file in active_files(table)}
                still = [each for each in done if active.issuperset(file.path for file in each.files)]
                if table is None or table.schema() != schema:
                    still = []
                self._unlink([each for each in done if each not in still])
                done = still
                if table is None or not done:
                    return 0
                check_keepable(self._sink, table)
                now_ms = time.time_ns() // 1_000_000
                removed = [RemoveAction(file.path, False, now_ms) for each in done for file in each.files]
                added = self._staged.add_all([path for each in done for path in each.written], data_change=False)
                if self._log.transact(table, [*removed, *added], []):
                    return len(removed) - len(added)
            self._unlink(done)
            return 0  # others write to it all the time: later

    def _unlink(self, given_up: list[Rewritten]) -> None:
        """What is not in the table: a transaction that seemed to fail may have made its version."""
        shown = (self._log.shown() if given_up else None) or set()
        for path in self._staged.targets(path for each in given_up for path in each.written):
            if path not in shown:
                path.unlink(missing_ok=True)

    # -- files that nobody needs ------------------------------------------------------------------

    def _vacuum(self, retained: Callable[[], Sequence[Manifest]]) -> list[int]:
        """Delete them. Returns their sizes."""
        table, kept_ms = self._log.open(), self._sink.vacuum_ms
        if table is None or kept_ms is None:
            return []
        check_keepable(self._sink, table)
        # Asked after the table was opened: a checkpoint that is not among these yet is shown by a later version, and
        # what this version no longer has, no later one has.
        versions = versions_of(self._sink.path, self._place.stage, retained(), self._place.root)
        files = unneeded_files(table, self._sink.path, retention_s(table, kept_ms), versions)
        if files:
            self._log.force_shown(table)
        with self._sink.turn:
            shown = self._log.shown()
            if shown is None:
                return []
            sizes = []
            for path in files:
                if path not in shown:  # put back meanwhile, from an older version
                    with suppress(FileNotFoundError):
                        sizes.append(path.stat().st_size)
                        path.unlink()
            return sizes
