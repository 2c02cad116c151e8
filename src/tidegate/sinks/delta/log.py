"""The log of a Delta table, as one owner writes to it: its versions, and what they record of the owner's epochs.

A record is an application transaction of the table, `tidegate/<owner>/<kind>`: the `epoch` and the `batch` that are
shown, the generation of the `fence`, the `root` that the owner's rows come from, and the generation by which the table
was last `set_back` to an older checkpoint. `counted_by` is the root whose number the epoch is, where that is another:
it was, when the table was set back to a checkpoint that was brought from there, until the next commit.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote

import deltalake
import msgspec
from deltalake import CommitProperties, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from tidegate.errors import SinkFailed, StoreUnavailable
from tidegate.sinks.contract import SinkPlace
from tidegate.sinks.delta.following import Following
from tidegate.sinks.delta.home import LOG, InFolder, name_of
from tidegate.sinks.delta.scan import active_files
from tidegate.sinks.staging import foreign_table
from tidegate.storage.disk import sync
from tidegate.storage.files import Files

if TYPE_CHECKING:
    from tidegate.sinks.delta.table import DeltaTable

Kind = Literal["epoch", "batch", "fence", "root", "set_back", "counted_by"]

TRIES: Final = 5
"""How often a transaction is made again that met another writer's."""
_FORCED_VERSIONS: Final = 20
_MARK: Final = "tidegate"
_SURELY_WRITTEN_S: Final = 3_600


class Replacement(msgspec.Struct, frozen=True):
    """All that a version is to show."""

    files: list[AddAction]
    schema: deltalake.Schema


class _Made:
    """Whether a version was made, and by what it is known to be ours."""

    def __init__(self) -> None:
        self.is_done = False
        self.mark = uuid.uuid4().hex

    def properties(self, records: list[Transaction]) -> CommitProperties:
        return CommitProperties(app_transactions=records, max_commit_retries=0, custom_metadata={_MARK: self.mark})


class TableLog:
    def __init__(self, sink: DeltaTable, place: SinkPlace, files: Files) -> None:
        """`files`: all that lies in the table's folder."""
        self.home = sink.home
        self.files = files
        self._described = sink.describe()
        self._partition_by = sink.partition_by
        self._place = place
        self._disk = sink.home.path if place.fsync and isinstance(sink.home, InFolder) else None
        """Where anything is to be forced; None: nowhere, as what a bucket has taken is durable."""
        self._forced: frozenset[Path] = frozenset()
        """What of it is known to be on the disk."""
        self._following = Following(self)

    def open(self) -> deltalake.DeltaTable | None:
        """The newest version; None: there is no table."""
        if isinstance(self.home, InFolder) and self.home.path.is_file():
            raise SinkFailed(f"{self._described} is a file; a Delta table is a folder")
        with self.home.telling("be opened"):
            return self.home.open()

    def opened(self) -> deltalake.DeltaTable:
        """The same, where there must be one."""
        table = self.open()
        if table is None:
            raise SinkFailed(
                f"{self._described} is gone; restore it, or start the pipeline on a new root with new tables"
            )
        return table

    def followed(self) -> deltalake.DeltaTable:
        """The same for one commit after another, of which only one is made at a time: of a table in a bucket only what
        is new is read."""
        return self.opened() if isinstance(self.home, InFolder) else self._following.newest()

    def shown(self) -> set[str] | None:
        """The files of the newest version; None: there is no table."""
        table = self.open()
        return None if table is None else {file.path for file in active_files(table)}

    # -- records ----------------------------------------------------------------------------------

    def recorded(self, table: deltalake.DeltaTable, kind: Kind, stage: str | None = None) -> int:
        """0: nothing is. `stage`: another one of the pipeline."""
        return self._following.recorded(table, self._name(kind, stage))

    def record(self, kind: Kind, value: int, stage: str | None = None) -> Transaction:
        # Where transactions expire, Delta on Spark takes one without a time for an old one.
        return Transaction(self._name(kind, stage), value, time.time_ns() // 1_000_000)

    def root_record(self, stage: str | None = None) -> Transaction:
        """Whose the owner's rows are. Every commit says so again: a record that is renewed does not expire."""
        return self.record("root", number_of(self._place.root), stage)

    def counting_record(self, table: deltalake.DeltaTable) -> list[Transaction]:
        """That epochs are this root's numbers from now on, where they were another's."""
        own = number_of(self._place.root)
        return [] if self.recorded(table, "counted_by") in (0, own) else [self.record("counted_by", own)]

    def _name(self, kind: Kind, stage: str | None = None) -> str:
        return f"{self.prefix}{stage or self._place.stage}/{kind}"

    @property
    def prefix(self) -> str:
        """How the names of all records of the pipeline begin."""
        return f"tidegate/{self._place.pipeline}/"

    def is_anothers(self, table: deltalake.DeltaTable) -> bool:
        """Whether the rows of this owner come from another root."""
        return self.recorded(table, "root") not in (0, number_of(self._place.root))

    def records_of(self, then: deltalake.DeltaTable, stages: Iterable[str], generation: int) -> Iterator[Transaction]:
        """What a table is to record that shows what a version, of this table or another, showed of some stages: their
        epochs and batches of then. Older generations are fenced, and it is this root's."""
        for stage in stages:
            yield self.record("epoch", self.recorded(then, "epoch", stage), stage)
            yield self.record("batch", self.recorded(then, "batch", stage), stage)
            yield self.record("fence", generation, stage)
            yield self.record("set_back", generation, stage)
            counted_by = self.recorded(then, "counted_by", stage) or self.recorded(then, "root", stage)
            if counted_by:
                yield self.record("counted_by", counted_by, stage)
            yield self.root_record(stage)

    def check_root(self, table: deltalake.DeltaTable) -> None:
        """Refuse a table that is another's."""
        if self.is_anothers(table):
            raise foreign_table(
                self._described,
                self._place,
                f"remove the folder {self.home.address}; if others write to it too, take another name for the sink",
            )

    # -- versions ---------------------------------------------------------------------------------

    def transact(
        self, table: deltalake.DeltaTable, actions: list[AddAction | RemoveAction], records: list[Transaction]
    ) -> bool:
        """Make the next version of the table. False: the table has moved on, perhaps by another writer."""
        version = table.version() + 1
        with self.next_version(table) as made:
            table.create_write_transaction(
                actions,
                "append",
                table.schema(),
                partition_by=list(self._partition_by),
                commit_properties=made.properties(records),
                post_commithook_properties=self.home.after_version(version),
            )
        if made.is_done:
            self._following.made(table, version, made.mark, records)
        return made.is_done

    def replace(self, table: deltalake.DeltaTable, by: Replacement, records: list[Transaction]) -> bool:
        """The same with nothing but these files, and these columns."""
        with self.next_version(table) as made:
            table.create_write_transaction(
                [*by.files],
                "overwrite",
                by.schema,
                partition_by=table.metadata().partition_columns,
                commit_properties=made.properties(records),
            )
        return made.is_done

    def restore(self, table: deltalake.DeltaTable, version: int, records: list[Transaction]) -> bool:
        """Make the next version of the table show what an older one did. False: the table has moved on."""
        hint = "; if files of it were vacuumed, set it back to a newer checkpoint"
        with self.next_version(table, f"be set back to version {version}", hint) as made:
            table.restore(version, commit_properties=made.properties(records))
        return made.is_done

    @contextmanager
    def next_version(self, table: deltalake.DeltaTable, what: str = "be written", hint: str = "") -> Iterator[_Made]:
        """Make the one after the version that was opened. It tells whether it was made: not if the table has moved on,
        perhaps by another writer."""
        made = _Made()
        try:
            yield made
        except self.home.failures as error:
            why, cause = self.home.why(error), self.home.cause(error)
            is_conflict, is_passing = isinstance(error, CommitFailedError), self.home.is_passing(error)
        else:
            self.force(through=table.version() + 1)
            made.is_done = True
            return
        # Where the answer of a bucket was lost, the version may be there all the same: then it is the one that we met.
        made.is_done = self._is_marked(table.version() + 1, made.mark)
        if not made.is_done and not is_passing:
            now = self.open()
            if not is_conflict or now is None or now.version() <= table.version():
                raise SinkFailed(f"{self._described} cannot {what}: {why}{hint}") from cause

    def _is_marked(self, version: int, mark: str) -> bool:
        written = self.files.read(name_of(version))
        return written is not None and mark.encode() in written

    def changes_since(self, version: int, newest: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """What each later version has done, as the table's log says it, one object an action."""
        for number in range(version + 1, newest + 1):
            name = name_of(number)
            try:
                data = self.files.read(name)
            except StoreUnavailable as error:
                raise SinkFailed(f"{self.files.location(name)}, of {self._described}: {error}") from error
            if data is None:
                raise SinkFailed(f"{self.files.location(name)}, of {self._described}, cannot be read: it is gone")
            yield number, [msgspec.json.decode(line) for line in data.decode().splitlines() if line]

    def added_since(self, version: int, newest: int) -> set[str]:
        """The files that later versions have added."""
        changes = (action.get("add") for _, actions in self.changes_since(version, newest) for action in actions)
        return {unquote(add["path"]) for add in changes if add}

    def force(self, through: int) -> None:
        """Force the last versions of the table's log to the disk, which deltalake leaves to the system.

        Not only the very last: what a commit finds done already was done by a run that was killed before it came to
        this, perhaps a few versions ago, because others write to the table too.
        """
        if self._disk is None:
            return
        log = self._disk / LOG
        last = tuple(f"{version:020d}." for version in range(max(0, through - _FORCED_VERSIONS), through + 1))
        files = {Path(entry.path) for entry in os.scandir(log) if entry.name.startswith(last)}
        pointer = log / "_last_checkpoint"  # which changes with each checkpoint of the log
        if any(".checkpoint" in file.name for file in files - self._forced):
            files.add(pointer)
        self._forced = sync(files, self._forced, missing_ok=True) - {pointer}

    def force_files(self, names: Iterable[str]) -> None:
        """Force files of the table to the disk, before a version has them."""
        if self._disk is not None:
            sync((self._disk / name for name in names), self._forced)

    def force_shown(self, table: deltalake.DeltaTable) -> None:
        """Force what takes the place of files to the disk before these are deleted: other writers leave that to the
        system, and a run may have been killed before it came to it. What is older was written by itself long ago."""
        if self._disk is not None:
            since_ms = (time.time() - _SURELY_WRITTEN_S) * 1000
            shown = (self._disk / file.path for file in active_files(table) if file.modified_ms > since_ms)
            sync(shown, missing_ok=True)
            self.force(through=table.version())


def number_of(root: str) -> int:
    """A root's id as the version of a transaction can hold it: 62 bits of its digest, and never 0."""
    return (int.from_bytes(hashlib.sha256(root.encode()).digest()[:8]) >> 2) + 1
