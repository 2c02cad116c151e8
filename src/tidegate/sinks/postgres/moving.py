"""From a staging table into a PostgreSQL table: rows appended, or taking the place of those with their key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.sinks.postgres import catalog
from tidegate.sinks.postgres.copying import BATCH, PART
from tidegate.sinks.postgres.statements import comma, compared, execute, names, sql

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed, Identifier

    from tidegate.sinks.postgres.table import PostgresTable

ROW: Final = "tidegate_row"
STEP: Final = "tidegate_step"
ADDED: Final = "tidegate_added"
_THERE: Final = "tidegate_there"


class Kept(NamedTuple):
    """Where it is kept what a step has changed: the rows that came, and those that went."""

    rows: Identifier
    step: int


def written(columns: Mapping[str, str]) -> dict[str, str]:
    """Of the columns of a staging table those that a stage writes."""
    return {name: kind for name, kind in columns.items() if name not in (BATCH, PART)}


def move(
    connection: psycopg.Connection[Any],
    sink: PostgresTable,
    staging: Identifier,
    batches: Sequence[int],
    kept: Kept | None = None,
) -> int:
    """Move the rows of some batches. Returns how many were staged of them."""
    kinds = written(catalog.columns(connection, staging))
    columns, from_staged = names(kinds), _from_staged(staging)
    insert = sql().SQL("INSERT INTO {} AS {} ({}) ").format(sink.identifier, sql().Identifier(_THERE), columns)
    if sink.key:
        insert += sql().SQL("SELECT DISTINCT ON ({}) {}").format(names(sink.key), columns) + from_staged
        insert += _newest_of_each_key(sink, kinds) + _in_the_place_of_others(sink, kinds)
    else:
        insert += sql().SQL("SELECT {}").format(columns) + from_staged
    if kept is not None:
        insert = _keeping(connection, sink, insert, kinds, kept)
    execute(connection, insert, (list(batches),))
    return execute(connection, sql().SQL("DELETE") + from_staged, (list(batches),)).rowcount


def _keeping(
    connection: psycopg.Connection[Any], sink: PostgresTable, insert: Composed, kinds: Mapping[str, str], kept: Kept
) -> Composed:
    """The same, and what it has changed is kept: as the table holds it, whatever its triggers do."""
    moved = sql().SQL("WITH moved AS ({} RETURNING {}) ").format(insert, names(kinds))
    keep = sql().SQL("INSERT INTO {} ({}) ").format(kept.rows, names((*kinds, STEP, ADDED)))
    came = sql().SQL("SELECT {}, {}, true").format(qualified("moved", kinds), sql().Literal(kept.step))
    if not sink.key:
        appended: Composed = moved + keep + came + sql().SQL(" FROM moved")
        return appended
    # All parts of a statement see the table as it was before. Nobody else changes it meanwhile: it is locked.
    went = (
        sql()
        .SQL("SELECT {}, {}, false WHERE replaced.{}")
        .format(qualified("replaced", kinds), sql().Literal(kept.step), sql().Identifier(ROW))
    )
    both: Composed = (
        moved
        + keep
        + sql()
        .SQL(
            "SELECT changed.* FROM moved LEFT JOIN (SELECT {0}, true AS {1} FROM {2}) AS replaced ON {3}"
            " CROSS JOIN LATERAL ({4} UNION ALL {5}) AS changed"
            " WHERE replaced.{1} IS NULL OR NOT record_image_eq(ROW({6}), ROW({7}))"
        )
        .format(
            names(kinds),
            sql().Identifier(ROW),
            sink.identifier,
            same_key("replaced", "moved", sink.key, catalog.nullable(connection, sink.identifier)),
            came,
            went,
            qualified("moved", kinds),
            qualified("replaced", kinds),
        )
    )
    return both


def qualified(of: str, columns: Iterable[str]) -> Composed:
    """Columns of a table that is called so."""
    return comma(sql().Identifier(of, name) for name in columns)


def same_key(one: str, other: str, key: Sequence[str], nullable: set[str]) -> Composed:
    """Whether two rows have one key; in a way that finds it by an index where a key is never null."""
    pairs = [
        sql()
        .SQL("{} IS NOT DISTINCT FROM {}" if name in nullable else "{} = {}")
        .format(sql().Identifier(one, name), sql().Identifier(other, name))
        for name in key
    ]
    joined: Composed = sql().SQL(" AND ").join(pairs)
    return joined


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
