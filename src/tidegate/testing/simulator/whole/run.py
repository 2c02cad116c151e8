"""From a seed to a verdict, at the second depth."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from tidegate.errors import TidegateError
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig, UnalignedMode
from tidegate.testing.played import PlayedFailure
from tidegate.testing.simulator.checkers import SimulationFailure
from tidegate.testing.simulator.dag import (
    Dag,
    random_dag,
    random_lines,
    with_early_stages,
    with_late_stages,
    with_stage_between,
)
from tidegate.testing.simulator.run import Outcome
from tidegate.testing.simulator.whole.cluster import QueryFaults, WholeCluster, WholeScenario
from tidegate.testing.simulator.whole.remains import check_nothing_left, check_restorable
from tidegate.testing.simulator.whole.together import Together
from tidegate.testing.simulator.whole.versions import Changes
from tidegate.testing.simulator.world import Faults, World

_LIVENESS_MS: Final = 20_000
_LATE_MS: Final = 1_000
"""So long after the faults, nothing that was asleep or on its way comes any more: it would seem to be left over."""


def random_whole_scenario(
    seed: int,
    dag: Dag | None = None,
    *,
    every_change: bool = False,
    set_backs: int | None = None,
    movers: bool | None = None,
) -> WholeScenario:
    """What happens in the run of this seed. Each kind of fault is absent from about half of the seeds. `every_change`:
    the pipeline is changed in every way, not in some. `set_backs`: how often it goes back, if not by chance; one that
    does is not changed. `movers`: whether checkpoints are taken elsewhere, and brought back, if not by chance."""
    rng = random.Random(f"whole scenario {seed}")

    def sometimes(highest: float) -> float:
        return rng.random() * highest if rng.random() < 0.5 else 0.0

    def up_to(most: int) -> int:
        return rng.randint(0, most) if rng.random() < 0.6 else 0

    chains = rng.choice((0.0, 0.6, 1.0))
    chance = 0.2 if dag is None else 0.0  # one that is given stays as it is
    if dag is None:
        dag = random_lines(rng) if chains and rng.random() < 0.6 else random_dag(rng, reads_twice=0.2)
    back = random.Random(f"back {seed}")
    if set_backs is None:
        set_backs = back.randint(1, 3) if back.random() < chance and not every_change else 0
    elsewhere = random.Random(f"elsewhere {seed}")
    if movers is None:
        movers = elsewhere.random() < chance and not every_change
    moves = _moves(elsewhere) if movers else {}
    changes = Changes()
    if (
        not set_backs and not moves
    ):  # what is at a checkpoint of another version, and what tables show of it, is not known then
        dag, changes = _changed(dag, random.Random(f"late {seed}"), 1.0 if every_change else chance)
    drift = random.Random(f"drift {seed}")
    modes: tuple[UnalignedMode, ...] = ("never", "on_timeout", "always")
    return WholeScenario(
        dag=dag,
        config=CheckpointConfig(
            interval_ms=rng.choice((100, 200)),
            timeout_ms=rng.choice((1_000, 2_000)),
            max_concurrent=rng.choice((1, 1, 2, 3)),
            max_retained=max(rng.randint(1, 3), 3 if set_backs or moves else 1),
            retain_ms=rng.choice((0, 0, 300, 3_000)),
            incremental=rng.random() < 0.9,
            alignment=AlignmentConfig(
                unaligned=rng.choice(modes), timeout_ms=rng.choice((20, 80)), max_inflight_bytes=rng.choice((0, 10**6))
            ),
        ),
        drivers=rng.choice((1, 1, 2)),
        rows={name: rng.choice((0, 1, 30, 60)) for name in dag.sources},
        faults=Faults(
            store_fails=sometimes(0.02),
            store_fails_after_writing=sometimes(0.02),
            store_is_slow=sometimes(0.1),
            seems_to_exist=sometimes(0.1),
        ),
        query_faults=QueryFaults(
            task_fails=sometimes(0.05), runs_away=sometimes(0.001), dies_early=rng.choice((0.0, 0.0, 0.3))
        ),
        # So that there is something to go back to.
        fault_phase_ms=4_000 if set_backs or moves else 1_500,
        crashes=up_to(2),
        kills=up_to(3),
        pauses=up_to(2),
        take_overs=up_to(2),
        full_disks=1 if rng.random() < 0.2 else 0,
        standstills=1 if rng.random() < 0.15 else 0,
        dead_queries=up_to(2),
        backlog_segments=rng.choice((3, 1_000)),
        window=rng.choice((1, 256)),
        max_files=rng.choice((None, 1)),
        requests=up_to(4),
        damages=1 if rng.random() < 0.08 else 0,
        power_losses=rng.randint(1, 2) if rng.random() < 0.15 else 0,
        available_now=rng.choice((0.0, 0.0, 0.5)),
        chains=chains,
        set_backs=set_backs,
        changes=changes,
        drift_ms=drift.choice((None, None, 1, 5, 20)),
        together=Together(),
        **moves,
    )


def random_together_scenario(seed: int, dag: Dag | None = None) -> WholeScenario:
    """What happens in the run of this seed, where several instances run the pipeline together."""
    rng = random.Random(f"together {seed}")

    def up_to(most: int) -> int:
        return rng.randint(0, most) if rng.random() < 0.6 else 0

    if dag is None:
        dag = random_lines(rng) if rng.random() < 0.4 else random_dag(rng, reads_twice=0.2)
    whole = random_whole_scenario(seed, dag, set_backs=0, movers=False)
    instances = rng.choice((2, 2, 3))
    together = Together(
        instances=instances,
        late=rng.choice((0, 0, 1)),
        how_many=rng.choice((1, instances)),
        lease_ms=rng.choice((100, 300)),
        grace_ms=rng.choice((100, 500)),
        pinned=rng.choice((0.0, 0.0, 0.3)),
        most_bytes=random.Random(f"boards {seed}").choice((128 * 1024, 2_000, 100)),
        stale=rng.choice((0.0, 0.3, 0.6)),
        cuts=up_to(3),
        expiries=up_to(2),
        doubts=up_to(4),
        leaves=up_to(2),
    )
    return msgspec.structs.replace(whole, together=together, fault_phase_ms=3_000, **_going_back(seed, whole))


def _going_back(seed: int, whole: WholeScenario) -> dict[str, Any]:
    """Sometimes a user brings the pipeline back while instances run it: to a checkpoint, or to a savepoint."""
    rng = random.Random(f"back together {seed}")
    if rng.random() < 0.75:
        return {}
    back = rng.choice(({"set_backs": rng.randint(1, 2)}, {"savepoints": 3, "brings": rng.randint(1, 2)}))
    return {**back, "config": msgspec.structs.replace(whole.config, max_retained=3)}


def _moves(rng: random.Random) -> dict[str, int]:
    """What users do with checkpoints elsewhere: each of these kinds in about half of the seeds that have any."""
    return {
        "savepoints": rng.randint(1, 5),
        "brings": rng.randint(0, 3),
        "lost_roots": rng.choice((0, 0, 1, 2)),
        **rng.choice(({}, {"forks": 1, "promotions": 1}, {"forks": 2, "promotions": 2})),
    }


def _changed(dag: Dag, rng: random.Random, chance: float) -> tuple[Dag, Changes]:
    """What becomes of a pipeline while it runs, and the DAG of all that it ever has. `chance`: of each kind."""
    late: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    between: tuple[str, str] | None = None
    renamed: list[str] = []
    if rng.random() < chance:
        dag, late = with_late_stages(dag, rng)
    if rng.random() < chance:
        dag, gone = with_early_stages(dag, rng, late)
    if rng.random() < chance:
        dag, between = with_stage_between(dag, rng, frozenset((*late, *gone)))
    if rng.random() < chance:
        stay = sorted(dag.stages.keys() - {*late, *gone, "between"})
        renamed = rng.sample(stay, rng.randint(1, 2))
    return dag, Changes(late, gone, between, {name: f"{name}_renamed" for name in renamed})


class _TogetherOutcome(Outcome, frozen=True):
    @property
    def replay(self) -> str:
        return f"tidegate simulate --together --seed {self.seed}"


def simulate_together(seed: int, scenario: WholeScenario | None = None, *, trace: bool = False) -> Outcome:
    """Run one seed, of those in which several instances run the pipeline together."""
    return simulate_whole(seed, random_together_scenario(seed) if scenario is None else scenario, trace=trace)


def simulate_whole(seed: int, scenario: WholeScenario | None = None, *, trace: bool = False) -> Outcome:
    """Run one seed. The same seed and scenario give the same outcome, to the last event."""
    scenario = random_whole_scenario(seed) if scenario is None else scenario
    cluster = WholeCluster(scenario, seed)
    if trace:
        cluster.world.trace = []
    failure: str | None = None
    checker: str | None = None
    with _quiet(cluster.world):
        try:
            _run(cluster, scenario)
        except SimulationFailure as error:
            failure, checker = str(error), error.checker
        except (TidegateError, PlayedFailure) as error:
            failure, checker = f"{type(error).__name__}: {error}", "Protocol"
        except Exception as error:  # of what runs: nothing there may fail but in words of its own
            failure, checker = f"{type(error).__name__}: {error}", "Unexpected"
    return _outcome(seed, cluster, failure, checker)


def _run(cluster: WholeCluster, scenario: WholeScenario) -> None:
    def shows_all() -> bool:
        shows_all = cluster.is_changed and cluster.exactly_once.shows_all(scenario.rows)
        return cluster.refused is not None or shows_all

    def is_at_rest() -> bool:
        is_checkpointed = len(cluster.checkers.completions) > before and not cluster.waits_for_answers
        return cluster.refused is not None or is_checkpointed

    cluster.start()
    cluster.world.run(scenario.fault_phase_ms)
    cluster.end_faults()
    before = len(cluster.checkers.completions)
    cluster.world.run(scenario.fault_phase_ms + _LIVENESS_MS, shows_all)
    if not shows_all():
        raise SimulationFailure("Liveness", f"not all rows became visible: {cluster.exactly_once.visible}")
    cluster.world.run(cluster.world.now + _LIVENESS_MS, is_at_rest)
    if cluster.refused is not None:
        return
    if len(cluster.checkers.completions) == before:
        raise SimulationFailure("Liveness", "no checkpoint completed after the faults had ended")
    _check_answered(cluster)
    cluster.world.run(scenario.fault_phase_ms + _LATE_MS)
    if cluster.refused is None:
        _end(cluster)


def _check_answered(cluster: WholeCluster) -> None:
    waiting = [user for user in cluster.users if not user.is_done]
    if waiting:
        raise SimulationFailure("Requests", f"nobody answers: {waiting}")


def _end(cluster: WholeCluster) -> None:
    """A user stops the run, after a last checkpoint, and looks at what is left."""
    cluster.stop()
    cluster.world.run(cluster.world.now + _LIVENESS_MS, lambda: cluster.has_ended and not cluster.waits_for_answers)
    _check_answered(cluster)
    if not cluster.has_ended:
        raise SimulationFailure("Requests", "a run that was told to stop has not ended")
    check_restorable(cluster)
    check_nothing_left(cluster)


def _outcome(seed: int, cluster: WholeCluster, failure: str | None, checker: str | None) -> Outcome:
    checkers, scenario = cluster.checkers, cluster.scenario
    visible = cluster.exactly_once.visible
    return (_TogetherOutcome if scenario.together else Outcome)(
        seed=seed,
        failure=failure,
        checker=checker,
        steps=cluster.world.steps,
        completions=tuple(each for root in cluster.roots for each in root.checkers.completions),
        aborted=cluster.aborted,
        generations=checkers.log.generation,
        crashes=cluster.crashes,
        rows=scenario.rows,
        visible={sink: sum(counts.values()) for sink, counts in visible.items()},
        expected={
            sink: sum(scenario.rows[scenario.dag.source_of[path]] for path in counts)
            for sink, counts in visible.items()
        },
        refused=cluster.refused,
        trace=tuple(cluster.world.trace or ()),
        whole=True,
    )


class _Noted(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note("{}", record.getMessage())


@contextmanager
def _quiet(world: World) -> Iterator[None]:
    """What a run logs goes to the trace, if one is kept, and nowhere else."""
    log = logging.getLogger("tidegate")
    before, level = log.propagate, log.level
    handler = _Noted(world) if world.trace is not None else logging.NullHandler()
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.DEBUG if world.trace is not None else logging.CRITICAL)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before
        log.setLevel(level)
