"""What undoes the commits of a PostgreSQL table, kept in the very transactions that make them.

`tidegate_history`, in the schema of the table, has the states that a table has shown, per pipeline, sink and table, in
order. A table of each sink's own has the rows that came and went from one state to the next: a row that was replaced
both went and came. Setting a table back is such a step too, so that it can be undone.

A history is of use only if it ends where the record of the table's epochs does. Whatever else has moved the record on
(a run without history, an older version, somebody's hand) has left a gap; then the next commit begins it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.sinks.contract import SinkPlace
from tidegate.sinks.postgres import catalog
from tidegate.sinks.postgres.epochs import OWNED, Record, creating
from tidegate.sinks.postgres.moving import ADDED, STEP, Kept
from tidegate.sinks.postgres.statements import execute, names, sql

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed, Identifier

    from tidegate.sinks.postgres.table import PostgresTable

_HISTORY: Final = "tidegate_history"
_FIELDS: Final = "state, root, generation, since, epoch, next_batch, by_key, is_set_back"


class State(msgspec.Struct, frozen=True):
    """What a table showed from one change of its rows to the next.

    `number` is that of the last step that made it. `since` is the epoch that it was first shown by, `epoch` the last
    one, both as `root` counts them. `is_set_back`: no commit has made it, so it is known by one epoch alone.
    """

    number: int
    root: str
    generation: int
    since: int
    epoch: int
    next_batch: int
    key: tuple[str, ...] = ()
    is_set_back: bool = False
    shown_at: datetime | None = None
    age_ms: int = 0


class History:
    """Of one owner's table."""

    def __init__(self, sink: PostgresTable, place: SinkPlace) -> None:
        self._sink = sink
        self._place = place
        self._owner = (place.pipeline, place.stage, sink.name)

    @property
    def _states(self) -> Identifier:
        return self._sink.beside(_HISTORY)

    @property
    def rows(self) -> Identifier:
        """The table of the rows that came and went."""
        return self._sink.beside(self._sink.belonging(_HISTORY, self._place))

    # -- what is known ----------------------------------------------------------------------------

    def states(self, connection: psycopg.Connection[Any], *, newest: bool = False) -> list[State]:
        """In their order, or the newest alone."""
        if not catalog.exists(connection, self._states):
            return []
        query = (
            f"SELECT {_FIELDS}, shown_at, (extract(epoch FROM clock_timestamp() - shown_at) * 1000)::bigint"
            f" FROM {{}} WHERE {OWNED} ORDER BY state"
        )
        ordered = sql().SQL(query + (" DESC LIMIT 1" if newest else "")).format(self._states)
        found = execute(connection, ordered, self._owner).fetchall()
        fields = State.__struct_fields__
        return [msgspec.convert(dict(zip(fields, each, strict=True)), State) for each in found]

    def usable(self, connection: psycopg.Connection[Any], record: Record) -> list[State]:
        """The states, if they end where the table is."""
        states = self.states(connection)
        return states if states and _is_at(states[-1], record) and self._has_rows(connection) else []

    def newest_number(self, connection: psycopg.Connection[Any]) -> Composed:
        """The number of the newest state, for a statement that reads other things too."""
        pipeline, sink, table = map(sql().Literal, self._owner)
        query = "(SELECT max(state) FROM {} WHERE pipeline = {} AND sink = {} AND table_name = {})"
        found: Composed = sql().SQL(query).format(self._states, pipeline, sink, table)
        return found if catalog.exists(connection, self._states) else sql().Composed([sql().SQL("NULL::bigint")])

    def up_to(self, connection: psycopg.Connection[Any], number: int, record: Record) -> list[State]:
        """The states up to this one, which was the newest when this was recorded; it may have lasted on since."""
        states = [each for each in self.states(connection) if each.number <= number]
        if not states or not self._has_rows(connection):
            return []
        last = states[-1]
        is_at = last.since <= record.epoch <= last.epoch and record.next_batch <= last.next_batch
        return states if is_at and last.number == number else []

    def _has_rows(self, connection: psycopg.Connection[Any]) -> bool:
        return catalog.exists(connection, self.rows)

    # -- keeping ----------------------------------------------------------------------------------

    def prepare(self, connection: psycopg.Connection[Any]) -> None:
        """Before the record is locked: who creates tables waits for others who do."""
        if catalog.exists(connection, self._states):
            return
        creating(connection, self._sink)
        connection.execute(
            sql()
            .SQL(
                "CREATE TABLE IF NOT EXISTS {} (pipeline text, sink text, table_name text, state bigint,"
                " root text NOT NULL, generation bigint NOT NULL, since bigint NOT NULL, epoch bigint NOT NULL,"
                " next_batch bigint NOT NULL, by_key text[] NOT NULL, is_set_back boolean NOT NULL,"
                " shown_at timestamp with time zone NOT NULL, PRIMARY KEY (pipeline, sink, table_name, state))"
            )
            .format(self._states)
        )

    def begin(self, connection: psycopg.Connection[Any], record: Record) -> int:
        """Go on behind the newest state, or begin anew. Returns its number. The record is locked, and so is the table:
        nobody changes its columns."""
        newest = self.states(connection, newest=True)
        fits = newest and _is_at(newest[-1], record) and newest[-1].key == self._sink.key
        if fits and self.fit_columns(connection):
            return newest[-1].number
        root = self._place.root if record.root is None else record.root
        return self.restart(connection, root, 0, record.epoch, record.next_batch)

    def fit_columns(self, connection: psycopg.Connection[Any]) -> bool:
        """Let rows that are kept have the columns that the table was given since: in it they were null, or a
        comparison tells. Returns whether they have the table's columns then."""
        table, kept = catalog.columns(connection, self._sink.identifier), kept_columns(connection, self.rows)
        if not kept or any(table.get(name) != kind for name, kind in kept.items()):
            return False
        for name, kind in table.items():
            if name not in kept:
                add = sql().SQL("ALTER TABLE {} ADD COLUMN {} {}")
                connection.execute(add.format(self.rows, sql().Identifier(name), sql().SQL(kind)))
        return True

    def restart(
        self,
        connection: psycopg.Connection[Any],
        root: str,
        generation: int,
        epoch: int,
        next_batch: int,
        *,
        is_set_back: bool = False,
    ) -> int:
        """Begin anew, at what the table shows now. Returns its number, which no state had before."""
        newest = self.states(connection, newest=True)
        self.forget(connection)
        # Without what the table is constrained by: that may be changed.
        create = sql().SQL("CREATE TABLE {} AS SELECT {}, 0::bigint AS {}, true AS {} FROM {} WITH NO DATA")
        columns, table = names(catalog.columns(connection, self._sink.identifier)), self._sink.identifier
        step = sql().Identifier(STEP)
        connection.execute(create.format(self.rows, columns, step, sql().Identifier(ADDED), table))
        connection.execute(sql().SQL("CREATE INDEX ON {} ({})").format(self.rows, step))
        number = newest[-1].number + 1 if newest else 1
        self.add(
            connection,
            State(number, root, generation, epoch, epoch, next_batch, self._sink.key, is_set_back=is_set_back),
        )
        return number

    def add(self, connection: psycopg.Connection[Any], state: State) -> None:
        query = (
            f"INSERT INTO {{}} (pipeline, sink, table_name, {_FIELDS}, shown_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, clock_timestamp())"
        )
        fields = (state.number, state.root, state.generation, state.since, state.epoch, state.next_batch)
        values = (*self._owner, *fields, list(state.key), state.is_set_back)
        execute(connection, sql().SQL(query).format(self._states), values)

    def shown(
        self, connection: psycopg.Connection[Any], before: Record, step: int | None, generation: int, now: Record
    ) -> None:
        """After a commit: what is shown by now. `step` is the last one that was kept of it, None: it had no rows."""
        root = self._place.root
        state = State(step or 0, root, generation, now.epoch, now.epoch, now.next_batch, self._sink.key)
        if step is None:
            newest = self.states(connection, newest=True)
            if not newest or not _is_at(newest[-1], before):
                self.begin(connection, before)
                newest = self.states(connection, newest=True)
            if not newest[-1].is_set_back and newest[-1].root == root:
                query = f"UPDATE {{}} SET epoch = %s, next_batch = %s WHERE {OWNED} AND state = %s"
                values = (now.epoch, now.next_batch, *self._owner, newest[-1].number)
                execute(connection, sql().SQL(query).format(self._states), values)
                return
            state = msgspec.structs.replace(state, number=newest[-1].number + 1, key=newest[-1].key)
        self.add(connection, state)

    def kept(self, step: int) -> Kept:
        """Where a step's rows are kept."""
        return Kept(self.rows, step)

    # -- forgetting -------------------------------------------------------------------------------

    def forget(self, connection: psycopg.Connection[Any]) -> None:
        """All of it."""
        if catalog.exists(connection, self._states):
            execute(connection, sql().SQL(f"DELETE FROM {{}} WHERE {OWNED}").format(self._states), self._owner)
        connection.execute(sql().SQL("DROP TABLE IF EXISTS {}").format(self.rows))

    def forget_before(self, connection: psycopg.Connection[Any], number: int) -> None:
        """What only states before this one need."""
        if not self._has_rows(connection):
            return
        delete = sql().SQL(f"DELETE FROM {{}} WHERE {OWNED} AND state < %s").format(self._states)
        execute(connection, delete, (*self._owner, number))
        delete = sql().SQL("DELETE FROM {} WHERE {} <= %s").format(self.rows, sql().Identifier(STEP))
        execute(connection, delete, (number,))


def kept_columns(connection: psycopg.Connection[Any], rows: Identifier) -> dict[str, str]:
    """Of rows that are kept, without what was added to them. Empty: there is no such table."""
    return {name: kind for name, kind in catalog.columns(connection, rows).items() if name not in (STEP, ADDED)}


def as_state(record: Record, root: str) -> State:
    """All that is known of a table without a history."""
    known = root if record.root is None else record.root
    return State(0, known, 0, record.epoch, record.epoch, record.next_batch)


def _is_at(state: State, record: Record) -> bool:
    return (state.epoch, state.next_batch) == (record.epoch, record.next_batch)


def oldest_needed(states: Sequence[State], needed: Sequence[State], kept_ms: int) -> State:
    """The oldest state that is to be reached: one that a checkpoint needs, or what was shown so long ago."""
    old = [each for each in states if each.age_ms >= kept_ms]
    return min([*needed, old[-1] if old else states[0]], key=lambda each: each.number)
