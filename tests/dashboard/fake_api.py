"""A server that answers as the dashboard's does, of pipelines that are made up: for work on the page, and its tests.

`python -m tests.dashboard.fake_api` serves the page on them. Time passes by itself there; a test calls `World.advance`.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from tests.dashboard.fake_answers import Refused, act, answer, find_pipeline, live
from tests.dashboard.fake_pipelines import World

STATIC: Final = Path(__file__).parents[2] / "src" / "tidegate" / "dashboard" / "static"
TOKEN: Final = "a-token-for-the-fake"
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
_SECURITY: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, world: World, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.world = world
        self.streams = 0
        """How many are open."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves is nothing to tell."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base class
        """Nothing: the terminal is for who works on the page."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] in {"", "static"}:
            self._static(parts[-1] or "index.html")
            return
        with suppress(ConnectionError):
            try:
                if self.server.world.is_down:
                    raise Refused(503, "the root cannot be read now")
                if parts[-1] == "live":
                    self.server.streams += 1
                    try:
                        self._stream(parts[3:-1])
                    finally:
                        self.server.streams -= 1
                else:
                    found = answer(self.server.world, parts[2:], query)
                    if self.server.world.is_slow(self.path):
                        self.server.world.may_answer.wait(30)
                    self._send(found)
            except Refused as refused:
                self._send({"error": str(refused)}, refused.code)

    def do_POST(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        token = self.headers.get("Authorization")
        world = self.server.world
        try:
            pipeline = find_pipeline(world, parts[3])
            world.posted.append((pipeline.name, parts[-1], token))
            if not world.allows_actions:
                raise Refused(403, "actions are off: start the dashboard with --allow-actions")
            if token != f"Bearer {TOKEN}":
                raise Refused(401, "the token is missing or wrong")
            self._send(act(pipeline, parts[-1], world))
            world.tell()
        except Refused as refused:
            self._send({"error": str(refused)}, refused.code)

    def _stream(self, parts: list[str]) -> None:
        world = self.server.world
        self.send_response(200)
        for name, value in {**_SECURITY, "Content-Type": "text/event-stream", "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        seen = -1
        while not world.is_down:
            with world.changed:
                if world.count == seen and not world.changed.wait(0.5):
                    self.wfile.write(b": still here\n\n")
                    self.wfile.flush()
                    continue
                seen = world.count
                kind, data = live(world, parts[0] if parts else None)
            self.wfile.write(f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode())
            self.wfile.flush()

    def _static(self, name: str) -> None:
        path = STATIC / name
        if path.name not in {each.name for each in STATIC.iterdir()}:
            self._send({"error": "there is no such file"}, 404)
            return
        self._reply(path.read_bytes(), _TYPES[path.suffix] + "; charset=utf-8", 200)

    def _send(self, value: Any, code: int = 200) -> None:
        self._reply(json.dumps(value).encode(), "application/json", code)

    def _reply(self, body: bytes, kind: str, code: int) -> None:
        self.send_response(code)
        for name, value in {**_SECURITY, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(world: World, port: int = 0) -> Iterator[Server]:
    server = Server(world, port)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        world.is_down = True
        world.tell()
        server.shutdown()
        server.server_close()
        thread.join(10)


def main() -> None:
    arguments = argparse.ArgumentParser(description="The dashboard's page, on pipelines that are made up.")
    arguments.add_argument("--port", type=int, default=8089)
    arguments.add_argument("--seed", type=int, default=7)
    given = arguments.parse_args()
    world = World(given.seed, 1000)
    with serving(world, given.port) as server:
        print(f"{server.url}/  the token of actions: {TOKEN}", flush=True)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(0.5)
                world.advance()


if __name__ == "__main__":
    main()
