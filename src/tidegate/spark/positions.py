"""Where a source stands in what it reads, as something that can be compared, with another root's too.

An offset of Spark's will do for most streams. Not of files: the log offset of a file source only counts the entries of
its own log, so what is compared is the files that were read. And where a source first stood counts as well, where it
has noted that: of two sources that have come equally far, one may have begun in the middle.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from tidegate.errors import DamagedCheckpoint, UnknownState
from tidegate.spark.filelog import (
    PlannedBatch,
    SourceLogEntry,
    is_of_files,
    log_offset,
    log_place,
    offsets_in,
    source_entries,
)
from tidegate.storage.file_lists import SnapshotFile
from tidegate.storage.files import Files, checksum
from tidegate.storage.manifest import SourceStream

_KAFKA: Final = "kafka"

ReadFile = tuple[str, int]
"""A file that was read: its address, and its time then."""


class StreamPosition(msgspec.Struct, frozen=True):
    """Where a source stands in one of its streams.

    `log`: the number of its source log. `offset`: as Spark wrote it; None: nothing was read. `files`: those that were
    read, with the offset at which each was; None: it is no source of files. `first`: what was noted of where it began.
    """

    stream: SourceStream
    log: int
    offset: str | None = None
    files: dict[ReadFile, int] | None = None
    first: bytes | None = None

    @property
    def told(self) -> str:
        """For people."""
        if self.offset is None:
            return "nothing read yet"
        return self.offset if self.files is None else f"{len(self.files):,} files read"


Position = tuple[StreamPosition, ...]
"""Where a source stands, stream by stream."""


def told(position: Position) -> str:
    """For people."""
    return ", ".join(each.told for each in position)


# -- reading it -----------------------------------------------------------------------------------


def position_at(
    root: Files,
    stage: str,
    files: Collection[SnapshotFile],
    cut: int | None,
    streams: Sequence[SourceStream],
    logs: Sequence[int] | None = None,
) -> Position:
    """Of a source's snapshot. What is read of it is checked. `logs`: the numbers of its source logs, if they are known
    from its plan; else they are told from what there is."""
    by_name = {file.name: file for file in files}
    entries: dict[int, dict[str, SnapshotFile]] = {}
    for name, file in by_name.items():
        if (place := log_place(name)) is not None:
            entries.setdefault(place[0], {})[name] = file
    if cut is None:
        offsets: tuple[str | None, ...] = (None,) * len(streams)
    else:
        offsets = offsets_in(root, _checked(root, stage, by_name, f"offsets/{cut}")).sources
    if len(offsets) != len(streams):
        raise DamagedCheckpoint(
            f"source {stage!r} reads {len(streams)} streams, but its batch {cut} names {len(offsets)} positions"
        )
    if logs is None:
        logs = _logs_of(streams, offsets, entries)
    return tuple(
        _stream_position(root, stage, stream, log, offset, entries.get(log, {}))
        for stream, log, offset in zip(streams, logs, offsets, strict=True)
    )


def first_at(root: Files, names: Iterable[str], streams: Sequence[SourceStream], logs: Sequence[int]) -> Position:
    """Of a source that no checkpoint knows a position of: where it first stood, by the entries that have it, by names
    in the root. `logs`: the numbers of its source logs."""
    noted = {int(name.split("/")[-2]): root.read(name) for name in names}
    return tuple(StreamPosition(stream, log, first=noted.get(log)) for stream, log in zip(streams, logs, strict=True))


def _logs_of(
    streams: Sequence[SourceStream], offsets: Sequence[str | None], entries: Mapping[int, Any]
) -> tuple[int, ...]:
    """The number of each stream's log. A DataFrame that is read twice (a union with itself) has one log for both."""
    apart = tuple(range(len(streams)))
    shared = tuple(sorted(set(map(streams.index, streams))).index(streams.index(each)) for each in streams)
    for logs in (apart, shared):
        read = {log for log, offset in zip(logs, offsets, strict=True) if offset is not None}
        if apart == shared or read <= entries.keys():
            return logs
    raise UnknownState(f"{len(streams)} streams are read by {len(entries)} logs: which is whose is not known")


def _stream_position(
    root: Files, stage: str, stream: SourceStream, log: int, offset: str | None, entries: Mapping[str, SnapshotFile]
) -> StreamPosition:
    read_to = None if offset is None else _log_offset(offset)
    if read_to is not None:
        return StreamPosition(stream, log, offset, _files_read(root, stage, log, read_to, entries))
    name = f"sources/{log}/0"
    noted = _checked(root, stage, entries, name) if name in entries else None
    if noted is None or is_of_files(root, noted):  # of a batch that was begun
        return StreamPosition(stream, log, offset)
    return StreamPosition(stream, log, offset, first=root.read(noted))


def _log_offset(offset: str) -> int | None:
    """None: it is not of a file source."""
    try:
        return log_offset(offset)
    except msgspec.MsgspecError:
        return None


def _files_read(
    root: Files, stage: str, log: int, read_to: int, entries: Mapping[str, SnapshotFile]
) -> dict[ReadFile, int]:
    """All that was read up to an offset. An entry that holds all before it makes those before it needless."""
    places = {name: place for name in entries if (place := log_place(name)) is not None}
    whole = [number for _, number, is_compact in places.values() if is_compact]
    first = max(whole, default=0)
    missing = set(range(first, read_to + 1)) - {number for _, number, _ in places.values()}
    if missing:
        raise DamagedCheckpoint(f"entry {min(missing)} of what source {stage!r} has read (its log {log}) is gone")
    found: dict[ReadFile, int] = {}
    for name, (_, number, _) in places.items():
        if number >= first:
            for file in source_entries(root, _checked(root, stage, entries, name)) or ():
                if file.batch_id <= read_to:
                    found[file.path, file.timestamp] = file.batch_id
    return found


def _checked(root: Files, stage: str, files: Mapping[str, SnapshotFile], name: str) -> str:
    """Where a file of a snapshot is kept, if it is what it was."""
    file = files.get(name)
    if file is None:
        raise DamagedCheckpoint(f"{name} is not in the snapshot of source {stage!r}")
    if checksum(root, file.stored) != (file.size_bytes, file.sha256):
        raise DamagedCheckpoint(f"{file.stored} of source {stage!r} is gone, or not what it was")
    return file.stored


# -- comparing --------------------------------------------------------------------------------------


class Order(enum.Enum):
    """How one position is to another."""

    SAME = "at the same position as"
    BEHIND = "behind"
    AHEAD = "ahead of"
    APART = "neither behind nor ahead of"
    UNKNOWN = "not to be compared with"


def compared(one: Position, other: Position) -> Order:
    """Both are of the same streams."""
    found = {_of_stream(mine, its) for mine, its in zip(one, other, strict=True)} - {Order.SAME}
    if not found:
        return Order.SAME
    if len(found) == 1:
        return found.pop()
    return Order.UNKNOWN if Order.UNKNOWN in found else Order.APART


def _of_stream(one: StreamPosition, other: StreamPosition) -> Order:
    if one.offset is None and other.offset is None:
        return Order.SAME  # whether or not it is known where they will begin
    if one.files is not None or other.files is not None:
        return _of_sets(set(one.files or ()), set(other.files or ()))
    if _first(one) != _first(other) and not (_has_not_begun(one) or _has_not_begun(other)):
        return Order.APART
    if one.offset is None or other.offset is None:
        return Order.BEHIND if one.offset is None else Order.AHEAD
    return _of_offsets(one.stream.format, _value(one.offset), _value(other.offset))


def _has_not_begun(position: StreamPosition) -> bool:
    return position.offset is None and position.first is None


def _first(position: StreamPosition) -> Any:
    """Where it began, whatever is written before that in the entry."""
    lines = (position.first or b"").splitlines()
    return _value(lines[-1].decode(errors="replace")) if lines else None


def _value(offset: str) -> Any:
    """An offset, whatever the order of its fields."""
    try:
        return msgspec.json.decode(offset)
    except msgspec.MsgspecError:
        return offset


def _of_sets(one: set[ReadFile], other: set[ReadFile]) -> Order:
    if one == other:
        return Order.SAME
    if one < other:
        return Order.BEHIND
    return Order.AHEAD if other < one else Order.APART


def _of_offsets(form: str, one: Any, other: Any) -> Order:
    if one == other:
        return Order.SAME
    if form == _KAFKA and _are_partitions(one) and _are_partitions(other):
        return _by(_is_within, one, other)
    if isinstance(one, int) and isinstance(other, int):
        return _by(lambda mine, its: mine <= its, one, other)
    return Order.UNKNOWN


def _by(is_within: Callable[[Any, Any], bool], one: Any, other: Any) -> Order:
    if is_within(one, other):
        return Order.BEHIND
    return Order.AHEAD if is_within(other, one) else Order.APART


def _are_partitions(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, dict) and all(isinstance(number, int) for number in each.values()) for each in value.values()
    )


def _is_within(one: Mapping[str, Mapping[str, int]], other: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether in no partition it is further. One that only the other knows came later."""
    return all(
        number <= other.get(topic, {}).get(partition, -1)
        for topic, numbers in one.items()
        for partition, number in numbers.items()
    )


# -- from one to the other ------------------------------------------------------------------------


def batch_between(own: Position, target: Position, logs: Sequence[int]) -> PlannedBatch:
    """The batch by which a source that is behind reads exactly up to where another stands. `logs`: the numbers of its
    own source logs, in the order of its streams."""
    sources: list[str | None] = []
    entries: dict[int, tuple[SourceLogEntry, ...]] = {}
    firsts: dict[int, bytes] = {}
    for mine, its, log in zip(own, target, logs, strict=True):
        offset = its.offset
        if its.files is not None:
            offset = mine.offset
            unread = {file: number for file, number in its.files.items() if file not in (mine.files or {})}
            if unread:
                number = 0 if mine.offset is None else log_offset(mine.offset) + 1
                in_order = sorted(unread, key=lambda file: (unread[file], file[1], file[0]))
                entries[log] = tuple(SourceLogEntry(path, timestamp, number) for path, timestamp in in_order)
                offset = f'{{"logOffset":{number}}}'
        elif mine.first is None and its.first is not None:
            firsts[log] = its.first
        sources.append(offset)
    return PlannedBatch(tuple(sources), entries, firsts)


def entries_beyond(position: Position, names: Collection[str]) -> set[str]:
    """Entries of the logs of files that are of no batch yet: files that a batch would have read which was begun when
    the snapshot was taken."""
    read_to = {
        each.log: -1 if each.offset is None else log_offset(each.offset)
        for each in position
        if each.files is not None or _has_not_begun(each)
    }
    places = {name: place for name in names if (place := log_place(name)) is not None}
    return {name for name, (log, number, _) in places.items() if log in read_to and number > read_to[log]}
