"""State on a real cluster, behind the hundred versions that Spark might go back: what is swept, and what stays."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.harness import tidegate
from tests.s3_server import S3Server
from tests.spark.cluster_runs import LongClusterRuns
from tests.spark_cluster import SparkCluster
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.inspection import read_manifest, references

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.s3, pytest.mark.usefixtures("s3a"), pytest.mark.soak]

BATCHES = 320
_SECONDS = 900
_OFTEN = "--conf=spark.sql.streaming.stateStore.maintenanceInterval=2s"  # so that there are full snapshots


class Looking:
    """At a root in a bucket, again and again while its pipeline runs."""

    def __init__(self, runs: LongClusterRuns) -> None:
        self._store = runs.store
        self._seen: set[str] = set()
        self._now: set[str] = set()
        self.looks = 0

    def look(self) -> None:
        """Every file that a retained checkpoint names is there."""
        log = StoredDecisions(self._store).read()
        named = [
            (checkpoint_id, references(self._store, read_manifest(self._store, record)))
            for checkpoint_id in log.retained
            if (record := log.completed(checkpoint_id)) is not None
        ]
        self._now = set(self._store.list("generations"))
        retained = set(StoredDecisions(self._store).read().retained)
        for checkpoint_id, names in named:
            # One that was given up meanwhile may have lost what it named.
            assert checkpoint_id not in retained or names <= self._now, (checkpoint_id, sorted(names - self._now)[:5])
        self._seen |= self._now
        self.looks += 1

    def swept(self) -> set[str]:
        """The files of state that were there, and are not."""
        return {name for name in self._seen - self._now if "/stages/orders/" in name and "/state/" in name}

    def oldest_retained(self) -> int:
        return min(StoredDecisions(self._store).read().retained)


def look_until_it_ends(looking: Looking, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _SECONDS
    while process.poll() is None:
        assert time.monotonic() < deadline, "the run does not end"
        looking.look()
        time.sleep(1)


@pytest.mark.parametrize(
    "retention",
    [("--retain", "3", "--checkpoint-interval", "30s"), ("--retain", "24h", "--checkpoint-interval", "5s")],
    ids=["three", "of a day"],
)
def test_what_retained_checkpoints_name_stays_and_each_can_be_gone_on_from(
    cluster: SparkCluster,
    s3_server: S3Server,
    shared: Path,
    retention: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    runs = LongClusterRuns(shared, cluster, s3_server, _OFTEN, *retention)
    runs.feed(BATCHES)
    looking = Looking(runs)
    process = runs.start("--available-now")
    try:
        look_until_it_ends(looking, process)
    finally:
        process.kill()
        assert runs.finish(process) == 0, runs.output[-1][-3000:]
    looking.look()
    runs.check_tables()
    swept = looking.swept()
    assert looking.looks > 10
    assert any(name.endswith(".zip") for name in swept), f"{len(swept)} swept: {sorted(swept)[:5]}"
    done = tidegate("verify", "--root", str(runs.root))
    assert done.returncode == 0, done.stdout + done.stderr

    oldest = looking.oldest_retained()
    done = tidegate("restore", "--root", str(runs.root), "--to", str(oldest), "--yes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)
    runs.feed(3)
    runs.run_to_the_end()
    runs.check_tables()
    runs.check_no_orphans()
