"""What an owner stages for a Delta table, in a folder of it that no reader sees, and how that comes into the table.

A commit that writes files itself, because it merges or combines, does so in a folder of its own there, its *attempt*.
Files come into the table by a second name, so that a commit that is tried again, or not to its end, costs nothing; in a
bucket, by a copy that the bucket makes. An attempt is there, whole, before any of its files is in the table: whoever
comes after a kill finds by it what the table does not show, on another machine too. So it is with a pass of upkeep.
Both are named by the version that the table had when they began: what came of them, later versions say.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import unquote

from deltalake.transaction import AddAction

from tidegate.errors import InvariantViolation, SinkFailed, StoreUnavailable
from tidegate.protocol.commit import CommitPermit
from tidegate.sinks.contract import SinkPlace, StagedFile
from tidegate.sinks.delta.home import InFolder
from tidegate.sinks.delta.log import TableLog
from tidegate.sinks.delta.statistics import statistics
from tidegate.sinks.staging import NULL_FOLDER
from tidegate.storage.files import Files, clear
from tidegate.storage.folder import near
from tidegate.storage.mounted import Mounted
from tidegate.storage.parquet import footer_of, is_written

if TYPE_CHECKING:
    from tidegate.sinks.delta.table import DeltaTable

T = TypeVar("T")

STAGING: Final = "_tidegate"
_MERGE: Final = "merge-"
_PASS: Final = "upkeep-"
_ATTEMPT: Final = re.compile(rf"{_MERGE}(\d+)(-.*)?")
_BEGUN_AT: Final = re.compile(rf"(?:{_MERGE}\d+-|{_PASS})(\d+)-[0-9a-f]+")
_LOOKED_THROUGH: Final = 1000
_AT_ONCE: Final = 16


class Staged:
    """Files are named from the owner's folder of what is staged, unless they are said to be the table's."""

    def __init__(self, sink: DeltaTable, place: SinkPlace, log: TableLog) -> None:
        self._log = log
        self.is_near = isinstance(sink.home, InFolder)
        """Whether files come into the table by a link."""
        self.is_on_cluster = isinstance(log.files, Mounted)
        """Whether executors write to the table's bucket themselves: then nothing of it is on this machine."""
        self.table = log.files
        self.files = log.files.at(f"{STAGING}/{place.owner}")

    def path(self, name: str) -> Path:
        """Where Spark writes, or reads, a file. One that was not written here must have been brought."""
        return Path(near(self.files).location(name))

    def for_spark(self, name: str) -> str:
        """How Spark names a file that was written, or a folder to write to."""
        return unquote(self.files.uri(name)) if self.is_on_cluster else str(self.path(name))

    def names(self, staged: Iterable[StagedFile]) -> list[str]:
        """Of what a checkpoint has sealed, and is there."""
        found = [self.files.name_at(file.path) for file in staged]
        if None in found:
            raise InvariantViolation(f"what was staged is not in {self.files.location()}")
        return [name for name in found if name is not None]

    # -- attempts ---------------------------------------------------------------------------------

    def attempt(self, permit: CommitPermit, version: int) -> str:
        """Where a commit writes what it merges, with the table at this version: each try elsewhere. Of one whose answer
        a bucket has lost the version may come to be there yet, and then it has these files."""
        return f"{permit.generation:06d}/{_MERGE}{permit.epoch}-{version}-{uuid.uuid4().hex[:8]}"

    def attempts(self, generation: int) -> list[str]:
        """Where commits have written what they merged, up to a generation: a newer one's is none of our business."""
        return [name for name in self._folders(generation) if _ATTEMPT.fullmatch(name.rpartition("/")[2])]

    def upkeep_pass(self, generation: int, version: int) -> str:
        """Where a pass of upkeep writes, with the table at this version."""
        return f"{generation:06d}/{_PASS}{version}-{uuid.uuid4().hex[:8]}"

    def upkeep_passes(self, generation: int) -> list[str]:
        """Where passes have written that were not done, or whose work is not tidied up yet, up to a generation."""
        return [name for name in self._folders(generation) if name.rpartition("/")[2].startswith(_PASS)]

    def _folders(self, generation: int) -> list[str]:
        return [f"{each}/{name}" for each in self.generations(generation) for name in self.files.names_in(each)]

    def generations(self, through: int) -> list[str]:
        """The folders of those, up to one, of which something is left."""
        return [each for each in self.files.names_in() if each.isdigit() and int(each) <= through]

    def written(self, folder: str) -> list[str]:
        """The Parquet files in an attempt."""
        return [name for name in self.files.list(folder) if is_written(name, folder)]

    def written_here(self, folder: str) -> list[str]:
        """What Spark has just written there."""
        if self.is_on_cluster:
            return self.written(folder)
        return [name for name in near(self.files).list(folder) if is_written(name, folder)]

    def linked(self, attempts: Iterable[str]) -> list[str]:
        """What attempts have brought into the table, or would have, by its names there."""
        return self.targets(name for folder in attempts for name in self.written(folder))

    def take_back(self, folders: Iterable[str], newest: int) -> None:
        """Remove attempts or passes that can make no version any more, and from a table in a bucket what none of its
        versions, up to the newest, was given of theirs. From one in a folder vacuum removes that, by its age; copies in
        a bucket take long enough for kills to leave many, and cost money."""
        for folder in folders:
            since = _begun_at(folder)
            # Where very much was written since, or the log has forgotten what, it is left to vacuum.
            if not self.is_near and since is not None and newest - since <= _LOOKED_THROUGH:
                with suppress(SinkFailed, StoreUnavailable):
                    brought = set(self.linked([folder]))
                    self.table.delete(brought - self._log.added_since(since, newest) if brought else ())
            self.remove([folder])

    def remove(self, folders: Iterable[str]) -> None:
        """As far as it can be: what is left is removed with its generation."""
        for folder in folders:
            with suppress(StoreUnavailable):
                clear(self.files, folder)

    # -- into the table ---------------------------------------------------------------------------

    def targets(self, staged: Iterable[str]) -> list[str]:
        """The names in the table that staged files are to have."""
        # Without the folder of the generation, and of the batch or the attempt where there is one.
        parts = (name.split("/")[1:] for name in staged)
        return ["/".join((*(part for part in each[:-1] if "=" in part), each[-1])) for each in parts]

    def add_all(self, staged: Sequence[str], *, data_change: bool = True) -> list[AddAction]:
        """Bring files into the table, and describe them. When it is done they are durable, by these names too."""
        if not self.is_near:
            self.files.sync(staged)  # what a commit has written itself is not there yet
        targets = self.targets(staged)
        now_ms = time.time_ns() // 1_000_000

        def add(pair: tuple[str, str]) -> AddAction:
            name, target = pair
            self.table.keep(target, self.files, name)
            modified_ms = int(Path(self.table.location(target)).stat().st_mtime * 1000) if self.is_near else now_ms
            return add_action(self.files, name, target, modified_ms, data_change=data_change)

        added = self.each(add, list(zip(staged, targets, strict=True)))
        self._log.force_files(targets)
        return added

    def each(self, call: Callable[[tuple[str, str]], T], pairs: list[tuple[str, str]]) -> list[T]:
        """Side by side where each takes a request."""
        if self.is_near or len(pairs) < 2:
            return [call(pair) for pair in pairs]
        with ThreadPoolExecutor(min(_AT_ONCE, len(pairs))) as threads:
            return list(threads.map(call, pairs))


def add_action(files: Files, name: str, target: str, modified_ms: int, *, data_change: bool) -> AddAction:
    """What a table's log says of a file, which is there under another name."""
    footer, size_bytes = footer_of(files, name)
    partitions = dict(part.split("=", 1) for part in target.split("/")[:-1])
    values = {unquote(name): None if value == NULL_FOLDER else unquote(value) for name, value in partitions.items()}
    return AddAction(
        path=target,
        size=size_bytes,
        partition_values=values,
        modification_time=modified_ms,
        data_change=data_change,
        stats=statistics(footer),
    )


def epoch_of(attempt: str) -> int:
    found = _ATTEMPT.fullmatch(attempt.rpartition("/")[2])
    if found is None:
        raise InvariantViolation(f"{attempt} is no attempt")
    return int(found[1])


def _begun_at(folder: str) -> int | None:
    """The version of the table. None: it was made by a Tidegate that did not say so."""
    found = _BEGUN_AT.fullmatch(folder.rpartition("/")[2])
    return None if found is None else int(found[1])
