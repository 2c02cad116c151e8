"""A pipeline that is told to stop while it reads, and what its tables must hold of what its sources have read."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import START, oracle, stream, table_rows, write_rows
from tidegate.engine.requests import Answer, StopRun
from tidegate.engine.status import RunStatus
from tidegate.protocol.messages import Flag
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest
from tidegate.storage.paths import RootPaths

FILES = 30
ROWS = 4
UNALIGNED = tg.CheckpointConfig(alignment=tg.AlignmentConfig(unaligned="always"))
COLUMNS = {
    "window_table": ["start", "value"],
    "sum_table": ["start", "value"],
    "paid_table": ["id", "paid"],
    "slow_table": ["id", "value"],
}
ALL = {"orders": FILES, "payments": FILES}
FAILS, WAITS = "fails", "waits"
_DELAY_S = 10
_WINDOW_S = 10


def slowly(value: int, fails: str, waits: str) -> int:
    """Fails, or waits, while there is such a file."""
    time.sleep(0.02)
    deadline = time.monotonic() + 60
    while Path(waits).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    if Path(fails).exists():
        raise ValueError("told to fail")
    return value


def draining_pipeline(folder: Path, lake: Path, files_per_batch: int = 1) -> tg.Pipeline:
    """Two levels of windows, two sources that are joined, and a stage that is slower than what it reads."""
    pipeline = tg.Pipeline("draining")

    @pipeline.source
    def orders(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "orders", files_per_batch)

    @pipeline.source
    def payments(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "payments", files_per_batch)

    @pipeline.stage
    def windows(orders: DataFrame) -> DataFrame:
        per_window = orders.withWatermark("ts", f"{_DELAY_S} seconds").groupBy(F.window("ts", f"{_WINDOW_S} seconds"))
        return per_window.agg(F.sum("value").alias("value")).select("window.start", "value")

    @pipeline.stage
    def sums(windows: DataFrame) -> DataFrame:
        per_window = windows.withWatermark("start", "1 minute").groupBy(F.window("start", "1 minute"))
        return per_window.agg(F.sum("value").alias("value")).select("window.start", "value")

    @pipeline.stage
    def paid(orders: DataFrame, payments: DataFrame) -> DataFrame:
        ours = orders.withWatermark("ts", "1 second").alias("o")
        theirs = payments.withWatermark("ts", "1 second").alias("p")
        same = F.expr("o.id = p.id AND p.ts BETWEEN o.ts AND o.ts + INTERVAL 20 SECONDS")
        return ours.join(theirs, same, "leftOuter").select("o.id", F.col("p.value").alias("paid"))

    @pipeline.stage
    def slow(orders: DataFrame) -> DataFrame:
        fails, waits = str(lake.parent / FAILS), str(lake.parent / WAITS)
        waited = F.udf(lambda value: slowly(value, fails, waits), "long")
        return orders.withColumn("value", waited("value"))

    _add_sinks(pipeline, lake)
    return pipeline


def _add_sinks(pipeline: tg.Pipeline, lake: Path) -> None:
    @pipeline.sink(tg.DeltaTable(lake / "window_table"))
    def window_table(windows: DataFrame) -> DataFrame:
        return windows

    @pipeline.sink(tg.DeltaTable(lake / "sum_table"))
    def sum_table(sums: DataFrame) -> DataFrame:
        return sums

    @pipeline.sink(tg.DeltaTable(lake / "paid_table"))
    def paid_table(paid: DataFrame) -> DataFrame:
        return paid

    @pipeline.sink(tg.DeltaTable(lake / "slow_table"))
    def slow_table(slow: DataFrame) -> DataFrame:
        return slow.select("id", "value")


class Drained:
    """One root, and what is asked of the runs on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.lake = folder / "lake"
        self.pipeline = draining_pipeline(folder / "in", self.lake)
        self.faster = draining_pipeline(folder / "in", self.lake, files_per_batch=10)
        """The same, with larger batches."""
        for number in range(FILES):
            ids = range(number * ROWS, (number + 1) * ROWS)
            write_rows(folder / "in" / "orders", number, ids)
            write_rows(folder / "in" / "payments", number, [each for each in ids if each % 3])

    def ask(self, how: StopRun, name: str = "asked") -> None:
        Folder(self.root).write(f"{RootPaths.REQUESTS}/{name}.request", msgspec.json.encode(how))

    def is_asked(self, name: str = "asked") -> bool:
        return Folder(self.root).exists(f"{RootPaths.REQUESTS}/{name}.request")

    def has_answered(self, name: str) -> bool:
        return Folder(self.root).exists(f"{RootPaths.REQUESTS}/{name}.answer")

    def answer(self, name: str = "asked") -> Answer:
        data = Folder(self.root).read(f"{RootPaths.REQUESTS}/{name}.answer")
        assert data is not None
        return msgspec.json.decode(data, type=Answer)

    def asking(self, how: StopRun, then: Callable[[RunStatus], None] | None = None) -> Callable[[RunStatus], None]:
        """A view that asks the run to stop when something is on its way to the slow stage, which waits until the run
        has heard. `then` sees what follows."""
        is_asked = False
        waits = self.folder / WAITS

        def view(status: RunStatus) -> None:
            nonlocal is_asked
            if is_asked:
                if status.stopping is not None:
                    waits.unlink(missing_ok=True)
            elif waits.exists():
                is_asked = (status.stages["slow"].lag or 0) >= 2
                if is_asked:
                    self.ask(how)
            elif _has_read(status):
                waits.touch()
            if then is not None and is_asked:
                then(status)

        return view

    @property
    def last(self) -> Manifest:
        inspected = InspectedRoot(self.root)
        return inspected.manifest(inspected.newest())

    def read_by(self, manifest: Manifest) -> dict[str, int]:
        """How many files each source had read at a checkpoint: a file is a batch."""
        found = {name: manifest.stages[name].source_positions for name in ("orders", "payments")}
        return {name: json.loads(each[0])["logOffset"] + 1 if each else 0 for name, each in found.items()}

    def batch_job(self, session: SparkSession, read: dict[str, int]) -> dict[str, Counter[tuple[Any, ...]]]:
        """What the tables must hold when all of so many files is consumed, and every window closed."""
        folder = self.folder / "as read"
        shutil.rmtree(folder, ignore_errors=True)
        for name, count in read.items():
            (folder / name).mkdir(parents=True)
            for number in range(count):
                shutil.copy2(self.folder / "in" / name / f"{number:05d}.json", folder / name)
        return oracle(draining_pipeline(folder, self.lake), session)

    def tables(self) -> dict[str, Counter[tuple[Any, ...]]]:
        return {name: table_rows(self.lake / name, columns) for name, columns in COLUMNS.items()}

    def check_drained(self, session: SparkSession, read: dict[str, int] | None = None) -> dict[str, int]:
        """Of all that was read everything is in the tables that a watermark has let go, and nothing is in flight.
        Returns how much was read, unless that is known."""
        manifest = self.last
        assert manifest.flags & Flag.DRAIN
        assert manifest.aligned
        assert not any(part.in_flight for part in manifest.stages.values())
        read = self.read_by(manifest) if read is None else read
        whole, found = self.batch_job(session, read), self.tables()
        assert found["slow_table"] == whole["slow_table"]
        # Also the windows which the very last rows have closed: a batch without data writes them out.
        newest = START + timedelta(seconds=read["orders"] * ROWS - 1 - _DELAY_S - _WINDOW_S)
        assert found["window_table"] == Counter({row: 1 for row in whole["window_table"] if row[0] <= newest})
        assert found["sum_table"] <= whole["sum_table"]
        matched = {row for row in whole["paid_table"] if row[1] is not None}
        assert {row for row in found["paid_table"] if row[1] is not None} == matched
        assert found["paid_table"] <= whole["paid_table"]
        return read


def _has_read(status: RunStatus) -> bool:
    sources = [status.stages[name].batch or 0 for name in ("orders", "payments") if name in status.stages]
    return bool(status.checkpoints) and len(sources) == 2 and min(sources) >= 2
