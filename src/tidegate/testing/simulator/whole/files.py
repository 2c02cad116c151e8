"""The files of a simulated root: a memory that lives on, seen by processes that die, through a store that fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from io import BufferedIOBase
from typing import Self

from tidegate.errors import StoreUnavailable
from tidegate.storage.files import AtHand, Files
from tidegate.storage.memory import Memory
from tidegate.testing.simulator.world import World


class Killed(BaseException):
    """A process dies, right before a call of its files."""


class Disk:
    """What all processes see, and what is watched."""

    def __init__(self, label: str) -> None:
        self.memory = Memory(label)
        self.on_created: Callable[[str, bytes], None] = lambda _name, _data: None
        self.on_deleted: Callable[[str], None] = lambda _name: None
        self.is_full = False
        self.tears = False
        """Whether a record that a process dies in creating is left torn."""
        self.unforced: dict[str, None] = {}
        """What a loss of power may take: written, and not forced to the disk."""

    def lose_power(self, rng: random.Random) -> None:
        for name in self.unforced:
            data = self.memory.read(name)
            if data is not None and rng.random() < 0.7:
                if rng.random() < 0.5:
                    self.memory.delete([name])
                else:
                    self.memory.write(name, data[: rng.randrange(len(data) + 1)])
        self.unforced.clear()


class Life:
    """How long a process lives yet, in calls of its files; and whether what it does reaches anybody."""

    def __init__(self) -> None:
        self.calls_left: int | None = None
        self.is_cut_off = False
        """Whether the store answers everybody but this process."""

    def call(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise Killed


class SeenFiles(AtHand):
    """`Files` as a process sees them. With `fails`, as those of a store: calls fail, before or after they take effect,
    and what is created seems to be there already. Spark's own folders do not: but for a disk that is full."""

    def __init__(
        self, disk: Disk, world: World, life: Life, *, fails: bool, forces: bool = True, links_last: bool = False
    ) -> None:
        """`forces`: what is written is on the disk. `links_last`: also what is kept or copied, as where the files are
        those of a table, which looks after itself."""
        self._disk = disk
        self._files: Files = disk.memory
        self._prefix = ""
        self._world = world
        self._life = life
        self._fails = fails
        self._forces = forces
        self._links_last = links_last
        self.on_delete: Callable[[str], None] | None = None
        """Called before this process deletes anything."""

    def __repr__(self) -> str:
        return f"SeenFiles({self.location()!r})"

    @property
    def fsync(self) -> bool:
        return True

    def at(self, folder: str, *, durable: bool = True) -> Self:
        below = object.__new__(type(self))
        below._disk, below._world, below._life, below._fails = self._disk, self._world, self._life, self._fails
        below._forces, below._links_last = self._forces and durable, self._links_last
        below.on_delete = self.on_delete
        below._files = self._files.at(folder, durable=durable)
        below._prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        return below

    def _call(self) -> None:
        self._life.call()
        if self._fails and (self._life.is_cut_off or self._world.chance(self._world.faults.store_fails)):
            raise StoreUnavailable("the store failed")

    def _change(self) -> None:
        self._call()
        if self._disk.is_full:
            raise StoreUnavailable("no space is left on the device")

    def _answer(self) -> None:
        if self._fails and self._world.chance(self._world.faults.store_fails_after_writing):
            raise StoreUnavailable("the store failed, after it had done what it was asked")

    # -- reading ----------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        self._call()
        return self._files.read(name)

    def open(self, name: str) -> BufferedIOBase | None:
        self._call()
        return self._files.open(name)

    def exists(self, name: str) -> bool:
        self._life.call()
        return self._files.exists(name)

    def size(self, name: str) -> int | None:
        self._call()
        return self._files.size(name)

    def names_in(self, folder: str = "") -> list[str]:
        self._call()
        return self._files.names_in(folder)

    def list(self, folder: str = "", *, but: Collection[str] = ()) -> list[str]:
        self._call()
        return self._files.list(folder, but=but)

    # -- writing ----------------------------------------------------------------------------------

    def _written(self, name: str, *, is_forced: bool) -> None:
        if is_forced:
            self._disk.unforced.pop(self._prefix + name, None)
        else:
            self._disk.unforced[self._prefix + name] = None

    def write(self, name: str, data: bytes) -> None:
        self._change()
        self._files.write(name, data)
        self._written(name, is_forced=self._forces)
        self._answer()

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._change()
        except Killed:
            if self._disk.tears:
                self._files.create(name, data[: self._world.random.choice((0, 0, len(data) // 2))])
            raise
        if self._fails and self._world.chance(self._world.faults.seems_to_exist):
            return False
        created = self._files.create(name, data)
        if created:
            self._written(name, is_forced=self._forces)
            self._disk.on_created(self._prefix + name, data)
        self._answer()
        return created

    def overwrite(self, name: str, data: bytes) -> None:
        self._call()
        self._files.overwrite(name, data)

    def keep(self, name: str, source: Files, source_name: str) -> None:
        self._change()
        if not self._files.exists(name):
            self._files.copy(name, source._files if isinstance(source, SeenFiles) else source, source_name)
            self._written(name, is_forced=self._links_last)

    def copy(self, name: str, source: Files, source_name: str) -> None:
        self._change()
        self._files.copy(name, source._files if isinstance(source, SeenFiles) else source, source_name)
        self._written(name, is_forced=self._links_last)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._call()
            if self.on_delete is not None:
                self.on_delete(self._prefix + name)
            self._files.delete([name])
            self._disk.unforced.pop(self._prefix + name, None)
            self._disk.on_deleted(self._prefix + name)
        self._answer()

    def make_folder(self, folder: str) -> None:
        self._files.make_folder(folder)

    def prune(self, folder: str) -> None:
        self._files.prune(folder)

    def prune_above(self, names: Iterable[str], top: str) -> None:
        self._files.prune_above(names, top)

    def sync(
        self, names: Iterable[str], known: Collection[object] = frozenset(), *, missing_ok: bool = False
    ) -> frozenset[object]:
        self._call()
        wanted = frozenset(names)
        synced = self._files.sync(wanted, known, missing_ok=missing_ok)
        for name in wanted - known if isinstance(known, frozenset | set) else wanted:
            self._disk.unforced.pop(self._prefix + name, None)
        return synced

    def forget_unwritten(self) -> None:
        self._files.forget_unwritten()

    # -- where they are ---------------------------------------------------------------------------

    def strays(self, names: Iterable[str]) -> frozenset[str]:
        return self._files.strays(names)

    def location(self, name: str = "") -> str:
        return self._files.location(name)

    def name_at(self, location: str) -> str | None:
        return self._files.name_at(location)

    def uri(self, name: str) -> str:
        return self._files.uri(name)

    def name_of(self, uri: str) -> str | None:
        return self._files.name_of(uri)
