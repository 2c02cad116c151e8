"""The two works: their input, the same files for every peer, and what must come out of them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.peers.job import CHAIN, COUNTS, DELAY_S, WINDOW_S

KEYS: Final = 1_000
_COUNTRIES: Final = 20
_ROWS_PER_EVENT_SECOND: Final = 5_000
_START_US: Final = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
_CLOSING_ROWS: Final = 2 * _COUNTRIES


class Work(msgspec.Struct, frozen=True):
    """Files of `rows_per_file` rows: so many to warm up, to measure, and to be in the middle of when it is killed."""

    name: str
    rows_per_file: int
    files_per_batch: int
    warm_up_files: int
    measured_files: int
    killed_files: int

    @property
    def files(self) -> int:
        return self.warm_up_files + self.measured_files + self.killed_files + 1  # one is added while it is down

    def part(self, share: float) -> Work:
        """Fewer of the same files."""

        def less(files: int, least: int) -> int:
            return max(least, round(files * share))

        return msgspec.structs.replace(
            self,
            warm_up_files=less(self.warm_up_files, 2),
            measured_files=less(self.measured_files, 2),
            killed_files=less(self.killed_files, 2),
        )


# Sized so that a round of the fastest peers takes ten seconds or more on two cores: ten checkpoints.
WORKS: Final = (
    Work(COUNTS, rows_per_file=250_000, files_per_batch=4, warm_up_files=16, measured_files=64, killed_files=16),
    Work(CHAIN, rows_per_file=100_000, files_per_batch=4, warm_up_files=12, measured_files=40, killed_files=12),
)


class Answer(msgspec.Struct, frozen=True):
    """How far from right an output is. Of counts, a count that is too low has lost rows, one too high has doubled."""

    lost: int
    doubled: int


def shown_rows(work: str, first_rows: int) -> int:
    """How many rows the output accounts for when it shows the first rows of the input."""
    return first_rows if work == COUNTS else first_rows - first_rows // 10


@cache
def _libraries() -> tuple[Any, Any, Any]:
    numpy, pyarrow, parquet = (importlib.import_module(name) for name in ("numpy", "pyarrow", "pyarrow.parquet"))
    return numpy, pyarrow, parquet


def columns(first: int, rows: int) -> dict[str, Any]:
    """Rows by their numbers: always the same."""
    numpy, pyarrow, _ = _libraries()
    chance = numpy.random.default_rng(first)
    ids = numpy.arange(first, first + rows, dtype="int64")
    moments = _START_US + ids * (1_000_000 // _ROWS_PER_EVENT_SECOND)
    return {
        "id": ids,
        "key": chance.integers(0, KEYS, rows),
        "country": pyarrow.array([f"country-{each}" for each in range(_COUNTRIES)]).take(ids % _COUNTRIES),
        "amount": numpy.round(chance.random(rows) * 1_000, 2),
        "ts": pyarrow.array(moments).cast(pyarrow.timestamp("us", tz="UTC")),
    }


def write_files(work: Work, folder: Path) -> tuple[Path, ...]:
    _, pyarrow, parquet = _libraries()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(work.files):
        path = folder / f"{number:06d}.parquet"
        if not path.exists():
            parquet.write_table(pyarrow.table(columns(number * work.rows_per_file, work.rows_per_file)), path)
        paths.append(path)
    return tuple(paths)


def write_closing_file(work: Work, folder: Path) -> Path:
    """A file that closes every window before it: its rows are from long after, one of every country and band, because
    Bytewax has a watermark for each key."""
    numpy, pyarrow, parquet = _libraries()
    rows = columns(work.files * work.rows_per_file, _CLOSING_ROWS)
    later = _START_US + (2 * DELAY_S + WINDOW_S) * 1_000_000
    rows["ts"] = pyarrow.array(numpy.full(_CLOSING_ROWS, later)).cast(pyarrow.timestamp("us", tz="UTC"))
    rows["amount"] = numpy.repeat([900.0, 100.0], _COUNTRIES)
    path = folder / f"closing-{work.files}.parquet"
    parquet.write_table(pyarrow.table(rows), path)
    return path


# -- the oracle ------------------------------------------------------------------------------------


@cache
def true_counts(files: int, rows_per_file: int) -> Any:
    """The count of each key."""
    numpy, _, _ = _libraries()
    counts = numpy.zeros(KEYS, dtype="int64")
    for number in range(files):
        counts += numpy.bincount(columns(number * rows_per_file, rows_per_file)["key"], minlength=KEYS)
    return counts


@cache
def true_totals(files: int, rows_per_file: int) -> dict[tuple[str, str], tuple[int, float]]:
    """Orders and revenue per country and band, over all windows."""
    numpy, _, _ = _libraries()
    orders: dict[tuple[str, str], tuple[int, float]] = {}
    for number in range(files):
        rows = columns(number * rows_per_file, rows_per_file)
        kept = rows["id"] % 10 != 9
        prices = numpy.round(rows["amount"] * 1.19, 2)
        for country in range(_COUNTRIES):
            of_country = kept & (rows["id"] % _COUNTRIES == country)
            for band, chosen in (("high", prices > 500), ("low", prices <= 500)):
                those = of_country & chosen
                if those.any():
                    before = orders.get((f"country-{country}", band), (0, 0.0))
                    found = (before[0] + int(those.sum()), before[1] + float(prices[those].sum()))
                    orders[f"country-{country}", band] = found
    return orders


def compare_counts(found: Any, expected: Any) -> Answer:
    numpy, _, _ = _libraries()
    difference = found - expected
    return Answer(int(-numpy.minimum(difference, 0).sum()), int(numpy.maximum(difference, 0).sum()))


def compare_paid(ids: Any, rows: int) -> Answer:
    """The ids that came, against those that the first rows, and the closing file, have."""
    numpy, _, _ = _libraries()
    wanted = numpy.arange(rows + _CLOSING_ROWS, dtype="int64")
    wanted = wanted[wanted % 10 != 9]
    times = numpy.bincount(ids, minlength=rows + _CLOSING_ROWS) if len(ids) else numpy.zeros(rows + _CLOSING_ROWS)
    lost = int((times[wanted] == 0).sum())
    return Answer(lost, int(times.sum()) - (len(wanted) - lost))


def compare_totals(
    found: dict[tuple[str, str], tuple[int, float]], expected: dict[tuple[str, str], tuple[int, float]]
) -> Answer:
    lost = doubled = 0
    for group in found.keys() | expected.keys():
        difference = found.get(group, (0, 0.0))[0] - expected.get(group, (0, 0.0))[0]
        lost += max(0, -difference)
        doubled += max(0, difference)
    return Answer(lost, doubled)


class Feed:
    """The folder that a peer reads. A file appears in it whole, at once."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self.folder = folder
        self.offered = 0
        self._files = files
        folder.mkdir(parents=True)

    def offer(self, files: int) -> None:
        for path in self._files[self.offered : self.offered + files]:
            os.link(path, self.folder / path.name)
        self.offered += files

    def close(self, closing: Path) -> None:
        # Its name sorts behind all others.
        os.link(closing, self.folder / "999999.parquet")
