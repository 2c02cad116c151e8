"""What is in the folders that instances share, as it was listed last.

In a folder each list is a call of the system. In a bucket it is a request, and one that lists everything below costs no
more than one that lists a single folder: so all of it is listed at once, and a list serves whoever asks within a moment
after it was begun, and has changed nothing since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from tidegate.storage.files import Files


class Listing:
    """`fresh_s`: for how long a list of everything is good; None: each folder is listed by itself, each time."""

    def __init__(self, files: Files, fresh_s: float | None = None) -> None:
        self._files = files
        self._fresh_s = fresh_s
        self._found: Mapping[str, list[str]] = {}
        self._listed_s: float | None = None
        self._changes = self._listed_at = 0
        self._listing = threading.Lock()
        self._changing = threading.Lock()

    @property
    def is_of_all(self) -> bool:
        return self._fresh_s is not None

    @property
    def may_be_old_s(self) -> float:
        """How long ago what is listed may have been so, unless it is asked for anew."""
        return self._fresh_s or 0.0

    def names_in(self, folder: str, *, anew: bool = False) -> list[str]:
        """As `Files.names_in`. `anew`: not as it was a moment ago."""
        if self._fresh_s is None:
            return self._files.names_in(folder)
        asked_s = time.monotonic()
        with self._listing:  # who waits for another one's list takes it
            since_s = asked_s if anew else asked_s - self._fresh_s
            if self._listed_s is None or self._listed_s < since_s or self._listed_at != self._changes:
                changes, began_s = self._changes, time.monotonic()
                self._found = _by_folder(self._files.list())
                self._listed_s, self._listed_at = began_s, changes
            return self._found.get(folder, [])

    def added(self, folder: str, name: str) -> None:
        """One was written here, in a folder of its own name: what was listed until now shows it, too."""
        with self._listing:
            known = self._found.get(folder, [])
            if self._fresh_s is not None and name not in known:
                self._found = {**self._found, folder: [*known, name]}

    def changed(self) -> None:
        """Something was written or deleted here, or may have been: what was listed until now does not show it."""
        with self._changing:
            self._changes += 1


def _by_folder(names: list[str]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        parts = name.split("/")
        for depth, part in enumerate(parts):
            found.setdefault("/".join(parts[:depth]), set()).add(part)
    return {folder: sorted(below) for folder, below in found.items()}
