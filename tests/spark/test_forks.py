"""A fork is tried beside the pipeline, and takes its place: in one decision, whenever whoever does it is killed."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import deltalake
import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession

import tidegate as tg
from tests.postgres_server import PostgresServer
from tests.spark.harness import oracle, run_to_end, stream, table_rows, write_input
from tests.spark.test_restoring import COLUMNS, shop, shown
from tests.spark.test_savepoints import SOME_KILLS, tidegate
from tidegate.cli.load import load_pipeline
from tidegate.errors import ForeignTable, InvalidConfig, RecoveryRefused, RootInUse
from tidegate.storage.lock import RootLock

pyarrow: Any = importlib.import_module("pyarrow")

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def shown_by_fork(folder: Path) -> dict[str, Counter[tuple[Any, ...]]]:
    return {name: table_rows(folder / "lake" / f"{name}_next", columns) for name, columns in COLUMNS.items()}


class Forked:
    """A pipeline and its fork, made after three files; the fork has read a fourth one."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.folder = folder
        self.root, self.fork = folder / "root", folder / "fork"
        write_input(folder / "in", 3, 10)
        run_to_end(shop(folder), self.root, spark)
        self.shown_then = shown(folder)
        made = tidegate("fork", "--root", self.root, "--to", self.fork, "--json")
        assert made.returncode == 0, made.stderr
        self.told: dict[str, Any] = json.loads(made.stdout)
        self.forked_then = shown_by_fork(folder)
        write_input(folder / "in", 1, 10, first_file=3)
        run_to_end(shop(folder), self.fork, spark)
        self._backup = folder.with_name("backup")
        shutil.copytree(folder, self._backup)

    def as_it_was(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self._backup, self.folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Forked:
    return Forked(tmp_path_factory.mktemp("forked") / "all", spark)


@pytest.fixture
def forked(made: Forked) -> Forked:
    made.as_it_was()
    return made


def test_a_fork_goes_on_by_itself_and_the_pipeline_notices_nothing(forked: Forked, spark: SparkSession) -> None:
    assert forked.forked_then == forked.shown_then
    assert {each["copy_of"] for each in forked.told["tables"]} == {
        str(forked.folder / "lake" / name) for name in COLUMNS
    }
    assert shown(forked.folder) == forked.shown_then, "what the fork has read since is in its own tables"
    assert shown_by_fork(forked.folder) != forked.shown_then
    run_to_end(shop(forked.folder), forked.root, spark)
    assert shown(forked.folder) == shown_by_fork(forked.folder), "both have read the same by now"


@pytest.mark.parametrize("killed_at", SOME_KILLS)
def test_a_promoted_fork_goes_on_with_the_tables_that_it_was_made_from(
    killed_at: str | None, forked: Forked, spark: SparkSession
) -> None:
    pipeline = shop(forked.folder)
    by_fork = shown_by_fork(forked.folder)
    done = tidegate("promote", "--root", forked.fork, "--yes", killed_at=killed_at)
    if killed_at is None:
        assert done.returncode == 0, done.stderr
        assert shown(forked.folder) == by_fork
    else:
        assert done.returncode == -signal.SIGKILL, done.stderr
    if killed_at == "checkpoint_brought:1":
        assert shown(forked.folder) == forked.shown_then, "nothing was decided"
        assert tidegate("promote", "--root", forked.fork, "--yes").returncode == 0
    write_input(forked.folder / "in", 2, 10, first_file=4)
    run_to_end(pipeline, forked.fork, spark)
    lake = forked.folder / "lake"
    assert table_rows(lake / "all_rows", ["id", "value"]) == oracle(pipeline, spark)["all_rows"]
    assert table_rows(lake / "latest", ["id"]) == Counter((number,) for number in range(55, 60))
    assert table_rows(lake / "counts", ["count"]) == Counter({(12,): 5})
    assert shown_by_fork(forked.folder) == by_fork, "the fork's own tables stay as they were"
    with pytest.raises((RecoveryRefused, ForeignTable), match="belongs to another root of"):
        run_to_end(pipeline, forked.root, spark)
    with pytest.raises(InvalidConfig, match="is no fork"):
        tg.promote(forked.fork)


def test_a_fork_is_not_promoted_while_the_pipeline_runs_or_over_what_others_wrote(forked: Forked) -> None:
    with RootLock(forked.root / "lock"), pytest.raises(RootInUse, match="it was forked from still runs"):
        tg.promote(forked.fork)
    rows = pyarrow.table({"id": pyarrow.array([1], pyarrow.int64()), "value": pyarrow.array([1], pyarrow.int64())})
    deltalake.write_deltalake(forked.folder / "lake" / "all_rows", rows, mode="append")
    before = shown(forked.folder)
    told = tidegate("promote", "--root", forked.fork, "--dry-run")
    assert told.returncode == 3
    assert "by others since" in told.stdout
    with pytest.raises(RecoveryRefused, match="others have written to tables since it was made"):
        tg.promote(forked.fork)
    assert shown(forked.folder) == before
    tg.promote(forked.fork, discard_others=True)
    assert shown(forked.folder) == shown_by_fork(forked.folder)


def test_what_cannot_be_forked_is_refused_and_nothing_is_left_of_it(forked: Forked) -> None:
    taken = tidegate("fork", "--root", forked.root, "--to", forked.folder / "second")
    assert taken.returncode == 3, taken.stderr
    assert "is there already" in taken.stderr
    assert not (forked.folder / "second").exists()
    used = tidegate("fork", "--root", forked.root, "--to", forked.fork, "--tables", "suffix=_other")
    assert used.returncode == 2, used.stderr
    unknown = tidegate("fork", "--root", forked.root, "--to", forked.folder / "second", "--table", "nobody=x")
    assert unknown.returncode == 2, unknown.stderr


@pytest.mark.parametrize("killed_at", [pytest.param("generation_opened:1", marks=pytest.mark.soak), "table_set_back:2"])
def test_a_fork_whose_maker_was_killed_is_finished_by_its_first_run(
    killed_at: str, forked: Forked, spark: SparkSession
) -> None:
    second = forked.folder / "second"
    command = ("fork", "--root", forked.root, "--to", second, "--tables", "suffix=_second")
    assert tidegate(*command, killed_at=killed_at).returncode == -signal.SIGKILL
    run_to_end(shop(forked.folder), second, spark)
    found = {name: table_rows(forked.folder / "lake" / f"{name}_second", columns) for name, columns in COLUMNS.items()}
    assert found == shown_by_fork(forked.folder)
    assert shown(forked.folder) == forked.shown_then


def test_a_fork_calls_no_function_until_it_is_promoted(tmp_path: Path, spark: SparkSession) -> None:
    called: list[tuple[str, int]] = []

    def pipeline(who: str) -> tg.Pipeline:
        made = tg.Pipeline("calls")

        @made.source
        def rows(spark: SparkSession) -> DataFrame:
            return stream(spark, tmp_path / "in")

        @made.sink(tg.ForeachBatch(lambda frame, _: called.extend((who, row["id"]) for row in frame.collect())))
        def calls(rows: DataFrame) -> DataFrame:
            return rows

        return made

    write_input(tmp_path / "in", 1, 5)
    run_to_end(pipeline("first"), tmp_path / "root", spark)
    assert len(called) == 5
    forked = tg.fork(tmp_path / "root", tmp_path / "fork")
    assert forked.muted == ("calls",)
    write_input(tmp_path / "in", 1, 5, first_file=1)
    run_to_end(pipeline("fork"), tmp_path / "fork", spark)
    assert len(called) == 5
    tg.promote(tmp_path / "fork")
    write_input(tmp_path / "in", 1, 5, first_file=2)
    run_to_end(pipeline("fork"), tmp_path / "fork", spark)
    assert sorted(called[5:]) == [("fork", number) for number in range(10, 15)]


POSTGRES = """
import tidegate as tg
pipeline = tg.Pipeline("kept")

@pipeline.source
def rows(spark):
    return spark.readStream.schema("id long, key string, ts timestamp, value long").json({folder!r} + "/in")

@pipeline.sink(tg.PostgresTable({table!r}, {dsn!r}, key="key", newest_by="id", history="7d"))
def latest(rows):
    return rows.select("key", "id", "value")
"""


@pytest.mark.soak  # it takes long; its parts are in CI
def test_a_postgres_table_goes_back_is_forked_and_promoted_by_the_pipelines_file(
    tmp_path: Path, spark: SparkSession, postgres_server: PostgresServer
) -> None:
    table = f"kept_{tmp_path.name[-20:].replace('-', '_')}"
    file = tmp_path / "kept.py"
    file.write_text(POSTGRES.format(folder=str(tmp_path), table=table, dsn=postgres_server.dsn), encoding="utf-8")

    def newest_ids(name: str = table) -> set[int]:
        with psycopg.connect(postgres_server.dsn) as connection:
            return {row[0] for row in connection.execute(f'SELECT id FROM "{name}"').fetchall()}

    root, fork = tmp_path / "root", tmp_path / "fork"
    write_input(tmp_path / "in", 1, 10)
    run_to_end(load_pipeline(file, None), root, spark)
    assert tidegate("savepoint", "--root", root, "--name", "first", "--file", file).returncode == 0
    write_input(tmp_path / "in", 1, 10, first_file=1)
    run_to_end(load_pipeline(file, None), root, spark)
    assert newest_ids() == set(range(15, 20))
    refused = tidegate("restore", "--root", root, "--to", "first", "--yes")
    assert (refused.returncode, "--file FILE" in refused.stderr) == (3, True), refused.stderr
    back = tidegate("restore", "--root", root, "--to", "first", "--yes", "--file", file)
    assert back.returncode == 0, back.stderr
    assert newest_ids() == set(range(5, 10))
    run_to_end(load_pipeline(file, None), root, spark)
    assert newest_ids() == set(range(15, 20))
    made = tidegate("fork", "--root", root, "--to", fork, "--file", file)
    assert made.returncode == 0, made.stderr
    write_input(tmp_path / "in", 1, 10, first_file=2)
    run_to_end(load_pipeline(file, None), fork, spark)
    assert (newest_ids(), newest_ids(f"{table}_next")) == (set(range(15, 20)), set(range(25, 30)))
    promoted = tidegate("promote", "--root", fork, "--yes", "--file", file)
    assert promoted.returncode == 0, promoted.stderr
    assert newest_ids() == set(range(25, 30))
    write_input(tmp_path / "in", 1, 10, first_file=3)
    run_to_end(load_pipeline(file, None), fork, spark)
    assert newest_ids() == set(range(35, 40))
