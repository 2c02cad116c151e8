"""The roots that a simulated pipeline runs on, one after the other, and the tables that it has there.

A root may be lost, and a savepoint brought into another one; or the pipeline is forked, and goes on with copies of its
tables. A driver that was started on a root stays there, whatever the others do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.storage.inspection import read_owner
from tidegate.testing.played import PlayedTable
from tidegate.testing.simulator.checkers import Checkers, ExactlyOnce, SimulationFailure
from tidegate.testing.simulator.dag import Dag, StageSpec
from tidegate.testing.simulator.whole.files import Disk
from tidegate.testing.simulator.whole.prefix import WholePrefix
from tidegate.testing.simulator.world import World

FIRST: Final = "first"
"""The folder of the tables that the pipeline is written for."""


class SimulatedRoot:
    """One root, what is known of its runs, and what is checked of them."""

    def __init__(self, label: str, dag: Dag, world: World, config: CheckpointConfig, prefixes: WholePrefix) -> None:
        self.label = label
        self.disk = Disk(label)
        self.checkers = Checkers(dag, world, config)
        self.prefixes = prefixes
        self.folder = FIRST
        """Where its tables are, beside others."""
        self.lock: str | None = None
        """The run that holds it, on the machine."""
        self.stages_of: dict[int, dict[str, StageSpec]] = {}
        """What the pipeline of each generation had."""
        self.fed_at: dict[int, dict[str, int]] = {}
        """How many rows each source had to read when a generation was opened."""
        self.rows_read: dict[tuple[int, str, int], int] = {}
        """By generation, source and batch: up to where that has read."""
        self.states: dict[tuple[int, str, int], dict[int, int]] = {}
        self.cancelled: set[tuple[int, int]] = set()
        """By generation and epoch: an id that nobody else has heard of may be used again."""
        self.damaged_files: set[str] = set()
        self.needed: frozenset[str] = frozenset()
        self.shares: set[str] = set()
        """The instances that hold it together."""
        self._runners: dict[tuple[int, str], str] = {}

    def on_started(self, generation: int, query: str, runner: str) -> None:
        """A query of a generation is started, by a process that runs its part of it. It may be paused and be started
        again, but nobody else ever runs it, nor that process in another try."""
        before = self._runners.setdefault((generation, query), runner)
        if before != runner:
            raise SimulationFailure(
                "OneRunner", f"the query of {query} in generation {generation} is run by {before} and by {runner}"
            )

    @property
    def id(self) -> str:
        owner = read_owner(self.disk.memory)
        return "" if owner is None else owner.root_id


class Savepoint:
    """A checkpoint that was copied out of a root, as its user keeps it."""

    def __init__(self, disk: Disk, record: CheckpointCompleted, root: SimulatedRoot, folder: str) -> None:
        """`folder`: of the tables that showed it."""
        self.disk = disk
        self.record = record
        self.root = root
        self.folder = folder


class TableSeen:
    """What each version of a table shows, as a reader of it finds."""

    def __init__(self, paths: Mapping[int, int]) -> None:
        self.visible = dict.fromkeys(paths.values(), 0)
        self._at = [dict(self.visible)]

    @property
    def versions(self) -> int:
        return len(self._at) - 1

    def look(self, table: PlayedTable, sink: str, exactly_once: ExactlyOnce) -> list[tuple[int, str, dict[int, int]]]:
        """At all versions since. Returns the epochs that became visible, by which root, and what was visible then."""
        epochs: list[tuple[int, str, dict[int, int]]] = []
        mine, exactly_once.visible[sink] = exactly_once.visible[sink], self.visible
        try:
            for version in table.versions()[self.versions :]:
                if version.shows is not None:
                    self.visible.update(self._at[version.shows])
                elif version.copies is not None:
                    self.visible.update(dict.fromkeys(self.visible, 0))
                    exactly_once.on_rows_visible(sink, table.rows_of(version).ranges)
                elif version.epoch:
                    exactly_once.on_rows_visible(sink, table.rows_of(version).ranges)
                    epochs.append((version.epoch, version.owners[version.owner].root, dict(self.visible)))
                self._at.append(dict(self.visible))
        finally:
            exactly_once.visible[sink] = mine
        return epochs
