"""Several simulated instances run one pipeline: nothing is found, runs repeat themselves, all kinds of trouble come."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tidegate.testing.simulator.whole import random_together_scenario, simulate_together


def test_some_seeds_with_instances_break_no_guarantee_and_cover_what_can_go_wrong() -> None:
    outcomes = [simulate_together(seed) for seed in range(30)]
    failed = [outcome for outcome in outcomes if outcome.failure]
    assert not failed, "\n".join(f"{outcome.failure}\n  {outcome.replay}" for outcome in failed[:5])
    assert sum(len(outcome.completions) for outcome in outcomes) > 200
    assert sum(outcome.aborted > 0 for outcome in outcomes) >= 10
    assert sum(outcome.crashes for outcome in outcomes) > 20
    assert sum(outcome.generations for outcome in outcomes) > 100


@pytest.mark.slow
@pytest.mark.soak  # some seeds are in CI
@pytest.mark.parametrize("first", [30, 130])
def test_hundreds_of_seeds_with_instances_break_no_guarantee(first: int) -> None:
    failed = [outcome for seed in range(first, first + 100) if (outcome := simulate_together(seed)).failure]
    assert not failed, "\n".join(f"{outcome.failure}\n  {outcome.replay}" for outcome in failed[:5])


def test_a_seed_with_instances_gives_the_same_run_every_time() -> None:
    assert simulate_together(9, trace=True) == simulate_together(9, trace=True)


def test_a_seed_with_instances_gives_the_same_run_in_every_process() -> None:
    script = (
        "from tidegate.testing.simulator.whole import simulate_together\n"
        "for seed in (5, 22): print(*simulate_together(seed, trace=True).trace, sep='\\n')"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert "is complete" in runs[0]
    assert runs[0] == runs[1]


def test_all_kinds_of_trouble_come() -> None:
    traces = "\n".join(line for seed in range(55) for line in simulate_together(seed, trace=True).trace)
    for told in (
        "is cut off from keys",
        "is cut off from store",
        "is cut off from both",
        "expires early",
        "is in doubt",
        "is told to leave",
        "others may have taken this process for dead",
        "another instance leads",
        "was started again",
        "is missing for",
        "has come",
        "leaves",
    ):
        assert told in traces, told


def test_what_a_seed_decides_of_instances_covers_all() -> None:
    drawn = [random_together_scenario(seed).together for seed in range(30)]
    assert {each.instances for each in drawn} == {2, 3}
    assert {bool(each.late) for each in drawn} == {bool(each.pinned) for each in drawn} == {False, True}
