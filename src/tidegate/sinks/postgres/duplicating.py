"""Making a PostgreSQL table show what another one of the same database shows at a checkpoint: in one transaction.

The rows of the other table and the records of its epochs are read by one statement, so they belong together, and nobody
who commits to it meanwhile is held up. What it shows beyond the checkpoint is undone in the copy, by its history;
without one it must show just the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.errors import CheckpointNotVisible, SinkFailed
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import SettingBack, SinkPlace
from tidegate.sinks.postgres import catalog
from tidegate.sinks.postgres.checks import LONGEST_NAME
from tidegate.sinks.postgres.epochs import Epochs, Record
from tidegate.sinks.postgres.history import History, State, as_state
from tidegate.sinks.postgres.setting_back import Wanted, as_wanted, check_shows, state_of
from tidegate.sinks.postgres.statements import comma, names, sql
from tidegate.sinks.postgres.undoing import Effect, Undoing
from tidegate.storage.manifest import Manifest, TableAddress

if TYPE_CHECKING:
    import psycopg

    from tidegate.sinks.postgres.table import PostgresTable

_WHAT_TO_DO: Final = "What to do: stop the pipeline, or take its newest checkpoint"


class _Shown(msgspec.Struct, frozen=True):
    """What the other table showed of one stage, and the states that led there, if they are known."""

    place: SinkPlace
    record: Record
    states: list[State]

    def wanted(self, to: Manifest) -> Wanted:
        found = as_wanted(to, self.place)
        # One that was not brought from elsewhere is of the root that the other table belongs to.
        known = self.record.root if to.origin is None else None
        return found if known is None else msgspec.structs.replace(found, root=known)


class Duplicate:
    """The table of one stage, as a copy of another one at one checkpoint."""

    def __init__(self, sink: PostgresTable, place: SinkPlace, source: TableAddress, to: Manifest) -> None:
        if source.kind != sink.table.kind:
            raise SinkFailed(f"{sink.describe()} cannot show a copy of {source.address}, a table of kind {source.kind}")
        self._sink = sink
        self._place = place
        self._to = to
        self._name = checkpoint_name(to.checkpoint_id)
        self._source = sink.at(source.address)
        # All sinks that write to it, by the checkpoint, and this one.
        tables = {name: shape.table for name, shape in to.shape.items() if shape.table is not None}
        there = [name for name, each in tables.items() if _is_at(each, source) or _is_at(each, sink.table)]
        # In one order: who locks several records would else wait for another who does.
        stages = sorted({*there, place.stage})
        self._places = [msgspec.structs.replace(place, stage=stage) for stage in stages]

    def look(self, connection: psycopg.Connection[Any], *, must_be_empty: bool) -> SettingBack:
        self._check_columns(connection)
        is_there = bool(catalog.columns(connection, self._sink.identifier))
        removed = self._count(connection, self._sink) if is_there else 0
        if must_be_empty:
            self._check_is_empty(removed)
        shown: list[_Shown] = []
        for place in self._places:
            record = Epochs(self._source, place).read(connection) or Record()
            shown.append(_Shown(place, record, History(self._source, place).usable(connection, record)))
        added = self._count(connection, self._source)
        for undoing in self._undoings(connection, self._source, shown):
            effect = self._effect(undoing)
            added += effect.added - effect.removed
        own = Epochs(self._sink, self._place)
        return SettingBack(rows_removed=removed, rows_added=added, is_anothers=own.is_anothers(own.read(connection)))

    def prepare(self, connection: psycopg.Connection[Any]) -> None:
        """Create what is not there yet, in a transaction of its own: a copy may take long, and others create tables
        too."""
        self._check_columns(connection)
        Epochs(self._sink, self._place).create(connection)
        if self._sink.history_ms is not None:
            History(self._sink, self._place).prepare(connection)
        create = sql().SQL("CREATE TABLE IF NOT EXISTS {} (LIKE {} INCLUDING ALL)")
        connection.execute(create.format(self._sink.identifier, self._source.identifier))

    def _check_is_empty(self, rows: int) -> None:
        if rows:
            raise SinkFailed(f"{self._sink.describe()} holds rows; a copy needs a new table, or an empty one")

    def apply(self, connection: psycopg.Connection[Any], generation: int, *, must_be_empty: bool) -> None:
        known = [(Epochs(self._sink, place), place) for place in self._places]
        records = [epochs.locked(connection) for epochs, _ in known]
        if all(epochs.is_set_back(record, generation) for (epochs, _), record in zip(known, records, strict=True)):
            return
        # Nobody writes to it meanwhile.
        lock = sql().SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE")
        connection.execute(lock.format(self._sink.identifier))
        self._check_columns(connection)
        if must_be_empty:
            self._check_is_empty(self._count(connection, self._sink))
        connection.execute(sql().SQL("DELETE FROM {}").format(self._sink.identifier))
        shown = self._copy(connection)
        for undoing in self._undoings(connection, self._sink, shown):
            why = undoing.apply(self._effect(undoing), None)
            if why is not None:
                raise SinkFailed(f"{self._sink.describe()} cannot show a copy of {self._name}: {why}")
        self._undoings(connection, self._sink, shown, is_over=True)
        for (epochs, place), each in zip(known, shown, strict=True):
            wanted, history = each.wanted(self._to), History(self._sink, place)
            epochs.set_back(connection, generation, *wanted.record)
            history.forget(connection)  # what undid the rows of before
            if self._sink.history_ms is not None:
                history.restart(connection, wanted.root, generation, *wanted.record, is_set_back=True)

    def _copy(self, connection: psycopg.Connection[Any]) -> list[_Shown]:
        """Copy all rows. Returns what was known of the other table at that very moment."""
        columns, source = names(catalog.columns(connection, self._source.identifier)), self._source.identifier
        copied = sql().SQL("WITH copied AS (INSERT INTO {} ({}) SELECT {} FROM {} RETURNING 1) ")
        counts = sql().SQL("(SELECT count(*) FROM copied), (SELECT count(*) FROM {})").format(source)
        records = [Epochs(self._source, place).as_json(connection) for place in self._places]
        numbers = [History(self._source, place).newest_number(connection) for place in self._places]
        query = copied.format(self._sink.identifier, columns, columns, source)
        found = connection.execute(
            query + sql().SQL("SELECT {}").format(comma([counts, *records, *numbers]))
        ).fetchone()
        assert found is not None
        taken, there, *known = found
        if taken != there:
            raise SinkFailed(
                f"{self._sink.describe()} cannot show a copy of {self._source.describe()}: of {there} rows it took "
                f"{taken}; a trigger or a rule of it leaves some out. Nothing was changed; disable that, or take a new "
                f"table"
            )
        shown: list[_Shown] = []
        recorded, ends = known[: len(records)], known[len(records) :]
        for place, each, end in zip(self._places, recorded, ends, strict=True):
            record = Record() if each is None else msgspec.convert(each, Record)
            history = History(self._source, place)
            shown.append(_Shown(place, record, [] if end is None else history.up_to(connection, end, record)))
        return shown

    def _undoings(
        self, connection: psycopg.Connection[Any], table: PostgresTable, shown: list[_Shown], *, is_over: bool = False
    ) -> list[Undoing]:
        """What undoes, in a table, what the other one showed beyond the checkpoint. `is_over`: it was done, and is
        there still all that it took?"""
        found: list[Undoing] = []
        for each in shown:
            states = each.states or [as_state(each.record, each.place.root)]
            wanted, history = each.wanted(self._to), History(self._source, each.place)
            state = state_of(states, wanted)
            left = history.states(connection) if is_over and each.states else states
            if state is None or not left or left[0].number > state.number:
                raise CheckpointNotVisible(
                    f"{self._source.describe()} does not show {self._name} any more, but epoch {each.record.epoch}, "
                    f"and has kept no history that reaches back to it. {_WHAT_TO_DO}"
                )
            check_shows(self._source.describe(), state, wanted, is_newest=state is states[-1])
            if state is not states[-1]:
                steps = (state.number, states[-1].number)
                found.append(Undoing(connection, table.identifier, history.rows, states[-1].key, steps))
        return found

    def _effect(self, undoing: Undoing) -> Effect:
        """What it does. Refuse what cannot be undone."""
        changed = undoing.changed_columns()
        effect = undoing.look() if not changed else None
        if effect is None or effect.strange:
            why = "its columns were changed" if effect is None else "others have changed rows of it"
            raise CheckpointNotVisible(
                f"{self._source.describe()} shows more than {self._name}, and that cannot be undone in the copy: {why} "
                f"since. {_WHAT_TO_DO}"
            )
        return effect

    def _check_columns(self, connection: psycopg.Connection[Any]) -> None:
        long = [name for name in (self._sink.schema, self._sink.name) if len(name.encode()) > LONGEST_NAME]
        if long:
            raise SinkFailed(f"PostgreSQL would cut {long[0]!r} off at {LONGEST_NAME} bytes; take a shorter name")
        if self._sink.table == self._source.table:
            raise SinkFailed(f"{self._sink.describe()} cannot show a copy of itself")
        source = catalog.columns(connection, self._source.identifier)
        if not source:
            raise SinkFailed(
                f"{self._source.describe()}, which {self._sink.describe()} is to show a copy of, is not in the same "
                f"database, or is gone"
            )
        own = catalog.columns(connection, self._sink.identifier)
        for name in {**source, **own} if own else ():
            if source.get(name) != own.get(name):
                raise SinkFailed(
                    f"{self._sink.describe()} cannot show a copy of {self._source.describe()}: there, column {name!r} "
                    f"is {source.get(name, 'missing')}, here {own.get(name, 'missing')}. Nothing was changed; change "
                    f"one of the tables, or take a new one"
                )

    def _count(self, connection: psycopg.Connection[Any], table: PostgresTable) -> int:
        found = connection.execute(sql().SQL("SELECT count(*) FROM {}").format(table.identifier)).fetchone()
        return 0 if found is None else int(found[0])


def _is_at(table: TableAddress, other: TableAddress) -> bool:
    return (table.kind, table.address) == (other.kind, other.address)
