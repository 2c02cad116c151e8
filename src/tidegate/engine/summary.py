"""How the checkpoints of a history went, in numbers: smallest, average, largest, and percentiles.

Importing this brings no PySpark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tidegate.engine.status import CheckpointStatus


class Spread(msgspec.Struct, frozen=True):
    """How something was over many checkpoints. A percentile is the least value that so many of 100 do not exceed."""

    count: Annotated[int, Meta(description="of how many checkpoints it is known")]
    min: Annotated[int, Meta(description="the smallest")]
    average: Annotated[float, Meta(description="all together by how many they are")]
    max: Annotated[int, Meta(description="the largest")]
    p50: Annotated[int, Meta(description="half of them are no larger")]
    p90: Annotated[int, Meta(description="90 of 100 are no larger")]
    p95: Annotated[int, Meta(description="95 of 100 are no larger")]
    p99: Annotated[int, Meta(description="99 of 100 are no larger")]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of the checkpoints in the history of a root. Of those that were aborted only how many; the rest is of those that
    are complete, and null where nothing is known of any."""

    complete: Annotated[int, Meta(description="how many are")]
    aborted: Annotated[int, Meta(description="how many were")]
    since: Annotated[str | None, Meta(description="when the first of them was triggered; null: there are none")] = None
    duration_ms: Annotated[Spread | None, Meta(description="from the trigger to the decision")] = None
    alignment_ms: Annotated[Spread | None, Meta(description="of the stage that took longest to align")] = None
    commit_ms: Annotated[Spread | None, Meta(description="of the sink that took longest to commit")] = None
    shown_ms: Annotated[Spread | None, Meta(description="from the trigger until all tables showed it")] = None
    new_bytes: Annotated[Spread | None, Meta(description="what was not stored before")] = None
    total_bytes: Annotated[Spread | None, Meta(description="all that it consists of")] = None
    in_flight_bytes: Annotated[Spread | None, Meta(description="what was captured in flight")] = None


def spread_of(values: Sequence[int]) -> Spread | None:
    """None of nothing."""
    if not values:
        return None
    ordered = sorted(values)

    def percentile(percent: int) -> int:
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

    average = round(sum(ordered) / len(ordered), 1)
    percentiles = (percentile(percent) for percent in (50, 90, 95, 99))
    return Spread(len(ordered), ordered[0], average, ordered[-1], *percentiles)


def _commit_ms(status: CheckpointStatus) -> int | None:
    took = [each.took_ms for each in status.commits.values() if each.took_ms is not None]
    return max(took, default=None)


_MEASURES: Final[dict[str, Callable[[CheckpointStatus], int | None]]] = {
    "duration_ms": lambda status: status.duration_ms,
    "alignment_ms": lambda status: status.alignment_ms,
    "commit_ms": _commit_ms,
    "shown_ms": lambda status: status.shown_ms,
    "new_bytes": lambda status: status.new_bytes,
    "total_bytes": lambda status: status.total_bytes,
    "in_flight_bytes": lambda status: status.in_flight_bytes,
}


def summary_of(checkpoints: Iterable[CheckpointStatus]) -> Summary:
    found = list(checkpoints)
    complete = [each for each in found if each.state in ("complete", "committing")]
    spreads = {
        name: spread_of([value for each in complete if (value := measure(each)) is not None])
        for name, measure in _MEASURES.items()
    }
    return Summary(
        complete=len(complete),
        aborted=sum(each.state == "aborted" for each in found),
        since=min((each.triggered_at for each in found if each.triggered_at is not None), default=None),
        **spreads,
    )
