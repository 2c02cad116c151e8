"""A run that reads exactly up to where another root stands (`up_to`), so that the tables of both can be compared.

Of each source the batch is planned by which it comes from where it stands to where that of the other root does. When
its folders are laid out, that batch is written into Spark's log as one that was begun: Spark runs it, and the query
ends (see `filelog.plan_batch`). A source that stands there already gets no query. So none can read a row more, whatever
there is to read, and whenever it is killed: the next run plans anew, from what its checkpoint says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import msgspec

from tidegate.errors import InvalidConfig, PipelineChanged, RecoveryRefused
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.spark.filelog import PlannedBatch
from tidegate.spark.plan import has_state
from tidegate.spark.positions import (
    Order,
    Position,
    batch_between,
    compared,
    entries_beyond,
    first_at,
    position_at,
    told,
)
from tidegate.spark.queries import Built
from tidegate.spark.snapshot import first_position
from tidegate.spark.sources import are_same, described, log_numbers
from tidegate.storage.file_lists import SnapshotFiles, files_of
from tidegate.storage.files import Files
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest, SourceStream, StageShape
from tidegate.storage.places import Place, place_of

_log = logging.getLogger("tidegate")

_AT: Final = "@"


def root_and_checkpoint(text: str) -> tuple[str, int | None]:
    """Of ROOT or ROOT@CHECKPOINT."""
    root, at, named = text.rpartition(_AT)
    number = checkpoint_id_of(named) if at and root else None
    return (text, None) if number is None else (root, number)


def in_full(text: str) -> str:
    """The same wherever the process works later."""
    root, number = root_and_checkpoint(text)
    return str(place_of(root)) + ("" if number is None else f"{_AT}{checkpoint_name(number)}")


def source_positions(root: InspectedRoot, manifest: Manifest) -> dict[str, Position]:
    """Where the sources of a checkpoint stand, by their names."""
    return {
        name: _position(root.files, name, manifest, shape.streams)
        for name, shape in manifest.shape.items()
        if shape.kind == "source"
    }


def _position(
    root: Files,
    name: str,
    manifest: Manifest,
    streams: tuple[SourceStream, ...],
    logs: tuple[int, ...] | None = None,
) -> Position:
    snapshot = manifest.stages[name]
    return position_at(root, name, files_of(root, name, snapshot.files), snapshot.cut, streams, logs)


class Target:
    """Where the sources of a checkpoint of another root stand. It is read once, and may be removed there later."""

    def __init__(self, text: str, own: Place) -> None:
        """`text`: ROOT or ROOT@CHECKPOINT. `own`: the root that the run is on."""
        path, number = root_and_checkpoint(text)
        inspected = InspectedRoot(place_of(path))
        if inspected.place.is_same_as(own):
            raise InvalidConfig(f"up_to names {own}, the root of this very run; name the root of the other pipeline")
        record = _newest(inspected) if number is None else inspected.find(number)
        manifest = inspected.manifest(record)
        self.name = f"{checkpoint_name(record.checkpoint_id)} of {inspected.place}"
        self.positions = source_positions(inspected, manifest)
        self.streams = {name: manifest.shape[name].streams for name in self.positions}


def _newest(root: InspectedRoot) -> CheckpointCompleted:
    """The newest at which all tables show the same; if none does, the newest."""
    aligned = [each for each in root.current() if each.aligned]
    return aligned[-1] if aligned else root.newest()


class Plans(msgspec.Struct, frozen=True):
    """What each source is to read, by its name, None: nothing; and the checkpoint to start from for that.

    `closing`: sources that keep state, of which a batch without data follows, where their watermark has moved.
    """

    base: Manifest | None
    batches: dict[str, PlannedBatch | None]
    closing: frozenset[str]


def planned(
    target: Target,
    root: Files,
    generation: int,
    base: Manifest | None,
    shape: Mapping[str, StageShape],
    built: Mapping[str, Built],
) -> Plans:
    """Refuses where a source cannot come to exactly there."""
    sources = {name: each for name, each in shape.items() if each.kind == "source"}
    for name in target.positions.keys() - sources.keys():
        _log.warning("%s has a source %r, which this pipeline lacks", target.name, name)
    batches: dict[str, PlannedBatch | None] = {}
    for name, each in sources.items():
        _check_streams(target, name, each.streams)
        logs = log_numbers(built[name].frame)
        own = _own_position(root, generation, name, base, each.streams, logs)
        order = compared(own, target.positions[name])
        if order not in (Order.SAME, Order.BEHIND):
            raise RecoveryRefused(_cannot_reach(target, name, own, order))
        batches[name] = batch_between(own, target.positions[name], logs) if order is Order.BEHIND else None
        if base is not None and order is Order.BEHIND:
            base = _without_begun(root, name, base, own)
    closing = frozenset(name for name in sources if has_state(built[name].frame))
    return Plans(base, batches, closing)


def _check_streams(target: Target, name: str, streams: tuple[SourceStream, ...]) -> None:
    if name not in target.positions:
        raise PipelineChanged(
            f"up_to: {target.name} has no source {name!r}, so nobody can say up to where it is to read; it has: "
            f"{', '.join(target.positions)}. What to do: give it the name that it has there; nothing was changed"
        )
    if not are_same(streams, target.streams[name]):
        raise PipelineChanged(
            f"up_to: source {name!r} reads {described(streams)}, but at {target.name} it reads "
            f"{described(target.streams[name])}: where that stands says nothing of this one; nothing was changed"
        )


def _own_position(
    root: Files,
    generation: int,
    name: str,
    base: Manifest | None,
    streams: tuple[SourceStream, ...],
    logs: tuple[int, ...],
) -> Position:
    if base is None or not base.stages[name].knows_position:
        first = first_position(root, generation, name)
        return first_at(root, () if first is None else first.files, streams, logs)
    return _position(root, name, base, streams, logs)


def _cannot_reach(target: Target, name: str, own: Position, order: Order) -> str:
    other = target.positions[name]
    if order is Order.AHEAD:
        why, todo = "has read more", "name a later checkpoint there, or take one, or begin from an older one here"
    elif order is Order.APART:
        why = "has read something that the other has not, or began elsewhere"
        todo = "start on a new root, or on a fork of the other"
    else:
        why, todo = "stands where nobody can tell which of the two is ahead", "begin here from where the other stands"
    return (
        f"up_to: source {name!r} cannot come to exactly where it stands at {target.name}: it {why} (here: {told(own)}; "
        f"there: {told(other)}). What to do: {todo}; nothing was changed"
    )


def _without_begun(root: Files, name: str, base: Manifest, own: Position) -> Manifest:
    """Without what the snapshot holds of a batch that was begun: its entries would be read too, and what is planned
    takes their numbers."""
    snapshot = base.stages[name]
    beyond = entries_beyond(own, [each.name for each in files_of(root, name, snapshot.files)])
    if not beyond:
        return base
    files = snapshot.files
    kept = SnapshotFiles(
        files.lists,
        tuple(sorted({*files.dropped, *beyond})),
        tuple(each for each in files.added if each.name not in beyond),
        files.forced,
    )
    stages = {**base.stages, name: msgspec.structs.replace(snapshot, files=kept)}
    return msgspec.structs.replace(base, stages=stages)
