"""A PostgreSQL table as a sink: executors copy into a staging table, and one transaction per epoch moves the rows.

In the schema of the table lie also
- `tidegate_epochs`: per pipeline, sink and table the last epoch, the last batch and the generation that it is fenced
  at. A commit writes it in the transaction that moves the rows, so a repeated commit does nothing;
- one staging table per sink and generation. It is an ordinary, logged table: what a decided checkpoint has sealed must
  survive a crash of the server.

Rows go from Spark's executors to the server by COPY and never pass through the driver.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import Fenced, InvalidPipeline, SinkFailed
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace
from tidegate.sinks.staging import as_names, check_key
from tidegate.storage.manifest import TableAddress

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed, Identifier
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

_EPOCHS: Final = "tidegate_epochs"
_STAGING: Final = "tidegate_staging"
_BATCH: Final = "tidegate_batch"
_PART: Final = "tidegate_part"
_CONNECT_SECONDS: Final = 10
_LOCK_SECONDS: Final = 30

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


class PostgresTable:
    """A PostgreSQL table that a sink stage appends to or, with a `key`, inserts into and updates.

    `table` is `name` or `schema.name`. `dsn` is a connection string or URL; what it leaves out comes from the usual
    environment variables (PGHOST, PGUSER, PGPASSWORD, …), also on the executors. Of several rows with one key in an
    epoch that of the last batch counts.
    """

    is_exactly_once = True

    def __init__(self, table: str, dsn: str = "", *, key: str | Sequence[str] = ()) -> None:
        schema, _, name = table.rpartition(".")
        if not name or "." in schema:
            raise InvalidPipeline(f"a PostgreSQL table is called 'name' or 'schema.name', not {table!r}")
        self._schema = schema or "public"
        self._name = name
        self._dsn = dsn
        self._key = as_names(key)

    def __repr__(self) -> str:
        return f"PostgresTable({self._schema}.{self._name})"

    def describe(self) -> str:
        return f"PostgreSQL table {self._schema}.{self._name}"

    @property
    def table(self) -> TableAddress:
        return TableAddress("postgres", f"{self._schema}.{self._name}")

    # -- the table itself -------------------------------------------------------------------------

    def check_table(self, place: SinkPlace, schema: StructType, output_mode: str) -> bool:
        wanted = {field.name: self._type(place, field.name, field.dataType) for field in schema.fields}
        check_key(self.describe(), self._key, place, schema, output_mode)
        reserved = [name for name in wanted if name in (_BATCH, _PART)]
        if reserved:
            raise InvalidPipeline(f"{place.owner} has a column {reserved[0]!r}, a name that Tidegate needs")
        with self._connected() as connection:
            found = self._columns(connection)
            if not found:
                return False
            if found != wanted:
                raise SinkFailed(
                    f"{self.describe()} has the columns {_listed(found)}, but {place.owner} writes {_listed(wanted)}; "
                    f"change the stage or the table, or write to a new table"
                )
            if self._key and not self._has_unique_key(connection):
                raise SinkFailed(
                    f"{self.describe()} has no primary key or unique index on ({', '.join(self._key)}), without which "
                    f"rows cannot be replaced by their key; create it"
                )
            return True

    def prepare_table(self, _place: SinkPlace, schema: StructType) -> None:
        sql = _sql()
        columns = [
            sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(_type_name(field.dataType)))
            for field in schema.fields
        ]
        if self._key:
            columns.append(sql.SQL("PRIMARY KEY ({})").format(_comma(map(sql.Identifier, self._key))))
        with self._connected() as connection:
            connection.execute(sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(self._table(), _comma(columns)))
            connection.execute(
                sql.SQL(
                    "CREATE TABLE IF NOT EXISTS {} (pipeline text, sink text, table_name text,"
                    " generation bigint NOT NULL DEFAULT 0, fence bigint NOT NULL DEFAULT 0,"
                    " epoch bigint NOT NULL DEFAULT 0, next_batch bigint NOT NULL DEFAULT 0,"
                    " committed_at timestamp with time zone, PRIMARY KEY (pipeline, sink, table_name))"
                ).format(self._table(_EPOCHS))
            )

    def facts(self, place: SinkPlace) -> SinkFacts:
        with self._connected() as connection:
            if not self._exists(connection, _EPOCHS):
                return SinkFacts()
            found = self._record(connection, place)
            return SinkFacts() if found is None else SinkFacts(found.epoch, found.fence)

    def fence(self, place: SinkPlace, generation: int) -> None:
        with self._connected() as connection:
            if not self._exists(connection, _EPOCHS):
                return
            connection.execute(
                _sql()
                .SQL(
                    "INSERT INTO {0} AS known (pipeline, sink, table_name, fence) VALUES (%s, %s, %s, %s)"
                    " ON CONFLICT (pipeline, sink, table_name)"
                    " DO UPDATE SET fence = greatest(known.fence, excluded.fence)"
                )
                .format(self._table(_EPOCHS)),
                (*self._owner(place), generation),
            )

    # -- staging ----------------------------------------------------------------------------------

    def open_staging(self, place: SinkPlace, generation: int, _schema: StructType) -> None:
        sql = _sql()
        staging = self._staging(place, generation)
        with self._connected() as connection:
            connection.execute(
                sql.SQL("CREATE TABLE IF NOT EXISTS {} (LIKE {}, {} bigint, {} integer)").format(
                    self._table(staging), self._table(), sql.Identifier(_BATCH), sql.Identifier(_PART)
                )
            )
            connection.execute(
                sql.SQL("CREATE INDEX IF NOT EXISTS {} ON {} ({}, {})").format(
                    sql.Identifier(f"{staging}_batch"),
                    self._table(staging),
                    sql.Identifier(_BATCH),
                    sql.Identifier(_PART),
                )
            )

    def stage(self, place: SinkPlace, generation: int, batch: int, frame: DataFrame) -> int:
        staging = self._staging(place, generation)
        with self._connected() as connection:
            # Of an earlier try of the batch, which may have had more partitions.
            connection.execute(
                _sql().SQL("DELETE FROM {} WHERE {} = %s").format(self._table(staging), _sql().Identifier(_BATCH)),
                (batch,),
            )
        copied = frame.select(*_copyable(frame)).mapInArrow(
            _copier(self._dsn, self._schema, staging, batch, tuple(frame.columns)), "copied long"
        )
        return sum(row["copied"] for row in copied.collect())

    # -- committing -------------------------------------------------------------------------------

    def commit(self, place: SinkPlace, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        with self._connected() as connection:
            sql = _sql()
            if not self._columns(connection):
                raise SinkFailed(f"{self.describe()} is gone; restore it, or start the pipeline on a new root")
            # The lock on this row makes commits and fences of one sink come one after the other.
            connection.execute(
                sql.SQL(
                    "INSERT INTO {} (pipeline, sink, table_name) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
                ).format(self._table(_EPOCHS)),
                self._owner(place),
            )
            record = self._record(connection, place, for_update=True)
            assert record is not None
            if record.fence > permit.generation:
                raise Fenced(f"{self.describe()} was fenced by generation {record.fence}")
            if record.epoch >= permit.epoch:
                return CommitAnswer.ALREADY
            fresh = [each for each in committable.batches if each.batch >= record.next_batch and each.rows]
            for generation in sorted({each.generation for each in fresh}):
                numbers = [each.batch for each in fresh if each.generation == generation]
                self._move(connection, self._staging(place, generation), numbers)
            connection.execute(
                sql.SQL(
                    "UPDATE {} SET generation = %s, epoch = %s, next_batch = greatest(next_batch, %s),"
                    " committed_at = now() WHERE pipeline = %s AND sink = %s AND table_name = %s"
                ).format(self._table(_EPOCHS)),
                (permit.generation, permit.epoch, committable.through_batch + 1, *self._owner(place)),
            )
        return CommitAnswer.COMMITTED

    def _move(self, connection: psycopg.Connection[Any], staging: str, batches: list[int]) -> None:
        sql = _sql()
        names = [name for name in self._columns(connection, staging) if name not in (_BATCH, _PART)]
        columns = _comma(map(sql.Identifier, names))
        insert = sql.SQL("INSERT INTO {} ({}) ").format(self._table(), columns)
        staged = sql.SQL(" FROM {} WHERE {} = ANY(%s)").format(self._table(staging), sql.Identifier(_BATCH))
        if not self._key:
            connection.execute(insert + sql.SQL("SELECT {}").format(columns) + staged, (batches,))
        else:
            key = _comma(map(sql.Identifier, self._key))
            others = [name for name in names if name not in self._key]
            change = _comma(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in others)
            newest = sql.SQL("SELECT DISTINCT ON ({}) {}").format(key, columns)
            order = sql.SQL(" ORDER BY {}, {} DESC").format(key, sql.Identifier(_BATCH))
            then = sql.SQL("UPDATE SET {}").format(change) if others else sql.SQL("NOTHING")
            conflict = sql.SQL(" ON CONFLICT ({}) DO ").format(key)
            connection.execute(insert + newest + staged + order + conflict + then, (batches,))
        connection.execute(sql.SQL("DELETE") + staged, (batches,))

    def forget_staged(self, place: SinkPlace, before_generation: int) -> None:
        sql = _sql()
        prefix = self._staging(place, None)
        with self._connected() as connection:
            found = connection.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = %s AND starts_with(tablename, %s)",
                (self._schema, prefix),
            ).fetchall()
            for (name,) in found:
                number = name.removeprefix(prefix)
                if number.isdigit() and int(number) < before_generation:
                    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(self._table(name)))

    # -- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        """One transaction. What goes wrong is told without credentials."""
        try:
            import psycopg
        except ImportError as error:
            raise InvalidPipeline(
                "PostgresTable needs the package psycopg: pip install 'tidegate[postgres]'"
            ) from error
        try:
            with psycopg.connect(self._dsn, **_options(self._dsn)) as connection:
                _wait_for_locks(connection)
                yield connection
        except psycopg.errors.LockNotAvailable:
            raise SinkFailed(
                f"{self.describe()} is locked by another transaction, perhaps of an old run that hangs; end it"
            ) from None
        except psycopg.Error as error:
            raise SinkFailed(f"{self.describe()}: {scrubbed(str(error), self._dsn)}") from None

    def _table(self, name: str | None = None) -> Identifier:
        identifier: Identifier = _sql().Identifier(self._schema, self._name if name is None else name)
        return identifier

    def _owner(self, place: SinkPlace) -> tuple[str, str, str]:
        """Whose record it is in `tidegate_epochs`, which the tables of a schema share."""
        return place.pipeline, place.stage, self._name

    def _staging(self, place: SinkPlace, generation: int | None) -> str:
        # By a digest, because names are cut off at 63 bytes.
        digest = hashlib.sha256(f"{place.owner}\n{self._name}".encode()).hexdigest()[:12]
        return f"{_STAGING}_{digest}_{'' if generation is None else generation}"

    def _exists(self, connection: psycopg.Connection[Any], name: str) -> bool:
        found = connection.execute("SELECT to_regclass(%s)", (self._table(name).as_string(connection),)).fetchone()
        return found is not None and found[0] is not None

    def _columns(self, connection: psycopg.Connection[Any], name: str | None = None) -> dict[str, str]:
        """Names and types in the table's order. Empty: there is no such table."""
        found = connection.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            (self._table(name).as_string(connection),),
        ).fetchall()
        return dict(found)

    def _has_unique_key(self, connection: psycopg.Connection[Any]) -> bool:
        found = connection.execute(
            "SELECT array_agg(attname::text) FROM pg_index"
            " JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY(indkey)"
            " WHERE indrelid = to_regclass(%s) AND indisunique AND indpred IS NULL GROUP BY indexrelid",
            (self._table().as_string(connection),),
        ).fetchall()
        return any(set(names) == set(self._key) for (names,) in found)

    def _record(
        self, connection: psycopg.Connection[Any], place: SinkPlace, *, for_update: bool = False
    ) -> _Record | None:
        query = "SELECT epoch, fence, next_batch FROM {} WHERE pipeline = %s AND sink = %s AND table_name = %s"
        found = connection.execute(
            _sql().SQL(query + (" FOR UPDATE" if for_update else "")).format(self._table(_EPOCHS)),
            self._owner(place),
        ).fetchone()
        return None if found is None else _Record(*found)

    def _type(self, place: SinkPlace, name: str, kind: DataType) -> str:
        try:
            return _type_name(kind)
        except KeyError:
            raise InvalidPipeline(
                f"{place.owner}: column {name!r} is {kind.simpleString()}, which {self.describe()} cannot hold; cast it"
            ) from None


class _Record:
    __slots__ = ("epoch", "fence", "next_batch")

    def __init__(self, epoch: int, fence: int, next_batch: int) -> None:
        self.epoch = epoch
        self.fence = fence
        self.next_batch = next_batch


def _sql() -> Any:
    from psycopg import sql

    return sql


def _comma(parts: Any) -> Composed:
    joined: Composed = _sql().SQL(", ").join(parts)
    return joined


def _options(dsn: str) -> dict[str, Any]:
    """A server that does not answer must not hang a checkpoint."""
    return {} if "connect_timeout" in dsn else {"connect_timeout": _CONNECT_SECONDS}


def _wait_for_locks(connection: psycopg.Connection[Any]) -> None:
    """For a while, not for ever: a run that was stopped in the middle of a transaction holds its locks."""
    connection.execute("SELECT set_config('lock_timeout', %s, true)", (f"{_LOCK_SECONDS}s",))


def _listed(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def _type_name(kind: DataType) -> str:
    name = kind.typeName()
    if name.startswith("decimal"):
        return f"numeric({kind.precision},{kind.scale})"  # type: ignore[attr-defined]
    if name.startswith(("varchar", "char")):
        return "text"
    return _TYPES[name]


def scrubbed(text: str, dsn: str) -> str:
    """A message without what a connection string keeps secret."""
    from psycopg import conninfo

    secrets = {dsn}
    try:
        found = conninfo.conninfo_to_dict(dsn)
        secrets |= {str(found[name]) for name in ("password", "sslpassword", "passfile") if found.get(name)}
    except Exception:
        return "the connection string cannot be read (it is not shown here)"
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return " ".join(text.split())


# -- on the executors -------------------------------------------------------------------------------


def _pyarrow() -> Any:
    return importlib.import_module("pyarrow")


def _copyable(frame: DataFrame) -> list[Column]:
    """The columns as values that CSV can hold: JSON for what is nested, hexadecimal digits for bytes."""
    from pyspark.sql import functions as F

    columns: list[Column] = []
    for field in frame.schema.fields:
        column = F.col(f"`{field.name}`")
        kind = field.dataType.typeName()
        if kind in ("array", "map", "struct"):
            column = F.to_json(column)
        elif kind == "binary":
            column = F.concat(F.lit("\\x"), F.hex(column))
        columns.append(column.alias(field.name))
    return columns


def _copier(
    dsn: str, schema: str, staging: str, batch: int, names: tuple[str, ...]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What an executor does with a partition. It may be tried again, also while an earlier try still runs."""

    def copy(batches: Iterator[Any]) -> Iterator[Any]:
        import psycopg
        from psycopg import sql
        from pyspark import TaskContext

        context = TaskContext.get()
        part = 0 if context is None else context.partitionId()
        table = sql.Identifier(schema, staging)
        columns = sql.SQL(", ").join(map(sql.Identifier, (*names, _BATCH, _PART)))
        copied = 0
        try:
            with psycopg.connect(dsn, **_options(dsn)) as connection:
                _wait_for_locks(connection)
                connection.execute(
                    "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"{staging} {batch} {part}",)
                )
                connection.execute(
                    sql.SQL("DELETE FROM {} WHERE {} = %s AND {} = %s").format(
                        table, sql.Identifier(_BATCH), sql.Identifier(_PART)
                    ),
                    (batch, part),
                )
                statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(table, columns)
                with connection.cursor() as cursor, cursor.copy(statement) as into:
                    for each in batches:
                        if each.num_rows:
                            into.write(_as_csv(each, batch, part))
                            copied += each.num_rows
        except psycopg.Error as error:
            raise RuntimeError(f"could not copy into {schema}.{staging}: {scrubbed(str(error), dsn)}") from None
        yield _pyarrow().RecordBatch.from_pydict({"copied": [copied]})

    return copy


def _as_csv(rows: Any, batch: int, part: int) -> bytes:
    pyarrow, csv = _pyarrow(), importlib.import_module("pyarrow.csv")
    table = pyarrow.Table.from_batches([rows])
    count = table.num_rows
    table = table.append_column(_BATCH, pyarrow.repeat(pyarrow.scalar(batch, pyarrow.int64()), count))
    table = table.append_column(_PART, pyarrow.repeat(pyarrow.scalar(part, pyarrow.int32()), count))
    into = pyarrow.BufferOutputStream()
    # Strings are quoted, null is not: so an empty string and null stay two things.
    csv.write_csv(table, into, csv.WriteOptions(include_header=False, quoting_style="needed"))
    data: bytes = into.getvalue().to_pybytes()
    return data
