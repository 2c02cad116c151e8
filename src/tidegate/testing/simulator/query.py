"""A simulated query: what Spark does for a stage, with batches that take simulated time.

It releases segments as the stage's part in checkpoints allows, runs batches over what was released, and appends each
committed batch's output to its channel, or stages it for its table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tidegate.errors import StageFailed
from tidegate.flows import requests
from tidegate.flows.requests import Standing
from tidegate.flows.stage import StageCheckpoints, StartsAt
from tidegate.protocol.messages import Barrier
from tidegate.testing.simulator.dag import Ranges, StageSpec
from tidegate.testing.simulator.host import PATIENCE, Host
from tidegate.testing.simulator.store import StagedRows

if TYPE_CHECKING:
    from tidegate.testing.simulator.process import SimulatedProcess

_BYTES_PER_ROW = 10
_LONGEST_CHAIN = 4


class SimulatedSegment(msgspec.Struct, frozen=True):
    sequence: int
    path: str
    rows: Ranges

    @property
    def size_bytes(self) -> int:
        return sum(after - first for _, first, after in self.rows) * _BYTES_PER_ROW


class Channel:
    """The ordered, durable log of one stage's output in one generation, as far as one process knows it."""

    def __init__(self) -> None:
        self.messages: list[SimulatedSegment | Barrier] = []
        self.readers: list[SimulatedQuery] = []
        self.segments: dict[int, SimulatedSegment] = {}

    def append(self, message: SimulatedSegment | Barrier, stage: str) -> None:
        if isinstance(message, SimulatedSegment):
            self.segments[message.sequence] = message
        self.messages.append(message)
        for reader in self.readers:
            reader.notice(stage)


class QueryState(msgspec.Struct, frozen=True):
    """Where a stage starts: from the beginning, or from its part of a checkpoint."""

    rows: dict[int, int]
    batch: int | None = None
    positions: dict[str, int] = {}
    output_sequence: int = 0
    in_flight: dict[str, tuple[SimulatedSegment, ...]] = {}
    chain: tuple[str, ...] = ()
    staged: tuple[StagedRows, ...] = ()


def sealed_in(committable: str) -> tuple[StagedRows, ...]:
    return msgspec.json.decode(committable, type=tuple[StagedRows, ...])


class SimulatedQuery(Host):
    def __init__(
        self, driver: SimulatedProcess, spec: StageSpec, generation: int, start: QueryState, after_checkpoint: int
    ) -> None:
        super().__init__(driver.cluster, driver.process)
        self._driver = driver
        self.spec = spec
        self.generation = generation
        cluster = driver.cluster
        self._world = driver.world
        self._handlers |= {
            requests.StoreSnapshot: self._store_snapshot,
            requests.StoreInFlight: self._store_in_flight,
            requests.CheckSealed: self._check_sealed,
        }
        self.checkpoints = StageCheckpoints(
            spec.name,
            spec.inputs,
            self,
            self,
            cluster.config,
            PATIENCE,
            StartsAt(generation, after_checkpoint, start.batch, start.positions),
            is_sink=spec.is_sink,
        )
        self._store = cluster.store
        self._rows = dict(start.rows)
        self._batch = -1 if start.batch is None else start.batch
        self._output_sequence = start.output_sequence
        self._channels = {name: driver.channel(generation, name) for name in spec.inputs}
        self._output = driver.channel(generation, spec.name)
        self._cursors = dict.fromkeys(spec.inputs, 0)
        self._released: dict[str, deque[SimulatedSegment]] = {name: deque() for name in spec.inputs}
        self._batch_runs = False
        self._looks_again = False
        self._chain = start.chain
        self._staged = list(start.staged)
        self._slowness_ms = self._world.random.choice((8, 15, 40, 120))
        for name, segments in start.in_flight.items():
            for segment in segments:
                self.checkpoints.on_segment(name, segment.sequence, segment.size_bytes)
                self._released[name].append(segment)
                self._channels[name].segments.setdefault(segment.sequence, segment)

    @property
    def watermark_ms(self) -> int | None:
        """A source's event time: its row count; not set before its first row."""
        return max(self._rows.values(), default=0) or None

    def stop(self) -> None:
        self.scope.is_over = True

    def die(self, why: str) -> None:
        if not self.scope.is_over:
            self.stop()
            self._driver.member.on_failed(StageFailed(self.spec.name, why))

    def begin(self) -> None:
        for name, channel in self._channels.items():
            channel.readers.append(self)
            self._wake(1, self._read, name)
        self._wake(1, self._try_batch)

    # -- reading ----------------------------------------------------------------------------------

    def _wake(self, delay_ms: int, call: Callable[..., None], *arguments: object) -> None:
        self._world.after(delay_ms, self.process, self._if_running, call, *arguments)

    def _if_running(self, call: Callable[..., None], *arguments: object) -> None:
        if not self.scope.is_over:
            call(*arguments)

    def notice(self, name: str) -> None:
        """The writer appended to its channel; the reader sees it a little later."""
        self._wake(self._world.delay(6), self._read, name)

    def _read(self, name: str) -> None:
        messages = self._channels[name].messages
        while self._cursors[name] < len(messages) and self.checkpoints.is_open(name):
            message = messages[self._cursors[name]]
            self._cursors[name] += 1
            if isinstance(message, Barrier):
                self.checkpoints.on_barrier(name, message)
            else:
                self._released[name].append(message)
                self.checkpoints.on_segment(name, message.sequence, message.size_bytes)
        self._try_batch()

    # -- batches ----------------------------------------------------------------------------------

    def _try_batch(self) -> None:
        if self._batch_runs or self.checkpoints.is_drained:
            return
        if self.spec.is_source:
            self._try_source_batch()
        elif any(self._released.values()):
            taken: dict[str, int] = {}
            for name, released in self._released.items():
                if released:
                    taken[name] = self._world.random.randint(1 if len(self._released) == 1 else 0, len(released))
            if any(taken.values()):
                self._start_batch(taken)
            else:
                self._look_again_in(3)

    def _try_source_batch(self) -> None:
        path, offset = next(iter(self._rows.items()))
        available = self.cluster.rows_available(self.spec.name)
        if available > offset:
            after = min(available, offset + self._world.random.randint(1, 12))
            self._begin_batch()
            self._wake(self._world.delay(self._slowness_ms), self._commit_batch, {}, ((path, offset, after),))
        else:
            self._look_again_in(self._world.delay(60))

    def _look_again_in(self, delay_ms: int) -> None:
        if not self._looks_again:
            self._looks_again = True
            self._wake(delay_ms, self._look_again)

    def _look_again(self) -> None:
        self._looks_again = False
        self._try_batch()

    def _begin_batch(self) -> None:
        self._batch_runs = True
        self.cluster.checkers.nothing_after_drain.on_batch(self.generation, self.spec.name)

    def _start_batch(self, taken: dict[str, int]) -> None:
        self._begin_batch()
        positions: dict[str, int] = {}
        rows: list[tuple[int, int, int]] = []
        for name, count in taken.items():
            for _ in range(count):
                segment = self._released[name].popleft()
                positions[name] = segment.sequence
                rows += segment.rows
        self._wake(self._world.delay(self._slowness_ms), self._commit_batch, positions, tuple(rows))

    def _commit_batch(self, positions: dict[str, int], rows: Ranges) -> None:
        if self._world.has_full_disk:
            self.die("no space left on device")
            return
        if self.process.store_cut_until > self._world.now:
            self._wake(self._world.delay(60), self._commit_batch, positions, rows)
            return
        self._batch_runs = False
        self._batch += 1
        output: list[tuple[int, int, int]] = []
        checker = self.cluster.checkers.rows_in_order
        for path, first, after in rows:
            own_path = self.spec.paths[path]
            checker.on_consumed(self.spec, self._rows, own_path, first)
            self._rows[own_path] = after
            output.append((own_path, first, after))
        if output:
            self._write(tuple(output))
        self.checkpoints.on_committed(self._batch, positions)
        self._try_batch()

    def _write(self, rows: Ranges) -> None:
        if self.spec.is_sink:
            staged = StagedRows(self.generation, self._batch)
            self._staged.append(staged)
            self.cluster.tables[self.spec.name].stage_now(staged, rows)
            return
        self._output_sequence += 1
        path = f"g{self.generation}/{self.spec.name}/segment-{self._output_sequence}"
        segment = SimulatedSegment(self._output_sequence, path, rows)
        self._store.write_now(path, self.generation, segment)
        self._append(segment)

    def _append(self, message: SimulatedSegment | Barrier) -> None:
        self._output.append(message, self.spec.name)
        self._driver.carry(self.generation, self.spec.name, message)

    # -- what its part in checkpoints asks --------------------------------------------------------

    def standing(self) -> Standing:
        return Standing(
            output_sequence=self._output_sequence,
            has_event_time=self.spec.is_source,
            watermark_ms=self.watermark_ms,
            source_position=str(next(iter(self._rows.values()))) if self.spec.is_source else None,
            committable=msgspec.json.encode(self._staged).decode() if self.spec.is_sink else None,
            detail=dict(self._rows),
        )

    def append_barrier(self, barrier: Barrier) -> None:
        self.cluster.checkers.nothing_after_drain.on_barrier(self.generation, self.spec.name, barrier)
        if not self.spec.is_sink:
            self._append(barrier)
        self._wake(1, self._try_batch)

    def on_open(self, name: str) -> None:
        self._wake(1, self._read, name)

    def on_keeps_aligning(self, checkpoint_id: int, inflight_bytes: int) -> None:
        self._world.note("{} keeps aligning {}: {} bytes", self.spec.name, checkpoint_id, inflight_bytes)

    def on_visible(self, through_batch: int) -> None:
        self._staged = [each for each in self._staged if each.batch > through_batch]

    # -- snapshots --------------------------------------------------------------------------------

    async def _store_snapshot(self, request: requests.StoreSnapshot) -> requests.Stored:
        """It builds on the last one that was stored."""
        checkpoint_id = request.cut.barrier.checkpoint_id
        state = request.standing.detail
        path = f"g{self.generation}/{self.spec.name}/state-{checkpoint_id}"
        is_full = request.cut.barrier.is_full_snapshot or len(self._chain) >= _LONGEST_CHAIN
        chain = (path,) if is_full else (path, *self._chain)
        await self._store.put(path, self.generation, state)
        self._chain = chain
        return requests.Stored(files=chain, new_bytes=len(state), total_bytes=len(state) * len(chain))

    async def _store_in_flight(self, request: requests.StoreInFlight) -> requests.StoredInFlight:
        return requests.StoredInFlight(
            tuple(
                self._channels[flying.input].segments[sequence].path
                for flying in request.in_flight
                for sequence in range(flying.after + 1, flying.through + 1)
            )
        )

    async def _check_sealed(self, request: requests.CheckSealed) -> None:
        await self.cluster.tables[request.stage].check()
