"""The phases of a checkpoint, as bars: what each stage did from when until when, and what of it all waited for.

The bars of a stage follow one another; where the critical path goes through a part of one, that part is a bar of its
own. What nobody has told of has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidegate.dashboard.values import Phase, Span
from tidegate.engine.critical_path import PathStep, critical_path
from tidegate.engine.status import CheckpointStatus, StagePart


def spans_of(checkpoint: CheckpointStatus) -> tuple[Span, ...]:
    """By when they began."""
    begun_ms = checkpoint.begun_ms or 0
    found = list(_span(None, "beginning", 0, begun_ms))
    for name, part in checkpoint.stages.items():
        found += _of_stage(name, part, begun_ms, checkpoint.duration_ms)
    found += _of_all(checkpoint, max((each.to_ms for each in found), default=None))
    for name, commit in checkpoint.commits.items():
        if commit.took_ms is not None:
            found += _span(name, "committing", commit.begun_ms, commit.begun_ms + commit.took_ms)
    marked = [piece for each in found for piece in _marked(each, critical_path(checkpoint))]
    return tuple(sorted(marked, key=lambda each: (each.from_ms, each.to_ms)))


def _of_stage(name: str, part: StagePart, begun_ms: int, until_ms: int | None) -> Iterator[Span]:
    """`until_ms`: when the checkpoint had ended, or now."""
    if part.barrier_ms is None:
        if part.progress == "waiting":
            yield from _span(name, "waiting", begun_ms, until_ms)
        return
    barrier = begun_ms + part.barrier_ms
    yield from _span(name, "waiting", begun_ms, barrier)
    if part.alignment_ms is None:
        return
    cut = barrier + part.alignment_ms
    aligned = barrier if part.progress == "catching_up" else cut
    if part.aligned_ms is not None:
        aligned = min(max(begun_ms + part.aligned_ms, barrier), cut)
    yield from _span(name, "aligning", barrier, aligned)
    yield from _span(name, "catching_up", aligned, cut)
    if part.progress in ("recording", "storing"):
        yield from _span(name, part.progress, cut, until_ms)
    stored_ms = part.snapshot_ms if part.stored_ms is None else part.stored_ms
    if stored_ms is not None:
        yield from _span(name, "recording", cut, cut + part.recorded_ms)
        yield from _span(name, "storing", cut + part.recorded_ms, cut + stored_ms)


def _of_all(checkpoint: CheckpointStatus, stored_ms: int | None) -> Iterator[Span]:
    if checkpoint.state == "aborted" or checkpoint.prepared_ms is None or stored_ms is None:
        return
    decided_ms = checkpoint.duration_ms if checkpoint.decided_ms is None else checkpoint.decided_ms
    yield from _span(None, "quorum", stored_ms, checkpoint.prepared_ms)
    yield from _span(None, "deciding", checkpoint.prepared_ms, decided_ms)


def _span(
    name: str | None, phase: Phase, from_ms: int, to_ms: int | None, *, is_critical: bool = False
) -> Iterator[Span]:
    if to_ms is not None and to_ms > from_ms:
        yield Span(name=name, phase=phase, from_ms=from_ms, to_ms=to_ms, is_critical=is_critical)


def _marked(span: Span, path: Sequence[PathStep]) -> Iterator[Span]:
    """The span, or the pieces of it that are before, on and behind the critical path."""
    for step in path:
        # A quorum is of an instance, which has no bar of its own; of a stage the first barrier may be the last, too.
        is_it = step.phase == span.phase or (step.phase, span.phase) == ("aligning", "waiting")
        if is_it and (span.name is None or step.of == span.name):
            start, end = max(span.from_ms, step.from_ms), min(span.to_ms, step.to_ms)
            if start < end:
                yield from _span(span.name, span.phase, span.from_ms, start)
                yield from _span(span.name, span.phase, start, end, is_critical=True)
                yield from _span(span.name, span.phase, end, span.to_ms)
                return
    yield span
