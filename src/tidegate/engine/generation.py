"""One generation of a pipeline in this process, which leads it and runs all of its stages; or has a part in it, where
several processes run one pipeline (`part.py`, `links.py`).

A single control thread polls the stages and lets the flows of leader and member go on; there are no locks. What takes
time happens beside it (`carrier.py`); messages between leader and member are handed over in the same round.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from tidegate.engine.carrier import Carrier
from tidegate.engine.chains import by_query
from tidegate.engine.channel import Channel
from tidegate.engine.cleaning import Cleaning
from tidegate.engine.kill_points import Step, reached
from tidegate.engine.leading import Course, Leading, following, reports_at_start, with_snapshot
from tidegate.engine.links import LeaderTold, Links
from tidegate.engine.options import Bounds
from tidegate.engine.part import Part
from tidegate.engine.pausing import PausableSource, StartQuery
from tidegate.engine.planning import PlanningWatch, WhyUnreachable
from tidegate.engine.stage.inputs import InputTime
from tidegate.engine.stage.running import RunningStage, StagePlace
from tidegate.engine.status import CheckpointStatus, NoBatch, StagePart, as_moment, part_of, status_of
from tidegate.engine.upkeep import TableUpkeep
from tidegate.errors import InvariantViolation, StoreUnavailable, TidegateError
from tidegate.flows import requests
from tidegate.flows.boards import ToMember, give_to_leader, give_to_member
from tidegate.flows.cleaning import clean_up_own
from tidegate.flows.leader import Announced, Assignment, Leader, Visible
from tidegate.flows.member import Member, ToLeader
from tidegate.flows.opening import Opened
from tidegate.flows.requests import Asker, Flow, Patience, Request, StartOrder
from tidegate.flows.stage import StageCheckpoints
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.coordinator import AbortReason, Checkpoint, Coordinator, Obstacle, StageDecline, StageReport
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.drift import with_event_time
from tidegate.protocol.messages import Barrier, Flag
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.quorum import Ack, Announcement
from tidegate.sinks.contract import BoundSink, FileSink, staged_by
from tidegate.spark.causes import why_not_stopped
from tidegate.spark.definition import StageDefinition
from tidegate.storage.file_lists import MOST_IN_A_MANIFEST
from tidegate.storage.files import Files
from tidegate.storage.folder import near
from tidegate.storage.manifest import Manifest, StageShape
from tidegate.storage.mounted import Mounted
from tidegate.storage.paths import RootPaths

_log = logging.getLogger("tidegate")
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
    deletes_from: int = 1
    """See `Pace`."""


class Delay(msgspec.Struct, frozen=True):
    """The next checkpoint is due since a moment of the run's clock, and is not begun."""

    since_ms: int
    by: Obstacle
    why: str


class CheckpointListener(Protocol):
    """Must not wait, nor fail."""

    def on_ended(self, status: CheckpointStatus) -> None:
        """One was aborted, or all tables show it."""
        ...

    def on_base_shown(self, checkpoint_id: int, course: Course) -> None:
        """All tables show the one that the generation started from."""
        ...


class _Leadership(msgspec.Struct, frozen=True):
    """What only the process has that leads."""

    leader: Leader
    leading: Leading
    upkeep: TableUpkeep


class Generation:
    has_stuck_queries = False
    """Whether a query of it could not be stopped: none of the same stage can be started beside it."""
    has_heard = False
    """Whether another process has said something since the last round."""
    listener: CheckpointListener | None = None
    """Who wants to know how checkpoints end."""

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
        part: Part | None = None,
    ) -> None:
        """`definitions`: of what Spark runs, stages and chains of them, wherever they run. `launch` rebuilds those that
        run here and starts their queries. `part`: what this process has to do with it, if not everything."""
        self.part = Part() if part is None else part
        self._bounds = Bounds() if bounds is None else bounds
        self._patience = Patience() if patience is None else patience
        self.queries = tuple(definitions)
        self._definitions = {each.name: each for each in self.queries if self.part.runs(each.name)}
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
        self._messages: deque[ToMember | ToLeader] = deque()
        self._failure: TidegateError | None = None
        self._parts_when_aborted: dict[int, dict[str, StagePart]] = {}
        self._declining: StageDecline | None = None
        self._is_base_shown = ground.base is None
        self._acks: dict[int, Ack] = {}
        self._is_cleaning = False
        self._is_abandoned = False
        self._has_advanced = False
        base, queries = ground.base, self.queries
        self._starts = {} if base is None else by_query(base.stages, queries)
        self._reports_at_base = None if base is None else reports_at_start(base, queries)
        own_time = [name for name, each in self.shape.items() if each.has_event_time]
        self._timed = with_event_time({name: each.inputs for name, each in self.shape.items()}, own_time)
        here = dict.fromkeys(name for each in self._definitions.values() for name in (*each.inputs, each.name))
        self.channels = {each.name: self._channel(each.name) for each in self.queries if each.name in here}
        self.stages = {name: self._stage(definition) for name, definition in self._definitions.items()}
        self._readers: dict[str, list[RunningStage]] = {name: [] for name in self.channels}
        for stage in self.stages.values():
            for each in stage.definition.inputs:
                self._readers[each].append(stage)
        self.links = None if self.part.exchange is None else Links(self, self.part, self.part.exchange)
        self.shown = 0
        """The newest checkpoint that all tables show."""
        self.carrier.handle(self._handlers())
        self.member = Member(self, self.part.instance)
        self._leadership: _Leadership | None = None
        if self.part.leads:
            self._leadership = self._lead()
        else:
            self.carrier.handle(following(ground.root, self.generation, self.queries, self._cleaning()))

    def _cleaning(self) -> Cleaning:
        return Cleaning(
            self._ground.root,
            self.generation,
            self.stages,
            self.queries,
            leads=self.part.leads,
            elsewhere=self._ground.base if self.elsewhere else None,
            deletes_from=self._ground.deletes_from,
        )

    def _lead(self) -> _Leadership:
        ground, sinks = self._ground, self.sinks
        leading = Leading(
            ground.pipeline,
            self.generation,
            self.shape,
            ground.root,
            sinks,
            self.queries,
            self._cleaning(),
            self.carrier.clock,
            self._bounds.commit_ms,
        )
        self.carrier.handle(leading.handlers())
        if ground.base is not None:
            leading.course_of_base(ground.base)
        if self.links is not None:
            self.links.lead(ground.opened.claimant)
        leader = Leader(
            self,
            ground.opened,
            [each.name for each in self.queries],
            sinks,
            self._assignments(),
            self._config,
            self._reports_at_base,
            self._patience,
        )
        return _Leadership(leader, leading, TableUpkeep(sinks, self.generation, leading.retained_manifests))

    def _assignments(self) -> dict[str, Assignment]:
        placed = self.part.placed or {self.part.instance: tuple(self._definitions)}
        incarnations = self.part.incarnations or {self.part.instance: self.incarnation}
        return {
            name: Assignment(incarnations[name], queries, self._has_event_time(queries))
            for name, queries in placed.items()
            if queries
        }

    def _has_event_time(self, queries: Collection[str]) -> bool:
        own = [each for query in self.queries if query.name in queries for each in query.members]
        return any(self.shape[each.name].has_event_time for each in own)

    # -- who leads --------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self._leadership is not None

    @property
    def _lead_here(self) -> _Leadership:
        if self._leadership is None:
            raise InvariantViolation("this process does not lead the generation")
        return self._leadership

    @property
    def leader(self) -> Leader:
        return self._lead_here.leader

    @property
    def leading(self) -> Leading:
        return self._lead_here.leading

    def _channel(self, name: str) -> Channel:
        if not self._starts:
            return Channel(name, 0, self._bounds.backlog)
        in_flight = (stage.in_flight.get(name, ()) for stage in self._starts.values())
        # Of several readers, the same segments may be in flight to each.
        segments = {segment.sequence: segment for each in in_flight for segment in each}
        start = self._starts[name]
        channel = Channel(name, start.output_sequence, self._bounds.backlog, segments.values())
        if self._bounds.drift_ms is not None and start.watermark_ms is not None:
            channel.append_watermark(start.watermark_ms)
        return channel

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
            input_time=self._input_time(definition),
            clock=self.carrier.clock,
        )
        return RunningStage(definition, place, self.channels, self._config, self, self._patience)

    def _input_time(self, definition: StageDefinition) -> InputTime | None:
        if self._bounds.drift_ms is None:
            return None
        return InputTime(tuple(each for each in definition.inputs if each in self._timed), self._bounds.drift_ms)

    def _staging_of(self, definition: StageDefinition) -> Files:
        """Where what a stage writes lies, by whatever generation."""
        sink = self.sinks.get(definition.name)
        return sink.staging if isinstance(sink, FileSink) else self._ground.work

    def output_of(self, definition: StageDefinition, attempt: int = 1) -> Files:
        sink = self.sinks.get(definition.name)
        if isinstance(sink, FileSink):
            staged = staged_by(sink, self.generation, attempt)
            return (staged if isinstance(staged, Mounted) else near(staged)).at("", durable=False)
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
        if self.links is not None:
            self._hear(self.links)
        self._look_at_tables()
        for stage in self.stages.values():
            stage.poll()
        self.member.on_time()
        for source in self._sources:
            source.poll()
        if self._leadership is not None:
            self._lead_on(self._leadership)
        self.go_on()
        if self._bounds.drift_ms is not None:
            self._look_at_time()
        for stage in self.stages.values():
            stage.flush()
        if self._leadership is not None:
            self._look_after_tables(self._leadership)
        self._forget_read()
        if self.links is not None:
            self.links.say()

    def _lead_on(self, leadership: _Leadership) -> None:
        leadership.leader.on_time()
        if self.links is not None and not self.links.has_said:
            self.links.say()  # before this one launches its own part, so that all do so at the same time

    def _look_after_tables(self, leadership: _Leadership) -> None:
        leadership.leading.check_commits()
        if self._is_base_shown:
            leadership.upkeep.poll(self.now_ms)

    def _hear(self, links: Links) -> None:
        """Take what other processes have said."""
        for message in links.hear(self.channels, self.member.seen):
            self._hand_over(message)
        if self.leads:
            return
        told = self._told
        if told.holds_sources and not self.holds_sources:
            self.hold_sources()
        if told.shown > self.shown and not self._is_cleaning:
            self.shown, self._is_cleaning = told.shown, True
            self.carrier.start(self._clean_up(told.shown), self.on_failed)

    async def _clean_up(self, shown: int) -> None:
        """After the stages that run here, where another process leads."""
        try:
            await clean_up_own(Asker(self, self._patience), self.generation, shown)
        except StoreUnavailable as error:
            self.on_not_cleaned(error)
        finally:
            self._is_cleaning = False

    @property
    def has_cleaned_up(self) -> bool:
        """Whether nothing is left to clean up here behind what all tables show, where another process leads."""
        return not self._is_cleaning and (self.links is None or self.shown >= self.links.leader_told.shown)

    def start_by(self, order: StartOrder) -> None:
        """Run what the leader elsewhere has ordered. With the first round."""
        self.member.on_start(order)

    def go_on(self) -> None:
        """Let the flows go on whose answers are there, and hand over what they have to say."""
        self.carrier.poll()
        while self._messages:
            self._hand_over(self._messages.popleft())
        if self._failure is not None:
            raise self._failure

    def _hand_over(self, message: ToMember | ToLeader) -> None:
        if isinstance(message, StartOrder | Announced | Visible):
            give_to_member(message, self.member)
            return
        self._declining = message if isinstance(message, StageDecline) else None
        if isinstance(message, Ack) and self.links is not None:
            self._note_ack(message)
        give_to_leader(message, self.leader)
        self._declining = None
        if isinstance(message, StageReport):
            reached(Step.STAGE_REPORTED)

    def _note_ack(self, ack: Ack) -> None:
        """It is said again and again, until it is heard."""
        for checkpoint in self.coordinator.active:
            if (checkpoint.checkpoint_id, checkpoint.attempt) == (ack.checkpoint_id, ack.attempt):
                self.course_of(checkpoint).acks.setdefault(ack.instance, self.now_ms - checkpoint.triggered_ms)

    def _forget_read(self) -> None:
        for name, channel in self.channels.items():
            readers = [stage.inputs for stage in self._readers[name]]
            cursors, positions = [each.cursor(name) for each in readers], [each.position(name) for each in readers]
            if self.links is not None and (consumed := self.links.consumed(name)) is not None:
                cursors.append(self.links.is_sent(name, channel.end))
                positions.append(consumed)
            channel.forget_before(min(cursors, default=channel.end))
            channel.on_consumed(min(positions, default=channel.sequence))

    def consumed_here(self, name: str) -> int:
        """How far those that read a channel here have consumed it."""
        return min(stage.inputs.position(name) for stage in self._readers[name])

    def _look_at_tables(self) -> None:
        """A sink whose table is late with an epoch may be held back, but not from a barrier that it is to reach: only a
        checkpoint makes visible what it has staged. Behind it, storing its part may wait for that very table."""
        pending: Collection[str] = self._told.pending if self._leadership is None else self.leader.commits.pending
        for name, stage in self.stages.items():
            if name in self.sinks:
                is_wanted = any(not stage.checkpoints.has_cut(each) for each in self._under_way)
                stage.is_late(name in pending and not is_wanted)

    @property
    def _told(self) -> LeaderTold:
        """By whoever leads elsewhere."""
        return LeaderTold() if self.links is None else self.links.leader_told

    @property
    def _under_way(self) -> Sequence[int]:
        """The checkpoints that are, wherever this is led from."""
        if self._leadership is None:
            return self._told.active
        return [each.checkpoint_id for each in self.coordinator.active]

    def _look_at_time(self) -> None:
        """Stages tell their readers how far event time has come, and an input that is too far ahead is held: not from
        a barrier that its stage is to reach, and not while the stage records what comes before one. Who writes it may
        have to consume more before it sends that barrier."""
        active = self._under_way
        for stage in self.stages.values():
            stage.tell_time(is_done=not stage.definition.inputs and self.has_ended(stage))
            stage.inputs.let_through(not all(map(stage.checkpoints.has_captured, active)))
        for name, channel in self.channels.items():
            is_held_elsewhere = self.links is not None and self.links.is_held(name)
            channel.hold(is_held_elsewhere or self.is_held_here(name))

    def is_held_here(self, name: str) -> bool:
        """Whether a reader of a channel here is shown no more of it for now: it is too far ahead in event time."""
        return any(reader.inputs.is_held(name) for reader in self._readers[name])

    @property
    def has_news(self) -> bool:
        """Whether a query has committed a batch since the last round. One that rests has not."""
        if self.has_heard:
            self.has_heard = False
            return True
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
        readers = [(reader.inputs.position(name), reader.definition.head) for reader in self._readers[name]]
        if self.links is not None and (slowest := self.links.slowest_reader(name)) is not None:
            readers.append((slowest[0], f"instance {slowest[1]}"))
        return min(readers)[1]

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
            case Obstacle.INSTANCE:
                why = f"instance {', '.join(self.coordinator.missing_instances)} is missing"
        return Delay(held.since_ms, held.by, why)

    def _what_is_missing(self, checkpoint_id: int) -> str:
        """Those that wait for others come last."""
        name = checkpoint_name(checkpoint_id)
        progress = {each: self._part_now(each, checkpoint_id) for each in self.coordinator.missing(checkpoint_id)}
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

    def course_of(self, checkpoint: Checkpoint) -> Course:
        """How a checkpoint went that was begun here, as far as it has come."""
        return self.leading.course_of(checkpoint)

    def parts_of(self, checkpoint: Checkpoint) -> dict[str, StagePart]:
        """How far each stage has come with a checkpoint that was begun here, or had come when it was aborted."""
        known = self._parts_when_aborted.get(checkpoint.checkpoint_id)
        return self._parts_now(checkpoint) if known is None else known

    def _parts_now(self, checkpoint: Checkpoint) -> dict[str, StagePart]:
        is_asked = checkpoint.barrier.is_unaligned
        return {
            name: part_of(checkpoint.reports[name], is_asked=is_asked)
            if name in checkpoint.reports
            else self._part_now(name, checkpoint.checkpoint_id, self._begun_ms(checkpoint), is_asked=is_asked)
            for name in (each.name for each in self.queries)
        }

    def parts_here(self, checkpoint_id: int) -> dict[str, StagePart]:
        """Of the queries that run here, and have not reported yet."""
        reports = self.member.reports(checkpoint_id)
        return {name: self._part_now(name, checkpoint_id) for name in self.stages if name not in reports}

    def _begun_ms(self, checkpoint: Checkpoint) -> int | None:
        """When it was announced, by the run's clock."""
        begun_ms = self.course_of(checkpoint).begun_ms
        return None if begun_ms is None else checkpoint.triggered_ms + begun_ms

    def _part_now(
        self, name: str, checkpoint_id: int, begun_ms: int | None = None, *, is_asked: bool = False
    ) -> StagePart:
        """How far a query has come that has not reported yet, wherever it runs."""
        if self.links is not None and name not in self.stages:
            return self.links.part_of(name, checkpoint_id)
        return self.stages[name].part_of(checkpoint_id, self.now_ms, begun_ms, is_asked=is_asked)

    def has_ended(self, source: RunningStage) -> bool:
        """Whether nothing more comes from a source."""
        return source.progress.has_ended or self.is_at_rest(source.name)

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """The queries that other processes run."""
        return tuple(each.name for each in self.queries if each.name not in self.stages)

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

    def send(self, to: str, message: ToMember | ToLeader) -> None:
        if isinstance(message, StageReport):
            message = with_snapshot(message)
        elif isinstance(message, Ack):
            message = self._whole(message)
        if self.links is None or not self.links.is_to_elsewhere(to, message):
            self._messages.append(message)

    def _whole(self, ack: Ack) -> Ack:
        """Made once, however often it is sent."""
        if ack.checkpoint_id not in self._acks:
            whole = msgspec.structs.replace(ack, reports=tuple(map(with_snapshot, ack.reports)))
            self._acks = {ack.checkpoint_id: whole}
        return self._acks[ack.checkpoint_id]

    @property
    def incarnation(self) -> str:
        """A process runs a generation once: another try is another generation."""
        return self.part.incarnation

    def on_announced(self, announcement: Announcement) -> None:
        """Nothing is to be done beside what the stages do."""

    def on_begun(self, checkpoint: Checkpoint) -> None:
        known = {each.checkpoint_id for each in (*self.coordinator.active, *self.coordinator.history)}
        base = self._ground.base
        self.leading.forget_but(known if base is None or self._is_base_shown else {*known, base.checkpoint_id})
        for forgotten in self._parts_when_aborted.keys() - known:
            del self._parts_when_aborted[forgotten]
        self.leading.triggered_at(checkpoint)
        self.course_of(checkpoint).begun_ms = self.now_ms - checkpoint.triggered_ms

    def on_aborted(self, barrier: Barrier, reason: AbortReason, detail: str) -> None:
        checkpoint_id = barrier.checkpoint_id
        _log.warning("%s aborted: %s%s", checkpoint_name(checkpoint_id), reason.value, f" ({detail})" if detail else "")
        for checkpoint in self.coordinator.history:
            if checkpoint.checkpoint_id == checkpoint_id:
                parts = self._parts_now(checkpoint)
                if self._declining is not None:
                    parts[self._declining.stage] = StagePart(progress="declined")
                self._parts_when_aborted[checkpoint_id] = parts
                if self.listener is not None:
                    self.listener.on_ended(status_of(self, checkpoint))

    def on_completed(self, record: CheckpointCompleted, checkpoint: Checkpoint, min_watermark_ms: int | None) -> None:
        self._has_advanced |= _consumed(checkpoint.reports) != self._consumed_at_base
        if checkpoint.ended_ms is not None:
            self.course_of(checkpoint).decided_ms = checkpoint.ended_ms - checkpoint.triggered_ms
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
        self.shown = max(self.shown, checkpoint_id)
        _log.debug("all tables show %s", checkpoint_name(checkpoint_id))
        self._tell_shown(checkpoint_id)

    def _tell_shown(self, checkpoint_id: int) -> None:
        base = self._ground.base
        for checkpoint in self.coordinator.history:
            if checkpoint.checkpoint_id == checkpoint_id:
                self.course_of(checkpoint).shown_ms = self.now_ms - checkpoint.triggered_ms
                if self.listener is not None:
                    self.listener.on_ended(status_of(self, checkpoint))
        if base is not None and base.checkpoint_id == checkpoint_id:
            course = self.leading.course_of_base(base)
            course.shown_ms = self.now_ms - course.since_ms
            if self.listener is not None:
                self.listener.on_base_shown(checkpoint_id, course)

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
        if self._leadership is not None:
            self._leadership.upkeep.stop()
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
                try:
                    each.stop()
                except Exception as error:
                    self._on_not_stopped(error)

    def _on_not_stopped(self, error: Exception) -> None:
        """What fails because Spark's process is gone is told elsewhere."""
        if (why := why_not_stopped(error)) is not None:
            _log.warning("%s", why)
            self.has_stuck_queries = True


def _consumed(reports: Mapping[str, StageReport]) -> dict[str, object]:
    """How far stages have come in what they read, those that have come anywhere."""
    return {
        name: (each.source_position, each.positions)
        for name, each in reports.items()
        if each.source_position or any(each.positions.values())
    }
