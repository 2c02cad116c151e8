"""The tables of a pipeline as they were at a checkpoint: a set that belongs together."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
from deltalake.exceptions import DeltaError

from tidegate.errors import CheckpointNotVisible, DamagedCheckpoint, SinkFailed, UnknownCheckpoint, first_line
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.sinks.contract import decode_committable
from tidegate.sinks.delta.features import unreadable
from tidegate.sinks.delta.scan import FILE, active_files, columns_of, scan
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest
from tidegate.storage.user_paths import plain_path

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession


class TableAt:
    """One sink's Delta table at the version that shows a checkpoint."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.version = version

    def __repr__(self) -> str:
        return f"TableAt({str(self.path)!r}, version {self.version})"

    def delta(self) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(self.path, version=self.version)

    def to_arrow(self) -> Any:
        """A pyarrow table."""
        fs: Any = importlib.import_module("pyarrow.fs")
        # Read by pyarrow's own threads alone. By default they would call back into Python for every file, and a process
        # that ends while one of them lets go of it is aborted.
        local = fs.SubTreeFileSystem(str(self.path), fs.LocalFileSystem())
        return self.delta().to_pyarrow_table(filesystem=local)

    def to_pandas(self) -> pd.DataFrame:
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame

    def to_spark(self, session: SparkSession) -> DataFrame:
        """Read by Spark itself, from the files of the version."""
        table = self.delta()
        obstacle = unreadable(table)
        if obstacle is not None:
            raise SinkFailed(f"{self} has {obstacle}, which to_spark cannot read; read it with a package for Delta")
        schema = columns_of(table.schema())
        files = active_files(table)
        if not files:
            return session.createDataFrame([], schema)
        return scan(session, self.path, schema, files).drop(FILE)


class TablesAt(Mapping[str, TableAt]):
    """The Delta tables of a pipeline at one checkpoint, by the names of their sinks.

    `is_consistent`: all of them show exactly the same prefix of the sources. A checkpoint that was cut unaligned is as
    good to restore from, but at it one table may be ahead of another.
    """

    def __init__(self, checkpoint: str, epoch: int, is_consistent: bool, tables: dict[str, TableAt]) -> None:
        self.checkpoint = checkpoint
        self.epoch = epoch
        self.is_consistent = is_consistent
        self._tables = tables

    def __getitem__(self, sink: str) -> TableAt:
        try:
            return self._tables[sink]
        except KeyError:
            known = ", ".join(self._tables) or "none"
            raise KeyError(f"{self.checkpoint} has no Delta table of a sink {sink!r} (it has: {known})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        return f"TablesAt({self.checkpoint}, {self._tables})"


def read(root: str | os.PathLike[str], checkpoint: str | int | None = None) -> TablesAt:
    """All Delta tables of the pipeline with this root, as they were at a checkpoint.

    `checkpoint` is an id such as "ckpt-000042" that the root retains; left out, it is the newest one that is aligned
    and that all tables show. Tables of other kinds keep no versions and are not among them.

    Sinks that write to one table commit to it one after the other. Where one came with a later checkpoint before
    another was done with this one, no version of the table shows just this one, and `CheckpointNotVisible` says so.
    """
    inspected = InspectedRoot(plain_path(root))
    if checkpoint is not None:
        number = checkpoint_id_of(str(checkpoint))
        if number is None:
            raise UnknownCheckpoint(f"{checkpoint!r} names no checkpoint; write 42 or {checkpoint_name(42)!r}")
        return _named(inspected, number)
    retained = inspected.retained()
    hidden: CheckpointNotVisible | None = None
    for record in sorted(retained, key=lambda each: each.checkpoint_id, reverse=True):
        if record.aligned:
            try:
                return _tables(inspected, record)
            except CheckpointNotVisible as error:
                hidden = hidden or error
            except UnknownCheckpoint:
                return read(root)  # the run has removed it meanwhile: newer ones have taken its place
            except DamagedCheckpoint as damage:
                raise _damaged(inspected, record.checkpoint_id, damage) from damage
    if hidden is not None:
        raise hidden
    if not retained:
        raise UnknownCheckpoint(f"{inspected.paths.root} has no checkpoint yet; a run completes one at every interval")
    names = ", ".join(checkpoint_name(record.checkpoint_id) for record in retained)
    raise UnknownCheckpoint(f"{inspected.paths.root} retains no aligned checkpoint; name one of the others: {names}")


def _named(root: InspectedRoot, checkpoint_id: int) -> TablesAt:
    try:
        return _tables(root, root.find(checkpoint_id))
    except DamagedCheckpoint as damage:
        raise _damaged(root, checkpoint_id, damage) from damage
    except UnknownCheckpoint as unknown:
        raise UnknownCheckpoint(f"{unknown}; {_readable(root, checkpoint_id)}") from unknown


def _damaged(root: InspectedRoot, checkpoint_id: int, damage: DamagedCheckpoint) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{checkpoint_name(checkpoint_id)} is damaged: {damage}; {_readable(root, checkpoint_id)}")


def _readable(root: InspectedRoot, instead_of: int) -> str:
    """Which checkpoints can be read instead of one, for people."""
    found: list[str] = []
    for record in root.retained():
        if record.checkpoint_id != instead_of:
            with suppress(DamagedCheckpoint, UnknownCheckpoint, CheckpointNotVisible, SinkFailed):
                found.append(_tables(root, record).checkpoint)
    return f"what can be read: {', '.join(found)}" if found else "none can be read"


def _tables(root: InspectedRoot, record: CheckpointCompleted) -> TablesAt:
    manifest = root.manifest(record)
    addresses = _addresses(manifest)
    sharing: dict[str, list[str]] = {}
    for name, address in addresses.items():
        sharing.setdefault(os.path.realpath(address), []).append(name)
    tables: dict[str, TableAt] = {}
    for names in sharing.values():
        tables |= dict.fromkeys(names, _table_at(names, Path(addresses[names[0]]), manifest))
    return TablesAt(checkpoint_name(record.checkpoint_id), manifest.epoch, manifest.aligned, tables)


def _addresses(manifest: Manifest) -> dict[str, str]:
    """Where the Delta tables of its sinks are."""
    return {
        name: shape.table.address
        for name, shape in manifest.shape.items()
        if shape.table is not None and shape.table.kind == "delta"
    }


class _Versions:
    """What the versions of a table say of the sinks of a pipeline that write to it, as of a checkpoint."""

    def __init__(self, pipeline: str, sinks: Sequence[str], path: Path, manifest: Manifest) -> None:
        self._pipeline = pipeline
        self._sinks = sinks
        self._path = path
        self._manifest = manifest

    def newest(self) -> int:
        return self._open(None, "").version()

    def later(self, version: int) -> list[str]:
        """The sinks of which a version shows a later epoch."""
        table = self._at(version)
        return [sink for sink in self._sinks if self._record(table, sink, "epoch") > self._manifest.epoch]

    def hidden(self, version: int) -> list[str]:
        """The sinks of which a version lacks rows."""
        table = self._at(version)
        return [sink for sink in self._sinks if self._lacks(sink, self._record(table, sink, "batch"))]

    def _lacks(self, sink: str, next_batch: int) -> bool:
        sealed = self._manifest.stages[sink].committable
        files = () if sealed is None else decode_committable(sealed).files
        return any(each.batch >= next_batch and each.rows for each in files)

    def _record(self, table: deltalake.DeltaTable, sink: str, kind: str) -> int:
        return table.transaction_version(f"tidegate/{self._pipeline}/{sink}/{kind}") or 0

    def _at(self, version: int) -> deltalake.DeltaTable:
        return self._open(version, f" at {checkpoint_name(self._manifest.checkpoint_id)}")

    def _open(self, version: int | None, when: str) -> deltalake.DeltaTable:
        try:
            return deltalake.DeltaTable(self._path, version=version)
        except DeltaError as error:
            sinks = " and ".join(map(repr, self._sinks))
            raise SinkFailed(
                f"the table {self._path} of sink {sinks} cannot be read{when}: {first_line(error)}"
            ) from error


def versions_of(path: Path, sink: str, manifests: Iterable[Manifest]) -> list[int]:
    """The versions of a table by which these checkpoints are read, those that can be. `sink`: one that writes to it."""
    found: list[int] = []
    for manifest in manifests:
        addresses = _addresses(manifest)
        sinks = [name for name in addresses if os.path.realpath(addresses[name]) == os.path.realpath(path)]
        if not sinks and sink in manifest.stages:
            sinks = [sink]  # the table has been moved since
        if sinks:
            with suppress(CheckpointNotVisible):
                found.append(_table_at(sinks, path, manifest).version)
    return found


def _table_at(sinks: Sequence[str], path: Path, manifest: Manifest) -> TableAt:
    """The last version of a table that shows no later epoch of any of its sinks. Their records only grow."""
    versions = _Versions(manifest.pipeline, sinks, path, manifest)
    newest = versions.newest()
    version, above = newest, newest + 1
    if versions.later(newest):
        version, above = 0, newest  # `above` shows a later epoch; version 0, when the table was created, none
        while above - version > 1:
            middle = (version + above) // 2
            try:
                is_above = bool(versions.later(middle))
            except SinkFailed:
                is_above = False  # older than what is left of the table's log
            version, above = (version, middle) if is_above else (middle, above)
    hidden = versions.hidden(version)
    if not hidden:
        return TableAt(path, version)
    if version == newest:
        why = "does not show it yet; try again"
    elif hidden[0] in (first := versions.later(above)):
        why = "showed it only together with a later one; read that"
    else:
        why = (
            f"has no version that shows it alone: several sinks write to it, and rows of {first[0]!r} of a later "
            f"checkpoint came before those of {hidden[0]!r}; read another checkpoint, or give each sink its own table"
        )
    raise CheckpointNotVisible(f"{checkpoint_name(manifest.checkpoint_id)} is complete, but {path} {why}")
