"""What a stage's query writes: Parquet files, named by Spark's sink log or, in update mode, by a folder per batch."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from tidegate.errors import DamagedCheckpoint
from tidegate.spark.definition import OutputMode
from tidegate.spark.filelog import as_path, read_sink_log, remove_file, seed_sink_log

_BATCH_FOLDER: Final = "batch-"


def batch_folder(output: Path, batch: int) -> Path:
    """Where a batch in another mode than append writes."""
    return output / f"{_BATCH_FOLDER}{batch}"


def written_files(output: Path, batch: int, mode: OutputMode) -> list[tuple[Path, int]]:
    """The files that a committed batch has written, with their sizes."""
    if mode != "append":
        folder = batch_folder(output, batch)
        files = [(path, path.stat().st_size) for path in sorted(folder.rglob("*.parquet"))]
        if not files:
            shutil.rmtree(folder, ignore_errors=True)  # a batch without rows and with partitions: nobody else would
        return files
    entries = read_sink_log(output, batch)
    if entries is None:
        raise DamagedCheckpoint(f"Spark's sink log in {output} lacks batch {batch}, though the batch was committed")
    return [(as_path(entry.path), entry.size) for entry in entries]


def remove_output(path: Path) -> None:
    """Delete a file that a batch wrote, and with the last of them the folder of the batch, where it has one."""
    remove_file(path)
    depth = next((depth for depth, parent in enumerate(path.parents) if parent.name.startswith(_BATCH_FOLDER)), -1)
    for parent in list(path.parents)[: depth + 1]:
        with suppress(OSError):  # other files of the batch are still there
            parent.rmdir()


def restore_output(output: Path, batch: int | None) -> None:
    """A fresh output folder that goes on after `batch`."""
    output.mkdir(parents=True)
    if batch is not None:
        seed_sink_log(output, batch)
