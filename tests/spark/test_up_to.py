"""A run up to where another root stands: it reads exactly what that has read, whatever else there is."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.cli.harness import TIDEGATE
from tests.spark.harness import Crash, at_most, run_to_end, stream, table_rows, write_input, write_rows
from tidegate.engine.status import RunStatus
from tidegate.engine.up_to import source_positions
from tidegate.errors import InvalidConfig, NoRoot, PipelineChanged, RecoveryRefused, UnknownCheckpoint
from tidegate.protocol.names import checkpoint_name
from tidegate.spark.positions import Order, compared
from tidegate.storage.inspection import InspectedRoot

pytestmark = [pytest.mark.spark, pytest.mark.slow]

Rows = Counter[tuple[Any, ...]]


def two_sources(folder: Path, name: str) -> tg.Pipeline:
    """Rows that are summed up by window, and logged together with those of another source. Those of one source come in
    the order of their times, so none is late, whatever a batch holds."""
    pipeline = tg.Pipeline("summed")

    @pipeline.source
    def left(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "left")

    @pipeline.source
    def right(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "right")

    @pipeline.stage
    def both(left: DataFrame, right: DataFrame) -> DataFrame:
        return left.unionByName(right)

    @pipeline.sink(tg.DeltaTable(folder / name / "log"))
    def log(both: DataFrame) -> DataFrame:
        return both

    @pipeline.sink(tg.DeltaTable(folder / name / "sums"))
    def sums(left: DataFrame) -> DataFrame:
        by = left.withWatermark("ts", "10 seconds").groupBy(F.window("ts", "20 seconds"), "key")
        return by.agg(F.sum("value").alias("value")).select("window.start", "key", "value")

    return pipeline


def logged(folder: Path, name: str) -> Rows:
    return table_rows(folder / name / "log", ["id", "key"])


def sums(folder: Path, name: str) -> Rows:
    return table_rows(folder / name / "sums", ["start", "key", "value"])


def up_to(folder: Path, spark: SparkSession, *, target: str = "a", name: str = "b", **options: Any) -> None:
    pipeline = options.pop("pipeline", None) or two_sources(folder, name)
    settings = {"available_now": False, "up_to": str(folder / f"root-{target}"), "view": at_most(120), **options}
    run_to_end(pipeline, folder / f"root-{name}", spark, **settings)


def run(folder: Path, spark: SparkSession, name: str = "a", **options: Any) -> None:
    run_to_end(two_sources(folder, name), folder / f"root-{name}", spark, view=at_most(120), **options)


def are_at_one_position(folder: Path, one: str = "a", other: str = "b") -> bool:
    found = []
    for name in (one, other):
        root = InspectedRoot(folder / f"root-{name}")
        found.append(source_positions(root, root.manifest(root.newest())))
    assert found[0].keys() == found[1].keys()
    return all(compared(position, found[1][name]) is Order.SAME for name, position in found[0].items())


def having_read(folder: Path, name: str, files: int) -> int:
    """A checkpoint at which so many files of the left source were read."""
    root = InspectedRoot(folder / f"root-{name}")
    for record in root.retained():
        (position,) = source_positions(root, root.manifest(record))["left"]
        if len(position.files or ()) == files:
            return record.checkpoint_id
    raise AssertionError("no checkpoint was taken there")


def newest(folder: Path, name: str) -> int:
    return InspectedRoot(folder / f"root-{name}").newest().checkpoint_id


def test_a_run_reads_exactly_what_the_other_has_read_and_goes_on_from_there_as_ever(
    tmp_path: Path, spark: SparkSession
) -> None:
    write_input(tmp_path / "left", 6, 10)
    write_rows(tmp_path / "right", 0, range(1000, 1010))
    run(tmp_path, spark)
    write_input(tmp_path / "left", 3, 10, first_file=6)  # what comes later is there as well, and is not read
    write_rows(tmp_path / "right", 1, range(1010, 1020))
    shown = logged(tmp_path, "a"), sums(tmp_path, "a")

    up_to(tmp_path, spark)  # from the beginning
    assert (
        logged(tmp_path, "b")
        == shown[0]
        == Counter((each, f"k{each % 5}") for each in (*range(60), *range(1000, 1010)))
    )
    assert sums(tmp_path, "b") == shown[1]
    assert are_at_one_position(tmp_path)

    up_to(tmp_path, spark)  # it stands there: nothing is read, nothing shown twice
    assert logged(tmp_path, "b") == shown[0]
    assert are_at_one_position(tmp_path)

    run(tmp_path, spark, retain=20)
    write_input(tmp_path / "left", 2, 10, first_file=9)
    up_to(tmp_path, spark)  # with state and a position of its own
    assert logged(tmp_path, "b") == logged(tmp_path, "a")
    assert logged(tmp_path, "b").total() == 90 + 20
    assert sums(tmp_path, "b") == sums(tmp_path, "a")
    assert are_at_one_position(tmp_path)
    with pytest.raises(
        RecoveryRefused, match=r"source 'left' cannot come to .*ckpt-.*it has read more \(here: 9 files"
    ):
        up_to(tmp_path, spark, up_to=f"{tmp_path / 'root-a'}@{having_read(tmp_path, 'a', 6)}")

    run(tmp_path, spark, "b")  # and then whatever there is
    assert logged(tmp_path, "b").total() == 110 + 20
    with pytest.raises(RecoveryRefused, match="it has read more"):
        up_to(tmp_path, spark)


@pytest.mark.soak
def test_one_source_stands_there_already_and_the_log_of_the_other_is_compacted(
    tmp_path: Path, spark: SparkSession
) -> None:
    write_input(tmp_path / "left", 17, 2)  # two files a batch: entries 0 to 8, the next one holds all
    write_rows(tmp_path / "right", 0, range(1000, 1010))
    run(tmp_path, spark, "b")
    write_input(tmp_path / "left", 3, 2, first_file=17)
    run(tmp_path, spark)
    write_input(tmp_path / "left", 2, 2, first_file=20)
    write_rows(tmp_path / "right", 1, range(1010, 1020))
    up_to(tmp_path, spark)
    assert logged(tmp_path, "b") == logged(tmp_path, "a")
    assert logged(tmp_path, "b").total() == 40 + 10
    assert are_at_one_position(tmp_path)
    assert any((tmp_path / "root-b").rglob("sources/0/9.compact"))
    for name in "ab":
        run(tmp_path, spark, name)
        assert logged(tmp_path, name).total() == 44 + 20


@pytest.mark.parametrize("when", [pytest.param("at its start", marks=pytest.mark.soak), "behind a checkpoint"])
def test_a_run_that_is_killed_comes_to_the_same_when_it_is_started_again(
    tmp_path: Path, spark: SparkSession, when: str
) -> None:
    write_input(tmp_path / "left", 8, 10)
    write_rows(tmp_path / "right", 0, range(1000, 1010))
    run(tmp_path, spark)
    write_input(tmp_path / "left", 4, 10, first_file=8)
    in_time = at_most(60)

    def crash(status: RunStatus) -> None:
        in_time(status)
        has_checkpoint = any(each.state == "complete" for each in status.checkpoints)
        if when == "at its start" or has_checkpoint:
            raise Crash

    with pytest.raises(Crash):
        up_to(tmp_path, spark, checkpoint_interval="10ms", view=crash)
    up_to(tmp_path, spark)
    assert logged(tmp_path, "b") == logged(tmp_path, "a")
    assert sums(tmp_path, "b") == sums(tmp_path, "a")
    assert are_at_one_position(tmp_path)


def of_one(read: Callable[[SparkSession], DataFrame], table: Path) -> tg.Pipeline:
    pipeline = tg.Pipeline("one")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return read(spark)

    @pipeline.sink(tg.DeltaTable(table))
    def kept(rows: DataFrame) -> DataFrame:
        return rows

    return pipeline


def test_several_streams_in_one_source(tmp_path: Path, spark: SparkSession) -> None:
    def read(spark: SparkSession) -> DataFrame:
        left = stream(spark, tmp_path / "left")
        return left.union(left).union(stream(spark, tmp_path / "right", 1)).select("id")

    write_input(tmp_path / "left", 1, 5)
    (tmp_path / "right").mkdir()
    for name in "ab":
        run_to_end(of_one(read, tmp_path / name), tmp_path / f"root-{name}", spark, view=at_most(60))
    write_input(tmp_path / "left", 3, 5, first_file=1)
    write_input(tmp_path / "right", 3, 5)
    run_to_end(of_one(read, tmp_path / "a"), tmp_path / "root-a", spark, view=at_most(60))
    write_input(tmp_path / "left", 1, 5, first_file=4)
    write_input(tmp_path / "right", 1, 5, first_file=3)
    up_to(tmp_path, spark, pipeline=of_one(read, tmp_path / "b"))
    assert table_rows(tmp_path / "b", ["id"]) == table_rows(tmp_path / "a", ["id"])
    assert table_rows(tmp_path / "b", ["id"]).total() == 2 * 20 + 15
    assert are_at_one_position(tmp_path)


def test_a_source_that_keeps_state_writes_out_what_its_watermark_has_closed(
    tmp_path: Path, spark: SparkSession
) -> None:
    def read(spark: SparkSession) -> DataFrame:
        rows = stream(spark, tmp_path / "left", 100).withWatermark("ts", "1 second")
        return rows.groupBy(F.window("ts", "10 seconds")).agg(F.count("*").alias("n")).select("window.start", "n")

    write_input(tmp_path / "left", 4, 10)
    run_to_end(of_one(read, tmp_path / "a"), tmp_path / "root-a", spark, view=at_most(60))
    write_input(tmp_path / "left", 4, 10, first_file=4)
    up_to(tmp_path, spark, pipeline=of_one(read, tmp_path / "b"))
    assert table_rows(tmp_path / "b", ["start", "n"]) == table_rows(tmp_path / "a", ["start", "n"])
    assert table_rows(tmp_path / "b", ["start", "n"]).total() == 3
    assert are_at_one_position(tmp_path)


def test_a_source_of_another_kind_begins_where_the_other_began(tmp_path: Path, spark: SparkSession) -> None:
    def read(spark: SparkSession) -> DataFrame:
        return spark.readStream.format("rate").option("rowsPerSecond", "20").load()

    pipeline = of_one(read, tmp_path / "a")

    def enough(table: Path) -> Callable[[RunStatus], None]:
        in_time = at_most(120)

        def look(status: RunStatus) -> None:
            in_time(status)
            # Rows are shown, and nothing is decided that the table does not show yet: it is read at the newest.
            is_settled = not status.in_progress and all(each.state == "complete" for each in status.checkpoints)
            if is_settled and len(status.checkpoints) > 2 and as_set(table):
                raise Crash

        return look

    with pytest.raises(Crash):
        run_to_end(
            pipeline,
            tmp_path / "root-a",
            spark,
            available_now=False,
            checkpoint_interval="700ms",
            view=enough(tmp_path / "a"),
        )
    up_to(tmp_path, spark, pipeline=of_one(read, tmp_path / "b"))
    tables = tg.read(tmp_path / "root-a", newest(tmp_path, "a"))
    assert as_set(tmp_path / "b") == {tuple(each.items()) for each in tables["kept"].to_arrow().to_pylist()}
    assert as_set(tmp_path / "b")
    assert are_at_one_position(tmp_path)
    with pytest.raises(Crash):  # it begins now
        run_to_end(
            of_one(read, tmp_path / "c"),
            tmp_path / "root-c",
            spark,
            available_now=False,
            checkpoint_interval="700ms",
            view=enough(tmp_path / "c"),
        )
    with pytest.raises(RecoveryRefused, match="has read something that the other has not, or began elsewhere"):
        up_to(tmp_path, spark, name="c", pipeline=of_one(read, tmp_path / "c"))


def as_set(table: Path) -> set[tuple[Any, ...]]:
    return {tuple(each.items()) for each in deltalake.DeltaTable(table).to_pyarrow_table().to_pylist()}


def test_what_cannot_be_reached_is_refused_before_anything_is_changed(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "left", 2, 10)
    write_input(tmp_path / "right", 2, 10)
    run(tmp_path, spark)
    with pytest.raises(NoRoot):
        up_to(tmp_path, spark, target="nowhere")
    with pytest.raises(UnknownCheckpoint, match="retains no ckpt-000099"):
        up_to(tmp_path, spark, up_to=f"{tmp_path / 'root-a'}@99")
    with pytest.raises(InvalidConfig, match="the root of this very run"):
        up_to(tmp_path, spark, name="a")
    with pytest.raises(PipelineChanged, match=f"{checkpoint_name(newest(tmp_path, 'a'))} of .* has no source 'rows'"):
        up_to(tmp_path, spark, pipeline=of_one(lambda spark: stream(spark, tmp_path / "left"), tmp_path / "b"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "left").symlink_to(tmp_path / "left")
    (tmp_path / "elsewhere" / "right").symlink_to(tmp_path / "right")
    with pytest.raises(PipelineChanged, match=r"source 'left' reads json \(path=.*elsewhere.*but at .* it reads json"):
        up_to(tmp_path, spark, pipeline=two_sources(tmp_path / "elsewhere", "b"))
    assert not (tmp_path / "root-b").exists()
    assert not (tmp_path / "b").exists()


def test_a_reader_that_is_slow_does_not_make_a_source_read_more(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "left", 6, 50)
    write_input(tmp_path / "right", 6, 50)
    run(tmp_path, spark)
    write_input(tmp_path / "left", 6, 50, first_file=6)
    up_to(tmp_path, spark, max_backlog_segments=1, chain=False)
    assert logged(tmp_path, "b") == logged(tmp_path, "a")
    assert are_at_one_position(tmp_path)


KILLED = """
from pathlib import Path
from tests.spark.test_up_to import two_sources

pipeline = two_sources(Path({folder!r}), "b")
"""


@pytest.mark.soak
def test_processes_that_are_killed_at_any_step_come_to_the_same(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "left", 8, 10)
    write_input(tmp_path / "right", 3, 10)
    run(tmp_path, spark)
    write_input(tmp_path / "left", 4, 10, first_file=8)
    write_input(tmp_path / "right", 1, 10, first_file=3)
    file = tmp_path / "killed.py"
    file.write_text(KILLED.format(folder=str(tmp_path)), encoding="utf-8")
    command = [TIDEGATE, "run", str(file), "--root", "root-b", "--up-to", "root-a", "--checkpoint-interval", "200ms"]
    repository = str(Path(__file__).parents[2])
    for step in (
        "stage_restored:2",
        "queries_started",
        "stage_cut:3",
        "slot_claimed",
        "slot_claimed:2",
        "sink_committed:2",
        "all_sinks_committed",
        None,
    ):
        environment = {**os.environ, "PYTHONPATH": repository, **({} if step is None else {"TIDEGATE_KILL_AT": step})}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
    assert done.returncode == 0
    assert logged(tmp_path, "b") == logged(tmp_path, "a")
    assert sums(tmp_path, "b") == sums(tmp_path, "a")
    assert are_at_one_position(tmp_path)
