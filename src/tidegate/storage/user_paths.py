"""Paths as users write them: of a root, of a table, of a pipeline's file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from tidegate.errors import InvalidConfig

# One slash is enough: a Path has lost the second one.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_LOCAL: Final = re.compile(r"file:(?://(?:localhost)?)?(/(?!/).*)", re.DOTALL | re.IGNORECASE)

BUCKETS: Final = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""The schemes of buckets, and whose they are."""


def bucket_kind(location: str | os.PathLike[str]) -> str | None:
    """Whose bucket a URL leads into. None: into none. A Path never does: it has lost a slash."""
    scheme, separator, _ = os.fspath(location).partition("://")
    return BUCKETS.get(scheme.lower()) if separator else None


def is_bucket_url(location: str | os.PathLike[str]) -> bool:
    return bucket_kind(location) is not None


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path as a user writes it: as it is, or as a file: URL, whose % escapes are resolved.

    Any other URL is refused: taken for a path, it would name a folder below the current one.
    """
    text = os.fspath(path)
    if not text:
        raise InvalidConfig(
            "the path of a root or table is empty (of a variable that is not set?); write . for this folder"
        )
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text)
    local = _LOCAL.fullmatch(text)
    if local is not None:
        return Path(unquote(local[1]))
    if scheme[1].lower() == "file":
        raise InvalidConfig(f"{text} names no file of this machine; write file:///folder, or just the path")
    raise InvalidConfig(
        f"{text} is not a local folder; write a path such as /data/orders. A root, or a Delta table, may be in a "
        f"bucket: name that by a string, such as 's3://bucket/orders'"
    )


def folder_or_bucket(location: str | os.PathLike[str]) -> Path | str:
    """A plain path, or the URL of a bucket as it is."""
    return os.fspath(location).rstrip("/") if is_bucket_url(location) else plain_path(location)


def plain_path(path: str | os.PathLike[str]) -> Path:
    """Absolute, without ".." and with one slash in front, as Spark names in its logs what lies there."""
    text = os.path.normpath(local_path(path).absolute())
    return Path(text.removeprefix("/") if text.startswith("//") else text)
