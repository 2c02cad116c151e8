"""A member: a driver process that runs some of the stages of a generation, and obeys its leader.

Guarantees:
- It runs stages for one generation at a time, and never goes back to an older one. A process that has died is another
  incarnation, and does not run its stages again in the same generation.
- It takes every announcement once, in order.
- It acknowledges a checkpoint when all its stages have reported, and says so again until it hears how that ended.
- Its watermark is held back by every stage with event time whose watermark is not set yet.
- If its stages cannot go on, it says so until its leader has opened another generation, or another leader has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from tidegate.errors import TidegateError
from tidegate.flows.leader import Announced, Visible
from tidegate.flows.requests import DropShown, Host, RunStages, StartOrder
from tidegate.flows.stage import StageCheckpoints
from tidegate.protocol.coordinator import StageDecline, StageReport
from tidegate.protocol.messages import Barrier
from tidegate.protocol.quorum import Ack, AnnouncedPhase, Announcement, AnnouncementReader, watermark_of


class MemberFailed(msgspec.Struct, frozen=True):
    """To the leader: its stages cannot go on, so all go back to the last checkpoint."""

    generation: int
    instance: str
    why: str


class Seen(msgspec.Struct, frozen=True):
    """To the leader: all announcements up to this one were taken."""

    generation: int
    instance: str
    sequence: int


ToLeader = Seen | StageReport | Ack | StageDecline | MemberFailed


class MemberHost(Host, Protocol):
    """Who carries out what a member wants, and hears of it."""

    @property
    def incarnation(self) -> str: ...

    def send(self, leader: str, message: ToLeader) -> None:
        """It may get lost, but for those to a leader in the same process."""
        ...

    def on_announced(self, announcement: Announcement) -> None:
        """It is taken, before it has any effect."""
        ...

    def on_failed(self, error: TidegateError) -> None:
        """Its stages cannot go on; the leader hears of it."""
        ...


class _Prepared(msgspec.Struct, frozen=True):
    """A checkpoint that was announced here, and not ended."""

    attempt: int
    at_ms: int


class Member:
    def __init__(self, host: MemberHost, instance: str) -> None:
        self._host = host
        self.instance = instance
        self.generation = 0
        self.stages: Mapping[str, StageCheckpoints] = {}
        self._begin_anew(0, "")

    def _begin_anew(self, generation: int, leader: str) -> None:
        for stage in self.stages.values():
            stage.listen(None)
        self.generation = generation
        self._leader = leader
        self.stages = {}
        self._failure: MemberFailed | None = None
        self._is_ready = False
        self._reader = AnnouncementReader(generation)
        self._prepared: dict[int, _Prepared] = {}
        self._reports: dict[int, dict[str, StageReport]] = {}
        self._declined: dict[int, tuple[str, str]] = {}
        self._acks: dict[int, Ack] = {}
        self._dropped: dict[str, int] = {}

    @property
    def seen(self) -> int:
        """The last announcement that was taken."""
        return self._reader.seen

    @property
    def under_way(self) -> frozenset[int]:
        """The checkpoints that were announced here, and of which it is not known yet how they end."""
        return frozenset(self._prepared)

    # -- a generation starts ----------------------------------------------------------------------

    def on_start(self, order: StartOrder) -> None:
        if order.generation <= self.generation or order.incarnation != self._host.incarnation:
            return
        self._begin_anew(order.generation, order.leader)
        self._host.start(self._run_stages(order), lambda error: self._fail(order.generation, error))

    async def _run_stages(self, order: StartOrder) -> None:
        stages = await RunStages(order)
        if self.generation == order.generation:
            self.stages = stages
            self._is_ready = True
            for stage in stages.values():
                stage.listen(self)

    # -- the leader announces ---------------------------------------------------------------------

    def on_announced(self, announced: Announced) -> None:
        if announced.generation != self.generation or not self._is_ready:
            return
        for announcement in self._reader.take(announced.announcements):
            self._host.on_announced(announcement)
            self._obey(announcement)
        self._host.send(self._leader, Seen(self.generation, self.instance, self._reader.seen))

    def _obey(self, announcement: Announcement) -> None:
        barrier = announcement.barrier
        match announcement.phase:
            case AnnouncedPhase.PREPARE:
                self._prepare(barrier, announcement.attempt)
            case AnnouncedPhase.ABORT:
                self._close(barrier.checkpoint_id)
                for stage in self.stages.values():
                    stage.on_aborted(barrier)
            case AnnouncedPhase.COMMIT:
                self._close(barrier.checkpoint_id)
                for stage in self.stages.values():
                    stage.on_decided(barrier.checkpoint_id)

    def _prepare(self, barrier: Barrier, attempt: int) -> None:
        self._prepared[barrier.checkpoint_id] = _Prepared(attempt, self._host.now_ms)
        for stage in self.stages.values():
            if stage.is_source:
                stage.inject(barrier)
        if barrier.checkpoint_id in self._declined:
            stage_name, why = self._declined.pop(barrier.checkpoint_id)
            self.on_decline(stage_name, barrier.checkpoint_id, why)
        self._acknowledge_if_done(barrier.checkpoint_id)

    def _close(self, checkpoint_id: int) -> None:
        self._prepared.pop(checkpoint_id, None)
        self._reports.pop(checkpoint_id, None)
        self._declined.pop(checkpoint_id, None)
        self._acks.pop(checkpoint_id, None)

    def on_visible(self, visible: Visible) -> None:
        """Perhaps again: it stays on the leader's board."""
        if visible.generation != self.generation or visible.sink not in self.stages:
            return
        if visible.through_batch > self._dropped.get(visible.sink, -1):
            self._dropped[visible.sink] = visible.through_batch
            self._host.start(self._drop_shown(visible), self.on_failed)

    async def _drop_shown(self, visible: Visible) -> None:
        try:
            await DropShown(visible.sink, visible.through_batch)
        except TidegateError:
            return  # it is dropped with all that its generation has staged

    # -- the stages answer ------------------------------------------------------------------------

    def on_time(self) -> None:
        """Time passes: say again what may have got lost."""
        for stage in self.stages.values():
            stage.poll()
        for ack in self._acks.values():
            self._host.send(self._leader, ack)
        if self._failure is not None:
            self._host.send(self._leader, self._failure)

    def reports(self, checkpoint_id: int) -> Mapping[str, StageReport]:
        """Those of its stages that are done with their part of a checkpoint that is under way."""
        return self._reports.get(checkpoint_id, {})

    def on_report(self, report: StageReport) -> None:
        """Perhaps before the checkpoint is announced here: barriers travel by another way."""
        self._reports.setdefault(report.checkpoint_id, {})[report.stage] = report
        prepared = self._prepared.get(report.checkpoint_id)
        if prepared is not None:
            self._host.send(self._leader, self._dated(report, prepared))
        self._acknowledge_if_done(report.checkpoint_id)

    def on_decline(self, stage: str, checkpoint_id: int, why: str) -> None:
        prepared = self._prepared.get(checkpoint_id)
        if prepared is None:
            self._declined[checkpoint_id] = (stage, why)
        else:
            decline = StageDecline(stage, checkpoint_id, prepared.attempt, self.generation, why)
            self._host.send(self._leader, decline)

    def on_failed(self, error: TidegateError) -> None:
        self._fail(self.generation, error)

    def _fail(self, generation: int, error: TidegateError) -> None:
        """The first failure counts, and nothing but a new generation mends it."""
        if generation == self.generation and self._failure is None:
            self._failure = MemberFailed(generation, self.instance, str(error))
            self._host.on_failed(error)
            self._host.send(self._leader, self._failure)

    def _acknowledge_if_done(self, checkpoint_id: int) -> None:
        prepared = self._prepared.get(checkpoint_id)
        reports = self._reports.get(checkpoint_id, {})
        if prepared is None or len(reports) < len(self.stages) or checkpoint_id in self._acks:
            return
        ack = Ack(
            instance=self.instance,
            checkpoint_id=checkpoint_id,
            attempt=prepared.attempt,
            generation=self.generation,
            watermark_ms=watermark_of(reports.values()),
            reports=tuple(self._dated(report, prepared) for report in reports.values()),
        )
        self._acks[checkpoint_id] = ack
        self._host.send(self._leader, ack)

    def _dated(self, report: StageReport, prepared: _Prepared) -> StageReport:
        """Of this attempt; when its barrier came, from when the checkpoint was announced."""
        barrier_ms = max(0, report.barrier_ms - prepared.at_ms)
        return msgspec.structs.replace(report, attempt=prepared.attempt, barrier_ms=barrier_ms)
