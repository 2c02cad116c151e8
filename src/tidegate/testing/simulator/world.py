"""One seed, one queue of events: the clock, the randomness and the processes of a simulated cluster.

Everything that happens is an event at a simulated millisecond. The order of events, every delay and every
fault is drawn from one generator, so a seed replays a run exactly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import msgspec

Resume = Callable[[Any, Exception | None], None]


class Operation:
    """Something that takes simulated time: it is started for a process, and resumes it with a result or error."""

    __slots__ = ("start",)

    def __init__(self, start: Callable[[Process, Resume], None]) -> None:
        self.start = start

    def __await__(self) -> Generator[Operation, Any, Any]:
        return (yield self)


Task = Coroutine[Operation, Any, None]
"""What one process does: awaits operations, is resumed with their results, dies with its process."""


class Scope:
    """Tasks that belong together: none goes on when it is over."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class Faults(msgspec.Struct):
    """How likely things go wrong, now. All zero once the faults have ended.

    `seems_to_exist`: a slot is said to be taken, though it is free. `sleeps_before_claim`: others may have trimmed the
    log past the slot when the process wakes up. `disk_is_full_until_ms`: no write succeeds. `store_stands_until_ms`:
    nothing that is asked for takes effect, or is answered, before that. `lose_message`: what is said to another process
    is sent or heard a round later. `kv_fails`: what processes share does not answer, and may have done what it was
    asked, or do it later. `kv_lags`: something is seen as it was. `repeats`: what is sent or heard is so twice.
    """

    lose_message: float = 0.0
    kv_fails: float = 0.0
    kv_lags: float = 0.0
    lose_notice: float = 0.0
    repeats: float = 0.0
    store_fails: float = 0.0
    store_fails_after_writing: float = 0.0
    store_is_slow: float = 0.0
    seems_to_exist: float = 0.0
    sleeps_before_claim: float = 0.0
    disk_is_full_until_ms: int = 0
    store_stands_until_ms: int = 0


class Process:
    """A process that can crash (losing all that it knows) and pause (losing nothing but time), be cut off from what
    processes share and from the store, and has a clock of its own."""

    __slots__ = ("alive", "clock_ahead_ms", "incarnation", "kv_cut_until", "name", "paused_until", "store_cut_until")

    def __init__(self, name: str, clock_ahead_ms: int = 0) -> None:
        self.name = name
        self.alive = True
        self.incarnation = 0
        self.paused_until = 0
        self.kv_cut_until = 0
        self.store_cut_until = 0
        self.clock_ahead_ms = clock_ahead_ms

    def crash(self) -> None:
        self.alive = False
        self.incarnation += 1
        self.paused_until = 0

    def restart(self) -> None:
        self.alive = True

    def renew(self) -> None:
        """Nothing that it had begun goes on: it begins anew, as another incarnation."""
        self.incarnation += 1


class World:
    """The event queue."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.faults = Faults()
        self.now = 0
        self.steps = 0
        self.trace: list[str] | None = None
        self._order = 0
        self._queue: list[tuple[int, int, Process | None, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay_ms: int, process: Process | None, call: Callable[..., None], *arguments: Any) -> None:
        """Call in `delay_ms`; not if the process has crashed by then, later if it is paused."""
        self._order += 1
        incarnation = 0 if process is None else process.incarnation
        entry = (self.now + delay_ms, self._order, process, incarnation, call, arguments)
        heapq.heappush(self._queue, entry)

    def run(self, until_ms: int, done: Callable[[], bool] | None = None) -> None:
        """Let time pass up to `until_ms`, or until `done`, asked now and then."""
        queue = self._queue
        while queue and queue[0][0] <= until_ms:
            moment, order, process, incarnation, call, arguments = heapq.heappop(queue)
            if process is not None:
                if incarnation != process.incarnation:
                    continue
                if process.paused_until > moment:
                    entry = (process.paused_until, order, process, incarnation, call, arguments)
                    heapq.heappush(queue, entry)
                    continue
            self.now = moment
            self.steps += 1
            call(*arguments)
            if done is not None and self.steps % 32 == 0 and done():
                return
        self.now = max(self.now, until_ms)

    def note(self, template: str, *values: object) -> None:
        """Tell the trace, if one is kept, what happened."""
        if self.trace is not None:
            self.trace.append(f"{self.now:>6} ms  {template.format(*values)}")

    @property
    def has_full_disk(self) -> bool:
        return self.now < self.faults.disk_is_full_until_ms

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def delay(self, longest_ms: int) -> int:
        return int(self.random.random() * longest_ms) + 1

    def spawn(self, process: Process, task: Task, scope: Scope) -> None:
        """Run a task in a process."""
        self._advance(process, task, scope, None, None)

    def sleep(self, delay_ms: int) -> Operation:
        return Operation(lambda process, resume: self.after(delay_ms, process, resume, None, None))

    def _advance(self, process: Process, task: Task, scope: Scope, value: Any, error: Exception | None) -> None:
        if scope.is_over:
            task.close()
            return
        try:
            operation = task.send(value) if error is None else task.throw(error)
        except StopIteration:
            return
        operation.start(process, lambda result, failure: self._advance(process, task, scope, result, failure))
