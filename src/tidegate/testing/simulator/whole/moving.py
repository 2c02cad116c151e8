"""Users who take checkpoints elsewhere: what `tidegate savepoint`, `restore`, `fork` and `promote` do, in a process
that dies.

Folders are all that differs: there is no lock that two could wait for, and what is copied cannot be dropped meanwhile,
because all of it happens at one moment.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from tidegate.engine.bringing import Bringing, known_origin, sealed_when_shown
from tidegate.engine.copies import Copies, finish_pending
from tidegate.engine.forks import Fork, ForkedTable, read_fork, write_fork
from tidegate.engine.opening import RootOpening
from tidegate.engine.root import Root
from tidegate.engine.savepoints import shown_tables
from tidegate.engine.setting_back import PipelineTables, known_tables, tables_in
from tidegate.errors import RecoveryRefused, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted, Copied
from tidegate.storage.carrying import Carrying, Numbers
from tidegate.storage.inspection import look_through
from tidegate.storage.manifest import Manifest, TableAddress, encode_manifest, with_tables
from tidegate.storage.paths import RootPaths
from tidegate.testing.simulator.whole.driver import OpeningClock, SimulatedDriver
from tidegate.testing.simulator.whole.files import Disk, SeenFiles
from tidegate.testing.simulator.whole.roots import FIRST, Savepoint, SimulatedRoot

if TYPE_CHECKING:
    from tidegate.testing.simulator.whole.cluster import WholeCluster

PIPELINE = "simulated"


class SimulatedMover:
    """One user, who does one thing."""

    def __init__(self, cluster: WholeCluster) -> None:
        self._cluster = cluster
        self._process = SimulatedDriver(cluster, "user")
        self._dies = False

    def dies_later(self) -> None:
        """In the midst of what changes anything."""
        self._dies = True

    def _begin(self, most: int) -> None:
        if self._dies:
            self._process.life.calls_left = self._cluster.world.random.randint(0, most)

    def _at(self, root: SimulatedRoot) -> Root:
        self._process.root, self._process.folder = root, root.folder
        store: Any = self._process.files(fails=True)
        return Root(store, PIPELINE, root_id=self._cluster.new_id())

    def _opening(self, root: Root, sinks: Any) -> RootOpening:
        cluster = self._cluster
        return RootOpening(root, sinks, claimant=cluster.new_id(), clock=OpeningClock(cluster.world))

    # -- savepoints -------------------------------------------------------------------------------

    def save(self, checkpoint_id: int) -> Savepoint:
        """Copy a checkpoint out of its root. It is one when all of it is there."""
        cluster = self._cluster
        root, seen = self._at(cluster.root), cluster.root
        manifest = self._shown(root, checkpoint_id)
        disk = Disk(f"savepoint-{len(cluster.savepoints) + 1}")
        target: Any = SeenFiles(disk, cluster.world, self._process.life, fails=True)
        self._begin(40)
        numbers = Numbers(manifest.generation, manifest.checkpoint_id, manifest.epoch)
        carried = Carrying(root.store, target, manifest).carry(
            numbers, sealed_when_shown(manifest), {}, manifest.origin
        )
        data, sha256 = encode_manifest(carried)
        name = RootPaths.manifest(carried.generation, carried.checkpoint_id)
        target.write(name, data)
        return Savepoint(disk, _as_completed(carried, name, sha256), seen, seen.folder)

    def _shown(self, root: Root, checkpoint_id: int) -> Manifest:
        record = root.decisions.read().completed(checkpoint_id)
        if record is None:
            raise UnknownCheckpoint(f"{checkpoint_id} is gone")
        manifest = look_through(root.store, record)
        inspected: Any = SimpleNamespace(files=root.store, pipeline=PIPELINE, id=root.id)
        shown_tables(inspected, manifest, self._process.sinks(root.store, root.id), is_shown=False)
        return manifest

    def bring(self, savepoint: Savepoint, to: SimulatedRoot) -> None:
        """Back into the root that it was made from, or into any other."""
        source: Any = SeenFiles(savepoint.disk, self._cluster.world, self._process.life, fails=True)
        manifest = _brought(look_through(source, savepoint.record), savepoint.root.id)
        root = self._at(to)
        self._process.find_tables()
        sinks = self._process.sinks(root.store, root.id)
        log = root.decisions.read()
        here = {name: sink.table for name, sink in sinks.items()}
        addresses: dict[str, TableAddress] = {**tables_in(manifest), **here, **known_tables(root.store, log)}
        tables = PipelineTables(root.store, PIPELINE, root.id, addresses, sinks)
        self._check(tables.look_back(manifest, takes_over=True))
        bringing = Bringing(source, manifest, savepoint.root.id, addresses)
        above = bringing.above(tables.facts(), tables.staged_generation())
        self._begin(80)
        self._opening(root, sinks).bring(bringing, above)

    # -- forks ------------------------------------------------------------------------------------

    def fork(self, checkpoint_id: int, to: SimulatedRoot) -> None:
        """A second pipeline with the same state, and tables of its own."""
        source = self._at(self._cluster.root)
        manifest = _brought(self._shown(source, checkpoint_id), source.id)
        sinks = self._process.tables()
        originals = {name: table.address for name, table in tables_in(manifest).items()}
        if any(sink.table.address != originals[name] for name, sink in sinks.items()):
            raise UnknownCheckpoint(f"{checkpoint_id} is of before a promotion, and of other tables")
        addresses = {name: TableAddress("played", sink.beside.location(to.folder)) for name, sink in sinks.items()}
        copies = {name: Copied(original) for name, original in originals.items()}
        made = self._at(to)
        copying = Copies(made.store, made.id, with_tables(manifest, addresses), addresses, copies, sinks)
        self._check(copying.look())
        tables = {name: ForkedTable("played", addresses[name].address, originals[name]) for name in addresses}
        self._begin(80)
        write_fork(made.store, Fork("root", source.id, "checkpoint", "now", tables))
        bringing = Bringing(source.store, manifest, source.id, addresses, copies)
        self._opening(made, copying.own).bring(bringing, bringing.above({}))

    def promote(self) -> None:
        """The tables that the fork was made from show what the fork's do, and it goes on with these."""
        root = self._at(self._cluster.root)
        fork_folder, self._process.folder = self._process.folder, FIRST
        sinks = self._process.tables()
        finish_pending(root, sinks, OpeningClock(self._cluster.world))
        fork = read_fork(root.store)
        if fork is None:
            raise UnknownCheckpoint("it is no fork any more")
        newest = root.decisions.read().newest
        self._process.folder = fork_folder
        manifest = self._shown(root, 0 if newest is None else newest.checkpoint_id)
        addresses = {name: TableAddress("played", each.original) for name, each in fork.tables.items()}
        copies = {name: Copied(each.table, replaces=True) for name, each in fork.tables.items()}
        copying = Copies(root.store, root.id, with_tables(manifest, addresses), addresses, copies, sinks)
        self._check(copying.look())
        bringing = Bringing(root.store, manifest, root.id, addresses, copies, ends_fork=True, is_within_root=True)
        tables = PipelineTables(root.store, PIPELINE, root.id, addresses, copying.own)
        above = bringing.above(tables.facts(), tables.staged_generation())
        self._begin(80)
        self._opening(root, copying.own).bring(bringing, above)

    @staticmethod
    def _check(looked: Any) -> None:
        if any(each.refused is not None for each in looked):
            raise RecoveryRefused(f"{looked}")


def _brought(manifest: Manifest, root_id: str) -> Manifest:
    """As another root will have it."""
    return msgspec.structs.replace(manifest, origin=known_origin(manifest, root_id))


def _as_completed(manifest: Manifest, name: str, sha256: str) -> CheckpointCompleted:
    """As the log of a root would have it."""
    return CheckpointCompleted(
        1,
        "",
        manifest.generation,
        manifest.checkpoint_id,
        manifest.epoch,
        None,
        name,
        sha256,
        manifest.aligned,
        (manifest.checkpoint_id,),
        1,
    )
