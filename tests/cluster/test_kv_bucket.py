"""Keys and values in a bucket pass the tests that all must pass, on a network that fails too; and what they cost."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_kv_files import CALLS, FaultyFiles
from tests.s3_proxy import Fault, Plan, S3Proxy
from tests.s3_server import S3Server
from tidegate.cluster.exchange import Exchange, Profile
from tidegate.cluster.files import FilesSession
from tidegate.cluster.kv import Session
from tidegate.cluster.post import Post
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.bucket_root import BucketRoot
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import RootInBucket
from tidegate.testing.kv import KVConformance, eventually

pytestmark = [pytest.mark.s3, pytest.mark.slow]

LOOKS_S = RootInBucket.pace.between_looks_s


class TestFilesInABucket(KVConformance):
    lease_s = 2.0

    @pytest.fixture(autouse=True)
    def given(self, s3_server: S3Server, tmp_path: Path) -> Iterator[None]:
        self.faults: dict[int, FaultyFiles] = {}
        self.folder = tmp_path
        self.bucket = s3_server.make_bucket("keys")
        with S3Proxy(s3_server.port) as self.proxy:
            self.options = s3_server.options(self.proxy.endpoint)
            self.trouble()
            yield
            self.teardown_method()  # while what they talk through is there

    def trouble(self) -> None:
        """What goes wrong on the way."""

    def make_files(self, name: str) -> Files:
        """As an instance has them."""
        root = open_bucket(f"{self.bucket}/{hashlib.sha256(name.encode()).hexdigest()[:12]}", self.options)
        return BucketRoot(root, Folder(self.folder), in_bucket=True).at(RootPaths.COORDINATION, durable=False)

    def make_session(self, name: str) -> Session:
        faulty = FaultyFiles(self.make_files(name))
        session = FilesSession(faulty, lease_s=self.lease_s, poll_s=(0.05, 0.2), is_far=True)
        self.faults[id(session)] = faulty
        return session

    def cut_off(self, session: Session) -> None:
        self.faults[id(session)].fails_before.update(CALLS)

    def mend(self, session: Session) -> None:
        self.faults[id(session)].fails_before.clear()


class TestFilesInABucketThatFails(TestFilesInABucket):
    """What fails is tried again beneath, so that nobody hears of it; answers that are lost prove nothing."""

    lease_s = 4.0

    def trouble(self) -> None:
        self.proxy.plan = Plan(7, {Fault.BUSY: 0.01, Fault.DONE_BUT_ERROR: 0.02, Fault.DONE_BUT_CUT: 0.01})


def test_three_that_have_nothing_to_say_make_few_requests(s3_server: S3Server, tmp_path: Path) -> None:
    """A look a second each, and a beat every quarter of the lease: a put, and what is removed of them together."""
    lease_s = 10.0
    url = s3_server.make_bucket("idle-keys")
    with S3Proxy(s3_server.port) as proxy:
        posts: list[Post] = []
        exchanges: list[Exchange] = []
        for name in ("a", "b", "c"):
            root = open_bucket(f"{url}/orders", s3_server.options(proxy.endpoint))
            files = BucketRoot(root, Folder(tmp_path / name), in_bucket=True).at(RootPaths.COORDINATION, durable=False)
            session = FilesSession(files, lease_s=lease_s, poll_s=LOOKS_S, is_far=True)
            exchanges.append(Exchange(session, files, name, f"{name}1", Profile()))
            exchanges[-1].join()
            posts.append(Post(exchanges[-1], session, LOOKS_S[1] * 8))
            posts[-1].open()
        try:
            eventually(lambda: all(len(each.heard.present) == 3 for each in exchanges))
            exchanges[0].campaign()
            eventually(lambda: all(each.heard.claim == exchanges[0].own for each in exchanges))
            time.sleep(3)  # who has just heard something looks more often for a moment
            before, began_s = proxy.counts.copy(), time.monotonic()
            time.sleep(10)
            made, took_s = proxy.counts - before, time.monotonic() - began_s
            assert all(len(each.heard.present) == 3 for each in exchanges)
        finally:
            for post in posts:
                post.close()
    _check_few(made, took_s / lease_s)


def _check_few(made: Counter[str], leases: float) -> None:
    """Of three, in as many leases of 10 s."""
    puts, most_looks = 4 * 3 * leases, 10 * 3 * leases
    assert puts * 0.5 <= made["PUT"] <= puts + 3, made
    assert made["GET"] <= most_looks + puts + 3, made  # lists; a beat's own may come between two looks
    assert made.total() - made["GET"] - made["PUT"] <= 3 * leases + 3, made
