"""How a run ends in order: after a last checkpoint, behind which nothing flows, when all tables show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.errors import CheckpointError
from tidegate.protocol.messages import Flag

if TYPE_CHECKING:
    from tidegate.engine.generation import Generation


class Ending:
    """Of one generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._last: int | None = None
        self._waited_at: dict[str, int] = {}

    @property
    def is_begun(self) -> bool:
        """Whether the last checkpoint is under way."""
        return self._last is not None

    def begin(self) -> None:
        """Take the last checkpoint: now, or in one of the next rounds."""
        if self._last is None:
            try:
                self._last = self._generation.trigger(Flag.DRAIN)
            except CheckpointError:
                return  # one is in progress: after it

    def is_over(self) -> bool:
        """Whether it was taken, and everybody shows it. If it was aborted, it is to be begun again."""
        generation, last = self._generation, self._last
        if last is None:
            return False
        if generation.completed(last):
            return generation.is_settled
        if not generation.is_under_way(last):
            self._last = None
        return False

    def has_consumed_all(self) -> bool:
        """Whether the sources have ended, and every query has waited for data in vain since its last batch.

        A query that has consumed all may still have a batch without data to run, when its watermark has moved.
        """
        all_done = True
        for stage in self._generation.stages.values():
            if not stage.definition.inputs:
                all_done &= stage.progress.has_ended
            elif stage.has_consumed_all:
                if stage.progress.is_idle:
                    self._waited_at[stage.name] = stage.progress.last_useful_batch
                all_done &= self._waited_at.get(stage.name) == stage.progress.last_useful_batch
            else:
                all_done = False
        return all_done
