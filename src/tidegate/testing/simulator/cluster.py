"""The simulated cluster: instances, an election that nobody may trust, messages that get lost, and faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from tidegate.errors import CheckpointError, NoCheckpointInProgress
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.messages import Flag
from tidegate.protocol.recovery import Refuse
from tidegate.testing.simulator.checkers import Checkers, Manifest, SimulationFailure
from tidegate.testing.simulator.dag import Dag
from tidegate.testing.simulator.host import PATIENCE
from tidegate.testing.simulator.process import SimulatedLeader, SimulatedProcess
from tidegate.testing.simulator.query import Channel
from tidegate.testing.simulator.store import SimulatedStore, SimulatedTable
from tidegate.testing.simulator.world import Faults, Process, World


class Mishaps(msgspec.Struct, frozen=True):
    """How often what happens during the fault phase."""

    crashes: int = 0
    pauses: int = 0
    spurious_elections: int = 0
    drains: int = 0
    damages: int = 0
    power_losses: int = 0
    full_disks: int = 0
    standstills: int = 0
    dead_queries: int = 0


class Scenario(msgspec.Struct, frozen=True):
    """Everything that a seed decides before the first event."""

    dag: Dag
    config: CheckpointConfig
    instances: int
    rows: dict[str, int]
    faults: Faults
    mishaps: Mishaps
    fault_phase_ms: int = 1_800


class Cluster:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.world = World(seed)
        self.dag = scenario.dag
        self.config = scenario.config
        self.checkers = Checkers(scenario.dag, self.world, scenario.config)
        self._clock = random.Random(f"clock {seed}")
        self.store = SimulatedStore(self.world, self.checkers)
        self.tables = {name: SimulatedTable(self.world, self.checkers, name) for name in scenario.dag.sinks}
        self.processes = {
            name: SimulatedProcess(self, name) for name in (f"i{index}" for index in range(scenario.instances))
        }
        self.refused: Refuse | None = None
        self.aborted = 0
        self.crashes = 0
        self._scenario = scenario
        self._channels: dict[tuple[int, str], Channel] = {}
        self._leaders: dict[str, SimulatedLeader] = {}
        self._leader: SimulatedLeader | None = None
        self._elections = 0
        self._faults_end = False

    def config_now(self) -> CheckpointConfig:
        """Without faults a restart would hide that checkpoints cannot succeed."""
        return msgspec.structs.replace(self.config, tolerable_failures=10**6) if self._faults_end else self.config

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
        """The instances that seem to be alive, with their incarnations. One that is paused may be taken for dead."""
        return {
            name: instance.process.incarnation
            for name, instance in self.processes.items()
            if instance.process.alive and (self._is_awake(name) or self.world.chance(0.5))
        }

    def _is_awake(self, name: str) -> bool:
        return self.processes[name].process.paused_until <= self.world.now

    def assign(self, generation: int, members: list[str]) -> dict[str, tuple[str, ...]]:
        """Spread the stages over the members, and lay the channels of the generation."""
        placed: dict[str, list[str]] = {name: [] for name in members}
        for stage in self.dag.stages:
            placed[self.world.random.choice(members)].append(stage)
            self._channels[generation, stage] = Channel()
        return {name: tuple(stages) for name, stages in placed.items()}

    def check_watermark(self, generation: int, min_watermark_ms: int | None) -> None:
        watermarks = {
            name: query.watermark_ms
            for process in self.processes.values()
            for name, query in process.queries.items()
            if query.generation == generation and query.spec.is_source
        }
        self.checkers.watermark_held_back.on_announced(min_watermark_ms, watermarks)

    # -- messages ---------------------------------------------------------------------------------

    def send_to_process(self, name: str, message: Any) -> None:
        self._send(self.processes[name].receive, message, self.processes[name])

    def send_to_leader(self, claimant: str, message: Any) -> None:
        leader = self._leaders.get(claimant)
        if leader is not None:
            self._send(leader.receive, message, leader.driver)

    def _send(self, receive: Callable[[Any], None], message: Any, to: SimulatedProcess) -> None:
        if to.process.alive and not self.world.chance(self.world.faults.lose_message):
            self.world.after(self.world.delay(10), to.process, receive, message)

    # -- leadership -------------------------------------------------------------------------------

    def elect(self, name: str | None = None) -> None:
        """Make an instance the leader. The old one is not told, and nobody asks whether it is dead."""
        alive = [name for name, each in self.processes.items() if each.process.alive and self._is_awake(name)]
        if not alive:
            return
        chosen = name if name in alive else self.world.random.choice(alive)
        self._elections += 1
        for leader in self._leaders.values():
            if leader.driver.name == chosen:
                leader.stop()
        claimant = f"{chosen}#{self._elections}"
        self._leader = SimulatedLeader(self, self.processes[chosen], claimant)
        self._leaders[claimant] = self._leader
        self.world.note("{} is elected", claimant)
        self._leader.begin()

    def _supervise(self) -> None:
        """A run that was superseded, or died, is started again somewhere sooner or later."""
        if self.refused is None:
            if self._leader is None or self._leader.is_over:
                self.elect()
            self.world.after(150, None, self._supervise)

    def restart_generation(self, leader: SimulatedLeader) -> None:
        """The pipeline failed, or an instance was lost: open a new generation."""
        leader.stop()
        if leader is self._leader:
            self.world.after(self.world.delay(30), None, self.elect, leader.driver.name)

    def on_drained(self, leader: SimulatedLeader) -> None:
        """A drained pipeline has stopped; somebody starts it again."""
        self.restart_generation(leader)

    def on_refused(self, refusal: Refuse, health: Mapping[int, str | None]) -> None:
        """Right only where a damaged checkpoint's rows are visible already, or all are damaged."""
        damaged = {checkpoint_id for checkpoint_id, damage in health.items() if damage is not None}
        if not damaged or not damaged <= self.checkers.no_checkpoint_lost.damaged_checkpoints:
            raise SimulationFailure("NoCheckpointLost", f"refused without damage: {refusal.why}")
        self.refused = refusal
        self.world.note("recovery refuses: {}", refusal.why)

    # -- faults -----------------------------------------------------------------------------------

    def start(self) -> None:
        scenario, rng = self._scenario, self.world.random
        self.world.faults = msgspec.structs.replace(scenario.faults)
        for instance in self.processes.values():
            instance.start_ticking()
        self.elect()
        self.world.after(150, None, self._supervise)
        mishaps = scenario.mishaps
        for count, fault in (
            (mishaps.crashes, self._crash),
            (mishaps.pauses, self._pause),
            (mishaps.spurious_elections, self.elect),
            (mishaps.drains, self._drain),
            (mishaps.damages, self._damage),
            (mishaps.power_losses, self._lose_power),
            (mishaps.full_disks, self._fill_disk),
            (mishaps.standstills, self._stand_still),
            (mishaps.dead_queries, self._kill_query),
        ):
            for _ in range(count):
                self.world.after(rng.randrange(scenario.fault_phase_ms), None, fault)

    def end_faults(self) -> None:
        self._faults_end = True
        self.world.note("the faults end")
        self.world.faults = Faults()
        for instance in self.processes.values():
            instance.process.paused_until = 0
            if not instance.process.alive:
                self._restart(instance)
        self.world.after(100, None, self.elect)
        # Not faults, but without them nothing would show that aborts and second tries lead anywhere.
        for table in self.tables.values():
            table.failures_due = 2
        for _ in range(2):
            self.world.after(200 + self.world.delay(400), None, self._cancel)
        self.world.after(200 + self.world.delay(400), None, self._kill_query)

    def _cancel(self) -> None:
        """A user cancels the checkpoint that is under way, as soon as there is one."""
        try:
            if self._leader is not None and not self._leader.is_over:
                self._leader.cancel()
                return
        except NoCheckpointInProgress:
            pass
        self.world.after(5, None, self._cancel)

    def _crash(self, name: str | None = None) -> None:
        instance = self.processes[name or self.world.random.choice(list(self.processes))]
        if not instance.process.alive:
            return
        self.crashes += 1
        self.world.note("{} crashes", instance.name)
        instance.process.crash()
        instance.forget()
        for leader in self._leaders.values():
            if leader.driver is instance:
                leader.stop()
        self.world.after(self.world.delay(150), None, self._restart, instance)
        self.world.after(self.world.delay(120), None, self._notice, instance)

    def _restart(self, instance: SimulatedProcess) -> None:
        if not instance.process.alive:
            instance.process.restart()
            self.world.note("{} is up again", instance.name)
            instance.start_ticking()
            self.world.after(self.world.delay(50), None, self._notice, instance)

    def _notice(self, instance: SimulatedProcess) -> None:
        """Membership has changed; who leads hears of it, or somebody else is elected."""
        leader = self._leader
        if leader is None or leader.is_over or not leader.driver.process.alive:
            self.elect()
        else:
            if leader.leader is not None:
                leader.leader.on_lost(instance.name)
            self.restart_generation(leader)

    def _pause(self) -> None:
        """A process stops and wakes up later, knowing nothing of it (SIGSTOP, a long collection)."""
        leader = self._leader
        name = self.world.random.choice(list(self.processes))
        if leader is not None and self.world.random.random() < 0.6:
            name = leader.driver.name
        if self.processes[name].process.alive:
            self.put_to_sleep(self.processes[name].process)

    def put_to_sleep(self, process: Process) -> None:
        process.paused_until = self.world.now + self.world.delay(800)
        self.world.note("{} is paused until {} ms", process.name, process.paused_until)
        self.world.after(self.world.delay(100), None, self.elect)

    def _fill_disk(self) -> None:
        """Nothing can be written, what lies there can be read and deleted, and then somebody makes room."""
        self.world.faults.disk_is_full_until_ms = self.world.now + self.world.delay(600)
        self.world.note("the disk is full until {} ms", self.world.faults.disk_is_full_until_ms)

    def _stand_still(self) -> None:
        """The store does not answer for longer than anybody's patience, and then does all that it was asked."""
        lasts_ms = PATIENCE.give_up_ms + self.world.delay(600)
        self.world.faults.store_stands_until_ms = self.world.now + lasts_ms
        self.world.note("the store stands still for {} ms", lasts_ms)

    def _kill_query(self) -> None:
        running = [query for process in self.processes.values() for query in process.queries.values()]
        if running:
            self.world.random.choice(running).die("a task failed too often")

    def _drain(self) -> None:
        if self._leader is not None:
            with suppress(CheckpointError):
                self._leader.trigger(Flag.DRAIN)

    def _lose_power(self) -> None:
        """Everything goes down while a record is being written to the log, and half of it is there afterwards."""
        for name in self.processes:
            self._crash(name)
        self.store.tear_next()
        self.world.note("the power is lost, and the last record is torn")

    def _damage(self) -> None:
        """Everything goes down, and a file of the newest checkpoint with it."""
        newest = self.checkers.log.newest
        if newest is None:
            return
        for name in self.processes:
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
