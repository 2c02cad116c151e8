"""How a run is told to stop: by Ctrl-C or SIGTERM, from another terminal, or by the event of whoever runs it."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tidegate.engine.requests import StopRun

# Of its own, so that a view which shows nothing but warnings can show this too.
_log_of_stops = logging.getLogger("tidegate.stopping")

_LOOK_EVERY_S: Final = 0.2


class Stop:
    """Wanted by Ctrl-C or SIGTERM, of which a second one stops at once, by whoever asks the run to, or by the event of
    whoever runs the pipeline.

    While Spark starts the first one does too: there is nothing yet that a last checkpoint could be taken of. A signal
    does not set that event: it is not ours, and may be there for more than one run.

    Of several who ask from other terminals each gets what he has asked for. A signal, or that event, is for who cannot
    wait: it ends a drain, and the closing of windows, with an ordinary last checkpoint.
    """

    def __init__(self, given: threading.Event | None) -> None:
        self._signalled = threading.Event()
        self._asked: list[StopRun] = []  # added to on any thread
        self._given = given
        self.is_starting = True
        self._is_interrupted = False

    @property
    def wanted(self) -> bool:
        return bool(self._asked) or self._cannot_wait

    @property
    def is_asked(self) -> bool:
        """Whether somebody has asked the run to, and not only told this process."""
        return bool(self._asked)

    @property
    def _cannot_wait(self) -> bool:
        return self._signalled.is_set() or (self._given is not None and self._given.is_set())

    @property
    def how(self) -> StopRun:
        """How it is to end, by what is known of that now, if it is to end at all."""
        asked = StopRun()
        for each in tuple(self._asked):
            asked = asked.and_also(each)
        return StopRun(full=asked.full) if self._cannot_wait else asked

    @property
    def is_soon(self) -> bool:
        """Whether it is wanted, and nothing is to be done before but a last checkpoint."""
        return self.wanted and not self.how.drain

    def ask(self, how: StopRun) -> None:
        """From another terminal. A signal that comes after it is a first one all the same."""
        before = self.how if self._asked else None
        self._asked.append(how)
        if before is None or self.how != before:
            _log_of_stops.info("stopping after %s (tidegate stop)", before_the_end(self.how))

    def wait(self, seconds: float) -> bool:
        """Wait that long, or until it is to end soon. Tells whether it is."""
        deadline = time.monotonic() + seconds
        while not self.is_soon and (left := deadline - time.monotonic()) > 0:
            self._signalled.wait(min(left, _LOOK_EVERY_S))
        return self.is_soon

    def check_not_interrupted(self) -> None:
        """Raise once more what may have been swallowed: some of what is imported while a run starts catches all."""
        if self._is_interrupted:
            raise KeyboardInterrupt("stopped while it was starting")

    def __call__(self, number: int, _frame: object) -> None:
        if self.is_starting:
            self._is_interrupted = True
            self.check_not_interrupted()
        if self._signalled.is_set():
            raise KeyboardInterrupt("stopped at once by a second signal")
        _log_of_stops.info("stopping after a last checkpoint (%s)", signal.Signals(number).name)
        self._signalled.set()


def before_the_end(how: StopRun) -> str:
    """What a run still does, for people."""
    last = "a last full checkpoint" if how.full else "a last checkpoint"
    return "draining, " * how.drain + "closing windows, " * how.close_windows + last


@contextmanager
def stopping_by(given: threading.Event | None) -> Iterator[Stop]:
    stop = Stop(given)
    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us there gives an event
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
