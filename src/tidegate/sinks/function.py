"""Sinks that call a function with each epoch's rows: the user's own, one that prints, one that remembers.

The rows of an epoch are staged as Parquet files in the root, like any other's. When the epoch's checkpoint is decided,
the function is called with them, as a DataFrame, and with the epoch's number. That happens **at least once**: a crash
after the call and before it is remembered makes it happen again, with the same epoch and the very same rows. So a
function that writes under the epoch's number, or looks for it first, has its effect exactly once. Only the rows of a
checkpoint that is skipped, because it is damaged, come again under the numbers of later ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.errors import Fenced, InvalidPipeline, SinkFailed
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, SettingBack, SinkPlace, decode_committable
from tidegate.sinks.staging import (
    forget_generations,
    read_files,
    refuse_foreign,
    refuse_gone,
    refuse_put_back,
)
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, TableAddress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

KINDS: Final = frozenset({"function", "console", "memory"})
"""Of tables that are none: what is remembered of them lies in the root, whatever function is called."""
_RECORDS: Final = "records"
_SCHEMA: Final = "schema.json"


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is remembered of the calls.

    `calling` is the epoch that the function is called with, `calling_next_batch` the batch after its rows: so that a
    call that was interrupted is repeated as it was, though a later epoch may have been decided meanwhile. `writer` has
    no other record.
    """

    epoch: int = 0
    next_batch: int = 0
    fence: int = 0
    calling: int = 0
    calling_next_batch: int = 0
    writer: str = ""
    set_back: int = 0
    """The generation by which it was last set back."""

    def fenced_at(self, generation: int) -> _Record:
        # A call that was interrupted was for what is skipped now: there are no such rows to repeat it with.
        return _Record(self.epoch, self.next_batch, generation, set_back=self.set_back)

    def set_back_by(self, generation: int, epoch: int, next_batch: int) -> _Record:
        return _Record(min(self.epoch, epoch), min(self.next_batch, next_batch), generation, set_back=generation)

    def taken_over_by(self, generation: int, epoch: int, next_batch: int) -> _Record:
        """Another root has called the function up to there."""
        return _Record(epoch, next_batch, generation, set_back=generation)

    def about_to_call(self, epoch: int, next_batch: int) -> _Record:
        return msgspec.structs.replace(self, calling=epoch, calling_next_batch=next_batch)

    def called(self, epoch: int, next_batch: int) -> _Record:
        """Of two runs that call at once, the one that is behind takes nothing back."""
        done = msgspec.structs.replace(self, epoch=max(self.epoch, epoch), next_batch=max(self.next_batch, next_batch))
        return done if self.calling > epoch else msgspec.structs.replace(done, calling=0, calling_next_batch=0)


class _Records:
    """The records of one stage's calls, in the root: the newest counts.

    Each is created under the number after the one that it follows, if there is none yet: so nobody follows a record
    that was followed already, by a fence for instance. Those before it are removed. That may empty the number that
    somebody is about to create who has slept meanwhile: so what was created counts only if it is read back as newest.
    """

    def __init__(self, files: Files) -> None:
        self._files = files.at(_RECORDS)

    def newest(self) -> tuple[int, _Record]:
        """With its number; 0: there is none."""
        while names := self._files.names_in():
            data = self._files.read(names[-1])
            if data is not None:
                return int(names[-1].removesuffix(".json")), self._decoded(names[-1], data)
        return 0, _Record()

    def _decoded(self, name: str, data: bytes) -> _Record:
        try:
            return msgspec.json.decode(data, type=_Record)
        except msgspec.MsgspecError as error:
            raise SinkFailed(f"{self._files.location(name)} cannot be read: {error}") from error

    def follow(self, number: int, record: _Record) -> bool:
        """Write the record that follows the one of this number. False: another one does."""
        record = msgspec.structs.replace(record, writer=uuid.uuid4().hex)
        self._files.create(_name_of_record(number + 1), msgspec.json.encode(record))
        if self.newest() != (number + 1, record):
            return False
        self._files.delete(name for name in self._files.names_in() if name < _name_of_record(number + 1))
        return True

    def force(self, number: int) -> None:
        """The run that wrote a record may have been killed before it had forced its name."""
        if number:
            self._files.sync([_name_of_record(number)], missing_ok=True)


def _name_of_record(number: int) -> str:
    return f"{number:012d}.json"


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
        self.staging = place.files
        self._records = _Records(place.files)
        self._schema: StructType | None = None
        """The stage's columns, as they were checked."""

    def describe(self) -> str:
        return self.sink.describe()

    @property
    def table(self) -> TableAddress:
        return self.sink.table

    def identity(self) -> str | None:
        return None

    def check_table(self, schema: StructType, _output_mode: str) -> bool:
        """A function takes anything, and nothing has to be created for it."""
        self._schema = schema
        return True

    def prepare_table(self, schema: StructType) -> None:
        # So that an epoch's rows have the stage's columns, whatever files it consists of.
        self.place.files.write(_SCHEMA, schema.json().encode())

    def claim(self) -> None:
        """What is remembered and staged lies in the root, so it is no other's. A root into which a checkpoint was
        brought does not know the columns yet."""
        if self._schema is not None and not self.place.files.exists(_SCHEMA):
            self.prepare_table(self._schema)

    def facts(self) -> SinkFacts:
        _, record = self._records.newest()
        return SinkFacts(record.epoch, record.fence, record.next_batch)

    def fence(self, generation: int) -> None:
        while True:
            number, record = self._records.newest()
            if record.fence >= generation:
                self._records.force(number)
                return
            if self._records.follow(number, record.fenced_at(generation)):
                return

    def look_back(self, to: Manifest, *, takes_over: bool = False) -> SettingBack:  # noqa: ARG002 - it is no other's
        _, record = self._records.newest()
        if record.epoch <= to.shown_epoch:
            return SettingBack()
        return SettingBack(
            remains=f"{self.describe()} was called with epochs up to {record.epoch}, which is not undone: it is called "
            f"again, under other numbers, with what comes after {checkpoint_name(to.checkpoint_id)}"
        )

    def set_back(self, to: Manifest, generation: int, *, discards_others: bool, takes_over: bool = False) -> None:
        del discards_others  # nobody else calls it
        stage = to.stages.get(self.place.stage)
        sealed = None if stage is None or stage.committable is None else decode_committable(stage.committable)
        while True:
            number, record = self._records.newest()
            if record.set_back >= generation:
                self._records.force(number)
                return
            next_batch = 0 if sealed is None else sealed.through_batch + 1
            epoch = 0 if sealed is None else to.shown_epoch
            change = record.taken_over_by if takes_over else record.set_back_by
            if self._records.follow(number, change(generation, epoch, next_batch)):
                return

    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        refuse_foreign(self.describe(), self.place, committable.batches)
        number, record = self._records.newest()
        self._check_fence(record, permit)
        refuse_put_back(self.describe(), self.place, record.epoch, record.next_batch, committable)
        if record.epoch >= permit.epoch:
            self._records.force(number)
            return CommitAnswer.ALREADY
        if record.epoch < record.calling < permit.epoch:
            record = self._show(permit, record, record.calling, record.calling_next_batch, committable)
        self._show(permit, record, permit.epoch, committable.through_batch + 1, committable)
        return CommitAnswer.COMMITTED

    def _show(
        self, permit: CommitPermit, record: _Record, epoch: int, next_batch: int, committable: Committable
    ) -> _Record:
        next_batch = max(record.next_batch, next_batch)
        fresh = [file for file in committable.files if record.next_batch <= file.batch < next_batch and file.rows]
        if fresh:
            refuse_gone(self.describe(), self.place, self.staging, fresh)
            self._note(permit, lambda now: now.about_to_call(epoch, next_batch))
            self._call([file.path for file in fresh], epoch)
        return self._note(permit, lambda now: now.called(epoch, next_batch))

    def _note(self, permit: CommitPermit, change: Callable[[_Record], _Record]) -> _Record:
        """Change the record, unless a fence came since it was last read: a call may take long."""
        while True:
            number, now = self._records.newest()
            self._check_fence(now, permit)
            record = change(now)
            if self._records.follow(number, record):
                return record

    def _check_fence(self, record: _Record, permit: CommitPermit) -> None:
        if record.fence > permit.generation:
            raise Fenced(f"{self.describe()} was fenced by generation {record.fence}")

    def _call(self, files: list[str], epoch: int) -> None:
        from pyspark.sql.types import StructType

        if self.place.session is None:
            raise SinkFailed(f"{self.describe()} can be called only while the pipeline runs")
        found = self.place.files.read(_SCHEMA)
        if found is None:
            raise SinkFailed(f"{self.place.files.location(_SCHEMA)} is gone; start the pipeline again")
        schema = StructType.fromJson(msgspec.json.decode(found))
        self.sink.function(read_files(self.place.session, schema, files), epoch)

    def forget_staged(self, before_generation: int) -> None:
        forget_generations(self.staging, before_generation)


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
