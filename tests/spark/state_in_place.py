"""A stage with state on a cluster, whose root is in a bucket: checkpoints name its state where Spark has written it.

Spark is played, and deletes nothing, as on a cluster. What snapshots tell, what is retained and what is deleted are the
real thing, over a bucket in memory.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from obstore.store import MemoryStore

from tidegate.engine.cleaning import Cleaning
from tidegate.protocol.aligner import CutCause
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.retention import deletable, retained_after
from tidegate.spark.snapshot import Snapshotter, _shared_files, restore_checkpoint
from tidegate.storage.bucket import Bucket, BucketPlace
from tidegate.storage.bucket_root import BucketRoot
from tidegate.storage.cluster_work import ClusterWork
from tidegate.storage.file_lists import SnapshotFiles, files_of
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import read_manifest, references
from tidegate.storage.manifest import FORMAT, Manifest, StageSnapshot, encode_manifest
from tidegate.storage.memory import Memory
from tidegate.storage.paths import RootPaths
from tidegate.testing.played.rows import PlayedRows
from tidegate.testing.played.sources import PlayedStream, TopicSource
from tidegate.testing.played.spark import Plan, PlayedQuery, Step

STAGE: Final = "counted"
MINUTE_MS: Final = 60_000
VERSIONS: Final = 100
"""As many versions of state Spark might go back."""
LATE: Final = 50
"""As many versions later a file may go: full snapshots are ten versions apart, sweeps twenty batches; and some rest."""
PLAN: Final = Plan(has_state=True, has_checksums=False, retained=1_000_000)


def running(snapshotter: Snapshotter) -> Any:
    """All that cleaning asks of a stage that runs."""
    return SimpleNamespace(
        definition=SimpleNamespace(head=STAGE),
        output=None,
        unneeded=deque(),
        oldest_attempt=1,
        held_paths=snapshotter.held_paths,
        in_place=snapshotter.in_place,
        on_deleted=snapshotter.on_deleted,
    )


class OnCluster:
    """From its first batch on, in one generation after the other."""

    def __init__(
        self, folder: Path, config: CheckpointConfig, *, batches_a_checkpoint: int, full: bool = False
    ) -> None:
        self.bucket = Bucket(MemoryStore(), BucketPlace("s3://bucket/", "s3a://bucket/"), "root")
        self.root = BucketRoot(self.bucket, Folder(folder, fsync=False), in_bucket=True)
        self.config = config
        self.log = DecisionLog()
        self._batches_a_checkpoint = batches_a_checkpoint
        self._full = full
        self._stream = PlayedStream()
        self._checkpoint_id = 0
        self._named: dict[int, frozenset[str]] = {}
        """What each checkpoint names, whatever became of it."""
        self._told: set[str] = set()
        self.open()

    # -- running ----------------------------------------------------------------------------------

    def open(self) -> None:
        """The next generation, from the last checkpoint: whoever ran the one before is dead."""
        newest = self.log.completed(self._checkpoint_id)
        self.log.append(self.log.opening("me", self._checkpoint_id or None))
        self.generation = self.log.generation
        start = None if newest is None else read_manifest(self.root, newest).stages[STAGE].files
        self.snapshotter = Snapshotter(self.root, self.generation, STAGE, start, reads_gates=False)
        self.attempt = 1
        if start is not None:
            restore_checkpoint(self.root, files_of(self.root, STAGE, start), self.spark())
        self._start_query()
        self._stage = running(self.snapshotter)
        self._cleaning = Cleaning(self.root, self.generation, {STAGE: self._stage}, ())

    def pause(self) -> None:
        """And go on in fresh folders."""
        old = self.spark()
        self.attempt += 1
        self.snapshotter.rebuild(old, self.spark(), self.query.batch)
        self._start_query()
        self._stage.oldest_attempt = self.attempt

    def spark(self) -> Files:
        return ClusterWork.of(self.root).at(RootPaths.spark_checkpoint(self.generation, STAGE, self.attempt))

    def _start_query(self) -> None:
        self.query = PlayedQuery(self.spark(), Memory("output"), [TopicSource(self._stream)], PLAN)

    def run_batch(self, *, a_task_fails: bool = False, maintains: bool = True) -> None:
        """`maintains`: Spark stores a full snapshot when it is time to."""
        number = len(self._stream.files)
        self._stream.append(PlayedRows(((0, number, number + 1), (1, number, number + 1))))
        self.query.task_fails = int(a_task_fails)
        assert self.query.run_batch() is Step.COMMITTED
        for _ in self.query.maintain() if maintains else ():
            pass
        old = self.query.batch - VERSIONS
        self.spark().delete([f"offsets/{old}", f"commits/{old}"])  # of its logs Spark deletes what is old

    # -- checkpoints ------------------------------------------------------------------------------

    def checkpoint(self, *, cleans_up: bool = True) -> None:
        """After so many batches; and all tables show it."""
        for batch in range(self._batches_a_checkpoint):
            self.run_batch(a_task_fails=batch % 7 == 3)
        self.take(cleans_up=cleans_up)

    def take(self, *, cleans_up: bool = True) -> None:
        """A checkpoint, of what was run."""
        self._checkpoint_id = number = self._checkpoint_id + 1
        taken = self.snapshotter.take(self.spark(), number, self.query.batch, full=self._full)
        told = {file.path for file in taken.unneeded}
        assert len(told) == len(taken.unneeded)
        assert told.isdisjoint(self._told), "each is told once"
        self._told |= told
        self._stage.unneeded.extend(taken.unneeded)
        self.root.sync(taken.fresh)
        self._decide(number, taken.files)
        if cleans_up:
            self.clean_up()
        self.check_nothing_is_lost()

    def _decide(self, number: int, files: SnapshotFiles) -> None:
        snapshot = StageSnapshot(
            cut=self.query.batch,
            cause=CutCause.FORCED,
            over_bound=False,
            files=files,
            positions={},
            output_sequence=0,
            in_flight={},
            source_positions=(),
            watermark_ms=None,
            committable=None,
            barrier_ms=0,
            alignment_ms=0,
            snapshot_ms=0,
            new_bytes=0,
            total_bytes=0,
        )
        generation = self.generation
        manifest = Manifest(
            FORMAT, "shop", number, number, generation, 1, 0, True, "2026-01-01", 1, None, {}, {STAGE: snapshot}
        )
        data, sha256 = encode_manifest(manifest)
        name = RootPaths.manifest(generation, number)
        self._cleaning.on_manifest(name, number, is_last=False)
        self.root.write(name, data)
        self._named[number] = frozenset({name, *references(self.root, manifest)})
        at_ms = number * MINUTE_MS
        self.log.append(
            self.log.completing(
                "me",
                generation,
                checkpoint_id=number,
                epoch=number,
                manifest=name,
                manifest_sha256=sha256,
                aligned=True,
                retained=retained_after(self.log, number, self.config, at_ms=at_ms),
                at_ms=at_ms,
            )
        )

    def clean_up(self) -> None:
        records = {each: self.log.completed(each) for each in self.log.retained}
        stored = self._cleaning.listing(self._checkpoint_id, {}, records)()
        named = {each: frozenset({record.manifest}) for each, record in records.items() if record is not None}
        self._cleaning.deleting(deletable(records, self.generation, named, stored))()

    # -- what must hold ---------------------------------------------------------------------------

    def there(self) -> set[str]:
        return set(self.bucket.list(RootPaths.GENERATIONS))

    def needed(self) -> set[str]:
        return {name for each in self.log.retained for name in self._named[each]}

    def check_nothing_is_lost(self) -> None:
        lost = sorted(self.needed() - self.there())
        assert not lost, f"{len(lost)} files of checkpoints {self.log.retained} are gone, as {lost[0]}"

    def check_nothing_is_left(self) -> None:
        """Of state that no retained checkpoint names only what Spark may want."""
        shared = {f"{self.spark().location()}/{name}" for name in self._shared()}
        for name in sorted(self.there() - self.needed()):
            assert name.startswith(RootPaths.spark_checkpoint(self.generation, STAGE, self.attempt) + "/state/"), name
            last = name.rpartition("/")[2]
            if "SSTs" in name:
                assert self.root.location(name) in shared, f"{name} is of no full snapshot that is left"
            elif "_" in last:
                version = int(last.partition("_")[0])
                assert version > self.query.batch - VERSIONS - LATE - 2 * self._batches_a_checkpoint, name

    def _shared(self) -> set[str]:
        found = self.spark()
        zips = [name for name in found.list("state") if name.endswith(".zip")]
        return {each for name in zips for each in _shared_files(found, name)}

    def check_each_is_restored(self) -> None:
        """From every retained checkpoint Spark goes on with the state that it had."""
        for each in self.log.retained:
            record = self.log.completed(each)
            assert record is not None
            snapshot = read_manifest(self.root, record).stages[STAGE]
            scratch = Memory(f"of {each}")
            restore_checkpoint(self.root, files_of(self.root, STAGE, snapshot.files), scratch)
            query = PlayedQuery(scratch, Memory("output"), [TopicSource(self._stream)], PLAN)
            query.take_up()
            assert snapshot.cut is not None
            assert query.seen == {0: snapshot.cut + 1, 1: snapshot.cut + 1}


def zip_that_shares(*names: str) -> bytes:
    """A full snapshot of state, with what it shares with others."""
    listed = ",".join(f'{{"localFileName":"x","dfsSstFileName":"{name}","sizeBytes":1}}' for name in names)
    written = BytesIO()
    with zipfile.ZipFile(written, "w") as zipped:
        zipped.writestr("metadata", f'v1\n{{"sstFiles":[{listed}],"numKeys":1}}')
    return written.getvalue()


class Retention(NamedTuple):
    """How often checkpoints are taken, and how long they are kept. `checkpoints`: until none of the first is left."""

    config: CheckpointConfig
    batches: int
    checkpoints: int


RETENTIONS: Final = {
    "the newest three, at each batch": Retention(CheckpointConfig(max_retained=3), 1, 180),
    "the newest three, far apart": Retention(CheckpointConfig(max_retained=3), 150, 8),
    "the newest ten": Retention(CheckpointConfig(max_retained=10), 30, 25),
    "for an hour": Retention(CheckpointConfig(max_retained=1, retain_ms=60 * MINUTE_MS), 5, 130),
    "the newest alone": Retention(CheckpointConfig(max_retained=1), 7, 50),
}


@contextmanager
def on_cluster(which: str = "the newest ten", *, full: bool = False) -> Iterator[OnCluster]:
    config, batches, _ = RETENTIONS[which]
    with tempfile.TemporaryDirectory(prefix="tidegate-swept-") as folder:
        yield OnCluster(Path(folder), config, batches_a_checkpoint=batches, full=full)


def nothing_that_a_retained_checkpoint_names_is_swept(which: str = "the newest ten", *, full: bool = False) -> None:
    with on_cluster(which, full=full) as stage:
        for _ in range(RETENTIONS[which].checkpoints):
            stage.checkpoint()
        stage.check_each_is_restored()
        stage.check_nothing_is_left()


def nothing_that_a_retained_checkpoint_names_goes_with_its_attempt() -> None:
    with on_cluster() as stage:
        for number in range(40):
            stage.checkpoint()
            if number % 4 == 3 and number < 30:
                stage.pause()
        stage.check_each_is_restored()
        stage.check_nothing_is_left()


def what_a_restored_stage_builds_upon_is_not_swept() -> None:
    """Of what the last snapshot names Spark has its own, and a full snapshot of a task that was tried in vain is newer
    and old enough: but nobody builds upon that."""
    with on_cluster() as stage:
        stage.checkpoint()
        stage.open()
        for _ in range(VERSIONS + LATE):
            stage.run_batch(maintains=False)
        for partition in (0, 1):
            stage.spark().write(f"state/0/{partition}/40_dead.zip", zip_that_shares())
        stage.take()
        held = {name for name in stage.snapshotter.held if name.startswith("state/")}
        assert held <= set(stage.spark().list("state")), "Spark could not load its state again"


def what_was_told_and_not_deleted_goes_after_a_kill() -> None:
    with on_cluster() as stage:
        for _ in range(12):
            stage.checkpoint(cleans_up=False)
        stage.open()
        for _ in range(12):
            stage.checkpoint()
        stage.check_each_is_restored()
        stage.check_nothing_is_left()
