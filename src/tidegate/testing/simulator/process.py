"""A simulated driver process: it carries out what flows ask for, in simulated time, with faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import (
    CheckpointsFailed,
    Fenced,
    InstanceFailed,
    NoCheckpointInProgress,
    StageFailed,
    StoreUnavailable,
    Superseded,
    TidegateError,
)
from tidegate.flows import requests
from tidegate.flows.leader import Announced, Assignment, Leader, Visible
from tidegate.flows.member import Member, MemberFailed, Seen, ToLeader
from tidegate.flows.opening import Opening
from tidegate.flows.requests import Asker, Request, StartOrder
from tidegate.flows.stage import StageCheckpoints
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.coordinator import AbortReason, Checkpoint, StageDecline, StageReport
from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog
from tidegate.protocol.messages import Barrier, Flag
from tidegate.protocol.quorum import Ack, Announcement
from tidegate.protocol.recovery import Refuse
from tidegate.protocol.retention import StoredFile
from tidegate.testing.simulator.checkers import Manifest, SimulationFailure
from tidegate.testing.simulator.host import PATIENCE, Host
from tidegate.testing.simulator.query import QueryState, SimulatedQuery, SimulatedSegment, sealed_in
from tidegate.testing.simulator.world import Process, Scope

if TYPE_CHECKING:
    from tidegate.testing.simulator.cluster import Cluster

LEADER_TICK_MS: Final = 25
MEMBER_TICK_MS: Final = 40

REASONS_TO_STEP_DOWN: Final = (Superseded, Fenced, StoreUnavailable, CheckpointsFailed, InstanceFailed)
REASONS_TO_FAIL: Final = (StageFailed,)
"""Any other error is a defect, which a new generation would hide."""


class SimulatedProcess(Host):
    """A driver process, which is a member: it runs some of the stages of one generation."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster, Process(name))
        self.name = name
        self.queries: dict[str, SimulatedQuery] = {}
        self.member = Member(self, name)
        self._handlers |= {
            requests.RunStages: self._run_stages,
            requests.DropShown: self._drop_shown,
        }

    def forget(self) -> None:
        """What a crash does to memory."""
        self._stop_queries()
        self.scope.is_over = True
        self.scope = Scope()
        self.member = Member(self, self.name)

    def _stop_queries(self) -> None:
        for query in self.queries.values():
            query.stop()
        self.queries = {}

    def start_ticking(self) -> None:
        self.world.after(self.world.delay(MEMBER_TICK_MS), self.process, self._tick)

    def _tick(self) -> None:
        self.member.on_time()
        self.world.after(MEMBER_TICK_MS, self.process, self._tick)

    # -- what a member asks -----------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        return self.process.incarnation

    def receive(self, message: StartOrder | Announced | Visible) -> None:
        match message:
            case StartOrder():
                self.member.on_start(message)
            case Announced():
                self.member.on_announced(message)
            case Visible():
                self.member.on_visible(message)

    def send(self, leader: str, message: ToLeader) -> None:
        if isinstance(message, Ack):
            self.cluster.checkers.all_acknowledged.on_ack(message)
        elif isinstance(message, StageDecline):
            self.cluster.checkers.rightly_blamed.on_decline(message)
        self.cluster.send_to_leader(leader, message)

    def on_announced(self, announcement: Announcement) -> None:
        taken = self.cluster.checkers.announcements_in_order
        taken.on_taken(announcement.generation, self.name, announcement.sequence)

    def on_failed(self, error: TidegateError) -> None:
        self.world.note("{} cannot go on: {}", self.name, error)
        if not isinstance(error, REASONS_TO_FAIL):
            raise SimulationFailure("Protocol", f"{self.name} cannot go on: {type(error).__name__}: {error}")

    async def _run_stages(self, request: requests.RunStages) -> dict[str, StageCheckpoints]:
        order = request.order
        self._stop_queries()
        self.world.note("{} runs {} in generation {}", self.name, list(order.stages), order.generation)
        manifest: Manifest | None = None
        if order.base is not None:
            held = await self._get(order, order.base.manifest)
            manifest = held
        ready: dict[str, SimulatedQuery] = {}
        for name in order.stages:
            spec = self.cluster.dag.stages[name]
            if manifest is None:
                start = QueryState(dict.fromkeys(spec.paths.values(), 0))
            else:
                start = await self._load(order, manifest[name])
            ready[name] = SimulatedQuery(self, spec, order.generation, start, order.after_checkpoint)
        if self.member.generation != order.generation:
            return {}
        self.queries = ready
        for query in ready.values():
            query.begin()
        return {name: query.checkpoints for name, query in ready.items()}

    async def _load(self, order: StartOrder, report: StageReport) -> QueryState:
        states = [file for file in report.files if "/state-" in file]
        found: dict[str, object] = {path: await self._get(order, path) for path in report.files}
        rows = found[report.files[0]]
        in_flight: dict[str, list[SimulatedSegment]] = {}
        segments = iter(report.files[len(states) :])
        for flying in report.in_flight:
            for _ in range(flying.after, flying.through):
                segment = found[next(segments)]
                if isinstance(segment, SimulatedSegment):
                    in_flight.setdefault(flying.input, []).append(segment)
        return QueryState(
            rows=dict(rows) if isinstance(rows, dict) else {},
            batch=report.cut,
            positions=report.positions,
            output_sequence=report.output_sequence,
            in_flight={name: tuple(found) for name, found in in_flight.items()},
            chain=tuple(states),
            staged=sealed_in(report.committable) if report.committable else (),
        )

    async def _get(self, order: StartOrder, path: str) -> Any:
        while True:
            try:
                held = await self.cluster.store.get(path)
            except StoreUnavailable:
                await self.world.sleep(self.world.delay(10))
                continue
            if held is not None:
                return held.value
            if self.cluster.checkers.log.generation > order.generation:
                # A newer leader has moved on and cleaned up: this generation is over.
                await self.world.sleep(10**9)
            checker = "NoCheckpointLost" if path in self.cluster.checkers.damaged_files else "NothingNeededDeleted"
            raise SimulationFailure(checker, f"{path} was gone when it was restored")

    async def _drop_shown(self, request: requests.DropShown) -> None:
        generation, through = self.member.generation, request.through_batch
        self.queries[request.sink].on_visible(through)
        await self.cluster.tables[request.sink].drop(
            lambda staged: staged.generation <= generation and staged.batch <= through
        )


class SimulatedLeader(Host):
    """What a process does to lead: it opens a generation, and then leads it."""

    def __init__(self, cluster: Cluster, driver: SimulatedProcess, claimant: str) -> None:
        super().__init__(cluster, driver.process)
        self.driver = driver
        self.claimant = claimant
        self.leader: Leader | None = None
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

    async def _lead(self) -> None:
        cluster = self.cluster
        members = cluster.members()
        opening = Opening(self, self.claimant, PATIENCE)
        opened = await opening.open()
        if isinstance(opened, Refuse):
            cluster.on_refused(opened, opening.health)
            return
        base = None
        if opened.base is not None:
            base = await Asker(self, PATIENCE).insist(requests.ReadReports(opened.base))
        self.world.note("{} opened generation {} from {}", self.claimant, opened.generation, opened.base)
        assignment = cluster.assign(opened.generation, list(members))
        self._members = tuple(members)
        self.leader = Leader(
            self,
            opened,
            cluster.dag.stages,
            cluster.dag.sinks,
            {
                name: Assignment(members[name], stages, any(cluster.dag.stages[each].is_source for each in stages))
                for name, stages in assignment.items()
            },
            cluster.config_now(),
            base,
            PATIENCE,
        )
        self._tick()

    def _tick(self) -> None:
        if not self.is_over and self.leader is not None:
            self.leader.on_time()
            self.world.after(LEADER_TICK_MS, self.process, self._tick)

    def receive(self, message: ToLeader) -> None:
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
        self.cluster.send_to_process(instance, message)

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
            self.cluster.on_drained(self)

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
        if isinstance(why, Superseded | Fenced):
            self.stop()
        else:
            self.cluster.restart_generation(self)

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
            self.cluster.put_to_sleep(self.process)
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
