"""What a cluster has to reach is tried before anything is changed. Here the executors are in Spark's own process, which
reaches all, so what they may not do is played."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tidegate.errors import InvalidConfig
from tidegate.spark.modules import modules_in
from tidegate.spark.sharing import check_shared

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_a_folder_that_is_shared_is_left_as_it_was(tmp_path: Path, spark: SparkSession) -> None:
    check_shared(spark, tmp_path, "the root")
    check_shared(spark, tmp_path / "lake", "a Delta table")
    assert not list(tmp_path.iterdir())


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
