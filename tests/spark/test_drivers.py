"""Several real drivers, really killed: nothing lost, nothing twice, nothing left behind."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.s3_server import S3Server
from tests.spark.bucket_drivers import BucketDrivers
from tests.spark.drivers import Drivers, fault_often, on_zookeeper
from tidegate.cli.exits import Exit
from tidegate.engine.kill_points import Step

pytestmark = [pytest.mark.spark, pytest.mark.slow]

_ON_A_FOLDER = ("kill leader", "sleep leader", "lose member")
_MORE_ON_A_FOLDER = ("kill member", "sleep member", "lose leader", "leave member")
_IN_A_BUCKET = ("kill leader", "kill member")
_ON_ZOOKEEPER = ("kill leader", "sleep member", f"{Step.STAGE_CUT.value}:3")


@pytest.mark.soak  # on ZooKeeper they are in CI, and the guide to several drivers is, on a folder
@pytest.mark.parametrize("faults", [_ON_A_FOLDER, _MORE_ON_A_FOLDER])
def test_drivers_that_are_killed_and_sleep_lose_and_double_nothing(tmp_path: Path, faults: Sequence[str]) -> None:
    with Drivers(tmp_path) as drivers:
        assert fault_often(drivers, faults, seed=1) == len(faults)
        _check(drivers)


@pytest.mark.zookeeper
def test_drivers_on_zookeeper_lose_and_double_nothing_either(tmp_path: Path) -> None:
    with on_zookeeper(tmp_path) as drivers:
        faults = (*_ON_ZOOKEEPER, *drivers.happens)
        assert fault_often(drivers, faults, seed=2) == len(faults)
        _check(drivers)


@pytest.mark.s3
@pytest.mark.usefixtures("s3a")
@pytest.mark.soak  # it takes minutes; keys in a bucket, and executors that share nothing else, are tested by themselves
def test_drivers_that_share_nothing_but_buckets_lose_and_double_nothing(tmp_path: Path, s3_server: S3Server) -> None:
    with BucketDrivers(tmp_path, s3_server, names=("a", "b")) as drivers:
        assert fault_often(drivers, _IN_A_BUCKET, seed=3) == len(_IN_A_BUCKET)
        _check(drivers)


@pytest.mark.soak  # it takes minutes
def test_instances_do_not_take_the_pipeline_back_from_a_run_alone_that_took_over(tmp_path: Path) -> None:
    with Drivers(tmp_path, names=("a", "b")) as drivers:
        drivers.begin_all()
        drivers.feed_until_shown()
        for process in drivers.processes.values():
            process.send_signal(signal.SIGSTOP)
        alone = drivers.start("--take-over")
        drivers.feed_until_shown()
        for process in drivers.processes.values():
            process.send_signal(signal.SIGCONT)
        for name, process in drivers.processes.items():
            assert process.wait(240) == Exit.SUPERSEDED, drivers.said(name)[-3000:]
        drivers.feed_until_shown()
        alone.terminate()
        assert drivers.finish(alone) == 0, drivers.output[-1][-3000:]
        drivers.run_to_the_end()
        drivers.check_tables()
        drivers.check_every_epoch()


def _check(drivers: Drivers) -> None:
    assert len(drivers.leaders) > 1, "nobody has taken over"
    drivers.check_tables()
    assert drivers.check_every_epoch() >= 3
    drivers.check_no_orphans()
    drivers.check_history()
