"""What a simulated driver process does to lead: it opens a generation, and then leads it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import (
    CheckpointsFailed,
    Fenced,
    InstanceFailed,
    NoCheckpointInProgress,
    StoreUnavailable,
    Superseded,
    TidegateError,
)
from tidegate.flows import requests
from tidegate.flows.boards import LeaderSays
from tidegate.flows.leader import Announced, Assignment, Leader, Visible
from tidegate.flows.member import MemberFailed, Seen, ToLeader
from tidegate.flows.opening import Opening
from tidegate.flows.requests import Asker, Flow, Request, StartOrder
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.coordinator import AbortReason, Checkpoint, StageDecline, StageReport
from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog
from tidegate.protocol.membership import staying
from tidegate.protocol.messages import Barrier, Flag
from tidegate.protocol.placement import place
from tidegate.protocol.quorum import Ack
from tidegate.protocol.recovery import Refuse
from tidegate.protocol.retention import StoredFile
from tidegate.testing.simulator.checkers import Manifest, SimulationFailure
from tidegate.testing.simulator.host import PATIENCE, Host
from tidegate.testing.simulator.query import sealed_in

if TYPE_CHECKING:
    from tidegate.testing.simulator.process import SimulatedProcess

LEADER_TICK_MS: Final = 25

REASONS_TO_STEP_DOWN: Final = (Superseded, Fenced, StoreUnavailable, CheckpointsFailed, InstanceFailed)
"""Any other error is a defect, which a new generation would hide."""

SLEPT_THROUGH_MS: Final = 900
"""Longer than any lease: another one leads by then."""


class Moment(enum.Enum):
    BEFORE = "before what it asks for"
    AFTER = "after that"


class SimulatedLeader(Host):
    """What a process does to lead: it opens a generation, and then leads it."""

    def __init__(self, driver: SimulatedProcess, claimant: str) -> None:
        cluster = driver.cluster
        super().__init__(cluster, driver.process)
        self.driver = driver
        self.claimant = claimant
        self.leader: Leader | None = None
        self.says: LeaderSays | None = None
        self._seen_at_first = staying(driver.heard.present)
        self._has_stepped_down = False
        self._members: tuple[str, ...] = ()
        self._store = cluster.store
        self._handlers |= {
            requests.ReadLog: self._read_log,
            requests.Claim: self._claim,
            requests.Force: self._nothing,
            requests.Trim: self._trim,
            requests.Mark: self._mark,
            requests.LargestMarked: self._largest_marked,
            requests.ForgetMarks: self._forget_marks,
            requests.ReadSinks: self._read_sinks,
            requests.HasLeftovers: self._has_leftovers,
            requests.Examine: self._examine,
            requests.Fence: self._fence,
            requests.Fit: self._fit,
            requests.WriteManifest: self._write_manifest,
            requests.ReadReports: self._read_reports,
            requests.CommitSink: self._commit_sink,
            requests.ListStored: self._list_stored,
            requests.Delete: self._delete,
            requests.ForgetStaged: self._forget_staged,
        }

    @property
    def is_over(self) -> bool:
        return self.scope.is_over

    @property
    def _generation(self) -> int:
        return 0 if self.leader is None else self.leader.generation

    def begin(self) -> None:
        self.start(self._lead(), self.on_stepped_down)

    def stop(self) -> None:
        if not self.is_over:
            self.world.note("{} leads no more", self.claimant)
        self.scope.is_over = True

    def start(self, flow: Flow[None], on_failed: Callable[[TidegateError], None]) -> None:
        if self._has_stepped_down:
            self.cluster.checkers.nothing_after_stepping_down.on_begun(self.claimant)
        super().start(flow, on_failed)

    async def carry_out(self, request: Request[Any]) -> Any:
        """It may stop before or after any of them, and wake up to another leader."""
        pause = self.cluster.on_leader_asks()
        if pause is Moment.BEFORE:
            await self._sleep_through()
        answer = await super().carry_out(request)
        if pause is Moment.AFTER:
            await self._sleep_through()
        return answer

    async def _sleep_through(self) -> None:
        self.cluster.put_to_sleep(self.process, SLEPT_THROUGH_MS)
        await self.world.sleep(1)

    async def _lead(self) -> None:
        cluster = self.cluster
        opening = Opening(self, self.claimant, PATIENCE)
        opened = await opening.open()
        if isinstance(opened, Refuse):
            cluster.on_refused(opened, opening.health)
            return
        base = None
        if opened.base is not None:
            base = await Asker(self, PATIENCE).insist(requests.ReadReports(opened.base))
        self.world.note("{} opened generation {} from {}", self.claimant, opened.generation, opened.base)
        present = staying(self.driver.heard.present) or self._seen_at_first
        placed = place(cluster.placeables, {name: each.stages for name, each in present.items()})
        members = {
            name: Assignment(
                present[name].incarnation, stages, any(cluster.dag.stages[each].is_source for each in stages)
            )
            for name, stages in placed.items()
            if stages
        }
        placement = {stage: name for name, each in members.items() for stage in each.stages}
        self.driver.placements[opened.generation] = placement
        cluster.checkers.run_once.on_ordered(opened.generation, members)
        self._members = tuple(members)
        self.says = LeaderSays(opened.generation, self.claimant)
        self.leader = Leader(
            self, opened, cluster.dag.stages, cluster.dag.sinks, members, cluster.config_now(), base, PATIENCE
        )
        incarnations = {name: each.incarnation for name, each in members.items()}
        self.driver.instance.on_opened(self.leader, incarnations, cluster.placeables)
        self._tick()

    def _tick(self) -> None:
        if not self.is_over and self.leader is not None:
            self.leader.on_time()
            self.driver.say()
            self.world.after(LEADER_TICK_MS, self.process, self._tick)

    def receive(self, message: ToLeader) -> None:
        """From the member in the same process."""
        leader = self.leader
        if self.is_over or leader is None:
            return
        match message:
            case Seen(generation, instance, sequence):
                if generation == leader.generation:
                    leader.on_seen(instance, sequence)
            case StageReport():
                leader.on_report(message)
            case Ack():
                self.cluster.checkers.all_acknowledged.on_ack(message)
                leader.on_ack(message)
            case MemberFailed(generation, instance, why):
                if generation == leader.generation:
                    leader.on_failed(instance, why)
            case StageDecline():
                leader.on_decline(message)

    def trigger(self, flags: Flag) -> None:
        """A user asks for a checkpoint."""
        if self.leader is not None and not self.is_over:
            self.leader.trigger(flags)

    def cancel(self) -> None:
        """A user cancels the checkpoint that is being prepared."""
        if self.leader is None or not self.leader.cancel():
            raise NoCheckpointInProgress("there is none to cancel")

    # -- what a leader tells ----------------------------------------------------------------------

    def send(self, instance: str, message: StartOrder | Announced | Visible) -> None:
        if self._has_stepped_down:
            self.cluster.checkers.nothing_after_stepping_down.on_begun(self.claimant)
        if self.says is not None:
            self.says.say(instance, message)
        if instance == self.driver.name:
            self.driver.hand_over(self.driver.receive, message)

    def on_begun(self, checkpoint: Checkpoint) -> None:
        barrier = checkpoint.barrier
        self.world.note("{} begins {}", self.claimant, barrier)
        checkers = self.cluster.checkers
        checkers.monotone_ids.on_prepared(checkpoint.generation, barrier.checkpoint_id, barrier.epoch)
        checkers.rightly_blamed.on_announced(checkpoint.generation, barrier.checkpoint_id)

    def on_aborted(self, barrier: Barrier, reason: AbortReason, detail: str) -> None:
        self.world.note("{} aborts {}: {}, {}", self.claimant, barrier, reason.value, detail)
        self.cluster.aborted += 1
        self.cluster.checkers.rightly_blamed.on_aborted(self._generation, barrier.checkpoint_id, reason)

    def on_completed(self, record: CheckpointCompleted, checkpoint: Checkpoint, min_watermark_ms: int | None) -> None:
        self.cluster.check_watermark(record.generation, min_watermark_ms)
        self.cluster.checkers.all_acknowledged.on_decided(record, self._members)
        if checkpoint.barrier.is_drain:
            self.driver.end_leading()  # a drained pipeline has stopped; somebody starts it again

    def on_commit_failed(self, sink: str, permit: CommitPermit, failures: int, error: TidegateError) -> None:
        self.world.note("{}: {} of {} failed ({}): {}", self.claimant, permit, sink, failures, error)

    def on_shown(self, checkpoint_id: int) -> None:
        self.world.note("all tables show checkpoint {}", checkpoint_id)

    def on_not_cleaned(self, error: StoreUnavailable) -> None:
        self.world.note("{} could not clean up: {}", self.claimant, error)

    def on_stepped_down(self, why: TidegateError) -> None:
        self.world.note("{} steps down: {}", self.claimant, why)
        is_open = self.leader is not None and self.cluster.checkers.log.generation == self._generation
        if not isinstance(why, REASONS_TO_STEP_DOWN) or (is_open and isinstance(why, Superseded)):
            raise SimulationFailure("Protocol", f"{self.claimant} steps down: {type(why).__name__}: {why}")
        self._has_stepped_down = True
        if self.leader is not None:
            self.leader.on_time()  # as whoever has not noticed yet
        self.driver.end_leading()

    # -- what a leader asks -----------------------------------------------------------------------

    async def _nothing(self, _request: Request[Any]) -> None:
        """What was written is there."""

    async def _fit(self, _request: requests.Fit) -> bool:
        return True

    async def _read_log(self, _request: requests.ReadLog) -> DecisionLog:
        records, torn = await self._store.read_log()
        return DecisionLog.from_records(records, torn)

    async def _claim(self, request: requests.Claim) -> bool:
        if self.world.chance(self.world.faults.sleeps_before_claim):
            self.cluster.put_to_sleep(self.process, self.world.delay(800))
            await self.world.sleep(1)
        claimed: bool = await self._store.claim(request.record)
        return claimed

    async def _trim(self, request: requests.Trim) -> None:
        await self._store.trim_log(request.start, request.but)

    async def _mark(self, request: requests.Mark) -> None:
        await self._store.reserve(request.checkpoint_id)

    async def _largest_marked(self, _request: requests.LargestMarked) -> int:
        largest: int = await self._store.largest_reserved()
        return largest

    async def _forget_marks(self, request: requests.ForgetMarks) -> None:
        await self._store.forget_marks(request.below)

    async def _read_sinks(self, _request: requests.ReadSinks) -> dict[str, Any]:
        return {name: await table.facts() for name, table in self.cluster.tables.items()}

    async def _has_leftovers(self, _request: requests.HasLeftovers) -> bool:
        return bool(await self._store.list_objects())

    async def _fence(self, request: requests.Fence) -> None:
        for table in self.cluster.tables.values():
            await table.fence(request.generation)

    async def _examine(self, request: requests.Examine) -> str | None:
        held = await self._store.get(request.record.manifest)
        if held is None:
            return "its manifest is gone"
        stored = dict(await self._store.list_objects())
        missing = [path for report in held.value.values() for path in report.files if path not in stored]
        return f"{missing[0]} is gone" if missing else None

    async def _write_manifest(self, request: requests.WriteManifest) -> requests.Written:
        checkpoint = request.checkpoint
        path = f"g{checkpoint.generation}/manifest-{checkpoint.checkpoint_id}"
        manifest: Manifest = dict(checkpoint.reports)
        await self._store.put(path, checkpoint.generation, manifest)
        return requests.Written(path, "", self.cluster.clock())

    async def _read_reports(self, request: requests.ReadReports) -> Manifest | None:
        held = await self._store.get(request.record.manifest)
        return None if held is None else held.value

    async def _commit_sink(self, request: requests.CommitSink) -> None:
        answer = await self.cluster.tables[request.sink].commit(request.permit, sealed_in(request.committable))
        self.world.note("{} committed {} to {}: {}", self.claimant, request.permit, request.sink, answer)
        if isinstance(answer, Fenced):
            raise answer

    async def _list_stored(self, request: requests.ListStored) -> list[StoredFile]:
        return [
            StoredFile(path, each)
            for path, each in await self._store.list_objects()
            if each != self._generation or self._is_behind(path, request)
        ]

    def _is_behind(self, path: str, request: requests.ListStored) -> bool:
        kind, number = path.rpartition("/")[2].rsplit("-", 1)
        if kind in ("state", "manifest"):
            return int(number) < request.visible
        stage = path.split("/")[1]
        positions = [request.reports[reader].positions[stage] for reader in self.cluster.dag.readers(stage)]
        return int(number) <= min(positions)

    async def _delete(self, request: requests.Delete) -> None:
        self.world.note("{} deletes {} files", self.claimant, len(request.files))
        await self._store.delete([file.path for file in request.files], self._generation)

    async def _forget_staged(self, request: requests.ForgetStaged) -> None:
        for table in self.cluster.tables.values():
            await table.drop(lambda staged: staged.generation < request.before_generation)
