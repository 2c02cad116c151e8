"""Whether a Delta table, there or yet to be created, can take what a stage writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import deltalake

from tidegate.errors import InvalidPipeline, SinkFailed
from tidegate.sinks.contract import SinkPlace
from tidegate.sinks.delta.features import FORGETTING, unwritable
from tidegate.sinks.staging import check_key, check_newest_by

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

    from tidegate.sinks.delta.table import DeltaTable

_RESERVED: Final = "_tidegate_"
"""What the names of our columns beside the table's own start with, when Spark reads it."""


def check_columns(sink: DeltaTable, place: SinkPlace, schema: StructType, output_mode: str) -> deltalake.Schema:
    """Refuse columns that no table, or none of this kind, can hold. Returns them as Delta has them."""
    table, owner = sink.describe(), place.owner
    check_key(table, sink.key, place, schema, output_mode)
    check_newest_by(table, sink.newest_by, sink.key, place, schema)
    reserved = [name for name in schema.names if name.lower().startswith(_RESERVED)]
    if reserved:
        raise InvalidPipeline(f"{owner} has a column {reserved[0]!r}, a name that Tidegate needs")
    for field in schema.fields:
        kinds = {kind.typeName() for kind in _kinds(field.dataType)}
        if any("interval" in kind or kind == "variant" for kind in kinds):
            raise InvalidPipeline(
                f"{table} cannot hold {field.name!r} of {owner}, {field.dataType.simpleString()}; cast it"
            )
        if field.name in sink.key and "map" in kinds:
            raise InvalidPipeline(f"{table} cannot have the key {field.name!r} of {owner}: Spark cannot compare maps")
    _check_partitions(sink, place, schema)
    try:
        return deltalake.Schema.from_json(schema.json())
    except Exception as error:
        raise InvalidPipeline(f"{owner} has a column that a Delta table cannot hold: {error}") from error


def _check_partitions(sink: DeltaTable, place: SinkPlace, schema: StructType) -> None:
    table, owner = sink.describe(), place.owner
    missing = [name for name in sink.partition_by if name not in schema.names]
    if missing:
        raise InvalidPipeline(f"{table} is partitioned by {missing[0]!r}, which {owner} does not have")
    kinds = {name: schema[name].dataType.typeName() for name in sink.partition_by}
    octets = [name for name, kind in kinds.items() if kind == "binary"]
    if octets:
        raise InvalidPipeline(
            f"{table}: {owner} cannot be partitioned by {octets[0]!r}, which is binary; take its hexadecimal digits"
        )
    moments = [name for name, kind in kinds.items() if kind == "timestamp"]
    if moments:
        # Spark names such a folder in the session's time zone, Delta reads it in UTC.
        raise InvalidPipeline(f"{table}: {owner} cannot be partitioned by {moments[0]!r}, a timestamp; take its date")
    if not set(schema.names) - set(sink.partition_by):
        raise InvalidPipeline(f"{table}: {owner} has no column that the table is not partitioned by")


def check_found(sink: DeltaTable, place: SinkPlace, wanted: deltalake.Schema, table: deltalake.DeltaTable) -> None:
    """Refuse a table that cannot take what the stage writes, whoever made it what it is now."""
    check_demands(sink, table)
    found = table.schema()
    if _columns(found) != _columns(wanted):
        raise SinkFailed(
            f"{sink.describe()} has the columns {', '.join(_columns(found))}, but {place.owner} writes "
            f"{', '.join(_columns(wanted))}; {_way_out(sink, _columns(found), _columns(wanted))}"
        )
    demanded = {field.name for field in found.fields if not field.nullable}
    unsure = [field.name for field in wanted.fields if field.nullable and field.name in demanded]
    if unsure:
        raise SinkFailed(
            f"{sink.describe()} takes no null in {unsure[0]!r}, but {place.owner} may write one; "
            f"let the column be null, or write to a new table"
        )


def check_demands(sink: DeltaTable, table: deltalake.DeltaTable) -> None:
    """Refuse a table that demands what is not done here, whatever the columns of the rows are."""
    obstacle = unwritable(table, replaces=bool(sink.key))
    if obstacle is not None:
        raise SinkFailed(
            f"{sink.describe()} has {obstacle}, which Tidegate does not do; take it off, or write to a new table"
        )
    if FORGETTING in table.metadata().configuration:
        raise SinkFailed(
            f"{sink.describe()} has the property {FORGETTING}: after that time without new rows it would forget "
            f"which epochs it shows; take the property off, or write to a new table"
        )
    partitions = tuple(table.metadata().partition_columns)
    if partitions != sink.partition_by:
        raise SinkFailed(
            f"{sink.describe()} is partitioned by {partitions or 'nothing'}, not by {sink.partition_by or 'nothing'}"
        )


def check_keepable(sink: DeltaTable, table: deltalake.DeltaTable) -> None:
    """Refuse to look after a table that has come to demand what is not done here."""
    obstacle = unwritable(table, replaces=False)
    if obstacle is not None:
        raise SinkFailed(f"it has {obstacle}, which Tidegate does not do")
    if tuple(table.metadata().partition_columns) != sink.partition_by:
        raise SinkFailed(f"it is no longer partitioned by {sink.partition_by or 'nothing'}")


def _columns(schema: deltalake.Schema) -> list[str]:
    fields = json.loads(schema.to_json())["fields"]
    return [f"{field['name']} {json.dumps(field['type']).strip(chr(34))}" for field in fields]


def _way_out(sink: DeltaTable, found: list[str], wanted: list[str]) -> str:
    """A table never gets rid of a column: so it is its owner's to add one."""
    otherwise = "change the stage, or write to a new table"
    if not set(found) < set(wanted):
        return otherwise
    new = ", ".join(each for each in wanted if each not in found)
    if found != wanted[: len(found)]:
        return f"let {new} come last in the stage, as in a table that it is added to; or {otherwise}"
    return (
        f"add {new} to the table yourself (in SQL: ALTER TABLE delta.`{sink.home}` ADD COLUMNS ({new}); in Python: "
        f"deltalake.DeltaTable(…).alter.add_columns) and start again, but then the pipeline as it was cannot write to "
        f"it any more; or {otherwise}"
    )


def _kinds(kind: DataType) -> Iterator[DataType]:
    """A type, and all that are nested in it."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    yield kind
    inner: list[DataType] = []
    if isinstance(kind, ArrayType):
        inner = [kind.elementType]
    elif isinstance(kind, MapType):
        inner = [kind.keyType, kind.valueType]
    elif isinstance(kind, StructType):
        inner = [field.dataType for field in kind.fields]
    for each in inner:
        yield from _kinds(each)
