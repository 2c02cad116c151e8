"""A Delta table as a sink: native staging, one Delta transaction per epoch.

Rows are staged by Spark in `<table>/_tidegate/<owner>/<generation>/`, which no reader of the table sees (`staged.py`);
those of a table in a bucket on this machine, from where they are sent there before a checkpoint names them. A commit
links the epoch's files into the table, or lets the bucket copy them, and adds them in one transaction, which also
records the epoch, the last batch and the generation (`log.py`). The table's own record makes a repeated commit do
nothing. Another one, of the root that the owner's rows come from, is made before anything is staged.

Of many small files of an epoch a commit makes few (`appending.py`): in the same transaction, so once. With a `key`, it
replaces the rows of the table that have a key of the epoch's (`keyed.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import deltalake
from deltalake.transaction import AddAction

from tidegate.errors import Fenced, InvariantViolation, SinkFailed
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, SettingBack, SinkPlace, Upkeep
from tidegate.sinks.delta.appending import Appending
from tidegate.sinks.delta.checks import check_columns, check_demands, check_found
from tidegate.sinks.delta.duplicating import Duplicate
from tidegate.sinks.delta.keyed import ByKey
from tidegate.sinks.delta.log import TRIES, TableLog
from tidegate.sinks.delta.setting_back import Reversal
from tidegate.sinks.delta.staged import Staged, epoch_of
from tidegate.sinks.delta.upkeep import Keeper
from tidegate.sinks.staging import forget_generations, refuse_foreign, refuse_gone, refuse_put_back
from tidegate.storage.manifest import Manifest, TableAddress

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from tidegate.sinks.delta.table import DeltaTable


_logger = logging.getLogger("tidegate")


class BoundDeltaTable:
    """A Delta table as one stage writes to it."""

    def __init__(self, sink: DeltaTable, place: SinkPlace) -> None:
        self.sink = sink
        self.place = place
        self._log = TableLog(sink, place, sink.home.files(place))
        self._staged = Staged(sink, place, self._log)
        self.staging = self._staged.files
        self._by_key = ByKey(sink, place, self._staged) if sink.key else None
        self._keeper = Keeper(sink, place, self._log, self._staged)
        self._wanted: deltalake.Schema | None = None
        """What the stage writes, as it was checked."""

    def describe(self) -> str:
        return self.sink.describe()

    @property
    def path(self) -> Path:
        """Of a table in a folder."""
        return self.sink.path

    @property
    def table(self) -> TableAddress:
        return self.sink.table

    def identity(self) -> str | None:
        """What a table is given when it is created."""
        table = self._log.open()
        return None if table is None else str(table.metadata().id)

    @property
    def partition_by(self) -> tuple[str, ...]:
        # What is merged at a commit is partitioned then.
        return () if self.sink.key else self.sink.partition_by

    @property
    def folders_by(self) -> tuple[str, ...]:
        return self.sink.partition_by

    # -- the table itself -------------------------------------------------------------------------

    def check_table(self, schema: StructType, output_mode: str) -> bool:
        self._wanted = check_columns(self.sink, self.place, schema, output_mode)
        table = self._log.open()
        if table is None:
            return False
        self._log.check_root(table)
        check_found(self.sink, self.place, self._wanted, table)
        return True

    def probe(self) -> bool:
        table = self._log.open()
        if table is None:
            return False
        self._log.check_root(table)
        check_demands(self.sink, table)
        return True

    def prepare_table(self, schema: StructType) -> None:
        wanted = deltalake.Schema.from_json(schema.json())
        if self._log.open() is None:
            self.sink.home.prepare()
        self.sink.home.create(wanted, list(self.sink.partition_by))
        self._log.force(through=0)

    def facts(self) -> SinkFacts:
        table = self._log.open()
        if table is None:
            return SinkFacts()
        recorded = self._log.recorded
        return SinkFacts(
            recorded(table, "epoch"),
            recorded(table, "fence"),
            recorded(table, "batch"),
            self._log.is_anothers(table),
        )

    def claim(self) -> None:
        for _ in range(TRIES):
            table = self._log.opened()
            self._log.check_root(table)
            if self._log.recorded(table, "root") or self._log.transact(table, [], [self._log.root_record()]):
                return
        raise SinkFailed(f"{self.describe()} could not be claimed: {TRIES} attempts met another writer's")

    def fence(self, generation: int) -> None:
        for _ in range(TRIES):
            table = self._log.open()
            if table is None:
                return
            self._log.check_root(table)
            if self._log.recorded(table, "fence") >= generation:
                self._log.force(through=table.version())
                return
            if self._log.transact(table, [], [self._log.record("fence", generation)]):
                return
        raise SinkFailed(f"{self.describe()} could not be fenced: {TRIES} attempts met another writer's")

    # -- committing -------------------------------------------------------------------------------

    def check_commit(self, committable: Committable) -> None:
        if self._by_key is not None:
            self._by_key.check(self._schema, committable.files)

    @property
    def _schema(self) -> deltalake.Schema:
        if self._wanted is None:
            raise InvariantViolation(
                f"{self.describe()} was not checked for {self.place.owner} before its first commit"
            )
        return self._wanted

    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        refuse_foreign(self.describe(), self.place, committable.batches)
        with self.sink.turn:
            return self._commit(permit, committable)

    def _commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:
        showing = self._by_key or Appending(self.sink, self.place, self._staged)
        tried: set[str] = set()
        since: int | None = None
        for _ in range(TRIES):
            table = self._log.followed()
            since = table.version() if since is None else since
            self._log.check_root(table)
            fence = self._log.recorded(table, "fence")
            if fence > permit.generation:
                raise Fenced(f"{self.describe()} was fenced by generation {fence}")
            # The batch is recorded as its number + 1, because a record starts at 0.
            shown, epoch = self._log.recorded(table, "batch"), self._log.recorded(table, "epoch")
            refuse_put_back(self.describe(), self.place, epoch, shown, committable)
            if epoch >= permit.epoch:
                self._staged.table.delete(tried - self._log.added_since(since, table.version()))
                self._attempts_after(epoch, permit, table)
                self._log.force(through=table.version())
                return CommitAnswer.ALREADY
            fresh = [file for file in committable.files if file.batch >= shown and file.rows]
            if not fresh:
                # Nothing to show: an idle pipeline makes no versions of its tables. Where rows were shown by an epoch
                # before, whose run was killed, the next checkpoint no longer names them.
                if committable.files:
                    self._log.force(through=table.version())
                return CommitAnswer.COMMITTED
            attempts = self._attempts_after(epoch, permit, table)
            check_found(self.sink, self.place, self._schema, table)
            refuse_gone(self.describe(), self.place, self.staging, fresh)
            if self._by_key is not None:
                self._by_key.refuse_conflicts(self._schema, fresh)
            records = [
                self._log.record("epoch", permit.epoch),
                self._log.record("batch", max(shown, committable.through_batch + 1)),
                self._log.root_record(),
                *self._log.counting_record(table),
            ]
            # Made for this version of the table or an older one, and never shown: once ours has followed on this
            # version, none of them can.
            own = self._staged.attempt(permit, table.version())
            vain = self._staged.linked(attempts)
            staged = self._staged.targets(self._staged.names(fresh))
            actions = [*showing.actions(table, fresh, own)]
            added = {each.path for each in actions if isinstance(each, AddAction)}
            if not self._log.transact(table, actions, records):
                tried |= added
                continue  # look at what the other writer left
            self._staged.table.delete({*vain, *staged, *tried} - added)
            self._staged.remove(attempts)
            writes = self._by_key is not None if self._staged.is_on_cluster else self._staged.path(own).exists()
            if writes:  # else there is nothing, elsewhere neither
                self._staged.remove([own])
            return CommitAnswer.COMMITTED
        raise SinkFailed(f"{self.describe()}: {TRIES} commits in a row met another writer's")

    def _attempts_after(self, epoch: int, permit: CommitPermit, table: deltalake.DeltaTable) -> list[str]:
        """Where commits of later epochs than the recorded one have written what they merged. Those of others were made
        for an older version: what the table was not given of them it will not be, and that is removed."""
        attempts = self._staged.attempts(permit.generation)
        self._staged.take_back((each for each in attempts if epoch_of(each) <= epoch), table.version())
        return [each for each in attempts if epoch_of(each) > epoch]

    def forget_staged(self, before_generation: int) -> None:
        if not self._staged.generations(before_generation - 1):
            return
        if not self._staged.is_near:
            try:
                self._take_back_passes(before_generation)
            except SinkFailed as error:
                # It only takes room, and vacuum finds it in a day.
                _logger.warning("%s: what upkeep has left there is not removed: %s", self.describe(), error)
        forget_generations(self.staging, before_generation)

    def _take_back_passes(self, generation: int) -> None:
        """What passes of upkeep that were killed have brought into the table's folder."""
        passes = self._staged.upkeep_passes(generation - 1)
        if not passes:
            return
        with self.sink.turn:
            self.fence(generation)  # the run of such a pass may be alive yet: from here on it shows nothing more
            table = self._log.open()
            if table is not None:
                self._staged.take_back(passes, table.version())

    # -- going back -------------------------------------------------------------------------------

    def look_back(self, to: Manifest, *, takes_over: bool = False) -> SettingBack:
        return Reversal(self.sink, self.place, self._log, to, takes_over=takes_over).look()

    def set_back(self, to: Manifest, generation: int, *, discards_others: bool, takes_over: bool = False) -> None:
        reversal = Reversal(self.sink, self.place, self._log, to, takes_over=takes_over)
        with self.sink.turn:
            reversal.apply(generation, discards_others=discards_others)

    # -- the copy of another ----------------------------------------------------------------------

    def look_at_copy(
        self, source: TableAddress, to: Manifest, *, replaces: bool, since: int | None = None
    ) -> SettingBack:
        return self._duplicate(source, to).look(since, replaces=replaces)

    def show_copy(
        self, source: TableAddress, to: Manifest, generation: int, *, replaces: bool, since: int | None = None
    ) -> None:
        with self.sink.turn:
            self._duplicate(source, to).apply(generation, since, replaces=replaces)

    def _duplicate(self, source: TableAddress, to: Manifest) -> Duplicate:
        return Duplicate(self.sink, self.place, self._log, self._staged, self.sink.at(source.address).home, to)

    # -- upkeep -----------------------------------------------------------------------------------

    @property
    def upkeep_every_ms(self) -> int | None:
        return self.sink.optimize_ms

    def upkeep_due_in_ms(self) -> int:
        return self._keeper.due_in_ms()

    def keep_up(self, generation: int, retained: Callable[[], Sequence[Manifest]], is_stopping: Event) -> Upkeep | None:
        return self._keeper.keep_up(generation, retained, is_stopping)
