"""What a stage's query writes: Parquet files, named by Spark's sink log or, in update mode, by a folder per batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tidegate.errors import DamagedCheckpoint
from tidegate.spark.definition import OutputMode
from tidegate.spark.filelog import checked_by, read_sink_log, remove_files, seed_sink_log
from tidegate.storage.files import Files, clear
from tidegate.storage.parquet import is_written

_BATCH_FOLDER: Final = "batch-"


def batch_folder(batch: int) -> str:
    """Where in the output a batch in another mode than append writes."""
    return f"{_BATCH_FOLDER}{batch}"


def written_files(output: Files, batch: int, mode: OutputMode) -> list[tuple[str, int]]:
    """The files that a committed batch has written, by their names in the output, with their sizes."""
    if mode != "append":
        folder = batch_folder(batch)
        listed = output.list(folder)
        written = [name for name in listed if is_written(name, folder)]
        files = [(name, size) for name in written if (size := output.size(name)) is not None]
        if left := [name for name in listed if checked_by(name) not in written]:
            output.delete(left)  # what a task that was lost has left stays else until its generation is over
        if not files:
            clear(output, folder)  # a batch without rows and with partitions
        return files
    entries = read_sink_log(output, batch)
    if entries is None:
        raise DamagedCheckpoint(
            f"Spark's sink log in {output.location()} lacks batch {batch}, though the batch was committed"
        )
    return [(_name_in(output, entry.path), entry.size) for entry in entries]


def _name_in(output: Files, uri: str) -> str:
    name = output.name_of(uri)
    if name is None:
        raise DamagedCheckpoint(f"Spark's sink log in {output.location()} names {uri}, which is not there")
    return name


def remove_outputs(files: Files, names: Iterable[str]) -> None:
    """Delete files that batches wrote, and with the last of each the folder of the batch, where it has one."""
    written = list(names)
    remove_files(files, written)
    for folder in sorted({folder for name in written if (folder := _batch_of(name)) is not None}):
        files.prune(folder)


def _batch_of(name: str) -> str | None:
    parts = name.split("/")[:-1]
    depth = next((depth for depth, part in enumerate(parts, start=1) if part.startswith(_BATCH_FOLDER)), None)
    return None if depth is None else "/".join(parts[:depth])


def restore_output(output: Files, batch: int | None) -> None:
    """A fresh output folder that goes on after `batch`."""
    if batch is not None:
        seed_sink_log(output, batch)
