"""The simulator finds nothing, and would find something if it were there."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.testing.simulator import Mishaps, Scenario, Together, example_dag, random_scenario, simulate
from tidegate.testing.simulator.cluster import Cluster
from tidegate.testing.simulator.dag import random_dag
from tidegate.testing.simulator.leading import Moment
from tidegate.testing.simulator.world import Faults, Process, World


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(each, marks=pytest.mark.soak) for each in (250, 500, 750))])
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
        "is taken for dead",
        "is told that it was taken for dead",
        "does not see",
        "is cut off from the others until",
        "is cut off from the store until",
        "is cut off from the others and the store until",
        "ends its generation: another instance leads",
        "was started again",
        "is missing for",
        "has come",
        "leaves",
        "an instance was lost",
    ):
        assert what in happened


@pytest.mark.soak  # it takes long; some seeds are in CI
def test_some_seeds_let_a_process_sleep_through_trimming() -> None:
    traces = (simulate(seed, trace=True).trace for seed in range(500))
    assert any("which was trimmed, is claimed" in line for trace in traces for line in trace)


def quiet(seed: int) -> Scenario:
    return msgspec.structs.replace(
        random_scenario(seed, example_dag()),
        faults=Faults(),
        mishaps=Mishaps(),
    )


@pytest.mark.parametrize("instances", [1, 2, 3])
def test_without_faults_one_generation_is_opened_and_all_rows_arrive(instances: int) -> None:
    for seed in range(5):
        together = Together(at_first=instances)
        outcome = simulate(seed, msgspec.structs.replace(quiet(seed), instances=instances, together=together))
        assert outcome.failure is None
        assert outcome.crashes == 0
        # When the faults end, the simulator lets somebody take the lead, or a query die, or both. Who led before may be
        # taken for dead by then, and comes back.
        assert outcome.generations <= 4
        assert outcome.visible == outcome.expected


def asleep(instances: int) -> Scenario:
    """A leader that nobody disturbs, but for the pause that it is given."""
    together = Together(at_first=instances, grace_ms=100, clocks={"i0": 240_000, "i1": -90_000})
    return msgspec.structs.replace(quiet(0), instances=instances, together=together, fault_phase_ms=1_200)


def asked_for_by_leaders(scenario: Scenario) -> int:
    cluster = Cluster(scenario, 0)
    cluster.start()
    cluster.world.run(scenario.fault_phase_ms)
    return cluster.asked


@pytest.mark.slow
@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("instances", [2, 3])
def test_a_leader_may_sleep_at_anything_that_it_asks_for_while_another_one_takes_over(
    instances: int, moment: Moment
) -> None:
    """Before each and after each, of an opening, of checkpoints, commits and of cleaning up."""
    scenario = asleep(instances)
    asked = asked_for_by_leaders(scenario)
    assert asked > 40
    taken_over = 0
    for number in range(1, asked + 1):
        outcome = simulate(0, msgspec.structs.replace(scenario, pauses_leader_at=number, pauses_leader=moment))
        assert outcome.failure is None, f"at request {number}: {outcome.failure}"
        taken_over += outcome.generations > 1
    assert taken_over > asked * 0.9


def test_a_late_barrier_comes_to_a_stage_whose_snapshot_has_failed() -> None:
    assert simulate(21_192).failure is None


def test_a_seed_is_replayed_to_the_last_event() -> None:
    for seed in range(12):
        assert simulate(seed, trace=True) == simulate(seed, trace=True)


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
