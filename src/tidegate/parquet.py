"""What a Parquet file's footer tells, without reading a row."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

# pyarrow ships no types; this is the one place that would need them.
_parquet: Final[Any] = importlib.import_module("pyarrow.parquet")


def read_footer(path: Path) -> Any:
    """pyarrow's `FileMetaData`: row count, row groups, column statistics."""
    return _parquet.read_metadata(path)


def count_rows(path: Path) -> int:
    return int(read_footer(path).num_rows)
