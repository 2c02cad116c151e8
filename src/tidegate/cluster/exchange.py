"""What a process says to the others and hears from them, through what they share.

Its control thread hands over values and looks at what was heard; it never waits. `send` and `receive` do all that takes
time: on threads of their own in a run (`post.py`), at moments of their choice in a simulation.

Keys:
  election/leader                        who leads; shared
  orders/<instance>                      the board of a process as a leader
  boards/<instance>                      its board as a member
  channels/<generation>/<stage>/<index>  what a stage's channel holds for readers in other processes, one key an entry
What is too large for a key lies in the root (`spills.py`).

Guarantees:
- What is said last is what is heard in the end, however often sending failed before. Entries of a channel are sent in
  order, and heard in order, each once.
- Nothing is sent or heard for an incarnation that others may have taken for dead.
- What cannot be sent or heard, however often it is tried, is an error of this process, and not a silence.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from tidegate.cluster.kv import Entry, Session
from tidegate.cluster.leftovers import Leftovers
from tidegate.cluster.spills import MOST_BYTES, Spills, is_named
from tidegate.errors import (
    InstanceFailed,
    MaybeWritten,
    NotWritten,
    ProtocolViolation,
    SessionLost,
    StageFailed,
    TidegateError,
)
from tidegate.flows.boards import (
    Board,
    LeaderBoard,
    MemberBoard,
    decode_leader_board,
    decode_member_board,
    encode_board,
)
from tidegate.protocol.membership import Attendance, LeaderClaim
from tidegate.storage.files import Files

_log = logging.getLogger("tidegate")

ELECTION: Final = "election"
LEADER: Final = "election/leader"
ORDERS: Final = "orders"
BOARDS: Final = "boards"
CHANNELS: Final = "channels"

B = TypeVar("B", LeaderBoard, MemberBoard)

ChannelKey = tuple[int, str]
"""A generation, and the stage that writes."""


class Profile(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an instance says of itself when it joins."""

    stages: tuple[str, ...] = ()
    host: str = ""
    pid: int = 0
    since: str = ""


class Heard(msgspec.Struct, frozen=True):
    """What was heard last."""

    present: Mapping[str, Attendance] = {}
    profiles: Mapping[str, Profile] = {}
    claim: LeaderClaim | None = None
    claim_version: int | None = None
    leaders: Mapping[str, LeaderBoard] = {}
    members: Mapping[str, MemberBoard] = {}
    is_lost: bool = False
    """Whether others may have taken this incarnation for dead."""


class _Appended(msgspec.Struct, frozen=True):
    channel: ChannelKey
    key: str
    value: bytes


class _Following:
    """Channels that are read, and what was heard of them. Where others are read next, there is another one of these: so
    a thread that still reads by the one before adds nothing to it, and nothing that it holds is lost."""

    def __init__(self, channels: Collection[ChannelKey] = ()) -> None:
        self.taken = dict.fromkeys(channels, 0)
        self.entries: deque[tuple[ChannelKey, bytes]] = deque()


class _Failed(msgspec.Struct, frozen=True):
    """What cannot be tried again. `channel`: of which it is an entry."""

    error: TidegateError
    channel: ChannelKey | None = None


class Exchange:
    def __init__(
        self,
        session: Session,
        root: Files,
        instance: str,
        incarnation: str,
        profile: Profile,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`root`: where boards and entries go that are larger than `most_bytes`."""
        self.own = LeaderClaim(instance, incarnation)
        self._session = session
        self._spills = Spills(root, incarnation, most_bytes)
        self._profile = profile
        self.heard = Heard()
        self.hearings = 0
        """How often it has heard what the others say, whether or not that was new."""
        self._boards: dict[str, Board] = {}
        self._written: dict[str, Board] = {}
        self._sent: dict[str, bytes] = {}
        self._own_versions: dict[str, int] = {}
        self._spilled: dict[str, bool] = {}
        """Of the boards that were written, whether they were too large."""
        self._appended: deque[_Appended] = deque()
        self._trimmed: deque[str] = deque()
        self._own_channels: set[ChannelKey] = set()
        self._left: set[ChannelKey] = set()
        """Channels of generations that are over."""
        self._listens_to: frozenset[str] | None = None
        self._campaign: Heard | None = None
        self._forgets_before = 0
        self._following = _Following()
        self._profiles: dict[bytes, Profile] = {}
        self.folders: tuple[str, ...] = (ELECTION, ORDERS, BOARDS)
        """Where something may change that is listened to."""
        self._versions: dict[str, dict[str, int]] = {ORDERS: {}, BOARDS: {}}
        """Of all boards that were heard last, by their folders and names."""
        self._foreign: dict[str, int] = {}
        """The versions of boards that cannot be understood."""
        self._leftovers = Leftovers(session, self._spills, (ORDERS, BOARDS))
        self._tidies: tuple[int, frozenset[str]] | None = None
        self._sends: ChannelKey | None = None
        """The channel of which an entry is being sent."""
        self._failed: _Failed | None = None
        self._decoded: dict[str, tuple[int, Any]] = {}
        self.on_heard: Callable[[], None] = _nothing
        """Called when something new was heard, on whichever thread hears it."""
        self.said = threading.Event()
        """Set when there is something to send."""

    def join(self) -> None:
        """Be present, from now on. It takes time, and may fail."""
        self._session.join(self.own.instance, self.own.incarnation, msgspec.json.encode(self._profile))

    # -- for the control thread -------------------------------------------------------------------

    def lead(self, board: LeaderBoard) -> None:
        self._say(f"{ORDERS}/{self.own.instance}", board)

    def follow_up(self, board: MemberBoard) -> None:
        self._say(f"{BOARDS}/{self.own.instance}", board)

    def _say(self, key: str, board: Board) -> None:
        if self._boards.get(key) != board:
            self._boards[key] = board
            self.said.set()

    def listen_to(self, members: Collection[str] | None) -> None:
        """Whose boards as members are read; None: those of all. Nobody has to know what all of them say but who leads:
        that would be so many reads as there are pairs of them."""
        self._listens_to = None if members is None else frozenset({*members, self.own.instance})
        self._set_folders()

    def _set_folders(self) -> None:
        boards = (BOARDS,) if self._listens_to is None else ()
        self.folders = (ELECTION, ORDERS, *boards, *map(_folder, self._following.taken))

    def campaign(self, heard: Heard | None = None) -> None:
        """Try to lead, instead of who was heard to claim it: what others have claimed since is left alone. `heard`: by
        which nobody leads, if that is not what was heard last."""
        self._campaign = self.heard if heard is None else heard
        self.said.set()

    def append(self, channel: ChannelKey, index: int, value: bytes) -> None:
        self._own_channels.add(channel)
        self._appended.append(_Appended(channel, _entry(channel, index), value))
        self.said.set()

    def trim(self, channel: ChannelKey, indices: Iterable[int]) -> None:
        """Its readers have taken these."""
        self._trimmed.extend(_entry(channel, index) for index in indices)
        self.said.set()

    def follow(self, channels: Collection[ChannelKey]) -> None:
        """A generation begins, or has ended. From now on these are read, each from its start; what is left of those
        before is deleted by all who have written or read it: without them nobody can use it."""
        self._left |= self._own_channels | self._following.taken.keys()
        self._own_channels = set()
        self._following = _Following(channels)
        self._set_folders()

    @property
    def followed(self) -> Collection[ChannelKey]:
        """The channels that are read."""
        return self._following.taken.keys()

    def taken(self, channel: ChannelKey) -> int:
        """How many entries of a channel were heard."""
        return self._following.taken.get(channel, 0)

    def entries(self) -> list[tuple[ChannelKey, bytes]]:
        """What was heard of channels since the last time, in order. What was still being read of those that were
        followed before is none of it."""
        entries = self._following.entries
        return [entries.popleft() for _ in range(len(entries))]

    def forget_before(self, generation: int) -> None:
        """Their generations are over, and those who have written and read them may not live any more."""
        self._forgets_before = generation
        self.said.set()

    def forget_boards(self, generation: int, but: Collection[str]) -> None:
        """Delete what instances have said that do not come back: that were not seen the last time that this was asked
        for either, and have said nothing since. For who leads a generation. `but`: those that have a part in it."""
        self._tidies = generation, frozenset({*but, self.own.instance})
        self.said.set()

    def check(self) -> None:
        """Raise what is in the way of saying or hearing anything, and would be at the next try, too. Of a channel that
        is over nothing is sent any more."""
        failed = self._failed
        if failed is not None and (failed.channel is None or failed.channel in self._own_channels):
            raise failed.error

    # -- for whoever sends and receives -----------------------------------------------------------

    def on_not_sent(self, error: Exception) -> None:
        """What `send` has raised cannot be tried again."""
        if self._sends is None:
            self._fail(InstanceFailed(self.own.instance, f"what it says cannot be sent to the others: {error}"))
            return
        generation, stage = self._sends
        what = f"what its channel holds for other instances cannot be sent (generation {generation}): {error}"
        self._fail(StageFailed(stage, what), self._sends)

    def on_not_heard(self, error: Exception) -> None:
        """The same of `receive`."""
        self._fail(InstanceFailed(self.own.instance, f"what the others say cannot be heard: {error}"))

    def _fail(self, error: TidegateError, channel: ChannelKey | None = None) -> None:
        self._failed = _Failed(error, channel)
        self.on_heard()

    # -- sending ----------------------------------------------------------------------------------

    def send(self) -> None:
        """Send what is to be sent. What fails stays to be sent."""
        self.said.clear()
        while self._appended:
            self._sends = self._appended[0].channel
            if self._appended[0].channel not in self._left:
                self._create(self._appended[0])
            self._appended.popleft()
        self._sends = None
        for key, board in tuple(self._boards.items()):
            if self._written.get(key) != board:
                self._write(key, board)
        if (heard := self._campaign) is not None:
            self._campaign = None
            self._try_to_lead(heard)
        self._delete_what_is_over()

    def _delete_what_is_over(self) -> None:
        if self._trimmed:
            keys = list(self._trimmed)
            self._session.delete(keys)
            self._spills.delete(keys)
            for _ in keys:
                self._trimmed.popleft()
        for channel in sorted(self._left):
            self._delete_left(channel)
        if self._forgets_before:
            self._forget(self._forgets_before)
            self._forgets_before = 0
        if (tidies := self._tidies) is not None:
            self._tidies = None  # what fails is left for the next time
            self._tidy(*tidies)

    def _delete_left(self, channel: ChannelKey) -> None:
        """Until nothing is seen of it any more: others may not know yet that it is over."""
        folder = _folder(channel)
        if found := self._session.read_folder(folder):
            self._session.delete([f"{folder}/{name}" for name in found])
            self.said.set()
        elif not self._appended:  # else something of it may be among these
            self._spills.clear(folder)
            self._left.discard(channel)

    def _forget(self, before: int) -> None:
        for name in self._session.folders(CHANNELS):
            if name.isdigit() and int(name) < before:
                self._session.clear(f"{CHANNELS}/{name}")
        for name in self._spills.folders(CHANNELS):
            if name.isdigit() and int(name) < before:
                self._spills.clear(f"{CHANNELS}/{name}")

    def _tidy(self, generation: int, stays: frozenset[str]) -> None:
        """Only where others can hear who leads and who has a part: what was said before that tells them of nobody whom
        they should wait for, and of no end of the pipeline that is one."""
        heard, own = self.heard, self._written.get(f"{ORDERS}/{self.own.instance}")
        if own is None or own.generation != generation:
            return
        if any(each.generation > generation for each in heard.leaders.values()):
            return

        def is_needed(key: str) -> bool:
            folder, _, name = key.rpartition("/")
            if name in stays or name in heard.present:
                return True
            board = heard.leaders.get(name)
            # What cannot be understood may be of whoever takes over, with another version of Tidegate.
            is_newer = key in self._foreign or (board is not None and board.generation >= generation)
            return folder == ORDERS and is_newer

        versions = {
            f"{folder}/{name}": each for folder, found in self._versions.items() for name, each in found.items()
        }
        self._leftovers.look(versions, is_needed)

    def _create(self, entry: _Appended) -> None:
        """Nobody else makes it: if it is there, an attempt of ours has made it that was not answered."""
        value = self._spills.put(entry.key, entry.value)
        if not self._session.create(entry.key, value):
            found = self._session.read(entry.key)
            if found is None:
                raise MaybeWritten(f"{entry.key} is there, and cannot be seen yet")
            if found.value != value:
                raise ProtocolViolation(f"{entry.key} holds what another process has written")

    def _write(self, key: str, board: Board) -> None:
        # Who reads it by an earlier version of the key finds what is said now: a board is all that there is to say.
        value = self._spills.put(key, encode_board(board))
        self._sent[key] = value
        self._session.write(key, value)
        self._written[key] = board
        is_large = is_named(value)
        if self._spilled.get(key) != is_large:
            self._spills.delete_but_last(key, but_own=is_large)
            self._spilled[key] = is_large

    def _try_to_lead(self, heard: Heard) -> None:
        value, version = msgspec.json.encode(self.own), heard.claim_version
        try:
            if version is None:
                self._session.create(LEADER, value)
            else:
                self._session.swap(LEADER, value, version)
        except (NotWritten, MaybeWritten):
            return  # what is heard next tells

    # -- receiving --------------------------------------------------------------------------------

    def receive(self) -> None:
        """Hear what the others say."""
        try:
            heard = self._hear()
        except SessionLost:
            heard = msgspec.structs.replace(self.heard, is_lost=True)
        before = self.heard
        self.heard = heard
        self.hearings += 1
        if before != heard or self._following.entries:
            self.on_heard()

    def _hear(self) -> Heard:
        following = self._following
        for channel in following.taken:
            self._read_on(following, channel)
        present = self._session.present()
        claimed = self._session.read_folder(ELECTION).get("leader")
        claim = None if claimed is None else msgspec.json.decode(claimed.value, type=LeaderClaim)
        leaders = self._read_boards(ORDERS, decode_leader_board)
        members = self._read_members()
        profiles = {name: self._profile_of(each.value) for name, each in present.items()}
        self._profiles = {each.value: profiles[name] for name, each in present.items()}
        return Heard(
            {
                name: Attendance(
                    each.incarnation,
                    profiles[name].stages,
                    _is_leaving(members.get(name), each.incarnation),
                    each.is_sure,
                )
                for name, each in present.items()
            },
            profiles,
            claim,
            None if claimed is None else claimed.version,
            leaders,
            members,
        )

    def _profile_of(self, value: bytes) -> Profile:
        profile = self._profiles.get(value)
        if profile is None:
            profile = self._profiles[value] = msgspec.json.decode(value, type=Profile)
        return profile

    def _read_on(self, following: _Following, channel: ChannelKey) -> None:
        found = self._session.read_folder(_folder(channel))
        while (entry := found.get(_index(following.taken[channel]))) is not None:
            value = self._spills.get(entry.value)
            if value is None:
                return  # it was deleted meanwhile, as its key is, or will be
            following.entries.append((channel, value))
            following.taken[channel] += 1

    def _read_members(self) -> dict[str, MemberBoard]:
        if self._listens_to is None:
            return self._read_boards(BOARDS, decode_member_board)
        found = {name: self._session.read(f"{BOARDS}/{name}") for name in sorted(self._listens_to)}
        there = {name: entry for name, entry in found.items() if entry is not None}
        return self._boards_in(BOARDS, there, decode_member_board)

    def _read_boards(self, folder: str, decode: Callable[[bytes], B]) -> dict[str, B]:
        return self._boards_in(folder, self._session.read_folder(folder), decode)

    def _boards_in(self, folder: str, entries: Mapping[str, Entry], decode: Callable[[bytes], B]) -> dict[str, B]:
        boards: dict[str, B] = {}
        self._check_own(f"{folder}/{self.own.instance}", entries.get(self.own.instance))
        for name in self._versions[folder].keys() - entries.keys():
            self._decoded.pop(f"{folder}/{name}", None)
            self._foreign.pop(f"{folder}/{name}", None)
        self._versions[folder] = {name: entry.version for name, entry in entries.items()}
        for instance, entry in entries.items():
            key = f"{folder}/{instance}"
            version, board = self._decoded.get(key, (None, None))
            if version != entry.version:
                found = self._decode(key, entry, decode)
                if found is not None:
                    board = found
                    self._decoded[key] = (entry.version, board)
            if board is not None:
                boards[instance] = board
        return boards

    def _check_own(self, key: str, entry: Entry | None) -> None:
        """A write that was not answered, or one of an incarnation before, may take effect late, and hide what was said
        since; and whoever leads may have deleted it, who did not see this one for a while. Then it is said again."""
        if entry is None:
            if self._written.pop(key, None) is not None:
                self.said.set()
        elif key in self._sent and entry.version != self._own_versions.get(key):
            self._own_versions[key] = entry.version
            if entry.value != self._sent[key]:
                self._written.pop(key, None)
                self.said.set()

    def _decode(self, key: str, entry: Entry, decode: Callable[[bytes], B]) -> B | None:
        if self._foreign.get(key) == entry.version:
            return None
        said = self._spills.get(entry.value)
        if said is None:
            return None  # there is a newer one by now
        try:
            board = decode(said)
        except ProtocolViolation as error:
            _log.warning("%s; do all instances run the same version of Tidegate?", error)
            self._foreign[key] = entry.version
            return None
        self._foreign.pop(key, None)
        return board

    def close(self) -> None:
        self._session.close()


def _is_leaving(board: MemberBoard | None, incarnation: str) -> bool:
    return board is not None and board.incarnation == incarnation and board.is_leaving


def _folder(channel: ChannelKey) -> str:
    generation, stage = channel
    return f"{CHANNELS}/{generation:06d}/{stage}"


def _index(index: int) -> str:
    return f"{index:012d}"


def _entry(channel: ChannelKey, index: int) -> str:
    return f"{_folder(channel)}/{_index(index)}"


def _nothing() -> None:
    """Nobody wants to hear of it."""
