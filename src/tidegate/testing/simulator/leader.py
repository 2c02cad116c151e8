"""A simulated leader: recovers, opens a generation, and runs its checkpoints to their commit."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from tidegate.errors import CheckpointError, StoreUnavailable
from tidegate.protocol.commit import CommitPermit, RetryPause, SinkCommits, permit_commit
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
)
from tidegate.protocol.decision_log import (
    CheckpointCompleted,
    ClaimAnswer,
    Decision,
    DecisionLog,
    judge_claim,
)
from tidegate.protocol.quorum import (
    Ack,
    AckAnswer,
    AnnouncedPhase,
    Announcements,
    Failed,
    Member,
    Quorum,
    Reached,
    TimedOut,
)
from tidegate.protocol.recovery import Examine, Facts, FenceSinks, Refuse, Restore, SinkFacts, recover
from tidegate.protocol.retention import StoredFile, content_of, deletable, retained_after
from tidegate.testing.simulator.checkers import Manifest
from tidegate.testing.simulator.instance import SimulatedInstance, StartGeneration
from tidegate.testing.simulator.stage import batch_of
from tidegate.testing.simulator.store import Fenced
from tidegate.testing.simulator.world import Operation, Task

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.protocol.messages import Barrier, Flag
    from tidegate.testing.simulator.cluster import Cluster

TICK_MS = 25


class SimulatedLeader:
    def __init__(self, cluster: Cluster, instance: SimulatedInstance, claimant: str) -> None:
        self.stopped = False
        self.is_open = False
        self.generation = 0
        self._cluster = cluster
        self._world = cluster.world
        self._store = cluster.store
        self.instance = instance
        self._process = instance.process
        self._claimant = claimant
        self._log = DecisionLog()
        self._manifests: dict[int, Manifest] = {}
        self._quorums: dict[int, Quorum] = {}
        self._seen: dict[str, int] = {}
        self._begins: deque[Begin] = deque()

    def begin(self) -> None:
        self._world.spawn(self._process, self._lead())

    def stop(self) -> None:
        if not self.stopped:
            self._world.note("{} leads no more", self._claimant)
        self.stopped = True

    def has_stopped(self) -> bool:
        return self.stopped

    # -- opening a generation ---------------------------------------------------------------------

    def _lead(self) -> Task:
        members = self._cluster.members()
        health: dict[int, str | None] = {}
        while not self.stopped:
            # The sinks first: an old leader may go on deciding and committing while we read.
            sinks = yield from self._read_sinks()
            log = yield from self._read_log()
            decision = recover(Facts(log, sinks, health))
            match decision:
                case Examine(checkpoint_id):
                    damage = yield from self._examine(log, checkpoint_id)
                    # A leader that still lives may have dropped it: then the log has moved on meanwhile.
                    if damage is None or (yield from self._read_log()).next_slot == log.next_slot:
                        health[checkpoint_id] = damage
                    continue
                case FenceSinks(generation):
                    for table in self._cluster.tables.values():
                        yield from self._insist(table.fence(generation))
                    continue
                case Refuse():
                    self._cluster.on_refused(decision, health)
                    return
                case Restore(checkpoint):
                    base: CheckpointCompleted | None = checkpoint
                case _:
                    base = None
            proposed = log.opening(self._claimant, None if base is None else base.checkpoint_id)
            answer, log = yield from self._claim(proposed)
            if answer is ClaimAnswer.WON:
                self._log = log
                self.generation = proposed.generation
                self._world.note("{} opened generation {} from {}", self._claimant, self.generation, proposed.base)
                yield from self._open(members, base)
                return
            if answer is ClaimAnswer.SUPERSEDED:
                self.stop()

    def _open(self, members: dict[str, int], base: CheckpointCompleted | None) -> Task:
        largest = yield from self._insist(self._store.largest_reserved())
        manifest: Manifest | None = None
        if base is not None:
            manifest = yield from self._manifest(base.checkpoint_id)
        if self.stopped:
            return
        cluster = self._cluster
        after_checkpoint = max(largest, self._log.last_checkpoint_id)
        self._coordinator = Coordinator(
            cluster.dag.stages,
            cluster.config,
            generation=self.generation,
            now_ms=self._world.now,
            after_checkpoint=after_checkpoint,
            after_epoch=max(largest, self._log.last_epoch),
        )
        self._announcements = Announcements(self.generation)
        self._commits = SinkCommits(cluster.dag.sinks, RetryPause(first_ms=5, longest_ms=60))
        assignment = cluster.assign(self.generation, list(members), manifest)
        self._members = [
            Member(name, any(cluster.dag.stages[stage].is_source for stage in stages))
            for name, stages in assignment.items()
        ]
        self._orders = {
            name: StartGeneration(self.generation, members[name], self._claimant, stages, manifest, after_checkpoint)
            for name, stages in assignment.items()
        }
        if base is not None:
            self._commits.on_permit(permit_commit(self._log, base.checkpoint_id, self.generation), self._world.now)
        self.is_open = True
        self._tick()

    def _read_sinks(self) -> Task:
        facts: dict[str, SinkFacts] = {}
        for name, table in self._cluster.tables.items():
            facts[name] = yield from self._insist(table.facts())
        return facts

    def _examine(self, log: DecisionLog, checkpoint_id: int) -> Task:
        """What is missing of a checkpoint; None if it is whole."""
        record = log.completed(checkpoint_id)
        held = None if record is None else (yield from self._insist(self._store.get(record.manifest)))
        if held is None:
            return "its manifest is gone"
        stored = dict((yield from self._insist(self._store.list_objects())))
        for report in held.value.values():
            for path in report.files:
                if path not in stored:
                    return f"{path} is gone"
        self._manifests[checkpoint_id] = held.value
        return None

    def _manifest(self, checkpoint_id: int) -> Task:
        if checkpoint_id not in self._manifests:
            record = self._log.completed(checkpoint_id)
            held = None if record is None else (yield from self._insist(self._store.get(record.manifest)))
            if held is None:
                return None
            self._manifests[checkpoint_id] = held.value
        return self._manifests[checkpoint_id]

    # -- the store, as often as it takes ----------------------------------------------------------

    def _insist(self, operation: Operation) -> Task:
        while True:
            try:
                return (yield operation)
            except StoreUnavailable:
                yield self._world.sleep(self._world.delay(10))

    def _read_log(self) -> Task:
        records, torn = yield from self._insist(self._store.read_log())
        return DecisionLog.from_records(records, torn)

    def _claim(self, proposed: Decision) -> Task:
        while True:
            # However the claim ends, it may have been written: the log tells.
            with suppress(StoreUnavailable):
                yield self._store.claim(proposed)
            log = yield from self._read_log()
            answer = judge_claim(proposed, log)
            if answer is not ClaimAnswer.RETRY:
                return answer, log

    # -- running ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.stopped:
            return
        now_ms = self._world.now
        self._execute(self._coordinator.on_time(now_ms))
        for checkpoint in self._coordinator.active:
            quorum = self._quorums.get(checkpoint.checkpoint_id)
            if quorum is None or checkpoint.phase is Phase.DECIDING:
                continue
            outcome = quorum.on_time(now_ms)
            if isinstance(outcome, Failed | TimedOut):
                self._abort(checkpoint.checkpoint_id, AbortReason.QUORUM_FAILED, str(outcome))
        self._decide_if_ready()
        self._commit_due()
        for member in self._members:
            self._announce_to(member.instance)
        self._announcements.seen_by_all(min(self._seen.get(member.instance, 0) for member in self._members))
        self._world.after(TICK_MS, self._process, self._tick)

    def _announce_to(self, instance: str) -> None:
        """Tell an instance all that it has not confirmed, and first of all that the generation is open."""
        seen = self._seen.get(instance)
        if seen is None:
            self._cluster.send_to_instance(instance, "on_start", self._orders[instance])
        pending = self._announcements.since(seen or 0)
        if pending or seen is None:
            self._cluster.send_to_instance(instance, "on_announcements", self.generation, pending)

    def _announce(
        self, phase: AnnouncedPhase, barrier: Barrier, attempt: int, min_watermark_ms: int | None = None
    ) -> None:
        self._world.note("{} announces {} of {}", self._claimant, phase.value, barrier)
        self._announcements.announce(phase, barrier, attempt, min_watermark_ms)
        for member in self._members:
            self._announce_to(member.instance)

    def trigger(self, flags: Flag) -> None:
        """A user asks for a checkpoint."""
        if self.is_open and not self.stopped:
            with suppress(CheckpointError):
                self._execute([self._coordinator.trigger(self._world.now, flags)])

    def cancel(self) -> bool:
        """A user cancels the checkpoint that is being prepared. Answers whether there was one."""
        if self.is_open and not self.stopped:
            for checkpoint in self._coordinator.active:
                if checkpoint.phase is Phase.PREPARING:
                    self._abort(checkpoint.checkpoint_id, AbortReason.CANCELLED, "by the user")
                    return True
        return False

    def on_seen(self, generation: int, instance: str, sequence: int) -> None:
        if not self.stopped and generation == self.generation:
            self._seen[instance] = max(self._seen.get(instance, 0), sequence)

    def on_ack(self, ack: Ack) -> None:
        quorum = self._quorums.get(ack.checkpoint_id)
        if self.stopped or quorum is None or quorum.on_ack(ack) is not AckAnswer.ACCEPTED:
            return
        for report in ack.reports:
            self._coordinator.on_report(report)
        self._decide_if_ready()

    def on_decline(self, decline: StageDecline) -> None:
        if not self.stopped:
            self._execute(self._coordinator.on_decline(decline, self._world.now))

    def on_membership(self, instance: str) -> None:
        """An instance died or came back without its memory: what it had under way is void."""
        if self.is_open and not self.stopped:
            for checkpoint_id, quorum in tuple(self._quorums.items()):
                quorum.on_lost(instance)
                if isinstance(quorum.on_time(self._world.now), Failed):
                    self._abort(checkpoint_id, AbortReason.QUORUM_FAILED, f"{instance} was lost")

    def _abort(self, checkpoint_id: int, reason: AbortReason, detail: str) -> None:
        phases = {checkpoint.checkpoint_id: checkpoint.phase for checkpoint in self._coordinator.active}
        if phases.get(checkpoint_id) in (Phase.PREPARING, Phase.PREPARED):
            self._execute(self._coordinator.abort(checkpoint_id, reason, detail, self._world.now))

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Begin():
                    self._begins.append(action)
                    if len(self._begins) == 1:
                        self._world.spawn(self._process, self._begin_all())
                case Abort(barrier, reason, detail):
                    self._world.note("{} aborts {}: {}, {}", self._claimant, barrier, reason.value, detail)
                    self._quorums.pop(barrier.checkpoint_id, None)
                    self._cluster.aborted += 1
                    self._announce(AnnouncedPhase.ABORT, barrier, 0)
                case FailPipeline():
                    self._cluster.on_failed(self)

    def _begin_all(self) -> Task:
        """One after the other, so that barriers are announced in the order of their ids."""
        while self._begins:
            yield from self._begin(self._begins[0].barrier, self._begins[0].attempt)
            self._begins.popleft()

    def _begin(self, barrier: Barrier, attempt: int) -> Task:
        """Mark the id as used, make sure that no newer generation can have missed the mark, then announce."""
        yield from self._insist(self._store.reserve(barrier.checkpoint_id))
        log = yield from self._read_log()
        if log.generation > self.generation:
            self._coordinator.on_superseded(log.generation, self._world.now)
            self.stop()
        active = {checkpoint.checkpoint_id: checkpoint for checkpoint in self._coordinator.active}
        if self.stopped or barrier.checkpoint_id not in active:
            return
        self._cluster.checkers.monotone_ids.on_prepared(self.generation, barrier.checkpoint_id, barrier.epoch)
        deadline_ms = active[barrier.checkpoint_id].deadline_ms
        self._quorums[barrier.checkpoint_id] = Quorum(barrier, attempt, self.generation, self._members, deadline_ms)
        self._announce(AnnouncedPhase.PREPARE, barrier, attempt)

    # -- deciding ---------------------------------------------------------------------------------

    def _decide_if_ready(self) -> None:
        checkpoint = self._coordinator.ready_to_decide()
        if checkpoint is None:
            return
        outcome = self._quorums[checkpoint.checkpoint_id].on_time(self._world.now)
        if isinstance(outcome, Reached):
            self._coordinator.decide(checkpoint.checkpoint_id)
            self._world.spawn(self._process, self._decide(checkpoint, outcome.min_watermark_ms))

    def _decide(self, checkpoint: Checkpoint, min_watermark_ms: int | None) -> Task:
        checkpoint_id = checkpoint.checkpoint_id
        path = f"g{self.generation}/manifest-{checkpoint_id}"
        manifest: Manifest = dict(checkpoint.reports)
        yield from self._insist(self._store.put(path, self.generation, manifest))
        if self.stopped:
            return
        content, at_ms = content_of(checkpoint.reports.values()), self._cluster.clock()
        config, aligned = self._cluster.config, checkpoint.is_aligned
        proposed = self._log.completing(
            self._claimant,
            self.generation,
            checkpoint_id=checkpoint_id,
            epoch=checkpoint.barrier.epoch,
            manifest=path,
            manifest_sha256="",
            aligned=aligned,
            retained=retained_after(self._log, checkpoint_id, config, aligned=aligned, content=content, at_ms=at_ms),
            content=content,
            at_ms=at_ms,
        )
        answer, log = yield from self._claim(proposed)
        if answer is not ClaimAnswer.WON:
            self._coordinator.on_superseded(log.generation, self._world.now, lost=checkpoint_id)
            self.stop()
            return
        # What the log holds beyond it is another run's: this one knows of its own part alone.
        self._log.append(proposed)
        self._manifests[checkpoint_id] = manifest
        self._quorums.pop(checkpoint_id, None)
        if self.has_stopped():
            return
        self._coordinator.on_slot_won(checkpoint_id, self._world.now)
        self._cluster.check_watermark(self.generation, min_watermark_ms)
        self._announce(AnnouncedPhase.COMMIT, checkpoint.barrier, checkpoint.attempt, min_watermark_ms)
        self._commits.on_permit(permit_commit(self._log, checkpoint_id, self.generation), self._world.now)
        self._commit_due()
        if checkpoint.barrier.is_drain:
            self._cluster.on_drained(self)
        self._decide_if_ready()

    # -- committing and cleaning up ---------------------------------------------------------------

    def _commit_due(self) -> None:
        for sink, permit in self._commits.due(self._world.now):
            self._world.spawn(self._process, self._commit(sink, permit))

    def _commit(self, sink: str, permit: CommitPermit) -> Task:
        committable = self._manifests[permit.checkpoint_id][sink].committable
        staged = []
        try:
            for path in (committable or "").split():
                held = yield self._store.get(path)
                if held is None:
                    # Dropped because a later epoch covers it: the table will answer "already".
                    continue
                staged.append((batch_of(path), held.value))
            result = yield self._cluster.tables[sink].commit(permit, staged)
        except StoreUnavailable as error:
            self._commits.on_failed(sink, str(error), self._world.now)
            return
        self._world.note("{} committed epoch {} to {}: {}", self._claimant, permit.epoch, sink, result)
        if isinstance(result, Fenced):
            self.stop()
            return
        cut = self._manifests[permit.checkpoint_id][sink].cut
        for member in self._members:
            if cut is not None and sink in self._orders[member.instance].stages:
                self._cluster.send_to_instance(member.instance, "on_visible", self.generation, sink, cut)
        checkpoint_id = self._commits.on_committed(sink, self._world.now)
        if checkpoint_id is not None and not self.stopped:
            if any(each.checkpoint_id == checkpoint_id for each in self._coordinator.history):
                self._coordinator.on_sinks_committed(checkpoint_id)
            yield from self._clean_up(checkpoint_id)

    def _clean_up(self, checkpoint_id: int) -> Task:
        """Remove what no retained checkpoint refers to. Its own generation's files may be needed still unless
        they lie behind the checkpoint that was just committed."""
        log = self._log
        references: dict[int, frozenset[str]] = {}
        for retained in log.retained:
            manifest = yield from self._manifest(retained)
            record = log.completed(retained)
            if manifest is not None and record is not None:
                files = {file for report in manifest.values() for file in report.files}
                references[retained] = frozenset({*files, record.manifest})
        listed = yield from self._insist(self._store.list_objects())
        stored = [StoredFile(path, generation) for path, generation in listed]
        in_use = frozenset(
            file.path
            for file in stored
            if file.generation == self.generation and not self._is_behind(file.path, checkpoint_id)
        )
        unneeded = deletable(log, self.generation, references, stored, in_use)
        if unneeded and not self.stopped:
            self._world.note("{} deletes {} files", self._claimant, len(unneeded))
            yield from self._insist(self._store.delete([file.path for file in unneeded], self.generation))
        yield from self._insist(self._store.trim_log(log.has_dropped))

    def _is_behind(self, path: str, checkpoint_id: int) -> bool:
        _, stage, name = path.split("/") if path.count("/") == 2 else ("", "", path.rsplit("/", 1)[1])
        kind, number = name.rsplit("-", 1)
        if kind in ("state", "manifest"):
            return int(number) < checkpoint_id
        manifest = self._manifests[checkpoint_id]
        if kind == "staged":
            cut = manifest[stage].cut
            return cut is not None and int(number) <= cut
        positions = [manifest[reader].positions[stage] for reader in self._cluster.dag.readers(stage)]
        return int(number) <= min(positions)
