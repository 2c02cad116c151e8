"""The simulator finds nothing, and would find something if it were there."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.testing.simulator import Mishaps, Scenario, example_dag, random_scenario, simulate
from tidegate.testing.simulator.dag import random_dag
from tidegate.testing.simulator.world import Faults, Process, World


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 250, *(pytest.param(each, marks=pytest.mark.soak) for each in (500, 750))])
def test_a_thousand_seeds_break_no_guarantee(first: int) -> None:
    failed = [outcome for seed in range(first, first + 250) if (outcome := simulate(seed)).failure]
    assert not failed, "\n".join(f"{outcome.failure}\n  {outcome.replay}" for outcome in failed[:5])


def test_the_seeds_cover_what_can_go_wrong() -> None:
    """A search that never aborts, falls back, refuses or changes its leader would prove nothing."""
    outcomes = [simulate(seed, trace=True) for seed in range(60)]
    assert sum(outcome.unaligned for outcome in outcomes) > 30
    assert sum(outcome.aborted for outcome in outcomes) > 30
    assert sum(outcome.crashes for outcome in outcomes) > 30
    assert sum(outcome.generations for outcome in outcomes) > 120
    assert any(outcome.refused for outcome in outcomes)
    assert sum(len(outcome.completions) for outcome in outcomes) > 300
    happened = "\n".join(line for outcome in outcomes for line in outcome.trace)
    for what in (
        "the disk is full",
        "the store stands still",
        "is said to be taken",
        "cannot go on: stage",
        "steps down: instance",
        "steps down: the store failed",
        "is paused",
    ):
        assert what in happened


def test_some_seeds_let_a_process_sleep_through_trimming() -> None:
    traces = (simulate(seed, trace=True).trace for seed in range(500))
    assert any("which was trimmed, is claimed" in line for trace in traces for line in trace)


def quiet(seed: int) -> Scenario:
    return msgspec.structs.replace(
        random_scenario(seed, example_dag()),
        faults=Faults(),
        mishaps=Mishaps(),
    )


def test_without_faults_one_generation_is_opened_and_all_rows_arrive() -> None:
    outcome = simulate(1, quiet(1))
    assert outcome.failure is None
    assert outcome.crashes == 0
    # When the faults end, the simulator always holds an election, and then lets a query die.
    assert outcome.generations == 3
    assert outcome.visible == outcome.expected


def test_a_random_dag_has_no_output_that_nobody_reads() -> None:
    for seed in range(50):
        dag = random_dag(World(seed).random)
        for name, spec in dag.stages.items():
            assert spec.is_sink != bool(dag.readers(name))
            assert spec.is_source == (not spec.inputs)


def test_events_of_a_crashed_process_are_dropped_and_those_of_a_paused_one_are_late() -> None:
    world, crashed, paused = World(0), Process("crashed"), Process("paused")
    happened: list[tuple[str, int]] = []
    world.after(10, crashed, lambda: happened.append(("crashed", world.now)))
    world.after(10, paused, lambda: happened.append(("paused", world.now)))
    world.after(10, None, lambda: happened.append(("anyone", world.now)))
    crashed.crash()
    paused.paused_until = 50
    world.run(100)
    assert happened == [("anyone", 10), ("paused", 50)]
