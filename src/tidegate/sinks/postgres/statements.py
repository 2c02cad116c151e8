"""Statements for a PostgreSQL server, put together from names and values that may hold anything.

psycopg is asked for only here and where a connection is made: without it, a `PostgresTable` can still be written down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composable, Composed


def sql() -> Any:
    from psycopg import sql

    return sql


def execute(connection: psycopg.Connection[Any], query: Composed, parameters: Sequence[object]) -> psycopg.Cursor[Any]:
    """With parameters a % in a name would be taken for a placeholder."""
    return connection.execute(sql().SQL(_with_placeholders(query)), parameters)


def _with_placeholders(part: Any) -> str:
    if isinstance(part, sql().Composed):
        return "".join(map(_with_placeholders, part))
    text: str = part.as_string()
    return text.replace("%", "%%") if isinstance(part, sql().Identifier) else text


def comma(parts: Iterable[Composable]) -> Composed:
    joined: Composed = sql().SQL(", ").join(parts)
    return joined


def names(columns: Iterable[str]) -> Composed:
    return comma(map(sql().Identifier, columns))


def compared(name: str, kind: str, of: str | None = None) -> Composed:
    """A column, of a table where one is named, compared as Spark does it: strings by their bytes."""
    column = sql().Identifier(name) if of is None else sql().Identifier(of, name)
    found: Composed = sql().SQL('{} COLLATE "C"' if kind == "text" else "{}").format(column)
    return found
