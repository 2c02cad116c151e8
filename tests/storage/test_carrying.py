"""What is carried is all of a checkpoint, refers to nothing but itself, and is what it was."""

from __future__ import annotations

import hashlib
import threading
from io import BufferedIOBase
from pathlib import Path

import msgspec
import pytest
from obstore.store import MemoryStore

from tests.storage.test_manifest import a_manifest, a_snapshot
from tidegate.errors import DamagedCheckpoint, InvariantViolation
from tidegate.protocol.messages import Flag, Segment, SegmentFile
from tidegate.storage.bucket import Bucket, BucketPlace
from tidegate.storage.carrying import Carrying, Numbers
from tidegate.storage.file_lists import FileLists, SnapshotFile, SnapshotFiles, files_of
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import check_files, references
from tidegate.storage.manifest import Manifest, Origin, StageShape, TableAddress
from tidegate.storage.memory import Memory
from tidegate.storage.paths import RootPaths

TO = Numbers(9, 43, 44)
ORIGIN = Origin("another", 7, 6)


def stored(root: Memory, name: str, data: bytes) -> SnapshotFile:
    path = f"generations/000002/snapshots/joined/ckpt-000007/{name}"
    root.write(path, data)
    return SnapshotFile(name, path, len(data), hashlib.sha256(data).hexdigest())


def in_flight(root: Memory, sequence: int, generation: int = 2, *, is_known: bool = True) -> Segment:
    path = f"generations/{generation:06d}/stages/orders/output/part-{sequence}.parquet"
    data = f"rows {sequence}".encode()
    root.write(path, data)
    sha256 = hashlib.sha256(data).hexdigest() if is_known else ""
    return Segment(sequence, sequence - 1, (SegmentFile(path, len(data), sha256),))


def a_checkpoint(root: Memory, files: int = 3) -> Manifest:
    """Of a root that holds all of it."""
    held = {name: stored(root, name, name.encode()) for name in (f"state/{each}" for each in range(files))}
    told, _ = FileLists(root, 2, "joined", SnapshotFiles()).replace(7, held)
    snapshot = msgspec.structs.replace(
        a_snapshot(),
        files=told,
        in_flight={"orders": (in_flight(root, 5), in_flight(root, 6, is_known=False)), "payments": ()},
        committable="what is staged",
    )
    shape = StageShape("sink", ("orders",), "append", "rows", TableAddress("delta", "/lake/joined"))
    return msgspec.structs.replace(a_manifest(), shape={"joined": shape}, stages={"joined": snapshot}, chains={})


def carried(root: Files, target: Files, manifest: Manifest, *, links: bool = False) -> Manifest:
    return Carrying(root, target, manifest, links=links).carry(TO, {"joined": "nothing is staged"}, {}, ORIGIN)


def data_of(files: Files, manifest: Manifest) -> dict[str, bytes | None]:
    return {file.name: files.read(file.stored) for file in files_of(files, "joined", manifest.stages["joined"].files)}


@pytest.mark.parametrize("files", [0, 3, 200, 201, 450])
def test_what_is_carried_is_all_that_there_was_and_needs_nothing_of_where_it_came_from(files: int) -> None:
    """Also where so many files are told by lists."""
    root, target = Memory("root"), Memory("target")
    manifest = a_checkpoint(root, files)
    found = carried(root, target, manifest)
    expected = data_of(root, manifest)
    for name in root.list():
        root.delete([name])
    assert len(expected) == files
    assert data_of(target, found) == expected
    assert bool(found.stages["joined"].files.lists) == (files > 200)
    assert [each.damage for each in check_files(target, found) if each.damage is not None] == []
    assert references(target, found) == frozenset(target.list()), "nothing else was carried"
    assert {RootPaths.generation_of(name) for name in target.list()} == {9}


def test_it_has_the_numbers_it_is_given_and_tells_where_it_was_taken() -> None:
    root, target = Memory("root"), Memory("target")
    manifest = a_checkpoint(root)
    moved = {"joined": TableAddress("delta", "/lake/moved")}
    found = Carrying(root, target, manifest).carry(TO, {"joined": "nothing is staged"}, moved, ORIGIN)
    assert (found.generation, found.checkpoint_id, found.epoch, found.shown_epoch) == (9, 43, 44, 6)
    assert found.flags & Flag.FULL_SNAPSHOT
    assert found.shape["joined"].table == moved["joined"]
    assert found.stages["joined"].committable == "nothing is staged"
    assert found.triggered_at == manifest.triggered_at


def test_rows_in_flight_come_along_in_order_also_where_their_checksum_was_not_known() -> None:
    root, target = Memory("root"), Memory("target")
    found = carried(root, target, a_checkpoint(root))
    segments = found.stages["joined"].in_flight["orders"]
    assert [(each.sequence, each.batch) for each in segments] == [(5, 4), (6, 5)]
    assert [target.read(each.files[0].path) for each in segments] == [b"rows 5", b"rows 6"]
    assert {RootPaths.stage_of(each.files[0].path) for each in segments} == {"orders"}, "a gate tells inputs by that"
    assert found.stages["joined"].in_flight["payments"] == ()


def test_nothing_of_it_lies_where_a_run_of_its_generation_writes_or_another_try_has_written() -> None:
    """Who is killed before it is decided leaves the generation to a run, or to the next try with another id."""
    root = Memory("root")
    manifest = a_checkpoint(root)
    first = Carrying(root, root, manifest, links=True).carry(Numbers(9, 43, 43), {}, {}, ORIGIN)
    again = Carrying(root, root, manifest, links=True).carry(Numbers(9, 44, 44), {}, {}, ORIGIN)
    assert references(root, first).isdisjoint(references(root, again))
    for checkpoint_id, found in ((43, first), (44, again)):
        assert {RootPaths.kept_for(name) for name in references(root, found)} == {checkpoint_id}
        assert not any("/stages/" in name for name in references(root, found))


def test_what_is_in_flight_to_two_stages_is_carried_once() -> None:
    root, target = Memory("root"), Memory("target")
    manifest = a_checkpoint(root)
    also = msgspec.structs.replace(manifest.stages["joined"], files=SnapshotFiles())
    manifest = msgspec.structs.replace(manifest, stages={**manifest.stages, "also": also})
    found = carried(root, target, manifest)
    assert found.stages["also"].in_flight == found.stages["joined"].in_flight
    assert references(target, found) == frozenset(target.list())


def test_two_files_never_become_one() -> None:
    root, target = Memory("root"), Memory("target")
    manifest = a_checkpoint(root)
    both = (in_flight(root, 5), in_flight(root, 5, generation=1))
    stage = msgspec.structs.replace(manifest.stages["joined"], in_flight={"orders": both})
    with pytest.raises(InvariantViolation, match="cannot both be carried"):
        carried(root, target, msgspec.structs.replace(manifest, stages={"joined": stage}))


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize("what", ["snapshots/joined/ckpt-000007/state/1", "stages/orders/output/part-5.parquet"])
def test_damage_is_noticed_before_anything_is_decided(what: str, *, links: bool) -> None:
    name = f"generations/000002/{what}"
    for damaged, why in ((None, "is gone"), (b"", "differs"), (b"other!!", "differs")):
        root = Memory("root")
        manifest = a_checkpoint(root)
        if damaged is None:
            root.delete([name])
        else:
            root.write(name, damaged)
        with pytest.raises(DamagedCheckpoint, match=f"{what}.*{why}"):
            carried(root, root if links else Memory("target"), manifest, links=links)


def test_a_list_that_is_damaged_is_noticed() -> None:
    root = Memory("root")
    manifest = a_checkpoint(root, files=300)
    (told,) = manifest.stages["joined"].files.lists
    root.write(told.stored, b"{}")
    with pytest.raises(DamagedCheckpoint, match="a list of files of stage 'joined', is not what it was"):
        carried(root, Memory("target"), manifest)


def test_within_a_root_second_names_are_enough_and_outlive_the_first() -> None:
    root = Memory("root")
    manifest = a_checkpoint(root, files=300)
    expected = data_of(root, manifest)
    found = carried(root, root, manifest, links=True)
    root.delete(references(root, manifest))
    assert data_of(root, found) == expected
    assert found.flags == manifest.flags, "what was linked is no full snapshot"
    assert [each.damage for each in check_files(root, found) if each.damage is not None] == []


def test_what_was_carried_can_be_carried_on() -> None:
    root, savepoint, target = Memory("root"), Memory("savepoint"), Memory("target")
    manifest = a_checkpoint(root)
    own = Numbers(manifest.generation, manifest.checkpoint_id, manifest.epoch)
    saved = Carrying(root, savepoint, manifest).carry(own, {}, {}, manifest.origin)
    assert saved.shown_epoch == manifest.epoch
    found = carried(savepoint, target, saved)
    further = Memory("further")
    again = Carrying(target, further, found).carry(Numbers(12, 50, 50), {}, {}, ORIGIN)
    assert data_of(further, again) == data_of(root, manifest)
    segments = again.stages["joined"].in_flight["orders"]
    assert [further.read(each.files[0].path) for each in segments] == [b"rows 5", b"rows 6"]
    assert {RootPaths.generation_of(name) for name in further.list()} == {12}


class SlowBucket(Bucket):
    """Of which no state is read until 16 read at once (or, where they never do, too late). It tells how many did."""

    def __init__(self, name: str) -> None:
        super().__init__(MemoryStore(), BucketPlace(f"s3://{name}/", f"s3a://{name}/"))
        self.now = [0, 0]
        self.counting = threading.Lock()
        self.met = threading.Event()

    def open(self, name: str) -> BufferedIOBase | None:
        with self.counting:
            self.now[0] += 1
            self.now[1] = max(self.now)
            if self.now[0] >= 16:
                self.met.set()
        if "/state/" in name and not self.met.wait(10):
            self.met.set()
        with self.counting:
            self.now[0] -= 1
        return super().open(name)


def in_a_bucket(files: int) -> tuple[SlowBucket, Manifest]:
    made, root = Memory(), SlowBucket("bucket")
    manifest = a_checkpoint(made, files)
    for name in made.list():
        root.write(name, made.read(name) or b"")
    return root, manifest


@pytest.mark.parametrize("where", ["folder", "bucket", "another bucket"])
def test_between_places_of_which_one_is_far_many_are_carried_at_once(tmp_path: Path, where: str) -> None:
    root, manifest = in_a_bucket(300)
    targets: dict[str, Files] = {
        "folder": Folder(tmp_path),
        "bucket": root.at("savepoint"),
        "another bucket": SlowBucket("another"),
    }
    looks = root.requests["head"]
    found = carried(root, targets[where], manifest)
    assert data_of(targets[where], found) == data_of(root, manifest)
    assert [each.damage for each in check_files(targets[where], found) if each.damage is not None] == []
    assert 16 <= root.now[1] <= 32
    synced = 302 if where == "bucket" else 0
    assert root.requests["head"] - looks == synced, "whether a file is there shows when it is copied"


def test_of_a_bucket_too_it_is_told_which_file_is_gone(tmp_path: Path) -> None:
    root, manifest = in_a_bucket(40)
    root.delete(["generations/000002/snapshots/joined/ckpt-000007/state/7"])
    with pytest.raises(DamagedCheckpoint, match="ckpt-000007/state/7 of stage 'joined' is gone"):
        carried(root, Folder(tmp_path), manifest)
