"""Flows whose requests are answered by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.protocol.logs import log_with
from tidegate.errors import StoreUnavailable, TidegateError
from tidegate.flows.leader import Assignment, Leader
from tidegate.flows.member import Member
from tidegate.flows.opening import Opened
from tidegate.flows.requests import (
    Claim,
    CommitSink,
    Delete,
    Flow,
    ForgetMarks,
    ForgetStaged,
    ListStored,
    Mark,
    Patience,
    ReadLog,
    Request,
    RunStages,
    Sleep,
    Standing,
    StartOrder,
    Trim,
    WriteManifest,
    Written,
)
from tidegate.flows.stage import StageCheckpoints, StartsAt
from tidegate.protocol.commit import CommitPermit, RetryPause
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.coordinator import AbortReason, Checkpoint, StageReport
from tidegate.protocol.decision_log import CheckpointCompleted, Decision, DecisionLog
from tidegate.protocol.messages import Barrier
from tidegate.protocol.quorum import Ack, Announcement
from tidegate.protocol.retention import StoredFile

R = TypeVar("R", bound=Request[Any])

PATIENCE = Patience(
    give_up_ms=1_000,
    pause=RetryPause(first_ms=10, longest_ms=100),
    sink_pause=RetryPause(first_ms=10, longest_ms=100),
    sink_tries=3,
    snapshot_tries=2,
)
CONFIG = CheckpointConfig(interval_ms=10**6, timeout_ms=500, max_concurrent=2)
OnFailed = Callable[[TidegateError], None]


class ByHand:
    """The host of any flow: it keeps what is asked for, until the test answers it, and all that it is told."""

    incarnation = "0"

    def __init__(self) -> None:
        self.now_ms = 0
        self.sent: list[Any] = []
        self.told: list[tuple[Any, ...]] = []
        self._waiting: list[tuple[Request[Any], Flow[None], OnFailed]] = []

    # -- requests ---------------------------------------------------------------------------------

    def start(self, flow: Flow[None], on_failed: OnFailed) -> None:
        self._go_on(flow, on_failed, None, None)

    def asked(self, kind: type[R]) -> list[R]:
        return [request for request, _, _ in self._waiting if isinstance(request, kind)]

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def answer(self, kind: type[Request[Any]], answer: Any = None) -> None:
        """The oldest request of a kind."""
        flow, on_failed = self._take(kind)
        self._go_on(flow, on_failed, answer, None)

    def fail(self, kind: type[Request[Any]], error: TidegateError | None = None) -> None:
        flow, on_failed = self._take(kind)
        self._go_on(flow, on_failed, None, error or StoreUnavailable("the disk is full"))

    def sleep(self) -> int:
        """Let time pass until the end of the oldest pause. Returns how long it was."""
        delay_ms = self.asked(Sleep)[0].delay_ms
        self.now_ms += delay_ms
        self.answer(Sleep)
        return delay_ms

    def _take(self, kind: type[Request[Any]]) -> tuple[Flow[None], OnFailed]:
        for index, (request, flow, on_failed) in enumerate(self._waiting):
            if isinstance(request, kind):
                del self._waiting[index]
                return flow, on_failed
        waiting = ", ".join(type(request).__name__ for request, _, _ in self._waiting) or "nothing"
        raise AssertionError(f"{kind.__name__} was not asked for; what was: {waiting}")

    def _go_on(self, flow: Flow[None], on_failed: OnFailed, answer: Any, error: TidegateError | None) -> None:
        try:
            request = flow.send(answer) if error is None else flow.throw(error)
        except StopIteration:
            return
        except TidegateError as failure:
            on_failed(failure)
            return
        self._waiting.append((request, flow, on_failed))

    def on_unanswered(self, request: Request[Any], error: StoreUnavailable, failures: int) -> None:
        self.told.append(("unanswered", type(request), str(error), failures))

    # -- what a leader tells ----------------------------------------------------------------------

    def send(self, _to: str, message: Any) -> None:
        self.sent.append(message)

    def on_begun(self, checkpoint: Checkpoint) -> None:
        self.told.append(("begun", checkpoint.checkpoint_id))

    def on_aborted(self, barrier: Barrier, reason: AbortReason, detail: str) -> None:
        self.told.append(("aborted", barrier.checkpoint_id, reason, detail))

    def on_completed(self, record: CheckpointCompleted, _checkpoint: Checkpoint, min_watermark_ms: int | None) -> None:
        self.told.append(("completed", record.checkpoint_id, min_watermark_ms))

    def on_commit_failed(self, sink: str, _permit: CommitPermit, failures: int, _error: TidegateError) -> None:
        self.told.append(("commit failed", sink, failures))

    def on_shown(self, checkpoint_id: int) -> None:
        self.told.append(("shown", checkpoint_id))

    def on_not_cleaned(self, error: StoreUnavailable) -> None:
        self.told.append(("not cleaned", str(error)))

    def on_stepped_down(self, why: TidegateError) -> None:
        self.told.append(("stepped down", type(why), str(why)))

    # -- what a member tells ----------------------------------------------------------------------

    def on_announced(self, announcement: Announcement) -> None:
        self.told.append(("announced", announcement.phase, announcement.barrier.checkpoint_id))

    def on_failed(self, error: TidegateError) -> None:
        self.told.append(("failed", error))

    def of(self, what: str) -> list[tuple[Any, ...]]:
        """What was told of one kind."""
        return [told[1:] for told in self.told if told[0] == what]


class Query:
    """The query of a stage: it does nothing but remember."""

    def __init__(self, *, committable: str | None = None) -> None:
        self.barriers: list[Barrier] = []
        self.opened: list[str] = []
        self._committable = committable

    def standing(self) -> Standing:
        return Standing(output_sequence=len(self.barriers), committable=self._committable)

    def append_barrier(self, barrier: Barrier) -> None:
        self.barriers.append(barrier)

    def on_open(self, name: str) -> None:
        self.opened.append(name)

    def on_keeps_aligning(self, checkpoint_id: int, inflight_bytes: int) -> None:
        raise AssertionError(f"nothing is in flight here: {checkpoint_id}, {inflight_bytes}")


def stage(host: ByHand, query: Query | None = None, name: str = "stage", *inputs: str) -> StageCheckpoints:
    """A source, unless it has inputs; a sink, if its query has something to commit."""
    query = Query() if query is None else query
    is_sink = query.standing().committable is not None
    return StageCheckpoints(name, inputs, host, query, CONFIG, PATIENCE, StartsAt(1), is_sink=is_sink)


class Heard:
    """Who a stage answers to."""

    def __init__(self, listened: StageCheckpoints) -> None:
        self.reports: list[StageReport] = []
        self.declined: list[tuple[int, str]] = []
        self.failures: list[TidegateError] = []
        listened.listen(self)

    def on_report(self, report: StageReport) -> None:
        self.reports.append(report)

    def on_decline(self, _stage: str, checkpoint_id: int, why: str) -> None:
        self.declined.append((checkpoint_id, why))

    def on_failed(self, error: TidegateError) -> None:
        self.failures.append(error)


def running_member(host: ByHand, *stages: StageCheckpoints) -> Member:
    """One that runs these stages in generation 1."""
    member = Member(host, "member")
    order = StartOrder(1, "0", "leader", tuple(each.name for each in stages), None, 0)
    member.on_start(order)
    host.answer(RunStages, {each.name: each for each in stages})
    return member


class Led:
    """A leader of one member with a source and a sink, in generation 1 or behind checkpoints that are decided."""

    def __init__(self, *decided: int, config: CheckpointConfig = CONFIG) -> None:
        self.host = ByHand()
        self.log = log_with(*decided)
        base = self.log.newest
        opened = Opened(self.log.generation, "leader", self._as_read(), base, 0)
        reports = None if base is None else self.reports(base.checkpoint_id, 1)
        self.leader = Leader(
            self.host,
            opened,
            ("source", "sink"),
            ("sink",),
            {"member": Assignment("0", ("source", "sink"))},
            config,
            reports,
            PATIENCE,
        )

    def _as_read(self, *more: Decision) -> DecisionLog:
        return DecisionLog.from_records([*self.log, *more])

    def reports(self, checkpoint_id: int, attempt: int) -> dict[str, StageReport]:
        generation = self.log.generation
        return {
            "source": StageReport("source", checkpoint_id, attempt, generation, 3, files=(f"source-{checkpoint_id}",)),
            "sink": StageReport("sink", checkpoint_id, attempt, generation, 3, {"source": 1}, committable="rows"),
        }

    def begin(self) -> int:
        """Up to the announcement."""
        checkpoint_id = self.leader.trigger()
        self.host.answer(Mark)
        self.host.answer(ReadLog, self._as_read())
        return checkpoint_id

    def acknowledge(self, checkpoint_id: int, attempt: int = 1) -> None:
        reports = tuple(self.reports(checkpoint_id, attempt).values())
        self.leader.on_ack(Ack("member", checkpoint_id, attempt, self.log.generation, reports=reports))

    def claim(self) -> None:
        """The slot of the checkpoint that is being decided is won."""
        self.host.answer(WriteManifest, Written("manifest", "", 0))
        record = self.host.asked(Claim)[0].record
        self.host.answer(Claim, True)
        self.log.append(record)
        self.host.answer(ReadLog, self._as_read())

    def complete(self) -> int:
        """Up to the decision: its commit is under way."""
        checkpoint_id = self.begin()
        self.acknowledge(checkpoint_id)
        self.claim()
        return checkpoint_id

    def clean_up(self, stored: Sequence[StoredFile] = ()) -> None:
        self.host.answer(ListStored, list(stored))
        if self.host.asked(Delete):
            self.host.answer(Delete)
        for kind in (Trim, ForgetMarks, ForgetStaged):
            self.host.answer(kind)

    def commit(self) -> None:
        self.host.answer(CommitSink)
