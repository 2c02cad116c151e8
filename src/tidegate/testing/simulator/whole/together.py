"""Several instances that run a simulated pipeline together: what they share, and what goes wrong between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tidegate.testing.simulator.whole.instances import SimulatedInstance

if TYPE_CHECKING:
    from tidegate.testing.simulator.whole.cluster import WholeCluster


class Together(msgspec.Struct, frozen=True):
    """What a seed decides of them."""

    instances: int = 0
    """How many run the pipeline together; none: each driver runs all of it."""
    late: int = 0
    """So many of them come later."""
    how_many: int = 1
    """So many are to be there before the first generation is opened."""
    lease_ms: int = 300
    grace_ms: int = 400
    most_bytes: int = 128 * 1024
    """Boards and entries of channels that are larger go to the root."""
    pinned: float = 0.0
    """How likely an instance asks for a stage."""
    stale: float = 0.0
    """How likely what is shared is seen as it was a moment ago, and a notice is late."""
    cuts: int = 0
    """How often one of them is cut off from what they share, from the store, or from both."""
    expiries: int = 0
    """How often one of them is taken for dead, and is not."""
    doubts: int = 0
    """How often it is not known whether something was written."""
    leaves: int = 0
    """How often one of them is told to leave. Some of these never come back, nor do some that have crashed."""

    def __bool__(self) -> bool:
        return self.instances > 0


class Trouble:
    """What goes wrong between instances."""

    def __init__(self, cluster: WholeCluster, instances: list[SimulatedInstance]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._instances = instances

    def start(self) -> None:
        scenario, rng = self._cluster.scenario, self._world.random
        together, phase_ms = scenario.together, scenario.fault_phase_ms
        for index, instance in enumerate(self._instances):
            is_late = index >= len(self._instances) - together.late
            self._world.after(rng.randrange(phase_ms) if is_late else self._world.delay(100), None, instance.start)
        for count, fault in (
            (together.cuts, self._cut_off),
            (together.expiries, self._expire),
            (together.doubts, self._doubt),
            (together.leaves, self._leave),
        ):
            for _ in range(count):
                self._world.after(rng.randrange(phase_ms), None, fault)

    def supervise(self) -> None:
        """Whoever has ended is started again, sooner or later."""
        for instance in self._instances:
            if instance.process.alive and not instance.is_running and not instance.is_gone:
                instance.start()

    def end(self) -> None:
        for instance in self._instances:
            instance.heal()

    def lose_power(self) -> None:
        """What they share may be on the machine that goes down: nothing of it has to be durable."""
        if self._instances and self._world.random.random() < 0.5:
            self._cluster.kv.forget_all()

    def _any(self) -> SimulatedInstance:
        return self._world.random.choice(self._instances)

    def _cut_off(self) -> None:
        instance, rng = self._any(), self._world.random
        until_ms = self._world.now + self._world.delay(3 * self._cluster.scenario.together.lease_ms)
        what = rng.choice(("keys", "store", "both"))
        self._world.note("{} is cut off from {} until {} ms", instance.name, what, until_ms)
        if what != "store":
            instance.cut_off(until_ms)
        if what != "keys":
            instance.cut_off_from_store(until_ms)

    def _expire(self) -> None:
        instance = self._any()
        if instance.session is not None:
            self._world.note("the lease of {} expires early", instance.name)
            instance.session.session.expire()

    def _doubt(self) -> None:
        instance = self._any()
        if instance.session is not None:
            after_ms = self._world.random.choice((None, 0, 50, 300))
            self._world.note("what {} writes next is in doubt ({})", instance.name, after_ms)
            instance.session.session.doubt_next(after_ms)

    def _leave(self) -> None:
        instance = self._any()
        if instance.is_running:
            instance.tell()
            self.may_go(instance, 0.3)

    def may_go(self, instance: SimulatedInstance, chance: float) -> None:
        """Nobody may start one again that dies or leaves, as long as others are there."""
        others = [each for each in self._instances if each is not instance and not each.is_gone]
        instance.is_gone = bool(others) and self._world.random.random() < chance
