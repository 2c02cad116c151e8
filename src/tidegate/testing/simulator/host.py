"""Who carries requests out in a simulated process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import StoreUnavailable, TidegateError
from tidegate.flows.requests import Flow, Patience, Request, Sleep
from tidegate.protocol.commit import RetryPause
from tidegate.testing.simulator.checkers import SimulationFailure
from tidegate.testing.simulator.world import Process, Scope, World

if TYPE_CHECKING:
    from tidegate.testing.simulator.cluster import Cluster

PATIENCE: Final = Patience(
    give_up_ms=400,
    pause=RetryPause(first_ms=5, longest_ms=60),
    sink_pause=RetryPause(first_ms=5, longest_ms=60),
    sink_tries=8,
    snapshot_tries=3,
)

LEAST_PATIENCE_MS: Final = PATIENCE.give_up_ms - PATIENCE.pause.longest_ms
"""What the store does not answer is asked again for about as long as patience lasts."""

Handler = Callable[[Any], Awaitable[Any]]


class Host:
    """Carries requests out for one part, until its scope is over."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self.cluster = cluster
        self.world: World = cluster.world
        self.process = process
        self.scope = Scope()
        self._handlers: dict[type[Request[Any]], Handler] = {Sleep: self._sleep}

    @property
    def now_ms(self) -> int:
        return self.world.now + self.process.clock_ahead_ms

    def start(self, flow: Flow[None], on_failed: Callable[[TidegateError], None]) -> None:
        if self.scope.is_over:
            flow.close()
        else:
            self.world.spawn(self.process, self._carry_out(flow, on_failed), self.scope)

    def on_unanswered(self, request: Request[Any], error: StoreUnavailable, failures: int) -> None:
        self.world.note("{}: {} is asked again ({}): {}", self.process.name, type(request).__name__, failures, error)

    async def _carry_out(self, flow: Flow[None], on_failed: Callable[[TidegateError], None]) -> None:
        answer: Any = None
        failure: Exception | None = None
        began_ms = self.now_ms
        try:
            while True:
                request = flow.send(answer) if failure is None else flow.throw(failure)
                answer = failure = None
                try:
                    answer = await self.carry_out(request)
                except TidegateError as error:
                    failure = error
        except StopIteration:
            return
        except TidegateError as error:
            if isinstance(error, StoreUnavailable) and self.now_ms - began_ms < LEAST_PATIENCE_MS:
                raise SimulationFailure("Patience", f"given up after {self.now_ms - began_ms} ms: {error}") from error
            on_failed(error)
        finally:
            flow.close()

    async def carry_out(self, request: Request[Any]) -> Any:
        return await self._handlers[type(request)](request)

    async def _sleep(self, request: Sleep) -> None:
        await self.world.sleep(request.delay_ms)
