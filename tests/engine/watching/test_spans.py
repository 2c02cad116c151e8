"""Traces as values: which spans there are of a checkpoint and of a start, with times that were worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.watching.told import AT, AT_S, ended
from tidegate.engine.events import AnyEvent, Ended, Failed, Started, StepTaken
from tidegate.engine.status import SinkCommit, StagePart
from tidegate.engine.watching.spans import Span, span_of

AT_MS = int(AT_S * 1000)


def traced(event: AnyEvent) -> Span:
    span = span_of(event)
    assert span is not None
    return span


def times(span: Span, start_ms: int = AT_MS, above: str = "") -> Iterator[tuple[str, int, int]]:
    """Every span below one, by its path, with its times after a moment."""
    for child in span.children:
        path = f"{above}{child.name}"
        yield path, child.from_ms - start_ms, child.to_ms - start_ms
        yield from times(child, start_ms, f"{path}/")


def test_a_stage_that_recorded_until_a_late_barrier_has_a_span_of_that() -> None:
    late = StagePart(
        progress="done",
        cut_because="always",
        barrier_ms=10,
        alignment_ms=0,
        aligned_ms=80,
        snapshot_ms=10,
        stored_ms=90,
    )
    span = traced(ended(7, duration_ms=100, begun_ms=0, stages={"join": late}))
    assert list(times(span))[:4] == [
        ("stage join", 0, 100),
        ("stage join/waiting for a barrier", 0, 10),
        ("stage join/recording", 10, 80),
        ("stage join/storing", 80, 100),
    ]


def test_a_checkpoint_has_spans_of_every_stage_and_phase_of_its_decision_and_of_commits() -> None:
    source = StagePart(progress="done", cut=4, cut_because="aligned", barrier_ms=0, alignment_ms=0, snapshot_ms=40)
    totals = StagePart(
        progress="done",
        cut=3,
        cut_because="aligned",
        barrier_ms=10,
        aligned_ms=110,
        alignment_ms=300,
        snapshot_ms=50,
        stored_ms=60,
        caught_up_segments=41,
    )
    commits = {"paid": SinkCommit(begun_ms=400, took_ms=250, failures=1, why="no room")}
    span = traced(
        ended(
            7,
            duration_ms=400,
            begun_ms=5,
            prepared_ms=380,
            decided_ms=395,
            shown_ms=655,
            new_bytes=5,
            stages={"read": source, "totals": totals},
            commits=commits,
            waited_for="0.3 s of 0.4 s: totals",
        )
    )
    assert (span.name, span.from_ms, span.to_ms, span.error) == ("checkpoint", AT_MS, AT_MS + 655, None)
    assert span.attributes["tidegate.checkpoint"] == "ckpt-000007"
    assert span.attributes["tidegate.waited_for"] == "0.3 s of 0.4 s: totals"
    assert list(times(span)) == [
        ("stage read", 5, 45),
        ("stage read/storing", 5, 45),
        ("stage totals", 5, 375),
        ("stage totals/waiting for a barrier", 5, 15),
        ("stage totals/aligning", 15, 115),
        ("stage totals/catching up", 115, 315),
        ("stage totals/storing", 315, 375),
        ("beginning", 0, 5),
        ("quorum", 375, 380),
        ("deciding", 380, 395),
        ("commit paid", 400, 650),
    ]
    assert span.children[1].attributes["tidegate.caught_up_segments"] == 41
    assert span.children[-1].attributes == {
        "tidegate.sink": "paid",
        "tidegate.failures": 1,
        "tidegate.last_failure": "no room",
    }


def test_a_stage_that_was_cut_unaligned_stores_until_late_barriers_have_come() -> None:
    part = StagePart(
        progress="done", cut=3, cut_because="timeout", barrier_ms=10, alignment_ms=30, snapshot_ms=5, stored_ms=55
    )
    assert list(times(traced(ended(1, duration_ms=100, stages={"totals": part})))) == [
        ("stage totals", 0, 95),
        ("stage totals/waiting for a barrier", 0, 10),
        ("stage totals/aligning", 10, 40),
        ("stage totals/storing", 40, 95),
    ]


@pytest.mark.parametrize(
    ("part", "spans"),
    [
        (StagePart(progress="waiting"), [("waiting for a barrier", 0, 500)]),
        (
            StagePart(progress="aligning", waits_for=("b",), barrier_ms=100, alignment_ms=400),
            [("waiting for a barrier", 0, 100), ("aligning", 100, 500)],
        ),
        (
            StagePart(progress="catching_up", barrier_ms=100, aligned_ms=150, alignment_ms=400),
            [("waiting for a barrier", 0, 100), ("aligning", 100, 150), ("catching up", 150, 500)],
        ),
        (
            StagePart(progress="recording", waits_for=("b",), barrier_ms=0, alignment_ms=200, cut_because="timeout"),
            [("aligning", 0, 200), ("recording", 200, 500)],
        ),
        (
            StagePart(progress="storing", barrier_ms=0, aligned_ms=0, alignment_ms=200, cut_because="aligned"),
            [("catching up", 0, 200), ("storing", 200, 500)],
        ),
    ],
)
def test_what_an_aborted_checkpoint_was_doing_lasts_until_then_and_is_marked(
    part: StagePart, spans: list[tuple[str, int, int]]
) -> None:
    span = traced(ended(1, "aborted", duration_ms=500, why="timeout: totals", stages={"totals": part}))
    assert span.error == "timeout: totals"
    (totals,) = span.children
    assert list(times(totals)) == spans
    assert [each.error is None for each in totals.children] == [True] * (len(spans) - 1) + [False]
    assert totals.error == totals.children[-1].error == part.told
    assert "deciding" not in {each.name for each in span.children}


def test_a_checkpoint_of_which_little_is_known_is_a_span_all_the_same() -> None:
    """As one that an older version has kept, or a run that was killed."""
    done = StagePart(progress="done", cut=1, cut_because="aligned", alignment_ms=20, snapshot_ms=3)
    span = traced(ended(1, duration_ms=50, stages={"totals": done}))
    assert (span.from_ms, span.to_ms) == (AT_MS, AT_MS + 50)
    assert list(times(span)) == [("stage totals", 0, 0)]
    assert span_of(ended(1, triggered_at=None)) is None


def test_a_table_that_does_not_show_its_checkpoint_is_marked() -> None:
    commits = {"paid": SinkCommit(begun_ms=60, failures=2, why="no room"), "open": SinkCommit(begun_ms=60)}
    span = traced(ended(1, "committing", duration_ms=50, commits=commits))
    assert [each.error for each in span.children] == ["no room", "its table does not show it"]


@pytest.mark.parametrize(("because", "name"), [("again", "start"), ("failure", "recovery"), ("killed", "recovery")])
def test_a_start_has_its_steps_one_after_the_other(because: str, name: str) -> None:
    steps = (StepTaken("making_session", 1_000), StepTaken("reading_checkpoint", 300), StepTaken("laying_out", 900))
    event = Started(
        at=AT,
        because=because,  # type: ignore[arg-type]
        why="stage totals failed",
        base="ckpt-000007",
        skipped=("ckpt-000008",),
        steps=steps,
        took_ms=2_000,
        generation=3,
    )
    span = traced(event)
    assert (span.name, span.from_ms, span.to_ms, span.error) == (name, AT_MS - 2_000, AT_MS, None)
    assert span.attributes == {
        "tidegate.because": because,
        "tidegate.why": "stage totals failed",
        "tidegate.base": "ckpt-000007",
        "tidegate.generation": 3,
        "tidegate.skipped": "ckpt-000008",
    }
    assert list(times(span, AT_MS - 2_000)) == [
        ("making session", 0, 1_000),
        ("reading checkpoint", 1_000, 1_300),
        ("laying out", 1_300, 2_000),
    ]


def test_other_events_are_no_traces() -> None:
    assert span_of(Failed(at=AT, why="no")) is None
    assert span_of(Ended(at=AT, state="finished")) is None
