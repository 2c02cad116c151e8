"""Looking after a Delta table beside its commits: small files of several epochs made few, and files deleted that nobody
needs any more.

What is made of some files takes their place in one transaction that changes no row (`dataChange` is false) and no
record of an epoch: to those who look for the version of a checkpoint, the version before and the one after show the
same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from threading import Event
from typing import TYPE_CHECKING, Final

import deltalake
from deltalake.transaction import RemoveAction

from tidegate.errors import SinkFailed
from tidegate.sinks.contract import SinkPlace, Upkeep
from tidegate.sinks.delta.checks import check_keepable
from tidegate.sinks.delta.compacting import Rewritten, rewrite, small_files
from tidegate.sinks.delta.home import Shelf
from tidegate.sinks.delta.log import TRIES, TableLog
from tidegate.sinks.delta.reading import versions_of
from tidegate.sinks.delta.scan import TableFile, active_files, columns_of
from tidegate.sinks.delta.staged import Staged
from tidegate.sinks.delta.vacuum import retention_s, unneeded_files
from tidegate.sinks.staging import spark_fails
from tidegate.storage.folder import near
from tidegate.storage.manifest import Manifest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidegate.sinks.delta.table import DeltaTable

_MARK: Final = "upkeep"
"""A file that tells when a pass has come to its end."""
_AT_ONCE_BYTES: Final = 1 << 30
"""What is replaced in one transaction."""


class Keeper:
    """Of the table of one stage."""

    def __init__(self, sink: DeltaTable, place: SinkPlace, log: TableLog, staged: Staged) -> None:
        self._sink = sink
        self._place = place
        self._log = log
        self._staged = staged
        self._tried_at = -1
        """The version that the last transaction was made for."""

    def due_in_ms(self) -> int:
        last = self._sink.home.touched_at(self._staged.files, _MARK)
        if last is None:
            return 0
        since_ms = max(0, round((time.time() - last) * 1000))
        return max(0, (self._sink.optimize_ms or 0) - since_ms)

    def keep_up(self, generation: int, retained: Callable[[], Sequence[Manifest]], is_stopping: Event) -> Upkeep | None:
        table, session, target = self._log.open(), self._place.session, self._sink.target_size
        if table is None or session is None or target is None:
            return None
        before = after = len(active_files(table))
        if self._staged.is_near or self._tried_at < table.version():  # what has failed can be shown no more
            own = (each for each in self._staged.upkeep_passes(generation) if each.startswith(f"{generation:06d}/"))
            self._staged.take_back(own, table.version())
        folder = self._staged.upkeep_pass(generation, table.version())
        is_done = False
        try:
            with self._sink.home.shelf(self._staged.files) as shelf:
                rewriting = self._rewriting(session, table, shelf, folder)
                after -= self._compact(table, generation, rewriting, is_stopping)
            is_done = True
        finally:
            if is_done or self._staged.is_near:  # else what it has brought into the table is found by it
                self._staged.remove([folder])
        deleted = [] if is_stopping.is_set() else self._vacuum(retained)
        if not is_stopping.is_set():
            self._sink.home.touch(self._staged.files, _MARK)
        return Upkeep(before, after, len(deleted), sum(deleted)) if deleted or after < before else None

    # -- small files made few ---------------------------------------------------------------------

    def _compact(
        self,
        table: deltalake.DeltaTable,
        generation: int,
        rewritten: Callable[[Sequence[TableFile]], Rewritten],
        is_stopping: Event,
    ) -> int:
        """Returns by how many files there are fewer."""
        check_keepable(self._sink, table)
        done: list[Rewritten] = []
        fewer = 0
        # On a cluster, what Spark would write is not on this machine.
        for files in () if self._staged.is_on_cluster else small_files(table, self._sink.target_size or 0):
            if is_stopping.is_set():
                break
            done.append(rewritten(files))
            if sum(each.size for each in done) >= _AT_ONCE_BYTES:
                fewer += self._replace(table.schema(), done, generation)
                done = []
        return fewer + self._replace(table.schema(), done, generation)

    def _rewriting(
        self, session: SparkSession, table: deltalake.DeltaTable, shelf: Shelf, folder: str
    ) -> Callable[[Sequence[TableFile]], Rewritten]:
        """Writes some files of one partition again, as one, each time to a folder of its own below this one."""
        from tidegate.sinks.sessions import table_session

        own, schema, numbers = table_session(session), columns_of(table.schema()), count()

        def rewritten(files: Sequence[TableFile]) -> Rewritten:
            with spark_fails("its small files cannot be made few"):
                into = self._staged.path(f"{folder}/{next(numbers)}")
                return rewrite(own, shelf, schema, files, self._sink.partition_by, into)

        return rewritten

    def _replace(self, schema: deltalake.Schema, done: list[Rewritten], generation: int) -> int:
        """Let what was written take the place of what it was made of, where the table still shows all of that."""
        with self._sink.turn:
            for _ in range(TRIES):
                if not done:
                    return 0
                table = self._log.open()
                active = set() if table is None else {file.path for file in active_files(table)}
                still = [each for each in done if active.issuperset(file.path for file in each.files)]
                if table is None or table.schema() != schema or self._is_overtaken(table, generation):
                    still = []
                self._unlink([each for each in done if each not in still])
                done = still
                if table is None or not done:
                    return 0
                check_keepable(self._sink, table)
                now_ms = time.time_ns() // 1_000_000
                removed = [RemoveAction(file.path, False, now_ms) for each in done for file in each.files]
                added = self._staged.add_all(self._names(done), data_change=False)
                self._tried_at = table.version()
                if self._log.transact(table, [*removed, *added], []):
                    return len(removed) - len(added)
            now = self._log.open()
            if not self._staged.is_near and now is not None and now.version() <= self._tried_at:
                raise SinkFailed("the bucket does not tell whether it has taken a version")  # it may be shown yet
            self._unlink(done)
            return 0  # others write to it all the time: later

    def _is_overtaken(self, table: deltalake.DeltaTable, generation: int) -> bool:
        """Whether a newer run has removed what older ones have brought into a table in a bucket."""
        return not self._staged.is_near and self._log.recorded(table, "fence") > generation

    def _unlink(self, given_up: list[Rewritten]) -> None:
        """What is not in the table: a transaction that seemed to fail may have made its version."""
        shown = (self._log.shown() if given_up else None) or set()
        self._staged.table.delete(name for name in self._staged.targets(self._names(given_up)) if name not in shown)

    def _names(self, done: list[Rewritten]) -> list[str]:
        here = near(self._staged.files)
        names = [here.name_at(str(path)) for each in done for path in each.written]
        return [name for name in names if name is not None]

    # -- files that nobody needs ------------------------------------------------------------------

    def _vacuum(self, retained: Callable[[], Sequence[Manifest]]) -> list[int]:
        """Delete them. Returns their sizes."""
        table, kept_ms = self._log.open(), self._sink.vacuum_ms
        if table is None or kept_ms is None:
            return []
        check_keepable(self._sink, table)
        # Asked after the table was opened: a checkpoint that is not among these yet is shown by a later version, and
        # what this version no longer has, no later one has.
        versions = versions_of(self._sink.home, self._place.stage, retained(), self._place.root)
        files = unneeded_files(table, self._sink.home, retention_s(table, kept_ms), versions)
        if files:
            self._log.force_shown(table)
        with self._sink.turn:
            shown = self._log.shown()
            if shown is None:
                return []
            doomed = [name for name in files if name not in shown]  # else put back meanwhile, from an older version
            sizes = self._staged.table.sizes(doomed)
            self._staged.table.delete(sizes)
            return [*sizes.values()]
