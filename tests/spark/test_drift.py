"""An input that is too far ahead in event time is held, so that it does not fill the state of a join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import Crash, at_most, oracle, run_to_end, stream, table_rows, write_input
from tidegate.engine.requests import StopRun
from tidegate.engine.run import run_pipeline
from tidegate.engine.status import HeldInput, RunStatus
from tidegate.errors import InvalidConfig
from tidegate.protocol.messages import Flag
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.paths import RootPaths

pytestmark = [pytest.mark.spark, pytest.mark.slow]

FILES = 40
ROWS = 60
"""A minute per file."""
MINUTE_MS = 60_000
COLUMNS = ["id", "clicked"]
ASKED = f"{RootPaths.REQUESTS}/asked.request"
TIMES: dict[str, Any] = {"checkpoint_interval": "3s"}
"""Each checkpoint lets a few segments through."""


def joined(folder: Path, lake: Path, *, is_timed: bool = True, pause_s: float = 0.2) -> tg.Pipeline:
    """Clicks are read as fast as Spark can, impressions slowly, and through a stage without event time of its own."""
    pipeline = tg.Pipeline("joined")

    def timed(rows: DataFrame) -> DataFrame:
        return rows.withWatermark("ts", "1 second") if is_timed else rows

    @pipeline.source
    def clicks(spark: SparkSession) -> DataFrame:
        return timed(stream(spark, folder / "clicks", files_per_batch=1))

    @pipeline.source
    def impressions(spark: SparkSession) -> DataFrame:
        late = F.udf(lambda each: (__import__("time").sleep(0 if each % ROWS else pause_s)) or each, "long")
        return timed(stream(spark, folder / "impressions", files_per_batch=1)).withColumn("id", late("id"))

    @pipeline.stage
    def seen(impressions: DataFrame) -> DataFrame:
        return impressions.where("value >= 0")

    @pipeline.stage
    def pairs(clicks: DataFrame, seen: DataFrame) -> DataFrame:
        ours = clicks.withWatermark("ts", "1 second").alias("c")
        theirs = seen.withWatermark("ts", "1 second").alias("i")
        same = F.expr("c.id = i.id AND i.ts BETWEEN c.ts - INTERVAL 10 SECONDS AND c.ts + INTERVAL 10 SECONDS")
        return ours.join(theirs, same).select("c.id", F.col("c.value").alias("clicked"))

    @pipeline.sink(tg.DeltaTable(lake))
    def table(pairs: DataFrame) -> DataFrame:
        return pairs

    return pipeline


class Looking:
    """A view that notes the largest state of all queries, what was held, and the checkpoints that ended meanwhile."""

    def __init__(self, spark: SparkSession) -> None:
        self.most_rows = 0
        self.held: list[HeldInput] = []
        self.completed: set[str] = set()
        self.in_time = at_most(120)
        self._state = spark._jsparkSession.sharedState().activeStreamingQueries()

    def __call__(self, status: RunStatus) -> None:
        self.in_time(status)
        for query in list(self._state.values()):
            progress = None if query is None else query.lastProgress()  # it may just have ended
            for each in [] if progress is None else progress.stateOperators():
                self.most_rows = max(self.most_rows, each.numRowsTotal())
        if "pairs" in status.stages:
            self.held += status.stages["pairs"].held
        if self.held:
            self.completed |= {each.checkpoint for each in status.checkpoints if each.state == "complete"}


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    write_input(tmp_path / "clicks", FILES, ROWS)
    write_input(tmp_path / "impressions", FILES, ROWS)
    return tmp_path


def check_table(inputs: Path, lake: Path, spark: SparkSession) -> None:
    expected = oracle(joined(inputs, lake, pause_s=0), spark)["table"]
    assert expected.total() == FILES * ROWS
    assert table_rows(lake, COLUMNS) == expected


@pytest.mark.soak  # the next ones and the simulator show it faster
@pytest.mark.parametrize("chain", [True, False])
def test_a_fast_source_does_not_fill_the_state_of_a_join(inputs: Path, spark: SparkSession, chain: bool) -> None:
    seen: dict[str, Looking] = {}
    for name, options in {"free": {}, "held": {"max_watermark_drift": "3m"}}.items():
        seen[name] = Looking(spark)
        pipeline = joined(inputs, inputs / name)
        run_to_end(pipeline, inputs / f"root-{name}", spark, view=seen[name], chain=chain, **TIMES, **options)
        check_table(inputs, inputs / name, spark)
    assert not seen["free"].held
    held = seen["held"].held
    assert {each.input for each in held} == {"clicks"}
    assert {each.ahead_of for each in held} == {"seen"}
    assert all(each.by_ms is None or each.by_ms > 3 * MINUTE_MS for each in held)
    assert seen["held"].completed, "checkpoints complete while it is held"
    most_rows = {name: each.most_rows for name, each in seen.items()}
    # About 600 and 1,500 on a quiet machine. Each checkpoint lets through what is held, so a slow one has more of it.
    assert most_rows["held"] < most_rows["free"], most_rows


@pytest.mark.soak  # drains and drift are each shown by others
def test_a_drain_consumes_what_is_held_for_an_input_that_is_silent(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "clicks", FILES, ROWS)
    write_input(tmp_path / "impressions", 1, ROWS)
    root, pipeline, looking = tmp_path / "root", joined(tmp_path, tmp_path / "lake"), Looking(spark)
    held_back: set[str | None] = set()
    asked = Folder(root)

    def drain_when_held(status: RunStatus) -> None:
        looking(status)
        if looking.held and "clicks" in status.stages:
            held_back.add(status.stages["clicks"].held_back_by)
        if "pairs" in held_back and not asked.exists(ASKED):
            assert status.stages["pairs"].lag
            asked.write(ASKED, msgspec.json.encode(StopRun(drain=True)))

    # No checkpoint that would let anything through.
    options: dict[str, Any] = {"checkpoint_interval": "1h", "max_watermark_drift": "3m"}
    run_pipeline(pipeline, root, spark, view=drain_when_held, **options)
    inspected = InspectedRoot(root)
    last = inspected.manifest(inspected.newest())
    assert last.flags & Flag.DRAIN
    assert last.aligned
    read = last.stages["clicks"].output_sequence
    assert 4 <= read < FILES, "its source was paused"
    assert last.stages["pairs"].positions["clicks"] == read
    assert table_rows(tmp_path / "lake", COLUMNS).total() == ROWS
    # Whoever goes on from there reads the rest.
    write_input(tmp_path / "impressions", FILES - 1, ROWS, first_file=1)
    run_to_end(pipeline, root, spark, view=looking, max_watermark_drift="3m", **TIMES)
    check_table(tmp_path, tmp_path / "lake", spark)


@pytest.mark.soak  # it takes long; that it is held is in CI
def test_a_run_that_dies_while_an_input_is_held_goes_on_and_holds_it_again(inputs: Path, spark: SparkSession) -> None:
    pipeline = joined(inputs, inputs / "lake")
    options = {"max_watermark_drift": "3m", "unaligned_after": "0s", "checkpoint_interval": "500ms"}
    for _ in range(2):
        looking = Looking(spark)

        def crash(status: RunStatus, seen: Looking = looking) -> None:
            seen(status)
            if len(seen.completed) > 1:
                raise Crash

        with pytest.raises(Crash):
            run_to_end(pipeline, inputs / "root", spark, view=crash, **options)
        assert {each.input for each in looking.held} == {"clicks"}
    run_to_end(pipeline, inputs / "root", spark, view=at_most(120), **options)
    check_table(inputs, inputs / "lake", spark)


def test_a_drift_of_inputs_without_event_time_is_refused_before_anything_is_changed(
    inputs: Path, spark: SparkSession
) -> None:
    pipeline = joined(inputs, inputs / "lake", is_timed=False)
    with pytest.raises(InvalidConfig, match="max_watermark_drift is 3m, which has no effect: no stage has several inp"):
        run_to_end(pipeline, inputs / "root", spark, max_watermark_drift="3m")
    assert not (inputs / "lake").exists()
    assert not (inputs / "root" / "decisions").exists()
