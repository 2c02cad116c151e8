"""Beside a run: whether its sources plan batches at all.

A source that cannot be reached does not fail, not for minutes: its client asks again and again inside the planning of
one batch. Spark tells what a query is doing, and at which trigger it was last through with planning. One that finds
nothing new is through with that many times a second, and says so every ten seconds: so it is not taken for one that
waits, even if each look happens to find it asking.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tidegate.engine.beside import beside
from tidegate.engine.status import NoBatch, now
from tidegate.spark.sources import without_secrets

if TYPE_CHECKING:
    from tidegate.engine.stage.running import RunningStage

_log = logging.getLogger("tidegate")

_LOOK_EVERY_S: Final = 1.0
# Longer than Spark is silent about a source that has nothing new.
_WAITS_AFTER_S: Final = 15.0
# And so many looks: where the whole machine stood still, nobody has waited.
_WAITS_AFTER_LOOKS: Final = 10
_TELL_EVERY_S: Final = 60.0
# Early enough that the reason is known when it is told.
_ASK_AFTER_S: Final = 3.0
_ASK_EVERY_S: Final = 30.0
_PLANNING: Final = ("Getting offsets from ", "Initializing ")

WhyUnreachable = Callable[[str], str | None]
"""Asks what a source reads from whether it answers, and says why not; None if it does or cannot be asked."""


class _Planning:
    """One source's planning that has not ended, as far as anybody can see."""

    def __init__(self, sign: object) -> None:
        self.sign = sign
        self.since = now()
        self.since_s = time.monotonic()
        self.looks = 1
        self.told_s: float | None = None
        self.asked_s: float | None = None
        self.asking: Future[str | None] | None = None
        self.why: str | None = None


class PlanningWatch:
    """Looks on a thread of its own: it asks Spark, and what the sources read from."""

    def __init__(self, sources: Iterable[RunningStage], why_unreachable: WhyUnreachable) -> None:
        self._sources = list(sources)
        self._why_unreachable = why_unreachable
        self._planning: dict[str, _Planning] = {}
        self._waiting: dict[str, NoBatch] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="tidegate-planning", daemon=True).start()

    def waiting(self, source: str) -> NoBatch | None:
        return self._waiting.get(source)

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_EVERY_S):
            for source in self._sources:
                # A query that has failed, or Spark's process that is gone, is told by the run itself.
                with suppress(Exception):
                    self._look(source)

    def _look(self, source: RunningStage) -> None:
        name, query = source.definition.head, source.progress.query
        doing = "" if query is None or source.progress.has_ended else str(query.status["message"])
        if query is None or not doing.startswith(_PLANNING):
            self._forget(name)
            return
        progress = query.lastProgress
        sign = (doing, query.runId, source.progress.batch, None if progress is None else progress["timestamp"])
        planning = self._planning.get(name)
        if planning is None or planning.sign != sign:
            self._forget(name)
            self._planning[name] = _Planning(sign)
            return
        planning.looks += 1
        waited_s = time.monotonic() - planning.since_s
        if waited_s >= _ASK_AFTER_S:
            self._ask(name, planning)
        if waited_s >= _WAITS_AFTER_S and planning.looks >= _WAITS_AFTER_LOOKS:
            what = f"Spark is {doing[0].lower()}{without_secrets(doing[1:])}"
            self._waiting[name] = NoBatch(planning.since, what if planning.why is None else f"{what}; {planning.why}")
            self._tell(name, planning)

    def _ask(self, name: str, planning: _Planning) -> None:
        now_s = time.monotonic()
        if planning.asking is not None and planning.asking.done():
            planning.why = None if planning.asking.exception() is not None else planning.asking.result()
            planning.asking = None
        if planning.asking is None and (planning.asked_s is None or now_s - planning.asked_s >= _ASK_EVERY_S):
            planning.asked_s = now_s
            planning.asking = beside(f"tidegate-ask-{name}", lambda: self._why_unreachable(name))

    def _tell(self, name: str, planning: _Planning) -> None:
        now_s = time.monotonic()
        if planning.told_s is None or now_s - planning.told_s >= _TELL_EVERY_S:
            planning.told_s = now_s
            waited_s = now_s - planning.since_s
            _log.warning("source %s has planned no batch for %.0f s: %s", name, waited_s, self._waiting[name].why)

    def _forget(self, name: str) -> None:
        planning = self._planning.pop(name, None)
        self._waiting.pop(name, None)
        if planning is not None and planning.told_s is not None:
            waited_s = time.monotonic() - planning.since_s
            _log.warning("source %s goes on, after %.0f s without planning a batch", name, waited_s)
