"""What a PostgreSQL server tells of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Identifier


def exists(connection: psycopg.Connection[Any], table: Identifier) -> bool:
    found = connection.execute("SELECT to_regclass(%s)", (table.as_string(connection),)).fetchone()
    return found is not None and found[0] is not None


def identity(connection: psycopg.Connection[Any], table: Identifier) -> str | None:
    """The server, the database and the table, as the server itself numbers them."""
    found = connection.execute(
        "SELECT pg_database.oid, to_regclass(%s)::oid FROM pg_database WHERE datname = current_database()",
        (table.as_string(connection),),
    ).fetchone()
    if found is None or found[1] is None:
        return None
    return f"{_server_number(connection)} {found[0]} {found[1]}"


def _server_number(connection: psycopg.Connection[Any]) -> str:
    """The number that a server got when it was made; where it does not tell, how it was reached."""
    import psycopg

    try:
        with connection.transaction():  # so that a refusal does not end the one that we are in
            found = connection.execute("SELECT system_identifier FROM pg_control_system()").fetchone()
    except psycopg.errors.Error:
        found = None
    return f"{connection.info.host}:{connection.info.port}" if found is None else str(found[0])


def columns(connection: psycopg.Connection[Any], table: Identifier) -> dict[str, str]:
    """Names and types in the table's order. Empty: there is no such table."""
    found = connection.execute(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
        " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        (table.as_string(connection),),
    ).fetchall()
    return dict(found)


def nullable(connection: psycopg.Connection[Any], table: Identifier) -> set[str]:
    """The columns that may hold null."""
    found = connection.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0"
        " AND NOT attisdropped AND NOT attnotnull",
        (table.as_string(connection),),
    ).fetchall()
    return {name for (name,) in found}


def generated(connection: psycopg.Connection[Any], table: Identifier) -> str | None:
    """The first column that takes no value from outside, computed or numbered."""
    # Servers before 12 do not know attgenerated.
    found = connection.execute(
        "SELECT attname FROM pg_attribute AS known WHERE attrelid = to_regclass(%s) AND attnum > 0"
        " AND NOT attisdropped AND (attidentity = 'a' OR coalesce(to_jsonb(known) ->> 'attgenerated', '') <> '')"
        " ORDER BY attnum",
        (table.as_string(connection),),
    ).fetchone()
    return None if found is None else str(found[0])


def not_durable(connection: psycopg.Connection[Any], table: Identifier) -> list[tuple[str, bool]]:
    """The table, or partitions of it, that do not keep rows as the record of epochs is kept; which are foreign."""
    found: list[tuple[str, bool]] = connection.execute(
        "WITH RECURSIVE part (number) AS (SELECT to_regclass(%s)::oid"
        " UNION SELECT inhrelid FROM part JOIN pg_inherits ON inhparent = number"
        " JOIN pg_class ON pg_class.oid = inhrelid WHERE relispartition)"
        " SELECT relnamespace::regnamespace::text || '.' || quote_ident(relname), relkind = 'f'"
        " FROM part JOIN pg_class ON pg_class.oid = number"
        " WHERE relpersistence = 'u' OR relkind = 'f' ORDER BY 1",
        (table.as_string(connection),),
    ).fetchall()
    return found


def has_unique_key(connection: psycopg.Connection[Any], table: Identifier, key: tuple[str, ...]) -> bool:
    # Servers before 15 do not know indnullsnotdistinct.
    found = connection.execute(
        "SELECT array_agg(attname::text) FROM pg_index AS known"
        " JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY(indkey[0:indnkeyatts - 1])"
        " WHERE indrelid = to_regclass(%s) AND indisunique AND indimmediate AND indisvalid"
        " AND indexprs IS NULL AND indpred IS NULL GROUP BY indexrelid"
        " HAVING bool_and(attnotnull OR coalesce((to_jsonb(known) ->> 'indnullsnotdistinct')::boolean, false))",
        (table.as_string(connection),),
    ).fetchall()
    return any(set(names) == set(key) for (names,) in found)
