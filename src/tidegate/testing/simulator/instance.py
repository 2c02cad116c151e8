"""A simulated driver process: it runs some of the stages of one generation and obeys its leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tidegate.errors import StoreUnavailable
from tidegate.protocol.coordinator import StageDecline, StageReport
from tidegate.protocol.quorum import Ack, AnnouncedPhase, Announcement, AnnouncementReader
from tidegate.testing.simulator.checkers import Manifest, SimulationFailure
from tidegate.testing.simulator.stage import SimulatedSegment, SimulatedStage, StageState
from tidegate.testing.simulator.world import Process, Task, World

if TYPE_CHECKING:
    from tidegate.testing.simulator.cluster import Cluster

TICK_MS = 40


class StartGeneration(msgspec.Struct, frozen=True):
    """A leader tells an instance what to run.

    It names the incarnation that the leader knows: a process that has crashed since must not run these stages
    a second time in the same generation, because their channels hold what the first one wrote.
    """

    generation: int
    incarnation: int
    leader: str
    stages: tuple[str, ...]
    base: Manifest | None
    after_checkpoint: int


class SimulatedInstance:
    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.world: World = cluster.world
        self.process = Process(name)
        self.name = name
        self.forget()

    def forget(self) -> None:
        """What a crash does to memory."""
        self.generation = 0
        self.stages: dict[str, SimulatedStage] = {}
        self.attempts: dict[int, int] = {}
        self._leader = ""
        self._reader = AnnouncementReader(0)
        self._reports: dict[int, dict[str, StageReport]] = {}
        self._acks: dict[int, Ack] = {}

    def start_ticking(self) -> None:
        self.world.after(self.world.delay(TICK_MS), self.process, self._tick)

    def _tick(self) -> None:
        for stage in self.stages.values():
            stage.on_tick()
        for ack in self._acks.values():
            self._send_ack(ack)
        self.world.after(TICK_MS, self.process, self._tick)

    # -- a generation starts ----------------------------------------------------------------------

    def on_start(self, order: StartGeneration) -> None:
        if order.generation <= self.generation or order.incarnation != self.process.incarnation:
            return
        for stage in self.stages.values():
            stage.stopped = True
        self.forget()
        self.world.note("{} runs {} in generation {}", self.name, list(order.stages), order.generation)
        self.generation = order.generation
        self._leader = order.leader
        self._reader = AnnouncementReader(order.generation)
        self.world.spawn(self.process, self._restore(order))

    def _restore(self, order: StartGeneration) -> Task:
        ready: dict[str, SimulatedStage] = {}
        for name in order.stages:
            spec = self.cluster.dag.stages[name]
            if order.base is None:
                start = StageState(dict.fromkeys(spec.paths.values(), 0))
            else:
                start = yield from self._load(order.generation, order.base[name])
                if start is None or self.generation != order.generation:
                    return
            start = msgspec.structs.replace(start, after_checkpoint=order.after_checkpoint)
            ready[name] = SimulatedStage(
                self,
                spec,
                order.generation,
                start,
                self.cluster.config.alignment,
                self.cluster.config.max_concurrent,
            )
        if self.generation == order.generation:
            self.stages = ready
            for stage in ready.values():
                stage.begin()

    def _load(self, generation: int, report: StageReport) -> Task:
        states = sum("/state-" in file for file in report.files)
        found: dict[str, object] = {}
        for path in report.files:
            if "/staged-" in path:
                continue
            held = yield from self._insist(path)
            if held is None:
                if self.cluster.checkers.log.generation > generation:
                    return None  # a newer leader has moved on and cleaned up: this generation is over
                checker = "NoCheckpointLost" if path in self.cluster.checkers.damaged_files else "NothingNeededDeleted"
                raise SimulationFailure(checker, f"{path} was gone when it was restored")
            found[path] = held.value
        rows = found[report.files[0]]
        in_flight: dict[str, list[SimulatedSegment]] = {}
        segments = iter(report.files[states:])
        for flying in report.in_flight:
            for _ in range(flying.after, flying.through):
                segment = found[next(segments)]
                if isinstance(segment, SimulatedSegment):
                    in_flight.setdefault(flying.input, []).append(segment)
        return StageState(
            rows=dict(rows) if isinstance(rows, dict) else {},
            batch=report.cut,
            positions=report.positions,
            output_sequence=report.output_sequence,
            in_flight={name: tuple(found) for name, found in in_flight.items()},
            chain=report.files[:states],
            staged=tuple((report.committable or "").split()),
        )

    def _insist(self, path: str) -> Task:
        while True:
            try:
                return (yield self.cluster.store.get(path))
            except StoreUnavailable:
                yield self.world.sleep(self.world.delay(10))

    # -- the leader announces ---------------------------------------------------------------------

    def on_announcements(self, generation: int, announcements: tuple[Announcement, ...]) -> None:
        if generation != self.generation or not self._ready():
            return
        for announcement in self._reader.take(announcements):
            checkpoint_id = announcement.barrier.checkpoint_id
            taken = self.cluster.checkers.announcements_in_order
            taken.on_taken(generation, self.name, announcement.sequence)
            match announcement.phase:
                case AnnouncedPhase.PREPARE:
                    self._prepare(announcement)
                case AnnouncedPhase.ABORT:
                    self._close(checkpoint_id)
                    for stage in self.stages.values():
                        stage.on_aborted(announcement.barrier)
                case AnnouncedPhase.COMMIT:
                    self._close(checkpoint_id)
                    for stage in self.stages.values():
                        stage.on_committed(checkpoint_id)
        self.cluster.send_to_leader(self._leader, "on_seen", generation, self.name, self._reader.seen)

    def on_visible(self, generation: int, sink: str, through_batch: int) -> None:
        if generation == self.generation and sink in self.stages:
            self.stages[sink].on_visible(through_batch)

    def _ready(self) -> bool:
        return bool(self.stages) or not self.cluster.assigned(self.generation, self.name)

    def _prepare(self, announcement: Announcement) -> None:
        checkpoint_id = announcement.barrier.checkpoint_id
        self.attempts[checkpoint_id] = announcement.attempt
        self._reports[checkpoint_id] = {}
        for stage in self.stages.values():
            if stage.spec.is_source:
                stage.injector.inject(announcement.barrier)
                stage.poll_injector()
        self._ack_if_done(checkpoint_id)

    def _close(self, checkpoint_id: int) -> None:
        self.attempts.pop(checkpoint_id, None)
        self._reports.pop(checkpoint_id, None)
        self._acks.pop(checkpoint_id, None)

    # -- the stages answer ------------------------------------------------------------------------

    def on_report(self, report: StageReport) -> None:
        reports = self._reports.get(report.checkpoint_id)
        if reports is not None:
            reports[report.stage] = report
            self._ack_if_done(report.checkpoint_id)

    def decline(self, stage: SimulatedStage, checkpoint_id: int, why: str) -> None:
        attempt = self.attempts.get(checkpoint_id)
        if attempt is not None:
            decline = StageDecline(stage.spec.name, checkpoint_id, attempt, self.generation, why)
            self.cluster.send_to_leader(self._leader, "on_decline", decline)

    def _ack_if_done(self, checkpoint_id: int) -> None:
        reports = self._reports[checkpoint_id]
        if len(reports) < len(self.stages) or checkpoint_id in self._acks:
            return
        watermarks = [stage.watermark_ms for stage in self.stages.values() if stage.spec.is_source]
        known = [watermark for watermark in watermarks if watermark is not None]
        ack = Ack(
            instance=self.name,
            checkpoint_id=checkpoint_id,
            attempt=self.attempts[checkpoint_id],
            generation=self.generation,
            watermark_ms=min(known) if known and len(known) == len(watermarks) else None,
            reports=tuple(reports.values()),
        )
        self._acks[checkpoint_id] = ack
        self._send_ack(ack)

    def _send_ack(self, ack: Ack) -> None:
        self.cluster.send_to_leader(self._leader, "on_ack", ack)
