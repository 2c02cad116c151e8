"""A checkpoint that is copied out of a root stays whole, whatever the run that is alive drops meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from tests.storage.test_carrying import a_checkpoint
from tidegate.engine.bringing import pinned
from tidegate.errors import DamagedCheckpoint, StoreUnavailable, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted, GenerationOpened
from tidegate.storage.bucket import Bucket, BucketPlace
from tidegate.storage.carrying import Carrying, Numbers
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files
from tidegate.storage.inspection import InspectedRoot, RootOwner, owner_record, references
from tidegate.storage.manifest import Manifest, encode_manifest
from tidegate.storage.memory import Memory
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import Place, RootInBucket, RootInFolder

FILES = 300


class Watched:
    """How a bucket was asked, by all handles on it."""

    def __init__(self) -> None:
        self.under_way = self.most = self.copied = self.looked_at = 0
        self.changing = threading.Lock()
        self.after: tuple[int, Callable[[], None]] | None = None
        """What happens once so many were copied."""

    def begin(self) -> None:
        with self.changing:
            self.under_way += 1
            self.copied += 1
            self.most = max(self.most, self.under_way)
            is_now = self.after is not None and self.copied == self.after[0]
        if is_now and self.after is not None:
            self.after[1]()

    def end(self) -> None:
        with self.changing:
            self.under_way -= 1


class SlowBucket(Bucket):
    """Of which a copy takes a while."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), BucketPlace("s3://bucket/", "s3a://bucket/"), "orders")
        self.watched = Watched()

    def copy(self, name: str, source: Files, source_name: str) -> None:
        self.watched.begin()
        time.sleep(0.002)
        super().copy(name, source, source_name)
        self.watched.end()

    def size(self, name: str) -> int | None:
        self.watched.looked_at += 1
        return super().size(name)


@pytest.fixture
def bucket() -> SlowBucket:
    return SlowBucket()


def in_bucket(bucket: Bucket, work: Path) -> Place:
    place = RootInBucket("s3://bucket/orders", work)
    place._bucket = bucket
    return place


class LiveRoot:
    """With one checkpoint of many files, which the next one drops."""

    def __init__(
        self, place: Place, files: int = FILES, as_is: Callable[[Manifest], Manifest] = lambda each: each
    ) -> None:
        self.place, self.files = place, place.files
        self._decisions = StoredDecisions(self.files)
        self.files.write(RootPaths.PIPELINE, owner_record(RootOwner("orders", "its-id")))
        made = Memory()
        self.manifest = as_is(a_checkpoint(made, files))
        for name in made.list():
            self.files.write(name, made.read(name) or b"")
        for generation in (1, self.manifest.generation):
            assert self._decisions.create(GenerationOpened(generation, "a", generation, None, (), 1))
        self.record = self._completed(3, None, (7,))
        self.seen = InspectedRoot(place)

    def _completed(self, slot: int, parent: int | None, retained: tuple[int, ...]) -> CheckpointCompleted:
        generation, checkpoint_id = self.manifest.generation, retained[-1]
        data, sha256 = encode_manifest(self.manifest)
        name = RootPaths.manifest(generation, checkpoint_id)
        self.files.write(name, data)
        record = CheckpointCompleted(
            slot, "a", generation, checkpoint_id, checkpoint_id, parent, name, sha256, True, retained, 1
        )
        assert self._decisions.create(record)
        return record

    def decide_to_drop(self) -> None:
        """As the run does: by the record of the next checkpoint."""
        self._completed(4, 7, (8,))

    def drop(self) -> None:
        self.decide_to_drop()
        self.files.delete([self.record.manifest, *references(self.files, self.manifest)])


def carried(source: Files, manifest: Manifest) -> Memory:
    target = Memory("savepoint")
    Carrying(source, target, manifest).carry(Numbers(2, 7, 6), {}, {}, None)
    return target


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_once_all_files_have_second_names_the_run_may_drop_the_checkpoint(
    tmp_path: Path, bucket: SlowBucket, where: str
) -> None:
    root = LiveRoot(RootInFolder(tmp_path / "root") if where == "folder" else in_bucket(bucket, tmp_path))
    with pinned(root.seen, root.record) as (source, manifest):
        root.drop()
        found = carried(source, manifest)
    assert len(found.list()) == FILES + 3, "with two in flight, and a list"
    assert not root.files.list(RootPaths.PINS)


def test_a_checkpoint_that_is_dropped_while_the_last_of_its_files_get_second_names_is_whole(
    tmp_path: Path, bucket: SlowBucket
) -> None:
    """The record comes first, and the files go later: what was copied by then is what it was."""
    root = LiveRoot(in_bucket(bucket, tmp_path))
    bucket.watched.after = (FILES // 2, root.decide_to_drop)
    with pinned(root.seen, root.record) as (source, manifest):
        assert not root.seen.is_retained(7)
        assert len(carried(source, manifest).list()) == FILES + 3


def test_one_whose_files_are_gone_before_they_had_second_names_was_dropped(tmp_path: Path, bucket: SlowBucket) -> None:
    root = LiveRoot(in_bucket(bucket, tmp_path))
    bucket.watched.after = (40, root.drop)
    with (
        pytest.raises(UnknownCheckpoint, match="ckpt-000007 was dropped by the run while it was about to be copied"),
        pinned(root.seen, root.record),
    ):
        pass
    assert not root.files.list(RootPaths.PINS)


def test_files_that_are_gone_of_one_that_is_retained_are_damage(tmp_path: Path, bucket: SlowBucket) -> None:
    root = LiveRoot(in_bucket(bucket, tmp_path))
    (told,) = root.manifest.stages["joined"].files.lists
    root.files.delete(["generations/000002/snapshots/joined/ckpt-000007/state/5"])
    with pytest.raises(StoreUnavailable, match=r"state/5 to .*: it is gone"), pinned(root.seen, root.record):
        pass
    root.files.delete([told.stored])
    with pytest.raises(DamagedCheckpoint, match="a list of files"), pinned(root.seen, root.record):
        pass


def test_many_get_second_names_side_by_side_with_one_request_each(tmp_path: Path, bucket: SlowBucket) -> None:
    root = LiveRoot(in_bucket(bucket, tmp_path))
    bucket.watched.looked_at = 0
    before = bucket.requests.total()
    with pinned(root.seen, root.record):
        asked = bucket.requests.total() - before
    assert (bucket.watched.copied, bucket.watched.looked_at) == (FILES + 3, 0)
    assert asked <= FILES + 3 + 2, "besides its manifest and its list are read"
    assert 16 <= bucket.watched.most <= 32


def test_pins_of_processes_that_were_killed_are_removed_and_others_are_not(tmp_path: Path, bucket: SlowBucket) -> None:
    root = LiveRoot(in_bucket(bucket, tmp_path))
    for name in ("20260101-a/file", "29990101-b/file"):
        root.files.write(f"{RootPaths.PINS}/{name}", b"")
    with pinned(root.seen, root.record):
        pass
    assert root.files.names_in(RootPaths.PINS) == ["29990101-b"]
