"""The threads of an exchange: one sends, one listens, and neither holds up the control thread or the other.

What may work later is tried again, for as long as it takes. What would fail again is told to the control thread, which
ends what runs here with it: while the rest waits behind it, others would see a process that lives, and says nothing.
It is tried on all the same, since what ends with a generation may have been all that was in the way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from tidegate.cluster.exchange import Exchange
from tidegate.cluster.kv import Session
from tidegate.errors import CoordinationUnavailable, StoreUnavailable, TidegateError

_log = logging.getLogger("tidegate")

_LISTEN_S: Final = 0.2
_PAUSE_S: Final = 0.2
_TELL_EVERY_S: Final = 10.0
_TRIES: Final = 10
"""Of what nobody has foreseen, such as an error of a client's own threads: it may pass."""


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
        send = _Tries(self._exchange.send, self._exchange.on_not_sent)
        while True:
            self._exchange.said.wait(_LISTEN_S)
            is_last = self._is_closed.is_set()
            if not self._try(send):
                self._exchange.said.set()
                if not is_last:
                    self._is_closed.wait(_PAUSE_S)
            if is_last:
                return

    def _listen(self) -> None:
        receive = _Tries(self._exchange.receive, self._exchange.on_not_heard)
        wait = _Tries(self._wait, self._exchange.on_not_heard)
        while not self._is_closed.is_set():
            if not (self._try(receive) and self._try(wait)):
                self._is_closed.wait(_PAUSE_S)

    def _wait(self) -> None:
        self._session.wait(self._exchange.folders, self._listen_s)

    def _try(self, what: _Tries) -> bool:
        try:
            what.act()
        except (CoordinationUnavailable, StoreUnavailable) as error:
            if not self._is_closed.is_set() and time.monotonic() - self._told_at >= _TELL_EVERY_S:
                self._told_at = time.monotonic()
                _log.warning("what the instances share does not answer: %s; it is tried again", error)
            return False
        except Exception as error:  # whatever it is, nobody else would hear of it
            if not self._is_closed.is_set():
                what.failed(error)
            return False
        what.in_vain = 0
        return True


class _Tries:
    """Something that is done again and again, and who is told that it cannot be."""

    def __init__(self, act: Callable[[], None], tell: Callable[[Exception], None]) -> None:
        self.act = act
        self._tell = tell
        self.in_vain = 0
        """How often in a row it has failed in a way that is not known to pass."""

    def failed(self, error: Exception) -> None:
        self.in_vain += 1
        if self.in_vain == 1:
            _log.error("talking to the other instances has failed", exc_info=error)
        if isinstance(error, TidegateError) or self.in_vain >= _TRIES:
            self._tell(error)
