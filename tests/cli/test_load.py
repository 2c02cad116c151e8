"""A pipeline's file: what is loaded of it, what Spark's workers get of it, and what is said of one that is wrong."""

from __future__ import annotations

import base64
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deltalake
import pytest

from tests.cli.harness import tidegate
from tidegate.cli.load import load_pipeline
from tidegate.errors import InvalidPipeline

WITH_A_HELPER = """
from dataclasses import dataclass

import tidegate as tg

pipeline = tg.Pipeline("helped")

@dataclass
class Price:
    net: int

def gross(net):
    return Price(net).net * 2

def stage_function():
    return lambda net: gross(net) + 1
"""


def test_functions_of_the_file_work_in_a_process_that_cannot_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # as it was, after the test
    file = tmp_path / "helped.py"
    file.write_text(WITH_A_HELPER, encoding="utf-8")
    load_pipeline(file, None, to_run=True)
    used = sys.modules["tidegate_pipeline_helped"].stage_function()
    cloudpickle: Any = importlib.import_module("pyspark.cloudpickle")
    sent = base64.b64encode(cloudpickle.dumps(used)).decode()
    program = "import base64, pickle, sys; print(pickle.loads(base64.b64decode(sys.argv[1]))(20))"
    done = subprocess.run(
        [sys.executable, "-c", program, sent], capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )
    assert done.stdout == "41\n", done.stderr


WITH_A_UDF = """
import beside
import tidegate as tg
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

pipeline = tg.Pipeline("udfs")

def twice(value):
    return beside.checked(value) * 2

@F.udf(LongType())
def doubled(value):
    return twice(value)

@pipeline.source
def rows(spark):
    return spark.readStream.schema("id long").json("in")

@pipeline.sink(tg.DeltaTable("lake/table"))
def table(rows):
    @F.udf("long")
    def next_of(value):
        return twice(value) + 1

    return rows.select(doubled("id").alias("twice"), next_of("id").alias("next"))
"""


@pytest.mark.slow
@pytest.mark.spark
def test_a_udf_may_call_functions_of_the_file_and_of_modules_beside_it(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "udfs.py").write_text(WITH_A_UDF, encoding="utf-8")
    (code / "beside.py").write_text("def checked(value):\n    return value\n", encoding="utf-8")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text("\n".join(json.dumps({"id": each}) for each in range(3)), encoding="utf-8")
    done = tidegate("run", "code/udfs.py", "--root", "root", "--available-now", "--restarts", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = deltalake.DeltaTable(tmp_path / "lake" / "table").to_pyarrow_table().sort_by("twice").to_pylist()
    assert found == [{"twice": 2 * each, "next": 2 * each + 1} for each in range(3)]


def test_drawing_a_file_that_does_without_spark_does_not_import_it(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text("import tidegate as tg\npipeline = tg.Pipeline('plain')\n", encoding="utf-8")
    program = (
        "import sys, pathlib, tidegate.cli.load as load; load.load_pipeline(pathlib.Path(sys.argv[1]), None); "
        "print('pyspark' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("early", ["F.udf(abs, 'long')", "F.col('amount') > 1"])
def test_what_needs_spark_too_early_is_told_with_its_line_and_what_to_do(tmp_path: Path, early: str) -> None:
    source = f"from pyspark.sql import functions as F\n\nearly = {early}\n"
    (tmp_path / "early.py").write_text(source, encoding="utf-8")
    done = tidegate("graph", "early.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: early.py cannot be loaded at line 3: this needs Spark")
    assert "inside the function of a stage" in done.stderr
    assert "LongType()" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_assertion_of_the_files_own_is_told_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "asserts.py"
    file.write_text("assert 1 == 2, 'no sense'\n", encoding="utf-8")
    with pytest.raises(InvalidPipeline, match=r"at line 1: AssertionError: no sense"):
        load_pipeline(file, None)


def test_a_line_is_named_however_the_file_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    file = tmp_path / "code" / "wrong.py"
    file.write_text("def f():\n    return 1 / 0\n\nx = 1\nf()\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for given in (
        file,
        Path("code/wrong.py"),
        Path("code/../code/wrong.py"),
        Path("../" + tmp_path.name) / "code/wrong.py",
    ):
        with pytest.raises(InvalidPipeline, match=r"cannot be loaded at line 2: ZeroDivisionError"):
            load_pipeline(given, None)


def test_two_pipelines_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "twice.py"
    file.write_text(
        "import tidegate as tg\nfirst = tg.Pipeline('orders')\nsecond = tg.Pipeline('orders')\n", encoding="utf-8"
    )
    for name in (None, "orders"):
        with pytest.raises(InvalidPipeline, match=r"two pipelines called 'orders'; give one of them another name"):
            load_pipeline(file, name)


def test_one_pipeline_may_have_two_names_in_its_file(tmp_path: Path) -> None:
    file = tmp_path / "once.py"
    file.write_text("import tidegate as tg\nfirst = tg.Pipeline('orders')\nsecond = first\n", encoding="utf-8")
    assert load_pipeline(file, None).name == "orders"
