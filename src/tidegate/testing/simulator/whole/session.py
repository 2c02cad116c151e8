"""What a simulated instance shares with the others: keys in memory, of which it may read what was so a moment ago."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tidegate.cluster.kv import Entry, Presence
from tidegate.cluster.memory import MemorySession
from tidegate.testing.simulator.world import World


class SimulatedSession:
    """A `Session`. Each folder is read by itself: of two, one may be older than the other. Never of a key that was
    written here, and never older than what was read before."""

    def __init__(self, session: MemorySession, world: World, stale: float) -> None:
        """`stale`: how likely a read is of what was read last."""
        self.session = session
        self._world = world
        self.stale = stale
        self._read: dict[str, Mapping[str, Entry]] = {}
        self._present: Mapping[str, Presence] | None = None

    # -- who is there -----------------------------------------------------------------------------

    def join(self, instance: str, incarnation: str, value: bytes) -> None:
        self._present = None
        self.session.join(instance, incarnation, value)

    def leave(self) -> None:
        self._present = None
        self.session.leave()

    def present(self) -> Mapping[str, Presence]:
        found = self.session.present()
        if self._present is None or not self._world.chance(self.stale):
            self._present = found
        return self._present

    # -- keys -------------------------------------------------------------------------------------

    def read(self, key: str) -> Entry | None:
        self._forget(key)
        return self.session.read(key)

    def read_folder(self, folder: str) -> Mapping[str, Entry]:
        found = self.session.read_folder(folder)
        if folder not in self._read or not self._world.chance(self.stale):
            self._read[folder] = found
        return self._read[folder]

    def write(self, key: str, value: bytes) -> None:
        self._forget(key)
        self.session.write(key, value)

    def create(self, key: str, value: bytes) -> bool:
        self._forget(key)
        return self.session.create(key, value)

    def swap(self, key: str, value: bytes, version: int) -> bool:
        self._forget(key)
        return self.session.swap(key, value, version)

    def delete(self, keys: Iterable[str]) -> None:
        these = list(keys)
        for key in these:
            self._forget(key)
        self.session.delete(these)

    def folders(self, folder: str) -> list[str]:
        return self.session.folders(folder)

    def clear(self, folder: str) -> None:
        self._read = {each: held for each, held in self._read.items() if not f"{each}/".startswith(f"{folder}/")}
        self.session.clear(folder)

    def _forget(self, key: str) -> None:
        self._read.pop(key.rpartition("/")[0], None)

    # -- changes ----------------------------------------------------------------------------------

    def wait(self, folders: Collection[str], timeout_s: float) -> None:
        """Nobody waits in simulated time: what has changed is looked at now and then."""

    def close(self) -> None:
        self.session.close()
