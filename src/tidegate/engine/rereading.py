"""Reading what older checkpoints have kept, beside a run: damage is told while newer checkpoints are whole.

A start reads what it restores, and nothing else. What is retained besides would be read only when it is needed, which
is when it is too late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Final

from tidegate.errors import DamagedCheckpoint, StoreUnavailable
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files
from tidegate.storage.inspection import check_files, read_manifest, references
from tidegate.storage.manifest import Manifest

_log = logging.getLogger("tidegate")

# A tenth of a core, and of what the disk can read.
_AT_WORK_S: Final = 0.05
_AT_REST_S: Final = 0.45


class Rereading:
    """Of the checkpoints that are retained when a generation starts, but for the one that it starts from."""

    def __init__(self, files: Files, base: Manifest | None) -> None:
        self._files = files
        self._base = base
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="tidegate-rereading", daemon=True)

    def start(self) -> None:
        if self._base is not None:
            self._thread.start()

    def stop(self) -> None:
        """Without waiting: it changes nothing."""
        self._stopped.set()

    def _read(self) -> None:
        try:
            for checkpoint_id, damage in self.damaged():
                _log.warning(
                    "%s, which is retained, can no longer be restored: %s; newer checkpoints and the tables are not "
                    "concerned by that, but look at the disk: `tidegate verify` reads all of them",
                    checkpoint_name(checkpoint_id),
                    damage,
                )
        except StoreUnavailable as error:
            _log.debug("what older checkpoints have kept was not read: %s", error)

    def damaged(self) -> Iterator[tuple[int, str]]:
        """Each that is, with the first damage. What is removed meanwhile, by what the log retains, is not."""
        assert self._base is not None
        decisions = StoredDecisions(self._files)
        log = decisions.read()
        known = set(references(self._files, self._base))
        rested = time.monotonic()
        for checkpoint_id in sorted(set(log.retained) - {self._base.checkpoint_id}, reverse=True):
            record = log.completed(checkpoint_id)
            if record is None:
                continue
            for found in self._damage_of(record, known):
                if found is not None and checkpoint_id in decisions.read().retained:
                    yield checkpoint_id, found
                    break
                if time.monotonic() - rested > _AT_WORK_S:
                    self._stopped.wait(_AT_REST_S)
                    rested = time.monotonic()
                if self._stopped.is_set():
                    return

    def _damage_of(self, record: CheckpointCompleted, known: set[str]) -> Iterator[str | None]:
        """What is wrong with each file that was not read before; None: nothing is."""
        try:
            manifest = read_manifest(self._files, record)
        except DamagedCheckpoint as damage:
            yield str(damage)
            return
        for file in check_files(self._files, manifest, but=known):
            if file.damage is None:
                known.add(file.path)
            yield file.damage
