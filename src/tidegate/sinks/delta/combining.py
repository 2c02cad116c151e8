"""Small files made few, by Spark: which of them, and how. Rows never leave Spark.

Small files of one partition become one of at most the target's size. As long as none is small that is more than half of
it, what was combined is either large enough to be left alone from then on, or the only small one of its partition.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from tidegate.errors import SinkFailed
from tidegate.sinks.delta.scan import FILE, as_in_rows, file_of, path_of
from tidegate.sinks.staging import read_files
from tidegate.storage.parquet import read_footer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_BIN: Final = "_tidegate_bin"
_LITTLE_BYTES: Final = 16 << 20
"""What one task writes sooner than a shuffle would spread it."""


class Piece(msgspec.Struct, frozen=True):
    """A file that may become a part of another. `partition`: only those of the same one may be together."""

    path: Path
    size: int
    partition: Hashable


def bins(pieces: Iterable[Piece], target: int, small: int) -> list[list[Piece]]:
    """Which of the files, of at most that size, are to become one, neighbours first; none that would be alone."""
    closed: list[list[Piece]] = []
    filling: dict[Hashable, tuple[list[Piece], int]] = {}
    for piece in pieces:
        if piece.size > small:
            continue
        together, size = filling.get(piece.partition, ([], 0))
        if size + piece.size > target:
            closed.append(together)
            together, size = [], 0
        together.append(piece)
        filling[piece.partition] = together, size + piece.size
    return [each for each in (*closed, *(together for together, _ in filling.values())) if len(each) > 1]


def files_wanted(size: int, target: int) -> int:
    """How many files of this target hold that many bytes."""
    return max(1, -(-size // target))


def combine(session: SparkSession, schema: StructType, wanted: Sequence[Sequence[Piece]], folder: Path) -> list[Path]:
    """Write the rows of each bin as one file, in folders of the bins' own below `folder`. Returns these folders.

    `schema`: of what the files hold, without the columns that their folders stand for.
    """
    from tidegate.sinks.sessions import table_session

    own = table_session(session)
    folders = [folder / f"{_BIN}={number}" for number in range(len(wanted))]
    rows = read_files(own, schema, (piece.path for piece in chain(*wanted)))
    if len(wanted) == 1:
        _write(rows.coalesce(1), folders[0])
    else:
        rows = _with_bins(own, rows, wanted)
        if sum(piece.size for piece in chain(*wanted)) <= _LITTLE_BYTES:
            rows = rows.coalesce(1)
        else:
            rows = rows.repartition(min(len(wanted), session.sparkContext.defaultParallelism), _BIN)
        _write(rows, folder, _BIN)
    for each, pieces in zip(folders, wanted, strict=True):
        check_rows_kept(each, (piece.path for piece in pieces))
    return folders


def check_rows_kept(written: Path, of: Iterable[Path]) -> None:
    """Refuse what has not the rows that it was made of: they would be lost, or shown twice."""
    found, expected = _rows_in(written.rglob("*.parquet")), _rows_in(of)
    if found != expected:
        raise SinkFailed(f"{written} has {found} rows, but the files that it was made of have {expected}")


def _rows_in(files: Iterable[Path]) -> int:
    return sum(read_footer(file).num_rows for file in files)


def _with_bins(session: SparkSession, rows: DataFrame, wanted: Sequence[Sequence[Piece]]) -> DataFrame:
    """The rows, each with the number of its bin."""
    from pyspark.sql import functions as F

    from tidegate.sinks.sessions import frame_of

    numbers = {str(piece.path): number for number, pieces in enumerate(wanted) for piece in pieces}
    known = frame_of(
        session,
        [(as_in_rows(uri), numbers[path_of(uri)]) for uri in rows.inputFiles()],
        f"{FILE} string, {_BIN} int",
    )
    return rows.withColumn(FILE, file_of(rows)).join(F.broadcast(known), FILE).drop(FILE)


def _write(rows: DataFrame, folder: Path, *by: str) -> None:
    writing = rows.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    writing.partitionBy(*by).parquet(str(folder))
