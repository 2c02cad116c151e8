"""The lock of a root: it tells at once, on one machine, whether a run is alive."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tidegate.errors import NoRoot, RootInUse, StoreUnavailable
from tidegate.storage.system import told

# Whoever asks whether the lock is held holds it for an instant: that must not make a run fail that is starting.
_PATIENCE_S: Final = 0.3
_PAUSE_S: Final = 0.01
_WITHOUT_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


class RootLock:
    """Held by the run that lives. It dies with its process, so a restart after a kill waits for nothing."""

    def __init__(self, path: Path, *, take_over: bool = False) -> None:
        self._path = path
        self._take_over = take_over
        self._file: int | None = None

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NoRoot(f"the root {self._path.parent} cannot be a folder: {told(error)}") from error
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_taken():
            if time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
            elif self._take_over:
                break  # the decision log, not the lock, keeps the other run from doing harm
            else:
                raise RootInUse(
                    f"another run is alive on {self._path.parent} (process {holder(self._path) or 'unknown'}); stop "
                    f"it first, or take over with --take-over if it hangs"
                )
        return self

    def _is_taken(self) -> bool:
        try:
            return self.take_if_free()
        except OSError as error:
            lacks = "" if error.errno not in _WITHOUT_LOCKS else "; a root must be on a file system with locks"
            raise NoRoot(f"the root {self._path.parent} cannot be used: {told(error, self._path)}{lacks}") from error

    def take_if_free(self) -> bool:
        """Take the lock unless another process holds it. A run that took over asks until the other one is gone."""
        if self._file is not None:
            return True
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            noted = os.pwrite(handle, str(os.getpid()).encode(), 0)  # over the last one's: that fits on a full disk too
            os.ftruncate(handle, noted)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError:
            os.close(handle)
            raise
        self._file = handle
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def holder(path: Path) -> str:
    """The process that holds the lock, or held it last, as it noted itself."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""


def is_held(path: Path) -> bool:
    """Whether a run is alive. Changes nothing: the lock is shared for an instant, if nobody holds it."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(handle)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise StoreUnavailable(f"whether a run is alive cannot be told: {told(error, path)}") from error
    return False
