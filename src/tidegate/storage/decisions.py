"""The decision log and the marks of used ids in the store: what is read and written of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Final

from tidegate.errors import DamagedLog, StoreUnavailable
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

_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8)


def _decided(data: bytes, name: str) -> Decision:
    record = decode_decision(data, name)
    if record.slot != RootPaths.slot_of(name):
        raise DamagedLog(f"the decision log's record {name} is that of slot {record.slot}: it was put into its place")
    return record


class StoredDecisions:
    def __init__(self, files: Files) -> None:
        self._files = files
        self._known: dict[str, bytes] = {}
        """Records that were read and are whole: none ever changes, and no slot is filled twice."""
        self._written: tuple[str, bytes] | None = None
        """The last record that was created here, which need not be read where it is listed."""
        self._listed: list[str] | None = None
        """Those that were there when they were last read, and have not been trimmed since."""
        self._marks: set[str] | None = None
        """The marks that may be there, once they were listed."""

    def read(self) -> DecisionLog:
        """The log as it is now."""
        pauses_s, unread = iter(_PAUSES_S), set[str]()
        while True:
            names = self._files.list(RootPaths.DECISIONS)
            whole = self._known if self._written is None else {**self._known, self._written[0]: self._written[1]}
            known = {name: whole[name] for name in names if name in whole}
            found = {**known, **self._files.read_all(name for name in names if name not in known)}
            if len(found) == len(names):
                log = self._decoded(found)
                self._known = {name: data for name, data in found.items() if not is_torn(data)}
                self._listed = names
                return log
            # Some were trimmed since they were listed, so there are newer ones: list again. None is listed that was
            # trimmed before, but by a store that is late, or that cannot read what it has.
            before, unread = unread, set(names) - found.keys()
            if again := before & unread:
                pause_s = next(pauses_s, None)
                if pause_s is None:
                    record = self._files.location(min(again))
                    raise StoreUnavailable(f"{record}, a record of the decision log, is listed and cannot be read")
                time.sleep(pause_s)

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
        name, data = RootPaths.decision(record.slot), encode_decision(record)
        is_ours = self._files.create(name, data)
        if is_ours:
            self._written = (name, data)
        return is_ours

    def force(self, record: Decision) -> None:
        """Make a record durable that is in the log: an attempt that failed has written it, perhaps not to the disk."""
        self._files.sync([RootPaths.decision(record.slot)], missing_ok=True)

    def trim(self, start: int, but: Collection[int]) -> None:
        """Delete the records of slots before the start of the log, but for these."""
        names = self._files.list(RootPaths.DECISIONS) if self._listed is None else self._listed
        slots = {name: RootPaths.slot_of(name) for name in names}
        dropped = {name for name, slot in slots.items() if slot < start and slot not in but}
        self._files.delete(sorted(dropped))
        self._listed = [name for name in names if name not in dropped]

    def mark_used(self, checkpoint_id: int) -> None:
        mark = RootPaths.used_id(checkpoint_id)
        if self._marks is not None:
            self._marks.add(mark)
        self._files.write(mark, b"")

    def largest_used(self) -> int:
        marks = self._files.list(RootPaths.IDS)
        return int(marks[-1].rsplit("/", 1)[1]) if marks else 0

    def forget_marks_below(self, checkpoint_id: int, at_least: int = 1) -> None:
        """If there are so many of them."""
        mark = RootPaths.used_id(checkpoint_id)
        if self._marks is None:
            self._marks = set(self._files.list(RootPaths.IDS))
        older = sorted(name for name in self._marks.copy() if name < mark)
        if len(older) < at_least:
            return
        self._files.delete(older)
        self._marks.difference_update(older)
