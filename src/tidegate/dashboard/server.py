"""How the dashboard is served: each request that reads files on a thread, streams beside them, everything behind the
guard (`guard.py`)."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, get_args

import anyio.to_thread
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as Served

from tidegate.dashboard.actions import act
from tidegate.dashboard.guard import Guard, is_open
from tidegate.dashboard.openapi import document
from tidegate.dashboard.page import INDEX, page_files
from tidegate.dashboard.root import ShownRoot
from tidegate.dashboard.routes import (
    API,
    ROUTES,
    Asked,
    Board,
    NotThere,
    Route,
    WrongQuery,
    pipelines,
    query_of,
    status_of,
)
from tidegate.dashboard.token import Token
from tidegate.dashboard.values import ActionName, Live, Pipelines, Problem
from tidegate.errors import InvalidConfig, TidegateError
from tidegate.scrubbing import json_without_secrets
from tidegate.storage.places import Place

_log = logging.getLogger("tidegate")

_ACTIONS_AT_ONCE: Final = 8
_STREAMS_AT_ONCE: Final = 200
_LOOK_EVERY_S: Final = 0.5
_LIST_EVERY_S: Final = 1.0
_HEARTBEAT_S: Final = 10.0
_STILL_HERE: Final = b": still here\n\n"
_NO_STORE: Final = {"Cache-Control": "no-store"}
_NAMES: Final[tuple[ActionName, ...]] = get_args(ActionName)


def answered(value: Any, code: int = 200, headers: dict[str, str] | None = None) -> Response:
    data = json_without_secrets(msgspec.json.encode(value))
    return Response(data, code, {**_NO_STORE, **(headers or {})}, "application/json")


def refused(code: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return answered(Problem(why), code, headers)


class Pages:
    """The handlers of all requests."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.guard: Guard | None = None
        self._files = page_files()
        self._document = document()
        self._acting: anyio.CapacityLimiter | None = None
        self._streams = 0
        self.is_closing = False
        self._metrics = _metrics(board)

    def app(self) -> Starlette:
        one = f"{API}/pipelines/{{key}}"
        routes = [
            Served("/", self._index),
            Served("/static/{name:path}", self._static),
            Served("/metrics", self._metrics_page),
            Served(f"{API}/openapi.json", self._openapi),
            Served(f"{API}/live", self._live_list),
            Served(f"{one}/live", self._live_one),
            Served(f"{one}/actions/{{action}}", self._act, methods=["POST"]),
            *(Served(route.path, self._handler(route), methods=["GET"]) for route in ROUTES),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _told})
        app.router.redirect_slashes = False
        return app

    # -- the page ---------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        return self._file(request, INDEX)

    async def _static(self, request: Request) -> Response:
        return self._file(request, request.path_params["name"])

    def _file(self, request: Request, name: str) -> Response:
        found = self._files.get(name)
        if found is None:
            return refused(404, "there is no such page here")
        headers = {"ETag": found.etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.data, 200, headers, found.type)

    # -- the API ----------------------------------------------------------------------------------

    async def _openapi(self, request: Request) -> Response:
        return await self._guarded(lambda: self._document, request)

    def _handler(self, route: Route) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            def answer() -> Any:
                query = query_of(request.query_params.multi_items(), route.parameters)
                return route.answer(Asked(self.board, request.path_params, query))

            return await self._guarded(answer)

        return handle

    async def _guarded(
        self,
        answer: Callable[[], Any],
        without_query: Request | None = None,
        limiter: anyio.CapacityLimiter | None = None,
    ) -> Response:
        """On a thread, and whatever fails is told in one line."""

        def work() -> Response:
            try:
                if without_query is not None:
                    query_of(without_query.query_params.multi_items(), ())
                return answered(answer())
            except (WrongQuery, NotThere, TidegateError) as error:
                return refused(status_of(error), str(error))
            except Exception:
                _log.exception("the dashboard could not answer; this is a defect")
                return refused(503, "it could not be told; the dashboard's own messages say why")

        return await anyio.to_thread.run_sync(work, limiter=limiter)

    async def _act(self, request: Request) -> Response:
        assert self.guard is not None
        if not self.board.actions_allowed:
            return refused(403, "this dashboard only shows; start it with --allow-actions to have it act")
        if not self.guard.knows(request.scope["headers"]):
            return refused(401, "an action takes the token", {"WWW-Authenticate": "Bearer"})
        name = request.path_params["action"]

        def answer() -> Any:
            root = self.board.root(request.path_params["key"])
            if name not in _NAMES:
                raise NotThere(f"there is no such action; there is {', '.join(_NAMES)}")
            _log.info("%s of %s was asked for over the dashboard", name, root.given)
            try:
                return act(name, root.place)
            finally:
                root.has_changed()

        self._acting = self._acting or anyio.CapacityLimiter(_ACTIONS_AT_ONCE)
        return await self._guarded(answer, request, self._acting)

    async def _metrics_page(self, _request: Request) -> Response:
        def work() -> Response:
            if self._metrics is None:
                return refused(404, "for metrics install Tidegate with them: pip install 'tidegate[metrics]'")
            try:
                data, kind = self._metrics()
            except Exception:
                _log.exception("the dashboard could not tell its metrics; this is a defect")
                return refused(503, "the metrics could not be told; the dashboard's own messages say why")
            return Response(json_without_secrets(data), 200, _NO_STORE, kind)

        return await anyio.to_thread.run_sync(work)

    # -- what is live -----------------------------------------------------------------------------

    async def _live_one(self, request: Request) -> Response:
        try:
            root = self.board.root(request.path_params["key"])
        except NotThere as error:
            return refused(404, str(error))
        return self._stream(request, "status", root.live, _LOOK_EVERY_S)

    async def _live_list(self, request: Request) -> Response:
        return self._stream(request, "pipelines", lambda: pipelines(self.board), _LIST_EVERY_S)

    def _stream(self, request: Request, name: str, look: Callable[[], Any], every_s: float) -> Response:
        if request.query_params:
            return refused(400, "it takes no parameters")
        if request.method == "HEAD":
            return Response(headers=_NO_STORE, media_type="text/event-stream")
        if self._streams >= _STREAMS_AT_ONCE:
            return refused(503, "too many look at once; close some of the pages")
        return StreamingResponse(self._events(name, look, every_s), 200, _NO_STORE, "text/event-stream")

    async def _events(self, name: str, look: Callable[[], Any], every_s: float) -> AsyncIterator[bytes]:
        self._streams += 1
        reading: asyncio.Future[Any] | None = None
        try:
            last: Any = None
            told_s = 0.0
            while not self.is_closing:
                reading = asyncio.ensure_future(anyio.to_thread.run_sync(look))
                while not (await asyncio.wait([reading], timeout=_HEARTBEAT_S))[0]:
                    yield _STILL_HERE
                found = reading.result()
                now_s = time.monotonic()
                if (timeless := _without_age(found)) != last:
                    last, told_s = timeless, now_s
                    yield b"event: %s\ndata: %s\n\n" % (name.encode(), json_without_secrets(msgspec.json.encode(found)))
                elif now_s - told_s > _HEARTBEAT_S:
                    told_s = now_s
                    yield _STILL_HERE
                await asyncio.sleep(every_s)
        except Exception:
            _log.exception("a stream of the dashboard has failed; this is a defect")
        finally:
            self._streams -= 1
            if reading is not None:
                reading.cancel()


def _without_age(found: Live | Pipelines) -> Any:
    """What is compared: that a checkpoint is older than before is no change."""
    if isinstance(found, Pipelines):
        return tuple(map(_ageless, found.pipelines))
    return _ageless(found.summary), found.status, found.newest_event, found.mark


def _ageless(summary: Any) -> Any:
    if summary.last_checkpoint is None:
        return summary
    last = msgspec.structs.replace(summary.last_checkpoint, age_ms=None)
    return msgspec.structs.replace(summary, last_checkpoint=last)


async def _told(_request: Request, error: Exception) -> Response:
    """What Starlette itself refuses."""
    assert isinstance(error, HTTPException)
    why = {404: "there is nothing at that address", 405: "that method does nothing here"}.get(error.status_code)
    return refused(error.status_code, why or error.detail, dict(error.headers or {}))


def _metrics(board: Board) -> Callable[[], tuple[bytes, str]] | None:
    """Of every root; None: what they are made with is not installed."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        from tidegate.engine.watching.roots import Seen, collector_for
    except ImportError:
        return None

    def look(root: ShownRoot) -> Seen:
        pipeline, is_alive, status, events = root.seen()
        return Seen(pipeline=pipeline, is_alive=is_alive, status=status, events=events, room=root.room())

    registry = CollectorRegistry()
    registry.register(collector_for({root.given: functools.partial(look, root) for root in board.roots.values()}))
    return lambda: (generate_latest(registry), CONTENT_TYPE_LATEST)


class _Server(uvicorn.Server):
    """Tells its streams to end when it is to."""

    def __init__(self, config: uvicorn.Config, pages: Pages) -> None:
        super().__init__(config)
        self._pages = pages

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._pages.is_closing = True
        await super().shutdown(sockets)


class Dashboard:
    """As a context, or with `close`: it listens from when it is made, and answers from `start` on."""

    def __init__(
        self,
        roots: Sequence[Place],
        host: str = "127.0.0.1",
        port: int = 8472,
        *,
        allow_actions: bool = False,
        token: Token | None = None,
        more_hosts: Collection[str] = (),
    ) -> None:
        """`port` 0: a free one. `token`: needed with `allow_actions`, off loopback, and with `more_hosts`."""
        if token is None and (allow_actions or not is_open(host, more_hosts)):
            raise InvalidConfig("without a token the dashboard only shows, and on loopback only")
        self._beside = ThreadPoolExecutor(4, "tidegate-dashboard")
        shown = [ShownRoot(place, self._beside) for place in roots]
        board = Board({root.key: root for root in shown}, allow_actions)
        self.roots = {root.key: root.given for root in shown}
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        pages = Pages(board)
        pages.guard = Guard(pages.app(), host, self.port, token, more_hosts)
        config = uvicorn.Config(
            pages.guard,
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config, pages)
        self._thread = threading.Thread(target=self._serve, name="tidegate-dashboard-server", daemon=True)
        for root in shown:
            self._beside.submit(root.warm_up)

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        self._thread.start()
        while self._thread.is_alive() and not self._server.started:
            time.sleep(0.005)

    @property
    def is_serving(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(10)
        self._socket.close()
        self._beside.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Dashboard:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
        # For those that are accepted: else a small answer waits until the client has acknowledged its headers.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise InvalidConfig(
            f"the dashboard cannot listen on {host}:{port}: {error.strerror or error}; give another one with --port, "
            f"0 takes a free one"
        ) from error
