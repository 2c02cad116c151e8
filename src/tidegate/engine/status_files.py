"""What a run says of itself, in files of its root.

    status.json               what the run is doing, written whole
    status.reserve            the same in short, written in place where that one cannot be written: on a full disk

In a bucket it is in neither, but in the lease, which is written anew all the time in any case.

Before a run says its first word, it keeps beside the history what the run before said last: one that fails to start, or
is killed at it, takes nothing away from the history of that one (`last_words`).

Importing this brings no PySpark.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import datetime
from typing import Final

import msgspec

from tidegate.engine.status import RunStatus
from tidegate.errors import StoreUnavailable
from tidegate.storage.files import Files
from tidegate.storage.lease import read_lease
from tidegate.storage.lock import RootLock
from tidegate.storage.paths import RootPaths

_log = logging.getLogger("tidegate")

# Enough for a status without its stages, whatever the reason in it is made of.
_RESERVE_BYTES: Final = 8192
_LONGEST_REASON: Final = 1000
_NOTHING: Final = b"null"


def read_status(files: Files) -> RunStatus | None:
    """What the last run said last; None if nothing, or if it cannot be understood: of another version, or damaged."""
    carried = _carried(files)
    if carried is not None:
        return _status_in(carried)
    # In the reserve first: of two that were written within a millisecond, that one came later.
    found = [_status_in(_read(files, name)) for name in (RootPaths.STATUS_RESERVE, RootPaths.STATUS)]
    said = [status for status in found if status is not None]
    return max(said, key=lambda status: datetime.fromisoformat(status.updated_at), default=None)


def last_words(files: Files) -> RunStatus | None:
    """What the last run said last that had opened a generation; of one that had not, if there was none before it."""
    said = read_status(files)
    if said is None or said.generation is not None:
        return said
    with suppress(ValueError, msgspec.MsgspecError):
        data = _read(files, RootPaths.LAST_WORDS)
        kept = None if data is None else msgspec.json.decode(data, type=_Kept)
        return said if kept is None or kept.by != _who(said) else kept.words
    return said


class _Kept(msgspec.Struct, frozen=True):
    """What a run has kept of the words of the one before it."""

    by: str
    words: RunStatus


def _who(status: RunStatus) -> str:
    """A run, as no other is known."""
    return f"{status.pid} {status.host} {status.started_at}"


def _carried(files: Files) -> bytes | None:
    """What the lease carries, in a bucket; None if it carries nothing, or there is none."""
    with suppress(StoreUnavailable):
        lease = read_lease(files)
        return None if lease is None or bytes(lease.said) == _NOTHING else bytes(lease.said)
    return None


def _read(files: Files, name: str) -> bytes | None:
    with suppress(StoreUnavailable):
        return files.read(name)
    return None


def _status_in(data: bytes | None) -> RunStatus | None:
    try:
        status = None if data is None else msgspec.json.decode(data, type=RunStatus)
        times = [] if status is None else [datetime.fromisoformat(at) for at in (status.started_at, status.updated_at)]
    except (ValueError, msgspec.MsgspecError):  # what is not UTF-8, or no time, is a ValueError
        return None
    return status if all(moment.tzinfo is not None for moment in times) else None


class _AnyStatus(msgspec.Struct, frozen=True):
    updated_at: datetime


def last_word(files: Files) -> datetime | None:
    """When a run last said something, be it in words of another version."""
    with suppress(ValueError, msgspec.MsgspecError):
        data = _carried(files) or _read(files, RootPaths.STATUS)
        said = None if data is None else msgspec.json.decode(data, type=_AnyStatus)
        return said.updated_at if said is not None and said.updated_at.tzinfo is not None else None
    return None


class StatusFiles:
    """Of one run. No failure of these is one of the run's."""

    def __init__(self, files: Files, lock: RootLock, earlier: RunStatus | None = None) -> None:
        """`earlier`: what the run before said last."""
        self._earlier = earlier
        self._files = files
        self._lock = lock
        self._is_written = True

    def make_reserve(self) -> None:
        """Blank, of blocks that are there. One that an earlier run has made is kept: the disk may be full by now."""
        if self._lock.carries_words:
            return
        blank = b" " * _RESERVE_BYTES
        try:
            if self._files.size(RootPaths.STATUS_RESERVE) == _RESERVE_BYTES:
                self._files.overwrite(RootPaths.STATUS_RESERVE, blank)
            else:
                self._files.write(RootPaths.STATUS_RESERVE, blank)
        except StoreUnavailable as error:
            _log.debug("there is no reserve for the status: %s", error)

    def write(self, status: RunStatus, *, at_once: bool = False) -> None:
        self._keep_earlier(status)
        if self._lock.carries_words:
            self._lock.say(msgspec.json.encode(status), at_once=at_once)
            return
        if self.is_of_another_run(status.generation):
            return
        try:
            self._files.write(RootPaths.STATUS, msgspec.json.encode(status))
            self._is_written = True
        except StoreUnavailable as error:
            self._write_in_short(status, error)

    def _keep_earlier(self, status: RunStatus) -> None:
        """Once, before what that one said is lost; of one that had opened no generation there is nothing to tell."""
        earlier, self._earlier = self._earlier, None
        if earlier is not None and earlier.generation is not None and status.generation is None:
            try:
                self._files.write(RootPaths.LAST_WORDS, msgspec.json.encode(_Kept(_who(status), earlier)))
            except StoreUnavailable as error:
                _log.debug("what the run before said last is not kept: %s", error)

    def is_of_another_run(self, generation: int | None) -> bool:
        """Whether another run took over from the one of this generation: then what that one says counts."""
        known = read_status(self._files)
        return known is not None and generation is not None and (known.generation or 0) > generation

    def _write_in_short(self, status: RunStatus, error: StoreUnavailable) -> None:
        """In the reserve: else a run that has failed would seem to have been killed, and one that lives to hang."""
        why = f"what it does cannot be written down: {error}"
        if self._is_written:  # said once
            _log.warning("%s; the run goes on", why)
        self._is_written = False
        why = why if status.why is None else status.why
        short = msgspec.structs.replace(status, why=why[:_LONGEST_REASON], stages={}, in_progress=(), checkpoints=())
        data = msgspec.json.encode(short)
        try:
            self._files.overwrite(RootPaths.STATUS_RESERVE, data.ljust(_RESERVE_BYTES))
        except StoreUnavailable as reserve_error:
            # Files that nothing can be written to in place have room when it is gone.
            _log.debug("the reserve for the status cannot be written: %s", reserve_error)
            with suppress(StoreUnavailable):
                self._files.delete([RootPaths.STATUS_RESERVE])
                self._files.write(RootPaths.STATUS, data)
