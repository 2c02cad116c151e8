"""From a seed to a verdict: a safety phase full of faults, then a liveness phase without any."""

from __future__ import annotations

import random
from typing import Final

import msgspec

from tidegate.errors import TidegateError
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig, UnalignedMode
from tidegate.testing.simulator.checkers import Completion, SimulationFailure
from tidegate.testing.simulator.cluster import Cluster, Mishaps, Scenario, Together
from tidegate.testing.simulator.dag import Dag, random_dag
from tidegate.testing.simulator.world import Faults

_LIVENESS_MS: Final = 20_000


class Outcome(msgspec.Struct, frozen=True):
    """How a seed ended. `failure` is None when every checker was content."""

    seed: int
    failure: str | None
    checker: str | None
    steps: int
    completions: tuple[Completion, ...]
    aborted: int
    generations: int
    crashes: int
    rows: dict[str, int]
    visible: dict[str, int]
    """Rows that each sink shows, over all paths that lead to it."""
    expected: dict[str, int]
    refused: str | None
    trace: tuple[str, ...]
    whole: bool = False

    @property
    def unaligned(self) -> int:
        return sum(not completion.record.aligned for completion in self.completions)

    @property
    def replay(self) -> str:
        return f"tidegate simulate{' --whole' if self.whole else ''} --seed {self.seed}"


def random_scenario(seed: int, dag: Dag | None = None) -> Scenario:
    """What happens in the run of this seed. Each kind of fault is absent from about half of the seeds."""
    rng = random.Random(f"scenario {seed}")

    def sometimes(highest: float) -> float:
        return rng.random() * highest if rng.random() < 0.5 else 0.0

    def up_to(most: int) -> int:
        return rng.randint(0, most) if rng.random() < 0.6 else 0

    dag = random_dag(rng) if dag is None else dag
    modes: tuple[UnalignedMode, ...] = ("never", "on_timeout", "always")
    config = CheckpointConfig(
        interval_ms=rng.choice((60, 120)),
        min_pause_ms=rng.choice((0, 20)),
        timeout_ms=rng.choice((250, 500)),
        tolerable_failures=3,
        max_concurrent=rng.choice((1, 1, 2, 3)),
        max_retained=rng.randint(1, 3),
        retain_ms=random.Random(f"retention {seed}").choice((0, 0, 300, 3_000)),
        incremental=rng.random() < 0.8,
        alignment=AlignmentConfig(
            unaligned=rng.choice(modes),
            timeout_ms=rng.choice((10, 40)),
            max_inflight_bytes=rng.choice((0, 300, 10**6)),
        ),
    )
    instances = rng.randint(1, 3)
    # Drawn apart: what else a seed does is the same, however many there are.
    others = random.Random(f"together {seed}")
    return Scenario(
        dag=dag,
        config=config,
        instances=instances,
        rows={name: rng.choice((0, 1, 60, 250, 500)) for name in dag.sources},
        faults=_with_kv_faults(
            others,
            lose_message=sometimes(0.2),
            store_fails=sometimes(0.1),
            store_fails_after_writing=sometimes(0.15),
            store_is_slow=sometimes(0.1),
            seems_to_exist=sometimes(0.3),
            sleeps_before_claim=sometimes(0.25),
        ),
        mishaps=Mishaps(
            crashes=up_to(4),
            pauses=up_to(3),
            spurious_elections=up_to(3),
            drains=1 if rng.random() < 0.15 else 0,
            damages=1 if rng.random() < 0.1 else 0,
            power_losses=rng.randint(1, 2) if rng.random() < 0.15 else 0,
            full_disks=up_to(2),
            standstills=1 if rng.random() < 0.3 else 0,
            dead_queries=up_to(2),
            **_mishaps_of_several(others),
        ),
        together=_together(others, dag, instances),
    )


def _with_kv_faults(rng: random.Random, **others: float) -> Faults:
    faults = Faults()
    for name, likely in others.items():
        setattr(faults, name, likely)
    for name, highest in (("kv_fails", 0.15), ("kv_lags", 0.3), ("lose_notice", 0.5), ("repeats", 0.3)):
        if rng.random() < 0.5:
            setattr(faults, name, rng.random() * highest)
    return faults


def _mishaps_of_several(rng: random.Random) -> dict[str, int]:
    return {
        name: rng.randint(1, most) if rng.random() < likely else 0
        for name, most, likely in (
            ("cut_offs", 3, 0.5),
            ("early_expiries", 2, 0.3),
            ("blinks", 3, 0.3),
            ("departures", 2, 0.25),
            ("deaths", 1, 0.2),
        )
    }


def _together(rng: random.Random, dag: Dag, instances: int) -> Together:
    """Half of them begin together, some know what they want to run, and no two clocks agree."""
    names = [f"i{index}" for index in range(instances)]
    late = rng.sample(names, rng.randint(0, instances - 1)) if rng.random() < 0.5 else []
    pinned = rng.sample(names, rng.randint(0, instances)) if rng.random() < 0.3 else []
    return Together(
        at_first=rng.randint(1, instances),
        grace_ms=rng.choice((0, 100, 250)),
        late={name: rng.randrange(1_200) for name in late},
        pinned={name: tuple(rng.sample(list(dag.stages), rng.randint(1, len(dag.stages)))) for name in pinned},
        clocks={name: rng.randint(-300_000, 300_000) for name in names} if rng.random() < 0.5 else {},
    )


def simulate(seed: int, scenario: Scenario | None = None, *, trace: bool = False) -> Outcome:
    """Run one seed. The same seed and scenario give the same outcome, to the last event."""
    scenario = random_scenario(seed) if scenario is None else scenario
    cluster = Cluster(scenario, seed)
    if trace:
        cluster.world.trace = []
    failure: str | None = None
    checker: str | None = None
    try:
        _run(cluster, scenario)
    except SimulationFailure as error:
        failure, checker = str(error), error.checker
    except TidegateError as error:
        failure, checker = f"{type(error).__name__}: {error}", "Protocol"
    return _outcome(seed, cluster, scenario, failure, checker)


def _run(cluster: Cluster, scenario: Scenario) -> None:
    def done() -> bool:
        return cluster.refused is not None or cluster.checkers.exactly_once.shows_all(scenario.rows)

    cluster.start()
    cluster.world.run(scenario.fault_phase_ms)
    cluster.end_faults()
    before = len(cluster.checkers.completions)
    cluster.world.run(scenario.fault_phase_ms + _LIVENESS_MS, done)
    if cluster.refused is not None:
        return
    if not cluster.checkers.exactly_once.shows_all(scenario.rows):
        raise SimulationFailure("Liveness", f"not all rows became visible: {cluster.checkers.exactly_once.visible}")
    cluster.world.run(
        cluster.world.now + _LIVENESS_MS,
        lambda: len(cluster.checkers.completions) > before or cluster.refused is not None,
    )
    if len(cluster.checkers.completions) == before and cluster.refused is None:
        raise SimulationFailure("Liveness", "no checkpoint completed after the faults had ended")


def _outcome(seed: int, cluster: Cluster, scenario: Scenario, failure: str | None, checker: str | None) -> Outcome:
    checkers = cluster.checkers
    return Outcome(
        seed=seed,
        failure=failure,
        checker=checker,
        steps=cluster.world.steps,
        completions=tuple(checkers.completions),
        aborted=cluster.aborted,
        generations=checkers.log.generation,
        crashes=cluster.crashes,
        rows=scenario.rows,
        visible={sink: sum(counts.values()) for sink, counts in checkers.exactly_once.visible.items()},
        expected={
            sink: sum(scenario.rows[scenario.dag.source_of[path]] for path in counts)
            for sink, counts in checkers.exactly_once.visible.items()
        },
        refused=None if cluster.refused is None else cluster.refused.why,
        trace=tuple(cluster.world.trace or ()),
    )
