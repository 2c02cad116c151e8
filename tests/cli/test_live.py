"""A pipeline on Spark in one terminal, and every other command in a second one."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.harness import TIDEGATE, tidegate, wait_until
from tests.cli.strict import answered, told
from tests.test_documents import example
from tidegate.cli.answers import (
    CancelledAnswer,
    CheckpointEvent,
    EndedEvent,
    Event,
    StagesEvent,
    StartingEvent,
    StatusAnswer,
    StoppedAnswer,
    StoppingEvent,
    TakenAnswer,
)
from tidegate.engine.status import CheckpointStatus, StartingStep

RUN = "tidegate run orders.py --root state/orders"
ROOT = Path("state/orders")


def put(folder: Path, first: int) -> None:
    """A file of a hundred orders, all of them large."""
    rows = [
        {"id": each, "ts": f"2026-01-01T00:{each % 60:02d}:00Z", "country": "DE", "amount": 100}
        for each in range(first, first + 100)
    ]
    hidden = folder / "orders" / f".{first}"
    hidden.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    hidden.rename(folder / "orders" / f"{first}.json")


@pytest.mark.slow
@pytest.mark.spark
def test_a_run_is_looked_at_and_told_from_another_terminal(tmp_path: Path) -> None:
    def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = tidegate(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    (tmp_path / "orders.py").write_text(example(), encoding="utf-8")
    (tmp_path / "orders").mkdir()
    put(tmp_path, 0)
    command = [TIDEGATE, *shlex.split(RUN)[1:], "--json", "--checkpoint-interval", "1h"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as run:
        try:
            wait_until(lambda: tidegate("status", "--root", ROOT, cwd=tmp_path).returncode == 0)
            wait_until(lambda: state(tmp_path) == "running")
            put(tmp_path, 100)
            wait_until(lambda: rows(tmp_path, "large_orders") == 200)

            taken = answered(asked("checkpoint", "--root", str(ROOT), "--full", "--json").stdout)
            assert isinstance(taken, TakenAnswer)
            assert (taken.checkpoint.checkpoint, taken.checkpoint.full) == ("ckpt-000001", True)
            assert taken.checkpoint.new_bytes
            cancelled = answered(asked("cancel", "--root", str(ROOT), "--json").stdout)
            assert isinstance(cancelled, CancelledAnswer)
            assert cancelled.checkpoints == (), "none is in progress"
            assert "ckpt-000001" in asked("checkpoints", "--root", str(ROOT)).stdout
            assert "source orders stands at" in asked("checkpoints", "1", "--root", str(ROOT)).stdout
            assert "intact" in asked("verify", "--root", str(ROOT)).stdout
            assert "large_orders" in asked("graph", "--root", str(ROOT)).stdout
            said = asked("status", "--root", str(ROOT)).stdout
            assert f"process {run.pid}" in said
            assert "revenue" in said

            second = tidegate("run", "orders.py", "--root", ROOT, cwd=tmp_path)
            assert second.returncode == 3
            assert f"process {run.pid}" in second.stderr

            stopped = answered(asked("stop", "--root", str(ROOT), "--json").stdout)
            assert isinstance(stopped, StoppedAnswer)
            assert (stopped.state, stopped.why) == ("finished", "it was told to stop")
            output, _ = run.communicate(timeout=120)
        finally:
            run.kill()
    assert run.returncode == 0
    check_events(told(output), taken.checkpoint)
    after = tidegate("status", "--root", ROOT, cwd=tmp_path)
    assert after.returncode == 6
    assert "because it was told to stop" in after.stdout
    assert "goes on from ckpt-000002" in after.stdout


def check_events(events: list[Event], taken: CheckpointStatus) -> None:
    """Of a run that has taken one checkpoint on demand, and its last one."""
    checkpoints = [event.checkpoint for event in events if isinstance(event, CheckpointEvent)]
    complete = [checkpoint for checkpoint in checkpoints if checkpoint.state == "complete"]
    assert [checkpoint.checkpoint for checkpoint in complete] == ["ckpt-000001", "ckpt-000002"]
    assert {checkpoint.state for checkpoint in checkpoints} <= {"committing", "complete"}
    assert complete[0] == taken
    assert complete[1].drain
    check_steps([event.step for event in events if isinstance(event, StartingEvent)])
    kinds = [type(event) for event in events if not isinstance(event, StartingEvent | CheckpointEvent | StagesEvent)]
    assert kinds == [StoppingEvent, EndedEvent]
    assert isinstance(events[-1], EndedEvent)
    assert events[-1].why == "it was told to stop"


def check_steps(steps: list[StartingStep]) -> None:
    assert list(dict.fromkeys(each.step for each in steps)) == [
        "checking",
        "starting_spark",
        "making_session",
        "calling_functions",
        "reading_checkpoint",
        "checking_tables",
        "laying_out",
        "starting_queries",
    ]
    called = [(each.stage, each.number, each.of) for each in steps if each.step == "calling_functions"]
    assert called == [("orders", 1, 4), ("large", 2, 4), ("large_orders", 3, 4), ("revenue", 4, 4)]


def state(folder: Path) -> str:
    found = answered(tidegate("status", "--root", ROOT, "--json", cwd=folder).stdout)
    assert isinstance(found, StatusAnswer)
    return "" if found.run is None else found.run.state


def rows(folder: Path, stage: str) -> int:
    found = answered(tidegate("status", "--root", ROOT, "--json", cwd=folder).stdout)
    assert isinstance(found, StatusAnswer)
    assert found.run is not None
    return found.run.stages[stage].rows


@pytest.mark.slow
@pytest.mark.spark
def test_spark_that_cannot_be_started_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "orders.py").write_text(example(), encoding="utf-8")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no-java"))
    done = tidegate("run", "orders.py", "--root", ROOT, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Java 17 or 21" in line
    assert "Traceback" not in done.stderr


HANGS = """
import time
from pathlib import Path

import tidegate as tg

pipeline = tg.Pipeline("hangs")

def hang(rows, epoch):
    Path("hangs").touch()
    time.sleep(3600)

@pipeline.source
def rows(spark):
    return spark.readStream.schema("id long").json("orders")

@pipeline.sink(tg.ForeachBatch(hang))
def table(rows):
    return rows
"""


@pytest.mark.slow
@pytest.mark.spark
def test_a_second_signal_ends_a_run_at_once_though_a_sink_hangs(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS, encoding="utf-8")
    (tmp_path / "orders").mkdir()
    put(tmp_path, 0)
    command = [TIDEGATE, "run", "hangs.py", "--root", str(ROOT), "--checkpoint-interval", "200ms", "--json"]
    with (
        (tmp_path / "events").open("w") as events,
        subprocess.Popen(command, cwd=tmp_path, stdout=events, stderr=subprocess.PIPE, text=True) as run,
    ):
        try:
            wait_until((tmp_path / "hangs").exists)
            run.send_signal(signal.SIGINT)
            wait_until(lambda: state(tmp_path) == "stopping")
            assert run.poll() is None
            assert "stopping after a last checkpoint" in tidegate("status", "--root", ROOT, cwd=tmp_path).stdout
            run.send_signal(signal.SIGINT)
            interrupted = time.monotonic()
            assert run.wait(timeout=60) == 130
            assert time.monotonic() - interrupted < 3
            assert run.stderr is not None
            said = run.stderr.read()
        finally:
            run.kill()
    last = told((tmp_path / "events").read_text())[-1]
    assert isinstance(last, EndedEvent)
    assert (last.state, last.why, last.exit) == ("interrupted", "stopped at once by a second signal", 130)
    assert said.endswith(
        "stopped at once by a second signal; the next run goes on from the newest checkpoint, if there is one\n"
    )
    assert "Traceback" not in said
    assert "stopped at once by a second signal" in tidegate("status", "--root", ROOT, cwd=tmp_path).stdout
