"""Played tables: a `FileSink` and a `RowSink` whose record, fence and staged rows lie in `Files`.

A table is a log of versions, each created if absent, so that of two that change it at the same time one looks again and
sees the other's fence. A version says what it adds, or which one before it shows the same, or that it shows a copy of
another table, and of every owner what is known: its root, fence, last epoch and next batch. The files that a commit
shows are kept under `data/`; what a batch has staged lies under `staged/`.

What a table shows is read from it, by whoever holds the same files: `versions`, `visible`. Where it is slow or fails is
a caller's word: `on_call`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from tidegate.errors import CheckpointNotVisible, Fenced, SinkFailed
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import (
    BoundSink,
    CommitAnswer,
    Committable,
    SettingBack,
    SinkPlace,
    StagedBatch,
    decode_committable,
)
from tidegate.sinks.staging import foreign_table, refuse_foreign, refuse_put_back
from tidegate.storage.files import Files, clear
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.testing.played.rows import PlayedRows, decode_rows, encode_rows, joined

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_LOG: Final = "log"
_STAGED: Final = "staged"

Call = Literal[
    "check_commit",
    "commit",
    "committed",
    "fence",
    "fenced",
    "facts",
    "claim",
    "stage",
    "forget_staged",
    "set_back",
    "was_set_back",
    "show_copy",
    "has_shown_copy",
]


class OwnerRecord(msgspec.Struct, frozen=True):
    """What a table knows of one stage of one pipeline."""

    root: str = ""
    fence: int = 0
    epoch: int = 0
    next_batch: int = 0
    set_back: int = 0
    counted_by: str = ""
    """The root whose number the epoch is, if that is another."""


class Version(msgspec.Struct, frozen=True):
    """One change of a table. `data`: the files that it shows from now on. `shows`: the number of the version that it
    goes back to; None: it adds to the one before. `copies`: the address of the table whose rows it shows, and no
    others."""

    id: str
    table: str
    owners: dict[str, OwnerRecord] = {}
    owner: str = ""
    epoch: int = 0
    generation: int = 0
    data: tuple[str, ...] = ()
    shows: int | None = None
    copies: str | None = None


_decoder: Final = msgspec.json.Decoder(Version)


class PlayedTable:
    """What a user would write: a table in a folder. As many objects as there are processes may stand for one."""

    is_exactly_once: Final = True

    def __init__(
        self,
        files: Files,
        stages: Literal["files", "rows"] = "files",
        *,
        on_call: Callable[[Call], None] = lambda _: None,
        encode: Callable[[Any], bytes] = encode_rows,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        beside: Files | None = None,
    ) -> None:
        """`files`: of the folder of the table. `stages`: who writes its batches, Spark or the sink itself. `beside`:
        where others are, of which it may show a copy.

        `on_call` is called before each call of the contract, and after a commit and a fence are done: it may wait, or
        raise `SinkFailed`; what is done by then stays done. `encode`: how rows that the sink stages are written.
        """
        self._files = files
        self._stages = stages
        self.on_call = on_call
        self._encode = encode
        self._new_id = new_id
        self.beside = beside

    @property
    def table(self) -> TableAddress:
        return TableAddress("played", self._files.location())

    def describe(self) -> str:
        return f"played table {self._files.location()}"

    def bind(self, place: SinkPlace) -> BoundSink:
        kind = _FileTable if self._stages == "files" else _RowTable
        return kind(self, place)

    def at(self, address: str) -> PlayedTable:
        """The same sink for a table beside this one."""
        folder = None if self.beside is None else self.beside.name_at(address)
        if self.beside is None or not folder:
            raise SinkFailed(f"{self.describe()} knows of no table at {address}")
        return PlayedTable(
            self.beside.at(folder),
            self._stages,
            on_call=self.on_call,
            encode=self._encode,
            new_id=self._new_id,
            beside=self.beside,
        )

    # -- what it shows ----------------------------------------------------------------------------

    def versions(self) -> list[Version]:
        """All changes, oldest first."""
        return [self._read(name) for name in self._files.names_in(_LOG)]

    def newest(self) -> Version | None:
        names = self._files.names_in(_LOG)
        return self._read(names[-1]) if names else None

    def _read(self, name: str) -> Version:
        data = self._files.read(f"{_LOG}/{name}")
        assert data is not None, "nobody deletes a version"
        return _decoder.decode(data)

    def rows_of(self, version: Version) -> PlayedRows:
        """What a version has added."""
        return joined(decode_rows(self._files.read(name) or b"") for name in version.data)

    def visible(self) -> PlayedRows:
        """What a reader sees, in the order in which it became visible."""
        return joined(decode_rows(data) for data in self.data)

    @property
    def data(self) -> list[bytes]:
        """The files that a reader sees."""
        newest = len(self._files.names_in(_LOG))
        return [self._files.read(name) or b"" for name in self.shown_at(newest)]

    @staticmethod
    def _after(shown: list[tuple[str, ...]], version: Version) -> tuple[str, ...]:
        """The files that a reader sees after a version. `shown`: those after the ones before it."""
        if version.copies is not None:
            return version.data
        return (*shown[-1], *version.data) if version.shows is None else shown[version.shows]

    def shown_at(self, number: int) -> tuple[str, ...]:
        """The files that a reader of a version sees, by their names."""
        shown: list[tuple[str, ...]] = [()]
        for version in self.versions()[:number]:
            shown.append(self._after(shown, version))
        return shown[-1]

    def facts(self, owner: str) -> SinkFacts:
        """What it says of an owner, without being asked through the contract."""
        newest = self.newest()
        record = OwnerRecord() if newest is None else newest.owners.get(owner, OwnerRecord())
        return SinkFacts(record.epoch, record.fence, record.next_batch)

    # -- changing it ------------------------------------------------------------------------------

    def create(self) -> None:
        """Make it, unless it is there."""
        unique = self._new_id()
        self._files.create(_name(1), msgspec.json.encode(Version(unique, unique)))

    def change(self, owner: str, changed: Callable[[OwnerRecord], Version | None]) -> bool:
        """Add the version that `changed` makes of what is known of an owner, looking again whenever another was faster.

        Only its `owners`, `id` and `table` are still to be filled in. None: there is nothing to change.
        """
        while True:
            number = len(self._files.names_in(_LOG))
            if number == 0:
                raise SinkFailed(f"{self.describe()} is gone")
            before = self._read(f"{number:06d}.json")
            version = changed(before.owners.get(owner, OwnerRecord()))
            if version is None:
                return False
            owners = {**before.owners, **version.owners}
            version = msgspec.structs.replace(version, id=self._new_id(), table=before.table, owners=owners)
            self._files.create(_name(number + 1), msgspec.json.encode(version))
            # Neither an answer that says so nor one that does not proves who has created it.
            if self._read(f"{number + 1:06d}.json").id == version.id:
                return True


class _BoundTable:
    """What both kinds have."""

    def __init__(self, sink: PlayedTable, place: SinkPlace) -> None:
        self._sink = sink
        self._files = sink._files
        self._place = place

    @property
    def place(self) -> SinkPlace:
        return self._place

    @property
    def table(self) -> TableAddress:
        return self._sink.table

    def describe(self) -> str:
        return self._sink.describe()

    def identity(self) -> str | None:
        newest = self._sink.newest()
        return None if newest is None else newest.table

    def check_table(self, schema: StructType, output_mode: str) -> bool:  # noqa: ARG002 - it takes any rows
        newest = self._sink.newest()
        if newest is not None:
            self._refuse_another_root(newest.owners.get(self._place.owner, OwnerRecord()))
        return newest is not None

    def prepare_table(self, schema: StructType) -> None:  # noqa: ARG002
        self._sink.create()

    def claim(self) -> None:
        self._sink.on_call("claim")

        def claimed(record: OwnerRecord) -> Version | None:
            self._refuse_another_root(record)
            return None if record.root else self._version(msgspec.structs.replace(record, root=self._place.root))

        self._sink.change(self._place.owner, claimed)

    def facts(self) -> SinkFacts:
        self._sink.on_call("facts")
        return msgspec.structs.replace(self._sink.facts(self._place.owner), is_anothers=self._is_anothers())

    def _is_anothers(self) -> bool:
        newest = self._sink.newest()
        record = OwnerRecord() if newest is None else newest.owners.get(self._place.owner, OwnerRecord())
        return record.root not in ("", self._place.root)

    def fence(self, generation: int) -> None:
        self._sink.on_call("fence")

        def fenced(record: OwnerRecord) -> Version | None:
            self._refuse_another_root(record)
            if record.fence >= generation:
                return None
            return self._version(msgspec.structs.replace(record, fence=generation), generation=generation)

        self._sink.change(self._place.owner, fenced)
        self._sink.on_call("fenced")

    def check_commit(self, committable: Committable) -> None:  # noqa: ARG002 - it takes any rows
        self._sink.on_call("check_commit")

    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        self._sink.on_call("commit")

        def committed(record: OwnerRecord) -> Version | None:
            self._refuse_another_root(record)
            if permit.generation < record.fence:
                raise Fenced(f"{self.describe()} was fenced at generation {record.fence}: {permit!r} comes too late")
            refuse_put_back(self.describe(), self._place, record.epoch, record.next_batch, committable)
            if permit.epoch <= record.epoch:
                return None
            data = self._shown(committable, record.next_batch)
            next_batch = max(record.next_batch, committable.through_batch + 1)
            after = msgspec.structs.replace(record, epoch=permit.epoch, next_batch=next_batch, counted_by="")
            return self._version(after, epoch=permit.epoch, generation=permit.generation, data=data)

        is_new = self._sink.change(self._place.owner, committed)
        self._sink.on_call("committed")
        return CommitAnswer.COMMITTED if is_new else CommitAnswer.ALREADY

    def look_back(self, to: Manifest, *, takes_over: bool = False) -> SettingBack:  # noqa: ARG002 - it tells the same
        number, _ = self._then(self._sink, to)
        return SettingBack(len(self._sink.versions()), number, is_anothers=self._is_anothers())

    def set_back(self, to: Manifest, generation: int, *, discards_others: bool, takes_over: bool = False) -> None:
        del discards_others  # nobody else writes
        self._sink.on_call("set_back")

        def back(record: OwnerRecord) -> Version | None:
            if not takes_over:
                self._refuse_another_root(record)
            if self._is_done(record, generation):
                return None
            number, version = self._then(self._sink, to)
            then = self._taken_over(version.owners.get(self._place.owner, OwnerRecord()), generation)
            return msgspec.structs.replace(self._version(then, generation=generation), shows=number)

        self._sink.change(self._place.owner, back)
        self._sink.on_call("was_set_back")

    def _is_done(self, record: OwnerRecord, generation: int) -> bool:
        return record.set_back >= generation and record.root == self._place.root

    def _taken_over(self, record: OwnerRecord, generation: int) -> OwnerRecord:
        root, counted_by = self._place.root, record.counted_by or record.root
        counted_by = "" if counted_by == root else counted_by
        return msgspec.structs.replace(record, root=root, fence=generation, set_back=generation, counted_by=counted_by)

    def _then(self, table: PlayedTable, to: Manifest) -> tuple[int, Version]:
        """The newest version of a table that shows all of a checkpoint, and nothing later."""
        stage = to.stages.get(self._place.stage)
        sealed = (
            Committable(-1) if stage is None or stage.committable is None else decode_committable(stage.committable)
        )
        for number, version in reversed(list(enumerate(table.versions(), start=1))):
            record = version.owners.get(self._place.owner, OwnerRecord())
            # Epochs of another lineage may be smaller though more is shown.
            is_shown = sealed.last_with_rows < record.next_batch <= sealed.through_batch + 1
            if is_shown and not self._is_later(record, to):
                return number, version
        raise CheckpointNotVisible(f"{table.describe()} has no version that shows epoch {to.shown_epoch}")

    def _is_later(self, record: OwnerRecord, to: Manifest) -> bool:
        """Epochs are numbers of a root. What a root was brought lies before all of its own."""
        wanted = to.counted_by(self._place.root)
        if not record.root or wanted == (record.counted_by or record.root):
            return record.epoch > to.shown_epoch
        return record.root != wanted

    # -- the copy of another ----------------------------------------------------------------------

    def look_at_copy(
        self, source: TableAddress, to: Manifest, *, replaces: bool, since: int | None = None
    ) -> SettingBack:
        del since  # nobody else writes
        self._then(self._sink.at(source.address), to)
        if not replaces:
            self._refuse_used()
        return SettingBack(len(self._sink.versions()) or None, is_anothers=self._is_anothers())

    def show_copy(
        self, source: TableAddress, to: Manifest, generation: int, *, replaces: bool, since: int | None = None
    ) -> None:
        del since  # nobody else writes
        self._sink.on_call("show_copy")
        other = self._sink.at(source.address)
        if not replaces:
            self._sink.create()

        def copied(record: OwnerRecord) -> Version | None:
            if self._is_done(record, generation):
                return None
            if not replaces:
                self._refuse_used()
            number, version = self._then(other, to)
            sharing = {
                f"{self._place.pipeline}/{name}" for name, shape in to.shape.items() if shape.table == self.table
            }
            # Of one that had written nothing there is no record, and nothing else tells that this was done.
            owners = {
                owner: self._taken_over(version.owners.get(owner, OwnerRecord()), generation)
                for owner in {*sharing, self._place.owner}
            }
            made = self._version(OwnerRecord(), generation=generation, data=self._copies(other, number, generation))
            return msgspec.structs.replace(made, owners=owners, copies=source.address)

        self._sink.change(self._place.owner, copied)
        self._sink.on_call("has_shown_copy")

    def _refuse_used(self) -> None:
        """A try before may have made it, and no more."""
        newest = self._sink.newest()
        if newest is not None and (newest.owners or self._sink.data):
            raise SinkFailed(f"{self.describe()} is there already")

    def _copies(self, other: PlayedTable, number: int, generation: int) -> tuple[str, ...]:
        """Under names that no other root, or later decision of this one, would give."""
        names = other.shown_at(number)
        targets = tuple(f"data/copied/{self._place.root}/{generation:06d}/{each:06d}" for each in range(len(names)))
        for name, target in zip(names, targets, strict=True):
            self._files.keep(target, other._files, name)
        return targets

    def forget_staged(self, before_generation: int) -> None:
        self._sink.on_call("forget_staged")
        folder = f"{_STAGED}/{self._place.owner}"
        for name in self._files.names_in(folder):
            if int(name) < before_generation:
                clear(self._files, f"{folder}/{name}")

    def _version(
        self, record: OwnerRecord, *, epoch: int = 0, generation: int = 0, data: tuple[str, ...] = ()
    ) -> Version:
        owner = self._place.owner
        return Version("", "", {owner: record}, owner, epoch, generation, data)

    def _refuse_another_root(self, record: OwnerRecord) -> None:
        if record.root and record.root != self._place.root:
            raise foreign_table(self.describe(), self._place, "take another table")

    def _shown(self, committable: Committable, next_batch: int) -> tuple[str, ...]:
        """Keep what lies in batches that the table does not show yet. Returns the names."""
        raise NotImplementedError

    def _keep(self, staged: Iterable[tuple[int, str | None]]) -> tuple[str, ...]:
        """`staged`: batches and names. A second try finds them kept."""
        kept: list[str] = []
        for batch, name in staged:
            if name is None or not self._files.exists(name):
                raise SinkFailed(f"{self.describe()}: what batch {batch} of {self._place.owner} has staged is gone")
            inside = name.removeprefix(f"{_STAGED}/{self._place.owner}/")
            # Generations are numbers of a root.
            target = f"data/{self._place.owner}/{self._place.root}/{inside}"
            self._files.keep(target, self._files, name)
            kept.append(target)
        return tuple(kept)

    def _folder(self, generation: int) -> str:
        return f"{_STAGED}/{self._place.owner}/{generation:06d}"


class _FileTable(_BoundTable):
    """Spark stages its files."""

    partition_by: Final = ()
    folders_by: Final = ()

    @property
    def staging(self) -> Files:
        return self._files.at(f"{_STAGED}/{self._place.owner}")

    def _shown(self, committable: Committable, next_batch: int) -> tuple[str, ...]:
        refuse_foreign(self.describe(), self._place, committable.batches)
        files = [file for file in committable.files if file.batch >= next_batch]
        return self._keep((file.batch, self._files.name_at(file.path)) for file in files)


class _RowTable(_BoundTable):
    """The sink itself stages each batch: whoever runs the query hands it the rows."""

    def open_staging(self, generation: int, schema: StructType) -> None:  # noqa: ARG002 - it takes any rows
        """That it may stage is told as long as it does."""
        self._files.write(f"{self._folder(generation)}/open", b"")

    def staged_generation(self) -> int:
        return max(map(int, self._files.names_in(f"{_STAGED}/{self._place.owner}")), default=0)

    def stage(self, generation: int, batch: int, frame: Any) -> int:
        """`frame` is what the query hands on: of a played one, its `PlayedRows`."""
        self._sink.on_call("stage")
        self._files.write(f"{self._folder(generation)}/{batch:06d}.parquet", self._sink._encode(frame))
        return int(frame.count() if callable(frame.count) else frame.count)

    def _shown(self, committable: Committable, next_batch: int) -> tuple[str, ...]:
        refuse_foreign(self.describe(), self._place, committable.files)
        return self._keep((each.batch, self._name(each)) for each in committable.batches if each.batch >= next_batch)

    def _name(self, staged: StagedBatch) -> str:
        return f"{self._folder(staged.generation)}/{staged.batch:06d}.parquet"


def _name(number: int) -> str:
    return f"{_LOG}/{number:06d}.json"
