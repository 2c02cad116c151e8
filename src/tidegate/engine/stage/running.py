"""One running stage: its query, what it reads and writes, and its part in checkpoints, put together.

All of it is driven from the run's one control thread: no locks. Rows never come here; what does are the names of files
that Spark has committed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar

import msgspec

from tidegate.engine.carrier import Clock
from tidegate.engine.channel import Channel
from tidegate.engine.kill_points import Step, reached
from tidegate.engine.stage.inputs import Inputs, InputTime
from tidegate.engine.stage.output import ChannelOutput, Output, StagedFiles, StagedOutput, StagedRows
from tidegate.engine.stage.progress import Progress
from tidegate.engine.status import StagePart, part_after_cut, part_before_cut
from tidegate.errors import DamagedCheckpoint, StageFailed, StoreUnavailable, TidegateError
from tidegate.flows.requests import Host, Patience, Standing, Stored, StoredInFlight, StoreInFlight, StoreSnapshot
from tidegate.flows.stage import StageCheckpoints, StartsAt
from tidegate.protocol.backpressure import BacklogBound
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.messages import END_OF_TIME_MS, Barrier, Segment, SegmentFile
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.retention import StoredFile
from tidegate.sinks.contract import BoundSink, CheckingSink, RowSink, StagedFile, decode_committable
from tidegate.spark.definition import StageDefinition
from tidegate.spark.filelog import (
    METADATA,
    BatchOffsets,
    StageSource,
    has_moved_watermark,
    trim_log,
    watermark_behind,
)
from tidegate.spark.gate import WINDOW
from tidegate.spark.output import remove_outputs, restore_output
from tidegate.spark.snapshot import Snapshotter, Taken
from tidegate.storage.file_lists import MOST_IN_A_MANIFEST, SnapshotFile
from tidegate.storage.files import Files, NotDurable
from tidegate.storage.manifest import StageSnapshot
from tidegate.storage.parquet import write_nothing
from tidegate.storage.paths import RootPaths
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
# So long its gates are empty before a query rests: to let it rest and to wake it costs as much as a look of its own.
_RESTS_AFTER_MS: Final = 50
# Before its first batch: those that it waits for are being started too, and there is more to do than to let it rest.
_RESTS_AT_FIRST_MS: Final = 1_000


class StagePlace(msgspec.Struct, frozen=True):
    """Where a stage lives in a generation, and where it starts from. `bound`: of what its table may be behind.
    `input_time`: what is told of event time between stages, if anything is.

    `work`: where Spark lives between checkpoints. `staging`: where what it writes lies, by whatever generation: there,
    or beside its table. `output` is in it.
    """

    root: Files
    work: Files
    generation: int
    staging: Files
    output: Files
    start: StageSnapshot | None
    after_checkpoint: int
    sink: BoundSink | None
    bound: BacklogBound
    has_event_time: bool = False
    most_in_a_manifest: int = MOST_IN_A_MANIFEST
    input_time: InputTime | None = None
    clock: Clock = msgspec.field(default_factory=Clock)


class AsOfCut(msgspec.Struct, frozen=True, eq=False):
    """What else was so at a cut: Spark's folder of the attempt that ran the batch, and where a source stood. Each cut
    has its own, though nothing has changed since another."""

    checkpoint: Files
    attempt: int
    source_positions: tuple[str, ...]


def _fails_its_stage(act: Callable[Concatenate[RunningStage, P], T]) -> Callable[Concatenate[RunningStage, P], T]:
    """What is wrong with the files of a query that runs is no damage to a checkpoint: a restart lays them anew."""

    @wraps(act)
    def acting(stage: RunningStage, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return act(stage, *args, **kwargs)
        except (DamagedCheckpoint, StoreUnavailable, OSError) as error:
            raise StageFailed(stage.name, say(error)) from error

    return acting


class RunningStage:
    def __init__(
        self,
        definition: StageDefinition,
        place: StagePlace,
        channels: Mapping[str, Channel],
        config: CheckpointConfig,
        host: Host,
        patience: Patience,
    ) -> None:
        self.definition = definition
        self.name = definition.name
        self.start = start = place.start
        self._place = place
        self._host = host
        self.channel = channels[self.name]
        positions = {} if start is None else start.positions
        self.checkpoints = StageCheckpoints(
            self.name,
            definition.inputs,
            host,
            self,
            config,
            patience,
            StartsAt(place.generation, place.after_checkpoint, None if start is None else start.cut, positions),
            # What is in flight to a chain is so to its first stage.
            is_sink=definition.kind == "sink" and not definition.chained,
        )
        self.inputs = Inputs(
            definition.head,
            {name: channels[name] for name in definition.inputs},
            positions,
            self.checkpoints,
            place.input_time,
        )
        self.output = self._output()
        self.output_folder = place.output
        self.progress = Progress(
            definition,
            place.work.at(RootPaths.spark_checkpoint(place.generation, definition.head), durable=False),
            None if start is None else start.cut,
            None if start is None else start.watermark_ms,
        )
        self._source_positions = () if start is None else start.source_positions
        self._snapshotter = Snapshotter(
            place.root,
            place.generation,
            definition.head,
            None if start is None else start.files,
            reads_gates=bool(definition.inputs),
            most_in_a_manifest=place.most_in_a_manifest,
        )
        self.unneeded: deque[StoredFile] = deque()
        """What its snapshots no longer refer to. Added to beside the control thread."""
        # What of its snapshot is yet to be forced to the disk, and what of it, and of its staging, was forced last.
        self._unforced: set[str] = set() if start is None or start.files.forced else set(self.held_paths())
        self._on_disk: frozenset[object] = frozenset()
        self._staged_on_disk: frozenset[object] = frozenset()
        self._captured: dict[str, str] = {}
        """What the last checkpoint that captured anything in flight has captured, with its checksums: it is durable."""
        self._attempt = 1
        self._to_store: deque[AsOfCut] = deque()
        """In order: what a snapshot is yet to be stored of. Taken from beside the control thread."""
        self._nudged_at: int | None = None
        self._rests_at_ms: int | None = None
        self._trimmed_at = self.progress.batch
        self._since_ms = self._wall_ms()

    @property
    def has_event_time(self) -> bool:
        """Whether its query has a watermark, or will have one."""
        return self._place.has_event_time

    @property
    def held(self) -> Collection[SnapshotFile]:
        """The files of its last snapshot."""
        return self._snapshotter.held.values()

    def held_paths(self) -> Iterator[str]:
        """What that refers to, in the root."""
        return self._snapshotter.held_paths()

    def in_place(self) -> frozenset[str]:
        """What its snapshots refer to where Spark has written it."""
        return self._snapshotter.in_place()

    def on_deleted(self, paths: Iterable[str]) -> None:
        """What was stored is gone."""
        self._snapshotter.on_deleted(paths)

    def _output(self) -> Output:
        place, mode = self._place, self.definition.output_mode
        if place.sink is None:
            return ChannelOutput(self.channel, place.work, mode)
        sealed = None if self.start is None else self.start.committable
        if isinstance(place.sink, RowSink):
            return StagedRows(place.sink, place.generation, place.bound, sealed)
        return StagedFiles(place.staging, mode, place.bound, sealed)

    def open_gates(self, sources: Iterable[StageSource], window: int = WINDOW) -> None:
        """Lay the gates, with what was in flight at the checkpoint that the stage starts from.

        If it was cut before the batch without data that writes out what the watermark has closed, a nudge makes up for
        that batch.
        """
        work, generation = self._place.work, self._place.generation
        self.inputs.open(work, generation, list(sources), window)
        in_flight = {} if self.start is None else self.start.in_flight
        if in_flight:
            self._place.root.bring(
                file.path for segments in in_flight.values() for segment in segments for file in segment.files
            )
        for name, segments in in_flight.items():
            for segment in segments:
                self.inputs.release(name, segment)
        cut = None if self.start is None else self.start.cut
        if cut is not None and self.definition.inputs and has_moved_watermark(self.progress.checkpoint, cut):
            self._nudged_at = cut
            nothing = RootPaths.nothing(generation, self.definition.inputs[0])
            self.inputs.nudge(SegmentFile(nothing, write_nothing(work.at("", durable=False), nothing)))

    def row_staging(self, schema: StructType) -> Callable[[DataFrame, int], None] | None:
        """What stages a batch, if the stage's table does so itself. Spark calls it before it commits the batch."""
        return self.output.open(schema) if isinstance(self.output, StagedRows) else None

    # -- one round --------------------------------------------------------------------------------

    @_fails_its_stage
    def poll(self) -> None:
        """Take up what Spark has committed, and read what the inputs hold. After a drain nothing flows any more."""
        if not self.checkpoints.is_drained:
            self._take_up_batches()
        self.inputs.read()
        self.checkpoints.poll()
        self._rest_if_idle()

    @_fails_its_stage
    def flush(self) -> None:
        """Let the query see what was read, unless it is held back."""
        if not self.is_held_back and self.inputs.flush() and self.progress.rest is not None:
            self._rests_at_ms = None
            self.progress.rest.end()

    def _rest_if_idle(self) -> None:
        """A query whose gates have been empty for a while rests, until they are no more."""
        rest = self.progress.rest
        if rest is None or rest.is_resting:
            return
        if not self.inputs.shows_nothing or self.progress.batch == self._nudged_at:
            self._rests_at_ms = None
            return
        now_ms = self._host.now_ms
        if self._rests_at_ms is not None and now_ms >= self._rests_at_ms:
            self._rests_at_ms = None
            rest.begin()
        if self._rests_at_ms is None:
            self._rests_at_ms = now_ms + (_RESTS_AFTER_MS if self.progress.has_run else _RESTS_AT_FIRST_MS)

    @_fails_its_stage
    def check_query(self) -> None:
        """Raise if the query has failed, was stopped, or has run away; notice if it has ended."""
        self.progress.check()

    @property
    def has_consumed_all(self) -> bool:
        """Whether nothing that its inputs hold is left to consume. Barriers are nothing: there may always be one."""
        return self.progress.batch != self._nudged_at and self.inputs.lag == 0

    @property
    def is_held_back(self) -> bool:
        """Whether it gets nothing more to read for now: the readers of its output, or its table, are behind."""
        return self.output.is_held_back

    def is_late(self, is_late: bool) -> None:
        """Whether its table is late with an epoch, and it may be held back for that."""
        if isinstance(self.output, StagedOutput):
            self.output.is_table_late = is_late

    def part_of(
        self, checkpoint_id: int, now_ms: int, begun_ms: int | None = None, *, is_asked: bool = False
    ) -> StagePart:
        """How far this stage has come with a checkpoint that is under way, until it has reported. `begun_ms`: when it
        was announced, if that is known. `is_asked`: for an unaligned one."""
        cut = self.checkpoints.cut_at(checkpoint_id)
        progress = self.checkpoints.progress_of(checkpoint_id)
        arrival = self.checkpoints.arrival_of(checkpoint_id)
        if cut is None:
            return part_before_cut(progress, now_ms, arrival, begun_ms)
        first_ms = self.checkpoints.first_barrier_ms(checkpoint_id)
        barrier_ms = None if begun_ms is None or first_ms is None else max(0, first_ms - begun_ms)
        return part_after_cut(cut[0], progress, cut[1], arrival, barrier_ms, is_asked=is_asked)

    # -- batches ----------------------------------------------------------------------------------

    def _take_up_batches(self) -> None:
        progress = self.progress

        def is_cut_behind(offsets: BatchOffsets) -> bool:
            return self.inputs.consume(progress.checkpoint, offsets.sources)

        while not self.checkpoints.is_drained and (taken := progress.next_committed(is_cut_behind)) is not None:
            moved, consumed_bytes = self.inputs.moved()
            written_bytes = sum(map(self._hand_on, taken))
            if not self.definition.inputs:
                self.output.on_consumed(progress.batch, written_bytes)  # what it has read is not known by its size
            elif moved:
                self.output.on_consumed(progress.batch, consumed_bytes)
            progress.on_batch(has_moved=bool(moved))
            self.checkpoints.on_committed(progress.batch, moved)
            self._trim_if_due(taken[-1])

    def _hand_on(self, offsets: BatchOffsets) -> int:
        """What a batch wrote. Returns its bytes, as far as they are known."""
        self.progress.watermark_ms = offsets.watermark_ms
        if not self.definition.inputs:
            self._source_positions = tuple(source for source in offsets.sources if source is not None)
        self.progress.batch += 1
        self._measure(offsets.planned_ms)
        rows, size_bytes = self.output.take_up(self.progress.batch, self.output_folder, self._reached_ms())
        self.progress.rows += rows
        return size_bytes

    def _measure(self, planned_ms: int) -> None:
        """A batch has taken from when Spark planned it until now, when its commit was seen: to ask Spark would cost
        more than it is worth. What is older than the stage was planned elsewhere, or by a clock that has jumped."""
        if self._since_ms <= planned_ms <= (now_ms := self._wall_ms()):
            self.progress.batches += 1
            self.progress.batches_ms += now_ms - planned_ms

    def _wall_ms(self) -> int:
        return int(self._place.clock.utc().timestamp() * 1000)

    def _reached_ms(self) -> int | None:
        """How far event time has come with its last batch, if its readers want to know. Where its query has none, that
        of its inputs is passed on."""
        if self._place.input_time is None:
            return None
        if not self.has_event_time:
            return self.inputs.reached_ms
        return watermark_behind(self.progress.checkpoint, self.progress.batch)

    def tell_time(self, *, is_done: bool) -> None:
        """Tell its readers how far event time has come, where no segment does. `is_done`: it is a source, and nothing
        more comes from it."""
        if is_done or (self.inputs.have_ended and self.has_consumed_all):
            self.channel.append_watermark(END_OF_TIME_MS)
        elif not self.has_event_time and (reached_ms := self.inputs.reached_ms) is not None:
            self.channel.append_watermark(reached_ms)

    def _trim_if_due(self, offsets: BatchOffsets) -> None:
        """Keep Spark's own logs short; not while a snapshot may still want an entry."""
        batch = self.progress.batch
        if batch - self._trimmed_at >= _TRIM_EVERY and not self.checkpoints.is_under_way:
            self._trimmed_at = batch
            self.inputs.trim(self.progress.checkpoint, offsets.sources, _KEPT_LOG_ENTRIES)
            trim_log(self.output_folder, METADATA, batch - _KEPT_LOG_ENTRIES)

    # -- attempts ---------------------------------------------------------------------------------

    def rebuild(self, checkpoint: Files, output: Files) -> None:
        """Fresh folders for its next attempt, as of its last batch: what an interrupted one has begun stays behind."""
        self._snapshotter.rebuild(self.progress.checkpoint, checkpoint, self.progress.batch)
        restore_output(output, self.progress.batch)

    def move_to(self, attempt: int, checkpoint: Files, output: Files, query: StreamingQuery) -> None:
        """Another attempt runs the stage from here on."""
        self._attempt = attempt
        self.progress.checkpoint, self.output_folder, self.progress.query = checkpoint, output, query
        self._trimmed_at = self.progress.batch

    @property
    def oldest_attempt(self) -> int:
        """The oldest whose folders are still needed: those before it are abandoned."""
        return min((at.attempt for at in tuple(self._to_store)), default=self._attempt)

    # -- what its part in checkpoints asks --------------------------------------------------------

    def standing(self) -> Standing:
        progress = self.progress
        at = AsOfCut(progress.checkpoint, self._attempt, self._source_positions)
        self._to_store.append(at)
        return Standing(
            output_sequence=self.channel.sequence,
            has_event_time=self.has_event_time,
            watermark_ms=progress.watermark_ms,
            source_position=", ".join(self._source_positions) or None,
            committable=self.output.sealed(progress.batch),
            detail=at,
        )

    def append_barrier(self, barrier: Barrier) -> None:
        if not self.definition.inputs:
            reached(Step.BARRIER_INJECTED)
        self.channel.append_barrier(barrier)
        reached(Step.STAGE_CUT)

    def on_open(self, name: str) -> None:
        """The next round reads on."""

    def on_keeps_aligning(self, checkpoint_id: int, inflight_bytes: int) -> None:
        _log.warning(
            "stage %s: %d bytes are in flight, more than --max-inflight allows: %s waits until it is aligned",
            self.name,
            inflight_bytes,
            checkpoint_name(checkpoint_id),
        )

    # -- what is carried out for it beside the control thread -------------------------------------

    def storing_snapshot(self, request: StoreSnapshot) -> Callable[[], Stored]:
        at: AsOfCut = request.standing.detail

        def store() -> Stored:
            started_ms = self._host.now_ms
            try:
                taken = self._store(request, at)
            except NotDurable as error:
                raise self._not_forced(error) from error
            except OSError as error:
                raise StoreUnavailable(say(error)) from error
            # Not before: it may name files where they lie. Those before it that are left were given up.
            while at in self._to_store:
                self._to_store.popleft()
            return Stored(
                files=(),
                new_bytes=taken.new_bytes,
                total_bytes=taken.total_bytes,
                snapshot_ms=self._host.now_ms - started_ms,
                detail=msgspec.structs.replace(taken.files, forced=self._place.root.fsync),
            )

        return store

    def _store(self, request: StoreSnapshot, at: AsOfCut) -> Taken:
        """When it is done, all that the checkpoint names of this stage is on the disk."""
        cut = request.cut
        taken = self._snapshotter.take(
            at.checkpoint, cut.barrier.checkpoint_id, cut.batch, full=cut.barrier.is_full_snapshot
        )
        self.unneeded.extend(taken.unneeded)
        if self._place.root.fsync:
            sealed = request.standing.committable
            self._unforced.update(taken.fresh)
            self._unforced.difference_update(file.path for file in taken.unneeded)
            self._sync(() if sealed is None else decode_committable(sealed).files)
        return taken

    def _sync(self, staged: Iterable[StagedFile]) -> None:
        root, staging = self._place.root, self._place.staging
        if self._unforced:
            self._on_disk = root.sync(self._unforced, self._on_disk, missing_ok=True)
            self._unforced = set()
        # What was staged is gone once the table shows it, which an earlier checkpoint may bring about meanwhile.
        names = {name for file in staged if (name := staging.name_at(file.path)) is not None}
        self._staged_on_disk = staging.sync(names, self._staged_on_disk, missing_ok=True) if names else frozenset()

    def _not_forced(self, error: NotDurable) -> StageFailed:
        """The next checkpoint would name the same files: only from the last one on all of them are whole."""
        return StageFailed(
            self.name,
            f"{error}; look at the disk, or do without: --no-fsync",
        )

    def storing_in_flight(self, request: StoreInFlight) -> Callable[[], StoredInFlight]:
        """Whose output it is has forced nothing: only what is captured must be durable, and known by its checksum."""
        segments = self.inputs.in_flight(request.in_flight)
        files = [file for each in segments.values() for segment in each for file in segment.files]

        def store() -> StoredInFlight:
            try:
                if self._place.root.fsync:
                    fresh = [file.path for file in files if file.path not in self._captured]
                    if fresh:
                        self._place.root.sync(fresh)
                self._captured = {file.path: self._checksum(file) for file in files}
            except NotDurable as error:
                raise self._not_forced(error) from error
            except OSError as error:
                raise StoreUnavailable(say(error)) from error
            captured = {name: tuple(map(self._with_checksums, each)) for name, each in segments.items()}
            return StoredInFlight(tuple(file.path for file in files), captured)

        return store

    def _checksum(self, file: SegmentFile) -> str:
        """Read once: what is captured again was captured before, by this run or by the one before it."""
        if known := self._captured.get(file.path) or file.sha256:
            return known
        found = self._place.root.described(file.path)
        if found is None or found[0] != file.size_bytes:
            what = "is gone" if found is None else "is not what was written"
            raise StageFailed(self.name, f"{self._place.root.location(file.path)}, in flight to it, {what}")
        return found[1]

    def _with_checksums(self, segment: Segment) -> Segment:
        files = (msgspec.structs.replace(each, sha256=self._captured[each.path]) for each in segment.files)
        return msgspec.structs.replace(segment, files=tuple(files))

    def checking_sealed(self, committable: str) -> Callable[[], None]:
        sink = self._place.sink

        def check() -> None:
            try:
                if isinstance(sink, CheckingSink):
                    sink.check_commit(decode_committable(committable))
            except TidegateError:
                raise
            except Exception as error:
                raise StoreUnavailable(say(error)) from error

        return check

    def dropping_shown(self, through_batch: int) -> Callable[[], None]:
        shown, staging = self.output.on_visible(through_batch), self._place.staging

        def drop() -> None:
            try:
                # What was staged for a table that was moved since stays where the table was.
                names = (staging.name_at(file.path) for file in shown)
                remove_outputs(staging, [name for name in names if name is not None])
            except (StoreUnavailable, OSError) as error:
                _log.warning(
                    "stage %s: what its table shows stays staged until the next start: %s", self.name, say(error)
                )

        return drop
