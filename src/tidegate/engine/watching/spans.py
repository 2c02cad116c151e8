"""What has happened, as spans with times: one tree of a checkpoint, and one of a start. Values, without OpenTelemetry.

Of a stage that was not done when its checkpoint was aborted, the phase that it was in lasts until then, and is marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Final

import msgspec

from tidegate.engine.events import AnyEvent, CheckpointEnded, Started
from tidegate.engine.status import CheckpointStatus, Progress, SinkCommit, StagePart
from tidegate.engine.watching.counts import RECOVERIES

Attribute = str | int | bool

_PREFIX: Final = "tidegate."
_PHASES: Final[dict[Progress, str]] = {
    "waiting": "waiting for a barrier",
    "aligning": "aligning",
    "catching_up": "catching up",
    "recording": "recording",
    "storing": "storing",
}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Something that took a while."""

    name: str
    from_ms: int
    """In ms since 1970, as `to_ms` is."""
    to_ms: int
    attributes: dict[str, Attribute] = {}
    error: str | None = None
    """Why it failed, if it did."""
    children: tuple[Span, ...] = ()


def span_of(event: AnyEvent) -> Span | None:
    """The trace that is made of an event; None: there is none of it."""
    match event:
        case CheckpointEnded(checkpoint=checkpoint) if checkpoint.triggered_at is not None:
            return _of_checkpoint(checkpoint, _ms_of(checkpoint.triggered_at))
        case Started():
            return _of_start(event)
        case _:
            return None


# -- a checkpoint ---------------------------------------------------------------------------------


def _of_checkpoint(checkpoint: CheckpointStatus, at_ms: int) -> Span:
    is_aborted = checkpoint.state == "aborted"
    until_ms, begun_ms = checkpoint.duration_ms or 0, checkpoint.begun_ms or 0
    children = [
        *(_of_stage(name, part, at_ms, begun_ms, until_ms) for name, part in checkpoint.stages.items()),
        *_of_decision(checkpoint, at_ms, begun_ms),
        *(_of_commit(sink, commit, at_ms) for sink, commit in checkpoint.commits.items()),
    ]
    ends_ms = at_ms + max(until_ms, checkpoint.shown_ms or 0)
    return Span(
        name="checkpoint",
        from_ms=at_ms,
        to_ms=max([ends_ms, *(each.to_ms for each in children)]),
        attributes=_named(
            checkpoint=checkpoint.checkpoint,
            state=checkpoint.state,
            generation=checkpoint.generation,
            epoch=checkpoint.epoch,
            attempt=checkpoint.attempt,
            aligned=checkpoint.aligned,
            full=checkpoint.full,
            drain=checkpoint.drain,
            new_bytes=checkpoint.new_bytes,
            total_bytes=checkpoint.total_bytes,
            in_flight_bytes=checkpoint.in_flight_bytes,
            waited_for=checkpoint.waited_for,
        ),
        error=(checkpoint.why or "aborted") if is_aborted else None,
        children=tuple(children),
    )


def _of_stage(name: str, part: StagePart, at_ms: int, begun_ms: int, until_ms: int) -> Span:
    phases = tuple(
        Span(name=_PHASES[phase], from_ms=at_ms + from_ms, to_ms=at_ms + to_ms, error=error)
        for phase, from_ms, to_ms, error in _phases(part, begun_ms, until_ms)
    )
    is_done = part.progress == "done"
    return Span(
        name=f"stage {name}",
        from_ms=at_ms + begun_ms,
        to_ms=max((each.to_ms for each in phases), default=at_ms + begun_ms),
        attributes=_named(
            stage=name,
            progress=part.progress,
            cut=part.cut,
            cut_because=part.cut_because,
            last_barrier_from=part.last_barrier_from,
            caught_up_segments=part.caught_up_segments,
            snapshot_ms=part.snapshot_ms,
            new_bytes=part.new_bytes,
            total_bytes=part.total_bytes,
            in_flight_bytes=part.in_flight_bytes,
        ),
        error=None if is_done else part.told,
        children=phases,
    )


def _phases(part: StagePart, begun_ms: int, until_ms: int) -> Iterator[tuple[Progress, int, int, str | None]]:
    """Each with when it began and ended, after the trigger, and what it was doing if it never did. `begun_ms`: when the
    checkpoint was announced; `until_ms`: when it ended."""
    at_ms = begun_ms
    for phase, after_ms in _ends(part):
        if after_ms is None:
            yield phase, at_ms, max(at_ms, until_ms), part.told
            return
        if begun_ms + after_ms > at_ms:
            yield phase, at_ms, begun_ms + after_ms, None
            at_ms = begun_ms + after_ms


def _ends(part: StagePart) -> Iterator[tuple[Progress, int | None]]:
    """When each of its phases had ended, in order, after the checkpoint was announced; None: it had not."""
    if part.barrier_ms is None:  # it never came, or nobody has said when
        yield "waiting", 0 if part.progress == "done" else None
        return
    yield "waiting", part.barrier_ms
    cut_ms = None if part.cut_because is None or part.alignment_ms is None else part.barrier_ms + part.alignment_ms
    if part.aligned_ms is None or (cut_ms is not None and part.aligned_ms > cut_ms):
        yield "aligning", cut_ms
    else:
        yield "aligning", part.aligned_ms
        yield "catching_up", cut_ms
    if cut_ms is None:
        return
    if part.progress == "recording":
        yield "recording", None
    elif part.recorded_ms:
        yield "recording", cut_ms + part.recorded_ms
    took_ms = part.snapshot_ms if part.stored_ms is None else part.stored_ms
    yield "storing", None if took_ms is None else cut_ms + took_ms


def _of_decision(checkpoint: CheckpointStatus, at_ms: int, begun_ms: int) -> Iterator[Span]:
    if begun_ms:
        yield Span(name="beginning", from_ms=at_ms, to_ms=at_ms + begun_ms)
    prepared_ms = checkpoint.prepared_ms
    if prepared_ms is None:
        return
    ends = [after_ms or 0 for part in checkpoint.stages.values() for _, after_ms in _ends(part)]
    stored_ms = begun_ms + max(ends, default=0)
    if stored_ms < prepared_ms:
        yield Span(name="quorum", from_ms=at_ms + stored_ms, to_ms=at_ms + prepared_ms)
    if checkpoint.decided_ms is not None:
        decided_ms = max(prepared_ms, checkpoint.decided_ms)
        yield Span(name="deciding", from_ms=at_ms + prepared_ms, to_ms=at_ms + decided_ms)


def _of_commit(sink: str, commit: SinkCommit, at_ms: int) -> Span:
    begun_ms = at_ms + commit.begun_ms
    return Span(
        name=f"commit {sink}",
        from_ms=begun_ms,
        to_ms=begun_ms + (commit.took_ms or 0),
        attributes=_named(sink=sink, failures=commit.failures, last_failure=commit.why),
        error=None if commit.took_ms is not None else commit.why or "its table does not show it",
    )


# -- a start --------------------------------------------------------------------------------------


def _of_start(event: Started) -> Span:
    """Its steps come one after the other, and together take no longer than all of it."""
    to_ms = _ms_of(event.at)
    from_ms = to_ms - event.took_ms
    steps: list[Span] = []
    at_ms = from_ms
    for step in event.steps:
        ends_ms = min(at_ms + step.took_ms, to_ms)
        steps.append(Span(name=step.step.replace("_", " "), from_ms=at_ms, to_ms=ends_ms))
        at_ms = ends_ms
    return Span(
        name="recovery" if event.because in RECOVERIES else "start",
        from_ms=from_ms,
        to_ms=to_ms,
        attributes=_named(
            because=event.because,
            why=event.why,
            base=event.base,
            generation=event.generation,
            instance=event.instance,
            skipped=", ".join(event.skipped) or None,
        ),
        children=tuple(steps),
    )


def _named(**attributes: Attribute | None) -> dict[str, Attribute]:
    return {f"{_PREFIX}{name}": value for name, value in attributes.items() if value is not None}


def _ms_of(moment: str) -> int:
    return round(datetime.fromisoformat(moment).timestamp() * 1000)
