"""A pipeline's file: what is loaded of it, what Spark's workers get of it, and what is said of one that is wrong."""

from __future__ import annotations

import base64
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import deltalake
import pytest
from pyspark.sql import SparkSession

import tidegate as tg
from tests.cli.harness import TIDEGATE, tidegate
from tests.spark.harness import run_to_end
from tidegate.cli.load import load_pipeline
from tidegate.errors import InvalidPipeline
from tidegate.spark.session import in_place

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
FACTOR = int(open("factor.txt").read())

def twice(value):
    return beside.checked(value) * FACTOR * int(open("factor.txt").read()) // 2

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


def write_ids(folder: Path, *ids: int) -> None:
    folder.mkdir(parents=True)
    (folder / "0.json").write_text("\n".join(json.dumps({"id": each}) for each in ids), encoding="utf-8")


def as_cron_runs_it(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Elsewhere, and with hardly any environment."""
    kept = {name: os.environ[name] for name in ("PATH", "JAVA_HOME", "PYTHONPATH") if name in os.environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=kept)


@pytest.mark.soak  # it takes long; modules on a cluster are in CI
@pytest.mark.slow
@pytest.mark.spark
def test_a_udf_may_call_functions_of_the_file_and_modules_and_files_beside_it_wherever_it_is_run(
    tmp_path: Path,
) -> None:
    code, elsewhere = tmp_path / "code", tmp_path / "elsewhere"
    write_ids(code / "in", 0, 1, 2)
    elsewhere.mkdir()
    (code / "udfs.py").write_text(WITH_A_UDF, encoding="utf-8")
    (code / "beside.py").write_text("def checked(value):\n    return value\n", encoding="utf-8")
    (code / "factor.txt").write_text("2", encoding="utf-8")
    (elsewhere / "given.txt").touch()
    options = ("--root", "root", "--conf", "spark.files=given.txt", "--available-now", "--restarts", "0")
    done = as_cron_runs_it(TIDEGATE, "run", "../code/udfs.py", *options, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    found = deltalake.DeltaTable(code / "lake" / "table").to_pyarrow_table().sort_by("twice").to_pylist()
    assert found == [{"twice": 2 * each, "next": 2 * each + 1} for each in range(3)]
    assert {each.name for each in code.iterdir()} == {"__pycache__", "beside.py", "factor.txt", "in", "lake", "udfs.py"}
    assert {each.name for each in elsewhere.iterdir()} == {"given.txt", "root"}


COPYING = """
import tidegate as tg

pipeline = tg.Pipeline("copying")

@pipeline.source
def rows(spark):
    return spark.readStream.schema("id long").json("in")

@pipeline.sink(tg.DeltaTable("lake/table"))
def table(rows):
    return rows
"""

RUNNING = """
import copying
from pathlib import Path

copying.pipeline.run("root", available_now=True, restarts=0)
print("still in", Path.cwd())
"""


@pytest.mark.slow
@pytest.mark.spark
def test_a_pipeline_that_another_program_runs_reads_and_writes_beside_its_own_file(
    tmp_path: Path, spark: SparkSession
) -> None:
    code, elsewhere = tmp_path / "code", tmp_path / "elsewhere"
    write_ids(code / "in", 0, 1, 2)
    write_ids(elsewhere / "in", 7)
    (code / "copying.py").write_text(COPYING, encoding="utf-8")
    (elsewhere / "main.py").write_text(f"import sys\nsys.path.append('../code')\n{RUNNING}", encoding="utf-8")
    done = as_cron_runs_it(sys.executable, "main.py", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert f"still in {elsewhere}" in done.stdout
    assert deltalake.DeltaTable(code / "lake" / "table").to_pyarrow_table()["id"].to_pylist() == [0, 1, 2]
    assert {each.name for each in elsewhere.iterdir()} == {"in", "main.py", "root"}

    shutil.rmtree(code / "lake")  # a table that another root has written to would be refused first
    here = Path.cwd()
    for path, told in (
        (
            "in",
            rf"reads .*in, which is not there at .*copying.py, line .* \(relative paths are taken from {here}\)",
        ),
        (
            "docs",
            rf"relative path 'docs', which means {code}/docs, .* the Spark session that is .* from {here}\.",
        ),
    ):
        (code / "copying.py").write_text(COPYING.replace('"in"', f'"{path}"'), encoding="utf-8")
        with pytest.raises(InvalidPipeline, match=rf"source 'rows' .*{told}"):
            run_to_end(load_pipeline(code / "copying.py", None), elsewhere / "another root", spark)


def test_relative_paths_of_options_are_those_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"spark.jars": "a.jar, /b.jar,s3://c/d.jar", "spark.driver.extraClassPath": "e:/f", "spark.app.name": "g"}
    assert in_place(given) == {
        "spark.jars": f"{tmp_path}/a.jar,/b.jar,s3://c/d.jar",
        "spark.driver.extraClassPath": f"{tmp_path}/e:/f",
        "spark.app.name": "g",
    }


def test_a_table_is_taken_from_the_folder_of_the_file_that_makes_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "copying.py").write_text(COPYING, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    sink = load_pipeline(Path("code/copying.py"), None).validated()[-1].sink
    assert sink is not None
    assert sink.table.address == f"{code}/lake/table"
    assert Path.cwd() == tmp_path
    made: dict[str, Any] = {}
    exec(COPYING, made)  # as in a notebook: there is no file
    assert made["pipeline"].folder == tmp_path

    class Named(tg.Pipeline):
        def __init__(self) -> None:
            super().__init__("named")

    assert Named().folder == Path(__file__).parent


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
