"""Making a fork: what is left of one that fails, or whose maker is killed. `tests/spark/test_forks.py` has the rest."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from obstore.store import MemoryStore

from tests.engine.test_bringing import LiveRoot, in_bucket
from tidegate.engine import forking
from tidegate.engine.bringing import Bringing
from tidegate.engine.forking import Forked, fork_root
from tidegate.engine.forks import as_run_on, read_fork
from tidegate.engine.pipeline import Pipeline
from tidegate.errors import InvalidConfig, RecoveryRefused, StoreUnavailable
from tidegate.storage.bucket import Bucket, BucketPlace
from tidegate.storage.inspection import InspectedRoot, examine
from tidegate.storage.manifest import Manifest
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import Place, RootInFolder


def without_tables(manifest: Manifest) -> Manifest:
    shape = {name: msgspec.structs.replace(each, table=None) for name, each in manifest.shape.items()}
    stages = {name: msgspec.structs.replace(each, committable=None) for name, each in manifest.stages.items()}
    return msgspec.structs.replace(manifest, shape=shape, stages=stages)


class Forking:
    def __init__(self, folder: Path, where: str) -> None:
        self._folder = folder
        self._where = where
        self._bucket = Bucket(MemoryStore(), BucketPlace("s3://bucket/", "s3a://bucket/"))
        self.to = self._place("fork")
        self._source = LiveRoot(self._place("root"), files=3, as_is=without_tables)

    def _place(self, name: str) -> Place:
        if self._where == "folder":
            return RootInFolder(self._folder / name)
        return in_bucket(self._bucket.at(name), self._folder / name)

    def fork(self) -> Forked:
        return fork_root(self._source.place, "ckpt-000007", self.to)


@pytest.fixture(params=["folder", "bucket"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Forking:
    return Forking(tmp_path, request.param)


def unreachable(*_: object) -> None:
    raise StoreUnavailable("no way there")


def fail(made: Forking, monkeypatch: pytest.MonkeyPatch, *, killed: bool = False) -> None:
    """When all is stored, and before it is decided."""
    store = Bringing.store

    def stores_and_fails(*given: Any) -> None:
        store(*given)
        unreachable()

    with monkeypatch.context() as patched:
        patched.setattr(Bringing, "store", stores_and_fails)
        if killed:
            patched.setattr(forking, "leaving_no_new_root", nullcontext)
        with pytest.raises(StoreUnavailable, match="no way there"):
            made.fork()


def check_is_whole(made: Forking) -> None:
    fork, found = read_fork(made.to.files), InspectedRoot(made.to)
    assert fork is not None
    assert fork.made_from == "ckpt-000007"
    examine(found.files, found.log(), found.newest().checkpoint_id)


def test_nothing_is_left_of_a_fork_that_fails_so_it_can_be_made_again(
    made: Forking, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(made, monkeypatch)
    assert made.to.is_empty()
    assert not made.to.files.list()
    made.fork()
    check_is_whole(made)


def test_one_whose_maker_was_killed_before_it_was_decided_is_made_over_what_is_left(
    made: Forking, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(made, monkeypatch, killed=True)
    left = set(made.to.files.list(RootPaths.GENERATIONS))
    assert left
    made.fork()
    check_is_whole(made)
    named = InspectedRoot(made.to).newest().manifest
    assert named not in left, "of what is left nothing is named"


def test_nobody_runs_on_one_whose_maker_was_killed_before_it_was_decided(
    made: Forking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin with nothing, and write to tables that nobody knows."""
    fail(made, monkeypatch, killed=True)
    with pytest.raises(RecoveryRefused, match=r"was to be a fork of .* make it again with `tidegate fork`"):
        as_run_on(Pipeline("orders"), made.to.files)
    made.fork()
    as_run_on(Pipeline("orders"), made.to.files)


def test_one_whose_maker_was_killed_as_soon_as_it_had_a_root_is_made_there(
    made: Forking, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(forking, "write_fork", unreachable)
        patched.setattr(forking, "leaving_no_new_root", nullcontext)
        with pytest.raises(StoreUnavailable, match="no way there"):
            made.fork()
    assert not made.to.is_empty()
    made.fork()
    check_is_whole(made)


@pytest.mark.parametrize("holds", ["a run's", "a log that is gone", "something else"])
def test_what_is_in_use_or_was_is_never_made_a_fork(made: Forking, holds: str) -> None:
    if holds == "something else":
        made.to.files.write("notes.txt", b"mine")
    else:
        LiveRoot(made.to, files=3)
    if holds == "a log that is gone":
        made.to.files.delete(made.to.files.list(RootPaths.DECISIONS))
    with pytest.raises(InvalidConfig, match="is there and is not empty"):
        made.fork()
