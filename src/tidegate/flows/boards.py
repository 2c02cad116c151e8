"""What the processes of a pipeline say to each other: each has a board, which it alone writes and all others read.

A board holds all that its process has to say at the moment. So none that is missed is missed for good, and one that is
read again says nothing new: leader and member take the same words twice. Nothing that was said is hidden by what is
said after it: announcements stay on the leader's board until every member has taken them, acks on a member's until it
is told how their checkpoint has ended.

Guarantees:
- Everything on a board is of one generation, and who reads it checks that it is his own.
- An order is for one incarnation of an instance, and says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

import msgspec

from tidegate.errors import ProtocolViolation
from tidegate.flows.leader import Announced, Leader, Visible
from tidegate.flows.member import Member, MemberFailed, Seen, ToLeader
from tidegate.flows.requests import StartOrder
from tidegate.protocol.coordinator import StageDecline, StageReport
from tidegate.protocol.quorum import Ack, Announcement

ToMember = StartOrder | Announced | Visible
B = TypeVar("B")


class LeaderBoard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """To all members of a generation. `told`: what else they are to know, which is between those who run them."""

    generation: int
    leader: str
    orders: dict[str, StartOrder] = {}
    announcements: tuple[Announcement, ...] = ()
    visible: dict[str, int] = {}
    told: Any = None

    def for_member(self, instance: str) -> Iterator[ToMember]:
        if (order := self.orders.get(instance)) is not None:
            yield order
        if self.announcements:
            yield Announced(self.generation, self.announcements)
        for sink, through_batch in self.visible.items():
            yield Visible(self.generation, sink, through_batch)


class MemberBoard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """To whoever leads a generation. `told`: the same."""

    generation: int
    instance: str
    incarnation: str
    seen: int = 0
    reports: tuple[StageReport, ...] = ()
    acks: tuple[Ack, ...] = ()
    declines: tuple[StageDecline, ...] = ()
    failed: str | None = None
    is_leaving: bool = False
    told: Any = None

    def for_leader(self) -> Iterator[ToLeader]:
        yield Seen(self.generation, self.instance, self.seen)
        yield from self.reports
        yield from self.declines
        yield from self.acks
        if self.failed is not None:
            yield MemberFailed(self.generation, self.instance, self.failed)


class LeaderSays:
    """What a leader has to say, gathered from its messages."""

    def __init__(self, generation: int, leader: str) -> None:
        self._generation = generation
        self._leader = leader
        self._orders: dict[str, StartOrder] = {}
        self._announcements: dict[int, Announcement] = {}
        self._visible: dict[str, int] = {}

    def say(self, instance: str, message: ToMember) -> None:
        match message:
            case StartOrder():
                self._orders[instance] = message
            case Announced(_, announcements):
                self._announcements.update({each.sequence: each for each in announcements})
            case Visible(_, sink, through_batch):
                self._visible[sink] = max(through_batch, self._visible.get(sink, through_batch))

    def seen_by_all(self, sequence: int) -> None:
        """Every member has taken the announcements up to this one."""
        self._announcements = {each: one for each, one in self._announcements.items() if each > sequence}

    def board(self, told: Any = None) -> LeaderBoard:
        announcements = tuple(self._announcements[each] for each in sorted(self._announcements))
        return LeaderBoard(self._generation, self._leader, dict(self._orders), announcements, dict(self._visible), told)


class MemberSays:
    """What a member has to say, gathered from its messages."""

    def __init__(self, generation: int, instance: str, incarnation: str) -> None:
        self._generation = generation
        self._instance = instance
        self._incarnation = incarnation
        self._seen = 0
        self._reports: dict[tuple[int, str], StageReport] = {}
        self._acks: dict[int, Ack] = {}
        self._declines: dict[tuple[int, str], StageDecline] = {}
        self._failed: str | None = None

    def say(self, message: ToLeader) -> None:
        match message:
            case Seen(_, _, sequence):
                self._seen = max(self._seen, sequence)
            case StageReport():
                self._reports[message.checkpoint_id, message.stage] = message
            case Ack():
                self._acks[message.checkpoint_id] = message
            case StageDecline():
                self._declines[message.checkpoint_id, message.stage] = message
            case MemberFailed(_, _, why):
                self._failed = why

    def forget_but(self, under_way: Iterable[int]) -> None:
        """Of all other checkpoints it is known how they ended."""
        known = frozenset(under_way)
        self._reports = {key: each for key, each in self._reports.items() if key[0] in known}
        self._declines = {key: each for key, each in self._declines.items() if key[0] in known}
        self._acks = {key: each for key, each in self._acks.items() if key in known}

    def board(self, told: Any = None, *, is_leaving: bool = False) -> MemberBoard:
        return MemberBoard(
            self._generation,
            self._instance,
            self._incarnation,
            self._seen,
            tuple(each for key, each in self._reports.items() if key[0] not in self._acks),
            tuple(self._acks.values()),
            tuple(self._declines.values()),
            self._failed,
            is_leaving,
            told,
        )


def hand_to_member(board: LeaderBoard, member: Member) -> None:
    """What a leader says, to a member that reads it, perhaps again. Of another generation than its own it takes nothing
    but the order to begin one."""
    for message in board.for_member(member.instance):
        give_to_member(message, member)


def give_to_member(message: ToMember, member: Member) -> None:
    match message:
        case StartOrder():
            member.on_start(message)
        case Announced():
            member.on_announced(message)
        case Visible():
            member.on_visible(message)


def hand_to_leader(board: MemberBoard, leader: Leader) -> None:
    """What a member says, to the leader of its generation, perhaps again. Any other takes nothing of it."""
    if board.generation == leader.generation:
        for message in board.for_leader():
            give_to_leader(message, leader)


def give_to_leader(message: ToLeader, leader: Leader) -> None:
    match message:
        case Seen(_, instance, sequence):
            leader.on_seen(instance, sequence)
        case StageReport():
            leader.on_report(message)
        case Ack():
            leader.on_ack(message)
        case StageDecline():
            leader.on_decline(message)
        case MemberFailed(_, instance, why):
            leader.on_failed(instance, why)


Board = LeaderBoard | MemberBoard

_leader_decoder: Final = msgspec.json.Decoder(LeaderBoard)
_member_decoder: Final = msgspec.json.Decoder(MemberBoard)


def encode_board(board: Board) -> bytes:
    return msgspec.json.encode(board)


def decode_leader_board(data: bytes) -> LeaderBoard:
    """Raise `ProtocolViolation` on anything else, such as what another version of Tidegate says."""
    return _decoded(_leader_decoder, data)


def decode_member_board(data: bytes) -> MemberBoard:
    """The same of a member's."""
    return _decoded(_member_decoder, data)


def _decoded(decoder: msgspec.json.Decoder[B], data: bytes) -> B:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"what another process says cannot be understood: {error}") from error
