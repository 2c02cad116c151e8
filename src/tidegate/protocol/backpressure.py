"""Backpressure: when the writer of a channel is held back, and when it may go on.

What a channel's slowest reader has yet to consume is its *backlog*. Bounding it bounds the disk, the memory and, since
a barrier waits behind what was written before it, the time of an aligned checkpoint.

Guarantees:
- A writer is held back from when its backlog passes a bound, by bytes or by segments, until it is down to half of both.
  In between it stays as it is: holding back a source costs the batch that is under way, so it must not flutter.
- A writer that is held back will go on: a reader's consuming what is there depends on no other reader of the channel.
  And barriers do not wait for it: those that it has to write are written while it is held back.

- While a reader holds the channel, because its event time is too far ahead (drift.py), a few segments are the bound:
  each checkpoint lets through what stands before its barrier, and that is to be little.

How far a backlog passes its bound is up to the writer: by the batch that passed it, and by what a stage had been given
to read when it was held back.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

from tidegate.errors import InvalidConfig
from tidegate.protocol.transitions import step

_MOST_HELD_SEGMENTS: Final = 4


class BacklogBound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of a channel its slowest reader may have yet to consume."""

    max_bytes: int = 256 << 20
    max_segments: int = 1_000

    def __post_init__(self) -> None:
        for name, value in (("max_bytes", self.max_bytes), ("max_segments", self.max_segments)):
            if value < 1:
                raise InvalidConfig(f"the bound of a backlog has {name} {value}; it must be at least 1")


class WriterPhase(enum.Enum):
    FLOWING = "flowing"
    HELD_BACK = "held back"


class BacklogEvent(enum.Enum):
    PASSED_BOUND = "the backlog passed its bound"
    DOWN_TO_HALF = "readers have caught up to half of it"


TRANSITIONS: Final[Mapping[tuple[WriterPhase, BacklogEvent], WriterPhase]] = {
    (WriterPhase.FLOWING, BacklogEvent.PASSED_BOUND): WriterPhase.HELD_BACK,
    (WriterPhase.HELD_BACK, BacklogEvent.DOWN_TO_HALF): WriterPhase.FLOWING,
}


class Backpressure:
    """Of one channel on its writer."""

    def __init__(self, bound: BacklogBound) -> None:
        self._bound = bound
        self._phase = WriterPhase.FLOWING

    @property
    def is_held_back(self) -> bool:
        return self._phase is WriterPhase.HELD_BACK

    def on_backlog(self, segments: int, size_bytes: int, *, is_held: bool = False) -> None:
        """What the slowest reader has yet to consume, whenever it has changed. `is_held`: by a reader, whose other
        inputs are behind in event time."""
        bound = self._bound
        max_segments = min(bound.max_segments, _MOST_HELD_SEGMENTS) if is_held else bound.max_segments
        if self._phase is WriterPhase.FLOWING:
            if segments > max_segments or size_bytes > bound.max_bytes:
                self._phase = step(TRANSITIONS, self._phase, BacklogEvent.PASSED_BOUND)
        elif segments * 2 <= max_segments and size_bytes * 2 <= bound.max_bytes:
            self._phase = step(TRANSITIONS, self._phase, BacklogEvent.DOWN_TO_HALF)
