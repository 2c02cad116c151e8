"""Watermark drift: which inputs of a stage wait because their event time is too far ahead of the slowest one's.

A join keeps what one input has delivered until the other's event time has come there too. So a fast source fills the
join's state with all that it is ahead. Where a drift is set, an input that is further ahead than that waits: its
segments are not shown to the query until the others have caught up.

Each segment says which watermark its writer has reached with it, and a `Watermark` stands in a channel where there were
no rows to say it with. Where an input *stands* is told by the next segment that waits, because that will be shown next;
by all that was told, where none waits. Inputs without event time have no part in it: they are neither held nor waited
for, and unknown here.

Guarantees:
- An input is held only while its next segment is further ahead of where the slowest one stands than the drift. Without
  a drift none ever is.
- The slowest is never held. So never are all: some input goes on, or has nothing more to show.
- Segments are shown in order, none is left out, and which are depends only on what was told, in whatever order inputs
  are looked at.
- An input that has event time, but no watermark yet, counts as the slowest: it is behind all that have one, as for the
  pipeline's watermark (quorum.py). A segment without one is never held: it is ahead of nobody.
- A writer that has ended stands at the end of time: nobody waits for what can never come.
- While holds are to yield, nothing is held: a barrier stands behind what is, and a checkpoint never waits for an input
  that may be silent for ever. That also keeps the inputs of one stage from waiting for one another through a writer
  that both come from: the next checkpoint parts them.

How much is let through then is up to the writer, so what is held counts for its backlog (backpressure.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from tidegate.protocol.messages import END_OF_TIME_MS

_UNSET: Final = -(2**63)
_NO_LIMIT: Final = 2**63


def with_event_time(inputs: Mapping[str, Iterable[str]], own: Collection[str]) -> frozenset[str]:
    """The stages that tell their readers of event time: those that have their `own`, and those that read such, and pass
    theirs on. `inputs`: of each stage, which comes after those that it reads."""
    timed: set[str] = set()
    for name, read in inputs.items():
        if name in own or not timed.isdisjoint(read):
            timed.add(name)
    return frozenset(timed)


class Hold(msgspec.Struct, frozen=True):
    """An input that waits for another. `by_ms`: how far it is ahead of that one; None: that has no watermark yet."""

    input: str
    ahead_of: str
    by_ms: int | None


class _Input:
    """`shown_ms`: the watermark of what may be seen. `told_ms`: of all that was told. `waiting`: of each segment that
    waits, in order."""

    __slots__ = ("name", "shown_ms", "told_ms", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.shown_ms = self.told_ms = _UNSET
        self.waiting: deque[int] = deque()

    @property
    def stands_ms(self) -> int:
        return max(self.shown_ms, self.waiting[0]) if self.waiting else self.told_ms

    def tell(self, watermark_ms: int) -> None:
        self.told_ms = max(self.told_ms, watermark_ms)
        if not self.waiting:
            self.shown_ms = self.told_ms

    def show(self, most: int, limit_ms: int) -> int:
        """Show up to so many segments, up to a watermark. Returns how many."""
        shown = 0
        while shown < most and self.waiting and self.waiting[0] <= limit_ms:
            self.shown_ms = max(self.shown_ms, self.waiting.popleft())
            shown += 1
        if not self.waiting:
            self.shown_ms = self.told_ms
        return shown


class WatermarkDrift:
    """Of one stage: what of its inputs may be shown. All methods are to be called from one thread."""

    def __init__(self, inputs: Iterable[str], max_drift_ms: int | None) -> None:
        """`inputs`: those with event time."""
        self._inputs = {name: _Input(name) for name in inputs}
        self._max_drift_ms = max_drift_ms
        self.yields = False
        """Whether a barrier is to be reached, or what comes before one is recorded: then nothing is held."""

    def on_segment(self, name: str, watermark_ms: int | None) -> None:
        """The next segment of an input is there, and waits."""
        if (source := self._inputs.get(name)) is None:
            return
        if watermark_ms is None:
            source.waiting.append(_UNSET)
            return
        # The end of time tells nothing of rows: a query whose windows were closed says so of all that it writes.
        source.waiting.append(watermark_ms if watermark_ms < END_OF_TIME_MS else _UNSET)
        source.tell(watermark_ms)

    def on_watermark(self, name: str, watermark_ms: int) -> None:
        """The writer of an input has come so far, behind the segments that were told before."""
        if (source := self._inputs.get(name)) is not None:
            source.tell(watermark_ms)

    def show(self, room: Mapping[str, int]) -> dict[str, int]:
        """How many segments of each input are shown from now on. `room`: how many may be, whatever their time."""
        shown = dict.fromkeys(self._inputs, 0)
        has_shown = True
        while has_shown:  # what is shown of the slowest may let others go on
            limit_ms = self._limit_ms
            has_shown = False
            for name, source in self._inputs.items():
                count = source.show(room[name] - shown[name], limit_ms)
                shown[name] += count
                has_shown |= count > 0
        return shown

    @property
    def held(self) -> tuple[Hold, ...]:
        """The inputs that wait for others. None while holds yield."""
        limit_ms = self._limit_ms
        if limit_ms == _NO_LIMIT:
            return ()
        slowest = self._slowest
        stands_ms = slowest.stands_ms
        return tuple(
            Hold(each.name, slowest.name, None if stands_ms == _UNSET else each.waiting[0] - stands_ms)
            for each in self._inputs.values()
            if each.waiting and each.waiting[0] > limit_ms
        )

    def is_held(self, name: str) -> bool:
        source = self._inputs.get(name)
        return source is not None and bool(source.waiting) and source.waiting[0] > self._limit_ms

    @property
    def _slowest(self) -> _Input:
        return min(self._inputs.values(), key=lambda each: each.stands_ms)

    @property
    def _limit_ms(self) -> int:
        """The watermark up to which segments may be shown."""
        if self.yields or self._max_drift_ms is None or not self._inputs:
            return _NO_LIMIT
        return self._slowest.stands_ms + self._max_drift_ms


class _Consumed:
    __slots__ = ("last", "reached_ms", "unconsumed")

    def __init__(self, position: int) -> None:
        self.last = position
        self.reached_ms: int | None = None
        self.unconsumed: deque[tuple[int, int]] = deque()


class ConsumedTime:
    """How far event time has come with what a stage has consumed, which is what it tells its own readers where its
    query has no watermark. All inputs are known here: those without event time may end too."""

    def __init__(self, positions: Mapping[str, int]) -> None:
        self._inputs = {name: _Consumed(position) for name, position in positions.items()}

    def on_segment(self, name: str, sequence: int, watermark_ms: int | None) -> None:
        source = self._inputs[name]
        source.last = sequence
        if watermark_ms is not None:
            source.unconsumed.append((sequence, watermark_ms))

    def on_watermark(self, name: str, watermark_ms: int, position: int) -> None:
        """It stands behind the last segment that was told; the stage has consumed up to `position`."""
        source = self._inputs[name]
        source.unconsumed.append((source.last, watermark_ms))
        self.on_consumed(name, position)

    def on_consumed(self, name: str, position: int) -> None:
        source = self._inputs[name]
        while source.unconsumed and source.unconsumed[0][0] <= position:
            watermark_ms = source.unconsumed.popleft()[1]
            source.reached_ms = watermark_ms if source.reached_ms is None else max(source.reached_ms, watermark_ms)

    def reached_ms(self, names: Iterable[str]) -> int | None:
        """The lowest of these inputs; None where one of them has none yet, or there are none."""
        reached = [self._inputs[name].reached_ms for name in names]
        known = [each for each in reached if each is not None]
        return min(known, default=None) if len(known) == len(reached) else None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes from any input, and what came is consumed."""
        return (self.reached_ms(self._inputs) or 0) >= END_OF_TIME_MS
