"""A commit that appends: staged files are added as they are, and in place of many small ones what is made of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import deltalake
from deltalake.transaction import AddAction

from tidegate.errors import SinkFailed
from tidegate.sinks.contract import SinkPlace, StagedFile
from tidegate.sinks.delta.combining import Piece, bins, combine
from tidegate.sinks.delta.scan import columns_of
from tidegate.sinks.delta.staged import Staged, remove
from tidegate.sinks.staging import spark_fails

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from tidegate.sinks.delta.table import DeltaTable

_log = logging.getLogger("tidegate")
_SMALL_AT_A_COMMIT: Final = 16
"""What part of the target. Larger files are too much to write again while the table is waited for: upkeep does that."""
_WORTH_A_JOB: Final = 3
"""By how many an epoch's files must become fewer for a job of Spark's to pay."""


class Appending:
    """Of one commit, which may try several times to make its transaction."""

    def __init__(self, sink: DeltaTable, place: SinkPlace, staged: Staged) -> None:
        self._sink = sink
        self._place = place
        self._staged = staged
        self._combined: dict[tuple[StagedFile, ...], list[Path]] = {}
        """What was made of small files, which is the same whatever others write meanwhile."""

    def actions(self, table: deltalake.DeltaTable, fresh: list[StagedFile], attempt: Path) -> list[AddAction]:
        """What a transaction does to show what was staged."""
        if tuple(fresh) not in self._combined:
            self._staged.take_back(attempt)
            self._combined[tuple(fresh)] = self._to_show(table, fresh, attempt)
        return self._staged.add_all(self._combined[tuple(fresh)])

    def _to_show(self, table: deltalake.DeltaTable, fresh: Sequence[StagedFile], attempt: Path) -> list[Path]:
        """The files to be shown: those that were staged, and in place of small ones what they were combined to."""
        staged = [Path(file.path) for file in fresh]
        target, session = self._sink.target_size, self._place.session
        if target is None or session is None:
            return staged
        targets = self._staged.targets(staged)
        homes = {path: each.parent.relative_to(self._sink.path) for path, each in zip(staged, targets, strict=True)}
        wanted = bins(
            (Piece(path, file.size_bytes, homes[path]) for path, file in zip(staged, fresh, strict=True)),
            target,
            target // _SMALL_AT_A_COMMIT,
        )
        if sum(len(pieces) - 1 for pieces in wanted) < _WORTH_A_JOB:
            return staged
        try:
            with spark_fails("Spark"):
                written = combine(session, self._stored(table), wanted, attempt)
        except (SinkFailed, OSError) as error:
            # To show many small files is better than to show none.
            _log.warning("%s: small files are shown as they are: %s", self._sink.describe(), error)
            remove([attempt])
            return staged
        combined = {piece.path for pieces in wanted for piece in pieces}
        shown = [path for path in staged if path not in combined]
        for number, (pieces, below) in enumerate(zip(wanted, written, strict=True)):
            home = attempt / homes[pieces[0].path]
            home.mkdir(parents=True, exist_ok=True)
            # In each bin Spark gives the same names.
            shown += [path.rename(home / f"bin-{number:05d}-{path.name}") for path in sorted(below.glob("*.parquet"))]
        return shown

    def _stored(self, table: deltalake.DeltaTable) -> StructType:
        """The columns that the table's files hold: without those that it is partitioned by."""
        from pyspark.sql.types import StructType

        every = columns_of(table.schema())
        return StructType([field for field in every.fields if field.name not in self._sink.partition_by])
