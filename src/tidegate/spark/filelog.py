"""Spark's own log files: the only module that knows their format.

Every log is a folder of files named by a number, each written whole by rename: a first line `v1`, then one JSON
object per line. A name that ends in `.compact` replaces all before it. Seen with Spark 4.1 to 4.3; the tests read logs
that Spark wrote, and make Spark read logs that we wrote.

- *sink log*: `<folder>/_spark_metadata/<batch>`, the files that a batch of Spark's file sink wrote.
- *source log*: `<checkpoint>/sources/<index>/<offset>`, the files that Spark's file source took up.
- *batch log*: `<checkpoint>/offsets/<batch>` where a batch reads to, `<checkpoint>/commits/<batch>` once it is done
  (`v2` where the query has state).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from tidegate.errors import DamagedCheckpoint
from tidegate.protocol.messages import END_OF_TIME_MS
from tidegate.storage.files import Files

METADATA: Final = "_spark_metadata"
_VERSION: Final = "v1"
_COMMIT_VERSIONS: Final = ("v1", "v2")  # the second one names the files of the state

# Neither of a stage's own logs is ever compacted by Spark: rewriting every entry since the beginning is the slow
# death of long-running file streams. Tidegate trims them instead.
# The largest interval that Spark takes: a million, at ten batches a second, would be over within a day.
NEVER_COMPACT: Final = 2**31 - 1

# A query without state takes up nothing else from its log, and for this one Spark has another default where the log has
# none: a filter that nothing passes would take its source away.
_SETTINGS: Final = {"spark.sql.optimizer.pruneFiltersCanPruneStreamingSubplan": "false"}
# Where the source logs of a restored stage start again.
_RESTARTED: Final = '{"logOffset":0}'
# Of a source that has read nothing yet.
_NO_OFFSET: Final = "-"
_COMPACT: Final = ".compact"
COMPACT_INTERVAL: Final = "spark.sql.streaming.fileSource.log.compactInterval"
"""A setting: each so many entries, one of a user's own file source holds all before it."""


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
    """Where a batch reads to. `sources` holds each source's end offset as Spark wrote it; None: none yet. `planned_ms`:
    when Spark has planned it, by its clock, in ms since 1970."""

    watermark_ms: int | None
    sources: tuple[str | None, ...]
    planned_ms: int = 0


class StageSource(msgspec.Struct, frozen=True):
    """A source of a stage's query: the input that it reads, and the number of its source log.

    A batch's offsets name every source in the order of the plan; those that are equal share a log.
    """

    input: str
    log: int


class _OffsetMetadata(msgspec.Struct, rename="camel"):
    batch_watermark_ms: int = 0
    batch_timestamp_ms: int = 0
    conf: dict[str, str] = {}


class _CommitMetadata(msgspec.Struct, rename="camel"):
    next_batch_watermark_ms: int = 0


class _LogOffset(msgspec.Struct, rename="camel"):
    log_offset: int


_sink_decoder: Final = msgspec.json.Decoder(SinkLogEntry)
_source_decoder: Final = msgspec.json.Decoder(SourceLogEntry)
_metadata_decoder: Final = msgspec.json.Decoder(_OffsetMetadata)
_commit_decoder: Final = msgspec.json.Decoder(_CommitMetadata)
_any_decoder: Final = msgspec.json.Decoder(dict[str, Any])

T = TypeVar("T")


def write_log(files: Files, name: str, lines: Iterable[str]) -> None:
    files.write(name, "\n".join([_VERSION, *lines]).encode())


def _read_lines(files: Files, name: str, versions: Sequence[str] = (_VERSION,)) -> list[str] | None:
    data = files.read(name)
    if data is None:
        return None
    try:
        version, *lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise DamagedCheckpoint(f"{files.location(name)} is no log of Spark's: {error}") from error
    if version not in versions:
        raise DamagedCheckpoint(f"{files.location(name)} starts with {version[:20]!r}, not {versions[0]!r}")
    return [line for line in lines if line]


def _decoded(decoder: msgspec.json.Decoder[T], line: str, files: Files, name: str) -> T:
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise DamagedCheckpoint(f"{files.location(name)} cannot be read: {error}") from error


def read_sink_log(output: Files, batch: int) -> list[SinkLogEntry] | None:
    """The files that a batch wrote to a folder; None if Spark has not logged the batch."""
    name = f"{METADATA}/{batch}"
    lines = _read_lines(output, name)
    return None if lines is None else [_decoded(_sink_decoder, line, output, name) for line in lines]


def seed_sink_log(output: Files, batch: int) -> None:
    """Make a fresh folder accept `batch` + 1 as its next."""
    write_log(output, f"{METADATA}/{batch}", [])


def trim_log(files: Files, log: str, below: int) -> None:
    """Delete the numbered files below a number. Hidden checksums of theirs go too."""
    numbers = {
        name: name.removeprefix(".").removesuffix(".crc").removesuffix(".compact") for name in files.names_in(log)
    }
    files.delete(f"{log}/{name}" for name, number in numbers.items() if number.isdigit() and int(number) < below)


def checked_by(name: str) -> str:
    """The file that a file of Spark's checksums is of; any other is its own. Who reads a file looks whether there is
    one of these, and then opens it: it has to stay as long as the file does."""
    folder, slash, last = name.rpartition("/")
    is_checksum = last.startswith(".") and last.endswith(".crc")
    return f"{folder}{slash}{last[1:].removesuffix('.crc')}" if is_checksum else name


def remove_files(files: Files, names: Iterable[str]) -> None:
    """Delete files that Spark wrote, each with the checksum that Hadoop keeps beside it."""
    apart = (name.rpartition("/") for name in names)
    files.delete(
        [each for folder, slash, last in apart for each in (f"{folder}{slash}{last}", f"{folder}{slash}.{last}.crc")]
    )


def is_committed(checkpoint: Files, batch: int) -> bool:
    """Whether Spark has committed a batch. This file existing is the authority."""
    return checkpoint.exists(f"commits/{batch}")


def is_begun(checkpoint: Files, batch: int) -> bool:
    """Whether Spark has begun a batch, or has ended it not long ago."""
    return checkpoint.exists(f"offsets/{batch}")


def is_overrun(checkpoint: Files, batch: int) -> bool:
    """Whether Spark has committed a batch so long ago that it has deleted the entry: it keeps those of the last 100.

    It deletes where the batch reads to first.
    """
    is_behind = any(name.isdigit() and int(name) > batch for name in checkpoint.names_in("commits"))
    return is_behind and not (is_committed(checkpoint, batch) and is_begun(checkpoint, batch))


def read_offsets(checkpoint: Files, batch: int) -> BatchOffsets:
    """Where a committed batch read to."""
    return offsets_in(checkpoint, f"offsets/{batch}")


def offsets_in(files: Files, entry: str) -> BatchOffsets:
    """The same, by the name of its entry, wherever that is kept."""
    lines = _read_lines(files, entry)
    if not lines:
        raise DamagedCheckpoint(f"{files.location(entry)} is missing or empty, though the batch was committed")
    metadata = _decoded(_metadata_decoder, lines[0], files, entry)
    sources = tuple(None if line == _NO_OFFSET else line for line in lines[1:])
    return BatchOffsets(metadata.batch_watermark_ms or None, sources, metadata.batch_timestamp_ms)


def kept_settings(files: Files, entry: str) -> dict[str, str]:
    """The settings that Spark goes on with after a batch, whatever the session has: in where that batch reads to."""
    lines = _read_lines(files, entry)
    return _decoded(_metadata_decoder, lines[0], files, entry).conf if lines else {}


def has_moved_watermark(checkpoint: Files, batch: int) -> bool:
    """Whether a committed batch has moved the watermark, so that state waits to be written out by the next one.

    Spark then runs a batch without data, but not as the first one of a query that was started again.
    """
    reached_ms = watermark_behind(checkpoint, batch)
    return reached_ms is not None and reached_ms > (read_offsets(checkpoint, batch).watermark_ms or 0)


def watermark_behind(checkpoint: Files, batch: int) -> int | None:
    """The watermark that a committed batch has reached with its rows, which the next one starts with; None: none yet,
    or its entry is gone. Where a batch reads to says only the one that it started with."""
    name = f"commits/{batch}"
    lines = _read_lines(checkpoint, name, _COMMIT_VERSIONS)
    return (_decoded(_commit_decoder, lines[0], checkpoint, name).next_batch_watermark_ms or None) if lines else None


def move_watermark_to_the_end(checkpoint: Files, batch: int) -> None:
    """Let the next batch close whatever a watermark closes: as if `batch`, the last one, had seen the end of time.

    What that batch names of its state stays as it is.
    """
    name = f"commits/{batch}"
    data = checkpoint.read(name)
    if data is None:
        raise DamagedCheckpoint(f"{checkpoint.location(name)} is missing, though the batch was committed")
    version, _, line = data.decode().partition("\n")
    committed = _decoded(_any_decoder, line, checkpoint, name)
    committed["nextBatchWatermarkMs"] = END_OF_TIME_MS
    checkpoint.write(name, f"{version}\n{msgspec.json.encode(committed).decode()}".encode())


def log_offset(source: str) -> int:
    """The number in a file source's offset."""
    return msgspec.json.decode(source, type=_LogOffset).log_offset


def restart_source_logs(checkpoint: Files, batch: int, sources: Sequence[StageSource]) -> None:
    """Make the sources of a restored stage start anew: they have seen nothing, and their next offset follows.

    A source log without a compact file must reach back to its first entry when a query starts, which would keep
    every entry for ever. So the offsets of the last two batches are moved to the first entry, which is empty: what
    was consumed is not in the new gates. Both get the same offset, so Spark looks up no files between them. What a
    snapshot keeps of them stays as it is: to write a file anew leaves its other names alone.
    """
    for number in (batch - 1, batch):
        name = f"offsets/{number}"
        lines = _read_lines(checkpoint, name)
        if lines is not None:
            write_log(checkpoint, name, [lines[0], *(_RESTARTED for _ in sources)])
    for number in {source.log for source in sources}:
        write_log(checkpoint, f"sources/{number}/0", [])


def begin_after(checkpoint: Files, batch: int) -> None:
    """A fresh checkpoint folder for a query without state whose first batch is the one after `batch`.

    Its sources have yet to be restarted.
    """
    _write_query_id(checkpoint)
    offsets = msgspec.json.encode(_OffsetMetadata(conf=_SETTINGS)).decode()
    for number in {max(0, batch - 1), batch}:  # Spark asks for the last two
        write_log(checkpoint, f"offsets/{number}", [offsets])
    write_log(checkpoint, f"commits/{batch}", [msgspec.json.encode(_CommitMetadata()).decode()])


def _write_query_id(checkpoint: Files) -> None:
    """Without one Spark does not start a query on logs that are there."""
    query_id = uuid.uuid5(uuid.NAMESPACE_URL, checkpoint.location())
    checkpoint.write("metadata", msgspec.json.encode({"id": str(query_id)}))


def is_of_files(files: Files, entry: str) -> bool:
    """Whether an entry of a source log is of a file source, and not where another kind of source stood."""
    try:
        for line in _read_lines(files, entry) or ():
            _decoded(_source_decoder, line, files, entry)
    except DamagedCheckpoint:
        return False
    return True


def read_source_log(checkpoint: Files, index: int, offset: int) -> list[SourceLogEntry] | None:
    """The files that a file source took up at one offset."""
    return source_entries(checkpoint, f"sources/{index}/{offset}")


def source_entries(files: Files, entry: str) -> list[SourceLogEntry] | None:
    """The files that an entry of a file source's log names, wherever that is kept; None if it is gone."""
    lines = _read_lines(files, entry)
    return None if lines is None else [_decoded(_source_decoder, line, files, entry) for line in lines]


# -- a batch that is planned for a query ----------------------------------------------------------
#
# Spark writes where a batch reads to before it runs it. A query that finds such an entry when it is started, and no
# commit of it, runs exactly that batch first; with a trigger of one batch it ends behind it.


class PlannedBatch(msgspec.Struct, frozen=True):
    """The next batch of a source: where it reads to in each of its streams, None: nowhere yet.

    `entries`: the files that it takes up, by the number of the source log. `firsts`: where sources of other kinds
    begin, by the same, where this one has not noted that yet.
    """

    sources: tuple[str | None, ...]
    entries: dict[int, tuple[SourceLogEntry, ...]] = {}
    firsts: dict[int, bytes] = {}


def log_place(name: str) -> tuple[int, int, bool] | None:
    """Of an entry of a source log, by its name in Spark's folder: the log, its number, and whether it holds all before
    it. None: it is none."""
    folder, _, last = name.rpartition("/")
    number = last.removesuffix(_COMPACT)
    above, _, log = folder.partition("/")
    if above != "sources" or not log.isdigit() or not number.isdigit():
        return None
    return int(log), int(number), last != number


def plan_batch(checkpoint: Files, cut: int | None, planned: PlannedBatch, first: str, interval: int) -> None:
    """Make a query that stands behind a batch, or before its first, run this one next.

    `first`: what Spark notes beside where a first batch reads to. `interval`: how often it compacts the logs of files.
    """
    for log, data in planned.firsts.items():
        checkpoint.write(f"sources/{log}/0", data)
    for log, entries in planned.entries.items():
        _add_entry(checkpoint, log, entries, interval)
    if cut is None:
        _write_query_id(checkpoint)
    metadata = first if cut is None else _metadata_after(checkpoint, cut)
    number = 0 if cut is None else cut + 1
    write_log(checkpoint, f"offsets/{number}", [metadata, *(each or _NO_OFFSET for each in planned.sources)])


def plan_no_data(checkpoint: Files, batch: int) -> None:
    """Make a query that stands behind a batch run one that reads nothing next: what its watermark has closed comes out
    of it."""
    plan_batch(checkpoint, batch, PlannedBatch(read_offsets(checkpoint, batch).sources), "", 1)


def _metadata_after(checkpoint: Files, batch: int) -> str:
    """What Spark would note for the batch behind this one: the same settings, and the watermark as it has become."""
    lines = _read_lines(checkpoint, f"offsets/{batch}") or ["{}"]
    noted = _decoded(_any_decoder, lines[0], checkpoint, f"offsets/{batch}")
    name = f"commits/{batch}"
    committed = _read_lines(checkpoint, name, _COMMIT_VERSIONS)
    moved = _decoded(_commit_decoder, committed[0], checkpoint, name).next_batch_watermark_ms if committed else 0
    noted["batchWatermarkMs"] = max(int(noted.get("batchWatermarkMs", 0)), moved)
    noted["batchTimestampMs"] = time.time_ns() // 1_000_000
    return msgspec.json.encode(noted).decode()


def _add_entry(checkpoint: Files, log: int, entries: Sequence[SourceLogEntry], interval: int) -> None:
    """Add to the log of a file source. An entry that Spark would compact holds all before it as well."""
    number = entries[0].batch_id
    places = [place for name in checkpoint.list(f"sources/{log}") if (place := log_place(name)) is not None]
    compact = sorted(each for _, each, is_compact in places if is_compact)
    name = f"sources/{log}/{number}"
    if (number + 1) % _compacted_every(interval, compact) == 0:
        since = compact[-1] if compact else 0
        before = [f"sources/{log}/{each}{_COMPACT if each in compact else ''}" for each in range(since, number)]
        entries = [*(file for each in before for file in _existing_entries(checkpoint, each)), *entries]
        name += _COMPACT
    write_log(checkpoint, name, (msgspec.json.encode(each).decode() for each in entries))


def _existing_entries(checkpoint: Files, entry: str) -> list[SourceLogEntry]:
    found = source_entries(checkpoint, entry)
    if found is None:
        raise DamagedCheckpoint(f"{checkpoint.location(entry)} is missing, though entries after it are there")
    return found


def _compacted_every(default: int, compact: Sequence[int]) -> int:
    """How often Spark compacts a log in which these entries are: it goes on as it did, whatever the setting is now."""
    if not compact:
        return default
    if len(compact) > 1:
        return compact[-1] - compact[-2]
    whole = compact[0] + 1
    if whole <= default or default >= whole // 2:
        return whole
    return next((each for each in range(default, whole // 2 + 1) if whole % each == 0), whole)
