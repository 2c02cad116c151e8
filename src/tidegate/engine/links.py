"""What the part of a generation in one process has to do with its parts in others: channels that cross, messages
between leader and members, and what the one who leads has to know of stages that run elsewhere.

All of it is called from the control thread. Within a process nothing of it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from tidegate.cluster.exchange import Exchange, Heard
from tidegate.engine.channel import Channel
from tidegate.engine.ending import Consumption
from tidegate.engine.part import Part
from tidegate.engine.status import InstanceStatus, Observer, StagePart, StageStatus, as_moment
from tidegate.errors import ProtocolViolation
from tidegate.flows.boards import LeaderBoard, LeaderSays, MemberBoard, MemberSays, ToMember
from tidegate.flows.leader import Announced, Visible
from tidegate.flows.member import ToLeader
from tidegate.flows.requests import StartOrder
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.messages import Segment, Watermark, decode, encode
from tidegate.protocol.outlet import Outlet
from tidegate.protocol.quorum import Ack
from tidegate.storage.manifest import StageSnapshot

if TYPE_CHECKING:
    from tidegate.engine.generation import Generation


class LeaderTold(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a leader tells its members besides."""

    shown: int = 0
    """The newest checkpoint that all tables show."""
    pending: tuple[str, ...] = ()
    """The sinks whose tables are late with an epoch."""
    active: tuple[int, ...] = ()
    """The checkpoints that are under way."""
    holds_sources: bool = False
    ended: str | None = None
    """Why the pipeline has ended, if it has."""
    has_failed: bool = False


class Rest(msgspec.Struct, frozen=True):
    """How far a query has come, and whether it is done: it waits in vain for more than it has consumed."""

    is_done: bool
    sequence: int
    positions: dict[str, int]


class MemberTold(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a member tells its leader, and those whose channels it reads."""

    taken: dict[str, tuple[int, int]] = {}
    """Of each channel from elsewhere: how many entries were taken from it, and how far it is consumed."""
    held: tuple[str, ...] = ()
    """The channels from elsewhere of which no more is shown for now, because they are too far ahead in event time."""
    stages: dict[str, StageStatus] = {}
    parts: dict[int, dict[str, StagePart]] = {}
    rests: dict[str, Rest] = {}


NOTHING: Final = MemberTold()


class Links:
    def __init__(self, generation: Generation, part: Part, exchange: Exchange) -> None:
        self._part = part
        self._exchange = exchange
        self._of = generation
        self._generation = generation.generation
        queries = generation.queries
        own = [each for each in queries if part.runs(each.name)]
        self._incoming = sorted({name for each in own for name in each.inputs if not part.runs(name)})
        readers: dict[str, set[str]] = {}
        for query in queries:
            for name in query.inputs:
                if part.runs(name) and not part.runs(query.name):
                    readers.setdefault(name, set()).add(part.runs_at(query.name))
        self._outlets = {name: Outlet(sorted(instances)) for name, instances in readers.items()}
        """Of the channels that are read elsewhere."""
        self._leader_says: LeaderSays | None = None
        self._member_says = MemberSays(self._generation, part.instance, part.incarnation)
        self._handed_over: dict[str, MemberBoard] = {}
        self._told: dict[str, MemberTold] = {}
        self._visible: dict[str, int] = {}
        self.leader_told = LeaderTold()
        """What the leader said last, for a member."""
        self.ended: str | None = None
        """Why the pipeline has ended, as this one leads it."""
        self.has_failed = False
        self.missing: Mapping[str, int] = {}
        """Which members are not seen any more, and since when, as this one leads them."""
        self.has_said = False
        self._own_told = NOTHING
        # What is told besides messages: often enough for whoever waits for it, and for people.
        self._tell_every_ms, self._tell_status_every_ms = part.tell_every_ms, part.tell_status_every_ms
        self._told_ms = self._status_ms = -self._tell_status_every_ms
        self.is_leaving = False
        self._consumption = Consumption(generation, generation.has_ended)
        self._observer = Observer("", generation.carrier.clock)
        exchange.listen_to(None if part.leads else {name for each in self._outlets.values() for name in each.readers})
        exchange.follow([(self._generation, name) for name in self._incoming])

    def lead(self, leader: str) -> None:
        """This one leads, by that name."""
        self._exchange.forget_before(self._generation)
        self._leader_says = LeaderSays(self._generation, leader)

    @property
    def is_away(self) -> frozenset[str]:
        """The instances that have a part in it elsewhere."""
        return frozenset(self._part.incarnations) - {self._part.instance}

    @property
    def newer(self) -> LeaderBoard | None:
        """What somebody says who leads a newer generation."""
        boards = self._exchange.heard.leaders.values()
        newest = max(boards, key=lambda each: each.generation, default=None)
        return newest if newest is not None and newest.generation > self._generation else None

    # -- messages ---------------------------------------------------------------------------------

    def is_to_elsewhere(self, to: str, message: ToMember | ToLeader) -> bool:
        """Whether a message is for another process: then it is said to that."""
        if isinstance(message, StartOrder | Announced | Visible):
            if to == self._part.instance:
                return False
            assert self._leader_says is not None
            self._leader_says.say(to, message)
            return True
        if self._part.leads:
            return False
        self._member_says.say(message)
        return True

    def hear(self, channels: Mapping[str, Channel], seen: int) -> Iterator[ToMember | ToLeader]:
        """What the others have said since. `seen`: the last announcement that the member here has taken. Raises what
        keeps this process from hearing them, or them from hearing it."""
        self._exchange.check()
        for (generation, name), value in self._exchange.entries():
            if generation == self._generation:
                _append(channels[name], value)
        if self._part.leads:
            yield from self._from_members()
        else:
            yield from self._from_leader(seen)

    def _from_members(self) -> Iterator[ToLeader]:
        for instance in sorted(self.is_away):
            board = self._board_of(instance)
            if board is not None and board is not self._handed_over.get(instance):
                self._handed_over[instance] = board
                yield from map(_with_details, board.for_leader())

    def _board_of(self, instance: str) -> MemberBoard | None:
        """Only of the incarnation that runs it, and of this generation."""
        board = self._exchange.heard.members.get(instance)
        if board is None or board.generation != self._generation:
            return None
        return board if board.incarnation == self._part.incarnations.get(instance) else None

    def _from_leader(self, seen: int) -> Iterator[ToMember]:
        boards = self._exchange.heard.leaders.values()
        board = next((each for each in boards if each.generation == self._generation), None)
        if board is None:
            return
        if board.told is not None:
            self.leader_told = msgspec.convert(board.told, LeaderTold)
        for message in board.for_member(self._part.instance):
            match message:
                case StartOrder():
                    continue  # it is what is run
                case Announced(_, announcements):
                    if announcements[-1].sequence > seen:
                        yield message
                case Visible(_, sink, through_batch):
                    if through_batch > self._visible.get(sink, -1):
                        self._visible[sink] = through_batch
                        yield message

    # -- what is known of others ------------------------------------------------------------------

    def told_by(self, instance: str) -> MemberTold:
        board = self._board_of(instance)
        if board is None or board.told is None:
            return NOTHING
        known = self._told.get(instance)
        if known is None or self._handed_over.get(f"told by {instance}") is not board:
            self._handed_over[f"told by {instance}"] = board
            known = self._told[instance] = msgspec.convert(board.told, MemberTold, str_keys=True)
        return known

    def told_of(self, query: str) -> MemberTold:
        """What the one that runs a query says."""
        return self.told_by(self._part.runs_at(query))

    def part_of(self, query: str, checkpoint_id: int) -> StagePart:
        """How far a query elsewhere has come with a checkpoint."""
        return self.told_of(query).parts.get(checkpoint_id, {}).get(query, StagePart(progress="waiting"))

    def rests(self) -> dict[str, Rest]:
        """Of all queries, as far as it is known."""
        away = {name: self.told_of(name).rests.get(name, Rest(False, 0, {})) for name in self._of.elsewhere}
        return self._own_rests() | away

    def instances(self, now: datetime) -> tuple[InstanceStatus, ...]:
        """All that have a part in it, and those that are there besides. `now`: what the clock on the wall says."""
        heard = self._exchange.heard
        names = sorted(self._part.placed.keys() | heard.present.keys())
        return tuple(self._instance(heard, name, now) for name in names)

    def _instance(self, heard: Heard, name: str, now: datetime) -> InstanceStatus:
        profile, since = heard.profiles.get(name), self.missing.get(name)
        given = self._part.placed.get(name, ())
        stages = tuple(stage.name for query in self._of.queries if query.name in given for stage in query.members)
        ago = None if since is None else timedelta(milliseconds=self._of.now_ms - since)
        return InstanceStatus(
            leads=name == self._part.instance,
            host=None if profile is None else profile.host,
            pid=None if profile is None else profile.pid,
            stages=stages,
            missing_since=None if ago is None else as_moment(now - ago),
            name=name,
        )

    def stages(self) -> dict[str, StageStatus]:
        """The stages that run elsewhere."""
        return {name: each for instance in sorted(self.is_away) for name, each in self.told_by(instance).stages.items()}

    def consumed(self, name: str) -> int | None:
        """How far those elsewhere that read a channel have consumed it; None: there are none."""
        slowest = self.slowest_reader(name)
        return None if slowest is None else slowest[0]

    def is_held(self, name: str) -> bool:
        """Whether a reader elsewhere is shown no more of a channel for now."""
        outlet = self._outlets.get(name)
        return outlet is not None and any(name in self.told_by(each).held for each in outlet.readers)

    def is_sent(self, name: str, end: int) -> int:
        """How far a channel was sent to those who read it elsewhere."""
        return self._outlets[name].appended if name in self._outlets else end

    def slowest_reader(self, name: str) -> tuple[int, str] | None:
        """How far the slowest of those elsewhere that read a channel has consumed it, and where that is."""
        if name not in self._outlets:
            return None
        return min((self.told_by(each).taken.get(name, (0, 0))[1], each) for each in self._outlets[name].readers)

    # -- saying -----------------------------------------------------------------------------------

    def say(self) -> None:
        """Hand over what is to be said now."""
        generation = self._of
        self.has_said = True
        for name, outlet in self._outlets.items():
            self._send_on(outlet, name, generation.channels[name])
        now_ms = generation.now_ms
        if now_ms - self._told_ms >= self._tell_every_ms:
            self._told_ms = now_ms
            self._trim()
            self._own_told = self._tell(now_ms)
        if self._leader_says is not None:
            self._leader_says.seen_by_all(generation.leader.seen_by_all)
            self._exchange.lead(self._leader_says.board(self._leader_tells()))
        self._member_says.forget_but(generation.member.under_way)
        self._exchange.follow_up(self._member_says.board(self._own_told, is_leaving=self.is_leaving))

    def _send_on(self, outlet: Outlet, name: str, channel: Channel) -> None:
        while (message := channel.at(outlet.appended)) is not None:
            self._exchange.append((self._generation, name), outlet.append(), encode(message))

    def _trim(self) -> None:
        for name, outlet in self._outlets.items():
            for each in outlet.readers:
                outlet.on_taken(each, self.told_by(each).taken.get(name, (0, 0))[0])
            if taken := outlet.let_go():
                self._exchange.trim((self._generation, name), taken)

    def _tell(self, now_ms: int) -> MemberTold:
        taken = {
            name: (self._exchange.taken((self._generation, name)), self._of.consumed_here(name))
            for name in self._incoming
        }
        held = tuple(name for name in self._incoming if self._of.is_held_here(name))
        told = msgspec.structs.replace(self._own_told, taken=taken, held=held)
        if self._part.leads:
            return told
        told = msgspec.structs.replace(told, rests=self._own_rests())
        if now_ms - self._status_ms >= self._tell_status_every_ms:
            self._status_ms = now_ms
            told = msgspec.structs.replace(
                told,
                stages=self._observer.stages_of(self._of),
                parts={each: self._of.parts_here(each) for each in self.leader_told.active},
            )
        return told

    def _own_rests(self) -> dict[str, Rest]:
        """Looked at again and again: what a query was seen to wait behind is remembered."""
        done = self._consumption.done_here()
        return {
            name: Rest(
                name in done,
                stage.channel.sequence,
                {each: stage.inputs.position(each) for each in stage.definition.inputs},
            )
            for name, stage in self._of.stages.items()
        }

    def _leader_tells(self) -> LeaderTold:
        generation = self._of
        return LeaderTold(
            generation.shown,
            tuple(generation.leader.commits.pending),
            tuple(each.checkpoint_id for each in generation.coordinator.active),
            generation.holds_sources,
            self.ended,
            self.has_failed,
        )


def _append(channel: Channel, value: bytes) -> None:
    try:
        message = decode(value)
    except msgspec.ValidationError as error:
        raise ProtocolViolation(
            f"what another instance has appended to the channel of {channel.writer!r} cannot be understood: {error}"
        ) from error
    match message:
        case Segment():
            try:
                channel.append_segment(message)
            except ValueError as error:
                raise ProtocolViolation(
                    f"of what another instance has appended to the channel of {channel.writer!r} something is missing, "
                    f"or came twice: {error}"
                ) from error
        case Watermark(watermark_ms):
            channel.append_watermark(watermark_ms)
        case _:
            channel.append_barrier(message)


def _with_details(message: ToLeader) -> ToLeader:
    """What is stored of a stage, as who writes the manifest takes it."""
    match message:
        case StageReport():
            return _with_detail(message)
        case Ack():
            return msgspec.structs.replace(message, reports=tuple(map(_with_detail, message.reports)))
        case _:
            return message


def _with_detail(report: StageReport) -> StageReport:
    return msgspec.structs.replace(report, detail=msgspec.convert(report.detail, StageSnapshot))
