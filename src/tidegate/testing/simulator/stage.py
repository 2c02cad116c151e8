"""A simulated stage: what a stage's runner does around Spark, with batches that take simulated time.

It releases segments through its aligner's gates, runs batches over what was released, appends each committed
batch's output to its channel, and on a cut forwards the barrier and stores a snapshot.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from tidegate.errors import StoreUnavailable
from tidegate.protocol.aligner import (
    Abandoned,
    Action,
    Aligner,
    AlignmentEvent,
    Captured,
    Cut,
    Forward,
    InFlight,
    Open,
)
from tidegate.protocol.config import AlignmentConfig
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.injector import Injector
from tidegate.protocol.messages import Barrier
from tidegate.testing.simulator.dag import Ranges, StageSpec
from tidegate.testing.simulator.world import Task

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.testing.simulator.instance import SimulatedInstance

_BYTES_PER_ROW = 10
_LONGEST_CHAIN = 4
_UPLOAD_TRIES = 3


class SimulatedSegment(msgspec.Struct, frozen=True):
    sequence: int
    path: str
    rows: Ranges

    @property
    def size_bytes(self) -> int:
        return sum(after - first for _, first, after in self.rows) * _BYTES_PER_ROW


class Channel:
    """The ordered, durable log of one stage's output in one generation."""

    def __init__(self, base_sequence: int) -> None:
        self.base_sequence = base_sequence
        self.messages: list[SimulatedSegment | Barrier] = []
        self.readers: list[SimulatedStage] = []
        self.segments: dict[int, SimulatedSegment] = {}


class StageState(msgspec.Struct, frozen=True):
    """Where a stage starts: from the beginning, or from its part of a checkpoint."""

    rows: dict[int, int]
    batch: int | None = None
    positions: dict[str, int] = {}
    output_sequence: int = 0
    in_flight: dict[str, tuple[SimulatedSegment, ...]] = {}
    chain: tuple[str, ...] = ()
    staged: tuple[str, ...] = ()
    after_checkpoint: int = 0


def batch_of(staged_path: str) -> int:
    return int(staged_path.rsplit("-", 1)[1])


class _Part:
    """This stage's part of a checkpoint that is under way."""

    __slots__ = ("captured", "chain", "cut", "output_sequence", "staged", "state", "uploaded")

    def __init__(self, cut: Cut, output_sequence: int, state: dict[int, int], staged: tuple[str, ...]) -> None:
        self.cut = cut
        self.output_sequence = output_sequence
        self.state = state
        self.staged = staged
        self.captured: tuple[InFlight, ...] | None = None
        self.chain: tuple[str, ...] = ()
        self.uploaded = False


class SimulatedStage:
    def __init__(
        self,
        instance: SimulatedInstance,
        spec: StageSpec,
        generation: int,
        start: StageState,
        alignment: AlignmentConfig,
        max_concurrent: int,
    ) -> None:
        self.spec = spec
        self.generation = generation
        self.stopped = False
        self.injector = Injector(spec.name, max_pending=max_concurrent, after_checkpoint=start.after_checkpoint)
        self.aligner = Aligner(
            spec.name,
            spec.inputs,
            alignment,
            is_sink=spec.is_sink,
            batch=start.batch,
            positions=start.positions,
            after_checkpoint=start.after_checkpoint,
        )
        self._instance = instance
        self._world = instance.world
        self._process = instance.process
        cluster = instance.cluster
        self._store = cluster.store
        self._rows = dict(start.rows)
        self._batch = -1 if start.batch is None else start.batch
        self._output_sequence = start.output_sequence
        self._channels = {name: cluster.channel(generation, name) for name in spec.inputs}
        self._output = cluster.channel(generation, spec.name)
        self._cursors = dict.fromkeys(spec.inputs, 0)
        self._released: dict[str, deque[SimulatedSegment]] = {name: deque() for name in spec.inputs}
        self._batch_runs = False
        self._chain = start.chain
        self._parts: dict[int, _Part] = {}
        self._uploads: deque[_Part] = deque()
        self._upload_runs = False
        self._staged = {batch_of(path): path for path in start.staged}
        self._slowness_ms = self._world.random.choice((8, 15, 40, 120))
        for name, segments in start.in_flight.items():
            for segment in segments:
                self.aligner.on_segment(name, segment.sequence, segment.size_bytes)
                self._released[name].append(segment)
                self._channels[name].segments.setdefault(segment.sequence, segment)

    @property
    def watermark_ms(self) -> int | None:
        """A source's event time: its row count; not set before its first row."""
        return max(self._rows.values(), default=0) or None

    def begin(self) -> None:
        for name, channel in self._channels.items():
            channel.readers.append(self)
            self._wake(1, self._read, name)
        self._wake(1, self._try_batch)

    # -- reading ----------------------------------------------------------------------------------

    def _wake(self, delay_ms: int, call: object, *arguments: object) -> None:
        self._world.after(delay_ms, self._process, self._if_running, call, *arguments)

    def _if_running(self, call: object, *arguments: object) -> None:
        if not self.stopped and callable(call):
            call(*arguments)

    def notice(self, name: str) -> None:
        """The writer appended to its channel; the reader sees it a little later."""
        self._wake(self._world.delay(6), self._read, name)

    def _read(self, name: str) -> None:
        messages = self._channels[name].messages
        while self._cursors[name] < len(messages) and self.aligner.is_open(name):
            message = messages[self._cursors[name]]
            self._cursors[name] += 1
            if isinstance(message, Barrier):
                self.execute(self.aligner.on_barrier(name, message, self._world.now))
            else:
                self._released[name].append(message)
                self.execute(self.aligner.on_segment(name, message.sequence, message.size_bytes))
        self._try_batch()

    # -- batches ----------------------------------------------------------------------------------

    def _try_batch(self) -> None:
        if self._batch_runs or self.aligner.is_drained:
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
                self._wake(3, self._try_batch)

    def _try_source_batch(self) -> None:
        path, offset = next(iter(self._rows.items()))
        available = self._instance.cluster.rows_available(self.spec.name)
        if available > offset:
            after = min(available, offset + self._world.random.randint(1, 12))
            self._batch_runs = True
            self._wake(self._world.delay(self._slowness_ms), self._commit_batch, {}, ((path, offset, after),))
        else:
            self._wake(self._world.delay(60), self._try_batch)

    def _start_batch(self, taken: dict[str, int]) -> None:
        self._batch_runs = True
        positions: dict[str, int] = {}
        rows: list[tuple[int, int, int]] = []
        for name, count in taken.items():
            for _ in range(count):
                segment = self._released[name].popleft()
                positions[name] = segment.sequence
                rows += segment.rows
        self._wake(self._world.delay(self._slowness_ms), self._commit_batch, positions, tuple(rows))

    def _commit_batch(self, positions: dict[str, int], rows: Ranges) -> None:
        self._batch_runs = False
        self._batch += 1
        output: list[tuple[int, int, int]] = []
        checker = self._instance.cluster.checkers.rows_in_order
        for path, first, after in rows:
            own_path = self.spec.paths[path]
            checker.on_consumed(self.spec, self._rows, own_path, first)
            self._rows[own_path] = after
            output.append((own_path, first, after))
        if output:
            self._write(tuple(output))
        self.execute(self.aligner.on_committed(self._batch, positions, self._world.now))
        self.poll_injector()
        self._try_batch()

    def _write(self, rows: Ranges) -> None:
        if self.spec.is_sink:
            path = f"g{self.generation}/{self.spec.name}/staged-{self._batch}"
            self._staged[self._batch] = path
            self._store.write_now(path, self.generation, rows)
            return
        self._output_sequence += 1
        path = f"g{self.generation}/{self.spec.name}/segment-{self._output_sequence}"
        self._append(SimulatedSegment(self._output_sequence, path, rows))

    def _append(self, message: SimulatedSegment | Barrier) -> None:
        if isinstance(message, SimulatedSegment):
            self._store.write_now(message.path, self.generation, message)
            self._output.segments[message.sequence] = message
        self._output.messages.append(message)
        for reader in self._output.readers:
            reader.notice(self.spec.name)

    def poll_injector(self) -> None:
        if self.spec.is_source:
            while (barrier := self.injector.poll()) is not None:
                self.execute(self.aligner.on_injected(barrier, self._world.now))

    # -- checkpoints ------------------------------------------------------------------------------

    def on_tick(self) -> None:
        self.poll_injector()
        self.execute(self.aligner.on_time(self._world.now))

    def on_aborted(self, barrier: Barrier) -> None:
        if self.spec.is_source:
            self.injector.cancel(barrier)
        else:
            self.execute(self.aligner.on_cancelled(barrier))

    def on_committed(self, checkpoint_id: int) -> None:
        """The checkpoint is decided. A sink goes on sealing what it staged until its table shows it: a leader
        that dies before that leaves it to the next checkpoint that is restored."""
        self._parts.pop(checkpoint_id, None)

    def on_visible(self, through_batch: int) -> None:
        """The table shows all that was staged up to this batch."""
        for batch in [batch for batch in self._staged if batch <= through_batch]:
            del self._staged[batch]

    def execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Cut():
                    if not self.spec.is_sink:
                        self._append(action.barrier)
                    self._begin_part(action)
                case Captured():
                    self._parts[action.checkpoint_id].captured = action.in_flight
                    self._report_if_done(action.checkpoint_id)
                case Open():
                    self._wake(1, self._read, action.input)
                case Abandoned():
                    self._parts.pop(action.checkpoint_id, None)
                    if action.why is not AlignmentEvent.CANCELLED:
                        self._instance.decline(self, action.checkpoint_id, action.why.value)
                case Forward():
                    if not self.spec.is_sink:
                        self._append(action.barrier)
                    self._wake(1, self._try_batch)

    def _begin_part(self, cut: Cut) -> None:
        part = _Part(cut, self._output_sequence, dict(self._rows), tuple(self._staged.values()))
        self._parts[cut.barrier.checkpoint_id] = part
        self._uploads.append(part)
        if not self._upload_runs:
            self._world.spawn(self._process, self._upload())

    def _upload(self) -> Task:
        """Store snapshots one after the other: each may build on the one before it."""
        self._upload_runs = True
        while self._uploads:
            part = self._uploads.popleft()
            checkpoint_id = part.cut.barrier.checkpoint_id
            path = f"g{self.generation}/{self.spec.name}/state-{checkpoint_id}"
            full = part.cut.barrier.is_full_snapshot or len(self._chain) >= _LONGEST_CHAIN
            part.chain = (path,) if full else (path, *self._chain)
            for _ in range(_UPLOAD_TRIES):
                try:
                    yield self._store.put(path, self.generation, part.state)
                except StoreUnavailable:
                    continue
                part.uploaded = True
                self._chain = part.chain
                break
            if not self.stopped and checkpoint_id in self._parts:
                if part.uploaded:
                    self._report_if_done(checkpoint_id)
                else:
                    self._instance.decline(self, checkpoint_id, "the snapshot could not be stored")
        self._upload_runs = False

    def _report_if_done(self, checkpoint_id: int) -> None:
        part = self._parts[checkpoint_id]
        if part.captured is None or not part.uploaded or self.stopped:
            return
        in_flight_files = [
            self._channels[flying.input].segments[sequence].path
            for flying in part.captured
            for sequence in range(flying.after + 1, flying.through + 1)
        ]
        attempt = self._instance.attempts.get(checkpoint_id)
        if attempt is None:
            return
        report = StageReport(
            stage=self.spec.name,
            checkpoint_id=checkpoint_id,
            attempt=attempt,
            generation=self.generation,
            cut=part.cut.batch,
            positions=part.cut.positions,
            output_sequence=part.output_sequence,
            files=(*part.chain, *in_flight_files, *part.staged),
            committable="\n".join(part.staged) if self.spec.is_sink else None,
            source_position=str(next(iter(part.state.values()))) if self.spec.is_source else None,
            in_flight=part.captured,
            watermark_ms=self.watermark_ms,
            new_bytes=len(part.state),
            total_bytes=len(part.state) * len(part.chain),
            alignment_ms=part.cut.alignment_ms,
        )
        self._instance.on_report(report)
