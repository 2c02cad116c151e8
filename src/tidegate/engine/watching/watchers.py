"""Who is told what a run does and what has happened to it, without ever being in its way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, Protocol

from tidegate.engine.events import AnyEvent
from tidegate.engine.options import RunOptions
from tidegate.engine.status import RunStatus
from tidegate.errors import InvalidConfig
from tidegate.storage.places import Place

_log = logging.getLogger("tidegate")

_ENDS_IN_S: Final = 10.0
_ENDS_WHEN_INTERRUPTED_IN_S: Final = 2.0


class Watcher(Protocol):
    """Is called on the control thread of a run, several times a second: it waits for nothing."""

    def on_status(self, status: RunStatus | None) -> None:
        """What the run does now; None: from now on another process speaks for it."""
        ...

    def on_event(self, event: AnyEvent) -> None:
        """What has happened."""
        ...

    def close(self, patience_s: float) -> None:
        """The run has ended. What is left to do may take so long."""
        ...


class Watchers:
    """All of one run. One that fails is a log line, and is not asked again; the run goes on."""

    def __init__(self, watchers: Iterable[Watcher] = ()) -> None:
        self._watchers = list(watchers)

    def on_status(self, status: RunStatus | None) -> None:
        for each in tuple(self._watchers):
            self._guarded(each, partial(each.on_status, status))

    def on_event(self, event: AnyEvent) -> None:
        for each in tuple(self._watchers):
            self._guarded(each, partial(each.on_event, event))

    def close(self, patience_s: float = _ENDS_IN_S) -> None:
        for each in tuple(self._watchers):
            self._guarded(each, partial(each.close, patience_s))

    def _guarded(self, watcher: Watcher, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self._watchers.remove(watcher)
            _log.exception("%s has failed, and is left out; the run goes on", type(watcher).__name__)


@contextmanager
def watching(settings: RunOptions, pipeline: str, place: Place) -> Iterator[Watchers]:
    """Those that the options of a run ask for, while it lasts. What cannot be had is refused before it begins."""
    watchers: list[Watcher] = []
    patience_s = _ENDS_IN_S
    try:
        if settings.metrics_port is not None:
            from tidegate.engine.watching.serving import Metrics

            watchers.append(Metrics(settings, pipeline, place))
        watchers += _traces(settings, pipeline, place)
        yield Watchers(watchers)
    except KeyboardInterrupt:
        patience_s = _ENDS_WHEN_INTERRUPTED_IN_S
        raise
    finally:
        Watchers(watchers).close(patience_s)  # also one that was left out


def _traces(settings: RunOptions, pipeline: str, place: Place) -> list[Watcher]:
    from tidegate.engine.watching.otlp import wanted

    destination = wanted(settings.traces)
    if destination is None:
        return []
    try:
        from tidegate.engine.watching.traces import Traces
    except ImportError as error:
        how = "pip install 'tidegate[otel]'"
        if destination.is_asked_for:
            raise InvalidConfig(f"for traces install Tidegate with them: {how}") from error
        _log.warning("%s is set, but no traces are sent: for these, %s", destination.asked_by, how)
        return []
    return [Traces(destination, pipeline, str(place))]
