"""A PostgreSQL table as a sink: executors copy into a staging table, and one transaction per epoch moves the rows.

In the schema of the table lie also
- `tidegate_epochs`: per pipeline, sink and table the root that it belongs to, the last epoch, the last batch and the
  generation that it is fenced at. A commit writes it in the transaction that moves the rows, so a repeated commit does
  nothing;
- one staging table per sink and generation. It is an ordinary, logged table: what a decided checkpoint has sealed must
  survive a crash of the server.

Rows go from Spark's executors to the server by COPY and never pass through the driver.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import Fenced, InvalidConfig, InvalidPipeline, SinkFailed
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.config import as_ms
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace, StagedBatch
from tidegate.sinks.postgres_copy import BATCH as _BATCH
from tidegate.sinks.postgres_copy import PART as _PART
from tidegate.sinks.postgres_copy import copier, copyable
from tidegate.sinks.postgres_types import type_name, why_not_held
from tidegate.sinks.staging import (
    as_names,
    check_key,
    check_newest_by,
    conflicting_rows,
    foreign_table,
    refuse_foreign,
    refuse_put_back,
)
from tidegate.storage.manifest import TableAddress

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed, Identifier
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

    from tidegate.sinks.postgres_connection import Server

_EPOCHS: Final = "tidegate_epochs"
_STAGING: Final = "tidegate_staging"
_ROW: Final = "tidegate_row"
_THERE: Final = "tidegate_there"
_LONGEST_NAME: Final = 63
_LET_IT_IN: Final = (
    "change or delete the row that is in its way, or drop the constraint, and start again; "
    "or give PostgresTable a key, by which rows are replaced"
)
_REFUSED_AT_COMMIT: Final = (
    "So the table shows nothing of this checkpoint, which other tables may show already. What to do: "
    f"{_LET_IT_IN}; or change the pipeline and start it on a new root with new tables. "
    "PostgresTable(check=True) refuses such a checkpoint before it is taken"
)
_REFUSED_BEFORE: Final = (
    "So there is no such checkpoint, and all tables stay at the one before. What to do: "
    f"{_LET_IT_IN}; or change the pipeline so that it writes no such row, and start again"
)


class PostgresTable:
    """A PostgreSQL table that a sink stage appends to or, with a `key`, inserts into and updates.

    `table` is `name` or `schema.name`; without a schema it is in `public`, whatever the `search_path`. `dsn` is a
    connection string or URL; what it leaves out comes from the usual environment variables (PGHOST, PGUSER, PGPASSWORD,
    …), also on the executors. `newest_by` names columns that tell which of two rows with one key is the newer one,
    whenever it comes; without it the later one is.

    `timeout` bounds each statement. A server that does not answer for that long is given up, and told as an error.

    With `check`, the rows of every checkpoint are first tried in a transaction that is rolled back: if the table does
    not take one (UNIQUE, CHECK, a foreign key, …), there is no such checkpoint. It costs as much as the commit itself.
    """

    is_exactly_once = True

    def __init__(
        self,
        table: str,
        dsn: str = "",
        *,
        key: str | Sequence[str] = (),
        newest_by: str | Sequence[str] = (),
        timeout: str = "10m",
        check: bool = False,
    ) -> None:
        schema, _, name = table.rpartition(".")
        if not name or "." in schema:
            raise InvalidPipeline(f"a PostgreSQL table is called 'name' or 'schema.name', not {table!r}")
        self.schema = schema or "public"
        self.name = name
        self._dsn = dsn
        self.key = as_names(key)
        self._timeout_ms = as_ms("timeout", timeout)
        if not self._timeout_ms:
            raise InvalidConfig(f"timeout is {timeout!r}; it must be at least 1ms, such as 10m")
        self.newest_by = as_names(newest_by)
        self.check = check
        self.turn = threading.Lock()
        """A check and a commit take turns here: in the server one would end the other, if it took long."""

    def __repr__(self) -> str:
        return f"PostgresTable({self.schema}.{self.name})"

    def describe(self) -> str:
        return f"PostgreSQL table {self.schema}.{self.name}"

    @property
    def table(self) -> TableAddress:
        return TableAddress("postgres", f"{self.schema}.{self.name}")

    @property
    def needs_order(self) -> bool:
        return bool(self.key) and not self.newest_by

    def bind(self, place: SinkPlace) -> BoundPostgresTable:
        return BoundPostgresTable(self, place)

    def server(self) -> Server:
        """How its server is reached."""
        try:
            from tidegate.sinks.postgres_connection import Server
        except ImportError as error:
            raise InvalidPipeline(
                "PostgresTable needs the package psycopg: pip install 'tidegate[postgres]'"
            ) from error
        return Server(self._dsn, self._timeout_ms)


class BoundPostgresTable:
    """A PostgreSQL table as one stage writes to it."""

    def __init__(self, sink: PostgresTable, place: SinkPlace) -> None:
        self.sink = sink
        self.place = place
        self._schema = sink.schema
        self._name = sink.name
        self._key = sink.key
        self._newest_by = sink.newest_by
        self._checked: frozenset[StagedBatch] = frozenset()
        """The staged batches that were looked through."""

    def describe(self) -> str:
        return self.sink.describe()

    @property
    def table(self) -> TableAddress:
        return self.sink.table

    def identity(self) -> str | None:
        """The server, the database and the table, as the server itself numbers them."""
        with self._connected() as connection:
            found = connection.execute(
                "SELECT pg_database.oid, to_regclass(%s)::oid FROM pg_database WHERE datname = current_database()",
                (self._table().as_string(connection),),
            ).fetchone()
            if found is None or found[1] is None:
                return None
            return f"{_server_number(connection)} {found[0]} {found[1]}"

    # -- the table itself -------------------------------------------------------------------------

    def check_table(self, schema: StructType, output_mode: str) -> bool:
        wanted = {field.name: self._type(field.name, field.dataType) for field in schema.fields}
        check_key(self.describe(), self._key, self.place, schema, output_mode)
        check_newest_by(self.describe(), self._newest_by, self._key, self.place, schema)
        long = [name for name in (self._schema, self._name, *wanted) if len(name.encode()) > _LONGEST_NAME]
        if long:
            raise InvalidPipeline(
                f"{self.place.owner}: PostgreSQL would cut {long[0]!r} off at {_LONGEST_NAME} bytes; "
                f"take a shorter name"
            )
        reserved = [name for name in wanted if name in (_BATCH, _PART, _ROW)]
        if reserved:
            raise InvalidPipeline(f"{self.place.owner} has a column {reserved[0]!r}, a name that Tidegate needs")
        with self._connected() as connection:
            self._check_root(self._record(connection))  # it may have outlived the table
            found = self._columns(connection)
            if not found:
                return False
            if found != wanted:
                raise SinkFailed(
                    f"{self.describe()} has the columns {_listed(found)}, but {self.place.owner} writes "
                    f"{_listed(wanted)}; change the stage or the table, or write to a new table"
                )
            self._check_takes_rows(connection)
            return True

    def probe(self) -> bool:
        with self._connected() as connection:
            self._check_root(self._record(connection))
            if not self._columns(connection):
                return False
            self._check_takes_rows(connection)
            return True

    def _check_takes_rows(self, connection: psycopg.Connection[Any]) -> None:
        """Refuse a table that would not hold the rows as they are, or not for long."""
        generated = self._generated(connection)
        if generated is not None:
            raise SinkFailed(
                f"{self.describe()} makes the values of {generated!r} itself (GENERATED ALWAYS), but "
                f"{self.place.owner} writes them; take that off the column, or write to a new table"
            )
        if self._key and not self._has_unique_key(connection):
            raise SinkFailed(
                f"{self.describe()} has no primary key or unique index on ({', '.join(self._key)}), without which "
                f"rows cannot be replaced by their key; create it, for the whole table, not deferrable, and on "
                f"columns that are NOT NULL (or with NULLS NOT DISTINCT)"
            )
        for name, is_foreign in self._not_durable(connection):
            if is_foreign:
                raise SinkFailed(
                    f"{self.describe()}: {name} is a foreign table, which does not show rows in one transaction with "
                    f"others; write to a table of the server itself"
                )
            raise SinkFailed(
                f"{self.describe()}: {name} is UNLOGGED, so a crash of the server would empty it; "
                f"ALTER TABLE {name} SET LOGGED, or write to a new table"
            )

    def _check_unchanged(
        self, connection: psycopg.Connection[Any], wanted: dict[str, str], name: str | None = None
    ) -> None:
        """Refuse a table, or that of this name, whose columns are not those of the rows: the server would convert
        them, which rounds and cuts."""
        found = {
            column: kind for column, kind in self._columns(connection, name).items() if column not in (_BATCH, _PART)
        }
        if found != wanted:
            of = self.describe() if name is None else f"{self.describe()}: its staging table {self._schema}.{name}"
            raise SinkFailed(
                f"{of} was changed during the run: {_changes(found, wanted)}. Nothing was committed; change it back "
                f"and start again, or start the pipeline on a new root with a new table"
            )

    def prepare_table(self, schema: StructType) -> None:
        sql = _sql()
        columns = [
            sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(type_name(field.dataType)))
            for field in schema.fields
        ]
        if self._key:
            columns.append(sql.SQL("PRIMARY KEY ({})").format(_comma(map(sql.Identifier, self._key))))
        with self._connected() as connection:
            self._create_epochs(connection)
            connection.execute(sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(self._table(), _comma(columns)))

    def _create_epochs(self, connection: psycopg.Connection[Any]) -> None:
        # Two that create one table at the same time would fail, IF NOT EXISTS or not: one after the other.
        connection.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"tidegate tables of {self._schema}",)
        )
        connection.execute(
            _sql()
            .SQL(
                "CREATE TABLE IF NOT EXISTS {} (pipeline text, sink text, table_name text,"
                " generation bigint NOT NULL DEFAULT 0, fence bigint NOT NULL DEFAULT 0,"
                " epoch bigint NOT NULL DEFAULT 0, next_batch bigint NOT NULL DEFAULT 0,"
                " committed_at timestamp with time zone, root text, PRIMARY KEY (pipeline, sink, table_name))"
            )
            .format(self._table(_EPOCHS))
        )
        if "root" not in self._columns(connection, _EPOCHS):  # it was made before tables had owners
            connection.execute(_sql().SQL("ALTER TABLE {} ADD COLUMN root text").format(self._table(_EPOCHS)))

    def claim(self) -> None:
        with self._connected() as connection:
            record = self._record(connection)
            self._check_root(record)
            if record is not None and record.root == self.place.root:
                return  # and wait for no commit of an older run, which has this record locked
            self._create_epochs(connection)
            _execute(
                connection,
                _sql()
                .SQL(
                    "INSERT INTO {} AS known (pipeline, sink, table_name, root) VALUES (%s, %s, %s, %s)"
                    " ON CONFLICT (pipeline, sink, table_name) DO UPDATE SET root = coalesce(known.root, excluded.root)"
                )
                .format(self._table(_EPOCHS)),
                (*self._owner(), self.place.root),
            )
            self._check_root(self._record(connection))

    def _check_root(self, record: _Record | None) -> None:
        if record is None or record.root in (None, self.place.root):
            return
        pipeline, sink, table = (name.replace("'", "''") for name in self._owner())
        raise foreign_table(
            self.describe(),
            self.place,
            f"DELETE FROM {self._table(_EPOCHS).as_string(None)} WHERE pipeline = '{pipeline}' AND sink = '{sink}' "
            f"AND table_name = '{table}'",
        )

    def facts(self) -> SinkFacts:
        with self._connected() as connection:
            found = self._record(connection)
            return SinkFacts() if found is None else SinkFacts(found.epoch, found.fence, found.next_batch)

    def fence(self, generation: int) -> None:
        with self._connected() as connection:
            if not self._exists(connection, _EPOCHS):
                return
            self._check_root(self._record(connection, for_update=True))
            _execute(
                connection,
                _sql()
                .SQL(
                    "INSERT INTO {0} AS known (pipeline, sink, table_name, fence) VALUES (%s, %s, %s, %s)"
                    " ON CONFLICT (pipeline, sink, table_name)"
                    " DO UPDATE SET fence = greatest(known.fence, excluded.fence)"
                )
                .format(self._table(_EPOCHS)),
                (*self._owner(), generation),
            )

    # -- staging ----------------------------------------------------------------------------------

    def open_staging(self, generation: int, schema: StructType) -> None:
        sql = _sql()
        staging = self._staging(generation)
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
            # What it was made like stays as it is until this transaction ends.
            wanted = {field.name: type_name(field.dataType) for field in schema.fields}
            self._check_unchanged(connection, wanted)
            self._check_unchanged(connection, wanted, staging)

    def stage(self, generation: int, batch: int, frame: DataFrame) -> int:
        staging = self._staging(generation)
        with self._connected() as connection:
            # Of an earlier try of the batch, which may have had more partitions.
            _execute(
                connection,
                _sql().SQL("DELETE FROM {} WHERE {} = %s").format(self._table(staging), _sql().Identifier(_BATCH)),
                (batch,),
            )
        copied = frame.select(*copyable(frame)).mapInArrow(
            copier(self.sink.server(), self._schema, staging, batch, tuple(frame.columns)), "copied long"
        )
        return sum(row["copied"] for row in copied.collect())

    # -- committing -------------------------------------------------------------------------------

    def _refuse_conflicts(self, connection: psycopg.Connection[Any], staged: Sequence[StagedBatch]) -> None:
        """Refuse different rows of one key in a batch, in what was not looked through yet."""
        known = self._checked
        unknown = [each for each in staged if each.rows and each not in known]
        for generation in sorted({each.generation for each in unknown}):
            batches = [each.batch for each in unknown if each.generation == generation]
            key = self._conflict(connection, self._staging(generation), batches)
            if key is not None:
                raise conflicting_rows(self.describe(), self.place, key, self._newest_by)
        self._checked = known | set(unknown)

    def _conflict(
        self, connection: psycopg.Connection[Any], staging: str, batches: Sequence[int]
    ) -> dict[str, Any] | None:
        """A key of which a batch has different rows that are the newest; None: there is none."""
        sql = _sql()
        columns = self._columns(connection, staging)
        if not columns:
            return None  # a commit says so
        by = _comma(map(sql.Identifier, (_BATCH, *self._key)))
        from_staged = sql.SQL(" FROM {} WHERE {} = ANY(%s)").format(self._table(staging), sql.Identifier(_BATCH))
        # The keys alone are counted first, and most often that is all.
        several = sql.SQL("SELECT 1") + from_staged + sql.SQL(" GROUP BY {} HAVING count(*) > 1 LIMIT 1").format(by)
        if _execute(connection, several, (list(batches),)).fetchone() is None:
            return None
        values = _comma(_compared(name, kind) for name, kind in columns.items() if name not in (_BATCH, _PART))
        order = sql.SQL("ORDER BY {}").format(self._newest_first(columns)) if self._newest_by else sql.SQL("")
        rivals = sql.SQL("SELECT {}, ROW({}) AS {}, rank() OVER (PARTITION BY {} {}) AS {}").format(
            by, values, sql.Identifier(_ROW), by, order, sql.Identifier(_PART)
        )
        different = sql.SQL(
            "SELECT {} FROM ({}) AS rivals WHERE {} = 1 GROUP BY {} HAVING count(DISTINCT {}) > 1 LIMIT 1"
        ).format(
            _comma(map(sql.Identifier, self._key)),
            rivals + from_staged,
            sql.Identifier(_PART),
            by,
            sql.Identifier(_ROW),
        )
        found = _execute(connection, different, (list(batches),)).fetchone()
        return None if found is None else dict(zip(self._key, found, strict=True))

    def _newest_first(self, columns: dict[str, str]) -> Composed:
        """In the order that Spark has: strings by their bytes, null before all values."""
        sql = _sql()
        return _comma(sql.SQL("{} DESC NULLS LAST").format(_compared(name, columns[name])) for name in self._newest_by)

    def _is_not_older(self, columns: dict[str, str]) -> Composed:
        """Whether the row of a conflict is at least as new as the one that is there."""
        sql = _sql()
        newer = sql.SQL("false")
        for name in reversed(self._newest_by):
            there, new = (_compared(name, columns[name], of) for of in (_THERE, "excluded"))
            newer = sql.SQL(
                "({0} > {1}) IS TRUE OR ({0} IS NOT NULL AND {1} IS NULL) OR ({0} IS NOT DISTINCT FROM {1} AND ({2}))"
            ).format(there, new, newer)
        return sql.SQL("NOT ({})").format(newer)  # type: ignore[no-any-return]

    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        refuse_foreign(self.describe(), self.place, committable.files)
        with self.sink.turn, self._connected(_REFUSED_AT_COMMIT) as connection:
            sql = _sql()
            record = self._locked_record(connection)
            self._check_root(record)
            if record.fence > permit.generation:
                raise Fenced(f"{self.describe()} was fenced by generation {record.fence}")
            refuse_put_back(self.describe(), self.place, record.epoch, record.next_batch, committable)
            if record.epoch >= permit.epoch:
                return CommitAnswer.ALREADY
            self._move_fresh(connection, record, committable)
            _execute(
                connection,
                sql.SQL(
                    "UPDATE {} SET root = %s, generation = %s, epoch = %s, next_batch = greatest(next_batch, %s),"
                    " committed_at = now() WHERE pipeline = %s AND sink = %s AND table_name = %s"
                ).format(self._table(_EPOCHS)),
                (self.place.root, permit.generation, permit.epoch, committable.through_batch + 1, *self._owner()),
            )
        return CommitAnswer.COMMITTED

    def check_commit(self, committable: Committable) -> None:
        if not (self.sink.check or self._key) or not any(each.rows for each in committable.batches):
            return
        if self.sink.check:
            self._try_commit(committable)
        else:
            self._look_through(committable)
        self._checked = frozenset(committable.batches)

    def _try_commit(self, committable: Committable) -> None:
        with self.sink.turn, self._connected(_REFUSED_BEFORE) as connection:
            record = self._locked_record(connection)
            self._check_root(record)
            refuse_put_back(self.describe(), self.place, record.epoch, record.next_batch, committable)
            self._move_fresh(connection, record, committable)
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")  # also what a commit alone would look at
            connection.rollback()

    def _look_through(self, committable: Committable) -> None:
        """Without a lock: a commit that takes long holds up no checkpoint. What it shows meanwhile it takes out of the
        staging table all at once, so that no statement sees a part of a batch."""
        with self._connected() as connection:
            record = self._record(connection) or _Record(0, 0, 0, None)
            self._check_root(record)
            refuse_put_back(self.describe(), self.place, record.epoch, record.next_batch, committable)
            self._refuse_conflicts(connection, _fresh(record, committable))

    def _locked_record(self, connection: psycopg.Connection[Any]) -> _Record:
        """The lock on this row makes commits, checks and fences of one sink come one after the other."""
        if not self._columns(connection):
            raise SinkFailed(f"{self.describe()} is gone; restore it, or start the pipeline on a new root")
        _execute(
            connection,
            _sql()
            .SQL("INSERT INTO {} (pipeline, sink, table_name) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING")
            .format(self._table(_EPOCHS)),
            self._owner(),
        )
        record = self._record(connection, for_update=True)
        assert record is not None
        return record

    def _move_fresh(self, connection: psycopg.Connection[Any], record: _Record, committable: Committable) -> None:
        """Move what the table does not show yet. Nobody has changed the table, nor can until the transaction ends."""
        fresh = _fresh(record, committable)
        if not fresh:
            return
        connection.execute(_sql().SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(self._table()))
        self._check_takes_rows(connection)
        if self._key:
            self._refuse_conflicts(connection, fresh)
        for generation in sorted({each.generation for each in fresh}):
            staging = self._staging(generation)
            staged = self._columns(connection, staging)
            if not staged:
                raise SinkFailed(
                    f"{self.describe()}: {self._schema}.{staging}, in which rows were staged, is gone, so nothing was "
                    f"committed; restore it, or start the pipeline on a new root"
                )
            self._check_unchanged(connection, {name: staged[name] for name in staged if name not in (_BATCH, _PART)})
            self._move(connection, staging, [each for each in fresh if each.generation == generation])

    def _move(self, connection: psycopg.Connection[Any], staging: str, batches: list[StagedBatch]) -> None:
        sql = _sql()
        numbers = [each.batch for each in batches]
        kinds = self._columns(connection, staging)
        names = [name for name in kinds if name not in (_BATCH, _PART)]
        columns = _comma(map(sql.Identifier, names))
        insert = sql.SQL("INSERT INTO {} AS {} ({}) ").format(self._table(), sql.Identifier(_THERE), columns)
        staged = sql.SQL(" FROM {} WHERE {} = ANY(%s)").format(self._table(staging), sql.Identifier(_BATCH))
        if not self._key:
            _execute(connection, insert + sql.SQL("SELECT {}").format(columns) + staged, (numbers,))
        else:
            key = _comma(map(sql.Identifier, self._key))
            others = [name for name in names if name not in self._key]
            change = _comma(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in others)
            newest = sql.SQL("SELECT DISTINCT ON ({}) {}").format(key, columns)
            order = sql.SQL(" ORDER BY {}, ").format(key)
            then = sql.SQL("UPDATE SET {}").format(change) if others else sql.SQL("NOTHING")
            if self._newest_by:
                order += self._newest_first(kinds) + sql.SQL(", ")
                then += sql.SQL(" WHERE ") + self._is_not_older(kinds) if others else sql.SQL("")
            order += sql.SQL("{} DESC").format(sql.Identifier(_BATCH))
            conflict = sql.SQL(" ON CONFLICT ({}) DO ").format(key)
            _execute(connection, insert + newest + staged + order + conflict + then, (numbers,))
        found = _execute(connection, sql.SQL("DELETE") + staged, (numbers,)).rowcount
        expected = sum(each.rows for each in batches)
        if found != expected:
            raise SinkFailed(
                f"{self.describe()}: {expected} rows were staged in {self._schema}.{staging}, but {found} are there, "
                f"so nothing was committed; restore them, or start the pipeline on a new root"
            )

    def forget_staged(self, before_generation: int) -> None:
        sql = _sql()
        prefix = self._staging(None)
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
    def _connected(self, if_refused: str = "") -> Iterator[psycopg.Connection[Any]]:
        """One transaction. What goes wrong is told without credentials; `if_refused`: what is said of a row that the
        table does not take."""
        server = self.sink.server()
        import psycopg

        try:
            with server.transaction() as connection:
                yield connection
        except psycopg.errors.LockNotAvailable:
            raise SinkFailed(
                f"{self.describe()} is locked by another transaction, perhaps of an old run that hangs; end it"
            ) from None
        except psycopg.errors.QueryCanceled as error:
            raise SinkFailed(
                f"{self.describe()}: {server.told(error)}; PostgresTable(timeout=…) says how long one may take"
            ) from None
        except psycopg.Error as error:
            if if_refused and isinstance(error, psycopg.IntegrityError | psycopg.errors.RaiseException):
                raise SinkFailed(f"{self.describe()} refuses a row: {server.told(error)} {if_refused}") from None
            raise SinkFailed(f"{self.describe()}: {server.told(error)}") from None

    def _table(self, name: str | None = None) -> Identifier:
        identifier: Identifier = _sql().Identifier(self._schema, self._name if name is None else name)
        return identifier

    def _owner(self) -> tuple[str, str, str]:
        """Whose record it is in `tidegate_epochs`, which the tables of a schema share."""
        return self.place.pipeline, self.place.stage, self._name

    def _staging(self, generation: int | None) -> str:
        # By a digest, because names are cut off at 63 bytes.
        digest = hashlib.sha256(f"{self.place.owner}\n{self._name}".encode()).hexdigest()[:12]
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

    def _generated(self, connection: psycopg.Connection[Any]) -> str | None:
        """The first column that takes no value from outside, computed or numbered."""
        # Servers before 12 do not know attgenerated.
        found = connection.execute(
            "SELECT attname FROM pg_attribute AS known WHERE attrelid = to_regclass(%s) AND attnum > 0"
            " AND NOT attisdropped AND (attidentity = 'a' OR coalesce(to_jsonb(known) ->> 'attgenerated', '') <> '')"
            " ORDER BY attnum",
            (self._table().as_string(connection),),
        ).fetchone()
        return None if found is None else str(found[0])

    def _not_durable(self, connection: psycopg.Connection[Any]) -> list[tuple[str, bool]]:
        """The table, or partitions of it, that do not keep rows as the record of epochs is kept; which are foreign."""
        found: list[tuple[str, bool]] = connection.execute(
            "WITH RECURSIVE part (number) AS (SELECT to_regclass(%s)::oid"
            " UNION SELECT inhrelid FROM part JOIN pg_inherits ON inhparent = number"
            " JOIN pg_class ON pg_class.oid = inhrelid WHERE relispartition)"
            " SELECT relnamespace::regnamespace::text || '.' || quote_ident(relname), relkind = 'f'"
            " FROM part JOIN pg_class ON pg_class.oid = number"
            " WHERE relpersistence = 'u' OR relkind = 'f' ORDER BY 1",
            (self._table().as_string(connection),),
        ).fetchall()
        return found

    def _has_unique_key(self, connection: psycopg.Connection[Any]) -> bool:
        # Servers before 15 do not know indnullsnotdistinct.
        found = connection.execute(
            "SELECT array_agg(attname::text) FROM pg_index AS known"
            " JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY(indkey[0:indnkeyatts - 1])"
            " WHERE indrelid = to_regclass(%s) AND indisunique AND indimmediate AND indisvalid"
            " AND indexprs IS NULL AND indpred IS NULL GROUP BY indexrelid"
            " HAVING bool_and(attnotnull OR coalesce((to_jsonb(known) ->> 'indnullsnotdistinct')::boolean, false))",
            (self._table().as_string(connection),),
        ).fetchall()
        return any(set(names) == set(self._key) for (names,) in found)

    def _record(self, connection: psycopg.Connection[Any], *, for_update: bool = False) -> _Record | None:
        if not self._exists(connection, _EPOCHS):
            return None
        # By way of JSON, because one that was made before tables had owners has no such column.
        query = (
            "SELECT epoch, fence, next_batch, to_jsonb(known) ->> 'root' FROM {} AS known"
            " WHERE pipeline = %s AND sink = %s AND table_name = %s"
        )
        found = _execute(
            connection,
            _sql().SQL(query + (" FOR UPDATE" if for_update else "")).format(self._table(_EPOCHS)),
            self._owner(),
        ).fetchone()
        return None if found is None else _Record(*found)

    def _type(self, name: str, kind: DataType) -> str:
        why = why_not_held(kind, self.place.session)
        if why is not None:
            raise InvalidPipeline(
                f"{self.place.owner}: column {name!r} is {kind.simpleString()}, which {self.describe()} cannot "
                f"hold{why}"
            )
        return type_name(kind)


class _Record:
    __slots__ = ("epoch", "fence", "next_batch", "root")

    def __init__(self, epoch: int, fence: int, next_batch: int, root: str | None) -> None:
        self.epoch = epoch
        self.fence = fence
        self.next_batch = next_batch
        self.root = root


def _fresh(record: _Record, committable: Committable) -> list[StagedBatch]:
    """The batches with rows that the table does not show yet."""
    return [each for each in committable.batches if each.batch >= record.next_batch and each.rows]


def _sql() -> Any:
    from psycopg import sql

    return sql


def _execute(connection: psycopg.Connection[Any], query: Composed, parameters: Sequence[object]) -> psycopg.Cursor[Any]:
    """With parameters a % in a name would be taken for a placeholder."""
    return connection.execute(_sql().SQL(_with_placeholders(query)), parameters)


def _with_placeholders(part: Any) -> str:
    sql = _sql()
    if isinstance(part, sql.Composed):
        return "".join(map(_with_placeholders, part))
    text: str = part.as_string()
    return text.replace("%", "%%") if isinstance(part, sql.Identifier) else text


def _compared(name: str, kind: str, of: str | None = None) -> Composed:
    """A column, of a table where one is named, compared as Spark does it: strings by their bytes."""
    sql = _sql()
    column = sql.Identifier(name) if of is None else sql.Identifier(of, name)
    compared: Composed = sql.SQL('{} COLLATE "C"' if kind == "text" else "{}").format(column)
    return compared


def _comma(parts: Any) -> Composed:
    joined: Composed = _sql().SQL(", ").join(parts)
    return joined


def _server_number(connection: psycopg.Connection[Any]) -> str:
    """The number that a server got when it was made; where it does not tell, how it was reached."""
    import psycopg

    try:
        with connection.transaction():  # so that a refusal does not end the one that we are in
            found = connection.execute("SELECT system_identifier FROM pg_control_system()").fetchone()
    except psycopg.errors.Error:
        found = None
    return f"{connection.info.host}:{connection.info.port}" if found is None else str(found[0])


def _listed(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def _changes(found: dict[str, str], wanted: dict[str, str]) -> str:
    """What columns have become, against what they were."""
    changes = [
        f"{name} is {found[name]}, not {kind}" if name in found else f"{name} is gone"
        for name, kind in wanted.items()
        if found.get(name) != kind
    ]
    return ", ".join([*changes, *(f"{name} is new" for name in found if name not in wanted)])
