"""How many requests were made to a store, by kind, and how many it has failed: for people who pay for them, or wait."""

from __future__ import annotations

import threading
from collections import Counter


class Requests:
    """Of all handles on one store, on whatever threads. What was counted is never less than before."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._failed = 0
        self._counting = threading.Lock()

    def add(self, kind: str, count: int = 1) -> None:
        with self._counting:
            self._counts[kind] += count

    def add_failed(self) -> None:
        with self._counting:
            self._failed += 1

    def counted(self) -> Counter[str]:
        with self._counting:
            return self._counts.copy()

    @property
    def failed(self) -> int:
        """Those that were given up, of whatever kind: what is not there is none, nor is what was tried again and then
        succeeded."""
        return self._failed
