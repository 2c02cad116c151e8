"""A query that has nothing to read rests: it takes no CPU, and goes on the moment that there is something.

An idle query of Spark's looks for data again and again, which takes about 2 ms of a core each time, most of them for
copies of Hadoop's settings; how long it sleeps in between cannot be changed while it runs, and its sleep cannot be
ended but by an end of the query. Before each look, however, it takes a lock of its own (`awaitProgressLock`). So what
lets a query rest is to hold that lock, and what wakes it is to let go: it then looks at once, instead of after the
rest of its sleep.

- Only a query that waits for data may rest: one with a batch under way could not commit it, and one with timers in
  processing time never waits.
- The lock is held by a thread of the JVM's own, one per query, so any thread of ours may wake it, and it needs no
  connection that lasts.
- That thread lets go once a second for a moment, whatever becomes of us: a query that others stop, which does not heed
  an interrupt while it waits for a lock, ends then; and were a query ever not woken, it would be late, and not hang.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import first_line
from tidegate.spark.jvm import java_class

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger("tidegate")

WAITING: Final = "Waiting for data to arrive"
"""What Spark says of a query whose last look has found nothing."""
_LETS_GO_EVERY_MS: Final = 1_000
# Long enough for a look that it slept before: so it mostly stands before the next one again, and not before a sleep.
_LETS_GO_FOR_MS: Final = 50


class QueryRest:
    """Whether a query rests. All but `close` is called from the control thread."""

    def __init__(self, query: StreamingQuery, session: SparkSession) -> None:
        self._query: Any = query
        self._session = session
        self._holder: Any = None
        self._pauses: list[Any] = []
        self._cannot = False
        self.is_resting = False

    def begin(self) -> None:
        """Let it rest, if it waits for data: nothing may be there that it has yet to see."""
        if self._cannot or self._query._jsq.status().message() != WAITING:
            return
        if self._holder is None:
            try:
                self._make_holder()
            except Exception as error:  # of a Spark that is made otherwise inside: what it costs is CPU, and no rows
                self._cannot = True
                _log.warning("the query of %s cannot rest while it is idle: %s", self._query.name, first_line(error))
                return
        self.is_resting = True  # before it is so: what comes in between may wake it in vain, but never not at all
        self._holder.execute(self._take)
        for act, first_ms in (
            (self._let_go, _LETS_GO_EVERY_MS),
            (self._take, _LETS_GO_EVERY_MS + _LETS_GO_FOR_MS),
        ):
            self._pauses.append(self._holder.scheduleAtFixedRate(act, first_ms, _LETS_GO_EVERY_MS, self._ms))

    def end(self) -> None:
        """Wake it, if it rests."""
        if not self.is_resting:
            return
        pauses, self._pauses = self._pauses, []
        for pause in pauses:
            pause.cancel(False)
        self._holder.execute(self._let_go)  # if it does not hold the lock just now, this fails, and nobody minds
        self.is_resting = False

    def close(self) -> None:
        """It is about to be stopped, or has ended."""
        with suppress(Exception):
            self.end()
        if self._holder is not None:
            with suppress(Exception):
                self._holder.shutdown()  # when it has let go

    def _make_holder(self) -> None:
        stream = self._query._jsq.streamingQuery()
        lock = stream.awaitProgressLock()
        java = partial(java_class, self._session)
        nothing = java("java.lang.invoke.MethodType").methodType(java("java.lang.Void").TYPE)
        lookup = java("java.lang.invoke.MethodHandles").publicLookup()
        runnable = java("java.lang.Class").forName("java.lang.Runnable")

        def calling(method: str) -> Any:
            bound = lookup.findVirtual(lock.getClass(), method, nothing).bindTo(lock)
            return java("java.lang.invoke.MethodHandleProxies").asInterfaceInstance(runnable, bound)

        self._take, self._let_go = calling("lock"), calling("unlock")
        self._ms = java("java.util.concurrent.TimeUnit").MILLISECONDS
        threads = java("org.apache.spark.util.ThreadUtils")
        self._holder = threads.newDaemonSingleThreadScheduledExecutor(f"tidegate-rest-{self._query.name}")
