"""Two checkpoints of a pipeline, side by side."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.dashboard.moments import apart_ms
from tidegate.dashboard.values import Compared, ComparedStage, Comparison
from tidegate.engine.status import CheckpointStatus, StagePart

Positions = Mapping[str, tuple[str, ...]]


def compared(
    a: CheckpointStatus, b: CheckpointStatus, at_a: Positions, at_b: Positions, problems: tuple[str, ...]
) -> Comparison:
    # A source that ran in the query of another stage has no part of its own, but a position.
    names = dict.fromkeys([*a.stages, *b.stages, *at_a, *at_b])
    return Comparison(
        a=a,
        b=b,
        apart_ms=apart_ms(a.triggered_at, b.triggered_at),
        duration_ms=_numbers(a.duration_ms, b.duration_ms),
        alignment_ms=_numbers(a.alignment_ms, b.alignment_ms),
        new_bytes=_numbers(a.new_bytes, b.new_bytes),
        total_bytes=_numbers(a.total_bytes, b.total_bytes),
        in_flight_bytes=_numbers(a.in_flight_bytes, b.in_flight_bytes),
        stages={
            name: _stage(a.stages.get(name), b.stages.get(name), at_a.get(name, ()), at_b.get(name, ()))
            for name in names
        },
        problems=problems,
    )


def _stage(a: StagePart | None, b: StagePart | None, at_a: tuple[str, ...], at_b: tuple[str, ...]) -> ComparedStage:
    def both(field: str) -> Compared:
        return _numbers(*(None if part is None else getattr(part, field) for part in (a, b)))

    return ComparedStage(
        in_a=a is not None or bool(at_a),
        in_b=b is not None or bool(at_b),
        alignment_ms=both("alignment_ms"),
        snapshot_ms=both("snapshot_ms"),
        new_bytes=both("new_bytes"),
        total_bytes=both("total_bytes"),
        in_flight_bytes=both("in_flight_bytes"),
        batch=both("cut"),
        positions_a=at_a,
        positions_b=at_b,
    )


def _numbers(a: int | None, b: int | None) -> Compared:
    return Compared(a, b, None if a is None or b is None else b - a)
