"""Setting a PostgreSQL table back to a checkpoint: one transaction undoes what was kept of the epochs since, and sets
the record of them back too, so that the next commits are not taken for ones that were made already.

Which state of the table shows a checkpoint is told by epochs, which one root never counts twice. An epoch that no state
names was not committed alone; then the state before it shows it too, if it held no row that the table did not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidegate.errors import CheckpointNotVisible, SinkFailed
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import Committable, SettingBack, SinkPlace, decode_committable
from tidegate.sinks.postgres import catalog
from tidegate.sinks.postgres.epochs import Epochs, Record
from tidegate.sinks.postgres.history import History, State, as_state
from tidegate.sinks.postgres.statements import sql
from tidegate.sinks.postgres.undoing import Effect, Undoing
from tidegate.storage.manifest import Manifest

if TYPE_CHECKING:
    import psycopg

    from tidegate.sinks.postgres.table import PostgresTable


class Wanted(msgspec.Struct, frozen=True):
    """A checkpoint, as a table knows it for one stage: `epoch`, as `root` counts them.

    `sealed` is None where the stage had not written anything yet. `generation` is None where the root has not taken it:
    generations of different roots cannot be compared.
    """

    name: str
    root: str
    epoch: int
    generation: int | None
    sealed: Committable | None

    @property
    def record(self) -> tuple[int, int]:
        """The epoch and the next batch of a table that shows it."""
        return (0, 0) if self.sealed is None else (self.epoch, self.sealed.through_batch + 1)


def as_wanted(to: Manifest, place: SinkPlace) -> Wanted:
    stage = to.stages.get(place.stage)
    sealed = None if stage is None or stage.committable is None else decode_committable(stage.committable)
    root = place.root if to.origin is None else to.origin.root_id
    generation = to.generation if to.origin is None else None
    return Wanted(checkpoint_name(to.checkpoint_id), root, to.shown_epoch, generation, sealed)


def state_of(states: Sequence[State], wanted: Wanted) -> State | None:
    """The newest state that shows a checkpoint; None: there is none any more. Of one that is later than the table, or
    that it passed by, that is yet to be seen: `check_shows`."""
    sealed = wanted.sealed
    if sealed is None:
        return _newest(each for each in states if each.since == 0)
    known = [each for each in states if each.root == wanted.root]
    named = _newest(each for each in known if each.since <= wanted.epoch <= each.epoch)
    if named is not None:
        return named
    # One that was set back later is of another course of things, though its epoch be lower.
    latest = wanted.generation
    if latest is None and any(each.is_set_back for each in known[1:]):
        return None
    before = [each for each in known if latest is None or not each.is_set_back or each.generation <= latest]
    found = _newest(each for each in before if each.since <= wanted.epoch)
    if found is None and known and known[0] is states[0] and known[0].next_batch == sealed.through_batch + 1:
        return known[0]  # the oldest, of which it is not known since when it is shown
    return found


def _newest(states: Any) -> State | None:
    found = list(states)
    return found[-1] if found else None


def check_shows(table: str, state: State, wanted: Wanted, *, is_newest: bool) -> None:
    """Refuse a state that does not show all rows of a checkpoint. `table` is the sink's, for people."""
    if wanted.sealed is None or wanted.sealed.last_with_rows < state.next_batch:
        return
    if is_newest:
        raise CheckpointNotVisible(
            f"{wanted.name} is complete, but {table} does not show it yet; run the pipeline until it does, or take an "
            f"older checkpoint"
        )
    raise CheckpointNotVisible(
        f"{wanted.name} is complete, but {table} showed it only together with a later one; take another checkpoint"
    )


class Reversal:
    """Of the table of one stage, to one checkpoint."""

    def __init__(self, sink: PostgresTable, place: SinkPlace, to: Manifest, *, takes_over: bool = False) -> None:
        """`takes_over`: the table may be another root's, and is this one's then."""
        self._sink = sink
        self._place = place
        self._takes_over = takes_over
        self._wanted = as_wanted(to, place)
        self._epochs = Epochs(sink, place)
        self._history = History(sink, place)

    def look(self, connection: psycopg.Connection[Any]) -> SettingBack:
        record = self._epochs.read(connection)
        if not self._is_there(connection, record):
            return SettingBack()
        record = record or Record()
        self._check_root(record)
        states, target = self._found(connection, record)
        effect = self._undoing(connection, states, target).look() if target is not states[-1] else Effect()
        return SettingBack(
            rows_removed=effect.removed,
            rows_added=effect.added,
            others=self._others(effect),
            remains=self._remains(effect, states[-1]),
            is_anothers=self._epochs.is_anothers(record),
        )

    def apply(self, connection: psycopg.Connection[Any], generation: int, *, discards_others: bool) -> None:
        if not self._is_there(connection, self._epochs.read(connection)):
            return
        self._epochs.ensure(connection)  # those of before cannot tell what they were set back by
        if self._sink.history_ms is not None:
            self._history.prepare(connection)
        record = self._epochs.locked(connection)
        self._check_root(record)
        if self._epochs.is_set_back(record, generation):
            return
        # Nobody changes a row between the look at it and the end of this.
        lock = sql().SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE")
        connection.execute(lock.format(self._sink.identifier))
        states, target = self._found(connection, record)
        has_history = bool(states[-1].number)
        if target is not states[-1]:
            self._undo(connection, states, target, discards_others=discards_others)
        self._epochs.set_back(connection, generation, *self._wanted.record)
        self._remember(connection, states[-1] if has_history else None, generation)

    def _remember(self, connection: psycopg.Connection[Any], newest: State | None, generation: int) -> None:
        """In the history, if there is one or is to be."""
        root, (epoch, next_batch) = self._wanted.root, self._wanted.record
        if newest is not None:
            number = newest.number + 1
            self._history.add(
                connection,
                State(number, root, generation, epoch, epoch, next_batch, newest.key, is_set_back=True),
            )
        elif self._sink.history_ms is not None:
            self._history.restart(connection, root, generation, epoch, next_batch, is_set_back=True)

    def _undo(
        self, connection: psycopg.Connection[Any], states: Sequence[State], target: State, *, discards_others: bool
    ) -> None:
        self._history.fit_columns(connection)
        undoing, name = self._undoing(connection, states, target), self._wanted.name
        effect = undoing.look()
        others = () if discards_others else self._others(effect)
        if others:
            raise SinkFailed(
                f"{self._sink.describe()} cannot be set back to {name}: {others[0]}. What to do: `tidegate restore "
                f"--to {name} --discard-others`, if that may be lost"
            )
        why = undoing.apply(effect, states[-1].number + 1)
        if why is not None:
            raise SinkFailed(
                f"{self._sink.describe()} cannot be set back to {name}: {why}. Nothing was changed; disable that for "
                f"as long as it takes, or {self._by_hand()}"
            )

    def _undoing(self, connection: psycopg.Connection[Any], states: Sequence[State], target: State) -> Undoing:
        newest, steps = states[-1], (target.number, states[-1].number)
        undoing = Undoing(connection, self._sink.identifier, self._history.rows, newest.key, steps)
        changed = undoing.changed_columns()
        if changed:
            raise SinkFailed(
                f"{self._sink.describe()} cannot be set back to {self._wanted.name}: its column {changed[0]!r} was "
                f"changed or dropped since. Nothing was changed; change the column back, or {self._by_hand()}"
            )
        return undoing

    def _found(self, connection: psycopg.Connection[Any], record: Record) -> tuple[list[State], State]:
        """What the table has shown, as far as that is known, and what is to be shown again."""
        states = self._history.usable(connection, record) or [as_state(record, self._place.root)]
        found = state_of(states, self._wanted)
        if found is None:
            raise SinkFailed(self._out_of_reach(states[0]))
        check_shows(self._sink.describe(), found, self._wanted, is_newest=found is states[-1])
        return states, found

    def _out_of_reach(self, oldest: State) -> str:
        if not oldest.number:
            return (
                f"{self._sink.describe()} has kept no history, so it cannot be set back to {self._wanted.name}: "
                f'{self._by_hand()}. PostgresTable(history="7d") keeps what that takes, from then on'
            )
        at = "" if oldest.shown_at is None else f", shown at {oldest.shown_at:%Y-%m-%d %H:%M:%S %Z}"
        return (
            f"{self._sink.describe()} cannot be set back to {self._wanted.name}, epoch {self._wanted.epoch}: its "
            f"history reaches back to epoch {oldest.epoch}{at}. Take a newer checkpoint, or {self._by_hand()}"
        )

    def _by_hand(self) -> str:
        return (
            f"put it back yourself (a backup, or by hand, with its record in tidegate_epochs) and say so with --leave "
            f"{self._place.stage}"
        )

    def _is_there(self, connection: psycopg.Connection[Any], record: Record | None) -> bool:
        """False: there is nothing of this owner, and nothing is missing of it."""
        sealed = self._wanted.sealed
        is_there = bool(catalog.columns(connection, self._sink.identifier))
        if record is not None and is_there:
            return True
        if (record is None or not record.next_batch) and (sealed is None or sealed.last_with_rows < 0):
            return False
        if is_there:
            raise CheckpointNotVisible(f"{self._sink.describe()} shows nothing of {self._wanted.name}, which has rows")
        raise SinkFailed(f"{self._sink.describe()} is gone; restore it, or start the pipeline on a new root")

    def _check_root(self, record: Record) -> None:
        if not self._takes_over:
            self._epochs.check_root(record)

    def _others(self, effect: Effect) -> tuple[str, ...]:
        if not effect.strange:
            return ()
        rows = "a row" if effect.strange == 1 else f"{effect.strange} rows"
        return (f"others have changed or deleted {rows} that {self._place.owner} has written since",)

    def _remains(self, effect: Effect, newest: State) -> str | None:
        if not effect.strange or newest.key:
            return None
        return (
            f"{self._sink.describe()} has no key: of what {self._place.owner} has written since, {effect.strange} that "
            f"others have changed stay as they are, unless they were deleted"
        )
