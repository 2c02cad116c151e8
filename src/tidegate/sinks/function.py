"""Sinks that call a function with each epoch's rows: the user's own, one that prints, one that remembers.

The rows of an epoch are staged as Parquet files in the root, like any other's. When the epoch's checkpoint is decided,
the function is called with them, as a DataFrame, and with the epoch's number. That happens **at least once**: a crash
after the call and before it is remembered makes it happen again, with the same epoch and the very same rows. So a
function that writes under the epoch's number, or looks for it first, has its effect exactly once. Only the rows of a
checkpoint that is skipped, because it is damaged, come again under the numbers of later ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.errors import Fenced, InvalidPipeline, SinkFailed
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace
from tidegate.sinks.staging import (
    forget_generations,
    generation_folder,
    read_files,
    refuse_foreign,
    refuse_gone,
    refuse_put_back,
)
from tidegate.storage.disk import force, sync_names
from tidegate.storage.manifest import TableAddress
from tidegate.storage.system import naming

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

KINDS: Final = frozenset({"function", "console", "memory"})
"""Of tables that are none: what is remembered of them lies in the root, whatever function is called."""
_RECORD: Final = "record.json"
_SCHEMA: Final = "schema.json"


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is remembered of the calls, in the root.

    `calling` is the epoch that the function is called with, `calling_next_batch` the batch after its rows: so that a
    call that was interrupted is repeated as it was, though a later epoch may have been decided meanwhile.
    """

    epoch: int = 0
    next_batch: int = 0
    fence: int = 0
    calling: int = 0
    calling_next_batch: int = 0


def _name_of(function: object) -> str:
    """A name that is the same in every process: the text of an object often tells where in memory it is."""
    if isinstance(function, partial):
        return _name_of(function.func)
    return getattr(function, "__name__", None) or type(function).__name__


class ForeachBatch:
    """Calls `function(rows, epoch)` for each epoch that has rows, at least once."""

    is_exactly_once = False

    def __init__(self, function: Callable[[DataFrame, int], object]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name})"

    @property
    def _name(self) -> str:
        return _name_of(self.function)

    def describe(self) -> str:
        return f"function {self._name}"

    @property
    def table(self) -> TableAddress:
        return TableAddress("function", self._name)

    def bind(self, place: SinkPlace) -> BoundFunction:
        return BoundFunction(self, place)


class BoundFunction:
    """A function as one stage calls it."""

    partition_by = ()
    folders_by = ()

    def __init__(self, sink: ForeachBatch, place: SinkPlace) -> None:
        self.sink = sink
        self.place = place

    def describe(self) -> str:
        return self.sink.describe()

    @property
    def table(self) -> TableAddress:
        return self.sink.table

    def identity(self) -> str | None:
        return None

    def check_table(self, _schema: StructType, _output_mode: str) -> bool:
        """A function takes anything, and nothing has to be created for it."""
        return True

    def prepare_table(self, schema: StructType) -> None:
        # So that an epoch's rows have the stage's columns, whatever files it consists of.
        _write_whole(self.place, _SCHEMA, schema.json().encode())

    def claim(self) -> None:
        """What is remembered and staged lies in the root, so it is no other's."""

    def staging_folder(self, generation: int) -> Path:
        return generation_folder(self.place.folder, generation)

    def facts(self) -> SinkFacts:
        record = self._read()
        return SinkFacts(record.epoch, record.fence, record.next_batch)

    def fence(self, generation: int) -> None:
        record = self._read()
        if record.fence < generation:
            # A call that was interrupted was for what is skipped now: there are no such rows to repeat it with.
            self._write(_Record(record.epoch, record.next_batch, generation))
        else:
            self._force_found()

    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        refuse_foreign(self.describe(), self.place, committable.batches)
        record = self._read()
        self._check_fence(record, permit)
        refuse_put_back(self.describe(), self.place, record.epoch, record.next_batch, committable)
        if record.epoch >= permit.epoch:
            self._force_found()
            return CommitAnswer.ALREADY
        if record.epoch < record.calling < permit.epoch:
            record = self._show(permit, record, record.calling, record.calling_next_batch, committable)
        self._show(permit, record, permit.epoch, committable.through_batch + 1, committable)
        return CommitAnswer.COMMITTED

    def _show(
        self,
        permit: CommitPermit,
        record: _Record,
        epoch: int,
        next_batch: int,
        committable: Committable,
    ) -> _Record:
        next_batch = max(record.next_batch, next_batch)
        fresh = [file for file in committable.files if record.next_batch <= file.batch < next_batch and file.rows]
        if fresh:
            refuse_gone(self.describe(), self.place, fresh)
            calling = msgspec.structs.replace(record, calling=epoch, calling_next_batch=next_batch)
            self._note(permit, calling)
            self._call([file.path for file in fresh], epoch)
        return self._note(permit, _Record(epoch, next_batch))

    def _note(self, permit: CommitPermit, record: _Record) -> _Record:
        """Write a record, unless a fence came since the last one was read: a call may take long."""
        now = self._read()
        self._check_fence(now, permit)
        record = msgspec.structs.replace(record, fence=now.fence)
        self._write(record)
        return record

    def _check_fence(self, record: _Record, permit: CommitPermit) -> None:
        if record.fence > permit.generation:
            raise Fenced(f"{self.describe()} was fenced by generation {record.fence}")

    def _call(self, files: list[str], epoch: int) -> None:
        from pyspark.sql.types import StructType

        if self.place.session is None:
            raise SinkFailed(f"{self.describe()} can be called only while the pipeline runs")
        schema = StructType.fromJson(msgspec.json.decode((self.place.folder / _SCHEMA).read_bytes()))
        self.sink.function(read_files(self.place.session, schema, map(Path, files)), epoch)

    def forget_staged(self, before_generation: int) -> None:
        forget_generations(self.place.folder, before_generation)

    def _read(self) -> _Record:
        try:
            return msgspec.json.decode((self.place.folder / _RECORD).read_bytes(), type=_Record)
        except FileNotFoundError:
            return _Record()
        except msgspec.MsgspecError as error:
            raise SinkFailed(f"{self.place.folder / _RECORD} cannot be read: {error}") from error

    def _force_found(self) -> None:
        """The run that wrote the record may have been killed before it had forced its name."""
        if self.place.fsync:
            sync_names([self.place.folder / _RECORD])

    def _write(self, record: _Record) -> None:
        _write_whole(self.place, _RECORD, msgspec.json.encode(record))


def _write_whole(place: SinkPlace, name: str, data: bytes) -> None:
    """So that a reader sees all of it or nothing; after a loss of power too, and what it was before never again."""
    place.folder.mkdir(parents=True, exist_ok=True)
    hidden = place.folder / f".{name}.{os.getpid()}"
    with naming(place.folder / name), hidden.open("wb") as file:
        file.write(data)
        file.flush()
        if place.fsync:
            force(file.fileno())
    hidden.rename(place.folder / name)
    if place.fsync:
        sync_names([place.folder / name])


class Console(ForeachBatch):
    """Prints the first rows of each epoch, for trying things out. At least once, like any function."""

    def __init__(self, rows: int = 20) -> None:
        if rows < 1:
            raise InvalidPipeline(f"tidegate.Console prints at least one row of an epoch, not {rows}")
        self._rows = rows
        super().__init__(self._print)

    def describe(self) -> str:
        return "the console"

    @property
    def table(self) -> TableAddress:
        return TableAddress("console", "")

    def _print(self, rows: DataFrame, epoch: int) -> None:
        print(f"epoch {epoch}: {rows.count()} rows")
        rows.show(self._rows, truncate=False)


class Memory(ForeachBatch):
    """Keeps the rows in the memory of this process, for trying things out and for tests.

    A process that is started again has only what it has committed itself.
    """

    def __init__(self) -> None:
        self._epochs: dict[int, list[Any]] = {}
        super().__init__(self._remember)

    def describe(self) -> str:
        return "the memory of this process"

    @property
    def table(self) -> TableAddress:
        return TableAddress("memory", "")

    @property
    def rows(self) -> list[Any]:
        """All rows, in the order of their epochs."""
        return [row for epoch in sorted(self._epochs) for row in self._epochs[epoch]]

    @property
    def epochs(self) -> dict[int, list[Any]]:
        """The rows of each epoch."""
        return {epoch: list(rows) for epoch, rows in self._epochs.items()}

    def _remember(self, rows: DataFrame, epoch: int) -> None:
        self._epochs[epoch] = rows.collect()
