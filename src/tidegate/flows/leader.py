"""The leader of one generation: it begins checkpoints, decides them, has sinks commit them, and cleans up.

Guarantees:
- An id is marked as used before anybody hears of it, and the log is read once more after that: every later generation
  will see the mark. Barriers are announced in the order of their ids.
- A checkpoint is decided when every member has acknowledged it: acks are judged by the quorum first, and only those
  that count reach the coordinator.
- What the store does not answer is asked again, after growing pauses; a leader whose patience is over steps down, and
  leaves it to recovery how its claim ended.
- Nothing is deleted but by what this leader knows to be in the log, nothing before all sinks show a checkpoint.
- A leader that is superseded, or fenced by a table, decides, commits and deletes nothing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Protocol

import msgspec

from tidegate.errors import (
    CheckpointsFailed,
    ConflictingRows,
    Fenced,
    ForeignTable,
    InstanceFailed,
    SinkFailed,
    StoreUnavailable,
    Superseded,
    TablePutBack,
    TidegateError,
)
from tidegate.flows.cleaning import Reports, remove_unneeded
from tidegate.flows.opening import Opened
from tidegate.flows.requests import (
    Asker,
    CommitSink,
    Flow,
    ForgetMarks,
    ForgetStaged,
    Host,
    Mark,
    Patience,
    ReadLog,
    ReadReports,
    StartOrder,
    Trim,
    WriteManifest,
)
from tidegate.protocol.commit import CommitPermit, SinkCommits, permit_commit
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.coordinator import (
    Abort,
    AbortReason,
    Action,
    Begin,
    Checkpoint,
    Coordinator,
    FailPipeline,
    Phase,
    StageDecline,
    StageReport,
)
from tidegate.protocol.decision_log import CheckpointCompleted, ClaimAnswer, DecisionLog
from tidegate.protocol.messages import Barrier, Flag
from tidegate.protocol.quorum import (
    Ack,
    AckAnswer,
    AnnouncedPhase,
    Announcement,
    Announcements,
    Failed,
    Member,
    Quorum,
    Reached,
    TimedOut,
)
from tidegate.protocol.retention import content_of, retained_after

FINAL: Final = (Fenced, ForeignTable, TablePutBack, ConflictingRows)
"""What a table says that trying again would not change."""


class Announced(msgspec.Struct, frozen=True):
    """To a member: announcements that it has not confirmed."""

    generation: int
    announcements: tuple[Announcement, ...]


class Visible(msgspec.Struct, frozen=True):
    """To the member of a sink: its table shows all that was staged up to a batch."""

    generation: int
    sink: str
    through_batch: int


class Assignment(msgspec.Struct, frozen=True):
    """What a member is to run. Without event time in any of its stages it has no watermark to wait for."""

    incarnation: str
    stages: tuple[str, ...]
    has_event_time: bool = True


class LeaderHost(Host, Protocol):
    """Who carries out what a leader wants, and hears of it."""

    def send(self, instance: str, message: StartOrder | Announced | Visible) -> None:
        """It may get lost, but for those to a member in the same process."""
        ...

    def on_begun(self, checkpoint: Checkpoint) -> None:
        """Its id is marked, and it is about to be announced."""
        ...

    def on_aborted(self, barrier: Barrier, reason: AbortReason, detail: str) -> None: ...

    def on_completed(
        self, record: CheckpointCompleted, checkpoint: Checkpoint, min_watermark_ms: int | None
    ) -> None: ...

    def on_commit_failed(self, sink: str, permit: CommitPermit, failures: int, error: TidegateError) -> None:
        """It is tried again."""
        ...

    def on_shown(self, checkpoint_id: int) -> None:
        """All tables show the checkpoint."""
        ...

    def on_not_cleaned(self, error: StoreUnavailable) -> None:
        """Cleaning up failed; it is tried again after the next checkpoint."""
        ...

    def on_stepped_down(self, why: TidegateError) -> None:
        """It leads no more: none of its flows may go on."""
        ...


class Leader:
    """All of it happens on one thread: events come by its `on_` methods, and flows go on between them."""

    def __init__(
        self,
        host: LeaderHost,
        opened: Opened,
        stages: Collection[str],
        sinks: Collection[str],
        members: Mapping[str, Assignment],
        config: CheckpointConfig,
        base: Reports | None,
        patience: Patience,
    ) -> None:
        """`base`: what the checkpoint that the generation starts from holds of each stage."""
        self._host = host
        self._opened = opened
        self.generation = opened.generation
        self._config = config
        self._patience = patience
        self._store = Asker(host, patience)
        self._marks = Asker(host, patience)
        self._members = [Member(name, each.has_event_time) for name, each in members.items()]
        self.log = opened.log
        self._reports: dict[int, Reports] = {}
        largest = max(opened.largest_id, opened.log.last_checkpoint_id)
        self.coordinator = Coordinator(
            stages,
            config,
            generation=self.generation,
            now_ms=host.now_ms,
            after_checkpoint=largest,
            after_epoch=max(largest, opened.log.last_epoch),
        )
        self._orders = {
            name: StartOrder(self.generation, each.incarnation, opened.claimant, each.stages, opened.base, largest)
            for name, each in members.items()
        }
        self._announcements = Announcements(self.generation)
        self._seen: dict[str, int] = {}
        self._quorums: dict[int, Quorum] = {}
        self._begins: deque[Begin] = deque()
        self.commits = SinkCommits(sinks, patience.sink_pause)
        self._is_cleaning = False
        self._to_clean_after = 0
        self._has_stepped_down = False
        self._completed = 0
        if opened.base is not None and base is not None:
            self._reports[opened.base.checkpoint_id] = base
            self._permit(opened.base.checkpoint_id)

    @property
    def completed(self) -> int:
        """How many checkpoints it has completed."""
        return self._completed

    @property
    def seen_by_all(self) -> int:
        """The last announcement that every member has taken."""
        return min((self._seen.get(member.instance, 0) for member in self._members), default=0)

    @property
    def is_settled(self) -> bool:
        """Whether no checkpoint is under way, every sink shows all that was decided, and it is cleaned up after."""
        return not self.coordinator.active and not self.commits.pending and not self._is_cleaning

    # -- what happens -----------------------------------------------------------------------------

    def on_time(self) -> None:
        """Time passes. To be called often: nothing else finds what is due or overdue."""
        if self._has_stepped_down:
            return
        self._give_up_beginning()
        now_ms = self._host.now_ms  # once: both have the same deadline, and the coordinator knows better who is late
        self._execute(self.coordinator.on_time(now_ms))
        for checkpoint_id, quorum in tuple(self._quorums.items()):
            self._judge(checkpoint_id, quorum, now_ms)
        self._decide_if_ready()
        self._commit_due()
        for member in self._members:
            self._announce_to(member.instance)
        self._announcements.seen_by_all(self.seen_by_all)

    def trigger(self, flags: Flag = Flag.NONE) -> int:
        """A user wants a checkpoint now. Returns its id."""
        begin = self.coordinator.trigger(self._host.now_ms, flags)
        self._execute([begin])
        return begin.barrier.checkpoint_id

    def cancel(self) -> tuple[int, ...]:
        """A user cancels what is being prepared. Returns which: what is being decided cannot be any more."""
        preparing = [each.checkpoint_id for each in self.coordinator.active if each.phase is not Phase.DECIDING]
        for checkpoint_id in preparing:
            self._abort(checkpoint_id, AbortReason.CANCELLED, "tidegate cancel")
        return tuple(preparing)

    def on_seen(self, instance: str, sequence: int) -> None:
        """A member has taken all announcements up to this one."""
        self._seen[instance] = max(self._seen.get(instance, 0), sequence)

    def on_report(self, report: StageReport) -> None:
        """A stage has stored its part; its member has yet to acknowledge with all of its stages."""
        if not self._has_stepped_down and report.checkpoint_id in self._quorums:
            self.coordinator.on_report(report)

    def on_ack(self, ack: Ack) -> None:
        quorum = self._quorums.get(ack.checkpoint_id)
        if self._has_stepped_down or quorum is None or quorum.on_ack(ack) is not AckAnswer.ACCEPTED:
            return
        for report in ack.reports:
            self.coordinator.on_report(report)
        self._judge(ack.checkpoint_id, quorum, self._host.now_ms)
        self._decide_if_ready()

    def on_decline(self, decline: StageDecline) -> None:
        if not self._has_stepped_down:
            self._execute(self.coordinator.on_decline(decline, self._host.now_ms))

    def on_failed(self, instance: str, why: str) -> None:
        """The stages of a member cannot go on."""
        self._step_down(InstanceFailed(instance, why))

    def on_lost(self, instance: str) -> None:
        """An instance is not seen any more: what it had under way is void, unless it has acknowledged. No checkpoint is
        begun before it is back."""
        if self._has_stepped_down:
            return
        self.coordinator.hold(instance)
        for checkpoint_id, quorum in tuple(self._quorums.items()):
            quorum.on_lost(instance)
            if isinstance(quorum.on_time(self._host.now_ms), Failed):
                self._abort(checkpoint_id, AbortReason.INSTANCE_LOST, f"instance {instance} is not seen any more")

    def on_back(self, instance: str) -> None:
        """The same incarnation is seen again: it has gone on all the while."""
        self.coordinator.release(instance)

    # -- beginning and aborting -------------------------------------------------------------------

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Begin():
                    self._begins.append(action)
                    if len(self._begins) == 1:
                        self._start(self._begin_all())
                case Abort(barrier, reason, detail):
                    self._quorums.pop(barrier.checkpoint_id, None)
                    self._host.on_aborted(barrier, reason, detail)
                    self._announce(AnnouncedPhase.ABORT, barrier, 0)
                case FailPipeline(failures, detail):
                    self._step_down(CheckpointsFailed(f"{failures} checkpoints failed in a row; the last: {detail}"))

    async def _begin_all(self) -> None:
        """One after the other, so that barriers are announced in the order of their ids."""
        while self._begins:
            await self._begin(self._begins[0])
            self._begins.popleft()

    async def _begin(self, begin: Begin) -> None:
        barrier = begin.barrier
        await self._marks.insist(Mark(barrier.checkpoint_id))
        log = await self._marks.insist(ReadLog())
        self._check_still_open(log)
        checkpoint = self._active(barrier.checkpoint_id)
        if checkpoint is None:
            return  # aborted meanwhile
        if missing := self.coordinator.missing_instances:
            self._abort(barrier.checkpoint_id, AbortReason.INSTANCE_LOST, f"instance {missing[0]} is not seen any more")
            return
        self._quorums[barrier.checkpoint_id] = Quorum(
            barrier, begin.attempt, self.generation, self._members, checkpoint.deadline_ms
        )
        self._host.on_begun(checkpoint)
        self._announce(AnnouncedPhase.PREPARE, barrier, begin.attempt)

    def _give_up_beginning(self) -> None:
        """Abort what is overdue and was never announced: no stage is to blame for that."""
        for begin in self._begins:
            checkpoint = self._active(begin.barrier.checkpoint_id)
            is_announced = begin.barrier.checkpoint_id in self._quorums
            if checkpoint is not None and not is_announced and self._host.now_ms >= checkpoint.deadline_ms:
                detail = f"it could not be begun: {self._marks.last_failure}"
                self._abort(checkpoint.checkpoint_id, AbortReason.STORE_FAILED, detail)

    def _check_still_open(self, log: DecisionLog, *, lost: int | None = None) -> None:
        if log.generation > self.generation:
            self.coordinator.on_superseded(log.generation, self._host.now_ms, lost=lost)
            raise Superseded(self.generation, log.generation)

    def _active(self, checkpoint_id: int) -> Checkpoint | None:
        return next((each for each in self.coordinator.active if each.checkpoint_id == checkpoint_id), None)

    def _judge(self, checkpoint_id: int, quorum: Quorum, now_ms: int) -> None:
        outcome = quorum.on_time(now_ms)
        if isinstance(outcome, Failed | TimedOut):
            self._abort(checkpoint_id, AbortReason.QUORUM_FAILED, str(outcome))

    def _abort(self, checkpoint_id: int, reason: AbortReason, detail: str) -> None:
        """Unless it is being decided: then only the log tells how it ends."""
        checkpoint = self._active(checkpoint_id)
        if checkpoint is not None and checkpoint.phase in (Phase.PREPARING, Phase.PREPARED):
            self._execute(self.coordinator.abort(checkpoint_id, reason, detail, self._host.now_ms))

    # -- announcing -------------------------------------------------------------------------------

    def _announce(
        self, phase: AnnouncedPhase, barrier: Barrier, attempt: int, min_watermark_ms: int | None = None
    ) -> None:
        self._announcements.announce(phase, barrier, attempt, min_watermark_ms)
        for member in self._members:
            self._announce_to(member.instance)

    def _announce_to(self, instance: str) -> None:
        """Tell a member all that it has not confirmed, and first of all what it is to run."""
        if self._has_stepped_down:
            return
        seen = self._seen.get(instance)
        if seen is None:
            self._host.send(instance, self._orders[instance])
        pending = self._announcements.since(seen or 0)
        if pending or seen is None:
            self._host.send(instance, Announced(self.generation, pending))

    # -- deciding ---------------------------------------------------------------------------------

    def _decide_if_ready(self) -> None:
        checkpoint = self.coordinator.ready_to_decide()
        quorum = None if checkpoint is None else self._quorums.get(checkpoint.checkpoint_id)
        if checkpoint is None or quorum is None:
            return
        outcome = quorum.on_time(self._host.now_ms)
        if isinstance(outcome, Reached):
            self.coordinator.decide(checkpoint.checkpoint_id)
            self._start(self._decide(checkpoint, outcome.min_watermark_ms))

    async def _decide(self, checkpoint: Checkpoint, min_watermark_ms: int | None) -> None:
        checkpoint_id = checkpoint.checkpoint_id
        reports = dict(checkpoint.reports)
        written = await self._store.insist(WriteManifest(checkpoint, min_watermark_ms))
        content, aligned = content_of(reports.values()), checkpoint.is_aligned
        proposed = self.log.completing(
            self._opened.claimant,
            self.generation,
            checkpoint_id=checkpoint_id,
            epoch=checkpoint.barrier.epoch,
            manifest=written.name,
            manifest_sha256=written.sha256,
            aligned=aligned,
            retained=retained_after(
                self.log, checkpoint_id, self._config, aligned=aligned, content=content, at_ms=written.at_ms
            ),
            content=content,
            at_ms=written.at_ms,
        )
        answer, log = await self._store.claim(proposed)
        if answer is not ClaimAnswer.WON:
            self._check_still_open(log, lost=checkpoint_id)
            raise Superseded(self.generation, log.generation)
        # What the log holds beyond it is another run's: this one knows of its own part alone.
        self.log.append(proposed)
        self._reports[checkpoint_id] = reports
        del self._quorums[checkpoint_id]
        self._completed += 1
        self.coordinator.on_slot_won(checkpoint_id, self._host.now_ms)
        self._host.on_completed(proposed, checkpoint, min_watermark_ms)
        self._announce(AnnouncedPhase.COMMIT, checkpoint.barrier, checkpoint.attempt, min_watermark_ms)
        self._permit(checkpoint_id)
        self._commit_due()
        self._decide_if_ready()

    # -- committing and cleaning up ---------------------------------------------------------------

    def _permit(self, checkpoint_id: int) -> None:
        permit = permit_commit(self.log, checkpoint_id, self.generation)
        self.commits.on_permit(permit, self._host.now_ms)

    def _commit_due(self) -> None:
        for sink, permit in self.commits.due(self._host.now_ms):
            self._start(self._commit(sink, permit))

    async def _commit(self, sink: str, permit: CommitPermit) -> None:
        report = self._reports[permit.checkpoint_id][sink]
        try:
            await CommitSink(sink, permit, report.committable or "")
        except FINAL:
            raise
        except TidegateError as error:
            failures = self.commits.on_failed(sink, str(error), self._host.now_ms)
            self._host.on_commit_failed(sink, permit, failures, error)
            if failures < self._patience.sink_tries:
                return
            if isinstance(error, SinkFailed):
                raise
            raise CheckpointsFailed(f"sink {sink!r} could not be committed: {error}") from error
        if report.cut is not None:
            for member in self._members:
                self._host.send(member.instance, Visible(self.generation, sink, report.cut))
        checkpoint_id = self.commits.on_committed(sink, self._host.now_ms)
        if checkpoint_id is not None:
            self._on_shown(checkpoint_id)

    def _on_shown(self, checkpoint_id: int) -> None:
        """All sinks show it. The one that the generation started from was another coordinator's."""
        if self._opened.base is None or checkpoint_id != self._opened.base.checkpoint_id:
            self.coordinator.on_sinks_committed(checkpoint_id)
        self._host.on_shown(checkpoint_id)
        self._to_clean_after = checkpoint_id
        if not self._is_cleaning:
            self._is_cleaning = True
            self._start(self._clean_up())

    async def _clean_up(self) -> None:
        """Remove what no retained checkpoint refers to. If it fails, the next one removes what this one leaves.

        Once more, where another one was shown meanwhile: it may be the last.
        """
        cleaned_after = 0
        while cleaned_after < self._to_clean_after:
            cleaned_after = self._to_clean_after
            try:
                await self._remove_unneeded(cleaned_after)
            except StoreUnavailable as error:
                self._host.on_not_cleaned(error)
        self._is_cleaning = False

    async def _remove_unneeded(self, visible: int) -> None:
        log = self.log
        retained, start, but = log.retained, log.first_slot, log.kept_before_start
        self._reports = {kept: each for kept, each in self._reports.items() if kept in retained or kept >= visible}
        records = {checkpoint_id: log.completed(checkpoint_id) for checkpoint_id in retained}
        at_visible = self._reports[visible]
        await remove_unneeded(self._store, self.generation, visible, at_visible, records, self._reports_of)
        await self._store.insist(Trim(start, but))
        await self._store.insist(ForgetMarks(visible))
        await self._store.insist(ForgetStaged(self.generation))

    async def _reports_of(self, record: CheckpointCompleted) -> Reports | None:
        if record.checkpoint_id in self._reports:
            return self._reports[record.checkpoint_id]
        reports = await self._store.insist(ReadReports(record))
        if reports is not None:
            self._reports[record.checkpoint_id] = reports
        return reports

    # -- flows ------------------------------------------------------------------------------------

    def _start(self, flow: Flow[None]) -> None:
        """A flow that fails ends the leader: what it was about can be told by recovery alone."""
        if self._has_stepped_down:
            flow.close()
        else:
            self._host.start(flow, self._step_down)

    def _step_down(self, why: TidegateError) -> None:
        if not self._has_stepped_down:
            self._has_stepped_down = True
            self._host.on_stepped_down(why)
