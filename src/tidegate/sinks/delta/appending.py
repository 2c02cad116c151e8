"""A commit that appends: staged files are added as they are, and in place of many small ones what is made of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import deltalake
from deltalake.transaction import AddAction

from tidegate.errors import SinkFailed, StoreUnavailable
from tidegate.sinks.contract import SinkPlace, StagedFile
from tidegate.sinks.delta.combining import Piece, bins, combine
from tidegate.sinks.delta.scan import columns_of
from tidegate.sinks.delta.staged import Staged
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
        self._combined: dict[tuple[StagedFile, ...], list[str]] = {}
        """What was made of small files, which is the same whatever others write meanwhile."""

    def actions(self, table: deltalake.DeltaTable, fresh: list[StagedFile], attempt: str) -> list[AddAction]:
        """What a transaction does to show what was staged."""
        if tuple(fresh) not in self._combined:
            self._combined[tuple(fresh)] = self._to_show(table, fresh, attempt)
        return self._staged.add_all(self._combined[tuple(fresh)])

    def _to_show(self, table: deltalake.DeltaTable, fresh: Sequence[StagedFile], attempt: str) -> list[str]:
        """The files to be shown: those that were staged, and in place of small ones what they were combined to."""
        staged = self._staged.names(fresh)
        target, session = self._sink.target_size, self._place.session
        if target is None or session is None or self._staged.is_on_cluster:
            return staged
        paths = {name: self._staged.path(name) for name in staged}
        targets = self._staged.targets(staged)
        homes = {paths[name]: each.rpartition("/")[0] for name, each in zip(staged, targets, strict=True)}
        wanted = bins(
            (Piece(path, file.size_bytes, homes[path]) for path, file in zip(paths.values(), fresh, strict=True)),
            target,
            target // _SMALL_AT_A_COMMIT,
        )
        if sum(len(pieces) - 1 for pieces in wanted) < _WORTH_A_JOB:
            return staged
        try:
            combined = {piece.path for pieces in wanted for piece in pieces}
            self._staged.files.bring(name for name, path in paths.items() if path in combined)
            with spark_fails("Spark"):
                written = combine(session, self._stored(table), wanted, self._staged.path(attempt))
        except (SinkFailed, StoreUnavailable, OSError) as error:
            # To show many small files is better than to show none.
            _log.warning("%s: small files are shown as they are: %s", self._sink.describe(), error)
            self._staged.remove([attempt])
            return staged
        shown = [name for name, path in paths.items() if path not in combined]
        for number, (pieces, below) in enumerate(zip(wanted, written, strict=True)):
            folder = "/".join(part for part in (attempt, homes[pieces[0].path]) if part)
            self._staged.path(folder).mkdir(parents=True, exist_ok=True)
            for path in sorted(below.glob("*.parquet")):
                name = f"{folder}/bin-{number:05d}-{path.name}"  # in each bin Spark gives the same names
                path.rename(self._staged.path(name))
                shown.append(name)
        return shown

    def _stored(self, table: deltalake.DeltaTable) -> StructType:
        """The columns that the table's files hold: without those that it is partitioned by."""
        from pyspark.sql.types import StructType

        every = columns_of(table.schema())
        return StructType([field for field in every.fields if field.name not in self._sink.partition_by])
