"""What a cluster has to reach is tried before anything is changed. Here the executors are in Spark's own process, which
reaches all, so what they may not do is played."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tidegate.errors import InvalidConfig
from tidegate.spark import sharing
from tidegate.spark.modules import give_modules, modules_in
from tidegate.spark.sharing import check_shared

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(autouse=True)
def nothing_was_tried(spark: SparkSession) -> None:
    sharing._shared.pop(spark.sparkContext, None)


def test_nothing_is_left_in_a_folder_that_is_shared(tmp_path: Path, spark: SparkSession) -> None:
    check_shared(spark, tmp_path, "the root")
    assert not list(tmp_path.iterdir())
    check_shared(spark, tmp_path / "lake", "a Delta table")
    assert not list((tmp_path / "lake").iterdir())


def test_two_drivers_may_try_the_same_folder_at_the_same_time(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Path.hardlink_to

    def another_comes_first(kept: Path, written: Path) -> None:
        monkeypatch.setattr(Path, "hardlink_to", link)
        check_shared(spark, tmp_path / "lake", "a Delta table")
        link(kept, written)

    monkeypatch.setattr(Path, "hardlink_to", another_comes_first)
    check_shared(spark, tmp_path / "lake", "a Delta table")
    assert not list((tmp_path / "lake").iterdir())


def test_what_was_found_to_be_shared_is_not_tried_again_by_the_session(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_shared(spark, tmp_path, "the root")

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    check_shared(spark, tmp_path, "the root")
    for _ in range(2):
        with pytest.raises(InvalidConfig):
            check_shared(spark, tmp_path / "lake", "a Delta table")
    assert not list(tmp_path.iterdir()), "nor is a folder there that was made to try it"


def test_what_a_process_has_left_that_was_killed_long_ago_is_removed(tmp_path: Path, spark: SparkSession) -> None:
    for name in (".executors-killed", ".executors-alive", "table"):
        (tmp_path / name / "_temporary").mkdir(parents=True)
    for name in (".executors-killed", "table"):
        os.utime(tmp_path / name, (0, 0))
    check_shared(spark, tmp_path, "a Delta table")
    assert {path.name for path in tmp_path.iterdir()} == {".executors-alive", "table"}


def test_a_folder_that_executors_cannot_write_to_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    (tmp_path / "root").write_text("no folder", encoding="utf-8")
    with pytest.raises(InvalidConfig, match=r"do not share .*root with this driver: .*umask 002\), or in a bucket"):
        check_shared(spark, tmp_path / "root", "the root")


def test_what_the_driver_cannot_keep_is_refused(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(InvalidConfig, match="the driver cannot keep what they write: Operation not permitted"):
        check_shared(spark, tmp_path, "a Delta table")
    assert not list(tmp_path.iterdir())


def test_modules_and_packages_beside_the_file_are_found_and_nothing_else(tmp_path: Path) -> None:
    for name in ("pipeline.py", "beside.py", "package/__init__.py", "package/deep/inner.py", "package/words.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    for name in ("data.csv", "not-a-module.py", "folder/lonely.py", "package/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    found = [name for name, _ in modules_in(tmp_path)]
    assert found == ["beside.py", "package/__init__.py", "package/deep/inner.py", "package/words.txt", "pipeline.py"]


def test_modules_that_are_older_than_zip_files_can_tell_are_sent(tmp_path: Path) -> None:
    """As Nix, Bazel and images of containers date them."""
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "pipeline.py").write_text("ONE = 1\n", encoding="utf-8")
    os.utime(tmp_path / "beside" / "pipeline.py", (0, 0))
    added: list[str] = []
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(addPyFile=added.append))
    give_modules(session, tmp_path / "beside", tmp_path / "modules.zip")
    assert added == [str(tmp_path / "modules.zip")]
    with zipfile.ZipFile(added[0]) as packed:
        assert packed.read("pipeline.py") == b"ONE = 1\n"
