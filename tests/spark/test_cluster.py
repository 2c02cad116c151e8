"""Pipelines on a real cluster: a master and two workers, whose executors are another user where tests may choose."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cli.harness import tidegate
from tests.postgres_server import PostgresServer
from tests.s3_server import S3Server
from tests.spark.cluster_runs import ClusterBucketRuns, ClusterLakeRuns, ClusterRuns, SlowClusterRuns
from tests.spark_cluster import IN_BUCKET, ON_CLUSTER, SparkCluster
from tidegate.sinks.sessions import PARTITIONS
from tidegate.spark.s3a import with_s3a

pytestmark = [pytest.mark.spark, pytest.mark.slow]

# At what a root in a folder holds.
_LOOKS_INTO_THE_FOLDER = "tests/spark/test_shapes.py::test_a_chain_of_many_batches_is_restored_again_and_again"


def losses(cluster: SparkCluster) -> Sequence[Callable[[], object]]:
    def lose_a_worker() -> None:
        cluster.kill_worker(0)
        cluster.start_worker(0)

    return lambda: cluster.kill_executors(1), lambda: cluster.kill_executors(2), lose_a_worker


@pytest.mark.soak  # the next one shows the same, and more
def test_executors_workers_and_drivers_that_are_lost_cost_no_row(cluster: SparkCluster, shared: Path) -> None:
    runs = ClusterRuns(shared, cluster)
    runs.survive(losses(cluster))
    runs.run_to_the_end()
    runs.check_tables()
    assert runs.check_every_epoch() >= 4
    runs.check_no_orphans()


@pytest.mark.s3
@pytest.mark.usefixtures("s3a")
def test_nor_do_they_where_the_root_and_the_tables_are_in_buckets(
    cluster: SparkCluster, s3_server: S3Server, shared: Path
) -> None:
    runs = ClusterLakeRuns(shared, cluster, s3_server)
    runs.survive(losses(cluster))
    runs.feed()
    runs.kill_at_step("stage_cut:2")
    cluster.kill_executors(2)
    runs.run_to_the_end()
    runs.check_tables()
    assert runs.check_every_epoch() >= 4
    runs.check_no_orphans()
    assert not (runs.work / "generations").exists() or not list((runs.work / "generations").rglob("state/*"))


@pytest.mark.s3
@pytest.mark.usefixtures("s3a")
@pytest.mark.soak
def test_a_root_is_run_on_a_cluster_and_on_one_machine_by_turns(
    cluster: SparkCluster, s3_server: S3Server, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    runs = ClusterBucketRuns(shared, cluster, s3_server, "--unaligned-after", "0s")
    runs.survive([])
    runs.run_here("--conf", f"{PARTITIONS}={cluster.settings[PARTITIONS]}")
    runs.check_tables()
    runs.feed()
    runs.run_to_the_end()
    runs.check_tables()
    runs.check_no_orphans()
    for command in ("verify", "checkpoints"):
        done = tidegate(command, "--root", str(runs.root))
        assert done.returncode == 0, done.stdout + done.stderr
    done = tidegate("inspect", "--root", str(runs.root), "--stage", "unique")
    assert done.returncode == 0, done.stdout + done.stderr
    state = next(name for name in runs.store.list("generations") if name.endswith(".changelog"))
    damaged = runs.store.read(state) or b""
    runs.store.write(state, damaged[:-1] + bytes([damaged[-1] ^ 1]))
    done = tidegate("verify", "--root", str(runs.root))
    assert done.returncode == 4, done.stdout
    assert state in done.stdout + done.stderr


@pytest.mark.s3
@pytest.mark.usefixtures("s3a")
@pytest.mark.postgres
@pytest.mark.soak  # it takes minutes, and what executors do there is the same as on one machine
def test_python_functions_and_postgresql_tables_and_slow_ones_have_every_row_once(
    cluster: SparkCluster, s3_server: S3Server, postgres_server: PostgresServer, shared: Path
) -> None:
    runs = SlowClusterRuns(shared, cluster, s3_server)
    runs.reach(postgres_server)
    runs.survive([lambda: cluster.kill_executors(1)])
    runs.run_to_the_end()
    runs.check_tables()
    runs.check_no_orphans()


@pytest.mark.s3
@pytest.mark.usefixtures("s3a")
@pytest.mark.soak  # the same shapes as on one machine, each of them twice as slow
def test_every_shape_makes_the_tables_of_a_batch_job(cluster: SparkCluster, s3_server: S3Server, shared: Path) -> None:
    """In a process of its own: each has but one Spark."""
    settings = with_s3a({"spark.master": cluster.master, **cluster.settings})
    modules = "spark.executorEnv.PYTHONPATH"  # of which one has a stage's processor
    settings[modules] = os.pathsep.join([str(Path(__file__).parents[2]), settings[modules]])
    environment = {
        **os.environ,
        **s3_server.environment(),
        ON_CLUSTER: json.dumps(settings),
        IN_BUCKET: s3_server.make_bucket("shapes"),
        "PYSPARK_PYTHON": cluster.python,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--basetemp", str(shared / "tests")]
    command += ["tests/spark/test_shapes.py", "-m", "matrix", "--deselect", _LOOKS_INTO_THE_FOLDER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False, umask=0)
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"\b8 passed", done.stdout), done.stdout[-500:]
