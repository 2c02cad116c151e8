"""Which state that lies where Spark has written it nobody needs any more: by Spark's own rule, a hundred versions, and
by what checkpoints refer to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.spark import state_in_place
from tests.spark.state_in_place import RETENTIONS, VERSIONS, on_cluster
from tidegate.errors import StoreUnavailable
from tidegate.spark.snapshot import stale_state
from tidegate.storage.bucket_root import BucketRoot

SHARED = {"state/0/0/1_a.zip": ["x", "y"], "state/0/0/50_b.zip": ["y", "z"], "state/0/0/140_c.zip": ["z"]}
CHANGES = [f"state/0/0/{number}_d.changelog" for number in range(1, 161)]
BESIDE = ["state/0/_metadata/v2/0", "state/0/1/7_e.changelog"]
HELD = ["state/0/0/140_c.zip", "z", *CHANGES[140:]]


def test_what_was_before_the_last_full_snapshot_that_is_old_enough_goes() -> None:
    stale = stale_state([*SHARED, *CHANGES, *BESIDE], 160, HELD, SHARED.__getitem__)
    assert set(stale) == {"state/0/0/1_a.zip", "x", *CHANGES[:49]}


def test_nothing_goes_before_there_are_a_hundred_versions_behind_a_full_snapshot() -> None:
    assert stale_state([*SHARED, *CHANGES], 149, HELD, SHARED.__getitem__) == []
    assert stale_state(CHANGES, 1_000, HELD, SHARED.__getitem__) == []


def test_nothing_goes_that_the_last_snapshot_builds_upon_whatever_full_snapshots_are_newer() -> None:
    held = ["state/0/0/1_a.zip", "x", "y", *CHANGES]
    assert stale_state([*SHARED, *CHANGES], 160, held, SHARED.__getitem__) == []
    assert stale_state([*SHARED, *CHANGES], 160, CHANGES, SHARED.__getitem__) == []


# -- from sweep to sweep ------------------------------------------------------------------------------


@pytest.mark.parametrize("which", RETENTIONS)
def test_what_a_retained_checkpoint_names_stays_and_what_nobody_needs_goes(which: str) -> None:
    state_in_place.nothing_that_a_retained_checkpoint_names_is_swept(which)


def test_where_every_snapshot_is_full_what_spark_wants_no_more_goes_as_well() -> None:
    state_in_place.nothing_that_a_retained_checkpoint_names_is_swept("the newest alone", full=True)


def test_what_lies_in_the_folder_of_an_attempt_that_was_abandoned_goes_with_the_checkpoints_that_name_it() -> None:
    state_in_place.nothing_that_a_retained_checkpoint_names_goes_with_its_attempt()


def test_what_a_restored_stage_builds_upon_stays() -> None:
    state_in_place.what_a_restored_stage_builds_upon_is_not_swept()


def test_what_was_told_by_a_driver_that_was_killed_before_it_was_deleted_goes_in_the_next_generation() -> None:
    state_in_place.what_was_told_and_not_deleted_goes_after_a_kill()


def test_what_is_deleted_is_forgotten() -> None:
    with on_cluster("the newest three, far apart") as stage:
        for _ in range(8):
            stage.checkpoint()
        stage.clean_up()
        known = stage.snapshotter.in_place()
        assert known == {name for name in stage.there() if name in known}, "of what is gone nothing is remembered"


def test_a_sweep_that_fails_takes_nothing_from_the_snapshot_and_is_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept for the snapshot has to be told, or else it is never sent."""
    with on_cluster() as stage:
        while stage.query.batch < VERSIONS:
            stage.checkpoint()
        with monkeypatch.context() as patched:
            patched.setattr(BucketRoot, "list", lists_state_once(BucketRoot.list))
            stage.checkpoint()
        for _ in range(20):
            stage.checkpoint()
        stage.check_each_is_restored()
        stage.check_nothing_is_left()


def lists_state_once(listing: Any) -> Any:
    """The snapshot itself looks at the state first, then the sweep does."""
    lists = iter(range(1))

    def once(files: BucketRoot, folder: str = "", **options: Any) -> list[str]:
        if folder == "state" and next(lists, None) is None:
            raise StoreUnavailable("the bucket is away")
        found: list[str] = listing(files, folder, **options)
        return found

    return once
