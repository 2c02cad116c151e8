"""Many files between a bucket and a disk."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from tests.s3_proxy import Fault, Plan, S3Proxy
from tests.s3_server import S3Server
from tidegate.errors import StoreUnavailable
from tidegate.storage import bucket_access, transfer
from tidegate.storage.bucket import PART_BYTES, Bucket, BucketPlace
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.transfer import download, upload
from tidegate.storage.transfers import Progress


def make_bucket() -> Bucket:
    return Bucket(MemoryStore(), BucketPlace("s3://bucket/", "s3a://bucket/"), "root")


def made(folder: Path, count: int) -> list[tuple[str, Path]]:
    folder.mkdir()
    pairs = [(f"state/{number % 3}/{number}", folder / f"{number}") for number in range(count)]
    for number, (_, path) in enumerate(pairs):
        path.write_bytes(f"{number} ".encode() * number)
    return pairs


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    monkeypatch.setattr(bucket_access, "PAUSE_MS", (5, 50))
    with S3Proxy(s3_server.port) as proxy:
        yield proxy


def test_what_is_sent_is_fetched(tmp_path: Path) -> None:
    bucket, sent = make_bucket(), made(tmp_path / "sent", 50)
    (tmp_path / "sent" / "large").write_bytes(b"x" * (2 * PART_BYTES + 3))
    sent.append(("state/large", tmp_path / "sent" / "large"))
    said: list[Progress] = []
    upload(bucket, sent, said.append)
    assert bucket.list() == sorted(name for name, _ in sent)
    total_bytes = sum(path.stat().st_size for _, path in sent)
    assert said[-1] == Progress(51, 51, total_bytes)
    assert [each.files for each in said] == [*range(1, 52)]
    fetched = [(name, tmp_path / "fetched" / name) for name, _ in sent]
    said.clear()
    for _ in range(2):  # what is there is replaced
        download(bucket, fetched, said.append)
    for (_, before), (_, after) in zip(sent, fetched, strict=True):
        assert after.read_bytes() == before.read_bytes()
    assert said[-1] == Progress(51, 51, total_bytes)
    assert not list((tmp_path / "fetched").rglob(".*"))
    upload(bucket, [])
    download(bucket, [])


def test_the_first_failure_is_raised_after_what_was_under_way_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, pairs = make_bucket(), made(tmp_path / "sent", 200)
    pairs[3][1].unlink()
    begun: list[str] = []
    ended: list[str] = []
    may_end = threading.Event()
    threading.Timer(1, may_end.set).start()

    def send(name: str, _: Path) -> None:
        begun.append(name)
        may_end.wait()
        time.sleep(0.02)
        ended.append(name)

    monkeypatch.setattr(bucket, "send", send)
    with pytest.raises(StoreUnavailable, match=r"could not copy .*/sent/3 to s3://bucket/root/state/0/3: No such file"):
        upload(bucket, pairs)
    assert 0 < len(begun) <= transfer.FILES_AT_ONCE, "those that had not begun were left"
    assert sorted(ended) == sorted(begun), "none is under way any more"


def test_what_is_not_there_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    bucket = make_bucket()
    bucket.write("a", b"content")
    with pytest.raises(StoreUnavailable, match=r"could not fetch s3://bucket/root/b to .*/b: it is gone"):
        download(bucket, [("b", tmp_path / "to" / "b")])
    assert list((tmp_path / "to").iterdir()) == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match=r"could not fetch s3://bucket/root/a to .*/file/a: "):
        download(bucket, [("a", tmp_path / "file" / "a")])


def test_no_more_bytes_are_under_way_than_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, pairs = make_bucket(), made(tmp_path / "sent", 60)
    monkeypatch.setattr(transfer, "BYTES_AT_ONCE", 500)
    now = most = 0
    counting = threading.Lock()

    def send(_: str, path: Path) -> None:
        nonlocal now, most
        size_bytes = path.stat().st_size
        with counting:
            now += size_bytes
            most = max(now, most)
        time.sleep(0.002)
        with counting:
            now -= size_bytes

    monkeypatch.setattr(bucket, "send", send)
    upload(bucket, pairs)
    assert 250 < most <= 500


@pytest.mark.s3
def test_no_half_of_a_file_has_its_name(s3_server: S3Server, proxy: S3Proxy, tmp_path: Path) -> None:
    url = s3_server.make_bucket(f"tests-{uuid.uuid4().hex[:12]}")
    bucket = open_bucket(url, s3_server.options(proxy.endpoint))
    pairs = made(tmp_path / "sent", 60)
    proxy.plan = Plan(1, {Fault.CUT_IN_BODY: 0.2, Fault.DONE_BUT_CUT: 0.1, Fault.CONFLICT: 0.02}, refuses_any_put=True)
    fetched = [(name, tmp_path / "fetched" / name) for name, _ in pairs]
    expected = {path.name: path.read_bytes() for _, path in pairs}
    failed = 0
    for move, files in ((upload, pairs), (download, fetched)):
        for _ in range(30):
            try:
                move(bucket, files)
                break
            except StoreUnavailable:
                failed += 1
            finally:
                for _, path in fetched:
                    if path.exists():
                        assert path.read_bytes() == expected[path.name]
        else:
            pytest.fail("it never came through")
    assert failed
    assert {path.name: path.read_bytes() for _, path in fetched} == expected


@pytest.mark.s3
def test_many_are_under_way_at_once_and_no_more_than_is_worth_it(
    s3_server: S3Server, proxy: S3Proxy, tmp_path: Path
) -> None:
    url = s3_server.make_bucket(f"tests-{uuid.uuid4().hex[:12]}")
    bucket = open_bucket(url, s3_server.options(proxy.endpoint))
    pairs = made(tmp_path / "sent", 100)
    proxy.delay_ms = 50
    upload(bucket, pairs)
    download(bucket, [(name, tmp_path / "fetched" / name) for name, _ in pairs])
    assert 8 <= proxy.most_at_once <= transfer.FILES_AT_ONCE
    assert proxy.counts == {"PUT": 100, "GET": 100}
