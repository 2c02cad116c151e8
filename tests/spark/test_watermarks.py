"""What a watermark has closed is written out, also when a checkpoint was cut just before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

import tidegate as tg
from tests.spark.harness import Crash, as_rows, at_most, run_to_end, stream, table_rows, write_input
from tidegate.engine.status import RunStatus
from tidegate.storage.inspection import InspectedRoot

pytestmark = [pytest.mark.matrix, pytest.mark.spark, pytest.mark.slow]


def windowed(folder: Path) -> tg.Pipeline:
    pipeline = tg.Pipeline("windowed")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder.parent / "in", files_per_batch=100)

    @pipeline.stage
    def slow(rows: DataFrame) -> DataFrame:
        """Its batch takes long enough for a barrier to wait behind it, and leaves the watermark to move."""
        waited = F.udf(lambda value: __import__("time").sleep(0.01) or value, "long")
        late = rows.select("ts", waited("value").alias("value")).withWatermark("ts", "10 seconds")
        return late.groupBy(F.window("ts", "10 seconds")).agg(F.sum("value").alias("value"))

    @pipeline.sink(tg.DeltaTable(folder / "lake"))
    def table(slow: DataFrame) -> DataFrame:
        return slow.select("window.start", "value")

    return pipeline


def test_what_the_watermark_closed_before_a_crash_is_written_out_after_it(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "in", 3, 40)
    run_to_end(windowed(tmp_path / "undisturbed"), tmp_path / "undisturbed" / "root", spark)
    expected = table_rows(tmp_path / "undisturbed" / "lake", ["start", "value"])
    assert expected.total() > 5

    root = tmp_path / "crashed" / "root"

    def crash_behind_the_first_batch(_status: RunStatus) -> None:
        retained = InspectedRoot(root).retained() if (root / "pipeline.json").exists() else []
        if retained and (manifest := InspectedRoot(root).manifest(retained[-1])).stages["slow"].cut == 0:
            assert manifest.min_watermark_ms is None, "the stage with event time has none yet"
            raise Crash

    pipeline = windowed(tmp_path / "crashed")
    with pytest.raises(Crash):
        run_to_end(pipeline, root, spark, checkpoint_interval="100ms", view=crash_behind_the_first_batch)
    assert not as_rows(table_rows(tmp_path / "crashed" / "lake", ["start", "value"]))
    run_to_end(pipeline, root, spark)
    assert table_rows(tmp_path / "crashed" / "lake", ["start", "value"]) == expected
    inspected = InspectedRoot(root)
    last = inspected.manifest(inspected.retained()[-1])
    assert {name: shape.has_event_time for name, shape in last.shape.items()} == {
        "rows": False,
        "slow": True,
        "table": True,  # which runs in the query of it
    }
    # The last row is of 119 s, and late ones may be so by 10 s.
    assert last.min_watermark_ms == last.stages["slow"].watermark_ms == 1_767_225_600_000 + 109_000


def test_a_stage_whose_first_input_has_delivered_nothing_is_restored_and_writes_out_what_was_closed(
    tmp_path: Path, spark: SparkSession
) -> None:
    """The nudge that makes Spark run the batch without data stands at the start of an input, before any segment."""
    pipeline = tg.Pipeline("late")

    @pipeline.source
    def silent(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "silent")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in", files_per_batch=100)

    @pipeline.stage
    def windows(silent: DataFrame, rows: DataFrame) -> DataFrame:
        waited = F.udf(lambda value: __import__("time").sleep(0.01) or value, "long")
        late = silent.union(rows).select("ts", waited("value").alias("value")).withWatermark("ts", "10 seconds")
        return late.groupBy(F.window("ts", "10 seconds")).agg(F.sum("value").alias("value"))

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake"))
    def table(windows: DataFrame) -> DataFrame:
        return windows.select("window.start", "value")

    root = tmp_path / "root"

    def crash_behind_the_first_batch(_status: RunStatus) -> None:
        retained = InspectedRoot(root).retained() if (root / "pipeline.json").exists() else []
        if retained and (stage := InspectedRoot(root).manifest(retained[-1]).stages["windows"]).cut == 0:
            assert stage.positions == {"silent": 0, "rows": 1}
            raise Crash

    (tmp_path / "silent").mkdir()
    write_input(tmp_path / "in", 3, 40)
    with pytest.raises(Crash):
        run_to_end(pipeline, root, spark, checkpoint_interval="100ms", view=crash_behind_the_first_batch)
    assert not table_rows(tmp_path / "lake", ["start"])
    run_to_end(pipeline, root, spark, view=at_most(120))
    # The last row is of 119 s, so the watermark closes all windows up to 100 s.
    values = [sum(range(start, start + 10)) for start in range(0, 100, 10)]
    assert table_rows(tmp_path / "lake", ["value"]) == Counter((value,) for value in values)


def test_a_run_ends_when_all_is_consumed_though_timers_never_rest(tmp_path: Path, spark: SparkSession) -> None:
    """With timers in processing time a query runs batch after batch: it never waits for data."""
    pipeline = tg.Pipeline("timed")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.stage(output_mode="update")
    def counted(rows: DataFrame) -> DataFrame:
        def count(key: tuple[str], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
            rows = sum(len(frame) for frame in frames)
            state.update((rows + (state.get[0] if state.exists else 0),))
            state.setTimeoutDuration(3_600_000)
            yield pd.DataFrame({"key": [key[0]], "n": [state.get[0]]})

        return rows.groupBy("key").applyInPandasWithState(
            count, "key string, n long", "n long", "update", GroupStateTimeout.ProcessingTimeTimeout
        )

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake", key="key"), output_mode="update")
    def table(counted: DataFrame) -> DataFrame:
        return counted

    write_input(tmp_path / "in", 1, 20)
    run_to_end(pipeline, tmp_path / "root", spark, view=at_most(120))
    assert table_rows(tmp_path / "lake", ["key", "n"]) == Counter({(f"k{key}", 4): 1 for key in range(5)})
