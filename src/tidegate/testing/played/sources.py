"""What a played query reads: gates, as Spark's file source reads them, and streams of the world outside.

As Spark's file source does: files are taken up in order of their time, noted in `sources/<log>/<offset>` before a batch
reads them, and never again while they are remembered. A gate's own source log is never compacted, a user's is, every
ten entries. Or, of a stream, as its source of Kafka does: where the stream first stood is noted, and then a batch's
offsets say all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from tidegate.spark.filelog import METADATA, NEVER_COMPACT, SinkLogEntry, SourceLogEntry
from tidegate.spark.gate import COMPACT_EVERY, WINDOW
from tidegate.storage.files import Files
from tidegate.testing.played.rows import NoRows, PlayedRows, decode_rows
from tidegate.testing.played.state import PlayedFailure

# As `spark/queries.py` has it for gates; Spark's own for a user's files is a week.
_GATE_MAX_AGE: Final = 8 * WINDOW * COMPACT_EVERY
_MAX_AGE: Final = 7 * 24 * 3_600_000
_USERS_COMPACTION: Final = 10

_TOPIC: Final = "played"


class _LogOffset(msgspec.Struct, frozen=True, rename="camel"):
    log_offset: int


_offset_decoder: Final = msgspec.json.Decoder(_LogOffset)
_sink_decoder: Final = msgspec.json.Decoder(SinkLogEntry)
_source_decoder: Final = msgspec.json.Decoder(SourceLogEntry)


class FoundFile(NamedTuple):
    uri: str
    time: int
    """By which they are read in order: of a gate, the sequence number of the segment."""


Write = Callable[[Files, str, bytes], None]
"""How Spark's process writes a file of a folder."""


class PlayedSource(Protocol):
    """One source of a query's plan. Several of a plan may be one object, as Spark makes of equal ones."""

    @property
    def log(self) -> int:
        """The number of its log."""
        ...

    def opened(self, log: Files, write: Write) -> OpenedSource:
        """At the start of a query. `log`: of the folder of its log."""
        ...


class OpenedSource(Protocol):
    """What a query asks of a source, by numbers: -1 is before the first."""

    @property
    def offset(self) -> int:
        """Up to where something was taken up."""
        ...

    def resume(self, offset: int) -> None:
        """The last batch that was begun reads to there."""
        ...

    def take_up(self) -> bool:
        """Take up what is new, if anything is, as the next offset. Tells whether it did."""
        ...

    def freeze(self) -> None:
        """Nothing that comes later counts: the query is to end with what is available now."""
        ...

    def rows_between(self, start: int, end: int) -> list[PlayedRows]:
        """What was taken up after one offset up to another, read now. What is gone is left out without a word."""
        ...

    def forget(self, through: int) -> None:
        """Those up to this offset are committed."""
        ...

    def encode(self, offset: int) -> bytes:
        """As a batch's entry in the offset log has it."""
        ...

    def decode(self, text: bytes) -> int: ...


class _FileSource(Protocol):
    """A source of files, which notes each in its log."""

    @property
    def max_age(self) -> int: ...

    @property
    def max_files(self) -> int | None:
        """Of one batch."""
        ...

    @property
    def compact_every(self) -> int: ...

    def found(self) -> Sequence[FoundFile]:
        """All that is there now: the same object as the last time, if nothing has changed since."""
        ...

    def read(self, uri: str) -> PlayedRows | None:
        """None: the file is gone."""
        ...


class GateSource:
    """A gate, whose log names the files."""

    compact_every: Final = NEVER_COMPACT
    max_age: Final = _GATE_MAX_AGE

    def __init__(self, gate: Files, root: Files, log: int = 0, max_files: int | None = None) -> None:
        """`gate`: of the gate's folder. `root`: where the files lie that it names."""
        self.log = log
        self.max_files = max_files
        self._gate = gate
        self._root = root
        self._entries: dict[str, list[FoundFile]] = {}
        self._names: list[str] = []
        self._found: list[FoundFile] = []

    def opened(self, log: Files, write: Write) -> OpenedSource:
        return SourceLog(self, log, write)

    def found(self) -> list[FoundFile]:
        names = self._gate.names_in(METADATA)
        if names == self._names:
            return self._found
        latest = max((number for name in names if (number := _number(name)) is not None), default=-1)
        compacted = (latest + 1) // COMPACT_EVERY * COMPACT_EVERY - 1
        if compacted < 0:
            raise PlayedFailure(f"{self._gate.location(METADATA)} is no log of a gate")
        read: dict[str, list[FoundFile]] = {}
        for number in range(compacted, latest + 1):
            name = f"{number}.compact" if number == compacted else str(number)
            read[name] = self._entries.get(name) or self._read_entry(name)
        self._entries, self._names = read, names
        self._found = [file for entry in read.values() for file in entry]
        return self._found

    def _read_entry(self, name: str) -> list[FoundFile]:
        data = self._gate.read(f"{METADATA}/{name}")
        if data is None:
            raise PlayedFailure(f"{self._gate.location(f'{METADATA}/{name}')} doesn't exist")
        entries = map(_sink_decoder.decode, data.splitlines()[1:])
        return [FoundFile(entry.path, entry.modification_time) for entry in entries]

    def read(self, uri: str) -> PlayedRows | None:
        name = self._root.name_of(uri)
        data = None if name is None else self._root.read(name)
        try:
            return None if data is None else decode_rows(data)
        except NoRows as error:
            raise PlayedFailure(f"{uri}: {error}") from error


class PlayedStream:
    """Rows of the world outside, file after file, which stay: a source goes back to where a checkpoint stood."""

    def __init__(self, uri: str = "file:///in/") -> None:
        """`uri`: of the folder."""
        self._uri = uri
        self.files: dict[str, PlayedRows] = {}

    def append(self, rows: PlayedRows) -> str:
        """One more file. Returns its URI."""
        uri = f"{self._uri}{len(self.files) + 1:06d}.parquet"
        self.files[uri] = rows
        return uri


class StreamSource:
    """A stream, read as Spark reads a folder of files."""

    compact_every: Final = _USERS_COMPACTION
    max_age: Final = _MAX_AGE

    def __init__(self, stream: PlayedStream, log: int = 0, max_files: int | None = None, since: int = 0) -> None:
        """`since`: the time of the first file; each is a second later than the one before."""
        self.log = log
        self.max_files = max_files
        self._stream = stream
        self._since = since
        self._found: list[FoundFile] = []

    def opened(self, log: Files, write: Write) -> OpenedSource:
        return SourceLog(self, log, write)

    def found(self) -> list[FoundFile]:
        if len(self._found) < len(self._stream.files):
            self._found = [FoundFile(uri, self._since + 1000 * at) for at, uri in enumerate(self._stream.files)]
        return self._found

    def read(self, uri: str) -> PlayedRows | None:
        return self._stream.files.get(uri)


class TopicSource:
    """A stream, read as Spark reads a topic of Kafka's."""

    def __init__(self, stream: PlayedStream, log: int = 0, max_records: int | None = None) -> None:
        """`max_records`: how many of what the stream was given at a time one batch reads at most."""
        self.log = log
        self.stream = stream
        self.max_records = max_records

    def opened(self, log: Files, write: Write) -> OpenedSource:
        return _Topic(self, log, write)


class _Topic:
    def __init__(self, source: TopicSource, log: Files, write: Write) -> None:
        self._source = source
        self._log = log
        self._write = write
        self._end: int | None = None
        self.offset = -1

    def resume(self, offset: int) -> None:
        self.offset = offset

    def take_up(self) -> bool:
        available = len(self._source.stream.files) if self._end is None else self._end
        taken = min(available - max(0, self.offset), self._source.max_records or available)
        if taken <= 0:
            return False
        if not self._log.exists("0"):
            self._write(self._log, "0", b"\x00v1\n" + self.encode(0))
        self.offset = max(0, self.offset) + taken
        return True

    def freeze(self) -> None:
        self._end = len(self._source.stream.files)

    def rows_between(self, start: int, end: int) -> list[PlayedRows]:
        return list(self._source.stream.files.values())[max(0, start) : end]

    def forget(self, through: int) -> None:
        """It remembers nothing."""

    def encode(self, offset: int) -> bytes:
        return msgspec.json.encode({_TOPIC: {"0": offset}})

    def decode(self, text: bytes) -> int:
        return msgspec.json.decode(text, type=dict[str, dict[str, int]])[_TOPIC]["0"]


def _number(name: str) -> int | None:
    number = name.removesuffix(".compact")
    return int(number) if number.isdigit() else None


class SourceLog:
    """What one source has taken up, in `sources/<log>`, and what it has found and not taken up yet."""

    def __init__(self, source: _FileSource, log: Files, write: Write) -> None:
        self._source = source
        self._log = log
        self._write = write
        self._seen: dict[str, int] = {}
        self._newest_time = 0
        self._waiting: list[FoundFile] = []
        self._found: Sequence[FoundFile] | None = None
        self._taken: dict[int, list[SourceLogEntry]] = {}
        self._is_frozen = False
        self.offset = -1
        self._restore()

    def _restore(self) -> None:
        """As Spark does at the start: everything since the last compact entry, or else the first, must be there."""
        names = {number: name for name in self._log.names_in() if (number := _number(name)) is not None}
        if not names:
            return
        self.offset = max(names)
        first = max((number for number, name in names.items() if name.endswith(".compact")), default=0)
        for number in range(first, self.offset + 1):
            if number not in names:
                raise PlayedFailure(f"{self._log.location(str(number))} doesn't exist")
            entries = self._entries_of(names[number])
            for entry in entries:
                self._remember(entry.path, entry.timestamp)
                self._taken.setdefault(entry.batch_id, []).append(entry)
            self._taken.setdefault(number, [])
        self._purge()

    def _entries_of(self, name: str) -> list[SourceLogEntry]:
        data = self._log.read(name)
        if data is None:
            raise PlayedFailure(f"{self._log.location(name)} doesn't exist")
        try:
            return [_source_decoder.decode(line) for line in data.splitlines()[1:]]
        except msgspec.MsgspecError as error:
            raise PlayedFailure(f"{self._log.location(name)} cannot be read: {error}") from error

    def _remember(self, uri: str, time: int) -> None:
        self._seen[uri] = time
        self._newest_time = max(self._newest_time, time)

    def _purge(self) -> None:
        oldest = self._newest_time - self._source.max_age
        if next(iter(self._seen.values()), oldest) < oldest:
            self._seen = {uri: time for uri, time in self._seen.items() if time >= oldest}

    def resume(self, offset: int) -> None:
        """Its log says what it has taken up, of which that batch may know only a part."""

    def freeze(self) -> None:
        self._find()
        self._is_frozen = True

    def _find(self) -> None:
        if self._is_frozen:
            return
        found, self._found = self._found, self._source.found()
        if found is not self._found:
            oldest = self._newest_time - self._source.max_age
            fresh = [file for file in self._found if file.uri not in self._seen and file.time >= oldest]
            self._waiting = sorted(dict.fromkeys([*self._waiting, *fresh]), key=lambda file: file.time)

    def take_up(self) -> bool:
        self._find()
        count = self._source.max_files or len(self._waiting)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        if not taken:
            return False
        number = self.offset + 1
        entries = [SourceLogEntry(file.uri, file.time, number) for file in taken]
        self._taken[number] = entries
        is_compact = (number + 1) % self._source.compact_every == 0
        written = [each for batch in self._taken.values() for each in batch] if is_compact else entries
        lines = [b"v1", *map(msgspec.json.encode, written)]
        self._write(self._log, f"{number}.compact" if is_compact else str(number), b"\n".join(lines))
        self.offset = number
        for file in taken:
            self._remember(file.uri, file.time)
        self._purge()
        return True

    def rows_between(self, start: int, end: int) -> list[PlayedRows]:
        rows: list[PlayedRows] = []
        for number in range(start + 1, end + 1):
            if number not in self._taken:
                raise PlayedFailure(f"{self._log.location()} lacks {number}: the batch reads from {start + 1} to {end}")
            rows += [found for entry in self._taken[number] if (found := self._source.read(entry.path)) is not None]
        return rows

    def forget(self, through: int) -> None:
        """A process needs them no more, but for the next compact entry."""
        if self._source.compact_every == NEVER_COMPACT:
            for number in [number for number in self._taken if number <= through]:
                del self._taken[number]

    def encode(self, offset: int) -> bytes:
        return msgspec.json.encode(_LogOffset(offset))

    def decode(self, text: bytes) -> int:
        return _offset_decoder.decode(text).log_offset
