"""What a run is doing at one moment, as values: for its own view, and for those who look from outside.

Importing this brings no PySpark.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from tidegate.protocol.coordinator import Checkpoint, Phase
from tidegate.protocol.recovery import checkpoint_name

if TYPE_CHECKING:
    from tidegate.spark.generation import Generation

_LAST_CHECKPOINTS: Final = 8
_RATE_OVER_S: Final = 1.0

RunState = Literal["starting", "running", "stopping", "restarting", "finished", "interrupted", "failed"]


class StageStatus(msgspec.Struct, frozen=True):
    """`rows` is what it has written since the last start, of the run or of its stages after a failure: what was written
    before may have been written again. `lag` is how many segments of its inputs it has yet to read. `held_back_by` is
    the reader of its output, or "its table", that is too far behind for it to go on."""

    kind: str
    batch: int | None
    rows: int
    rows_per_s: float
    lag: int | None
    watermark_ms: int | None
    held_back_by: str | None = None


class CheckpointStatus(msgspec.Struct, frozen=True):
    """`state` is preparing, prepared or deciding; then committing and complete, or aborted.

    `stages` says how far each stage has come with it: see `RunningStage.progress_of`.
    """

    checkpoint: str
    state: str
    aligned: bool
    generation: int
    attempt: int
    triggered_at: str
    duration_ms: int
    new_bytes: int
    total_bytes: int
    why: str | None = None
    stages: dict[str, str] = {}


class RunStatus(msgspec.Struct, frozen=True):
    """`checkpoints` are the last that ended, oldest first, whatever generation they were of."""

    pipeline: str
    pid: int
    host: str
    started_at: str
    updated_at: str
    state: RunState
    why: str | None = None
    generation: int | None = None
    stages: dict[str, StageStatus] = {}
    in_progress: tuple[CheckpointStatus, ...] = ()
    checkpoints: tuple[CheckpointStatus, ...] = ()


class Observer:
    """Looks at a run from inside, from its control thread."""

    def __init__(self, pipeline: str) -> None:
        now = _now()
        self.status = RunStatus(pipeline, os.getpid(), socket.gethostname(), now, now, "starting")
        self._rates: dict[tuple[int, str], tuple[float, int, float]] = {}
        self._earlier: deque[CheckpointStatus] = deque(maxlen=_LAST_CHECKPOINTS)
        self._ended: tuple[CheckpointStatus, ...] = ()

    def observe(self, generation: Generation, *, is_stopping: bool = False) -> RunStatus:
        """The run as it is now. `is_stopping`: it was told to, and takes its last checkpoint."""
        if generation.generation != self.status.generation:
            self._earlier.extend(self._ended)
            self._rates.clear()
        self._ended = tuple(status_of(each) for each in generation.coordinator.history[-_LAST_CHECKPOINTS:])
        stages = generation.stages
        self.status = msgspec.structs.replace(
            self.status,
            updated_at=_now(),
            state="stopping" if is_stopping else "running",
            why=None,
            generation=generation.generation,
            stages={
                name: StageStatus(
                    stage.definition.kind,
                    stage.batch if stage.batch >= 0 else None,
                    stage.rows,
                    self._rate(generation.generation, name, stage.rows),
                    stage.lag if stage.definition.inputs else None,
                    stage.watermark_ms,
                    generation.held_back_by(name),
                )
                for name, stage in stages.items()
            },
            in_progress=tuple(
                status_of(
                    each,
                    {
                        name: "done" if name in each.reports else stage.progress_of(each.checkpoint_id)
                        for name, stage in stages.items()
                    },
                )
                for each in generation.coordinator.active
            ),
            checkpoints=(*self._earlier, *self._ended)[-_LAST_CHECKPOINTS:],
        )
        return self.status

    def note(self, state: RunState, why: str | None) -> RunStatus:
        """What cannot be seen at a generation: that there is none, and why."""
        self.status = msgspec.structs.replace(self.status, updated_at=_now(), state=state, why=why, in_progress=())
        return self.status

    def _rate(self, generation: int, name: str, rows: int) -> float:
        now = time.monotonic()
        then, before, rate = self._rates.setdefault((generation, name), (now, rows, 0.0))
        if now - then >= _RATE_OVER_S:
            rate = (rows - before) / (now - then)
            self._rates[generation, name] = (now, rows, rate)
        return round(rate, 1)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


_STATES: Final = {Phase.COMPLETED: "committing", Phase.COMMITTED: "complete"}


def status_of(checkpoint: Checkpoint, stages: dict[str, str] | None = None) -> CheckpointStatus:
    now_ms = time.monotonic_ns() // 1_000_000
    since = timedelta(milliseconds=now_ms - checkpoint.triggered_ms)
    reason = checkpoint.abort_reason
    return CheckpointStatus(
        checkpoint=checkpoint_name(checkpoint.checkpoint_id),
        state=_STATES.get(checkpoint.phase, checkpoint.phase.value),
        aligned=checkpoint.is_aligned,
        generation=checkpoint.generation,
        attempt=checkpoint.attempt,
        triggered_at=(datetime.now(UTC) - since).isoformat(timespec="milliseconds"),
        duration_ms=now_ms - checkpoint.triggered_ms if checkpoint.duration_ms is None else checkpoint.duration_ms,
        new_bytes=checkpoint.new_bytes,
        total_bytes=checkpoint.total_bytes,
        why=None if reason is None else f"{reason.value}: {checkpoint.abort_detail}".removesuffix(": "),
        stages={} if stages is None else stages,
    )
