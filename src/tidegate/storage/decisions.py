"""The decision log in the store: reading it, and claiming its next slot."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.errors import DamagedLog, StoreUnavailable
from tidegate.protocol.decision_log import (
    ClaimAnswer,
    Decision,
    DecisionLog,
    GenerationOpened,
    decode_decision,
    encode_decision,
    is_torn,
    judge_claim,
)
from tidegate.storage.files import Files
from tidegate.storage.paths import RootPaths

_CLAIM_TRIES = 20


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
            records = [decode_decision(data, name) for name, data in found.items() if name not in torn]
            return DecisionLog.from_records(records, {RootPaths.slot_of(name) for name in torn})
        except DamagedLog as error:
            raise DamagedLog(
                f"{error} (a slot is a file of the root's folder {RootPaths.DECISIONS}). What to do: restore that "
                f"folder from a backup, or start the pipeline on a new root with new tables"
            ) from error

    def claim(self, proposed: Decision) -> tuple[ClaimAnswer, DecisionLog]:
        """Try to make a record part of the log. The answer comes from the log, not from the attempt."""
        if isinstance(proposed, GenerationOpened):
            # Runs without fsync may have written these, and what follows a torn record cannot be read.
            self._files.sync(self._files.list(RootPaths.DECISIONS), missing_ok=True)
        name = RootPaths.decision(proposed.slot)
        failure: StoreUnavailable | None = None
        for _ in range(_CLAIM_TRIES):
            is_on_disk = False
            try:
                is_on_disk = self._files.create(name, encode_decision(proposed))
            except StoreUnavailable as error:
                failure = error  # it may have been written all the same
            log = self.read()
            answer = judge_claim(proposed, log)
            if answer is ClaimAnswer.WON and not is_on_disk:
                self._files.sync(
                    [name], missing_ok=True
                )  # an attempt that failed has written it, perhaps not to the disk
            if answer is not ClaimAnswer.RETRY:
                return answer, log
        if failure is not None:
            raise StoreUnavailable(f"{failure} (tried {_CLAIM_TRIES} times)") from failure
        raise StoreUnavailable(f"slot {proposed.slot} of the decision log could not be claimed in {_CLAIM_TRIES} tries")

    def trim(self, log: DecisionLog) -> None:
        """Delete the records that are no longer part of the log."""
        names = self._files.list(RootPaths.DECISIONS)
        self._files.delete(name for name in names if log.has_dropped(RootPaths.slot_of(name)))

    def mark_used(self, checkpoint_id: int) -> None:
        self._files.write(RootPaths.used_id(checkpoint_id), b"")

    def largest_used(self) -> int:
        marks = self._files.list(RootPaths.IDS)
        return int(marks[-1].rsplit("/", 1)[1]) if marks else 0

    def forget_marks_below(self, checkpoint_id: int) -> None:
        mark = RootPaths.used_id(checkpoint_id)
        self._files.delete(name for name in self._files.list(RootPaths.IDS) if name < mark)
