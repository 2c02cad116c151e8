"""What an owner stages for a Delta table, in a folder of it that no reader sees, and how that comes into the table.

A commit that writes files itself, because it merges or combines, does so in a folder of its own there, its *attempt*.
Files come into the table by a second name, so that a commit that is tried again, or not to its end, costs nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from deltalake.transaction import AddAction

from tidegate.protocol.commit import CommitPermit
from tidegate.sinks.contract import SinkPlace
from tidegate.sinks.delta.log import TableLog
from tidegate.sinks.delta.statistics import statistics
from tidegate.sinks.staging import NULL_FOLDER
from tidegate.storage.folder import Folder, link

if TYPE_CHECKING:
    from tidegate.sinks.delta.table import DeltaTable

_STAGING: Final = "_tidegate"
_MERGE: Final = "merge-"


class Staged:
    def __init__(self, sink: DeltaTable, place: SinkPlace, log: TableLog) -> None:
        self._table = sink.path
        self._log = log
        self.folder = sink.path / _STAGING / place.owner
        self.files = Folder(self.folder, fsync=place.fsync)

    # -- attempts ---------------------------------------------------------------------------------

    def attempt(self, permit: CommitPermit) -> Path:
        """Where a commit writes what it merges."""
        return self.folder / f"{permit.generation:06d}" / f"{_MERGE}{permit.epoch}"

    def attempts(self, generation: int) -> list[Path]:
        """Where commits have written what they merged, up to a generation: a newer one's is none of our business."""
        return [folder for folder in self.folder.glob(f"*/{_MERGE}*") if int(folder.parent.name) <= generation]

    def linked(self, attempts: Iterable[Path]) -> list[Path]:
        """What attempts have linked into the table, or would have."""
        return [self._table / file.relative_to(folder) for folder in attempts for file in folder.rglob("*.parquet")]

    def take_back(self, attempt: Path) -> None:
        """Remove an earlier try of an attempt that is made again: the table knows nothing of it."""
        for path in self.linked([attempt]):
            path.unlink(missing_ok=True)
        remove([attempt])

    # -- into the table ---------------------------------------------------------------------------

    def targets(self, staged: Iterable[Path]) -> list[Path]:
        """Where staged files are to be in the table."""
        # Without the folder of the generation, and of the batch or the attempt where there is one.
        below = [path.relative_to(self.folder).parts[1:] for path in staged]
        return [self._table.joinpath(*(part for part in each[:-1] if "=" in part), each[-1]) for each in below]

    def add_all(self, staged: list[Path], *, data_change: bool = True) -> list[AddAction]:
        """Link files into the table, and describe them. When it is done they are on the disk, by these names too."""
        targets = self.targets(staged)
        added = [self._add(path, target, data_change=data_change) for path, target in zip(staged, targets, strict=True)]
        self._log.force_files(targets)
        return added

    def _add(self, staged: Path, target: Path, *, data_change: bool) -> AddAction:
        inside = target.relative_to(self._table).parts
        link(staged, target)
        partitions = dict(part.split("=", 1) for part in inside[:-1])
        values = {unquote(name): None if value == NULL_FOLDER else unquote(value) for name, value in partitions.items()}
        status = target.stat()
        return AddAction(
            path="/".join(inside),
            size=status.st_size,
            partition_values=values,
            modification_time=int(status.st_mtime * 1000),
            data_change=data_change,
            stats=statistics(target),
        )


def epoch_of(attempt: Path) -> int:
    return int(attempt.name.removeprefix(_MERGE))


def remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
