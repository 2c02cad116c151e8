"""The simulated cluster: instances, an election that nobody may trust, messages that get lost, and faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.messages import Flag
from tidegate.protocol.recovery import Refuse
from tidegate.testing.simulator.checkers import Checkers, Manifest, SimulationFailure
from tidegate.testing.simulator.dag import Dag
from tidegate.testing.simulator.instance import SimulatedInstance
from tidegate.testing.simulator.leader import SimulatedLeader
from tidegate.testing.simulator.stage import Channel
from tidegate.testing.simulator.store import SimulatedStore, SimulatedTable
from tidegate.testing.simulator.world import Faults, World


class Scenario(msgspec.Struct, frozen=True):
    """Everything that a seed decides before the first event."""

    dag: Dag
    config: CheckpointConfig
    instances: int
    rows: dict[str, int]
    faults: Faults
    fault_phase_ms: int
    crashes: int
    pauses: int
    spurious_elections: int
    drains: int
    damages: int
    power_losses: int


class Cluster:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.world = World(seed)
        self.dag = scenario.dag
        self.config = scenario.config
        self.checkers = Checkers(scenario.dag, self.world, scenario.config)
        self._clock = random.Random(f"clock {seed}")
        self.store = SimulatedStore(self.world, self.checkers)
        self.tables = {name: SimulatedTable(self.world, self.checkers, name) for name in scenario.dag.sinks}
        self.instances = {
            name: SimulatedInstance(self, name) for name in (f"i{index}" for index in range(scenario.instances))
        }
        self.refused: Refuse | None = None
        self.aborted = 0
        self.crashes = 0
        self._scenario = scenario
        self._channels: dict[tuple[int, str], Channel] = {}
        self._assignments: dict[int, dict[str, tuple[str, ...]]] = {}
        self._leaders: dict[str, SimulatedLeader] = {}
        self._leader: SimulatedLeader | None = None
        self._elections = 0
        self._faults_end = False

    def clock(self) -> int:
        """What the clock of a process says, which jumps forth and back."""
        return self.world.now + self._clock.choice((0, 0, 0, 0, 0, 0, 500, -500, 10**9))

    # -- what stages and leaders ask --------------------------------------------------------------

    def rows_available(self, source: str) -> int:
        """Rows of an external stream come in over the whole fault phase."""
        total = self._scenario.rows[source]
        if self._faults_end:
            return total
        return min(total, total * self.world.now // self._scenario.fault_phase_ms)

    def channel(self, generation: int, stage: str) -> Channel:
        return self._channels[generation, stage]

    def members(self) -> dict[str, int]:
        """The instances that are alive, with their incarnations."""
        return {
            name: instance.process.incarnation for name, instance in self.instances.items() if instance.process.alive
        }

    def assign(self, generation: int, members: list[str], base: Manifest | None) -> dict[str, tuple[str, ...]]:
        """Spread the stages over the members, and lay the channels of the generation."""
        placed: dict[str, list[str]] = {name: [] for name in members}
        for stage in self.dag.stages:
            placed[self.world.random.choice(members)].append(stage)
            self._channels[generation, stage] = Channel(0 if base is None else base[stage].output_sequence)
        self._assignments[generation] = {name: tuple(stages) for name, stages in placed.items()}
        return self._assignments[generation]

    def assigned(self, generation: int, instance: str) -> bool:
        return bool(self._assignments.get(generation, {}).get(instance))

    def check_watermark(self, generation: int, min_watermark_ms: int | None) -> None:
        watermarks = {
            name: stage.watermark_ms
            for instance in self.instances.values()
            if instance.generation == generation
            for name, stage in instance.stages.items()
            if stage.spec.is_source
        }
        self.checkers.watermark_held_back.on_announced(min_watermark_ms, watermarks)

    # -- messages ---------------------------------------------------------------------------------

    def send_to_instance(self, name: str, method: str, *arguments: Any) -> None:
        instance = self.instances[name]
        self._send(lambda: getattr(instance, method)(*arguments), instance)

    def send_to_leader(self, claimant: str, method: str, *arguments: Any) -> None:
        leader = self._leaders.get(claimant)
        if leader is not None:
            instance = leader.instance
            self._send(lambda: getattr(leader, method)(*arguments), instance)

    def _send(self, deliver: Callable[[], None], to: SimulatedInstance) -> None:
        if to.process.alive and not self.world.chance(self.world.faults.lose_message):
            self.world.after(self.world.delay(10), to.process, deliver)

    # -- leadership -------------------------------------------------------------------------------

    def elect(self, name: str | None = None) -> None:
        """Make an instance the leader. The old one is not told, and nobody asks whether it is dead."""
        alive = [each for each in self.members() if self.instances[each].process.paused_until <= self.world.now]
        if not alive:
            return
        chosen = name if name in alive else self.world.random.choice(alive)
        self._elections += 1
        for leader in self._leaders.values():
            if leader.instance.name == chosen:
                leader.stop()
        claimant = f"{chosen}#{self._elections}"
        self._leader = SimulatedLeader(self, self.instances[chosen], claimant)
        self._leaders[claimant] = self._leader
        self.world.note("{} is elected", claimant)
        self._leader.begin()

    def _supervise(self) -> None:
        """A run that was superseded, or died, is started again somewhere sooner or later."""
        if self.refused is None:
            if self._leader is None or self._leader.stopped:
                self.elect()
            self.world.after(150, None, self._supervise)

    def restart_generation(self, leader: SimulatedLeader) -> None:
        """The pipeline failed, or an instance was lost: open a new generation."""
        leader.stop()
        if leader is self._leader:
            self.world.after(self.world.delay(30), None, self.elect, leader.instance.name)

    def on_failed(self, leader: SimulatedLeader) -> None:
        """Too many checkpoints failed. Without faults a restart would hide that they cannot succeed."""
        if not self._faults_end:
            self.restart_generation(leader)

    def on_drained(self, leader: SimulatedLeader) -> None:
        """A drained pipeline has stopped; somebody starts it again."""
        self.restart_generation(leader)

    def on_refused(self, refusal: Refuse, health: dict[int, str | None]) -> None:
        """Right only where a damaged checkpoint's rows are visible already, or all are damaged."""
        damaged = {checkpoint_id for checkpoint_id, damage in health.items() if damage is not None}
        if not damaged or not damaged <= self.checkers.no_checkpoint_lost.damaged_checkpoints:
            raise SimulationFailure("NoCheckpointLost", f"refused without damage: {refusal.why}")
        self.refused = refusal
        self.world.note("recovery refuses: {}", refusal.why)

    # -- faults -----------------------------------------------------------------------------------

    def start(self) -> None:
        scenario, rng = self._scenario, self.world.random
        self.world.faults = scenario.faults
        for instance in self.instances.values():
            instance.start_ticking()
        self.elect()
        self.world.after(150, None, self._supervise)
        for count, fault in (
            (scenario.crashes, self._crash),
            (scenario.pauses, self._pause),
            (scenario.spurious_elections, self.elect),
            (scenario.drains, self._drain),
            (scenario.damages, self._damage),
            (scenario.power_losses, self._lose_power),
        ):
            for _ in range(count):
                self.world.after(rng.randrange(scenario.fault_phase_ms), None, fault)

    def end_faults(self) -> None:
        self._faults_end = True
        self.world.note("the faults end")
        self.world.faults = Faults()
        for instance in self.instances.values():
            instance.process.paused_until = 0
            if not instance.process.alive:
                self._restart(instance)
        self.world.after(100, None, self.elect)
        # Not faults, but without them nothing would show that aborts and second tries lead anywhere.
        for table in self.tables.values():
            table.failures_due = 2
        for _ in range(2):
            self.world.after(200 + self.world.delay(400), None, self._cancel)

    def _cancel(self) -> None:
        """A user cancels the checkpoint that is under way, as soon as there is one."""
        if self._leader is None or not self._leader.cancel():
            self.world.after(5, None, self._cancel)

    def _crash(self, name: str | None = None) -> None:
        instance = self.instances[name or self.world.random.choice(list(self.instances))]
        if not instance.process.alive:
            return
        self.crashes += 1
        self.world.note("{} crashes", instance.name)
        instance.process.crash()
        for stage in instance.stages.values():
            stage.stopped = True
        instance.forget()
        for leader in self._leaders.values():
            if leader.instance is instance:
                leader.stop()
        self.world.after(self.world.delay(150), None, self._restart, instance)
        self.world.after(self.world.delay(120), None, self._notice, instance)

    def _restart(self, instance: SimulatedInstance) -> None:
        if not instance.process.alive:
            instance.process.restart()
            self.world.note("{} is up again", instance.name)
            instance.start_ticking()
            self.world.after(self.world.delay(50), None, self._notice, instance)

    def _notice(self, instance: SimulatedInstance) -> None:
        """Membership has changed; who leads hears of it, or somebody else is elected."""
        leader = self._leader
        if leader is None or leader.stopped or not leader.instance.process.alive:
            self.elect()
        else:
            leader.on_membership(instance.name)
            self.restart_generation(leader)

    def _pause(self) -> None:
        """A process stops and wakes up later, knowing nothing of it (SIGSTOP, a long collection)."""
        leader = self._leader
        name = self.world.random.choice(list(self.instances))
        if leader is not None and self.world.random.random() < 0.6:
            name = leader.instance.name
        process = self.instances[name].process
        if process.alive:
            process.paused_until = self.world.now + self.world.delay(600)
            self.world.note("{} is paused until {} ms", name, process.paused_until)
            self.world.after(self.world.delay(100), None, self.elect)

    def _drain(self) -> None:
        if self._leader is not None:
            self._leader.trigger(Flag.DRAIN)

    def _lose_power(self) -> None:
        """Everything goes down while a record is being written to the log, and half of it is there afterwards."""
        for name in self.instances:
            self._crash(name)
        self.store.tear_next()
        self.world.note("the power is lost, and the last record is torn")

    def _damage(self) -> None:
        """Everything goes down, and a file of the newest checkpoint with it."""
        newest = self.checkers.log.newest
        if newest is None:
            return
        for name in self.instances:
            self._crash(name)
        manifest: Manifest = self.store.objects[newest.manifest].value
        paths = sorted(report.files[0] for report in manifest.values())
        path = self.world.random.choice([newest.manifest, *paths])
        del self.store.objects[path]
        self.world.note("{} is lost", path)
        self.checkers.damaged_files.add(path)
        lost = self.checkers.no_checkpoint_lost.damaged_checkpoints
        for record in self.checkers.log.lineage():
            held = self.store.objects.get(record.manifest)
            files = () if held is None else [file for report in held.value.values() for file in report.files]
            if held is None or path in files:
                lost.add(record.checkpoint_id)
