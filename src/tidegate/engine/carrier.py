"""Carrying out what flows ask for: on threads beside the control thread, which never waits.

A handler is called on the control thread, where it may look at what lives there; what it returns is called beside it,
and what that returns is the answer. When an answer is there, `poll` lets its flow go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import UTC, datetime
from typing import Any, Final, Protocol, TypeVar

from tidegate.engine.beside import beside
from tidegate.errors import StoreUnavailable, TidegateError
from tidegate.flows.requests import Flow, Request, RunStages, Sleep

T = TypeVar("T")

Act = Callable[[], Any]
Handler = Callable[[Any], Act]
Handlers = Mapping[type[Request[Any]], Handler]

AT_ONCE: Final = (RunStages,)
"""What is carried out on the control thread: nothing else could go on without it."""


class Beside(Protocol):
    """Makes a call beside the control thread."""

    def __call__(self, name: str, call: Callable[[], T], /) -> Future[T]: ...


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Clock:
    """What time it is, for a run."""

    @property
    def now_ms(self) -> int:
        """A time that never jumps."""
        return monotonic_ms()

    def sleep(self, delay_ms: int) -> None:
        time.sleep(delay_ms / 1000)

    def utc(self) -> datetime:
        """What the clock on the wall says, which may jump."""
        return datetime.now(UTC)


class _Step:
    """A flow that waits for an answer. `future` is None while it sleeps."""

    __slots__ = ("due_ms", "flow", "future", "on_failed", "request")

    def __init__(
        self,
        flow: Flow[None],
        on_failed: Callable[[TidegateError], None],
        request: Request[Any],
        future: Future[Any] | None,
        due_ms: int,
    ) -> None:
        self.flow = flow
        self.on_failed = on_failed
        self.request = request
        self.future = future
        self.due_ms = due_ms


class Carrier:
    """All of it is called from the control thread, but for what it calls beside it."""

    def __init__(self, clock: Clock | None = None, call: Beside = beside) -> None:
        self.clock = Clock() if clock is None else clock
        self.call = call
        self._handlers: dict[type[Request[Any]], Handler] = {}
        self._waiting: list[_Step] = []
        self._is_stopped = False
        self.woken = threading.Event()
        """Set when an answer is there, for whoever waits for the next round."""

    def handle(self, handlers: Handlers) -> None:
        self._handlers.update(handlers)

    def start(self, flow: Flow[None], on_failed: Callable[[TidegateError], None]) -> None:
        if self._is_stopped:
            flow.close()
        else:
            self._go_on(flow, on_failed, None, None)

    def poll(self) -> None:
        """Let the flows go on whose answers are there."""
        now_ms = self.clock.now_ms
        for step in tuple(self._waiting):
            if step.future is None:
                if now_ms >= step.due_ms:
                    self._resume(step, None, None)
            elif step.future.done():
                error = step.future.exception()
                self._resume(step, None if error is not None else step.future.result(), error)

    @property
    def is_idle(self) -> bool:
        """Whether no flow waits for anything."""
        return not self._waiting

    def stop(self, waits_s: Callable[[Request[Any]], float]) -> None:
        """No flow goes on. What is being carried out is waited for, for so long."""
        self._is_stopped = True
        steps, self._waiting = self._waiting, []
        for step in steps:
            step.flow.close()
        for step in steps:
            if step.future is not None:
                wait([step.future], timeout=waits_s(step.request))

    def _resume(self, step: _Step, answer: Any, error: BaseException | None) -> None:
        self._waiting.remove(step)
        if self._is_stopped:
            step.flow.close()
        else:
            self._go_on(step.flow, step.on_failed, answer, error)

    def _go_on(
        self,
        flow: Flow[None],
        on_failed: Callable[[TidegateError], None],
        answer: Any,
        error: BaseException | None,
    ) -> None:
        while True:
            try:
                request = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration:
                return
            except TidegateError as failure:
                on_failed(failure)
                return
            answer = error = None
            if isinstance(request, Sleep):
                self._waiting.append(_Step(flow, on_failed, request, None, self.clock.now_ms + request.delay_ms))
                return
            act = self._handlers[type(request)](request)
            if not isinstance(request, AT_ONCE):
                future = self.call(f"tidegate-{type(request).__name__}", act)
                self._waiting.append(_Step(flow, on_failed, request, future, 0))
                future.add_done_callback(lambda _: self.woken.set())
                return
            try:
                answer = act()
            except TidegateError as failure:
                error = failure


def carry_out(flow: Flow[T], handlers: Handlers, clock: Clock) -> T:
    """Carry a flow out here and now, to its end."""
    answer: Any = None
    error: TidegateError | None = None
    while True:
        try:
            request = flow.send(answer) if error is None else flow.throw(error)
        except StopIteration as ended:
            result: T = ended.value
            return result
        answer = error = None
        if isinstance(request, Sleep):
            clock.sleep(request.delay_ms)
            continue
        try:
            answer = handlers[type(request)](request)()
        except TidegateError as failure:
            error = failure


class Now:
    """A host for flows that are carried out at once."""

    def __init__(self, clock: Clock, on_unanswered: Callable[[str], None]) -> None:
        self._clock = clock
        self._on_unanswered = on_unanswered

    @property
    def now_ms(self) -> int:
        return self._clock.now_ms

    def start(self, flow: Flow[None], on_failed: Callable[[TidegateError], None]) -> None:  # noqa: ARG002
        flow.close()
        raise NotImplementedError("nothing goes on beside a flow that is carried out at once")

    def on_unanswered(self, request: Request[Any], error: StoreUnavailable, failures: int) -> None:  # noqa: ARG002
        self._on_unanswered(str(error))
