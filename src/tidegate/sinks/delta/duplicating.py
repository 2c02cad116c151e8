"""Making a Delta table show what another one shows at a checkpoint: a fork's, and one whose place a fork takes.

Files are shared by a second name (a hard link), or copied where there are none, by a bucket itself: so vacuum of one
table, or its deletion, takes nothing from the other. One transaction removes whatever the table showed and adds them,
with the records that the other has of the checkpoint. The names of the files are new ones: two pipelines may have used
the same.
"""

from __future__ import annotations

import hashlib
import importlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import deltalake
from deltalake.transaction import AddAction

from tidegate.errors import SinkFailed
from tidegate.sinks.contract import SettingBack, SinkPlace
from tidegate.sinks.delta.features import unreadable
from tidegate.sinks.delta.home import Home
from tidegate.sinks.delta.log import TRIES, Replacement, TableLog
from tidegate.sinks.delta.others import written_by_others
from tidegate.sinks.delta.reading import TableAt, sinks_sharing, table_at
from tidegate.sinks.delta.scan import TableFile, active_files
from tidegate.sinks.delta.staged import Staged
from tidegate.sinks.delta.statistics import statistics
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest
from tidegate.storage.parquet import footer_of

if TYPE_CHECKING:
    from tidegate.sinks.delta.table import DeltaTable


class Duplicate:
    """Of one table at one checkpoint, in the place of whatever another one shows."""

    def __init__(
        self, sink: DeltaTable, place: SinkPlace, log: TableLog, staged: Staged, source: Home, to: Manifest
    ) -> None:
        self._sink = sink
        self._place = place
        self._log = log
        self._staged = staged
        self._source = source
        self._to = to
        self._sharing = sinks_sharing(sink.home, place.stage, to)

    def look(self, since: int | None, *, replaces: bool) -> SettingBack:
        shown, table = self._shown(), self._log.open()
        rows = rows_in(shown)
        if table is None:
            return SettingBack(rows_added=rows)
        self._check_partitions(table, shown)
        if not replaces:
            self._check_is_free(table)
        others = () if since is None else tuple(written_by_others(self._log, since, table.version()))
        is_anothers = self._log.is_anothers(table)
        return SettingBack(table.version(), None, rows_in(table), rows, others, is_anothers=is_anothers)

    def apply(self, generation: int, since: int | None, *, replaces: bool) -> None:
        for _ in range(TRIES):
            table = self._log.open()
            if table is None:
                self._create()
                continue
            if self._log.recorded(table, "set_back") >= generation and not self._log.is_anothers(table):
                self._log.force(through=table.version())
                return
            if not replaces:
                self._check_is_free(table)
            self._check_others(table, since)
            shown = self._shown()
            self._check_partitions(table, shown)
            if self._replace(table, shown, generation):
                return
        raise SinkFailed(f"{self._sink.describe()} could not be replaced: {TRIES} attempts met another writer's")

    def _shown(self) -> deltalake.DeltaTable:
        """The other table, as it is at the checkpoint."""
        found: TableAt = table_at(self._sharing, self._source, self._to, self._place.root)
        table = found.delta()
        obstacle = unreadable(table)
        if obstacle is not None:
            raise SinkFailed(f"{found} has {obstacle}, so its files cannot be shown by another table")
        return table

    def _create(self) -> None:
        shown = self._shown()
        metadata = shown.metadata()
        self._sink.home.prepare()
        self._sink.home.create(
            shown.schema(),
            metadata.partition_columns,
            name=metadata.name,
            description=metadata.description,
            configuration=metadata.configuration,
        )
        self._log.force(through=0)

    def _check_is_free(self, table: deltalake.DeltaTable) -> None:
        """A try before may have made it, and no more."""
        if active_files(table) or any(self._log.recorded(table, "root", stage) for stage in self._sharing):
            raise SinkFailed(f"{self._sink.describe()} is there already; choose another place for it, or remove it")

    def _check_others(self, table: deltalake.DeltaTable, since: int | None) -> None:
        others = () if since is None else tuple(written_by_others(self._log, since, table.version()))
        if others:
            raise SinkFailed(
                f"{self._sink.describe()} cannot be replaced: others have written to it since ({others[0]}). What to "
                f"do: `tidegate promote --discard-others`, if that may be lost"
            )

    def _check_partitions(self, table: deltalake.DeltaTable, shown: deltalake.DeltaTable) -> None:
        now, then = table.metadata().partition_columns, shown.metadata().partition_columns
        if now != then:
            raise SinkFailed(
                f"{self._sink.describe()} is partitioned by {', '.join(now) or 'nothing'}, and {self._source} by "
                f"{', '.join(then) or 'nothing'}: the one cannot take the other's place"
            )

    def _replace(self, table: deltalake.DeltaTable, shown: deltalake.DeltaTable, generation: int) -> bool:
        """False: the table has moved on, perhaps by another writer."""
        # Unlike the names that any other root, or a later decision of this one, would give.
        mark = hashlib.sha256(f"{self._place.root}/{generation}".encode()).hexdigest()[:12]
        source = self._source.files()
        files = {file.path: file for file in active_files(shown)}

        def add(pair: tuple[str, str]) -> AddAction:
            return self._added(source, files[pair[0]], pair[1])

        added = self._staged.each(add, [(path, _marked(path, mark)) for path in files])
        self._log.force_files(each.path for each in added)
        records = [*self._log.records_of(shown, self._sharing, generation)]
        return self._log.replace(table, Replacement(added, shown.schema()), records)

    def _added(self, source: Files, file: TableFile, name: str) -> AddAction:
        self._log.files.keep(name, source, file.path)
        return AddAction(
            path=name,
            size=file.size,
            partition_values={column: as_in_log(value) for column, value in file.partition.items()},
            modification_time=file.modified_ms,
            data_change=True,
            stats=statistics(footer_of(source, file.path)[0]),
        )


def _marked(path: str, mark: str) -> str:
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{mark}-{name}"


def rows_in(table: deltalake.DeltaTable) -> int:
    """As far as its log tells."""
    actions = importlib.import_module("pyarrow").table(table.get_add_actions())
    return sum(count or 0 for count in actions.column("num_records").to_pylist())


def as_in_log(value: Any) -> str | None:
    """A value of a partition column as the log of a Delta table writes it."""
    match value:
        case None:
            return None
        case bool():
            return "true" if value else "false"
        case datetime():
            moment = value if value.tzinfo is None else value.astimezone(UTC)
            return moment.strftime("%Y-%m-%d %H:%M:%S.%f")
        case bytes():
            return value.decode("latin-1")
        case _:
            return str(value)
