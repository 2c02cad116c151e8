"""Small files of a Delta table made few, beside its commits. Rows go through Spark, and none of them changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import deltalake
import msgspec

from tidegate.sinks.delta.combining import Piece, bins, check_rows_kept
from tidegate.sinks.delta.home import Shelf
from tidegate.sinks.delta.scan import FILE, TableFile, active_files, scan
from tidegate.sinks.staging import refuse_null_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


class Rewritten(msgspec.Struct, frozen=True):
    """Files of a table, and what takes their place."""

    files: Sequence[TableFile]
    written: list[Path]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def small_files(table: deltalake.DeltaTable, target: int) -> list[list[TableFile]]:
    """Which files of a table are to become one: those that came after one another."""
    files = sorted(active_files(table), key=lambda file: (file.modified_ms, file.path))
    by_path = {Path(file.path): file for file in files}
    pieces = (Piece(path, file.size, repr(file.partition)) for path, file in by_path.items())
    return [[by_path[piece.path] for piece in together] for together in bins(pieces, target, target // 2)]


def rewrite(
    session: SparkSession,
    shelf: Shelf,
    schema: StructType,
    files: Sequence[TableFile],
    partition_by: Sequence[str],
    folder: Path,
) -> Rewritten:
    """Write the rows of some files of one partition to a folder, as one: by one task, so that other work goes on."""
    rows = scan(session, shelf, schema, files).drop(FILE)
    rows = refuse_null_folder(rows, partition_by)  # another writer may have written one
    writing = rows.coalesce(1).write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    writing.partitionBy(*partition_by).parquet(str(folder))
    check_rows_kept(folder, (shelf.folder / file.path for file in files))
    return Rewritten(files, sorted(folder.rglob("*.parquet")))
