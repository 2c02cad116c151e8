"""How checkpoints went, in numbers."""

from __future__ import annotations

from tidegate.engine.status import CheckpointState, CheckpointStatus, SinkCommit
from tidegate.engine.summary import Spread, spread_of, summary_of


def checkpoint(number: int, state: CheckpointState = "complete", duration_ms: int | None = None) -> CheckpointStatus:
    return CheckpointStatus(
        checkpoint=f"ckpt-{number:06d}",
        state=state,
        generation=1,
        epoch=number,
        triggered_at=f"2030-01-01T00:00:{number:02d}.000+00:00",
        duration_ms=duration_ms,
        commits={"a": SinkCommit(begun_ms=1, took_ms=number), "b": SinkCommit(begun_ms=1)},
    )


def test_percentiles_are_values_that_were_there() -> None:
    assert spread_of([]) is None
    assert spread_of([7]) == Spread(1, 7, 7.0, 7, 7, 7, 7, 7)
    assert spread_of(list(range(100, 0, -1))) == Spread(100, 1, 50.5, 100, 50, 90, 95, 99)
    assert spread_of([1, 2, 1000]) == Spread(3, 1, 334.3, 1000, 2, 1000, 1000, 1000)


def test_only_what_is_complete_counts() -> None:
    found = summary_of(
        [checkpoint(9, duration_ms=30), checkpoint(8, "aborted", 9_000), checkpoint(7, duration_ms=10), checkpoint(6)]
    )
    assert (found.complete, found.aborted, found.since) == (3, 1, "2030-01-01T00:00:06.000+00:00")
    assert found.duration_ms == Spread(2, 10, 20.0, 30, 10, 30, 30, 30)
    assert found.commit_ms == Spread(3, 6, 7.3, 9, 7, 9, 9, 9)
    assert found.new_bytes is None
    assert summary_of([]).duration_ms is None
