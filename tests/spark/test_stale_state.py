"""Which state that lies where Spark has written it nobody needs any more: by Spark's own rule, a hundred versions."""

from __future__ import annotations

from tidegate.spark.snapshot import stale_state

SHARED = {"state/0/0/1_a.zip": ["x", "y"], "state/0/0/50_b.zip": ["y", "z"], "state/0/0/140_c.zip": ["z"]}
CHANGES = [f"state/0/0/{number}_d.changelog" for number in range(1, 161)]
BESIDE = ["state/0/_metadata/v2/0", "state/0/1/7_e.changelog"]


def test_what_was_before_the_last_full_snapshot_that_is_old_enough_goes() -> None:
    stale = stale_state([*SHARED, *CHANGES, *BESIDE], 160, SHARED.__getitem__)
    assert set(stale) == {"state/0/0/1_a.zip", "x", *CHANGES[:49]}


def test_nothing_goes_before_there_are_a_hundred_versions_behind_a_full_snapshot() -> None:
    assert stale_state([*SHARED, *CHANGES], 149, SHARED.__getitem__) == []
    assert stale_state(CHANGES, 1_000, SHARED.__getitem__) == []
