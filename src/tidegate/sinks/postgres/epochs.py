"""The records of a PostgreSQL table's epochs, in a table `tidegate_epochs` of the same schema, which its tables share.

One row per pipeline, sink and table: the root that its rows belong to, the last epoch, the last batch, the generation
that it is fenced at, and the one that it was last set back by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.errors import Fenced
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import Committable, SinkPlace, StagedBatch
from tidegate.sinks.postgres import catalog
from tidegate.sinks.postgres.statements import execute, sql
from tidegate.sinks.staging import foreign_table

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed, Identifier

    from tidegate.sinks.postgres.table import PostgresTable

_EPOCHS: Final = "tidegate_epochs"
OWNED: Final = "pipeline = %s AND sink = %s AND table_name = %s"
_ADDED: Final = {"root": "text", "set_back": "bigint NOT NULL DEFAULT 0"}
"""Columns that it did not have from the start."""


class Record(msgspec.Struct, frozen=True):
    """What is recorded of one owner."""

    epoch: int = 0
    fence: int = 0
    next_batch: int = 0
    root: str | None = None
    set_back: int = 0

    @property
    def facts(self) -> SinkFacts:
        return SinkFacts(self.epoch, self.fence, self.next_batch)

    def fresh(self, committable: Committable) -> list[StagedBatch]:
        """The batches with rows that the table does not show yet."""
        return [each for each in committable.batches if each.batch >= self.next_batch and each.rows]


class Epochs:
    """Of one owner."""

    def __init__(self, sink: PostgresTable, place: SinkPlace) -> None:
        self._sink = sink
        self._place = place
        self._owner = (place.pipeline, place.stage, sink.name)

    @property
    def _table(self) -> Identifier:
        return self._sink.beside(_EPOCHS)

    def ensure(self, connection: psycopg.Connection[Any]) -> None:
        """Create it, unless it is there with all its columns: who creates tables holds up others who do."""
        if not _ADDED.keys() <= catalog.columns(connection, self._table).keys():
            self.create(connection)

    def create(self, connection: psycopg.Connection[Any]) -> None:
        creating(connection, self._sink)
        connection.execute(
            sql()
            .SQL(
                "CREATE TABLE IF NOT EXISTS {} (pipeline text, sink text, table_name text,"
                " generation bigint NOT NULL DEFAULT 0, fence bigint NOT NULL DEFAULT 0,"
                " epoch bigint NOT NULL DEFAULT 0, next_batch bigint NOT NULL DEFAULT 0,"
                " committed_at timestamp with time zone, root text, set_back bigint NOT NULL DEFAULT 0,"
                " PRIMARY KEY (pipeline, sink, table_name))"
            )
            .format(self._table)
        )
        there = catalog.columns(connection, self._table)
        for name, kind in _ADDED.items():
            if name not in there:
                add = sql().SQL(f"ALTER TABLE {{}} ADD COLUMN {name} {kind}")
                connection.execute(add.format(self._table))

    def read(self, connection: psycopg.Connection[Any], *, for_update: bool = False) -> Record | None:
        if not catalog.exists(connection, self._table):
            return None
        # By way of JSON, because one that was made before has no such columns.
        query = (
            "SELECT epoch, fence, next_batch, to_jsonb(known) ->> 'root',"
            " coalesce((to_jsonb(known) ->> 'set_back')::bigint, 0)"
            f" FROM {{}} AS known WHERE {OWNED}"
        )
        found = execute(
            connection,
            sql().SQL(query + (" FOR UPDATE" if for_update else "")).format(self._table),
            self._owner,
        ).fetchone()
        return None if found is None else Record(*found)

    def as_json(self, connection: psycopg.Connection[Any]) -> Composed:
        """What is recorded, for a statement that reads other things too."""
        pipeline, sink, table = map(sql().Literal, self._owner)
        query = "(SELECT to_jsonb(known) FROM {} AS known WHERE pipeline = {} AND sink = {} AND table_name = {})"
        found: Composed = sql().SQL(query).format(self._table, pipeline, sink, table)
        return found if catalog.exists(connection, self._table) else sql().Composed([sql().SQL("NULL::jsonb")])

    def locked(self, connection: psycopg.Connection[Any]) -> Record:
        """The lock on this row makes commits, checks and fences of one sink come one after the other."""
        query = "INSERT INTO {} (pipeline, sink, table_name) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
        execute(connection, sql().SQL(query).format(self._table), self._owner)
        record = self.read(connection, for_update=True)
        assert record is not None
        return record

    def is_anothers(self, record: Record | None) -> bool:
        """Whether the rows of this owner come from another root."""
        return record is not None and record.root not in (None, self._place.root)

    def check_root(self, record: Record | None) -> None:
        """Refuse a table whose rows of this owner come from another root."""
        if not self.is_anothers(record):
            return
        pipeline, sink, table = (name.replace("'", "''") for name in self._owner)
        raise foreign_table(
            self._sink.describe(),
            self._place,
            f"DELETE FROM {self._table.as_string(None)} WHERE pipeline = '{pipeline}' AND sink = '{sink}' "
            f"AND table_name = '{table}'",
        )

    def claim(self, connection: psycopg.Connection[Any]) -> None:
        record = self.read(connection)
        self.check_root(record)
        if record is not None and record.root == self._place.root:
            return  # and wait for no commit of an older run, which has this record locked
        self.create(connection)
        query = (
            "INSERT INTO {} AS known (pipeline, sink, table_name, root) VALUES (%s, %s, %s, %s)"
            " ON CONFLICT (pipeline, sink, table_name) DO UPDATE SET root = coalesce(known.root, excluded.root)"
        )
        execute(connection, sql().SQL(query).format(self._table), (*self._owner, self._place.root))
        self.check_root(self.read(connection))

    def fence(self, connection: psycopg.Connection[Any], generation: int) -> None:
        if not catalog.exists(connection, self._table):
            return
        self.check_root(self.read(connection, for_update=True))
        query = (
            "INSERT INTO {0} AS known (pipeline, sink, table_name, fence) VALUES (%s, %s, %s, %s)"
            " ON CONFLICT (pipeline, sink, table_name) DO UPDATE SET fence = greatest(known.fence, excluded.fence)"
        )
        execute(connection, sql().SQL(query).format(self._table), (*self._owner, generation))

    def check_fence(self, record: Record, permit: CommitPermit) -> None:
        if record.fence > permit.generation:
            raise Fenced(f"{self._sink.describe()} was fenced by generation {record.fence}")

    def commit(self, connection: psycopg.Connection[Any], permit: CommitPermit, through_batch: int) -> None:
        query = (
            "UPDATE {} SET root = %s, generation = %s, epoch = %s, next_batch = greatest(next_batch, %s),"
            f" committed_at = now() WHERE {OWNED}"
        )
        shown = (self._place.root, permit.generation, permit.epoch, through_batch + 1)
        execute(connection, sql().SQL(query).format(self._table), (*shown, *self._owner))

    def is_set_back(self, record: Record | None, generation: int) -> bool:
        """Whether it was done by this generation already, or by a newer one of this root."""
        return record is not None and record.set_back >= generation and not self.is_anothers(record)

    def set_back(self, connection: psycopg.Connection[Any], generation: int, epoch: int, next_batch: int) -> None:
        """Record what the table shows by now. It is this root's from here on, and no older generation's."""
        query = (
            "UPDATE {} SET fence = CASE WHEN root = %s THEN greatest(fence, %s) ELSE %s END, root = %s,"
            f" generation = %s, epoch = %s, next_batch = %s, set_back = %s, committed_at = now() WHERE {OWNED}"
        )
        root = self._place.root
        shown = (root, generation, generation, root, generation, epoch, next_batch, generation)
        execute(connection, sql().SQL(query).format(self._table), (*shown, *self._owner))


def creating(connection: psycopg.Connection[Any], sink: PostgresTable) -> None:
    """Two that create one table at the same time would fail, IF NOT EXISTS or not: one after the other."""
    connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"tidegate tables of {sink.schema}",))
