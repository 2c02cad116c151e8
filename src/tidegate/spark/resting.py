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
- That thread lets the query have its turn once a second, whatever becomes of us: a query that others stop, which does
  not heed an interrupt while it waits for a lock, ends then; and were a query ever not woken, it would be late, and not
  hang. It lets go and takes again in one act, so that it always holds the lock once between two turns: a process may be
  stopped between any two calls of ours, for however long. The lock is fair: who waits for it gets it in between.
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
_TURN_EVERY_MS: Final = 1_000


class QueryRest:
    """Whether a query rests. All but `close` is called from the control thread."""

    def __init__(self, query: StreamingQuery, session: SparkSession) -> None:
        self._query: Any = query
        self._session = session
        self._holder: Any = None
        self._turns: Any = None
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
        self._turns = self._holder.scheduleWithFixedDelay(self._take_turns, _TURN_EVERY_MS, _TURN_EVERY_MS, self._ms)

    def end(self) -> None:
        """Wake it, if it rests."""
        if not self.is_resting:
            return
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.cancel(False)
        self._holder.execute(self._let_go)  # behind a turn that is being given, which ends with the lock held
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

        def method(name: str) -> Any:
            return lookup.findVirtual(lock.getClass(), name, nothing).bindTo(lock)

        def calling(handle: Any) -> Any:
            return java("java.lang.invoke.MethodHandleProxies").asInterfaceInstance(runnable, handle)

        take, let_go = method("lock"), method("unlock")
        self._take, self._let_go = calling(take), calling(let_go)
        # First the second of them, then the first.
        self._take_turns = calling(java("java.lang.invoke.MethodHandles").foldArguments(take, let_go))
        self._ms = java("java.util.concurrent.TimeUnit").MILLISECONDS
        threads = java("org.apache.spark.util.ThreadUtils")
        self._holder = threads.newDaemonSingleThreadScheduledExecutor(f"tidegate-rest-{self._query.name}")
