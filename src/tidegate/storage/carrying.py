"""Carrying a checkpoint from one place to another: out of a root into a savepoint, from there into a root, or from one
root into another.

What is carried refers to nothing but itself: every file of its snapshots and every one in flight is copied, and is
compared with what is known of it. What tables show by then is theirs: a checkpoint is carried only when they show all
that it has sealed, so nothing that is staged is needed any more.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidegate.errors import DamagedCheckpoint, InvariantViolation
from tidegate.protocol.messages import Flag, Segment, SegmentFile
from tidegate.storage.file_lists import FileLists, SnapshotFile, SnapshotFiles, files_of
from tidegate.storage.files import Files, checksum, is_same
from tidegate.storage.manifest import FORMAT, Manifest, Origin, StageSnapshot, TableAddress, with_tables
from tidegate.storage.paths import RootPaths


class Numbers(msgspec.Struct, frozen=True):
    """By which a checkpoint is known."""

    generation: int
    checkpoint_id: int
    epoch: int


class Carrying:
    """Of one checkpoint, into another place."""

    def __init__(self, source: Files, target: Files, manifest: Manifest, *, links: bool = False) -> None:
        """`links`: within one root a second name is as good as a copy."""
        self._source = source
        self._target = target
        self._manifest = manifest
        self._links = links
        self._carried: dict[str, tuple[str, str]] = {}
        self.size_bytes = 0

    def carry(
        self,
        to: Numbers,
        sealed: Mapping[str, str],
        tables: Mapping[str, TableAddress],
        origin: Origin | None,
    ) -> Manifest:
        """All files, durably. Returns the manifest of what was carried, which is yet to be written.

        `sealed`: what each sink has sealed, as it is when its table shows that. `tables`: where those of sinks are now.
        """
        stages = {
            name: msgspec.structs.replace(
                stage,
                files=self._snapshot(name, stage, to),
                in_flight={each: self._segments(segments, to) for each, segments in stage.in_flight.items()},
                committable=sealed.get(name),
            )
            for name, stage in self._manifest.stages.items()
        }
        self._target.sync(self._carried)
        return msgspec.structs.replace(
            with_tables(self._manifest, tables),
            format=FORMAT,
            generation=to.generation,
            checkpoint_id=to.checkpoint_id,
            epoch=to.epoch,
            flags=self._manifest.flags if self._links else self._manifest.flags | Flag.FULL_SNAPSHOT,
            stages=stages,
            origin=origin,
        )

    def _snapshot(self, stage: str, snapshot: StageSnapshot, to: Numbers) -> SnapshotFiles:
        carried: dict[str, SnapshotFile] = {}
        for file in files_of(self._source, stage, snapshot.files):
            stored = RootPaths.snapshot_file(to.generation, stage, to.checkpoint_id, file.name)
            what = f"{file.stored} of stage {stage!r}"
            sha256 = self._copy(what, stored, file.stored, file.size_bytes, file.sha256)
            carried[file.name] = msgspec.structs.replace(file, stored=stored, sha256=sha256)
        files, _ = FileLists(self._target, to.generation, stage, SnapshotFiles()).replace(to.checkpoint_id, carried)
        return files

    def _segments(self, segments: tuple[Segment, ...], to: Numbers) -> tuple[Segment, ...]:
        return tuple(
            msgspec.structs.replace(
                segment,
                files=tuple(self._in_flight(each, to) for each in segment.files),
            )
            for segment in segments
        )

    def _in_flight(self, file: SegmentFile, to: Numbers) -> SegmentFile:
        stored = RootPaths.carried_in_flight(to.generation, to.checkpoint_id, file.path)
        sha256 = self._copy(f"{file.path}, in flight,", stored, file.path, file.size_bytes, file.sha256)
        return msgspec.structs.replace(file, path=stored, sha256=sha256)

    def _copy(self, what: str, stored: str, source: str, size_bytes: int, digest: str) -> str:
        """Returns the SHA-256 of what has arrived."""
        if (known := self._carried.get(stored)) is not None:
            if known[0] != source:
                raise InvariantViolation(f"{known[0]} and {source} cannot both be carried to {stored}")
            return known[1]
        if self._source.size(source) is None:
            raise DamagedCheckpoint(f"{what} is gone")
        if self._links:
            self._target.keep(stored, self._source, source)
        else:
            self._target.copy(stored, self._source, source)
        self.size_bytes += size_bytes
        found = checksum(self._target, stored)
        if found is None or not is_same(found, size_bytes, digest or found[1]):
            raise DamagedCheckpoint(f"{what} is not what it was: {'checksum' if found else 'size'} differs")
        self._carried[stored] = (source, found[1])
        return found[1]
