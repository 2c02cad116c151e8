"""Channels are bounded: what is over the bound holds back its writer, and a source is paused and goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import Crash, oracle, run_to_end, stream, table_rows, write_input
from tidegate.engine.status import RunStatus

pytestmark = [pytest.mark.spark, pytest.mark.slow]

FILES = 60
ROWS_PER_FILE = 5
BOUND = 2
COLUMNS = ["id", "key", "value"]


def slow_pipeline(folder: Path) -> tg.Pipeline:
    """A source that has state, a stage that stands still while there is a file `hold`, and two tables."""
    pipeline = tg.Pipeline("slow")
    hold = str(folder / "hold")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        read = stream(spark, folder / "rows", files_per_batch=1)
        return read.withWatermark("ts", "1 day").dropDuplicates(["id", "ts"])

    @pipeline.stage
    def passed(rows: DataFrame) -> DataFrame:
        return rows.select(*COLUMNS)

    @pipeline.stage
    def slow(passed: DataFrame) -> DataFrame:
        waited = F.udf(lambda value: _when_gone(hold, value), "long")
        return passed.coalesce(1).withColumn("value", waited("value"))  # so that it takes one core, not all

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "slow_table"))
    def slow_table(slow: DataFrame) -> DataFrame:
        return slow

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "quick_table"))
    def quick_table(rows: DataFrame) -> DataFrame:
        return rows.select(*COLUMNS)

    return pipeline


def _when_gone(path: str, value: int) -> int:
    import os
    import time

    deadline = time.monotonic() + 60
    while os.path.exists(path) and time.monotonic() < deadline:  # noqa: PTH110 - it runs in Spark's Python worker
        time.sleep(0.02)
    return value


class Pausing:
    """A view that makes the slow stage stand still until the source is held back, and lets it go on until it is not."""

    def __init__(self, folder: Path, pauses: int, *, crash: bool = False) -> None:
        """`pauses`: how many. After the last one the stage is left alone or, with `crash`, the run ends."""
        self.held: set[tuple[str, str]] = set()
        self.longest_lag = 0
        self.attempts: set[str] = set()
        self._folder = folder
        self._hold = folder / "hold"
        self._hold.touch()
        self._left = pauses
        self._crash = crash

    def __call__(self, status: RunStatus) -> None:
        stages = status.stages
        self.held |= {(name, each.held_back_by) for name, each in stages.items() if each.held_back_by}
        self.longest_lag = max(self.longest_lag, stages["slow"].lag or 0)
        self.attempts |= {path.name for path in self._folder.glob("root/generations/*/stages/rows/spark*")}
        is_held = stages["rows"].held_back_by is not None
        if is_held and self._hold.exists():
            self._left -= 1
            if self._crash and not self._left:
                self._hold.unlink()
                raise Crash
            self._hold.unlink()
        elif not is_held and self._left > 0:
            self._hold.touch()


def check_tables(folder: Path, session: SparkSession) -> None:
    expected = oracle(slow_pipeline(folder), session)
    for name in ("slow_table", "quick_table"):
        assert table_rows(folder / "lake" / name, COLUMNS) == expected[name], name


@pytest.mark.soak  # the simulator holds stages back in every other seed
def test_a_slow_stage_holds_back_all_before_it_and_nothing_is_lost_or_doubled(
    tmp_path: Path, spark: SparkSession
) -> None:
    write_input(tmp_path / "rows", FILES, ROWS_PER_FILE)
    pipeline = slow_pipeline(tmp_path)
    settings = {"max_backlog_segments": BOUND, "checkpoint_interval": "300ms"}
    for pauses in (1, 2):
        # Ended while the source is being paused, once before it has ever gone on and once after.
        with pytest.raises(Crash):
            run_to_end(pipeline, tmp_path / "root", spark, view=Pausing(tmp_path, pauses, crash=True), **settings)
    pausing = Pausing(tmp_path, 4)
    run_to_end(pipeline, tmp_path / "root", spark, view=pausing, **settings)
    check_tables(tmp_path, spark)
    assert {("passed", "slow"), ("rows", "passed")} <= pausing.held
    # It is passed by what one look at a stage has found, and by what that had been given to read.
    assert pausing.longest_lag <= BOUND + 8
    assert {"spark-2", "spark-3", "spark-4"} <= pausing.attempts
    stage = next((tmp_path / "root" / "generations").glob("000003/stages/rows"))
    # Spark's upkeep of state may still have written there since.
    left = [path.parent.name for path in stage.glob("spark*/commits")]
    assert len(left) <= 2, f"abandoned attempts are cleaned up: {left}"


@pytest.mark.parametrize(
    "chain", [pytest.param(False, marks=pytest.mark.soak, id="apart"), pytest.param(True, id="chained")]
)
def test_a_table_that_is_late_holds_its_sink_back_but_not_from_a_barrier(
    tmp_path: Path, spark: SparkSession, *, chain: bool
) -> None:
    """A source that is chained to its sink is paused for it, in the middle of a batch, and goes on elsewhere."""
    write_input(tmp_path / "rows", FILES, ROWS_PER_FILE)
    pipeline = tg.Pipeline("late")
    may_commit = threading.Event()
    seen: dict[int, set[int]] = {}

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "rows", files_per_batch=1)

    def late(frame: DataFrame, epoch: int) -> None:
        may_commit.wait(60)
        seen[epoch] = {row.id for row in frame.collect()}

    @pipeline.sink(tg.ForeachBatch(late))
    def table(rows: DataFrame) -> DataFrame:
        return rows

    held: set[tuple[str, str]] = set()
    # All is held back, by the table in the end.
    awaited = {("table", "its table")} | (set() if chain else {("rows", "table")})

    def view(status: RunStatus) -> None:
        held.update((name, stage.held_back_by) for name, stage in status.stages.items() if stage.held_back_by)
        if awaited <= held:
            may_commit.set()

    options = {"max_backlog_segments": 1, "checkpoint_interval": "100ms", "chain": chain}
    run_to_end(pipeline, tmp_path / "root", spark, view=view, **options)
    assert may_commit.is_set(), held
    if chain:
        attempts = sorted(path.name for path in (tmp_path / "root").glob("generations/*/stages/rows/spark-*"))
        assert attempts, "it was paused, and went on in fresh folders"
    assert sum(len(ids) for ids in seen.values()) == FILES * ROWS_PER_FILE
    assert set().union(*seen.values()) == set(range(FILES * ROWS_PER_FILE))
