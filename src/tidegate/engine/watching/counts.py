"""What is counted of a pipeline on a root, by its events and by what its run says: values, of which metrics are made.

Nothing that is counted ever goes down while somebody counts: what a run tells of a stage begins anew with every
generation, and is added up here. What is told of stages and sinks is of those that the pipeline has now, so there are
never more of them than it has.

This knows no Prometheus: a run without metrics needs none.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final, Literal

import msgspec

from tidegate.engine.events import AnyEvent, CheckpointEnded, Failed, Started
from tidegate.engine.status import CheckpointStatus, RunStatus

Outcome = Literal["complete", "aborted"]
CommitOutcome = Literal["committed", "failed"]

OUTCOMES: Final[tuple[Outcome, ...]] = ("complete", "aborted")
COMMIT_OUTCOMES: Final[tuple[CommitOutcome, ...]] = ("committed", "failed")
RECOVERIES: Final = ("failure", "killed", "instances")
"""The starts that were nobody's wish."""
SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Bounds of what takes from a moment to as long as a checkpoint may take by default."""
# Checkpoints of which it is known what was counted: more than a status tells of.
_REMEMBERED: Final = 256
_REMEMBERED_EVENTS: Final = 10_000


class Distribution(msgspec.Struct, frozen=True):
    """How often something took at most so long."""

    bounds: tuple[float, ...] = SECONDS
    counts: tuple[int, ...] = (0,) * (len(SECONDS) + 1)
    """How many lie between one bound and the next; the last: beyond all."""
    total: float = 0.0

    def with_one(self, value: float) -> Distribution:
        counts = list(self.counts)
        counts[bisect.bisect_left(self.bounds, value)] += 1
        return Distribution(self.bounds, tuple(counts), self.total + value)


class StageCounts(msgspec.Struct, frozen=True):
    """What a stage has done, in all generations together."""

    rows: int = 0
    batches: int = 0
    batches_ms: int = 0

    def __add__(self, other: StageCounts) -> StageCounts:
        return StageCounts(self.rows + other.rows, self.batches + other.batches, self.batches_ms + other.batches_ms)


class SinkCounts(msgspec.Struct, frozen=True):
    """What a sink has committed."""

    committed: int = 0
    failed: int = 0
    durations: Distribution = Distribution()


class Counted(msgspec.Struct, frozen=True):
    """All of it at one moment."""

    checkpoints: dict[Outcome, int] = {}
    aborted_in_a_row: int | None = None
    """None: whoever leads the pipeline knows, and that is another process."""
    durations: Distribution = Distribution()
    alignments: Distribution = Distribution()
    last: CheckpointStatus | None = None
    """The newest checkpoint that is complete."""
    stages: dict[str, StageCounts] = {}
    sinks: dict[str, SinkCounts] = {}
    recoveries: dict[str, int] = {}
    failures: int = 0
    status: RunStatus | None = None
    """What the run said last."""


class Tally:
    """Counts. May be told and asked on different threads."""

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._checkpoints: Counter[Outcome] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._aborted_in_a_row: int | None = None
        self._durations = Distribution()
        self._alignments = Distribution()
        self._last: CheckpointStatus | None = None
        self._before: dict[str, StageCounts] = {}
        self._now: dict[str, StageCounts] = {}
        self._of: object = None
        self._sinks: dict[str, SinkCounts] = {}
        self._failures_seen: dict[str, dict[str, int]] = {}
        self._known: dict[str, None] = {}
        self._recoveries: Counter[str] = Counter(dict.fromkeys(RECOVERIES, 0))
        self._failures = 0
        self._status: RunStatus | None = None

    def counted(self) -> Counted:
        with self._counting:
            return Counted(
                dict(self._checkpoints),
                self._aborted_in_a_row,
                self._durations,
                self._alignments,
                self._last,
                self._in_all_generations(),
                dict(self._sinks),
                dict(self._recoveries),
                self._failures,
                self._status,
            )

    # -- what the run says ------------------------------------------------------------------------

    def on_status(self, status: RunStatus | None) -> None:
        """None: nobody speaks for the run any more, or another process does."""
        with self._counting:
            self._status = status
            if status is None:
                return
            self._aborted_in_a_row = self._aborted_in_a_row or 0
            if status.generation is not None and status.stages:
                self._count_stages(status)
            for each in (*status.in_progress, *status.checkpoints):
                if each.commits:
                    self._count_failed_commits(each)

    def step_down(self) -> None:
        """Another process speaks for the run from now on. What was counted stays; of what came last, only that one
        knows."""
        with self._counting:
            self._status = self._aborted_in_a_row = self._last = None

    def on_base(self, checkpoint: CheckpointStatus) -> None:
        """The newest checkpoint that there is, whoever took it: what the run goes on from. It is not counted."""
        with self._counting:
            if self._status is not None:  # else it was looked for, and somebody else leads by now
                self._keep_last(checkpoint)

    def _count_stages(self, status: RunStatus) -> None:
        own = {name: each for name, each in status.stages.items() if each.chained_into is None}
        # A generation's first word is of whoever leads: of a stage elsewhere it knows but who was given it.
        untold = {name for each in status.instances for name in each.stages} - status.stages.keys()
        of = (status.started_at, status.generation)
        if of != self._of:
            self._of = of
            self._before, self._now = self._in_all_generations(), {}
        for name, each in own.items():
            known = self._now.get(name, StageCounts())
            self._now[name] = StageCounts(  # several processes may tell: who was heard later need not know more
                max(known.rows, each.rows), max(known.batches, each.batches), max(known.batches_ms, each.batches_ms)
            )
        for counts in (self._before, self._now):
            for gone in counts.keys() - own.keys() - untold:
                del counts[gone]
        sinks = [name for name, each in status.stages.items() if each.kind == "sink"]
        sinks += (name for name in self._sinks if name in untold)
        self._sinks = {name: self._sinks.get(name, SinkCounts()) for name in sinks}

    def _in_all_generations(self) -> dict[str, StageCounts]:
        none = StageCounts()
        return {name: self._before.get(name, none) + self._now.get(name, none) for name in self._before | self._now}

    # -- what has happened ------------------------------------------------------------------------

    def on_events(self, events: Iterable[AnyEvent]) -> None:
        for each in sorted(events, key=lambda event: event.at):
            self.on_event(each)

    def on_event(self, event: AnyEvent) -> None:
        """Of one that is told again, only what is new in it counts."""
        with self._counting:
            match event:
                case CheckpointEnded():
                    self._count_checkpoint(event)
                case Started() if event.because in RECOVERIES and not self._is_known(event.id):
                    self._recoveries[event.because] += 1
                case Failed() if not self._is_known(event.id):
                    self._failures += 1
                case _:
                    pass

    def _count_checkpoint(self, event: CheckpointEnded) -> None:
        ended = event.checkpoint
        self._count_failed_commits(ended)
        is_aborted = ended.state == "aborted"
        if not self._is_known(event.id):
            self._checkpoints["aborted" if is_aborted else "complete"] += 1
            self._aborted_in_a_row = (self._aborted_in_a_row or 0) + 1 if is_aborted else 0
            if not is_aborted:
                self._measure(ended)
        if is_aborted:
            return
        self._keep_last(ended)
        for sink, commit in ended.commits.items():
            if commit.took_ms is not None and not self._is_known(f"{event.id} {sink}"):
                known = self._sinks.get(sink, SinkCounts())
                durations = known.durations.with_one(commit.took_ms / 1000)
                self._sinks[sink] = SinkCounts(known.committed + 1, known.failed, durations)

    def _keep_last(self, complete: CheckpointStatus) -> None:
        if self._last is None or (decided_s(complete) or 0) >= (decided_s(self._last) or 0):
            self._last = complete

    def _measure(self, ended: CheckpointStatus) -> None:
        if ended.duration_ms is not None:
            self._durations = self._durations.with_one(ended.duration_ms / 1000)
        if ended.alignment_ms is not None:
            self._alignments = self._alignments.with_one(ended.alignment_ms / 1000)

    def _is_known(self, what: str) -> bool:
        """Whether it was counted before; from now on, it was."""
        if what in self._known:
            return True
        self._known[what] = None
        if len(self._known) > _REMEMBERED_EVENTS:
            del self._known[next(iter(self._known))]
        return False

    def _count_failed_commits(self, checkpoint: CheckpointStatus) -> None:
        """As soon as they fail: the checkpoint ends when they no longer do."""
        seen = self._failures_seen.pop(checkpoint.checkpoint, {})
        for sink, commit in checkpoint.commits.items():
            more = commit.failures - seen.get(sink, 0)
            if more > 0:
                known = self._sinks.get(sink, SinkCounts())
                self._sinks[sink] = msgspec.structs.replace(known, failed=known.failed + more)
                seen[sink] = commit.failures
        self._failures_seen[checkpoint.checkpoint] = seen  # as the one that was told of last
        if len(self._failures_seen) > _REMEMBERED:
            del self._failures_seen[next(iter(self._failures_seen))]


def decided_s(checkpoint: CheckpointStatus) -> float | None:
    """When it was decided, in seconds since 1970."""
    if checkpoint.triggered_at is None:
        return None
    return seconds_of(checkpoint.triggered_at) + (checkpoint.duration_ms or 0) / 1000


def seconds_of(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def cumulated(distribution: Distribution) -> Sequence[tuple[float, int]]:
    """How many took at most as long as each bound, and in the end how many there are."""
    found, below = [], 0
    for bound, count in zip((*distribution.bounds, float("inf")), distribution.counts, strict=True):
        below += count
        found.append((bound, below))
    return found
