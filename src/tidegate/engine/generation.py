"""One generation of a pipeline in this process, which leads it and runs all of its stages.

A single control thread polls the stages and lets the flows of leader and member go on; there are no locks. What takes
time happens beside it (`carrier.py`); messages between leader and member are handed over in the same round.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from tidegate.engine.carrier import Carrier
from tidegate.engine.chains import by_query
from tidegate.engine.channel import Channel
from tidegate.engine.kill_points import Step, reached
from tidegate.engine.leading import Leading, reports_at_start
from tidegate.engine.options import Bounds
from tidegate.engine.pausing import PausableSource, StartQuery
from tidegate.engine.planning import PlanningWatch, WhyUnreachable
from tidegate.engine.stage.running import RunningStage, StagePlace
from tidegate.engine.status import NoBatch, StagePart, as_moment, part_of, status_of
from tidegate.engine.upkeep import TableUpkeep
from tidegate.errors import StoreUnavailable, TidegateError
from tidegate.flows import requests
from tidegate.flows.leader import Announced, Assignment, Leader, Visible
from tidegate.flows.member import Member, MemberFailed, Seen, ToLeader
from tidegate.flows.opening import Opened
from tidegate.flows.requests import Flow, Patience, Request, StartOrder
from tidegate.flows.stage import StageCheckpoints
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.coordinator import AbortReason, Checkpoint, Coordinator, Obstacle, StageDecline, StageReport
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.messages import Barrier, Flag
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.quorum import Ack, Announcement
from tidegate.sinks.contract import BoundSink, FileSink, staged_by
from tidegate.spark.definition import StageDefinition
from tidegate.storage.file_lists import MOST_IN_A_MANIFEST
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, StageShape
from tidegate.storage.paths import RootPaths

_log = logging.getLogger("tidegate")
_INSTANCE: Final = "local"
# A checkpoint that takes a little longer than the interval is nothing to tell.
_TELL_DUE_AFTER_MS: Final = 5_000
_NAMED_STAGES: Final = 3
_STOPS_IN_S: Final = 60.0


class Ground(msgspec.Struct, frozen=True):
    """What a generation stands on: the root, what it was opened as, and what it starts from."""

    pipeline: str
    root: Files
    work: Files
    """Where Spark lives between checkpoints: on one machine, in the root too. By the same names as there."""
    opened: Opened
    base: Manifest | None
    shape: dict[str, StageShape]
    most_in_a_manifest: int = MOST_IN_A_MANIFEST
    """See `FileLists`."""


class Delay(msgspec.Struct, frozen=True):
    """The next checkpoint is due since a moment of the run's clock, and is not begun."""

    since_ms: int
    by: Obstacle
    why: str


class Generation:
    def __init__(
        self,
        definitions: Iterable[StageDefinition],
        ground: Ground,
        config: CheckpointConfig,
        sinks: Mapping[str, BoundSink],
        bounds: Bounds | None = None,
        *,
        launch: Callable[[Generation], None],
        patience: Patience | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        """`definitions`: of what Spark runs, stages and chains of them. `launch` rebuilds them and starts their
        queries."""
        self._bounds = Bounds() if bounds is None else bounds
        self._patience = Patience() if patience is None else patience
        self._definitions = {definition.name: definition for definition in definitions}
        self._ground = ground
        self.generation = ground.opened.generation
        self.shape = dict(ground.shape)
        self._config = config
        self._launch = launch
        self.sinks = sinks
        self.carrier = Carrier() if carrier is None else carrier
        self._sources: list[PausableSource] = []
        self.holds_sources = False
        """Whether no source is to read any more."""
        self.closes: frozenset[str] = frozenset()
        """The queries whose watermarks it was launched with at the end of time, to close what they hold."""
        self._planning: PlanningWatch | None = None
        self._messages: deque[StartOrder | Announced | Visible | ToLeader] = deque()
        self._failure: TidegateError | None = None
        self._parts_when_aborted: dict[int, dict[str, StagePart]] = {}
        self._declining: StageDecline | None = None
        self._is_base_shown = ground.base is None
        self._is_abandoned = False
        self._has_advanced = False
        base, queries = ground.base, self._definitions.values()
        self._starts = {} if base is None else by_query(base.stages, queries)
        self._reports_at_base = None if base is None else reports_at_start(base, queries)
        self.channels = {name: self._channel(name) for name in self._definitions}
        self.stages = {name: self._stage(definition) for name, definition in self._definitions.items()}
        self._readers: dict[str, list[RunningStage]] = {name: [] for name in self._definitions}
        for stage in self.stages.values():
            for each in stage.definition.inputs:
                self._readers[each].append(stage)
        self.leading = Leading(
            ground.pipeline,
            self.generation,
            self.shape,
            ground.root,
            sinks,
            self.stages,
            self.carrier.clock,
            self._bounds.commit_ms,
            max(ground.opened.largest_id, ground.opened.log.last_checkpoint_id),
        )
        self._upkeep = TableUpkeep(sinks, self.generation, self.leading.retained_manifests)
        self.carrier.handle(self.leading.handlers())
        self.carrier.handle(self._handlers())
        self.member = Member(self, _INSTANCE)
        self.leader = Leader(
            self,
            ground.opened,
            self._definitions,
            sinks,
            {_INSTANCE: Assignment(self.incarnation, tuple(self._definitions), self._has_event_time)},
            config,
            self._reports_at_base,
            self._patience,
        )

    @property
    def _has_event_time(self) -> bool:
        return any(each.has_event_time for each in self.shape.values())

    def _channel(self, name: str) -> Channel:
        if not self._starts:
            return Channel(name, 0, self._bounds.backlog)
        in_flight = (stage.in_flight.get(name, ()) for stage in self._starts.values())
        # Of several readers, the same segments may be in flight to each.
        segments = {segment.sequence: segment for each in in_flight for segment in each}
        return Channel(name, self._starts[name].output_sequence, self._bounds.backlog, segments.values())

    def _stage(self, definition: StageDefinition) -> RunningStage:
        ground = self._ground
        start = self._starts.get(definition.name)
        opened = ground.opened
        place = StagePlace(
            ground.root,
            ground.work,
            self.generation,
            self._staging_of(definition),
            self.output_of(definition),
            start,
            max(opened.largest_id, opened.log.last_checkpoint_id),
            self.sinks.get(definition.name),
            self._bounds.backlog,
            has_event_time=any(self.shape[each.name].has_event_time for each in definition.members),
            most_in_a_manifest=ground.most_in_a_manifest,
        )
        return RunningStage(definition, place, self.channels, self._config, self, self._patience)

    def _staging_of(self, definition: StageDefinition) -> Files:
        """Where what a stage writes lies, by whatever generation."""
        sink = self.sinks.get(definition.name)
        return sink.staging if isinstance(sink, FileSink) else self._ground.work

    def output_of(self, definition: StageDefinition, attempt: int = 1) -> Files:
        sink = self.sinks.get(definition.name)
        if isinstance(sink, FileSink):
            return staged_by(sink, self.generation, attempt).at("", durable=False)
        return self._ground.work.at(RootPaths.output(self.generation, definition.name, attempt), durable=False)

    def checkpoint_of(self, definition: StageDefinition, attempt: int = 1) -> Files:
        """Spark's own, of a query."""
        folder = RootPaths.spark_checkpoint(self.generation, definition.head, attempt)
        return self._ground.work.at(folder, durable=False)

    def may_pause(self, name: str, start: StartQuery, *, is_started: bool = True) -> None:
        """A source may be paused, and be started again. `is_started`: see `PausableSource`."""
        definition = self._definitions[name]

        def folders(attempt: int) -> tuple[Files, Files]:
            return self.checkpoint_of(definition, attempt), self.output_of(definition, attempt)

        source = PausableSource(self.stages[name], start, folders, self.carrier.call, is_started=is_started)
        self._sources.append(source)
        if self.holds_sources:  # also since a moment ago: whoever launches is beside the control thread
            source.hold()

    def hold_sources(self) -> None:
        """Let no source read a row more, for the rest of this generation. Before it is launched: none is started."""
        self.holds_sources = True
        for source in self._sources:
            source.hold()

    def is_at_rest(self, name: str) -> bool:
        """Whether a source is held, and nothing more comes from it."""
        return any(source.name == name and source.is_at_rest for source in self._sources)

    def watch_planning(self, why_unreachable: WhyUnreachable) -> None:
        """From now on, when its queries run."""
        sources = [stage for stage in self.stages.values() if not stage.definition.inputs]
        self._planning = PlanningWatch(sources, why_unreachable)

    # -- one round --------------------------------------------------------------------------------

    def poll(self) -> None:
        """One round of everything."""
        self._look_at_tables()
        for stage in self.stages.values():
            stage.poll()
        self.member.on_time()
        for source in self._sources:
            source.poll()
        self.leader.on_time()
        self.go_on()
        for stage in self.stages.values():
            stage.flush()
        self.leading.check_commits()
        if self._is_base_shown:
            self._upkeep.poll(self.now_ms)
        self._forget_read()

    def go_on(self) -> None:
        """Let the flows go on whose answers are there, and hand over what they have to say."""
        self.carrier.poll()
        while self._messages:
            self._hand_over(self._messages.popleft())
        if self._failure is not None:
            raise self._failure

    def _hand_over(self, message: StartOrder | Announced | Visible | ToLeader) -> None:
        match message:
            case StartOrder():
                self.member.on_start(message)
            case Announced():
                self.member.on_announced(message)
            case Visible():
                self.member.on_visible(message)
            case Seen(_, instance, sequence):
                self.leader.on_seen(instance, sequence)
            case StageReport():
                self.leader.on_report(message)
                reached(Step.STAGE_REPORTED)
            case Ack():
                self.leader.on_ack(message)
            case MemberFailed(_, instance, why):
                self.leader.on_failed(instance, why)
            case StageDecline():
                self._declining = message
                self.leader.on_decline(message)
                self._declining = None

    def _forget_read(self) -> None:
        for name, channel in self.channels.items():
            readers = [stage.inputs for stage in self._readers[name]]
            channel.forget_before(min((each.cursor(name) for each in readers), default=channel.end))
            channel.on_consumed(min((each.position(name) for each in readers), default=channel.sequence))

    def _look_at_tables(self) -> None:
        """A sink whose table is late with an epoch may be held back, but not from a barrier that it is to reach: only a
        checkpoint makes visible what it has staged. Behind it, storing its part may wait for that very table."""
        for name in self.sinks:
            stage = self.stages[name]
            is_wanted = any(not stage.checkpoints.has_cut(each.checkpoint_id) for each in self.coordinator.active)
            stage.is_late(name in self.leader.commits.pending and not is_wanted)

    @property
    def has_news(self) -> bool:
        """Whether a query has committed a batch since the last round. One that rests has not."""
        return any(not (stage.progress.is_resting or stage.progress.has_taken_up_all) for stage in self.stages.values())

    def check_queries(self) -> None:
        for stage in self.stages.values():
            stage.check_query()

    # -- what a user wants ------------------------------------------------------------------------

    def trigger(self, flags: Flag = Flag.NONE) -> int:
        """Take a checkpoint now. Returns its id."""
        return self.leader.trigger(flags)

    def cancel(self) -> tuple[int, ...]:
        """Cancel what is being prepared. Returns which: what is being decided cannot be any more."""
        return self.leader.cancel()

    # -- what one may ask -------------------------------------------------------------------------

    @property
    def coordinator(self) -> Coordinator:
        return self.leader.coordinator

    def is_under_way(self, checkpoint_id: int) -> bool:
        return any(each.checkpoint_id == checkpoint_id for each in self.coordinator.active)

    def completed(self, checkpoint_id: int) -> bool:
        return self.leader.log.completed(checkpoint_id) is not None

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
        base = self._ground.base
        return base.checkpoint_id if base is not None and self._is_base_shown else 0

    @property
    def is_settled(self) -> bool:
        """Whether no checkpoint is under way and every sink shows all that was decided."""
        return self.leader.is_settled

    def held_back_by(self, name: str) -> str | None:
        """What holds a stage back: the slowest reader of its output, or its table."""
        stage = self.stages[name]
        if not stage.is_held_back:
            return None
        if stage.definition.kind == "sink":
            return "its table"
        return min(self._readers[name], key=lambda reader: reader.inputs.position(name)).definition.head

    def no_batch(self, name: str) -> NoBatch | None:
        """Why a source has planned no batch for a while, if it has not."""
        return None if self._planning is None else self._planning.waiting(name)

    def held_back(self) -> Delay | None:
        """Why the next checkpoint is not begun although it is due, once that has lasted for a while."""
        now_ms = self.now_ms
        held = self.coordinator.held_back(now_ms)
        if held is None or now_ms - held.since_ms < _TELL_DUE_AFTER_MS:
            return None
        match held.by:
            case Obstacle.IN_PROGRESS:
                why = self._what_is_missing(held.checkpoints[0])
            case Obstacle.SINKS_LAG:
                why = "; ".join(self.leading.what_sinks_lack(self.leader.commits.pending))
            case Obstacle.PAUSE:
                left_s = ((held.until_ms or now_ms) - now_ms) / 1000
                ended = ", ".join(map(checkpoint_name, held.checkpoints))
                why = f"the pause after {ended} (min_pause_ms) lasts for another {left_s:.0f} s"
        return Delay(held.since_ms, held.by, why)

    def _what_is_missing(self, checkpoint_id: int) -> str:
        """Those that wait for others come last."""
        name = checkpoint_name(checkpoint_id)
        progress = {
            each: self.stages[each].part_of(checkpoint_id, self.now_ms)
            for each in self.coordinator.missing(checkpoint_id)
        }
        if not progress:
            return f"{name} is in progress: it is being decided"
        stages = sorted(progress, key=lambda each: (progress[each].progress in ("waiting", "aligning"), each))
        said = ", ".join(f"{each} is {progress[each].told}" for each in stages[:_NAMED_STAGES])
        more = f" and {len(stages) - _NAMED_STAGES} more" if len(stages) > _NAMED_STAGES else ""
        return f"{name} is in progress: {said}{more}"

    def triggered_at(self, checkpoint: Checkpoint) -> str:
        """When a checkpoint was begun."""
        return as_moment(self.leading.triggered_at(checkpoint))

    def duration_ms(self, checkpoint: Checkpoint) -> int:
        """How long it took, or takes until now."""
        return self.leading.duration_ms(checkpoint)

    def parts_of(self, checkpoint: Checkpoint) -> dict[str, StagePart]:
        """How far each stage has come with a checkpoint that was begun here, or had come when it was aborted."""
        known = self._parts_when_aborted.get(checkpoint.checkpoint_id)
        return self._parts_now(checkpoint) if known is None else known

    def _parts_now(self, checkpoint: Checkpoint) -> dict[str, StagePart]:
        return {
            name: part_of(checkpoint.reports[name], is_asked=checkpoint.barrier.is_unaligned)
            if name in checkpoint.reports
            else stage.part_of(checkpoint.checkpoint_id, self.now_ms, is_asked=checkpoint.barrier.is_unaligned)
            for name, stage in self.stages.items()
        }

    # -- for leader and member --------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        return self.carrier.clock.now_ms

    def start(self, flow: Flow[None], on_failed: Callable[[TidegateError], None]) -> None:
        self.carrier.start(flow, on_failed)

    def on_unanswered(self, request: Request[Any], error: StoreUnavailable, failures: int) -> None:
        if failures == 1:
            _log.warning("%s; it is tried again", error)
        else:
            _log.debug("%s, for the %dth time: %s", type(request).__name__, failures, error)

    def send(self, _to: str, message: StartOrder | Announced | Visible | ToLeader) -> None:
        """Both are here."""
        self._messages.append(message)

    @property
    def incarnation(self) -> int:
        """A process runs a generation once: another try is another generation."""
        return 0

    def on_announced(self, announcement: Announcement) -> None:
        """Nothing is to be done beside what the stages do."""

    def on_begun(self, checkpoint: Checkpoint) -> None:
        known = {each.checkpoint_id for each in (*self.coordinator.active, *self.coordinator.history)}
        self.leading.forget_but(known)
        for forgotten in self._parts_when_aborted.keys() - known:
            del self._parts_when_aborted[forgotten]
        self.leading.triggered_at(checkpoint)

    def on_aborted(self, barrier: Barrier, reason: AbortReason, detail: str) -> None:
        checkpoint_id = barrier.checkpoint_id
        _log.warning("%s aborted: %s%s", checkpoint_name(checkpoint_id), reason.value, f" ({detail})" if detail else "")
        for checkpoint in self.coordinator.history:
            if checkpoint.checkpoint_id == checkpoint_id:
                parts = self._parts_now(checkpoint)
                if self._declining is not None:
                    parts[self._declining.stage] = StagePart(progress="declined")
                self._parts_when_aborted[checkpoint_id] = parts

    def on_completed(self, record: CheckpointCompleted, checkpoint: Checkpoint, min_watermark_ms: int | None) -> None:
        self._has_advanced |= _consumed(checkpoint.reports) != self._consumed_at_base
        _log.debug("%s: the pipeline's watermark is %s", checkpoint_name(record.checkpoint_id), min_watermark_ms)
        _log.info(
            "%s complete in %d ms, %d bytes new of %d%s",
            checkpoint_name(record.checkpoint_id),
            self.duration_ms(checkpoint),
            checkpoint.new_bytes,
            checkpoint.total_bytes,
            "" if record.aligned else f", {status_of(self, checkpoint).alignment}",
        )

    @property
    def _consumed_at_base(self) -> dict[str, object]:
        return _consumed(self._reports_at_base or {})

    def on_commit_failed(self, sink: str, permit: CommitPermit, failures: int, error: TidegateError) -> None:
        self.leading.tell_commit_failed(sink, permit, failures, error)

    def on_shown(self, checkpoint_id: int) -> None:
        reached(Step.ALL_SINKS_COMMITTED)
        self._is_base_shown = True  # it comes first
        _log.debug("all tables show %s", checkpoint_name(checkpoint_id))

    def on_not_cleaned(self, error: StoreUnavailable) -> None:
        _log.warning("cleaning up failed and is tried again after the next checkpoint: %s", error)

    def on_stepped_down(self, why: TidegateError) -> None:
        self.on_failed(why)

    def on_failed(self, error: TidegateError) -> None:
        """The first failure counts: it ends the generation at the end of the round."""
        self._failure = self._failure or error

    def _handlers(self) -> dict[type[Request[Any]], Callable[[Any], Callable[[], Any]]]:
        return {
            requests.RunStages: self._run_stages,
            requests.StoreSnapshot: lambda request: self.stages[request.stage].storing_snapshot(request),
            requests.StoreInFlight: lambda request: self.stages[request.stage].storing_in_flight(request),
            requests.CheckSealed: lambda request: self.stages[request.stage].checking_sealed(request.committable),
            requests.DropShown: lambda request: self.stages[request.sink].dropping_shown(request.through_batch),
        }

    def _run_stages(self, _request: requests.RunStages) -> Callable[[], dict[str, StageCheckpoints]]:
        def run() -> dict[str, StageCheckpoints]:
            self._launch(self)
            return {name: stage.checkpoints for name, stage in self.stages.items()}

        return run

    # -- the end ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the queries and the threads. What is under way is lost, as a kill would lose it."""
        if self._is_abandoned:
            return
        self._stop_watching()
        for source in self._sources:
            source.stop()
        self._stop_queries()
        self._upkeep.stop()
        self.carrier.stop(self._waits_s)

    def _waits_s(self, request: Request[Any]) -> float:
        """How long a stop waits for what is under way. A table may hang: a commit is waited for until it is overdue.

        One that still ends later is like one of a superseded run.
        """
        match request:
            case requests.CheckSealed():
                return 0
            case requests.CommitSink():
                return self.leading.commit_ends_in_s(request.sink)
            case _:
                return _STOPS_IN_S

    def abandon(self) -> None:
        """Stop, and wait for nothing: a commit may hang. One that still ends is like one of a superseded run."""
        self._is_abandoned = True
        self._stop_watching()
        self.carrier.stop(lambda _: 0)
        threading.Thread(target=self._stop_queries, name="tidegate-stop", daemon=True).start()

    def _stop_watching(self) -> None:
        if self._planning is not None:
            self._planning.stop()

    def _stop_queries(self) -> None:
        started = (each.started for each in self._sources)
        for each in (*(stage.progress for stage in self.stages.values()), *started):
            if each is not None:
                with suppress(Exception):
                    each.stop()


def _consumed(reports: Mapping[str, StageReport]) -> dict[str, object]:
    """How far stages have come in what they read, those that have come anywhere."""
    return {
        name: (each.source_position, each.positions)
        for name, each in reports.items()
        if each.source_position or any(each.positions.values())
    }
