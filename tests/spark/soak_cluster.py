"""`./dev soak --cluster`: many more losses of executors, workers and drivers than the tests have time for.

Rounds of ten, each on a root of its own, in a bucket and in a folder by turns: executors and workers are killed at
random moments of two runs, and the driver of each, once together with all executors. Every second one in a bucket cuts
its checkpoints unaligned. A round that fails leaves its folder, and says which seed repeats it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.jvms import start_jvms_soon
from tests.s3_server import NONE_HERE, S3Server, find_program
from tests.spark.cluster_runs import ClusterBucketRuns, ClusterRuns
from tests.spark_cluster import SparkCluster, user_of_executors

_LOSSES_PER_RUN: Final = 4
_WORKERS: Final = 2


def some_loss(cluster: SparkCluster, rng: random.Random) -> Callable[[], object]:
    """Of one executor, of all, or of a worker that comes back."""
    which, number = rng.choice(("one", "one", "all", "worker")), rng.randrange(_WORKERS)

    def lose() -> None:
        if which == "worker":
            cluster.kill_worker(number)
            cluster.start_worker(number)
        else:
            cluster.kill_executors(1 if which == "one" else _WORKERS)

    return lose


def soak_round(cluster: SparkCluster, server: S3Server, seed: int) -> int:
    rng = random.Random(f"cluster {seed}")
    folder = Path(tempfile.mkdtemp(prefix=f"tidegate-cluster-{seed}-"))
    folder.chmod(0o777)
    runs: ClusterRuns
    if seed % 2:
        arguments = ("--unaligned-after", "0s") if seed % 4 == 1 else ()
        runs = ClusterBucketRuns(folder, cluster, server, *arguments)
    else:
        runs = ClusterRuns(folder, cluster)
    print(f"round {seed} in {folder}, the root in {runs.root}", flush=True)
    runs.survive([some_loss(cluster, rng) for _ in range(_LOSSES_PER_RUN)])
    runs.survive([some_loss(cluster, rng) for _ in range(_LOSSES_PER_RUN)])
    cluster.kill_executors(_WORKERS)
    runs.run_to_the_end()
    runs.check_tables()
    epochs = runs.check_every_epoch()
    runs.check_no_orphans()
    survived = 2 * (_LOSSES_PER_RUN + 1)
    print(f"round {seed}: {survived} losses survived, {epochs} epochs right", flush=True)
    shutil.rmtree(folder)
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(description="Lose executors, workers and drivers again and again.")
    parser.add_argument("losses", type=int, nargs="?", default=50)
    parser.add_argument("--seed", type=int, default=1, help="the first round's")
    arguments = parser.parse_args()
    program = find_program()
    if program is None:
        raise SystemExit(NONE_HERE)
    server = S3Server(program)
    cluster = SparkCluster(_WORKERS, user_of_executors())
    survived, seed = 0, arguments.seed
    try:
        while survived < arguments.losses:
            survived += soak_round(cluster, server, seed)
            seed += 1
    finally:
        cluster.remove()
        server.remove()
    print(f"{survived} losses survived: nothing lost, nothing twice")
    return 0


if __name__ == "__main__":
    start_jvms_soon()
    sys.exit(main())
