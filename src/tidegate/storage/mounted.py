"""Files that lie in several places, and that Spark knows by names which Hadoop's viewfs leads there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar
from urllib.parse import unquote

from tidegate.storage.files import Files

VIEWFS: Final = "viewfs://"
_AT_ONCE: Final = 16
T = TypeVar("T")
R = TypeVar("R")


class Mounted(ABC):
    """Of a root, or of a folder in it."""

    @abstractmethod
    def for_spark(self, name: str = "") -> str:
        """How Spark's options name it."""

    @abstractmethod
    def links(self) -> dict[str, str]:
        """Of a folder that is a query's own: the settings of Hadoop by which its names lead to where they lie."""

    @abstractmethod
    def make_near(self) -> None:
        """Make the folders on this machine that its names lead to."""

    def forget_here(self, before: int) -> None:  # noqa: B027 - of a table, nothing is here
        """Of a root: what lies on this machine of generations before one, whose queries are stopped."""

    @abstractmethod
    def settings(self) -> dict[str, str]:
        """Those of Hadoop by which executors reach what is elsewhere; there are secrets among them."""


def mounted_name(uri: str, folder: str) -> str | None:
    """The name of what a mount of viewfs leads to, from a folder of it on. None: it is not in that."""
    own = unquote(uri.removeprefix(VIEWFS).partition("/")[2])
    return own.removeprefix(folder) if own.startswith(folder) else None


def is_local(master: str) -> bool:
    """Whether a session's work is done in Spark's own process, so that nothing need be elsewhere."""
    return master.startswith("local") and not master.startswith("local-cluster")


def for_spark(files: Files, name: str = "") -> str:
    """How Spark's options name a file, or a folder."""
    return files.for_spark(name) if isinstance(files, Mounted) else files.location(name)


def side_by_side(files: Files, call: Callable[[T], R], each: Iterable[T]) -> Iterator[R]:
    """What a call returns for each, in order; many at once where each takes requests."""
    wanted = list(each)
    if not isinstance(files, Mounted) or len(wanted) < 2:
        yield from map(call, wanted)
        return
    with ThreadPoolExecutor(min(_AT_ONCE, len(wanted))) as threads:
        yield from threads.map(call, wanted)
