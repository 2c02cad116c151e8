"""The state of a played query: a count per path, in files as Spark's RocksDB provider lays them.

Per partition: a change log for each version, which says of which versions it goes on; now and then a full snapshot,
which Spark's maintenance stores: a `zip` whose metadata names the `SSTs` that it shares with those before. A version is
loaded from these files and nothing else, so that a restore that lacks one, or has another's, shows.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Final

import msgspec

from tidegate.storage.files import Files

DELTAS_FOR_SNAPSHOT: Final = 10
"""`spark.sql.streaming.stateStore.minDeltasForSnapshot`"""
_EXTRA: Final = 0.3
_MOST_SSTS: Final = 3
_VERSIONED: Final = re.compile(r"(\d+)_[0-9a-f-]+\.(zip|changelog)")
_EPOCH: Final = (2026, 1, 1, 0, 0, 0)


class PlayedFailure(Exception):
    """What fails a played query, as Spark would say it."""


class Count(msgspec.Struct, array_like=True):
    """Of one path: the rows that were consumed, those of them that were handed on, and the watermark of the batch that
    consumed the last."""

    seen: int = 0
    emitted: int = 0
    since: int = 0


Counts = dict[int, Count]


class _Ancestor(msgspec.Struct, frozen=True, rename="camel"):
    version: int
    checkpoint_unique_id: str


class _SstFile(msgspec.Struct, frozen=True, rename="camel"):
    local_file_name: str
    dfs_sst_file_name: str
    size_bytes: int

    @property
    def name(self) -> str:
        return f"SSTs/{self.dfs_sst_file_name}"


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    sst_files: list[_SstFile]
    num_keys: int = 0
    num_internal_keys: int = 0
    column_family_mapping: dict[str, int] = {}
    column_family_type_map: dict[str, int] = {}
    max_column_family_id: int = 0


class _Snapshot(msgspec.Struct, frozen=True):
    """A full one that was made and is not stored yet."""

    version: int
    unique: str
    counts: Counts


_lineage_decoder: Final = msgspec.json.Decoder(list[_Ancestor])
_counts_decoder: Final = msgspec.json.Decoder(Counts)
_metadata_decoder: Final = msgspec.json.Decoder(_Metadata)


class PlayedStore:
    """The state of one partition, in the memory of a process."""

    def __init__(
        self,
        files: Files,
        new_id: Callable[[], str],
        write: Callable[[Files, str, bytes], None],
        delete: Callable[[Files, str], None],
    ) -> None:
        """`files`: of the folder of the partition. `write`, `delete`: how Spark's process does so in a folder."""
        self._files = files
        self._new_id = new_id
        self._write = write
        self._delete = delete
        self._reset()

    def _reset(self) -> None:
        self.counts: Counts = {}
        self.version = 0
        self._lineage: list[_Ancestor] = []
        self._snapshot_at = 0
        self._made: _Snapshot | None = None
        self._made_in_vain: list[_Snapshot] = []
        self._stored: dict[str, _SstFile] = {}
        self._stored_counts: Counts = {}
        self._next_sst = 8
        self._oldest = 0

    # -- a version --------------------------------------------------------------------------------

    def load(self, version: int, unique: str | None) -> None:
        """Take up a version from its files. That of before the first batch is empty."""
        self._reset()
        if version == 0:
            return
        assert unique is not None
        newest = _Ancestor(version, unique)
        ancestors = [*self._lineage_of(newest), newest]
        changes = list(ancestors)
        while changes and not self._load_snapshot(changes[-1]):
            changes.pop()
        if not changes and ancestors[0].version != 1:
            raise PlayedFailure(f"{self._files.location()}: no full snapshot to load version {version} from")
        for each in ancestors[len(changes) :]:
            self.counts.update(self._changes_of(each))
        self.version, self._lineage = version, ancestors

    def _lineage_of(self, newest: _Ancestor) -> list[_Ancestor]:
        data = self._files.read(_changelog(newest))
        if data is None and self._files.exists(_zip(newest)):
            return []
        return _lineage_decoder.decode(self._lines_of(newest)[1])

    def _changes_of(self, ancestor: _Ancestor) -> Counts:
        return _counts_decoder.decode(self._lines_of(ancestor)[2])

    def _lines_of(self, ancestor: _Ancestor) -> list[bytes]:
        data = self._files.read(_changelog(ancestor))
        if data is None:
            raise PlayedFailure(f"{self._files.location(_changelog(ancestor))} does not exist")
        return data.split(b"\n")

    def _load_snapshot(self, ancestor: _Ancestor) -> bool:
        if not self._files.exists(_zip(ancestor)):
            return False
        for sst in self._metadata_of(_zip(ancestor)).sst_files:
            content = self._files.read(sst.name)
            if content is None:
                raise PlayedFailure(f"{self._files.location(sst.name)} does not exist")
            self.counts.update(_counts_decoder.decode(content))
            self._stored[sst.name] = sst
            self._next_sst = max(self._next_sst, int(sst.local_file_name[:6]) + 1)
        self._stored_counts = dict(self.counts)
        self._snapshot_at = ancestor.version
        return True

    def _metadata_of(self, snapshot: str) -> _Metadata:
        data = self._files.read(snapshot)
        if data is None:
            raise PlayedFailure(f"{self._files.location(snapshot)} does not exist")
        with zipfile.ZipFile(BytesIO(data)) as zipped:
            return _metadata_decoder.decode(zipped.read("metadata").split(b"\n", 1)[1])

    def commit(self, changed: Counts) -> str:
        """Write the next version, with these counts in place of those before. Returns its unique id.

        It is one try of a task, of which `keep` or `give_up` says what became.
        """
        unique = self._new_id()
        lineage = msgspec.json.encode(self._lineage)
        data = b"\n".join((b"v3", lineage, msgspec.json.encode(changed)))
        self._write(self._files, _changelog(_Ancestor(self.version + 1, unique)), data)
        return unique

    def keep(self, changed: Counts, unique: str) -> None:
        """The try counts."""
        self.counts = {**self.counts, **changed}
        self.version += 1
        self._lineage = [*self._lineage, _Ancestor(self.version, unique)]
        if self.version - self._snapshot_at >= DELTAS_FOR_SNAPSHOT:
            self._snapshot_at = self.version
            self._made = _Snapshot(self.version, unique, self.counts)

    def give_up(self, changed: Counts, unique: str) -> None:
        """The try was in vain. What it was run by, an executor on a cluster, stores its full snapshot nevertheless."""
        version = self.version + 1
        if version - self._snapshot_at >= DELTAS_FOR_SNAPSHOT:
            self._made_in_vain.append(_Snapshot(version, unique, {**self.counts, **changed}))

    # -- maintenance ------------------------------------------------------------------------------

    def upload(self) -> Iterator[str]:
        """Store a full snapshot, if one was made. Yields the name of each file, when it is there."""
        while self._made_in_vain:
            made = self._made_in_vain.pop()
            sst = self._sst_of(made.counts)
            yield sst.name
            yield self._zip_up(made, [sst])
        if self._made is not None:
            made, self._made = self._made, None
            yield from self._store(made)
            self._lineage = [each for each in self._lineage if each.version >= made.version]

    def clean_up(self, retained: int) -> Iterator[str]:
        """Delete what is no longer needed to load one of the last versions. Yields the name of each file.

        Not before it is worth it: `spark.sql.streaming.ratioExtraSpaceAllowedInCheckpoint`.
        """
        if self.version - self._oldest < retained + int(_EXTRA * retained):
            return
        found = [match for name in self._files.names_in() if (match := _VERSIONED.fullmatch(name))]
        full = sorted(int(match[1]) for match in found if match[2] == "zip")
        oldest = max((each for each in full if each <= full[-1] - retained + 1), default=0)
        for match in found:
            if int(match[1]) < oldest:
                self._delete(self._files, match[0])
                yield match[0]
        if oldest:
            self._oldest = oldest
            yield from self._delete_unshared(
                [match[0] for match in found if match[2] == "zip" and int(match[1]) >= oldest]
            )

    def _delete_unshared(self, snapshots: Iterable[str]) -> Iterator[str]:
        """SSTs that no full snapshot names any more, but for those of one that is being stored."""
        named = {sst.name for name in snapshots for sst in self._metadata_of(name).sst_files}
        for last in self._files.names_in("SSTs"):
            name = f"SSTs/{last}"
            if name.endswith(".sst") and name not in named and name not in self._stored:
                self._delete(self._files, name)
                yield name

    def _store(self, made: _Snapshot) -> Iterator[str]:
        is_merged = len(self._stored) >= _MOST_SSTS  # as RocksDB does, now and then
        before = {} if is_merged else self._stored_counts
        changed = {path: count for path, count in made.counts.items() if before.get(path) != count}
        if is_merged:
            self._stored = {}
        if changed:
            sst = self._sst_of(changed)
            self._stored[sst.name] = sst
            yield sst.name
        self._stored_counts = made.counts
        yield self._zip_up(made, self._stored.values())

    def _sst_of(self, counts: Counts) -> _SstFile:
        local = f"{self._next_sst:06d}"
        self._next_sst += 1
        content = msgspec.json.encode(counts)
        sst = _SstFile(f"{local}.sst", f"{local}-{self._new_id()}.sst", len(content))
        self._write(self._files, sst.name, content)
        return sst

    def _zip_up(self, made: _Snapshot, ssts: Iterable[_SstFile]) -> str:
        name = _zip(_Ancestor(made.version, made.unique))
        self._write(self._files, name, _zipped(_Metadata(list(ssts), len(made.counts))))
        return name


def _changelog(ancestor: _Ancestor) -> str:
    return f"{ancestor.version}_{ancestor.checkpoint_unique_id}.changelog"


def _zip(ancestor: _Ancestor) -> str:
    return f"{ancestor.version}_{ancestor.checkpoint_unique_id}.zip"


def _zipped(metadata: _Metadata) -> bytes:
    written = BytesIO()
    with zipfile.ZipFile(written, "w") as zipped:
        zipped.writestr(zipfile.ZipInfo("metadata", _EPOCH), b"v1\n" + msgspec.json.encode(metadata))
    return written.getvalue()
