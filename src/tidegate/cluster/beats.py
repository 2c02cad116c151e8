"""Who is present, over files: whoever has joined beats, and others see whether it does.

A beat is a file `<instance>@<term>@<number>@<incarnation>` with the next number; the one before it goes then. So one
list tells all there is to know. Who joins takes a term above those that it finds, and removes their beats. Of one name
the highest term is present, and of two that have come to the same one the greater incarnation.

- Others hold it for dead when its last beat has not changed for its lease, by their own clock, and since they have seen
  it first. They remember that, and remove its beats.
- It is lost when its last beat that is known to have arrived is older than the lease, by its own clock, which is so
  sooner than others see it; and when its last beat was removed, or is not the highest: it looks after each one.

A process that sleeps, or cannot write, is thus lost by its own account before anybody else's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from tidegate.cluster.kv import Presence
from tidegate.cluster.listing import Listing
from tidegate.errors import CoordinationUnavailable, MaybeWritten, NotWritten, SessionLost, StoreUnavailable
from tidegate.storage.files import Files

_BEATS_PER_LEASE: Final = 4
_TRIES_PER_LEASE: Final = 20
_TRIES: Final = 50
_END_S: Final = 5.0


class _Life(NamedTuple):
    """One incarnation of an instance."""

    instance: str
    term: int
    incarnation: str

    def beat(self, number: int) -> str:
        return f"{self.instance}@{self.term}@{number}@{self.incarnation}"


class _Beat(NamedTuple):
    life: _Life
    number: int


class _Content(msgspec.Struct, array_like=True):
    lease_s: float
    value: bytes


class _Sight(msgspec.Struct):
    """What is known of somebody else."""

    content: _Content
    number: int
    changed_s: float
    has_beaten: bool = False
    """Whether it has, since it was seen first."""
    is_dead: bool = False


class Listed:
    """The beats that are there."""

    def __init__(self, listing: Listing, folder: str) -> None:
        self._listing = listing
        self._folder = folder

    def __call__(self, *, anew: bool = True) -> list[_Beat]:
        return list(_read_names(self._listing.names_in(self._folder, anew=anew)))

    @property
    def may_be_old_s(self) -> float:
        return self._listing.may_be_old_s

    def changed(self) -> None:
        """Whoever is here has written or removed some."""
        self._listing.changed()


class Beats:
    def __init__(
        self, files: Files, lease_s: float, clock: Callable[[], float], listed: Listed, *, leaves: int = 0
    ) -> None:
        """`leaves`: how many of its beats before the last one stay until they are removed together."""
        self._files = files
        self._listed = listed
        self._leaves = leaves
        self._lease_s = lease_s
        self._clock = clock
        self._own: _Member | None = None
        self._is_joining = False
        """Or has tried to, in vain: it is lost until it has."""
        self._sights: dict[_Life, _Sight] = {}
        self._looking = threading.Lock()

    def join(self, instance: str, incarnation: str, value: bytes) -> None:
        self._is_joining = True
        self._withdraw()
        try:
            others = [beat for beat in self._listed() if beat.life.instance == instance]
        except StoreUnavailable as error:
            raise NotWritten(f"could not join: {error}") from error
        term = 1 + max((beat.life.term for beat in others), default=0)
        life = _Life(instance, term, incarnation)
        member = _Member(self._files, life, self._lease_s, self._clock, self._listed, self._leaves)
        try:
            _remove(self._files, others)
            member.begin(value)
            # Whoever has beaten between the two of them, and has left no trace of that, finds its beat removed.
            _remove(self._files, (beat for beat in self._listed() if _is_before(beat.life, member.life)))
            self._listed.changed()
        except StoreUnavailable as error:
            member.end()
            raise MaybeWritten(f"could not join: {error}") from error
        self._own, self._is_joining = member, False
        member.start()

    def leave(self) -> None:
        """What fails of it is left to the lease."""
        self._withdraw()
        self._is_joining = False

    def _withdraw(self) -> None:
        if self._own is not None:
            self._own.end()
            self._own = None

    def check(self) -> None:
        """`SessionLost` if others may hold this one for dead."""
        own = self._own
        why = "it could not join" if self._is_joining else None if own is None else own.why_lost()
        if why is not None:
            raise SessionLost(f"this session is lost: {why}; it has to join anew")

    def present(self) -> Mapping[str, Presence]:
        with self._looking:
            for tries in range(_TRIES):
                found = self._look(anew=tries > 0)
                if found is not None:
                    return found
        raise CoordinationUnavailable("who is present keeps changing while it is read")

    def _look(self, *, anew: bool) -> Mapping[str, Presence] | None:
        """None: somebody has gone on while this was read."""
        own = self._own
        before_s = self._clock() - (0.0 if anew else self._listed.may_be_old_s)
        beats = self._list_twice_if_in_doubt(anew=anew)
        after_s = self._clock()
        newest = _newest(beats)
        found = {}
        for beat in newest.values():
            sight = self._sights.get(beat.life)
            if sight is None:
                data = self._files.read(beat.life.beat(beat.number))
                if data is None:
                    return None
                sight = _Sight(msgspec.msgpack.decode(data, type=_Content), beat.number, after_s)
                self._sights[beat.life] = sight
            is_own = own is not None and own.life == beat.life
            self._judge(sight, beat, before_s, after_s, is_own=is_own)
            if not sight.is_dead:
                found[beat.life.instance] = Presence(
                    beat.life.instance, beat.life.incarnation, sight.content.value, sight.has_beaten or is_own
                )
        self._bury(beats)
        listed = {beat.life for beat in beats}
        self._sights = {life: sight for life, sight in self._sights.items() if life in listed}
        if own is not None and own.life.instance in newest and newest[own.life.instance].life != own.life:
            own.lose("another incarnation has joined by its name")
        return found

    def _list_twice_if_in_doubt(self, *, anew: bool) -> set[_Beat]:
        """A list of many files may miss a beat that was made meanwhile, and no longer have the one before it: who was
        there, and seems to be gone, is looked for again."""
        beats = set(self._listed(anew=anew))
        if self._sights.keys() - {beat.life for beat in beats}:
            beats |= set(self._listed())
        return beats

    @staticmethod
    def _judge(sight: _Sight, beat: _Beat, before_s: float, after_s: float, *, is_own: bool) -> None:
        """Time is counted from after the list that showed a beat first to before the one that still shows it: however
        long they take, or this process sleeps, nobody is held for dead too soon."""
        if sight.is_dead:
            return
        if beat.number != sight.number:
            sight.number, sight.changed_s, sight.has_beaten = beat.number, after_s, True
        elif before_s - sight.changed_s > sight.content.lease_s and not is_own:
            sight.is_dead = True

    def _bury(self, beats: Iterable[_Beat]) -> None:
        """Who was held for dead, and is not, hears of it when it finds its beat removed."""
        dead = [beat for beat in beats if (sight := self._sights.get(beat.life)) is not None and sight.is_dead]
        if dead:
            with suppress(StoreUnavailable):
                _remove(self._files, dead)
            self._listed.changed()


class _Member:
    """One's own beats, on a thread of their own."""

    def __init__(
        self,
        files: Files,
        life: _Life,
        lease_s: float,
        clock: Callable[[], float],
        listed: Listed,
        leaves: int,
    ) -> None:
        self.life = life
        self._files = files
        self._listed = listed
        self._leaves = leaves
        self._lease_s = lease_s
        self._clock = clock
        self._content = b""
        self._tried = self._arrived = 0
        self._arrived_s = clock()
        self._lost: str | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tidegate-beats-{life.instance}", daemon=True)

    def begin(self, value: bytes) -> None:
        self._content = msgspec.msgpack.encode(_Content(self._lease_s, value))
        began_s = self._clock()
        self._tried = self._arrived = 1
        self._files.write(self.life.beat(1), self._content)
        self._listed.changed()
        self._arrived_s = began_s

    def start(self) -> None:
        self._thread.start()

    def why_lost(self) -> str | None:
        if self._lost is None and self._clock() - self._arrived_s > self._lease_s:
            self.lose(f"it has not been able to say that it lives for {self._lease_s:g} s")
        return self._lost

    def lose(self, why: str) -> None:
        self._lost = self._lost or why
        self._ending.set()

    def end(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        if self._thread.is_alive():
            return  # the store stands still, and whoever asks it for more would too
        with suppress(StoreUnavailable):
            self._withdraw()

    def _run(self) -> None:
        pause_s = self._lease_s / _BEATS_PER_LEASE
        while not self._ending.wait(pause_s):
            try:
                self._beat()
                pause_s = self._lease_s / _BEATS_PER_LEASE
            except Exception:  # whatever it is: a beat that does not arrive in time says the rest
                pause_s = self._lease_s / _TRIES_PER_LEASE

    def _beat(self) -> None:
        if self.why_lost() is not None:
            return
        began_s = self._clock()
        self._tried += 1
        number = self._tried
        self._files.write(self.life.beat(number), self._content)
        self._listed.changed()
        beats = self._listed()
        if _Beat(self.life, self._arrived) not in beats:
            self.lose("others have taken it for dead, or another incarnation has joined by its name")
        elif any(_is_before(self.life, beat.life) for beat in beats):
            self.lose("another incarnation has joined by its name")
        if self._lost is not None:
            self._withdraw()
            return
        self._arrived, self._arrived_s = number, began_s
        older = [beat for beat in beats if beat.life == self.life and beat.number < number]
        if len(older) > self._leaves:
            _remove(self._files, older)

    def _withdraw(self) -> None:
        _remove(self._files, (beat for beat in self._listed() if beat.life == self.life))
        self._listed.changed()


def _read_names(names: Iterable[str]) -> Iterator[_Beat]:
    for name in names:
        parts = name.split("@")
        if len(parts) == 4 and parts[1].isdigit() and parts[2].isdigit():
            yield _Beat(_Life(parts[0], int(parts[1]), parts[3]), int(parts[2]))


def _newest(beats: Iterable[_Beat]) -> dict[str, _Beat]:
    """The last beat of who is present by each name, if it lives."""
    newest: dict[str, _Beat] = {}
    for beat in beats:
        if (known := newest.get(beat.life.instance)) is None or known < beat:
            newest[beat.life.instance] = beat
    return newest


def _is_before(life: _Life, other: _Life) -> bool:
    """Whether the other has joined by the same name, and counts."""
    return life.instance == other.instance and life < other


def _remove(files: Files, beats: Iterable[_Beat]) -> None:
    files.delete([beat.life.beat(beat.number) for beat in beats])
