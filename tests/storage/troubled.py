"""A folder of a disk that is full, or that stands still, when a test says so."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from tidegate.errors import StoreUnavailable
from tidegate.storage.folder import Folder

_LONGEST_S: Final = 20.0


class TroubledFolder(Folder):
    def __init__(self, root: Path) -> None:
        super().__init__(root, fsync=False)
        self.is_full = False
        """Nothing more fits; what is there can be written over."""
        self.moves = threading.Event()
        """Unless it is set, every call waits."""
        self.moves.set()

    def read(self, name: str) -> bytes | None:
        self._wait()
        return super().read(name)

    def size(self, name: str) -> int | None:
        self._wait()
        return super().size(name)

    def names_in(self, folder: str = "") -> list[str]:
        self._wait()
        return super().names_in(folder)

    def write(self, name: str, data: bytes) -> None:
        self._wait()
        if self.is_full:
            raise StoreUnavailable(f"could not write {name}: No space left on device")
        super().write(name, data)

    def overwrite(self, name: str, data: bytes) -> None:
        self._wait()
        super().overwrite(name, data)

    def _wait(self) -> None:
        if not self.moves.wait(_LONGEST_S):
            raise StoreUnavailable("it stands still")
