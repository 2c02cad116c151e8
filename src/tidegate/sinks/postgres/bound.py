"""A PostgreSQL table as a sink: executors copy into a staging table, and one transaction per epoch moves the rows.

In the schema of the table lie also
- `tidegate_epochs`: per pipeline, sink and table the root that it belongs to, the last epoch, the last batch and the
  generation that it is fenced at. A commit writes it in the transaction that moves the rows, so a repeated commit does
  nothing;
- one staging table per sink and generation. It is an ordinary, logged table: what a decided checkpoint has sealed must
  survive a crash of the server;
- with `history`, what undoes the commits (`history.py`).

Rows go from Spark's executors to the server by COPY and never pass through the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.errors import SinkFailed
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, SettingBack, SinkPlace, StagedBatch, Upkeep
from tidegate.sinks.postgres import catalog, moving
from tidegate.sinks.postgres.checks import check_columns, check_found, check_takes_rows, check_unchanged, types_of
from tidegate.sinks.postgres.copying import BATCH, PART, copier, copyable
from tidegate.sinks.postgres.duplicating import Duplicate
from tidegate.sinks.postgres.epochs import Epochs, Record
from tidegate.sinks.postgres.history import History, oldest_needed
from tidegate.sinks.postgres.moving import Kept
from tidegate.sinks.postgres.setting_back import Reversal, as_wanted, state_of
from tidegate.sinks.postgres.statements import comma, execute, names, sql
from tidegate.sinks.staging import conflicting_rows, refuse_foreign, refuse_put_back
from tidegate.storage.manifest import Manifest, TableAddress

if TYPE_CHECKING:
    import psycopg
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from tidegate.sinks.postgres.table import PostgresTable

_STAGING: Final = "tidegate_staging"
_LET_IT_IN: Final = (
    "change or delete the row that is in its way, or drop the constraint, and start again; "
    "or give PostgresTable a key, by which rows are replaced"
)
_REFUSED_AT_COMMIT: Final = (
    "So the table shows nothing of this checkpoint, which other tables may show already. What to do: "
    f"{_LET_IT_IN}; or change the pipeline and start it on a new root with new tables. "
    "PostgresTable(check=True) refuses such a checkpoint before it is taken"
)
_REFUSED_GOING_BACK: Final = (
    "So nothing was changed. What to do: change or delete what is in the way, or drop the constraint, and do it again"
)
_LOOKED_AFTER_MS: Final = 60_000
_REFUSED_BEFORE: Final = (
    "So there is no such checkpoint, and all tables stay at the one before. What to do: "
    f"{_LET_IT_IN}; or change the pipeline so that it writes no such row, and start again"
)


class BoundPostgresTable:
    """A PostgreSQL table as one stage writes to it."""

    def __init__(self, sink: PostgresTable, place: SinkPlace) -> None:
        self.sink = sink
        self.place = place
        self._epochs = Epochs(sink, place)
        self._history = History(sink, place)
        self._checked: frozenset[StagedBatch] = frozenset()
        """The staged batches that were looked through."""

    def describe(self) -> str:
        return self.sink.describe()

    @property
    def table(self) -> TableAddress:
        return self.sink.table

    def identity(self) -> str | None:
        with self._connected() as connection:
            return catalog.identity(connection, self.sink.identifier)

    # -- the table itself -------------------------------------------------------------------------

    def check_table(self, schema: StructType, output_mode: str) -> bool:
        wanted = check_columns(self.sink, self.place, schema, output_mode)
        with self._connected() as connection:
            self._epochs.check_root(self._epochs.read(connection))  # it may have outlived the table
            found = catalog.columns(connection, self.sink.identifier)
            if not found:
                return False
            check_found(self.sink, self.place, found, wanted)
            check_takes_rows(connection, self.sink, self.place)
            return True

    def probe(self) -> bool:
        with self._connected() as connection:
            self._epochs.check_root(self._epochs.read(connection))
            if not catalog.columns(connection, self.sink.identifier):
                return False
            check_takes_rows(connection, self.sink, self.place)
            return True

    def prepare_table(self, schema: StructType) -> None:
        columns = [
            sql().SQL("{} {}").format(sql().Identifier(name), sql().SQL(kind))
            for name, kind in types_of(schema).items()
        ]
        if self.sink.key:
            columns.append(sql().SQL("PRIMARY KEY ({})").format(names(self.sink.key)))
        query = sql().SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(self.sink.identifier, comma(columns))
        with self._connected() as connection:
            self._epochs.create(connection)
            connection.execute(query)

    def claim(self) -> None:
        with self._connected() as connection:
            self._epochs.claim(connection)

    def facts(self) -> SinkFacts:
        with self._connected() as connection:
            record = self._epochs.read(connection) or Record()
            return msgspec.structs.replace(record.facts, is_anothers=self._epochs.is_anothers(record))

    def fence(self, generation: int) -> None:
        with self._connected() as connection:
            self._epochs.fence(connection, generation)

    # -- staging ----------------------------------------------------------------------------------

    def _staging(self, generation: int | None) -> str:
        """The name of a generation's staging table; None: what it has in common with others'."""
        return f"{self.sink.belonging(_STAGING, self.place)}_{'' if generation is None else generation}"

    def open_staging(self, generation: int, schema: StructType) -> None:
        staging = self._staging(generation)
        batch, part, table = sql().Identifier(BATCH), sql().Identifier(PART), self.sink.beside(staging)
        create = sql().SQL("CREATE TABLE IF NOT EXISTS {} (LIKE {}, {} bigint, {} integer)")
        index = sql().SQL("CREATE INDEX IF NOT EXISTS {} ON {} ({}, {})")
        with self._connected() as connection:
            connection.execute(create.format(table, self.sink.identifier, batch, part))
            connection.execute(index.format(sql().Identifier(f"{staging}_batch"), table, batch, part))
            # What it was made like stays as it is until this transaction ends.
            check_unchanged(connection, self.sink, types_of(schema))
            check_unchanged(connection, self.sink, types_of(schema), staging)

    def stage(self, generation: int, batch: int, frame: DataFrame) -> int:
        staging = self._staging(generation)
        delete = sql().SQL("DELETE FROM {} WHERE {} = %s").format(self.sink.beside(staging), sql().Identifier(BATCH))
        with self._connected() as connection:
            execute(connection, delete, (batch,))  # of an earlier try of the batch, which may have had more partitions
        copied = frame.select(*copyable(frame)).mapInArrow(
            copier(self.sink.server(), self.sink.schema, staging, batch, tuple(frame.columns)), "copied long"
        )
        return sum(row["copied"] for row in copied.collect())

    def staged_generation(self) -> int:
        with self._connected() as connection:
            return max(self._staged(connection).values(), default=0)

    def forget_staged(self, before_generation: int) -> None:
        with self._connected() as connection:
            for name, generation in self._staged(connection).items():
                if generation < before_generation:
                    connection.execute(sql().SQL("DROP TABLE IF EXISTS {}").format(self.sink.beside(name)))

    def _staged(self, connection: psycopg.Connection[Any]) -> dict[str, int]:
        """The staging tables that there are, and the generation of each."""
        prefix = self._staging(None)
        found = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = %s AND starts_with(tablename, %s)",
            (self.sink.schema, prefix),
        ).fetchall()
        numbers = {name: name.removeprefix(prefix) for (name,) in found}
        return {name: int(number) for name, number in numbers.items() if number.isdigit()}

    # -- committing -------------------------------------------------------------------------------

    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        refuse_foreign(self.describe(), self.place, committable.files)
        with self.sink.turn, self._connected(_REFUSED_AT_COMMIT) as connection:
            if self._keeps_history:
                self._history.prepare(connection)
            record = self._locked(connection)
            self._epochs.check_fence(record, permit)
            self._refuse_put_back(record, committable)
            if record.epoch >= permit.epoch:
                return CommitAnswer.ALREADY
            step = self._move_fresh(connection, record, committable, keeps_history=self._keeps_history)
            self._epochs.commit(connection, permit, committable.through_batch)
            if self._keeps_history:
                now = Record(permit.epoch, next_batch=max(record.next_batch, committable.through_batch + 1))
                self._history.shown(connection, record, step, permit.generation, now)
            elif record.fresh(committable):
                self._history.forget(connection)  # it has a gap now
        return CommitAnswer.COMMITTED

    def check_commit(self, committable: Committable) -> None:
        if not (self.sink.check or self.sink.key) or not any(each.rows for each in committable.batches):
            return
        if self.sink.check:
            self._try_commit(committable)
        else:
            self._look_through(committable)
        self._checked = frozenset(committable.batches)

    def _try_commit(self, committable: Committable) -> None:
        with self.sink.turn, self._connected(_REFUSED_BEFORE) as connection:
            record = self._locked(connection)
            self._refuse_put_back(record, committable)
            self._move_fresh(connection, record, committable)
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")  # also what a commit alone would look at
            connection.rollback()

    def _look_through(self, committable: Committable) -> None:
        """Without a lock: a commit that takes long holds up no checkpoint. What it shows meanwhile it takes out of the
        staging table all at once, so that no statement sees a part of a batch."""
        with self._connected() as connection:
            record = self._epochs.read(connection) or Record()
            self._epochs.check_root(record)
            self._refuse_put_back(record, committable)
            self._refuse_conflicts(connection, record.fresh(committable))

    def _locked(self, connection: psycopg.Connection[Any]) -> Record:
        """What is recorded, while nobody else can commit to the table for this owner."""
        if not catalog.columns(connection, self.sink.identifier):
            raise SinkFailed(
                f"{self.describe()} is gone; restore it, or start the pipeline on a new root with new tables"
            )
        record = self._epochs.locked(connection)
        self._epochs.check_root(record)
        return record

    def _refuse_put_back(self, record: Record, committable: Committable) -> None:
        refuse_put_back(self.describe(), self.place, record.epoch, record.next_batch, committable)

    def _refuse_conflicts(self, connection: psycopg.Connection[Any], staged: Sequence[StagedBatch]) -> None:
        """Refuse different rows of one key in a batch, in what was not looked through yet."""
        known = self._checked
        unknown = [each for each in staged if each.rows and each not in known]
        for generation in sorted({each.generation for each in unknown}):
            batches = [each.batch for each in unknown if each.generation == generation]
            staging = self.sink.beside(self._staging(generation))
            key = moving.conflict(connection, self.sink, staging, batches)
            if key is not None:
                raise conflicting_rows(self.describe(), self.place, key, self.sink.newest_by)
        self._checked = known | set(unknown)

    def _move_fresh(
        self,
        connection: psycopg.Connection[Any],
        record: Record,
        committable: Committable,
        *,
        keeps_history: bool = False,
    ) -> int | None:
        """Move what the table does not show yet. Nobody has changed the table, nor can until the transaction ends.

        Returns the last step of it that was kept in the history, if one was.
        """
        fresh = record.fresh(committable)
        if not fresh:
            return None
        # What rows are replaced is seen before they are: until then nobody may change one.
        mode = "SHARE ROW EXCLUSIVE" if keeps_history and self.sink.key else "ROW EXCLUSIVE"
        connection.execute(sql().SQL(f"LOCK TABLE {{}} IN {mode} MODE").format(self.sink.identifier))
        check_takes_rows(connection, self.sink, self.place)
        if self.sink.key:
            self._refuse_conflicts(connection, fresh)
        step = self._history.begin(connection, record) if keeps_history else None
        for generation in sorted({each.generation for each in fresh}):
            staging = self._staging(generation)
            staged = catalog.columns(connection, self.sink.beside(staging))
            if not staged:
                raise SinkFailed(
                    f"{self.describe()}: {self.sink.schema}.{staging}, in which rows were staged, is gone, so nothing "
                    f"was committed; restore it, or start the pipeline on a new root with new tables"
                )
            check_unchanged(connection, self.sink, moving.written(staged))
            step = None if step is None else step + 1
            kept = None if step is None else self._history.kept(step)
            self._move(connection, staging, [each for each in fresh if each.generation == generation], kept)
        return step

    def _move(
        self, connection: psycopg.Connection[Any], staging: str, batches: list[StagedBatch], kept: Kept | None
    ) -> None:
        found = moving.move(connection, self.sink, self.sink.beside(staging), [each.batch for each in batches], kept)
        expected = sum(each.rows for each in batches)
        if found != expected:
            raise SinkFailed(
                f"{self.describe()}: {expected} rows were staged in {self.sink.schema}.{staging}, but {found} are "
                f"there, so nothing was committed; restore them, or start the pipeline on a new root with new tables"
            )

    # -- going back -------------------------------------------------------------------------------

    @property
    def _keeps_history(self) -> bool:
        return self.sink.history_ms is not None

    def look_back(self, to: Manifest, *, takes_over: bool = False) -> SettingBack:
        with self._connected(sees_one_moment=True) as connection:
            return Reversal(self.sink, self.place, to, takes_over=takes_over).look(connection)

    def set_back(self, to: Manifest, generation: int, *, discards_others: bool, takes_over: bool = False) -> None:
        reversal = Reversal(self.sink, self.place, to, takes_over=takes_over)
        with self.sink.turn, self._connected(_REFUSED_GOING_BACK) as connection:
            reversal.apply(connection, generation, discards_others=discards_others)

    def look_at_copy(
        self,
        source: TableAddress,
        to: Manifest,
        *,
        replaces: bool,
        since: int | None = None,  # noqa: ARG002 - it has no versions
    ) -> SettingBack:
        duplicate = Duplicate(self.sink, self.place, source, to)
        with self._connected(sees_one_moment=True) as connection:
            return duplicate.look(connection, must_be_empty=not replaces)

    def show_copy(
        self,
        source: TableAddress,
        to: Manifest,
        generation: int,
        *,
        replaces: bool,
        since: int | None = None,  # noqa: ARG002 - the same
    ) -> None:
        duplicate = Duplicate(self.sink, self.place, source, to)
        with self._connected() as connection:
            duplicate.prepare(connection)
        with self.sink.turn, self._connected(_REFUSED_GOING_BACK) as connection:
            duplicate.apply(connection, generation, must_be_empty=not replaces)

    @property
    def upkeep_every_ms(self) -> int | None:
        return _LOOKED_AFTER_MS if self._keeps_history else None

    def upkeep_due_in_ms(self) -> int:
        return 0

    def keep_up(self, generation: int, retained: Callable[[], Sequence[Manifest]], is_stopping: Event) -> Upkeep | None:
        """Forget what is older than `history`, but nothing that a retained checkpoint needs."""
        with self._connected() as connection:
            states = self._history.states(connection)
        kept_ms = self.sink.history_ms
        if kept_ms is None or not states or oldest_needed(states, (), kept_ms) is states[0]:
            return None
        found = (state_of(states, as_wanted(manifest, self.place)) for manifest in retained())
        oldest = oldest_needed(states, [each for each in found if each is not None], kept_ms)
        if oldest is not states[0] and not is_stopping.is_set():
            with self.sink.turn, self._connected() as connection:
                record = self._locked(connection)
                if record.fence <= generation:  # else a newer run sees to it
                    self._history.forget_before(connection, oldest.number)
        return None

    # -- the server -------------------------------------------------------------------------------

    @contextmanager
    def _connected(self, if_refused: str = "", *, sees_one_moment: bool = False) -> Iterator[psycopg.Connection[Any]]:
        """One transaction. What goes wrong is told without credentials; `if_refused`: what is said of a row that the
        table does not take. `sees_one_moment`: all its statements see the same; it must only read."""
        server = self.sink.server()
        import psycopg

        try:
            with server.transaction(sees_one_moment=sees_one_moment) as connection:
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
