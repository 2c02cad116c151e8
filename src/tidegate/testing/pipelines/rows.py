"""The rows that a test gives: checked against the columns of their source, then as an Arrow table.

A row is a dict or a Row with all columns of the source, by their names, or a tuple with all of them in order. Values
are what Spark takes for each type: nothing is converted, so that a test says what it means.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row
from pyspark.sql.conversion import LocalDataToArrowConversion
from pyspark.sql.types import DataType, StringType, StructField, StructType, _make_type_verifier

from tidegate.errors import InvalidRows, first_line

Rows = Iterable[Mapping[str, Any] | Sequence[Any]] | DataFrame
"""What a test gives a source."""


def as_arrow(what: str, rows: Rows, schema: StructType) -> Any:
    """A pyarrow table of them; None if there are none. `what`: whose they are, for errors."""
    if isinstance(rows, DataFrame):
        _check_columns(what, rows.schema, schema)
        table = rows.select(*(rows[f"`{name}`"] for name in schema.names)).toArrow()
        return table if table.num_rows else None
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise InvalidRows(f"{what}: a list of rows or a DataFrame is wanted, not {_short(rows)}")
    checks = [(field, _check_of(field)) for field in schema.fields]
    values = [
        _checked(f"{what}, row {number}", row, schema.names, checks) for number, row in enumerate(list(rows), start=1)
    ]
    return LocalDataToArrowConversion.convert(values, schema, use_large_var_types=False) if values else None


def _checked(
    what: str, row: object, names: list[str], checks: list[tuple[StructField, Callable[[Any], None]]]
) -> tuple[Any, ...]:
    """The values of a row in the order of the columns."""
    values = _in_order(what, row, names)
    for value, (field, check) in zip(values, checks, strict=True):
        try:
            check(value)
        except PySparkException as error:
            # What is wrong deep in a value, only Spark's own words tell.
            why = "" if _is_plain(field.dataType) else f" ({first_line(error)})"
            raise InvalidRows(
                f"{what}: column {field.name!r} is {field.dataType.simpleString()} and cannot hold {_short(value)}, "
                f"of type {type(value).__name__}{why}"
            ) from None
    return values


def _in_order(what: str, row: object, names: list[str]) -> tuple[Any, ...]:
    if isinstance(row, Row) and hasattr(row, "__fields__"):
        row = dict(zip(row.__fields__, row, strict=True))
    if isinstance(row, Mapping):
        missing = [name for name in names if name not in row]
        unknown = [name for name in row if name not in names]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), names, 1)
            meant = f"; {near[0]!r} is meant?" if near else ""
            raise InvalidRows(f"{what}: {unknown[0]!r} is no column of the source ({', '.join(names)} are){meant}")
        if missing:
            raise InvalidRows(f"{what} lacks the column {missing[0]!r}; write None where it has no value")
        return tuple(row[name] for name in names)
    if not isinstance(row, Sequence) or isinstance(row, str | bytes):
        raise InvalidRows(f"{what} is {_short(row)}; a row is a dict, a tuple or a Row")
    if len(row) != len(names):
        raise InvalidRows(f"{what} has {len(row)} values for the {len(names)} columns {', '.join(names)}")
    return tuple(row)


def _check_of(field: StructField) -> Callable[[Any], None]:
    """Spark's own check of a value. It takes anything for a string, which here would hide a mistake."""
    check: Callable[[Any], None] = _make_type_verifier(field.dataType, field.nullable)
    if not isinstance(field.dataType, StringType):
        return check

    def check_string(value: Any) -> None:
        if value is not None and not isinstance(value, str):
            raise PySparkException("it is no string")

    return check_string


def _is_plain(kind: DataType) -> bool:
    return kind.typeName() not in ("array", "map", "struct")


def _check_columns(what: str, given: StructType, wanted: StructType) -> None:
    missing = [name for name in wanted.names if name not in given.names]
    unknown = [name for name in given.names if name not in wanted.names]
    if missing or unknown:
        wrong = f"lacks the column {missing[0]!r}" if missing else f"has {unknown[0]!r}, which is no column of it"
        raise InvalidRows(f"{what}: the DataFrame {wrong}; the source has {wanted.simpleString()}")
    for field in wanted.fields:
        found = given[field.name].dataType
        if found.simpleString() != field.dataType.simpleString():
            raise InvalidRows(
                f"{what}: column {field.name!r} of the DataFrame is {found.simpleString()}, but of the source it is "
                f"{field.dataType.simpleString()}; cast it"
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
