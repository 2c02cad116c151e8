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
INSTANCES: Final = "instances"
_WITHOUT_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


class RootLock:
    """Held by the run that lives. It dies with its process, so a restart after a kill waits for nothing."""

    is_shared = False
    """Whether others may be alive on the root."""
    carries_words = False
    """Whether it is where the run says what it does."""

    def __init__(self, path: Path, *, take_over: bool = False) -> None:
        self._path = path
        self._take_over = take_over
        self._file: int | None = None

    def say(self, said: bytes, *, at_once: bool = False) -> None:
        """Carry what the run says of itself to whoever asks who holds it, if this `carries_words`."""
        raise NotImplementedError("a lock of a folder says nothing but that it is held")

    def speak(self, is_ours: bool) -> None:
        """Whether this process speaks for the run: of several instances, the one that leads."""

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


class InstanceLock(RootLock):
    """Held by each of several instances that run one pipeline: one of its own, and a share of the root's, so that no
    run alone starts beside them, nor they beside one."""

    def __init__(self, root: Path, instance: str, *, take_over: bool = False) -> None:
        super().__init__(root / INSTANCES / f"{instance}.lock", take_over=take_over)
        self._root = root / "lock"
        self._share: int | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        self._share = os.open(self._root, os.O_RDWR | os.O_CREAT, 0o666)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self.is_shared = not self._is_alone(self._share)
                fcntl.flock(self._share, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline and not self._take_over:
                    self.__exit__(None, None, None)
                    raise self._in_use() from None
                if time.monotonic() >= deadline:
                    return self
                time.sleep(_PAUSE_S)
            else:
                return self

    @staticmethod
    def _is_alone(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _in_use(self) -> RootInUse:
        return RootInUse(
            f"a run that is no instance is alive on {self._root.parent} (process {holder(self._root) or 'unknown'}); "
            f"stop it first, and start all instances with --instance"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._share is not None:
            os.close(self._share)
            self._share = None


def holder(path: Path) -> str:
    """The process that holds the lock, or held it last, as it noted itself."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""


def is_held(path: Path) -> bool:
    """Whether a run is alive, alone or as instances. Changes nothing: the lock is shared for an instant, if nobody
    holds it."""
    return _is_held(path) or any(map(_is_held, (path.parent / INSTANCES).glob("*.lock")))


def _is_held(path: Path) -> bool:
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
