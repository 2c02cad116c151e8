"""What nobody has noted of the runs before: of one that was killed, the checkpoints that it had under way, and those
whose records it had yet to write. Told from what it said of itself last, from the marks of ids and from the log.

Importing this brings no PySpark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from tidegate.engine.chronicle import ended
from tidegate.engine.events import AnyEvent, CheckpointEnded, StartedBecause
from tidegate.engine.history import Past
from tidegate.engine.status import CheckpointStatus, RunStatus, StagePart, as_moment, status_in
from tidegate.errors import DamagedCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.storage.files import Files
from tidegate.storage.inspection import read_manifest
from tidegate.storage.paths import RootPaths

# Of ids that are marked: those before were forgotten when tables showed a later one, but for what a kill has left.
_LOOKS_BACK: Final = 64
_NAMED_STAGES: Final = 2
_IN_PROGRESS: Final = ("preparing", "prepared", "deciding")
_ENDED: Final = ("finished", "interrupted", "failed")


def why_started(earlier: RunStatus | None) -> tuple[StartedBecause, str | None]:
    """Why a run starts, by what the one before it said last."""
    if earlier is None:
        return "first", None
    if earlier.state in _ENDED:
        return "again", None
    doing = "" if earlier.step is None else f", {earlier.step.told}"
    who = f"process {earlier.pid} on {earlier.host}"
    return "killed", f"{who} was killed, or its machine went down, after {earlier.updated_at} ({earlier.state}{doing})"


class Missed:
    """To be looked for beside the control thread: what a run that opens a generation finds of the runs before."""

    def __init__(self, files: Files, earlier: RunStatus | None, log: DecisionLog, largest_id: int) -> None:
        """`earlier`: what the run before said last. `log`, `largest_id`: as they were when the generation was
        opened."""
        self._files = files
        self._earlier = earlier
        self._first = max(1, largest_id - _LOOKS_BACK)
        self._largest = largest_id
        ids = range(self._first, largest_id + 1)
        self._decided: Mapping[int, CheckpointCompleted] = {
            each: record for each in ids if (record := log.completed(each)) is not None
        }
        self._last = max(self._decided.values(), key=lambda record: record.checkpoint_id, default=None)

    def __call__(self) -> Iterator[AnyEvent]:
        told = self._told()
        marked = {int(name.rpartition("/")[2]) for name in self._files.list(RootPaths.IDS)}
        marked = {each for each in marked if self._first <= each <= self._largest}
        candidates = told.keys() | marked | self._decided.keys()
        if not candidates:
            return
        noted = self._noted()
        for checkpoint_id in sorted(candidates):
            before = noted.get(checkpoint_name(checkpoint_id))
            if before is not None and before.checkpoint.state in ("complete", "aborted"):
                continue  # there is nothing more to say
            event = self._event(checkpoint_id, told.get(checkpoint_id))
            if event is not None:
                yield event if before is None else msgspec.structs.replace(event, at=_after(before))

    def _told(self) -> dict[int, CheckpointStatus]:
        if self._earlier is None:
            return {}
        found = (*self._earlier.checkpoints, *self._earlier.in_progress)
        return {number: each for each in found if (number := checkpoint_id_of(each.checkpoint)) is not None}

    def _noted(self) -> dict[str, CheckpointEnded]:
        """What the history has of the last ones."""
        events, _ = Past(self._files).newest(4 * _LOOKS_BACK, kinds=(CheckpointEnded,))
        return {each.checkpoint.checkpoint: each for each in events if isinstance(each, CheckpointEnded)}

    def _event(self, checkpoint_id: int, told: CheckpointStatus | None) -> CheckpointEnded | None:
        record = self._decided.get(checkpoint_id)
        at = None if self._earlier is None else self._earlier.updated_at
        if record is not None:
            return self._decided_event(record, told, at)
        if told is None:
            return ended(self._bare(checkpoint_id), at=at)
        if told.state in _IN_PROGRESS:
            told = msgspec.structs.replace(told, state="aborted", why=f"the run was killed{_doing(told)}")
        elif told.state == "committing":  # it was decided, and newer ones have taken its place
            told = msgspec.structs.replace(told, state="complete")
        return ended(told, at=at)

    def _decided_event(
        self, record: CheckpointCompleted, told: CheckpointStatus | None, at: str | None
    ) -> CheckpointEnded | None:
        """None: it was brought from elsewhere, and nobody has taken it here."""
        with suppress(DamagedCheckpoint):
            manifest = read_manifest(self._files, record)
            if manifest.origin is not None:
                return None
            if told is None or told.state in _IN_PROGRESS:  # it was decided after that was said
                taken_ms = manifest.duration_ms
                at = as_moment(datetime.fromisoformat(manifest.triggered_at) + timedelta(milliseconds=taken_ms))
                return ended(status_in(manifest), at=at)
        if told is None:
            told = CheckpointStatus(
                checkpoint=checkpoint_name(record.checkpoint_id),
                state="complete",
                generation=record.generation,
                epoch=record.epoch,
                aligned=record.aligned,
            )
        return ended(msgspec.structs.replace(told, state="complete", why=None), at=at)

    def _bare(self, checkpoint_id: int) -> CheckpointStatus:
        """One of which only the mark of its id is left. Ids and epochs are counted together."""
        last = self._last
        ahead = 0 if last is None else last.epoch - last.checkpoint_id
        generation = None if self._earlier is None else self._earlier.generation
        if generation is None:
            generation = 0 if last is None else last.generation
        return CheckpointStatus(
            checkpoint=checkpoint_name(checkpoint_id),
            state="aborted",
            generation=generation,
            epoch=checkpoint_id + ahead,
            why="whoever had begun it was killed; nothing more is known of it",
        )


def _after(before: CheckpointEnded) -> str:
    """The later word counts, whatever the clocks of those say who have noted one: at once, but behind that one."""
    return as_moment(max(datetime.now(UTC), datetime.fromisoformat(before.at) + timedelta(milliseconds=1)))


def _doing(status: CheckpointStatus) -> str:
    """Which stages it was waiting for: those that wait for others come last."""
    undone = [(name, part) for name, part in status.stages.items() if part.progress != "done"]
    if not undone:
        return " while it was being decided" if status.stages else ""
    undone.sort(key=lambda each: _waits(each[1]))
    said = " and ".join(f"{name} was {part.told}" for name, part in undone[:_NAMED_STAGES])
    return f" while {said}"


def _waits(part: StagePart) -> bool:
    return part.progress in ("waiting", "aligning")
