"""Savepoints: checkpoints that their user owns, each a folder that refers to nothing outside of itself.

<savepoint>/
  savepoint.json                         what it is; written last, so a folder without it is none
  generations/000003/manifests/…         the checkpoint, by the names that it had in its root
  generations/000003/snapshots/…
  generations/000003/in-flight/…         what was in flight

It may be moved and copied as any other folder. Those of a root lie beside it, unless their user says otherwise, so that
removing the root removes none of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from tidegate.errors import DamagedCheckpoint, ForeignRoot, InvalidConfig, StoreUnavailable, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import look_through, read_manifest
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.storage.paths import RootPaths
from tidegate.storage.system import told

RECORD: Final = "savepoint.json"
_FORMAT: Final = 1


class SavedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sink's table when the savepoint was made. `version`: the one that showed it, where a table has versions."""

    table: TableAddress
    version: int | None = None


class SavepointRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a savepoint is. `root_id`: of the root that it was made from."""

    format: int
    name: str
    pipeline: str
    root_id: str
    checkpoint_id: int
    epoch: int
    generation: int
    aligned: bool
    drained: bool
    manifest: str
    manifest_sha256: str
    triggered_at: str
    made_at: str
    size_bytes: int
    tables: dict[str, SavedTable] = {}


class Savepoint:
    """One that is whole, as far as its record tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = Folder(folder)
        data = self.files.read(RECORD)
        if data is None:
            raise UnknownCheckpoint(f"{folder} is no savepoint: it holds no {RECORD}")
        try:
            self.record = msgspec.json.decode(data, type=SavepointRecord)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DamagedCheckpoint(
                f"{folder / RECORD} cannot be read, it is damaged or of another version of Tidegate: {error}"
            ) from error
        if self.record.format != _FORMAT:
            raise ForeignRoot(
                f"{folder} is of another version of Tidegate: it has format {self.record.format}, this version reads "
                f"format {_FORMAT}"
            )

    def __str__(self) -> str:
        return f"savepoint {self.record.name}"

    def manifest(self) -> Manifest:
        """What it consists of."""
        return self._checked(read_manifest(self.files, self._as_completed()))

    def looked_through(self) -> Manifest:
        """The same, when every file was read against its checksum. Raises what is damaged first."""
        try:
            return self._checked(look_through(self.files, self._as_completed()))
        except DamagedCheckpoint as damage:
            raise DamagedCheckpoint(f"{self} is damaged: {damage} (in {self.folder})") from damage

    def _checked(self, manifest: Manifest) -> Manifest:
        said, found = self.record, manifest
        if (said.pipeline, said.checkpoint_id, said.epoch) != (found.pipeline, found.checkpoint_id, found.epoch):
            raise DamagedCheckpoint(f"{RECORD} is not of the checkpoint that it names, {said.manifest}")
        return manifest

    def _as_completed(self) -> CheckpointCompleted:
        """As the log of a root would have it."""
        said = self.record
        return CheckpointCompleted(
            1,
            "",
            said.generation,
            said.checkpoint_id,
            said.epoch,
            None,
            said.manifest,
            said.manifest_sha256,
            said.aligned,
            (said.checkpoint_id,),
            1,
        )


def write_savepoint(folder: Folder, manifest: Manifest, data: bytes, sha256: str, record: SavepointRecord) -> None:
    """Its manifest, and then what makes it one."""
    name = RootPaths.manifest(manifest.generation, manifest.checkpoint_id)
    folder.write(name, data)
    record = msgspec.structs.replace(record, format=_FORMAT, manifest=name, manifest_sha256=sha256)
    if not folder.create(RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1)):
        raise StoreUnavailable(f"{folder.location(RECORD)} was written by somebody else meanwhile")


def place_beside(root: Path) -> Path:
    """Where the savepoints of a root are, unless their user says otherwise."""
    return root.parent / f"{root.name}.savepoints"


def default_name(checkpoint_id: int) -> str:
    return f"save-{checkpoint_name(checkpoint_id).removeprefix('ckpt-')}"


def new_folder(place: Path, name: str) -> Path:
    """Where one of this name is to be. Refuses a name that is none, or is taken."""
    if not name or name != Path(name).name or name.startswith("."):
        raise InvalidConfig(f"{name!r} cannot be the name of a savepoint; it becomes a folder")
    folder = place / name
    if (folder / RECORD).exists():
        raise InvalidConfig(f"there is a savepoint {name!r} in {place} already; give this one another --name")
    if folder.exists() and any(folder.iterdir()):
        raise InvalidConfig(
            f"{folder} is there and holds something that is no savepoint, perhaps half of one; remove it, or give "
            f"this one another --name"
        )
    return folder


def find_savepoint(root: Path, named: str, place: Path | None = None) -> Savepoint:
    """By the path of its folder, or by its name among those beside a root."""
    beside = (place or place_beside(root)) / named
    for folder in (beside, Path(named)):
        if (folder / RECORD).exists():
            return Savepoint(folder.absolute())
    known = ", ".join(each.record.name for each in savepoints_in(place or place_beside(root))) or "none"
    raise UnknownCheckpoint(
        f"{named!r} names no savepoint: neither {beside} nor {Path(named).absolute()} is one (beside the root there "
        f"are: {known})"
    )


def savepoints_in(place: Path) -> Iterator[Savepoint]:
    """Those that can be read, the oldest first."""
    found = [Savepoint(path.parent) for path in sorted(place.glob(f"*/{RECORD}"))]
    yield from sorted(found, key=lambda each: (each.record.made_at, each.record.name))


def delete_savepoint(savepoint: Savepoint) -> None:
    """Its record first: what is left of one that was deleted half is none."""
    savepoint.files.delete([RECORD])
    try:
        shutil.rmtree(savepoint.folder)
    except OSError as error:
        raise StoreUnavailable(f"{savepoint} is deleted, but not all of its folder: {told(error)}") from error
