"""What a peer's committed output holds, read the same way of all: Parquet files, or lines of JSON."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.peers.job import COUNTS
from benchmarks.peers.work import KEYS

Visible = Callable[[str], Iterable[Path]]
_PARQUET: Final = ".parquet"


@cache
def _libraries() -> tuple[Any, Any]:
    return importlib.import_module("numpy"), importlib.import_module("pyarrow.parquet")


class Shown:
    """Follows an output while it grows. Every file is read once, one that grows from where it was read to."""

    def __init__(self, work: str, visible: Visible) -> None:
        numpy, _ = _libraries()
        self._work = work
        self._visible = visible
        self._highest = numpy.zeros(KEYS, dtype="int64")
        self._rows: dict[Path, int] = {}
        self._read_to: dict[Path, int] = {}

    def rows(self) -> int:
        """How many rows of the input it accounts for."""
        if self._work == COUNTS:
            return self._counted()
        return sum(self._rows_in(path) for path in self._visible("paid"))

    def _counted(self) -> int:
        numpy, _ = _libraries()
        for path in self._visible("counts"):
            # A batch that Spark runs again is deleted and written once more.
            with suppress(FileNotFoundError):
                self._raise_by(path)
        return int(numpy.sum(self._highest))

    def _raise_by(self, path: Path) -> None:
        if path in self._rows:
            return
        if _is_parquet(path):
            _raise_to(self._highest, *_read_columns(path, "key", "n"))
            self._rows[path] = 1
            return
        for row in self._new_lines(path):
            self._highest[row["key"]] = max(row["n"], self._highest[row["key"]])

    def _rows_in(self, path: Path) -> int:
        _, parquet = _libraries()
        if _is_parquet(path):
            if path not in self._rows:
                self._rows[path] = parquet.read_metadata(path).num_rows
        elif (size := path.stat().st_size) != self._read_to.get(path):
            # Counted anew: its writer may have truncated it and gone on between two looks.
            self._read_to[path] = size
            self._rows[path] = path.read_bytes().count(b"\n")
        return self._rows[path]

    def _new_lines(self, path: Path) -> list[dict[str, Any]]:
        """Lines that were read before may come again: counts only grow."""
        start = self._read_to.get(path, 0)
        with path.open("rb") as file:
            # Where no line ends, or nothing is, its writer has truncated it: then it is read anew.
            file.seek(max(0, start - 1))
            if start and file.read(1) != b"\n":
                start = 0
                file.seek(0)
            read = file.read()
        whole = read[: read.rfind(b"\n") + 1]
        self._read_to[path] = start + len(whole)
        return _rows_of(whole)


def read_counts(paths: Iterable[Path]) -> Any:
    """The newest count of each key: counts only grow."""
    numpy, _ = _libraries()
    counts = numpy.zeros(KEYS, dtype="int64")
    for path in paths:
        if _is_parquet(path):
            _raise_to(counts, *_read_columns(path, "key", "n"))
        else:
            for row in _rows_of(path.read_bytes()):
                counts[row["key"]] = max(row["n"], counts[row["key"]])
    return counts


def read_ids(paths: Iterable[Path]) -> Any:
    numpy, _ = _libraries()
    found = [
        _read_columns(path, "id")[0]
        if _is_parquet(path)
        else numpy.array([row["id"] for row in _rows_of(path.read_bytes())], dtype="int64")
        for path in paths
    ]
    return numpy.concatenate(found) if found else numpy.array([], dtype="int64")


def read_totals(paths: Iterable[Path]) -> dict[tuple[str, str], tuple[int, float]]:
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    names = ("country", "band", "orders", "revenue")
    for path in paths:
        rows: Iterable[tuple[str, str, int, float]]
        if _is_parquet(path):
            rows = zip(*(column.tolist() for column in _read_columns(path, *names)), strict=True)
        else:
            rows = ((row["country"], row["band"], row["orders"], row["revenue"]) for row in _rows_of(path.read_bytes()))
        for country, band, orders, revenue in rows:
            before = totals.get((country, band), (0, 0.0))
            totals[country, band] = (before[0] + orders, before[1] + revenue)
    return totals


def _is_parquet(path: Path) -> bool:
    """Flink names its files without a suffix, whatever they hold."""
    if path.suffix:
        return path.suffix == _PARQUET
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _raise_to(highest: Any, keys: Any, counts: Any) -> None:
    numpy, _ = _libraries()
    numpy.maximum.at(highest, keys, counts)


def _read_columns(path: Path, *names: str) -> list[Any]:
    _, parquet = _libraries()
    # Not read_table, which would take a folder such as batch=7 for a column.
    table = parquet.ParquetFile(path).read(columns=list(names))
    return [table.column(name).to_numpy() for name in names]


def _rows_of(lines: bytes) -> list[dict[str, Any]]:
    """Lines are rows, or Debezium's changes: of those the rows after the change."""
    rows = []
    for line in lines.splitlines():
        row = msgspec.json.decode(line)
        changed = row.get("after", row)
        if changed is not None:
            rows.append(changed)
    return rows
