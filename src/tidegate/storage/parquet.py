"""What a Parquet file's footer tells, without reading a row."""

from __future__ import annotations

import importlib
from functools import cache
from io import SEEK_END, BufferedIOBase, BytesIO
from pathlib import Path
from typing import Any

from tidegate.errors import DamagedCheckpoint, first_line
from tidegate.storage.files import Files


@cache
def _pyarrow_parquet() -> Any:
    """Imported when it is needed, because it is slow to; through importlib, because pyarrow ships no types."""
    return importlib.import_module("pyarrow.parquet")


def read_footer(source: Path | BufferedIOBase, called: str = "") -> Any:
    """pyarrow's `FileMetaData`: row count, row groups, column statistics. `called`: by what people know it."""
    try:
        return _pyarrow_parquet().read_metadata(source)
    except ValueError as error:  # as pyarrow's own is
        raise DamagedCheckpoint(f"{called or source} is no whole Parquet file: {first_line(error)}") from error


def footer_of(files: Files, name: str) -> tuple[Any, int]:
    """The same of one of some files, with its size."""
    opened = files.open(name)
    if opened is None:
        raise DamagedCheckpoint(f"{files.location(name)} is gone")
    with opened as file:
        return read_footer(file, files.location(name)), file.seek(0, SEEK_END)


def is_written(name: str, folder: str) -> bool:
    """Whether a file under a folder is one that a job of Spark's has written there, as Spark's own readers tell: not
    what a task has left in a folder that begins with `_` or `.`, as one does that was taken for lost and lived on."""
    parts = name.removeprefix(f"{folder}/").split("/")
    return name.endswith(".parquet") and not any(part[0] in "_." and "=" not in part for part in parts)


def count_rows(files: Files, name: str) -> int:
    return int(footer_of(files, name)[0].num_rows)


def write_nothing(files: Files, name: str) -> int:
    """A file without rows, that can be read with any schema. Returns its size."""
    pyarrow = importlib.import_module("pyarrow")
    written = BytesIO()
    _pyarrow_parquet().write_table(pyarrow.table({"nothing": pyarrow.array([], pyarrow.bool_())}), written)
    data = written.getvalue()
    files.write(name, data)
    return len(data)
