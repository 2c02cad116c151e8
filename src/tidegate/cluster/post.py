"""The threads of an exchange: one sends, one listens, and neither holds up the control thread or the other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from tidegate.cluster.exchange import Exchange
from tidegate.cluster.kv import Session
from tidegate.errors import CoordinationUnavailable, StoreUnavailable

_log = logging.getLogger("tidegate")

_LISTEN_S: Final = 0.2
_PAUSE_S: Final = 0.2
_TELL_EVERY_S: Final = 10.0


class Post:
    """As long as it is open, what is said is sent and what others say is heard."""

    def __init__(self, exchange: Exchange, session: Session, listen_s: float = _LISTEN_S) -> None:
        """`listen_s`: how long it waits for others to say something before it looks at all that they have said."""
        self._listen_s = listen_s
        self._exchange = exchange
        self._session = session
        self._is_closed = threading.Event()
        self._told_at = -_TELL_EVERY_S
        self._threads = [
            threading.Thread(target=self._send, name="tidegate-post-sends", daemon=True),
            threading.Thread(target=self._listen, name="tidegate-post-listens", daemon=True),
        ]

    def open(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """What was said before is sent, if that is possible at once."""
        self._is_closed.set()
        self._exchange.said.set()
        self._threads[0].join(5)
        self._exchange.close()
        self._threads[1].join(5)

    def _send(self) -> None:
        while True:
            self._exchange.said.wait(_LISTEN_S)
            is_last = self._is_closed.is_set()
            if not self._try(self._exchange.send):
                self._exchange.said.set()
                if not is_last:
                    self._is_closed.wait(_PAUSE_S)
            if is_last:
                return

    def _listen(self) -> None:
        while not self._is_closed.is_set():
            if not self._try(self._exchange.receive):
                self._is_closed.wait(_PAUSE_S)
                continue
            self._try(self._wait)

    def _wait(self) -> None:
        self._session.wait(self._exchange.folders, self._listen_s)

    def _try(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except (CoordinationUnavailable, StoreUnavailable) as error:
            if not self._is_closed.is_set() and time.monotonic() - self._told_at >= _TELL_EVERY_S:
                self._told_at = time.monotonic()
                _log.warning("what the instances share does not answer: %s; it is tried again", error)
            return False
        except Exception:
            _log.exception("talking to the other instances has failed; it is tried again")
            return False
        return True
