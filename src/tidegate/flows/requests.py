"""What a flow asks of the world, and how often it asks again.

A request is awaited. Its answer is what the world found or did; what went wrong comes back as an exception:
- `StoreUnavailable`: it is not known whether it was done. Whatever is asked for here may be asked for again.
- any other: as the request says.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import msgspec

from tidegate.errors import StoreUnavailable, TidegateError
from tidegate.protocol.aligner import Cut, InFlight
from tidegate.protocol.commit import CommitPermit, RetryPause
from tidegate.protocol.coordinator import Checkpoint, StageReport
from tidegate.protocol.decision_log import (
    Brought,
    CheckpointCompleted,
    ClaimAnswer,
    Decision,
    DecisionLog,
    GenerationOpened,
    judge_claim,
)
from tidegate.protocol.recovery import SinkFacts
from tidegate.protocol.retention import StoredFile

if TYPE_CHECKING:
    from tidegate.flows.stage import StageCheckpoints

Answer = TypeVar("Answer")

Flow = Coroutine["Request[Any]", Any, Answer]
"""A sequence of steps. It goes on with the answer to each of its requests."""


class Request(msgspec.Struct, Generic[Answer], frozen=True):
    def __await__(self) -> Generator[Request[Answer], Answer, Answer]:
        return (yield self)


class Sleep(Request[None], frozen=True):
    delay_ms: int


# -- the decision log -----------------------------------------------------------------------------


class ReadLog(Request[DecisionLog], frozen=True):
    """The decision log as it is now."""


class Claim(Request[bool], frozen=True):
    """Create a record in its slot, if that is empty. Answers whether this very call did, durably.

    The answer decides nothing: the log, read afterwards, does.
    """

    record: Decision


class Force(Request[None], frozen=True):
    """Make a record durable that is in the log: an attempt whose answer was lost has written it, or a run that forced
    nothing."""

    record: Decision


class Trim(Request[None], frozen=True):
    """Delete the records that are not part of the log any more: those of slots before its start, but for these."""

    start: int
    but: frozenset[int]


class Mark(Request[None], frozen=True):
    """Mark a checkpoint id as used, durably."""

    checkpoint_id: int


class LargestMarked(Request[int], frozen=True):
    """The largest id that was ever marked, 0 if none."""


class ForgetMarks(Request[None], frozen=True):
    below: int


# -- opening a generation -------------------------------------------------------------------------


class ReadSinks(Request[dict[str, SinkFacts]], frozen=True):
    """What every table itself says."""


class HasLeftovers(Request[bool], frozen=True):
    """Whether generations have left anything, where no log tells of any."""


class Examine(Request[str | None], frozen=True):
    """Look at all that a checkpoint refers to. Answers what is damaged, None if it is whole."""

    record: CheckpointCompleted


class Fence(Request[None], frozen=True):
    """Make every table refuse the commits of generations below this one."""

    generation: int


class SetTablesBack(Request[None], frozen=True):
    """Make every table show what it showed at a checkpoint, with the records that it had, and refuse the commits of
    generations below the one that decided it. Whatever of it is done already is as good."""

    checkpoint: CheckpointCompleted
    decided: GenerationOpened


class Bring(Request[Brought], frozen=True):
    """Store a checkpoint from elsewhere under these numbers, durably. What a try before has stored of it is as good."""

    generation: int
    checkpoint_id: int


class StartOrder(msgspec.Struct, frozen=True):
    """What a leader tells a member to run.

    It names the incarnation that the leader knows: a process that has died since must not run these stages a second
    time in the same generation, because their channels hold what the first one wrote.
    """

    generation: int
    incarnation: str
    leader: str
    stages: tuple[str, ...]
    base: CheckpointCompleted | None
    after_checkpoint: int


class Fit(Request[bool], frozen=True):
    """Check that what is to run fits the checkpoint that it would start from, and its tables; create those that are
    yet to be. Answers whether the generation may be opened now: else everything is to be looked at again."""

    log: DecisionLog
    base: CheckpointCompleted | None
    skipped: Mapping[int, str | None]
    """The newer ones that are passed over, and why."""


# -- a checkpoint ---------------------------------------------------------------------------------


class Written(msgspec.Struct, frozen=True):
    """A manifest that was written down. `at_ms`: when its checkpoint was begun, by a clock that may jump."""

    name: str
    sha256: str
    at_ms: int


class WriteManifest(Request[Written], frozen=True):
    checkpoint: Checkpoint
    min_watermark_ms: int | None


class ReadReports(Request[Mapping[str, StageReport] | None], frozen=True):
    """What the stages had reported for a checkpoint that is complete. None: it cannot be told."""

    record: CheckpointCompleted


class CommitSink(Request[None], frozen=True):
    """Make an epoch visible in a sink's table. What fails for good comes back as a `FinalFailure`."""

    sink: str
    permit: CommitPermit
    committable: str


class ListStored(Request[list[StoredFile]], frozen=True):
    """The stored files of other generations, and of this one what lies behind a checkpoint that all tables show.

    Of this generation these are: manifests and snapshots of older checkpoints, and the segments that all their readers
    have consumed at it. What a retained checkpoint refers to may be left out.
    """

    visible: int
    reports: Mapping[str, StageReport]
    retained: Mapping[int, CheckpointCompleted | None]
    """What the log retains, with the records of it that are known."""


class Delete(Request[None], frozen=True):
    """Delete stored files. One that is gone already is as good."""

    files: tuple[StoredFile, ...]


class ForgetStaged(Request[None], frozen=True):
    """Remove what older generations have staged for any table: what of it was decided is visible."""

    before_generation: int


# -- a stage's part -------------------------------------------------------------------------------


class Standing(msgspec.Struct, frozen=True):
    """Where a stage stands, right behind its last batch. `committable`: what its table does not show yet. `detail` is
    for who stores it, and who writes the manifest."""

    output_sequence: int
    has_event_time: bool = False
    watermark_ms: int | None = None
    source_position: str | None = None
    committable: str | None = None
    detail: Any = None


class Stored(msgspec.Struct, frozen=True):
    """A snapshot that is stored: the files that it refers to, as far as `StageReport` has them. `detail` is for who
    writes the manifest."""

    files: tuple[str, ...]
    new_bytes: int = 0
    total_bytes: int = 0
    snapshot_ms: int = 0
    detail: Any = None


class StoreSnapshot(Request[Stored], frozen=True):
    """Store all that rebuilds a stage as of a cut, durably, and what it has sealed."""

    stage: str
    cut: Cut
    standing: Standing


class StoredInFlight(msgspec.Struct, frozen=True):
    """What was in flight at a cut, and is durable. `detail` is for who writes the manifest."""

    files: tuple[str, ...] = ()
    detail: Any = None


class StoreInFlight(Request[StoredInFlight], frozen=True):
    """Make durable what was captured in flight."""

    stage: str
    in_flight: tuple[InFlight, ...]


class CheckSealed(Request[None], frozen=True):
    """Ask a stage's table, if it can tell, whether it takes what was sealed. Raises `SinkFailed` if not."""

    stage: str
    committable: str


class DropShown(Request[None], frozen=True):
    """Remove what a sink has staged up to a batch: its table shows it."""

    sink: str
    through_batch: int


class RunStages(Request[Mapping[str, "StageCheckpoints"]], frozen=True):
    """Rebuild the stages of an order from the checkpoint that it names, start their queries, and answer with their
    parts in checkpoints."""

    order: StartOrder


# -- asking again ---------------------------------------------------------------------------------


class Patience(msgspec.Struct, frozen=True):
    """For how long a request is made again that the store does not answer, and after which pauses.

    `sink_tries`: how often a commit may fail in a row. `snapshot_tries`: how often storing one is tried in all.
    """

    give_up_ms: int = 30_000
    pause: RetryPause = RetryPause(first_ms=50, longest_ms=5_000)
    sink_pause: RetryPause = RetryPause()
    sink_tries: int = 8
    snapshot_tries: int = 3


class Host(Protocol):
    """Who carries the requests of flows out."""

    @property
    def now_ms(self) -> int:
        """A time that never jumps."""
        ...

    def start(self, flow: Flow[None], on_failed: Callable[[TidegateError], None]) -> None:
        """Run a flow beside the others. What it raises goes to `on_failed`."""
        ...

    def on_unanswered(self, request: Request[Any], error: StoreUnavailable, failures: int) -> None:
        """The store did not answer for the n-th time in a row; the request is made again after a pause."""
        ...


UNANSWERED: Final = "the store does not answer"


class Asker:
    """Asks again and again, for as long as its patience lasts, and no longer."""

    def __init__(self, host: Host, patience: Patience) -> None:
        self._host = host
        self._patience = patience
        self.last_failure = UNANSWERED
        """What the store said of the last request, if that was not answered yet."""

    async def insist(self, request: Request[Answer]) -> Answer:
        """Until the store answers."""
        self.last_failure = UNANSWERED
        began_ms = self._host.now_ms
        failures = 0
        while True:
            try:
                return await request
            except StoreUnavailable as error:
                failures += 1
                failure = error
            await self._pause(request, failure, failures, began_ms)

    async def claim(self, proposed: Decision) -> tuple[ClaimAnswer, DecisionLog]:
        """Try to make a record part of the log. However an attempt ends, it may have been written: the log tells."""
        began_ms = self._host.now_ms
        failures = 0
        while True:
            is_durable = False
            failure = StoreUnavailable(f"slot {proposed.slot} of the decision log is free, and could not be claimed")
            try:
                is_durable = await Claim(proposed)
            except StoreUnavailable as error:
                failure = error
            log = await self.insist(ReadLog())
            answer = judge_claim(proposed, log)
            if answer is ClaimAnswer.WON and not is_durable:
                await self.insist(Force(proposed))
            if answer is not ClaimAnswer.RETRY:
                return answer, log
            failures += 1
            await self._pause(Claim(proposed), failure, failures, began_ms)

    async def _pause(self, request: Request[Any], failure: StoreUnavailable, failures: int, began_ms: int) -> None:
        self.last_failure = str(failure)
        pause_ms = self._patience.pause.after(failures)
        if self._host.now_ms + pause_ms - began_ms > self._patience.give_up_ms:
            tried = "" if failures == 1 else f" (tried {failures} times)"
            raise StoreUnavailable(f"{failure}{tried}") from failure
        self._host.on_unanswered(request, failure, failures)
        await Sleep(pause_ms)
