"""The records of a PostgreSQL table's epochs, in a table `tidegate_epochs` of the same schema, which its tables share.

One row per pipeline, sink and table: the root that its rows belong to, the last epoch, the last batch, and the
generation that it is fenced at.
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
    from psycopg.sql import Identifier

    from tidegate.sinks.postgres.table import PostgresTable

_EPOCHS: Final = "tidegate_epochs"
_OWNED: Final = "pipeline = %s AND sink = %s AND table_name = %s"


class Record(msgspec.Struct, frozen=True):
    """What is recorded of one owner."""

    epoch: int = 0
    fence: int = 0
    next_batch: int = 0
    root: str | None = None

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

    def create(self, connection: psycopg.Connection[Any]) -> None:
        # Two that create one table at the same time would fail, IF NOT EXISTS or not: one after the other.
        connection.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"tidegate tables of {self._sink.schema}",)
        )
        connection.execute(
            sql()
            .SQL(
                "CREATE TABLE IF NOT EXISTS {} (pipeline text, sink text, table_name text,"
                " generation bigint NOT NULL DEFAULT 0, fence bigint NOT NULL DEFAULT 0,"
                " epoch bigint NOT NULL DEFAULT 0, next_batch bigint NOT NULL DEFAULT 0,"
                " committed_at timestamp with time zone, root text, PRIMARY KEY (pipeline, sink, table_name))"
            )
            .format(self._table)
        )
        if "root" not in catalog.columns(connection, self._table):  # it was made before tables had owners
            connection.execute(sql().SQL("ALTER TABLE {} ADD COLUMN root text").format(self._table))

    def read(self, connection: psycopg.Connection[Any], *, for_update: bool = False) -> Record | None:
        if not catalog.exists(connection, self._table):
            return None
        # By way of JSON, because one that was made before tables had owners has no such column.
        query = f"SELECT epoch, fence, next_batch, to_jsonb(known) ->> 'root' FROM {{}} AS known WHERE {_OWNED}"
        found = execute(
            connection,
            sql().SQL(query + (" FOR UPDATE" if for_update else "")).format(self._table),
            self._owner,
        ).fetchone()
        return None if found is None else Record(*found)

    def locked(self, connection: psycopg.Connection[Any]) -> Record:
        """The lock on this row makes commits, checks and fences of one sink come one after the other."""
        query = "INSERT INTO {} (pipeline, sink, table_name) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
        execute(connection, sql().SQL(query).format(self._table), self._owner)
        record = self.read(connection, for_update=True)
        assert record is not None
        return record

    def check_root(self, record: Record | None) -> None:
        """Refuse a table whose rows of this owner come from another root."""
        if record is None or record.root in (None, self._place.root):
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
            f" committed_at = now() WHERE {_OWNED}"
        )
        shown = (self._place.root, permit.generation, permit.epoch, through_batch + 1)
        execute(connection, sql().SQL(query).format(self._table), (*shown, *self._owner))
