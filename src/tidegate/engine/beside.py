"""A call on a thread of its own, that nobody has to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def beside(name: str, call: Callable[[], T]) -> Future[T]:
    """Unlike a pool's threads, this one does not keep the process from ending: the call may hang for ever."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
