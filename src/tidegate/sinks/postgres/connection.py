"""Transactions with a PostgreSQL server that stay when they are committed, and that never wait for ever.

The server bounds each statement and each wait for a lock. Where it is silent itself, because it hangs or the link to it
was dropped, the client gives up: soon by keepalives, and after the time of a statement whatever stands between the two
and answers those in the server's stead, as a proxy does.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import conninfo

if TYPE_CHECKING:
    from psycopg.abc import RV, PQGen

_LOCK_SECONDS: Final = 30
_SLACK_SECONDS: Final = 5
"""How much longer than the server, which ends a statement that takes too long, the client waits for it to say so."""

_KEEPALIVES: Final = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
_USER_TIMEOUT_MS: Final = 60_000
_REACHED_BY: Final = {"connect_timeout": 10, "keepalives": 1, **_KEEPALIVES, "tcp_user_timeout": _USER_TIMEOUT_MS}
"""What a connection string need not say."""

# What the connection string says itself is left as it is, but for a commit that would not be durable. The server, too,
# notices a client that is gone: else it would keep its locks. Not every server knows every setting.
_SET: Final = """
SELECT set_config(name, value, true) FROM unnest(%s::text[], %s::text[]) AS wanted (name, value)
  JOIN pg_settings USING (name)
 WHERE CASE name WHEN 'synchronous_commit' THEN setting NOT IN ('on', 'remote_apply') ELSE source <> 'client' END
"""


class Server:
    """How a server is reached, and for how long a statement may run. Executors get it too; nobody is shown it."""

    __slots__ = ("_dsn", "_timeout_ms")

    def __init__(self, dsn: str, timeout_ms: int) -> None:
        self._dsn = dsn
        self._timeout_ms = timeout_ms

    @contextmanager
    def transaction(self, *, sees_one_moment: bool = False) -> Iterator[psycopg.Connection[Any]]:
        """A connection with one transaction, which sees in each statement what others have committed before it, or
        before the first one."""
        connection: _Connection | None = None
        try:
            with closing(_Connection.connect(self._dsn, **_options(self._dsn))) as connection, connection:
                connection.silent_s = self._timeout_ms / 1000 + _SLACK_SECONDS
                level = psycopg.IsolationLevel
                connection.isolation_level = level.REPEATABLE_READ if sees_one_moment else level.READ_COMMITTED
                settings = self._settings()
                connection.execute(_SET, (list(settings), list(settings.values())))
                yield connection
        except psycopg.Error:
            if connection is not None and connection.gave_up is not None:
                raise connection.gave_up from None  # not what happened on the connection that was closed
            raise

    def _settings(self) -> dict[str, str]:
        return {
            "synchronous_commit": "on",
            "lock_timeout": f"{_LOCK_SECONDS}s",
            "statement_timeout": f"{self._timeout_ms}ms",
            "idle_in_transaction_session_timeout": f"{self._timeout_ms}ms",
            **{f"tcp_{name}": str(value) for name, value in _KEEPALIVES.items()},
            "tcp_user_timeout": f"{_USER_TIMEOUT_MS}ms",
        }

    def told(self, error: Exception) -> str:
        """What went wrong, in one line, without secrets."""
        return scrubbed(str(error), self._dsn)


class _Connection(psycopg.Connection[Any]):
    """One that gives up when the server is silent for too long while something is asked of it."""

    silent_s: float = 0
    gave_up: psycopg.OperationalError | None = None

    def wait(self, gen: PQGen[RV], *args: Any, **kwargs: Any) -> RV:
        # Not every psycopg looks at the time itself while it waits.
        asking = threading.Lock()
        watchdog = threading.Timer(self.silent_s, self._give_up, (asking,))
        watchdog.daemon = True
        watchdog.start()
        try:
            return super().wait(gen, *args, **kwargs)
        finally:
            watchdog.cancel()
            asking.acquire()  # for good: one that has not begun has come too late, and the socket may soon be another's

    def _give_up(self, asking: threading.Lock) -> None:
        if not asking.acquire(blocking=False):
            return
        try:
            self.gave_up = psycopg.OperationalError(
                f"the server has not answered for {self.silent_s:.0f} s; it hangs, or the link to it is dropped"
            )
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.pgconn.socket)) as own:
                own.shutdown(socket.SHUT_RDWR)
        finally:
            asking.release()


def _options(dsn: str) -> dict[str, Any]:
    given = set(conninfo.conninfo_to_dict(dsn))
    if "PGCONNECT_TIMEOUT" in os.environ:
        given.add("connect_timeout")
    return {name: value for name, value in _REACHED_BY.items() if name not in given}


def scrubbed(text: str, dsn: str) -> str:
    """A message without what a connection string keeps secret."""
    secrets = {dsn}
    try:
        found = conninfo.conninfo_to_dict(dsn)
    except Exception:
        return "the connection string cannot be read (it is not shown here)"
    secrets |= {str(found[name]) for name in ("password", "sslpassword", "passfile") if found.get(name)}
    if "://" in dsn:
        # A password that is not written as URLs have it ends early, and its rest is taken for something else.
        if any("@" in str(found.get(name, "")) for name in ("host", "port", "dbname")):
            return "the password in the connection string has an @ or a /; write %40 or %2F (it is not shown here)"
        secrets.add(dsn.partition("://")[2].rpartition("@")[0].partition(":")[2])
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return " ".join(text.split())
