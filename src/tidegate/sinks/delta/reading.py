"""The tables of a pipeline as they were at a checkpoint: a set that belongs together."""

from __future__ import annotations

import atexit
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake

from tidegate.errors import CheckpointNotVisible, DamagedCheckpoint, SinkFailed, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.sinks.contract import decode_committable
from tidegate.sinks.delta.features import unreadable
from tidegate.sinks.delta.home import Home, InFolder, Options, home_of
from tidegate.sinks.delta.log import number_of
from tidegate.sinks.delta.scan import FILE, active_files, columns_of, scan
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest
from tidegate.storage.places import place_of
from tidegate.storage.user_paths import is_bucket_url

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession


class TableAt:
    """One sink's Delta table at the version that shows a checkpoint."""

    def __init__(self, at: Home | Path, version: int) -> None:
        self._home = home_of(at)
        self.version = version

    @property
    def address(self) -> str:
        """Its path, or its URL."""
        return self._home.address

    @property
    def path(self) -> Path:
        """Of a table in a folder."""
        return Path(self.address)

    def __repr__(self) -> str:
        return f"TableAt({self.address!r}, version {self.version})"

    def delta(self) -> deltalake.DeltaTable:
        if isinstance(self._home, InFolder):
            return self._home.opened(self.version)
        with self._home.telling("be opened"):
            return self._home.opened(self.version)

    def to_arrow(self) -> Any:
        """A pyarrow table."""
        fs: Any = importlib.import_module("pyarrow.fs")
        # Read by pyarrow's own threads alone. By default they would call back into Python for every file, and a process
        # that ends while one of them lets go of it is aborted.
        table = self.delta()
        with self._home.shelf() as shelf:
            shelf.bring(file.path for file in active_files(table))
            local = fs.SubTreeFileSystem(str(shelf.folder), fs.LocalFileSystem())
            return table.to_pyarrow_table(filesystem=local)

    def to_pandas(self) -> pd.DataFrame:
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame

    def to_spark(self, session: SparkSession) -> DataFrame:
        """Read by Spark itself, from the files of the version. Those of a bucket are fetched first, to this machine:
        they are removed when the process ends."""
        from tidegate.sinks.sessions import frame_of

        table = self.delta()
        obstacle = unreadable(table)
        if obstacle is not None:
            raise SinkFailed(f"{self} has {obstacle}, which to_spark cannot read; read it with a package for Delta")
        schema = columns_of(table.schema())
        files = active_files(table)
        if not files:
            return frame_of(session, [], schema)
        shelf = self._home.put_on_shelf()
        atexit.register(shelf.remove)
        return scan(session, shelf, schema, files).drop(FILE)


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


def read(
    root: str | os.PathLike[str],
    checkpoint: str | int | None = None,
    *,
    storage_options: Mapping[str, str] | None = None,
) -> TablesAt:
    """All Delta tables of the pipeline with this root, as they were at a checkpoint.

    `checkpoint` is an id such as "ckpt-000042" that the root retains; left out, it is the newest one that is aligned,
    that all tables show, and that was not left behind by `restore`. Tables of other kinds keep no versions and are not
    among them.

    `storage_options`: how tables in a bucket are reached, where the environment and the AWS files do not say. No root
    knows those that the pipeline was given.

    Sinks that write to one table commit to it one after the other. Where one came with a later checkpoint before
    another was done with this one, no version of the table shows just this one, and `CheckpointNotVisible` says so.
    """
    inspected = InspectedRoot(place_of(root))
    if checkpoint is not None:
        number = checkpoint_id_of(str(checkpoint))
        if number is None:
            raise UnknownCheckpoint(f"{checkpoint!r} names no checkpoint; write 42 or {checkpoint_name(42)!r}")
        return _named(inspected, number, storage_options)
    retained = inspected.current()
    hidden: CheckpointNotVisible | None = None
    for record in sorted(retained, key=lambda each: each.checkpoint_id, reverse=True):
        if record.aligned:
            try:
                return tables_at(inspected, record, storage_options)
            except CheckpointNotVisible as error:
                hidden = hidden or error
            except UnknownCheckpoint:
                return read(
                    root, storage_options=storage_options
                )  # the run has removed it meanwhile: newer ones have taken its place
            except DamagedCheckpoint as damage:
                raise _damaged(inspected, record.checkpoint_id, damage, storage_options) from damage
    if hidden is not None:
        raise hidden
    if not retained:
        raise UnknownCheckpoint(f"{inspected.place} has no checkpoint yet; a run completes one at every interval")
    names = ", ".join(checkpoint_name(record.checkpoint_id) for record in retained)
    raise UnknownCheckpoint(f"{inspected.place} retains no aligned checkpoint; name one of the others: {names}")


def _named(root: InspectedRoot, checkpoint_id: int, options: Options | None) -> TablesAt:
    try:
        return tables_at(root, root.find(checkpoint_id), options)
    except DamagedCheckpoint as damage:
        raise _damaged(root, checkpoint_id, damage, options) from damage
    except UnknownCheckpoint as unknown:
        raise UnknownCheckpoint(f"{unknown}; {_readable(root, checkpoint_id, options)}") from unknown


def _damaged(
    root: InspectedRoot, checkpoint_id: int, damage: DamagedCheckpoint, options: Options | None
) -> DamagedCheckpoint:
    readable = _readable(root, checkpoint_id, options)
    return DamagedCheckpoint(f"{checkpoint_name(checkpoint_id)} is damaged: {damage}; {readable}")


def _readable(root: InspectedRoot, instead_of: int, options: Options | None) -> str:
    """Which checkpoints can be read instead of one, for people."""
    found: list[str] = []
    for record in root.retained():
        if record.checkpoint_id != instead_of:
            with suppress(DamagedCheckpoint, UnknownCheckpoint, CheckpointNotVisible, SinkFailed):
                found.append(tables_at(root, record, options).checkpoint)
    return f"what can be read: {', '.join(found)}" if found else "none can be read"


def tables_at(root: InspectedRoot, record: CheckpointCompleted, options: Options | None = None) -> TablesAt:
    """All Delta tables of a checkpoint."""
    manifest = root.manifest(record)
    addresses = _addresses(manifest)
    sharing: dict[str, list[str]] = {}
    for name, address in addresses.items():
        sharing.setdefault(_home_of(address).same, []).append(name)
    tables: dict[str, TableAt] = {}
    for names in sharing.values():
        tables |= dict.fromkeys(names, table_at(names, _home_of(addresses[names[0]], options), manifest, root.id))
    return TablesAt(checkpoint_name(record.checkpoint_id), manifest.epoch, manifest.aligned, tables)


def _addresses(manifest: Manifest) -> dict[str, str]:
    """Where the Delta tables of its sinks are."""
    return {
        name: shape.table.address
        for name, shape in manifest.shape.items()
        if shape.table is not None and shape.table.kind == "delta"
    }


def _home_of(address: str, options: Options | None = None) -> Home:
    """Of a table that a manifest knows."""
    return home_of(address, options if is_bucket_url(address) else None)


class _Versions:
    """What the versions of a table say of the sinks of a pipeline that write to it, as of a checkpoint."""

    def __init__(self, sinks: Sequence[str], home: Home, manifest: Manifest, root_id: str | None) -> None:
        self._pipeline = manifest.pipeline
        # The root whose number its epoch is; None: any.
        self._counted_by = None if root_id is None else number_of(manifest.counted_by(root_id))
        self._sinks = sinks
        self._home = home
        self._manifest = manifest

    def newest(self) -> int:
        return self._open(None, "").version()

    def later(self, version: int) -> list[str]:
        """The sinks of which a version shows a later epoch, or later batches: it was set back to another lineage, whose
        epochs may be smaller."""
        table = self._at(version)
        return [
            sink
            for sink in self._sinks
            if self._is_later(table, sink) or self._exceeds(sink, self._record(table, sink, "batch"))
        ]

    def _is_later(self, table: deltalake.DeltaTable, sink: str) -> bool:
        """Epochs are numbers of a root. What a root was brought lies before all of its own; what another has shown,
        unless the checkpoint is that one's, is none of it."""
        root = self._record(table, sink, "root")
        counted_by = self._record(table, sink, "counted_by") or root
        if self._counted_by in (None, counted_by) or not root:
            return self._record(table, sink, "epoch") > self._manifest.shown_epoch
        return root != self._counted_by

    def _exceeds(self, sink: str, next_batch: int) -> bool:
        stage = self._manifest.stages.get(sink)
        if stage is None or stage.committable is None:
            return False
        return next_batch > decode_committable(stage.committable).through_batch + 1

    def hidden(self, version: int) -> list[str]:
        """The sinks of which a version lacks rows."""
        table = self._at(version)
        return [sink for sink in self._sinks if self._lacks(sink, self._record(table, sink, "batch"))]

    def _lacks(self, sink: str, next_batch: int) -> bool:
        stage = self._manifest.stages.get(sink)
        if stage is None or stage.committable is None:
            return False
        return next_batch <= decode_committable(stage.committable).last_with_rows

    def set_back_before(self, version: int) -> int:
        """The version by which the table was last set back to an older checkpoint, or 0: only since then the records of
        epochs have grown from version to version."""
        generation = self._set_back(version)
        return _first(lambda each: self._set_back(each) >= generation, version) if generation else 0

    def _set_back(self, version: int) -> int:
        """The generation that has done so."""
        table = self._at(version)
        return max(self._record(table, sink, "set_back") for sink in self._sinks)

    def _record(self, table: deltalake.DeltaTable, sink: str, kind: str) -> int:
        with self._home.telling("be read"):
            name = f"tidegate/{self._pipeline}/{sink}/{kind}"
            return self._home.patiently(lambda: table.transaction_version(name) or 0)

    def _at(self, version: int) -> deltalake.DeltaTable:
        return self._open(version, f" at {checkpoint_name(self._manifest.checkpoint_id)}")

    def _open(self, version: int | None, when: str) -> deltalake.DeltaTable:
        try:
            return self._home.opened(version)
        except self._home.failures as error:
            why, cause = self._home.why(error), self._home.cause(error)
        sinks = " and ".join(map(repr, self._sinks))
        raise SinkFailed(f"the table {self._home.address} of sink {sinks} cannot be read{when}: {why}") from cause


def versions_of(at: Home | Path, sink: str, manifests: Iterable[Manifest], root_id: str | None = None) -> list[int]:
    """The versions of a table by which these checkpoints are read, those that can be. `sink`: one that writes to it."""
    found: list[int] = []
    home = home_of(at)
    for manifest in manifests:
        sinks = sinks_sharing(home, sink, manifest)
        if any(each in manifest.stages for each in sinks):
            with suppress(CheckpointNotVisible):
                found.append(table_at(sinks, home, manifest, root_id).version)
    return found


def sinks_sharing(home: Home, sink: str, manifest: Manifest) -> list[str]:
    """The sinks of a pipeline that wrote to a table, by a checkpoint, and this one, which does now: the table may have
    been moved since."""
    addresses = _addresses(manifest)
    there = [name for name in addresses if _home_of(addresses[name]).same == home.same]
    return there if sink in there else [*there, sink]


def table_at(sinks: Sequence[str], at: Home | Path, manifest: Manifest, root_id: str | None = None) -> TableAt:
    """The last version of a table that shows no later epoch of any of its sinks; where it was set back since, the last
    one of before that, if need be. `root_id`: of the root that has the checkpoint."""
    home = home_of(at)
    versions = _Versions(sinks, home, manifest, root_id)
    last = newest = versions.newest()
    why: str | None = None
    while True:
        first = versions.set_back_before(last)
        if first == 0 or not versions.later(first):
            version = _first(lambda version: bool(versions.later(version)), last + 1, first) - 1
            hidden = versions.hidden(version)
            if not hidden:
                return TableAt(home, version)
            why = why or _why_hidden(versions, hidden, version, newest)
        if first == 0:
            break
        last = first - 1
    raise CheckpointNotVisible(f"{checkpoint_name(manifest.checkpoint_id)} is complete, but {home.address} {why}")


def _first(holds: Callable[[int], bool], below: int, known: int = -1) -> int:
    """The first version of which something holds, as it does of all later ones below, by bisection. It does not hold of
    the one that is `known`."""
    version, above = known, below
    while above - version > 1:
        middle = (version + above) // 2
        try:
            is_above = holds(middle)
        except SinkFailed:
            is_above = False  # older than what is left of the table's log
        version, above = (version, middle) if is_above else (middle, above)
    return above


def _why_hidden(versions: _Versions, hidden: Sequence[str], version: int, newest: int) -> str:
    if version == newest:
        return "does not show it yet; try again"
    first = versions.later(version + 1)
    if not first:
        return "showed it only before it was set back, and then together with a later one"
    if hidden[0] in first:
        return "showed it only together with a later one; read that"
    return (
        f"has no version that shows it alone: several sinks write to it, and rows of {first[0]!r} of a later "
        f"checkpoint came before those of {hidden[0]!r}; read another checkpoint, or give each sink its own table"
    )
