"""A commit by key: the rows of the table that have a key of the epoch's are replaced (`upsert.py`).

What was staged is looked through before a checkpoint is decided: different rows of one key in a batch are refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import deltalake
import msgspec
from deltalake.transaction import AddAction, RemoveAction

from tidegate.errors import SinkFailed, StoreUnavailable, first_line
from tidegate.sinks.contract import SinkPlace, StagedFile
from tidegate.sinks.delta.home import Shelf
from tidegate.sinks.delta.scan import TableFile, active_files, columns_of
from tidegate.sinks.delta.staged import Staged
from tidegate.sinks.delta.statistics import Bounds, bounds_of
from tidegate.sinks.staging import conflicting_rows, is_staged, spark_fails
from tidegate.storage.mounted import side_by_side
from tidegate.storage.parquet import count_rows, footer_of, read_footer

if TYPE_CHECKING:
    from tidegate.sinks.delta.table import DeltaTable
    from tidegate.sinks.delta.upsert import Upsert


class ByKey:
    """Of all commits of one stage."""

    def __init__(self, sink: DeltaTable, place: SinkPlace, staged: Staged) -> None:
        self._sink = sink
        self._place = place
        self._staged = staged
        self._checked: frozenset[str] = frozenset()
        """The staged files that were looked through."""

    def check(self, schema: deltalake.Schema, sealed: Sequence[StagedFile]) -> None:
        """Refuse what a checkpoint has sealed, where a commit would."""
        self.refuse_conflicts(schema, sealed)
        self._checked = frozenset(file.path for file in sealed)

    def refuse_conflicts(self, schema: deltalake.Schema, staged: Sequence[StagedFile]) -> None:
        """Refuse different rows of one key in a batch, in what was not looked through yet."""
        from pyspark.errors import PySparkException

        table, known = self._sink.describe(), self._checked
        unknown = [file for file in staged if file.rows and file.path not in known]
        # A commit beside us may remove what it has shown. A batch of which a part is gone it has looked through too; of
        # what is left, rows that a newer one was to replace might seem to conflict.
        while fresh := self._of_whole_batches(unknown):
            try:
                key = self._upsert(schema, (), Shelf(Path())).conflict(self._brought(fresh))
            except StoreUnavailable:
                if not all(self._is_there(file) for file in fresh):
                    continue
                raise
            except PySparkException as error:
                if not all(self._is_there(file) for file in fresh):
                    continue
                raise SinkFailed(f"{table}: what was staged cannot be read: {first_line(error)}") from error
            if key is not None:
                raise conflicting_rows(table, self._place, key, self._sink.newest_by)
            break
        self._checked = known | {file.path for file in unknown}

    def _of_whole_batches(self, staged: Sequence[StagedFile]) -> list[StagedFile]:
        """Those of the files whose batches have all of theirs."""
        broken = {file.batch for file in staged if not self._is_there(file)}
        return [file for file in staged if file.batch not in broken]

    def _is_there(self, file: StagedFile) -> bool:
        return is_staged(self._staged.files, file)

    def actions(
        self, table: deltalake.DeltaTable, fresh: list[StagedFile], attempt: str
    ) -> list[AddAction | RemoveAction]:
        """What a transaction does to show what was staged."""
        staged = self._staged
        with self._sink.home.shelf(staged.files, on_cluster=staged.is_on_cluster) as shelf:
            upsert = self._upsert(table.schema(), active_files(table, self._sink.key), shelf)
            brought = self._brought(fresh)
            with spark_fails(f"{self._sink.describe()}: its rows cannot be merged"):
                replaced = upsert.write(brought, staged.for_spark(attempt), self._keys(fresh))
        written = [name for name in staged.written_here(attempt) if self._rows_in(name)]
        now_ms = time.time_ns() // 1_000_000
        return [
            *(RemoveAction(path, True, now_ms) for path in replaced),
            *self._staged.add_all(written),
        ]

    def _rows_in(self, name: str) -> int:
        if self._staged.is_on_cluster:
            return count_rows(self._staged.files, name)
        return int(read_footer(self._staged.path(name)).num_rows)

    def _keys(self, fresh: Sequence[StagedFile]) -> dict[str, Bounds] | None:
        """Between what the keys of staged files are that lie elsewhere; None: they lie here."""
        if not self._staged.is_on_cluster:
            return None
        files = self._staged.files
        footers = side_by_side(files, lambda name: footer_of(files, name)[0], self._staged.names(fresh))
        return bounds_of(list(footers), self._sink.key)

    def _brought(self, fresh: Sequence[StagedFile]) -> list[StagedFile]:
        """The same files, where Spark reads them."""
        names = self._staged.names(fresh)
        if not self._staged.is_on_cluster:
            self._staged.files.bring(names)
        paths = (self._staged.for_spark(name) for name in names)
        return [msgspec.structs.replace(file, path=path) for file, path in zip(fresh, paths, strict=True)]

    def _upsert(self, columns: deltalake.Schema, files: Sequence[TableFile], shelf: Shelf) -> Upsert:
        # It brings PySpark, which an append does not need.
        from tidegate.sinks.delta.upsert import Upsert

        if self._place.session is None:
            raise SinkFailed(f"{self._sink.describe()} has a key: it can be committed only while the pipeline runs")
        return Upsert(
            self._place.session,
            shelf,
            columns_of(columns),
            files,
            self._sink.key,
            self._sink.partition_by,
            self._sink.newest_by,
            self._sink.target_size,
        )
