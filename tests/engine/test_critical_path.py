"""What a checkpoint waited for, in words and as steps that leave no gap."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.engine.critical_path import critical_path, told_ms, what_it_waited_for
from tidegate.engine.status import CheckpointStatus, Progress, SinkCommit, StagePart

SINKS = ("revenue", "paid")


def done(
    barrier_ms: int,
    alignment_ms: int = 0,
    stored_ms: int = 10,
    *,
    after: str | None = None,
    aligned_ms: int | None = None,
    segments: int = 0,
) -> StagePart:
    """A stage that is. `after`: the input of the last barrier, which came at `aligned_ms`, or with the first."""
    return StagePart(
        progress="done",
        cut=3,
        cut_because="aligned",
        barrier_ms=barrier_ms,
        alignment_ms=alignment_ms,
        snapshot_ms=stored_ms,
        stored_ms=stored_ms,
        aligned_ms=None if after is None else barrier_ms if aligned_ms is None else aligned_ms,
        caught_up_segments=None if after is None else segments,
        last_barrier_from=after,
    )


def checkpoint(stages: dict[str, StagePart], **given: object) -> CheckpointStatus:
    """Complete, unless something else is said."""
    known: dict[str, object] = {"state": "complete", "generation": 1, "epoch": 1, "begun_ms": 5, **given}
    found = msgspec.convert({"checkpoint": "ckpt-000001", **known}, CheckpointStatus)
    return msgspec.structs.replace(found, stages=stages)


SHORT = {
    "orders": done(1),
    "payments": done(2),
    "join": done(10, 5, after="payments", aligned_ms=12),
    "revenue": done(20, 5, after="join"),
}


def said(status: CheckpointStatus) -> str | None:
    path = critical_path(status)
    assert all(one.to_ms == other.from_ms for one, other in pairwise(path)), "there is no gap"
    assert not path or path[0].from_ms == 0
    return what_it_waited_for(status, SINKS)


def test_a_sink_that_works_off_a_backlog() -> None:
    stages = {**SHORT, "revenue": done(20, 3_120, after="join", segments=41)}
    status = checkpoint(stages, prepared_ms=3_160, decided_ms=3_200, shown_ms=3_400, duration_ms=3_160)
    assert said(status) == "3.1 s of 3.4 s: sink revenue working off 41 segments"
    path = [(step.phase, step.of) for step in critical_path(status)]
    assert path == [
        ("beginning", None),
        ("waiting", "payments"),
        ("aligning", "join"),
        ("catching_up", "join"),
        ("aligning", "revenue"),
        ("catching_up", "revenue"),
        ("storing", "revenue"),
        ("quorum", None),
        ("deciding", None),
        ("committing", None),
    ]


def test_a_snapshot_that_takes_long() -> None:
    stages = {**SHORT, "join": done(10, 5, 900, after="payments", aligned_ms=12)}
    status = checkpoint(stages, prepared_ms=930, decided_ms=1_000, shown_ms=1_200)
    assert said(status) == "900 ms of 1.2 s: storing the snapshot of join"


def test_a_sink_that_commits_slowly() -> None:
    commits = {"paid": SinkCommit(begun_ms=110, took_ms=2_000), "revenue": SinkCommit(begun_ms=110, took_ms=20)}
    status = checkpoint(SHORT, prepared_ms=60, decided_ms=110, shown_ms=2_110)
    assert said(msgspec.structs.replace(status, commits=commits)) == "2.0 s of 2.1 s: committing sink paid"


def test_a_source_that_is_late() -> None:
    stages = {**SHORT, "payments": done(2_000), "join": done(10, 2_003, after="payments", aligned_ms=2_010)}
    stages["revenue"] = done(2_020, after="join")
    status = checkpoint(stages, prepared_ms=2_050, decided_ms=2_060, shown_ms=2_100)
    assert said(status) == "2.0 s of 2.1 s: waiting for a barrier to reach payments"


def test_an_instance_that_says_nothing() -> None:
    status = checkpoint(SHORT, prepared_ms=1_000, decided_ms=1_010, shown_ms=1_020, acks={"a": 50, "b": 1_000})
    assert said(status) == "960 ms of 1.0 s: instance b had not said that it was ready"


def test_a_store_that_is_slow() -> None:
    status = checkpoint(SHORT, begun_ms=3_000, prepared_ms=3_060, decided_ms=3_100, shown_ms=3_200)
    assert said(status) == "3.0 s of 3.2 s: marking its number in the root"
    status = checkpoint(SHORT, prepared_ms=60, decided_ms=5_060, shown_ms=5_200)
    assert said(status) == "5.0 s of 5.2 s: writing its manifest and its record"


def test_one_that_is_under_way_waits_for_whom_the_others_wait_for() -> None:
    stages = {
        **SHORT,
        "join": StagePart(
            progress="catching_up",
            barrier_ms=10,
            alignment_ms=7_985,
            aligned_ms=12,
            last_barrier_from="payments",
            caught_up_segments=1,
        ),
        "revenue": StagePart(progress="waiting"),
        "paid": StagePart(progress="aligning", waits_for=("join",), barrier_ms=5, alignment_ms=7_000),
    }
    status = checkpoint(stages, state="preparing", duration_ms=8_000)
    assert said(status) == "8.0 s of 8.0 s: join working off 1 segment"
    aborted = checkpoint(stages, state="aborted", duration_ms=8_000, why="timed out: no report from join")
    assert said(aborted) == said(status)


def test_one_that_waits_for_a_barrier() -> None:
    stages = {"orders": StagePart(progress="waiting"), "join": StagePart(progress="waiting")}
    status = checkpoint(stages, state="preparing", duration_ms=900)
    assert said(status) == "895 ms of 900 ms: waiting for a barrier to reach orders"
    stages = {
        "orders": done(1),
        "join": StagePart(progress="aligning", waits_for=("payments",), barrier_ms=3, alignment_ms=892),
    }
    status = checkpoint(stages, state="preparing", duration_ms=900)
    assert said(status) == "892 ms of 900 ms: join waiting for the barrier of payments"


def test_one_that_was_cut_unaligned() -> None:
    late = msgspec.structs.replace(done(10, 30_000, 50), cut_because="timeout")
    status = checkpoint({"orders": done(1), "join": late}, prepared_ms=30_100, decided_ms=30_110, shown_ms=30_120)
    assert said(status) == "30.0 s of 30.1 s: join aligning"
    recording = StagePart(
        progress="recording", waits_for=("payments",), cut=1, cut_because="always", alignment_ms=0, barrier_ms=3
    )
    status = checkpoint({"join": recording}, state="preparing", duration_ms=4_000)
    assert said(status) == "4.0 s of 4.0 s: join waiting for the late barrier of payments"


def test_one_that_was_cut_at_once_and_recorded_until_a_late_barrier() -> None:
    join = done(1, 0, 30_000, after="payments", aligned_ms=29_950)
    join = msgspec.structs.replace(join, cut_because="always", snapshot_ms=40)
    early = {"orders": done(1), "payments": done(2), "join": join}
    ends = {"prepared_ms": 30_010, "decided_ms": 30_020, "shown_ms": 30_030}
    assert said(checkpoint(early, **ends)) == "29.9 s of 30.0 s: join waiting for the late barrier of payments"
    # Whoever sent it late is walked on to.
    late = {**early, "payments": done(29_900)}
    assert said(checkpoint(late, **ends)) == "29.9 s of 30.0 s: waiting for a barrier to reach payments"
    assert [(step.phase, step.of) for step in critical_path(checkpoint(late, **ends))] == [
        ("beginning", None),
        ("waiting", "payments"),
        ("recording", "join"),
        ("storing", "join"),
        ("quorum", None),
        ("deciding", None),
        ("committing", None),
    ]
    # A snapshot that took longer than that is what was waited for.
    slow = {**early, "join": msgspec.structs.replace(join, snapshot_ms=29_980)}
    assert said(checkpoint(slow, **ends)) == "30.0 s of 30.0 s: storing the snapshot of join"


def test_one_that_was_cut_with_the_barrier_of_its_only_input_waited_for_that() -> None:
    passed_on = msgspec.structs.replace(done(1_010, after="orders"), cut_because="upstream")
    stages = {"orders": done(1_000), "priced": passed_on}
    status = checkpoint(stages, prepared_ms=1_030, decided_ms=1_040, shown_ms=1_050)
    assert said(status) == "1.0 s of 1.1 s: waiting for a barrier to reach orders"


def test_what_only_its_manifest_tells_of() -> None:
    stages = {
        "orders": StagePart(progress="done", cut_because="aligned", barrier_ms=0, alignment_ms=0, snapshot_ms=7),
        "revenue": StagePart(progress="done", cut_because="aligned", barrier_ms=9, alignment_ms=500, snapshot_ms=20),
    }
    status = checkpoint(stages, begun_ms=None, duration_ms=540)
    assert said(status) == "500 ms of 540 ms: sink revenue aligning"
    assert said(checkpoint({}, duration_ms=None, begun_ms=None)) is None
    assert said(checkpoint({}, duration_ms=0, begun_ms=None)) is None


@pytest.mark.parametrize(("ms", "told"), [(0, "0 ms"), (999, "999 ms"), (1_040, "1.0 s"), (125_400, "2 min 5 s")])
def test_times_are_told_as_people_read_them(ms: int, told: str) -> None:
    assert told_ms(ms) == told


_ms = st.integers(0, 5_000)
_maybe_ms = st.none() | _ms
_progresses: tuple[Progress, ...] = ("waiting", "aligning", "catching_up", "recording", "storing", "declined", "done")
_parts = st.builds(
    StagePart,
    progress=st.sampled_from(_progresses),
    barrier_ms=_maybe_ms,
    alignment_ms=_maybe_ms,
    aligned_ms=_maybe_ms,
    stored_ms=_maybe_ms,
    snapshot_ms=_maybe_ms,
    cut_because=st.sampled_from((None, "aligned", "timeout")),
    last_barrier_from=st.sampled_from((None, "a", "b", "c", "d")),
)


@given(
    stages=st.dictionaries(st.sampled_from("abc"), _parts),
    begun=_maybe_ms,
    prepared=_maybe_ms,
    decided=_maybe_ms,
    shown=_maybe_ms,
    duration=_maybe_ms,
)
def test_whatever_is_known_there_is_no_gap_and_no_step_backwards(
    stages: dict[str, StagePart],
    begun: int | None,
    prepared: int | None,
    decided: int | None,
    shown: int | None,
    duration: int | None,
) -> None:
    """Clocks of several processes may contradict each other, and inputs may seem to lead in circles."""
    status = checkpoint(
        stages, begun_ms=begun, prepared_ms=prepared, decided_ms=decided, shown_ms=shown, duration_ms=duration
    )
    path = critical_path(status)
    assert all(step.from_ms < step.to_ms for step in path)
    said(status)
    end = next((each for each in (shown, decided, prepared, duration) if each is not None), 0)
    assert sum(step.took_ms for step in path) == end
