"""Files by their paths, for whoever does not yet go over `Files`."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from tidegate.storage.folder import removed_if_it_fails
from tidegate.storage.system import naming

_COPIED_AT_A_TIME: Final = 1 << 20


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
    with removed_if_it_fails(hidden), naming(path):
        hidden.write_bytes(data)
        hidden.rename(path)


def overwrite(path: Path, data: bytes) -> None:
    """In place, as much as the file holds: that takes no space, so that it works on a disk that is full too."""
    with naming(path), path.open("r+b", buffering=0) as file:
        file.write(data)


def checksum(path: Path) -> tuple[int, str]:
    """A file's size and SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return file.tell(), digest.hexdigest()
