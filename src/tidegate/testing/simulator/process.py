"""A simulated driver process: it carries out what flows ask for, in simulated time, with faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.cluster.exchange import Exchange, Heard, Profile
from tidegate.errors import CoordinationUnavailable, StageFailed, StoreUnavailable, TidegateError
from tidegate.flows import requests
from tidegate.flows.boards import MemberSays, hand_to_leader, hand_to_member
from tidegate.flows.instance import Cue, Instance, had_part
from tidegate.flows.leader import Announced, Visible
from tidegate.flows.member import Member, ToLeader
from tidegate.flows.requests import StartOrder
from tidegate.flows.stage import StageCheckpoints
from tidegate.protocol.coordinator import StageDecline, StageReport
from tidegate.protocol.membership import Attendance, LeaderClaim, Standing
from tidegate.protocol.messages import Barrier
from tidegate.protocol.outlet import Outlet
from tidegate.protocol.quorum import AnnouncedPhase, Announcement
from tidegate.testing.simulator.checkers import Manifest, SimulationFailure
from tidegate.testing.simulator.host import Host
from tidegate.testing.simulator.kv import SimulatedSession
from tidegate.testing.simulator.leading import SimulatedLeader
from tidegate.testing.simulator.query import Channel, QueryState, SimulatedQuery, SimulatedSegment, sealed_in
from tidegate.testing.simulator.world import Process, Scope

if TYPE_CHECKING:
    from tidegate.testing.simulator.cluster import Cluster

MEMBER_TICK_MS: Final = 40
_LISTEN_MS: Final = 150
"""A notice that is missed costs so much."""

REASONS_TO_FAIL: Final = (StageFailed,)
"""Any other error is a defect, which a new generation would hide."""


class Carried(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A message of a channel, for a reader in another process."""

    segment: SimulatedSegment | None = None
    barrier: Barrier | None = None


_carried: Final = msgspec.json.Decoder(Carried)


class SimulatedProcess(Host):
    """A driver process, which is a member: it runs some of the stages of one generation. Sometimes it leads one."""

    def __init__(self, cluster: Cluster, name: str, pinned: tuple[str, ...] = (), clock_ahead_ms: int = 0) -> None:
        super().__init__(cluster, Process(name, clock_ahead_ms))
        self.name = name
        self._pinned = pinned
        self.process.alive = False
        self._elections = 0
        self._handlers |= {
            requests.RunStages: self._run_stages,
            requests.DropShown: self._drop_shown,
        }
        self._begin_anew()

    def _begin_anew(self) -> None:
        """What an incarnation knows at first: nothing."""
        self.queries: dict[str, SimulatedQuery] = {}
        self.leading: SimulatedLeader | None = None
        self.is_leaving = False
        self._channels: dict[tuple[int, str], Channel] = {}
        self._outlets: dict[str, Outlet] = {}
        self.placements: dict[int, dict[str, str]] = {}
        """Where each stage of a generation runs that is yet to begin here."""
        self._under_way: set[int] = set()
        self.member = Member(self, self.name)
        self._says = MemberSays(0, self.name, self.incarnation)
        self.session: SimulatedSession | None = None
        self.exchange: Exchange | None = None
        self._alone = Heard()
        self._is_to_send = self._is_to_receive = self._is_round_due = False
        self._is_in_round = False
        self.instance = Instance(
            LeaderClaim(self.name, self.incarnation),
            how_many=self.cluster.expected_at_first,
            grace_ms=self.cluster.grace_ms,
        )

    def forget(self) -> None:
        """What a crash does to memory."""
        self._stop_queries()
        if self.leading is not None:
            self.leading.stop()
        if self.session is not None:
            self.session.close()
        self.scope.is_over = True
        self.scope = Scope()
        self._begin_anew()

    def _stop_queries(self) -> None:
        for query in self.queries.values():
            query.stop()
        self.queries = {}

    # -- among others -----------------------------------------------------------------------------

    def begin(self) -> None:
        """The process has started, or begins anew."""
        kv = self.cluster.kv
        if kv is None:
            own = self.instance.own
            self._alone = Heard({self.name: Attendance(self.incarnation)}, claim=own)
        else:
            self.session = kv.open(self.process)
            self.exchange = Exchange(
                self.session, self.cluster.files, self.name, self.incarnation, Profile(self._pinned)
            )
            try:
                self.exchange.join()
            except CoordinationUnavailable:
                self.world.after(self.world.delay(30), self.process, self._join_anew)
                return
            self.world.note("{} joins as {}", self.name, self.incarnation)
            self.exchange.on_heard = self._round_soon
            self.session.on_notice = self._receive_soon
            self.session.listens = self._listens
            self._listen()
        self.world.after(self.world.delay(MEMBER_TICK_MS), self.process, self._tick)

    def _join_anew(self) -> None:
        """Others may have taken it for dead: it is another incarnation from now on."""
        self.process.renew()
        self.forget()
        self.begin()

    def _listens(self) -> tuple[str, ...]:
        return () if self.exchange is None else self.exchange.folders

    @property
    def heard(self) -> Heard:
        return self._alone if self.exchange is None else self.exchange.heard

    def _listen(self) -> None:
        self._receive_soon()
        self.world.after(_LISTEN_MS, self.process, self._listen)

    def _receive_soon(self, longest_ms: int = 14) -> None:
        if not self._is_to_receive:
            self._is_to_receive = True
            self.world.after(self.world.delay(longest_ms), self.process, self._receive)

    def _receive(self) -> None:
        self._is_to_receive = False
        if self.exchange is not None and not self._talks(self.exchange.receive):
            self._receive_soon(30)

    def _send_soon(self, longest_ms: int = 8) -> None:
        if not self._is_to_send:
            self._is_to_send = True
            self.world.after(self.world.delay(longest_ms), self.process, self._send)

    def _send(self) -> None:
        self._is_to_send = False
        if self.exchange is not None and not self._talks(self.exchange.send):
            self._send_soon(30)

    def _talks(self, act: Callable[[], None]) -> bool:
        """Whether it has worked; else it is to be done later."""
        faults = self.world.faults
        if self.world.chance(faults.lose_message):
            return False
        try:
            act()
            if self.world.chance(faults.repeats):
                act()
        except CoordinationUnavailable:
            return False
        return True

    def leave(self) -> None:
        """In order: nothing of it is missed."""
        self.is_leaving = True
        self.world.note("{} wants to leave", self.name)
        self.say()

    # -- one round --------------------------------------------------------------------------------

    def _round_soon(self) -> None:
        if not self._is_round_due:
            self._is_round_due = True
            self.world.after(1, self.process, self._round)

    def _tick(self) -> None:
        self.member.on_time()
        self._round()
        self.world.after(MEMBER_TICK_MS, self.process, self._tick)

    def _round(self) -> None:
        """What the control thread does with what was heard."""
        self._is_round_due = False
        if self.heard.is_lost:
            self.world.note("{} is told that it was taken for dead", self.name)
            self._join_anew()
            return
        if self.exchange is not None:
            self._is_in_round = True
            self._take_entries(self.exchange)
            self._read_boards()
            self._is_in_round = False
        self._look()
        self.say()

    def _read_boards(self) -> None:
        heard = self.heard
        leaders = [board for name, board in heard.leaders.items() if name != self.name]
        if len(leaders) > 1:
            leaders.sort(key=lambda each: -each.generation)
        for board in leaders:
            if board.generation > self.member.generation:
                placement = {stage: name for name, order in board.orders.items() for stage in order.stages}
                self.placements[board.generation] = placement
            hand_to_member(board, self.member)
        leader = None if self.leading is None else self.leading.leader
        for name, each in heard.members.items():
            if name == self.name:
                continue
            if leader is not None:
                for ack in each.acks:
                    self.cluster.checkers.all_acknowledged.on_ack(ack)
                hand_to_leader(each, leader)
            if each.generation == self.member.generation:
                for stage, outlet in self._outlets.items():
                    outlet.on_taken(name, (each.told or {}).get(stage, 0))

    def _look(self) -> None:
        heard = self.heard
        is_to_open = self.leading is None and heard.claim == self.instance.own
        expected = had_part(heard.leaders, heard.members) if is_to_open else ()
        hearing = None if self.exchange is None else self.exchange.hearings
        cue = self.instance.look(heard.present, heard.claim, self.now_ms, expected, hearing)
        if self.cluster.refused is not None:
            return
        if cue is Cue.CAMPAIGN and self.exchange is not None:
            self.exchange.campaign()
        elif cue is Cue.OPEN and self.leading is None:
            self._elections += 1
            self.leading = SimulatedLeader(self, f"{self.name}.{self.incarnation}#{self._elections}")
            self.leading.begin()
        elif cue is Cue.END or (self._is_opening and self.instance.standing is Standing.FOLLOWS):
            self.world.note("{} ends its generation: {}", self.name, self.instance.why)
            self.end_leading()
        if self.is_leaving and self.leading is None:
            self._leave_if_free()

    def _leave_if_free(self) -> None:
        """When it has no part in what comes after, or nobody else is there."""
        newest = max(self.heard.leaders.values(), key=lambda each: each.generation, default=None)
        has_part = newest is None or newest.generation <= self.member.generation or self.name in newest.orders
        if not has_part or len(self.heard.present) == 1:
            self.cluster.on_left(self)

    @property
    def _is_opening(self) -> bool:
        return self.leading is not None and self.leading.leader is None

    def end_leading(self) -> None:
        """Its generation is over, or was not opened."""
        if self.leading is not None:
            self.leading.stop()
            self.leading = None
            self.instance.on_ended()
            self._round_soon()
            if self.exchange is not None:
                self._receive_soon()

    def say(self) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        if self.leading is not None and self.leading.leader is not None and self.leading.says is not None:
            self.leading.says.seen_by_all(self.leading.leader.seen_by_all)
            exchange.lead(self.leading.says.board())
        generation = self.member.generation
        told = {stage: exchange.taken((generation, stage)) for _, stage in exchange.followed}
        for stage, count in told.items():
            self.cluster.checkers.entries_once.on_heard(generation, stage, self.name, count)
        exchange.follow_up(self._says.board(told or None, is_leaving=self.is_leaving))
        for stage, outlet in self._outlets.items():
            if done := outlet.let_go():
                self.cluster.checkers.entries_once.on_trimmed(generation, stage, done, outlet.readers)
                exchange.trim((generation, stage), done)
        if exchange.said.is_set():
            self._send_soon()

    # -- channels ---------------------------------------------------------------------------------

    def channel(self, generation: int, stage: str) -> Channel:
        """As far as it is known here."""
        return self._channels.setdefault((generation, stage), Channel())

    def carry(self, generation: int, stage: str, message: SimulatedSegment | Barrier) -> None:
        """To readers in other processes."""
        outlet = self._outlets.get(stage)
        if outlet is not None and self.exchange is not None and generation == self.member.generation:
            carried = Carried(barrier=message) if isinstance(message, Barrier) else Carried(message)
            self.cluster.checkers.entries_once.on_appended(generation, stage, message)
            self.exchange.append((generation, stage), outlet.append(), msgspec.json.encode(carried))
            self._send_soon()

    def _take_entries(self, exchange: Exchange) -> None:
        for (generation, stage), value in exchange.entries():
            carried = _carried.decode(value)
            message = carried.barrier or carried.segment
            if message is not None:
                checker = self.cluster.checkers.entries_once
                checker.on_taken(generation, stage, self.name, message, self.member.generation)
                self.channel(generation, stage).append(message, stage)

    def _lay_channels(self, order: StartOrder) -> None:
        placement = self.placements[order.generation]
        self.placements = {number: each for number, each in self.placements.items() if number > order.generation}
        stages = self.cluster.dag.stages
        self._channels.clear()
        self._outlets = {}
        if self.exchange is None:
            return
        for name in order.stages:
            readers = {placement[reader] for reader in self.cluster.dag.readers(name)} - {self.name}
            if readers:
                self._outlets[name] = Outlet(sorted(readers))
        read = {each for name in order.stages for each in stages[name].inputs if placement[each] != self.name}
        self.exchange.follow([(order.generation, each) for each in sorted(read)])

    # -- what a member asks -----------------------------------------------------------------------

    @property
    def incarnation(self) -> str:
        return str(self.process.incarnation)

    def receive(self, message: StartOrder | Announced | Visible) -> None:
        """From the leader in the same process."""
        match message:
            case StartOrder():
                self.member.on_start(message)
            case Announced():
                self.member.on_announced(message)
            case Visible():
                self.member.on_visible(message)
        self.say()

    def send(self, leader: str, message: ToLeader) -> None:
        if isinstance(message, StageDecline):
            self.cluster.checkers.rightly_blamed.on_decline(message)
        self._says.say(message)
        if self.leading is not None and self.leading.claimant == leader:
            self.hand_over(self.leading.receive, message)
        elif not self._is_in_round:  # else it is said at its end
            self._round_soon()

    def hand_over(self, receive: Callable[[Any], None], message: Any) -> None:
        """Within the process. It may be as late as to another one, or get lost."""
        if not self.world.chance(self.world.faults.lose_message):
            self.world.after(self.world.delay(10), self.process, receive, message)

    def on_announced(self, announcement: Announcement) -> None:
        checkers = self.cluster.checkers
        checkers.announcements_in_order.on_taken(announcement.generation, self.name, announcement.sequence)
        checkers.run_once.on_obeyed(announcement.generation, self.name, self.incarnation)
        if announcement.phase is AnnouncedPhase.PREPARE:
            self._under_way.add(announcement.barrier.checkpoint_id)
        else:
            self._under_way.discard(announcement.barrier.checkpoint_id)
            self._says.forget_but(self._under_way)

    def on_failed(self, error: TidegateError) -> None:
        self.world.note("{} cannot go on: {}", self.name, error)
        if not isinstance(error, REASONS_TO_FAIL):
            raise SimulationFailure("Protocol", f"{self.name} cannot go on: {type(error).__name__}: {error}")

    async def _run_stages(self, request: requests.RunStages) -> dict[str, StageCheckpoints]:
        order = request.order
        self._stop_queries()
        self._says = MemberSays(order.generation, self.name, self.incarnation)
        self._under_way = set()
        self._lay_channels(order)
        self.say()
        self.cluster.checkers.run_once.on_run(order.generation, order.stages, self.name, self.incarnation)
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
