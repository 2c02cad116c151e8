"""Traces of a run, over OTLP: one of every checkpoint, and one of every start, sent when they have ended.

Needs the extra `otel`. Spans are made and sent on threads of their own; what cannot be sent is lost, and a log line of
OpenTelemetry's. The provider is this run's own: what a user's code traces by the global one is left alone.
"""

from __future__ import annotations

import logging
import os
import threading
from queue import SimpleQueue
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context

from tidegate.engine.events import AnyEvent
from tidegate.engine.status import RunStatus
from tidegate.engine.watching.otlp import Destination
from tidegate.engine.watching.spans import Span, span_of

_log = logging.getLogger("tidegate")

# A pipeline of a thousand stages has five spans of each in one checkpoint. The variables of OpenTelemetry go first.
_MOST_WAITING: Final = 16_384
_MOST_EVENTS: Final = 1_000
_NS_PER_MS: Final = 1_000_000


class Traces:
    """Makes them of events."""

    def __init__(self, destination: Destination, pipeline: str, root: str) -> None:
        attributes = {"tidegate.pipeline": pipeline, "tidegate.root": root}
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if not named:
            attributes[SERVICE_NAME] = "tidegate"
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        most = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else _MOST_WAITING
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=destination.url), max_queue_size=most)
        )
        self._events: SimpleQueue[AnyEvent | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tidegate-traces", daemon=True)
        self._thread.start()

    def on_status(self, status: RunStatus | None) -> None:
        """Nothing has ended."""

    def on_event(self, event: AnyEvent) -> None:
        if self._events.qsize() < _MOST_EVENTS:  # else nobody takes them, and they would fill the memory
            self._events.put(event)

    def close(self, patience_s: float) -> None:
        """Send what is left, for as long as that is worth waiting for."""
        self._events.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            _log.warning("traces of the run are not sent yet, after %.0f s, and may be lost", patience_s)

    def _work(self) -> None:
        tracer = self._provider.get_tracer("tidegate")
        while (event := self._events.get()) is not None:
            try:
                span = span_of(event)
                if span is not None:
                    trace(tracer, span, Context())  # of no other trace
            except Exception:
                _log.exception("no trace is made of what has happened; the run goes on")
        self._provider.shutdown()


def trace(tracer: Tracer, span: Span, parent: Context | None = None) -> None:
    """Hand a tree over to OpenTelemetry, with its times."""
    made = tracer.start_span(
        span.name, context=parent, attributes=span.attributes, start_time=span.from_ms * _NS_PER_MS
    )
    if span.error is not None:
        made.set_status(Status(StatusCode.ERROR, span.error))
    inside = set_span_in_context(made)
    for child in span.children:
        trace(tracer, child, inside)
    made.end(span.to_ms * _NS_PER_MS)
