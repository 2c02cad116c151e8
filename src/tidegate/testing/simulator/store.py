"""A simulated store and simulated tables, which fail, are slow, and fail after having written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tidegate.errors import StoreUnavailable
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.decision_log import Decision
from tidegate.protocol.recovery import SinkFacts
from tidegate.testing.simulator.checkers import Checkers
from tidegate.testing.simulator.dag import Ranges
from tidegate.testing.simulator.world import Operation, Process, Resume, World


class Remote:
    """Something across a network. An operation takes effect at one moment, which the caller may not live to
    see; its answer may be lost though it took effect."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _operation(self, effect: Callable[[], Any]) -> Operation:
        world = self._world

        def start(process: Process, resume: Resume) -> None:
            faults = world.faults
            if world.chance(faults.store_fails):
                world.after(world.delay(8), process, resume, None, StoreUnavailable("the store failed"))
                return
            answer_lost = world.chance(faults.store_fails_after_writing)
            there_ms = world.delay(400) if world.chance(faults.store_is_slow) else world.delay(6)
            incarnation = process.incarnation

            def land() -> None:
                result = effect()
                if process.incarnation == incarnation:
                    error = StoreUnavailable("the store failed, after it had written") if answer_lost else None
                    world.after(world.delay(4), process, resume, None if answer_lost else result, error)

            # Not bound to the process: what was sent takes effect though the sender dies.
            world.after(there_ms, None, land)

        return start

    def _failure(self) -> Operation:
        def start(process: Process, resume: Resume) -> None:
            self._world.after(self._world.delay(8), process, resume, None, StoreUnavailable("it failed"))

        return start


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
        return self._operation(lambda: self.write_now(path, generation, value))

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
            self.log[record.slot] = record
            self._checkers.on_claimed(record, self.objects)
            return True

        return self._operation(effect)

    def tear_next(self) -> None:
        """Power was lost while a record was being written behind the last one."""
        slot = self._checkers.log.next_slot
        while slot in self.torn:
            slot += 1
        self.torn.add(slot)

    def read_log(self) -> Operation:
        """The records, and the slots of those that are torn."""
        return self._operation(lambda: (list(self.log.values()), frozenset(self.torn)))

    def trim_log(self, is_dropped: Callable[[int], bool]) -> Operation:
        dropped = {slot for slot in (*self.log, *self.torn) if is_dropped(slot)}

        def effect() -> None:
            for slot in dropped & self.log.keys():
                del self.log[slot]
            self.torn -= dropped
            self.reserved = {max(self.reserved)} if self.reserved else set()

        return self._operation(effect)

    def reserve(self, checkpoint_id: int) -> Operation:
        """Mark a checkpoint id as used."""
        return self._operation(lambda: self.reserved.add(checkpoint_id))

    def largest_reserved(self) -> Operation:
        return self._operation(lambda: max(self.reserved, default=0))


class Fenced(Exception):
    """The table refused a commit of an older generation."""


class SimulatedTable(Remote):
    """A sink's table: rows become visible epoch by epoch, in one atomic commit each."""

    def __init__(self, world: World, checkers: Checkers, sink: str) -> None:
        super().__init__(world)
        self._checkers = checkers
        self.sink = sink
        self.epoch = 0
        self.through_batch = -1
        self.fenced_at = 0
        self.failures_due = 0

    def facts(self) -> Operation:
        return self._operation(lambda: SinkFacts(self.epoch, self.fenced_at))

    def fence(self, generation: int) -> Operation:
        def effect() -> None:
            self.fenced_at = max(self.fenced_at, generation)

        return self._operation(effect)

    def commit(self, permit: CommitPermit, staged: list[tuple[int, Ranges]]) -> Operation:
        """Show what was staged in batches after the last committed one. Answers whether it did."""
        if self.failures_due:
            self.failures_due -= 1
            return self._failure()

        def effect() -> bool | Fenced:
            if permit.generation < self.fenced_at:
                return Fenced()
            if permit.epoch <= self.epoch:
                return False
            self.epoch = permit.epoch
            for batch, rows in staged:
                if batch > self.through_batch:
                    self.through_batch = batch
                    self._checkers.on_rows_visible(self.sink, rows)
            self._checkers.on_epoch_visible(self.sink, permit)
            return True

        return self._operation(effect)
