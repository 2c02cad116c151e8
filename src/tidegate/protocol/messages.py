"""What travels in a channel: `Segment | Watermark | Barrier`.

Guarantees:
- A message is a value: frozen, comparable, hashable; it survives JSON unchanged.
- Decoding is strict: an unknown kind, field, flag or an id outside 64 bits is refused, never ignored.
- Segments of one channel are numbered from 1 without gaps. A barrier has no number of its own: it stands
  after the last segment that was appended before it.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

MAX_U64: Final = 2**64 - 1
# The last second that a timestamp can tell in Python, and far from where Spark's microseconds overflow.
END_OF_TIME_MS: Final = 253_402_300_799_000


class Flag(enum.IntFlag):
    """How a barrier wants to be treated. Combined with `|`."""

    NONE = 0
    FULL_SNAPSHOT = 1
    """Upload everything, also what the store holds already from earlier checkpoints."""
    DRAIN = 2
    """The last barrier before a stop: all before it is processed, nothing comes after it."""
    CANCEL = 4
    """Stands in the place of the barrier of an aborted checkpoint: forget it, open the gates."""
    UNALIGNED = 8
    """Cut at once and name what is in flight, instead of waiting for alignment."""


# Plain integers: an IntFlag operation costs half a microsecond, too much for every message.
_FULL_SNAPSHOT: Final = int(Flag.FULL_SNAPSHOT)
_DRAIN: Final = int(Flag.DRAIN)
_CANCEL: Final = int(Flag.CANCEL)
_UNALIGNED: Final = int(Flag.UNALIGNED)
_KNOWN: Final = _FULL_SNAPSHOT | _DRAIN | _CANCEL | _UNALIGNED


class Barrier(msgspec.Struct, frozen=True, tag="barrier", forbid_unknown_fields=True, gc=False):
    """The marker of a checkpoint in a channel."""

    checkpoint_id: int
    epoch: int
    flags: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.checkpoint_id <= MAX_U64:
            raise ValueError(f"checkpoint_id {self.checkpoint_id} is not in 1 … 2^64-1")
        if not 0 < self.epoch <= MAX_U64:
            raise ValueError(f"epoch {self.epoch} is not in 1 … 2^64-1")
        if self.flags & ~_KNOWN:
            raise ValueError(f"unknown barrier flags {self.flags & ~_KNOWN:#x}")
        if self.flags & _UNALIGNED and self.flags & _DRAIN:
            raise ValueError("a DRAIN barrier cannot be UNALIGNED: a drain leaves nothing in flight")

    @property
    def is_full_snapshot(self) -> bool:
        return self.flags & _FULL_SNAPSHOT != 0

    @property
    def is_drain(self) -> bool:
        return self.flags & _DRAIN != 0

    @property
    def is_cancel(self) -> bool:
        return self.flags & _CANCEL != 0

    @property
    def is_unaligned(self) -> bool:
        return self.flags & _UNALIGNED != 0

    def as_unaligned(self) -> Barrier:
        return Barrier(self.checkpoint_id, self.epoch, self.flags | _UNALIGNED)

    def as_cancel(self) -> Barrier:
        return Barrier(self.checkpoint_id, self.epoch, _CANCEL)

    def agrees_with(self, other: Barrier) -> bool:
        """Whether both are of one checkpoint as it was triggered.

        UNALIGNED may differ: a stage that fell back sets it on the barrier that it forwards.
        """
        return (
            self.checkpoint_id == other.checkpoint_id
            and self.epoch == other.epoch
            and (self.flags ^ other.flags) & ~_UNALIGNED == 0
        )


class SegmentFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One immutable file of a segment. `sha256` is known once it was captured in flight."""

    path: str
    size_bytes: int
    sha256: str = ""

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(f"file {self.path!r} has {self.size_bytes} bytes")


class Segment(msgspec.Struct, frozen=True, tag="segment", forbid_unknown_fields=True, omit_defaults=True):
    """The output of one committed batch, by reference. `watermark_ms`: what its writer has reached with it, where
    somebody wants to know (drift.py)."""

    sequence: int
    batch: int
    files: tuple[SegmentFile, ...]
    watermark_ms: int | None = None

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.batch < 0:
            raise ValueError(f"segment {self.sequence} of batch {self.batch}: numbers start at 1 and 0")

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Watermark(msgspec.Struct, frozen=True, tag="watermark", forbid_unknown_fields=True):
    """How far its writer has come in event time, where no segment tells it: a batch has written no rows, or nothing
    more will come, which is the end of time."""

    watermark_ms: int


Message = Segment | Watermark | Barrier

_decoder: Final = msgspec.json.Decoder(Message)


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message)


def decode(data: bytes) -> Message:
    """Raise `msgspec.ValidationError` on anything that is not a message."""
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise msgspec.ValidationError(str(error)) from error
    return message
