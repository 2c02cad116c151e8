"""`--json`: every answer of every command is of the one schema, in all its outcomes, errors included."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.cli.harness import TIDEGATE, LiveRun, ended_checkpoint, live_run, make_root, said, tidegate, wait_until
from tests.cli.strict import answered, told
from tests.spark.played import played
from tidegate.cli.answers import (
    CheckpointAnswer,
    CheckpointEvent,
    CheckpointsAnswer,
    EndedEvent,
    ErrorAnswer,
    ErrorEvent,
    GraphAnswer,
    ReplayAnswer,
    RestartingEvent,
    SimulateAnswer,
    StagesEvent,
    StatusAnswer,
    StoppingEvent,
    TakenAnswer,
    VerifyAnswer,
)
from tidegate.cli.view import JsonView
from tidegate.engine.control import Life
from tidegate.engine.outlook import NextStart
from tidegate.engine.root import Root
from tidegate.engine.status import CheckpointStatus, Observer, status_of
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.lock import RootLock
from tidegate.storage.paths import RootPaths

PIPELINE = """
import tidegate as tg

print("a file may print what it wants")
pipeline = tg.Pipeline("drawn")

@pipeline.source
def rows(spark): ...

@pipeline.sink(tg.DeltaTable("lake/kept"))
def kept(rows): ...
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("made"), checkpoints=4)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "root"))


# -- a run that is alive ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """It has completed a checkpoint, has aborted one and has one in progress."""
    with live_run(tmp_path_factory.mktemp("alive"), checkpoints=1) as run:
        run.pipeline.played["rows"].run_batch()  # nobody consumes it: checkpoints stay in progress
        wait_until(lambda: run.may_read("middle", "rows"))
        generation = run.pipeline.generation
        for action in (generation.trigger, generation.cancel, generation.trigger):
            run.in_its_thread(action)
            done = generation.coordinator.active
            wait_until(lambda done=done: not done or "rows" in done[0].reports)  # type: ignore[misc]
        yield run


def checkpoints_of(run: LiveRun) -> dict[str, dict[str, CheckpointStatus]]:
    """By their names, as `status` and as `checkpoints` tell them, once the run has written down all of them."""
    wait_until(lambda: bool((status := said(run.root)) and status.in_progress and len(status.checkpoints) == 2))
    status = answered(tidegate("status", "--root", run.root, "--json").stdout)
    assert isinstance(status, StatusAnswer)
    assert status.run is not None
    listed = answered(tidegate("checkpoints", "--root", run.root, "--json").stdout)
    assert isinstance(listed, CheckpointsAnswer)
    return {
        "status": {each.checkpoint: each for each in (*status.run.checkpoints, *status.run.in_progress)},
        "checkpoints": {each.checkpoint: each for each in listed.checkpoints},
    }


def test_a_checkpoint_is_told_alike_by_every_command(run: LiveRun) -> None:
    by_status, by_list = checkpoints_of(run).values()
    assert {name: each.state for name, each in by_status.items()} == {
        "ckpt-000001": "complete",
        "ckpt-000002": "aborted",
        "ckpt-000003": "preparing",
    }
    for name in ("ckpt-000001", "ckpt-000002"):
        assert by_status[name] == by_list[name]
        assert list(by_status[name].stages) == list(by_list[name].stages) == ["rows", "middle", "table"]
    in_full = answered(tidegate("checkpoints", "1", "--root", run.root, "--json").stdout)
    assert isinstance(in_full, CheckpointAnswer)
    assert in_full.checkpoint == by_status["ckpt-000001"]
    inspected = InspectedRoot(run.root)
    assert inspected.manifest(inspected.find(1)).triggered_at == in_full.checkpoint.triggered_at
    first, again = (status_of(run.pipeline.generation, run.pipeline.generation.coordinator.history[0]) for _ in "12")
    assert first == again == in_full.checkpoint


def test_the_stages_of_a_checkpoint_that_ended_are_told(run: LiveRun) -> None:
    complete, aborted, in_progress = checkpoints_of(run)["status"].values()
    for stage in ("rows", "middle", "table"):
        part = complete.stages[stage]
        assert (part.progress, part.cut) == ("done", 0)
        assert part.total_bytes
        assert None not in (part.barrier_ms, part.alignment_ms, part.snapshot_ms)
    assert aborted.why == "cancelled by the user: tidegate cancel"
    for checkpoint in (aborted, in_progress):
        assert {name: part.progress for name, part in checkpoint.stages.items()} == {
            "rows": "done",
            "middle": "catching_up",
            "table": "waiting",
        }
        assert checkpoint.aligned is None
        assert checkpoint.stages["rows"].cut is not None
        assert checkpoint.stages["table"].cut is None


def test_a_live_run_answers(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        done = tidegate("checkpoint", "--root", run.root, "--json")
        taken = answered(done.stdout)
        assert isinstance(taken, TakenAnswer)
        assert (taken.checkpoint.checkpoint, taken.checkpoint.state) == ("ckpt-000001", "complete")
        assert taken.checkpoint.stages.keys() == {"rows", "middle", "table"}
        status = answered(tidegate("status", "--root", run.root, "--json").stdout)
        assert isinstance(status, StatusAnswer)
        assert status.life is Life.ALIVE
        assert status.heard_at is not None
        assert status.next_start == NextStart("goes_on", "ckpt-000001")
        run.pipeline.played["rows"].run_batch()
        wait_until(lambda: run.may_read("middle", "rows"))
        late = tidegate("checkpoint", "--root", run.root, "--timeout", "300ms", "--json")
        error = answered(late.stdout)
        assert isinstance(error, ErrorAnswer)
        assert (error.error, error.retry_helps, error.exit) == ("RequestFailed", True, 1)
        assert late.stderr == f"error: {error.message}\n"


def test_a_stage_that_declines_is_told_as_such(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        generation = pipeline.generation
        pipeline.one_batch_each()
        pipeline.table.refusal = "for a test"
        checkpoint_id = generation.trigger()
        pipeline.poll_until(lambda: not generation.is_under_way(checkpoint_id))
        told_of = status_of(generation, generation.coordinator.history[-1])
    assert told_of.state == "aborted"
    assert told_of.why == "a stage declined: stage 'table': for a test"
    assert {name: part.progress for name, part in told_of.stages.items()}["table"] == "declined"


# -- a root without a run ---------------------------------------------------------------------------


def test_a_root_without_a_run_answers(root: Path) -> None:
    done = tidegate("status", "--root", root, "--json")
    status = answered(done.stdout)
    assert isinstance(status, StatusAnswer)
    assert (done.returncode, status.life, status.heard_at, status.run) == (6, Life.STOPPED, None, None)
    assert status.newest_checkpoint == "ckpt-000004"
    listed = answered(tidegate("checkpoints", "--root", root, "--json").stdout)
    assert isinstance(listed, CheckpointsAnswer)
    assert [each.state for each in listed.checkpoints] == ["complete"] * 3
    assert all(each.stages.keys() == {"rows", "middle", "table"} for each in listed.checkpoints)
    refused = answered(tidegate("checkpoint", "--root", root, "--json").stdout)
    assert isinstance(refused, ErrorAnswer)
    assert (refused.error, refused.exit) == ("NotRunning", 6)


def test_a_run_that_hangs_or_has_ended_is_told(root: Path) -> None:
    paths = RootPaths(root)
    last = msgspec.structs.replace(
        Observer("flat").status,
        state="failed",
        why="for a test",
        updated_at="2026-01-02T03:04:05.000+00:00",
        checkpoints=(ended_checkpoint(9, "aborted", "for a test"),),
    )
    for state, is_held, code in (("failed", False, 6), ("running", True, 7), ("failed", True, 0)):
        (paths.root / RootPaths.STATUS).write_bytes(msgspec.json.encode({**msgspec.to_builtins(last), "state": state}))
        with RootLock(paths.lock if is_held else root.parent / "another"):
            done = tidegate("status", "--root", root, "--json")
        status = answered(done.stdout)
        assert isinstance(status, StatusAnswer)
        assert done.returncode == code
        assert (status.heard_at is not None) is is_held
        # What an earlier run has left says nothing of the one that holds the root.
        assert (status.run is None) is (is_held and state == "failed")
    listed = answered(tidegate("checkpoints", "--root", root, "--json").stdout)
    assert isinstance(listed, CheckpointsAnswer)
    assert (listed.checkpoints[-1].checkpoint, listed.checkpoints[-1].why) == ("ckpt-000009", "for a test")


def test_a_root_without_a_checkpoint_answers(tmp_path: Path) -> None:
    Root(tmp_path, "flat")
    for command in ("status", "checkpoints", "verify"):
        answer = answered(tidegate(command, "--root", tmp_path, "--json").stdout)
        if not isinstance(answer, VerifyAnswer):
            assert isinstance(answer, StatusAnswer | CheckpointsAnswer)
            assert answer.next_start == NextStart("fresh")
    error = answered(tidegate("graph", "--root", tmp_path, "--json").stdout)
    assert isinstance(error, ErrorAnswer)
    assert error.error == "NoRoot"


def test_damage_is_told(root: Path) -> None:
    (root / "generations" / "000001" / "manifests" / "ckpt-000003.json").write_bytes(b"{}")
    listed = answered(tidegate("checkpoints", "--root", root, "--json").stdout)
    assert isinstance(listed, CheckpointsAnswer)
    damaged = listed.checkpoints[1]
    assert (damaged.checkpoint, damaged.state, damaged.epoch) == ("ckpt-000003", "damaged", 3)
    assert damaged.triggered_at is None
    assert damaged.why is not None
    done = tidegate("verify", "--root", root, "--json")
    verified = answered(done.stdout)
    assert isinstance(verified, VerifyAnswer)
    assert done.returncode == 4
    assert [each.state for each in verified.checkpoints] == ["intact", "damaged", "intact"]
    error = answered(tidegate("checkpoints", "3", "--root", root, "--json").stdout)
    assert isinstance(error, ErrorAnswer)
    assert (error.error, error.exit) == ("DamagedCheckpoint", 4)
    max((root / "decisions").iterdir()).write_bytes(b"nonsense")
    for command in ("status", "graph"):
        error = answered(tidegate(command, "--root", root, "--json").stdout)
        assert isinstance(error, ErrorAnswer)
        assert (error.error, error.exit) == ("DamagedLog", 4)


def test_an_unaligned_checkpoint_tells_what_was_in_flight(tmp_path: Path) -> None:
    config = CheckpointConfig(interval_ms=3_600_000, alignment=AlignmentConfig(unaligned="always", timeout_ms=0))
    with played(tmp_path, config=config) as pipeline:
        pipeline.one_batch_each()
        pipeline.played["rows"].run_batch()
        pipeline.checkpoint()
        root = pipeline.root.paths.root
    answer = answered(tidegate("checkpoints", "1", "--root", root, "--json").stdout)
    assert isinstance(answer, CheckpointAnswer)
    assert answer.checkpoint.aligned is False
    in_flight = answer.in_flight["middle"]["rows"]
    assert in_flight == answer.checkpoint.in_flight_bytes == answer.checkpoint.stages["middle"].in_flight_bytes
    assert in_flight


# -- graph ------------------------------------------------------------------------------------------


def test_a_graph_is_told_of_a_file_and_of_a_root(tmp_path: Path, made: Path) -> None:
    (tmp_path / "drawn.py").write_text(PIPELINE, encoding="utf-8")
    done = tidegate("graph", "drawn.py", "--json", cwd=tmp_path)
    of_file = answered(done.stdout)
    assert isinstance(of_file, GraphAnswer)
    assert (of_file.pipeline, of_file.checkpoint) == ("drawn", None)
    assert [(name, each.kind, each.inputs) for name, each in of_file.stages.items()] == [
        ("rows", "source", ()),
        ("kept", "sink", ("rows",)),
    ]
    table = of_file.stages["kept"].table
    assert table is not None
    assert table.address.endswith("lake/kept")
    assert "may print" in done.stderr, "what a file prints is not lost, and is no part of the answer"
    of_root = answered(tidegate("graph", "--root", made, "--json").stdout)
    assert isinstance(of_root, GraphAnswer)
    assert (of_root.pipeline, of_root.checkpoint) == ("flat", "ckpt-000004")
    assert of_root.stages["middle"].inputs == ("rows",)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "draw either a file or a root"),
        (("folder",), "folder is a folder; of a root: tidegate graph --root folder"),
    ],
)
def test_a_graph_is_drawn_of_either_a_file_or_a_root(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "drawn.py").write_text(PIPELINE, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    done = tidegate("graph", *arguments, "--json", cwd=tmp_path)
    assert done.returncode == 2
    error = answered(done.stdout)
    assert isinstance(error, ErrorAnswer)
    assert said in error.message


# -- simulate ---------------------------------------------------------------------------------------


def test_simulated_runs_are_told() -> None:
    search = answered(tidegate("simulate", "--seeds", "5", "--jobs", "1", "--json").stdout)
    assert isinstance(search, SimulateAnswer)
    assert (search.seeds, search.failures) == (5, ())
    replay = answered(tidegate("simulate", "--seed", "3", "--json").stdout)
    assert isinstance(replay, ReplayAnswer)
    assert (replay.seed, replay.failure) == (3, None)


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        "--json",
        "frobnicate --json",
        "status --json --frobnicate",
        "verify --json --root",
        "checkpoints latest --root x --json",
        "verify --root hdfs://host/x --json",
    ],
)
def test_wrong_usage_is_an_answer_too(arguments: str) -> None:
    done = tidegate(*arguments.split())
    error = answered(done.stdout)
    assert isinstance(error, ErrorAnswer)
    assert done.returncode == error.exit == 2
    assert error.error in ("WrongUsage", "InvalidConfig")
    assert "--help" in error.message or "is not a local folder" in error.message
    assert done.stderr, "people are told as ever"


def test_wrong_usage_of_a_run_is_its_last_event(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(PIPELINE, encoding="utf-8")
    for arguments, error, code in (
        (("drawn.py", "--root", "root", "--conf", "x"), "WrongUsage", 2),
        (("drawn.py", "--root", "root", "--checkpoint-interval", "0s"), "InvalidConfig", 2),
        (("drawn.py", "--root", "drawn.py"), "NoRoot", 3),
    ):
        done = tidegate("run", *arguments, "--json", cwd=tmp_path)
        (event,) = told(done.stdout)
        assert isinstance(event, ErrorEvent)
        assert (event.error, event.exit, done.returncode) == (error, code, code)


@pytest.mark.parametrize("command", ["checkpoint", "graph"])
def test_a_folder_that_is_no_root_is_an_answer_too(tmp_path: Path, command: str) -> None:
    done = tidegate(command, "--root", tmp_path, "--json")
    error = answered(done.stdout)
    assert isinstance(error, ErrorAnswer)
    assert (error.error, error.retry_helps, error.exit) == ("NoRoot", False, 3)
    assert done.returncode == 3


def test_what_nobody_has_foreseen_is_an_answer_too_and_its_trace_goes_to_stderr(root: Path) -> None:
    program = f"""
import sys
sys.argv = ["tidegate", "status", "--root", {str(root)!r}, "--json"]
from tidegate.cli import app, status
status.look.__code__ = (lambda place: 1 / 0).__code__
app.main()
"""
    command = [str(Path(TIDEGATE).with_name("python")), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    error = answered(done.stdout)
    assert isinstance(error, ErrorAnswer)
    assert (error.error, error.message, error.exit) == ("ZeroDivisionError", "division by zero", 1)
    assert "ZeroDivisionError" in done.stderr


def test_who_stops_reading_hears_no_complaint(made: Path) -> None:
    command = f"{TIDEGATE} checkpoints --root {made} --json | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


# -- a run's events ---------------------------------------------------------------------------------


def test_the_events_of_a_run_are_told_each_in_its_turn(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a real run on Spark are decoded in tests/cli/test_live.py."""
    view, status = JsonView(), msgspec.structs.replace(Observer("flat").status, state="running", generation=1)
    for state, checkpoints in (
        ("running", (ended_checkpoint(1, "committing"),)),
        ("running", (ended_checkpoint(1),)),
        ("restarting", (ended_checkpoint(1), ended_checkpoint(2, "aborted", "for a test"))),
        ("stopping", (ended_checkpoint(1), ended_checkpoint(2, "aborted", "for a test"))),
        ("finished", (ended_checkpoint(1), ended_checkpoint(2, "aborted", "for a test"))),
    ):
        for _ in range(2):
            view.update(msgspec.structs.replace(status, state=state, why="for a test", checkpoints=checkpoints))
    events = told(capsys.readouterr().out)
    assert [type(event) for event in events] == [
        CheckpointEvent,
        StagesEvent,
        CheckpointEvent,
        CheckpointEvent,
        RestartingEvent,
        StoppingEvent,
        EndedEvent,
    ]
    assert [event.checkpoint.state for event in events if isinstance(event, CheckpointEvent)] == [
        "committing",
        "complete",
        "aborted",
    ]
    assert json.loads(msgspec.json.encode(events[0]))["version"] == 1
