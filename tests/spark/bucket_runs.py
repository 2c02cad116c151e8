"""Runs on a root in a bucket, behind a network that fails, on two machines by turns: killed one after the other."""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path
from typing import IO, Final
from urllib.parse import unquote

from tests.s3_proxy import Fault, Plan, S3Proxy
from tests.s3_server import S3Server
from tests.spark.kills import KilledRuns
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder

# Often enough that every run meets some, and seldom enough that none gives up.
FAULTS: Final = {
    Fault.BUSY: 0.01,
    Fault.ERROR: 0.01,
    Fault.DONE_BUT_ERROR: 0.01,
    Fault.DONE_BUT_CUT: 0.01,
    Fault.CUT: 0.01,
    Fault.CUT_IN_BODY: 0.005,
    Fault.SLOW: 0.005,
    Fault.CONFLICT: 0.005,
}
_MACHINES: Final = ("here", "there")
_RUNS_ON_A_MACHINE: Final = 2


class BucketRuns(KilledRuns):
    """As a context: its proxy is closed in the end."""

    def __init__(self, folder: Path, server: S3Server, *arguments: str, seed: int = 0, delay_ms: float = 0) -> None:
        super().__init__(folder, *arguments)
        self._server = server
        self.bucket = server.make_bucket(f"killed-{uuid.uuid4().hex[:12]}")
        self.root = f"{self.bucket}/orders"
        self.proxy = S3Proxy(server.port)
        self.proxy.delay_ms = delay_ms
        self.proxy.plan = Plan(seed, FAULTS)
        self._environment |= server.environment(self.proxy.endpoint)
        self._run_on = 0

    def __enter__(self) -> BucketRuns:
        return self

    def __exit__(self, *_error: object) -> None:
        self.proxy.close()

    @property
    def store(self) -> Files:
        """Past the proxy: what it really holds."""
        return open_bucket(str(self.root), self._server.options())

    def work(self, machine: str) -> Path:
        """The work folder of a machine."""
        return self.folder / machine / "work"

    def start(
        self, *arguments: str, kill_at: str | None = None, said: IO[bytes] | None = None
    ) -> subprocess.Popen[str]:
        """Every few runs on the other machine: it waits for the lease, or takes over, by turns."""
        before, now = ((self._run_on + each) // _RUNS_ON_A_MACHINE for each in (-1, 0))
        self._run_on += 1
        if before != now and now % 2:
            arguments = ("--take-over", *arguments)
        machine = _MACHINES[now % len(_MACHINES)]
        return super().start("--work", str(self.work(machine)), *arguments, kill_at=kill_at, said=said)

    def _check_needed(self, store: Files, needed: set[str], generation: int) -> None:
        """Nothing else is in the bucket; nor in the work folder of the machine that the last run was on, but for what
        that run lived in."""
        found = set(store.list("generations"))
        assert found <= needed, sorted(found - needed)[:5]
        beside = {name.split("/")[0] for name in store.list()}
        known = {"decisions", "generations", "history", "ids", "sinks"}
        assert beside <= known | {"lease.json", "pipeline.json", "status.json", "status.reserve"}, beside
        last = max((self.work(each) for each in _MACHINES), key=lambda folder: (folder / "lock").stat().st_mtime)
        super()._check_needed(Folder(last), needed, generation)


class LakeRuns(BucketRuns):
    """The same with its tables in the bucket, too."""

    def __init__(self, folder: Path, server: S3Server, *arguments: str, seed: int = 0) -> None:
        super().__init__(folder, server, *arguments, seed=seed)
        self._environment["TIDEGATE_TEST_LAKE"] = f"{self.bucket}/lake"

    @property
    def lake(self) -> Path:
        """To this server, each object is a file."""
        return self._server.folder / "buckets" / self.bucket.removeprefix("s3://") / "lake"

    def check_no_orphans(self) -> None:
        """Nor is anything in a table's folder that its log does not know."""
        super().check_no_orphans()
        check_all_known(self.lake)


def check_all_known(lake: Path) -> None:
    """Nothing is in a table's folder that its log does not know."""
    for table in lake.iterdir():
        found = {path.relative_to(table).as_posix() for path in table.rglob("*.parquet") if path.is_file()}
        found = {name for name in found if not name.startswith(("_delta_log/", "_tidegate/"))}
        assert found <= ever_added(table), sorted(found - ever_added(table))[:5]


def ever_added(table: Path) -> set[str]:
    lines = (line for log in (table / "_delta_log").glob("*.json") for line in log.read_text("utf-8").splitlines())
    return {unquote(add["path"]) for line in lines if (add := json.loads(line).get("add"))}
