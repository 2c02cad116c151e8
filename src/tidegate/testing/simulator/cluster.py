"""The simulated cluster: instances, what they share and nobody may trust, and faults."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from tidegate.errors import CheckpointError, NoCheckpointInProgress
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.messages import Flag
from tidegate.protocol.placement import Placeable
from tidegate.protocol.recovery import Refuse
from tidegate.storage.memory import Memory
from tidegate.testing.simulator.checkers import Checkers, Manifest, SimulationFailure
from tidegate.testing.simulator.dag import Dag
from tidegate.testing.simulator.host import PATIENCE
from tidegate.testing.simulator.kv import SimulatedKv
from tidegate.testing.simulator.leading import Moment, SimulatedLeader
from tidegate.testing.simulator.process import SimulatedProcess
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
    cut_offs: int = 0
    early_expiries: int = 0
    blinks: int = 0
    departures: int = 0
    deaths: int = 0
    """Crashes after which nobody comes back."""


class Together(msgspec.Struct, frozen=True):
    """How instances come together. `late`: when those come that are not there from the start. `pinned`: the stages that
    some have asked for. `clocks`: by how much theirs are ahead."""

    at_first: int = 1
    grace_ms: int = 150
    late: dict[str, int] = {}
    pinned: dict[str, tuple[str, ...]] = {}
    clocks: dict[str, int] = {}


class Scenario(msgspec.Struct, frozen=True):
    """Everything that a seed decides before the first event."""

    dag: Dag
    config: CheckpointConfig
    instances: int
    rows: dict[str, int]
    faults: Faults
    mishaps: Mishaps
    fault_phase_ms: int = 1_800
    together: Together = Together()
    pauses_leader_at: int | None = None
    """Before and after this of what leaders ask for, the one that asks sleeps until another one leads."""
    pauses_leader: Moment = Moment.BEFORE


class Cluster:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.world = World(seed)
        self.dag = scenario.dag
        self.config = scenario.config
        self.checkers = Checkers(scenario.dag, self.world, scenario.config)
        self._clock = random.Random(f"clock {seed}")
        self.store = SimulatedStore(self.world, self.checkers)
        self.tables = {name: SimulatedTable(self.world, self.checkers, name) for name in scenario.dag.sinks}
        self.placeables = [Placeable(name, (name,), spec.inputs) for name, spec in scenario.dag.stages.items()]
        together = scenario.together
        self.expected_at_first, self.grace_ms = together.at_first, together.grace_ms
        self.files = Memory()
        self.kv = SimulatedKv(self.world) if scenario.instances > 1 else None
        self.processes = {
            name: SimulatedProcess(self, name, together.pinned.get(name, ()), together.clocks.get(name, 0))
            for name in (f"i{index}" for index in range(scenario.instances))
        }
        self.asked = 0
        """How often leaders have asked for something."""
        self.refused: Refuse | None = None
        self.aborted = 0
        self.crashes = 0
        self.departed = 0
        self._scenario = scenario
        self._gone: set[str] = set()
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

    def check_watermark(self, generation: int, min_watermark_ms: int | None) -> None:
        watermarks = {
            name: query.watermark_ms
            for process in self.processes.values()
            for name, query in process.queries.items()
            if query.generation == generation and query.spec.is_source
        }
        self.checkers.watermark_held_back.on_announced(min_watermark_ms, watermarks)

    # -- leadership -------------------------------------------------------------------------------

    @property
    def leader(self) -> SimulatedLeader | None:
        """Who leads the newest generation that is led: a user would find it."""
        found: SimulatedLeader | None = None
        newest = -1
        for each in self.processes.values():
            leading = each.leading
            if leading is not None and not leading.is_over:
                generation = 0 if leading.leader is None else leading.leader.generation
                if generation > newest:
                    found, newest = leading, generation
        return found

    def on_leader_asks(self) -> Moment | None:
        """When it is to sleep."""
        self.asked += 1
        return self._scenario.pauses_leader if self.asked == self._scenario.pauses_leader_at else None

    def elect(self) -> None:
        """Somebody does not see who leads, and takes its place. That one may be the last to hear of it."""
        leader, kv = self.leader, self.kv
        if leader is None:
            return
        if kv is None:
            leader.driver.end_leading()
            return
        old = leader.driver
        others = [
            each
            for each in self.processes.values()
            if each is not old and each.session is not None and not each.session.is_silent
        ]
        if not others:
            return
        chosen = self.world.random.choice(others)
        self.world.note("{} does not see {}", chosen.name, old.name)
        if chosen.session is not None:
            chosen.session.hide(old.name, 15 + self.world.delay(60))
        if self.world.random.random() < 0.5:
            old.process.kv_cut_until = self.world.now + self.world.delay(400)
            kv.expire_if_silent(old.process)

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
            self.world.after(scenario.together.late.get(instance.name, 0), None, self._restart, instance)
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
            (mishaps.cut_offs, self._cut_off),
            (mishaps.early_expiries, self._expire_early),
            (mishaps.blinks, self._blink),
            (mishaps.departures, self._depart),
            (mishaps.deaths, self._die),
        ):
            for _ in range(count):
                self.world.after(rng.randrange(scenario.fault_phase_ms), None, fault)

    def end_faults(self) -> None:
        self._faults_end = True
        self.world.note("the faults end")
        self.world.faults = Faults()
        for instance in self.processes.values():
            process = instance.process
            process.paused_until = process.kv_cut_until = process.store_cut_until = 0
            if not process.alive and instance.name not in self._gone:
                self._restart(instance)
        # Not faults, but without them nothing would show that aborts and second tries lead anywhere. A generation that
        # is opened for their sake would hide that the last one is stuck, so it is not always.
        if self.world.chance(0.5):
            self.world.after(100, None, self.elect)
        if self.world.chance(0.5):
            self.world.after(200 + self.world.delay(400), None, self._kill_query)
        for table in self.tables.values():
            table.failures_due = 2
        for _ in range(2):
            self.world.after(200 + self.world.delay(400), None, self._cancel)

    def _cancel(self) -> None:
        """A user cancels the checkpoint that is under way, as soon as there is one."""
        leader = self.leader
        try:
            if leader is not None:
                leader.cancel()
                return
        except NoCheckpointInProgress:
            pass
        self.world.after(5, None, self._cancel)

    def _crash(self, name: str | None = None) -> None:
        instance = self.processes[name or self.world.random.choice(list(self.processes))]
        if instance.process.alive:
            self.world.note("{} crashes", instance.name)
            self._stop(instance)
            self.world.after(self.world.delay(150), None, self._restart, instance)

    def _stop(self, instance: SimulatedProcess) -> None:
        self.crashes += 1
        if self.kv is not None:
            self.kv.expire_if_silent(instance.process)
        instance.process.crash()
        instance.forget()

    def _restart(self, instance: SimulatedProcess) -> None:
        if not instance.process.alive and instance.name not in self._gone:
            instance.process.restart()
            self.world.note("{} is up", instance.name)
            instance.begin()

    def _die(self) -> None:
        """Not the last one."""
        living = [name for name in self.processes if name not in self._gone]
        if len(living) > 1:
            name = self.world.random.choice(living)
            self._gone.add(name)
            self.world.note("{} dies", name)
            if self.processes[name].process.alive:
                self._stop(self.processes[name])

    def _depart(self) -> None:
        """Somebody stops one of several in order."""
        present = [each for each in self.processes.values() if each.exchange is not None and each.process.alive]
        if len(present) > 1:
            self.world.random.choice(present).leave()

    def on_left(self, instance: SimulatedProcess) -> None:
        """It has no part in the newest generation, and goes. It may be started again."""
        self.world.note("{} leaves", instance.name)
        if instance.session is not None:
            instance.session.leave()
        instance.process.crash()
        instance.forget()
        self.departed += 1
        self.world.after(self.world.delay(600), None, self._restart, instance)

    def _pause(self) -> None:
        """A process stops and wakes up later, knowing nothing of it (SIGSTOP, a long collection)."""
        process = self._somebody().process
        if process.alive:
            self.put_to_sleep(process, self.world.delay(800))

    def _somebody(self) -> SimulatedProcess:
        """Who leads more often than others."""
        leader = self.leader
        name = self.world.random.choice(list(self.processes))
        if leader is not None and self.world.random.random() < 0.6:
            return leader.driver
        return self.processes[name]

    def put_to_sleep(self, process: Process, for_ms: int) -> None:
        process.paused_until = self.world.now + for_ms
        self.world.note("{} is paused until {} ms", process.name, process.paused_until)
        if self.kv is not None:
            self.kv.expire_if_silent(process)

    def _cut_off(self) -> None:
        """From what they share, from the store, or from both; it goes on."""
        process = self._somebody().process
        until_ms = self.world.now + self.world.delay(500)
        what = self.world.random.randrange(3)
        if what != 0:
            process.store_cut_until = until_ms
        if what != 1 and self.kv is not None:
            process.kv_cut_until = until_ms
            self.kv.expire_if_silent(process)
        from_what = ("the others", "the store", "the others and the store")[what]
        self.world.note("{} is cut off from {} until {} ms", process.name, from_what, until_ms)

    def _blink(self) -> None:
        """One does not see another for a moment, which nobody else notices."""
        one, other = self._somebody(), self.world.random.choice(list(self.processes))
        if one.session is not None:
            self.world.note("{} does not see {} for a moment", one.name, other)
            one.session.hide(other, self.world.delay(60))

    def _expire_early(self) -> None:
        """Somebody is taken for dead who is not."""
        session = self._somebody().session
        if self.kv is not None and session is not None:
            self.kv.expire(session)

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
        leader = self.leader
        if leader is not None:
            with suppress(CheckpointError):
                leader.trigger(Flag.DRAIN)

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
