"""Looking after the tables of a running pipeline, in the background: no checkpoint and no commit waits for it, and what
goes wrong in it is told, and tried again later, but never fails a run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Final

from tidegate.engine.beside import beside
from tidegate.errors import first_line
from tidegate.sinks.contract import BoundSink, KeptSink, Upkeep
from tidegate.storage.manifest import Manifest

_log = logging.getLogger("tidegate")
_STOPS_IN_S: Final = 30.0
_TRIED_AGAIN_MS: Final = 60_000


class TableUpkeep:
    """Of one generation's sinks. `retained` gives the manifests of all checkpoints that the log retains."""

    def __init__(
        self,
        sinks: Mapping[str, BoundSink],
        generation: int,
        retained: Callable[[], Sequence[Manifest]],
    ) -> None:
        self._sinks = {
            name: sink
            for name, sink in sinks.items()
            if isinstance(sink, KeptSink) and sink.upkeep_every_ms is not None
        }
        self._generation = generation
        self._retained = retained
        self._due_ms: dict[str, int] = {}
        self._under_way: dict[str, Future[Upkeep | None]] = {}
        self._is_stopping = threading.Event()

    def poll(self, now_ms: int) -> None:
        """Begin what is due, and tell what has ended."""
        for name, sink in self._sinks.items():
            if name not in self._due_ms:
                self._due_ms[name] = now_ms + sink.upkeep_due_in_ms()
            ended = self._under_way.get(name)
            if ended is not None and ended.done():
                del self._under_way[name]
                self._due_ms[name] = now_ms + self._on_ended(name, sink, ended)
            elif ended is None and now_ms >= self._due_ms[name]:
                keep_up = partial(sink.keep_up, self._generation, self._retained, self._is_stopping)
                self._under_way[name] = beside(f"tidegate-upkeep-{name}", keep_up)

    def _on_ended(self, name: str, sink: KeptSink, ended: Future[Upkeep | None]) -> int:
        """Returns in how many milliseconds the next pass is due."""
        every_ms = sink.upkeep_every_ms or 0
        error = ended.exception()
        if error is not None:
            again_ms = max(every_ms, _TRIED_AGAIN_MS)
            _log.warning(
                "sink %s: upkeep of %s failed and is tried again in %g min: %s",
                name,
                sink.describe(),
                again_ms / 60_000,
                first_line(error),
            )
            return again_ms
        _tell(name, sink, ended.result())
        return every_ms

    def stop(self) -> None:
        """What is under way ends after its current step, or is left alone, as if it were killed."""
        self._is_stopping.set()
        wait(self._under_way.values(), timeout=_STOPS_IN_S)
        for name, ended in self._under_way.items():
            if ended.done() and ended.exception() is None:
                _tell(name, self._sinks[name], ended.result())


def _tell(name: str, sink: BoundSink, done: Upkeep | None) -> None:
    if done is not None:
        _log.info(
            "sink %s: upkeep of %s: before: %d files, after: %d; %d deleted, %s freed",
            name,
            sink.describe(),
            done.files_before,
            done.files_after,
            done.deleted,
            _as_size(done.freed_bytes),
        )


def _as_size(count: int) -> str:
    for unit, bytes_ in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count} bytes"
