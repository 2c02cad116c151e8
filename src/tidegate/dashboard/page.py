"""The files of the page, read once from the package. What a request names is looked up among them, and nowhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

import msgspec

INDEX: Final = "index.html"
_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "ico": "image/x-icon",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "png": "image/png",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "woff2": "font/woff2",
}


class PageFile(msgspec.Struct, frozen=True):
    data: bytes
    type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """By their names, all of them. None of another type is served."""
    found: dict[str, PageFile] = {}
    for name, file in _below(files("tidegate.dashboard") / "static"):
        kind = _TYPES.get(name.rpartition(".")[2])
        if kind is not None:
            data = file.read_bytes()
            found[name] = PageFile(data, kind, f'"{hashlib.sha256(data).hexdigest()[:24]}"')
    return found


def _below(folder: Traversable, inside: str = "") -> Iterator[tuple[str, Traversable]]:
    if not folder.is_dir():
        return
    for each in folder.iterdir():
        if each.is_dir():
            yield from _below(each, f"{inside}{each.name}/")
        elif each.is_file():
            yield f"{inside}{each.name}", each
