"""How far a stage's query has come, by what Spark has committed, and whether it still runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tidegate.errors import StageFailed
from tidegate.spark.causes import exception_of, failure_of
from tidegate.spark.definition import StageDefinition
from tidegate.spark.filelog import BatchOffsets, is_begun, is_committed, is_overrun, read_offsets
from tidegate.spark.resting import WAITING, QueryRest
from tidegate.spark.state import state_mismatch
from tidegate.storage.files import Files

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_BATCHES_IN_VAIN: Final = 3


class Progress:
    def __init__(
        self, definition: StageDefinition, checkpoint: Files, batch: int | None, watermark_ms: int | None
    ) -> None:
        """`checkpoint`: Spark's folder of the query. `batch`, `watermark_ms`: where a restored stage stands."""
        self._definition = definition
        self._stage = definition.name
        self.checkpoint = checkpoint
        self.batch = -1 if batch is None else batch
        self._started_behind = self.batch
        self.watermark_ms = watermark_ms
        self.rows = 0
        self.batches = 0
        """How many batches were taken up of which it is known how long they took."""
        self.batches_ms = 0
        """How long these took together."""
        self.query: StreamingQuery | None = None
        self.rest: QueryRest | None = None
        """Of a query that reads nothing but gates: it may rest while they are empty."""
        self.may_end = False
        """Whether the query ends by itself, as that of a source does with `available_now`."""
        self.has_ended = False
        self.then: Callable[[], StreamingQuery | None] | None = None
        """Starts what is to run after a query that has ended by itself, if anything is."""
        self._half_consumed: list[BatchOffsets] = []
        self._achieved: tuple[int, int | None] = (0, watermark_ms)
        self._in_vain = 0

    # -- batches ----------------------------------------------------------------------------------

    @property
    def _next_batch(self) -> int:
        """The one that Spark is to commit next, by what was taken up."""
        return self.batch + len(self._half_consumed) + 1

    @property
    def has_run(self) -> bool:
        """Whether a batch of this generation was taken up."""
        return self.batch > self._started_behind

    @property
    def has_taken_up_all(self) -> bool:
        """Whether nothing that the query has committed is left to be looked at."""
        return not is_committed(self.checkpoint, self._next_batch)

    def next_committed(self, is_cut_behind: Callable[[BatchOffsets], bool]) -> list[BatchOffsets] | None:
        """The batches that Spark has committed since, up to one behind which the stage can be cut; None if none is.

        Where a batch has half consumed a segment, there is no cut behind it, only behind the next.
        """
        while is_committed(self.checkpoint, self._next_batch):
            if not is_begun(self.checkpoint, self._next_batch):
                self._check_not_overrun()
            offsets = read_offsets(self.checkpoint, self._next_batch)
            self._half_consumed.append(offsets)
            if is_cut_behind(offsets):
                taken, self._half_consumed = self._half_consumed, []
                return taken
        return None

    def on_batch(self, *, has_moved: bool) -> None:
        """The stage stands behind a batch."""
        before, self._achieved = self._achieved, (self.rows, self.watermark_ms)
        self._in_vain = 0 if has_moved or self._achieved != before else self._in_vain + 1

    @property
    def last_useful_batch(self) -> int:
        """The last one that consumed or wrote something, or moved the watermark."""
        return self.batch - self._in_vain

    # -- the query --------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether the query waits for data, having committed nothing that was not taken up here.

        One with timers in processing time never waits: it runs batch after batch, and some of them in vain.
        """
        if self._in_vain >= _BATCHES_IN_VAIN:
            return True
        waits = self.is_resting or (self.query is not None and self.query.status["message"] == WAITING)
        return waits and self.has_taken_up_all

    @property
    def is_resting(self) -> bool:
        return self.rest is not None and self.rest.is_resting

    def stop(self) -> None:
        """Stop the query, whatever it does."""
        if self.rest is not None:
            self.rest.close()
        if self.query is not None:
            self.query.stop()

    def check(self) -> None:
        """Raise if the query has failed, was stopped, or has run away; notice if it has ended."""
        if self.query is None or self.has_ended:
            return
        self._check_not_overrun()
        if self.query.isActive:
            return
        error = exception_of(self.query)
        if error is not None:
            raise state_mismatch(self._definition.head, error) or failure_of(self._definition, error)
        if not self.has_taken_up_all:
            return
        if not self.may_end or is_begun(self.checkpoint, self._next_batch):
            raise StageFailed(
                self._stage, "its query ended without an error and without being done: something has stopped it"
            )
        follows = None if self.then is None else self.then()
        if follows is None:
            self.has_ended = True
        else:
            self.query = follows

    def _check_not_overrun(self) -> None:
        if is_overrun(self.checkpoint, self._next_batch):
            raise StageFailed(
                self._stage,
                f"batch {self._next_batch} was committed and deleted before it was looked at: this process did not run "
                f"for a while",
            )
