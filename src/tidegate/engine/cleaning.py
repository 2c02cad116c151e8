"""Cleaning up after a checkpoint: what snapshots no longer refer to, segments that were consumed, and what is left of
older generations and of paused sources.

What is listed is what nothing that runs, and no checkpoint under way, may come to refer to. Which of it no retained
checkpoint refers to either is for the leader to say.

Nothing is looked for that is known: each snapshot tells what it no longer refers to, so a clean-up costs what has
changed, not what is stored. Only after the first checkpoint of a generation, and after its last, all folders of older
generations are walked through: nobody else can tell what a run that was killed has left there, or one that was taken
over from has written since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from tidegate.engine.stage.output import ChannelOutput
from tidegate.engine.stage.running import RunningStage
from tidegate.errors import DamagedCheckpoint
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.retention import StoredFile
from tidegate.spark.definition import StageDefinition
from tidegate.spark.filelog import checked_by
from tidegate.spark.output import remove_outputs
from tidegate.storage.files import Files
from tidegate.storage.inspection import read_manifest, references
from tidegate.storage.manifest import Manifest
from tidegate.storage.paths import RootPaths, attempt_of

_log = logging.getLogger("tidegate")

Records = Mapping[int, CheckpointCompleted | None]


class AbandonedAttempts(msgspec.Struct, frozen=True):
    """Of a stage that was paused: what attempts before this one have left, but for segments, is nobody's.

    Spark's upkeep of state still writes there a minute later: it is looked at each time.
    """

    stages: frozenset[str]
    """Where it has folders: that of Spark's checkpoint is its first stage's, that of the output its last one's."""
    before: int
    needed: frozenset[str]
    """Segments, and state that snapshots refer to where it lies."""


class Leftovers:
    """What was stored and what runs no longer refers to, until no retained checkpoint does and it is deleted."""

    def __init__(self) -> None:
        self._new: list[StoredFile] = []
        self._referred: dict[int, list[StoredFile]] = {}
        """By the newest retained checkpoint that refers to them: they are looked at again when it is dropped."""
        self._free: dict[str, StoredFile] = {}

    def add(self, files: Iterable[StoredFile]) -> None:
        self._new.extend(files)

    def paths(self) -> set[str]:
        known = [*self._new, *(file for files in self._referred.values() for file in files)]
        return {file.path for file in known} | self._free.keys()

    def free(self, retained: Iterable[int], visible: int) -> tuple[StoredFile, ...]:
        """Those that no retained checkpoint refers to, nor one that was under way when all tables showed `visible`."""
        ordered = sorted(retained)
        waiting, self._new = self._new, []
        for dropped in self._referred.keys() - set(ordered):
            waiting += self._referred.pop(dropped)
        for file in waiting:
            if file.before is not None and file.before > visible:
                self._new.append(file)
            elif (newest := file.referring(ordered)) is not None:
                self._referred.setdefault(newest, []).append(file)
            else:
                self._free[file.path] = file
        return tuple(self._free.values())

    def forget(self, paths: Iterable[str]) -> None:
        """They are deleted."""
        for path in paths:
            self._free.pop(path, None)


class Walk(msgspec.Struct, frozen=True):
    """Through all that older generations have left. `known`: what need not be looked for. What somebody has left under
    the number of this one goes when it is opened."""

    root: Files
    generation: int
    known: Collection[str]
    retained: Records
    elsewhere: Manifest | None = None
    """What stages hold that run in other processes: they say themselves what they no longer need."""

    def older(self) -> list[int]:
        numbers = [int(name) for name in self.root.names_in(RootPaths.GENERATIONS) if name.isdigit()]
        return [number for number in numbers if number < self.generation]

    def found(self) -> list[StoredFile]:
        """What of it checkpoints of older generations refer to, and what nobody does."""
        stored = [(name, number) for number in self.older() for name in self.root.list(RootPaths.generation(number))]
        referring = self._referring()
        held = frozenset[str]() if self.elsewhere is None else references(self.root, self.elsewhere)
        return [
            StoredFile(name, number, *referring.get(own, (0, 0)))
            for name, number in stored
            if (own := checked_by(name)) not in self.known and own not in held
        ]

    def _referring(self) -> dict[str, tuple[int, int]]:
        """From which checkpoint on, and below which one, each file is referred to by those of older generations; and by
        all, where stages run elsewhere: what these have held since then is not known here."""
        found: dict[str, tuple[int, int]] = {}
        for checkpoint_id, record in sorted(self.retained.items(), reverse=True):
            if record is None:
                raise DamagedCheckpoint(f"the record of checkpoint {checkpoint_id} is gone")
            if record.generation < self.generation or self.elsewhere is not None:
                manifest = read_manifest(self.root, record)
                for path in (record.manifest, *references(self.root, manifest)):
                    _, before = found.get(path, (0, checkpoint_id + 1))
                    found[path] = (checkpoint_id, before)
        return found


class Cleaning:
    """Of one generation. What is returned is called beside the control thread, the rest on it."""

    def __init__(
        self,
        root: Files,
        generation: int,
        stages: Mapping[str, RunningStage],
        queries: Sequence[StageDefinition],
        *,
        leads: bool = True,
        elsewhere: Manifest | None = None,
        deletes_from: int = 1,
    ) -> None:
        """Before any of the stages takes a snapshot. `stages`: those that run here, of `queries`. `leads`: it cleans
        up after older generations, too. `elsewhere`: what stages start from that run in other processes, where there
        are any. `deletes_from`: fewer stored files than these are not deleted before there are more, or the run ends:
        each time costs a request, and may cost more than it saves."""
        self._root = root
        self._queries = queries
        self._leads = leads
        self._elsewhere = elsewhere
        self._is_all_here = len(stages) == len(queries)
        self._generation = generation
        self._stages = stages
        self._leftovers = Leftovers()
        # What stages start from is theirs until they say otherwise.
        self._started_from: frozenset[str] | None = frozenset(
            path for stage in stages.values() for path in stage.held_paths()
        )
        self._deletes_from = deletes_from if leads else 1  # who does not lead is not told which checkpoint is the last
        self._last: int | None = None
        self._walk: Walk | None = None
        self._walked: list[StoredFile] | None = None
        self._deleted: frozenset[str] = frozenset()

    def on_manifest(self, name: str, checkpoint_id: int, *, is_last: bool) -> None:
        """One is about to be written. `is_last`: the run ends with its checkpoint."""
        self._leftovers.add([StoredFile(name, self._generation, checkpoint_id, checkpoint_id + 1)])
        self._last = checkpoint_id if is_last else None

    def deletes_from(self, visible: int) -> int:
        """How many files are worth a deletion when all tables show a checkpoint. With the last nothing is left."""
        return 1 if visible == self._last else self._deletes_from

    # -- listing ----------------------------------------------------------------------------------

    def listing(
        self, visible: int, reports: Mapping[str, StageReport], retained: Records
    ) -> Callable[[], list[StoredFile]]:
        self._settle()
        for stage in self._stages.values():
            while stage.unneeded:
                self._leftovers.add([stage.unneeded.popleft()])
        free = self._leftovers.free(retained, visible)
        if len(free) < self.deletes_from(visible):
            free = ()
        consumed, abandoned = self._consumed(reports), self._abandoned()
        walk = self._walk = self._next_walk(visible, retained)

        def listed() -> list[StoredFile]:
            found = [*free, *(StoredFile(name, self._generation) for name in consumed)]
            for each in abandoned:
                found += [StoredFile(name, self._generation) for name in self._left_by(each)]
            if walk is not None:
                found += self._walk_through(walk)
            return found

        return listed

    def _settle(self) -> None:
        """What the last clean-up has found and deleted."""
        self._leftovers.forget(self._deleted)
        for stage in self._stages.values():
            stage.on_deleted(self._deleted)
            if isinstance(stage.output, ChannelOutput):
                stage.output.reclaimed(self._deleted)
        if self._walked is not None:
            self._leftovers.add(file for file in self._walked if file.path not in self._deleted)
            self._walked, self._started_from = None, None
        self._deleted = frozenset()

    def _next_walk(self, visible: int, retained: Records) -> Walk | None:
        if not self._leads:
            return None
        elsewhere = self._elsewhere
        if self._started_from is not None:
            known = self._started_from
        elif visible == self._last:
            known = frozenset(path for stage in self._stages.values() for path in stage.held_paths())
            record = retained.get(visible)
            if not self._is_all_here and record is not None:
                elsewhere = read_manifest(self._root, record)
        else:
            return None
        known |= self._leftovers.paths()
        return Walk(self._root, self._generation, known, retained, elsewhere)

    def _walk_through(self, walk: Walk) -> list[StoredFile]:
        try:
            self._walked = walk.found()
        except DamagedCheckpoint as damage:
            _log.debug("what older generations have left is not looked through: %s", damage)
            return []
        return self._walked

    def _consumed(self, reports: Mapping[str, StageReport]) -> list[str]:
        """The files of segments that all their readers have consumed."""
        through: dict[str, int] = {}
        for query in self._queries:
            for each in query.inputs:
                position = reports[query.name].positions[each]
                through[each] = min(position, through.get(each, position))
        return [
            file
            for name, stage in self._stages.items()
            if isinstance(stage.output, ChannelOutput)
            for file in stage.output.take_consumed(through[name])
        ]

    def _abandoned(self) -> list[AbandonedAttempts]:
        return [
            AbandonedAttempts(
                frozenset((stage.definition.head, name)),
                stage.oldest_attempt,
                stage.in_place() | (stage.output.unread() if isinstance(stage.output, ChannelOutput) else frozenset()),
            )
            for name, stage in self._stages.items()
            if stage.oldest_attempt > 1
        ]

    def _left_by(self, attempts: AbandonedAttempts) -> list[str]:
        found: list[str] = []
        for folder in (RootPaths.stage(self._generation, stage) for stage in sorted(attempts.stages)):
            for name in self._root.names_in(folder):
                if (attempt_of(name) or attempts.before) < attempts.before:
                    self._root.prune(f"{folder}/{name}")
                    listed = self._root.list(f"{folder}/{name}")
                    found += [each for each in listed if checked_by(each) not in attempts.needed]
        return found

    # -- deleting ---------------------------------------------------------------------------------

    def deleting(self, files: Iterable[StoredFile]) -> Callable[[], None]:
        walk = self._walk

        def delete() -> None:
            remove_outputs(self._root, (file.path for file in files))
            if walk is not None:
                for number in walk.older():
                    self._root.prune(RootPaths.generation(number))
            self._prune_above(files)
            self._deleted = frozenset(file.path for file in files)

        return delete

    def _prune_above(self, files: Iterable[StoredFile]) -> None:
        """The folders of deleted files, in which nobody writes any more."""
        tops: dict[str, list[str]] = {}
        for file in files:
            if file.generation < self._generation:
                tops.setdefault(RootPaths.generation(file.generation), []).append(file.path)
            elif RootPaths.is_of_snapshot(file.path):
                tops.setdefault(RootPaths.kept_folder(file.path), []).append(file.path)
        for top, paths in tops.items():
            self._root.prune_above(paths, top)
