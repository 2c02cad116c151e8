"""Looking at a root without touching it: whose it is, its decision log, its checkpoints and their files.

Nothing is claimed, created or locked, so it works beside a run that is alive, and on a root that one may only read.
What the run deletes meanwhile, by what its log retains, is not damage: `is_retained` tells the two apart, and
`InspectedRoot.manifest` asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress

import msgspec

from tidegate.errors import DamagedCheckpoint, DamagedLog, ForeignRoot, NoRoot, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import (
    Examine,
    Facts,
    FenceSinks,
    Refuse,
    Restore,
    SetTablesBack,
    SinkFacts,
    Start,
    in_words,
    recover,
)
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.file_lists import FileList, SnapshotFile, StoredList, all_files, files_of, read_list
from tidegate.storage.files import Files, claim, is_as_it_was
from tidegate.storage.manifest import Manifest, StageSnapshot, decode_manifest
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import RootGiven, as_given

_Referred = tuple[str, str, int, str | None]
"""A file for people, by its name in the root, with its size and, if that is known, its checksum."""


class RootOwner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pipeline whose root it is, and the id by which tables tell this root from others of the pipeline."""

    pipeline: str
    root_id: str


def owner_record(owner: RootOwner) -> bytes:
    return msgspec.json.encode(owner)


def read_owner(files: Files) -> RootOwner | None:
    """Whose root this is; None if it is nobody's."""
    data = files.read(RootPaths.PIPELINE)
    return None if data is None else _decode_owner(files, data)


def claim_root(files: Files, owner: RootOwner) -> RootOwner:
    """Make a root somebody's, unless it is. Returns whose it is: another run may have been first."""
    return _decode_owner(files, claim(files, RootPaths.PIPELINE, owner_record(owner)))


def _decode_owner(files: Files, data: bytes) -> RootOwner:
    try:
        return msgspec.json.decode(data, type=RootOwner)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ForeignRoot(
            f"{files.location(RootPaths.PIPELINE)} cannot be read, it is damaged or of another version of Tidegate: "
            f"{error}. What to do: restore it from a backup, or start the pipeline on a new root with new tables"
        ) from error


class CheckedFile(msgspec.Struct, frozen=True):
    """A file that a checkpoint refers to, as it was found."""

    path: str
    size_bytes: int
    damage: str | None


class SeenFiles:
    """What was found when several checkpoints were looked at: most of their files are the same. A file never changes,
    it is only deleted: so what was there is remembered, and what was not is asked for again."""

    def __init__(self) -> None:
        self.manifests: dict[str, bytes] = {}
        self.lists: dict[StoredList, FileList] = {}
        self.sizes: dict[str, int] = {}
        self.whole: set[tuple[str, int, str]] = set()
        """Those that were read, with their sizes and checksums."""

    def list_of(self, files: Files, each: StoredList, stage: str) -> FileList:
        if each not in self.lists:
            self.lists[each] = read_list(files, each, stage)
        return self.lists[each]

    def is_as_it_was(self, files: Files, name: str, size_bytes: int, sha256: str) -> bool:
        if (name, size_bytes, sha256) in self.whole:
            return True
        whole = is_as_it_was(files, name, size_bytes, sha256)
        if not whole and not (files.has_another(name) and is_as_it_was(files, name, size_bytes, sha256)):
            return False
        self.whole.add((name, size_bytes, sha256))
        return True


def check_files(
    files: Files,
    manifest: Manifest,
    *,
    reads: bool = True,
    but: Collection[str] = (),
    seen: SeenFiles | None = None,
) -> Iterator[CheckedFile]:
    """Check every file in the root that a checkpoint refers to, but for these, against what its manifest says of it.

    Files of snapshots and in flight are read against their checksums, unless `reads` says to leave it at their sizes.
    Of files in flight, manifests of before have the size only. What a sink has sealed is not looked at: it is removed
    once the table shows it, which only the table can tell. Lists are read in any case: of a stage with a damaged one
    nobody can tell what else belongs to it. `seen`: what was found before, which is not looked at again.
    """
    seen = SeenFiles() if seen is None else seen
    referred = list[_Referred]()
    for stage, snapshot in manifest.stages.items():
        lists = list[FileList]()
        for each in snapshot.files.lists:
            # One that need not be checked has to be read all the same: it tells of others.
            damage: str | None = None
            try:
                if files.strays([each.stored]):
                    raise DamagedCheckpoint(f"{each.stored} of stage {stage!r} is a link that leads elsewhere")
                lists.append(seen.list_of(files, each, stage))
            except DamagedCheckpoint as found:
                damage = str(found)
            yield CheckedFile(each.stored, each.size_bytes, damage)
        whole = all_files(lists, snapshot.files) if len(lists) == len(snapshot.files.lists) else {}
        referred += (each for each in _referred_to(stage, snapshot, whole.values()) if each[1] not in but)
    strays = files.strays(name for _, name, _, _ in referred)
    sizes = seen.sizes
    sizes.update(files.sizes([name for _, name, _, _ in referred if name not in sizes]))
    if reads:
        files.bring(name for _, name, size_bytes, _ in referred if sizes.get(name) == size_bytes)
    for what, name, size_bytes, sha256 in referred:
        damage = _damage_by_size(what, sizes.get(name), size_bytes)
        if name in strays:
            damage = f"{what} is a link that leads elsewhere"
        elif damage is None and sha256 is not None and reads and not seen.is_as_it_was(files, name, size_bytes, sha256):
            damage = f"{what} is not what it was: checksum differs"
        yield CheckedFile(name, size_bytes, damage)


def _damage_by_size(what: str, found: int | None, size_bytes: int) -> str | None:
    if found is None:
        return f"{what} is gone"
    return None if found == size_bytes else f"{what} is not what it was: size differs"


def _referred_to(stage: str, snapshot: StageSnapshot, files: Iterable[SnapshotFile]) -> Iterator[_Referred]:
    for file in files:
        yield f"{file.stored} of stage {stage!r}", file.stored, file.size_bytes, file.sha256
    for segments in snapshot.in_flight.values():
        for each in (each for segment in segments for each in segment.files):
            yield f"{each.path}, in flight to stage {stage!r},", each.path, each.size_bytes, each.sha256 or None


def references(files: Files, manifest: Manifest) -> frozenset[str]:
    """Every file in the root that a checkpoint needs, but for the manifest itself."""
    found: set[str] = set()
    for name, stage in manifest.stages.items():
        found.update(each.stored for each in stage.files.lists)
        found.update(file.stored for file in files_of(files, name, stage.files))
        found.update(stage.in_flight_files())
    return frozenset(found)


def read_manifest(files: Files, record: CheckpointCompleted) -> Manifest:
    if not RootPaths.is_inside(record.manifest):
        raise DamagedCheckpoint(
            f"the decision log names {record.manifest!r} as a manifest, which leads out of the root"
        )
    data = files.read(record.manifest)
    if data is None:
        raise DamagedCheckpoint(f"{record.manifest}, which {RootPaths.decision(record.slot)} names, is gone")
    return decode_manifest(data, record.manifest_sha256, record.manifest)


def retained_manifests(files: Files, log: DecisionLog) -> Iterator[Manifest]:
    """Of the checkpoints that the log retains, newest first, as far as they can be read."""
    for checkpoint_id in sorted(log.retained, reverse=True):
        record = log.completed(checkpoint_id)
        if record is not None:
            with suppress(DamagedCheckpoint):
                yield read_manifest(files, record)


def examine(files: Files, log: DecisionLog, checkpoint_id: int) -> Manifest:
    """Read a checkpoint's manifest, and check every file that it refers to. The first damage is raised."""
    record = log.completed(checkpoint_id)
    if record is None:
        raise DamagedCheckpoint(f"{checkpoint_name(checkpoint_id)} is not in the decision log")
    return look_through(files, record)


def look_through(files: Files, record: CheckpointCompleted) -> Manifest:
    manifest = read_manifest(files, record)
    for file in check_files(files, manifest):
        if file.damage is not None:
            raise DamagedCheckpoint(file.damage)
    return manifest


class SeenSinks(msgspec.Struct, frozen=True):
    """What the tables of a pipeline say of themselves. `unseen`: the sinks that only a run can ask."""

    facts: dict[str, SinkFacts]
    unseen: tuple[str, ...] = ()

    def fenced(self, generation: int) -> SeenSinks:
        """As they will be when a run has fenced them."""
        facts = {name: msgspec.structs.replace(each, fence=generation) for name, each in self.facts.items()}
        return SeenSinks(facts, self.unseen)


class Outlook(msgspec.Struct, frozen=True):
    """What the next run does, as far as it can be seen from outside. `health` is of the checkpoints that it depends on;
    `unseen` are the sinks whose tables it depends on and that were not asked; `read` are the checkpoints whose files
    were read, not only looked at."""

    start: Start
    health: dict[int, str | None]
    unseen: tuple[str, ...] = ()
    read: frozenset[int] = frozenset()

    @property
    def is_refused(self) -> bool:
        return isinstance(self.start, Refuse)

    @property
    def checkpoint(self) -> str | None:
        """The one that it goes on from."""
        match self.start:
            case Restore(checkpoint):
                return checkpoint_name(checkpoint.checkpoint_id)
            case SetTablesBack():
                return checkpoint_name(self.start.checkpoint_id)
            case _:
                return None

    def __str__(self) -> str:
        said = f"the next run {in_words(self.start, self.health)}"
        if not isinstance(self.start, Restore):
            return said
        if self.unseen:
            sinks = ", ".join(map(repr, self.unseen))
            said += f", if the table of {sinks} shows no rows past it, which is asked at its start; else it refuses"
        if self.start.checkpoint.checkpoint_id not in self.read:
            said += " (whose files are there, by their sizes; `tidegate verify` reads them)"
        return said


class InspectedRoot:
    """A root, seen from outside the run that may be alive on it."""

    def __init__(self, root: RootGiven) -> None:
        self.place = place = as_given(root)
        place.check_is_there()
        self.files = place.files
        owner = read_owner(self.files)
        if owner is None:
            raise NoRoot(
                f"{place} is not the root of a pipeline: it holds no {RootPaths.PIPELINE}; a root is what "
                f"`tidegate run` was given as --root"
            )
        self.pipeline = owner.pipeline
        self.id = owner.root_id
        self._decisions = StoredDecisions(self.files)
        self._seen: SeenFiles | None = None

    def look_ahead(self, records: Iterable[CheckpointCompleted]) -> None:
        """At checkpoints that are all to be looked at: their manifests are read side by side, and what they refer to is
        listed once for all of them. From now on what was found is not looked at again."""
        self._seen = seen = SeenFiles()
        wanted = list(records)
        inside = [each.manifest for each in wanted if RootPaths.is_inside(each.manifest)]
        seen.manifests.update(self.files.read_all(inside))
        names = set[str]()
        for record in wanted:
            with suppress(DamagedCheckpoint, UnknownCheckpoint):
                for snapshot in self.manifest(record).stages.values():
                    names.update(file.stored for file in snapshot.files.added)
                    names.update(snapshot.in_flight_files())
        seen.sizes.update(self.files.sizes(names))

    def checked(self, manifest: Manifest, *, reads: bool = True) -> Iterator[CheckedFile]:
        """Every file of a checkpoint, as `check_files` does."""
        return check_files(self.files, manifest, reads=reads, seen=self._seen)

    def log(self) -> DecisionLog:
        """The decision log as it is now. None at all, where a pipeline has run, is damage; a torn end of it is not.

        A run that was killed before it opened its first generation leaves folders there, but no file. And the log is
        read again after a file was seen: a run that is starting may have opened its first generation meanwhile.
        """
        log = self._decisions.read()
        if log.next_slot == 1 and self.files.list(RootPaths.GENERATIONS):
            log = self._decisions.read()
            if log.next_slot == 1:
                raise DamagedLog(
                    f"{self.files.location()} holds files of pipeline {self.pipeline!r} but no decision log: restore "
                    f"{self.files.location(RootPaths.DECISIONS)} from a backup; no run starts on this root without it"
                )
        return log

    def retained(self) -> list[CheckpointCompleted]:
        """The checkpoints that can be restored, oldest first."""
        log = self.log()
        found = [log.completed(checkpoint_id) for checkpoint_id in sorted(log.retained)]
        return [record for record in found if record is not None]

    def current(self) -> list[CheckpointCompleted]:
        """Those of them that the pipeline stands on, oldest first: not what was left behind when it went back."""
        return self.log().lineage()[::-1]

    def newest(self) -> CheckpointCompleted:
        """The newest of the lineage that the next run goes on from."""
        newest = self.log().newest
        if newest is None:
            raise UnknownCheckpoint(
                f"{self.files.location()} has no checkpoint yet; a run completes one every interval"
            )
        return newest

    def is_retained(self, checkpoint_id: int) -> bool:
        return checkpoint_id in self.log().retained

    def damage_of(self, record: CheckpointCompleted, *, reads: bool = False) -> str | None:
        """What is first found to be wrong with a checkpoint: of its manifest and, by their sizes or as they are read,
        its files. One that the run has removed meanwhile is unknown by now."""
        try:
            manifest = self.manifest(record)
        except DamagedCheckpoint as damaged:
            return str(damaged)
        found = (file.damage for file in self.checked(manifest, reads=reads))
        damage = next((each for each in found if each is not None), None)
        if damage is not None:
            self.find(record.checkpoint_id)  # asked after the damage was seen
        return damage

    def outlook(
        self,
        look_at_sinks: Callable[[Manifest], SeenSinks],
        known: Mapping[int, str | None] | None = None,
        *,
        is_alive: bool = False,
    ) -> Outlook:
        """What the next run does: decided as it will decide it, by what can be seen without claiming anything.

        While a run `is_alive`, tables are asked only where a damaged checkpoint would be skipped: else it depends on
        them only where they show more than the log knows of, as when an older root was restored from a backup. `known`
        is the health of checkpoints whose files were read; others are examined here, by the sizes of their files.
        """
        health = dict(known or {})
        seen: SeenSinks | None = None
        while True:
            log = self.log()
            decision = recover(Facts(log, {} if seen is None else seen.facts, health))
            match decision:
                case Examine(checkpoint_id):
                    with suppress(UnknownCheckpoint):  # removed meanwhile: there are newer ones
                        health[checkpoint_id] = self.damage_of(self.find(checkpoint_id))
                case FenceSinks(generation):
                    assert seen is not None
                    seen = seen.fenced(generation)
                case Restore(checkpoint, skipped) if seen is None and (skipped or not is_alive):
                    try:
                        seen = look_at_sinks(self.manifest(checkpoint))
                    except (DamagedCheckpoint, UnknownCheckpoint):
                        health.pop(checkpoint.checkpoint_id, None)
                case _:
                    skips = isinstance(decision, Restore) and decision.skipped
                    unseen = seen.unseen if seen is not None and skips else ()
                    return Outlook(decision, health, unseen, frozenset(known or ()))

    def find(self, checkpoint_id: int) -> CheckpointCompleted:
        retained = self.retained()
        for record in retained:
            if record.checkpoint_id == checkpoint_id:
                return record
        names = ", ".join(checkpoint_name(record.checkpoint_id) for record in retained)
        raise UnknownCheckpoint(
            f"{self.files.location()} retains no {checkpoint_name(checkpoint_id)}; it retains {names or 'none yet'}"
        )

    def manifest(self, record: CheckpointCompleted) -> Manifest:
        """What a checkpoint consists of. One that the run has removed since its record was read is unknown by now."""
        data = None if self._seen is None else self._seen.manifests.get(record.manifest)
        try:
            if data is not None:
                return decode_manifest(data, record.manifest_sha256, record.manifest)
            return read_manifest(self.files, record)
        except DamagedCheckpoint:
            self.find(record.checkpoint_id)  # asked after the damage was seen
            raise
