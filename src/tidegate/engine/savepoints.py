"""Making a savepoint: a checkpoint that all tables show is copied out of its root, into a folder that its user owns.

1. Have the run that is alive take a full checkpoint, or end with one; where none is alive, take the newest.
2. Give its files second names, so that they stay while they are copied, whatever the run drops.
3. Ask the tables: what a savepoint holds is behind what they show.
4. Copy every file, comparing each with its checksum, then write the manifest, then what makes it a savepoint.

Killed in the middle, it leaves a folder that is no savepoint. Nothing of the pipeline is changed by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from tidegate.engine import history
from tidegate.engine.bringing import pinned, sealed_when_shown
from tidegate.engine.events import SavepointTaken
from tidegate.engine.kill_points import Step, reached
from tidegate.engine.requests import StopRun, TakeCheckpoint, ask_for_checkpoint, ask_to_stop
from tidegate.engine.setting_back import PipelineTables, tables_in
from tidegate.engine.status import as_moment
from tidegate.engine.tables import described
from tidegate.errors import CheckpointNotVisible, SinkFailed
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.messages import Flag
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.sinks.contract import BoundSink, ReversibleSink, decode_committable
from tidegate.storage.carrying import Carrying, Numbers
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest, encode_manifest
from tidegate.storage.places import files_at, place_of
from tidegate.storage.savepoints import (
    SavedTable,
    Savepoint,
    SavepointRecord,
    default_name,
    name_of,
    new_folder,
    write_savepoint,
)
from tidegate.storage.user_paths import folder_or_bucket


def make_savepoint(
    root: InspectedRoot,
    name: str | None = None,
    place: Path | str | None = None,
    *,
    stop: StopRun | None = None,
    checkpoint_id: int | None = None,
    timeout_s: float = 600,
    own: Mapping[str, BoundSink] | None = None,
) -> Savepoint:
    """Of a pipeline as it is now, or of a checkpoint that its root retains. `stop`: the run ends with it. `own`: the
    pipeline's sinks, for tables that can only be reached by them."""
    place = place or root.place.savepoints()
    if name is not None:
        new_folder(place, name)  # before anything is asked of the run
    is_shown = False
    if checkpoint_id is not None:
        record = root.find(checkpoint_id)
    elif not root.place.is_held() and stop is None:
        record = root.newest()
    else:
        record, is_shown = _asked_for(root, stop, timeout_s), True
    folder = new_folder(place, name or default_name(record.checkpoint_id))
    made = _save(root, record, folder, own or {}, is_shown=is_shown)
    taken = SavepointTaken(
        at=made.record.made_at,
        generation=record.generation,
        checkpoint=checkpoint_name(record.checkpoint_id),
        name=made.record.name,
        place=str(folder),
    )
    history.record(root.files, taken)
    return made


def _asked_for(root: InspectedRoot, stop: StopRun | None, timeout_s: float) -> CheckpointCompleted:
    """What the run that is alive has taken for this. When it answers, all tables show it."""
    if stop is not None:
        ask_to_stop(root.place, timeout_s, stop)
        return root.newest()
    taken = ask_for_checkpoint(root.place, timeout_s, TakeCheckpoint(full=True))
    checkpoint_id = checkpoint_id_of(taken.checkpoint)
    assert checkpoint_id is not None
    return root.find(checkpoint_id)


def _save(
    root: InspectedRoot,
    record: CheckpointCompleted,
    folder: Path | str,
    own: Mapping[str, BoundSink],
    *,
    is_shown: bool,
) -> Savepoint:
    with pinned(root, record) as (source, manifest):
        tables = shown_tables(root, manifest, own, is_shown=is_shown)
        target = files_at(folder)
        carrying = Carrying(source, target, manifest)
        numbers = Numbers(manifest.generation, manifest.checkpoint_id, manifest.epoch)
        carried = carrying.carry(numbers, sealed_when_shown(manifest), {}, manifest.origin)
        data, sha256 = encode_manifest(carried)
        reached(Step.CHECKPOINT_BROUGHT)
        said = SavepointRecord(
            format=0,
            name=name_of(folder),
            pipeline=manifest.pipeline,
            root_id=root.id,
            checkpoint_id=manifest.checkpoint_id,
            epoch=manifest.epoch,
            generation=manifest.generation,
            aligned=manifest.aligned,
            drained=bool(manifest.flags & Flag.DRAIN),
            manifest="",
            manifest_sha256="",
            triggered_at=manifest.triggered_at,
            made_at=as_moment(datetime.now(UTC)),
            size_bytes=carrying.size_bytes,
            tables=tables,
        )
        write_savepoint(target, carried, data, sha256, said)
    return Savepoint(folder)


def shown_tables(
    root: InspectedRoot, manifest: Manifest, own: Mapping[str, BoundSink], *, is_shown: bool
) -> dict[str, SavedTable]:
    """The tables of a checkpoint, each with the version that shows it. Refuses one that does not: what was staged for
    it would be left behind. `is_shown`: the run has said so, also of those that nobody else can ask."""
    addresses = tables_in(manifest)
    tables = PipelineTables(root.files, root.pipeline, root.id, addresses, own)
    found: dict[str, SavedTable] = {}
    for name, address in addresses.items():
        sink, sealed = tables.sink(name), manifest.stages[name].committable
        if sink is None:
            if not is_shown:
                raise SinkFailed(
                    f"whether {described(address)} of sink {name!r} shows {checkpoint_name(manifest.checkpoint_id)} "
                    f"can only be asked by the pipeline. What to do: name its file with --file FILE, or ask while it "
                    f"runs"
                )
            found[name] = SavedTable(address)
            continue
        last = -1 if sealed is None else decode_committable(sealed).last_with_rows
        if sink.facts().next_batch <= last:
            raise CheckpointNotVisible(
                f"{sink.describe()} of sink {name!r} does not show all of "
                f"{checkpoint_name(manifest.checkpoint_id)} yet. What to do: start the pipeline, which commits it"
            )
        version = sink.look_back(manifest).to_version if isinstance(sink, ReversibleSink) and last >= 0 else None
        found[name] = SavedTable(address, version)
    return found


def savepoint(
    root: str | Path,
    name: str | None = None,
    to: str | Path | None = None,
    *,
    stop: bool = False,
    drain: bool = False,
    close_windows: bool = False,
    timeout: float = 600,
) -> Path | str:
    """Make a savepoint of the pipeline that runs on a root, or ran last, and return its folder; its URL in a bucket.

    `to`: the folder in which it gets one of its own, called `name`, or the URL of one in a bucket; by default beside
    the root. `stop` ends the run with it; `drain` ends it when every row that its sources have read is in the tables;
    `close_windows` besides writes out what is still open, so rows that come later are late.
    """
    ends = stop or drain or close_windows
    how = StopRun(full=True, drain=drain, close_windows=close_windows) if ends else None
    place = None if to is None else folder_or_bucket(to)
    return make_savepoint(InspectedRoot(place_of(root)), name, place, stop=how, timeout_s=timeout).folder
