"""Which checkpoint each table of a pipeline shows, and what each checkpoint has added to it.

Of Delta tables their log is read, a version once: it records the epoch and the batch that a version shows
(`sinks/delta/log.py`), and whatever others tell, that counts. Of other tables only the run can tell: when a checkpoint
is complete, every table shows it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from tidegate.dashboard.moments import moment
from tidegate.dashboard.values import AddedRows, MissingVersion, ShownTable, TableRow, Tables
from tidegate.engine.status import CheckpointStatus, as_moment
from tidegate.errors import TidegateError
from tidegate.sinks.contract import decode_committable
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.storage.system import say

MOST_ROWS: Final = 200
_MOST_VERSIONS: Final = 600
"""That are read of a table that nobody has looked at yet, and kept of any."""


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints of a root that are decided, as far as tables are concerned."""

    newest_first: Sequence[CheckpointStatus] = ()
    lineage: Sequence[CheckpointStatus] = ()
    """Those among them that the pipeline has come from, newest first."""
    left_behind: Sequence[CheckpointStatus] = ()
    """The others: it was set back behind them."""
    shown: CheckpointStatus | None = None
    """The newest that all tables show, as far as the run tells."""
    in_doubt: CheckpointStatus | None = None
    """A newer one, of which the run has not told that."""
    sealed: Mapping[str, Mapping[str, int]] = {}
    """By the names of those whose manifests were read: by the sinks, the last batch with rows that its table shows when
    it shows the checkpoint, -1 if there is none."""


def sealed_in(manifest: Manifest) -> dict[str, int]:
    """By its sinks, the last batch with rows that a checkpoint knows of, -1 if there is none."""
    return {
        name: -1 if stage.committable is None else decode_committable(stage.committable).last_with_rows
        for name, stage in manifest.stages.items()
        if name in manifest.shape and manifest.shape[name].table is not None
    }


class Version(msgspec.Struct, frozen=True):
    """What a version of a table tells: the epochs by the sinks that recorded one with it, and by which root."""

    number: int
    at_ms: int | None
    rows_added: int | None
    records: dict[str, dict[str, int]]


def read_version(number: int, data: bytes, pipeline: str) -> Version:
    """By what is in its file of the table's log, one action a line. `ValueError`: it is no such file."""
    at_ms: int | None = None
    rows, is_counted = 0, True
    records: dict[str, dict[str, int]] = {}
    prefix = f"tidegate/{pipeline}/"
    for line in data.splitlines():
        action = msgspec.json.decode(line, type=dict[str, Any]) if line.strip() else {}
        if isinstance(info := action.get("commitInfo"), dict):
            at_ms = at if isinstance(at := info.get("timestamp"), int) else None
        if isinstance(txn := action.get("txn"), dict) and str(txn.get("appId", "")).startswith(prefix):
            sink, _, kind = str(txn["appId"]).removeprefix(prefix).rpartition("/")
            if isinstance(value := txn.get("version"), int):
                records.setdefault(sink, {})[kind] = value
        if isinstance(add := action.get("add"), dict):
            count = _rows_in(add)
            is_counted = is_counted and count is not None
            rows += count or 0
    return Version(number, at_ms, rows if is_counted else None, records)


def _rows_in(add: dict[str, Any]) -> int | None:
    try:
        found = msgspec.json.decode(add.get("stats") or "{}", type=dict[str, Any]).get("numRecords")
    except (msgspec.MsgspecError, TypeError):
        return None
    return found if isinstance(found, int) else None


class ReadTable:
    """A Delta table of a sink, of which every version is read once."""

    def __init__(self, files: Files, pipeline: str, sink: str, root_number: int) -> None:
        self._files = files
        self._pipeline = pipeline
        self._sink = sink
        self._root_number = root_number
        self._versions: dict[int, Version] = {}
        self._next_batch: int | None = None
        """The first that it does not show yet, as its newest record of this root says."""
        self.newest: int | None = None

    def look(self) -> None:
        """Read what is new."""
        names = {int(name[:20]): name for name in self._files.names_in("_delta_log") if _is_version(name)}
        self.newest = max(names, default=None)
        wanted = sorted(names)[-_MOST_VERSIONS:]
        new = {number: f"_delta_log/{names[number]}" for number in wanted if number not in self._versions}
        found = self._files.read_all(new.values())
        for number, name in new.items():
            if name in found:
                try:
                    self._versions[number] = read_version(number, found[name], self._pipeline)
                except (ValueError, msgspec.MsgspecError):
                    self._versions[number] = Version(number, None, None, {})
        for number in sorted(self._versions)[:-_MOST_VERSIONS]:
            del self._versions[number]
        newest_first = (self._versions[number] for number in sorted(self._versions, reverse=True))
        records = (each.records.get(self._sink, {}) for each in newest_first)
        own = (each for each in records if each.get("root", self._root_number) == self._root_number)
        self._next_batch = next((each["batch"] for each in own if "batch" in each), None)

    def by_epoch(self) -> dict[int, Version]:
        """The first version that shows an epoch of this root: what comes later has not added its rows."""
        found: dict[int, Version] = {}
        for number in sorted(self._versions, reverse=True):
            version = self._versions[number]
            if (epoch := self._epoch(version)) is not None and "set_back" not in version.records[self._sink]:
                found[epoch] = version
        return found

    def last(self) -> tuple[int, Version] | None:
        """The epoch of this root that it shows, and since which version."""
        for number in sorted(self._versions, reverse=True):
            version = self._versions[number]
            if (epoch := self._epoch(version)) is not None:
                return epoch, version
        return None

    def has(self, batch: int) -> bool:
        """Whether it shows the rows of a batch, as its own record says. Where that is too old to be read, it does."""
        if self._next_batch is not None:
            return batch < self._next_batch
        return batch < 0 or not self.is_read_from_the_start

    @property
    def is_read_from_the_start(self) -> bool:
        return not self._versions or 0 in self._versions

    def showing(self, epoch: int, last_with_rows: int) -> int | None:
        """The last version that shows an epoch and none later, where that is plain: its only writer of this pipeline is
        the sink, it was never set back, and it has the batches that the checkpoint knows of. None: ask the table."""
        found: int | None = None
        next_batch: int | None = None
        has_epoch = False
        for number in sorted(self._versions):
            version = self._versions[number]
            records = version.records.get(self._sink, {})
            if len(version.records) > (1 if records else 0) or "set_back" in records:
                return None
            if records and self._epoch(version) is None and "epoch" in records:
                return None
            if records.get("epoch", 0) > epoch:
                break
            found, next_batch = number, records.get("batch", next_batch)
            has_epoch = has_epoch or "epoch" in records
        is_whole = has_epoch and next_batch is not None and next_batch > last_with_rows
        return found if is_whole else None

    def _epoch(self, version: Version) -> int | None:
        records = version.records.get(self._sink, {})
        counted_by = records.get("counted_by", records.get("root", self._root_number))
        return records.get("epoch") if counted_by == self._root_number else None


def _is_version(name: str) -> bool:
    return len(name) == 25 and name.endswith(".json") and name[:20].isdigit()


class ShownTables:
    """Those of a root, for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[tuple[str, str, str], ReadTable] = {}

    def look(self, manifest: Manifest | None, root_id: str, decided: Decided) -> Tables:
        """`manifest`: the newest."""
        if manifest is None:
            return Tables((), (), ())
        addresses = {name: shape.table for name, shape in manifest.shape.items() if shape.table is not None}
        problems: list[str] = []
        found: dict[str, ReadTable] = {}
        whys: dict[str, str] = {}
        for sink, table in addresses.items():
            if table.kind == "delta":
                try:
                    found[sink] = self._table(table, manifest.pipeline, sink, root_id)
                    with self._lock:
                        found[sink].look()
                except (TidegateError, OSError) as error:
                    whys[sink] = str(error) if isinstance(error, TidegateError) else say(error)
                    problems.append(f"the table {table.address} of sink {sink!r} cannot be read: {whys[sink]}")
        tables = tuple(
            _shown(sink, table, read, decided)
            if (read := found.get(sink)) is not None and sink not in whys
            else _told(sink, table, read, decided, whys.get(sink))
            for sink, table in addresses.items()
        )
        readable = {sink: read for sink, read in found.items() if sink not in whys}
        return Tables(tables, tuple(_matrix(readable, addresses, decided)), tuple(problems))

    def version_of(self, sink: str, table: TableAddress, manifest: Manifest, root_id: str) -> int:
        """The version of a Delta table that shows a checkpoint. `CheckpointNotVisible`, in words, if none does."""
        # It brings deltalake.
        from tidegate.sinks.delta.home import home_of
        from tidegate.sinks.delta.reading import sinks_sharing, table_at

        if manifest.origin is None:
            last = sealed_in(manifest)[sink]
            read = self._table(table, manifest.pipeline, sink, root_id)
            with self._lock:
                read.look()
                found = read.showing(manifest.epoch, last)
            if found is not None:
                return found
        home = home_of(table.address)
        return table_at(sinks_sharing(home, sink, manifest), home, manifest, root_id).version

    def _table(self, table: TableAddress, pipeline: str, sink: str, root_id: str) -> ReadTable:
        # It brings deltalake.
        from tidegate.sinks.delta.home import home_of
        from tidegate.sinks.delta.log import number_of

        key = (table.address, sink, root_id)
        if key not in self._read:
            self._read[key] = ReadTable(home_of(table.address).files(), pipeline, sink, number_of(root_id))
        return self._read[key]


def _shown(sink: str, table: TableAddress, read: ReadTable, decided: Decided) -> ShownTable:
    """By its own record."""
    last = read.last()
    shown = next((each for each in decided.lineage if _is_shown(each, sink, read, decided)), None)
    if last is not None:  # it has yet to be set back
        shown = next((each for each in decided.left_behind if each.epoch == last[0]), shown)
    return _as_shown(sink, table, shown, read)


def _is_shown(checkpoint: CheckpointStatus, sink: str, read: ReadTable, decided: Decided) -> bool:
    sealed = decided.sealed.get(checkpoint.checkpoint)
    if sealed is not None:
        return sink in sealed and read.has(sealed[sink])
    last = read.last()
    return checkpoint.state == "complete" or (last is not None and last[0] == checkpoint.epoch)


def _told(sink: str, table: TableAddress, read: ReadTable | None, decided: Decided, why: str | None) -> ShownTable:
    """Of a table that cannot be asked, by what the run has told."""
    if why is None and decided.in_doubt is not None:
        why = f"no run has told yet whether it shows {decided.in_doubt.checkpoint}"
    return _as_shown(sink, table, decided.shown, read, why)


def _as_shown(
    sink: str, table: TableAddress, shown: CheckpointStatus | None, read: ReadTable | None, why: str | None = None
) -> ShownTable:
    return ShownTable(
        sink=sink,
        kind=table.kind,
        address=table.address,
        shows=None if shown is None else shown.checkpoint,
        since=None if shown is None else _since(shown, sink, None if read is None else read.last()),
        version=None if read is None else read.newest,
        why=why,
    )


def _since(checkpoint: CheckpointStatus, sink: str, last: tuple[int, Version] | None) -> str | None:
    commit = checkpoint.commits.get(sink)
    begun = moment(checkpoint.triggered_at)
    if commit is not None and commit.took_ms is not None and begun is not None:
        return as_moment(begun + timedelta(milliseconds=commit.begun_ms + commit.took_ms))
    if last is not None and last[0] == checkpoint.epoch and last[1].at_ms is not None:
        return as_moment(datetime.fromtimestamp(last[1].at_ms / 1000, UTC))
    return None


def _matrix(
    read: Mapping[str, ReadTable], addresses: Mapping[str, TableAddress], decided: Decided
) -> Iterable[TableRow]:
    """`read`: those that could be."""
    epochs = {sink: table.by_epoch() for sink, table in read.items()}
    first = {sink: 0 if table.is_read_from_the_start else min(epochs[sink], default=0) for sink, table in read.items()}
    for checkpoint in decided.newest_first[:MOST_ROWS]:
        versions: dict[str, AddedRows | None] = {}
        missing: dict[str, MissingVersion] = {}
        sealed = decided.sealed.get(checkpoint.checkpoint, {})
        for sink in addresses:
            version = epochs.get(sink, {}).get(checkpoint.epoch)
            versions[sink] = (
                None if version is None else AddedRows(version=version.number, rows_added=version.rows_added)
            )
            if version is not None:
                continue
            if sink not in read or checkpoint.epoch < first[sink]:
                missing[sink] = "not_known"
            elif not read[sink].has(sealed.get(sink, -1)):
                missing[sink] = "not_shown"
        yield TableRow(checkpoint=checkpoint.checkpoint, versions=versions, missing=missing)
