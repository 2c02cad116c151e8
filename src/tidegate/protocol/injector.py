"""Where a barrier enters the pipeline: one injector per source.

Guarantees:
- A source takes every barrier that it was given, in order, exactly once: a second one queues behind the
  first while the coordinator's concurrency allows it and is refused otherwise. None is ever replaced.
- Id and epoch are the coordinator's; the source adds nothing of its own, so sources cannot disagree.
- A cancelled barrier that was not yet taken is never taken; one that was is followed by a CANCEL barrier,
  so that every reader of the channel learns of it in order.
- `poll` with nothing pending is one attribute look-up and one truth test.
"""

from __future__ import annotations

from collections import deque

from tidegate.errors import CheckpointInProgress, ProtocolViolation
from tidegate.protocol.messages import Barrier


class Injector:
    __slots__ = ("_last_id", "_max_pending", "_pending", "_source")

    def __init__(self, source: str, *, max_pending: int = 1, after_checkpoint: int = 0) -> None:
        self._source = source
        self._max_pending = max_pending
        self._last_id = after_checkpoint
        self._pending: deque[Barrier] = deque()

    @property
    def pending(self) -> tuple[Barrier, ...]:
        return tuple(self._pending)

    def inject(self, barrier: Barrier) -> None:
        """Hand a barrier to the source. Refused, with nothing changed, if it cannot be queued."""
        if barrier.is_cancel:
            raise ProtocolViolation(f"source {self._source!r}: cancel({barrier.checkpoint_id}) instead")
        if barrier.checkpoint_id <= self._last_id:
            raise ProtocolViolation(
                f"source {self._source!r} got checkpoint {barrier.checkpoint_id} after {self._last_id}: ids only grow"
            )
        waiting = [pending.checkpoint_id for pending in self._pending if not pending.is_cancel]
        if len(waiting) >= self._max_pending:
            raise CheckpointInProgress(
                f"source {self._source!r} has not yet taken the barrier of checkpoint {waiting[0]}, "
                f"and max_concurrent is {self._max_pending}"
            )
        self._last_id = barrier.checkpoint_id
        self._pending.append(barrier)

    def cancel(self, barrier: Barrier) -> None:
        """The coordinator aborted the checkpoint of this barrier.

        A CANCEL barrier takes its place, also where this source never had it: other sources may have sent
        theirs on, and a stage that waits for this source must learn that it waits in vain.
        """
        self._last_id = max(self._last_id, barrier.checkpoint_id)
        kept = [pending for pending in self._pending if pending.checkpoint_id != barrier.checkpoint_id]
        kept.append(barrier.as_cancel())
        kept.sort(key=lambda pending: pending.checkpoint_id)
        self._pending = deque(kept)

    def poll(self) -> Barrier | None:
        """Take the next barrier to append to the source's channel."""
        if self._pending:
            return self._pending.popleft()
        return None
