"""Tables that are not what the pipeline goes on from: put back to an older state, or another root's."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import tidegate as tg
from tests.spark.harness import at_most, run_to_end, stream, table_rows, write_input
from tidegate.engine.run import run_pipeline
from tidegate.engine.status import RunStatus
from tidegate.errors import Fenced, ForeignTable, RecoveryRefused, TablePutBack
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.storage.inspection import InspectedRoot

pytestmark = [pytest.mark.spark, pytest.mark.slow]


class Crashing(tg.DeltaTable):
    """Its run ends between the decision and the commit."""

    def bind(self, place: SinkPlace) -> BoundDeltaTable:
        return BoundCrashing(self, place)


class BoundCrashing(BoundDeltaTable):
    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:  # noqa: ARG002
        raise Fenced("as if it were killed")


def copying(
    folder: Path, table_sink: tg.DeltaTable | None = None, other_sink: tg.DeltaTable | None = None
) -> tg.Pipeline:
    pipeline = tg.Pipeline("copying")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in")

    @pipeline.sink(table_sink or tg.DeltaTable(folder / "table"))
    def table(rows: DataFrame) -> DataFrame:
        return rows.select("id")

    @pipeline.sink(other_sink or tg.DeltaTable(folder / "other"))
    def other(rows: DataFrame) -> DataFrame:
        return rows.select("id")

    return pipeline


def replace_table(folder: Path, state: str, aside: str) -> None:
    """Take another state of the table, and put the one that is there aside."""
    (folder / "table").rename(folder / aside)
    (folder / state).rename(folder / "table")


def test_a_table_that_was_put_back_behind_an_idle_checkpoint_is_refused_at_start_and_at_the_next_commit(
    tmp_path: Path, spark: SparkSession
) -> None:
    pipeline, root = copying(tmp_path), tmp_path / "root"
    keeping_all = CheckpointConfig(max_retained=100)

    def run(files: int, first_file: int) -> str:
        write_input(tmp_path / "in", files, 10, first_file=first_file)
        run_to_end(pipeline, root, spark, checkpoint_interval="1h", checkpoint=keeping_all)
        return checkpoint_name(InspectedRoot(root).retained()[-1].checkpoint_id)

    fitting = run(3, 0)
    shutil.copytree(tmp_path / "table", tmp_path / "backup")
    shutil.copytree(tmp_path / "table", tmp_path / "another backup")
    run(3, 3)
    idle = run(0, 6)
    replace_table(tmp_path, "backup", aside="newer")
    before = (InspectedRoot(root).log().next_slot, table_rows(tmp_path / "table", ["id"]))
    write_input(tmp_path / "in", 1, 10, first_file=6)
    with pytest.raises(RecoveryRefused) as refused:
        run_to_end(pipeline, root, spark)
    told = str(refused.value)
    assert f"Delta table {tmp_path / 'table'} of sink 'table' was put back to an older state" in told
    assert idle in told
    assert f"{fitting} would fit this table" in told
    assert "restore the newer state of the table" in told
    assert before == (InspectedRoot(root).log().next_slot, table_rows(tmp_path / "table", ["id"]))

    replace_table(tmp_path, "newer", aside="refused")
    bound = at_most(120)

    complete: set[str] = set()

    def view(status: RunStatus) -> None:
        bound(status)
        if (tmp_path / "another backup").exists() and table_rows(tmp_path / "table", ["id"]).total() == 70:
            complete.update(each.checkpoint for each in status.checkpoints if each.state == "complete")
            if len(complete) >= 3:
                replace_table(tmp_path, "another backup", aside="newest")

    with pytest.raises(TablePutBack, match=rf"was put back to an older state.*; {fitting} would fit this table"):
        run_pipeline(pipeline, root, spark, view, checkpoint_interval="1s", checkpoint=keeping_all)
    assert table_rows(tmp_path / "table", ["id"]) == {(each,): 1 for each in range(30)}

    replace_table(tmp_path, "newest", aside="refused again")
    run_to_end(pipeline, root, spark)
    for name in ("table", "other"):
        assert table_rows(tmp_path / name, ["id"]) == {(each,): 1 for each in range(70)}


def test_a_table_of_another_root_is_refused_though_it_holds_nothing_of_the_pipeline_yet(
    tmp_path: Path, spark: SparkSession
) -> None:
    pipeline = copying(tmp_path)
    (tmp_path / "in").mkdir()
    stop = threading.Event()
    refused: list[str] = []
    bound = at_most(120)

    def view(status: RunStatus) -> None:
        """While the first run is alive and has staged rows that no checkpoint has cut."""
        bound(status)
        if status.stages["table"].rows < 20 or stop.is_set():
            return
        with pytest.raises(ForeignTable, match=r"another root of pipeline 'copying'.*remove the folder") as no:
            run_to_end(pipeline, tmp_path / "another root", spark)
        refused.append(str(no.value))
        stop.set()

    write_input(tmp_path / "in", 2, 10)
    run_pipeline(pipeline, tmp_path / "root", spark, view, stop, checkpoint_interval="1h")
    assert len(refused) == 1
    assert not (tmp_path / "another root").exists()
    for name in ("table", "other"):
        assert table_rows(tmp_path / name, ["id"]) == {(each,): 1 for each in range(20)}


def test_a_table_may_be_moved_whole_and_named_elsewhere_before_its_first_row(
    tmp_path: Path, spark: SparkSession
) -> None:
    (tmp_path / "in").mkdir()
    table, other = tmp_path / "table", tmp_path / "other"
    moved, elsewhere, moved_again = tmp_path / "moved", tmp_path / "elsewhere", tmp_path / "moved again"

    def run(table: tg.DeltaTable, other: tg.DeltaTable) -> None:
        run_to_end(copying(tmp_path, table, other), tmp_path / "root", spark, checkpoint_interval="1h")

    run(tg.DeltaTable(table), tg.DeltaTable(other))
    table.rename(moved)
    write_input(tmp_path / "in", 2, 10)
    with pytest.raises(Fenced):  # with rows that were decided and that no table shows
        run(Crashing(moved), Crashing(elsewhere))
    assert table_rows(moved, ["id"]).total() == 0
    moved.rename(moved_again)
    run(tg.DeltaTable(moved_again), tg.DeltaTable(elsewhere))
    for name in (moved_again, elsewhere):
        assert table_rows(name, ["id"]) == {(each,): 1 for each in range(20)}
    assert table_rows(other, ["id"]).total() == 0

    moved_again.rename(moved)
    write_input(tmp_path / "in", 1, 10, first_file=2)
    told = (
        rf"'other' wrote to Delta table {elsewhere} \(still there\)\. Now it would write to Delta table {other}, which"
    )
    with pytest.raises(RecoveryRefused, match=told):
        run(tg.DeltaTable(moved), tg.DeltaTable(other))
    run(tg.DeltaTable(moved), tg.DeltaTable(elsewhere))
    for name in (moved, elsewhere):
        assert table_rows(name, ["id"]) == {(each,): 1 for each in range(30)}
