"""Whether a PostgreSQL table, there or yet to be created, can take what a stage writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import InvalidPipeline, SinkFailed
from tidegate.sinks.contract import SinkPlace
from tidegate.sinks.postgres import catalog
from tidegate.sinks.postgres.column_types import type_name, why_not_held
from tidegate.sinks.postgres.copying import BATCH, PART
from tidegate.sinks.postgres.moving import ADDED, ROW, STEP, written
from tidegate.sinks.staging import check_key, check_newest_by

if TYPE_CHECKING:
    import psycopg
    from pyspark.sql.types import StructType

    from tidegate.sinks.postgres.table import PostgresTable

LONGEST_NAME: Final = 63


def check_columns(sink: PostgresTable, place: SinkPlace, schema: StructType, output_mode: str) -> dict[str, str]:
    """Refuse columns that no table, or none of this kind, can hold. Returns them as PostgreSQL has them."""
    for field in schema.fields:
        why = why_not_held(field.dataType, place.session)
        if why is not None:
            raise InvalidPipeline(
                f"{place.owner}: column {field.name!r} is {field.dataType.simpleString()}, which {sink.describe()} "
                f"cannot hold{why}"
            )
    wanted = types_of(schema)
    check_key(sink.describe(), sink.key, place, schema, output_mode)
    check_newest_by(sink.describe(), sink.newest_by, sink.key, place, schema)
    long = [name for name in (sink.schema, sink.name, *wanted) if len(name.encode()) > LONGEST_NAME]
    if long:
        raise InvalidPipeline(
            f"{place.owner}: PostgreSQL would cut {long[0]!r} off at {LONGEST_NAME} bytes; take a shorter name"
        )
    reserved = [name for name in wanted if name in (BATCH, PART, ROW, STEP, ADDED)]
    if reserved:
        raise InvalidPipeline(f"{place.owner} has a column {reserved[0]!r}, a name that Tidegate needs")
    return wanted


def types_of(schema: StructType) -> dict[str, str]:
    return {field.name: type_name(field.dataType) for field in schema.fields}


def check_found(sink: PostgresTable, place: SinkPlace, found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    if found != wanted:
        raise SinkFailed(
            f"{sink.describe()} has the columns {_listed(found)}, but {place.owner} writes {_listed(wanted)}; "
            f"change the stage or the table, or write to a new table"
        )


def check_takes_rows(connection: psycopg.Connection[Any], sink: PostgresTable, place: SinkPlace) -> None:
    """Refuse a table that would not hold the rows as they are, or not for long."""
    table = sink.describe()
    generated = catalog.generated(connection, sink.identifier)
    if generated is not None:
        raise SinkFailed(
            f"{table} makes the values of {generated!r} itself (GENERATED ALWAYS), but {place.owner} writes them; take "
            f"that off the column, or write to a new table"
        )
    if sink.key and not catalog.has_unique_key(connection, sink.identifier, sink.key):
        raise SinkFailed(
            f"{table} has no primary key or unique index on ({', '.join(sink.key)}), without which rows cannot be "
            f"replaced by their key; create it, for the whole table, not deferrable, and on columns that are NOT NULL "
            f"(or with NULLS NOT DISTINCT)"
        )
    for name, is_foreign in catalog.not_durable(connection, sink.identifier):
        if is_foreign:
            raise SinkFailed(
                f"{table}: {name} is a foreign table, which does not show rows in one transaction with others; write "
                f"to a table of the server itself"
            )
        raise SinkFailed(
            f"{table}: {name} is UNLOGGED, so a crash of the server would empty it; ALTER TABLE {name} SET LOGGED, or "
            f"write to a new table"
        )


def check_unchanged(
    connection: psycopg.Connection[Any], sink: PostgresTable, wanted: Mapping[str, str], staging: str | None = None
) -> None:
    """Refuse a table, or the staging table of this name, whose columns are not those of the rows: the server would
    convert them, which rounds and cuts."""
    found = written(catalog.columns(connection, sink.identifier if staging is None else sink.beside(staging)))
    if found != wanted:
        of = sink.describe() if staging is None else f"{sink.describe()}: its staging table {sink.schema}.{staging}"
        raise SinkFailed(
            f"{of} was changed during the run: {_changes(found, wanted)}. Nothing was committed; change it back "
            f"and start again, or start the pipeline on a new root with a new table"
        )


def _listed(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def _changes(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """What columns have become, against what they were."""
    changes = [
        f"{name} is {found[name]}, not {kind}" if name in found else f"{name} is gone"
        for name, kind in wanted.items()
        if found.get(name) != kind
    ]
    return ", ".join([*changes, *(f"{name} is new" for name in found if name not in wanted)])
