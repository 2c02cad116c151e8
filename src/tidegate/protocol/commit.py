"""Prepare → permit → commit: how sinks make an epoch visible.

Guarantees:
- A sink is committed only with a `CommitPermit`, and only a record of the decision log yields one.
- Each sink commits its epochs in order. A commit that failed is tried again, after growing pauses, for as
  long as the run lives; a run that stops leaves the rest to recovery. No sink is ever given up silently.
- A commit may be repeated: the sink's own record of its last epoch makes the repeat do nothing.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tidegate.errors import InvariantViolation
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.transitions import step


class CommitPermit:
    """The right to commit one epoch to all sinks. Made by `permit_commit` alone."""

    __slots__ = ("_checkpoint_id", "_epoch", "_generation")

    def __init__(self, checkpoint_id: int, epoch: int, generation: int, *, _proof: object) -> None:
        if _proof is not _PROOF:
            raise InvariantViolation("a commit permit comes from the decision log and from nowhere else")
        self._checkpoint_id = checkpoint_id
        self._epoch = epoch
        self._generation = generation

    @property
    def checkpoint_id(self) -> int:
        return self._checkpoint_id

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def generation(self) -> int:
        """The generation that commits. A sink that was fenced by a newer one refuses it."""
        return self._generation

    def __repr__(self) -> str:
        return f"CommitPermit({self._checkpoint_id}, epoch {self._epoch}, generation {self._generation})"


_PROOF: Final = object()


def permit_commit(log: DecisionLog, checkpoint_id: int, generation: int) -> CommitPermit:
    """The permit for a checkpoint that the log holds, for the generation that will do the committing."""
    record = log.completed(checkpoint_id)
    if record is None or record not in log.lineage():
        raise InvariantViolation(f"checkpoint {checkpoint_id} was not decided: nothing may be committed for it")
    return CommitPermit(checkpoint_id, record.epoch, generation, _proof=_PROOF)


class SinkPhase(enum.Enum):
    SETTLED = "settled"
    DUE = "due"
    COMMITTING = "committing"


class SinkEvent(enum.Enum):
    PERMITTED = "an epoch is permitted"
    COMMIT = "commit is called"
    COMMITTED = "the last permitted epoch is committed"
    COMMITTED_MORE_DUE = "committed, a later epoch is due"
    FAILED = "the commit failed"


TRANSITIONS: Final[Mapping[tuple[SinkPhase, SinkEvent], SinkPhase]] = {
    (SinkPhase.SETTLED, SinkEvent.PERMITTED): SinkPhase.DUE,
    (SinkPhase.DUE, SinkEvent.PERMITTED): SinkPhase.DUE,
    (SinkPhase.COMMITTING, SinkEvent.PERMITTED): SinkPhase.COMMITTING,
    (SinkPhase.DUE, SinkEvent.COMMIT): SinkPhase.COMMITTING,
    (SinkPhase.COMMITTING, SinkEvent.COMMITTED): SinkPhase.SETTLED,
    (SinkPhase.COMMITTING, SinkEvent.COMMITTED_MORE_DUE): SinkPhase.DUE,
    (SinkPhase.COMMITTING, SinkEvent.FAILED): SinkPhase.DUE,
}


class RetryPause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to wait before what has failed is tried again: doubling, up to a bound."""

    first_ms: int = 100
    longest_ms: int = 30_000

    def after(self, failures: int) -> int:
        return int(min(self.first_ms * 2 ** min(failures - 1, 30), self.longest_ms))


class _Sink:
    __slots__ = ("due_ms", "failures", "permits", "phase", "why")

    def __init__(self) -> None:
        self.phase = SinkPhase.SETTLED
        self.permits: deque[CommitPermit] = deque()
        self.failures = 0
        self.due_ms = 0
        self.why = ""


class SinkCommits:
    """Drives all sinks of a pipeline through the epochs that were permitted."""

    def __init__(self, sinks: Iterable[str], pause: RetryPause | None = None) -> None:
        self._sinks = {name: _Sink() for name in sinks}
        self._pause = RetryPause() if pause is None else pause
        self._uncommitted: dict[int, int] = {}
        self._last_epoch = 0

    def on_permit(self, permit: CommitPermit, now_ms: int) -> int | None:
        """The checkpoint is in the log: every sink has its epoch to commit.

        Returns the checkpoint's id if there is no sink, so that nothing is left to wait for.
        """
        if permit.epoch <= self._last_epoch:
            raise InvariantViolation(f"epoch {permit.epoch} permitted out of order, after {self._last_epoch}")
        self._last_epoch = permit.epoch
        if not self._sinks:
            return permit.checkpoint_id
        for sink in self._sinks.values():
            sink.phase = step(TRANSITIONS, sink.phase, SinkEvent.PERMITTED)
            if not sink.permits:
                sink.due_ms = now_ms
            sink.permits.append(permit)
        self._uncommitted[permit.checkpoint_id] = len(self._sinks)
        return None

    def due(self, now_ms: int) -> list[tuple[str, CommitPermit]]:
        """The commits to call now. Each must be answered with `on_committed` or `on_failed`."""
        calls: list[tuple[str, CommitPermit]] = []
        for name, sink in self._sinks.items():
            if sink.phase is SinkPhase.DUE and now_ms >= sink.due_ms:
                sink.phase = step(TRANSITIONS, sink.phase, SinkEvent.COMMIT)
                calls.append((name, sink.permits[0]))
        return calls

    def on_committed(self, name: str, now_ms: int) -> int | None:
        """The sink shows the epoch. Returns the checkpoint's id if it was the last sink of it."""
        sink = self._sinks[name]
        event = SinkEvent.COMMITTED_MORE_DUE if len(sink.permits) > 1 else SinkEvent.COMMITTED
        sink.phase = step(TRANSITIONS, sink.phase, event)
        checkpoint_id = sink.permits.popleft().checkpoint_id
        sink.failures = 0
        sink.why = ""
        sink.due_ms = now_ms
        self._uncommitted[checkpoint_id] -= 1
        if self._uncommitted[checkpoint_id]:
            return None
        del self._uncommitted[checkpoint_id]
        return checkpoint_id

    def on_failed(self, name: str, why: str, now_ms: int) -> int:
        """The commit failed or its outcome is unknown. Returns how often in a row."""
        sink = self._sinks[name]
        sink.phase = step(TRANSITIONS, sink.phase, SinkEvent.FAILED)
        sink.failures += 1
        sink.why = why
        sink.due_ms = now_ms + self._pause.after(sink.failures)
        return sink.failures

    @property
    def pending(self) -> dict[str, tuple[int, str]]:
        """Per sink that is behind: the epoch that is due, and why the last try of it failed."""
        return {name: (sink.permits[0].epoch, sink.why) for name, sink in self._sinks.items() if sink.permits}
