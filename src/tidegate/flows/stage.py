"""A stage's part in checkpoints: where barriers enter or arrive, when it is cut, and what it stores and reports.

Guarantees:
- The barrier is forwarded first; then the snapshot is stored, beside the running query.
- Snapshots of a stage are stored one after the other, because each may build on the one before.
- A stage reports when all that its part refers to is durable, and its table has not refused what it sealed. What cannot
  be stored is declined, which aborts the checkpoint.
- After a DRAIN cut nothing flows, unless that checkpoint is aborted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from tidegate.errors import ConflictingRows, SinkFailed, StageFailed, StoreUnavailable, TidegateError
from tidegate.flows.requests import (
    CheckSealed,
    Host,
    Patience,
    Sleep,
    Standing,
    Stored,
    StoredInFlight,
    StoreInFlight,
    StoreSnapshot,
)
from tidegate.protocol.aligner import (
    Abandoned,
    Action,
    Aligner,
    AlignmentEvent,
    AlignmentProgress,
    Arrival,
    Captured,
    Cut,
    Forward,
    InFlight,
    KeepsAligning,
    Open,
)
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.injector import Injector
from tidegate.protocol.messages import Barrier


class StageQuery(Protocol):
    """The query whose part this is."""

    def standing(self) -> Standing: ...

    def append_barrier(self, barrier: Barrier) -> None:
        """To the stage's channel, behind the output of its last batch."""
        ...

    def on_open(self, name: str) -> None:
        """An input that was closed may flow again."""
        ...

    def on_keeps_aligning(self, checkpoint_id: int, inflight_bytes: int) -> None:
        """It is due to be cut unaligned, but more is in flight than may be."""
        ...


class StartsAt(msgspec.Struct, frozen=True):
    """Where a stage starts in a generation: behind a batch, if it is restored, and behind all checkpoints so far."""

    generation: int
    after_checkpoint: int = 0
    batch: int | None = None
    positions: Mapping[str, int] = {}


class StageListener(Protocol):
    """Who the stage answers to: the member that runs it."""

    def on_report(self, report: StageReport) -> None: ...

    def on_decline(self, stage: str, checkpoint_id: int, why: str) -> None: ...

    def on_failed(self, error: TidegateError) -> None:
        """The next checkpoint would meet the same: all go back to the last one."""
        ...


class _Part:
    """The stage's part of a checkpoint that is under way."""

    __slots__ = ("arrival", "captured", "cut", "cut_ms", "is_finishing", "standing", "stored")

    def __init__(self, cut: Cut, standing: Standing, cut_ms: int) -> None:
        self.cut = cut
        self.arrival: Arrival | None = None
        self.standing = standing
        self.cut_ms = cut_ms
        self.captured: tuple[InFlight, ...] | None = None
        self.stored: Stored | None = None
        self.is_finishing = False


class StageCheckpoints:
    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        host: Host,
        query: StageQuery,
        config: CheckpointConfig,
        patience: Patience,
        start: StartsAt,
        *,
        is_sink: bool,
    ) -> None:
        self.name = name
        self.generation = start.generation
        self.is_source = not inputs
        self._is_sink = is_sink
        self._host = host
        self._query = query
        self._patience = patience
        self._listener: StageListener | None = None
        self._injector = Injector(name, max_pending=config.max_concurrent, after_checkpoint=start.after_checkpoint)
        self._aligner = Aligner(
            name,
            inputs,
            config.alignment,
            is_sink=is_sink,
            batch=start.batch,
            positions=start.positions,
            after_checkpoint=start.after_checkpoint,
        )
        self._parts: dict[int, _Part] = {}
        self._to_store: deque[_Part] = deque()
        self._is_storing = False

    def listen(self, listener: StageListener | None) -> None:
        """None: nobody wants to hear of it any more."""
        self._listener = listener

    # -- what one may ask -------------------------------------------------------------------------

    def is_open(self, name: str) -> bool:
        """Whether the next message of this input may be taken from its channel."""
        return self._aligner.is_open(name)

    @property
    def is_drained(self) -> bool:
        """Whether nothing may flow any more."""
        return self._aligner.is_drained

    @property
    def is_under_way(self) -> bool:
        """Whether what is consumed, or was committed last, may still be wanted by a checkpoint."""
        return bool(self._parts)

    def has_cut(self, checkpoint_id: int) -> bool:
        """Whether it has passed the barrier of a checkpoint that is under way."""
        return checkpoint_id in self._parts

    def has_captured(self, checkpoint_id: int) -> bool:
        """Whether it has passed that barrier in all of its inputs: whatever came before one is consumed, or captured in
        flight."""
        return self.has_cut(checkpoint_id) and self._aligner.progress_of(checkpoint_id) is None

    def cut_at(self, checkpoint_id: int) -> tuple[Cut, tuple[InFlight, ...]] | None:
        """Where it was cut for a checkpoint that is under way, and what is known to have been in flight there."""
        part = self._parts.get(checkpoint_id)
        return None if part is None else (part.cut, part.captured or ())

    def progress_of(self, checkpoint_id: int) -> AlignmentProgress | None:
        """How far it is with a checkpoint that it is aligning or recording."""
        return self._aligner.progress_of(checkpoint_id)

    def arrival_of(self, checkpoint_id: int) -> Arrival | None:
        """How a checkpoint that is under way came here, once all barriers have, late ones too; None before, and of a
        source."""
        part = self._parts.get(checkpoint_id)
        return self._aligner.arrival_of(checkpoint_id) if part is None else part.arrival

    def first_barrier_ms(self, checkpoint_id: int) -> int | None:
        """When the first barrier came, of a checkpoint that it was cut for."""
        part = self._parts.get(checkpoint_id)
        return None if part is None else part.cut_ms - part.cut.alignment_ms

    # -- what happens -----------------------------------------------------------------------------

    def inject(self, barrier: Barrier) -> None:
        self._injector.inject(barrier)
        self.poll()

    def poll(self) -> None:
        """Time passes."""
        if self.is_source:
            while (barrier := self._injector.poll()) is not None:
                self._execute(self._aligner.on_injected(barrier, self._host.now_ms))
        self._execute(self._aligner.on_time(self._host.now_ms))

    def on_segment(self, name: str, sequence: int, size_bytes: int) -> None:
        """A segment was taken from an input's channel."""
        self._execute(self._aligner.on_segment(name, sequence, size_bytes))

    def on_barrier(self, name: str, barrier: Barrier) -> None:
        self._execute(self._aligner.on_barrier(name, barrier, self._host.now_ms))

    def on_committed(self, batch: int, positions: Mapping[str, int]) -> None:
        """The query has committed a batch, and its output was appended to the stage's channel."""
        self._execute(self._aligner.on_committed(batch, positions, self._host.now_ms))

    def on_aborted(self, barrier: Barrier) -> None:
        if self.is_source:
            self._injector.cancel(barrier)
            self.poll()
        else:
            self._execute(self._aligner.on_cancelled(barrier))

    def on_decided(self, checkpoint_id: int) -> None:
        """It is complete. A sink goes on sealing what it staged until its table shows it: a leader that dies before
        that leaves it to the next checkpoint that is restored."""
        self._parts.pop(checkpoint_id, None)

    # -- its part ---------------------------------------------------------------------------------

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Cut():
                    self._query.append_barrier(action.barrier)
                    self._begin(action)
                case Captured(checkpoint_id, in_flight, arrival):
                    # Its snapshot may have failed while a late barrier was still on its way: then it was declined.
                    if (part := self._parts.get(checkpoint_id)) is not None:
                        part.captured, part.arrival = in_flight, arrival
                        self._finish_if_ready(part)
                case Open(name):
                    self._query.on_open(name)
                case Abandoned(checkpoint_id, why):
                    self._parts.pop(checkpoint_id, None)
                    if why is not AlignmentEvent.CANCELLED:
                        self._decline(checkpoint_id, why.value)
                case Forward(barrier):
                    self._query.append_barrier(barrier)
                case KeepsAligning(checkpoint_id, inflight_bytes):
                    self._query.on_keeps_aligning(checkpoint_id, inflight_bytes)

    def _begin(self, cut: Cut) -> None:
        part = _Part(cut, self._query.standing(), self._host.now_ms)
        self._parts[cut.barrier.checkpoint_id] = part
        self._to_store.append(part)
        if not self._is_storing:
            self._is_storing = True
            self._host.start(self._store_all(), self._on_failed)

    async def _store_all(self) -> None:
        while self._to_store:
            await self._store(self._to_store.popleft())
        self._is_storing = False

    async def _store(self, part: _Part) -> None:
        """Also where its checkpoint was aborted meanwhile: the next snapshot may build on this one."""
        request = StoreSnapshot(self.name, part.cut, part.standing)
        for tried in range(1, self._patience.snapshot_tries + 1):
            try:
                part.stored = await request
            except StoreUnavailable as error:
                if tried < self._patience.snapshot_tries:
                    await Sleep(self._patience.pause.after(tried))
                    continue
                self._give_up(part, error, "the snapshot could not be stored")
            except TidegateError as error:
                self._give_up(part, error, "the snapshot could not be stored")
            break
        self._finish_if_ready(part)

    def _finish_if_ready(self, part: _Part) -> None:
        """Not of a checkpoint that was aborted meanwhile: what was in flight to it may be forgotten by now."""
        if part.captured is None or part.stored is None or part.is_finishing or not self._is_wanted(part):
            return
        part.is_finishing = True
        self._host.start(self._finish(part, part.captured, part.stored), self._on_failed)

    async def _finish(self, part: _Part, captured: tuple[InFlight, ...], stored: Stored) -> None:
        """The table is asked last: what the snapshot needs is deleted by Spark when the stage has run on for long."""
        committable = part.standing.committable
        try:
            in_flight = await StoreInFlight(self.name, captured) if captured else StoredInFlight()
            if committable is not None:
                await CheckSealed(self.name, committable)
        except TidegateError as error:
            self._give_up(part, error, "its rows could not be checked" if committable else "it could not be stored")
            return
        if self._is_wanted(part) and self._listener is not None:
            self._listener.on_report(self._report(part, captured, stored, in_flight))

    def _report(
        self, part: _Part, captured: tuple[InFlight, ...], stored: Stored, in_flight: StoredInFlight
    ) -> StageReport:
        cut = part.cut
        return StageReport(
            stage=self.name,
            checkpoint_id=cut.barrier.checkpoint_id,
            attempt=0,
            generation=self.generation,
            cut=cut.batch,
            positions=cut.positions,
            output_sequence=part.standing.output_sequence,
            files=(*stored.files, *in_flight.files),
            committable=part.standing.committable,
            source_position=part.standing.source_position,
            in_flight=captured,
            has_event_time=part.standing.has_event_time,
            watermark_ms=part.standing.watermark_ms,
            new_bytes=stored.new_bytes,
            total_bytes=stored.total_bytes,
            barrier_ms=part.cut_ms - cut.alignment_ms,
            alignment_ms=cut.alignment_ms,
            cause=cut.cause,
            over_bound=cut.over_bound,
            snapshot_ms=stored.snapshot_ms,
            arrival=part.arrival,
            stored_after_ms=self._host.now_ms - part.cut_ms,
            detail=(part.standing.detail, stored.detail, in_flight.detail),
        )

    def _is_wanted(self, part: _Part) -> bool:
        return self._parts.get(part.cut.barrier.checkpoint_id) is part

    def _give_up(self, part: _Part, error: TidegateError, what: str) -> None:
        if isinstance(error, StageFailed | ConflictingRows):
            self._on_failed(error)
        elif self._is_wanted(part):
            del self._parts[part.cut.barrier.checkpoint_id]
            why = str(error) if isinstance(error, SinkFailed) else f"{what}: {error}"
            self._decline(part.cut.barrier.checkpoint_id, why)

    def _decline(self, checkpoint_id: int, why: str) -> None:
        if self._listener is not None:
            self._listener.on_decline(self.name, checkpoint_id, why)

    def _on_failed(self, error: TidegateError) -> None:
        if self._listener is not None:
            self._listener.on_failed(error)
