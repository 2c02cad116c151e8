"""Snapshots: which files of Spark's checkpoint folder rebuild a stage at a batch, kept by hard links.

Files of the batch log and of the state are immutable (Spark writes them whole and renames), so a link is a copy.
Only files that the last snapshot of the stage did not hold are linked and read (for their checksum). What full
snapshots of the state share is looked at only where there is another one: it may be a hundred thousand files.

To rebuild the state as of batch N (state version N + 1), per state store: the newest full snapshot (`zip`) not
above that version, the SST files that it lists, and the change logs from there on. With format v2 a file's name
carries a unique id; where a version has several (a task was retried), all are kept. A full snapshot of a task that
was tried in vain is never loaded: only one that the commit log of its batch names is built upon. Where that entry is
gone before anybody looked, those before it are kept as well.

Where the root holds state where Spark has written it (`Files.hold`), Spark deletes none of it. What no snapshot refers
to any more is then kept as long as Spark might want it: for the last hundred versions, as Spark itself does. Then it is
told to be unneeded, once, with the checkpoints that refer to it: whoever is told keeps it as long as one is retained.

A full snapshot refers to no file of another checkpoint, nor shares one with Spark: each is copied, and is compared with
what was known of it. So it vouches for nothing that was damaged since.
"""

from __future__ import annotations

import logging
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from tidegate.errors import DamagedCheckpoint, StoreUnavailable
from tidegate.protocol.retention import StoredFile
from tidegate.spark.filelog import is_of_files, log_offset, read_offsets
from tidegate.storage.file_lists import MOST_IN_A_MANIFEST, FileLists, SnapshotFile, SnapshotFiles
from tidegate.storage.files import ETAG, Files, checksum, is_same
from tidegate.storage.manifest import SourceStream
from tidegate.storage.mounted import for_spark, side_by_side
from tidegate.storage.paths import RootPaths

_log = logging.getLogger("tidegate")

_STATE_FILE: Final = re.compile(r"(\d+)(?:_([0-9a-f-]+))?\.(zip|changelog|delta|snapshot)")
_FULL: Final = ("zip", "snapshot")
STATE_FOLDER: Final = "state/"
"""What the names of all files of state begin with."""
_RETAINED_VERSIONS: Final = 100
_SWEPT_EVERY: Final = 20
"""As many batches."""
_SST_FOLDER: Final = "SSTs"
_LOG_FOLDER: Final = "logs"
_OPERATOR_METADATA: Final = re.compile(r"state/\d+/_metadata/v2/(\d+)")
_OLDER_PLACE: Final = re.compile(r'[^"]*?/generations/\d+/stages/[^"/]+/spark(-\d+)?(?=/)')

_streams_decoder: Final = msgspec.json.Decoder(tuple[SourceStream, ...])


class _SstFile(msgspec.Struct, rename="camel"):
    dfs_sst_file_name: str


class _LogFile(msgspec.Struct, rename="camel"):
    dfs_log_file_name: str


class _ZipMetadata(msgspec.Struct, rename="camel"):
    """What a full snapshot of RocksDB says of the files that it shares with others."""

    sst_files: list[_SstFile]
    log_files: list[_LogFile] | None = None


def files_at(checkpoint: Files, batch: int | None, *, reads_gates: bool, committed: Collection[str] = ()) -> list[str]:
    """The files, relative to Spark's checkpoint folder, that a stage resumes from after `batch`.

    Before its first batch that is where a source first stood, if Spark has noted that yet. `committed`: full snapshots
    that were found to be of a commit before its entry was deleted.
    """
    names = _unshared_files_at(checkpoint, batch, reads_gates=reads_gates, committed=committed)
    return [*names, *(shared for name in names if _is_zip(name) for shared in _shared_files(checkpoint, name))]


def _unshared_files_at(
    checkpoint: Files, batch: int | None, *, reads_gates: bool, committed: Collection[str]
) -> list[str]:
    """The same, but for what the full snapshots among them share."""
    if batch is None:
        return [] if reads_gates else [each for each in _first_entries(checkpoint) if not is_of_files(checkpoint, each)]
    found = [f"{log}/{number}" for log in ("offsets", "commits") for number in (batch - 1, batch)]
    names = ["metadata", *(name for name in found if checkpoint.exists(name))]
    needed = {f"offsets/{batch}", f"commits/{batch}", f"offsets/{max(0, batch - 1)}"}
    if not needed <= set(names):
        raise DamagedCheckpoint(f"batch {batch} is no longer in {checkpoint.location()}: it was snapshotted too late")
    if not reads_gates:
        names += _source_files(checkpoint, batch)
    names += _state_files(checkpoint, batch + 1, committed)
    return names


def _source_files(checkpoint: Files, batch: int) -> Iterator[str]:
    """Logs of the user's own sources, which may need all of them. Those of gates start anew at a restore.

    An entry too many does no harm: Spark then reads its files in the next batch. One too few would make it read
    files again. Which source a log is of cannot be told from the offsets, where equal sources stand side by side.
    """
    newest = _newest_offset(read_offsets(checkpoint, batch).sources)
    for name in checkpoint.list("sources"):
        last = name.rpartition("/")[2]
        number = last.removesuffix(".compact")
        if not last.startswith(".") and (newest is None or not number.isdigit() or int(number) <= newest):
            yield name


def _newest_offset(sources: tuple[str | None, ...]) -> int | None:
    """The last entry that any source log needs; None if there are sources of another kind than files."""
    try:
        return max((log_offset(source) for source in sources if source is not None), default=-1)
    except msgspec.MsgspecError:
        return None


def _state_files(checkpoint: Files, version: int, committed: Collection[str]) -> Iterator[str]:
    # What is in the folders left out is named by the snapshots that need it.
    for folder, names in _visible_by_folder(checkpoint.list("state", but=(_SST_FOLDER, _LOG_FOLDER))).items():
        versioned = [match for name in names if (match := _STATE_FILE.fullmatch(name))]
        if versioned:
            yield from _store_files(checkpoint, folder, versioned, version, committed)
        else:
            for name in (f"{folder}/{name}" for name in names):
                operator = _OPERATOR_METADATA.fullmatch(name)
                if operator is None or int(operator[1]) < version:
                    yield name


def _visible_by_folder(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        if not last.startswith("."):
            found.setdefault(folder, []).append(last)
    return found


def _store_files(
    checkpoint: Files, folder: str, files: list[re.Match[str]], version: int, committed: Collection[str]
) -> Iterator[str]:
    full = [match for match in files if match[3] in _FULL and int(match[1]) <= version]
    verdicts = {match: f"{folder}/{match[0]}" in committed or _is_of_the_commit(checkpoint, match) for match in full}
    sure = [int(match[1]) for match in full if verdicts[match]]
    unsure = [int(match[1]) for match in full if verdicts[match] is None]
    oldest = max(sure) if sure else min(unsure, default=0)
    for match in files:
        is_full = match[3] in _FULL
        number = int(match[1])
        if number > version or number < oldest or (number == oldest and not is_full and full):
            continue
        if is_full and verdicts[match] is False:
            continue
        yield f"{folder}/{match[0]}"


def _is_of_the_commit(checkpoint: Files, full: re.Match[str]) -> bool | None:
    """Whether a full snapshot is of the task that was committed, not of one that was tried in vain.

    The commit log of its batch names the unique ids. None: it is gone, as for old batches and in a restored folder.
    """
    if full[2] is None:
        return True
    commit = checkpoint.read(f"commits/{int(full[1]) - 1}")
    if commit is None:
        return None
    return b"stateUniqueIds" not in commit or full[2].encode() in commit


def _committed_among(checkpoint: Files, names: Iterable[str], known: Collection[str]) -> frozenset[str]:
    """The full snapshots among these files that are surely of a commit."""
    found = ((name, _STATE_FILE.fullmatch(name.rpartition("/")[2])) for name in names if name.startswith(STATE_FOLDER))
    return frozenset(
        name
        for name, match in found
        if match and match[3] in _FULL and (name in known or _is_of_the_commit(checkpoint, match))
    )


def _is_zip(name: str) -> bool:
    """Whether a file of a stage is a full snapshot of state, which names others that it shares."""
    return name.endswith(".zip") and name.startswith(STATE_FOLDER)


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _shared_files(checkpoint: Files, snapshot: str) -> list[str]:
    """What a full snapshot of state shares with others of its store, by names in Spark's checkpoint folder."""
    opened = checkpoint.open(snapshot)
    if opened is None:
        raise DamagedCheckpoint(f"{checkpoint.location(snapshot)}, a full snapshot of state, is gone")
    try:
        with opened as file, zipfile.ZipFile(file) as zipped:
            _version, text = zipped.read("metadata").split(b"\n", 1)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise DamagedCheckpoint(
            f"{checkpoint.location(snapshot)}, a full snapshot of state, is damaged: {error}"
        ) from error
    metadata = msgspec.json.decode(text, type=_ZipMetadata)
    folder = _folder_of(snapshot)
    return [f"{folder}/{_SST_FOLDER}/{file.dfs_sst_file_name}" for file in metadata.sst_files] + [
        f"{folder}/{_LOG_FOLDER}/{file.dfs_log_file_name}" for file in metadata.log_files or ()
    ]


def stale_state(
    names: Iterable[str], version: int, held: Iterable[str], shared: Callable[[str], list[str]]
) -> list[str]:
    """What of the state no version needs that Spark retains, by the rules by which it deletes itself. `names`: without
    what full snapshots share. `shared`: what one of these does.

    `held`: what the last snapshot has. Nothing goes from where that begins on: the next one, and Spark, build upon it
    as well. A newer full snapshot may be of a task that was tried in vain, and then nobody does.

    What was uploaded for a full snapshot that was never completed is not known here: it goes with its generation.
    """
    found: dict[str, None] = {}
    begins_at = _first_full_versions(held)
    for folder, files in _visible_by_folder(names).items():
        versioned = [match for name in files if (match := _STATE_FILE.fullmatch(name))]
        full = [int(match[1]) for match in versioned if match[3] in _FULL]
        oldest = max((number for number in full if number <= version - _RETAINED_VERSIONS), default=0)
        oldest = min(oldest, begins_at.get(folder, 0))
        stale = [match for match in versioned if int(match[1]) < oldest]
        if not stale:
            continue
        zips = [f"{folder}/{match[0]}" for match in versioned if match[3] == "zip"]
        gone = {f"{folder}/{match[0]}" for match in stale}
        used = {each for name in zips if name not in gone for each in shared(name)}
        found.update(dict.fromkeys(gone))
        found.update(dict.fromkeys(each for name in zips if name in gone for each in shared(name) if each not in used))
    return list(found)


def _first_full_versions(held: Iterable[str]) -> dict[str, int]:
    """The version of the first full snapshot among these files, by the folder of its store."""
    found: dict[str, int] = {}
    for name in held:
        folder, _, last = name.rpartition("/")
        if (match := _STATE_FILE.fullmatch(last)) and match[3] in _FULL:
            found[folder] = min(int(match[1]), found.get(folder, int(match[1])))
    return found


class Taken(msgspec.Struct, frozen=True):
    """A snapshot that was taken. `fresh`: what of it is new in the store, by names in the root; of how many bytes.
    `unneeded`: what no later one refers to, with the checkpoints that do."""

    files: SnapshotFiles
    fresh: tuple[str, ...]
    new_bytes: int
    total_bytes: int
    unneeded: tuple[StoredFile, ...]


class _Found:
    """What was found in Spark's folder for a snapshot: unshared files, and what the full ones among them share."""

    def __init__(self, names: Iterable[str], before: _Found | None, shared: Callable[[str], list[str]]) -> None:
        """`before`: for the snapshot before; what full ones of that share is known."""
        self.names = dict.fromkeys(names)
        known: Mapping[str, list[str]] = {} if before is None else before.shared
        self.shared: dict[str, list[str]] = {
            name: known[name] if name in known else shared(name) for name in self.names if _is_zip(name)
        }

    def in_stores(self, folders: Collection[str] | None = None) -> dict[str, None]:
        """What is shared in these stores, or in all."""
        return dict.fromkeys(
            name
            for zipped, names in self.shared.items()
            if folders is None or _folder_of(zipped) in folders
            for name in names
        )

    def changes(self, before: _Found) -> tuple[list[str], list[str]]:
        """The names that are new, and those that are gone. Only where a store has another full snapshot, what is shared
        there is compared."""
        stores = {_folder_of(name) for name in self.shared.keys() ^ before.shared.keys()}
        old, new = before.in_stores(stores), self.in_stores(stores)
        return (
            [name for name in (*self.names, *new) if name not in before.names and name not in old],
            [name for name in (*before.names, *old) if name not in self.names and name not in new],
        )


class Snapshotter:
    """Keeps the snapshots of one stage in one generation, one after the other.

    Each refers to files that it has kept itself, under the id of its checkpoint, and to files of the last one. So the
    checkpoints that refer to a file are all from the one that it was kept for until the first that no longer does.
    """

    def __init__(
        self,
        root: Files,
        generation: int,
        stage: str,
        start: SnapshotFiles | None,
        *,
        reads_gates: bool,
        most_in_a_manifest: int = MOST_IN_A_MANIFEST,
    ) -> None:
        """`start`: the files of the snapshot that the stage starts from. `most_in_a_manifest`: see `FileLists`."""
        self._reads_gates = reads_gates
        self._root = root
        self._generation = generation
        self._stage = stage
        self._lists = FileLists(root, generation, stage, start or SnapshotFiles(), most_in_a_manifest)
        self._total_bytes = sum(file.size_bytes for file in self._lists.files.values())
        self._found: _Found | None = None
        self._found_at: tuple[str, int | None] | None = None
        self._committed: frozenset[str] = frozenset()
        # What snapshots refer to, or did, where Spark has written it, with the checkpoints that do. Until it is gone.
        self._in_place: dict[str, StoredFile] = {}
        # What of it, and of what none ever referred to, was told to be unneeded, and is not deleted yet.
        self._told: set[str] = set()
        self._shares: dict[str, list[str]] = {}
        self._swept_at = 0
        # What was stored in vain, or is about to be: of a snapshot that failed, until another one is taken.
        self._begun: dict[str, None] = {}

    @property
    def held(self) -> Mapping[str, SnapshotFile]:
        """The files of the last snapshot, by name."""
        return self._lists.files

    def held_paths(self) -> Iterator[str]:
        """What it refers to, in the root."""
        return self._lists.paths()

    def in_place(self) -> frozenset[str]:
        """What of it, and of snapshots before it, lies where Spark has written it, and is not deleted yet."""
        # It is asked for beside whoever takes the next one.
        return frozenset(tuple(self._in_place))

    def on_deleted(self, paths: Iterable[str]) -> None:
        """What was told to be unneeded is gone."""
        for path in paths:
            self._in_place.pop(path, None)
            self._told.discard(path)

    def _is_in_place(self, stored: str) -> bool:
        return RootPaths.is_working(stored) and RootPaths.generation_of(stored) == self._generation

    def take(self, checkpoint: Files, checkpoint_id: int, batch: int | None, *, full: bool) -> Taken:
        """Keep what rebuilds the stage at a batch. What has failed may be tried again.

        `checkpoint`: Spark's folder, of the attempt that ran the batch.
        """
        held = self._lists.files
        found, new, gone = self._look(checkpoint, batch)
        fresh = {
            name: RootPaths.snapshot_file(self._generation, self._stage, checkpoint_id, name)
            for name in new
            if name not in held
        }
        self._begun.update(dict.fromkeys(fresh.values()))
        # All links before any file is read, which takes time: Spark deletes what it no longer needs itself.
        fresh = {name: self._root.hold(stored, checkpoint, name) for name, stored in fresh.items()}
        added = {name: self._described(name, stored) for name, stored in fresh.items()}
        dropped = {name: held[name] for name in gone if name in held}
        written = partial(self._lists.change, checkpoint_id, dropped, added)
        if full:
            files = {name: file for name, file in held.items() if name not in dropped} | added
            dropped, added = dict(held), self._stored_anew(files.values(), checkpoint, checkpoint_id)
            written = partial(self._lists.replace, checkpoint_id, added)
        try:
            lists, unnamed = written()
        except StoreUnavailable:  # perhaps after it was written
            self._begun[RootPaths.file_list(self._generation, self._stage, checkpoint_id)] = None
            raise
        new_bytes = sum(file.size_bytes for file in added.values())
        self._total_bytes += new_bytes - sum(file.size_bytes for file in dropped.values())
        self._found, self._found_at = found, (checkpoint.location(), batch)
        kept = {file.stored for file in added.values()}
        unneeded = {file.stored for file in dropped.values()}.union(self._begun) - kept
        unneeded |= {each.stored for each in unnamed}
        unneeded -= {each.stored for each in lists.lists}
        self._begun = {}
        in_place = set(filter(self._is_in_place, fresh.values()))
        self._in_place.update((stored, StoredFile(stored, self._generation, checkpoint_id)) for stored in in_place)
        unneeded |= in_place - kept  # what a full snapshot has copied from there
        parted = unneeded & self._in_place.keys()
        for stored in parted:
            self._in_place[stored] = msgspec.structs.replace(self._in_place[stored], before=checkpoint_id)
        return Taken(
            lists,
            tuple(kept),
            new_bytes,
            self._total_bytes,
            (
                *(kept_until(checkpoint_id, stored) for stored in sorted(unneeded - parted)),
                *self._swept(checkpoint, batch),
            ),
        )

    def _swept(self, checkpoint: Files, batch: int | None) -> list[StoredFile]:
        """What lies where Spark has written it, and neither Spark will want again nor a snapshot from this one on: each
        is told once, and never without the checkpoints that refer to it.

        It may fail, and is then done another time: the snapshot is taken.
        """
        if batch is None or not self._in_place or batch - self._swept_at < _SWEPT_EVERY:
            return []
        self._swept_at = batch
        try:
            names = checkpoint.list("state", but=(_SST_FOLDER, _LOG_FOLDER))
            stale = stale_state(names, batch + 1, self._lists.files, partial(self._shared_by, checkpoint))
        except (StoreUnavailable, DamagedCheckpoint, OSError) as error:
            _log.debug("stage %s: what Spark has no use for any more is looked for later: %s", self._stage, error)
            return []
        self._shares = {name: self._shares[name] for name in names if name in self._shares}
        lies_at = [self._root.hold(name, checkpoint, name) for name in stale]  # their names in the root: they lie there
        unwanted = [self._in_place.get(stored) or StoredFile(stored, self._generation) for stored in lies_at]
        unwanted += self._parted_elsewhere(checkpoint)
        found = [file for file in unwanted if file.path not in self._told]
        self._told.update(file.path for file in found)
        return found

    def _parted_elsewhere(self, checkpoint: Files) -> Iterator[StoredFile]:
        """What no snapshot refers to any more, and lies in the folder of an attempt before: Spark is not there."""
        here = f"{self._root.name_at(checkpoint.location())}/"
        for file in tuple(self._in_place.values()):
            if file.before is not None and not file.path.startswith(here):
                yield file

    def _shared_by(self, checkpoint: Files, snapshot: str) -> list[str]:
        if snapshot not in self._shares:
            self._shares[snapshot] = _shared_files(checkpoint, snapshot)
        return self._shares[snapshot]

    def _look(self, checkpoint: Files, batch: int | None) -> tuple[_Found, Iterable[str], Iterable[str]]:
        """What is in Spark's folder, which names are new since the last snapshot, and which are gone.

        Where no batch was run since, nothing is: what Spark's maintenance has stored meanwhile need not be used.
        """
        before = self._found
        if before is not None and batch is not None and self._found_at == (checkpoint.location(), batch):
            return before, (), ()
        names = _unshared_files_at(checkpoint, batch, reads_gates=self._reads_gates, committed=self._committed)
        self._committed = _committed_among(checkpoint, names, self._committed)
        found = _Found(names, before, partial(_shared_files, checkpoint))
        if before is not None:
            return found, *found.changes(before)
        every = found.names | found.in_stores()
        return found, every, [name for name in self._lists.files if name not in every]

    def _stored_anew(
        self, files: Collection[SnapshotFile], checkpoint: Files, checkpoint_id: int
    ) -> dict[str, SnapshotFile]:
        """Copies of all files, by names that no link has."""
        names = {
            file.name: RootPaths.full_snapshot_file(self._generation, self._stage, checkpoint_id, file.name)
            for file in files
        }
        self._begun.update(dict.fromkeys(names.values()))

        def copy(file: SnapshotFile) -> SnapshotFile:
            return self._copy(file, checkpoint, names[file.name])

        try:
            return {file.name: file for file in side_by_side(checkpoint, copy, files)}
        except (StoreUnavailable, DamagedCheckpoint):
            with suppress(StoreUnavailable):
                self._root.delete(names.values())  # they would fill the disk until the next snapshot that succeeds
            raise

    def _copy(self, file: SnapshotFile, checkpoint: Files, target: str) -> SnapshotFile:
        """Of Spark's own file, or of what was kept of it: the first that is what it was when it was first looked at.

        The two are mostly one file by two names. Spark may have deleted its own by now; and one that names paths was
        rewritten when the stage was restored. One that is known by its ETag nobody has read, nor is its copy, which may
        have another: a bucket need not make it of the content alone.
        """
        describe = self._root.described if file.sha256.startswith(ETAG) else partial(checksum, self._root)
        for files, name in ((checkpoint, file.name), (self._root, file.stored)):
            try:
                self._root.copy(target, files, name)
            except StoreUnavailable:
                if files.exists(name):
                    raise
            else:
                found = describe(target)
                if found is not None and is_same(found, file.size_bytes, file.sha256):
                    return SnapshotFile(file.name, target, *found)
                self._root.delete([target])  # what is known of that name by now goes with it
        damage = "is not what it was: checksum differs" if self._root.exists(file.stored) else "is gone"
        raise DamagedCheckpoint(
            f"{file.stored} {damage}, and Spark's own file is no better, so no full snapshot can be taken of stage "
            f"{self._stage!r}; `tidegate verify` tells which checkpoints are damaged"
        )

    def rebuild(self, old: Files, new: Files, batch: int) -> None:
        """Build Spark's folder for the next attempt of the stage, as of a batch that the last one has committed."""
        names = files_at(old, batch, reads_gates=self._reads_gates, committed=self._committed)

        def restore(name: str) -> None:
            _restore_file(name, old, name, new)

        for _ in side_by_side(new, restore, dict.fromkeys(names)):
            pass

    def _described(self, name: str, stored: str) -> SnapshotFile:
        found = self._root.described(stored)
        if found is None:
            raise DamagedCheckpoint(f"{stored} is gone, though it was kept a moment ago; nothing else may delete there")
        return SnapshotFile(name, stored, *found)


def kept_until(checkpoint_id: int, stored: str) -> StoredFile:
    """A file that the snapshot for this checkpoint, and later ones, no longer refer to."""
    return StoredFile(stored, RootPaths.generation_of(stored), RootPaths.kept_for(stored) or 0, checkpoint_id)


def restore_checkpoint(root: Files, files: Iterable[SnapshotFile], checkpoint: Files) -> None:
    """Build Spark's checkpoint folder from a snapshot."""

    def restore(file: SnapshotFile) -> None:
        _restore_file(file.name, root, file.stored, checkpoint)

    for _ in side_by_side(checkpoint, restore, files):
        pass


def _restore_file(name: str, source: Files, source_name: str, checkpoint: Files) -> None:
    if _OPERATOR_METADATA.fullmatch(name) is None:
        checkpoint.keep(name, source, source_name)
        return
    # These name their schema files by absolute paths, which lie in the folder of an older generation or attempt, or of
    # an older name of the stage.
    data = source.read(source_name)
    if data is None:
        raise DamagedCheckpoint(f"{source.location(source_name)} is gone")
    here = for_spark(checkpoint)
    checkpoint.write(name, _OLDER_PLACE.sub(lambda _: here, data.decode()).encode())


# -- where a source first stood -------------------------------------------------------------------
#
# Spark notes that before the first batch, as entry 0 of the source's log. Kafka's "latest" was somewhere then. From the
# first checkpoint on that finds it, it is part of the snapshot; before, it is looked for in the generations before. A
# source of files has noted the files of its first batch there: it looks for them again, as if new.


class FirstPosition(msgspec.Struct, frozen=True):
    """Where a source stood before its first batch: entry 0 of its logs, by names in the root, and what it read."""

    files: tuple[str, ...]
    streams: tuple[SourceStream, ...]


def first_position(root: Files, generation: int, stage: str) -> FirstPosition | None:
    """Where a source that no checkpoint knows a position of first stood, in a generation before this one.

    Nothing was forced of it: what a loss of power has torn is passed over, as if it had not been noted.
    """
    for older in range(generation - 1, 0, -1):
        # Each attempt has it from the one before, which may be gone by now.
        if noted := {name.split("/")[-2]: name for name in _first_entries_of(root, older, stage)}:
            streams = _noted_streams(root, older, stage)
            if streams is None or any(_is_torn(root, name) for name in noted.values()):
                _log.warning("where source %s first stood is torn, as a loss of power leaves it: passed over", stage)
                continue
            files = tuple(name for name in noted.values() if not is_of_files(root, name))
            return FirstPosition(files, streams) if files else None
    return None


def keep_first_position(root: Files, generation: int, stage: str) -> None:
    """Make a source that no checkpoint knows a position of start where it first stood, not where its stream is now.

    What it reads was found to be what it read then.
    """
    first = first_position(root, generation, stage)
    checkpoint = RootPaths.spark_checkpoint(generation, stage)
    for name in () if first is None else first.files:
        log = name.split("/")[-2]
        root.keep(f"{checkpoint}/sources/{log}/0", root, name)


def note_streams(root: Files, generation: int, stage: str, streams: tuple[SourceStream, ...]) -> None:
    """What a source reads in this generation: a later one compares, if it goes by where the source first stood."""
    root.at("", durable=False).write(RootPaths.source_streams(generation, stage), msgspec.json.encode(streams))


def _noted_streams(root: Files, generation: int, stage: str) -> tuple[SourceStream, ...] | None:
    """None: the note is gone or torn."""
    try:
        return _streams_decoder.decode(root.read(RootPaths.source_streams(generation, stage)) or b"")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _is_torn(root: Files, name: str) -> bool:
    """Whether an entry, which ends with a line of JSON, is gone or cut off."""
    lines = (root.read(name) or b"").splitlines()
    try:
        msgspec.json.decode(lines[-1] if lines else b"")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return True
    return False


def _first_entries_of(root: Files, generation: int, stage: str) -> list[str]:
    """Entry 0 of each source log of each attempt, by names in the root."""
    folder = RootPaths.stage(generation, stage)
    attempts = [f"{folder}/{name}" for name in root.names_in(folder) if name.startswith("spark")]
    return [f"{attempt}/{name}" for attempt in attempts for name in _first_entries(root.at(attempt))]


def _first_entries(checkpoint: Files) -> list[str]:
    """Entry 0 of each source log of a query."""
    entries = [f"sources/{log}/0" for log in checkpoint.names_in("sources")]
    return [name for name in entries if checkpoint.exists(name)]
