"""How a leader and the other instances agree that a checkpoint is prepared.

Guarantees:
- Announcements are numbered and kept until no reader needs them; a reader takes them in order and notices
  a gap. None can hide another. One of an older generation than the reader has seen is refused.
- An ack counts once, and only with the right checkpoint id, attempt and generation, from an expected
  instance. A member that is named twice is still one member.
- A quorum ends in exactly one way: reached by all, failed with the reasons, or timed out with who is missing.
- An instance that is lost while waiting fails the quorum at once unless it has acknowledged; one that joins
  has no part in it.
- The minimum watermark is held back by every instance whose watermark is not set yet; an instance that was
  only ever declared without event time has no say in it. Of an instance's stages the same holds.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from tidegate.errors import ProtocolViolation
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.messages import Barrier


class AnnouncedPhase(enum.Enum):
    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"


class Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the leader tells all instances about a checkpoint."""

    generation: int
    sequence: int
    phase: AnnouncedPhase
    barrier: Barrier
    attempt: int
    min_watermark_ms: int | None = None


class Announcements:
    """The leader's side: announcements in order, trimmed when every instance has seen them."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._next = 1
        self._kept: deque[Announcement] = deque()

    def announce(
        self, phase: AnnouncedPhase, barrier: Barrier, attempt: int, min_watermark_ms: int | None = None
    ) -> Announcement:
        announcement = Announcement(self._generation, self._next, phase, barrier, attempt, min_watermark_ms)
        self._next += 1
        self._kept.append(announcement)
        return announcement

    def since(self, sequence: int) -> tuple[Announcement, ...]:
        """Everything after the one with this number."""
        return tuple(kept for kept in self._kept if kept.sequence > sequence)

    def seen_by_all(self, sequence: int) -> None:
        """Every instance has taken everything up to this number."""
        while self._kept and self._kept[0].sequence <= sequence:
            self._kept.popleft()


class AnnouncementReader:
    """An instance's side: each announcement of its generation once, in order."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._seen = 0

    @property
    def seen(self) -> int:
        """The number of the last announcement that was taken."""
        return self._seen

    def take(self, announcements: Iterable[Announcement]) -> list[Announcement]:
        """Return those that are new, in order. What was seen before is skipped.

        Stops before a gap: the missing ones must be asked for again from `seen`.
        """
        taken: list[Announcement] = []
        announcements = tuple(announcements)
        for announcement in announcements:
            if announcement.generation != self._generation:
                raise ProtocolViolation(
                    f"announcement {announcement.sequence} is of generation {announcement.generation}, "
                    f"this instance is of generation {self._generation}"
                )
        for announcement in announcements:
            if announcement.sequence == self._seen + 1:
                self._seen += 1
                taken.append(announcement)
            elif announcement.sequence > self._seen:
                break
        return taken


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance that must acknowledge. Without event time it has no watermark to wait for."""

    instance: str
    has_event_time: bool = True


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance's word that its part is prepared, with its stages' reports; or why it is not."""

    instance: str
    checkpoint_id: int
    attempt: int
    generation: int
    error: str | None = None
    watermark_ms: int | None = None
    reports: tuple[StageReport, ...] = ()


class Timed(Protocol):
    """A stage, by what is known of its event time."""

    @property
    def has_event_time(self) -> bool: ...

    @property
    def watermark_ms(self) -> int | None: ...


def watermark_of(stages: Iterable[Timed]) -> int | None:
    """The watermark of several stages: the lowest. None where one of them has none yet, or none has event time."""
    own = [stage.watermark_ms for stage in stages if stage.has_event_time]
    known = [watermark_ms for watermark_ms in own if watermark_ms is not None]
    return min(known, default=None) if len(known) == len(own) else None


class AckAnswer(enum.Enum):
    ACCEPTED = "accepted"
    DUPLICATE = "this instance has answered already"
    STRANGER = "this instance is not expected"
    LATE = "the quorum has ended without it"
    WRONG_CHECKPOINT = "it is of another checkpoint"
    WRONG_ATTEMPT = "it is of another attempt"
    WRONG_GENERATION = "it is of another generation"


class Waiting(msgspec.Struct, frozen=True):
    missing: tuple[str, ...]


class Reached(msgspec.Struct, frozen=True):
    """All acknowledged. The watermark is None where one of them holds it back, or none has event time."""

    min_watermark_ms: int | None


class Failed(msgspec.Struct, frozen=True):
    failures: tuple[tuple[str, str], ...]


class TimedOut(msgspec.Struct, frozen=True):
    got: tuple[str, ...]
    missing: tuple[str, ...]


Outcome = Waiting | Reached | Failed | TimedOut


class Quorum:
    """The acks of one checkpoint, at the leader."""

    def __init__(
        self,
        barrier: Barrier,
        attempt: int,
        generation: int,
        members: Sequence[Member],
        deadline_ms: int,
    ) -> None:
        self._checkpoint_id = barrier.checkpoint_id
        self._attempt = attempt
        self._generation = generation
        self._missing = dict.fromkeys(member.instance for member in members)
        self._members = frozenset(self._missing)
        self._with_event_time = frozenset(member.instance for member in members if member.has_event_time)
        self._deadline_ms = deadline_ms
        self._watermarks: dict[str, int | None] = {}
        self._failures: dict[str, str] = {}
        self._outcome: Outcome | None = None

    def on_ack(self, ack: Ack) -> AckAnswer:
        answer = self._judge(ack)
        if answer is AckAnswer.ACCEPTED:
            del self._missing[ack.instance]
            self._watermarks[ack.instance] = ack.watermark_ms
            if ack.error is not None:
                self._failures[ack.instance] = ack.error
        return answer

    def on_lost(self, instance: str) -> None:
        """An instance has left or died. What it acknowledged is stored and still counts."""
        if instance in self._missing and self._outcome is None:
            del self._missing[instance]
            self._failures[instance] = "the instance was lost before it acknowledged"

    def on_time(self, now_ms: int) -> Outcome:
        """The outcome as of now. Once it is not `Waiting` it does not change."""
        if self._outcome is not None:
            return self._outcome
        if self._failures:
            self._outcome = Failed(tuple(self._failures.items()))
        elif not self._missing:
            self._outcome = Reached(self._min_watermark_ms())
        elif now_ms >= self._deadline_ms:
            self._outcome = TimedOut(tuple(self._watermarks), tuple(self._missing))
        else:
            return Waiting(tuple(self._missing))
        return self._outcome

    def _judge(self, ack: Ack) -> AckAnswer:
        if ack.generation != self._generation:
            return AckAnswer.WRONG_GENERATION
        if ack.checkpoint_id != self._checkpoint_id:
            return AckAnswer.WRONG_CHECKPOINT
        if ack.attempt != self._attempt:
            return AckAnswer.WRONG_ATTEMPT
        if ack.instance not in self._members:
            return AckAnswer.STRANGER
        if ack.instance in self._watermarks:
            return AckAnswer.DUPLICATE
        if ack.instance not in self._missing or self._outcome is not None:
            return AckAnswer.LATE
        return AckAnswer.ACCEPTED

    def _min_watermark_ms(self) -> int | None:
        lowest: int | None = None
        for instance, watermark_ms in self._watermarks.items():
            if instance not in self._with_event_time:
                continue
            if watermark_ms is None:
                return None
            if lowest is None or watermark_ms < lowest:
                lowest = watermark_ms
        return lowest
