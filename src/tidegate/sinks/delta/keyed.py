"""A commit by key: the rows of the table that have a key of the epoch's are replaced (`upsert.py`).

What was staged is looked through before a checkpoint is decided: different rows of one key in a batch are refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import deltalake
from deltalake.transaction import AddAction, RemoveAction

from tidegate.errors import SinkFailed, first_line
from tidegate.sinks.contract import SinkPlace, StagedFile
from tidegate.sinks.delta.scan import TableFile, active_files, columns_of
from tidegate.sinks.delta.staged import Staged
from tidegate.sinks.staging import conflicting_rows, is_staged, spark_fails
from tidegate.storage.parquet import read_footer

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
                key = self._upsert(schema, ()).conflict(fresh)
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
        self, table: deltalake.DeltaTable, fresh: list[StagedFile], attempt: Path
    ) -> list[AddAction | RemoveAction]:
        """What a transaction does to show what was staged."""
        self._staged.take_back(attempt)
        upsert = self._upsert(table.schema(), active_files(table, self._sink.key))
        with spark_fails(f"{self._sink.describe()}: its rows cannot be merged"):
            replaced = upsert.write(fresh, attempt)
        now_ms = time.time_ns() // 1_000_000
        return [
            *(RemoveAction(path, True, now_ms) for path in replaced),
            *self._staged.add_all([path for path in sorted(attempt.rglob("*.parquet")) if read_footer(path).num_rows]),
        ]

    def _upsert(self, columns: deltalake.Schema, files: Sequence[TableFile]) -> Upsert:
        # It brings PySpark, which an append does not need.
        from tidegate.sinks.delta.upsert import Upsert

        if self._place.session is None:
            raise SinkFailed(f"{self._sink.describe()} has a key: it can be committed only while the pipeline runs")
        return Upsert(
            self._place.session,
            self._sink.path,
            columns_of(columns),
            files,
            self._sink.key,
            self._sink.partition_by,
            self._sink.newest_by,
            self._sink.target_size,
        )
