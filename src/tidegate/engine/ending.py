"""How a run ends in order: after a last checkpoint, behind which nothing flows, when all tables show it.

Before that one, a run that *drains* lets no source read on, and every stage and sink consumes what the sources have
read, with the batches without data that come of it. An ordinary last checkpoint has nothing in flight either, but what
a watermark has closed only then is left to the next run; and it has to align in the time that a checkpoint may take. A
drain takes as long as it takes, and checkpoints go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidegate.engine.closing import next_to_close
from tidegate.engine.requests import StopRun
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
        """To be called again and again: what a query was seen to wait behind is remembered.

        Of a query elsewhere it is known what it said last. Who reads a query that is done has consumed all when it has
        come to where that one's output has ended: neither changes any more.
        """
        if len(self.done_here()) < len(self._generation.stages):
            return False
        links = self._generation.links
        rests = {} if links is None else links.rests()
        return all(
            rest.is_done and all(rests[name].sequence == position for name, position in rest.positions.items())
            for rest in rests.values()
        )

    def done_here(self) -> frozenset[str]:
        """The queries that are done, of those that run here."""
        done: set[str] = set()
        for stage in self._generation.stages.values():
            if not stage.definition.inputs:
                if self._is_source_done(stage):
                    done.add(stage.name)
            elif stage.has_consumed_all:
                if stage.progress.is_idle:
                    self._waited_at[stage.name] = stage.progress.last_useful_batch
                if self._waited_at.get(stage.name) == stage.progress.last_useful_batch:
                    done.add(stage.name)
        return frozenset(done)


class Ending:
    """Of one generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._last: int | None = None
        self._how: StopRun | None = None
        self._is_full = False
        self._has_consumed_all = False
        self._consumption = Consumption(generation, generation.has_ended)

    @property
    def is_begun(self) -> bool:
        return self._how is not None

    def begin(self, how: StopRun) -> None:
        """Take the last checkpoint: now, when it is drained, or in one of the next rounds. To be called again when it
        is to end otherwise; too late, where the last checkpoint was begun."""
        self._how = how
        if how.drain:
            self._generation.hold_sources()

    def look(self) -> None:
        """Whether all is consumed, to be called now and then: Spark is asked."""
        if not self._has_consumed_all:
            self._has_consumed_all = self._consumption.is_complete()

    @property
    def has_consumed_all(self) -> bool:
        """Whether the sources have ended, or are held, and nothing is left of what they have read."""
        return self._has_consumed_all

    @property
    def is_draining(self) -> bool:
        """Whether something is still to be consumed before the last checkpoint."""
        return self._how is not None and self._how.drain and self._last is None and not self._has_consumed_all

    @property
    def done(self) -> StopRun:
        """What was done of what may be wanted, once it is over."""
        is_all_closed = (
            self._has_consumed_all and not self._generation.elsewhere and not next_to_close(self._generation)
        )
        return StopRun(full=self._is_full, drain=self._has_consumed_all, close_windows=is_all_closed)

    @property
    def goes_on(self) -> bool:
        """Whether another generation is to follow, which closes windows."""
        return self._how is not None and self._how.close_windows and bool(next_to_close(self._generation))

    def _take(self, how: StopRun) -> None:
        is_full = how.full and not self.goes_on
        try:
            self._last = self._generation.trigger(Flag.DRAIN | Flag.FULL_SNAPSHOT if is_full else Flag.DRAIN)
        except CheckpointError:
            return  # one is in progress: right after it, before the next one is due
        self._is_full = is_full

    def is_over(self) -> bool:
        """Whether it was taken, and everybody shows it. Called in every round: one that was aborted is taken again."""
        if self._how is not None and self._last is None and not self.is_draining:
            self._take(self._how)
        generation, last = self._generation, self._last
        if last is None:
            return False
        if generation.completed(last):
            return generation.is_settled
        if not generation.is_under_way(last):
            self._last = None
        return False
