"""As what a PostgreSQL table holds the values of a column: nested ones as JSON, which holds less than Spark does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import DataType

_TYPES: Final = {
    "boolean": "boolean",
    "byte": "smallint",
    "short": "smallint",
    "integer": "integer",
    "long": "bigint",
    "float": "real",
    "double": "double precision",
    "string": "text",
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamp with time zone",
    "timestamp_ntz": "timestamp without time zone",
    "array": "jsonb",
    "map": "jsonb",
    "struct": "jsonb",
}
_KEYS: Final = ("boolean", "byte", "short", "integer", "long", "float", "double", "decimal", "string")
"""Of others Spark writes what it has in memory: of bytes not even the bytes."""
_FORMER_DAYS: Final = "spark.sql.legacy.timeParserPolicy"


def type_name(kind: DataType) -> str:
    """The column's type in the table. KeyError: there is none."""
    name = kind.typeName()
    if name.startswith("decimal"):
        return f"numeric({kind.precision},{kind.scale})"  # type: ignore[attr-defined]
    if name.startswith(("varchar", "char")):
        return "text"
    return _TYPES[name]


def why_not_held(kind: DataType, session: SparkSession | None) -> str | None:
    """Why a table cannot hold such values as they are, and what to do, as the end of a sentence. None: it can."""
    try:
        type_name(kind)
    except KeyError:
        return "; cast it"
    within = _within(kind)
    for each in within:
        why = _why_not_json(each)
        if why is not None:
            return why
    # Without a session nothing is staged.
    policy = None if session is None else session.conf.get(_FORMER_DAYS, None)
    if policy == "LEGACY" and any(each.typeName() in ("date", "timestamp") for each in within[1:]):
        return f", because days before 1582 and after 9999 in it would become others: set {_FORMER_DAYS} to CORRECTED"
    return None


def _within(kind: Any) -> list[Any]:
    """A type, and all that are nested in it."""
    inner: list[Any] = []
    match kind.typeName():
        case "array":
            inner = [kind.elementType]
        case "map":
            inner = [kind.valueType]
        case "struct":
            inner = [field.dataType for field in kind.fields]
    return [kind, *(each for nested in inner for each in _within(nested))]


def _why_not_json(kind: Any) -> str | None:
    name = kind.typeName()
    if name == "map" and kind.keyType.typeName() not in _KEYS:
        return f", because a key of a map may not be {kind.keyType.simpleString()}: cast it to string"
    if name == "struct" and len(set(kind.names)) < len(kind.names):
        twice = next(each for each in kind.names if kind.names.count(each) > 1)
        return f", because of two fields {twice!r} one would be lost: rename it"
    try:
        type_name(kind)
    except KeyError:
        return None if name == "void" else f", because of {kind.simpleString()} in it: cast that"
    return None
