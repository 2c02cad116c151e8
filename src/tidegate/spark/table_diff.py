"""How the rows of two tables differ, as multisets: a row that is twice in one and once in the other is once only there.

Spark counts each different row in both, which is one shuffle; no row passes through the driver. Rows are told apart by
all columns that both have by one name and type. As in a `GROUP BY`, null equals null and NaN equals NaN; what has no
order or equality in Spark (maps, variants) is compared by what it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from tidegate.spark.rows import as_objects, ordered

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_FIRST: Final = "_tidegate_in_first"
_SECOND: Final = "_tidegate_in_second"
_TIMES: Final = "_tidegate_times"


class SharedColumns(msgspec.Struct, frozen=True):
    """The columns of two tables: those that both have by one type, and the rest, which are not compared."""

    shared: tuple[str, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    types: dict[str, tuple[str, str]]
    """Those whose types differ, with both."""


class RowCounts(msgspec.Struct, frozen=True):
    only_first: int
    only_second: int
    both: int


class TableDiff:
    """Of two frames. Nothing is read before it is asked for."""

    def __init__(self, first: DataFrame, second: DataFrame) -> None:
        self.columns = _columns(first, second)
        names = [name for name in first.columns if name in self.columns.shared]
        counted = _marked(first, names, 1, 0).unionAll(_marked(second, names, 0, 1))
        whole = [index for index, name in enumerate(names) if _needs_canon(first.schema[name].dataType)]
        kept = [F.first(_value(index)).alias(_value(index)) for index in whole]
        sums = [F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in (_FIRST, _SECOND)]
        grouped = counted.groupBy(*(_key(index) for index in range(len(names)))).agg(*kept, *sums)
        shown = [
            F.col(_value(index) if index in whole else _key(index)).alias(name) for index, name in enumerate(names)
        ]
        self._grouped = grouped.select(*shown, _FIRST, _SECOND)

    def counts(self) -> RowCounts:
        """Reads both tables."""
        first, second = F.col(_FIRST), F.col(_SECOND)
        zero = F.lit(0)
        sums = (F.greatest(first - second, zero), F.greatest(second - first, zero), F.least(first, second))
        row: Any = self._grouped.agg(*(F.coalesce(F.sum(each), zero) for each in sums)).first()
        return RowCounts(*(int(each) for each in row))

    def only_first(self) -> DataFrame:
        """The rows that only the first one has, each as often as it has it more often."""
        return self._only(_FIRST, _SECOND)

    def only_second(self) -> DataFrame:
        return self._only(_SECOND, _FIRST)

    def _only(self, here: str, there: str) -> DataFrame:
        found = self._grouped.where(F.col(here) > F.col(there))
        times = F.explode(F.sequence(F.lit(1).cast("long"), F.col(here) - F.col(there)))
        return found.withColumn(_TIMES, times).drop(_TIMES, _FIRST, _SECOND)


def some_rows(frame: DataFrame, limit: int) -> tuple[dict[str, Any], ...]:
    """The first rows, as JSON would have them."""
    return tuple(as_objects(ordered(frame).limit(limit))) if limit else ()


def _columns(first: DataFrame, second: DataFrame) -> SharedColumns:
    # Whether a column may be null is no part of a row.
    one, other = (
        {each.name: each.dataType.simpleString() for each in frame.schema.fields} for frame in (first, second)
    )
    both = [name for name in one if name in other]
    return SharedColumns(
        tuple(name for name in both if one[name] == other[name]),
        tuple(name for name in one if name not in other),
        tuple(name for name in other if name not in one),
        {name: (one[name], other[name]) for name in both if one[name] != other[name]},
    )


def _key(index: int) -> str:
    return f"_tidegate_key_{index}"


def _value(index: int) -> str:
    return f"_tidegate_value_{index}"


def _marked(frame: DataFrame, names: list[str], in_first: int, in_second: int) -> DataFrame:
    """What rows are told apart by, what that does not show, and in which table each row is."""
    selected: list[Column] = []
    for index, name in enumerate(names):
        column, kind = F.col(f"`{name.replace('`', '``')}`"), frame.schema[name].dataType
        selected.append(_canon(column, kind).alias(_key(index)))
        if _needs_canon(kind):
            selected.append(column.alias(_value(index)))
    marks = (F.lit(number).cast("long").alias(name) for name, number in ((_FIRST, in_first), (_SECOND, in_second)))
    return frame.select(*selected, *marks)


def _needs_canon(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_needs_canon(each.dataType) for each in kind.fields)
    if isinstance(kind, ArrayType):
        return _needs_canon(kind.elementType)
    return isinstance(kind, MapType | VariantType)


def _canon(column: Column, kind: DataType) -> Column:
    """Something that is equal exactly if the values are, and can be grouped by."""
    if not _needs_canon(kind):
        return column
    if isinstance(kind, VariantType):
        return F.to_json(column)
    if isinstance(kind, ArrayType):
        return F.transform(column, lambda each: _canon(each, kind.elementType))
    if isinstance(kind, MapType):
        entry = F.transform(
            F.map_entries(column),
            lambda each: F.struct(
                _canon(each.getField("key"), kind.keyType).alias("key"),
                _canon(each.getField("value"), kind.valueType).alias("value"),
            ),
        )
        return F.array_sort(entry)
    assert isinstance(kind, StructType)
    fields = (_canon(column.getField(each.name), each.dataType).alias(each.name) for each in kind.fields)
    return F.when(column.isNotNull(), F.struct(*fields))
