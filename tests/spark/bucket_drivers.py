"""Several drivers that share nothing but buckets: the root is in one, the tables are in another."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Final

from tests.s3_proxy import Plan, S3Proxy
from tests.s3_server import S3Server
from tests.spark.bucket_runs import FAULTS, check_all_known
from tests.spark.drivers import Drivers
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder

# What a process says takes requests, and a list of them is looked at once a second.
_LEASE: Final = "8s"


class BucketDrivers(Drivers):
    """`fails`: the network between them and the bucket does, now and then."""

    def __init__(
        self,
        folder: Path,
        server: S3Server,
        *arguments: str,
        names: tuple[str, ...] = ("a", "b", "c"),
        fails: bool = False,
        seed: int = 0,
        coordination: str | None = None,
    ) -> None:
        super().__init__(folder, *arguments, names=names, lease=_LEASE, coordination=coordination)
        self._server = server
        self._lake_bucket = server.make_bucket(f"lake-{uuid.uuid4().hex[:12]}")
        self.root = f"{server.make_bucket(f'drivers-{uuid.uuid4().hex[:12]}')}/orders"
        self.proxy = S3Proxy(server.port)
        if fails:
            self.proxy.plan = Plan(seed, FAULTS)
        self._environment |= {
            **server.environment(self.proxy.endpoint),
            "TIDEGATE_TEST_LAKE": f"{self._lake_bucket}/lake",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    def __exit__(self, *_error: object) -> None:
        super().__exit__(*_error)
        self.proxy.close()

    @property
    def store(self) -> Files:
        """Past the proxy."""
        return open_bucket(str(self.root), self._server.options())

    @property
    def lake(self) -> Path:
        return self._server.folder / "buckets" / self._lake_bucket.removeprefix("s3://") / "lake"

    @property
    def work(self) -> Path:
        """The work folder that they have by default; each has its own in it."""
        found = list((self.folder / "cache" / "tidegate" / "work").iterdir())
        assert len(found) == 1, found
        return found[0]

    def check_no_orphans(self) -> None:
        super().check_no_orphans()
        check_all_known(self.lake)

    def _check_needed(self, store: Files, needed: set[str], generation: int) -> None:
        """Nothing is in the bucket but what a run that has ended leaves; on the machine of each instance, nothing of
        generations before the last one that it had a part in."""
        found, last = set(store.list("generations")), f"generations/{generation:06d}/stages/"
        left = {name for name in found - needed if not name.startswith(last)}
        assert not left, sorted(left)[:5]
        beside = {name.split("/")[0] for name in store.list()}
        known = {"coordination", "decisions", "generations", "history", "ids", "lease.json", "pipeline.json"}
        assert beside <= known, beside
        for name in self.names:
            kept = {each for each in Folder(self.work / "instances" / name).list("generations") if "/stages/" in each}
            assert len({each.split("/")[1] for each in kept}) <= 1, sorted(kept)[:5]
