"""Which files a stage's snapshot has, told by what changed.

A manifest names lists, each an immutable file in the root, and says itself what has changed since the last of them. A
list says which files it adds to those of the lists before it, and which of them it drops. So a file that stays is
written down once, and neither written nor read again by the checkpoints after.

What a manifest says itself becomes a list when it is long. A list takes in the one before unless that is at least twice
as long: so there are few of them, and a file is written down again only as often as the number of files doubles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from tidegate.errors import DamagedCheckpoint
from tidegate.storage.files import Files
from tidegate.storage.paths import RootPaths

MOST_IN_A_MANIFEST: Final = 200
"""How many changes a manifest says itself. They take about 60 kB."""


class SnapshotFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One file of a stage's snapshot. `name` is its path in Spark's checkpoint folder, `stored` in the root.

    There may be a hundred thousand of them, and nothing that leads back to one: garbage collection passes them over.
    """

    name: str
    stored: str
    size_bytes: int
    sha256: str


class StoredList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list of files, by its path in the root."""

    stored: str
    size_bytes: int
    sha256: str


class _Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a list holds: first the names are dropped, then the files added."""

    dropped: tuple[str, ...]
    added: tuple[SnapshotFile, ...]


class SnapshotFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files of a stage's snapshot: those of its lists, oldest first, without those that were dropped since, and
    with those that were added. `forced`: all of them are surely on the disk."""

    lists: tuple[StoredList, ...] = ()
    dropped: tuple[str, ...] = ()
    added: tuple[SnapshotFile, ...] = ()
    forced: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is surely none."""
        return not self.lists and not self.added

    def paths(self) -> Iterator[str]:
        """Every path that is taken from what is told here, not in lists."""
        yield from (each.stored for each in self.lists)
        yield from paths_of(self.added)


_decoder: Final = msgspec.json.Decoder(_Changes)


def paths_of(files: Iterable[SnapshotFile]) -> Iterator[str]:
    for file in files:
        yield file.stored
        yield file.name


def check_inside(paths: Iterable[str], said_by: str) -> None:
    """Nothing outside of the root, or of a folder in it, is ever read, linked to or deleted."""
    for path in paths:
        if not RootPaths.is_inside(path):
            raise DamagedCheckpoint(
                f"{said_by} names {path!r}, which leads outside of where it belongs: nothing of it is used"
            )


class FileList:
    """What a list holds, in memory. `stored` is None of what the next manifest says itself."""

    __slots__ = ("added", "dropped", "stored")

    def __init__(self, dropped: Iterable[str], added: Iterable[SnapshotFile], stored: StoredList | None = None) -> None:
        self.dropped = set(dropped)
        self.added = {file.name: file for file in added}
        self.stored = stored

    def __len__(self) -> int:
        return len(self.dropped) + len(self.added)

    def then(self, newer: FileList) -> FileList:
        """Both in one. What only this one has added was in none before it: there is nothing to drop."""
        dropped = self.dropped | (newer.dropped - self.added.keys())
        kept = (file for name, file in self.added.items() if name not in newer.dropped)
        return FileList(dropped, (*kept, *newer.added.values()))


def read_list(files: Files, each: StoredList, stage: str) -> FileList:
    """Refuses anything but the very list that was written."""
    what = f"{each.stored}, a list of files of stage {stage!r},"
    data = files.read(each.stored)
    if data is None:
        raise DamagedCheckpoint(f"{what} is gone")
    if len(data) != each.size_bytes:
        raise DamagedCheckpoint(f"{what} is not what it was: size differs")
    if hashlib.sha256(data).hexdigest() != each.sha256:
        raise DamagedCheckpoint(f"{what} is not what it was: checksum differs")
    try:
        changes = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{what} cannot be read: {error}") from error
    check_inside(paths_of(changes.added), each.stored)
    return FileList(changes.dropped, changes.added, each)


def all_files(lists: Iterable[FileList], snapshot: SnapshotFiles) -> dict[str, SnapshotFile]:
    """The files of a snapshot by name, of which these are the lists."""
    found: dict[str, SnapshotFile] = {}
    for each in (*lists, FileList(snapshot.dropped, snapshot.added)):
        for name in each.dropped:
            found.pop(name, None)
        found.update(each.added)
    return found


def files_of(root: Files, stage: str, snapshot: SnapshotFiles) -> Collection[SnapshotFile]:
    """All files of a stage's snapshot. Its lists are read, and checked."""
    return all_files([read_list(root, each, stage) for each in snapshot.lists], snapshot).values()


def find_file(root: Files, stage: str, snapshot: SnapshotFiles, name: str) -> SnapshotFile | None:
    """One of a stage's snapshot, by its name. What is new is found without reading a list."""
    if (found := FileList((), snapshot.added).added.get(name)) is not None or name in snapshot.dropped:
        return found
    for each in reversed(snapshot.lists):
        read = read_list(root, each, stage)
        if name in read.added or name in read.dropped:
            return read.added.get(name)
    return None


class FileLists:
    """The lists of one stage, from checkpoint to checkpoint."""

    def __init__(
        self,
        root: Files,
        generation: int,
        stage: str,
        start: SnapshotFiles,
        most_in_a_manifest: int = MOST_IN_A_MANIFEST,
    ) -> None:
        """`start`: of the snapshot that the stage is restored from. Its lists are read, and checked."""
        self._most = most_in_a_manifest
        self._root = root
        self._generation = generation
        self._stage = stage
        self._lists = [read_list(root, each, stage) for each in start.lists]
        self._since = FileList(start.dropped, start.added)
        self.files = all_files(self._lists, start)
        """All of the last snapshot, by name."""

    def paths(self) -> Iterator[str]:
        """Of all that the last snapshot refers to, in the root: its lists and its files."""
        yield from (each.stored.stored for each in self._lists if each.stored is not None)
        yield from (file.stored for file in self.files.values())

    def change(
        self, checkpoint_id: int, dropped: Collection[str], added: Mapping[str, SnapshotFile]
    ) -> tuple[SnapshotFiles, list[StoredList]]:
        """What the snapshot of this checkpoint has, by how it differs from the one before. Returns besides the lists
        that no later one names. If it fails, nothing has changed."""
        lists, since = self._lists, self._since
        if dropped or added:
            since = since.then(FileList(dropped, added.values()))
        if len(since) > self._most:
            lists, since = self._written(checkpoint_id, since), FileList((), ())
        for name in dropped:
            del self.files[name]
        self.files.update(added)
        return self._now(lists, since)

    def replace(self, checkpoint_id: int, files: Mapping[str, SnapshotFile]) -> tuple[SnapshotFiles, list[StoredList]]:
        """The same of a snapshot that has none of the files of the one before."""
        lists, since = list[FileList](), FileList((), files.values())
        if len(since) > self._most:
            lists, since = [self._write(checkpoint_id, since)], FileList((), ())
        self.files = dict(files)
        return self._now(lists, since)

    def _written(self, checkpoint_id: int, newest: FileList) -> list[FileList]:
        kept = list(self._lists)
        while kept and len(kept[-1]) < 2 * len(newest):
            newest = kept.pop().then(newest)
        if not kept:
            newest.dropped.clear()  # there is nothing before it
        return [*kept, self._write(checkpoint_id, newest)]

    def _write(self, checkpoint_id: int, newest: FileList) -> FileList:
        data = msgspec.json.encode(_Changes(tuple(sorted(newest.dropped)), tuple(newest.added.values())))
        name = RootPaths.file_list(self._generation, self._stage, checkpoint_id)
        self._root.write(name, data)
        newest.stored = StoredList(name, len(data), hashlib.sha256(data).hexdigest())
        return newest

    def _now(self, lists: list[FileList], since: FileList) -> tuple[SnapshotFiles, list[StoredList]]:
        stored = tuple(each.stored for each in lists if each.stored is not None)
        named = {each.stored for each in stored}
        gone = [each.stored for each in self._lists if each.stored is not None and each.stored.stored not in named]
        self._lists, self._since = lists, since
        return SnapshotFiles(stored, tuple(sorted(since.dropped)), tuple(since.added.values())), gone
