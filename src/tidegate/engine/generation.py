"""One generation of a pipeline on Spark: its stages, and the checkpoints that are taken of them.

A single control thread polls the stages, the coordinator and the sinks in turn; there are no locks. What takes time
happens beside it: snapshots on a thread per stage, checks and commits on a thread each, cleaning up on one of its own,
and pausing sources and letting them go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from tidegate.engine import cleaning
from tidegate.engine.beside import beside
from tidegate.engine.channel import Channel
from tidegate.engine.kill_points import Step, reached
from tidegate.engine.options import Bounds
from tidegate.engine.pausing import PausableSource, StartQuery
from tidegate.engine.planning import PlanningWatch, WhyUnreachable
from tidegate.engine.stage import RunningStage, StagePlace
from tidegate.engine.status import NoBatch, StagePart, now, part_of
from tidegate.engine.tables import what_would_fit
from tidegate.engine.upkeep import TableUpkeep
from tidegate.errors import (
    CheckpointError,
    CheckpointsFailed,
    ConflictingRows,
    DamagedCheckpoint,
    Fenced,
    ForeignTable,
    SinkFailed,
    StoreUnavailable,
    Superseded,
    TablePutBack,
    TidegateError,
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
    Obstacle,
    Phase,
    ReportAnswer,
    StageDecline,
)
from tidegate.protocol.decision_log import ClaimAnswer, DecisionLog
from tidegate.protocol.messages import Barrier, Flag
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.quorum import Ack, Failed, Member, Quorum, Reached, TimedOut
from tidegate.protocol.retention import content_of, retained_after
from tidegate.sinks import function
from tidegate.sinks.contract import BoundSink, CommitAnswer, FileSink, decode_committable, staged_by
from tidegate.spark.definition import StageDefinition
from tidegate.spark.session import is_of_the_connection
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files
from tidegate.storage.inspection import read_manifest
from tidegate.storage.manifest import FORMAT, Manifest, StageShape, StageSnapshot, as_report, encode_manifest
from tidegate.storage.paths import RootPaths
from tidegate.storage.system import explained, say, told

_log = logging.getLogger("tidegate")
_INSTANCE = "local"
_SINK_TRIES = 8
# A checkpoint that takes a little longer than the interval is nothing to tell.
_TELL_DUE_AFTER_MS = 5_000
_NAMED_STAGES = 3


class Opened(msgspec.Struct, frozen=True):
    """A generation that was opened in the log, and what it starts from."""

    pipeline: str
    generation: int
    claimant: str
    log: DecisionLog
    base: Manifest | None
    largest_id: int
    shape: dict[str, StageShape]


class Delay(msgspec.Struct, frozen=True):
    """The next checkpoint is due since a moment of the run's clock, and is not begun."""

    since_ms: int
    by: Obstacle
    why: str


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Generation:
    def __init__(
        self,
        definitions: list[StageDefinition],
        opened: Opened,
        paths: RootPaths,
        store: Files,
        config: CheckpointConfig,
        sinks: Mapping[str, BoundSink],
        bounds: Bounds | None = None,
    ) -> None:
        self._bounds = Bounds() if bounds is None else bounds
        self._definitions = {definition.name: definition for definition in definitions}
        self._opened = opened
        self.generation = opened.generation
        self.shape = dict(opened.shape)
        self._paths = paths
        self._store = store
        self._decisions = StoredDecisions(store)
        self._config = config
        self._log = opened.log
        self._manifests: dict[int, Manifest] = {}
        self._now_ms = monotonic_ms()
        base = opened.base
        self._is_base_shown = base is None
        last = 0 if base is None else base.checkpoint_id
        largest = max(opened.largest_id, opened.log.last_checkpoint_id)
        self.coordinator = Coordinator(
            self._definitions,
            config,
            generation=self.generation,
            now_ms=self._now_ms,
            after_checkpoint=largest,
            after_epoch=max(largest, opened.log.last_epoch),
        )
        self._quorums: dict[int, Quorum] = {}
        self._snapshots: dict[int, dict[str, StageSnapshot]] = {}
        self._triggered_at: dict[int, str] = {}
        self._parts_when_aborted: dict[int, dict[str, StagePart]] = {}
        self.sinks = sinks
        self._commits = SinkCommits(self.sinks)
        self._committing: dict[str, _Commit] = {}
        self._threads = {name: ThreadPoolExecutor(1, f"tidegate-{name}") for name in self._definitions}
        self._pausing = ThreadPoolExecutor(max(1, len(definitions)), "tidegate-pause")
        self._sources: list[PausableSource] = []
        self._cleaner = ThreadPoolExecutor(1, "tidegate-clean-up")
        self._cleaning: Future[None] | None = None
        self._planning: PlanningWatch | None = None
        self._upkeep = TableUpkeep(self.sinks, self.generation, self._retained_manifests)
        self._is_abandoned = False
        self._has_advanced = False
        self.channels = {name: self._channel(name, base) for name in self._definitions}
        self.stages = {
            name: self._stage(definition, None if base is None else base.stages[name], last)
            for name, definition in self._definitions.items()
        }
        if base is not None:
            self._manifests[base.checkpoint_id] = base
            self._commits.on_permit(permit_commit(self._log, base.checkpoint_id, self.generation), self._now_ms)

    def _channel(self, name: str, base: Manifest | None) -> Channel:
        if base is None:
            return Channel(name, 0, self._bounds.backlog)
        in_flight = (stage.in_flight.get(name, ()) for stage in base.stages.values())
        # Of several readers, the same segments may be in flight to each.
        segments = {segment.sequence: segment for each in in_flight for segment in each}
        return Channel(name, base.stages[name].output_sequence, self._bounds.backlog, segments.values())

    def _stage(self, definition: StageDefinition, start: StageSnapshot | None, after: int) -> RunningStage:
        sink = self.sinks.get(definition.name)
        staging, output = self._staging_of(definition), self.output_of(definition)
        place = StagePlace(self._store, self.generation, staging, output, start, after, sink, self._bounds.backlog)
        return RunningStage(
            definition,
            place,
            self.channels,
            self._config,
            self._threads[definition.name],
            self._on_report,
            self._on_decline,
        )

    def _staging_of(self, definition: StageDefinition) -> Files:
        """Where what a stage writes lies, by whatever generation."""
        sink = self.sinks.get(definition.name)
        return sink.staging if isinstance(sink, FileSink) else self._store

    def output_of(self, definition: StageDefinition) -> Files:
        sink = self.sinks.get(definition.name)
        if isinstance(sink, FileSink):
            return staged_by(sink, self.generation).at("", durable=False)
        return self._store.at(RootPaths.output(self.generation, definition.name), durable=False)

    def checkpoint_of(self, definition: StageDefinition) -> Files:
        """Spark's own, of a stage's query."""
        return self._store.at(RootPaths.spark_checkpoint(self.generation, definition.name), durable=False)

    def may_pause(self, name: str, start: StartQuery) -> None:
        """A source may be paused, and be started again."""
        self._sources.append(PausableSource(self.stages[name], start, self._store, self.generation, self._pausing))

    def watch_planning(self, why_unreachable: WhyUnreachable) -> None:
        """From now on, when its queries run."""
        sources = [stage for stage in self.stages.values() if not stage.definition.inputs]
        self._planning = PlanningWatch(sources, why_unreachable)

    # -- one round --------------------------------------------------------------------------------

    def poll(self) -> None:
        """One round of everything."""
        self._now_ms = now_ms = monotonic_ms()
        self._look_at_tables()
        for stage in self.stages.values():
            stage.poll(now_ms)
        for source in self._sources:
            source.poll()
        self._execute(self.coordinator.on_time(now_ms))
        self._watch_quorums()
        self._decide_if_ready()
        self._drive_commits()
        if self._is_base_shown:
            self._upkeep.poll(now_ms)
        self._forget_read()

    def _forget_read(self) -> None:
        for name, channel in self.channels.items():
            readers = [stage for stage in self.stages.values() if name in stage.definition.inputs]
            channel.forget_before(min((stage.cursor(name) for stage in readers), default=channel.end))
            channel.on_consumed(min((stage.position(name) for stage in readers), default=channel.sequence))

    def _look_at_tables(self) -> None:
        """A sink whose table is late with an epoch may be held back, but not from a barrier that it is to reach: only a
        checkpoint makes visible what it has staged. Behind it, storing its part may wait for that very table."""
        for name in self.sinks:
            stage = self.stages[name]
            is_wanted = any(not stage.has_cut(checkpoint.checkpoint_id) for checkpoint in self.coordinator.active)
            stage.is_table_late = name in self._commits.pending and not is_wanted

    def held_back_by(self, name: str) -> str | None:
        """What holds a stage back: the slowest reader of its output, or its table."""
        stage = self.stages[name]
        if not stage.is_held_back:
            return None
        if stage.definition.kind == "sink":
            return "its table"
        return min(self._readers(name), key=lambda reader: self.stages[reader].position(name))

    def no_batch(self, name: str) -> NoBatch | None:
        """Why a source has planned no batch for a while, if it has not."""
        return None if self._planning is None else self._planning.waiting(name)

    def held_back(self) -> Delay | None:
        """Why the next checkpoint is not begun although it is due, once that has lasted for a while."""
        held = self.coordinator.held_back(self._now_ms)
        if held is None or self._now_ms - held.since_ms < _TELL_DUE_AFTER_MS:
            return None
        match held.by:
            case Obstacle.IN_PROGRESS:
                why = self._what_is_missing(held.checkpoints[0])
            case Obstacle.SINKS_LAG:
                why = "; ".join(self._what_sinks_lack())
            case Obstacle.PAUSE:
                left_s = ((held.until_ms or self._now_ms) - self._now_ms) / 1000
                ended = ", ".join(map(checkpoint_name, held.checkpoints))
                why = f"the pause after {ended} (min_pause_ms) lasts for another {left_s:.0f} s"
        return Delay(held.since_ms, held.by, why)

    def _what_is_missing(self, checkpoint_id: int) -> str:
        """Those that wait for others come last."""
        name = checkpoint_name(checkpoint_id)
        progress = {each: self.stages[each].part_of(checkpoint_id) for each in self.coordinator.missing(checkpoint_id)}
        if not progress:
            return f"{name} is in progress: it is being decided"
        stages = sorted(progress, key=lambda each: (progress[each].progress in ("waiting", "aligning"), each))
        said = ", ".join(f"{each} is {progress[each].told}" for each in stages[:_NAMED_STAGES])
        more = f" and {len(stages) - _NAMED_STAGES} more" if len(stages) > _NAMED_STAGES else ""
        return f"{name} is in progress: {said}{more}"

    def _what_sinks_lack(self) -> Iterable[str]:
        for name, (epoch, why) in self._commits.pending.items():
            commit = self._committing.get(name)
            if commit is not None:
                since_s = (monotonic_ms() - commit.since_ms) / 1000
                checkpoint = checkpoint_name(commit.permit.checkpoint_id)
                yield f"the commit of {checkpoint} to {name} is under way for {since_s:.0f} s"
            else:
                failed = f" has failed and is tried again: {why}" if why else " is about to begin"
                yield f"the commit of epoch {epoch} to {name}{failed}"

    def check_queries(self) -> None:
        for stage in self.stages.values():
            stage.check_query()

    def trigger(self, flags: Flag = Flag.NONE) -> int:
        """Take a checkpoint now. Returns its id."""
        begin = self.coordinator.trigger(self._now_ms, flags)
        self._execute([begin])
        return begin.barrier.checkpoint_id

    def is_under_way(self, checkpoint_id: int) -> bool:
        return any(each.checkpoint_id == checkpoint_id for each in self.coordinator.active)

    def completed(self, checkpoint_id: int) -> bool:
        return self._log.completed(checkpoint_id) is not None

    @property
    def has_advanced(self) -> bool:
        """Whether it has completed a checkpoint with which something more is consumed than when it started, and all
        tables show what it started from.

        Others would come again and again while a stage fails in the same place, or a table refuses the same rows.
        """
        return self._has_advanced and self._is_base_shown

    @property
    def shown_base(self) -> int:
        """The checkpoint that it started from, once all tables show it; 0 before, and if there was none."""
        base = self._opened.base
        return base.checkpoint_id if base is not None and self._is_base_shown else 0

    @property
    def is_settled(self) -> bool:
        """Whether no checkpoint is under way and every sink shows all that was decided."""
        return not self.coordinator.active and not self._commits.pending and self._cleaning is None

    # -- checkpoints ------------------------------------------------------------------------------

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Begin(barrier, attempt):
                    self._begin(barrier, attempt)
                case Abort(barrier, reason, detail):
                    self._abort(barrier, reason, detail)
                case FailPipeline(failures, detail):
                    raise CheckpointsFailed(f"{failures} checkpoints failed in a row; the last: {detail}")

    def _begin(self, barrier: Barrier, attempt: int) -> None:
        self._forget_those_before()
        self._triggered_at[barrier.checkpoint_id] = now()
        try:
            self._decisions.mark_used(barrier.checkpoint_id)
            reached(Step.ID_MARKED)
            self._check_still_open(self._decisions.read())
        except StoreUnavailable as error:
            self._stop_preparing(barrier.checkpoint_id, AbortReason.STORE_FAILED, str(error))
            return
        deadline_ms = self._now_ms + self._config.timeout_ms
        self._quorums[barrier.checkpoint_id] = Quorum(
            barrier, attempt, self.generation, [Member(_INSTANCE)], deadline_ms
        )
        self._snapshots[barrier.checkpoint_id] = {}
        for stage in self.stages.values():
            if stage.definition.kind == "source":
                stage.injector.inject(barrier)
                reached(Step.BARRIER_INJECTED)

    def _check_still_open(self, log: DecisionLog, *, lost: int | None = None) -> None:
        if log.generation > self.generation:
            self.coordinator.on_superseded(log.generation, self._now_ms, lost=lost)
            raise Superseded(self.generation, log.generation)

    def _stop_preparing(self, checkpoint_id: int, reason: AbortReason, detail: str) -> None:
        phases = {each.checkpoint_id: each.phase for each in self.coordinator.active}
        if phases.get(checkpoint_id) in (Phase.PREPARING, Phase.PREPARED):
            self._execute(self.coordinator.abort(checkpoint_id, reason, detail, self._now_ms))

    def triggered_at(self, checkpoint_id: int) -> str:
        """When a checkpoint was begun: looked at the clock once, so that everybody tells the same."""
        return self._triggered_at[checkpoint_id]

    def parts_of(self, checkpoint: Checkpoint) -> dict[str, StagePart]:
        """How far each stage has come with a checkpoint that was begun here, or had come when it was aborted."""
        known = self._parts_when_aborted.get(checkpoint.checkpoint_id)
        return self._parts_now(checkpoint) if known is None else known

    def _parts_now(self, checkpoint: Checkpoint) -> dict[str, StagePart]:
        return {
            name: part_of(checkpoint.reports[name])
            if name in checkpoint.reports
            else stage.part_of(checkpoint.checkpoint_id)
            for name, stage in self.stages.items()
        }

    def _forget_those_before(self) -> None:
        """What is told of a checkpoint is kept as long as the coordinator knows it."""
        known = {each.checkpoint_id for each in (*self.coordinator.active, *self.coordinator.history)}
        for forgotten in self._triggered_at.keys() - known:
            del self._triggered_at[forgotten]
            self._parts_when_aborted.pop(forgotten, None)

    def _abort(self, barrier: Barrier, reason: AbortReason, detail: str) -> None:
        _log.warning("%s aborted: %s (%s)", checkpoint_name(barrier.checkpoint_id), reason.value, detail)
        self._quorums.pop(barrier.checkpoint_id, None)
        self._snapshots.pop(barrier.checkpoint_id, None)
        for checkpoint in self.coordinator.history:
            if checkpoint.checkpoint_id == barrier.checkpoint_id:
                self._parts_when_aborted.setdefault(barrier.checkpoint_id, self._parts_now(checkpoint))
        for stage in self.stages.values():
            stage.on_aborted(barrier)

    def _on_report(self, stage: str, checkpoint_id: int, snapshot: StageSnapshot) -> None:
        active = {each.checkpoint_id: each for each in self.coordinator.active}
        checkpoint = active.get(checkpoint_id)
        if checkpoint is None:
            return
        snapshot = msgspec.structs.replace(snapshot, barrier_ms=max(0, snapshot.barrier_ms - checkpoint.triggered_ms))
        report = as_report(stage, snapshot, checkpoint_id, checkpoint.attempt, self.generation)
        if self.coordinator.on_report(report) is not ReportAnswer.ACCEPTED:
            return
        reached(Step.STAGE_REPORTED)
        self._snapshots[checkpoint_id][stage] = snapshot
        if not self.coordinator.missing(checkpoint_id):
            reports = tuple(checkpoint.reports.values())
            watermarks = [each.watermark_ms for each in reports if each.watermark_ms is not None]
            ack = Ack(
                _INSTANCE,
                checkpoint_id,
                checkpoint.attempt,
                self.generation,
                watermark_ms=min(watermarks, default=None),
                reports=reports,
            )
            self._quorums[checkpoint_id].on_ack(ack)

    def _on_decline(self, stage: str, checkpoint_id: int, why: str) -> None:
        active = {each.checkpoint_id: each for each in self.coordinator.active}
        checkpoint = active.get(checkpoint_id)
        if checkpoint is not None:
            decline = StageDecline(stage, checkpoint_id, checkpoint.attempt, self.generation, why)
            actions = self.coordinator.on_decline(decline, self._now_ms)
            if actions:
                declined = {stage: StagePart(progress="declined")}
                self._parts_when_aborted[checkpoint_id] = self._parts_now(checkpoint) | declined
            self._execute(actions)

    def _watch_quorums(self) -> None:
        for checkpoint_id, quorum in tuple(self._quorums.items()):
            outcome = quorum.on_time(self._now_ms)
            if isinstance(outcome, Failed | TimedOut):
                self._stop_preparing(checkpoint_id, AbortReason.QUORUM_FAILED, str(outcome))

    def _decide_if_ready(self) -> None:
        checkpoint = self.coordinator.ready_to_decide()
        if checkpoint is None:
            return
        outcome = self._quorums[checkpoint.checkpoint_id].on_time(self._now_ms)
        if isinstance(outcome, Reached):
            self.coordinator.decide(checkpoint.checkpoint_id)
            self._decide(checkpoint)

    def _decide(self, checkpoint: Checkpoint) -> None:
        checkpoint_id = checkpoint.checkpoint_id
        manifest = self._manifest_of(checkpoint)
        data, sha256 = encode_manifest(manifest)
        name = self._paths.manifest(self.generation, checkpoint_id)
        self._store.write(name, data)
        reached(Step.MANIFEST_WRITTEN)
        content = content_of(checkpoint.reports.values())
        at_ms = int(datetime.fromisoformat(manifest.triggered_at).timestamp() * 1000)
        proposed = self._log.completing(
            self._opened.claimant,
            self.generation,
            checkpoint_id=checkpoint_id,
            epoch=manifest.epoch,
            manifest=name,
            manifest_sha256=sha256,
            aligned=manifest.aligned,
            retained=retained_after(
                self._log, checkpoint_id, self._config, aligned=manifest.aligned, content=content, at_ms=at_ms
            ),
            content=content,
            at_ms=at_ms,
        )
        answer, log = self._decisions.claim(proposed)
        if answer is not ClaimAnswer.WON:
            self._check_still_open(log, lost=checkpoint_id)
            raise Superseded(self.generation, log.generation)
        reached(Step.SLOT_CLAIMED)
        self._log.append(proposed)
        self._manifests[checkpoint_id] = manifest
        self._has_advanced |= _consumed(manifest) != _consumed(self._opened.base)
        del self._quorums[checkpoint_id], self._snapshots[checkpoint_id]
        self.coordinator.on_slot_won(checkpoint_id, self._now_ms)
        for stage in self.stages.values():
            stage.on_decided(checkpoint_id)
        self._commits.on_permit(permit_commit(self._log, checkpoint_id, self.generation), self._now_ms)
        _log.info(
            "%s complete in %d ms, %d bytes new of %d%s",
            checkpoint_name(checkpoint_id),
            manifest.duration_ms,
            manifest.new_bytes,
            manifest.total_bytes,
            "" if manifest.aligned else ", unaligned",
        )

    def _manifest_of(self, checkpoint: Checkpoint) -> Manifest:
        return Manifest(
            format=FORMAT,
            pipeline=self._opened.pipeline,
            checkpoint_id=checkpoint.checkpoint_id,
            epoch=checkpoint.barrier.epoch,
            generation=self.generation,
            attempt=checkpoint.attempt,
            flags=checkpoint.barrier.flags,
            aligned=checkpoint.is_aligned,
            triggered_at=self._triggered_at[checkpoint.checkpoint_id],
            duration_ms=self._now_ms - checkpoint.triggered_ms,
            shape=dict(self.shape),
            stages=self._snapshots[checkpoint.checkpoint_id],
        )

    # -- sinks ------------------------------------------------------------------------------------

    def _drive_commits(self) -> None:
        for name, permit in self._commits.due(self._now_ms):
            committable = self._manifests[permit.checkpoint_id].stages[name].committable
            assert committable is not None
            sealed = decode_committable(committable)
            commit = partial(self.sinks[name].commit, permit, sealed)
            # On a thread of its own: it may take long, and must not hold up the next checkpoint.
            self._committing[name] = _Commit(permit, beside(f"tidegate-commit-{name}", commit), self._now_ms)
        for name, each in tuple(self._committing.items()):
            if each.future.done():
                del self._committing[name]
                self._on_commit_ended(name, each.permit, each.future)
            elif self._is_overdue(each):
                raise SinkFailed(
                    f"{self.sinks[name].describe()}: the commit of epoch {each.permit.epoch} has not ended in "
                    f"{self._bounds.commit_ms / 1000:g} s; see what it waits for, or give it longer: --commit-timeout"
                )
        if self._cleaning is not None and self._cleaning.done():
            error = self._cleaning.exception()
            self._cleaning = None
            if error is not None:
                _log.warning("cleaning up failed and is tried again after the next checkpoint: %s", say(error))

    def _is_overdue(self, commit: _Commit) -> bool:
        return monotonic_ms() - commit.since_ms >= self._bounds.commit_ms

    def _on_commit_ended(self, name: str, permit: CommitPermit, future: Future[CommitAnswer]) -> None:
        error = future.exception()
        if isinstance(error, Fenced | ForeignTable | ConflictingRows):
            raise error
        if isinstance(error, TablePutBack):
            would_fit = what_would_fit(name, error.epoch, error.next_batch, self._log, self._store)
            raise TablePutBack(f"{error}; {would_fit}", error.epoch, error.next_batch)
        if error is not None:
            is_ours = isinstance(error, TidegateError)
            why = self._told_of_table(name, error)
            failures = self._commits.on_failed(name, why, self._now_ms)
            # Where a function of the user's own failed is seen in the trace alone.
            is_users = self.sinks[name].table.kind in function.KINDS or not isinstance(error, OSError)
            trace = None if is_ours or is_of_the_connection(error) or not is_users else error
            _log.warning(
                "sink %s: commit of epoch %d failed (%d): %s", name, permit.epoch, failures, why, exc_info=trace
            )
            if failures >= _SINK_TRIES:
                if is_ours:
                    error.args = (why,)
                    raise error
                raise CheckpointsFailed(f"sink {name!r} could not be committed: {why}") from error
            return
        reached(Step.SINK_COMMITTED)
        cut = self._manifests[permit.checkpoint_id].stages[name].cut
        if cut is not None:
            self.stages[name].on_visible(cut)
        checkpoint_id = self._commits.on_committed(name, self._now_ms)
        if checkpoint_id is None:
            return
        reached(Step.ALL_SINKS_COMMITTED)
        self._is_base_shown = True  # it comes first
        with suppress(CheckpointError):  # the one that was restored is not this coordinator's
            self.coordinator.on_sinks_committed(checkpoint_id)
        self._clean_up(checkpoint_id)

    def _told_of_table(self, name: str, error: BaseException) -> str:
        """Why a commit failed. What a database says of its disk is of another machine's, perhaps."""
        if isinstance(error, OSError):
            return told(error)
        why = str(error) if isinstance(error, TidegateError) else f"{type(error).__name__}: {error}"
        table = self.sinks[name].table
        return explained(why, [Path(table.address), self._paths.root]) if table.kind == "delta" else why

    def _clean_up(self, checkpoint_id: int) -> None:
        if self._cleaning is not None:
            return
        retained = set(self._log.retained)
        self._manifests = {
            kept: each for kept, each in self._manifests.items() if kept in retained or kept >= checkpoint_id
        }
        job = cleaning.CleanUp(
            store=self._store,
            generation=self.generation,
            log=self._log,
            visible=self._manifests[checkpoint_id],
            manifests=dict(self._manifests),
            stages=list(self.stages.values()),
            readers={name: self._readers(name) for name in self._definitions},
        )

        def clean() -> None:
            job.run()
            for sink in self.sinks.values():
                sink.forget_staged(self.generation)
            reached(Step.CLEANED_UP)

        self._cleaning = self._cleaner.submit(clean)

    def _retained_manifests(self) -> list[Manifest]:
        """Of all checkpoints that the log retains. It comes from another thread, and reads what is stored."""
        while True:
            log = self._decisions.read()
            if log.generation > self.generation:
                raise Superseded(self.generation, log.generation)
            records = [record for each in log.retained if (record := log.completed(each)) is not None]
            try:
                return [read_manifest(self._store, record) for record in records]
            except DamagedCheckpoint:
                if self._decisions.read().retained == log.retained:
                    raise  # else it was removed meanwhile, and newer ones have taken its place

    def _readers(self, name: str) -> list[str]:
        return [each.name for each in self._definitions.values() if name in each.inputs]

    def stop(self) -> None:
        """Stop the queries and the threads. What is under way is lost, as a kill would lose it."""
        if self._is_abandoned:
            return
        self._stop_watching()
        self._pausing.shutdown(wait=True, cancel_futures=True)
        self._stop_queries()
        self._upkeep.stop()
        for pool in self._pools():
            pool.shutdown(wait=True, cancel_futures=True)
        self._await_commits()

    def _await_commits(self) -> None:
        """Until each has ended or is overdue. One that still ends later is like one of a superseded run."""
        for each in self._committing.values():
            left_ms = each.since_ms + self._bounds.commit_ms - monotonic_ms()
            wait([each.future], timeout=max(0, left_ms) / 1000)

    def abandon(self) -> None:
        """Stop, and wait for nothing: a commit may hang. One that still ends is like one of a superseded run."""
        self._is_abandoned = True
        self._stop_watching()
        for pool in self._pools():
            pool.shutdown(wait=False, cancel_futures=True)
        threading.Thread(target=self._stop_queries, name="tidegate-stop", daemon=True).start()

    def _stop_watching(self) -> None:
        if self._planning is not None:
            self._planning.stop()

    def _stop_queries(self) -> None:
        for query in (*(stage.query for stage in self.stages.values()), *(each.started for each in self._sources)):
            if query is not None:
                with suppress(Exception):
                    query.stop()

    def _pools(self) -> tuple[ThreadPoolExecutor, ...]:
        return (*self._threads.values(), self._cleaner, self._pausing)


def _consumed(manifest: Manifest | None) -> dict[str, object]:
    """How far stages have come in what they read, those that have come anywhere."""
    stages = {} if manifest is None else manifest.stages
    found = {name: (each.source_positions, each.positions) for name, each in stages.items()}
    return {name: (sources, inputs) for name, (sources, inputs) in found.items() if sources or any(inputs.values())}


class _Commit(msgspec.Struct, frozen=True):
    """A commit that is under way."""

    permit: CommitPermit
    future: Future[CommitAnswer]
    since_ms: int
