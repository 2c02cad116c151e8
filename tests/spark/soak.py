"""`./dev soak`: many more kills than the tests have time for.

Rounds of twenty kills, each on a root of its own, at random steps and random moments. Every second one cuts its
checkpoints unaligned. Every other two run a pipeline with slow sinks and PostgreSQL tables, in bounded channels. A
round that fails leaves its folder and says which seed repeats it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.jvms import start_jvms_soon
from tests.postgres_server import PostgresServer, find_programs
from tests.spark.kills import KilledRuns, SlowRuns, kill_often
from tidegate.engine.kill_points import UNDER_BACKPRESSURE, WHEN_SET_BACK, Step

_KILLS_PER_ROUND = 20
# How often a run passes a step when it starts, or in each checkpoint; at the least, as where stages are chained, which
# they are in every other run: who waits for more kills nobody. The first checkpoints of a run hold nothing new.
_WHEN_IT_STARTS = {Step.GENERATION_OPENED: 1, Step.STAGE_RESTORED: 7, Step.QUERIES_STARTED: 1}
_IN_A_CHECKPOINT = {Step.BARRIER_INJECTED: 2, Step.STAGE_CUT: 8, Step.STAGE_REPORTED: 8, Step.SINK_COMMITTED: 4}
_CHECKPOINTS = 4
_BOUNDED = ("--max-backlog-segments", "1")


def some_step(rng: random.Random, *, is_slow: bool) -> str:
    step = rng.choice(
        [step for step in Step if step not in WHEN_SET_BACK and (is_slow or step not in UNDER_BACKPRESSURE)]
    )
    if step in UNDER_BACKPRESSURE:
        return f"{step.value}:1"
    times = _WHEN_IT_STARTS.get(step) or _IN_A_CHECKPOINT.get(step, 1) * _CHECKPOINTS
    return f"{step.value}:{rng.randint(1, times)}"


def soak_round(seed: int, kills: int) -> int:
    rng = random.Random(seed)
    is_slow = seed % 4 in (0, 3)
    steps = [some_step(rng, is_slow=is_slow) for _ in range(kills * 2 // 3)]
    folder = Path(tempfile.mkdtemp(prefix=f"tidegate-soak-{seed}-"))
    arguments = () if seed % 2 else ("--unaligned-after", "0s")
    if is_slow:
        with _postgres() as server:
            runs = SlowRuns(folder, *arguments, *_BOUNDED, environment={"TIDEGATE_TEST_DSN": server.dsn})
            return _killed(runs, steps, kills, seed)
    return _killed(KilledRuns(folder, *arguments), steps, kills, seed)


@contextmanager
def _postgres() -> Iterator[PostgresServer]:
    programs = find_programs()
    if programs is None:
        raise SystemExit("there is no PostgreSQL server here (on Debian and Ubuntu: apt-get install postgresql)")
    server = PostgresServer(programs)
    try:
        yield server
    finally:
        server.remove()


def _killed(runs: KilledRuns, steps: list[str], kills: int, seed: int) -> int:
    folder = runs.folder
    print(f"round {seed} in {folder}: {runs.pipeline} {' '.join(runs.arguments)}", flush=True)
    survived = kill_often(runs, steps, random_kills=kills - len(steps), seed=seed)
    runs.check_tables()
    epochs = runs.check_every_epoch()
    runs.check_no_orphans()
    print(f"round {seed}: {survived} kills survived, {epochs} epochs right", flush=True)
    shutil.rmtree(folder)
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a pipeline on Spark again and again.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="the first round's")
    arguments = parser.parse_args()
    survived, seed = 0, arguments.seed
    while survived < arguments.kills:
        survived += soak_round(seed, min(_KILLS_PER_ROUND, arguments.kills - survived))
        seed += 1
    print(f"{survived} kills survived: nothing lost, nothing twice")
    return 0


if __name__ == "__main__":
    start_jvms_soon()
    sys.exit(main())
