"""Many files between a bucket and a disk, or from one bucket to another, at once.

A request takes tens of milliseconds however little it carries, so that files are sent and fetched side by side: as many
at a time as is worth it, and no more bytes than fit into memory. Whoever was killed, or has failed, calls again with
the same files: what is there already is sent or fetched again, and is the same.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from tidegate.errors import StoreUnavailable
from tidegate.storage.bucket import PART_BYTES, PARTS_AT_ONCE, Bucket
from tidegate.storage.system import reason, told
from tidegate.storage.transfers import OnProgress, Progress

FILES_AT_ONCE: Final = 32
BYTES_AT_ONCE: Final = 256 << 20

T = TypeVar("T")


def upload(bucket: Bucket, files: Iterable[tuple[str, Path]], on_progress: OnProgress | None = None) -> None:
    """Write each name with what a file on the disk holds. The files must not change meanwhile.

    The first failure is raised after what was under way has ended; what had not begun is left.
    """

    def send(file: tuple[str, Path], room: _Room) -> int:
        name, path = file
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise StoreUnavailable(f"could not copy {path} to {bucket.location(name)}: {reason(error)}") from error
        with room.taken(size_bytes):
            bucket.send(name, path)
        return size_bytes

    _transfer(files, send, on_progress)


def download(bucket: Bucket, files: Iterable[tuple[str, Path]], on_progress: OnProgress | None = None) -> None:
    """Fetch each name to a path on the disk, which appears whole or not at all; one that is there is replaced. Nothing
    is forced to the disk: what it is fetched for would fetch it again.

    A name that is not there is `StoreUnavailable`. Failures are raised as those of `upload`.
    """

    def fetch(file: tuple[str, Path], room: _Room) -> int:
        name, path = file
        hidden = path.with_name(f".{uuid.uuid4().hex}.fetched")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with room.taken(PART_BYTES):  # how much it is shows when it comes, and it comes in parts
                size_bytes = bucket.fetch(name, hidden)
            if size_bytes is None:
                raise StoreUnavailable(f"could not fetch {bucket.location(name)} to {path}: it is gone")
            hidden.replace(path)
        except OSError as error:
            raise StoreUnavailable(f"could not fetch {bucket.location(name)} to {path}: {told(error)}") from error
        finally:
            with suppress(OSError):
                hidden.unlink(missing_ok=True)
        return size_bytes

    _transfer(files, fetch, on_progress)


def side_by_side(calls: Iterable[tuple[int, Callable[[], None]]]) -> None:
    """Make each call, which moves as many bytes through this process. Failures are raised as those of `upload`."""

    def make(call: tuple[int, Callable[[], None]], room: _Room) -> int:
        size_bytes, move = call
        with room.taken(size_bytes):
            move()
        return size_bytes

    _transfer(calls, make, None)


class _Room:
    """So many bytes at a time, of all that are under way."""

    def __init__(self, size_bytes: int) -> None:
        self._free = size_bytes
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size_bytes: int) -> Iterator[None]:
        """A large file is never in memory as a whole."""
        wanted = min(size_bytes, PART_BYTES * PARTS_AT_ONCE)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()


def _transfer(
    files: Iterable[T],
    move: Callable[[T, _Room], int],
    on_progress: OnProgress | None,
) -> None:
    wanted = list(files)
    if not wanted:
        return
    room = _Room(BYTES_AT_ONCE)
    done_files = done_bytes = 0
    with ThreadPoolExecutor(min(FILES_AT_ONCE, len(wanted)), thread_name_prefix="transfer") as threads:
        moving = [threads.submit(move, each, room) for each in wanted]
        try:
            for moved in as_completed(moving):
                done_bytes += moved.result()
                done_files += 1
                if on_progress is not None:
                    on_progress(Progress(done_files, len(wanted), done_bytes))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
