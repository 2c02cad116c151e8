"""What a stage reads: its gates, as far as its checkpoints let segments through, and how far its query has come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tidegate.engine.channel import Channel
from tidegate.errors import DamagedCheckpoint, StageFailed
from tidegate.flows.stage import StageCheckpoints
from tidegate.protocol.aligner import InFlight
from tidegate.protocol.drift import ConsumedTime, Hold, WatermarkDrift
from tidegate.protocol.messages import Barrier, Segment, SegmentFile, Watermark
from tidegate.spark.filelog import StageSource, log_offset, read_source_log, trim_log
from tidegate.spark.gate import Gate
from tidegate.storage.files import Files
from tidegate.storage.mounted import side_by_side
from tidegate.storage.paths import RootPaths


class InputTime(msgspec.Struct, frozen=True):
    """What is told of event time between stages, where a drift is set. `inputs`: those of a stage that have any."""

    inputs: tuple[str, ...]
    max_drift_ms: int


class _Consumed:
    """How far one of the query's sources has come in its input."""

    __slots__ = ("input", "log", "position")

    def __init__(self, source: StageSource, position: int) -> None:
        self.input = source.input
        self.log = source.log
        self.position = position


class Inputs:
    """A source has none: then nothing is ever read here."""

    def __init__(
        self,
        stage: str,
        channels: Mapping[str, Channel],
        positions: Mapping[str, int],
        checkpoints: StageCheckpoints,
        time: InputTime | None = None,
    ) -> None:
        """`positions`: how far the stage had come in each. `time`: None: no input is ever held for its event time."""
        self._stage = stage
        self._channels = channels
        self._checkpoints = checkpoints
        self._cursors = dict.fromkeys(channels, 0)
        self._positions = {name: positions.get(name, 0) for name in channels}
        self._known: dict[str, dict[int, Segment]] = {name: {} for name in channels}
        self._written_by = {name: {name} for name in channels}
        """Whose folders the segments of an input lie in: what is in flight since before it was renamed, in its old."""
        self._sources: list[_Consumed] = []
        self.gates: dict[str, Gate] = {}
        self._timed: tuple[str, ...] = ()
        self._time: ConsumedTime | None = None
        self._drift: WatermarkDrift | None = None
        if time is not None:
            self._timed, self._time = time.inputs, ConsumedTime(self._positions)
            if len(time.inputs) > 1:
                self._drift = WatermarkDrift(time.inputs, time.max_drift_ms)

    def open(self, root: Files, generation: int, sources: Sequence[StageSource], window: int) -> None:
        """Lay the gates. `window`: see `Gate`."""
        self._root = root
        self._sources = [_Consumed(source, self._positions[source.input]) for source in sources]
        self.gates = {
            name: Gate(
                root.at(RootPaths.gate(generation, self._stage, name), durable=False),
                root,
                self._positions[name],
                window,
            )
            for name in self._channels
        }

    def position(self, name: str) -> int:
        """How far the stage has come in an input."""
        return self._positions[name]

    def cursor(self, name: str) -> int:
        """How far its channel was read."""
        return self._cursors[name]

    @property
    def lags(self) -> dict[str, int]:
        """How many segments of each input the stage has yet to commit, also those that wait behind a barrier."""
        return {name: channel.sequence - self._positions[name] for name, channel in self._channels.items()}

    @property
    def lag(self) -> int:
        """The same of all."""
        return sum(self.lags.values())

    # -- reading ----------------------------------------------------------------------------------

    def read(self) -> None:
        """Take from the channels what may be taken: what was in flight comes first, when gates are laid."""
        for name in self.gates:
            channel = self._channels[name]
            while self._checkpoints.is_open(name) and (message := channel.at(self._cursors[name])) is not None:
                self._cursors[name] += 1
                if isinstance(message, Barrier):
                    self._checkpoints.on_barrier(name, message)
                elif isinstance(message, Watermark):
                    self._take_time(name, message)
                else:
                    self.release(name, message)

    def release(self, name: str, segment: Segment) -> None:
        """Let the query see a segment, with the next `flush`."""
        self._known[name][segment.sequence] = segment
        self._written_by[name].update(RootPaths.stage_of(file.path) for file in segment.files)
        self._checkpoints.on_segment(name, segment.sequence, segment.size_bytes)
        self.gates[name].release(segment)
        if self._time is not None:
            self._time.on_segment(name, segment.sequence, segment.watermark_ms)
        if self._drift is not None:
            self._drift.on_segment(name, segment.watermark_ms)

    def _take_time(self, name: str, message: Watermark) -> None:
        if self._time is not None:
            self._time.on_watermark(name, message.watermark_ms, self._positions[name])
        if self._drift is not None:
            self._drift.on_watermark(name, message.watermark_ms)

    def flush(self) -> bool:
        """Tells whether there is something new for the query to see."""
        most: Mapping[str, int] = {}
        if self._drift is not None:
            most = self._drift.show({name: gate.room for name, gate in self.gates.items()})
        flushed = [gate.flush(most.get(name)) for name, gate in self.gates.items()]
        return any(flushed)

    # -- event time -------------------------------------------------------------------------------

    def let_through(self, yields: bool) -> None:
        """Whether a checkpoint waits for what is held for its event time, so that nothing is."""
        if self._drift is not None:
            self._drift.yields = yields

    @property
    def holds(self) -> tuple[Hold, ...]:
        """Those that are held now."""
        return () if self._drift is None else self._drift.held

    def is_held(self, name: str) -> bool:
        return self._drift is not None and self._drift.is_held(name)

    @property
    def reached_ms(self) -> int | None:
        """How far event time has come with what is consumed."""
        return None if self._time is None else self._time.reached_ms(self._timed)

    @property
    def have_ended(self) -> bool:
        """Whether nothing more comes, and what came is consumed."""
        return self._time is not None and self._time.has_ended

    @property
    def shows_nothing(self) -> bool:
        """Whether the query has committed all that it may see for now."""
        return all(gate.is_empty for gate in self.gates.values())

    def nudge(self, nothing: SegmentFile) -> None:
        """Make the query run a batch, though there is nothing new."""
        self.gates[next(iter(self._channels))].nudge(nothing)

    # -- consuming --------------------------------------------------------------------------------

    def consume(self, checkpoint: Files, sources: Iterable[str | None]) -> bool:
        """Note how far a batch has brought each of the query's sources. Tells whether those of one input stand at one
        place: where two sources read one input, a segment may arrive between the two looking at the gate."""
        if not self._channels:
            return True
        for consumed, source in zip(self._sources, sources, strict=True):
            if source is not None:
                self._consume(checkpoint, consumed, source)
        return len({(each.input, each.position) for each in self._sources}) == len(self._positions)

    def _consume(self, checkpoint: Files, consumed: _Consumed, source: str) -> None:
        entries = read_source_log(checkpoint, consumed.log, log_offset(source))
        if entries is None:
            raise DamagedCheckpoint(f"stage {self._stage!r}: Spark's source log {consumed.log} lacks {source}")
        names: list[str] = []
        for entry in entries:
            name = self._root.name_of(entry.path)
            if name is None or RootPaths.stage_of(name) not in self._written_by[consumed.input]:
                raise DamagedCheckpoint(
                    f"stage {self._stage!r}: source {consumed.log} reads {entry.path}, not {consumed.input!r}"
                )
            if entry.timestamp > consumed.position:
                names.append(name)
        # Spark reads on without a word where a file is gone.
        for name, is_there in zip(names, side_by_side(self._root, self._root.exists, names), strict=True):
            if not is_there:
                raise StageFailed(
                    self._stage,
                    f"{self._root.location(name)} is gone, which it was reading; nothing else may delete there",
                )
        consumed.position = max([consumed.position, *(entry.timestamp for entry in entries)])

    def moved(self) -> tuple[dict[str, int], int]:
        """The stage stands behind a batch: how far that has brought it, of the inputs in which it has come further, and
        the bytes that it has consumed."""
        moved = {each.input: each.position for each in self._sources if each.position > self._positions[each.input]}
        return moved, sum(self._forget(name, position) for name, position in moved.items())

    def _forget(self, name: str, position: int) -> int:
        known = self._known[name]
        sizes = (known[each].size_bytes for each in range(self._positions[name] + 1, position + 1) if each in known)
        consumed_bytes = sum(sizes)
        self._positions[name] = position
        if self._time is not None:
            self._time.on_consumed(name, position)
        if not self._checkpoints.is_under_way:  # else what is consumed may still be in flight for a checkpoint
            while known and (oldest := next(iter(known))) <= position:
                del known[oldest]
        self.gates[name].on_consumed(position)
        return consumed_bytes

    def in_flight(self, captured: Iterable[InFlight]) -> dict[str, tuple[Segment, ...]]:
        """The segments that were captured in flight."""
        return {
            flying.input: tuple(
                self._known[flying.input][sequence] for sequence in range(flying.after + 1, flying.through + 1)
            )
            for flying in captured
        }

    def trim(self, checkpoint: Files, sources: Iterable[str | None], kept_entries: int) -> None:
        """Keep Spark's own logs of the gates short. A user's source is left alone: it may need all of its log."""
        if self._channels:
            for consumed, source in zip(self._sources, sources, strict=True):
                if source is not None:
                    trim_log(checkpoint, f"sources/{consumed.log}", log_offset(source) - kept_entries)
