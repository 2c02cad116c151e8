"""Simulated keys and values that processes share (`tidegate.cluster.kv`): they fail, lag, forget who is alive, and do
late what they were asked.

What is written takes effect at once, never, or later, whatever became of its writer by then. Who reads may see what it
saw before, of each key by itself, and never something older than that. Whoever is silent for about a lease is taken for
dead, sometimes sooner, and sometimes by one reader alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, TypeVar

from tidegate.cluster.kv import Entry, Presence
from tidegate.errors import CoordinationUnavailable, MaybeWritten, NotWritten, SessionLost
from tidegate.testing.simulator.world import Process, World

SHORTEST_LEASE_MS: Final = 40
LONGEST_LEASE_MS: Final = 240
_LATEST_EFFECT_MS: Final = 250
_LATEST_SIGHT_MS: Final = 40

T = TypeVar("T")


class SimulatedKv:
    def __init__(self, world: World) -> None:
        self.world = world
        self._version = 0
        self._folders: dict[str, Mapping[str, Entry]] = {}
        self.presences: Mapping[str, Presence] = {}
        self._joined: dict[str, SimulatedSession] = {}
        self._sessions: list[SimulatedSession] = []

    def open(self, process: Process) -> SimulatedSession:
        session = SimulatedSession(self, process)
        self._sessions.append(session)
        return session

    # -- keys -------------------------------------------------------------------------------------

    def folder(self, folder: str) -> Mapping[str, Entry]:
        return self._folders.get(folder, {})

    def put(self, key: str, value: bytes) -> None:
        folder, _, last = key.rpartition("/")
        self._version += 1
        # Another one each time: who has read the last one keeps what it saw.
        self._folders[folder] = {**self.folder(folder), last: Entry(value, self._version)}
        self._tell(folder)

    def create(self, key: str, value: bytes) -> bool:
        folder, _, last = key.rpartition("/")
        if last in self.folder(folder):
            return False
        self.put(key, value)
        return True

    def swap(self, key: str, value: bytes, version: int) -> bool:
        folder, _, last = key.rpartition("/")
        held = self.folder(folder).get(last)
        if held is None or held.version != version:
            return False
        self.put(key, value)
        return True

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            folder, _, last = key.rpartition("/")
            self._folders[folder] = {name: held for name, held in self.folder(folder).items() if name != last}

    def folders(self, folder: str) -> list[str]:
        below = [each.removeprefix(f"{folder}/") for each in self._folders if each.startswith(f"{folder}/")]
        return sorted({each.partition("/")[0] for each in below})

    def clear(self, folder: str) -> None:
        self._folders = {each: held for each, held in self._folders.items() if not f"{each}/".startswith(f"{folder}/")}

    def _tell(self, folder: str) -> None:
        for session in self._sessions:
            session.tell(folder)

    # -- who is there -----------------------------------------------------------------------------

    def join(self, session: SimulatedSession, presence: Presence) -> None:
        before = self._joined.get(presence.instance)
        if before is not None:
            before.is_lost = True
        self._joined[presence.instance] = session
        self.presences = {**self.presences, presence.instance: presence}
        self._tell_all()

    def expire(self, session: SimulatedSession) -> None:
        """It is taken for dead, whether or not it is."""
        session.is_lost = True
        for name, each in tuple(self._joined.items()):
            if each is session:
                del self._joined[name]
                self.presences = {other: there for other, there in self.presences.items() if other != name}
                self.world.note("{} is taken for dead", name)
                self._tell_all()

    def expire_if_silent(self, process: Process) -> None:
        """Whoever this process has joined as is taken for dead after a lease, if it is silent still."""
        lease_ms = SHORTEST_LEASE_MS + self.world.delay(LONGEST_LEASE_MS - SHORTEST_LEASE_MS)
        for session in self._joined.values():
            if session.process is process:
                self.world.after(lease_ms, None, self._expire_if_silent, session)

    def _expire_if_silent(self, session: SimulatedSession) -> None:
        if session.is_silent:
            self.expire(session)

    def _tell_all(self) -> None:
        for session in self._sessions:
            session.tell()

    def forget(self, session: SimulatedSession) -> None:
        """Nobody reads by it any more."""
        if session in self._sessions:
            self._sessions.remove(session)


class SimulatedSession:
    def __init__(self, kv: SimulatedKv, process: Process) -> None:
        self._kv = kv
        self._world = kv.world
        self.process = process
        self._incarnation = process.incarnation
        self.is_lost = False
        self._seen: dict[str, Mapping[str, Entry]] = {}
        self._seen_present: Mapping[str, Presence] = {}
        self._blind: dict[str, int] = {}
        self.on_notice: Callable[[], None] = _nothing
        self.listens: Callable[[], Collection[str]] = tuple

    @property
    def is_cut_off(self) -> bool:
        return self.process.kv_cut_until > self._world.now

    @property
    def is_silent(self) -> bool:
        """Whether it cannot be heard."""
        has_ended = not self.process.alive or self.process.incarnation != self._incarnation
        return has_ended or self.is_cut_off or self.process.paused_until > self._world.now

    def hide(self, instance: str, for_ms: int) -> None:
        """From this one, for a while: nobody else is mistaken."""
        self._blind[instance] = self._world.now + for_ms
        self._world.after(for_ms, None, self.tell)
        self.tell()

    def tell(self, folder: str | None = None) -> None:
        """Something has changed in a folder, or who is there."""
        if (folder is None or folder in self.listens()) and not self._world.chance(self._world.faults.lose_notice):
            self.on_notice()

    # -- the contract -----------------------------------------------------------------------------

    def join(self, instance: str, incarnation: str, value: bytes) -> None:
        self._write(lambda: self._kv.join(self, Presence(instance, incarnation, value)), late=False)

    def leave(self) -> None:
        self._kv.expire(self)

    def close(self) -> None:
        self.on_notice = _nothing
        self._kv.forget(self)

    def present(self) -> Mapping[str, Presence]:
        self._reach()
        self._seen_present = self._as_seen(self._kv.presences, self._seen_present)
        now = self._world.now
        blind = [name for name, until_ms in self._blind.items() if until_ms > now]
        return {name: there for name, there in self._seen_present.items() if name not in blind}

    def read(self, key: str) -> Entry | None:
        folder, _, last = key.rpartition("/")
        return self.read_folder(folder).get(last)

    def read_folder(self, folder: str) -> Mapping[str, Entry]:
        self._reach()
        seen = self._as_seen(self._kv.folder(folder), self._seen.get(folder, {}))
        self._seen[folder] = seen
        return seen

    def write(self, key: str, value: bytes) -> None:
        self._write(lambda: self._kv.put(key, value))

    def create(self, key: str, value: bytes) -> bool:
        return self._write(lambda: self._kv.create(key, value))

    def swap(self, key: str, value: bytes, version: int) -> bool:
        return self._write(lambda: self._kv.swap(key, value, version))

    def delete(self, keys: Iterable[str]) -> None:
        known = tuple(keys)
        self._write(lambda: self._kv.delete(known))

    def folders(self, folder: str) -> list[str]:
        self._reach()
        return self._kv.folders(folder)

    def clear(self, folder: str) -> None:
        self._write(lambda: self._kv.clear(folder))

    def wait(self, folders: Collection[str], timeout_s: float) -> None:
        raise NotImplementedError("who is simulated is told instead")

    # -- what goes wrong --------------------------------------------------------------------------

    def _reach(self) -> None:
        if self.is_cut_off or self._world.chance(self._world.faults.kv_fails):
            raise CoordinationUnavailable("it does not answer")
        if self.is_lost:
            raise SessionLost("others may have taken it for dead")

    def _as_seen(self, now: Mapping[str, T], before: Mapping[str, T]) -> Mapping[str, T]:
        """What is there, or of some of it what was seen before: then it is told of once more."""
        world = self._world
        if now is before or not world.chance(world.faults.kv_lags):
            return now
        seen: dict[str, T] = {}
        for name in (*now, *(each for each in before if each not in now)):
            held = (before if world.random.random() < 0.5 else now).get(name)
            if held is not None:
                seen[name] = held
        world.after(world.delay(_LATEST_SIGHT_MS), None, self.tell)
        return seen

    def _write(self, effect: Callable[[], T], *, late: bool = True) -> T:
        world = self._world
        if not self.is_cut_off and self.is_lost:
            raise SessionLost("others may have taken it for dead")
        if self.is_cut_off or world.chance(world.faults.kv_fails):
            how = world.random.random()
            if how < 0.4:
                raise NotWritten("it was refused")
            if not self.is_cut_off and how > 0.8:
                effect()
            elif late and how > 0.6:
                # Whatever becomes of its writer: it was on its way.
                world.after(world.delay(_LATEST_EFFECT_MS), None, lambda: _forget(effect()))
            raise MaybeWritten("it was not answered")
        return effect()


def _nothing() -> None:
    """Nobody listens."""


def _forget(_answer: object) -> None:
    """Nobody waits for it."""
