"""Cleaning up looks for nothing that is known, and spares what a retained checkpoint refers to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.engine.test_store import Watched
from tests.spark.played import PlayedPipeline, PlayedStore, open_next, played
from tidegate.engine.cleaning import Leftovers
from tidegate.engine.root import Root
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.retention import StoredFile, deletable
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files
from tidegate.storage.inspection import read_manifest, references
from tidegate.storage.paths import RootPaths

INTERVALS = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), max_size=12)


@given(INTERVALS, st.lists(st.integers(2, 14), max_size=8), st.data())
def test_what_is_left_over_is_free_when_no_retained_checkpoint_refers_to_it(
    intervals: list[tuple[int, int]], dropped: list[int], data: st.DataObject
) -> None:
    files = [StoredFile(str(n), 1, since, since + length) for n, (since, length) in enumerate(intervals)]
    leftovers = Leftovers()
    leftovers.add(files)
    gone: set[str] = set()
    retained, visible = set(range(1, 15)), 0
    for each in sorted(dropped):
        retained.discard(each - 1)
        visible = each
        free = leftovers.free(retained, visible)
        expected = {
            file.path
            for file in files
            if file.before is not None
            and file.before <= visible
            and not any(file.since <= checkpoint < file.before for checkpoint in retained)
        }
        assert {file.path for file in free} == expected - gone
        assert {file.path for file in deletable(retained, 1, dict.fromkeys(retained, frozenset()), files)} >= expected
        deleted = data.draw(st.sets(st.sampled_from(sorted(expected)))) if expected else set()
        leftovers.forget(deleted)
        gone |= deleted
        assert leftovers.paths() == {file.path for file in files} - gone


def watching(asked: list[tuple[str, str]]) -> Callable[[Files], Files]:
    def watch(files: Files) -> Files:
        watched: Files = Watched(files, lambda method, name: asked.append((method, name)))
        return watched

    return watch


def named_by(root: Root) -> set[str]:
    """All that retained checkpoints need of the generations' folders."""
    log = root.decisions.read()
    records = [record for each in log.retained if (record := log.completed(each)) is not None]
    found = (references(root.store, read_manifest(root.store, record)) for record in records)
    return {record.manifest for record in records}.union(*found)


def left_in(root: Root, *folders: str) -> set[str]:
    return {name for folder in folders for name in root.store.list(folder)}


def take(pipeline: PlayedPipeline, checkpoints: int) -> None:
    for _ in range(checkpoints):
        pipeline.one_batch_each()
        pipeline.checkpoint()


def test_after_the_first_checkpoint_no_folder_of_the_root_is_listed(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []
    config = CheckpointConfig(interval_ms=3_600_000, max_retained=2)
    with played(tmp_path, config=config, store=PlayedStore(watching(asked))) as pipeline:
        take(pipeline, 1)
        asked.clear()
        take(pipeline, 5)
        listed = [name for method, name in asked if method in ("list", "names_in", "prune")]
        assert not [name for name in listed if name.startswith(RootPaths.GENERATIONS)]
        own = RootPaths.generation(1)
        kept = left_in(pipeline.root, *(f"{own}/{each}" for each in ("manifests", "snapshots", "lists")))
        assert kept == named_by(pipeline.root), "and nothing else is left"
        folders = tmp_path / "root" / own / "snapshots"
        assert all(any(path.iterdir()) for path in folders.rglob("*") if path.is_dir()), "nor an empty folder"


def test_what_older_generations_have_left_goes_with_the_checkpoints_that_refer_to_it(tmp_path: Path) -> None:
    config = CheckpointConfig(interval_ms=3_600_000, max_retained=3)
    with played(tmp_path, config=config) as first:
        take(first, 4)
    with played(tmp_path, config=config) as second:
        older = RootPaths.generation(1)
        for _ in range(4):
            take(second, 1)
            assert left_in(second.root, older) == {name for name in named_by(second.root) if name.startswith(older)}, (
                "what they need, and that alone"
            )


def test_what_somebody_has_left_who_was_killed_when_about_to_open_the_generation_goes_and_nothing_else(
    tmp_path: Path,
) -> None:
    """As one is who brings a savepoint."""
    with played(tmp_path) as first:
        take(first, 2)
        store, log = first.root.store, first.root.decisions.read()
        killed = log.last_checkpoint_id + 1
        StoredDecisions(store).mark_used(killed)
        left = [
            RootPaths.manifest(log.next_generation, killed),
            RootPaths.snapshot_file(log.next_generation, "source", killed, "commits/0"),
            RootPaths.file_list(log.next_generation, "source", killed),
            RootPaths.carried_in_flight(log.next_generation, killed, "generations/000001/stages/source/output/part"),
        ]
        for name in left:
            store.write(name, b"killed")
    with played(tmp_path) as second:
        assert not any(map(second.root.store.exists, left)), "before anything of this one could be taken for it"
        take(second, 1)
        assert left_in(second.root, RootPaths.generation(1)) <= named_by(second.root)
        assert named_by(second.root) <= left_in(second.root, RootPaths.GENERATIONS)


def test_a_start_reads_nothing_that_only_older_checkpoints_refer_to(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        for _ in range(3):
            take(pipeline, 1)
            pipeline.one_batch_each()
        root = pipeline.root
        newest = references(root.store, pipeline.newest())
    asked: list[tuple[str, str]] = []
    opened, base = open_next(Root(watching(asked)(root.store), "flat"))
    assert base is not None
    assert opened.base is not None
    read = {name for method, name in asked if method in ("read", "open", "size") and name.startswith("generations")}
    assert read == newest | {opened.base.manifest}
