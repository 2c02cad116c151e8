"""A channel: the ordered log of one stage's output, by reference to the Parquet files that Spark wrote.

One writer, any number of readers, each with a cursor of its own. The files are durable; the log of them is not:
a run that dies is restored into a new generation, whose channels start behind the checkpoint's barriers.
"""

from __future__ import annotations

from tidegate.protocol.messages import Barrier, Segment

Message = Segment | Barrier


class Channel:
    def __init__(self, writer: str, output_sequence: int) -> None:
        """`output_sequence`: the number of the last segment that was written before this generation."""
        self.writer = writer
        self.sequence = output_sequence
        self._first = 0
        self._messages: list[Message] = []

    def append_segment(self, segment: Segment) -> None:
        if segment.sequence != self.sequence + 1:
            raise ValueError(f"segment {segment.sequence} of {self.writer!r} after {self.sequence}")
        self.sequence = segment.sequence
        self._messages.append(segment)

    def append_barrier(self, barrier: Barrier) -> None:
        self._messages.append(barrier)

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
