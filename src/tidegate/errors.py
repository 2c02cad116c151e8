"""Every error that Tidegate raises on purpose, as one tree.

    TidegateError
     ├─ InvalidConfig            a setting cannot be; fix it and start again
     ├─ InvalidPipeline          the pipeline as written cannot run; fix it and start again
     ├─ InvalidRows              the rows that a test gives do not fit their source; fix the test
     ├─ NotConsumed              the rows that a test gives were not consumed in time
     ├─ RootInUse                another run on this root is alive
     ├─ NoRoot                   the folder is not the root of any pipeline, or cannot be one
     │   └─ BucketUnfit            the bucket lets two create one object
     ├─ ForeignRoot              the root belongs to another pipeline, or another version of Tidegate
     ├─ PipelineChanged          the pipeline no longer fits its checkpoint
     ├─ RecoveryRefused          starting would lose or double rows; it says what to do instead
     ├─ NotRunning               no run is alive on the root, so nobody does what was asked
     ├─ RequestFailed            the live run did not do what it was asked for
     ├─ UnknownCheckpoint        the root retains no checkpoint of that id
     ├─ UnknownState             the checkpoint holds no such stage, or nothing of that kind for it
     ├─ NoCommonPosition         two pipelines have no checkpoints at which both have read the same
     ├─ CheckpointNotVisible     the tables do not show the checkpoint by itself
     ├─ StageFailed              a stage's query failed, more often than it may
     │   └─ DataLost               what a source has yet to read is gone from where it reads
     ├─ InstanceFailed           a driver process that runs stages for another one cannot go on
     ├─ SparkLost                Spark's process is gone
     ├─ CheckpointsFailed        more checkpoints failed in a row than tolerated
     ├─ SinkFailed               a table cannot be written as it stands
     │   ├─ Fenced                 the table was fenced by a newer generation
     │   ├─ ForeignTable           the table belongs to another root of the pipeline
     │   ├─ TablePutBack           the table was put back to an older state, and would keep a hole
     │   └─ ConflictingRows        of several rows of one key nothing tells which is the newest
     ├─ CheckpointError          the call does not fit the checkpoint's phase
     │   ├─ CheckpointInProgress   as many as allowed are under way; try again later
     │   ├─ NoCheckpointInProgress there is none with that id to act on
     │   └─ CheckpointIncomplete   some stages have not reported yet
     ├─ ProtocolViolation        a peer said what it may not say; nothing was changed
     │   ├─ UnknownInput           a message from an input that the stage does not have
     │   └─ BarrierConflict        two barriers of one checkpoint disagree
     ├─ Superseded               another run took over; this one must stop
     ├─ DamagedLog               the decision log cannot be trusted as it stands
     ├─ DamagedCheckpoint        a file of a checkpoint is missing, or is not what it was
     ├─ StoreUnavailable         the store did not answer, or may have done it; a retry helps
     ├─ CoordinationUnavailable  what driver processes share did not answer; a retry helps
     │   ├─ NotWritten             nothing was changed there
     │   ├─ MaybeWritten           it may have been changed, now or later: read it back
     │   └─ SessionLost            others may have taken this process for dead; it has to join anew
     └─ InvariantViolation       cannot happen: a defect in Tidegate

`retry_helps` on each class tells a caller whether the same call may succeed later.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

_WORKER: Final = re.compile(r"Error from python worker:\n(?:.*\n)*?(.*)\nPYTHONPATH was:")


class TidegateError(Exception):
    """The root of the tree."""

    retry_helps: ClassVar[bool] = False


class InvalidConfig(TidegateError):
    """A setting has a value that it cannot have."""


class InvalidPipeline(TidegateError):
    """The pipeline as written cannot run."""


class InvalidRows(TidegateError):
    """The rows that a test gives do not fit their source."""


class NotConsumed(TidegateError):
    """The rows that a test gives were not consumed in time."""


class RootInUse(TidegateError):
    """Another run on this root is alive."""

    retry_helps = True


class NoRoot(TidegateError):
    """The folder is not the root of any pipeline, or cannot be one."""


class BucketUnfit(NoRoot):
    """A bucket does not do what a root needs: of all that create one object, exactly one may."""


class ForeignRoot(TidegateError):
    """The root belongs to another pipeline, or to another version of Tidegate."""


class PipelineChanged(TidegateError):
    """The pipeline no longer fits the checkpoint that it would be restored from."""


class RecoveryRefused(TidegateError):
    """Starting would lose or double rows, or could; the message says what to do instead."""


class NotRunning(TidegateError):
    """No run is alive on the root, so nobody does what was asked."""


class RequestFailed(TidegateError):
    """The run that is alive did not do what it was asked for."""

    retry_helps = True


class UnknownCheckpoint(TidegateError):
    """The root retains no checkpoint of that id."""


class UnknownState(TidegateError):
    """A checkpoint holds no such stage, or no such state of it, or nothing in flight to it."""


class NoCommonPosition(TidegateError):
    """Of two pipelines no two checkpoints that are retained have read the same input."""


class CheckpointNotVisible(TidegateError):
    """The tables do not show the checkpoint yet, or showed it only together with a later one."""

    retry_helps = True


class StageFailed(TidegateError):
    """A stage's query failed."""

    retry_helps = True

    def __init__(self, stage: str, cause: str) -> None:
        super().__init__(f"stage {stage!r} failed: {cause}")
        self.stage = stage
        self.cause = cause


class DataLost(StageFailed):
    """What a source has yet to read is gone from where it reads: trying again would not find it either."""

    retry_helps = False

    def __init__(self, stage: str, what: str) -> None:
        super().__init__(
            stage,
            f"rows that it has yet to read are gone from its source: {what.rstrip('. ')}. Trying again does not bring "
            f"them back. What to do: put them back, if you can, and start again; or go on without them: set the "
            f"source's option failOnDataLoss to false and start again. The tables and the newest checkpoint stay as "
            f"they are",
        )


class InstanceFailed(TidegateError):
    """A driver process that runs stages of the pipeline for another one cannot go on."""

    retry_helps = True

    def __init__(self, instance: str, cause: str) -> None:
        super().__init__(f"instance {instance!r} failed: {cause}")


class SparkLost(TidegateError):
    """The JVM that Spark runs in is gone, or Spark was stopped in it."""

    retry_helps = True


class CheckpointsFailed(TidegateError):
    """More checkpoints failed in a row than tolerated."""

    retry_helps = True


class SinkFailed(TidegateError):
    """A table cannot be written as it stands."""


class Fenced(SinkFailed):
    """The table was fenced by a newer generation: this run's commits come too late."""


class ForeignTable(SinkFailed):
    """The table belongs to another root of the pipeline."""


class TablePutBack(SinkFailed):
    """The table was put back to an older state: what came after it would be missing. `epoch` is its last one,
    `next_batch` the batch after the last that it shows."""

    def __init__(self, what: str, epoch: int, next_batch: int) -> None:
        super().__init__(what)
        self.epoch = epoch
        self.next_batch = next_batch


class ConflictingRows(SinkFailed):
    """Of several rows of one key in a batch nothing tells which is the newest. Trying again brings the same rows."""


class CheckpointError(TidegateError):
    """The call does not fit the phase that the checkpoint is in."""


class CheckpointInProgress(CheckpointError):
    """As many checkpoints as allowed are under way."""

    retry_helps = True


class NoCheckpointInProgress(CheckpointError):
    """No checkpoint with that id is under way."""


class CheckpointIncomplete(CheckpointError):
    """The checkpoint cannot be decided yet: stages are missing."""

    retry_helps = True

    def __init__(self, checkpoint_id: int, missing: frozenset[str]) -> None:
        shown = ", ".join(sorted(missing)[:5]) + (", …" if len(missing) > 5 else "")
        super().__init__(f"checkpoint {checkpoint_id} waits for {len(missing)} stage(s): {shown}")
        self.missing = missing


class ProtocolViolation(TidegateError):
    """A peer broke the protocol. The receiver's state is as it was before the message."""


class UnknownInput(ProtocolViolation):
    """A message came from an input that the stage does not have."""


class BarrierConflict(ProtocolViolation):
    """Two barriers carry one checkpoint id but disagree about what it is."""


class Superseded(TidegateError):
    """A newer generation was opened. This run decides, commits and deletes nothing more."""

    def __init__(self, own_generation: int, newer_generation: int) -> None:
        super().__init__(
            f"generation {own_generation} was superseded by generation {newer_generation}: another run "
            f"of this pipeline took over, so this one stops; nothing that it completed is lost"
        )
        self.own_generation = own_generation
        self.newer_generation = newer_generation


class DamagedLog(TidegateError):
    """The decision log contradicts itself, or a record of it cannot be read."""


class DamagedCheckpoint(TidegateError):
    """A file of a checkpoint is missing, or is not what it was."""


class StoreUnavailable(TidegateError):
    """The store failed. Whether a write took effect is not known."""

    retry_helps = True


class CoordinationUnavailable(TidegateError):
    """What driver processes share did not answer."""

    retry_helps = True


class NotWritten(CoordinationUnavailable):
    """Nothing was changed there."""


class MaybeWritten(CoordinationUnavailable):
    """It may have been changed, now or later: read it back."""


class SessionLost(CoordinationUnavailable):
    """Others may have taken this process for dead; it has to join anew."""


class InvariantViolation(TidegateError):
    """Something that cannot happen did. Please report it: it is a defect in Tidegate."""


def first_line(error: BaseException) -> str:
    """What went wrong, without the traces that Spark and delta-rs add."""
    said = str(error)
    first = said.split("\n", 1)[0].strip()
    # Of a worker that could not even start, Spark says it further below.
    worker = _WORKER.search(said) if first.endswith("SparkException:") else None
    return first if worker is None else f"{first} Python's worker could not start: {worker[1].strip()}"
