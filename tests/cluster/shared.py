"""Processes that share keys in memory, whose calls go wrong as a test wants it."""

from __future__ import annotations

from collections.abc import Callable

from tidegate.cluster.exchange import Exchange, Profile
from tidegate.cluster.spills import MOST_BYTES
from tidegate.errors import CoordinationUnavailable, MaybeWritten, NotWritten
from tidegate.storage.memory import Memory
from tidegate.testing.simulator.kv import SimulatedKv, SimulatedSession
from tidegate.testing.simulator.world import Process, World


class Troubled(SimulatedSession):
    """A session whose next write fails: `not_written`, or `late`, when it takes effect as soon as `land` is called."""

    def __init__(self, kv: SimulatedKv, process: Process) -> None:
        super().__init__(kv, process)
        kv._sessions.append(self)
        self.next = ""
        self._on_their_way: list[Callable[[], object]] = []

    def _write(self, effect, *, late=True):  # type: ignore[no-untyped-def] # it is generic
        kind, self.next = self.next, ""
        if kind == "not_written":
            raise NotWritten("it was refused")
        if kind == "late":
            self._on_their_way.append(effect)
            raise MaybeWritten("it was not answered")
        return super()._write(effect, late=late)

    def land(self) -> None:
        while self._on_their_way:
            self._on_their_way.pop(0)()


class Shared:
    def __init__(self, seed: int = 0, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.world = World(seed)
        self.kv = SimulatedKv(self.world)
        self.files = Memory()
        self.sessions: dict[str, Troubled] = {}

    def joined(self, name: str, incarnation: str = "1", *stages: str) -> Exchange:
        self.sessions[name] = Troubled(self.kv, Process(name))
        exchange = Exchange(self.sessions[name], self.files, name, incarnation, Profile(stages), self.most_bytes)
        exchange.join()
        return exchange

    @staticmethod
    def try_to(act: Callable[[], None]) -> bool:
        try:
            act()
        except CoordinationUnavailable:
            return False
        return True
