"""Who is alive on a root in a bucket: told by a lease, which whoever holds the root writes anew every few seconds.

A bucket has no locks, and clocks differ. So whoever comes watches the lease, by its own clock: one that does not change
for as long as it says is of somebody who is dead. One whose holder lived in the work folder of whoever comes need not
be watched: the lock of that folder, which is held by then, says that it is dead.

A lease that is wrong costs a restart and never a row: the decision log says who is right.

It carries what the run says of itself, because each write costs: a run that lives has one thing to write, not two.

Instances that run one pipeline together hold it together (`InstanceLease`): the one that leads writes it, with what it
says; the others look at it as often, and write it where nobody has for a while, so that no run alone takes the root
while one of them lives. Who of them is alive they tell each other elsewhere.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from tidegate.errors import RootInUse, StoreUnavailable
from tidegate.storage.files import Files
from tidegate.storage.lock import RootLock

_log = logging.getLogger("tidegate")

LEASE_S: Final = 15.0
_BEATS_PER_LEASE: Final = 3
# Of instances: those that do not lead write it as well, after so many looks at which nobody had.
SHARED_LEASE_S: Final = 20.0
_SHARED_BEATS_PER_LEASE: Final = 4
_UNCHANGED_LOOKS: Final = 2
# How often whoever holds it looks whether somebody has taken over.
_BEATS_PER_LOOK: Final = 6
_LOOK_EVERY_S: Final = 1.0
# Whose clock is further off than that is not waited for by commands that only look, nor taken for alive.
_CLOCKS_DIFFER_S: Final = 600.0
_END_S: Final = 10.0
NAME: Final = "lease.json"


class Lease(msgspec.Struct, frozen=True):
    """As it is in the bucket."""

    holder: str
    pid: int
    host: str
    work: str
    beat: int
    lease_s: float
    at: str
    """By the holder's clock."""
    is_over: bool = False
    """Whether its holder has given the root up."""
    taken: int = 0
    """How often the root was taken until then: of two that write, the one that has taken it later counts."""
    said: msgspec.Raw = msgspec.Raw(b"null")
    """What the run has said of itself last, in words of its own."""
    is_shared: bool = False
    """Whether instances hold it together, of which the holder is one."""
    speaks: bool = False
    """Whether that one leads, and `said` is its own. Else it only says that somebody lives."""

    @property
    def is_fresh(self) -> bool:
        """By both clocks, which may differ."""
        return not self.is_over and abs(_age_s(self)) <= self.lease_s


def read_lease(files: Files) -> Lease | None:
    """None: nobody has ever held the root, or it cannot be understood."""
    data = files.read(NAME)
    try:
        return None if data is None else msgspec.json.decode(data, type=Lease)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class SeenLease:
    """The lease as others see it who come to ask."""

    def __init__(self, files: Files, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._files = files
        self._pause = pause

    def is_held(self) -> bool:
        """One request, if a run is alive or has ended in order. Of one that was killed a while ago, as of one whose
        clock is behind, it is waited for whether the lease changes."""
        found = read_lease(self._files)
        if found is None or found.is_over:
            return False
        if found.is_fresh:
            return True
        if abs(_age_s(found)) > _CLOCKS_DIFFER_S:
            return False
        self._pause(found.lease_s / _BEATS_PER_LEASE + _LOOK_EVERY_S)
        now = read_lease(self._files)
        return now is not None and not now.is_over and now.beat != found.beat

    def holder(self) -> str:
        found = read_lease(self._files)
        return "" if found is None else str(found.pid)

    def held_since(self) -> datetime:
        found = read_lease(self._files)
        return datetime.fromtimestamp(0, UTC) if found is None else _moment(found.at)


class LeaseLock(RootLock):
    """Held by the run that lives on a root in a bucket: the lock of its work folder, and the lease."""

    carries_words = True
    _shares = False
    _speaks = True
    _may_end = True
    """Whether nobody else holds it."""
    _beats_per_lease = _BEATS_PER_LEASE

    def __init__(
        self,
        files: Files,
        work: Path,
        *,
        take_over: bool = False,
        lease_s: float = LEASE_S,
        look_s: float = _LOOK_EVERY_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(work / "lock", take_over=take_over)
        self._files = files
        self._work = work
        self._lease_s = lease_s
        self._look_s = look_s
        self._pause = pause
        self._id = uuid.uuid4().hex
        self._beats = 0
        self._taken = 0
        self._yields = False
        self._said = msgspec.Raw(b"null")
        self._writing = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidegate-lease", daemon=True)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._take(read_lease(self._files))
        except BaseException:
            super().__exit__(None, None, None)
            raise
        self._thread.start()
        return self

    def _take(self, seen: Lease | None) -> None:
        if not self._take_over:
            self._wait_until_free(seen)
        self._taken = 1 if seen is None else seen.taken + 1
        self._write()

    def _wait_until_free(self, seen: Lease | None) -> None:
        if seen is None or seen.is_over or (seen.host, seen.work) == (_host(), str(self._work)):
            return
        _log.info(
            "process %s on %s may be alive on %s: waiting for at most %.0f s",
            seen.pid,
            seen.host,
            self._where,
            seen.lease_s,
        )
        deadline = time.monotonic() + seen.lease_s
        while time.monotonic() < deadline:
            self._pause(min(self._look_s, max(0.0, deadline - time.monotonic())))
            now = read_lease(self._files)
            if now is None or now.is_over:
                return
            if (now.holder, now.beat) != (seen.holder, seen.beat):
                raise RootInUse(self._in_use(now))

    def _in_use(self, by: Lease) -> str:
        return (
            f"another run is alive on {self._where} (process {by.pid} on {by.host}); stop it first, or take over with "
            f"--take-over if it hangs"
        )

    @property
    def _where(self) -> str:
        return self._files.location()

    def say(self, said: bytes, *, at_once: bool = False) -> None:
        """With the next beat, or at once, unless somebody has taken over: then what that one says counts."""
        self._said = msgspec.Raw(said)
        if at_once:
            self._look()
            if not self._yields:
                self._write()

    def _look(self) -> None:
        """Whoever was taken over from leaves the lease alone; if the other one has ended, it may still be alive."""
        found = read_lease(self._files)
        self._yields = found is not None and found.taken > self._taken and not found.is_over

    def _write(self, *, is_over: bool = False) -> None:
        with self._writing:
            self._beats += 1
            lease = Lease(
                self._id,
                os.getpid(),
                _host(),
                str(self._work),
                self._beats,
                self._lease_s,
                datetime.now(UTC).isoformat(timespec="milliseconds"),
                is_over,
                self._taken,
                self._said,
                self._shares,
                self._speaks,
            )
            self._files.write(NAME, msgspec.json.encode(lease))

    def _run(self) -> None:
        count = 0
        while not self._ending.wait(self._lease_s / self._beats_per_lease):
            count += 1
            try:
                self._beat(count)
            except StoreUnavailable as error:
                _log.debug("the lease could not be written: %s", error)

    def _beat(self, count: int) -> None:
        if self._yields or count % _BEATS_PER_LOOK == 0:
            self._look()
        if not self._yields:
            self._write()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        with suppress(StoreUnavailable):
            found = read_lease(self._files)
            # Else somebody has taken over, or the root is gone.
            if found is not None and found.holder == self._id and self._may_end:
                self._write(is_over=True)
        super().__exit__(kind, error, trace)


class InstanceLease(LeaseLock):
    """Held by each of several instances, together with the others: the lock of its own work folder, and a share of the
    lease.

    `speaks`, of the one that leads: it writes the lease. Whoever begins to speak takes it anew, so that one who spoke
    before, and does not know yet that another one leads, leaves it alone.
    """

    _shares = True
    _beats_per_lease = _SHARED_BEATS_PER_LEASE

    def __init__(
        self,
        files: Files,
        work: Path,
        instance: str,
        *,
        take_over: bool = False,
        lease_s: float = SHARED_LEASE_S,
        look_s: float = _LOOK_EVERY_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(files, work, take_over=take_over, lease_s=lease_s, look_s=look_s, pause=pause)
        self._instance = instance
        self._speaks = self._has_spoken = False
        self._seen: tuple[str, int] | None = None
        self._unchanged = 0

    def _take(self, seen: Lease | None) -> None:
        """Who shares it need not wait. Where nobody lives it is written at once: a run alone may be about to come.

        Where nobody seems to live by the clocks, which may differ, what was said stands, and is not taken from whoever
        said it: one who lives, and leads, goes on saying it."""
        if seen is not None and seen.is_shared and not seen.is_over:
            self.is_shared = abs(_age_s(seen)) <= _CLOCKS_DIFFER_S
            self._may_end = False
            self._taken, self._said = seen.taken, seen.said
            if seen.is_fresh:
                return
        else:
            if not self._take_over and not (seen is not None and seen.is_shared):
                self._wait_until_free(seen)
            self._taken = 1 if seen is None else seen.taken + 1
        self._write()

    def _in_use(self, by: Lease) -> str:
        return (
            f"a run that is no instance is alive on {self._where} (process {by.pid} on {by.host}); stop it first, and "
            f"start all instances with --instance"
        )

    def speak(self, is_ours: bool) -> None:
        """Who does so to the end has ended the pipeline. Else, where there are others, the lease is left to them, or to
        end by itself."""
        self._may_end = is_ours if self._speaks or is_ours else self._may_end
        self._has_spoken &= not is_ours  # it takes the lease anew, whoever has spoken meanwhile
        self._speaks = is_ours

    def say(self, said: bytes, *, at_once: bool = False) -> None:
        self._said = msgspec.Raw(said)
        if at_once and self._speaks:
            self._renew()

    def _beat(self, count: int) -> None:  # noqa: ARG002 - it looks each time
        self._renew()

    def _renew(self) -> None:
        found = read_lease(self._files)
        is_own = found is not None and found.holder == self._id
        if not is_own and not self._speaks:
            self._may_end = False
        if found is not None and not is_own and not found.is_shared and not found.is_over:
            return  # a run alone has taken over
        if self._speaks:
            if found is not None and not is_own:
                if self._has_spoken and found.taken > self._taken and found.is_shared and found.speaks:
                    return  # another one has begun to speak since, or has ended the pipeline
                self._taken = max(self._taken, found.taken) + 1
            self._has_spoken = True
            self._write()
            return
        self._has_spoken = False
        if found is None or found.is_over:
            return  # the pipeline has ended, or the root is gone
        beat = (found.holder, found.beat)
        self._unchanged = self._unchanged + 1 if beat == self._seen else 0
        self._seen = beat
        if is_own or self._unchanged >= _UNCHANGED_LOOKS:
            self._taken, self._said = max(self._taken, found.taken), found.said  # what was said last stands
            self._write()


def _age_s(lease: Lease) -> float:
    """By the clock here: the holder's may be another."""
    return (datetime.now(UTC) - _moment(lease.at)).total_seconds()


def _host() -> str:
    return socket.gethostname()


def _moment(at: str) -> datetime:
    try:
        moment = datetime.fromisoformat(at)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
