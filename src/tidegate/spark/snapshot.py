"""Snapshots: which files of Spark's checkpoint folder rebuild a stage at a batch, kept by hard links.

Files of the batch log and of the state are immutable (Spark writes them whole and renames), so a link is a copy.
Only files that the last snapshot of the stage did not hold are linked and read (for their checksum).

To rebuild the state as of batch N (state version N + 1), per state store: the newest full snapshot (`zip`) not
above that version, the SST files that it lists, and the change logs from there on. With format v2 a file's name
carries a unique id; where a version has several (a task was retried), all are kept. A full snapshot of a task that
was tried in vain is never loaded: only one that the commit log of its batch names is built upon. Where that entry is
gone before anybody looked, those before it are kept as well.

A full snapshot refers to no file of another checkpoint, nor shares one with Spark: each is copied, and is compared with
what was known of it. So it vouches for nothing that was damaged since.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from tidegate.errors import DamagedCheckpoint, RecoveryRefused
from tidegate.spark.filelog import is_of_files, log_offset, read_offsets
from tidegate.storage.folder import link
from tidegate.storage.local import checksum, copy_anew, write_whole
from tidegate.storage.manifest import SnapshotFile, SourceStream
from tidegate.storage.paths import RootPaths

_STATE_FILE: Final = re.compile(r"(\d+)(?:_([0-9a-f-]+))?\.(zip|changelog|delta|snapshot)")
_FULL: Final = ("zip", "snapshot")
_SST_FOLDER: Final = "SSTs"
_LOG_FOLDER: Final = "logs"
_OPERATOR_METADATA: Final = re.compile(r"state/\d+/_metadata/v2/(\d+)")

_streams_decoder: Final = msgspec.json.Decoder(tuple[SourceStream, ...])


class _SstFile(msgspec.Struct, rename="camel"):
    dfs_sst_file_name: str


class _LogFile(msgspec.Struct, rename="camel"):
    dfs_log_file_name: str


class _ZipMetadata(msgspec.Struct, rename="camel"):
    """What a full snapshot of RocksDB says of the files that it shares with others."""

    sst_files: list[_SstFile]
    log_files: list[_LogFile] | None = None


def files_at(checkpoint: Path, batch: int, *, reads_gates: bool, committed: Collection[str] = ()) -> list[str]:
    """The files, relative to Spark's checkpoint folder, that a stage resumes from after `batch`.

    `committed`: full snapshots that were found to be of a commit before its entry was deleted.
    """
    found = [f"{log}/{number}" for log in ("offsets", "commits") for number in (batch - 1, batch)]
    names = ["metadata", *(name for name in found if (checkpoint / name).exists())]
    needed = {f"offsets/{batch}", f"commits/{batch}", f"offsets/{max(0, batch - 1)}"}
    if not needed <= set(names):
        raise DamagedCheckpoint(f"batch {batch} is no longer in {checkpoint}: it was snapshotted too late")
    if not reads_gates:
        names += _source_files(checkpoint, batch)
    names += _state_files(checkpoint, batch + 1, committed)
    return names


def _source_files(checkpoint: Path, batch: int) -> Iterator[str]:
    """Logs of the user's own sources, which may need all of them. Those of gates start anew at a restore.

    An entry too many does no harm: Spark then reads its files in the next batch. One too few would make it read
    files again. Which source a log is of cannot be told from the offsets, where equal sources stand side by side.
    """
    newest = _newest_offset(read_offsets(checkpoint, batch).sources)
    for path in sorted((checkpoint / "sources").rglob("*")):
        if not path.is_file() or path.name.startswith("."):
            continue
        number = path.name.removesuffix(".compact")
        if newest is None or not number.isdigit() or int(number) <= newest:
            yield path.relative_to(checkpoint).as_posix()


def _newest_offset(sources: tuple[str | None, ...]) -> int | None:
    """The last entry that any source log needs; None if there are sources of another kind than files."""
    try:
        return max((log_offset(source) for source in sources if source is not None), default=-1)
    except msgspec.MsgspecError:
        return None


def _state_files(checkpoint: Path, version: int, committed: Collection[str]) -> Iterator[str]:
    state = checkpoint / "state"
    if not state.is_dir():
        return
    for folder, _, names in os.walk(state):
        if Path(folder).name in (_SST_FOLDER, _LOG_FOLDER):
            continue  # named by the snapshots that need them
        visible = [name for name in names if not name.startswith(".")]
        versioned = [match for name in visible if (match := _STATE_FILE.fullmatch(name))]
        base = Path(folder)
        if versioned:
            yield from _store_files(checkpoint, base, versioned, version, committed)
        else:
            for name in visible:
                relative = (base / name).relative_to(checkpoint).as_posix()
                operator = _OPERATOR_METADATA.fullmatch(relative)
                if operator is None or int(operator[1]) < version:
                    yield relative


def _store_files(
    checkpoint: Path, store: Path, files: list[re.Match[str]], version: int, committed: Collection[str]
) -> Iterator[str]:
    folder = store.relative_to(checkpoint).as_posix()
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
        path = store / match[0]
        yield f"{folder}/{match[0]}"
        if match[3] == "zip":
            for shared in _shared_files(path):
                yield f"{folder}/{shared}"


def _is_of_the_commit(checkpoint: Path, full: re.Match[str]) -> bool | None:
    """Whether a full snapshot is of the task that was committed, not of one that was tried in vain.

    The commit log of its batch names the unique ids. None: it is gone, as for old batches and in a restored folder.
    """
    if full[2] is None:
        return True
    try:
        commit = (checkpoint / "commits" / str(int(full[1]) - 1)).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return "stateUniqueIds" not in commit or full[2] in commit


def _committed_among(checkpoint: Path, names: Iterable[str], known: Collection[str]) -> frozenset[str]:
    """The full snapshots among these files that are surely of a commit."""
    found = ((name, _STATE_FILE.fullmatch(name.rpartition("/")[2])) for name in names if name.startswith("state/"))
    return frozenset(
        name
        for name, match in found
        if match and match[3] in _FULL and (name in known or _is_of_the_commit(checkpoint, match))
    )


def _shared_files(snapshot: Path) -> list[str]:
    try:
        with zipfile.ZipFile(snapshot) as zipped:
            _version, text = zipped.read("metadata").split(b"\n", 1)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise DamagedCheckpoint(f"{snapshot}, a full snapshot of state, is damaged: {error}") from error
    metadata = msgspec.json.decode(text, type=_ZipMetadata)
    return [f"{_SST_FOLDER}/{file.dfs_sst_file_name}" for file in metadata.sst_files] + [
        f"{_LOG_FOLDER}/{file.dfs_log_file_name}" for file in metadata.log_files or ()
    ]


class Snapshotter:
    """Keeps the snapshots of one stage in one generation.

    Snapshots are taken on the stage's upload thread, forgotten on the control thread, and looked at (`in_use`) on the
    clean-up thread.
    """

    def __init__(
        self, paths: RootPaths, generation: int, stage: str, held: Mapping[str, SnapshotFile], *, reads_gates: bool
    ) -> None:
        """`held`: the files of the snapshot that the stage was restored from."""
        self._reads_gates = reads_gates
        self._paths = paths
        self._generation = generation
        self._stage = stage
        self._held = dict(held)
        self._committed: frozenset[str] = frozenset()
        self._taken: dict[int, frozenset[str]] = {}
        self._keeping: set[str] = set()

    @property
    def in_use(self) -> frozenset[str]:
        """Stored files that the next snapshot, or one of a checkpoint that is yet to be decided, refers to.

        Read it after listing the store, never before. What is being kept comes first here, because it moves to the
        others.
        """
        keeping = frozenset(tuple(self._keeping))
        taken = tuple(self._taken.values())
        return keeping.union(*taken, (file.stored for file in self._held.values()))

    def take(
        self, checkpoint: Path, checkpoint_id: int, batch: int, *, full: bool
    ) -> tuple[tuple[SnapshotFile, ...], int]:
        """Keep what rebuilds the stage at a batch. Returns the files, and the bytes that are new in the store.

        `checkpoint`: Spark's folder, of the attempt that ran the batch.
        """
        found = files_at(checkpoint, batch, reads_gates=self._reads_gates, committed=self._committed)
        names = dict.fromkeys(found)
        self._committed = _committed_among(checkpoint, names, self._committed)
        fresh = {
            name: self._paths.snapshot_file(self._generation, self._stage, name)
            for name in names
            if name not in self._held
        }
        self._keeping.update(fresh.values())
        # All links before any file is read, which takes time: Spark deletes what it no longer needs itself.
        for name, stored in fresh.items():
            link(checkpoint / name, self._paths.absolute(stored))
        files = {name: self._described(name, fresh[name]) if name in fresh else self._held[name] for name in names}
        new_bytes = sum(files[name].size_bytes for name in fresh)
        if full:
            files = self._stored_anew(files.values(), checkpoint, checkpoint_id)
            new_bytes = sum(file.size_bytes for file in files.values())
        self._taken[checkpoint_id] = frozenset(file.stored for file in files.values())
        self._held = files
        self._keeping.clear()  # only now: what a snapshot that failed has linked may be wanted by the next
        return tuple(files.values()), new_bytes

    def _stored_anew(
        self, files: Collection[SnapshotFile], checkpoint: Path, checkpoint_id: int
    ) -> dict[str, SnapshotFile]:
        """Copies of all files, by names that no other checkpoint uses: ids are never used twice."""
        names = {
            file.name: self._paths.full_snapshot_file(self._generation, self._stage, checkpoint_id, file.name)
            for file in files
        }
        self._keeping.update(names.values())
        try:
            for file in files:
                self._copy(file, checkpoint, self._paths.absolute(names[file.name]))
        except (OSError, DamagedCheckpoint):
            for stored in names.values():  # they would fill the disk until the next snapshot that succeeds
                self._paths.absolute(stored).unlink(missing_ok=True)
            self._keeping.difference_update(names.values())
            raise
        return {file.name: msgspec.structs.replace(file, stored=names[file.name]) for file in files}

    def _copy(self, file: SnapshotFile, checkpoint: Path, target: Path) -> None:
        """Spark's own file, or what was kept of it: the first that is what it was when it was first looked at.

        The two are mostly one file by two names. Spark may have deleted its own by now; and one that names paths was
        rewritten when the stage was restored.
        """
        stored = self._paths.absolute(file.stored)
        for source in (checkpoint / file.name, stored):
            with suppress(FileNotFoundError):
                if copy_anew(source, target) == (file.size_bytes, file.sha256):
                    return
        damage = "is not what it was: checksum differs" if stored.exists() else "is gone"
        raise DamagedCheckpoint(
            f"{file.stored} {damage}, and Spark's own file is no better, so no full snapshot can be taken of stage "
            f"{self._stage!r}; `tidegate verify` tells which checkpoints are damaged"
        )

    def rebuild(self, old: Path, new: Path, batch: int) -> None:
        """Build Spark's folder for the next attempt of the stage, as of a batch that the last one has committed."""
        names = files_at(old, batch, reads_gates=self._reads_gates, committed=self._committed)
        for name in dict.fromkeys(names):
            _restore_file(name, old / name, new, self._stage)

    def forget(self, through_checkpoint: int) -> None:
        """Checkpoints up to this one are decided, so what is needed of them is known elsewhere; or given up."""
        for checkpoint_id in tuple(self._taken):
            if checkpoint_id <= through_checkpoint:
                del self._taken[checkpoint_id]

    def _described(self, name: str, stored: str) -> SnapshotFile:
        size_bytes, sha256 = checksum(self._paths.absolute(stored))
        return SnapshotFile(name, stored, size_bytes, sha256)


def restore_checkpoint(paths: RootPaths, files: tuple[SnapshotFile, ...], checkpoint: Path, stage: str) -> None:
    """Build Spark's checkpoint folder from a snapshot."""
    for file in files:
        _restore_file(file.name, paths.absolute(file.stored), checkpoint, stage)


def _restore_file(name: str, source: Path, checkpoint: Path, stage: str) -> None:
    target = checkpoint / name
    if _OPERATOR_METADATA.fullmatch(name):
        # These name their schema files by absolute paths, which lie in the folder of an older generation or attempt.
        text = source.read_text(encoding="utf-8")
        old = re.compile(rf'[^"]*?/generations/\d+/stages/{re.escape(stage)}/spark(-\d+)?(?=/)')
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, old.sub(checkpoint.as_posix(), text).encode())
    else:
        link(source, target)


class FirstPosition(msgspec.Struct, frozen=True):
    """Where a source stood before its first batch: entry 0 of its logs, and what it read."""

    files: tuple[Path, ...]
    streams: tuple[SourceStream, ...]


def first_position(paths: RootPaths, generation: int, stage: str) -> FirstPosition | None:
    """Where a source that no checkpoint has seen a batch of first stood, in a generation before this one.

    Spark notes that before the first batch, as entry 0 of the source's log; the generation before has it, whatever else
    it did. A source of files has noted the files of its first batch there: it looks for them again, as if new.
    """
    for older in range(generation - 1, 0, -1):
        attempts = paths.absolute(paths.stage(older, stage)).glob("spark*/sources/*/0")
        # Each attempt has it from the one before, which may be gone by now.
        if noted := {path.parent.name: path for path in attempts if path.is_file()}:
            files = tuple(path for path in noted.values() if not is_of_files(path))
            return FirstPosition(files, _noted_streams(paths, older, stage)) if files else None
    return None


def _noted_streams(paths: RootPaths, generation: int, stage: str) -> tuple[SourceStream, ...]:
    note = paths.absolute(paths.source_streams(generation, stage))
    try:
        return _streams_decoder.decode(note.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise RecoveryRefused(
            f"what source {stage!r} read before any checkpoint of it cannot be told: {note} cannot be read ({error}). "
            f"What to do: start the pipeline on a new root; nothing was changed"
        ) from error


def keep_first_position(paths: RootPaths, generation: int, stage: str, streams: tuple[SourceStream, ...]) -> None:
    """Make a source that no checkpoint has seen a batch of start where it first stood, not where its stream is now.

    Kafka's "latest" is such a stream. `streams` is what the source reads: it was found to be what it read then.
    """
    note = paths.absolute(paths.source_streams(generation, stage))
    note.parent.mkdir(parents=True, exist_ok=True)
    write_whole(note, msgspec.json.encode(streams))
    first = first_position(paths, generation, stage)
    checkpoint = paths.absolute(paths.spark_checkpoint(generation, stage))
    for path in () if first is None else first.files:
        link(path, checkpoint / "sources" / path.parent.name / path.name)


def notes_of_first_position(paths: RootPaths, generation: int, stage: str) -> set[Path]:
    """What a later generation looks for to find where a source first stood in this one."""
    attempts = paths.absolute(paths.stage(generation, stage)).glob("spark*/sources/*/0")
    return {*attempts, paths.absolute(paths.source_streams(generation, stage))}
