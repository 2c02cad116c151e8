"""A run that is fed, step by step: what a step has put into the sources is consumed by every stage and shown by every
table before the next one is put in.

So the batches of a pipeline's own test are the same ones whenever it runs (`tidegate.testing.run_pipeline`). After the
last step the run ends as any other does, and its last checkpoint is what shows that step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from tidegate.engine.ending import Consumption
from tidegate.errors import CheckpointError

if TYPE_CHECKING:
    from tidegate.engine.generation import Generation
    from tidegate.engine.stage.running import RunningStage


class Fed(msgspec.Struct, frozen=True):
    """What was put into the sources: how many batches each has to run in all, since the root was new."""

    batches: Mapping[str, int]
    is_last: bool


Feed = Callable[[], Fed]
"""Puts in the next step. It is called at first, and then whenever every table shows all that was put in before."""


class Feeding:
    """Of one generation."""

    def __init__(self, generation: Generation, feed: Feed) -> None:
        self._generation = generation
        self._feed = feed
        self._fed: Fed | None = None
        self._consumption = Consumption(generation, self._has_read)
        self._checkpoint: int | None = None

    def is_over(self) -> bool:
        """Whether the last step is consumed. To be called in every round."""
        if self._fed is None:
            self._fed = self._feed()
        if self._checkpoint is None and not self._consumption.is_complete():
            return False
        if self._fed.is_last:
            return True
        if self._is_shown():
            self._fed = self._checkpoint = None
        return False

    def _has_read(self, source: RunningStage) -> bool:
        assert self._fed is not None
        return source.progress.batch + 1 >= self._fed.batches.get(source.definition.head, 0)

    def _is_shown(self) -> bool:
        """Whether a checkpoint behind all that is consumed was taken, and everybody shows it."""
        generation, taken = self._generation, self._checkpoint
        if taken is None or not (generation.completed(taken) or generation.is_under_way(taken)):
            with suppress(CheckpointError):  # one is in progress: right after it
                self._checkpoint = generation.trigger()
            return False
        return generation.completed(taken) and generation.is_settled
