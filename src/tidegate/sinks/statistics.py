"""Bounds of the values in a file's columns: what a table's log says of its files, and what that tells of them.

A reader of the table skips files by them, and so does a commit by key: a file whose bounds have nothing in common with
those of the new rows holds none of their keys.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
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


def statistics(path: Path) -> str:
    """A file's row count and bounds, as Delta's log has them."""
    footer = read_footer(path)
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for name, groups in _columns(footer):
        nulls[name] = sum(group.null_count for group in groups)
        ends = _ends(groups)
        if ends is not None:
            low, high = _in_json(ends[0]), _in_json(ends[1], up=True)
            if low is not None and high is not None:
                least[name], most[name] = low, high
    return json.dumps({"numRecords": footer.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls})


def bounds_of_files(paths: Iterable[Path], columns: Sequence[str]) -> dict[str, Bounds]:
    """Bounds of the values in all of the files together, of those columns of which every file tells."""
    footers = [read_footer(path) for path in paths]
    rows = sum(footer.num_rows for footer in footers)
    every = [dict(_columns(footer)) for footer in footers]
    together: dict[str, Bounds] = {}
    for name in columns:
        if not all(name in each for each in every):
            continue
        groups = [group for each in every for group in each[name]]
        nulls = sum(group.null_count for group in groups)
        if nulls == rows:
            together[name] = Bounds(None, None, nulls)
        elif (ends := _ends(groups)) is not None and _is_ordered(ends[0]):
            # As the value of a partition an empty string is null.
            together[name] = Bounds(*ends, None if ends[0] == "" else nulls)
    return together


def _columns(footer: Any) -> Iterator[tuple[str, list[Any]]]:
    """The columns that are not nested and whose nulls are counted, with their statistics by row group."""
    for index in range(footer.num_columns):
        groups = [footer.row_group(group).column(index).statistics for group in range(footer.num_row_groups)]
        is_counted = bool(groups) and all(each is not None and each.has_null_count for each in groups)
        path = footer.schema.column(index).path
        if is_counted and "." not in path:
            yield path, groups


def _ends(groups: Sequence[Any]) -> tuple[Any, Any] | None:
    with_values = [each for each in groups if each.has_min_max or each.num_values]
    if not with_values or not all(each.has_min_max for each in with_values):
        return None
    try:
        return min(each.min for each in with_values), max(each.max for each in with_values)
    except (UnicodeDecodeError, OverflowError, ValueError):
        return None  # Spark's strings may hold any bytes, its times go beyond the year 9999


def _is_ordered(value: Any) -> bool:
    """Whether values of this kind have one order, the same for everybody: NaN has none."""
    if isinstance(value, datetime):
        return value.tzinfo is not None
    return isinstance(value, int | date | str)


def _in_json(value: Any, *, up: bool = False) -> Any:
    """A bound as the log has it; None where it would not mean what it means in the column, or is too long for it."""
    if isinstance(value, bool):
        return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return None
        cut = value.astimezone(UTC).replace(microsecond=value.microsecond // 1000 * 1000)
        if up and cut < value:
            if cut > _LAST - _MILLISECOND:
                return None
            cut += _MILLISECOND
        return cut.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else None
    return value if isinstance(value, int) else None


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
