"""One running stage: its Spark query, its gates, its channel, and its part in checkpoints.

All of it is driven by `poll`, from the run's one control thread: no locks. Rows never come here; what does are
the names of files that Spark has committed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import msgspec

from tidegate.engine.beside import beside
from tidegate.engine.channel import Channel
from tidegate.engine.kill_points import Step, reached
from tidegate.engine.status import StagePart
from tidegate.errors import ConflictingRows, DamagedCheckpoint, SinkFailed, StageFailed, StoreUnavailable
from tidegate.protocol.aligner import (
    Abandoned,
    Action,
    Aligner,
    AlignmentEvent,
    Captured,
    Cut,
    Forward,
    InFlight,
    KeepsAligning,
)
from tidegate.protocol.backpressure import BacklogBound, Backpressure
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.injector import Injector
from tidegate.protocol.messages import Barrier, Segment, SegmentFile
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import (
    BoundSink,
    CheckingSink,
    Committable,
    RowSink,
    Staged,
    StagedBatch,
    StagedFile,
    decode_committable,
)
from tidegate.spark.causes import exception_of, failure_of
from tidegate.spark.definition import StageDefinition
from tidegate.spark.filelog import (
    METADATA,
    BatchOffsets,
    StageSource,
    has_moved_watermark,
    is_begun,
    is_committed,
    is_overrun,
    log_offset,
    read_offsets,
    read_source_log,
    trim_log,
)
from tidegate.spark.gate import WINDOW, Gate
from tidegate.spark.output import remove_output, restore_output, written_files
from tidegate.spark.snapshot import Snapshotter, notes_of_first_position
from tidegate.spark.state import state_mismatch
from tidegate.storage.files import Files, NotDurable
from tidegate.storage.manifest import SnapshotFile, StageSnapshot
from tidegate.storage.parquet import count_rows, write_nothing
from tidegate.storage.paths import RootPaths, attempt_of
from tidegate.storage.system import say

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

_log = logging.getLogger("tidegate")
P = ParamSpec("P")
T = TypeVar("T")

_TRIM_EVERY: Final = 20
_KEPT_LOG_ENTRIES: Final = 5
_BATCHES_IN_VAIN: Final = 3
_WAITING: Final = "Waiting for data to arrive"


class StagePlace(msgspec.Struct, frozen=True):
    """Where a stage lives in a generation, and where it starts from. `bound`: of what its table may be behind.

    `staging`: where what it writes lies, by whatever generation: the root, or beside its table. `output` is in it.
    """

    root: Files
    generation: int
    staging: Files
    output: Files
    start: StageSnapshot | None
    after_checkpoint: int
    sink: BoundSink | None
    bound: BacklogBound


class _Consumed:
    """How far one of the query's sources has come in its input."""

    __slots__ = ("input", "log", "position")

    def __init__(self, source: StageSource, position: int) -> None:
        self.input = source.input
        self.log = source.log
        self.position = position


class _Part:
    """This stage's part of a checkpoint that is under way."""

    __slots__ = (
        "barrier_ms",
        "captured",
        "checked",
        "committable",
        "cut",
        "output_sequence",
        "snapshot",
        "source_positions",
        "synced",
        "watermark_ms",
    )

    def __init__(self, cut: Cut, stage: RunningStage, now_ms: int) -> None:
        self.cut = cut
        self.barrier_ms = now_ms - cut.alignment_ms
        self.output_sequence = stage.channel.sequence
        self.watermark_ms = stage.watermark_ms
        self.source_positions = stage.source_positions
        self.committable = stage.sealed()
        self.captured: tuple[InFlight, ...] | None = None
        self.snapshot: Future[tuple[tuple[SnapshotFile, ...], int, int]] | None = None
        self.synced: Future[None] | None = None
        """Of what was captured in flight."""
        self.checked: Future[None] | None = None
        """Of what the table is to take."""


def _fails_its_stage(act: Callable[Concatenate[RunningStage, P], T]) -> Callable[Concatenate[RunningStage, P], T]:
    """What is wrong with the files of a query that runs is no damage to a checkpoint: a restart lays them anew."""

    @wraps(act)
    def acting(stage: RunningStage, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return act(stage, *args, **kwargs)
        except (DamagedCheckpoint, StoreUnavailable, OSError) as error:
            raise StageFailed(stage.name, say(error)) from error

    return acting


class _Unshown:
    """What a sink has consumed since what its table shows."""

    def __init__(self, bound: BacklogBound) -> None:
        self._backpressure = Backpressure(bound)
        self._batches: deque[tuple[int, int]] = deque()
        self._size_bytes = 0

    @property
    def is_too_much(self) -> bool:
        return self._backpressure.is_held_back

    def on_batch(self, batch: int, consumed_bytes: int) -> None:
        self._batches.append((batch, consumed_bytes))
        self._size_bytes += consumed_bytes
        self._backpressure.on_backlog(len(self._batches), self._size_bytes)

    def on_visible(self, through_batch: int) -> None:
        while self._batches and self._batches[0][0] <= through_batch:
            self._size_bytes -= self._batches.popleft()[1]
        self._backpressure.on_backlog(len(self._batches), self._size_bytes)


class RunningStage:
    def __init__(
        self,
        definition: StageDefinition,
        place: StagePlace,
        channels: dict[str, Channel],
        config: CheckpointConfig,
        uploads: Executor,
        report: Callable[[str, int, StageSnapshot], None],
        decline: Callable[[str, int, str], None],
    ) -> None:
        self.definition = definition
        self.name = definition.name
        self._place = place
        start = place.start
        self.checkpoint = place.root.at(RootPaths.spark_checkpoint(place.generation, self.name), durable=False)
        self.output = place.output
        self._live_attempt = 1
        self._channels = {name: channels[name] for name in definition.inputs}
        self.channel = channels[self.name]
        self._cursors = dict.fromkeys(definition.inputs, 0)
        positions = {} if start is None else start.positions
        self._positions = {name: positions.get(name, 0) for name in definition.inputs}
        self.start = start
        self.gates: dict[str, Gate] = {}
        self._consumed: list[_Consumed] = []
        self._half_consumed: list[BatchOffsets] = []
        self.injector = Injector(self.name, max_pending=config.max_concurrent, after_checkpoint=place.after_checkpoint)
        self.aligner = Aligner(
            self.name,
            definition.inputs,
            config.alignment,
            is_sink=definition.kind == "sink",
            batch=None if start is None else start.cut,
            positions=self._positions,
            after_checkpoint=place.after_checkpoint,
        )
        held = {} if start is None else {file.name: file for file in start.files}
        self._snapshotter = Snapshotter(
            place.root, place.generation, self.name, held, reads_gates=bool(definition.inputs)
        )
        self._uploads = uploads
        # What the last checkpoint named and this stage has forced there. Of the upload thread.
        self._on_disk: frozenset[object] = frozenset()
        self._report = report
        self._decline = decline
        self.batch = -1 if start is None or start.cut is None else start.cut
        self.watermark_ms = None if start is None else start.watermark_ms
        self.source_positions = () if start is None else start.source_positions
        self.rows = 0
        self._now_ms = 0
        self.may_end = False
        """Whether its query ends by itself, as that of a source does with `available_now`."""
        self.ended = False
        self.query: StreamingQuery | None = None
        self._nudged_at: int | None = None
        self._achieved: tuple[int, int | None] = (0, self.watermark_ms)
        self._in_vain = 0
        self._parts: dict[int, _Part] = {}
        self._staged: list[Staged] = []
        self._staged_rows: dict[int, int] = {}
        self._shown_through = -1
        self._written_segments: deque[Segment] = deque()
        self._unreclaimed: list[str] = []
        self._trimmed_at = self.batch
        self._known: dict[str, dict[int, Segment]] = {name: {} for name in definition.inputs}
        self.is_table_late = False
        self._unshown = _Unshown(place.bound)
        if start is not None and start.committable is not None:
            # What the table does not show yet is sealed again, until the table says that it does.
            restored = decode_committable(start.committable)
            self._staged = [*restored.files, *restored.batches]
            self._shown_through = restored.shown_through

    def open_gates(self, sources: Sequence[StageSource], window: int = WINDOW) -> None:
        """Lay the gates, with what was in flight at the checkpoint that the stage starts from. `window`: see `Gate`.

        If it was cut before the batch without data that writes out what the watermark has closed, a nudge makes up for
        that batch.
        """
        self._consumed = [_Consumed(source, self._positions[source.input]) for source in sources]
        self.gates = {
            name: Gate(
                self._place.root.at(RootPaths.gate(self._place.generation, self.name, name), durable=False),
                self._place.root,
                self._positions[name],
                window,
            )
            for name in self.definition.inputs
        }
        for name, segments in ({} if self.start is None else self.start.in_flight).items():
            for segment in segments:
                self._release(name, segment)
        cut = None if self.start is None else self.start.cut
        if cut is not None and self.gates and has_moved_watermark(self.checkpoint, cut):
            self._nudged_at = cut
            name = self.definition.inputs[0]
            nothing = RootPaths.nothing(self._place.generation, name)
            self.gates[name].nudge(SegmentFile(nothing, write_nothing(self._place.root.at("", durable=False), nothing)))

    # -- one round --------------------------------------------------------------------------------

    @_fails_its_stage
    def poll(self, now_ms: int) -> None:
        """Look at what Spark has committed and what inputs hold."""
        self._now_ms = now_ms
        self._take_up_batches(now_ms)
        for name in self._channels:
            self._read(name, now_ms)
        if not self.definition.inputs:
            while (barrier := self.injector.poll()) is not None:
                self._execute(self.aligner.on_injected(barrier, now_ms))
        self._execute(self.aligner.on_time(now_ms))
        if not self.is_held_back:
            for gate in self.gates.values():
                gate.flush()
        self._finish_parts()

    @_fails_its_stage
    def check_query(self) -> None:
        """Raise if the query has failed, was stopped, or has run away; notice if it has ended."""
        if self.query is None or self.ended:
            return
        self._check_not_overrun()
        if self.query.isActive:
            return
        error = exception_of(self.query)
        if error is not None:
            raise state_mismatch(self.name, error) or failure_of(self.name, error)
        if is_committed(self.checkpoint, self._next_batch):
            return  # to be taken up first
        if not self.may_end or is_begun(self.checkpoint, self._next_batch):
            raise StageFailed(
                self.name, "its query ended without an error and without being done: something has stopped it"
            )
        self.ended = True

    def _check_not_overrun(self) -> None:
        if is_overrun(self.checkpoint, self._next_batch):
            raise StageFailed(
                self.name,
                f"batch {self._next_batch} was committed and deleted before it was looked at: this process did not run "
                f"for a while",
            )

    @property
    def is_idle(self) -> bool:
        """Whether its query waits for data, having committed nothing that was not taken up here.

        One with timers in processing time never waits: it runs batch after batch, and some of them in vain.
        """
        if self._in_vain >= _BATCHES_IN_VAIN:
            return True
        waits = self.query is not None and self.query.status["message"] == _WAITING
        return waits and not is_committed(self.checkpoint, self._next_batch)

    @property
    def last_useful_batch(self) -> int:
        """The last one that consumed or wrote something, or moved the watermark."""
        return self.batch - self._in_vain

    @property
    def has_consumed_all(self) -> bool:
        """Whether nothing that its inputs hold is left to consume."""
        return self.batch != self._nudged_at and all(
            channel.at(self._cursors[name]) is None and self.gates[name].lag == 0
            for name, channel in self._channels.items()
        )

    @property
    def is_held_back(self) -> bool:
        """Whether it gets nothing more to read for now: the readers of its output, or its table, are behind."""
        return self.channel.is_held_back or (self.is_table_late and self._unshown.is_too_much)

    def position(self, name: str) -> int:
        """How far it has come in an input."""
        return self._positions[name]

    @property
    def held_files(self) -> frozenset[str]:
        """The stored files that this stage's next snapshot may refer to."""
        return self._snapshotter.in_use

    @property
    def lag(self) -> int:
        """How many segments of its inputs this stage has yet to commit, also those that wait behind a barrier."""
        return sum(channel.sequence - self._positions[name] for name, channel in self._channels.items())

    def has_cut(self, checkpoint_id: int) -> bool:
        """Whether it has passed the barrier of a checkpoint that is under way."""
        return checkpoint_id in self._parts

    def part_of(self, checkpoint_id: int) -> StagePart:
        """How far this stage has come with a checkpoint that is under way, until it has reported."""
        if self.has_cut(checkpoint_id):
            return StagePart(progress="storing")
        if self.aligner.phase_of(checkpoint_id) is None:
            return StagePart(progress="waiting")
        late = tuple(sorted(self.aligner.waiting_for(checkpoint_id)))
        return StagePart(progress="aligning", waits_for=late) if late else StagePart(progress="catching_up")

    # -- input ------------------------------------------------------------------------------------

    def _read(self, name: str, now_ms: int) -> None:
        channel = self._channels[name]
        while self.aligner.is_open(name) and (message := channel.at(self._cursors[name])) is not None:
            self._cursors[name] += 1
            if isinstance(message, Barrier):
                self._execute(self.aligner.on_barrier(name, message, now_ms))
            else:
                self._release(name, message)

    def _release(self, name: str, segment: Segment) -> None:
        self._known[name][segment.sequence] = segment
        self._execute(self.aligner.on_segment(name, segment.sequence, segment.size_bytes))
        self.gates[name].release(segment)

    def cursor(self, name: str) -> int:
        return self._cursors[name]

    # -- batches ----------------------------------------------------------------------------------

    @property
    def _next_batch(self) -> int:
        """The one that Spark is to commit next, by what was taken up."""
        return self.batch + len(self._half_consumed) + 1

    def _take_up_batches(self, now_ms: int) -> None:
        """Take up what Spark has committed since, as far as the stage can be cut behind it.

        Where two sources read one input (a join with itself), a segment may arrive between the two looking at the
        gate. Then the stage has half consumed it, until the next batch: there is no cut between the two.
        """
        while is_committed(self.checkpoint, self._next_batch):
            if not is_begun(self.checkpoint, self._next_batch):
                self._check_not_overrun()
            offsets = read_offsets(self.checkpoint, self._next_batch)
            self._half_consumed.append(offsets)
            if self._consume(offsets.sources):
                taken, self._half_consumed = self._half_consumed, []
                for each in taken:
                    self._write(self.batch + 1, each)
                self._on_batch(offsets, now_ms)

    def _write(self, batch: int, offsets: BatchOffsets) -> None:
        """Hand on what a batch wrote."""
        self.watermark_ms = offsets.watermark_ms
        if not self.definition.inputs:
            self.source_positions = tuple(source for source in offsets.sources if source is not None)
        self.batch = batch
        if isinstance(self._place.sink, RowSink):
            rows = self._staged_rows.pop(batch, 0)
            self.rows += rows
            if rows:
                self._staged.append(StagedBatch(batch, self._place.generation, rows))
            return
        files = self._written(batch)
        if self.definition.kind == "sink":
            self._staged += files
        elif files:
            named = [SegmentFile(self._name_of(file), file.size_bytes) for file in files]
            segment = Segment(self.channel.sequence + 1, batch, tuple(named))
            self.channel.append_segment(segment)
            self._written_segments.append(segment)
        self.rows += sum(file.rows for file in files)

    def _on_batch(self, offsets: BatchOffsets, now_ms: int) -> None:
        """The stage stands behind a batch."""
        moved = {
            consumed.input: consumed.position
            for consumed in self._consumed
            if consumed.position > self._positions[consumed.input]
        }
        consumed_bytes = sum(self._forget_consumed(name, position) for name, position in moved.items())
        if self.definition.kind == "sink" and moved:
            self._unshown.on_batch(self.batch, consumed_bytes)
        before, self._achieved = self._achieved, (self.rows, self.watermark_ms)
        self._in_vain = 0 if moved or self._achieved != before else self._in_vain + 1
        self._execute(self.aligner.on_committed(self.batch, moved, now_ms))
        # Not while a snapshot may still want an entry.
        if self.batch - self._trimmed_at >= _TRIM_EVERY and not self._parts:
            self._trimmed_at = self.batch
            self._trim(offsets.sources)

    def _consume(self, sources: Iterable[str | None]) -> bool:
        """Note how far a batch has brought each source. Tells whether those of one input stand at one place."""
        if not self.definition.inputs:
            return True
        for consumed, source in zip(self._consumed, sources, strict=True):
            if source is None:
                continue
            entries = read_source_log(self.checkpoint, consumed.log, log_offset(source))
            if entries is None:
                raise DamagedCheckpoint(f"stage {self.name!r}: Spark's source log {consumed.log} lacks {source}")
            for entry in entries:
                if self._input_of(entry.path) != consumed.input:
                    raise DamagedCheckpoint(
                        f"stage {self.name!r}: source {consumed.log} reads {entry.path}, not {consumed.input!r}"
                    )
                # Spark reads on without a word where a file is gone.
                if entry.timestamp > consumed.position and not self._place.root.exists(self._name_in_root(entry.path)):
                    where = self._place.root.location(self._name_in_root(entry.path))
                    raise StageFailed(
                        self.name, f"{where} is gone, which it was reading; nothing else may delete there"
                    )
                consumed.position = max(consumed.position, entry.timestamp)
        return len({(each.input, each.position) for each in self._consumed}) == len(self._positions)

    def _input_of(self, uri: str) -> str:
        return self._name_in_root(uri).split("/")[3]

    def _name_in_root(self, uri: str) -> str:
        name = self._place.root.name_of(uri)
        if name is None:
            raise DamagedCheckpoint(f"stage {self.name!r} reads {uri}, which is not in the root")
        return name

    def _forget_consumed(self, name: str, position: int) -> int:
        """The stage has consumed an input up to a segment. Returns the bytes since the last time."""
        known = self._known[name]
        sizes = (known[each].size_bytes for each in range(self._positions[name] + 1, position + 1) if each in known)
        consumed_bytes = sum(sizes)
        self._positions[name] = position
        if not self._parts:  # what is consumed may still be in flight for a checkpoint that is under way
            while known and (oldest := next(iter(known))) <= position:
                del known[oldest]
        self.gates[name].on_consumed(position)
        return consumed_bytes

    def _name_of(self, file: StagedFile) -> str:
        name = self._place.root.name_at(file.path)
        assert name is not None
        return name

    def _written(self, batch: int) -> list[StagedFile]:
        """The files with rows that a committed batch has written."""
        files: list[StagedFile] = []
        for name, size_bytes in written_files(self.output, batch, self.definition.output_mode):
            rows = count_rows(self.output, name)
            if rows:
                files.append(StagedFile(batch, self.output.location(name), size_bytes, rows))
            else:
                remove_output(self.output, name)  # Spark writes an empty file for a batch without rows
        return files

    def row_staging(self, schema: StructType) -> Callable[[DataFrame, int], None] | None:
        """What stages a batch, if the stage's sink does so itself. Spark calls it before it commits the batch."""
        sink, generation = self._place.sink, self._place.generation
        if not isinstance(sink, RowSink):
            return None
        sink.open_staging(generation, schema)

        def stage_rows(frame: DataFrame, batch: int) -> None:
            self._staged_rows[batch] = sink.stage(generation, batch, frame)

        return stage_rows

    def _trim(self, sources: Iterable[str | None]) -> None:
        """Keep Spark's own logs short. A user's source is left alone: it may need all of its log."""
        if self.definition.inputs:
            for consumed, source in zip(self._consumed, sources, strict=True):
                if source is not None:
                    trim_log(self.checkpoint, f"sources/{consumed.log}", log_offset(source) - _KEPT_LOG_ENTRIES)
        trim_log(self.output, METADATA, self.batch - _KEPT_LOG_ENTRIES)

    def take_consumed(self, through: int) -> list[str]:
        """Files of segments that every reader has consumed, each named once. Called from the clean-up thread."""
        names = [name for name in self._unreclaimed if self._place.root.exists(name)]
        while self._written_segments and self._written_segments[0].sequence <= through:
            names += [file.path for file in self._written_segments.popleft().files]
        # What a retained checkpoint has in flight cannot be deleted yet: it is offered again next time.
        self._unreclaimed = names
        return names

    # -- attempts ---------------------------------------------------------------------------------

    @property
    def has_taken_up_all(self) -> bool:
        """Whether nothing that its query has committed is left to be looked at."""
        return not is_committed(self.checkpoint, self._next_batch)

    def rebuild(self, checkpoint: Files, output: Files) -> None:
        """Fresh folders for its next attempt, as of its last batch: what an interrupted one has begun stays behind."""
        self._snapshotter.rebuild(self.checkpoint, checkpoint, self.batch)
        restore_output(output, self.batch)

    def move_to(self, attempt: int, checkpoint: Files, output: Files, query: StreamingQuery) -> None:
        """Another attempt runs the stage from here on."""
        # Behind the snapshots that are still to be taken of the old one.
        self._uploads.submit(setattr, self, "_live_attempt", attempt)
        self.checkpoint, self.output, self.query = checkpoint, output, query
        self._trimmed_at = self.batch

    def take_abandoned(self) -> list[str]:
        """What abandoned attempts have left but segments. Called from the clean-up thread, after `take_consumed`.

        All of them are looked at each time: Spark's upkeep of state still writes there a minute later.
        """
        if self._live_attempt == 1:
            return []
        segments = {file.path for segment in tuple(self._written_segments) for file in segment.files}
        segments.update(self._unreclaimed)
        found: list[str] = []
        folder = RootPaths.stage(self._place.generation, self.name)
        for name in self._place.root.names_in(folder):
            if (attempt_of(name) or self._live_attempt) < self._live_attempt:
                self._place.root.prune(f"{folder}/{name}")
                found += [each for each in self._place.root.list(f"{folder}/{name}") if each not in segments]
        return found

    # -- checkpoints ------------------------------------------------------------------------------

    def sealed(self) -> str | None:
        """What a sink's table does not show yet, as a committable."""
        if self.definition.kind != "sink":
            return None
        files = tuple(each for each in self._staged if isinstance(each, StagedFile))
        batches = tuple(each for each in self._staged if isinstance(each, StagedBatch))
        return Committable(self.batch, files, batches, self._shown_through).encode()

    def on_aborted(self, barrier: Barrier) -> None:
        if self.definition.inputs:
            self._execute(self.aligner.on_cancelled(barrier))
        else:
            self.injector.cancel(barrier)

    def on_decided(self, checkpoint_id: int) -> None:
        self._parts.pop(checkpoint_id, None)
        self._snapshotter.forget(checkpoint_id)

    def on_visible(self, through_batch: int) -> None:
        """The table shows everything up to this batch: its staged files are no longer needed."""
        self._unshown.on_visible(through_batch)
        done = [each for each in self._staged if each.batch <= through_batch]
        self._staged = [each for each in self._staged if each.batch > through_batch]
        self._shown_through = max([self._shown_through, *(each.batch for each in done if each.rows)])
        for file in done:
            # What was staged for a table that was moved since stays where the table was.
            if isinstance(file, StagedFile) and (name := self._place.staging.name_at(file.path)) is not None:
                remove_output(self._place.staging, name)

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Cut():
                    self.channel.append_barrier(action.barrier)
                    self._begin(action)
                case Captured():
                    self._parts[action.checkpoint_id].captured = action.in_flight
                case Abandoned():
                    self._parts.pop(action.checkpoint_id, None)
                    if action.why is not AlignmentEvent.CANCELLED:
                        self._decline(self.name, action.checkpoint_id, action.why.value)
                case Forward():
                    self.channel.append_barrier(action.barrier)
                case KeepsAligning():
                    _log.warning(
                        "stage %s: %d bytes are in flight, more than max_inflight_bytes: %s waits until it is aligned",
                        self.name,
                        action.inflight_bytes,
                        checkpoint_name(action.checkpoint_id),
                    )

    def _begin(self, cut: Cut) -> None:
        reached(Step.STAGE_CUT)
        part = _Part(cut, self, self._now_ms)
        self._parts[cut.barrier.checkpoint_id] = part
        part.snapshot = self._uploads.submit(self._take, self.checkpoint, part)

    def _take(self, checkpoint: Files, part: _Part) -> tuple[tuple[SnapshotFile, ...], int, int]:
        """Runs on the upload thread. When it is done, all that the checkpoint names of this stage is on the disk."""
        started = time.monotonic_ns()
        cut = part.cut
        files: tuple[SnapshotFile, ...] = ()
        new_bytes = 0
        if cut.batch is not None:
            files, new_bytes = self._snapshotter.take(
                checkpoint, cut.barrier.checkpoint_id, cut.batch, full=cut.barrier.is_full_snapshot
            )
        committable = None if part.committable is None else decode_committable(part.committable)
        if self._place.root.fsync:
            self._sync(cut, files, () if committable is None else committable.files)
        return files, new_bytes, (time.monotonic_ns() - started) // 1_000_000

    def _sync(self, cut: Cut, files: Iterable[SnapshotFile], staged: Iterable[StagedFile]) -> None:
        root, staging, known = self._place.root, self._place.staging, self._on_disk
        named = {file.stored for file in files}
        if cut.batch is None and not self.definition.inputs:
            named |= notes_of_first_position(root, self._place.generation, self.name)
        self._on_disk = root.sync(named, known, missing_ok=True)
        # What was staged is gone once the table shows it, which an earlier checkpoint may bring about meanwhile.
        names = {name for file in staged if (name := staging.name_at(file.path)) is not None}
        if names:
            self._on_disk |= staging.sync(names, known, missing_ok=True)

    def _finish_parts(self) -> None:
        for checkpoint_id, part in tuple(self._parts.items()):
            if part.captured is None or part.snapshot is None:
                continue
            step = self._step(part, part.snapshot)
            if not step.done():
                continue
            error = step.exception()
            if isinstance(error, NotDurable):
                # The next checkpoint would name the same files: only from the last one on all of them are whole.
                raise StageFailed(self.name, f"{error}; look at the disk, or do without: --no-fsync")
            if error is not None:
                del self._parts[checkpoint_id]
                if isinstance(error, ConflictingRows):
                    raise error  # the next checkpoint would meet the same rows
                what = "the snapshot could not be stored" if part.checked is None else "its rows could not be checked"
                self._decline(
                    self.name, checkpoint_id, str(error) if isinstance(error, SinkFailed) else f"{what}: {say(error)}"
                )
                continue
            snapshot = self._snapshot_of(part)
            part.snapshot = None
            self._report(self.name, checkpoint_id, snapshot)

    def _step(self, part: _Part, snapshot: Future[Any]) -> Future[Any]:
        """What a part of a checkpoint waits for, one after the other; what has failed; or, if all is done, the last."""
        step = snapshot
        for begin in (self._force_in_flight, self._check):
            if not step.done() or step.exception() is not None:
                break
            step = begin(part) or step
        return step

    def _force_in_flight(self, part: _Part) -> Future[None] | None:
        if part.synced is None and part.captured and self._place.root.fsync:
            part.synced = self._uploads.submit(self._sync_in_flight, self._in_flight(part))
        return part.synced

    def _check(self, part: _Part) -> Future[None] | None:
        """Ask the table, if it can tell, whether it takes what was sealed.

        After the snapshot, because Spark deletes what that needs when the stage has run on for long. On a thread of its
        own: a table that hangs must not keep a run from stopping.
        """
        sink, sealed = self._place.sink, part.committable
        if part.checked is None and isinstance(sink, CheckingSink) and sealed is not None:
            part.checked = beside(f"tidegate-check-{self.name}", lambda: sink.check_commit(decode_committable(sealed)))
        return part.checked

    def _in_flight(self, part: _Part) -> dict[str, tuple[Segment, ...]]:
        return {
            flying.input: tuple(
                self._known[flying.input][sequence] for sequence in range(flying.after + 1, flying.through + 1)
            )
            for flying in part.captured or ()
        }

    def _sync_in_flight(self, in_flight: dict[str, tuple[Segment, ...]]) -> None:
        """Runs on the upload thread. Whose output it is has forced nothing: only what is captured must be durable."""
        segments = (segment for captured in in_flight.values() for segment in captured)
        self._place.root.sync(file.path for segment in segments for file in segment.files)

    def _snapshot_of(self, part: _Part) -> StageSnapshot:
        assert part.snapshot is not None
        files, new_bytes, snapshot_ms = part.snapshot.result()
        return StageSnapshot(
            cut=part.cut.batch,
            files=files,
            positions=part.cut.positions,
            output_sequence=part.output_sequence,
            in_flight=self._in_flight(part),
            source_positions=part.source_positions,
            watermark_ms=part.watermark_ms,
            committable=part.committable,
            barrier_ms=part.barrier_ms,
            alignment_ms=part.cut.alignment_ms,
            snapshot_ms=snapshot_ms,
            new_bytes=new_bytes,
            total_bytes=sum(file.size_bytes for file in files),
        )
