"""A sink as a user may write one: a table in the memory of this process, described and bound by one class."""

from __future__ import annotations

import copy
import importlib
import threading
from collections import Counter
from io import BytesIO
from typing import TYPE_CHECKING, Any

import msgspec

from tidegate.errors import Fenced, SinkFailed
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace, StagedFile
from tidegate.sinks.staging import foreign_table, forget_generations, refuse_foreign, refuse_gone, refuse_put_back
from tidegate.storage.files import Files
from tidegate.storage.manifest import TableAddress

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class Record(msgspec.Struct):
    root: str = ""
    epoch: int = 0
    fence: int = 0
    next_batch: int = 0


class Rows(msgspec.Struct):
    """A table, and what it remembers of its owners in the same place as the rows."""

    is_there: bool = False
    rows: Counter[tuple[int, str]] = msgspec.field(default_factory=Counter)
    owners: dict[str, Record] = {}


class OwnTable:
    is_exactly_once = True
    partition_by = folders_by = ()
    place: SinkPlace
    staging: Files
    turn = threading.Lock()

    def __init__(self, name: str, tables: dict[str, Rows]) -> None:
        self._name = name
        self._tables = tables
        tables.setdefault(name, Rows())

    def bind(self, place: SinkPlace) -> OwnTable:
        bound = copy.copy(self)
        bound.place = place
        bound.staging = place.files
        return bound

    def describe(self) -> str:
        return f"own table {self._name}"

    @property
    def table(self) -> TableAddress:
        return TableAddress("own", self._name)

    def identity(self) -> str | None:
        return self._name if self._rows.is_there else None

    @property
    def _rows(self) -> Rows:
        return self._tables[self._name]

    def _record(self) -> Record:
        """The owner's. Refuses that of another root."""
        record = self._rows.owners.setdefault(self.place.owner, Record())
        if record.root not in ("", self.place.root):
            raise foreign_table(self.describe(), self.place, "delete it")
        return record

    def check_table(self, _schema: StructType, _output_mode: str) -> bool:
        self._record()
        return self._rows.is_there

    def prepare_table(self, _schema: StructType) -> None:
        self._rows.is_there = True

    def claim(self) -> None:
        with self.turn:
            self._record().root = self.place.root

    def facts(self) -> SinkFacts:
        record = self._record()
        return SinkFacts(record.epoch, record.fence, record.next_batch)

    def fence(self, generation: int) -> None:
        with self.turn:
            record = self._record()
            record.fence = max(record.fence, generation)

    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        refuse_foreign(self.describe(), self.place, committable.batches)
        with self.turn:
            record = self._record()
            if not self._rows.is_there:
                raise SinkFailed(f"{self.describe()} is gone")
            if record.fence > permit.generation:
                raise Fenced(f"{self.describe()} was fenced by generation {record.fence}")
            refuse_put_back(self.describe(), self.place, record.epoch, record.next_batch, committable)
            if record.epoch >= permit.epoch:
                return CommitAnswer.ALREADY
            fresh = [file for file in committable.files if file.batch >= record.next_batch and file.rows]
            refuse_gone(self.describe(), self.place, self.staging, fresh)
            for file in fresh:
                self._rows.rows.update((row["id"], row["value"]) for row in self._staged(file))
            record.epoch = permit.epoch
            record.next_batch = max(record.next_batch, committable.through_batch + 1)
            return CommitAnswer.COMMITTED

    def _staged(self, file: StagedFile) -> list[dict[str, Any]]:
        data = self.staging.read(self.staging.name_at(file.path) or "")
        rows: list[dict[str, Any]] = (
            importlib.import_module("pyarrow.parquet").read_table(BytesIO(data or b"")).to_pylist()
        )
        return rows

    def forget_staged(self, before_generation: int) -> None:
        forget_generations(self.staging, before_generation)
