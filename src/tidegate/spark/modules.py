"""Modules beside a pipeline's file, which functions in it import: executors on other machines need them too."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("tidegate")
_MOST_BYTES: Final = 64 << 20


def give_modules(session: SparkSession, folder: Path, packed: Path) -> None:
    """Let the executors of a cluster import what lies in the folder, as this process can. They fetch it from `packed`,
    those too that come later."""
    files = dict(modules_in(folder))
    if not files:
        return
    size_bytes = sum(path.stat().st_size for path in files.values())
    if size_bytes > _MOST_BYTES:
        _log.warning(
            "the modules in %s are not sent to the executors: they are %d MB, over %d MB; give those that functions "
            "import there with --conf spark.submit.pyFiles=…",
            folder,
            size_bytes >> 20,
            _MOST_BYTES >> 20,
        )
        return
    # Nix, Bazel and images of containers date files to 1970, which zip files cannot tell.
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as into:
        for name, path in files.items():
            into.write(path, name)
    session.sparkContext.addPyFile(str(packed))


def modules_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Files that can be imported by name where the folder is searched, and all that packages in it hold."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.stem.isidentifier() and path.is_file():
            yield path.name, path
        elif path.name.isidentifier() and (path / "__init__.py").is_file():
            for file in sorted(path.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    yield str(file.relative_to(folder)), file
