"""A gate: the segments of one input that a stage may see.

It is a folder that holds nothing but a log in the format of Spark's file sink, whose entries name the segments'
files where they lie. Spark's file source reads exactly what the log names, natively; no file is listed, moved or
copied.

Guarantees:
- Segments are seen in order: an entry's modification time is its sequence number, and Spark sorts by it. The
  reader's own source log then tells how far it has come.
- A segment is seen whole: all its files are in one entry of the log.
- Nothing is lost in a compaction: a compact entry repeats every segment that the reader has not committed. What
  it has committed is left out, so the log stays short.
- At most `WINDOW` segments stand in the log and wait; the others wait here, by reference. So the cost of a
  compaction, and of Spark's reading the log, does not grow with a backlog.
- With a window of one, each batch reads one segment at most: where rows must stay in order, because within a batch
  they have none.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.spark.filelog import METADATA, SinkLogEntry, trim_log, write_log
from tidegate.storage.files import Files

COMPACT_EVERY: Final = 10
WINDOW: Final = 256
_BLOCK_BYTES: Final = 33_554_432


class Gate:
    def __init__(self, files: Files, root: Files, position: int, window: int = WINDOW) -> None:
        """`files`: of the gate's own folder. `root`: those that segments name their files in.

        `position`: the sequence number up to which the reader has consumed its input.

        `window`: how many segments that it has not consumed the reader may see at a time.
        """
        self.files = files
        self._root = root
        self._waiting: deque[Segment] = deque()
        self._unconsumed: deque[Segment] = deque()
        self._position = position
        self._window = window
        self._next = COMPACT_EVERY
        # The one compact file makes Spark derive the interval, whatever the session says.
        self._write(f"{COMPACT_EVERY - 1}.compact", [])

    def release(self, segment: Segment) -> None:
        """Let the reader see a segment. It takes effect with the next `flush`."""
        self._waiting.append(segment)

    def nudge(self, nothing: SegmentFile) -> None:
        """Give the reader a batch to run, though there is nothing new: a file without rows, where it stands.

        It is not waited for. If it is gone from the log before the reader saw it, there was something else to see. It
        is no segment: where the input has delivered nothing yet, it stands before the first one.
        """
        self._write(str(self._next), [self._line(self._position, nothing)])
        self._next += 1

    def on_consumed(self, position: int) -> None:
        """The reader has committed everything up to this segment."""
        self._position = position
        while self._unconsumed and self._unconsumed[0].sequence <= position:
            self._unconsumed.popleft()

    @property
    def lag(self) -> int:
        """How many segments the reader has yet to commit."""
        return len(self._waiting) + len(self._unconsumed)

    @property
    def is_empty(self) -> bool:
        """Whether the reader has committed all that it may see."""
        return not self._unconsumed

    @property
    def room(self) -> int:
        """How many more segments the window allows."""
        return max(0, self._window - len(self._unconsumed))

    def flush(self, most: int | None = None) -> bool:
        """Write what was released since, as far as the window allows, in one entry. Tells whether there was any.

        `most`: as many segments at most; None: all of them.
        """
        count = min(self.room, len(self._waiting))
        if most is not None:
            count = min(count, most)
        if not count:
            return False
        fresh = [self._waiting.popleft() for _ in range(count)]
        self._unconsumed.extend(fresh)
        number = self._next
        self._next += 1
        if (number + 1) % COMPACT_EVERY == 0:
            self._write(f"{number}.compact", self._lines(self._unconsumed))
            # A reader that has just listed the log may still want what lies behind the compact file before this.
            trim_log(self.files, METADATA, number - COMPACT_EVERY)
        else:
            self._write(str(number), self._lines(fresh))
        return True

    def _write(self, entry: str, lines: list[str]) -> None:
        write_log(self.files, f"{METADATA}/{entry}", lines)

    def _lines(self, segments: deque[Segment] | list[Segment]) -> list[str]:
        return [self._line(segment.sequence, file) for segment in segments for file in segment.files]

    def _line(self, sequence: int, file: SegmentFile) -> str:
        entry = SinkLogEntry(
            path=self._root.uri(file.path),
            size=file.size_bytes,
            is_dir=False,
            modification_time=sequence,
            block_replication=1,
            block_size=_BLOCK_BYTES,
            action="add",
        )
        return msgspec.json.encode(entry).decode()
