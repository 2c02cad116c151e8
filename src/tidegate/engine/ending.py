"""How a run ends in order: after a last checkpoint, behind which nothing flows, when all tables show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidegate.errors import CheckpointError
from tidegate.protocol.messages import Flag

if TYPE_CHECKING:
    from tidegate.engine.generation import Generation
    from tidegate.engine.stage.running import RunningStage


class Consumption:
    """Whether a generation has consumed all that there is: each source is done, and every query has waited for data in
    vain since its last batch.

    A query that has consumed all may still have a batch without data to run, when its watermark has moved.
    """

    def __init__(self, generation: Generation, is_source_done: Callable[[RunningStage], bool]) -> None:
        self._generation = generation
        self._is_source_done = is_source_done
        self._waited_at: dict[str, int] = {}

    def is_complete(self) -> bool:
        """To be called again and again: what a query was seen to wait behind is remembered."""
        all_done = True
        for stage in self._generation.stages.values():
            if not stage.definition.inputs:
                all_done &= self._is_source_done(stage)
            elif stage.has_consumed_all:
                if stage.progress.is_idle:
                    self._waited_at[stage.name] = stage.progress.last_useful_batch
                all_done &= self._waited_at.get(stage.name) == stage.progress.last_useful_batch
            else:
                all_done = False
        return all_done


class Ending:
    """Of one generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._last: int | None = None
        self._is_wanted = False
        self._consumption = Consumption(generation, lambda source: source.progress.has_ended)

    @property
    def is_begun(self) -> bool:
        return self._is_wanted

    def begin(self) -> None:
        """Take the last checkpoint: now, or in one of the next rounds."""
        self._is_wanted = True

    def _take(self) -> None:
        try:
            self._last = self._generation.trigger(Flag.DRAIN)
        except CheckpointError:
            return  # one is in progress: right after it, before the next one is due

    def is_over(self) -> bool:
        """Whether it was taken, and everybody shows it. Called in every round: one that was aborted is taken again."""
        if self._is_wanted and self._last is None:
            self._take()
        generation, last = self._generation, self._last
        if last is None:
            return False
        if generation.completed(last):
            return generation.is_settled
        if not generation.is_under_way(last):
            self._last = None
        return False

    def has_consumed_all(self) -> bool:
        """Whether the sources have ended, and nothing is left of what they have read."""
        return self._consumption.is_complete()
