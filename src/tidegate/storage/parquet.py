"""What a Parquet file's footer tells, without reading a row."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

from tidegate.errors import DamagedCheckpoint, first_line


@cache
def _pyarrow_parquet() -> Any:
    """Imported when it is needed, because it is slow to; through importlib, because pyarrow ships no types."""
    return importlib.import_module("pyarrow.parquet")


def read_footer(path: Path) -> Any:
    """pyarrow's `FileMetaData`: row count, row groups, column statistics."""
    try:
        return _pyarrow_parquet().read_metadata(path)
    except ValueError as error:  # as pyarrow's own is
        raise DamagedCheckpoint(f"{path} is no whole Parquet file: {first_line(error)}") from error


def count_rows(path: Path) -> int:
    return int(read_footer(path).num_rows)


def write_nothing(path: Path) -> int:
    """A file without rows, that can be read with any schema. Returns its size."""
    pyarrow = importlib.import_module("pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    _pyarrow_parquet().write_table(pyarrow.table({"nothing": pyarrow.array([], pyarrow.bool_())}), path)
    return path.stat().st_size
