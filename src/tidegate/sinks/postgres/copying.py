"""What Spark's executors do for a PostgreSQL table: they copy the rows of a batch into a staging table."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from tidegate.sinks.staging import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from tidegate.sinks.postgres.connection import Server

BATCH: Final = "tidegate_batch"
PART: Final = "tidegate_part"
_DAY_US: Final = 86_400_000_000
_FIRST_DAY: Final = -719_162
"""1 January of the year 1, in days since 1970."""
_LAST_DAY: Final = 11_248_737
"""31 December 32767: a later one is not written as it is."""
_JSON: Final = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Spark itself would cut moments off at milliseconds, and write them in the session's time zone."""


def _pyarrow() -> Any:
    return importlib.import_module("pyarrow")


def copyable(frame: DataFrame) -> list[Column]:
    """The columns as values that CSV can hold: JSON for what is nested, hexadecimal digits for bytes.

    By plain names, because `mapInArrow` reads them as expressions.
    """
    from pyspark.sql import functions as F

    columns: list[Column] = []
    for field in frame.schema.fields:
        column = F.col(quoted(field.name))
        kind = field.dataType.typeName()
        if kind in ("array", "map", "struct"):
            column = F.to_json(column, _JSON)
        elif kind == "binary":
            column = F.concat(F.lit("\\x"), F.hex(column))
        columns.append(column.alias(f"c{len(columns)}"))
    return columns


def copier(
    server: Server, schema: str, staging: str, batch: int, names: tuple[str, ...]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What an executor does with a partition. It may be tried again, also while an earlier try still runs."""

    def copy(batches: Iterator[Any]) -> Iterator[Any]:
        import psycopg
        from psycopg import sql
        from pyspark import TaskContext

        context = TaskContext.get()
        part = 0 if context is None else context.partitionId()
        table = sql.Identifier(schema, staging)
        of_this_try = sql.SQL("{} = {} AND {} = {}").format(
            sql.Identifier(BATCH), sql.Literal(batch), sql.Identifier(PART), sql.Literal(part)
        )
        columns = sql.SQL(", ").join(map(sql.Identifier, (*names, BATCH, PART)))
        copied = 0
        try:
            with server.transaction() as connection:
                connection.execute(
                    "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"{staging} {batch} {part}",)
                )
                connection.execute(sql.SQL("DELETE FROM {} WHERE {}").format(table, of_this_try))
                # It takes as long as Spark takes to make the rows; the client bounds how long each part may take.
                connection.execute("SET LOCAL statement_timeout TO 0")
                statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(table, columns)
                with connection.cursor() as cursor, cursor.copy(statement) as into:
                    for each in batches:
                        if each.num_rows:
                            into.write(_as_csv(each.rename_columns(list(names)), batch, part))
                            copied += each.num_rows
        except (psycopg.Error, ValueError) as error:
            raise RuntimeError(f"could not copy into {schema}.{staging}: {server.told(error)}") from None
        yield _pyarrow().RecordBatch.from_pydict({"copied": [copied]})

    return copy


def _writable(rows: Any) -> Any:
    """Moments in UTC: offsets of former times have seconds, which CSV has no place for. And no year that it garbles."""
    pyarrow, compute = _pyarrow(), importlib.import_module("pyarrow.compute")
    for index, field in enumerate(rows.schema):
        if pyarrow.types.is_timestamp(field.type):
            zone = None if field.type.tz is None else "UTC"
            rows = rows.set_column(index, field.name, rows.column(index).cast(pyarrow.timestamp("us", zone)))
            number, per_day = pyarrow.int64(), _DAY_US
        elif pyarrow.types.is_date32(field.type):
            number, per_day = pyarrow.int32(), 1
        else:
            continue
        ends = compute.min_max(rows.column(index).cast(number)).as_py()
        if any(end is not None and not _FIRST_DAY <= end // per_day <= _LAST_DAY for end in ends.values()):
            raise ValueError(f"column {field.name!r} holds a year before 1 or after 32767, which cannot be copied")
    return rows


def _as_csv(rows: Any, batch: int, part: int) -> bytes:
    pyarrow, csv = _pyarrow(), importlib.import_module("pyarrow.csv")
    table = pyarrow.Table.from_batches([_writable(rows)])
    count = table.num_rows
    table = table.append_column(BATCH, pyarrow.repeat(pyarrow.scalar(batch, pyarrow.int64()), count))
    table = table.append_column(PART, pyarrow.repeat(pyarrow.scalar(part, pyarrow.int32()), count))
    into = pyarrow.BufferOutputStream()
    # Strings are quoted, null is not: so an empty string and null stay two things.
    csv.write_csv(table, into, csv.WriteOptions(include_header=False, quoting_style="needed"))
    data: bytes = into.getvalue().to_pybytes()
    return data
