"""Setting a Delta table back to a checkpoint: by a new version that shows what an older one did, its history kept.

The same transaction sets the records of all sinks of the pipeline that write to the table back to those of the older
version. Otherwise the next commits would be taken for ones that were made already, and their rows lost. It also fences
older generations, and notes which generation has done it, so that it is done once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import deltalake

from tidegate.errors import SinkFailed
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import SettingBack, SinkPlace, decode_committable
from tidegate.sinks.delta.log import TRIES, TableLog
from tidegate.sinks.delta.others import written_by_others
from tidegate.sinks.delta.reading import TableAt, sinks_sharing, table_at
from tidegate.storage.manifest import Manifest

if TYPE_CHECKING:
    from tidegate.sinks.delta.table import DeltaTable


class Reversal:
    """Of the table of one stage, to one checkpoint."""

    def __init__(
        self, sink: DeltaTable, place: SinkPlace, log: TableLog, to: Manifest, *, takes_over: bool = False
    ) -> None:
        """`takes_over`: the table may be another root's, and is this one's then."""
        self._takes_over = takes_over
        self._sink = sink
        self._place = place
        self._log = log
        self._to = to
        self._sharing = sinks_sharing(sink.home, place.stage, to)

    def look(self) -> SettingBack:
        table = self._table()
        if table is None:
            return SettingBack()
        self._check_root(table)
        target = self._target()
        now, then = _rows_of(table), _rows_of(target.delta())
        return SettingBack(
            table.version(),
            target.version,
            sum(rows for path, rows in now.items() if path not in then),
            sum(rows for path, rows in then.items() if path not in now),
            tuple(self._others(table, target)),
            is_anothers=self._log.is_anothers(table),
        )

    def apply(self, generation: int, *, discards_others: bool) -> None:
        for _ in range(TRIES):
            table = self._table()
            if table is None:
                return
            self._check_root(table)
            is_done = self._log.recorded(table, "set_back") >= generation and not self._log.is_anothers(table)
            if is_done:
                self._log.force(through=table.version())
                return
            target = self._target()
            others = [] if discards_others else list(self._others(table, target))
            if others:
                name = checkpoint_name(self._to.checkpoint_id)
                raise SinkFailed(
                    f"{self._sink.describe()} cannot be set back to {name}: others have written to it since "
                    f"({others[0]}). What to do: `tidegate restore --to {name} --discard-others`, if that may be lost"
                )
            records = [*self._log.records_of(target.delta(), self._sharing, generation)]
            if target.version == table.version():
                is_done = self._log.transact(table, [], records)
            else:
                is_done = self._log.restore(table, target.version, records)
            if is_done:
                return
        raise SinkFailed(f"{self._sink.describe()} could not be set back: {TRIES} attempts met another writer's")

    def _check_root(self, table: deltalake.DeltaTable) -> None:
        if not self._takes_over:
            self._log.check_root(table)

    def _table(self) -> deltalake.DeltaTable | None:
        """None: there is none, and nothing is missing of it."""
        table = self._log.open()
        if table is None and self._holds_rows():
            return self._log.opened()  # which says so
        return table

    def _holds_rows(self) -> bool:
        """Whether a table had rows, or was about to have them."""
        stage = self._to.stages.get(self._place.stage)
        if stage is None or stage.committable is None:
            return False
        return decode_committable(stage.committable).last_with_rows >= 0

    def _target(self) -> TableAt:
        return table_at(self._sharing, self._sink.home, self._to, self._place.root)

    def _others(self, table: deltalake.DeltaTable, target: TableAt) -> Iterator[str]:
        return written_by_others(self._log, target.version, table.version())


def _rows_of(table: deltalake.DeltaTable) -> dict[str, int]:
    """How many rows each of its files has, as far as its log tells."""
    actions = importlib.import_module("pyarrow").table(table.get_add_actions())
    paths, counts = (actions.column(name).to_pylist() for name in ("path", "num_records"))
    return {path: count or 0 for path, count in zip(paths, counts, strict=True)}
