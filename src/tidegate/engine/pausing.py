"""Pausing a source: under backpressure its query is stopped, and goes on when the readers have caught up; behind a
drain it is too, and goes on if that is cancelled. One that is *held* never goes on: the run is to consume what was
read, and to end.

A stop is not graceful: it hits a batch that is under way. That batch must never be run again in the folders in which it
was tried: Spark would take what is in them for its outcome. So the source goes on in fresh folders, as another
*attempt*, from its last committed batch. That needs nothing of the other stages: what it has handed on is durable, and
where it stands is known. Stopping and starting take their time, so they happen beside the control thread; barriers pass
meanwhile, behind the last batch.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Final

from pyspark.errors import StreamingQueryException

from tidegate.engine.carrier import Beside
from tidegate.engine.kill_points import Step, reached
from tidegate.engine.stage.running import RunningStage
from tidegate.errors import StageFailed
from tidegate.spark.causes import cause_of, exception_of, failure_of
from tidegate.storage.files import Files

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger("tidegate")

_STOPS_IN_S: Final = 120.0

StartQuery = Callable[[Files, Files], "StreamingQuery"]
"""Starts a stage's query on a folder of Spark's checkpoint and one of its output."""


class _Phase(enum.Enum):
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    STARTING = "starting"


class PausableSource:
    """A source's query, as its readers, or its table, want it. `poll` is called from the control thread."""

    def __init__(
        self,
        stage: RunningStage,
        start: StartQuery,
        folders: Callable[[int], tuple[Files, Files]],
        call: Beside,
        *,
        is_started: bool = True,
    ) -> None:
        """`folders`: of an attempt, that of Spark's checkpoint and that of the output. `is_started`: whether its query
        is, or is about to be."""
        self._stage = stage
        self._start = start
        self._folders_of = folders
        self._call = call
        self._phase = _Phase.RUNNING if is_started else _Phase.PAUSED
        self._is_held = False
        self._attempt = 1
        self._stopping: Future[None] | None = None
        self._starting: Future[StreamingQuery] | None = None

    @property
    def _folders(self) -> tuple[Files, Files]:
        return self._folders_of(self._attempt)

    def poll(self) -> None:
        stage = self._stage
        match self._phase:
            case _Phase.RUNNING:
                query = stage.progress.query
                # One that has ended, or failed, is no longer to be stopped: its own look at it will tell.
                # Before its first batch there is nothing that it could go on from; one that is held need not.
                may_stop = stage.progress.batch >= 0 or self._is_held
                if not self._is_wanted and may_stop and query is not None and query.isActive:
                    stage.progress.query = None
                    self._stopping = self._call(f"tidegate-pause-{stage.name}", partial(_stop, query))
                    self._phase = _Phase.STOPPING
            case _Phase.STOPPING:
                if self._ended(self._stopping):
                    self._phase = _Phase.PAUSED
                    reached(Step.SOURCE_PAUSED)
                    _log.debug("source %s is paused after batch %d", stage.name, stage.progress.batch)
            case _Phase.PAUSED:
                if self._is_wanted and stage.progress.has_taken_up_all:
                    self._attempt += 1
                    self._starting = self._call(f"tidegate-go-on-{stage.name}", self._rebuild_and_start)
                    self._phase = _Phase.STARTING
            case _Phase.STARTING:
                if self._ended(self._starting):
                    assert self._starting is not None
                    stage.move_to(self._attempt, *self._folders, self._starting.result())
                    self._phase = _Phase.RUNNING
                    reached(Step.SOURCE_GOES_ON)
                    _log.debug("source %s goes on after batch %d", stage.name, stage.progress.batch)

    @property
    def _is_wanted(self) -> bool:
        """Behind a drain nobody takes up what it would write, however long its readers are still at work."""
        return not (self._is_held or self._stage.is_held_back or self._stage.checkpoints.is_drained)

    @property
    def name(self) -> str:
        return self._stage.name

    def hold(self) -> None:
        """It reads no more in this generation."""
        self._is_held = True

    @property
    def is_at_rest(self) -> bool:
        """Whether it is held, does nothing any more, and all that it had committed was taken up."""
        return self._is_held and self._phase is _Phase.PAUSED and self._stage.progress.has_taken_up_all

    def _rebuild_and_start(self) -> StreamingQuery:
        # The stage stands still: it is not looked at by anybody else but for its last batch.
        self._stage.rebuild(*self._folders)
        return self._start(*self._folders)

    def _ended(self, change: Future[StreamingQuery] | Future[None] | None) -> bool:
        assert change is not None
        if not change.done():
            return False
        error = change.exception()
        if error is None:
            return True
        if isinstance(error, StreamingQueryException):  # it has failed before it could be stopped
            raise failure_of(self._stage.definition, error) from error
        what = "paused" if self._phase is _Phase.STOPPING else "started again after a pause"
        raise StageFailed(self._stage.name, f"its query could not be {what}: {cause_of(error)}") from error

    def stop(self) -> None:
        """Wait until nothing is being stopped or started any more."""
        if self._stopping is not None:
            wait([self._stopping], timeout=_STOPS_IN_S)
        if self._starting is not None:
            wait([self._starting], timeout=_STOPS_IN_S)

    @property
    def started(self) -> StreamingQuery | None:
        """A query that was started and not handed over yet: whoever stops the stages has to stop it too."""
        if self._starting is None or not self._starting.done() or self._starting.exception() is not None:
            return None
        return self._starting.result()


def _stop(query: StreamingQuery) -> None:
    query.stop()
    failure = exception_of(query)
    if failure is not None:
        raise failure
