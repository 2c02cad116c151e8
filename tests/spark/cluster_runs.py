"""Runs whose executors are on a cluster: these are lost, and the driver, and all of them."""

from __future__ import annotations

import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.postgres_server import PostgresServer
from tests.s3_server import S3Server
from tests.spark.bucket_runs import check_all_known
from tests.spark.harness import table_rows
from tests.spark.kills import KilledRuns, SlowRuns
from tests.spark_cluster import SparkCluster
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.files import Files


class ClusterRuns(KilledRuns):
    """On a folder that the executors share, though they are another user."""

    def __init__(self, folder: Path, cluster: SparkCluster, *arguments: str) -> None:
        super().__init__(folder, *cluster.options, *arguments, environment={"PYSPARK_PYTHON": cluster.python})
        self.umask = 0  # two users write there

    def survive(self, troubles: Sequence[Callable[[], object]]) -> None:
        """Let one run go through trouble after trouble, each while it has rows to work on; then kill it too."""
        shown = self.epochs_shown()
        self.feed()
        process = self.start()
        self._wait_for_more_than(shown, process)
        for number, trouble in enumerate(troubles):
            self.feed()
            time.sleep(0.3 * number)
            trouble()
            shown = self.epochs_shown()
            self.feed()  # what was there before it may be shown by now
            self._wait_for_more_than(shown, process)
        self.feed()
        process.kill()
        assert self.finish(process) == -signal.SIGKILL, self.output[-1][-3000:]


class ClusterBucketRuns(ClusterRuns):
    """On a root in a bucket: executors share nothing of it with the driver."""

    def __init__(self, folder: Path, cluster: SparkCluster, server: S3Server, *arguments: str) -> None:
        self.work = folder / "work"
        super().__init__(folder, cluster, "--work", str(self.work), *arguments)
        self._server = server
        self.root = f"{server.make_bucket(f'cluster-{uuid.uuid4().hex[:12]}')}/orders"
        self._environment |= server.environment()

    def run_here(self, *arguments: str) -> None:
        """On one machine, which has seen nothing of it, to the end."""
        on_cluster, self.arguments = self.arguments, ()
        try:
            done = self.finish(self.start("--work", str(self.folder / "elsewhere"), "--available-now", *arguments))
            assert done == 0, self.output[-1][-3000:]
        finally:
            self.arguments = on_cluster

    @property
    def store(self) -> Files:
        return open_bucket(str(self.root), self._server.options())

    def _check_needed(self, store: Files, needed: set[str], generation: int) -> None:
        """The last generation alone holds more: what Spark has written there since."""
        found, last = set(store.list("generations")), f"generations/{generation:06d}/stages/"
        left = {name for name in found - needed if not name.startswith(last)}
        assert not left, sorted(left)[:5]
        segments = {name for name in found - needed if "/output" in name}
        assert not segments, sorted(segments)[:5]


class LongClusterRuns(ClusterBucketRuns):
    """Of the pipeline whose state sees hundreds of batches."""

    pipeline = "long"
    prefixes = ("order_table",)

    def check_tables(self) -> None:
        assert table_rows(self.lake / "order_table", ["id"]) == Counter((each,) for each in range(self.rows))


class ClusterLakeRuns(ClusterBucketRuns):
    """The same with its tables in a bucket: then the executors share nothing with the driver at all."""

    def __init__(self, folder: Path, cluster: SparkCluster, server: S3Server, *arguments: str) -> None:
        super().__init__(folder, cluster, server, *arguments)
        self._bucket = server.make_bucket(f"lake-{uuid.uuid4().hex[:12]}")
        self._environment["TIDEGATE_TEST_LAKE"] = f"{self._bucket}/lake"

    @property
    def lake(self) -> Path:
        return self._server.folder / "buckets" / self._bucket.removeprefix("s3://") / "lake"

    def check_no_orphans(self) -> None:
        super().check_no_orphans()
        check_all_known(self.lake)


class SlowClusterRuns(ClusterBucketRuns, SlowRuns):
    """Of the pipeline with PostgreSQL tables, functions in Python and slow sinks."""

    def reach(self, server: PostgresServer) -> None:
        self._environment["TIDEGATE_TEST_DSN"] = server.dsn
