"""The decision log and the marks of used ids in the store: what is read and written of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tidegate.errors import DamagedLog
from tidegate.protocol.decision_log import (
    Decision,
    DecisionLog,
    GenerationOpened,
    decode_decision,
    encode_decision,
    is_torn,
)
from tidegate.storage.files import Files
from tidegate.storage.paths import RootPaths


def _decided(data: bytes, name: str) -> Decision:
    record = decode_decision(data, name)
    if record.slot != RootPaths.slot_of(name):
        raise DamagedLog(f"the decision log's record {name} is that of slot {record.slot}: it was put into its place")
    return record


class StoredDecisions:
    def __init__(self, files: Files) -> None:
        self._files = files

    def read(self) -> DecisionLog:
        """The log as it is now."""
        while True:
            names = self._files.list(RootPaths.DECISIONS)
            found = {name: data for name in names if (data := self._files.read(name)) is not None}
            if len(found) == len(names):
                return self._decoded(found)
            # Some were trimmed since they were listed, so there are newer ones: list again.

    def _decoded(self, found: Mapping[str, bytes]) -> DecisionLog:
        torn = {name for name, data in found.items() if is_torn(data)}
        try:
            records = [_decided(data, name) for name, data in found.items() if name not in torn]
            return DecisionLog.from_records(records, {RootPaths.slot_of(name) for name in torn})
        except DamagedLog as error:
            raise DamagedLog(
                f"{error} (a slot is a file of the root's folder {RootPaths.DECISIONS}). What to do: restore that "
                f"folder from a backup, or start the pipeline on a new root with new tables"
            ) from error

    def create(self, record: Decision) -> bool:
        """Write a record into its slot, if that is empty. Tells whether this did, durably; the log tells the rest."""
        if isinstance(record, GenerationOpened):
            # Runs without fsync may have written these, and what follows a torn record cannot be read.
            self._files.sync(self._files.list(RootPaths.DECISIONS), missing_ok=True)
        return self._files.create(RootPaths.decision(record.slot), encode_decision(record))

    def force(self, record: Decision) -> None:
        """Make a record durable that is in the log: an attempt that failed has written it, perhaps not to the disk."""
        self._files.sync([RootPaths.decision(record.slot)], missing_ok=True)

    def trim(self, start: int, but: Collection[int]) -> None:
        """Delete the records of slots before the start of the log, but for these."""
        slots = {name: RootPaths.slot_of(name) for name in self._files.list(RootPaths.DECISIONS)}
        self._files.delete(name for name, slot in slots.items() if slot < start and slot not in but)

    def mark_used(self, checkpoint_id: int) -> None:
        self._files.write(RootPaths.used_id(checkpoint_id), b"")

    def largest_used(self) -> int:
        marks = self._files.list(RootPaths.IDS)
        return int(marks[-1].rsplit("/", 1)[1]) if marks else 0

    def forget_marks_below(self, checkpoint_id: int) -> None:
        mark = RootPaths.used_id(checkpoint_id)
        self._files.delete(name for name in self._files.list(RootPaths.IDS) if name < mark)
