"""A pipeline and its tables go back to a checkpoint after a bad deploy, whenever whoever does it is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import deltalake
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import oracle, run_to_end, stream, table_rows, write_input
from tidegate.engine.kill_points import VARIABLE
from tidegate.errors import RecoveryRefused, RootInUse
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.lock import RootLock

pytestmark = [pytest.mark.spark, pytest.mark.slow]

COLUMNS = {"all_rows": ["id", "value"], "latest": ["key", "id", "value"], "counts": ["key", "count"]}


def shop(folder: Path, *, is_bad: bool = False) -> tg.Pipeline:
    """Rows, the newest row of each key, and counts of keys: files that are added, and files that are replaced."""
    pipeline = tg.Pipeline("shop")
    wrong = -1 if is_bad else 1

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in")

    @pipeline.stage
    def valued(rows: DataFrame) -> DataFrame:
        return rows.withColumn("value", F.col("value") * wrong)

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "all_rows"))
    def all_rows(valued: DataFrame) -> DataFrame:
        return valued.select("id", "value")

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "latest", key="key", newest_by="id"))
    def latest(valued: DataFrame) -> DataFrame:
        return valued.select("key", "id", "value")

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "counts", key="key"), output_mode="update")
    def counts(valued: DataFrame) -> DataFrame:
        return valued.groupBy("key").count()

    return pipeline


def shown(folder: Path) -> dict[str, Counter[tuple[Any, ...]]]:
    return {name: table_rows(folder / "lake" / name, columns) for name, columns in COLUMNS.items()}


class Shop:
    """Ten files by a good version, then four by a bad one."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.folder = folder
        self.root = folder / "root"
        write_input(folder / "in", 3, 10)
        run_to_end(shop(folder), self.root, spark, retain=20)
        self.good = self.newest()
        self.shown_then = shown(folder)
        write_input(folder / "in", 2, 10, first_file=3)
        # None before it has read something: that would take the place of the good one, which is the same.
        run_to_end(shop(folder, is_bad=True), self.root, spark, retain=20, checkpoint_interval="1h")
        self.bad = self.newest()
        self.shown_after = shown(folder)
        self._backup = folder.with_name("backup")
        shutil.copytree(folder, self._backup)

    def newest(self) -> str:
        record = InspectedRoot(self.root).log().newest
        assert record is not None
        return checkpoint_name(record.checkpoint_id)

    def as_it_was(self) -> None:
        """Before anything was restored."""
        shutil.rmtree(self.folder)
        shutil.copytree(self._backup, self.folder)

    def restore(self, *arguments: str, killed_at: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **({VARIABLE: killed_at} if killed_at is not None else {})}
        command = [sys.executable, "-m", "tidegate", "restore", "--root", str(self.root), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Shop:
    return Shop(tmp_path_factory.mktemp("shop") / "all", spark)


@pytest.fixture
def deployed(made: Shop) -> Shop:
    made.as_it_was()
    return made


@pytest.mark.parametrize(
    "killed_at",
    [
        None,
        pytest.param("generation_opened:1", marks=pytest.mark.soak),
        "table_set_back:1",
        pytest.param("table_set_back:3", marks=pytest.mark.soak),
    ],
)
def test_after_a_restore_the_good_version_goes_on_and_tables_show_what_a_batch_job_does(
    killed_at: str | None, deployed: Shop, spark: SparkSession
) -> None:
    assert deployed.shown_after != deployed.shown_then
    done = deployed.restore("--to", deployed.good, "--yes", killed_at=killed_at)
    if killed_at is None:
        assert done.returncode == 0, done.stderr
        assert f"the next run goes on from {deployed.good}" in done.stdout
        assert shown(deployed.folder) == deployed.shown_then
        assert tg.read(deployed.root).checkpoint == deployed.good, "not what was left behind"
    else:
        assert done.returncode == -signal.SIGKILL, done.stderr
        status = subprocess.run(
            [sys.executable, "-m", "tidegate", "verify", "--root", str(deployed.root), "--json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "first sees to it that all tables are back at" in json.loads(status.stdout)["next_start"]["why"]
    write_input(deployed.folder / "in", 1, 10, first_file=5)
    pipeline = shop(deployed.folder)
    run_to_end(pipeline, deployed.root, spark, retain=20, checkpoint_interval="1h")
    expected = oracle(pipeline, spark)
    assert table_rows(deployed.folder / "lake" / "all_rows", ["id", "value"]) == expected["all_rows"]
    assert table_rows(deployed.folder / "lake" / "latest", ["id"]) == Counter((n,) for n in range(55, 60))
    assert table_rows(deployed.folder / "lake" / "counts", ["count"]) == Counter({(12,): 5})
    left = [checkpoint_name(each.checkpoint_id) for each in InspectedRoot(deployed.root).retained()]
    assert deployed.bad not in left, "what was left behind is gone with the next checkpoint"
    assert deployed.good in left


def test_it_tells_what_it_would_do_and_does_it_only_if_it_may(deployed: Shop) -> None:
    told = deployed.restore("--to", deployed.good, "--dry-run", "--json")
    answer = json.loads(told.stdout)
    assert (answer["is_done"], answer["checkpoint"], answer["newest"]) == (False, deployed.good, deployed.bad)
    assert deployed.bad in answer["dropped"]
    tables = {each["sink"]: each for each in answer["tables"]}
    assert tables["all_rows"]["rows_removed"] == 20
    assert tables["all_rows"]["rows_added"] == 0
    assert tables["latest"]["rows_added"] >= 5, "rows that were replaced come back"
    assert all(each["from_version"] > each["to_version"] for each in tables.values())
    asked = subprocess.run(
        [sys.executable, "-m", "tidegate", "restore", "--root", str(deployed.root), "--to", deployed.good],
        input="n\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert asked.returncode == 1
    assert "nothing was changed" in asked.stdout
    assert shown(deployed.folder) == deployed.shown_after
    assert deployed.newest() == deployed.bad


def test_what_others_have_written_a_run_that_is_alive_and_json_without_a_word_are_refused(deployed: Shop) -> None:
    before = list(InspectedRoot(deployed.root).log())
    with RootLock(deployed.root / "lock"), pytest.raises(RootInUse):
        tg.restore(deployed.root, deployed.good)
    assert deployed.restore("--to", deployed.good, "--json").returncode == 2
    table = deltalake.DeltaTable(deployed.folder / "lake" / "counts")
    deltalake.write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode="append")
    with pytest.raises(RecoveryRefused, match=r"others have written .*lake/counts: version \d+, WRITE"):
        tg.restore(deployed.root, deployed.good)
    assert list(InspectedRoot(deployed.root).log()) == before, "nothing was decided"
    tg.restore(deployed.root, deployed.good, discard_others=True)
    assert shown(deployed.folder) == deployed.shown_then


def test_it_is_undone_by_restoring_the_newer_one_and_a_table_that_is_left_is_looked_at_by_the_next_run(
    deployed: Shop, spark: SparkSession
) -> None:
    tg.restore(deployed.root, deployed.good)
    assert shown(deployed.folder) == deployed.shown_then
    tg.restore(deployed.root, deployed.bad)
    assert shown(deployed.folder) == deployed.shown_after
    assert InspectedRoot(deployed.root).log().newest is not None
    tg.restore(deployed.root, deployed.good, leave=["counts"])
    assert table_rows(deployed.folder / "lake" / "counts", ["key", "count"]) == deployed.shown_after["counts"]
    with pytest.raises(RecoveryRefused, match="sink 'counts' holds epoch"):
        run_to_end(shop(deployed.folder), deployed.root, spark)


def test_it_is_the_way_out_of_a_damaged_checkpoint_and_recovery_says_so(deployed: Shop, spark: SparkSession) -> None:
    inspected = InspectedRoot(deployed.root)
    newest = inspected.log().newest
    assert newest is not None
    (deployed.root / newest.manifest).unlink()
    with pytest.raises(RecoveryRefused) as refused:
        run_to_end(shop(deployed.folder), deployed.root, spark)
    way_out = str(refused.value).rpartition("`tidegate restore ")[2].rpartition("`")[0].split()
    assert way_out[0] == "--to"
    done = deployed.restore(*way_out, "--yes")
    assert done.returncode == 0, done.stderr
    write_input(deployed.folder / "in", 1, 10, first_file=5)
    run_to_end(shop(deployed.folder), deployed.root, spark)
    ids = table_rows(deployed.folder / "lake" / "all_rows", ["id"])
    assert ids == Counter((n,) for n in range(60))
