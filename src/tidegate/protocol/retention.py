"""What may be deleted.

Guarantees:
- The newest complete checkpoint is retained, whatever failed after it.
- A checkpoint in which nothing has changed takes the place of the one before it, and pushes out no other. So the newest
  `max_retained` that differ are retained, whatever any clock says.
- The newest aligned one is retained in any case: what all tables show alike can be read.
- With `retain_ms`, older ones are retained for that long too, thinned out: of each 24th part of that time the first. So
  what is retained has a bound, and so have the records that name it.
- A file that a retained checkpoint refers to is never deleted, nor one that a checkpoint under way may come
  to refer to, nor one of a newer generation.
- If one retained checkpoint's references are not known, no file is deleted at all.
- Log records that the log has dropped (`DecisionLog.has_dropped`) may be deleted at any time, in any order.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog

PARTS: Final = 24
"""How many parts the time is divided into for which older checkpoints are retained."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file in the store, with the generation that wrote it.

    Where `before` is known, only checkpoints from `since` on and below it refer to the file, and all of these do: what
    a snapshot refers to is kept until a later one no longer does, and never taken up again.
    """

    path: str
    generation: int
    since: int = 0
    before: int | None = None

    def referring(self, retained: Sequence[int]) -> int | None:
        """The newest of these checkpoints, oldest first, that refers to it, if `before` is known."""
        below = 0 if self.before is None else bisect_left(retained, self.before)
        return retained[below - 1] if below and retained[below - 1] >= self.since else None


def content_of(reports: Iterable[StageReport]) -> str:
    """What tells a checkpoint from its parent: how far every stage has come, and what is in flight.

    Files do not count: a new generation stores the same ones by other names.
    """
    stages = [
        (
            report.stage,
            report.cut,
            sorted(report.positions.items()),
            report.output_sequence,
            report.source_position,
            sorted((each.input, each.after, each.through) for each in report.in_flight),
        )
        for report in reports
    ]
    return hashlib.sha256(msgspec.json.encode(sorted(stages, key=lambda each: each[0]))).hexdigest()[:16]


def retained_after(
    log: DecisionLog,
    checkpoint_id: int,
    config: CheckpointConfig,
    *,
    aligned: bool = True,
    content: str = "",
    at_ms: int = 0,
) -> tuple[int, ...]:
    """What the record that completes `checkpoint_id` retains, oldest first."""
    older = log.lineage()
    if older and content and older[0].content == content:
        older = older[1:]
    kept = older[: config.max_retained - 1]
    kept += _thinned(older[config.max_retained - 1 :], at_ms, config.retain_ms)
    if not aligned:
        newest_aligned = next((record for record in log.lineage() if record.aligned), None)
        if newest_aligned is not None and newest_aligned not in kept:
            kept.append(newest_aligned)
    return (*sorted(record.checkpoint_id for record in kept), checkpoint_id)


def _thinned(older: Sequence[CheckpointCompleted], now_ms: int, retain_ms: int) -> list[CheckpointCompleted]:
    """Of those of each part of the time the first: the choice stays the same as time goes on. Newest first.

    What a clock that has jumped says to be in the future is as good as new.
    """
    if not retain_ms:
        return []
    first: dict[int, CheckpointCompleted] = {}
    for record in reversed(older):
        if now_ms - record.at_ms < retain_ms:
            first.setdefault(record.at_ms * PARTS // retain_ms, record)
    return [record for record in older if record in first.values()][: PARTS + 1]


def deletable(
    retained: Iterable[int],
    generation: int,
    references: Mapping[int, frozenset[str]],
    stored: Iterable[StoredFile],
) -> list[StoredFile]:
    """The stored files that the run of this generation may delete, by what the log retains as it knows it.

    `references`: what each retained checkpoint refers to of the files that do not tell so themselves. `stored`: of the
    generation's own files, those that nothing which runs, and no checkpoint under way, may come to refer to.
    """
    retained = sorted(retained)
    if any(checkpoint_id not in references for checkpoint_id in retained):
        return []
    needed = frozenset().union(*(references[checkpoint_id] for checkpoint_id in retained))
    return [
        file
        for file in stored
        if file.generation <= generation and file.path not in needed and file.referring(retained) is None
    ]
