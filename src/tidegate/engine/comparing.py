"""Comparing two pipelines, table by table, where both have read the same input.

The tables of a checkpoint show exactly what its sources had read (if it was aligned). So of two roots, a fork and what
it was forked from perhaps, two checkpoints whose sources stand at the same positions have tables that show the same
input: what differs was made otherwise. Nothing is changed, claimed or locked in either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from tidegate.engine.inspecting import reading_session
from tidegate.engine.up_to import source_positions
from tidegate.errors import (
    CheckpointNotVisible,
    DamagedCheckpoint,
    NoCommonPosition,
    UnknownCheckpoint,
    UnknownState,
)
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.sinks.delta.reading import TableAt, TablesAt, tables_at
from tidegate.spark.positions import Order, Position, compared, told
from tidegate.spark.sources import are_same
from tidegate.spark.table_diff import RowCounts, SharedColumns, TableDiff
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest
from tidegate.storage.places import RootGiven, place_of

if TYPE_CHECKING:
    import os

    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger("tidegate")

_DELTA: Final = "delta"


class _At(msgspec.Struct, frozen=True):
    """A checkpoint of one of the two roots, and where its sources stand."""

    root: InspectedRoot
    record: CheckpointCompleted
    manifest: Manifest
    positions: dict[str, Position]

    @property
    def name(self) -> str:
        return checkpoint_name(self.record.checkpoint_id)

    def tables(self) -> TablesAt:
        return tables_at(self.root, self.record)

    def sinks(self) -> dict[str, str]:
        """The kind of table of each sink, by name."""
        shapes = ((name, each) for name, each in self.manifest.shape.items() if each.kind == "sink")
        return {name: "unknown" if each.table is None else each.table.kind for name, each in shapes}

    def told(self) -> str:
        positions = "; ".join(f"{name}: {told(position)}" for name, position in self.positions.items())
        return f"{self.root.place} at {self.name} ({positions})"


class TableComparison:
    """How the rows of one sink's table differ. Columns that only one table has, or that have different types, are not
    compared; the counts are of rows without them."""

    def __init__(self, tables: tuple[TableAt, TableAt], diff: TableDiff) -> None:
        self.table, self.other_table = tables
        self._diff = diff
        self._counts: RowCounts | None = None

    @property
    def columns(self) -> SharedColumns:
        return self._diff.columns

    @property
    def _counted(self) -> RowCounts:
        if self._counts is None:
            self._counts = self._diff.counts()
        return self._counts

    @property
    def only_in_root(self) -> int:
        return self._counted.only_first

    @property
    def only_in_other(self) -> int:
        return self._counted.only_second

    @property
    def in_both(self) -> int:
        return self._counted.both

    @property
    def is_equal(self) -> bool:
        """No row differs, and no column has another type. A column that only one has does not count."""
        return not self.only_in_root and not self.only_in_other and not self.columns.types

    def rows_only_in_root(self) -> DataFrame:
        return self._diff.only_first()

    def rows_only_in_other(self) -> DataFrame:
        return self._diff.only_second()


class Comparison(Mapping[str, TableComparison]):
    """Two pipelines at two checkpoints, by the names of the sinks that both have as Delta tables.

    `apart`: sources that do not stand at the same position, which can only be where both checkpoints were named.
    `not_compared`: sinks that are not tables of that kind, with what they are. `watermarks`: in ms, of both.
    """

    def __init__(self, first: _At, second: _At, tables: dict[str, TableComparison]) -> None:
        self._tables = tables
        self.checkpoint, self.other_checkpoint = first.name, second.name
        self.positions = {name: told(each) for name, each in first.positions.items()}
        self.apart = _apart(first, second)
        self.sources_only_in_root = _without(first.positions, second.positions)
        self.sources_only_in_other = _without(second.positions, first.positions)
        mine, its = first.sinks(), second.sinks()
        self.sinks_only_in_root, self.sinks_only_in_other = _without(mine, its), _without(its, mine)
        both = {name: kind for name, kind in mine.items() if name in its}
        self.not_compared = {name: kind for name, kind in both.items() if {kind, its[name]} != {_DELTA}}
        self.watermarks = first.manifest.min_watermark_ms, second.manifest.min_watermark_ms

    @property
    def is_equal(self) -> bool:
        return all(each.is_equal for each in self.values())

    def __getitem__(self, sink: str) -> TableComparison:
        return self._tables[sink]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def compare(
    root: str | os.PathLike[str],
    other: str | os.PathLike[str],
    checkpoint: str | int | None = None,
    other_checkpoint: str | int | None = None,
    *,
    tables: Sequence[str] = (),
    spark: SparkSession | None = None,
) -> Comparison:
    """The Delta tables of two pipelines, compared where both have read the same input.

    That is at the newest pair of retained, aligned checkpoints, one of each root, whose sources stand at the same
    positions; where one or both are named (42 or "ckpt-000042"), at those. `NoCommonPosition` says where each stands if
    there is no such pair. `tables` are the sinks to compare; left out, all that both have.

    `spark` is the session to read with; left out, it is the one that the process has, or one that is made.
    """
    pair = find_pair(root, other, checkpoint, other_checkpoint, tables)
    return pair(reading_session(spark))


def find_pair(
    root: RootGiven,
    other: RootGiven,
    checkpoint: str | int | None,
    other_checkpoint: str | int | None,
    tables: Sequence[str],
) -> Callable[[SparkSession], Comparison]:
    """What is compared, found without Spark. Returns what compares it with a session."""
    mine = _Side(InspectedRoot(place_of(root)), checkpoint)
    its = _Side(InspectedRoot(place_of(other)), other_checkpoint)
    first, second, shown = _pair(mine, its)
    chosen = _chosen(first, second, tables)

    def with_session(session: SparkSession) -> Comparison:
        found: dict[str, TableComparison] = {}
        for name in chosen:
            both = shown[0][name], shown[1][name]
            found[name] = TableComparison(both, TableDiff(both[0].to_spark(session), both[1].to_spark(session)))
        return Comparison(first, second, found)

    return with_session


class _Side:
    """One of the two roots, and the checkpoints of it that may be compared, newest first."""

    def __init__(self, root: InspectedRoot, named: str | int | None) -> None:
        self.root = root
        self.is_named = named is not None
        self._read: dict[int, _At | None] = {}
        if named is None:
            self.records = [each for each in root.current() if each.aligned][::-1]
            return
        number = checkpoint_id_of(str(named))
        if number is None:
            raise UnknownCheckpoint(f"{named!r} names no checkpoint; write 42 or {checkpoint_name(42)!r}")
        self.records = [root.find(number)]

    def all(self) -> Iterator[_At]:
        for record in self.records:
            number = record.checkpoint_id
            if number not in self._read:
                self._read[number] = self._at(record)
            if (found := self._read[number]) is not None:
                yield found

    def _at(self, record: CheckpointCompleted) -> _At | None:
        """None: it is gone by now, or damaged, and others may do."""
        try:
            manifest = self.root.manifest(record)
            return _At(self.root, record, manifest, source_positions(self.root, manifest))
        except (UnknownCheckpoint, DamagedCheckpoint) as error:
            if self.is_named and self.root.is_retained(record.checkpoint_id):
                raise
            if self.root.is_retained(record.checkpoint_id):
                _log.warning("%s is passed over: %s", checkpoint_name(record.checkpoint_id), error)
            return None


def _pair(mine: _Side, its: _Side) -> tuple[_At, _At, tuple[TablesAt, TablesAt]]:
    hidden: CheckpointNotVisible | None = None
    for first in mine.all():
        for second in its.all():
            if not (mine.is_named and its.is_named) and _apart(first, second):
                continue
            try:
                return first, second, (first.tables(), second.tables())
            except CheckpointNotVisible as error:
                hidden = hidden or error
            except UnknownCheckpoint:
                continue  # the run has removed it meanwhile
    raise hidden or _no_pair(mine, its)


def _apart(first: _At, second: _At) -> dict[str, str]:
    """The sources of both that do not stand at one position, with how they stand."""
    common = [name for name in first.positions if name in second.positions]
    if not common:
        raise UnknownState(
            f"{first.told()} and {second.told()} have no source of one name: nothing tells whether they have read the "
            f"same"
        )
    found: dict[str, str] = {}
    for name in common:
        one, other = first.positions[name], second.positions[name]
        if not are_same(first.manifest.shape[name].streams, second.manifest.shape[name].streams):
            found[name] = "reads something else there"
        elif (order := compared(one, other)) is not Order.SAME:
            found[name] = f"{order.value} the other ({told(one)}; there {told(other)})"
    return found


def _no_pair(mine: _Side, its: _Side) -> NoCommonPosition:
    first, second = next(mine.all(), None), next(its.all(), None)
    for side, newest in ((mine, first), (its, second)):
        if newest is None:
            return NoCommonPosition(
                f"{side.root.place} retains no aligned checkpoint that could be compared; a run completes one "
                f"every interval"
            )
    assert first is not None
    assert second is not None
    one, other = mine.root.place, its.root.place
    how = "; ".join(f"source {name!r} of the first is {each}" for name, each in _apart(first, second).items())
    return NoCommonPosition(
        f"no two checkpoints that are retained have read the same: the newest are {first.told()} and {second.told()}"
        f"{': ' + how if how else ''}. What to do: bring the one that is behind to where the other stands, with "
        f"`tidegate run FILE --root {other} --up-to {one}`, or the other way round, and let the other retain its "
        f"checkpoints for so long (--retain 1h)"
    )


def _chosen(first: _At, second: _At, tables: Sequence[str]) -> list[str]:
    mine, its = first.sinks(), second.sinks()
    both = [name for name, kind in mine.items() if kind == _DELTA == its.get(name)]
    for name in tables:
        if name not in both:
            raise UnknownState(
                f"sink {name!r} is no Delta table of both {first.name} and {second.name}; these are: "
                f"{', '.join(both) or 'none'}"
            )
    if not both:
        raise UnknownState(f"{first.told()} and {second.told()} have no sink of one name that is a Delta table")
    return [name for name in both if name in tables or not tables]


def _without(some: Mapping[str, object], others: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(name for name in some if name not in others)
