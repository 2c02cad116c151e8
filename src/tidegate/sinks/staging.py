"""What sinks of different kinds have in common."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.errors import InvalidPipeline, SinkFailed
from tidegate.sinks.contract import SinkPlace, StagedBatch, StagedFile

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def as_names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def quoted(name: str) -> str:
    """A column's name as Spark reads one, whatever it holds."""
    return "`" + name.replace("`", "``") + "`"


def check_key(table: str, key: Sequence[str], place: SinkPlace, schema: StructType, output_mode: str) -> None:
    """Refuse a key that is not there, and complete mode without one. `table` is the sink's, for people."""
    missing = [name for name in key if name not in schema.names]
    if missing:
        raise InvalidPipeline(f"{table} has the key {missing[0]!r}, which {place.owner} does not have")
    if output_mode == "complete" and not key:
        raise InvalidPipeline(
            f"{table}: {place.owner} has output_mode 'complete', which would append the whole result again in each "
            f"batch; give the table a key, or use output_mode 'update'"
        )


def refuse_foreign(table: str, place: SinkPlace, staged: Sequence[StagedFile] | Sequence[StagedBatch]) -> None:
    """Refuse what a sink of the other kind has staged: this one cannot show it."""
    if any(each.rows for each in staged):
        raise SinkFailed(
            f"{table}: the checkpoint holds rows that {place.owner} has staged for a sink of another kind; "
            f"take that sink, or start the pipeline on a new root"
        )


def generation_folder(staging: Path, generation: int) -> Path:
    """Where a generation stages its files."""
    return staging / f"{generation:06d}"


def forget_generations(staging: Path, before: int) -> None:
    """Remove what older generations have staged."""
    if staging.is_dir():
        for folder in staging.iterdir():
            if folder.name.isdigit() and int(folder.name) < before:
                shutil.rmtree(folder, ignore_errors=True)
