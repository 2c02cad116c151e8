"""From a staging table into a PostgreSQL table: rows appended, or taking the place of those with their key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tidegate.sinks.postgres import catalog
from tidegate.sinks.postgres.copying import BATCH, PART
from tidegate.sinks.postgres.statements import comma, compared, execute, names, sql

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed, Identifier

    from tidegate.sinks.postgres.table import PostgresTable

ROW: Final = "tidegate_row"
_THERE: Final = "tidegate_there"


def written(columns: Mapping[str, str]) -> dict[str, str]:
    """Of the columns of a staging table those that a stage writes."""
    return {name: kind for name, kind in columns.items() if name not in (BATCH, PART)}


def move(connection: psycopg.Connection[Any], sink: PostgresTable, staging: Identifier, batches: Sequence[int]) -> int:
    """Move the rows of some batches. Returns how many were staged of them."""
    kinds = written(catalog.columns(connection, staging))
    columns, from_staged = names(kinds), _from_staged(staging)
    insert = sql().SQL("INSERT INTO {} AS {} ({}) ").format(sink.identifier, sql().Identifier(_THERE), columns)
    if sink.key:
        insert += sql().SQL("SELECT DISTINCT ON ({}) {}").format(names(sink.key), columns) + from_staged
        insert += _newest_of_each_key(sink, kinds) + _in_the_place_of_others(sink, kinds)
    else:
        insert += sql().SQL("SELECT {}").format(columns) + from_staged
    execute(connection, insert, (list(batches),))
    return execute(connection, sql().SQL("DELETE") + from_staged, (list(batches),)).rowcount


def _from_staged(staging: Identifier) -> Composed:
    found: Composed = sql().SQL(" FROM {} WHERE {} = ANY(%s)").format(staging, sql().Identifier(BATCH))
    return found


def _newest_of_each_key(sink: PostgresTable, kinds: Mapping[str, str]) -> Composed:
    """Of equally new rows, that of the last batch."""
    order = sql().SQL(" ORDER BY {}, ").format(names(sink.key))
    if sink.newest_by:
        order += _newest_first(sink, kinds) + sql().SQL(", ")
    found: Composed = order + sql().SQL("{} DESC").format(sql().Identifier(BATCH))
    return found


def _in_the_place_of_others(sink: PostgresTable, kinds: Mapping[str, str]) -> Composed:
    others = [name for name in kinds if name not in sink.key]
    change = comma(sql().SQL("{0} = excluded.{0}").format(sql().Identifier(name)) for name in others)
    then = sql().SQL("UPDATE SET {}").format(change) if others else sql().SQL("NOTHING")
    if sink.newest_by and others:
        then += sql().SQL(" WHERE ") + _is_not_older(sink, kinds)
    found: Composed = sql().SQL(" ON CONFLICT ({}) DO ").format(names(sink.key)) + then
    return found


def conflict(
    connection: psycopg.Connection[Any], sink: PostgresTable, staging: Identifier, batches: Sequence[int]
) -> dict[str, Any] | None:
    """A key of which a batch has different rows that are the newest; None: there is none."""
    kinds = written(catalog.columns(connection, staging))
    if not kinds:
        return None  # a commit says so
    by, from_staged = names((BATCH, *sink.key)), _from_staged(staging)
    # The keys alone are counted first, and most often that is all.
    several = sql().SQL("SELECT 1") + from_staged + sql().SQL(" GROUP BY {} HAVING count(*) > 1 LIMIT 1").format(by)
    if execute(connection, several, (list(batches),)).fetchone() is None:
        return None
    values = comma(compared(name, kind) for name, kind in kinds.items())
    order = sql().SQL("ORDER BY {}").format(_newest_first(sink, kinds)) if sink.newest_by else sql().SQL("")
    row, rank = sql().Identifier(ROW), sql().Identifier(PART)
    rivals = sql().SQL("SELECT {}, ROW({}) AS {}, rank() OVER (PARTITION BY {} {}) AS {}")
    different = sql().SQL(
        "SELECT {} FROM ({}) AS rivals WHERE {} = 1 GROUP BY {} HAVING count(DISTINCT {}) > 1 LIMIT 1"
    )
    query = different.format(
        names(sink.key), rivals.format(by, values, row, by, order, rank) + from_staged, rank, by, row
    )
    found = execute(connection, query, (list(batches),)).fetchone()
    return None if found is None else dict(zip(sink.key, found, strict=True))


def _newest_first(sink: PostgresTable, kinds: Mapping[str, str]) -> Composed:
    """In the order that Spark has: strings by their bytes, null before all values."""
    return comma(sql().SQL("{} DESC NULLS LAST").format(compared(name, kinds[name])) for name in sink.newest_by)


def _is_not_older(sink: PostgresTable, kinds: Mapping[str, str]) -> Composed:
    """Whether the row of a conflict is at least as new as the one that is there."""
    newer = sql().SQL("false")
    for name in reversed(sink.newest_by):
        there, new = (compared(name, kinds[name], of) for of in (_THERE, "excluded"))
        newer = (
            sql()
            .SQL("({0} > {1}) IS TRUE OR ({0} IS NOT NULL AND {1} IS NULL) OR ({0} IS NOT DISTINCT FROM {1} AND ({2}))")
            .format(there, new, newer)
        )
    found: Composed = sql().SQL("NOT ({})").format(newer)
    return found
