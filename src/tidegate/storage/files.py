"""Files on the local file system: paths, links and checksums."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from tidegate.errors import InvalidConfig
from tidegate.storage.disk import sync
from tidegate.storage.system import naming

# One slash is enough: a Path has lost the second one.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_LOCAL: Final = re.compile(r"file:(?://(?:localhost)?)?(/(?!/).*)", re.DOTALL | re.IGNORECASE)
# What file systems say that have no hard links, or none here, or no more of this file.
_WITHOUT_LINKS: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
)
_COPIED_AT_A_TIME: Final = 1 << 20


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path as a user writes it: as it is, or as a file: URL, whose % escapes are resolved.

    Any other URL is refused: taken for a path, it would name a folder below the current one.
    """
    text = os.fspath(path)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text)
    local = _LOCAL.fullmatch(text)
    if local is not None:
        return Path(unquote(local[1]))
    if scheme[1].lower() == "file":
        raise InvalidConfig(f"{text} names no file of this machine; write file:///folder, or just the path")
    raise InvalidConfig(
        f"{text} is not a local folder, and buckets are not supported yet; write a path such as /data/orders"
    )


def plain_path(path: str | os.PathLike[str]) -> Path:
    """Absolute and without "..", as Spark names in its logs what lies there."""
    return Path(os.path.normpath(local_path(path).absolute()))


def link(source: Path, target: Path) -> None:
    """A second name for an immutable file; a copy where the file system has no hard links. A target that exists is
    whole, also after a crash: it is left as it is."""
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
        partial = target.with_name(f".{target.name}.copying")
        with _removed_if_it_fails(partial), naming(target):
            shutil.copy2(source, partial)
            sync([partial])  # else a loss of power could leave a target that exists and is not whole
            partial.rename(target)


def copy_anew(source: Path, target: Path) -> tuple[int, str]:
    """A file of its own with what another holds: what damages the one leaves the other whole. Returns the size and the
    SHA-256 of what was written. A crash may leave half of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with source.open("rb") as read, naming(target), target.open("wb") as written:
        while block := read.read(_COPIED_AT_A_TIME):
            digest.update(block)
            written.write(block)
        return written.tell(), digest.hexdigest()


def files_under(folder: Path) -> list[Path]:
    """All files at any depth, hidden ones too; none where the folder is not there."""
    return [Path(parent) / name for parent, _, names in os.walk(folder) for name in names]


def remove_empty_folders(folder: Path) -> None:
    """Those below a folder, and it too."""
    for parent, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):  # it is not empty
            Path(parent).rmdir()


def write_whole(path: Path, data: bytes) -> None:
    """So that a reader sees all of it or nothing."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _removed_if_it_fails(hidden), naming(path):
        hidden.write_bytes(data)
        hidden.rename(path)


def overwrite(path: Path, data: bytes) -> None:
    """In place, as much as the file holds: that takes no space, so that it works on a disk that is full too."""
    with naming(path), path.open("r+b", buffering=0) as file:
        file.write(data)


@contextmanager
def _removed_if_it_fails(path: Path) -> Iterator[None]:
    """Half a file, on a disk that is full, would take the place of what is to be written next."""
    try:
        yield
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def checksum(path: Path) -> tuple[int, str]:
    """A file's size and SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return file.tell(), digest.hexdigest()
