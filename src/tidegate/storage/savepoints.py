"""Savepoints: checkpoints that their user owns, each a folder, here or in a bucket, that refers to nothing outside of
itself.

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
from tidegate.storage.files import Files, claim
from tidegate.storage.inspection import look_through, read_manifest
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import files_at
from tidegate.storage.system import told
from tidegate.storage.user_paths import is_bucket_url

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

    def __init__(self, folder: Path | str) -> None:
        """`folder`: if it is in a bucket, its URL."""
        self.folder = folder
        self.files = files_at(folder)
        data = self.files.read(RECORD)
        if data is None:
            raise UnknownCheckpoint(f"{folder} is no savepoint: it holds no {RECORD}")
        try:
            self.record = msgspec.json.decode(data, type=SavepointRecord)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DamagedCheckpoint(
                f"{self.files.location(RECORD)} cannot be read, it is damaged or of another version of Tidegate: "
                f"{error}"
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


def write_savepoint(folder: Files, manifest: Manifest, data: bytes, sha256: str, record: SavepointRecord) -> None:
    """Its manifest, and then what makes it one."""
    name = RootPaths.manifest(manifest.generation, manifest.checkpoint_id)
    folder.write(name, data)
    record = msgspec.structs.replace(record, format=_FORMAT, manifest=name, manifest_sha256=sha256)
    said = msgspec.json.format(msgspec.json.encode(record), indent=1)
    # Of two that are the same to the millisecond each is right: they are of one checkpoint, whose files are the same.
    if claim(folder, RECORD, said) != said:
        raise StoreUnavailable(f"{folder.location(RECORD)} was written by somebody else meanwhile")


def default_name(checkpoint_id: int) -> str:
    return f"save-{checkpoint_name(checkpoint_id).removeprefix('ckpt-')}"


def name_of(folder: Path | str) -> str:
    return str(folder).rpartition("/")[2]


def _below(place: Path | str, name: str) -> Path | str:
    return f"{place}/{name}" if isinstance(place, str) else place / name


def _is_one(folder: Path | str) -> bool:
    """Beside savepoints there may be files, which no file is below."""
    return files_at(folder).exists(RECORD) if isinstance(folder, str) else (folder / RECORD).exists()


def new_folder(place: Path | str, name: str) -> Path | str:
    """Where one of this name is to be. Refuses a name that is none, or is taken."""
    if not name or name != Path(name).name or name.startswith("."):
        raise InvalidConfig(f"{name!r} cannot be the name of a savepoint; it becomes a folder")
    folder = _below(place, name)
    if _is_one(folder):
        raise InvalidConfig(f"there is a savepoint {name!r} in {place} already; give this one another --name")
    if files_at(folder).names_in():
        raise InvalidConfig(
            f"{folder} is there and holds something that is no savepoint, perhaps half of one; remove it, or give "
            f"this one another --name"
        )
    return folder


def find_savepoint(place: Path | str | None, named: str) -> Savepoint:
    """By the path of its folder or its URL, or by its name among those in a place, beside a root that has one."""
    own = named.rstrip("/") if is_bucket_url(named) else Path(named).absolute()
    if place is None or isinstance(own, str):
        if _is_one(own):
            return Savepoint(own)
        raise UnknownCheckpoint(f"{named!r} names no savepoint: {own} is none")
    for folder in (_below(place, named), own):
        if _is_one(folder):
            return Savepoint(folder.absolute() if isinstance(folder, Path) else folder)
    known = ", ".join(each.record.name for each in savepoints_in(place)) or "none"
    raise UnknownCheckpoint(
        f"{named!r} names no savepoint: neither {_below(place, named)} nor {own} is one (beside the root there are: "
        f"{known})"
    )


def savepoints_in(place: Path | str) -> Iterator[Savepoint]:
    """Those that can be read, the oldest first."""
    folders = [_below(place, name) for name in files_at(place).names_in()]
    found = [Savepoint(folder) for folder in folders if _is_one(folder)]
    yield from sorted(found, key=lambda each: (each.record.made_at, each.record.name))


def delete_savepoint(savepoint: Savepoint) -> None:
    """Its record first: what is left of one that was deleted half is none."""
    savepoint.files.delete([RECORD])
    if isinstance(savepoint.folder, str):
        savepoint.files.delete(savepoint.files.list())
        return
    try:
        shutil.rmtree(savepoint.folder)
    except OSError as error:
        raise StoreUnavailable(f"{savepoint} is deleted, but not all of its folder: {told(error)}") from error
