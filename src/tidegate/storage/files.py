"""Files on the local file system: paths, links and checksums."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path


def plain_path(path: str | os.PathLike[str]) -> Path:
    """Absolute and without "..", as Spark names in its logs what lies there."""
    return Path(os.path.normpath(Path(path).absolute()))


def link(source: Path, target: Path) -> None:
    """A second name for an immutable file; a copy where the file system has no hard links. A target that exists is
    whole, also after a crash: it is left as it is."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        partial = target.with_name(f".{target.name}.copying")
        shutil.copy2(source, partial)
        partial.rename(target)


def checksum(path: Path) -> tuple[int, str]:
    """A file's size and SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return file.tell(), digest.hexdigest()
