"""The control thread, watched from beside: what keeps it from going on is told while it lasts.

All of a run is driven by that one thread, so nobody else can tell that it stands still.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Final, Self

_log = logging.getLogger("tidegate")

_LOOK_EVERY_S: Final = 1.0
_TELL_AFTER_S: Final = 5.0


class Rounds:
    """As a context, for as long as the control thread is to be watched."""

    def __init__(self) -> None:
        self._doing: tuple[str, float] | None = None
        self._ended = threading.Event()

    def doing(self, what: str | None) -> None:
        """What the control thread does from now on; None if it may take as long as it likes."""
        self._doing = None if what is None else (what, time.monotonic())

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="tidegate-rounds", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def _watch(self) -> None:
        told: tuple[str, float] | None = None
        while not self._ended.wait(_LOOK_EVERY_S):
            doing = self._doing
            if told is not None and doing != told:
                _log.warning("the run goes on, after %.0f s of %s", time.monotonic() - told[1], told[0])
                told = None
            if told is None and doing is not None and time.monotonic() - doing[1] >= _TELL_AFTER_S:
                told = doing
                what, since_s = doing
                _log.warning(
                    "the run has been %s for %.0f s, and does nothing else meanwhile",
                    what,
                    time.monotonic() - since_s,
                )
