"""Snapshots: exactly the files that are needed, kept once; and a query goes on from them as if nothing had been."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import run_to_end, stream, table_rows, write_input
from tests.spark.state_in_place import STAGE, on_cluster, zip_that_shares
from tidegate.engine.cleaning import Leftovers
from tidegate.engine.root import Root
from tidegate.errors import DamagedCheckpoint, StoreUnavailable
from tidegate.protocol.aligner import CutCause
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.protocol.retention import StoredFile, deletable
from tidegate.spark.filelog import StageSource, is_committed, restart_source_logs, write_log
from tidegate.spark.session import StageSessions
from tidegate.spark.snapshot import Snapshotter, files_at, restore_checkpoint
from tidegate.storage.bucket_root import BucketRoot
from tidegate.storage.file_lists import SnapshotFile, SnapshotFiles, files_of
from tidegate.storage.files import ETAG, Files, checksum, is_as_it_was
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import InspectedRoot, examine, references
from tidegate.storage.manifest import FORMAT, Manifest, StageSnapshot, encode_manifest
from tidegate.storage.memory import Memory
from tidegate.storage.mounted import for_spark
from tidegate.storage.paths import RootPaths

pytestmark = pytest.mark.matrix

# -- folders that are made by hand ------------------------------------------------------------------


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")


def checkpoint_folder(folder: Path, batches: int, *sources: str) -> Path:
    """Spark's checkpoint folder after some batches, each of which has read to the offsets given."""
    touch(folder, "metadata")
    (folder / "offsets").mkdir()
    for batch in range(batches):
        write_log(Folder(folder, fsync=False), f"offsets/{batch}", ['{"batchWatermarkMs":0}', *sources])
        touch(folder, f"commits/{batch}", f"commits/.{batch}.crc", f"offsets/.{batch}.crc")
    return folder


def full_snapshot(path: Path, *shared: str) -> None:
    """A full snapshot of RocksDB that lists the files it shares with others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zip_that_shares(*shared))


def test_a_batch_needs_its_own_entries_and_those_of_the_one_before(tmp_path: Path) -> None:
    checkpoint = checkpoint_folder(tmp_path, 6, "-")
    wanted = {"metadata", "offsets/2", "offsets/3", "commits/2", "commits/3"}
    assert sorted(files_at(Folder(checkpoint), 3, reads_gates=True)) == sorted(wanted)


def test_the_first_batch_has_none_before_it(tmp_path: Path) -> None:
    checkpoint = checkpoint_folder(tmp_path, 6, "-")
    assert sorted(files_at(Folder(checkpoint), 0, reads_gates=True)) == ["commits/0", "metadata", "offsets/0"]


@pytest.mark.parametrize("gone", ["offsets/3", "commits/3", "offsets/2"])
def test_a_batch_that_spark_has_deleted_already_cannot_be_taken(tmp_path: Path, gone: str) -> None:
    checkpoint = checkpoint_folder(tmp_path, 6, "-")
    (checkpoint / gone).unlink()
    with pytest.raises(DamagedCheckpoint, match="batch 3 is no longer in"):
        files_at(Folder(checkpoint), 3, reads_gates=True)


def test_a_log_of_the_users_source_is_needed_whole_up_to_the_batch(tmp_path: Path) -> None:
    checkpoint = checkpoint_folder(tmp_path, 6, '{"logOffset":10}')
    touch(checkpoint, "sources/0/8", "sources/0/9.compact", "sources/0/10", "sources/0/11", "sources/0/.10.crc")
    found = [name for name in files_at(Folder(checkpoint), 3, reads_gates=False) if name.startswith("sources")]
    assert sorted(found) == ["sources/0/10", "sources/0/8", "sources/0/9.compact"]


def test_what_a_source_of_another_kind_keeps_is_needed_whole(tmp_path: Path) -> None:
    checkpoint = checkpoint_folder(tmp_path, 6, '{"topic":{"0":10}}')
    touch(checkpoint, "sources/0/0", "sources/0/partitions/7")
    found = [name for name in files_at(Folder(checkpoint), 3, reads_gates=False) if name.startswith("sources")]
    assert sorted(found) == ["sources/0/0", "sources/0/partitions/7"]


def test_of_two_equal_sources_and_another_no_log_is_cut_short(tmp_path: Path) -> None:
    """They have two logs, though the offsets name three sources."""
    checkpoint = checkpoint_folder(tmp_path, 6, '{"logOffset":3}', '{"logOffset":3}', '{"logOffset":8}')
    touch(checkpoint, *(f"sources/0/{number}" for number in range(5)), *(f"sources/1/{number}" for number in range(10)))
    found = {name for name in files_at(Folder(checkpoint), 3, reads_gates=False) if name.startswith("sources")}
    assert found >= {f"sources/0/{number}" for number in range(4)} | {f"sources/1/{number}" for number in range(9)}
    assert "sources/1/9" not in found


def test_the_logs_of_gates_are_not_kept_because_they_start_anew(tmp_path: Path) -> None:
    checkpoint = checkpoint_folder(tmp_path, 6, '{"logOffset":10}')
    touch(checkpoint, *(f"sources/0/{number}" for number in range(7, 14)))
    assert not any(name.startswith("sources") for name in files_at(Folder(checkpoint), 3, reads_gates=True))


def state_at(checkpoint: Path, batch: int) -> set[str]:
    found = files_at(Folder(checkpoint), batch, reads_gates=True)
    assert len(found) == len(set(found))
    return {name.removeprefix("state/0/0/") for name in found if name.startswith("state/")}


def test_state_without_a_full_snapshot_is_every_change(tmp_path: Path) -> None:
    checkpoint = checkpoint_folder(tmp_path, 6, "-")
    touch(checkpoint, *(f"state/0/0/{version}_aa.changelog" for version in range(1, 7)))
    assert state_at(checkpoint, 2) == {"1_aa.changelog", "2_aa.changelog", "3_aa.changelog"}


def test_state_is_the_newest_full_snapshot_what_it_lists_and_the_changes_since(tmp_path: Path) -> None:
    checkpoint = checkpoint_folder(tmp_path, 9, "-")
    touch(checkpoint, *(f"state/0/0/{version}_aa.changelog" for version in range(1, 10)))
    touch(checkpoint, *(f"state/0/0/SSTs/{name}.sst" for name in ("one", "two", "three", "orphan")))
    full_snapshot(checkpoint / "state/0/0/3_aa.zip", "one.sst")
    full_snapshot(checkpoint / "state/0/0/5_aa.zip", "one.sst", "two.sst")
    full_snapshot(checkpoint / "state/0/0/8_aa.zip", "three.sst")
    assert state_at(checkpoint, 1) == {"1_aa.changelog", "2_aa.changelog"}
    assert state_at(checkpoint, 2) == {"3_aa.zip", "SSTs/one.sst"}
    assert state_at(checkpoint, 5) == {"5_aa.zip", "SSTs/one.sst", "SSTs/two.sst", "6_aa.changelog"}
    assert state_at(checkpoint, 8) == {"8_aa.zip", "SSTs/three.sst", "9_aa.changelog"}


def test_changes_of_a_task_that_was_tried_twice_are_all_kept(tmp_path: Path) -> None:
    checkpoint = checkpoint_folder(tmp_path, 3, "-")
    touch(checkpoint, "state/0/0/1_aa.changelog", "state/0/0/2_aa.changelog", "state/0/0/2_bb.changelog")
    assert state_at(checkpoint, 1) == {"1_aa.changelog", "2_aa.changelog", "2_bb.changelog"}


def test_a_full_snapshot_of_a_task_that_was_tried_in_vain_does_not_replace_the_changes(tmp_path: Path) -> None:
    """Spark may upload one that the commit log does not name, and does not load it."""
    checkpoint = checkpoint_folder(tmp_path, 4, "-")
    for version in range(1, 5):
        touch(checkpoint, f"state/0/0/{version}_aa.changelog")
        commit = checkpoint / "commits" / str(version - 1)
        commit.write_text('v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{"0":[["aa"]]}}', encoding="utf-8")
    full_snapshot(checkpoint / "state/0/0/2_aa.zip", "one.sst")
    full_snapshot(checkpoint / "state/0/0/3_bb.zip", "two.sst")
    assert {"2_aa.zip", "SSTs/one.sst", "3_aa.changelog", "4_aa.changelog"} <= state_at(checkpoint, 3)


def test_a_full_snapshot_that_nobody_can_vouch_for_any_more_does_not_replace_what_was_before_it(tmp_path: Path) -> None:
    """It may be of a task that was tried in vain: the commit log that would tell is gone."""
    checkpoint = checkpoint_folder(tmp_path, 9, "-")
    touch(checkpoint, *(f"state/0/0/{version}_aa.changelog" for version in range(3, 10)))
    full_snapshot(checkpoint / "state/0/0/3_aa.zip", "one.sst")
    full_snapshot(checkpoint / "state/0/0/6_bb.zip", "two.sst")
    for gone in (2, 5):
        (checkpoint / "commits" / str(gone)).unlink()
    both = {"3_aa.zip", "SSTs/one.sst", "6_bb.zip", "SSTs/two.sst"}
    assert state_at(checkpoint, 8) == both | {f"{version}_aa.changelog" for version in range(4, 10)}
    # The older one was looked at in time: it is enough, and the other does no harm.
    found = files_at(Folder(checkpoint), 8, reads_gates=True, committed={"state/0/0/6_bb.zip"})
    kept = {name.removeprefix("state/0/0/") for name in found if name.startswith("state/")}
    assert kept == {"6_bb.zip", "SSTs/two.sst", *(f"{version}_aa.changelog" for version in range(7, 10))}


def test_a_full_snapshot_that_was_seen_in_time_is_built_upon_when_its_commit_is_deleted(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.checkpoint.mkdir(parents=True)
    checkpoint = checkpoint_folder(kept.checkpoint, 9, "-")
    touch(checkpoint, *(f"state/0/0/{version}_aa.changelog" for version in range(1, 10)))
    commit = '{"nextBatchWatermarkMs":0,"stateUniqueIds":{"0":[["aa"]]}}'
    (checkpoint / "commits" / "2").write_text(f"v2\n{commit}", encoding="utf-8")
    touch(checkpoint, "state/0/0/SSTs/one.sst", "state/0/0/SSTs/two.sst")
    full_snapshot(checkpoint / "state/0/0/3_aa.zip", "one.sst")
    kept.take(5)
    (checkpoint / "commits" / "2").unlink()
    full_snapshot(checkpoint / "state/0/0/2_cc.zip", "two.sst")
    (checkpoint / "commits" / "1").unlink()
    files, _ = kept.take(6)
    names = {file.name for file in files if file.name.startswith("state/")}
    assert names == {f"state/0/0/{name}" for name in ("3_aa.zip", "SSTs/one.sst")} | {
        f"state/0/0/{version}_aa.changelog" for version in range(4, 8)
    }


def test_every_operator_partition_and_store_is_looked_at(tmp_path: Path) -> None:
    checkpoint = checkpoint_folder(tmp_path, 2, "-")
    stores = [f"state/{operator}/{partition}/{store}" for operator in (0, 1) for partition in (0, 1) for store in "lr"]
    touch(checkpoint, *(f"{store}/{version}_aa.changelog" for store in stores for version in (1, 2)))
    found = [name for name in files_at(Folder(checkpoint), 0, reads_gates=True) if name.startswith("state/")]
    assert sorted(found) == sorted(f"{store}/1_aa.changelog" for store in stores)


def test_what_describes_the_state_is_needed_but_not_of_later_batches(tmp_path: Path) -> None:
    checkpoint = checkpoint_folder(tmp_path, 6, "-")
    touch(checkpoint, "state/0/_metadata/metadata", "state/0/0/_metadata/schema", "state/0/_metadata/.x.crc")
    touch(checkpoint, "state/1/_metadata/v2/0", "state/1/_metadata/v2/5", "state/1/_stateSchema/default/0_aa")
    found = [name for name in files_at(Folder(checkpoint), 3, reads_gates=True) if name.startswith("state/")]
    assert sorted(found) == [
        "state/0/0/_metadata/schema",
        "state/0/_metadata/metadata",
        "state/1/_metadata/v2/0",
        "state/1/_stateSchema/default/0_aa",
    ]


# -- keeping ----------------------------------------------------------------------------------------


class Kept:
    """A stage in a root, and its snapshots."""

    def __init__(self, folder: Path, held: tuple[SnapshotFile, ...] = (), generation: int = 1) -> None:
        self.paths = RootPaths(folder / "root")
        self.checkpoint = self.paths.absolute(self.paths.spark_checkpoint(generation, STAGE))
        self.files = Folder(self.paths.root)
        self.snapshotter = Snapshotter(self.files, generation, STAGE, SnapshotFiles(added=held), reads_gates=False)
        self.checkpoints = 0
        self._unneeded: list[StoredFile] = []

    def take(self, batch: int, *, full: bool = False) -> tuple[tuple[SnapshotFile, ...], int]:
        self.checkpoints += 1
        taken = self.snapshotter.take(Folder(self.checkpoint), self.checkpoints, batch, full=full)
        self._unneeded += taken.unneeded
        files = tuple(files_of(self.files, STAGE, taken.files))
        assert taken.total_bytes == sum(file.size_bytes for file in files)
        return files, taken.new_bytes

    def unneeded(self, visible: int) -> list[str]:
        """What a clean-up would delete after a checkpoint that all tables show, and that alone is retained."""
        leftovers = Leftovers()
        leftovers.add(self._unneeded)
        stored = leftovers.free({visible}, visible)
        return sorted(file.path for file in deletable({visible}, 1, {visible: frozenset()}, stored))


def test_a_snapshot_names_size_and_checksum_of_files_that_outlive_sparks_own(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.checkpoint.mkdir(parents=True)
    checkpoint_folder(kept.checkpoint, 3, "-")
    files, new_bytes = kept.take(2)
    shutil.rmtree(kept.checkpoint)
    for file in files:
        data = kept.paths.absolute(file.stored).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size_bytes, file.sha256)
    assert new_bytes == sum(file.size_bytes for file in files)


def test_the_next_snapshot_adds_only_what_is_new(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.checkpoint.mkdir(parents=True)
    checkpoint_folder(kept.checkpoint, 3, "-")
    touch(kept.checkpoint, *(f"state/0/0/{version}_aa.changelog" for version in (1, 2, 3)))
    first, _ = kept.take(1)
    again, nothing = kept.take(1)
    assert (again, nothing) == (first, 0)
    second, new_bytes = kept.take(2)
    added = {file.name for file in second} - {file.name for file in first}
    assert added == {"offsets/2", "commits/2", "state/0/0/3_aa.changelog"}
    assert new_bytes == sum(file.size_bytes for file in second if file.name in added)
    inodes = {(kept.checkpoint / file.name).stat().st_ino for file in second}
    assert {kept.paths.absolute(file.stored).stat().st_ino for file in second} == inodes


def test_what_was_kept_for_a_checkpoint_is_not_deleted_before_a_later_one_is_shown(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.checkpoint.mkdir(parents=True)
    checkpoint_folder(kept.checkpoint, 6, "-")
    first, second, third = (kept.take(batch)[0] for batch in (1, 3, 5))
    assert kept.unneeded(1) == []
    gone = sorted(path.split("/ckpt-000001/")[1] for path in kept.unneeded(2))
    assert gone == ["commits/0", "commits/1", "offsets/0", "offsets/1"]
    needed = {file.stored for file in (*second, *third)}
    assert set(kept.unneeded(3)) == {file.stored for file in (*first, *second)} - {file.stored for file in third}
    assert not set(kept.unneeded(2)) & needed, "also of those that are yet to be decided"


def test_what_a_snapshot_has_linked_that_failed_is_deleted_and_no_later_one_refers_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    kept.checkpoint.mkdir(parents=True)
    checkpoint_folder(kept.checkpoint, 3, "-")

    keep = Folder.keep

    def keep_on_a_full_disk(files: Folder, name: str, source: Files, source_name: str) -> None:
        if name.endswith("commits/2"):
            raise StoreUnavailable("No space left on device")
        keep(files, name, source, source_name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "keep", keep_on_a_full_disk)
        with pytest.raises(StoreUnavailable, match="No space left"):
            kept.take(2)
    left = kept.files.list("generations/000001/snapshots")
    assert left
    files, _ = kept.take(2)
    assert not {file.stored for file in files} & set(left)
    assert set(left) <= set(kept.unneeded(2)), "also of what it had not come to"


def taken_and_restored(root: Files, template: Path) -> tuple[list[tuple[SnapshotFile, ...]], list[str]]:
    """Two snapshots, the second of them full; and what is there when it is restored as the next generation."""
    spark = root.at(RootPaths.spark_checkpoint(1, STAGE), durable=False)
    for path in sorted(path for path in template.rglob("*") if path.is_file()):
        spark.write(path.relative_to(template).as_posix(), path.read_bytes())
    snapshotter = Snapshotter(root, 1, STAGE, None, reads_gates=True)
    taken = []
    for number in (1, 2):
        files = snapshotter.take(spark, number, 2 + number, full=number == 2).files
        taken.append(tuple(files_of(root, STAGE, files)))
    restored = root.at(RootPaths.spark_checkpoint(2, STAGE), durable=False)
    restore_checkpoint(root, taken[1], restored)
    restart_source_logs(restored, 4, [StageSource("rows", 0)])
    root.delete(root.list("generations/000001/stages"))
    assert all(is_whole(root, file) for file in (*taken[0], *taken[1]))
    assert restored.location() in (restored.read("state/0/_metadata/v2/0") or b"").decode()
    return taken, root.list()


def test_a_snapshot_in_memory_is_as_one_in_a_folder(tmp_path: Path) -> None:
    template = checkpoint_folder(tmp_path / "template", 6, "-")
    touch(template, "state/0/0/SSTs/one.sst", *(f"state/0/0/{version}_aa.changelog" for version in range(1, 6)))
    full_snapshot(template / "state/0/0/3_aa.zip", "one.sst")
    named = template / "state/0/_metadata/v2/0"
    named.parent.mkdir(parents=True)
    named.write_text(f'v2\n{{"paths":["/old/generations/000001/stages/{STAGE}/spark/state/0"]}}', encoding="utf-8")
    in_memory, in_folder = (
        taken_and_restored(files, template) for files in (Memory(), Folder(tmp_path / "root", fsync=False))
    )
    assert in_memory == in_folder
    assert any("/ckpt-" in name for name in in_memory[1])


def with_state(folder: Path, batches: int = 3) -> Kept:
    kept = Kept(folder)
    kept.checkpoint.mkdir(parents=True)
    checkpoint_folder(kept.checkpoint, batches, "-")
    touch(kept.checkpoint, *(f"state/0/0/{version}_aa.changelog" for version in range(1, batches + 1)))
    return kept


def is_whole(files: Files, file: SnapshotFile) -> bool:
    return checksum(files, file.stored) == (file.size_bytes, file.sha256)


def test_a_full_snapshot_stores_every_file_anew_and_refers_to_no_other_checkpoints(tmp_path: Path) -> None:
    kept = with_state(tmp_path)
    first, _ = kept.take(1)
    full, new_bytes = kept.take(2, full=True)
    assert new_bytes == sum(file.size_bytes for file in full)
    assert not {file.stored for file in first} & {file.stored for file in full}
    others = [kept.paths.absolute(file.stored) for file in first] + [kept.checkpoint / file.name for file in full]
    for path in others:
        path.write_bytes(b"damaged")
    assert all(is_whole(kept.files, file) for file in full), "it shares no file, by whatever name"


def test_the_snapshot_after_a_full_one_builds_on_it(tmp_path: Path) -> None:
    kept = with_state(tmp_path, 4)
    kept.take(1)
    full, _ = kept.take(2, full=True)
    later, new_bytes = kept.take(3)
    added = {file.name for file in later} - {file.name for file in full}
    assert added == {"offsets/3", "commits/3", "state/0/0/4_aa.changelog"}
    assert new_bytes == sum(file.size_bytes for file in later if file.name in added)
    assert {file for file in later if file.name not in added} <= set(full)
    needed = {file.stored for file in later}
    stored = set(kept.files.list("generations/000001/snapshots"))
    assert set(kept.unneeded(3)) == stored - needed, "what was kept for the time of copying goes too"


def test_what_spark_has_deleted_is_copied_from_what_an_older_checkpoint_keeps(tmp_path: Path) -> None:
    kept = with_state(tmp_path)
    touch(kept.checkpoint, "state/0/0/SSTs/one.sst")
    full_snapshot(kept.checkpoint / "state/0/0/2_aa.zip", "one.sst")
    kept.take(2)
    (kept.checkpoint / "state/0/0/SSTs/one.sst").unlink()
    full, _ = kept.take(2, full=True)
    assert "state/0/0/SSTs/one.sst" in {file.name for file in full}
    assert all(is_whole(kept.files, file) for file in full)


def test_a_full_snapshot_vouches_for_nothing_that_was_damaged(tmp_path: Path) -> None:
    kept = with_state(tmp_path)
    first, _ = kept.take(2)
    damaged = next(file for file in first if file.name == "state/0/0/1_aa.changelog")
    stored, live = kept.paths.absolute(damaged.stored), kept.checkpoint / damaged.name
    whole = live.read_bytes()
    flip(stored)  # and Spark's own, which is the same file
    with pytest.raises(DamagedCheckpoint, match=rf"{damaged.stored} is not what it was: checksum differs"):
        kept.take(2, full=True)
    assert not [path for path in kept.paths.root.rglob("ckpt-*/full/**/*") if path.is_file()], "nothing half done stays"
    stored.unlink()
    with pytest.raises(DamagedCheckpoint, match=rf"{damaged.stored} is gone"):
        kept.take(2, full=True)
    # Spark's own is another file where a file system has no links: then it takes the damaged one's place.
    live.write_bytes(whole)
    full, _ = kept.take(2, full=True)
    assert all(is_whole(kept.files, file) for file in full)


def test_what_a_full_snapshot_that_failed_could_not_remove_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = with_state(tmp_path)
    kept.take(2)
    copies = iter(range(3))

    def copy(files: Folder, name: str, source: Files, source_name: str) -> None:
        if next(copies, None) is None:
            raise StoreUnavailable("the store is away")
        files.write(name, source.read(source_name) or b"")

    def delete(_files: Folder, _names: Iterable[str]) -> None:
        raise StoreUnavailable("the store is away")

    with monkeypatch.context() as away:
        away.setattr(Folder, "copy", copy)
        away.setattr(Folder, "delete", delete)
        with pytest.raises(StoreUnavailable):
            kept.take(2, full=True)
    left = {name for name in kept.files.list("generations") if "/ckpt-000002/full/" in name}
    assert left
    kept.take(2)
    assert left <= set(kept.unneeded(3))


def test_a_full_snapshot_of_what_nobody_has_read_knows_its_copies_by_what_the_bucket_says_of_these() -> None:
    """Where a bucket makes ETags of more than the content, a copy has another one."""
    with on_cluster() as stage:
        stage.checkpoint()
        before = {file.name: file for file in stage.snapshotter.held.values()}
        gets = stage.bucket.requests["get"]
        taken = stage.snapshotter.take(stage.spark(), 2, stage.query.batch, full=True)
        assert stage.bucket.requests["get"] == gets, "nor does anybody read it for that"
        stage.root.sync(taken.fresh)
        files = files_of(stage.root, STAGE, taken.files)
        assert all(is_as_it_was(stage.root, file.stored, file.size_bytes, file.sha256) for file in files)
        known = {file.name for file in files if file.sha256.startswith(ETAG)}
        assert known == {file.name for file in files if file.name.startswith("state/")}
        assert all(file.sha256 != before[file.name].sha256 for file in files if file.name in known)


def test_one_that_names_paths_and_was_rewritten_for_another_attempt_is_copied_from_what_was_kept() -> None:
    with on_cluster() as stage:
        name = "state/0/_metadata/v2/0"
        stage.spark().write(name, f'v2\n{{"paths":["{for_spark(stage.spark())}/state/0/_stateSchema/x"]}}'.encode())
        stage.checkpoint()
        kept = stage.snapshotter.held[name]
        stage.pause()
        assert stage.spark().size(name) != kept.size_bytes
        stage.run_batch()
        taken = stage.snapshotter.take(stage.spark(), 2, stage.query.batch, full=True)
        (copied,) = [file for file in files_of(stage.root, STAGE, taken.files) if file.name == name]
        assert stage.root.read(copied.stored) == stage.root.read(kept.stored)
        assert is_as_it_was(stage.root, copied.stored, copied.size_bytes, copied.sha256)


def test_what_was_read_once_is_compared_by_its_content_though_executors_write_there_now() -> None:
    with on_cluster() as stage:
        stage.checkpoint()
        read = [
            SnapshotFile(file.name, file.stored, *(checksum(stage.root, file.stored) or (0, "")))
            for file in stage.snapshotter.held.values()
        ]
        later = Snapshotter(stage.root, 1, STAGE, SnapshotFiles(added=tuple(read)), reads_gates=False)
        files = files_of(stage.root, STAGE, later.take(stage.spark(), 2, stage.query.batch, full=True).files)
        assert {file.name: file.sha256 for file in files} == {file.name: file.sha256 for file in read}


def test_a_full_snapshot_copies_side_by_side_where_each_takes_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    under_way: set[str] = set()
    copy = BucketRoot.copy

    def copy_slowly(root: BucketRoot, name: str, source: Files, source_name: str) -> None:
        under_way.add(name)
        at_once.append(len(under_way))
        time.sleep(0.01)
        copy(root, name, source, source_name)
        under_way.discard(name)

    with on_cluster() as stage:
        stage.checkpoint()
        monkeypatch.setattr(BucketRoot, "copy", copy_slowly)
        taken = stage.snapshotter.take(stage.spark(), 2, stage.query.batch, full=True)
        names = [file.name for file in files_of(stage.root, STAGE, taken.files)]
    assert names == list(dict.fromkeys(names))
    assert 1 < max(at_once) <= 16


def test_nothing_is_copied_any_more_when_what_a_full_snapshot_that_failed_has_copied_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = BucketRoot.copy

    def copy_some(root: BucketRoot, name: str, source: Files, source_name: str) -> None:
        if name.endswith(".zip"):
            raise StoreUnavailable("the bucket is away")
        time.sleep(0.01)
        copy(root, name, source, source_name)

    with on_cluster() as stage:
        stage.checkpoint()
        monkeypatch.setattr(BucketRoot, "copy", copy_some)
        with pytest.raises(StoreUnavailable):
            stage.snapshotter.take(stage.spark(), 2, stage.query.batch, full=True)
        assert not [name for name in stage.there() if "/full/" in name]


def test_a_damaged_full_snapshot_of_state_is_named(tmp_path: Path) -> None:
    kept = with_state(tmp_path)
    touch(kept.checkpoint, "state/0/0/2_aa.zip")
    with pytest.raises(DamagedCheckpoint, match=r"state/0/0/2_aa\.zip, a full snapshot of state, is damaged"):
        kept.take(2)


def test_a_full_snapshot_of_a_restored_stage_has_its_own_files_also_of_those_that_name_paths(tmp_path: Path) -> None:
    kept = with_state(tmp_path)
    named = kept.checkpoint / "state/0/_metadata/v2/0"
    named.parent.mkdir(parents=True)
    named.write_text(f'v2\n{{"stateSchemaFilePaths":["{kept.checkpoint}/state/0/_stateSchema/x"]}}', encoding="utf-8")
    first, _ = kept.take(2)
    later = Kept(tmp_path, first, generation=2)
    restore_checkpoint(later.files, first, Folder(later.checkpoint))
    full, _ = later.take(2, full=True)
    assert all(file.stored.startswith("generations/000002/") for file in full)
    shutil.rmtree(tmp_path / "root" / "generations" / "000001")
    last = Kept(tmp_path, full, generation=3)
    restore_checkpoint(last.files, full, Folder(last.checkpoint))
    assert str(last.checkpoint) in (last.checkpoint / "state/0/_metadata/v2/0").read_text(encoding="utf-8")


def test_what_the_next_generation_still_needs_is_not_kept_twice(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.checkpoint.mkdir(parents=True)
    checkpoint_folder(kept.checkpoint, 3, '{"topic":{"0":10}}')
    touch(kept.checkpoint, "state/0/0/1_aa.changelog", "state/0/0/2_aa.changelog", "state/0/0/3_aa.changelog")
    first, _ = kept.take(2)
    later = Kept(tmp_path, first, generation=2)
    restore_checkpoint(later.files, first, Folder(later.checkpoint))
    write_log(Folder(later.checkpoint), "offsets/3", ['{"batchWatermarkMs":0}', "-"])
    touch(later.checkpoint, "commits/3", "state/0/0/4_bb.changelog")
    second, new_bytes = later.take(3)
    fresh = {file.name for file in second if file.stored.startswith("generations/000002/")}
    assert fresh == {"offsets/3", "commits/3", "state/0/0/4_bb.changelog"}
    assert new_bytes == sum(file.size_bytes for file in second if file.name in fresh)


# -- examining --------------------------------------------------------------------------------------


def a_checkpoint(folder: Path) -> tuple[Root, DecisionLog, StageSnapshot]:
    """A complete checkpoint of one stage, with one segment in flight."""
    kept = Kept(folder)
    kept.checkpoint.mkdir(parents=True)
    checkpoint_folder(kept.checkpoint, 3, "-")
    touch(kept.checkpoint, *(f"state/0/0/{version}_aa.changelog" for version in (1, 2, 3)))
    files, new_bytes = kept.take(2)
    flying = SegmentFile("generations/000001/stages/rows/output/part-7.parquet", 52)
    touch(kept.paths.root, flying.path)
    assert kept.paths.absolute(flying.path).stat().st_size == flying.size_bytes
    snapshot = StageSnapshot(
        cut=2,
        cause=CutCause.FORCED,
        over_bound=False,
        files=SnapshotFiles(added=files),
        positions={"rows": 6},
        output_sequence=0,
        in_flight={"rows": (Segment(7, 6, (flying,)),)},
        source_positions=(),
        watermark_ms=None,
        committable=None,
        barrier_ms=0,
        alignment_ms=0,
        snapshot_ms=0,
        new_bytes=new_bytes,
        total_bytes=new_bytes,
    )
    manifest = Manifest(FORMAT, "shop", 5, 5, 1, 1, 0, False, "2026-01-01", 1, None, {}, {STAGE: snapshot})
    data, sha256 = encode_manifest(manifest)
    root = Root(kept.paths.root, "shop")
    name = root.paths.manifest(1, 5)
    root.store.write(name, data)
    log = DecisionLog()
    log.append(log.opening("me", None))
    log.append(
        log.completing(
            "me", 1, checkpoint_id=5, epoch=5, manifest=name, manifest_sha256=sha256, aligned=False, retained=(5,)
        )
    )
    return root, log, snapshot


def flip(path: Path) -> None:
    """Change one bit, and neither size nor time."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_whole_checkpoint_is_found_whole(tmp_path: Path) -> None:
    root, log, snapshot = a_checkpoint(tmp_path)
    assert examine(root.store, log, 5).stages[STAGE] == snapshot


@pytest.mark.parametrize("damage", [Path.unlink, flip], ids=["gone", "one bit"])
@pytest.mark.parametrize("name", ["metadata", "offsets/1", "offsets/2", "commits/2", "state/0/0/1_aa.changelog"])
def test_any_file_of_a_snapshot_that_is_gone_or_changed_is_found_and_named(
    tmp_path: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    root, log, snapshot = a_checkpoint(tmp_path)
    (stored,) = [file.stored for file in snapshot.files.added if file.name == name]
    damage(root.paths.absolute(stored))
    with pytest.raises(DamagedCheckpoint, match=rf"{stored} of stage '{STAGE}'"):
        examine(root.store, log, 5)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"cut")], ids=["gone", "cut off"])
def test_a_segment_in_flight_that_is_gone_or_cut_off_is_found_and_named(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    root, log, snapshot = a_checkpoint(tmp_path)
    path = snapshot.in_flight["rows"][0].files[0].path
    damage(root.paths.absolute(path))
    with pytest.raises(DamagedCheckpoint, match=rf"{path}, in flight to stage '{STAGE}'"):
        examine(root.store, log, 5)


@pytest.mark.parametrize("damage", [Path.unlink, flip], ids=["gone", "one bit"])
def test_a_manifest_that_is_gone_or_changed_is_found_and_named(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    root, log, _ = a_checkpoint(tmp_path)
    damage(root.paths.absolute(root.paths.manifest(1, 5)))
    with pytest.raises(DamagedCheckpoint, match=r"ckpt-000005\.json"):
        examine(root.store, log, 5)


# -- real queries -----------------------------------------------------------------------------------

Rows = dict[int, list[tuple[Any, ...]]]
CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
BATCHES = 13


def run(session: SparkSession, frame: DataFrame, checkpoint: Path, mode: str = "append") -> Rows:
    """Run a query until its input is consumed. Returns the rows of every batch."""
    seen: Rows = {}

    def collect(batch: DataFrame, number: int) -> None:
        seen[number] = sorted(tuple(row) for row in batch.collect())

    assert frame.sparkSession is session
    writer = frame.writeStream.outputMode(mode).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).foreachBatch(collect).start()
    query.awaitTermination()
    return seen


def last_batch(checkpoint: Path) -> int:
    batch = 0
    while is_committed(Folder(checkpoint), batch + 1):
        batch += 1
    return batch


class Counted(Kept):
    """An aggregation whose state has full snapshots in the middle, and changes before and after."""

    def __init__(self, folder: Path, session: SparkSession) -> None:
        super().__init__(folder)
        self.input = folder / "in"
        self.session = session
        self.rows: Rows = {}
        for first, last, changes in ((0, 4, "true"), (4, 6, "false"), (6, BATCHES, "true")):
            write_input(self.input, last - first, 6, first_file=first)
            session.conf.set(CHANGELOG, changes)
            self.rows |= self.run(self.checkpoint)

    def run(self, checkpoint: Path) -> Rows:
        counts = stream(self.session, self.input, files_per_batch=1).groupBy("key").agg(F.sum("value"), F.count("*"))
        return run(self.session, counts, checkpoint, "update")


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Counted:
    session = StageSessions(spark).of_sources
    session.conf.set("spark.sql.shuffle.partitions", "1")
    return Counted(tmp_path_factory.mktemp("counted"), session)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 4, 5, 8, BATCHES - 1])
def test_an_aggregation_needs_what_lies_between_its_last_full_snapshot_and_the_batch(
    counted: Counted, batch: int
) -> None:
    names = files_at(Folder(counted.checkpoint), batch, reads_gates=False)
    assert all((counted.checkpoint / name).is_file() for name in names)
    store = [Path(name).name for name in names if name.startswith("state/0/0/") and "_metadata" not in name]
    full = [name for name in store if name.endswith(".zip")]
    changes = sorted(int(name.split("_")[0]) for name in store if name.endswith(".changelog"))
    assert [int(name.split("_")[0]) for name in full] == ([min(batch + 1, 6)] if batch >= 4 else [])
    assert changes == list(range(7 if batch >= 4 else 1, batch + 2))
    assert any(name.startswith("state/0/0/SSTs/") for name in names) == bool(full)
    sources = {name for name in names if name.startswith("sources/")}
    compacted = {f"sources/0/{number}" for number in range(batch + 1) if number != 9}
    assert sources == compacted | ({"sources/0/9.compact"} if batch >= 9 else set())


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 5, 10])
def test_an_aggregation_that_is_restored_goes_on_with_the_very_same_rows(counted: Counted, batch: int) -> None:
    files, _ = counted.take(batch)
    elsewhere = counted.checkpoint.parent.parent / f"restored-{batch}" / "spark"
    restore_checkpoint(counted.files, files, Folder(elsewhere))
    assert sorted(path.relative_to(elsewhere).as_posix() for path in elsewhere.rglob("*") if path.is_file()) == sorted(
        file.name for file in files
    )
    again = counted.run(elsewhere)
    assert again == {number: rows for number, rows in counted.rows.items() if number > batch}
    assert again


@pytest.mark.spark
@pytest.mark.slow
def test_an_aggregation_goes_on_from_a_full_snapshot_when_nothing_else_is_left(counted: Counted) -> None:
    kept = Kept(counted.paths.root.parent)
    kept.take(8)
    files, _ = kept.take(10, full=True)
    assert all("/ckpt-" in file.stored for file in files)
    alone = Folder(counted.input.parent / "alone")
    for file in files:
        alone.copy(file.stored, kept.files, file.stored)
    elsewhere = counted.input.parent / "alone" / "spark"
    restore_checkpoint(alone, files, Folder(elsewhere))
    assert counted.run(elsewhere) == {number: rows for number, rows in counted.rows.items() if number > 10}


@pytest.mark.spark
@pytest.mark.slow
def test_the_state_of_one_more_batch_costs_one_more_change(counted: Counted) -> None:
    kept = Kept(counted.paths.root.parent)
    first, _ = kept.take(9)
    second, new_bytes = kept.take(10)
    added = [file for file in second if file.name not in {each.name for each in first}]
    assert sorted(Path(file.name).suffix for file in added) == ["", "", "", ".changelog"]
    assert new_bytes == sum(file.size_bytes for file in added)


@pytest.mark.spark
@pytest.mark.slow
def test_a_query_without_state_needs_only_its_logs_and_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    session = StageSessions(spark).of_sources
    write_input(tmp_path / "in", 4, 5)
    kept = Kept(tmp_path)
    rows = run(session, stream(session, tmp_path / "in", 1).select("id"), kept.checkpoint)
    files, _ = kept.take(1)
    logs = ["offsets/0", "offsets/1", "commits/0", "commits/1", "sources/0/0", "sources/0/1"]
    assert sorted(file.name for file in files) == sorted(["metadata", *logs])
    restore_checkpoint(kept.files, files, Folder(tmp_path / "restored"))
    again = run(session, stream(session, tmp_path / "in", 1).select("id"), tmp_path / "restored")
    assert again == {number: each for number, each in rows.items() if number > 1}


@pytest.mark.spark
@pytest.mark.slow
def test_a_join_of_two_streams_that_is_restored_goes_on_with_the_very_same_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    session = StageSessions(spark).of_sources
    session.conf.set("spark.sql.shuffle.partitions", "1")
    for side in ("left", "right"):
        write_input(tmp_path / side, 3, 6)

    def joined() -> DataFrame:
        ours = stream(session, tmp_path / "left", 1).withWatermark("ts", "1 hour").alias("l")
        theirs = stream(session, tmp_path / "right", 1).where("id % 2 = 0").withWatermark("ts", "1 hour").alias("r")
        near = F.expr("l.key = r.key AND r.ts BETWEEN l.ts - INTERVAL 9 SECONDS AND l.ts + INTERVAL 9 SECONDS")
        return ours.join(theirs, near).select("l.id", "r.value")

    kept = Kept(tmp_path)
    rows = run(session, joined(), kept.checkpoint)
    batch = last_batch(kept.checkpoint) // 2
    files, _ = kept.take(batch)
    restore_checkpoint(kept.files, files, Folder(tmp_path / "restored"))
    again = run(session, joined(), tmp_path / "restored")
    assert again == {number: each for number, each in rows.items() if number > batch}
    assert any(again.values())


@pytest.mark.spark
@pytest.mark.slow
def test_stages_that_have_read_many_segments_are_restored_again_and_again(spark: SparkSession, tmp_path: Path) -> None:
    """A query that starts wants all of its source log, of which a gate's is trimmed. And of a full snapshot it wants
    nothing that another checkpoint keeps."""
    pipeline = tg.Pipeline("again")
    root = tmp_path / "root"

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in", files_per_batch=1)

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "copied"))
    def copied(rows: DataFrame) -> DataFrame:
        return rows.select("id")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "keys"))
    def keys(rows: DataFrame) -> DataFrame:
        return rows.dropDuplicates(["key"]).select("key")

    def run_once() -> None:
        run_to_end(pipeline, root, spark, full_snapshots=True)
        inspected = InspectedRoot(root)
        newest = references(inspected.files, inspected.manifest(inspected.retained()[-1]))
        for path in root.glob("generations/*/snapshots/**/*"):
            if path.is_file() and path.relative_to(root).as_posix() not in newest:
                path.unlink()

    written = 0
    for files in (1, 5):  # a first batch has none before it, which Spark treats apart
        write_input(tmp_path / "in", files, 4, first_file=written)
        written += files
        run_once()
        # Once more, with nothing to do: a checkpoint of a stage that has run no batch since it was restored.
        run_once()
        assert table_rows(tmp_path / "lake" / "copied", ["id"]) == {(each,): 1 for each in range(4 * written)}
        assert table_rows(tmp_path / "lake" / "keys", ["key"]) == {(f"k{each % 5}",): 1 for each in range(4 * written)}
