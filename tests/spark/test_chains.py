"""Chains on real Spark: which stages are joined, and that nobody sees it in the tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import Crash, oracle, run_to_end, stream, table_rows, write_input
from tidegate.engine import fitting
from tidegate.engine.root import Root
from tidegate.engine.status import RunStatus
from tidegate.engine.tables import bound, check_shows_nothing
from tidegate.errors import RecoveryRefused, StageFailed
from tidegate.sinks.contract import SinkPlace
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import read_manifest
from tidegate.storage.manifest import Manifest

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def newest(root: Path) -> Manifest:
    files = Folder(root)
    record = StoredDecisions(files).read().newest
    assert record is not None
    return read_manifest(files, record)


# -- which are joined -------------------------------------------------------------------------------


def untouched(rows: DataFrame) -> DataFrame:
    return rows


def by_sql(rows: DataFrame, spark: SparkSession) -> DataFrame:
    rows.createOrReplaceTempView("rows_of_a_chain")
    return spark.sql("SELECT id, value + 1 AS value FROM rows_of_a_chain WHERE value > 3")


def with_a_table(rows: DataFrame, spark: SparkSession) -> DataFrame:
    names = spark.createDataFrame([("k1", "one"), ("k2", "two")], "key string, name string")
    return rows.join(names, "key", "left").select("id", "name")


def in_python(rows: DataFrame) -> DataFrame:
    def passed(batches: Any) -> Any:
        for batch in batches:
            yield pd.DataFrame({"id": batch["id"] * 2})

    return rows.mapInPandas(passed, "id long")


JOINED: dict[str, Callable[..., DataFrame]] = {
    "the same": untouched,
    "projections and filters": lambda rows: (
        rows.where("id > 2").select("id", F.col("value") * 2).withColumnRenamed("id", "x")
    ),
    "an explode": lambda rows: rows.select("id", F.explode(F.array("key", "key")).alias("key")),
    "SQL": by_sql,
    "a join with a table": with_a_table,
    "a function over pandas": in_python,
}
APART: dict[str, Callable[..., DataFrame]] = {
    "read twice": lambda rows: rows.union(rows),
    "a watermark": lambda rows: rows.withWatermark("ts", "1 second"),
    "state": lambda rows: rows.dropDuplicates(["id"]),
    "a limit": lambda rows: rows.limit(7),
}


def queries_of(spark: SparkSession, root: Path, pipeline: tg.Pipeline) -> list[tuple[str, ...]]:
    definitions = pipeline.validated()
    opened = Root(root, pipeline.name)
    sinks = {
        each.name: bound(
            each.sink, SinkPlace(pipeline.name, each.name, opened.store.at(f"sinks/{each.name}"), spark, opened.id)
        )
        for each in definitions
        if each.sink is not None
    }
    with fitting.SparkFitting(definitions, opened, spark, sinks, lambda _: False, lambda *_args: None) as fits:
        fits.build(1)
        return [tuple(member.name for member in each.members) for each in fits.queries]


@pytest.mark.parametrize("function", JOINED.values(), ids=JOINED)
def test_what_only_passes_rows_on_is_joined_to_its_input(
    function: Callable[..., DataFrame], tmp_path: Path, spark: SparkSession
) -> None:
    assert queries_of(spark, tmp_path / "root", line(tmp_path, function)) == [("rows", "middle", "table")]


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_what_remembers_or_reads_twice_has_a_query_of_its_own(
    function: Callable[..., DataFrame], tmp_path: Path, spark: SparkSession
) -> None:
    assert queries_of(spark, tmp_path / "root", line(tmp_path, function)) == [("rows",), ("middle", "table")]


def line(tmp_path: Path, function: Callable[..., DataFrame], sink: Any = None) -> tg.Pipeline:
    pipeline = tg.Pipeline("line")
    (tmp_path / "in").mkdir(exist_ok=True)

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    def middle(rows: DataFrame, spark: SparkSession) -> DataFrame:
        return function(rows, spark) if "spark" in function.__code__.co_varnames else function(rows)

    pipeline.stage(middle)

    @pipeline.sink(sink or tg.DeltaTable(tmp_path / "lake" / "table"))
    def table(middle: DataFrame) -> DataFrame:
        return middle

    return pipeline


def test_a_second_reader_another_mode_a_key_and_a_wish_keep_stages_apart(tmp_path: Path, spark: SparkSession) -> None:
    (tmp_path / "in").mkdir()
    pipeline = tg.Pipeline("apart")

    @pipeline.source(chain=False)
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.stage
    def read_twice(rows: DataFrame) -> DataFrame:
        return rows

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "first"))
    def first(read_twice: DataFrame) -> DataFrame:
        return read_twice

    @pipeline.stage(chain=False)
    def wished(read_twice: DataFrame) -> DataFrame:
        return read_twice

    @pipeline.stage
    def ordered(wished: DataFrame) -> DataFrame:
        return wished

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "newest", key="id"))
    def newest_rows(ordered: DataFrame) -> DataFrame:
        return ordered

    @pipeline.source
    def others(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.stage(output_mode="update")
    def counted(others: DataFrame) -> DataFrame:
        return others.groupBy("key").count()

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "counts", key="key"))
    def counts(counted: DataFrame) -> DataFrame:
        return counted

    found = queries_of(spark, tmp_path / "root", pipeline)
    assert all(len(each) == 1 for each in found), found


# -- what tables show ------------------------------------------------------------------------------


def mixed(tmp_path: Path, *, keeps: str, chain: bool = True) -> tg.Pipeline:
    """A source and two stages that pass rows on, then windows, and a table of them that takes some of the columns."""
    pipeline = tg.Pipeline("mixed")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.stage
    def doubled(rows: DataFrame) -> DataFrame:
        return rows.withColumn("value", F.col("value") * 2)

    @pipeline.stage(chain=chain)
    def told(doubled: DataFrame) -> DataFrame:
        odd = F.struct(F.col("key"), F.array("value").alias("values"), F.lit(1.5).cast("decimal(9,3)").alias("d"))
        return doubled.withColumn("odd", odd).withColumn("pairs", F.create_map("key", "ts"))

    @pipeline.stage
    def windows(told: DataFrame) -> DataFrame:
        groups = told.withWatermark("ts", "20 seconds").groupBy(F.window("ts", "30 seconds"), "key")
        return groups.agg(F.sum("value").alias("value"), F.count("*").alias("count"), F.max("id").alias("last"))

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "totals"))
    def totals(windows: DataFrame) -> DataFrame:
        return windows.where(keeps).select(F.col("window.start").alias("at"), "key", "count")

    return pipeline


CHAINED = {"told": ("rows", "doubled"), "totals": ("windows",)}


@pytest.mark.soak
def test_a_pipeline_that_is_chained_and_apart_by_turns_shows_what_a_batch_job_does(
    tmp_path: Path, spark: SparkSession
) -> None:
    pipeline = mixed(tmp_path, keeps="key <> 'k1'")
    settings: list[tuple[bool, tg.Pipeline, dict[str, tuple[str, ...]]]] = [
        (True, pipeline, CHAINED),
        (False, pipeline, {}),
        (True, pipeline, CHAINED),
        (True, mixed(tmp_path, keeps="key <> 'k1'", chain=False), {"doubled": ("rows",), "totals": ("windows",)}),
        (False, pipeline, {}),
    ]
    for number, (chain, running, chains) in enumerate(settings):
        write_input(tmp_path / "in", 5, 30, first_file=5 * number)
        run_to_end(running, tmp_path / "root", spark, chain=chain)
        assert newest(tmp_path / "root").chains == chains
    write_input(tmp_path / "in", 1, 30, first_file=500)  # closes all windows
    run_to_end(pipeline, tmp_path / "root", spark)
    expected = Counter(
        {
            row: count for row, count in oracle(pipeline, spark)["totals"].items() if row[0].hour < 4
        }  # windows that are closed
    )
    assert table_rows(tmp_path / "lake" / "totals", ["at", "key", "count"]) == expected


def test_what_a_chain_leaves_out_is_in_the_state_of_its_first_stage_all_the_same(
    tmp_path: Path, spark: SparkSession
) -> None:
    """The filter of the sink is on a key of the windows: if it were taken before them, they would lack rows as soon as
    the sink wants them, and it is apart."""
    write_input(tmp_path / "in", 2, 25)
    run_to_end(mixed(tmp_path, keeps="key <> 'k1'"), tmp_path / "root", spark)
    assert newest(tmp_path / "root").chains == CHAINED
    write_input(tmp_path / "in", 1, 25, first_file=500)
    both = mixed(tmp_path, keeps="true")
    run_to_end(both, tmp_path / "root", spark, chain=False)
    shown = table_rows(tmp_path / "lake" / "totals", ["at", "key", "count"])
    # What was closed in the first run is without k1; what was open then is whole.
    expected = {row: count for row, count in oracle(both, spark)["totals"].items() if row[0].hour == 0}
    assert Counter(expected) - shown == Counter()
    assert any(row[1] == "k1" for row in shown)


def test_stages_with_something_between_them_stay_apart_until_nothing_is(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = mixed(tmp_path, keeps="true")
    write_input(tmp_path / "in", 3, 30)
    run_to_end(pipeline, tmp_path / "root", spark, chain=False)
    asked: list[Any] = []

    def cannot_join(_base: Manifest, chains: Any) -> frozenset[str]:
        asked.append(chains)
        return frozenset({"told"}) & {each for name, before in chains.items() for each in (*before, name)}

    with monkeypatch.context() as patched:
        patched.setattr(fitting, "cannot_join", cannot_join)
        write_input(tmp_path / "in", 3, 30, first_file=3)
        run_to_end(pipeline, tmp_path / "root", spark)
    assert newest(tmp_path / "root").chains == {"doubled": ("rows",), "totals": ("windows",)}
    assert len(asked) == 2, "once they were joined and were not to be, then as they were to be"
    write_input(tmp_path / "in", 1, 30, first_file=500)
    run_to_end(pipeline, tmp_path / "root", spark)
    assert newest(tmp_path / "root").chains == CHAINED
    expected = {row: count for row, count in oracle(pipeline, spark)["totals"].items() if row[0].hour < 4}
    assert table_rows(tmp_path / "lake" / "totals", ["at", "key", "count"]) == Counter(expected)


# -- what is added later ----------------------------------------------------------------------------


def growing(tmp_path: Path, *, readers: int) -> tg.Pipeline:
    """A line that is one query, until something else reads from the middle of it."""
    pipeline = tg.Pipeline("growing")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.stage
    def doubled(rows: DataFrame) -> DataFrame:
        return rows.withColumn("value", F.col("value") * 2)

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "all"))
    def all_rows(doubled: DataFrame) -> DataFrame:
        return doubled.select("id", "value")

    if readers > 1:

        @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "odd"))
        def odd_rows(doubled: DataFrame) -> DataFrame:
            return doubled.where("id % 2 = 1").select("id")

    if readers > 2:

        @pipeline.stage
        def counted(doubled: DataFrame) -> DataFrame:
            return doubled.withWatermark("ts", "1 second").groupBy(F.window("ts", "10 seconds")).count()

        @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "counts"))
        def counts(counted: DataFrame) -> DataFrame:
            return counted.select(F.col("window.start").alias("at"), "count")

    return pipeline


def never(_status: RunStatus) -> bool:
    return False


def as_soon_as_it_runs(status: RunStatus) -> bool:
    return bool(status.stages)


def behind_its_first_checkpoint(status: RunStatus) -> bool:
    return any(each.state == "complete" and each.generation == status.generation for each in status.checkpoints)


@pytest.mark.parametrize(
    "is_time", [pytest.param(never, marks=pytest.mark.soak), as_soon_as_it_runs, behind_its_first_checkpoint]
)
def test_a_second_reader_that_is_added_parts_a_chain_and_gets_what_comes_from_then_on(
    is_time: Callable[[RunStatus], bool], tmp_path: Path, spark: SparkSession
) -> None:
    root = tmp_path / "root"
    write_input(tmp_path / "in", 4, 10)
    run_to_end(growing(tmp_path, readers=1), root, spark)
    assert newest(root).chains == {"all_rows": ("rows", "doubled")}
    write_input(tmp_path / "in", 4, 10, first_file=4)
    grown = growing(tmp_path, readers=3)
    told: list[str] = []

    def crash(status: RunStatus) -> None:
        told.extend(status.changes)
        if is_time(status):
            raise Crash

    with suppress(Crash):
        run_to_end(grown, root, spark, view=crash)
    assert any("sink 'odd_rows' is new since" in each for each in told)
    run_to_end(grown, root, spark)
    assert newest(root).chains == {"doubled": ("rows",), "counts": ("counted",)}
    write_input(tmp_path / "in", 2, 10, first_file=8)
    run_to_end(grown, root, spark)
    assert table_rows(tmp_path / "lake" / "all", ["id", "value"]) == Counter((n, 2 * n) for n in range(100))
    assert table_rows(tmp_path / "lake" / "odd", ["id"]) == Counter((n,) for n in range(41, 100, 2))
    counted = table_rows(tmp_path / "lake" / "counts", ["at", "count"])
    assert sum(count * times for (_, count), times in counted.items()) in range(50, 60), "windows that are closed"


def test_a_sink_that_comes_back_is_not_taken_for_the_one_that_its_table_has_a_record_of(
    tmp_path: Path, spark: SparkSession
) -> None:
    write_input(tmp_path / "in", 2, 10)
    first = tmp_path / "first"
    run_to_end(growing(tmp_path, readers=2), first, spark)
    assert table_rows(tmp_path / "lake" / "odd", ["id"]) == Counter((n,) for n in range(1, 20, 2))
    base = newest(first)
    without = msgspec.structs.replace(
        base, stages={name: base.stages[name] for name in base.stages if name != "odd_rows"}
    )
    files = Folder(first)
    sink = bound(
        tg.DeltaTable(tmp_path / "lake" / "odd"),
        SinkPlace("growing", "odd_rows", files.at("sinks/odd_rows"), spark, Root(first, "growing").id),
    )
    with pytest.raises(RecoveryRefused, match=r"sink 'odd_rows' is new since .* shows it up to batch .* another name"):
        check_shows_nothing(sink, without)


# -- whose fault it is -----------------------------------------------------------------------------


def test_of_a_chain_that_fails_the_stage_is_named_whose_function_it_was(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "in", 1, 5)

    def divides(rows: DataFrame) -> DataFrame:
        return rows.withColumn("value", F.col("value") / (F.col("id") - 3))

    def fails(rows: DataFrame) -> DataFrame:
        failing = F.udf(lambda number: number // (number - number), "long")
        return rows.withColumn("value", failing("value"))

    for function, why in ((fails, "ZeroDivisionError"), (divides, "DIVIDE_BY_ZERO")):
        pipeline = tg.Pipeline("failing")

        @pipeline.source
        def rows(spark: SparkSession) -> DataFrame:
            return stream(spark, tmp_path / "in")

        middle = function
        middle.__name__ = "middle"
        pipeline.stage(middle)

        @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / why))
        def table(middle: DataFrame) -> DataFrame:
            return middle.select("id", "value")

        with pytest.raises(StageFailed, match=why) as failed:
            run_to_end(pipeline, tmp_path / f"root-{why}", spark)
        assert failed.value.stage == "middle", str(failed.value)


def test_a_run_says_which_stages_run_in_one_query(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "in", 2, 5)
    seen: list[Any] = []
    run_to_end(line(tmp_path, untouched), tmp_path / "root", spark, view=seen.append)
    stages = seen[-1].stages
    assert {name: each.chained_into for name, each in stages.items()} == {
        "rows": "table",
        "middle": "table",
        "table": None,
    }
    assert stages["table"].rows == 10
    assert json.loads((tmp_path / "root" / "status.json").read_text())["stages"]["rows"]["chained_into"] == "table"
