"""A Delta table as a sink: native staging, one Delta transaction per epoch.

Rows are staged by Spark in `<table>/_tidegate/<owner>/<generation>/`, which no reader of the table sees. A commit
links the epoch's files into the table and adds them in one transaction, which also records the epoch, the last
batch and the generation as application transactions. The table's own record makes a repeated commit do nothing. Another
one, of the root that the owner's rows come from, is made before anything is staged.

Of many small files of an epoch a commit makes few (`sinks/combining.py`): in the same transaction, so once.

With a `key`, a commit replaces the rows of the table that have a key of the epoch's (`sinks/upsert.py`). What was
staged is looked through before a checkpoint is decided: different rows of one key in a batch are refused.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import unquote

import deltalake
from deltalake import CommitProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from tidegate.errors import Fenced, InvalidConfig, InvalidPipeline, InvariantViolation, SinkFailed, first_line
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.config import as_ms, size_in_bytes
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.combining import Piece, bins, combine
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace, StagedFile, Upkeep, staged_by
from tidegate.sinks.features import FORGETTING, unwritable
from tidegate.sinks.reading import versions_of
from tidegate.sinks.scan import TableFile, active_files
from tidegate.sinks.staging import (
    NULL_FOLDER,
    as_names,
    check_key,
    check_newest_by,
    conflicting_rows,
    foreign_table,
    forget_generations,
    refuse_foreign,
    refuse_gone,
    refuse_put_back,
)
from tidegate.sinks.statistics import statistics
from tidegate.sinks.upkeep import Rewritten, retention_s, rewrite, small_files, unneeded_files
from tidegate.storage.disk import sync
from tidegate.storage.folder import Folder, link
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.storage.parquet import read_footer
from tidegate.storage.user_paths import local_path, plain_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import DataType, StructType

    from tidegate.sinks.upsert import Upsert

_log = logging.getLogger("tidegate")
_STAGING: Final = "_tidegate"
_MERGE: Final = "merge-"
_UPKEEP: Final = "upkeep"
_UPKEEP_BYTES: Final = 1 << 30
"""What upkeep replaces in one transaction."""
_RESERVED: Final = "_tidegate_"
"""What the names of our columns beside the table's own start with, when Spark reads it."""
_SMALL_AT_A_COMMIT: Final = 16
"""What part of the target. Larger files are too much to write again while the table is waited for: upkeep does that."""
_WORTH_A_JOB: Final = 3
"""By how many an epoch's files must become fewer for a job of Spark's to pay."""
_COMMIT_TRIES: Final = 5
_FORCED_VERSIONS: Final = 20
_SURELY_WRITTEN_S: Final = 3_600


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

    @property
    def needs_order(self) -> bool:
        return bool(self.key) and not self.newest_by

    def bind(self, place: SinkPlace) -> BoundDeltaTable:
        return BoundDeltaTable(self, place)


class BoundDeltaTable:
    """A Delta table as one stage writes to it."""

    def __init__(self, sink: DeltaTable, place: SinkPlace) -> None:
        self.sink = sink
        self.place = place
        self.path = sink.path
        self._key = sink.key
        self._partition_by = sink.partition_by
        self._newest_by = sink.newest_by
        self._target_size = sink.target_size
        self._staging = sink.path / _STAGING / place.owner
        self.staging = Folder(self._staging, fsync=place.fsync)
        self._checked: frozenset[str] = frozenset()
        """The staged files that were looked through."""
        self._wanted: deltalake.Schema | None = None
        """What the stage writes, as it was checked."""
        self._forced: frozenset[Path] = frozenset()
        """What of the table's log is known to be on the disk."""

    def describe(self) -> str:
        return self.sink.describe()

    @property
    def table(self) -> TableAddress:
        return self.sink.table

    def identity(self) -> str | None:
        """What a table is given when it is created."""
        table = self._open()
        return None if table is None else str(table.metadata().id)

    @property
    def partition_by(self) -> tuple[str, ...]:
        # What is merged at a commit is partitioned then.
        return () if self._key else self._partition_by

    @property
    def folders_by(self) -> tuple[str, ...]:
        return self._partition_by

    # -- the table itself -------------------------------------------------------------------------

    def check_table(self, schema: StructType, output_mode: str) -> bool:
        self._check_columns(schema, output_mode)
        try:
            wanted = deltalake.Schema.from_json(schema.json())
        except Exception as error:
            raise InvalidPipeline(f"{self.place.owner} has a column that a Delta table cannot hold: {error}") from error
        self._wanted = wanted
        table = self._open()
        if table is None:
            return False
        self._check_root(table)
        self._check_found(table)
        return True

    def probe(self) -> bool:
        table = self._open()
        if table is None:
            return False
        self._check_root(table)
        self._check_demands(table)
        return True

    def _check_root(self, table: deltalake.DeltaTable) -> None:
        if self._record(table, "root") not in (0, _number(self.place.root)):
            raise foreign_table(
                self.describe(),
                self.place,
                f"remove the folder {self.path}; if others write to it too, take another name for the sink",
            )

    def _check_found(self, table: deltalake.DeltaTable) -> None:
        """Refuse a table that cannot take what the stage writes, whoever made it what it is now."""
        self._check_demands(table)
        wanted, found = self._schema_of(), table.schema()
        if _columns(found) != _columns(wanted):
            raise SinkFailed(
                f"{self.describe()} has the columns {_columns(found)}, but {self.place.owner} writes "
                f"{_columns(wanted)}; change the stage, or write to a new table"
            )
        demanded = {field.name for field in found.fields if not field.nullable}
        unsure = [field.name for field in wanted.fields if field.nullable and field.name in demanded]
        if unsure:
            raise SinkFailed(
                f"{self.describe()} takes no null in {unsure[0]!r}, but {self.place.owner} may write one; "
                f"let the column be null, or write to a new table"
            )

    def _check_demands(self, table: deltalake.DeltaTable) -> None:
        """Refuse a table that demands what is not done here, whatever the columns of the rows are."""
        obstacle = unwritable(table, replaces=bool(self._key))
        if obstacle is not None:
            raise SinkFailed(
                f"{self.describe()} has {obstacle}, which Tidegate does not do; take it off, or write to a new table"
            )
        if FORGETTING in table.metadata().configuration:
            raise SinkFailed(
                f"{self.describe()} has the property {FORGETTING}: after that time without new rows it would forget "
                f"which epochs it shows; take the property off, or write to a new table"
            )
        partitions = tuple(table.metadata().partition_columns)
        if partitions != self._partition_by:
            raise SinkFailed(
                f"{self.describe()} is partitioned by {partitions or 'nothing'}, "
                f"not by {self._partition_by or 'nothing'}"
            )

    def _schema_of(self) -> deltalake.Schema:
        """What the stage writes."""
        if self._wanted is None:
            raise InvariantViolation(
                f"{self.describe()} was not checked for {self.place.owner} before its first commit"
            )
        return self._wanted

    def _check_columns(self, schema: StructType, output_mode: str) -> None:
        check_key(self.describe(), self._key, self.place, schema, output_mode)
        check_newest_by(self.describe(), self._newest_by, self._key, self.place, schema)
        missing = [name for name in self._partition_by if name not in schema.names]
        if missing:
            raise InvalidPipeline(
                f"{self.describe()} is partitioned by {missing[0]!r}, which {self.place.owner} does not have"
            )
        reserved = [name for name in schema.names if name.lower().startswith(_RESERVED)]
        if reserved:
            raise InvalidPipeline(f"{self.place.owner} has a column {reserved[0]!r}, a name that Tidegate needs")
        for field in schema.fields:
            kinds = {kind.typeName() for kind in _kinds(field.dataType)}
            if any("interval" in kind or kind == "variant" for kind in kinds):
                raise InvalidPipeline(
                    f"{self.describe()} cannot hold {field.name!r} of {self.place.owner}, "
                    f"{field.dataType.simpleString()}; cast it"
                )
            if field.name in self._key and "map" in kinds:
                raise InvalidPipeline(
                    f"{self.describe()} cannot have the key {field.name!r} of {self.place.owner}: Spark cannot compare "
                    f"maps"
                )
        octets = [name for name in self._partition_by if schema[name].dataType.typeName() == "binary"]
        if octets:
            raise InvalidPipeline(
                f"{self.describe()}: {self.place.owner} cannot be partitioned by {octets[0]!r}, which is binary; "
                f"take its hexadecimal digits"
            )
        moments = [name for name in self._partition_by if schema[name].dataType.typeName() == "timestamp"]
        if moments:
            # Spark names such a folder in the session's time zone, Delta reads it in UTC.
            raise InvalidPipeline(
                f"{self.describe()}: {self.place.owner} cannot be partitioned by {moments[0]!r}, a timestamp; "
                f"take its date"
            )
        if not set(schema.names) - set(self._partition_by):
            raise InvalidPipeline(
                f"{self.describe()}: {self.place.owner} has no column that the table is not partitioned by"
            )

    def prepare_table(self, schema: StructType) -> None:
        wanted = deltalake.Schema.from_json(schema.json())
        try:
            deltalake.DeltaTable.create(self.path, schema=wanted, partition_by=list(self._partition_by), mode="ignore")
        except DeltaError as error:
            raise SinkFailed(f"{self.describe()} cannot be created: {first_line(error)}") from error
        self._sync_log(through=0)

    def facts(self) -> SinkFacts:
        table = self._open()
        if table is None:
            return SinkFacts()
        return SinkFacts(self._record(table, "epoch"), self._record(table, "fence"), self._record(table, "batch"))

    def claim(self) -> None:
        for _ in range(_COMMIT_TRIES):
            table = self._open()
            if table is None:
                raise SinkFailed(f"{self.describe()} is gone; restore it, or start the pipeline on a new root")
            self._check_root(table)
            if self._record(table, "root") or self._transact(table, [], [self._root()]):
                return
        raise SinkFailed(f"{self.describe()} could not be claimed: {_COMMIT_TRIES} attempts met another writer's")

    def fence(self, generation: int) -> None:
        for _ in range(_COMMIT_TRIES):
            table = self._open()
            if table is None:
                return
            self._check_root(table)
            if self._record(table, "fence") >= generation:
                self._sync_log(through=table.version())
                return
            if self._transact(table, [], [self._transaction("fence", generation)]):
                return
        raise SinkFailed(f"{self.describe()} could not be fenced: {_COMMIT_TRIES} attempts met another writer's")

    # -- committing -------------------------------------------------------------------------------

    def check_commit(self, committable: Committable) -> None:
        if self._key:
            self._refuse_conflicts(committable.files)
            self._checked = frozenset(file.path for file in committable.files)

    def _refuse_conflicts(self, staged: Sequence[StagedFile]) -> None:
        """Refuse different rows of one key in a batch, in what was not looked through yet."""
        from pyspark.errors import PySparkException

        known = self._checked
        unknown = [file for file in staged if file.rows and file.path not in known]
        # A commit beside us may remove what it has shown. A batch of which a part is gone it has looked through too; of
        # what is left, rows that a newer one was to replace might seem to conflict.
        while fresh := _of_whole_batches(unknown):
            try:
                key = self._upsert(self._schema_of(), ()).conflict(fresh)
            except PySparkException as error:
                if not all(Path(file.path).exists() for file in fresh):
                    continue
                raise SinkFailed(f"{self.describe()}: what was staged cannot be read: {first_line(error)}") from error
            if key is not None:
                raise conflicting_rows(self.describe(), self.place, key, self._newest_by)
            break
        self._checked = known | {file.path for file in unknown}

    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        refuse_foreign(self.describe(), self.place, committable.batches)
        with self.sink.turn:
            return self._commit(permit, committable)

    def _commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        combined: dict[tuple[StagedFile, ...], list[Path]] = {}
        for _ in range(_COMMIT_TRIES):
            table = self._open()
            if table is None:
                raise SinkFailed(f"{self.describe()} is gone; restore it, or start the pipeline on a new root")
            self._check_root(table)
            if self._record(table, "fence") > permit.generation:
                raise Fenced(f"{self.describe()} was fenced by generation {self._record(table, 'fence')}")
            # The batch is recorded as its number + 1, because a record starts at 0.
            shown = self._record(table, "batch")
            epoch = self._record(table, "epoch")
            refuse_put_back(self.describe(), self.place, epoch, shown, committable)
            attempts = self._attempts(permit.generation)
            if epoch >= permit.epoch:
                # Of an attempt at a recorded epoch nobody knows whether it is the one that the table has shown: only
                # what was staged is removed.
                _remove(folder for folder in attempts if _attempted(folder) <= epoch)
                self._sync_log(through=table.version())
                return CommitAnswer.ALREADY
            fresh = [file for file in committable.files if file.batch >= shown and file.rows]
            if not fresh:
                # Nothing to show: an idle pipeline makes no versions of its tables. Where rows were shown by an epoch
                # before, whose run was killed, the next checkpoint no longer names them.
                if committable.files:
                    self._sync_log(through=table.version())
                return CommitAnswer.COMMITTED
            self._check_found(table)
            refuse_gone(self.describe(), self.place, self.staging, fresh)
            records = [
                self._transaction("epoch", permit.epoch),
                self._transaction("batch", max(shown, committable.through_batch + 1)),
                self._root(),
            ]
            if self._key:
                self._refuse_conflicts(fresh)
            # Made for this version of the table or an older one, and never shown: once ours has followed on this
            # version, none of them can.
            own = self._attempt(permit)
            vain = self._linked(folder for folder in attempts if _attempted(folder) > epoch and folder != own)
            staged = self._targets([Path(file.path) for file in fresh])
            actions = self._actions(table, permit, fresh, combined)
            if not self._transact(table, actions, records):
                continue  # look at what the other writer left
            added = {self.path / each.path for each in actions if isinstance(each, AddAction)}
            for path in {*vain, *staged} - added:
                path.unlink(missing_ok=True)
            _remove([*attempts, own])
            return CommitAnswer.COMMITTED
        raise SinkFailed(f"{self.describe()}: {_COMMIT_TRIES} commits in a row met another writer's")

    def _actions(
        self,
        table: deltalake.DeltaTable,
        permit: CommitPermit,
        fresh: list[StagedFile],
        combined: dict[tuple[StagedFile, ...], list[Path]],
    ) -> list[AddAction | RemoveAction]:
        """What a transaction does to show what was staged.

        `combined`: what this commit has made of small files, which is the same whatever others write meanwhile.
        """
        folder = self._attempt(permit)
        if tuple(fresh) in combined:
            return [*self._add_all(combined[tuple(fresh)])]
        for path in self._linked([folder]):  # by an earlier try of ours, which the table would know of
            path.unlink(missing_ok=True)
        _remove([folder])
        if not self._key:
            combined[tuple(fresh)] = self._combined(table, fresh, folder)
            return [*self._add_all(combined[tuple(fresh)])]
        upsert = self._upsert(table.schema(), active_files(table, self._key))
        with _spark_fails(f"{self.describe()}: its rows cannot be merged"):
            replaced = upsert.write(fresh, folder)
        now_ms = time.time_ns() // 1_000_000
        return [
            *(RemoveAction(path, True, now_ms) for path in replaced),
            *self._add_all([path for path in sorted(folder.rglob("*.parquet")) if read_footer(path).num_rows]),
        ]

    def _combined(self, table: deltalake.DeltaTable, fresh: Sequence[StagedFile], folder: Path) -> list[Path]:
        """The files to be shown: those that were staged, and in place of small ones what they were combined to."""
        staged = [Path(file.path) for file in fresh]
        if self._target_size is None or self.place.session is None:
            return staged
        targets = self._targets(staged)
        homes = {path: target.parent.relative_to(self.path) for path, target in zip(staged, targets, strict=True)}
        wanted = bins(
            (Piece(path, file.size_bytes, homes[path]) for path, file in zip(staged, fresh, strict=True)),
            self._target_size,
            self._target_size // _SMALL_AT_A_COMMIT,
        )
        if sum(len(pieces) - 1 for pieces in wanted) < _WORTH_A_JOB:
            return staged
        try:
            with _spark_fails("Spark"):
                written = combine(self.place.session, self._stored(table), wanted, folder)
        except (SinkFailed, OSError) as error:
            # To show many small files is better than to show none.
            _log.warning("%s: small files are shown as they are: %s", self.describe(), error)
            _remove([folder])
            return staged
        combined = {piece.path for pieces in wanted for piece in pieces}
        shown = [path for path in staged if path not in combined]
        for number, (pieces, below) in enumerate(zip(wanted, written, strict=True)):
            home = folder / homes[pieces[0].path]
            home.mkdir(parents=True, exist_ok=True)
            # In each bin Spark gives the same names.
            shown += [path.rename(home / f"bin-{number:05d}-{path.name}") for path in sorted(below.glob("*.parquet"))]
        return shown

    def _stored(self, table: deltalake.DeltaTable) -> StructType:
        """The columns that the table's files hold: without those that it is partitioned by."""
        from pyspark.sql.types import StructType

        every = StructType.fromJson(json.loads(table.schema().to_json()))
        return StructType([field for field in every.fields if field.name not in self._partition_by])

    def _upsert(self, columns: deltalake.Schema, files: Sequence[TableFile]) -> Upsert:
        # These bring PySpark, which an append does not need.
        from pyspark.sql.types import StructType

        from tidegate.sinks.upsert import Upsert

        if self.place.session is None:
            raise SinkFailed(f"{self.describe()} has a key: it can be committed only while the pipeline runs")
        schema = StructType.fromJson(json.loads(columns.to_json()))
        return Upsert(
            self.place.session,
            self.path,
            schema,
            files,
            self._key,
            self._partition_by,
            self._newest_by,
            self._target_size,
        )

    def _add_all(self, staged: list[Path], *, data_change: bool = True) -> list[AddAction]:
        """Link files into the table, and describe them. When it is done they are on the disk, by these names too."""
        targets = self._targets(staged)
        added = [self._add(path, target, data_change=data_change) for path, target in zip(staged, targets, strict=True)]
        if self.place.fsync:
            sync(targets, self._forced)
        return added

    def _attempt(self, permit: CommitPermit) -> Path:
        """Where a commit writes what it merges."""
        return Path(staged_by(self, permit.generation).location(f"{_MERGE}{permit.epoch}"))

    def _attempts(self, generation: int) -> list[Path]:
        """Where commits have written what they merged, up to a generation: a newer one's is none of our business."""
        found = self._staging.glob(f"*/{_MERGE}*")
        return [folder for folder in found if int(folder.parent.name) <= generation]

    def _linked(self, attempts: Iterable[Path]) -> list[Path]:
        """What attempts have linked into the table, or would have."""
        return [self.path / file.relative_to(folder) for folder in attempts for file in folder.rglob("*.parquet")]

    def forget_staged(self, before_generation: int) -> None:
        forget_generations(self.staging, before_generation)

    # -- upkeep -----------------------------------------------------------------------------------

    @property
    def upkeep_every_ms(self) -> int | None:
        return self.sink.optimize_ms

    def upkeep_due_in_ms(self) -> int:
        try:
            last = self._upkeep_mark().stat().st_mtime
        except FileNotFoundError:
            return 0
        since_ms = max(0, round((time.time() - last) * 1000))
        return max(0, (self.sink.optimize_ms or 0) - since_ms)

    def _upkeep_mark(self) -> Path:
        """A file whose time tells when a pass has come to its end."""
        return self._staging / "upkeep"

    def keep_up(
        self,
        generation: int,
        retained: Callable[[], Sequence[Manifest]],
        is_stopping: threading.Event,
    ) -> Upkeep | None:
        table = self._open()
        if table is None or self.place.session is None or self._target_size is None:
            return None
        before = after = len(active_files(table))
        folder = Path(staged_by(self, generation).location(_UPKEEP))
        _remove([folder])  # of a pass that failed
        try:
            rewritten = self._rewriting(self.place.session, table, folder)
            after -= self._compact(table, self._target_size, rewritten, is_stopping)
        finally:
            _remove([folder])
        deleted = [] if is_stopping.is_set() or self.sink.vacuum_ms is None else self._vacuum(retained)
        if not is_stopping.is_set():
            mark = self._upkeep_mark()
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        return Upkeep(before, after, len(deleted), sum(deleted)) if deleted or after < before else None

    def _compact(
        self,
        table: deltalake.DeltaTable,
        target: int,
        rewritten: Callable[[Sequence[TableFile]], Rewritten],
        is_stopping: threading.Event,
    ) -> int:
        """Make few files of small ones. Returns by how many there are fewer."""
        self._check_keepable(table)
        done: list[Rewritten] = []
        fewer = 0
        for files in small_files(table, self.path, target):
            if is_stopping.is_set():
                break
            done.append(rewritten(files))
            if sum(each.size for each in done) >= _UPKEEP_BYTES:
                fewer += self._replace(table.schema(), done)
                done = []
        return fewer + self._replace(table.schema(), done)

    def _rewriting(
        self, session: SparkSession, table: deltalake.DeltaTable, folder: Path
    ) -> Callable[[Sequence[TableFile]], Rewritten]:
        """Writes some files of one partition again, as one, each time to a folder of its own below this one."""
        from pyspark.sql.types import StructType

        from tidegate.sinks.sessions import table_session

        own, numbers = table_session(session), count()
        schema = StructType.fromJson(json.loads(table.schema().to_json()))

        def rewritten(files: Sequence[TableFile]) -> Rewritten:
            with _spark_fails("its small files cannot be made few"):
                return rewrite(own, self.path, schema, files, self._partition_by, folder / str(next(numbers)))

        return rewritten

    def _check_keepable(self, table: deltalake.DeltaTable) -> None:
        obstacle = unwritable(table, replaces=False)
        if obstacle is not None:
            raise SinkFailed(f"it has {obstacle}, which Tidegate does not do")
        if tuple(table.metadata().partition_columns) != self._partition_by:
            raise SinkFailed(f"it is no longer partitioned by {self._partition_by or 'nothing'}")

    def _replace(self, schema: deltalake.Schema, done: list[Rewritten]) -> int:
        """Let what was written take the place of what it was made of, where the table still shows all of that."""
        with self.sink.turn:
            for _ in range(_COMMIT_TRIES):
                if not done:
                    return 0
                table = self._open()
                active = set() if table is None else {file.path for file in active_files(table)}
                still = [each for each in done if active.issuperset(file.path for file in each.files)]
                if table is None or table.schema() != schema:
                    still = []
                self._unlink([each for each in done if each not in still])
                done = still
                if table is None or not done:
                    return 0
                self._check_keepable(table)
                now_ms = time.time_ns() // 1_000_000
                removed = [RemoveAction(file.path, False, now_ms) for each in done for file in each.files]
                added = self._add_all([path for each in done for path in each.written], data_change=False)
                if self._transact(table, [*removed, *added], []):
                    return len(removed) - len(added)
            self._unlink(done)
            return 0  # others write to it all the time: later

    def _unlink(self, given_up: list[Rewritten]) -> None:
        """What is not in the table: a transaction that seemed to fail may have made its version."""
        table = self._open() if given_up else None
        shown = set() if table is None else {self.path / file.path for file in active_files(table)}
        for path in self._targets(path for each in given_up for path in each.written):
            if path not in shown:
                path.unlink(missing_ok=True)

    def _vacuum(self, retained: Callable[[], Sequence[Manifest]]) -> list[int]:
        """Delete files that nobody needs. Returns their sizes."""
        table = self._open()
        if table is None or self.sink.vacuum_ms is None:
            return []
        self._check_keepable(table)
        # Asked after the table was opened: a checkpoint that is not among these yet is shown by a later version, and
        # what this version no longer has, no later one has.
        versions = versions_of(self.path, self.place.stage, retained())
        files = unneeded_files(table, self.path, retention_s(table, self.sink.vacuum_ms), versions)
        if files:
            self._sync_shown(table)
        with self.sink.turn:
            now = self._open()
            shown = set() if now is None else {self.path / file.path for file in active_files(now)}
            sizes = []
            for path in files if now is not None else []:
                if path not in shown:  # put back meanwhile, from an older version
                    with suppress(FileNotFoundError):
                        sizes.append(path.stat().st_size)
                        path.unlink()
            return sizes

    # -- inside -----------------------------------------------------------------------------------

    def _open(self) -> deltalake.DeltaTable | None:
        if self.path.is_file():
            raise SinkFailed(f"{self.describe()} is a file; a Delta table is a folder")
        try:
            return deltalake.DeltaTable(self.path)
        except TableNotFoundError:
            return None
        except DeltaError as error:
            raise SinkFailed(f"{self.describe()} cannot be opened: {first_line(error)}") from error

    def _transact(
        self,
        table: deltalake.DeltaTable,
        actions: list[AddAction | RemoveAction],
        records: list[Transaction],
    ) -> bool:
        """Make the next version of the table. False: the table has moved on, perhaps by another writer."""
        try:
            table.create_write_transaction(
                actions,
                "append",
                table.schema(),
                partition_by=list(self._partition_by),
                commit_properties=CommitProperties(app_transactions=records, max_commit_retries=0),
            )
        except DeltaError as error:
            now = self._open()
            if isinstance(error, CommitFailedError) and now is not None and now.version() > table.version():
                return False
            raise SinkFailed(f"{self.describe()} cannot be written: {first_line(error)}") from error
        self._sync_log(through=table.version() + 1)
        return True

    def _transaction(self, kind: str, value: int) -> Transaction:
        # Where transactions expire, Delta on Spark takes one without a time for an old one.
        return Transaction(f"tidegate/{self.place.owner}/{kind}", value, time.time_ns() // 1_000_000)

    def _root(self) -> Transaction:
        """Whose the owner's rows are. Every commit says so again: a record that is renewed does not expire."""
        return self._transaction("root", _number(self.place.root))

    def _record(self, table: deltalake.DeltaTable, kind: str) -> int:
        return table.transaction_version(f"tidegate/{self.place.owner}/{kind}") or 0

    def _sync_shown(self, table: deltalake.DeltaTable) -> None:
        """Force what takes the place of files to the disk before these are deleted: other writers leave that to the
        system, and a run may have been killed before it came to it. What is older was written by itself long ago."""
        if self.place.fsync:
            since_ms = (time.time() - _SURELY_WRITTEN_S) * 1000
            sync(
                (self.path / file.path for file in active_files(table) if file.modified_ms > since_ms), missing_ok=True
            )
            self._sync_log(through=table.version())

    def _sync_log(self, through: int) -> None:
        """Force the last versions of the table's log to the disk, which deltalake leaves to the system.

        Not only the very last: what a commit finds done already was done by a run that was killed before it came to
        this, perhaps a few versions ago, because others write to the table too.
        """
        if not self.place.fsync:
            return
        log = self.path / "_delta_log"
        last = tuple(f"{version:020d}." for version in range(max(0, through - _FORCED_VERSIONS), through + 1))
        files = {Path(entry.path) for entry in os.scandir(log) if entry.name.startswith(last)}
        pointer = log / "_last_checkpoint"  # which changes with each checkpoint of the log
        if any(".checkpoint" in file.name for file in files - self._forced):
            files.add(pointer)
        self._forced = sync(files, self._forced, missing_ok=True) - {pointer}

    def _add(self, staged: Path, target: Path, *, data_change: bool) -> AddAction:
        """Link a staged file into the table, and describe it."""
        inside = target.relative_to(self.path).parts
        link(staged, target)
        partitions = dict(part.split("=", 1) for part in inside[:-1])
        values = {unquote(name): None if value == NULL_FOLDER else unquote(value) for name, value in partitions.items()}
        status = target.stat()
        return AddAction(
            path="/".join(inside),
            size=status.st_size,
            partition_values=values,
            modification_time=int(status.st_mtime * 1000),
            data_change=data_change,
            stats=statistics(target),
        )

    def _targets(self, staged: Iterable[Path]) -> list[Path]:
        """Where staged files are to be in the table."""
        # Without the folder of the generation, and of the batch or the attempt where there is one.
        below = [path.relative_to(self._staging).parts[1:] for path in staged]
        return [self.path.joinpath(*(part for part in each[:-1] if "=" in part), each[-1]) for each in below]


@contextmanager
def _spark_fails(what: str) -> Iterator[None]:
    """Say what of ours has failed where Spark has."""
    # It brings PySpark, which an append of files as they are does not need.
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, importlib.import_module("py4j.protocol").Py4JJavaError) as error:
        why = error if isinstance(error, PySparkException) else error.java_exception.getMessage()
        raise SinkFailed(f"{what}: {str(why).splitlines()[0]}") from error


def _attempted(folder: Path) -> int:
    """The epoch of an attempt."""
    return int(folder.name.removeprefix(_MERGE))


def _of_whole_batches(staged: Sequence[StagedFile]) -> list[StagedFile]:
    """Those of the files whose batches have all of theirs."""
    broken = {file.batch for file in staged if not Path(file.path).exists()}
    return [file for file in staged if file.batch not in broken]


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _number(root: str) -> int:
    """A root's id as the version of a transaction can hold it: 62 bits of its digest, and never 0."""
    return (int.from_bytes(hashlib.sha256(root.encode()).digest()[:8]) >> 2) + 1


def _columns(schema: deltalake.Schema) -> str:
    fields = json.loads(schema.to_json())["fields"]
    return ", ".join(f"{field['name']} {json.dumps(field['type']).strip(chr(34))}" for field in fields)


def _kinds(kind: DataType) -> Iterator[DataType]:
    """A type, and all that are nested in it."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    yield kind
    inner: list[DataType] = []
    if isinstance(kind, ArrayType):
        inner = [kind.elementType]
    elif isinstance(kind, MapType):
        inner = [kind.keyType, kind.valueType]
    elif isinstance(kind, StructType):
        inner = [field.dataType for field in kind.fields]
    for each in inner:
        yield from _kinds(each)
