"""Files in a folder of a local or shared file system.

A file has its content on the disk before it gets its name, so that no loss of power can leave a name with half of it,
and the name is on the disk when the call returns, so that what is done next cannot outlive it. Until it has its name it
lies in a folder `writing`, which nobody lists: a kill leaves nothing beside what is whole.
"""

from __future__ import annotations

import copy
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO, Final, NoReturn, Protocol, Self, runtime_checkable
from urllib.parse import quote, unquote

from tidegate.errors import StoreUnavailable
from tidegate.storage import disk
from tidegate.storage.disk import NotForced, force, sync_names
from tidegate.storage.files import AtHand, Files, NotDurable
from tidegate.storage.paths import RootPaths
from tidegate.storage.requests import Requests
from tidegate.storage.system import naming, reason, told

# What file systems say that have no hard links, or none here, or no more of this file.
_WITHOUT_LINKS: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
)

_FETCHED_AT_ONCE: Final = 8 << 20
"""Of a file that is elsewhere: each takes a request."""


class Folder(AtHand):
    """`Files` in a folder, which is made when something is written.

    Without `fsync` it is the system that chooses when what is written reaches the disk.
    """

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = True, counts: Requests | None = None) -> None:
        """`counts`: where what is asked for is counted, but for whether a file is there: that costs next to nothing,
        and is asked of every stage in every round."""
        self._root = Path(root)
        self._fsync = fsync
        self._writing = self._root / RootPaths.WRITING
        self._on_disk: set[Path] = set()
        """The folders that are known to be on the disk; one set for all that `at` gives."""
        self._folder = ""
        self._base = f"{str(self._root).rstrip('/')}/"
        self._forces = fsync
        self._counts = Requests() if counts is None else counts

    def __repr__(self) -> str:
        return f"Folder({self.location()!r})"

    @property
    def fsync(self) -> bool:
        return self._fsync

    def at(self, folder: str, *, durable: bool = True) -> Self:
        below = copy.copy(self)
        if folder:
            below._folder = f"{self._folder}{folder}/"
            below._base = f"{self._base}{folder}/"
        below._forces = self._forces and durable
        return below

    def _path(self, name: str) -> Path:
        return Path(self._base + name)

    # -- reading ----------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        opened = self.open(name)
        if opened is None:
            return None
        try:
            with opened as file:
                return file.read()
        except OSError as error:
            self._fail("read", name, error)

    def open(self, name: str) -> BufferedIOBase | None:
        self._counts.add("read")
        try:
            return open(self._base + name, "rb")  # noqa: PTH123 - of many files; whoever asked closes it
        except (FileNotFoundError, IsADirectoryError):
            return None
        except OSError as error:
            self._fail("read", name, error)

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        try:
            found = os.stat(self._base + name)  # noqa: PTH116 - asked of every stage in every round
        except FileNotFoundError:
            return None
        except OSError as error:
            self._fail("read", name, error)
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def names_in(self, folder: str = "") -> list[str]:
        self._counts.add("list")
        try:
            names = sorted(path.name for path in self._path(folder).iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            self._fail("list", folder, error)
        return names if self._folder or folder else [name for name in names if name != RootPaths.WRITING]

    # -- writing ----------------------------------------------------------------------------------

    def write(self, name: str, data: bytes) -> None:
        with self._telling("write", name):
            self._give_name(name, data, Path.replace)

    def create(self, name: str, data: bytes) -> bool:
        with self._telling("create", name):
            try:
                self._give_name(name, data, os.link)  # of all that try at the same time, one does
            except FileExistsError:
                return False
        return True

    def _give_name(self, name: str, data: bytes, give: Callable[[Path, Path], object]) -> None:
        target = self._path(name)
        self._counts.add("write")
        with self._hidden() as hidden:
            with naming(target), self._opened(hidden) as file:
                file.write(data)
                if self._forces and data:
                    file.flush()
                    force(file.fileno())
            try:
                give(hidden, target)
            except FileNotFoundError:
                self._make_folder_of(target)
                give(hidden, target)
        if self._forces:
            self._on_disk.update(sync_names([target], self._on_disk))

    @contextmanager
    def _hidden(self) -> Iterator[Path]:
        """A place for what has no name yet that anybody looks for."""
        hidden = self._writing / uuid.uuid4().hex
        try:
            yield hidden
        finally:
            with suppress(OSError):
                hidden.unlink(missing_ok=True)

    def _opened(self, hidden: Path) -> BinaryIO:
        try:
            return hidden.open("xb")
        except FileNotFoundError:
            self._make_folder_of(hidden)
            return hidden.open("xb")

    def _make_folder_of(self, path: Path) -> None:
        if not path.parent.is_dir():
            self._on_disk.clear()  # what is made anew is not on the disk, whatever was there before
            path.parent.mkdir(parents=True, exist_ok=True)

    def overwrite(self, name: str, data: bytes) -> None:
        target = self._path(name)
        self._counts.add("write")
        with self._telling("write", name), naming(target), target.open("r+b", buffering=0) as file:
            file.write(data)

    def keep(self, name: str, source: Files, source_name: str) -> None:
        if isinstance(found := near(source), Folder):
            self._counts.add("link")
            with self._telling("keep", name):
                self._link(found, source_name, name)
        elif not self.exists(name):
            self.copy(name, source, source_name)

    def _link(self, source: Folder, source_name: str, name: str) -> None:
        """Most names of a snapshot lead through a folder that is there, on a file system with links: tried first."""
        try:
            os.link(source._base + source_name, self._base + name)
        except FileExistsError:
            return
        except OSError:
            with self._hidden() as hidden:
                link(source._path(source_name), self._path(name), hidden)

    def copy(self, name: str, source: Files, source_name: str) -> None:
        self._counts.add("copy")
        with self._telling("copy", name), self._hidden() as hidden:
            target = self._path(name)
            for path in (hidden, target):
                self._make_folder_of(path)
            with naming(target):
                if isinstance(found := near(source), Folder):
                    shutil.copyfile(found._path(source_name), hidden)
                else:
                    self._fetch(hidden, source, source_name, self.location(name))
            hidden.replace(target)

    @staticmethod
    def _fetch(hidden: Path, source: Files, name: str, wanted_for: str) -> None:
        """Part by part: a file may be larger than what there is of memory, and many are fetched at once."""
        opened = source.open(name)
        if opened is None:
            raise StoreUnavailable(f"could not copy {source.location(name)} to {wanted_for}: it is gone")
        with opened as content, hidden.open("xb") as file:
            shutil.copyfileobj(content, file, _FETCHED_AT_ONCE)

    def make_folder(self, folder: str) -> None:
        with self._telling("make", folder):
            self._path(folder).mkdir(parents=True, exist_ok=True)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._counts.add("delete")
            try:
                os.unlink(self._base + name)  # noqa: PTH108 - of many files
            except FileNotFoundError:
                continue
            except OSError as error:
                self._fail("delete", name, error)

    def prune(self, folder: str) -> None:
        for parent, _, _ in os.walk(self._base + folder, topdown=False):
            with suppress(OSError):  # it is not empty
                Path(parent).rmdir()
                self._on_disk.discard(Path(parent))

    def prune_above(self, names: Iterable[str], top: str) -> None:
        highest = self._base + top
        for folder in sorted({(self._base + name).rpartition("/")[0] for name in names}, reverse=True):
            parent = folder
            with suppress(OSError):  # it is not empty, or gone already
                while parent == highest or parent.startswith(f"{highest}/"):
                    Path(parent).rmdir()
                    self._on_disk.discard(Path(parent))
                    parent = parent.rpartition("/")[0]

    def forget_unwritten(self) -> None:
        with self._telling("clear", RootPaths.WRITING):
            for path in self._writing.glob("*"):
                path.unlink(missing_ok=True)

    def sync(
        self, names: Iterable[str], known: Collection[object] = frozenset(), *, missing_ok: bool = False
    ) -> frozenset[object]:
        if not self._fsync:
            return frozenset()
        self._counts.add("sync")
        try:
            return disk.sync([self._path(name) for name in names], known, missing_ok=missing_ok)
        except OSError as error:
            self._counts.add_failed()
            kind = NotDurable if isinstance(error, NotForced) else StoreUnavailable
            raise kind(f"what is in {self.location()} cannot be forced to the disk: {told(error)}") from error

    # -- where they are ---------------------------------------------------------------------------

    def location(self, name: str = "") -> str:
        return (self._base + name).rstrip("/")

    def name_at(self, location: str) -> str | None:
        return location.removeprefix(self._base) if location.startswith(self._base) else None

    def uri(self, name: str) -> str:
        return "file://" + quote(self._base + name)

    def name_of(self, uri: str) -> str | None:
        """Spark writes one slash or three."""
        path = uri.removeprefix("file:")
        return None if path == uri else self.name_at(unquote(path.replace("///", "/", 1)))

    def strays(self, names: Iterable[str]) -> frozenset[str]:
        root = Path(os.path.realpath(self._root))
        known: dict[str, bool] = {}
        found = []
        for name in names:
            path = self._base + name
            parent = path.rpartition("/")[0]
            if parent not in known:  # asked of each folder once
                known[parent] = Path(os.path.realpath(parent)).is_relative_to(root)
            if os.path.islink(path) or not known[parent]:  # noqa: PTH114 - of many files
                found.append(name)
        return frozenset(found)

    # -- what fails -------------------------------------------------------------------------------

    @contextmanager
    def _telling(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fail(doing, name, error)

    def _fail(self, doing: str, name: str, error: OSError) -> NoReturn:
        self._counts.add_failed()
        said = reason(error, self._path(name))
        raise StoreUnavailable(f"could not {doing} {self.location(name)}: {said}") from error

    def list(self, folder: str = "", *, but: Collection[str] = ()) -> list[str]:
        top = self._base + folder
        found: list[str] = []
        self._counts.add("list")
        with self._telling("list", folder):
            for parent, folders, names in os.walk(top, onerror=_raise_unless_gone):
                if parent == self._base and not self._folder:
                    folders[:] = [name for name in folders if name != RootPaths.WRITING]
                if but:
                    folders[:] = [name for name in folders if name not in but]
                start = parent[len(self._base) :]
                found += names if not start else [f"{start}/{name}" for name in names]
        return sorted(found)


@runtime_checkable
class _Here(Protocol):
    """Files that lie in a folder, by the same names, once they were brought."""

    @property
    def here(self) -> Folder: ...


def near(files: Files) -> Files:
    """Where files lie on this machine, by the same names, if they are to be had elsewhere too."""
    return files.here if isinstance(files, _Here) else files


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def link(source: Path, target: Path, hidden: Path | None = None) -> None:
    """A second name for an immutable file; a copy where the file system has no hard links. A target that exists is
    whole, also after a crash: it is left as it is. `hidden`: where a copy is made, if not beside the target."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        partial = hidden or target.with_name(f".{target.name}.copying")
        partial.parent.mkdir(parents=True, exist_ok=True)
        with _removed_if_it_fails(partial), naming(target):
            shutil.copy2(source, partial)
            disk.sync([partial])  # else a loss of power could leave a target that exists and is not whole
            partial.rename(target)


@contextmanager
def _removed_if_it_fails(path: Path) -> Iterator[None]:
    """Half a file, on a disk that is full, would take the place of what is to be written next."""
    try:
        yield
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise
