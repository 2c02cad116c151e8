"""Spark's process dies, or its session is stopped: told in one line, and started anew where it is ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.spark.harness import table_rows, write_input
from tidegate.errors import SinkFailed
from tidegate.spark.session import is_of_the_connection
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SOURCE = Path(__file__).parents[2]
ROWS_PER_FILE = 20
GONE = "Spark's process is gone: it was killed, ran out of memory, or its session was stopped"

# A function that is made before Spark is there, and lives on when the JVM that knew it does not; a stage and a sink
# with calls back from the JVM; a commit that needs Spark.
PIPELINE = """
from pathlib import Path

from pyspark.sql import functions as F
from pyspark.sql.types import LongType

import tidegate as tg
from tests.spark.harness import stream

FOLDER = Path(__file__).parent
twice = F.udf(lambda value: 2 * value, LongType())
pipeline = tg.Pipeline("lost")

@pipeline.source
def rows(spark):
    return stream(spark, FOLDER / "in", files_per_batch=1)

@pipeline.stage(output_mode="update")
def totals(rows):
    return rows.groupBy("key").agg(F.sum(twice("value")).alias("value"))

@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "ids"))
def ids(rows):
    return rows.select("id")

@pipeline.sink(tg.DeltaTable(FOLDER / "lake" / "values", key="key"), output_mode="update")
def values(totals):
    return totals
"""


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "lost.py").write_text(PIPELINE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE / "src")])}
    command = [sys.executable, "-m", "tidegate", "run", str(folder / "lost.py"), "--root", str(folder / "root")]
    command += ["--checkpoint-interval", "300ms", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_the_jvm(run: subprocess.Popen[str]) -> None:
    """Spark's process is a child of the run's."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            told = status.read_text(encoding="utf-8")
            if f"PPid:\t{run.pid}\n" in told and told.startswith("Name:\tjava\n"):
                os.kill(int(status.parent.name), signal.SIGKILL)
                return
    raise AssertionError("the run has no JVM")


def wait_until(run: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def shows_rows(folder: Path) -> bool:
    table = folder / "lake" / "ids"
    return (table / "_delta_log").exists() and bool(table_rows(table, ["id"]))


def last_checkpoint(folder: Path) -> int:
    return StoredDecisions(Folder(folder / "root")).read().last_checkpoint_id


@pytest.mark.soak  # it takes long; a session that is stopped is in CI
def test_a_run_whose_jvm_is_killed_says_so_in_one_line_or_starts_another_and_goes_on(tmp_path: Path) -> None:
    write_input(tmp_path / "in", 2, ROWS_PER_FILE)
    with started(tmp_path, "--restarts", "0") as run:
        wait_until(run, lambda: shows_rows(tmp_path))
        kill_the_jvm(run)
        said = run.communicate(timeout=120)[0]
    assert run.returncode == 1, said
    assert "Traceback" not in said
    assert said.splitlines()[-1] == f"error: {GONE}"

    write_input(tmp_path / "in", 14, ROWS_PER_FILE, first_file=2)
    before = last_checkpoint(tmp_path)
    with started(tmp_path, "--restarts", "1", "--available-now") as run:
        wait_until(run, lambda: last_checkpoint(tmp_path) > before)
        kill_the_jvm(run)
        said = run.communicate(timeout=240)[0]
    assert run.returncode == 0, said
    assert "Traceback" not in said
    (restarted,) = [line for line in said.splitlines() if "restarting" in line]
    assert f"WARNING {GONE}; restarting from the last checkpoint" in restarted
    rows = range(16 * ROWS_PER_FILE)
    assert table_rows(tmp_path / "lake" / "ids", ["id"]) == Counter((each,) for each in rows)
    expected = Counter((f"k{key}", 2 * sum(rows[key::5])) for key in range(5))
    assert table_rows(tmp_path / "lake" / "values", ["key", "value"]) == expected


GIVEN = """
import logging, sys, threading
from pathlib import Path

logging.basicConfig(level=logging.WARNING, format="%(message)s")
sys.path.insert(0, sys.argv[1])
from pyspark.sql import SparkSession
from tidegate.engine.run import run_pipeline
from tidegate.errors import SparkLost
import lost

session = SparkSession.builder.master("local[2]").getOrCreate()
stopping = []

def stop_spark(status):
    if status.generation == 1 and status.stages["ids"].rows and not stopping:
        stopping.append(threading.Thread(target=session.stop))
        stopping[0].start()

try:
    run_pipeline(lost.pipeline, Path(sys.argv[1]) / "root", session, view=stop_spark, checkpoint_interval="300ms")
except SparkLost as error:
    print("told:", error)
"""


def test_a_session_of_the_users_that_is_stopped_ends_the_run_with_one_clear_line(tmp_path: Path) -> None:
    write_input(tmp_path / "in", 2, ROWS_PER_FILE)
    (tmp_path / "lost.py").write_text(PIPELINE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE / "src")])}
    command = [sys.executable, "-c", GIVEN, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("told: ")]
    assert told == f"told: {GONE}; the run cannot start another one in its place: start the program again"


def test_an_error_that_was_raised_from_itself_is_looked_at_once() -> None:
    failed = SinkFailed("a table refuses a row")
    failed.__cause__ = failed
    assert not is_of_the_connection(failed)
