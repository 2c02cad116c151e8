"""A proxy in front of an S3 server that delays, refuses and cuts, by a plan that a seed decides.

It speaks as much HTTP/1.1 as S3's clients do, and passes on what it hears as it is: the name of the host is signed.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Final, Self

_HEAD_BYTES: Final = 1 << 16
_BODY: Final = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message>'
    "<RequestId>TESTS</RequestId></Error>"
)
_ANSWERS: Final = {
    409: ("Conflict", "ConditionalRequestConflict", "A conflicting operation occurred. Try again."),
    500: ("Internal Server Error", "InternalError", "We encountered an internal error. Please try again."),
    503: ("Slow Down", "SlowDown", "Please reduce your request rate."),
}


class Fault(Enum):
    """What happens to one request."""

    CONFLICT = "answered 409, and not passed on"
    ERROR = "answered 500, and not passed on"
    BUSY = "answered 503, and not passed on"
    DONE_BUT_ERROR = "passed on, and answered 500"
    DONE_BUT_CUT = "passed on, and cut before the answer"
    CUT = "cut before it was passed on"
    CUT_IN_BODY = "cut in the middle of the answer's body"
    SLOW = "answered slowly, a few bytes at a time"


_STATUS: Final = {Fault.CONFLICT: 409, Fault.ERROR: 500, Fault.BUSY: 503, Fault.DONE_BUT_ERROR: 500}
_DONE: Final = frozenset((Fault.DONE_BUT_ERROR, Fault.DONE_BUT_CUT, Fault.CUT_IN_BODY, Fault.SLOW))


@dataclass
class Plan:
    """How often each fault happens, from 0 to 1, of requests of some methods, so many times at the most."""

    seed: int
    faults: Mapping[Fault, float]
    at_most: int = 1_000_000
    methods: frozenset[str] = frozenset(("GET", "PUT", "HEAD", "POST", "DELETE"))
    refuses_any_put: bool = False
    """S3 answers 409 only where two create one object; here any put may be, for a failure that nobody tries again."""
    happened: Counter[Fault] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def decide(self, method: str, *, is_conditional: bool = False) -> Fault | None:
        if method not in self.methods or self.happened.total() >= self.at_most:
            return None
        drawn = self._random.random()
        for fault, chance in self.faults.items():
            drawn -= chance
            may_conflict = is_conditional or (self.refuses_any_put and method == "PUT")
            if drawn < 0 and fault is Fault.CONFLICT and not may_conflict:
                return None
            if drawn < 0:
                self.happened[fault] += 1
                return fault
        return None


class S3Proxy:
    def __init__(self, port: int) -> None:
        """`port`: of the server, on loopback."""
        self._server_port = port
        self.delay_ms = 0.0
        self.plan: Plan | None = None
        """May be set, and unset, at any time."""
        self.counts: Counter[str] = Counter()
        """Requests by method, those that were made again too."""
        self.asked: deque[tuple[str, str]] = deque(maxlen=10_000)
        """The last of them: method, and path with what it asks for."""
        self.put_bytes: Counter[str] = Counter()
        """How many were put, by the path of the object."""
        self.most_at_once = 0
        self._now = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD_BYTES))
        self._port = int(server.sockets[0].getsockname()[1])
        started.set()
        loop.run_forever()
        server.close()
        for task in self._tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._serve_one(reader, writer):
                pass
        writer.close()
        self._tasks.discard(task)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection can be used again."""
        head = await reader.readuntil(b"\r\n\r\n")
        if b"100-continue" in head.lower():  # as s3a does: else it waits for seconds before it sends the body
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()
        body = await _body(head, reader)
        method = head.split(b" ", 1)[0].decode()
        self.counts[method] += 1
        path = head.split(b" ", 2)[1].decode()
        self.asked.append((method, path))
        if method == "PUT":
            self.put_bytes[path.partition("?")[0]] += len(body)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await asyncio.sleep(self.delay_ms / 1000)
            is_conditional = b"\r\nif-none-match:" in head.lower()
            fault = None if self.plan is None else self.plan.decide(method, is_conditional=is_conditional)
            answer = b"" if fault is not None and fault not in _DONE else await self._passed_on(method, head + body)
        finally:
            self._now -= 1
        if fault in _STATUS:
            answer = _refusal(_STATUS[fault], method)
        return await _answered(writer, answer, fault)

    async def _passed_on(self, method: str, request: bytes) -> bytes:
        """The server's whole answer. A connection each: which one is used again is not what is tested."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port, limit=_HEAD_BYTES)
        try:
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            while head.startswith(b"HTTP/1.1 100"):
                head = await reader.readuntil(b"\r\n\r\n")
            has_body = method != "HEAD" and head[9:12] not in {b"204", b"304"}
            return head + (await _body(head, reader) if has_body else b"")
        finally:
            writer.close()


async def _answered(writer: asyncio.StreamWriter, answer: bytes, fault: Fault | None) -> bool:
    if fault in {Fault.CUT, Fault.DONE_BUT_CUT}:
        return False
    head, end, body = answer.partition(b"\r\n\r\n")
    if fault is Fault.CUT_IN_BODY:
        writer.write(head + end + body[: len(body) // 2])
        await writer.drain()
        return not body
    if fault is Fault.SLOW:
        writer.write(head + end)
        step = max(1, len(body) // 5)
        for start in range(0, len(body), step):
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(body[start : start + step])
    else:
        writer.write(answer)
    await writer.drain()
    return b"connection: close" not in head.lower()


async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return await reader.readexactly(int(value))
        if name == b"transfer-encoding" and b"chunked" in value:
            return await _chunks(reader)
    return b""


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """As they came, with their lengths."""
    found = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        found += line + await reader.readexactly(size + 2)
        if not size:
            return found


def _refusal(status: int, method: str) -> bytes:
    reason, code, message = _ANSWERS[status]
    body = _BODY.format(code=code, message=message).encode()
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + (b"" if method == "HEAD" else body)
