"""Cleaning up after a checkpoint: what lies behind it in the root, and what is left of paused sources.

What is listed is what nothing that runs, and no checkpoint under way, may come to refer to. Which of it no retained
checkpoint refers to either is for the leader to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tidegate.engine.stage.output import ChannelOutput
from tidegate.engine.stage.running import RunningStage
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.retention import StoredFile
from tidegate.spark.output import remove_output
from tidegate.storage.files import Files
from tidegate.storage.paths import RootPaths, attempt_of


class AbandonedAttempts(msgspec.Struct, frozen=True):
    """Of a stage that was paused: what attempts before this one have left, but for segments, is nobody's.

    Spark's upkeep of state still writes there a minute later: it is looked at each time.
    """

    stages: frozenset[str]
    """Where it has folders: that of Spark's checkpoint is its first stage's, that of the output its last one's."""
    before: int
    segments: frozenset[str]


class CleaningPlan(msgspec.Struct, frozen=True):
    """What to look at after a checkpoint that all tables show, as it was when that was known."""

    root: Files
    generation: int
    visible: int
    consumed: tuple[str, ...]
    abandoned: tuple[AbandonedAttempts, ...]

    def listed(self) -> list[StoredFile]:
        found: list[StoredFile] = []
        for generation in self._generations():
            folder = RootPaths.generation(generation)
            names = self.root.list(folder) if generation < self.generation else self._own(folder)
            found += [StoredFile(name, generation) for name in names]
        return found

    def _generations(self) -> list[int]:
        """Those up to this one."""
        numbers = [int(name) for name in self.root.names_in(RootPaths.GENERATIONS) if name.isdigit()]
        return [number for number in numbers if number <= self.generation]

    def _own(self, folder: str) -> list[str]:
        kept = [*self.root.list(f"{folder}/snapshots"), *self.root.list(f"{folder}/manifests")]
        names = [name for name in kept if (RootPaths.kept_for(name) or self.visible) < self.visible]
        names += [name for name in self.consumed if self.root.exists(name)]
        for each in self.abandoned:
            names += self._left_by(each)
        return names

    def _left_by(self, attempts: AbandonedAttempts) -> list[str]:
        found: list[str] = []
        for folder in (RootPaths.stage(self.generation, stage) for stage in sorted(attempts.stages)):
            for name in self.root.names_in(folder):
                if (attempt_of(name) or attempts.before) < attempts.before:
                    self.root.prune(f"{folder}/{name}")
                    found += [each for each in self.root.list(f"{folder}/{name}") if each not in attempts.segments]
        return found

    def delete(self, files: Iterable[StoredFile]) -> None:
        for file in files:
            remove_output(self.root, file.path)
        for folder in self._done_with():
            self.root.prune(folder)

    def _done_with(self) -> Iterator[str]:
        """The folders in which nobody writes any more."""
        for generation in self._generations():
            folder = RootPaths.generation(generation)
            if generation < self.generation:
                yield folder
                continue
            for stage in self.root.names_in(f"{folder}/snapshots"):
                kept = [
                    f"{folder}/snapshots/{stage}/{each}" for each in self.root.names_in(f"{folder}/snapshots/{stage}")
                ]
                yield from (each for each in kept if (RootPaths.kept_for(each) or self.visible) < self.visible)


def plan_after(
    root: Files,
    generation: int,
    visible: int,
    reports: Mapping[str, StageReport],
    stages: Mapping[str, RunningStage],
) -> CleaningPlan:
    """Looks at what runs, so it is called on the control thread."""
    consumed: list[str] = []
    abandoned: list[AbandonedAttempts] = []
    for name, stage in stages.items():
        unread: frozenset[str] = frozenset()
        if isinstance(stage.output, ChannelOutput):
            readers = [each for each in stages.values() if name in each.definition.inputs]
            consumed += stage.output.take_consumed(min(reports[each.name].positions[name] for each in readers))
            unread = stage.output.unread()
        if stage.oldest_attempt > 1:
            folders = frozenset((stage.definition.head, name))
            abandoned.append(AbandonedAttempts(folders, stage.oldest_attempt, unread))
    return CleaningPlan(root, generation, visible, tuple(consumed), tuple(abandoned))
