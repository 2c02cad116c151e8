"""Which checkpoint each table of a pipeline shows, and what each checkpoint has added to it.

Of Delta tables their log is read, a version once: it records the epoch that a version shows (`sinks/delta/log.py`). Of
others only the run can tell: when a checkpoint is complete, every table shows it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from tidegate.dashboard.moments import moment
from tidegate.dashboard.values import AddedRows, ShownTable, TableRow, Tables
from tidegate.engine.status import CheckpointStatus, as_moment
from tidegate.errors import TidegateError
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.storage.system import say

MOST_ROWS: Final = 200
_MOST_VERSIONS: Final = 600
"""That are read of a table that nobody has looked at yet, and kept of any."""


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

    def look(
        self, manifest: Manifest | None, root_id: str, newest_first: Sequence[CheckpointStatus], shown: str | None
    ) -> Tables:
        """`newest_first`: completed checkpoints. `shown`: the newest that all tables show, as far as the run tells."""
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
        by_epoch = {each.epoch: each for each in newest_first}
        tables = tuple(
            _shown(sink, table, found.get(sink), whys.get(sink), by_epoch, shown) for sink, table in addresses.items()
        )
        return Tables(tables, tuple(_matrix(found, addresses, newest_first[:MOST_ROWS])), tuple(problems))

    def version_of(self, sink: str, table: TableAddress, manifest: Manifest, root_id: str) -> int:
        """The version of a Delta table that shows a checkpoint. `CheckpointNotVisible`, in words, if none does."""
        # It brings deltalake.
        from tidegate.sinks.contract import decode_committable
        from tidegate.sinks.delta.home import home_of
        from tidegate.sinks.delta.reading import sinks_sharing, table_at

        if manifest.origin is None:
            sealed = manifest.stages[sink].committable
            last = -1 if sealed is None else decode_committable(sealed).last_with_rows
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


def _shown(
    sink: str,
    table: TableAddress,
    read: ReadTable | None,
    why: str | None,
    by_epoch: Mapping[int, CheckpointStatus],
    shown: str | None,
) -> ShownTable:
    told = next((each for each in by_epoch.values() if each.checkpoint == shown), None)
    last = None if read is None else read.last()
    if last is not None and last[0] in by_epoch and (told is None or last[0] >= told.epoch):
        told = by_epoch[last[0]]
    return ShownTable(
        sink=sink,
        kind=table.kind,
        address=table.address,
        shows=None if told is None else told.checkpoint,
        since=None if told is None else _since(told, sink, last),
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
    read: Mapping[str, ReadTable], addresses: Mapping[str, TableAddress], newest_first: Iterable[CheckpointStatus]
) -> Iterable[TableRow]:
    epochs = {sink: table.by_epoch() for sink, table in read.items()}
    for checkpoint in newest_first:
        versions: dict[str, AddedRows | None] = {}
        for sink in addresses:
            version = epochs.get(sink, {}).get(checkpoint.epoch)
            versions[sink] = (
                None if version is None else AddedRows(version=version.number, rows_added=version.rows_added)
            )
        yield TableRow(checkpoint=checkpoint.checkpoint, versions=versions)
