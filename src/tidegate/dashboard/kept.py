"""Values that are read from a root and kept for a while, so that many requests cost as much as one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """A value that is read anew when it is older than `fresh_s`, by one thread at a time.

    Until it is older than `stale_s`, whoever asks is given what there is, and it is read beside. So nobody waits for
    what many look at all the time, and who comes back after an hour sees nothing that is an hour old. A failure is kept
    like a value: a root that cannot be read is not tried for every request.
    """

    def __init__(self, read: Callable[[], T], beside: Executor, fresh_s: float, stale_s: float) -> None:
        self._read = read
        self._beside = beside
        self._fresh_s = fresh_s
        self._stale_s = stale_s
        self._reading = threading.Lock()
        self._found: tuple[float, T | None, Exception | None] | None = None

    def get(self) -> T:
        age = self._age()
        if age is None or age > self._stale_s:
            self._renew(self._stale_s if age is not None else None)
        elif age > self._fresh_s and not self._reading.locked():
            self._beside.submit(self._renew, self._fresh_s)
        return self._value()

    def peek(self, otherwise: T) -> T:
        """What there is, however old it is, and something else where there is nothing yet; it is read beside."""
        age = self._age()
        if (age is None or age > self._fresh_s) and not self._reading.locked():
            self._beside.submit(self._renew, self._fresh_s)
        if age is None:
            return otherwise
        try:
            return self._value()
        except Exception:  # whoever needs it asks for it
            return otherwise

    def forget(self) -> None:
        """It has just changed."""
        self._found = None

    def _age(self) -> float | None:
        found = self._found
        return None if found is None else time.monotonic() - found[0]

    def _renew(self, if_older_s: float | None) -> None:
        with self._reading:
            age = self._age()
            if age is not None and (if_older_s is None or age <= if_older_s):
                return  # another thread has done it meanwhile
            value: T | None = None
            failure: Exception | None = None
            try:
                value = self._read()
            except Exception as error:
                failure = error
            self._found = (time.monotonic(), value, failure)

    def _value(self) -> T:
        found = self._found
        while found is None:  # forgotten since it was read
            self._renew(None)
            found = self._found
        _, value, failure = found
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]
