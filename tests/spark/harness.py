"""What the tests of pipelines on Spark share: input, the oracle, and runs in this process."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
from pyspark.sql import DataFrame, SparkSession

from tests.spark_cluster import IN_BUCKET
from tidegate.engine.batch_job import batch_job
from tidegate.engine.pipeline import Pipeline
from tidegate.engine.run import run_pipeline
from tidegate.engine.status import RunStatus

START = datetime(2026, 1, 1, tzinfo=UTC)
ROW_SCHEMA = "id long, key string, ts timestamp, value long"


class Crash(Exception):
    """Ends a run from within, as a kill would, when a view raises it."""


def at_most(seconds: float) -> Callable[[RunStatus], None]:
    """A view that ends a run which would never end."""
    deadline = time.monotonic() + seconds

    def view(_status: RunStatus) -> None:
        assert time.monotonic() < deadline, "the run does not end"

    return view


def write_rows(folder: Path, number: int, ids: Iterable[int], *, key_count: int = 5, far_future: bool = False) -> None:
    """One file of input rows, written whole. A row's time is its id in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for each in ids:
        moment = START + timedelta(seconds=each) + (timedelta(days=30) if far_future else timedelta())
        lines.append(json.dumps({"id": each, "key": f"k{each % key_count}", "ts": moment.isoformat(), "value": each}))
    hidden = folder / f".{number:05d}.tmp"
    hidden.write_text("\n".join(lines), encoding="utf-8")
    # Spark takes files in the order of their times: one second apart, so that rows come in the order of their ids.
    os.utime(hidden, (1_700_000_000 + number, 1_700_000_000 + number))
    hidden.rename(folder / f"{number:05d}.json")


def write_input(folder: Path, files: int, rows_per_file: int, *, first_file: int = 0) -> None:
    for number in range(first_file, first_file + files):
        write_rows(folder, number, range(number * rows_per_file, (number + 1) * rows_per_file))


def stream(spark: SparkSession, folder: Path, files_per_batch: int = 2) -> DataFrame:
    reader = spark.readStream.schema(ROW_SCHEMA).option("maxFilesPerTrigger", str(files_per_batch))
    return reader.json(str(folder))


def oracle(pipeline: Pipeline, session: SparkSession) -> dict[str, Counter[tuple[Any, ...]]]:
    """The rows that every sink should hold: the same functions over the same input, as one batch job."""
    return {name: as_rows(frame.collect()) for name, frame in batch_job(pipeline, session).items()}


def as_rows(rows: Iterable[Any]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(_plain(value) for value in row) for row in rows)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC) if value.tzinfo else value.astimezone().astimezone(UTC)
    return value


def table_rows(path: Path, columns: list[str], version: int | None = None) -> Counter[tuple[Any, ...]]:
    table = deltalake.DeltaTable(path, version=version).to_pyarrow_table(columns=columns)
    return as_rows(tuple(row[name] for name in columns) for row in table.to_pylist())


def run_to_end(pipeline: Pipeline, root: Path, session: SparkSession, **options: Any) -> None:
    settings: Mapping[str, Any] = {"checkpoint_interval": "1s", "available_now": True, "restarts": 0, **options}
    bucket = os.environ.get(IN_BUCKET)
    if bucket is None:
        run_pipeline(pipeline, root, session, **settings)
    else:
        run_pipeline(pipeline, f"{bucket}{root}", session, work=str(root), **settings)
