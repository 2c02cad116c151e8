"""Where the sources of a checkpoint stand, in words: of Kafka by topic, partition and offset, of files by how many were
read and which was the last. Spark's own words for it (`{"logOffset":29}`) say neither.

Importing this brings no PySpark.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tidegate.errors import TidegateError
from tidegate.spark.positions import StreamPosition, position_at
from tidegate.storage.file_lists import files_of
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, SourceStream, StageSnapshot

_KAFKA: Final = "kafka"
_NAMED_PARTITIONS: Final = 8
_LOG_OFFSET: Final = "logOffset"


class SourcePosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a source stands in one of its streams."""

    format: Annotated[str, Meta(description="the kind of stream, such as `kafka` or `json`")]
    words: Annotated[str, Meta(description="for people")]
    offset: Annotated[str | None, Meta(description="as Spark wrote it; null: nothing was read")] = None
    topics: Annotated[
        dict[str, dict[str, int]] | None,
        Meta(description="of Kafka: by topic and partition, the offset of the next record; otherwise null"),
    ] = None
    files: Annotated[int | None, Meta(description="of files: how many were read; null: it is of none, or unknown")] = (
        None
    )
    last_file: Annotated[str | None, Meta(description="of files: the last that was read; otherwise null")] = None


def positions_of(root: Files, manifest: Manifest) -> dict[str, tuple[SourcePosition, ...]]:
    """By the names of sources. What cannot be read of one is told as Spark wrote it."""
    return {
        name: _positions(root, name, manifest.stages[name], shape.streams)
        for name, shape in manifest.shape.items()
        if not shape.inputs
    }


def _positions(
    root: Files, stage: str, snapshot: StageSnapshot, streams: tuple[SourceStream, ...]
) -> tuple[SourcePosition, ...]:
    told = snapshot.source_positions
    if len(told) == len(streams) and not any(_LOG_OFFSET in each for each in told):
        return tuple(
            told_position(StreamPosition(stream, 0, offset)) for stream, offset in zip(streams, told, strict=True)
        )
    try:
        files = files_of(root, stage, snapshot.files)
        return tuple(map(told_position, position_at(root, stage, files, snapshot.cut, streams)))
    except TidegateError:
        formats = [stream.format for stream in streams] if len(streams) == len(told) else ["unknown"] * len(told)
        return tuple(
            SourcePosition(format=form, words=each, offset=each) for form, each in zip(formats, told, strict=True)
        )


def told_position(position: StreamPosition) -> SourcePosition:
    """A position that was read, for people."""
    form, offset, files = position.stream.format, position.offset, position.files
    if offset is None:
        return SourcePosition(format=form, words="nothing read yet", files=0 if files is not None else None)
    if files is not None:
        last = max(files, key=lambda file: (files[file], file[1], file[0]), default=None)
        count = f"{len(files):,} file{'' if len(files) == 1 else 's'} read"
        words = count if last is None else f"{count}, the last: {last[0]}"
        return SourcePosition(
            format=form, words=words, offset=offset, files=len(files), last_file=None if last is None else last[0]
        )
    topics = _topics(offset) if form == _KAFKA else None
    if topics is not None:
        return SourcePosition(format=form, words=_in_words(topics), offset=offset, topics=topics)
    return SourcePosition(format=form, words=f"offset {offset}", offset=offset)


def _topics(offset: str) -> dict[str, dict[str, int]] | None:
    try:
        return msgspec.json.decode(offset, type=dict[str, dict[str, int]])
    except (msgspec.MsgspecError, ValueError):
        return None


def _in_words(topics: dict[str, dict[str, int]]) -> str:
    return "; ".join(_topic(name, partitions) for name, partitions in sorted(topics.items())) or "no topic yet"


def _topic(name: str, partitions: dict[str, int]) -> str:
    ordered = sorted(partitions.items(), key=lambda each: (len(each[0]), each[0]))
    named = ", ".join(f"partition {number} at offset {offset}" for number, offset in ordered[:_NAMED_PARTITIONS])
    left = len(ordered) - _NAMED_PARTITIONS
    return f"topic {name}: {named}" + (f" and {left} more partitions" if left > 0 else "")
