"""Bounds of the values in a file's columns: what a table's log says of its files, and what that tells of them.

A reader of the table skips files by them, and so does a commit by key: a file whose bounds have nothing in common with
those of the new rows holds none of their keys.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import msgspec

from tidegate.storage.parquet import read_footer

_LONGEST: Final = 64
"""Of a string in the log."""
_MILLISECOND: Final = timedelta(milliseconds=1)
_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)
_COARSEST: Final = timedelta(seconds=1)
"""How far a bound of another writer's may be off: they cut microseconds, and not all of them round up."""


class Bounds(msgspec.Struct, frozen=True):
    """Of the values of one column. Without `least` and `most` there are no values, only nulls."""

    least: Any
    most: Any
    nulls: int | None
    """How many; None: not known."""

    def meets(self, other: Bounds) -> bool:
        """Whether one value, or null, may be in both."""
        if self.nulls != 0 and other.nulls != 0:
            return True
        if self.least is None or other.least is None:
            return False
        return bool(self.least <= other.most and other.least <= self.most)


def may_hold(file: Mapping[str, Bounds], wanted: Mapping[str, Bounds]) -> bool:
    """Whether a file with these bounds may have a row whose values are all within those."""
    return all(file[name].meets(each) for name, each in wanted.items() if name in file)


# -- of one file, from its footer ------------------------------------------------------------------


class _Column(msgspec.Struct, frozen=True):
    """A column that is in no list and no map, and its statistics by row group."""

    path: tuple[str, ...]
    """Its name, after those of the structs that it is in."""
    kind: Any
    groups: list[Any]
    by_spark: bool

    @property
    def is_bounded(self) -> bool:
        """Whether Delta has bounds of columns of this type."""
        types = importlib.import_module("pyarrow").types
        return not (types.is_binary(self.kind) or types.is_large_binary(self.kind))

    @property
    def nulls(self) -> int | None:
        """How many; None: not known."""
        is_counted = all(each is not None and each.has_null_count for each in self.groups)
        return sum(each.null_count for each in self.groups) if is_counted else None

    def ends(self) -> tuple[Any, Any] | None:
        """The smallest and the largest value. None: there is no value, or they are not known for sure."""
        if importlib.import_module("pyarrow").types.is_floating(self.kind) and not self.by_spark:
            return None  # others leave NaN out of the bounds, and it is in no one place of the order
        if not all(each is not None and (each.has_min_max or not each.num_values) for each in self.groups):
            return None
        try:
            values = [value for each in self.groups if each.has_min_max for value in (each.min, each.max)]
        except (UnicodeDecodeError, OverflowError, ValueError):
            return None  # Spark's strings may hold any bytes, its times go beyond the year 9999
        if any(isinstance(each, float) and not math.isfinite(each) for each in values):
            return None  # JSON has no infinity either
        return (min(values), max(values)) if values else None


def statistics(footer: Any) -> str:
    """By its footer, a file's row count, nulls and bounds, as Delta's log has them: the bounds of all columns, or none.

    Where there are bounds, deltalake takes one that is missing for null, and then finds no row of the file.
    """
    nulls: dict[str, Any] = {}
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    is_whole = True
    for column in _columns(footer):
        if column.nulls is not None:
            _put(nulls, column.path, column.nulls)
        if column.is_bounded:
            ends = column.ends()
            low, high = (None, None) if ends is None else (_in_json(ends[0]), _in_json(ends[1], up=True))
            has_both = low is not None and high is not None
            is_whole &= has_both or column.nulls == footer.num_rows
            _put(least, column.path, low if has_both else None)
            _put(most, column.path, high if has_both else None)
    bounds = {"minValues": least, "maxValues": most} if is_whole else {}
    return msgspec.json.encode({"numRecords": footer.num_rows, **bounds, "nullCount": nulls}).decode()


def _put(into: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """A column's value under its name; of one in a struct, in an object, which is there also without a value."""
    for name in path[:-1]:
        into = into.setdefault(name, {})
    if value is not None:
        into[path[-1]] = value


def bounds_of_files(paths: Iterable[Path], columns: Sequence[str]) -> dict[str, Bounds]:
    return bounds_of([read_footer(path) for path in paths], columns)


def bounds_of(footers: Sequence[Any], columns: Sequence[str]) -> dict[str, Bounds]:
    """Bounds of the values in all of the files together, of those columns of which every file tells."""
    rows = sum(footer.num_rows for footer in footers)
    every = [{column.path: column for column in _columns(footer)} for footer in footers]
    together: dict[str, Bounds] = {}
    for name in columns:
        found = [each[name,] for each in every if (name,) in each]
        if len(found) < len(every) or not found:
            continue
        column = msgspec.structs.replace(found[0], groups=[group for each in found for group in each.groups])
        ends = column.ends()
        if column.nulls is not None and column.nulls == rows:
            together[name] = Bounds(None, None, column.nulls)
        elif ends is not None and _is_ordered(ends[0]):
            # As the value of a partition an empty string is null.
            together[name] = Bounds(*ends, None if ends[0] == "" else column.nulls)
    return together


def _columns(footer: Any) -> Iterator[_Column]:
    by_spark = str(footer.created_by).startswith("parquet-mr ")
    leaves = (index for index in range(footer.num_columns) if not footer.schema.column(index).max_repetition_level)
    for index, (path, kind) in zip(leaves, _leaves(footer.schema.to_arrow_schema()), strict=True):
        groups = [footer.row_group(group).column(index).statistics for group in range(footer.num_row_groups)]
        yield _Column(path, kind, groups, by_spark)


def _leaves(fields: Iterable[Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path and type of each column that is in no list and no map, in a footer's order. A name may have dots."""
    types = importlib.import_module("pyarrow").types
    for field in fields:
        path = (*above, field.name)
        if types.is_struct(field.type):
            yield from _leaves(field.type.fields, path)
        elif not types.is_nested(field.type):
            yield path, field.type


def _is_ordered(value: Any) -> bool:
    """Whether values of this kind have one order, the same for everybody, and are in the log as they are."""
    if isinstance(value, datetime):
        return value.tzinfo is not None
    return isinstance(value, int | date | str)


def _in_json(value: Any, *, up: bool = False) -> Any:
    """A bound as the log has it, not above the value or, where it goes `up`, not below; None where there is none."""
    if isinstance(value, datetime):
        return _cut_time(value, up=up)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str):
        return _cut(value, up=up)
    if isinstance(value, Decimal):
        return msgspec.Raw(format(value, "f"))  # all its digits
    if isinstance(value, float):
        return value or (0.0 if up else -0.0)  # to some readers, -0.0 is the smaller of the two
    return value


def _cut_time(value: datetime, *, up: bool) -> str:
    """To milliseconds, which is all that some readers look at."""
    exact = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    cut = exact.replace(microsecond=exact.microsecond // 1000 * 1000)
    if up and cut < exact:
        # The calendar's last one has no next.
        cut = exact if cut > _LAST - _MILLISECOND else cut + _MILLISECOND
    text = cut.replace(tzinfo=None).isoformat(timespec="microseconds" if cut.microsecond % 1000 else "milliseconds")
    return text if value.tzinfo is None else f"{text}Z"


def _cut(text: str, *, up: bool) -> str:
    """To the length of a string in the log: its beginning or, where it goes `up`, what comes next after that."""
    cut = text[:_LONGEST]
    if not up or cut == text:
        return cut
    while cut:
        following = ord(cut[-1]) + 1
        if following <= sys.maxunicode:
            # What UTF-8 cannot hold lies between these two.
            return cut[:-1] + ("\ue000" if following == 0xD800 else chr(following))
        cut = cut[:-1]
    return text


# -- of a table's files, from its log --------------------------------------------------------------


def bounds_in_log(actions: Any, partition_by: Sequence[str], columns: Sequence[str]) -> list[dict[str, Bounds]]:
    """For each file of a table's `get_add_actions()`, as a pyarrow table, the bounds of those columns that it has."""
    found: list[dict[str, Bounds]] = [{} for _ in range(actions.num_rows)]
    counts = actions.column("num_records").to_pylist()
    for name in columns:
        kinds = ("partition",) if name in partition_by else ("min", "max", "null_count")
        fields = [field for kind in kinds if (field := _field(actions, kind, name)) is not None]
        if len(fields) < len(kinds):
            continue
        bounds: Iterable[Bounds | None]
        if name in partition_by:
            bounds = (Bounds(value, value, int(value is None)) for value in fields[0])
        else:
            bounds = (_logged(*each) for each in zip(*fields, counts, strict=True))
        for file, each in zip(found, bounds, strict=True):
            if each is not None:
                file[name] = each
    return found


def _field(actions: Any, struct: str, name: str) -> list[Any] | None:
    """One column's value for each file, in a column of structs; None where they cannot be read."""
    if struct in actions.schema.names:
        index = actions.schema.field(struct).type.get_field_index(name)
        if index >= 0:
            with suppress(OverflowError, ValueError):  # a time beyond the year 9999
                fields = importlib.import_module("pyarrow.compute").struct_field(actions.column(struct), [index])
                return list(fields.to_pylist())
    return None


def _logged(least: Any, most: Any, nulls: int | None, count: int | None) -> Bounds | None:
    if least is None or most is None:
        return Bounds(None, None, nulls) if nulls is not None and nulls == count else None
    if isinstance(least, str) or not _is_ordered(least):
        return None  # a string may have been cut short
    if isinstance(least, datetime):
        return Bounds(max(least, _FIRST + _COARSEST) - _COARSEST, min(most, _LAST - _COARSEST) + _COARSEST, nulls)
    return Bounds(least, most, nulls)
