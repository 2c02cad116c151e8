"""How far what is uploaded to a bucket, downloaded or deleted there has come: for people, who would else wonder."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal

_log = logging.getLogger("tidegate")

Doing = Literal["uploading", "downloading", "deleting"]

_TOLD_AFTER_S: Final = 1.0
_LOGGED_EVERY_S: Final = 5.0


@dataclass(frozen=True)
class Progress:
    """How much of a transfer is done."""

    files: int
    of_files: int
    size_bytes: int = 0
    of_bytes: int = 0
    """0: that is not known, or does not matter."""

    def __add__(self, other: Progress) -> Progress:
        return Progress(
            self.files + other.files,
            self.of_files + other.of_files,
            self.size_bytes + other.size_bytes,
            self.of_bytes + other.of_bytes,
        )


OnProgress = Callable[[Progress], None]


@dataclass
class _Transfer:
    doing: Doing
    progress: Progress
    since_s: float


class Transfers:
    """All of one run, on whatever threads. Each may last for a moment or for an hour."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: list[_Transfer] = []
        self._logged_s: float | None = None
        self._changing = threading.Lock()

    @contextmanager
    def under_way(self, doing: Doing, of_files: int, of_bytes: int = 0) -> Iterator[OnProgress]:
        """While it lasts; what it gives is to be told how much is done."""
        each = _Transfer(doing, Progress(0, of_files, 0, of_bytes), self._clock())

        def told(progress: Progress) -> None:
            each.progress = replace(progress, of_bytes=of_bytes)
            if doing == "downloading":  # as a run does that starts: nothing else of it is seen then
                self._log_now_and_then()

        with self._changing:
            self._under_way.append(each)
        try:
            yield told
        finally:
            with self._changing:
                self._under_way.remove(each)

    def now(self) -> tuple[Doing, Progress] | None:
        """What lasts for a second by now, with all of its kind; of several kinds, the one with the most files."""
        now_s = self._clock()
        with self._changing:
            found: dict[Doing, Progress] = {}
            for each in self._under_way:
                found[each.doing] = found.get(each.doing, Progress(0, 0)) + each.progress
            lasting = {each.doing for each in self._under_way if now_s - each.since_s >= _TOLD_AFTER_S}
        told = [(doing, progress) for doing, progress in found.items() if doing in lasting]
        return max(told, key=lambda each: each[1].of_files, default=None)

    def _log_now_and_then(self) -> None:
        found, now_s = self.now(), self._clock()
        if found is None or (self._logged_s is not None and now_s - self._logged_s < _LOGGED_EVERY_S):
            return
        self._logged_s = now_s
        doing, progress = found
        of = f" of {progress.of_bytes / 1e6:.1f}" if progress.of_bytes else ""
        done = progress.size_bytes / 1e6
        _log.info("%s %d of %d files, %.1f%s MB", doing, progress.files, progress.of_files, done, of)
