"""Carrying a checkpoint from one place to another: out of a root into a savepoint, from there into a root, or from one
root into another.

What is carried refers to nothing but itself: every file of its snapshots and every one in flight is copied, and is
compared with what is known of it. What tables show by then is theirs: a checkpoint is carried only when they show all
that it has sealed, so nothing that is staged is needed any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

import msgspec

from tidegate.errors import DamagedCheckpoint, InvariantViolation, StoreUnavailable
from tidegate.protocol.messages import Flag, Segment, SegmentFile
from tidegate.storage.file_lists import FileLists, SnapshotFile, SnapshotFiles, files_of
from tidegate.storage.files import AtHand, Files, checksum, is_same
from tidegate.storage.manifest import FORMAT, Manifest, Origin, TableAddress, with_tables
from tidegate.storage.paths import RootPaths


class Numbers(msgspec.Struct, frozen=True):
    """By which a checkpoint is known."""

    generation: int
    checkpoint_id: int
    epoch: int


class _Copy(msgspec.Struct, frozen=True):
    """One file that is carried. `what`: how people are told of it. `digest`: empty, if nobody knows it."""

    what: str
    source: str
    stored: str
    size_bytes: int
    digest: str


class Carrying:
    """Of one checkpoint, into another place."""

    def __init__(self, source: Files, target: Files, manifest: Manifest, *, links: bool = False) -> None:
        """`links`: within one root a second name is as good as a copy."""
        self._source = source
        self._target = target
        self._manifest = manifest
        self._links = links
        self._sha256: dict[str, str] = {}
        """Of what has arrived, by where it is stored."""
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
        manifest = self._manifest
        snapshots = {name: files_of(self._source, name, stage.files) for name, stage in manifest.stages.items()}
        self._copy_all(self._copies(snapshots, to))
        stages = {
            name: msgspec.structs.replace(
                stage,
                files=self._snapshot(name, snapshots[name], to),
                in_flight={each: self._segments(segments, to) for each, segments in stage.in_flight.items()},
                committable=sealed.get(name),
            )
            for name, stage in manifest.stages.items()
        }
        self._target.sync(self._sha256)
        return msgspec.structs.replace(
            with_tables(manifest, tables),
            format=FORMAT,
            generation=to.generation,
            checkpoint_id=to.checkpoint_id,
            epoch=to.epoch,
            flags=manifest.flags if self._links else manifest.flags | Flag.FULL_SNAPSHOT,
            stages=stages,
            origin=origin,
        )

    # -- what is copied ---------------------------------------------------------------------------

    def _copies(self, snapshots: Mapping[str, Collection[SnapshotFile]], to: Numbers) -> Iterator[_Copy]:
        for name, stage in self._manifest.stages.items():
            for file in snapshots[name]:
                what = f"{file.stored} of stage {name!r}"
                yield _Copy(what, file.stored, _stored(name, file, to), file.size_bytes, file.sha256)
            for segment in (segment for segments in stage.in_flight.values() for segment in segments):
                for each in segment.files:
                    what = f"{each.path}, in flight,"
                    yield _Copy(what, each.path, _stored_in_flight(each, to), each.size_bytes, each.sha256)

    def _copy_all(self, copies: Iterable[_Copy]) -> None:
        wanted: dict[str, _Copy] = {}
        for each in copies:  # what is in flight to two stages is named by both
            if (known := wanted.setdefault(each.stored, each)).source != each.source:
                raise InvariantViolation(f"{known.source} and {each.source} cannot both be carried to {each.stored}")
        side_by_side(
            ((each.size_bytes, partial(self._copy, each)) for each in wanted.values()), self._source, self._target
        )
        self.size_bytes = sum(each.size_bytes for each in wanted.values())

    def _copy(self, each: _Copy) -> None:
        give = self._target.keep if self._links else self._target.copy
        try:
            give(each.stored, self._source, each.source)
        except StoreUnavailable as error:
            if self._source.size(each.source) is None:
                raise DamagedCheckpoint(f"{each.what} is gone") from error
            raise
        found = checksum(self._target, each.stored)
        if found is None or not is_same(found, each.size_bytes, each.digest or found[1]):
            raise DamagedCheckpoint(f"{each.what} is not what it was: {'checksum' if found else 'size'} differs")
        self._sha256[each.stored] = found[1]

    # -- what the manifest says of it -------------------------------------------------------------

    def _snapshot(self, stage: str, snapshot: Collection[SnapshotFile], to: Numbers) -> SnapshotFiles:
        carried: dict[str, SnapshotFile] = {}
        for file in snapshot:
            stored = _stored(stage, file, to)
            carried[file.name] = msgspec.structs.replace(file, stored=stored, sha256=self._sha256[stored])
        files, _ = FileLists(self._target, to.generation, stage, SnapshotFiles()).replace(to.checkpoint_id, carried)
        return files

    def _segments(self, segments: tuple[Segment, ...], to: Numbers) -> tuple[Segment, ...]:
        return tuple(
            msgspec.structs.replace(segment, files=tuple(self._in_flight(each, to) for each in segment.files))
            for segment in segments
        )

    def _in_flight(self, file: SegmentFile, to: Numbers) -> SegmentFile:
        stored = _stored_in_flight(file, to)
        return msgspec.structs.replace(file, path=stored, sha256=self._sha256[stored])


def _stored(stage: str, file: SnapshotFile, to: Numbers) -> str:
    return RootPaths.snapshot_file(to.generation, stage, to.checkpoint_id, file.name)


def _stored_in_flight(file: SegmentFile, to: Numbers) -> str:
    return RootPaths.carried_in_flight(to.generation, to.checkpoint_id, file.path)


def side_by_side(calls: Iterable[tuple[int, Callable[[], None]]], *places: Files) -> None:
    """Make each call, with how many bytes it moves; many at once where one of the places takes requests for each."""
    if all(isinstance(place, AtHand) for place in places):
        for _, call in calls:
            call()
        return
    from tidegate.storage import transfer  # who has no bucket need not have what it takes

    transfer.side_by_side(calls)
