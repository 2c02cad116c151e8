"""`./dev soak --bucket`: many more kills of runs on a bucket than the tests have time for.

Rounds of ten kills, each on a root of its own, at random steps and random moments, on two machines by turns, behind a
network that fails. Every second one cuts its checkpoints unaligned; every third has 20 ms added to each request. A
round that fails leaves its folder, and says which seed repeats it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.jvms import start_jvms_soon
from tests.s3_server import NONE_HERE, S3Server, find_program
from tests.spark.bucket_runs import BucketRuns
from tests.spark.kills import kill_often
from tests.spark.soak import some_step

_KILLS_PER_ROUND: Final = 10
_AT_STEPS: Final = 7


def soak_round(server: S3Server, seed: int, kills: int) -> int:
    rng = random.Random(f"bucket {seed}")
    folder = Path(tempfile.mkdtemp(prefix=f"tidegate-bucket-{seed}-"))
    arguments = ("--unaligned-after", "0s") if seed % 2 == 0 else ()
    delay_ms = 20 if seed % 3 == 0 else 0
    print(f"round {seed} in {folder}: {' '.join(arguments)}, {delay_ms} ms added to each request", flush=True)
    with BucketRuns(folder, server, *arguments, seed=seed, delay_ms=delay_ms) as runs:
        steps = [some_step(rng, is_slow=False) for _ in range(min(_AT_STEPS, kills))]
        survived = kill_often(runs, steps, random_kills=kills - len(steps), seed=seed)
        runs.check_tables()
        epochs = runs.check_every_epoch()
        runs.check_no_orphans()
        plan = runs.proxy.plan
        faults = 0 if plan is None else plan.happened.total()
    print(f"round {seed}: {survived} kills and {faults} failed requests survived, {epochs} epochs right", flush=True)
    shutil.rmtree(folder)
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill runs on a bucket again and again.")
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=1, help="the first round's")
    arguments = parser.parse_args()
    program = find_program()
    if program is None:
        raise SystemExit(NONE_HERE)
    server = S3Server(program)
    survived, seed = 0, arguments.seed
    try:
        while survived < arguments.kills:
            survived += soak_round(server, seed, min(_KILLS_PER_ROUND, arguments.kills - survived))
            seed += 1
    finally:
        server.remove()
    print(f"{survived} kills survived: nothing lost, nothing twice")
    return 0


if __name__ == "__main__":
    start_jvms_soon()
    sys.exit(main())
