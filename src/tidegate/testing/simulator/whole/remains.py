"""What must hold of a root when all has come to rest: what is retained can be restored, and nothing else is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import DamagedCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.spark.filelog import begin_after, checked_by, restart_source_logs
from tidegate.spark.snapshot import restore_checkpoint
from tidegate.storage.file_lists import files_of
from tidegate.storage.inspection import look_through
from tidegate.storage.memory import Memory
from tidegate.storage.paths import RootPaths
from tidegate.testing.played import PlayedFailure, PlayedQuery
from tidegate.testing.simulator.checkers import SimulationFailure

if TYPE_CHECKING:
    from tidegate.testing.simulator.whole.cluster import WholeCluster


_MOST_ENTRIES: Final = 100


def check_restorable(cluster: WholeCluster) -> None:
    """Every retained checkpoint can be restored, and holds the state that its stages had when they were cut."""
    log, damaged = cluster.checkers.log, cluster.checkers.no_checkpoint_lost.damaged_checkpoints
    for checkpoint_id in sorted(set(log.retained) - damaged):
        record = log.completed(checkpoint_id)
        assert record is not None
        try:
            _restore(cluster, record)
        except (DamagedCheckpoint, PlayedFailure) as error:
            raise SimulationFailure("Restorable", f"checkpoint {checkpoint_id}: {error}") from error


def _restore(cluster: WholeCluster, record: CheckpointCompleted) -> None:
    root: Any = cluster.disk.memory
    manifest = look_through(root, record)
    for name, stage in manifest.stages.items():
        if stage.cut is None:
            continue
        scratch: Any = Memory("scratch")
        restore_checkpoint(root, files_of(root, name, stage.files), scratch)
        if stage.files.is_empty:
            begin_after(scratch, stage.cut)
        sources = cluster.sources_of(cluster.root, record.generation, name)
        if sources:
            restart_source_logs(scratch, stage.cut, sources)
        played = cluster.played_sources(name, record.generation, root, sources)
        query = PlayedQuery(scratch, Memory("nothing"), played, cluster.plan(name), new_id=cluster.new_id)
        query.take_up()
        if query.batch != stage.cut:
            raise PlayedFailure(f"{name} was cut at batch {stage.cut}, and restored at {query.batch}")
        expected = cluster.root.states.get((record.generation, name, stage.cut))
        if expected is not None and query.seen != expected:
            raise PlayedFailure(f"{name} had seen {expected} at batch {stage.cut}, and has {query.seen} when restored")


def check_nothing_left(cluster: WholeCluster) -> None:
    """A run was stopped in order: in its root is nothing but what the checkpoints that it retains need, and what was
    its own. Of its tables' staging, nothing of generations before."""
    log = cluster.checkers.log
    needed: set[str] = set()
    for checkpoint_id in log.retained:
        needed |= cluster.checkers.nothing_needed_deleted.references(checkpoint_id)
    own = (f"{RootPaths.generation(log.generation)}/stages/", RootPaths.briefing(log.generation))
    # Somebody may have been killed beside this run who wanted a generation after it: whoever opens that cleans up.
    files = [
        name
        for name in cluster.disk.memory.list(RootPaths.GENERATIONS)
        if not (RootPaths.generation_of(name) > log.generation and cluster.moves and RootPaths.kept_for(name))
    ]
    left = [name for name in files if checked_by(name) not in needed and not name.startswith(own)]
    left += cluster.disk.memory.list(RootPaths.REQUESTS)
    sinks = cluster.versions.specs()
    for disk in cluster.lake.values():
        staged = [(name, *name.split("/")[2:4]) for name in disk.memory.at(cluster.root.folder).list("staged")]
        # For a sink that is gone, or has another name, a run that was asleep then may have staged since.
        left += [name for name, sink, number in staged if sink in sinks and int(number) < log.generation]
    if left:
        raise SimulationFailure("NothingLeft", f"{len(left)} files are nobody's: {', '.join(left[:3])}")
    _check_logs(cluster)
    _check_shared(cluster)


def _check_shared(cluster: WholeCluster) -> None:
    """What instances have said to each other goes with them: but for what the last of each has said, and a little that
    nobody has lived, or was there, to delete."""
    together = cluster.scenario.together
    spilled = cluster.disk.memory.list(f"{RootPaths.COORDINATION}/spilled")
    channels = [name for name in spilled if name.startswith(f"{RootPaths.COORDINATION}/spilled/channels/")]
    if len(spilled) - len(channels) > 2 * together.instances:
        raise SimulationFailure("NothingLeft", f"{len(spilled) - len(channels)} boards are left: {spilled}")
    is_calm = not (cluster.crashes or cluster.taken_for_dead or together.cuts or together.doubts or together.stale)
    for entries in (cluster.kv.keys_in("channels"), channels):
        if len(entries) > (0 if is_calm else _MOST_ENTRIES):
            raise SimulationFailure("NothingLeft", f"{len(entries)} entries of channels are left: {entries[:3]}")


def _check_logs(cluster: WholeCluster) -> None:
    log, memory = cluster.checkers.log, cluster.disk.memory
    slots = [RootPaths.slot_of(name) for name in memory.list(RootPaths.DECISIONS)]
    behind = [slot for slot in slots if slot < log.first_slot]
    if len(behind) > len(log.retained):
        raise SimulationFailure("NothingLeft", f"{len(behind)} records of the log lie before its start: {behind}")
    marks = memory.list(RootPaths.IDS)
    if len(marks) > 2:
        raise SimulationFailure("NothingLeft", f"{len(marks)} ids are still marked: {marks}")
