"""What a stage writes: segments of its channel, or rows that are staged for its table, as files or by the table itself.

One of them is a stage's output. `take_up` hands on what a committed batch has written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from tidegate.engine.channel import Channel
from tidegate.protocol.backpressure import BacklogBound, Backpressure
from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.sinks.contract import Committable, RowSink, Staged, StagedBatch, StagedFile, decode_committable
from tidegate.spark.definition import OutputMode
from tidegate.spark.output import remove_outputs, written_files
from tidegate.storage.files import Files
from tidegate.storage.mounted import side_by_side
from tidegate.storage.parquet import count_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


class Output(Protocol):
    @property
    def is_held_back(self) -> bool:
        """Whether the stage should write no more for now."""
        ...

    def take_up(self, batch: int, folder: Files, watermark_ms: int | None = None) -> tuple[int, int]:
        """Hand on what a committed batch has written. Returns its rows and, as far as they are known, its bytes.

        `watermark_ms`: what the batch has reached, if readers want to know.
        """
        ...

    def on_consumed(self, batch: int, size_bytes: int) -> None:
        """The stage stands behind a batch, and has consumed so much with it."""
        ...

    def sealed(self, through_batch: int) -> str | None:
        """What the stage's table does not show yet, as a committable; None if it has no table."""
        ...

    def on_visible(self, through_batch: int) -> list[StagedFile]:
        """The table shows everything up to this batch. Returns the files that are no longer needed."""
        ...


def _with_rows(folder: Files, batch: int, mode: OutputMode) -> Iterator[StagedFile]:
    """The files with rows that a committed batch has written."""
    written = written_files(folder, batch, mode)
    counted = side_by_side(folder, partial(count_rows, folder), [name for name, _ in written])
    for (name, size_bytes), rows in zip(written, counted, strict=True):
        if rows:
            yield StagedFile(batch, folder.location(name), size_bytes, rows)
        else:
            remove_outputs(folder, [name])  # Spark writes an empty file for a batch without rows


def _counted(files: Iterable[StagedFile]) -> tuple[int, int]:
    """Their rows and bytes."""
    found = list(files)
    return sum(file.rows for file in found), sum(file.size_bytes for file in found)


class ChannelOutput:
    """Each batch with rows is one segment."""

    def __init__(self, channel: Channel, root: Files, mode: OutputMode) -> None:
        self._channel = channel
        self._root = root
        self._mode = mode
        self._written: deque[Segment] = deque()
        self._unreclaimed: list[str] = []

    @property
    def is_held_back(self) -> bool:
        return self._channel.is_held_back

    def take_up(self, batch: int, folder: Files, watermark_ms: int | None = None) -> tuple[int, int]:
        files = list(_with_rows(folder, batch, self._mode))
        if files:
            named = [SegmentFile(self._name_of(file), file.size_bytes) for file in files]
            segment = Segment(self._channel.sequence + 1, batch, tuple(named), watermark_ms)
            self._channel.append_segment(segment)
            self._written.append(segment)
        elif watermark_ms is not None:
            self._channel.append_watermark(watermark_ms)
        return _counted(files)

    def _name_of(self, file: StagedFile) -> str:
        name = self._root.name_at(file.path)
        assert name is not None
        return name

    def on_consumed(self, batch: int, size_bytes: int) -> None:
        """What its readers have yet to consume is what counts."""

    def sealed(self, through_batch: int) -> str | None:  # noqa: ARG002
        return None

    def on_visible(self, through_batch: int) -> list[StagedFile]:  # noqa: ARG002
        return []

    def take_consumed(self, through: int) -> tuple[str, ...]:
        """The files of the segments that every reader has consumed, up to this one.

        What a retained checkpoint has in flight cannot be deleted yet: it is offered again, until it is `reclaimed`.
        """
        while self._written and self._written[0].sequence <= through:
            self._unreclaimed += [file.path for file in self._written.popleft().files]
        return tuple(self._unreclaimed)

    def reclaimed(self, names: frozenset[str]) -> None:
        self._unreclaimed = [name for name in self._unreclaimed if name not in names]

    def unread(self) -> frozenset[str]:
        """The files of segments that are not deleted yet."""
        return frozenset(file.path for segment in self._written for file in segment.files).union(self._unreclaimed)


class _Unshown:
    """What a sink has consumed since what its table shows."""

    def __init__(self, bound: BacklogBound) -> None:
        self._backpressure = Backpressure(bound)
        self._batches: deque[tuple[int, int]] = deque()
        self._size_bytes = 0

    @property
    def is_too_much(self) -> bool:
        return self._backpressure.is_held_back

    def on_batch(self, batch: int, consumed_bytes: int) -> None:
        self._batches.append((batch, consumed_bytes))
        self._size_bytes += consumed_bytes
        self._backpressure.on_backlog(len(self._batches), self._size_bytes)

    def on_visible(self, through_batch: int) -> None:
        while self._batches and self._batches[0][0] <= through_batch:
            self._size_bytes -= self._batches.popleft()[1]
        self._backpressure.on_backlog(len(self._batches), self._size_bytes)


class StagedOutput:
    """What both kinds of staging have in common: all that was staged is sealed, until the table shows it."""

    def __init__(self, bound: BacklogBound, restored: str | None) -> None:
        """`restored`: what the checkpoint had sealed that the stage starts from."""
        self.is_table_late = False
        """Whether the table is late with an epoch, and the stage may be held back for it."""
        self._unshown = _Unshown(bound)
        sealed = Committable(-1) if restored is None else decode_committable(restored)
        # What the table does not show yet is sealed again, until the table says that it does.
        self._staged: list[Staged] = [*sealed.files, *sealed.batches]
        self._shown_through = sealed.shown_through

    @property
    def is_held_back(self) -> bool:
        return self.is_table_late and self._unshown.is_too_much

    def on_consumed(self, batch: int, size_bytes: int) -> None:
        self._unshown.on_batch(batch, size_bytes)

    def sealed(self, through_batch: int) -> str | None:
        files = tuple(each for each in self._staged if isinstance(each, StagedFile))
        batches = tuple(each for each in self._staged if isinstance(each, StagedBatch))
        return Committable(through_batch, files, batches, self._shown_through).encode()

    def on_visible(self, through_batch: int) -> list[StagedFile]:
        self._unshown.on_visible(through_batch)
        done = [each for each in self._staged if each.batch <= through_batch]
        self._staged = [each for each in self._staged if each.batch > through_batch]
        self._shown_through = max([self._shown_through, *(each.batch for each in done if each.rows)])
        return [each for each in done if isinstance(each, StagedFile)]


class StagedFiles(StagedOutput):
    """Spark stages Parquet files, in a folder of the table or, if that is elsewhere, in one that they are sent from."""

    def __init__(self, staging: Files, mode: OutputMode, bound: BacklogBound, restored: str | None) -> None:
        super().__init__(bound, restored)
        self._staging = staging
        self._mode = mode

    def take_up(self, batch: int, folder: Files, watermark_ms: int | None = None) -> tuple[int, int]:  # noqa: ARG002
        files = [self._where_it_will_be(file) for file in _with_rows(folder, batch, self._mode)]
        self._staged += files
        return _counted(files)

    def _where_it_will_be(self, file: StagedFile) -> StagedFile:
        name = self._staging.name_at(file.path)
        assert name is not None
        return msgspec.structs.replace(file, path=self._staging.location(name))


class StagedRows(StagedOutput):
    """The table itself stages what Spark hands it, before Spark commits the batch."""

    def __init__(self, sink: RowSink, generation: int, bound: BacklogBound, restored: str | None) -> None:
        super().__init__(bound, restored)
        self._sink = sink
        self._generation = generation
        self._rows: dict[int, int] = {}

    def open(self, schema: StructType) -> Callable[[DataFrame, int], None]:
        """Returns what stages a batch."""
        self._sink.open_staging(self._generation, schema)

        def stage(frame: DataFrame, batch: int) -> None:
            self._rows[batch] = self._sink.stage(self._generation, batch, frame)

        return stage

    def take_up(self, batch: int, folder: Files, watermark_ms: int | None = None) -> tuple[int, int]:  # noqa: ARG002
        rows = self._rows.pop(batch, 0)
        if rows:
            self._staged.append(StagedBatch(batch, self._generation, rows))
        return rows, 0
