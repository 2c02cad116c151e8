"""A Delta table as a sink: native staging, one Delta transaction per epoch.

Rows are staged by Spark in `<table>/_tidegate/<owner>/<generation>/`, which no reader of the table sees. A commit
links the epoch's files into the table and adds them in one transaction, which also records the epoch, the last
batch and the generation as application transactions. The table's own record makes a repeated commit do nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import deltalake
from deltalake import CommitProperties, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction

from tidegate.errors import Fenced, InvalidPipeline, SinkFailed
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, StagedFile
from tidegate.storage.files import link
from tidegate.storage.parquet import read_footer

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_STAGING: Final = "_tidegate"
_COMMIT_TRIES: Final = 5
_LONGEST_STATISTIC: Final = 64


class DeltaTable:
    """A Delta table that a sink stage appends to. `partition_by` names its partition columns."""

    def __init__(self, path: str | os.PathLike[str], partition_by: str | Sequence[str] = ()) -> None:
        self._path = Path(path).absolute()
        self._partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)

    def __repr__(self) -> str:
        return f"DeltaTable({str(self._path)!r})"

    def describe(self) -> str:
        return f"Delta table {self._path}"

    @property
    def path(self) -> Path:
        return self._path

    @property
    def partition_by(self) -> tuple[str, ...]:
        return self._partition_by

    def staging_folder(self, owner: str, generation: int) -> Path:
        return self._path / _STAGING / owner / f"{generation:06d}"

    def check_table(self, owner: str, schema: StructType) -> None:
        missing = [name for name in self._partition_by if name not in schema.names]
        if missing:
            raise InvalidPipeline(f"{self.describe()} is partitioned by {missing[0]!r}, which {owner} does not have")
        moments = [name for name in self._partition_by if schema[name].dataType.typeName() == "timestamp"]
        if moments:
            # Spark names such a folder in the session's time zone, Delta reads it in UTC.
            raise InvalidPipeline(
                f"{self.describe()}: {owner} cannot be partitioned by {moments[0]!r}, a timestamp; take its date"
            )
        if not set(schema.names) - set(self._partition_by):
            raise InvalidPipeline(f"{self.describe()}: {owner} has no column that the table is not partitioned by")
        try:
            wanted = deltalake.Schema.from_json(schema.json())
        except Exception as error:
            raise InvalidPipeline(f"{owner} has a column that a Delta table cannot hold: {error}") from error
        table = self._open()
        if table is None:
            return
        found = table.schema()
        if _columns(found) != _columns(wanted):
            raise SinkFailed(
                f"{self.describe()} has the columns {_columns(found)}, but {owner} writes {_columns(wanted)}; "
                f"change the stage, or write to a new table"
            )
        partitions = tuple(table.metadata().partition_columns)
        if partitions != self._partition_by:
            raise SinkFailed(
                f"{self.describe()} is partitioned by {partitions or 'nothing'}, "
                f"not by {self._partition_by or 'nothing'}"
            )

    def prepare_table(self, owner: str, schema: StructType) -> None:
        self.check_table(owner, schema)
        wanted = deltalake.Schema.from_json(schema.json())
        deltalake.DeltaTable.create(self._path, schema=wanted, partition_by=list(self._partition_by), mode="ignore")

    def facts(self, owner: str) -> SinkFacts:
        table = self._open()
        if table is None:
            return SinkFacts()
        return SinkFacts(_record(table, owner, "epoch"), _record(table, owner, "fence"))

    def fence(self, owner: str, generation: int) -> None:
        table = self._open()
        if table is not None and _record(table, owner, "fence") < generation:
            self._transact(table, [], [Transaction(f"tidegate/{owner}/fence", generation)])

    def commit(self, owner: str, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        for _ in range(_COMMIT_TRIES):
            table = self._open()
            if table is None:
                raise SinkFailed(f"{self.describe()} is gone; restore it, or start the pipeline on a new root")
            if _record(table, owner, "fence") > permit.generation:
                raise Fenced(f"{self.describe()} was fenced by generation {_record(table, owner, 'fence')}")
            if _record(table, owner, "epoch") >= permit.epoch:
                return CommitAnswer.ALREADY
            # The batch is recorded as its number + 1, because a record starts at 0.
            shown = _record(table, owner, "batch")
            fresh = [file for file in committable.files if file.batch >= shown and file.rows]
            if not fresh:
                return CommitAnswer.COMMITTED  # nothing to show: an idle pipeline makes no versions of its tables
            records = [
                Transaction(f"tidegate/{owner}/epoch", permit.epoch),
                Transaction(f"tidegate/{owner}/batch", max(shown, committable.through_batch + 1)),
            ]
            try:
                self._transact(table, [self._add(owner, file) for file in fresh], records)
            except CommitFailedError:
                continue  # another writer of the table was first: look at what it left
            return CommitAnswer.COMMITTED
        raise SinkFailed(f"{self.describe()}: {_COMMIT_TRIES} commits in a row met another writer's")

    def forget_staged(self, owner: str, before_generation: int) -> None:
        staging = self._path / _STAGING / owner
        if staging.is_dir():
            for folder in staging.iterdir():
                if folder.name.isdigit() and int(folder.name) < before_generation:
                    shutil.rmtree(folder, ignore_errors=True)

    # -- inside -----------------------------------------------------------------------------------

    def _open(self) -> deltalake.DeltaTable | None:
        try:
            return deltalake.DeltaTable(self._path)
        except TableNotFoundError:
            return None

    def _transact(self, table: deltalake.DeltaTable, adds: list[AddAction], records: list[Transaction]) -> None:
        table.create_write_transaction(
            list(adds),
            "append",
            table.schema(),
            partition_by=list(self._partition_by),
            commit_properties=CommitProperties(app_transactions=records, max_commit_retries=0),
        )

    def _add(self, owner: str, file: StagedFile) -> AddAction:
        """Link a staged file into the table, and describe it."""
        staged = Path(file.path)
        # Without the folder of the generation, and of the batch where a batch has one.
        below = staged.relative_to(self._path / _STAGING / owner).parts[1:]
        inside = [part for part in below[:-1] if "=" in part] + [below[-1]]
        target = self._path.joinpath(*inside)
        link(staged, target)
        partitions = dict(part.split("=", 1) for part in inside[:-1])
        values = {
            name: None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
            for name, value in partitions.items()
        }
        return AddAction(
            path="/".join(inside),
            size=file.size_bytes,
            partition_values=values,
            modification_time=int(target.stat().st_mtime * 1000),
            data_change=True,
            stats=_statistics(target),
        )


def _record(table: deltalake.DeltaTable, owner: str, kind: str) -> int:
    return table.transaction_version(f"tidegate/{owner}/{kind}") or 0


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
