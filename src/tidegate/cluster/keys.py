"""What a key, a name and a value may be: the same wherever they are kept, so that none of them fits one place only."""

from __future__ import annotations

from typing import Final

from tidegate.cluster.kv import MAX_VALUE_BYTES
from tidegate.errors import InvariantViolation

MAX_PART_BYTES: Final = 200
"""A file's name has at most 255, and its version is in it."""
MAX_NAME_BYTES: Final = 100
"""Of an instance or an incarnation: both are in one file's name."""


def check_key(key: str) -> tuple[str, str]:
    """Its folder, and its last part."""
    for part in key.split("/"):
        _check_part(part, key, MAX_PART_BYTES)
    folder, _, last = key.rpartition("/")
    return folder, last


def check_folder(folder: str) -> str:
    """None, which is written as an empty string, is the one that all others are in."""
    if folder:
        check_key(folder)
    return folder


def check_name(name: str) -> str:
    """Of an instance or an incarnation."""
    if "/" in name:
        raise InvariantViolation(f"{name!r} is no name: it has a / in it")
    _check_part(name, name, MAX_NAME_BYTES)
    return name


def check_value(key: str, value: bytes) -> bytes:
    if len(value) > MAX_VALUE_BYTES:
        raise InvariantViolation(f"the value of {key!r} has {len(value)} bytes; at most {MAX_VALUE_BYTES} are possible")
    return value


def _check_part(part: str, whole: str, most: int) -> None:
    if part in ("", ".", ".."):
        raise InvariantViolation(f"{whole!r} is no key: a part of it is {part!r}")
    if "@" in part or not part.isprintable():
        raise InvariantViolation(f"{whole!r} is no key: an @ is in it, or what cannot be printed")
    if len(part.encode()) > most:
        raise InvariantViolation(f"{whole!r} is no key: a part of it has more than {most} bytes")
