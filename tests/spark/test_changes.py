"""Changed pipelines on old checkpoints, on real Spark: with what is in flight, with crashes, and as they were told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pytest
from deltalake import Field
from deltalake.schema import PrimitiveType
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import Crash, oracle, run_to_end, stream, table_rows, write_input
from tests.spark.test_chains import newest
from tidegate.engine.preview import Preview, preview
from tidegate.engine.status import RunStatus
from tidegate.errors import PipelineChanged, RecoveryRefused, SinkFailed
from tidegate.protocol.recovery import StartFresh
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.storage.manifest import Manifest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = 8
"""Of a file that is a batch."""
UNALIGNED = tg.CheckpointConfig(alignment=tg.AlignmentConfig(unaligned="always"))


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


def slow(column: str) -> Any:
    """A column of work, so that segments pile up before it."""
    return F.length(F.sha2(F.repeat(F.col(column), 1_000_000), 512)).alias("digits")


def as_soon_as_it_runs(status: RunStatus) -> bool:
    return bool(status.stages)


def behind_its_first_checkpoint(status: RunStatus) -> bool:
    return any(each.state == "complete" and each.generation == status.generation for each in status.checkpoints)


def crashing(is_time: Callable[[RunStatus], bool], told: list[str] | None = None) -> Callable[[RunStatus], None]:
    def crash(status: RunStatus) -> None:
        if told is not None:
            told.extend(each for each in status.changes if each not in told)
        if is_time(status):
            raise Crash

    return crash


def run_until_in_flight(pipeline: tg.Pipeline, root: Path, spark: SparkSession, stage: str) -> Manifest:
    """Crash as soon as a checkpoint has something in flight to a stage."""
    found: list[Manifest] = []

    def is_time(status: RunStatus) -> bool:
        if any(each.state == "complete" for each in status.checkpoints):
            manifest = newest(root)
            if any(manifest.stages[stage].in_flight.values()):
                found.append(manifest)
        return bool(found)

    with pytest.raises(Crash):
        run_to_end(
            pipeline,
            root,
            spark,
            chain=False,
            checkpoint=UNALIGNED,
            checkpoint_interval="200ms",
            view=crashing(is_time),
        )
    return found[-1]


# -- other names --------------------------------------------------------------------------------------


def joined(folder: Path, names: dict[str, str]) -> tg.Pipeline:
    """A fast source, a slow join of it with itself, a table of that, and one more of the source."""
    pipeline = tg.Pipeline("joined")
    rows, pairs, table = (names.get(name, name) for name in ("rows", "pairs", "table"))

    def pair(rows: DataFrame) -> DataFrame:
        left = rows.withWatermark("ts", "1 day").alias("left")
        right = rows.withWatermark("ts", "1 day").alias("right")
        same = left.join(right, F.expr("left.id = right.id AND left.ts = right.ts"))
        return same.select("left.id", slow("left.key"))

    pipeline.source(named(rows, lambda spark: stream(spark, folder / "in", files_per_batch=1)))
    pipeline.stage(inputs=[rows])(named(pairs, pair))
    pipeline.sink(tg.DeltaTable(folder / "lake" / "pairs"), inputs=[pairs])(named(table, lambda frame: frame))

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "ids"), inputs=[rows])
    def ids(frame: DataFrame) -> DataFrame:
        return frame.select("id")

    return pipeline


@pytest.mark.soak  # it takes long; the played Spark shows it in CI
def test_stages_go_on_under_other_names_with_their_state_and_what_is_in_flight_whatever_crashes(
    tmp_path: Path, spark: SparkSession
) -> None:
    root = tmp_path / "root"
    write_input(tmp_path / "in", 8, ROWS)
    then = run_until_in_flight(joined(tmp_path, {}), root, spark, "pairs")
    assert "rows" in then.stages["pairs"].in_flight
    names = {"rows": "orders", "pairs": "twins"}
    pipeline = joined(tmp_path, names)
    with pytest.raises(PipelineChanged, match="--rename pairs=twins if that is its name now"):
        run_to_end(pipeline, root, spark, checkpoint=UNALIGNED)
    told: list[str] = []
    for is_time in (as_soon_as_it_runs, behind_its_first_checkpoint):
        with pytest.raises(Crash):
            run_to_end(
                pipeline,
                root,
                spark,
                rename=names,
                checkpoint=UNALIGNED,
                checkpoint_interval="200ms",
                view=crashing(is_time, told),
            )
    assert told == [
        f"source 'orders' goes on as what was 'rows' at ckpt-{then.checkpoint_id:06d}",
        f"stage 'twins' goes on as what was 'pairs' at ckpt-{then.checkpoint_id:06d}",
    ]
    write_input(tmp_path / "in", 2, ROWS, first_file=8)
    told.clear()
    run_to_end(pipeline, root, spark, rename=names, view=crashing(lambda _: False, told))
    assert [each.split(": ")[0] for each in told] == ["rename rows=orders is done", "rename pairs=twins is done"]
    expected = oracle(pipeline, spark)
    assert table_rows(tmp_path / "lake" / "pairs", ["id", "digits"]) == expected["table"]
    assert table_rows(tmp_path / "lake" / "ids", ["id"]) == expected["ids"]

    # A sink too, and back again, though its table keeps its record by its name.
    renamed = joined(tmp_path, {**names, "table": "shown"})
    write_input(tmp_path / "in", 1, ROWS, first_file=10)
    with pytest.raises(Crash):
        run_to_end(renamed, root, spark, rename={"table": "shown"}, view=crashing(as_soon_as_it_runs))
    run_to_end(renamed, root, spark, rename={"table": "shown"})
    write_input(tmp_path / "in", 1, ROWS, first_file=11)
    run_to_end(pipeline, root, spark, rename={"shown": "table"})
    expected = oracle(pipeline, spark)
    assert table_rows(tmp_path / "lake" / "pairs", ["id", "digits"]) == expected["table"]
    assert table_rows(tmp_path / "lake" / "ids", ["id"]) == expected["ids"]


# -- other columns ------------------------------------------------------------------------------------


def widened(folder: Path, *, is_new: bool) -> tg.Pipeline:
    pipeline = tg.Pipeline("widened")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        found = stream(spark, folder / "in", files_per_batch=1)
        return found.withColumn("twice", F.col("value") * 2) if is_new else found

    @pipeline.stage
    def worked(rows: DataFrame) -> DataFrame:
        return rows.select("id", slow("key"), *(["twice"] if is_new else []))

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "table"))
    def table(worked: DataFrame) -> DataFrame:
        return worked

    @pipeline.sink(tg.ForeachBatch(lambda rows, _: rows.select("id").count()))
    def called(worked: DataFrame) -> DataFrame:
        return worked

    return pipeline


def test_a_new_column_is_null_in_what_is_in_flight_and_in_the_table_when_its_owner_has_added_it(
    tmp_path: Path, spark: SparkSession
) -> None:
    root, table = tmp_path / "root", tmp_path / "lake" / "table"
    write_input(tmp_path / "in", 8, ROWS)
    then = run_until_in_flight(widened(tmp_path, is_new=False), root, spark, "worked")
    read = ROWS * then.stages["rows"].output_sequence  # a file a batch, and a segment of each
    grown = widened(tmp_path, is_new=True)
    versions = deltalake.DeltaTable(table).version()
    with pytest.raises(SinkFailed, match=r"add twice long to the table yourself \(in SQL: ALTER TABLE delta.`.*` ADD"):
        run_to_end(grown, root, spark, chain=False)
    assert deltalake.DeltaTable(table).version() == versions
    deltalake.DeltaTable(table).alter.add_columns([Field("twice", PrimitiveType("long"))])
    told: list[str] = []
    for is_time in (as_soon_as_it_runs, behind_its_first_checkpoint):
        with pytest.raises(Crash):
            run_to_end(
                grown,
                root,
                spark,
                chain=False,
                checkpoint=UNALIGNED,
                checkpoint_interval="200ms",
                view=crashing(is_time, told),
            )
    assert [each.split(" since")[0] for each in told] == [
        f"{kind} has twice:bigint in addition"
        for kind in ("source 'rows'", "stage 'worked'", "sink 'table'", "sink 'called'")
    ]
    run_to_end(grown, root, spark)
    found = table_rows(table, ["id", "twice"])
    assert found == Counter((each, 2 * each if each >= read else None) for each in range(8 * ROWS))


# -- what is put between, and what goes ---------------------------------------------------------------


def line(folder: Path, *, is_new: bool) -> tg.Pipeline:
    """A line of stages and a second table, which the new version has not; but a stage more in the line."""
    pipeline = tg.Pipeline("line")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in")

    if is_new:

        @pipeline.stage
        def cleaned(rows: DataFrame) -> DataFrame:
            return rows.where("id % 10 <> 3")

    @pipeline.stage(inputs=["cleaned" if is_new else "rows"])
    def doubled(rows: DataFrame) -> DataFrame:
        return rows.withColumn("value", F.col("value") * 2)

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "all"))
    def all_rows(doubled: DataFrame) -> DataFrame:
        return doubled.select("id", "value")

    if not is_new:

        @pipeline.stage
        def unique(rows: DataFrame) -> DataFrame:
            return rows.dropDuplicates(["id"])

        @pipeline.sink(tg.DeltaTable(folder / "lake" / "odd"))
        def odd_rows(unique: DataFrame) -> DataFrame:
            return unique.where("id % 2 = 1").select("id")

    return pipeline


def listing(*folders: Path) -> dict[str, tuple[int, bytes]]:
    """All that lies there."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("chain", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_stage_put_between_and_a_table_taken_off_lose_and_double_nothing(
    chain: bool, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, lake, scratch = tmp_path / "root", tmp_path / "lake", tmp_path / "scratch"
    write_input(tmp_path / "in", 4, 10)
    old, new = line(tmp_path, is_new=False), line(tmp_path, is_new=True)

    def planned(pipeline: tg.Pipeline, **options: Any) -> Preview:
        before = listing(root, lake)
        found = preview(pipeline, root, scratch, spark, chain=chain, **options)
        assert listing(root, lake) == before, "nothing is changed"
        return found

    first = planned(old)
    assert isinstance(first.start, StartFresh)
    assert first.refused is None
    assert not root.exists()
    assert not lake.exists()
    run_to_end(old, root, spark, chain=chain)
    assert {each.change for each in planned(old).stages} == {"same"}
    write_input(tmp_path / "in", 2, 10, first_file=4)
    committing = BoundDeltaTable.commit

    def not_yet(sink: BoundDeltaTable, permit: Any, committable: Any) -> Any:
        if sink.place.stage == "odd_rows":
            raise SinkFailed("not yet")
        return committing(sink, permit, committable)

    view = crashing(lambda status: any(each.state == "committing" for each in status.checkpoints))
    with monkeypatch.context() as patched:
        patched.setattr(BoundDeltaTable, "commit", not_yet)
        with pytest.raises(Crash):
            run_to_end(old, root, spark, chain=chain, view=view)

    refused = planned(new).refused
    assert isinstance(refused, PipelineChanged)
    assert "stage 'unique' is gone, and ckpt-" in str(refused)
    refused = planned(new, allow_dropped_state=["unique"]).refused
    assert isinstance(refused, RecoveryRefused)
    assert "sink 'odd_rows' is gone since" in str(refused)
    with pytest.raises(RecoveryRefused, match=r"10 rows that were sealed for it Delta table .*odd does not show yet"):
        run_to_end(new, root, spark, chain=chain, allow_dropped_state=["unique"])
    run_to_end(old, root, spark, chain=chain)
    assert table_rows(lake / "odd", ["id"]) == Counter((each,) for each in range(1, 60, 2))

    write_input(tmp_path / "in", 3, 10, first_file=6)
    found = planned(new, allow_dropped_state=["unique"])
    assert found.refused is None
    assert {each.name: (each.change, each.has_state) for each in found.stages} == {
        "rows": ("same", False),
        "cleaned": ("new", False),
        "doubled": ("changed", False),
        "all_rows": ("same", False),
        "unique": ("removed", True),
        "odd_rows": ("removed", False),
    }
    assert {name: each.change for name, each in found.tables.items()} == {"all_rows": "same"}
    told: list[str] = []
    for is_time in (as_soon_as_it_runs, behind_its_first_checkpoint):
        with pytest.raises(Crash):
            run_to_end(
                new,
                root,
                spark,
                chain=chain,
                checkpoint_interval="200ms",
                allow_dropped_state=["unique"],
                view=crashing(is_time, told),
            )
    assert tuple(told) == found.told, "what was planned is what is done"
    write_input(tmp_path / "in", 1, 10, first_file=9)
    run_to_end(new, root, spark, chain=chain, allow_dropped_state=["unique"])
    assert newest(root).chains == found.chains
    kept = (each for each in range(100) if each < 60 or each % 10 != 3)
    assert table_rows(lake / "all", ["id", "value"]) == Counter((each, 2 * each) for each in kept)
    assert table_rows(lake / "odd", ["id"]) == Counter((each,) for each in range(1, 60, 2))
