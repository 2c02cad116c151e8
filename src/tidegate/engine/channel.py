"""A channel: the ordered log of one stage's output, by reference to the Parquet files that Spark wrote.

One writer, any number of readers, each with a cursor of its own. The files are durable; the log of them is not:
a run that dies is restored into a new generation, whose channels start behind the checkpoint's barriers.

A channel is bounded: what its slowest reader has yet to consume holds back its writer (protocol/backpressure.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tidegate.protocol.backpressure import BacklogBound, Backpressure
from tidegate.protocol.messages import Barrier, Message, Segment, Watermark


class Channel:
    def __init__(
        self,
        writer: str,
        output_sequence: int,
        bound: BacklogBound | None = None,
        in_flight: Iterable[Segment] = (),
    ) -> None:
        """`output_sequence`: the number of the last segment that was written before this generation. `in_flight`: those
        up to there that a reader has yet to consume."""
        self.writer = writer
        self.sequence = output_sequence
        self._watermark_ms: int | None = None
        self._first = 0
        self._messages: list[Message] = []
        self._backpressure = Backpressure(BacklogBound() if bound is None else bound)
        self._backlog: deque[Segment] = deque()
        self._backlog_bytes = 0
        self._is_held = False
        for segment in sorted(in_flight, key=lambda each: each.sequence):
            self._add_to_backlog(segment)

    def append_segment(self, segment: Segment) -> None:
        if segment.sequence != self.sequence + 1:
            raise ValueError(f"segment {segment.sequence} of {self.writer!r} after {self.sequence}")
        self.sequence = segment.sequence
        if segment.watermark_ms is not None:
            self._watermark_ms = max(segment.watermark_ms, self._watermark_ms or 0)
        self._messages.append(segment)
        self._add_to_backlog(segment)

    def append_barrier(self, barrier: Barrier) -> None:
        self._messages.append(barrier)

    def append_watermark(self, watermark_ms: int) -> None:
        """How far its writer has come in event time, if that is further than was told."""
        if self._watermark_ms is None or watermark_ms > self._watermark_ms:
            self._watermark_ms = watermark_ms
            self._messages.append(Watermark(watermark_ms))

    def at(self, cursor: int) -> Message | None:
        """The message at a reader's cursor; None if the reader has seen all."""
        index = cursor - self._first
        return self._messages[index] if index < len(self._messages) else None

    @property
    def end(self) -> int:
        """The cursor of a reader that has seen all."""
        return self._first + len(self._messages)

    def forget_before(self, cursor: int) -> None:
        """Every reader has passed this cursor."""
        del self._messages[: cursor - self._first]
        self._first = max(self._first, cursor)

    # -- backpressure -----------------------------------------------------------------------------

    @property
    def is_held_back(self) -> bool:
        """Whether its writer should write no more for now."""
        return self._backpressure.is_held_back

    def on_consumed(self, position: int) -> None:
        """Every reader has consumed what is up to this segment."""
        if self._backlog and self._backlog[0].sequence <= position:
            while self._backlog and self._backlog[0].sequence <= position:
                self._backlog_bytes -= self._backlog.popleft().size_bytes
            self._on_backlog()

    def hold(self, is_held: bool) -> None:
        """Whether a reader holds it, because it is too far ahead of another input (protocol/drift.py)."""
        if is_held is not self._is_held:
            self._is_held = is_held
            self._on_backlog()

    def _add_to_backlog(self, segment: Segment) -> None:
        self._backlog.append(segment)
        self._backlog_bytes += segment.size_bytes
        self._on_backlog()

    def _on_backlog(self) -> None:
        self._backpressure.on_backlog(len(self._backlog), self._backlog_bytes, is_held=self._is_held)
