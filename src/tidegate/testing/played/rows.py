"""Rows as played queries and tables write them: real Parquet files, which also say which rows they stand for.

A row is known by its path and its offset (see `simulator/dag.py`). A file has as many rows as its ranges have, so that
its footer can be counted by, and the ranges themselves lie between its data and its footer, where no reader of Parquet
looks. What a reader was given is thereby told by the file that it has really read.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import lru_cache
from io import BytesIO
from typing import Any, Final

import msgspec

from tidegate.testing.simulator.dag import Ranges

_MARK: Final = b"played rows: "
_END: Final = 8  # the footer's length, and what every Parquet file ends with


class PlayedRows(msgspec.Struct, frozen=True):
    """`time_ms`: the newest event time among them, where rows have any."""

    ranges: Ranges = ()
    time_ms: int | None = None

    @property
    def count(self) -> int:
        return sum(after - first for _, first, after in self.ranges)


_decoder: Final = msgspec.json.Decoder(PlayedRows)


class NoRows(Exception):
    """A file that was to be read is not whole."""


def encode_rows(rows: PlayedRows) -> bytes:
    """The Parquet file that holds them."""
    data, footer = _template(rows.count)
    return b"".join((data, _MARK, msgspec.json.encode(rows), footer))


def decode_rows(file: bytes) -> PlayedRows:
    """What a file holds: nothing, if it was not written by `encode_rows` but is Parquet nevertheless."""
    if len(file) < _END + 4 or file[-4:] != b"PAR1":
        raise NoRows("it is no whole Parquet file")
    at = file.find(_MARK)
    if at < 0:
        return PlayedRows()
    footer = len(file) - _END - int.from_bytes(file[-_END:-4], "little")
    return _decoder.decode(file[at + len(_MARK) : footer])


def joined(rows: Iterable[PlayedRows]) -> PlayedRows:
    found = tuple(rows)
    times = [each.time_ms for each in found if each.time_ms is not None]
    return PlayedRows(tuple(each for one in found for each in one.ranges), max(times, default=None))


@lru_cache(maxsize=4096)
def _template(count: int) -> tuple[bytes, bytes]:
    """A file of so many rows, up to its footer and from there on."""
    pyarrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    written = BytesIO()
    parquet.write_table(pyarrow.table({"row": pyarrow.array([True] * count, pyarrow.bool_())}), written)
    file = written.getvalue()
    footer = len(file) - _END - int.from_bytes(file[-_END:-4], "little")
    return file[:footer], file[footer:]
