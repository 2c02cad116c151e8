"""Savepoints: restored on the root that they were made from, on a new one, and on tables that were moved."""

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

import pytest
from pyspark.sql import SparkSession

import tidegate as tg
from tests.s3_server import S3Server
from tests.spark.harness import oracle, run_to_end, table_rows, write_input
from tests.spark.test_restoring import COLUMNS, shop, shown
from tidegate.engine.kill_points import VARIABLE
from tidegate.errors import DamagedCheckpoint, ForeignTable, RecoveryRefused
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.savepoints import RECORD

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def tidegate(*arguments: object, killed_at: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({VARIABLE: killed_at} if killed_at is not None else {})}
    command = [sys.executable, "-m", "tidegate", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


class Saved:
    """Three files and a savepoint, then two more files: of the checkpoint that it was made of nothing is left."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.savepoint = folder / "root.savepoints" / "first"
        write_input(folder / "in", 3, 10)
        run_to_end(shop(folder), self.root, spark, retain=1)
        made = tidegate("savepoint", "--root", self.root, "--name", "first", "--json")
        assert made.returncode == 0, made.stderr
        self.told: dict[str, Any] = json.loads(made.stdout)["savepoint"]
        self.shown_then = shown(folder)
        write_input(folder / "in", 2, 10, first_file=3)
        run_to_end(shop(folder), self.root, spark, retain=1)
        self.shown_after = shown(folder)
        self._backup = folder.with_name("backup")
        shutil.copytree(folder, self._backup)

    def as_it_was(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self._backup, self.folder)

    def go_on(self, spark: SparkSession, root: Path | None = None) -> None:
        """With one file more; then every table shows each row once."""
        write_input(self.folder / "in", 1, 10, first_file=5)
        pipeline = shop(self.folder)
        run_to_end(pipeline, root or self.root, spark, retain=1)
        self.check(pipeline, spark, self.folder / "lake")

    def check(self, pipeline: tg.Pipeline, spark: SparkSession, lake: Path) -> None:
        expected = oracle(pipeline, spark)
        assert table_rows(lake / "all_rows", ["id", "value"]) == expected["all_rows"]
        assert table_rows(lake / "latest", ["id"]) == Counter((number,) for number in range(55, 60))
        assert table_rows(lake / "counts", ["count"]) == Counter({(12,): 5})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved") / "all", spark)


@pytest.fixture
def saved(made: Saved) -> Saved:
    made.as_it_was()
    return made


KILLS = ["checkpoint_brought:1", "generation_opened:1", "table_set_back:1", "table_set_back:3"]
"""Every step of bringing a checkpoint that leaves something else behind."""
SOME_KILLS = [
    pytest.param(None, marks=pytest.mark.soak),
    *(pytest.param(each, marks=[] if each == KILLS[2] else pytest.mark.soak) for each in KILLS),
]


@pytest.mark.parametrize("killed_at", SOME_KILLS)
def test_a_savepoint_that_the_root_has_long_forgotten_is_restored_with_the_tables(
    killed_at: str | None, saved: Saved, spark: SparkSession
) -> None:
    assert saved.shown_after != saved.shown_then
    done = tidegate("restore", "--root", saved.root, "--to", "first", "--yes", killed_at=killed_at)
    if killed_at is None:
        assert done.returncode == 0, done.stderr
        assert shown(saved.folder) == saved.shown_then
        verified = tidegate("verify", "--root", saved.root)
        assert verified.returncode == 0, verified.stdout + verified.stderr
    else:
        assert done.returncode == -signal.SIGKILL, done.stderr
    saved.go_on(spark)


def test_it_outlives_its_root_and_needs_nothing_but_itself_and_the_tables(saved: Saved, spark: SparkSession) -> None:
    elsewhere = saved.folder / "backup of mine"
    shutil.move(saved.savepoint, elsewhere)
    shutil.rmtree(saved.root)
    root = saved.folder / "another root"
    plan = tg.restore(root, str(elsewhere), dry_run=True)
    assert not root.exists(), "nothing is made by looking"
    assert (plan.is_savepoint, plan.newest, plan.refused) == (True, None, None)
    assert all(each.change.is_anothers for each in plan.tables)
    tg.restore(root, str(elsewhere))
    assert shown(saved.folder) == saved.shown_then
    shutil.rmtree(elsewhere)  # it is taken over by nobody, and needed no more
    saved.go_on(spark, root)


@pytest.mark.soak  # it takes long; in a folder it is in CI
@pytest.mark.s3
def test_it_may_be_in_a_bucket(
    saved: Saved, spark: SparkSession, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    place = f"{s3_server.make_bucket('savepoints')}/orders"
    done = tidegate("savepoint", "--root", saved.root, "--to", place, "--name", "last")
    assert done.returncode == 0, done.stderr
    assert f"it is yours: {place}/last" in done.stdout
    again = tidegate("savepoint", "--root", saved.root, "--to", place, "--name", "last")
    assert again.returncode == 2
    assert "there is a savepoint 'last'" in again.stderr
    listed = tidegate("savepoints", "--in", place, "--verify", "--json")
    assert listed.returncode == 0, listed.stderr
    assert [each["folder"] for each in json.loads(listed.stdout)["savepoints"]] == [f"{place}/last"]
    shutil.rmtree(saved.root)
    root = saved.folder / "another root"
    unknown = tidegate("restore", "--root", root, "--to", f"{place}/first", "--yes")
    assert unknown.returncode != 0
    assert "names no savepoint" in unknown.stderr
    restored = tidegate("restore", "--root", root, "--to", f"{place}/last", "--yes")
    assert restored.returncode == 0, restored.stderr
    assert shown(saved.folder) == saved.shown_after
    deleted = tidegate("savepoint", "delete", "last", "--in", place, "--yes")
    assert deleted.returncode == 0, deleted.stderr
    assert not open_bucket(place).names_in()
    saved.go_on(spark, root)


@pytest.mark.soak  # it takes long; others are in CI
def test_tables_that_were_moved_with_it_are_found_where_they_are_said_to_be(saved: Saved, spark: SparkSession) -> None:
    elsewhere = saved.folder / "elsewhere"
    shutil.move(saved.savepoint, elsewhere / "save")
    shutil.move(saved.folder / "lake", elsewhere / "lake")
    shutil.rmtree(saved.root)
    root = elsewhere / "root"
    refused = tidegate("restore", "--root", root, "--to", elsewhere / "save", "--yes")
    assert refused.returncode == 3, refused.stderr
    assert not root.exists(), "nothing is left of a root on which nothing was decided"
    where = [f"--table={name}={elsewhere / 'lake' / name}" for name in COLUMNS]
    done = tidegate("restore", "--root", root, "--to", elsewhere / "save", "--yes", *where)
    assert done.returncode == 0, done.stderr
    (elsewhere / "in").symlink_to(saved.folder / "in")
    pipeline = shop(saved.folder)
    moved = pipeline.with_stages(lambda each: each if each.sink is None else _at(each, elsewhere / "lake" / each.name))
    write_input(saved.folder / "in", 1, 10, first_file=5)
    run_to_end(moved, root, spark)
    saved.check(pipeline, spark, elsewhere / "lake")


def _at(definition: Any, path: Path) -> Any:
    import msgspec

    return msgspec.structs.replace(definition, sink=definition.sink.at(str(path)))


@pytest.mark.soak  # it takes long; others are in CI
def test_the_root_that_had_the_tables_before_is_refused(saved: Saved, spark: SparkSession) -> None:
    tg.restore(saved.folder / "another", str(saved.savepoint))
    write_input(saved.folder / "in", 1, 10, first_file=5)
    run_to_end(shop(saved.folder), saved.folder / "another", spark)
    before = shown(saved.folder)
    with pytest.raises((RecoveryRefused, ForeignTable), match="belongs to another root of"):
        run_to_end(shop(saved.folder), saved.root, spark)
    assert shown(saved.folder) == before


@pytest.mark.parametrize("kind", ["cut", "gone", "record"])
def test_a_damaged_savepoint_is_noticed_before_anything_is_changed(kind: str, saved: Saved) -> None:
    files = sorted(each for each in saved.savepoint.rglob("*") if each.is_file() and each.name != RECORD)
    victim = next(each for each in files if "snapshots" in each.parts and each.stat().st_size > 10)
    if kind == "cut":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif kind == "gone":
        victim.unlink()
    else:
        record = saved.savepoint / RECORD
        record.write_text(record.read_text("utf-8").replace('"epoch": ', '"epoch": 1'), "utf-8")
    with pytest.raises(DamagedCheckpoint, match="first"):
        tg.restore(saved.root, "first")
    listed = tidegate("savepoints", "--root", saved.root, "--verify")
    assert listed.returncode == 4, listed.stdout
    assert shown(saved.folder) == saved.shown_after


@pytest.mark.soak
def test_it_is_listed_and_deleted_by_its_user_alone(saved: Saved, spark: SparkSession) -> None:
    assert saved.told["drained"] is True
    assert saved.told["tables"]["all_rows"]["version"] is not None
    saved.go_on(spark)
    assert saved.savepoint.is_dir(), "retention knows nothing of it"
    listed = tidegate("savepoints", "--root", saved.root, "--json")
    assert [each["name"] for each in json.loads(listed.stdout)["savepoints"]] == ["first"]
    again = tidegate("savepoint", "--root", saved.root, "--name", "first")
    assert again.returncode == 2, "a name is taken once"
    deleted = tidegate("savepoint", "delete", "first", "--root", saved.root, "--yes")
    assert deleted.returncode == 0, deleted.stderr
    assert not saved.savepoint.exists()
    assert "there are no savepoints" in tidegate("savepoints", "--root", saved.root).stdout


def test_a_savepoint_that_is_killed_in_the_middle_is_none_and_leaves_the_root_as_it_was(saved: Saved) -> None:
    killed = tidegate("savepoint", "--root", saved.root, "--name", "second", killed_at="checkpoint_brought:1")
    assert killed.returncode == -signal.SIGKILL
    listed = json.loads(tidegate("savepoints", "--root", saved.root, "--json").stdout)
    assert [each["name"] for each in listed["savepoints"]] == ["first"]
    InspectedRoot(saved.root).newest()
    again = tidegate("savepoint", "--root", saved.root, "--name", "second")
    assert again.returncode == 2, again.stderr
    assert "perhaps half of one" in again.stderr
