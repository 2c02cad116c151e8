"""A simulated store and simulated tables, which fail, are slow, and fail after having done what they were asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from tidegate.errors import Fenced, StoreUnavailable
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.decision_log import Decision
from tidegate.protocol.recovery import SinkFacts
from tidegate.testing.simulator.checkers import Checkers, SimulationFailure
from tidegate.testing.simulator.dag import Ranges
from tidegate.testing.simulator.world import Operation, Process, Resume, World


class Remote:
    """Something across a network. An operation takes effect at one moment, which the caller may not live to
    see; its answer may be lost though it took effect."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _operation(self, effect: Callable[[], Any], *, writes: bool = False) -> Operation:
        world = self._world

        def start(process: Process, resume: Resume) -> None:
            faults = world.faults
            is_cut_off = process.store_cut_until > world.now
            if is_cut_off or world.chance(faults.store_fails) or (writes and world.has_full_disk):
                world.after(world.delay(8), process, resume, None, StoreUnavailable("the store failed"))
                return
            answer_lost = world.chance(faults.store_fails_after_writing)
            there_ms = world.delay(400) if world.chance(faults.store_is_slow) else world.delay(6)
            incarnation = process.incarnation

            def land() -> None:
                standing_ms = world.faults.store_stands_until_ms - world.now
                if standing_ms > 0:
                    world.after(standing_ms, None, land)
                    return
                result = effect()
                if process.incarnation == incarnation:
                    error = StoreUnavailable("the store failed, after it had written") if answer_lost else None
                    world.after(world.delay(4), process, resume, None if answer_lost else result, error)

            # Not bound to the process: what was sent takes effect though the sender dies.
            world.after(there_ms, None, land)

        return Operation(start)

    def _failure(self) -> Operation:
        def start(process: Process, resume: Resume) -> None:
            self._world.after(self._world.delay(8), process, resume, None, StoreUnavailable("it failed"))

        return Operation(start)


class StagedRows(msgspec.Struct, frozen=True):
    """Names what one batch has staged for a table."""

    generation: int
    batch: int


class StoredObject(msgspec.Struct, frozen=True):
    generation: int
    value: Any


class SimulatedStore(Remote):
    """Objects with create-if-absent, and the decision log."""

    def __init__(self, world: World, checkers: Checkers) -> None:
        super().__init__(world)
        self._checkers = checkers
        self.objects: dict[str, StoredObject] = {}
        self.log: dict[int, Decision] = {}
        self.torn: set[int] = set()
        """Slots whose record has a name and no content."""
        self.reserved: set[int] = set()

    def write_now(self, path: str, generation: int, value: Any) -> None:
        """What Spark writes and commits by itself; it is not Tidegate's to make durable."""
        self.objects[path] = StoredObject(generation, value)

    def put(self, path: str, generation: int, value: Any) -> Operation:
        return self._operation(lambda: self.write_now(path, generation, value), writes=True)

    def get(self, path: str) -> Operation:
        return self._operation(lambda: self.objects.get(path))

    def list_objects(self) -> Operation:
        return self._operation(lambda: [(path, held.generation) for path, held in self.objects.items()])

    def delete(self, paths: Iterable[str], by_generation: int) -> Operation:
        paths = tuple(paths)

        def effect() -> None:
            for path in paths:
                self.objects.pop(path, None)
            self._checkers.on_deleted(by_generation, self.objects.keys())

        return self._operation(effect)

    def claim(self, record: Decision) -> Operation:
        def effect() -> bool:
            if record.slot in self.log or record.slot in self.torn:
                return False
            if self._world.chance(self._world.faults.seems_to_exist):
                self._world.note("slot {} is said to be taken", record.slot)
                return False
            if record.slot < self._checkers.log.first_slot:
                self._world.note("slot {}, which was trimmed, is claimed", record.slot)
            self.log[record.slot] = record
            self._checkers.on_claimed(record, self.objects)
            return True

        return self._operation(effect, writes=True)

    def tear_next(self) -> None:
        """Power was lost while a record was being written behind the last one."""
        slot = self._checkers.log.next_slot
        while slot in self.torn:
            slot += 1
        self.torn.add(slot)

    def read_log(self) -> Operation:
        """The records, and the slots of those that are torn."""
        return self._operation(lambda: (list(self.log.values()), frozenset(self.torn)))

    def trim_log(self, start: int, but: frozenset[int]) -> Operation:
        def effect() -> None:
            self.log = {slot: record for slot, record in self.log.items() if slot >= start or slot in but}
            self.torn = {slot for slot in self.torn if slot >= start}

        return self._operation(effect)

    def forget_marks(self, below: int) -> Operation:
        def effect() -> None:
            self.reserved = {marked for marked in self.reserved if marked >= below}

        return self._operation(effect)

    def reserve(self, checkpoint_id: int) -> Operation:
        """Mark a checkpoint id as used."""
        return self._operation(lambda: self.reserved.add(checkpoint_id), writes=True)

    def largest_reserved(self) -> Operation:
        return self._operation(lambda: max(self.reserved, default=0))


class SimulatedTable(Remote):
    """A sink's table: rows are staged batch by batch, and become visible epoch by epoch, in one atomic commit each."""

    def __init__(self, world: World, checkers: Checkers, sink: str) -> None:
        super().__init__(world)
        self._checkers = checkers
        self.sink = sink
        self.epoch = 0
        self.through_batch = -1
        self.fenced_at = 0
        self.failures_due = 0
        self.staged: dict[StagedRows, Ranges] = {}

    def stage_now(self, staged: StagedRows, rows: Ranges) -> None:
        """What Spark stages and commits by itself."""
        self.staged[staged] = rows

    def facts(self) -> Operation:
        return self._operation(lambda: SinkFacts(self.epoch, self.fenced_at))

    def fence(self, generation: int) -> Operation:
        def effect() -> None:
            self.fenced_at = max(self.fenced_at, generation)

        return self._operation(effect, writes=True)

    def check(self) -> Operation:
        """Whether it would take what was sealed, which it does."""
        return self._operation(lambda: None)

    def commit(self, permit: CommitPermit, sealed: Sequence[StagedRows]) -> Operation:
        """Show what was staged in batches after the last committed one. Answers whether it did, or that it may not."""
        if self.failures_due:
            self.failures_due -= 1
            return self._failure()

        def effect() -> bool | Fenced:
            if permit.generation < self.fenced_at:
                return Fenced(f"the table of {self.sink} is fenced at {self.fenced_at}")
            if permit.epoch <= self.epoch:
                return False
            self.epoch = permit.epoch
            for each in sealed:
                if each.batch > self.through_batch:
                    self._show(each)
            self._checkers.on_epoch_visible(self.sink, permit)
            return True

        return self._operation(effect, writes=True)

    def _show(self, staged: StagedRows) -> None:
        if staged not in self.staged:
            raise SimulationFailure("NothingNeededDeleted", f"{staged}, which {self.sink} is to show, is gone")
        self.through_batch = staged.batch
        self._checkers.on_rows_visible(self.sink, self.staged[staged])

    def drop(self, is_dropped: Callable[[StagedRows], bool]) -> Operation:
        def effect() -> None:
            self.staged = {each: rows for each, rows in self.staged.items() if not is_dropped(each)}

        return self._operation(effect)
