"""Looking after a Delta table beside its commits: small files of several epochs made few, and files deleted that nobody
needs any more.

Rows go through Spark. What is made of some files takes their place in one transaction that changes no row
(`dataChange` is false) and no record of an epoch: to those who look for the version of a checkpoint, the version before
and the one after show the same.

A file is deleted when all of this is so:
- no version needs it that shows a checkpoint which the root retains, nor the newest one;
- it was removed from the table longer ago than the retention: no version that is younger needs it;
- its last change, or the last change of its names, is as old: nobody is about to add it. Of a file that the table's log
  knows nothing of, a day at least.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import deltalake
import msgspec
from deltalake.exceptions import DeltaError

from tidegate.errors import SinkFailed
from tidegate.sinks.combining import Piece, bins, check_rows_kept
from tidegate.sinks.scan import FILE, TableFile, active_files, scan
from tidegate.sinks.staging import refuse_null_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

RETENTION: Final = "delta.deletedFileRetentionDuration"
_HOUR_S: Final = 3_600
_UNITS_S: Final = {"second": 1, "minute": 60, "hour": _HOUR_S, "day": 24 * _HOUR_S, "week": 7 * 24 * _HOUR_S}
_ELSEWHERE: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|/")
_UNKNOWN_FOR_S: Final = 24 * _HOUR_S


class Rewritten(msgspec.Struct, frozen=True):
    """Files of a table, and what takes their place."""

    files: Sequence[TableFile]
    written: list[Path]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


# -- small files -------------------------------------------------------------------------------------


def small_files(table: deltalake.DeltaTable, path: Path, target: int) -> list[list[TableFile]]:
    """Which files of a table are to become one: those that came after one another."""
    files = sorted(active_files(table), key=lambda file: (file.modified_ms, file.path))
    by_path = {path / file.path: file for file in files}
    pieces = (Piece(path / file.path, file.size, repr(file.partition)) for file in files)
    return [[by_path[piece.path] for piece in together] for together in bins(pieces, target, target // 2)]


def rewrite(
    session: SparkSession,
    path: Path,
    schema: StructType,
    files: Sequence[TableFile],
    partition_by: Sequence[str],
    folder: Path,
) -> Rewritten:
    """Write the rows of some files of one partition to a folder, as one: by one task, so that other work goes on."""
    rows = scan(session, path, schema, files).drop(FILE)
    rows = refuse_null_folder(rows, partition_by)  # another writer may have written one
    writing = rows.coalesce(1).write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    writing.partitionBy(*partition_by).parquet(str(folder))
    check_rows_kept(folder, (path / file.path for file in files))
    return Rewritten(files, sorted(folder.rglob("*.parquet")))


# -- files that nobody needs -------------------------------------------------------------------------


def retention_s(table: deltalake.DeltaTable, wanted_ms: int) -> int:
    """For how long what was removed stays: what the table itself demands, if that is longer."""
    text = table.metadata().configuration.get(RETENTION)
    if text is None:
        return math.ceil(wanted_ms / 1000)
    found = re.fullmatch(r"(?:interval\s+)?(\d+)\s+([a-z]+?)s?", text.strip().lower())
    if found is None or found[2] not in _UNITS_S:
        raise SinkFailed(f"its property {RETENTION} is {text!r}, which is not understood, so no file is deleted")
    return max(math.ceil(wanted_ms / 1000), int(found[1]) * _UNITS_S[found[2]])


def unneeded_files(table: deltalake.DeltaTable, path: Path, kept_s: int, versions: Iterable[int]) -> list[Path]:
    """The files below a table's folder that no one needs who may read it. `versions`: whose files stay in any case."""
    if any(_ELSEWHERE.match(file.path) for file in active_files(table)):
        raise SinkFailed("it has files that lie elsewhere, so no file is deleted")
    kept = sorted({*versions, *_last_before(table, path, time.time() - kept_s)})
    hours = math.ceil(kept_s / _HOUR_S)

    def listed(*, full: bool) -> set[str]:
        return set(table.vacuum(hours, True, False, full=full, keep_versions=kept))

    removed = listed(full=False)
    found = {name: kept_s if name in removed else max(kept_s, _UNKNOWN_FOR_S) for name in removed | listed(full=True)}
    now = time.time()
    return [
        path / name
        for name, age_s in found.items()
        if name.endswith(".parquet") and _is_older(path / name, now - age_s)
    ]


def _is_older(file: Path, moment: float) -> bool:
    """By all that has happened to it: a link does not change a file's own time, but that of its names."""
    with suppress(FileNotFoundError):
        status = file.stat()
        return max(status.st_mtime, status.st_ctime) <= moment
    return False


def _last_before(table: deltalake.DeltaTable, path: Path, moment: float) -> list[int]:
    """The version that the table had at a moment: younger ones show files of it, also where the log has forgotten when
    these were removed."""
    log = path / "_delta_log"
    older = [int(file.stem) for file in log.glob("*.json") if file.stem.isdigit() and file.stat().st_mtime <= moment]
    version = max(older, default=None)
    if version is None or version > table.version():
        return []
    try:
        deltalake.DeltaTable(path, version=version)
    except DeltaError:
        return []  # nobody can read it
    return [version]
