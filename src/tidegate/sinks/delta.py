"""A Delta table as a sink: native staging, one Delta transaction per epoch.

Rows are staged by Spark in `<table>/_tidegate/<owner>/<generation>/`, which no reader of the table sees. A commit
links the epoch's files into the table and adds them in one transaction, which also records the epoch, the last
batch and the generation as application transactions. The table's own record makes a repeated commit do nothing.

With a `key`, a commit replaces the rows of the table that have a key of the epoch's (`sinks/upsert.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import deltalake
from deltalake import CommitProperties, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from tidegate.errors import Fenced, InvalidPipeline, SinkFailed
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace, StagedFile
from tidegate.sinks.staging import as_names, check_key, forget_generations, generation_folder
from tidegate.storage.files import link
from tidegate.storage.manifest import TableAddress
from tidegate.storage.parquet import count_rows, read_footer

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_STAGING: Final = "_tidegate"
_MERGE: Final = "merge-"
_COMMIT_TRIES: Final = 5
_LONGEST_STATISTIC: Final = 64


class DeltaTable:
    """A Delta table that a sink stage appends to or, with a `key`, inserts into and updates.

    `partition_by` names its partition columns. `key` names the columns by which a new row replaces an old one; of
    several rows with one key in an epoch that of the last batch counts.
    """

    is_exactly_once = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        partition_by: str | Sequence[str] = (),
        *,
        key: str | Sequence[str] = (),
    ) -> None:
        self._path = Path(path).absolute()
        self._partition_by = as_names(partition_by)
        self._key = as_names(key)

    def __repr__(self) -> str:
        return f"DeltaTable({str(self._path)!r})"

    def describe(self) -> str:
        return f"Delta table {self._path}"

    @property
    def table(self) -> TableAddress:
        return TableAddress("delta", str(self._path))

    @property
    def path(self) -> Path:
        return self._path

    @property
    def partition_by(self) -> tuple[str, ...]:
        # What is merged at a commit is partitioned then.
        return () if self._key else self._partition_by

    def staging_folder(self, place: SinkPlace, generation: int) -> Path:
        return generation_folder(self._path / _STAGING / place.owner, generation)

    # -- the table itself -------------------------------------------------------------------------

    def check_table(self, place: SinkPlace, schema: StructType, output_mode: str) -> bool:
        self._check_columns(place, schema, output_mode)
        try:
            wanted = deltalake.Schema.from_json(schema.json())
        except Exception as error:
            raise InvalidPipeline(f"{place.owner} has a column that a Delta table cannot hold: {error}") from error
        table = self._open()
        if table is None:
            return False
        found = table.schema()
        if _columns(found) != _columns(wanted):
            raise SinkFailed(
                f"{self.describe()} has the columns {_columns(found)}, but {place.owner} writes {_columns(wanted)}; "
                f"change the stage, or write to a new table"
            )
        partitions = tuple(table.metadata().partition_columns)
        if partitions != self._partition_by:
            raise SinkFailed(
                f"{self.describe()} is partitioned by {partitions or 'nothing'}, "
                f"not by {self._partition_by or 'nothing'}"
            )
        return True

    def _check_columns(self, place: SinkPlace, schema: StructType, output_mode: str) -> None:
        check_key(self.describe(), self._key, place, schema, output_mode)
        missing = [name for name in self._partition_by if name not in schema.names]
        if missing:
            raise InvalidPipeline(
                f"{self.describe()} is partitioned by {missing[0]!r}, which {place.owner} does not have"
            )
        moments = [name for name in self._partition_by if schema[name].dataType.typeName() == "timestamp"]
        if moments:
            # Spark names such a folder in the session's time zone, Delta reads it in UTC.
            raise InvalidPipeline(
                f"{self.describe()}: {place.owner} cannot be partitioned by {moments[0]!r}, a timestamp; take its date"
            )
        if not set(schema.names) - set(self._partition_by):
            raise InvalidPipeline(
                f"{self.describe()}: {place.owner} has no column that the table is not partitioned by"
            )

    def prepare_table(self, _place: SinkPlace, schema: StructType) -> None:
        wanted = deltalake.Schema.from_json(schema.json())
        deltalake.DeltaTable.create(self._path, schema=wanted, partition_by=list(self._partition_by), mode="ignore")

    def facts(self, place: SinkPlace) -> SinkFacts:
        table = self._open()
        if table is None:
            return SinkFacts()
        return SinkFacts(_record(table, place, "epoch"), _record(table, place, "fence"))

    def fence(self, place: SinkPlace, generation: int) -> None:
        for _ in range(_COMMIT_TRIES):
            table = self._open()
            if table is None or _record(table, place, "fence") >= generation:
                return
            try:
                self._transact(table, [], [_transaction(place, "fence", generation)])
            except CommitFailedError:
                continue  # another writer of the table was first
            return
        raise SinkFailed(f"{self.describe()} could not be fenced: {_COMMIT_TRIES} attempts met another writer's")

    # -- committing -------------------------------------------------------------------------------

    def commit(self, place: SinkPlace, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        for _ in range(_COMMIT_TRIES):
            table = self._open()
            if table is None:
                raise SinkFailed(f"{self.describe()} is gone; restore it, or start the pipeline on a new root")
            if _record(table, place, "fence") > permit.generation:
                raise Fenced(f"{self.describe()} was fenced by generation {_record(table, place, 'fence')}")
            if _record(table, place, "epoch") >= permit.epoch:
                return CommitAnswer.ALREADY
            # The batch is recorded as its number + 1, because a record starts at 0.
            shown = _record(table, place, "batch")
            fresh = [file for file in committable.files if file.batch >= shown and file.rows]
            if not fresh:
                return CommitAnswer.COMMITTED  # nothing to show: an idle pipeline makes no versions of its tables
            records = [
                _transaction(place, "epoch", permit.epoch),
                _transaction(place, "batch", max(shown, committable.through_batch + 1)),
            ]
            try:
                self._transact(table, self._actions(place, table, permit, fresh), records)
            except CommitFailedError:
                continue  # another writer of the table was first: look at what it left
            if self._key:
                # Nobody else's either can be committed any more: the table has moved on.
                staging = self._path / _STAGING / place.owner
                self._forget_attempts(deltalake.DeltaTable(self._path), staging.glob(f"*/{_MERGE}*"))
            return CommitAnswer.COMMITTED
        raise SinkFailed(f"{self.describe()}: {_COMMIT_TRIES} commits in a row met another writer's")

    def _actions(
        self, place: SinkPlace, table: deltalake.DeltaTable, permit: CommitPermit, fresh: list[StagedFile]
    ) -> list[AddAction | RemoveAction]:
        """What a transaction does to show what was staged."""
        staging = self._path / _STAGING / place.owner
        if not self._key:
            return [self._add(Path(file.path), staging) for file in fresh]
        # These bring PySpark, which an append does not need.
        from pyspark.sql.types import StructType

        from tidegate.sinks.upsert import Upsert

        if place.session is None:
            raise SinkFailed(f"{self.describe()} has a key: it can be committed only while the pipeline runs")
        folder = self.staging_folder(place, permit.generation) / f"{_MERGE}{permit.epoch}"
        self._forget_attempts(table, [folder])  # an earlier one of ours, which the table would know of
        schema = StructType.fromJson(json.loads(table.schema().to_json()))
        upsert = Upsert(place.session, self._path, schema, active_files(table), self._key, self._partition_by)
        replaced = upsert.write(fresh, folder)
        now_ms = time.time_ns() // 1_000_000
        return [
            *(RemoveAction(path, True, now_ms) for path in replaced),
            *(self._add(path, staging) for path in sorted(folder.rglob("*.parquet")) if count_rows(path)),
        ]

    def _forget_attempts(self, table: deltalake.DeltaTable, folders: Iterable[Path]) -> None:
        """Remove what attempts to merge have written, and have linked into the table in vain."""
        shown = set(active_files(table))
        for folder in folders:
            for file in folder.rglob("*.parquet"):
                name = file.relative_to(folder).as_posix()
                if name not in shown:
                    (self._path / name).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)

    def forget_staged(self, place: SinkPlace, before_generation: int) -> None:
        forget_generations(self._path / _STAGING / place.owner, before_generation)

    # -- inside -----------------------------------------------------------------------------------

    def _open(self) -> deltalake.DeltaTable | None:
        try:
            return deltalake.DeltaTable(self._path)
        except TableNotFoundError:
            return None

    def _transact(
        self, table: deltalake.DeltaTable, actions: list[AddAction | RemoveAction], records: list[Transaction]
    ) -> None:
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            partition_by=list(self._partition_by),
            commit_properties=CommitProperties(app_transactions=records, max_commit_retries=0),
        )

    def _add(self, staged: Path, staging: Path) -> AddAction:
        """Link a staged file into the table, and describe it."""
        # Without the folder of the generation, and of the batch where a batch has one.
        below = staged.relative_to(staging).parts[1:]
        inside = [part for part in below[:-1] if "=" in part] + [below[-1]]
        target = self._path.joinpath(*inside)
        link(staged, target)
        partitions = dict(part.split("=", 1) for part in inside[:-1])
        values = {
            name: None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
            for name, value in partitions.items()
        }
        status = target.stat()
        return AddAction(
            path="/".join(inside),
            size=status.st_size,
            partition_values=values,
            modification_time=int(status.st_mtime * 1000),
            data_change=True,
            stats=_statistics(target),
        )


def active_files(table: deltalake.DeltaTable) -> list[str]:
    """The files of a table's version, by their path in it."""
    paths = table.get_add_actions(flatten=True).column("path").to_pylist()
    return [unquote(str(path)) for path in paths]


def _transaction(place: SinkPlace, kind: str, value: int) -> Transaction:
    return Transaction(f"tidegate/{place.owner}/{kind}", value)


def _record(table: deltalake.DeltaTable, place: SinkPlace, kind: str) -> int:
    return table.transaction_version(f"tidegate/{place.owner}/{kind}") or 0


def _columns(schema: deltalake.Schema) -> str:
    fields = json.loads(schema.to_json())["fields"]
    return ", ".join(f"{field['name']} {json.dumps(field['type']).strip(chr(34))}" for field in fields)


def _statistics(path: Path) -> str:
    """Row count, and smallest, largest and null count of the columns that a reader can skip files by."""
    metadata = read_footer(path)
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for index in range(metadata.num_columns):
        column = metadata.schema.column(index)
        if "." in column.path:
            continue
        found = [metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)]
        if not found or any(each is None or not each.has_null_count for each in found):
            continue
        nulls[column.path] = sum(each.null_count for each in found)
        ends = [(each.min, each.max) for each in found if each.has_min_max]
        if len(ends) == len(found) and all(_is_plain(end) for pair in ends for end in pair):
            least[column.path] = min(low for low, _ in ends)
            most[column.path] = max(high for _, high in ends)
    return json.dumps({"numRecords": metadata.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls})


def _is_plain(value: object) -> bool:
    """Whether a value means in JSON what it means in the column, and is short enough for the log."""
    if isinstance(value, str):
        return len(value) <= _LONGEST_STATISTIC
    return isinstance(value, int) and not isinstance(value, bool)
