"""What was asked of a store, and what it has failed, is counted."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from tidegate.errors import StoreUnavailable
from tidegate.storage import places
from tidegate.storage.bucket import Bucket, BucketPlace
from tidegate.storage.folder import Folder
from tidegate.storage.places import place_of
from tidegate.storage.requests import Requests


def test_what_a_folder_is_asked_for_is_counted_by_kind(tmp_path: Path) -> None:
    counts = Requests()
    files = Folder(tmp_path, counts=counts)
    below = files.at("a")
    below.write("x", b"1")
    assert files.create("a/x", b"2") is False
    assert below.read("x") == b"1"
    assert files.read("gone") is None
    files.names_in("a")
    files.list()
    files.keep("b/x", files, "a/x")
    files.copy("c/x", files, "a/x")
    files.sync(["b/x"])
    files.delete(["b/x", "c/x", "gone"])
    assert counts.counted() == {"write": 2, "read": 2, "list": 2, "link": 1, "copy": 1, "sync": 1, "delete": 3}
    assert counts.failed == 0


def test_whether_a_file_is_there_is_not_counted(tmp_path: Path) -> None:
    """It is asked of every stage in every round."""
    counts = Requests()
    files = Folder(tmp_path, counts=counts)
    files.exists("a")
    files.size("a")
    assert not counts.counted()


def test_what_a_folder_fails_is_counted(tmp_path: Path) -> None:
    counts = Requests()
    files = Folder(tmp_path, counts=counts)
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(StoreUnavailable):
        files.write("a/x", b"1")
    with pytest.raises(StoreUnavailable):
        files.sync(["gone"])
    assert counts.failed == 2


def test_a_root_counts_what_its_run_asks_for(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    store, _ = place.for_run(fsync=False)
    store.at("generations").write("x", b"1")
    place.files.read("x")
    assert place.counts.counted() == {"write": 1, "read": 1}


def test_a_root_in_a_bucket_counts_its_requests_and_what_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(MemoryStore(), BucketPlace("s3://bucket/", "s3a://bucket/"))
    monkeypatch.setattr(places, "_opened", lambda _: bucket)
    place = places.RootInBucket("s3://bucket/orders", tmp_path)
    place.files.write("x", b"1")
    place.files.read("x")
    assert place.counts.counted() == bucket.requests == {"put": 1, "get": 1}
    with pytest.raises(StoreUnavailable):
        bucket.write("a//b", b"1")
    assert place.counts.failed == 1


def test_nothing_is_lost_where_many_count_at_the_same_time() -> None:
    counts = Requests()

    def count() -> None:
        for _ in range(5_000):
            counts.add("read")
            counts.add_failed()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert counts.counted() == {"read": 20_000}
    assert counts.failed == 20_000
