"""`tidegate simulate`, as a user runs it: real processes, exit codes, output."""

from __future__ import annotations

import json

import pytest

from tests.cli.harness import tidegate
from tidegate.cli.app import app
from tidegate.cli.simulate import Depth, Tally, run_chunk
from tidegate.engine.stage.running import RunningStage
from tidegate.errors import InvariantViolation
from tidegate.protocol.aligner import Aligner
from tidegate.testing import simulate


def test_a_clean_search_exits_with_zero_and_says_so() -> None:
    done = tidegate("simulate", "--seeds", "60")
    assert done.returncode == 0
    assert "60 seeds" in done.stdout
    assert "every guarantee held" in done.stdout


def test_the_search_is_the_same_in_one_process_and_in_two() -> None:
    runs = [json.loads(tidegate("simulate", "--seeds", "60", "--jobs", jobs, "--json").stdout) for jobs in "12"]
    for run in runs:
        assert run.pop("seconds") > 0
    assert runs[0] == runs[1]
    assert runs[0]["seeds"] == 60
    assert runs[0]["failures"] == []


def test_a_replay_shows_what_happened() -> None:
    done = tidegate("simulate", "--seed", "3")
    assert done.returncode == 0
    assert "opened generation 1" in done.stdout
    assert "is complete" in done.stdout


def test_the_whole_of_it_is_searched_and_replayed() -> None:
    done = tidegate("simulate", "--whole", "--seeds", "4", "--jobs", "1")
    assert done.returncode == 0
    assert "4 seeds" in done.stdout
    assert "every guarantee held" in done.stdout
    done = tidegate("simulate", "--whole", "--seed", "3")
    assert done.returncode == 0
    assert "on 1 driver(s)" in done.stdout or "on 2 driver(s)" in done.stdout
    assert "opened generation 1" in done.stdout


def test_a_seed_below_zero_is_refused() -> None:
    assert tidegate("simulate", "--seed", "-1").returncode == 2


def test_a_broken_guarantee_is_told_with_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise InvariantViolation("broken on purpose")

    monkeypatch.setattr(Aligner, "on_time", broken)
    tally = run_chunk(5, 2)
    assert [failure.replay for failure in tally.failures] == [
        "tidegate simulate --seed 5",
        "tidegate simulate --seed 6",
    ]
    assert "broken on purpose" in tally.failures[0].failure


def test_so_is_one_that_is_broken_where_all_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken on purpose")  # no error of ours, with which a run would start again

    monkeypatch.setattr(RunningStage, "poll", broken)
    (failure,) = run_chunk(5, 1, depth=Depth.WHOLE).failures
    assert failure.replay == "tidegate simulate --whole --seed 5"
    assert "broken on purpose" in failure.failure
    (failure,) = run_chunk(5, 1, depth=Depth.TOGETHER).failures
    assert failure.replay == "tidegate simulate --together --seed 5"


def test_a_failure_with_brackets_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise InvariantViolation("stage [a] lacks [/b]")

    monkeypatch.setattr(Aligner, "on_time", broken)
    for arguments in (["--seeds", "1", "--jobs", "1"], ["--seed", "5"]):
        with pytest.raises(SystemExit, match="1"):
            app(["simulate", *arguments])
        assert "stage [a] lacks [/b]" in capsys.readouterr().out


def test_tallies_add_up() -> None:
    one, other = run_chunk(0, 3), run_chunk(3, 2)
    together = Tally()
    together.merge(one)
    together.merge(other)
    assert together == run_chunk(0, 5)


def test_the_version_is_told() -> None:
    assert tidegate("--version").stdout == "tidegate 0.1.0\n"


def test_a_seed_gives_the_same_run_every_time() -> None:
    assert simulate(11, trace=True) == simulate(11, trace=True)
