"""A decision log that was put back from a backup: the next generation has the number of one that is lost, and must take
up nothing of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import tidegate as tg
from tests.s3_server import S3Server
from tests.spark.harness import Crash, oracle, stream, table_rows, write_input
from tidegate.engine.run import run_pipeline
from tidegate.engine.status import RunStatus
from tidegate.errors import RecoveryRefused
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.files import Files, clear
from tidegate.storage.folder import Folder
from tidegate.storage.paths import RootPaths

pytestmark = [pytest.mark.spark, pytest.mark.slow]

_LOST = ("rows", "sums", "table")


def summing(folder: Path) -> tg.Pipeline:
    pipeline = tg.Pipeline("summing")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in", files_per_batch=1)

    @pipeline.stage(output_mode="update", chain=False)
    def sums(rows: DataFrame) -> DataFrame:
        return rows.groupBy("key").sum("value").withColumnRenamed("sum(value)", "total")

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "table", key="key"), output_mode="update", chain=False)
    def table(sums: DataFrame) -> DataFrame:
        return sums

    return pipeline


class Roots:
    """One root, where it is, and where Spark lives."""

    def __init__(self, folder: Path, spark: SparkSession, root: str | None = None) -> None:
        """`root`: in a bucket; else in a folder."""
        self._folder = folder
        self._spark = spark
        self._root = root
        self.lives_in = folder / "root"
        self._backup = Folder(folder / "backup")

    def run(self, **options: Any) -> None:
        settings = {"available_now": True, "restarts": 0, **options}
        if self._root is not None:
            settings["work"] = str(self.lives_in)
        run_pipeline(summing(self._folder), self._root or self.lives_in, self._spark, **settings)

    @property
    def store(self) -> Files:
        return Folder(self.lives_in) if self._root is None else open_bucket(self._root)

    def back_up(self, folder: str) -> None:
        for name in self.store.list(folder):
            self._backup.copy(name, self.store, name)

    def put_back(self, folder: str) -> None:
        clear(self.store, folder)
        for name in self._backup.list(folder):
            self.store.copy(name, self._backup, name)

    def lose_a_generation(self, generation: int) -> None:
        """Each stage commits batches in it, and no checkpoint is taken."""

        def view(_status: RunStatus) -> None:
            if all(self._committed(generation, name) for name in _LOST):
                raise Crash

        with pytest.raises(Crash):
            self.run(checkpoint_interval="1h", available_now=False, view=view)

    def _committed(self, generation: int, stage: str) -> bool:
        commits = self.lives_in / RootPaths.spark_checkpoint(generation, stage) / "commits"
        return len([each for each in commits.glob("*") if each.name.isdigit()]) > 2

    def check(self) -> None:
        shown = table_rows(self._folder / "lake" / "table", ["key", "total"])
        assert shown == oracle(summing(self._folder), self._spark)["table"]


# In a folder there is less to go wrong: all of it is in one place.
@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.soak), "bucket"])
def roots(
    request: pytest.FixtureRequest, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Roots:
    if request.param == "folder":
        return Roots(tmp_path, spark)
    server: S3Server = request.getfixturevalue("s3_server")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return Roots(tmp_path, spark, f"{server.make_bucket('put-back')}/root")


def test_a_generation_takes_up_nothing_of_a_lost_one_of_its_number(roots: Roots, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 3, 20)
    roots.run()
    roots.back_up("decisions")
    write_input(tmp_path / "in", 4, 20, first_file=3)
    roots.lose_a_generation(2)
    roots.put_back("decisions")
    write_input(tmp_path / "in", 2, 20, first_file=7)
    roots.run()
    roots.check()


def test_tables_that_show_more_than_the_log_are_refused_until_they_are_put_back_too(
    roots: Roots, tmp_path: Path
) -> None:
    """With the ids of checkpoints, too: those of the next generation have names that the lost one has used."""
    write_input(tmp_path / "in", 3, 20)
    roots.run()
    roots.back_up("decisions")
    roots.back_up("ids")
    shutil.copytree(tmp_path / "lake", tmp_path / "lake-then")
    write_input(tmp_path / "in", 4, 20, first_file=3)
    roots.run()
    roots.put_back("decisions")
    with pytest.raises(RecoveryRefused, match=r"sink 'table' holds epoch \d+, but the decision log ends at \d+"):
        roots.run()
    roots.put_back("ids")
    shutil.rmtree(tmp_path / "lake")
    (tmp_path / "lake-then").rename(tmp_path / "lake")
    write_input(tmp_path / "in", 2, 20, first_file=7)
    roots.run()
    roots.check()
    write_input(tmp_path / "in", 2, 20, first_file=9)
    roots.run()
    roots.check()
