"""How things are called, for people and in files."""

from __future__ import annotations

import re


def checkpoint_name(checkpoint_id: int) -> str:
    return f"ckpt-{checkpoint_id:06d}"


def checkpoint_id_of(name: str) -> int | None:
    """`42` and `ckpt-000042` name the same checkpoint. None: it names none."""
    match = re.fullmatch(r"(?:ckpt-)?0*([1-9]\d*)", name.strip())
    return None if match is None else int(match[1])
