"""The metrics of a run, served from its own process (`--metrics-port`): it is scraped while it runs, and no longer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tidegate.engine.control import has_spoken, is_silent
from tidegate.engine.events import AnyEvent
from tidegate.engine.options import RunOptions
from tidegate.engine.status import RunStatus, status_in
from tidegate.engine.watching.counts import Tally
from tidegate.errors import InvalidConfig, TidegateError
from tidegate.storage.disk import room
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.places import Place
from tidegate.storage.system import say

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from tidegate.engine.watching.families import Shown

_log = logging.getLogger("tidegate")


class Metrics:
    """Counts what a run does, and answers whoever asks over HTTP, on threads of its own."""

    def __init__(self, settings: RunOptions, pipeline: str, place: Place) -> None:
        self._interval_s = settings.config().interval_ms / 1000
        self._pipeline = pipeline
        self._place = place
        self._root = str(place)
        self._tally = Tally()
        self._speaks = False
        assert settings.metrics_port is not None
        self._server = Server(self._collector(), settings.metrics_host, settings.metrics_port)
        _log.info("metrics are at %s", self._server.url)

    def on_status(self, status: RunStatus | None) -> None:
        if status is None:
            self._speaks = False
            self._tally.step_down()
            return
        self._tally.on_status(status)
        if not self._speaks:
            self._speaks = True
            # Not here: the control thread waits for nothing.
            threading.Thread(target=self._look_back, name="tidegate-metrics-base", daemon=True).start()

    def _look_back(self) -> None:
        """At the newest checkpoint, which another process may have taken: until this one completes its first, that is
        how old the last one is."""
        try:
            inspected = InspectedRoot(self._place)
            newest = inspected.log().newest
            if newest is not None:
                self._tally.on_base(status_in(inspected.manifest(newest)))
        except (TidegateError, OSError) as error:
            _log.debug("there are no metrics of the newest checkpoint before the next is complete: %s", error)

    def on_event(self, event: AnyEvent) -> None:
        self._tally.on_event(event)

    def close(self, patience_s: float) -> None:
        self._server.close(patience_s)

    def _collector(self) -> Collector:
        try:
            from tidegate.engine.watching.families import Shown, families
        except ImportError as error:
            raise missing_extra() from error

        def shown() -> Shown:
            counts, counted = self._place.counts, self._tally.counted()
            return Shown(
                pipeline=self._pipeline,
                root=self._root,
                counted=counted,
                is_alive=not (has_spoken(counted.status) and is_silent(self._place, counted.status)),
                interval_s=self._interval_s,
                room=room(self._place.paths.root),
                requests=counts.counted(),
                failed_requests=counts.failed,
            )

        return collector_of(lambda: families([shown()]))


def missing_extra() -> InvalidConfig:
    return InvalidConfig("for metrics install Tidegate with them: pip install 'tidegate[metrics]'")


def collector_of(collect: Callable[[], Iterable[Metric]]) -> Collector:
    """What Prometheus' client asks for metrics."""
    from prometheus_client.registry import Collector

    class Collecting(Collector):
        def collect(self) -> Iterable[Metric]:
            return collect()

        def describe(self) -> Iterable[Metric]:
            """Nothing is asked for when it is registered."""
            return ()

    return Collecting()


class Server:
    """Answers over HTTP until it is closed. Whoever is slow to ask waits for himself."""

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise InvalidConfig(
                f"metrics_port is {port}, and {host} cannot be listened on there: {say(error)}; give another port, or "
                f"0 for any that is free"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def close(self, patience_s: float) -> None:
        def end() -> None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

        # Not here: what hangs in it is not to hold up the end of a run.
        ending = threading.Thread(target=end, name="tidegate-metrics-end", daemon=True)
        ending.start()
        ending.join(patience_s)
