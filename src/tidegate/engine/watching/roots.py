"""Metrics of pipelines by their roots, whether or not a run is alive there: for whoever looks at them from outside.

    place = place_of("state/orders")
    registry.register(collector_for({str(place): partial(look_at, place, Past(place.files))}))

A root is looked at when Prometheus asks. What its history holds is counted once, however often it is read: what was
there when the collector was made counts from the beginning, and what is dropped there because it is old stays counted.
Rows and batches are those that a status has told of: what a generation did after somebody looked last is not in them.
What a run has asked of its store is known to the run alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from tidegate.engine.control import Life, look
from tidegate.engine.events import AnyEvent, Started
from tidegate.engine.history import Past
from tidegate.engine.status import RunStatus
from tidegate.engine.watching.counts import Tally
from tidegate.engine.watching.serving import collector_of, missing_extra
from tidegate.errors import InvalidConfig, NoRoot, TidegateError
from tidegate.protocol.config import as_ms
from tidegate.storage.disk import room
from tidegate.storage.inspection import read_owner
from tidegate.storage.places import Place

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from tidegate.engine.watching.families import Shown

_log = logging.getLogger("tidegate")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody has seen of a root just now."""

    pipeline: str
    is_alive: bool
    """Whether a run is alive there, and gives a sign now and then."""
    status: RunStatus | None = None
    """What the run says, or said last."""
    events: Iterable[AnyEvent] = ()
    """All of the history, in whatever order, or at least what is new in it."""
    room: tuple[int, int] | None = None
    """See `tidegate.storage.disk.room`."""


def collector_for(roots: Mapping[str, Callable[[], Seen]]) -> Collector:
    """A collector for `prometheus_client.CollectorRegistry.register`, of all these roots.

    `roots`: by what each is called in the label `root`, how it is looked at. Each is called once whenever metrics are
    asked for, on the thread of whoever asks, one at a time; one that raises a `TidegateError` or an `OSError` is told
    as not readable, and the others as ever. A name of a root must not change, and none may be of another's.
    """
    try:
        from tidegate.engine.watching.families import families
    except ImportError as error:
        raise missing_extra() from error
    watched = [_Watched(name, look) for name, look in roots.items()]
    looking = threading.Lock()

    def collect() -> Iterator[Metric]:
        with looking:
            shown = [each.shown() for each in watched]
        return families(shown)

    return collector_of(collect)


def look_at(place: Place, past: Past) -> Seen:
    """A root as it is now. Whoever has looked at it already makes a `Seen` of that instead."""
    life, status = look(place)
    owner = read_owner(place.files)
    if owner is None:
        raise NoRoot(f"{place} is not the root of any pipeline")
    return Seen(
        pipeline=owner.pipeline,
        is_alive=life is Life.ALIVE,
        status=status,
        events=past.everything(),
        room=None if place.is_far else room(place.paths.root),
    )


class _Watched:
    def __init__(self, root: str, look: Callable[[], Seen]) -> None:
        self._root = root
        self._look = look
        self._tally = Tally()
        self._known: dict[str, AnyEvent] = {}
        self._interval_s: float | None = None
        self._pipeline = ""

    def shown(self) -> Shown:
        from tidegate.engine.watching.families import Shown

        try:
            seen = self._look()
            events = list(seen.events)
        except (TidegateError, OSError) as error:
            _log.debug("%s cannot be read, so there are no metrics of it: %s", self._root, error)
            return Shown(pipeline=self._pipeline, root=self._root, is_readable=False)
        self._pipeline = seen.pipeline
        self._count(events)
        self._tally.on_status(seen.status)
        return Shown(
            pipeline=seen.pipeline,
            root=self._root,
            counted=self._tally.counted(),
            is_alive=seen.is_alive,
            interval_s=self._interval_s,
            room=seen.room,
        )

    def _count(self, events: list[AnyEvent]) -> None:
        """Those that were not there before, or are not as they were."""
        fresh = [each for each in events if (known := self._known.get(each.id)) is not each and known != each]
        self._known = {each.id: each for each in events}
        self._tally.on_events(fresh)
        started = max((each for each in fresh if isinstance(each, Started)), key=lambda each: each.at, default=None)
        if started is not None:
            self._interval_s = _interval_s(started)


def _interval_s(started: Started) -> float | None:
    try:
        return as_ms("checkpoint_interval", started.settings["checkpoint-interval"]) / 1000
    except (KeyError, InvalidConfig):
        return None
