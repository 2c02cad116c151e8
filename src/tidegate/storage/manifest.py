"""The manifest: all that a checkpoint consists of.

Strictly decoded: an unknown field, a missing one or one of the wrong type is refused, and so is a manifest
whose bytes are not those that the decision log's record names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from tidegate.errors import DamagedCheckpoint, ForeignRoot
from tidegate.protocol.aligner import CutCause, InFlight
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.messages import Segment
from tidegate.storage.file_lists import SnapshotFiles, check_inside

FORMAT: Final = 4
# Those before: no manifest was brought from elsewhere; each named all files of its snapshots itself.
_WITHOUT_ORIGIN: Final = 3
_WITHOUT_LISTS: Final = 2

StageKind = Literal["source", "stage", "sink"]


class StageSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage's part of a checkpoint. `cause`, `over_bound`: see `Cut`."""

    cut: int | None
    cause: CutCause
    over_bound: bool
    files: SnapshotFiles
    positions: dict[str, int]
    output_sequence: int
    in_flight: dict[str, tuple[Segment, ...]]
    source_positions: tuple[str, ...]
    watermark_ms: int | None
    committable: str | None
    barrier_ms: int
    """When the first barrier arrived, in ms after the trigger."""
    alignment_ms: int
    snapshot_ms: int
    new_bytes: int
    total_bytes: int

    @property
    def knows_position(self) -> bool:
        """Whether it tells where a source goes on: behind a batch, or where it first stood."""
        return self.cut is not None or not self.files.is_empty

    def in_flight_files(self) -> Iterator[str]:
        return (file.path for segments in self.in_flight.values() for segment in segments for file in segment.files)

    @property
    def in_flight_bytes(self) -> int:
        return sum(segment.size_bytes for segments in self.in_flight.values() for segment in segments)


class TableAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a sink's rows are: a kind of table, and its address without credentials.

    `identity` tells the table from another one that is at the same address later. None: it is not known.
    """

    kind: str
    address: str
    identity: str | None = None


class SourceStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stream that a source reads: which one it is (topics, a path), without secrets and without how it is read.

    `ids` tells topics from others that have their names later. One that is not there is not known.
    """

    format: str
    reads: dict[str, str]
    ids: dict[str, str] = {}


class StateColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column of a state: what it stands for, in terms of the columns that the stage reads, and its type.

    `detail` may change without another meaning of what is stored: the length of windows, how long a value is kept, the
    exact expression that a sum is of.
    """

    name: str
    type: str
    detail: str = ""


class StateOperator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something in a stage's plan that keeps state. `settings` must stay the same, `details` may change."""

    kind: str
    keys: tuple[StateColumn, ...] = ()
    values: tuple[StateColumn, ...] | None = ()
    """None: it is not known what they are."""
    settings: dict[str, str] = {}
    details: dict[str, str] = {}


class WatermarkDelay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How late rows may be, by which column."""

    column: str
    delay: str


class StageState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stage keeps as state, as its plan says, in the order in which Spark numbers the operators.

    `spark` is the version that made the plan. `time_zone` is None where no key depends on it.
    """

    spark: str
    operators: tuple[StateOperator, ...] = ()
    watermarks: tuple[WatermarkDelay, ...] = ()
    time_zone: str | None = None


class StageShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of a stage must stay the same for its state to be taken up again, what a source reads, where a sink's rows
    are, and what is kept as state. Where `state` is None, that is not known. `has_event_time`: it has a watermark, or
    will have one."""

    kind: StageKind
    inputs: tuple[str, ...]
    output_mode: str
    schema: str
    table: TableAddress | None = None
    streams: tuple[SourceStream, ...] = ()
    state: StageState | None = None
    has_event_time: bool = False


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint that one was brought from, into this root or within it: of which root, by its numbers there."""

    root_id: str
    checkpoint_id: int
    epoch: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    pipeline: str
    checkpoint_id: int
    epoch: int
    generation: int
    attempt: int
    flags: int
    aligned: bool
    triggered_at: str
    duration_ms: int
    min_watermark_ms: int | None
    """The pipeline's: None where a stage with event time has none yet, or no stage has event time."""
    shape: dict[str, StageShape]
    stages: dict[str, StageSnapshot]
    chains: dict[str, tuple[str, ...]] = {}
    """Stages that ran as one query: by the last one, those before it, in order."""
    origin: Origin | None = None
    """None: it was taken here."""

    @property
    def shown_epoch(self) -> int:
        """The epoch by which tables know what they show of it: that of where it was taken."""
        return self.epoch if self.origin is None else self.origin.epoch

    def counted_by(self, root_id: str) -> str:
        """The root whose numbers `shown_epoch` is one of, where the checkpoint is of the root with this id."""
        return root_id if self.origin is None else self.origin.root_id

    def paths(self) -> Iterator[str]:
        """Every path that is taken from the root, or from a folder in it, to be read, linked to or deleted; but for
        those that lists tell of."""
        for stage in self.stages.values():
            yield from stage.files.paths()
            yield from stage.in_flight_files()

    @property
    def new_bytes(self) -> int:
        return sum(stage.new_bytes for stage in self.stages.values())

    @property
    def total_bytes(self) -> int:
        return sum(stage.total_bytes for stage in self.stages.values())

    @property
    def alignment_ms(self) -> int:
        """How long the stage that waited longest for its barriers waited."""
        return max((stage.alignment_ms for stage in self.stages.values()), default=0)

    @property
    def in_flight_bytes(self) -> int:
        return sum(stage.in_flight_bytes for stage in self.stages.values())


def with_tables(manifest: Manifest, tables: Mapping[str, TableAddress]) -> Manifest:
    """The same with the tables of some sinks elsewhere."""
    shape = {
        name: each if name not in tables else msgspec.structs.replace(each, table=tables[name])
        for name, each in manifest.shape.items()
    }
    return msgspec.structs.replace(manifest, shape=shape)


class _Format(msgspec.Struct):
    """What every manifest has in common, whatever its format."""

    format: int


_decoder: Final = msgspec.json.Decoder(Manifest)
_format_decoder: Final = msgspec.json.Decoder(_Format)


def encode_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """The manifest's bytes, and their SHA-256 for the decision log."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return data, hashlib.sha256(data).hexdigest()


def decode_manifest(data: bytes, sha256: str, name: str) -> Manifest:
    """Refuses anything but the very manifest that was decided."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DamagedCheckpoint(f"{name} is not the manifest that was decided: its checksum differs")
    try:
        found = _format_decoder.decode(data).format
        if not _WITHOUT_LISTS <= found <= FORMAT:
            raise ForeignRoot(
                f"{name} is of another version of Tidegate: it has format {found}, this version reads formats "
                f"{_WITHOUT_LISTS} to {FORMAT}. What to do: go on with the version that wrote it, or start the "
                f"pipeline on a new root with new tables"
            )
        manifest: Manifest = _without_lists(data) if found == _WITHOUT_LISTS else _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{name} cannot be read: {error}") from error
    check_inside(manifest.paths(), name)
    return manifest


def _without_lists(data: bytes) -> Manifest:
    """One of the format before, as this version would have written it."""
    found = msgspec.json.decode(data, type=dict[str, Any])
    stages = msgspec.convert(found.get("stages"), dict[str, dict[str, Any]])
    for stage in stages.values():
        stage["files"] = {"added": msgspec.convert(stage.get("files"), list[Any])}
    return msgspec.convert({**found, "format": FORMAT, "stages": stages}, Manifest)


def as_report(
    stage: str,
    snapshot: StageSnapshot,
    checkpoint_id: int,
    attempt: int,
    generation: int,
    *,
    has_event_time: bool,
) -> StageReport:
    """What the coordinator needs to know of a stage's snapshot."""
    return StageReport(
        stage=stage,
        checkpoint_id=checkpoint_id,
        attempt=attempt,
        generation=generation,
        cut=snapshot.cut,
        positions=snapshot.positions,
        output_sequence=snapshot.output_sequence,
        files=tuple(snapshot.in_flight_files()),
        committable=snapshot.committable,
        source_position=", ".join(snapshot.source_positions) or None,
        in_flight=tuple(
            InFlight(
                name,
                segments[0].sequence - 1,
                segments[-1].sequence,
                sum(each.size_bytes for each in segments),
            )
            for name, segments in snapshot.in_flight.items()
            if segments
        ),
        has_event_time=has_event_time,
        watermark_ms=snapshot.watermark_ms,
        cause=snapshot.cause,
        over_bound=snapshot.over_bound,
        new_bytes=snapshot.new_bytes,
        total_bytes=snapshot.total_bytes,
        barrier_ms=snapshot.barrier_ms,
        alignment_ms=snapshot.alignment_ms,
        snapshot_ms=snapshot.snapshot_ms,
    )
