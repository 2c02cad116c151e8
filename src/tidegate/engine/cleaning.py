"""Cleaning up after a checkpoint: what no retained checkpoint refers to and the running stages do not need."""

from __future__ import annotations

import msgspec

from tidegate.engine.stage import RunningStage
from tidegate.errors import DamagedCheckpoint
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.retention import StoredFile, deletable
from tidegate.spark.output import remove_output
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files
from tidegate.storage.inspection import read_manifest
from tidegate.storage.manifest import Manifest
from tidegate.storage.paths import RootPaths


class CleanUp(msgspec.Struct):
    """One round of it. `visible` is the checkpoint that all sinks have just committed."""

    store: Files
    generation: int
    log: DecisionLog
    visible: Manifest
    manifests: dict[int, Manifest]
    stages: list[RunningStage]
    readers: dict[str, list[str]]

    def run(self) -> None:
        log = self.log
        references = self._references(log)
        stored = list(self._stored())
        # After the listing: a file that is linked meanwhile is not in the list, one that was is in use.
        in_use = frozenset().union(*(stage.held_files for stage in self.stages))
        unneeded = deletable(log, self.generation, references, stored, in_use)
        for file in unneeded:
            remove_output(self.store, file.path)
        self._remove_empty_folders()
        decisions = StoredDecisions(self.store)
        decisions.trim(log)
        decisions.forget_marks_below(self.visible.checkpoint_id)

    def _references(self, log: DecisionLog) -> dict[int, frozenset[str]]:
        found: dict[int, frozenset[str]] = {}
        for checkpoint_id in log.retained:
            record = log.completed(checkpoint_id)
            manifest = self.manifests.get(checkpoint_id)
            if record is None:
                continue
            if manifest is None:
                try:
                    manifest = read_manifest(self.store, record)
                except DamagedCheckpoint:
                    continue  # then nothing is deleted
            found[checkpoint_id] = manifest.references() | {record.manifest}
        return found

    def _stored(self) -> list[StoredFile]:
        """All files of older generations; of this one, what lies behind the checkpoint that is visible."""
        found: list[StoredFile] = []
        for generation in self._generations():
            if generation < self.generation:
                names = self.store.list(RootPaths.generation(generation))
            else:
                names = self._own_files(RootPaths.generation(generation))
            found += [StoredFile(name, generation) for name in names]
        return found

    def _generations(self) -> list[int]:
        """Those up to this one."""
        numbers = [int(name) for name in self.store.names_in(RootPaths.GENERATIONS) if name.isdigit()]
        return [number for number in numbers if number <= self.generation]

    def _own_files(self, folder: str) -> list[str]:
        newest = self.visible.checkpoint_id
        names = self.store.list(f"{folder}/snapshots")
        names += [
            name
            for name in self.store.list(f"{folder}/manifests")
            if int(name.rsplit("-", 1)[1].removesuffix(".json")) < newest
        ]
        for stage in self.stages:
            if stage.definition.kind != "sink":
                names += stage.take_consumed(
                    min(self.visible.stages[reader].positions[stage.name] for reader in self.readers[stage.name])
                )
                names += stage.take_abandoned()
        return names

    def _remove_empty_folders(self) -> None:
        for generation in self._generations():
            if generation < self.generation:
                self.store.prune(RootPaths.generation(generation))
