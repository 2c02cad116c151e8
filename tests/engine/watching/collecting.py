"""A collector of OTLP over HTTP, on loopback, that keeps what it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collected:
    """What has come so far."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.resource: dict[str, Any] = {}
        self.spans: list[Span] = []
        self.has_come = threading.Condition()
        self.url = ""

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self.has_come:
            self.paths.append(path)
            self.headers.append(headers)
            for of_resource in request.resource_spans:
                self.resource = values_of(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    self.spans += of_scope.spans
            self.has_come.notify_all()

    def children(self, parent: Span) -> list[Span]:
        found = [each for each in self.spans if each.parent_span_id == parent.span_id]
        assert all(each.trace_id == parent.trace_id for each in found)
        return sorted(found, key=lambda each: (each.start_time_unix_nano, each.name))

    def roots(self, name: str) -> list[Span]:
        found = [each for each in self.spans if not each.parent_span_id and each.name == name]
        return sorted(found, key=lambda each: each.start_time_unix_nano)


def values_of(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collecting() -> Iterator[Collected]:
    collected = Collected()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collected.take(self.path, dict(self.headers), body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        collected.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collected
        finally:
            server.shutdown()
            thread.join()
