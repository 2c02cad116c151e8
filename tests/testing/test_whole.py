"""The simulator at its second depth finds nothing, repeats itself, and goes where things can go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import msgspec
import pytest

from tidegate.protocol.drift import WatermarkDrift
from tidegate.testing.simulator.whole import random_whole_scenario, simulate_whole


def test_some_whole_seeds_break_no_guarantee_and_cover_what_can_go_wrong() -> None:
    outcomes = [simulate_whole(seed) for seed in range(50)]
    failed = [outcome for outcome in outcomes if outcome.failure]
    assert not failed, "\n".join(f"{outcome.failure}\n  {outcome.replay}" for outcome in failed[:5])
    assert sum(len(outcome.completions) for outcome in outcomes) > 200
    assert sum(outcome.unaligned for outcome in outcomes) > 30
    assert sum(outcome.aborted > 0 for outcome in outcomes) >= 10  # by seeds: one of them may see dozens
    assert sum(outcome.crashes for outcome in outcomes) > 30
    assert sum(outcome.generations for outcome in outcomes) > 100


def test_inputs_that_wait_for_the_slowest_break_no_guarantee(monkeypatch: pytest.MonkeyPatch) -> None:
    held: Counter[int] = Counter()
    show = WatermarkDrift.show

    def seen(stage: WatermarkDrift, room: dict[str, int]) -> dict[str, int]:
        shown = show(stage, room)
        held[seed] += len(stage.held)
        return shown

    monkeypatch.setattr(WatermarkDrift, "show", seen)
    for seed in range(24):
        scenario = msgspec.structs.replace(random_whole_scenario(seed), drift_ms=(1, 5, 20)[seed % 3])
        assert simulate_whole(seed, scenario).failure is None, seed
    assert sum(count > 10 for count in held.values()) >= 6, held


@pytest.mark.slow
@pytest.mark.soak  # some are in CI
@pytest.mark.parametrize("first", [40, 140])
def test_hundreds_of_whole_seeds_break_no_guarantee(first: int) -> None:
    failed = [outcome for seed in range(first, first + 100) if (outcome := simulate_whole(seed)).failure]
    assert not failed, "\n".join(f"{outcome.failure}\n  {outcome.replay}" for outcome in failed[:5])


def test_a_whole_seed_gives_the_same_run_every_time() -> None:
    assert simulate_whole(9, trace=True) == simulate_whole(9, trace=True)


def test_a_whole_seed_gives_the_same_run_in_every_process() -> None:
    script = (
        "from tidegate.testing.simulator.whole import simulate_whole\n"
        "for seed in (5, 7): print(*simulate_whole(seed, trace=True).trace, sep='\\n')"
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
