"""Rows of a DataFrame for people and for scripts: flat, as text, in a stable order, and no more than were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StructType, VariantType

from tidegate.errors import InvalidConfig
from tidegate.spark.causes import objection_of, without_pysparks_log

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_NO_ORDER: Final = (MapType, VariantType)


def filtered(frame: DataFrame, where: str | None) -> DataFrame:
    """The rows that a condition in SQL lets through."""
    if where is None:
        return frame
    try:
        with without_pysparks_log():
            return frame.where(where)
    except PySparkException as error:
        columns = ", ".join(name for name, _ in _leaves(frame))
        raise InvalidConfig(f"--where {where!r} cannot be asked: {objection_of(error)}; there is: {columns}") from error


def ordered(frame: DataFrame) -> DataFrame:
    """In an order that is the same whenever it is looked at, by all columns that have one."""
    columns = [F.col(f"`{each.name}`") for each in frame.schema.fields if _has_order(each.dataType)]
    return frame.orderBy(*columns) if columns else frame


def flattened(frame: DataFrame) -> DataFrame:
    """Every value as text in a column of its own, `key.window.start` of what is nested; lists and maps as JSON."""
    return frame.select(*(_as_text(column, kind).alias(name) for name, (column, kind) in _leaves(frame)))


def as_objects(frame: DataFrame) -> list[dict[str, Any]]:
    """What JSON makes of each row. Null where there is nothing."""
    whole = F.struct(*(F.col(f"`{name}`") for name in frame.columns))
    rows = frame.select(F.to_json(whole, {"ignoreNullFields": "false"}).alias("row")).collect()
    return [msgspec.json.decode(row["row"], type=dict[str, Any]) for row in rows]


def texts(frame: DataFrame) -> Iterator[tuple[str | None, ...]]:
    """The rows of a frame that was flattened, one after the other."""
    return (tuple(row) for row in frame.toLocalIterator())


def _leaves(frame: DataFrame) -> list[tuple[str, tuple[Column, DataType]]]:
    return [leaf for each in frame.schema.fields for leaf in _inside(each.name, F.col(f"`{each.name}`"), each.dataType)]


def _inside(name: str, column: Column, kind: DataType) -> Iterator[tuple[str, tuple[Column, DataType]]]:
    if isinstance(kind, StructType) and kind.fields:
        for each in kind.fields:
            yield from _inside(f"{name}.{each.name}", column.getField(each.name), each.dataType)
    else:
        yield name, (column, kind)


def _as_text(column: Column, kind: DataType) -> Column:
    if isinstance(kind, ArrayType | MapType | StructType):
        return F.to_json(column)
    if isinstance(kind, BinaryType):
        return F.regexp_replace(F.base64(column), r"\s", "")  # Spark breaks it into lines
    return column.cast("string")


def _has_order(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return all(_has_order(each.dataType) for each in kind.fields)
    if isinstance(kind, ArrayType):
        return _has_order(kind.elementType)
    return not isinstance(kind, _NO_ORDER)
