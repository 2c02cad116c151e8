"""Spark's own log files: the only module that knows their format.

Every log is a folder of files named by a number, each written whole by rename: a first line `v1`, then one JSON
object per line. A name that ends in `.compact` replaces all before it. Seen with Spark 4.3; the tests read logs
that Spark wrote, and make Spark read logs that we wrote.

- *sink log*: `<folder>/_spark_metadata/<batch>`, the files that a batch of Spark's file sink wrote.
- *source log*: `<checkpoint>/sources/<index>/<offset>`, the files that Spark's file source took up.
- *batch log*: `<checkpoint>/offsets/<batch>` where a batch reads to, `<checkpoint>/commits/<batch>` once it is done
  (`v2` where the query has state).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote, unquote

import msgspec

from tidegate.errors import DamagedCheckpoint
from tidegate.storage import local

METADATA: Final = "_spark_metadata"
_VERSION: Final = "v1"
_COMMIT_VERSIONS: Final = ("v1", "v2")  # the second one names the files of the state

# Neither of a stage's own logs is ever compacted by Spark: rewriting every entry since the beginning is the slow
# death of long-running file streams. Tidegate trims them instead.
# The largest interval that Spark takes: a million, at ten batches a second, would be over within a day.
NEVER_COMPACT: Final = 2**31 - 1

# Where the source logs of a restored stage start again.
_RESTARTED: Final = '{"logOffset":0}'


class SinkLogEntry(msgspec.Struct, frozen=True, rename="camel"):
    path: str
    size: int
    is_dir: bool
    modification_time: int
    block_replication: int
    block_size: int
    action: str


class SourceLogEntry(msgspec.Struct, frozen=True, rename="camel"):
    path: str
    timestamp: int
    batch_id: int


class BatchOffsets(msgspec.Struct, frozen=True):
    """Where a batch reads to. `sources` holds each source's end offset as Spark wrote it; None: none yet."""

    watermark_ms: int | None
    sources: tuple[str | None, ...]


class StageSource(msgspec.Struct, frozen=True):
    """A source of a stage's query: the input that it reads, and the number of its source log.

    A batch's offsets name every source in the order of the plan; those that are equal share a log.
    """

    input: str
    log: int


class _OffsetMetadata(msgspec.Struct, rename="camel"):
    batch_watermark_ms: int = 0
    conf: dict[str, str] = {}


class _CommitMetadata(msgspec.Struct, rename="camel"):
    next_batch_watermark_ms: int = 0


class _LogOffset(msgspec.Struct, rename="camel"):
    log_offset: int


_sink_decoder: Final = msgspec.json.Decoder(SinkLogEntry)
_source_decoder: Final = msgspec.json.Decoder(SourceLogEntry)
_metadata_decoder: Final = msgspec.json.Decoder(_OffsetMetadata)
_commit_decoder: Final = msgspec.json.Decoder(_CommitMetadata)

T = TypeVar("T")


def as_uri(path: Path) -> str:
    return "file://" + quote(str(path))


def as_path(uri: str) -> Path:
    """The local file that Spark's URI names."""
    return Path(unquote(uri.removeprefix("file:").replace("///", "/", 1)))


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Write a log file so that a reader sees all of it or nothing."""
    local.write_whole(path, "\n".join([_VERSION, *lines]).encode())


def _read_lines(path: Path, versions: Sequence[str] = (_VERSION,)) -> list[str] | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise DamagedCheckpoint(f"{path} is no log of Spark's: {error}") from error
    version, *lines = text.split("\n")
    if version not in versions:
        raise DamagedCheckpoint(f"{path} starts with {version[:20]!r}, not {versions[0]!r}")
    return [line for line in lines if line]


def _decoded(decoder: msgspec.json.Decoder[T], line: str, path: Path) -> T:
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error


def read_sink_log(folder: Path, batch: int) -> list[SinkLogEntry] | None:
    """The files that a batch wrote to a folder; None if Spark has not logged the batch."""
    path = folder / METADATA / str(batch)
    lines = _read_lines(path)
    return None if lines is None else [_decoded(_sink_decoder, line, path) for line in lines]


def seed_sink_log(folder: Path, batch: int) -> None:
    """Make a fresh folder accept `batch` + 1 as its next."""
    log = folder / METADATA
    log.mkdir(parents=True)
    write_whole(log / str(batch), [])


def trim_log(log: Path, below: int) -> None:
    """Delete the numbered files below a number. Hidden checksums of theirs go too."""
    if not log.is_dir():
        return
    for name in [path.name for path in log.iterdir()]:
        number = name.removeprefix(".").removesuffix(".crc").removesuffix(".compact")
        if number.isdigit() and int(number) < below:
            (log / name).unlink(missing_ok=True)


def remove_file(path: Path) -> None:
    """Delete a file that Spark wrote, with the checksum that Hadoop keeps beside it."""
    path.unlink(missing_ok=True)
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


def is_committed(checkpoint: Path, batch: int) -> bool:
    """Whether Spark has committed a batch. This file existing is the authority."""
    return (checkpoint / "commits" / str(batch)).exists()


def is_begun(checkpoint: Path, batch: int) -> bool:
    """Whether Spark has begun a batch, or has ended it not long ago."""
    return (checkpoint / "offsets" / str(batch)).exists()


def is_overrun(checkpoint: Path, batch: int) -> bool:
    """Whether Spark has committed a batch so long ago that it has deleted the entry: it keeps those of the last 100.

    It deletes where the batch reads to first.
    """
    try:
        names = [path.name for path in (checkpoint / "commits").iterdir()]
    except FileNotFoundError:
        return False
    is_behind = any(name.isdigit() and int(name) > batch for name in names)
    return is_behind and not (is_committed(checkpoint, batch) and is_begun(checkpoint, batch))


def read_offsets(checkpoint: Path, batch: int) -> BatchOffsets:
    """Where a committed batch read to."""
    path = checkpoint / "offsets" / str(batch)
    lines = _read_lines(path)
    if not lines:
        raise DamagedCheckpoint(f"{path} is missing or empty, though the batch was committed")
    metadata = _decoded(_metadata_decoder, lines[0], path)
    sources = tuple(None if line == "-" else line for line in lines[1:])
    return BatchOffsets(metadata.batch_watermark_ms or None, sources)


def kept_settings(entry: Path) -> dict[str, str]:
    """The settings that Spark goes on with after a batch, whatever the session has: in where that batch reads to."""
    lines = _read_lines(entry)
    return _decoded(_metadata_decoder, lines[0], entry).conf if lines else {}


def has_moved_watermark(checkpoint: Path, batch: int) -> bool:
    """Whether a committed batch has moved the watermark, so that state waits to be written out by the next one.

    Spark then runs a batch without data, but not as the first one of a query that was started again.
    """
    path = checkpoint / "commits" / str(batch)
    lines = _read_lines(path, _COMMIT_VERSIONS)
    if not lines:
        return False
    then = read_offsets(checkpoint, batch).watermark_ms or 0
    return _decoded(_commit_decoder, lines[0], path).next_batch_watermark_ms > then


def log_offset(source: str) -> int:
    """The number in a file source's offset."""
    return msgspec.json.decode(source, type=_LogOffset).log_offset


def restart_source_logs(checkpoint: Path, batch: int, sources: Sequence[StageSource]) -> None:
    """Make the sources of a restored stage start anew: they have seen nothing, and their next offset follows.

    A source log without a compact file must reach back to its first entry when a query starts, which would keep
    every entry for ever. So the offsets of the last two batches are moved to the first entry, which is empty: what
    was consumed is not in the new gates. Both get the same offset, so Spark looks up no files between them.
    """
    for number in (batch - 1, batch):
        path = checkpoint / "offsets" / str(number)
        lines = _read_lines(path)
        if lines is not None:
            path.unlink()  # it may be a link to a snapshot's file, which must stay as it is
            write_whole(path, [lines[0], *(_RESTARTED for _ in sources)])
    for number in {source.log for source in sources}:
        log = checkpoint / "sources" / str(number)
        log.mkdir(parents=True)
        write_whole(log / "0", [])


def is_of_files(entry: Path) -> bool:
    """Whether an entry of a source log is of a file source, and not where another kind of source stood."""
    try:
        for line in _read_lines(entry) or ():
            _decoded(_source_decoder, line, entry)
    except DamagedCheckpoint:
        return False
    return True


def read_source_log(checkpoint: Path, index: int, offset: int) -> list[SourceLogEntry] | None:
    """The files that a file source took up at one offset."""
    path = checkpoint / "sources" / str(index) / str(offset)
    lines = _read_lines(path)
    return None if lines is None else [_decoded(_source_decoder, line, path) for line in lines]
