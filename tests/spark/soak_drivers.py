"""`./dev soak --drivers`: many more faults of several drivers than the tests have time for.

Rounds of ten faults, each on a root of its own: every second one on ZooKeeper, whose server is killed and started again
too, and where one of the drivers has a link of its own that is cut, if that can be here. Every third one cuts its
checkpoints unaligned. A round that fails leaves its folder, and says which seed repeats it.

With `--bucket` every round has its root and its tables in buckets, and the network to them fails now and then; of these
too, every second one talks through ZooKeeper.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.jvms import start_jvms_soon
from tests.s3_server import NONE_HERE, S3Server, find_program
from tests.spark.bucket_drivers import BucketDrivers
from tests.spark.drivers import Drivers, fault_often, on_zookeeper
from tests.zookeeper_server import ZooKeeperServer
from tidegate.engine.kill_points import Step

_FAULTS_PER_ROUND: Final = 10
_KINDS: Final = (
    "kill leader",
    "kill member",
    "lose leader",
    "lose member",
    "sleep leader",
    "sleep member",
    "leave leader",
    "leave member",
    "all",
)
# Steps that only the one passes that leads, and how often it may have when it dies.
_LEADING: Final = {
    Step.GENERATION_OPENED: 1,
    Step.ID_MARKED: 3,
    Step.STAGE_REPORTED: 8,
    Step.MANIFEST_WRITTEN: 3,
    Step.SLOT_CLAIMED: 3,
    Step.SINK_COMMITTED: 6,
    Step.ALL_SINKS_COMMITTED: 2,
    Step.CLEANED_UP: 2,
}
# Steps that any of them passes after it was started again, whichever leads; and how often it may have then.
_STEPS: Final = {Step.STAGE_RESTORED: 2, Step.QUERIES_STARTED: 1, Step.STAGE_CUT: 6}


def soak_round(seed: int, faults: int, server: S3Server | None = None) -> int:
    """`server`: on buckets of this one."""
    rng = random.Random(f"drivers {seed}")
    folder = Path(tempfile.mkdtemp(prefix=f"tidegate-drivers-{seed}-"))
    arguments = ("--unaligned-after", "0s") if seed % 3 == 0 else ()
    where = f"{'on ZooKeeper' if seed % 2 == 0 else 'on files'}, {'in a folder' if server is None else 'in buckets'}"
    print(f"round {seed} in {folder}, {where} {' '.join(arguments)}", flush=True)
    plan = [_some_fault(rng) for _ in range(faults)]
    if server is not None:
        with _in_buckets(folder, server, arguments, seed) as drivers:
            _survive(drivers, plan, seed)
            happened = 0 if drivers.proxy.plan is None else drivers.proxy.plan.happened.total()
            print(f"round {seed}: {happened} failed requests survived", flush=True)
    elif seed % 2 == 0:
        with on_zookeeper(folder, *arguments) as drivers:
            plan[: len(drivers.happens)] = drivers.happens
            _survive(drivers, plan, seed)
    else:
        with Drivers(folder, *arguments) as drivers:
            _survive(drivers, plan, seed)
    shutil.rmtree(folder)
    return len(plan)


@contextmanager
def _in_buckets(folder: Path, server: S3Server, arguments: tuple[str, ...], seed: int) -> Iterator[BucketDrivers]:
    with ExitStack() as stack:
        address = None
        if seed % 2 == 0:
            zookeeper = ZooKeeperServer()
            stack.callback(zookeeper.remove)
            address = f"zk://{zookeeper.servers}/tests"
        drivers = BucketDrivers(folder, server, *arguments, fails=True, seed=seed, coordination=address)
        yield stack.enter_context(drivers)


def _some_fault(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(_KINDS)
    is_leading = rng.random() < 0.6
    steps = _LEADING if is_leading else _STEPS
    step = rng.choice(list(steps))
    at = f"{step.value}:{rng.randint(1, steps[step])}"
    return f"lead {at}" if is_leading else at


def _survive(drivers: Drivers, plan: list[str], seed: int) -> None:
    fault_often(drivers, plan, seed)
    drivers.check_tables()
    epochs = drivers.check_every_epoch()
    drivers.check_no_orphans()
    print(f"round {seed}: {len(plan)} faults survived, {epochs} epochs right", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill drivers of one pipeline on Spark again and again.")
    parser.add_argument("faults", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=1, help="the first round's")
    parser.add_argument("--bucket", action="store_true", help="with root and tables in buckets")
    arguments = parser.parse_args()
    program = find_program() if arguments.bucket else None
    if arguments.bucket and program is None:
        raise SystemExit(NONE_HERE)
    server = None if program is None else S3Server(program)
    survived, seed = 0, arguments.seed
    try:
        while survived < arguments.faults:
            survived += soak_round(seed, min(_FAULTS_PER_ROUND, arguments.faults - survived), server)
            seed += 1
    finally:
        if server is not None:
            server.remove()
    print(f"{survived} faults survived: nothing lost, nothing twice")
    return 0


if __name__ == "__main__":
    start_jvms_soon()
    sys.exit(main())
