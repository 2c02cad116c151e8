"""Every checkpoint of a pipeline that was taken or tried, from all that tells of one.

The history has those that have ended. What the run says itself is newer by a moment, and the decision log and the
manifests know what the history may have lost. Checkpoints are known by their numbers, which only grow and are never
used twice: so they are their order, and where a page of them goes on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from tidegate.dashboard.values import (
    CheckpointCounts,
    CheckpointRow,
    Checkpoints,
    CheckpointsSummary,
    LatestCheckpoints,
    MadeSavepoint,
    Measure,
    Measures,
    Point,
    RestoredCheckpoint,
)
from tidegate.engine.control import Life
from tidegate.engine.events import AnyEvent, CheckpointEnded, SavepointTaken, Started
from tidegate.engine.history import cursor_of, order_of
from tidegate.engine.status import CheckpointStatus, RunStatus, moment_ms
from tidegate.engine.summary import spread_of
from tidegate.protocol.names import checkpoint_id_of

MOST_POINTS: Final = 1_000
_COMPLETED: Final = frozenset(("committing", "complete", "damaged"))
_IN_PROGRESS: Final = frozenset(("preparing", "prepared", "deciding"))


class Happened:
    """What the history tells, put in order once for as long as it stays the same."""

    def __init__(self, events: Sequence[AnyEvent]) -> None:
        """Newest first."""
        self.events = events
        self.ended: dict[int, CheckpointStatus] = {}
        self.saved: set[int] = set()
        self.savepoints: list[SavepointTaken] = []
        self.restores: list[Started] = []
        self.start: Started | None = None
        """The last one."""
        for event in events:
            match event:
                case CheckpointEnded(checkpoint=checkpoint):
                    self.ended.setdefault(checkpoint_id_of(checkpoint.checkpoint) or 0, checkpoint)
                case SavepointTaken():
                    self.savepoints.append(event)
                    self.saved.add(checkpoint_id_of(event.checkpoint) or 0)
                case Started():
                    self.start = self.start or event
                    if event.base is not None:
                        self.restores.append(event)
                case _:
                    pass
        self.ids = sorted(self.ended)
        states = [each.state for each in self.ended.values()]
        self.completed = sum(state in _COMPLETED for state in states)
        self.failed = states.count("aborted")

    @property
    def newest(self) -> str | None:
        """What changes when something has happened."""
        return cursor_of(self.events[0]) if self.events else None

    def page(
        self, kinds: Collection[type[Any]] | None, before: str | None, limit: int
    ) -> tuple[list[AnyEvent], str | None]:
        """Of these kinds, newest first, and by what to ask for those before them; None: there are none. What has come
        since shifts nothing."""
        found: list[AnyEvent] = []
        for event in islice(self.events, 0 if before is None else self._first_before(order_of(before)), None):
            if kinds is not None and type(event) not in kinds:
                continue
            if len(found) == limit:
                return found, cursor_of(found[-1])
            found.append(event)
        return found, None

    def _first_before(self, order: tuple[int, str]) -> int:
        events = self.events
        return bisect_left(
            range(len(events)), True, key=lambda each: (moment_ms(events[each].at), events[each].id) < order
        )

    def is_of(self, events: Sequence[AnyEvent]) -> bool:
        """Whether these are the very same."""
        ours = self.events
        return len(ours) == len(events) and (not ours or (ours[0].id, ours[-1].id) == (events[0].id, events[-1].id))


class Attempts:
    """All of them, at one moment."""

    def __init__(
        self,
        happened: Happened,
        life: Life,
        status: RunStatus | None,
        kept: Mapping[int, CheckpointStatus],
        damage: Mapping[int, str],
    ) -> None:
        """`kept`: those that the log retains, by their manifests. `damage`: what is wrong with which of them."""
        self._happened = happened
        self._kept = kept
        self._status = status
        self.damage = damage
        self._over = dict(self._told_elsewhere(life, status))
        more = sorted(each for each in self._over if each not in happened.ended)
        self.ids = sorted([*happened.ids, *more]) if more else happened.ids

    def _told_elsewhere(self, life: Life, status: RunStatus | None) -> Iterator[tuple[int, CheckpointStatus]]:
        """What is not in the history, or not as it is now."""
        for number, found in self._kept.items():
            known = self._happened.ended.get(number)
            if known is None or known.state not in _COMPLETED:
                yield number, found
        said = (
            [] if status is None else [*status.checkpoints, *(status.in_progress if life is not Life.STOPPED else ())]
        )
        for each in said:
            number = checkpoint_id_of(each.checkpoint) or 0
            if number in self._happened.ended or (number in self._kept and each.state in _IN_PROGRESS):
                continue  # it is decided by now
            if life is not Life.STOPPED or each.state in ("complete", "aborted"):
                yield number, each
        for number, text in self.damage.items():
            known = self._happened.ended.get(number) or self._kept.get(number)
            if known is not None:
                yield number, msgspec.structs.replace(known, state="damaged", why=text)

    def get(self, number: int) -> CheckpointStatus | None:
        return self._over.get(number) or self._happened.ended.get(number)

    def is_in_doubt(self, number: int) -> bool:
        """Whether the last run has decided it, and was not heard to say that all tables show it: it may have been
        killed before."""
        found, known = self._kept.get(number), self._happened.ended.get(number)
        if self._status is None or found is None or found.generation != self._status.generation:
            return False
        told = [] if known is None else [known]
        told += [each for each in self._status.checkpoints if each.checkpoint == found.checkpoint]
        return not any(each.state == "complete" for each in told)

    def row(self, number: int) -> CheckpointRow | None:
        found = self.get(number)
        if found is None:
            return None
        return CheckpointRow(
            checkpoint=found, retained=number in self._kept, is_savepoint=number in self._happened.saved
        )

    def newest_first(self, states: Collection[str] | None = None, before: int | None = None) -> Iterator[int]:
        end = len(self.ids) if before is None else bisect_left(self.ids, before)
        for index in range(end - 1, -1, -1):
            number = self.ids[index]
            found = self.get(number)
            if found is not None and (states is None or found.state in states):
                yield number

    def completed(self) -> Iterator[tuple[int, CheckpointStatus]]:
        """Newest first."""
        for number in self.newest_first(_COMPLETED):
            found = self.get(number)
            if found is not None:
                yield number, found

    def page(self, states: Collection[str] | None, before: int | None, limit: int) -> Checkpoints:
        wanted: list[int] = []
        goes_on = False
        for number in self.newest_first(states, before):
            if len(wanted) == limit:
                goes_on = True
                break
            wanted.append(number)
        rows = tuple(row for number in wanted if (row := self.row(number)) is not None)
        return Checkpoints(
            counts=self._counts(),
            latest=self._latest(),
            checkpoints=rows,
            next=str(wanted[-1]) if goes_on else None,
        )

    def _counts(self) -> CheckpointCounts:
        happened = self._happened
        completed, failed, in_progress = happened.completed, happened.failed, 0
        for number, found in self._over.items():
            known = happened.ended.get(number)
            completed += (found.state in _COMPLETED) - (known is not None and known.state in _COMPLETED)
            failed += (found.state == "aborted") - (known is not None and known.state == "aborted")
            in_progress += found.state in _IN_PROGRESS
        return CheckpointCounts(
            completed=completed,
            failed=failed,
            in_progress=in_progress,
            restored=len(happened.restores),
            savepoints=len(happened.savepoints),
        )

    def _latest(self) -> LatestCheckpoints:
        happened = self._happened
        done, failed = next(iter(self.completed()), None), next(self.newest_first(("aborted",)), None)
        restored, saved = next(iter(happened.restores), None), next(iter(happened.savepoints), None)
        return LatestCheckpoints(
            completed=None if done is None else self.row(done[0]),
            failed=None if failed is None else self.row(failed),
            restored=None
            if restored is None
            else RestoredCheckpoint(checkpoint=restored.base or "", at=restored.at, because=restored.because),
            savepoint=None
            if saved is None
            else MadeSavepoint(checkpoint=saved.checkpoint, name=saved.name, at=saved.at),
        )

    # -- in numbers -------------------------------------------------------------------------------

    def summary(self) -> CheckpointsSummary:
        done = [found for _, found in self.completed()][::-1]
        return CheckpointsSummary(
            measures=Measures(
                duration_ms=measured(each.duration_ms for each in done),
                alignment_ms=measured(each.alignment_ms for each in done),
                new_bytes=measured(each.new_bytes for each in done),
                total_bytes=measured(each.total_bytes for each in done),
                in_flight_bytes=measured(each.in_flight_bytes for each in done),
                commit_ms=measured(map(commit_ms, done)),
            ),
            series=tuple(map(_point, spread(done, MOST_POINTS))),
        )


def commit_ms(checkpoint: CheckpointStatus) -> int | None:
    """How long the slowest of its sinks took to show it; None: that is not known of all."""
    took = [each.took_ms for each in checkpoint.commits.values()]
    return max((each for each in took if each is not None), default=None) if None not in took else None


def measured(values: Iterable[int | None]) -> Measure:
    found = spread_of([value for value in values if value is not None])
    if found is None:
        return Measure(count=0, min=None, average=None, max=None, p50=None, p90=None, p95=None, p99=None)
    return Measure(**msgspec.structs.asdict(found))


def spread(done: Sequence[CheckpointStatus], most: int) -> list[CheckpointStatus]:
    """So many of them at most, evenly; the newest, which comes last, is among them."""
    if len(done) <= most:
        return list(done)
    step = (len(done) - 1) / (most - 1)
    return [done[round(index * step)] for index in range(most)]


def _point(checkpoint: CheckpointStatus) -> Point:
    return Point(
        checkpoint=checkpoint.checkpoint,
        at=checkpoint.triggered_at,
        duration_ms=checkpoint.duration_ms,
        alignment_ms=checkpoint.alignment_ms,
        new_bytes=checkpoint.new_bytes,
        total_bytes=checkpoint.total_bytes,
        in_flight_bytes=checkpoint.in_flight_bytes,
        commit_ms=commit_ms(checkpoint),
        state_by_stage={
            name: part.total_bytes for name, part in checkpoint.stages.items() if part.total_bytes is not None
        },
    )
