"""What a run is doing at one moment, as values: for its own view, and for those who look from outside.

What is described here of each field is what docs/reference/json.md tells users: `./dev docs` writes it.

Importing this brings no PySpark.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from tidegate.engine.carrier import Clock
from tidegate.engine.critical_path import what_it_waited_for
from tidegate.protocol import coordinator
from tidegate.protocol.aligner import AlignmentProgress, Arrival, Cut, CutCause, InFlight
from tidegate.protocol.coordinator import Checkpoint, Phase, StageReport
from tidegate.protocol.messages import Flag
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.protocol.quorum import watermark_of
from tidegate.storage.manifest import Manifest, StageKind, as_report
from tidegate.storage.transfers import Doing, Transfers

if TYPE_CHECKING:
    from tidegate.engine.generation import Delay, Generation
    from tidegate.engine.stage.running import RunningStage
    from tidegate.spark.definition import StageDefinition

_LAST_CHECKPOINTS: Final = 8
_RATE_OVER_S: Final = 1.0

RunState = Literal["starting", "running", "stopping", "restarting", "finished", "interrupted", "failed"]
StoppingStep = Literal["draining", "closing_windows", "last_checkpoint"]
CheckpointState = Literal["preparing", "prepared", "deciding", "committing", "complete", "aborted", "damaged"]
Obstacle = Literal["in_progress", "sinks_lag", "pause", "instance_missing"]
Progress = Literal["waiting", "aligning", "catching_up", "recording", "storing", "declined", "done"]
CutBecause = Literal["aligned", "timeout", "always", "asked", "upstream"]

Moment = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class NoBatch(msgspec.Struct, frozen=True):
    """A source that has planned no batch for a while, because what it reads from gives no answer."""

    since: Annotated[Moment, Meta(description="since when it plans one and the same")]
    why: Annotated[str, Meta(description="what Spark is doing and, of Kafka, whether its brokers answer")]


class HeldInput(msgspec.Struct, frozen=True):
    """An input of a stage that waits, because its watermark is further ahead than `--max-watermark-drift` allows."""

    input: Annotated[str, Meta(description="the stage that writes it")]
    ahead_of: Annotated[str, Meta(description="the slowest input, which it waits for")]
    by_ms: Annotated[
        int | None, Meta(description="how far it is ahead, in ms of event time; null: that one has no watermark yet")
    ]


class StageStatus(msgspec.Struct, frozen=True):
    """A stage of a run."""

    kind: Annotated[StageKind, Meta(description="what it is")]
    batch: Annotated[int | None, Meta(description="the last batch that Spark has committed; null: none yet")]
    rows: Annotated[
        int,
        Meta(
            description="what it has written since the last start, of the run or of its stages after a failure: what "
            "was written before may have been written again"
        ),
    ]
    rows_per_s: Annotated[float, Meta(description="the same per second, over the last second")]
    lag: Annotated[
        int | None, Meta(description="how many segments of its inputs it has yet to read; null: it is a source")
    ]
    watermark_ms: Annotated[
        int | None, Meta(description="its watermark, in ms since 1970; null: it has none, or none yet")
    ]
    held_back_by: Annotated[
        str | None,
        Meta(description='the reader of its output, or "its table", that is too far behind for it to go on, or null'),
    ] = None
    no_batch: Annotated[
        NoBatch | None,
        Meta(description="of a source that has planned no batch for a while; null also if it just finds nothing new"),
    ] = None
    has_event_time: Annotated[
        bool, Meta(description="whether it has a watermark, or will have one: it calls `withWatermark`")
    ] = False
    chained_into: Annotated[
        str | None,
        Meta(
            description="the stage in whose query it runs, which counts its batches and rows; null: it has its own, or "
            "is the last of those that run in it"
        ),
    ] = None
    held: Annotated[
        tuple[HeldInput, ...],
        Meta(description="the inputs that it is not shown for now, because they are too far ahead of another"),
    ] = ()
    batches: Annotated[
        int, Meta(description="how many batches Spark has committed of it since the last start, as `rows` counts them")
    ] = 0
    batches_ms: Annotated[
        int, Meta(description="how long these took together, each from when Spark planned it until its commit was seen")
    ] = 0
    lags: Annotated[dict[str, int], Meta(description="`lag` by input, where it has several")] = {}


class StagePart(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's part of a checkpoint. What is not known before it is `done` is null until then."""

    progress: Annotated[
        Progress,
        Meta(
            description="how far it has come, or had when the checkpoint was aborted: `waiting` for the first barrier, "
            "`aligning`: waiting for the barriers of other inputs, `catching_up`: all barriers are there, it has yet "
            "to consume what came before them, `recording`: it was cut unaligned, and what comes before the barriers "
            "of other inputs is captured, `storing` its snapshot, `declined` to take part, `done`"
        ),
    ]
    waits_for: Annotated[
        tuple[str, ...], Meta(description="`aligning`, `recording`: the inputs whose barriers it waits for")
    ] = ()
    cut: Annotated[int | None, Meta(description="the batch that it was cut at; null also if it had committed none")] = (
        None
    )
    cut_because: Annotated[
        CutBecause | None,
        Meta(
            description="why it was cut when it was: `aligned`: it had all barriers and had consumed what came before "
            "them; or it was cut unaligned, by `timeout` (`--unaligned-after`), `always`: that is `0s`, so none waits, "
            "`asked`: the checkpoint was asked for as unaligned, `upstream`: a stage before it was cut unaligned; null "
            "until it is cut"
        ),
    ] = None
    barrier_ms: Annotated[
        int | None,
        Meta(description="when the first barrier arrived, after the checkpoint was announced (see its `begun_ms`)"),
    ] = None
    alignment_ms: Annotated[
        int | None,
        Meta(
            description="from the first barrier until it was cut, or until now: how long it waited for the other "
            "barriers, and to consume what came before them"
        ),
    ] = None
    aligned_ms: Annotated[
        int | None,
        Meta(
            description="when the last barrier arrived, counted as `barrier_ms`: from then until the cut it caught up, "
            "or, where it was cut before, from the cut until then it recorded what was in flight; null: it is a "
            "source, or barriers are late"
        ),
    ] = None
    caught_up_segments: Annotated[
        int | None,
        Meta(description="how many segments of what came before the barriers it had yet to consume then"),
    ] = None
    last_barrier_from: Annotated[str | None, Meta(description="the input whose barrier was the last to arrive")] = None
    over_bound: Annotated[
        bool,
        Meta(
            description="whether an unaligned cut was due when more was in flight than `--max-inflight` allows, so "
            "that it kept aligning"
        ),
    ] = False
    snapshot_ms: Annotated[int | None, Meta(description="how long it took to store its snapshot")] = None
    stored_ms: Annotated[
        int | None,
        Meta(
            description="how long after the cut all of its part was stored, and its table had not refused it: with the "
            "wait for late barriers, and for the snapshot of the checkpoint before"
        ),
    ] = None
    new_bytes: Annotated[int | None, Meta(description="of its snapshot, what was not stored before")] = None
    total_bytes: Annotated[int | None, Meta(description="all of its snapshot")] = None
    in_flight_bytes: Annotated[
        int | None,
        Meta(
            description="what was captured in flight to it at an unaligned cut; before it is cut, what it has been "
            "given and has yet to consume"
        ),
    ] = None
    has_event_time: Annotated[bool | None, Meta(description="whether it has a watermark, or will have one")] = None
    watermark_ms: Annotated[
        int | None, Meta(description="its watermark there, in ms since 1970; null: it has none, or none yet")
    ] = None

    @property
    def recorded_ms(self) -> int:
        """How long after its cut it waited for late barriers, with all else stored; 0: there were none, or its snapshot
        took longer."""
        if self.aligned_ms is None or self.barrier_ms is None or self.alignment_ms is None:
            return 0
        late_ms = self.aligned_ms - self.barrier_ms - self.alignment_ms
        return late_ms if late_ms > (self.snapshot_ms or 0) else 0

    @property
    def told(self) -> str:
        """For people."""
        if self.progress == "aligning":
            return f"waiting for {', '.join(self.waits_for)}"
        if self.progress == "recording":
            return f"recording until {', '.join(self.waits_for)}"
        return self.progress.replace("_", " ")


class SinkCommit(msgspec.Struct, frozen=True, kw_only=True):
    """How a sink made a checkpoint visible."""

    begun_ms: Annotated[int, Meta(description="when its commit was begun, after the trigger")]
    took_ms: Annotated[
        int | None,
        Meta(description="how long it took until the table showed it, failed tries included; null: it has not"),
    ] = None
    failures: Annotated[int, Meta(description="how often it has failed, and was tried again")] = 0
    why: Annotated[str | None, Meta(description="what was said of the last failure; null: none")] = None


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint: the same wherever one is told. What its manifest alone tells is null if that is damaged."""

    checkpoint: Annotated[str, Meta(description="its name, such as `ckpt-000042`")]
    state: Annotated[
        CheckpointState,
        Meta(
            description="`preparing`: stages store their parts; `prepared`: all have; `deciding`: it is being written "
            "to the decision log; `committing`: it is decided, and stays so whatever happens, but not every table is "
            "known to show it yet; `complete`; `aborted`: it never was one; `damaged`: it was complete, but its "
            "manifest is gone or not what it was"
        ),
    ]
    aligned: Annotated[
        bool | None,
        Meta(
            description="whether nothing was in flight in it, so that all tables show the same prefix of the sources; "
            "null until all stages have reported"
        ),
    ] = None
    full: Annotated[bool | None, Meta(description="whether everything was stored anew, not only what has changed")] = (
        None
    )
    drain: Annotated[bool | None, Meta(description="whether it is the last one of a run that stops")] = None
    generation: Annotated[int, Meta(description="of the run's start, or restart, that took it")]
    epoch: Annotated[int, Meta(description="the number under which sinks commit it")]
    attempt: Annotated[
        int | None, Meta(description="which one it is since the last that was not aborted; the first is 1")
    ] = None
    triggered_at: Annotated[Moment | None, Meta(description="when it was begun")] = None
    duration_ms: Annotated[int | None, Meta(description="from there until it was decided or aborted, or until now")] = (
        None
    )
    alignment_ms: Annotated[
        int | None, Meta(description="how long the stage that took longest to align took, or has taken so far")
    ] = None
    new_bytes: Annotated[int | None, Meta(description="what was not stored before, as far as stages have reported")] = (
        None
    )
    total_bytes: Annotated[int | None, Meta(description="all that it consists of, as far as stages have reported")] = (
        None
    )
    in_flight_bytes: Annotated[
        int | None, Meta(description="what was captured in flight between stages, as far as they are cut")
    ] = None
    min_watermark_ms: Annotated[
        int | None,
        Meta(
            description="the pipeline's watermark, in ms since 1970: the lowest of all stages with event time; null: "
            "one of these has none yet, or there are none, or not all have reported"
        ),
    ] = None
    why: Annotated[str | None, Meta(description="why it was aborted, or what is damaged; otherwise null")] = None
    stages: Annotated[dict[str, StagePart], Meta(description="each stage's part of it, by the stage's name")] = {}
    begun_ms: Annotated[
        int | None,
        Meta(description="when it was announced to the stages, after the trigger: its id was marked by then"),
    ] = None
    acks: Annotated[
        dict[str, int],
        Meta(
            description="when each instance had said that its stages have stored their parts, after the trigger; none "
            "where one process runs all of them"
        ),
    ] = {}
    prepared_ms: Annotated[
        int | None,
        Meta(description="when all stages had stored their parts, and all instances said so, after the trigger"),
    ] = None
    decided_ms: Annotated[int | None, Meta(description="when it was in the decision log, after the trigger")] = None
    commits: Annotated[
        dict[str, SinkCommit],
        Meta(description="how each sink made it visible, by the sink's name; those that have begun to"),
    ] = {}
    shown_ms: Annotated[int | None, Meta(description="when all tables showed it, after the trigger")] = None
    waited_for: Annotated[
        str | None,
        Meta(
            description="for people: what took longest of it, such as `3.1 s of 3.4 s: sink revenue working off 41 "
            "segments`"
        ),
    ] = None

    @property
    def alignment(self) -> str:
        """For people: whether it is aligned and, if it is not, why."""
        if self.aligned is not False:
            return "aligned"
        late = [name for name, part in self.stages.items() if part.cut_because == "timeout"]
        causes = {part.cut_because for part in self.stages.values()}
        whys = [_timeout_at(late)] * bool(late)
        whys += ["as asked for"] * ("asked" in causes) + ["no stage waits"] * ("always" in causes)
        return f"unaligned ({', '.join(whys)})" if whys else "unaligned"


_NAMED_STAGES: Final = 2


def _timeout_at(stages: list[str]) -> str:
    more = f" and {len(stages) - _NAMED_STAGES} more" if len(stages) > _NAMED_STAGES else ""
    return f"timeout at {', '.join(stages[:_NAMED_STAGES])}{more}"


class DueCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that is due and not begun."""

    since: Annotated[Moment, Meta(description="when it was due")]
    held_back_by: Annotated[
        Obstacle,
        Meta(
            description="`in_progress`: as many as may be are under way; `sinks_lag`: tables are behind with those "
            "that are decided; `pause`: the one after the last is not over; `instance_missing`: a driver process that "
            "runs some of the stages is not seen any more"
        ),
    ]
    why: Annotated[str, Meta(description="for people: by which checkpoint, stage or table")]


StepName = Literal[
    "loading",
    "checking",
    "joining",
    "starting_spark",
    "fetching_packages",
    "making_session",
    "calling_functions",
    "reading_checkpoint",
    "checking_tables",
    "laying_out",
    "starting_queries",
]
_WORDS: Final[dict[StepName, str]] = {
    "loading": "loading the pipeline's file",
    "checking": "looking at the root, its checkpoint and the tables",
    "joining": "joining the other instances",
    "starting_spark": "starting Spark's process",
    "fetching_packages": "starting Spark's process, which fetches packages",
    "making_session": "making Spark's session",
    "calling_functions": "calling the functions of stages",
    "reading_checkpoint": "reading the newest checkpoint",
    "checking_tables": "checking the tables of sinks",
    "laying_out": "laying out the files of stages",
    "starting_queries": "starting queries",
}
_PATIENCE_S: Final[dict[StepName, int]] = {
    "starting_spark": 120,
    "making_session": 120,
    "checking_tables": 120,
    "starting_queries": 120,
}
"""How long one of them may take until the run counts as hanging. Of others it is longer: a function may read a schema
from far away, and every file of a large checkpoint is read."""
_LONGEST_PATIENCE_S: Final = 300


class StartingStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a run that starts, or restarts, is doing."""

    step: Annotated[
        StepName,
        Meta(
            description="`loading` the pipeline's file, `checking` what can be seen without Spark, `starting_spark` or "
            "`fetching_packages`: Spark's process, `making_session`, `calling_functions` of stages, "
            "`reading_checkpoint`, `checking_tables`, `laying_out` the files of stages, `starting_queries`"
        ),
    ]
    since: Annotated[Moment, Meta(description="when it was begun")]
    stage: Annotated[str | None, Meta(description="the stage that it is about, if it is about one")] = None
    number: Annotated[int | None, Meta(description="where it is one of several: the how manieth")] = None
    of: Annotated[int | None, Meta(description="of how many")] = None

    @property
    def words(self) -> str:
        """For people, without what changes from one stage to the next."""
        return _WORDS[self.step]

    @property
    def told(self) -> str:
        stage = "" if self.stage is None else f": {self.stage}"
        return self.words + stage + ("" if self.number is None else f", {self.number} of {self.of}")

    @property
    def patience_s(self) -> int:
        """After how long without another sign the run counts as hanging in it."""
        return _PATIENCE_S.get(self.step, _LONGEST_PATIENCE_S)


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A driver process, of several that run the pipeline together."""

    name: Annotated[str, Meta(description="its name")]
    leads: Annotated[bool, Meta(description="whether it leads: checkpoints are decided and tables committed there")]
    host: Annotated[str | None, Meta(description="where it is; null: it is not there")]
    pid: Annotated[int | None, Meta(description="its process; null: it is not there")]
    stages: Annotated[tuple[str, ...], Meta(description="the stages that it runs; none: it stands by")]
    missing_since: Annotated[
        Moment | None, Meta(description="since when it is not seen any more, though it has a part; otherwise null")
    ]


class TransferStatus(msgspec.Struct, frozen=True):
    """How far all transfers of one kind are that are under way."""

    doing: Annotated[Doing, Meta(description="which kind that is")]
    files: Annotated[int, Meta(description="how many are done")]
    of_files: Annotated[int, Meta(description="of how many")]
    bytes: Annotated[int, Meta(description="how many bytes these are")]
    of_bytes: Annotated[int, Meta(description="of how many; 0 if that is not known, as where files are deleted")]


def transfer_now(transfers: Transfers) -> TransferStatus | None:
    found = transfers.now()
    if found is None:
        return None
    doing, progress = found
    return TransferStatus(doing, progress.files, progress.of_files, progress.size_bytes, progress.of_bytes)


class RunStatus(msgspec.Struct, frozen=True):
    """What a run is doing, or was when it was last heard of."""

    pipeline: Annotated[str, Meta(description="the name of the pipeline")]
    pid: Annotated[int, Meta(description="its process")]
    host: Annotated[str, Meta(description="where that is")]
    started_at: Annotated[Moment, Meta(description="when the run was started")]
    updated_at: Annotated[Moment, Meta(description="when it said this")]
    state: Annotated[
        RunState,
        Meta(
            description="`starting`, `running`, `stopping`: it was told to, see `stopping`, `restarting` after a "
            "failure, or how it ended: `finished`, `interrupted`, `failed`. Where no run is alive, any of the others "
            "means that it was killed"
        ),
    ]
    why: Annotated[str | None, Meta(description="why it restarts, or has ended; otherwise null")] = None
    step: Annotated[
        StartingStep | None, Meta(description="while it starts or restarts, what it is doing; otherwise null")
    ] = None
    generation: Annotated[int | None, Meta(description="the one it has opened; null: none yet")] = None
    stages: Annotated[dict[str, StageStatus], Meta(description="its stages, by their names")] = {}
    in_progress: Annotated[tuple[CheckpointStatus, ...], Meta(description="checkpoints under way, oldest first")] = ()
    min_watermark_ms: Annotated[
        int | None,
        Meta(
            description="the pipeline's watermark now, in ms since 1970: the lowest of all stages with event time; "
            "null: one of these has none yet, or there are none"
        ),
    ] = None
    due: Annotated[
        DueCheckpoint | None, Meta(description="the next one, if it is due for some seconds and not begun; or null")
    ] = None
    checkpoints: Annotated[
        tuple[CheckpointStatus, ...],
        Meta(description="the last that were decided or aborted, oldest first, whatever generation they were of"),
    ] = ()
    changes: Annotated[
        tuple[str, ...],
        Meta(description="what is not as it was at the checkpoint that the run goes on from, and what that means"),
    ] = ()
    instances: Annotated[
        tuple[InstanceStatus, ...],
        Meta(description="the driver processes that run it together; none: one process runs all of it"),
    ] = ()
    transfer: Annotated[
        TransferStatus | None,
        Meta(
            description="what goes to or from the bucket that the root is in, if it lasts for a second by now; or null"
        ),
    ] = None
    stopping: Annotated[
        StoppingStep | None,
        Meta(
            description="what it does to stop: `draining`: its sources read no more, and what they have read is "
            "consumed, `closing_windows`: what is open is written out, `last_checkpoint`: it takes its last one; null "
            "if it was not told to stop"
        ),
    ] = None


class Observer:
    """Looks at a run from inside, from its control thread."""

    def __init__(self, pipeline: str, clock: Clock | None = None) -> None:
        self._clock = Clock() if clock is None else clock
        at = as_moment(self._clock.utc())
        self.status = RunStatus(pipeline, os.getpid(), socket.gethostname(), at, at, "starting")
        self._rates: dict[tuple[int, str], tuple[float, int, float]] = {}
        self._earlier: deque[CheckpointStatus] = deque(maxlen=_LAST_CHECKPOINTS)
        self._ended: tuple[CheckpointStatus, ...] = ()

    def observe(self, generation: Generation, stopping: StoppingStep | None = None) -> RunStatus:
        """The run as it is now. `stopping`: what it does to stop, if it was told to."""
        if generation.generation != self.status.generation:
            self._earlier.extend(self._ended)
            self._rates.clear()
        self._ended = tuple(status_of(generation, each) for each in generation.coordinator.history[-_LAST_CHECKPOINTS:])
        found = self.stages_of(generation) | ({} if generation.links is None else generation.links.stages())
        stages = {name: found[name] for name in generation.shape if name in found}  # in the order of the pipeline
        self.status = msgspec.structs.replace(
            self.status,
            updated_at=as_moment(self._clock.utc()),
            state="running" if stopping is None else "stopping",
            stopping=stopping,
            why=None,
            step=None,
            generation=generation.generation,
            stages=stages,
            in_progress=tuple(status_of(generation, each) for each in generation.coordinator.active),
            min_watermark_ms=watermark_of(stages.values()),
            due=self._due(generation.held_back()),
            instances=() if generation.links is None else generation.links.instances(self._clock.utc()),
            checkpoints=(*self._of_earlier(generation), *self._ended)[-_LAST_CHECKPOINTS:],
        )
        return self.status

    def stages_of(self, generation: Generation) -> dict[str, StageStatus]:
        """Those that run here."""
        return {
            each.name: self._stage(generation, stage, each)
            for stage in generation.stages.values()
            for each in stage.definition.members
        }

    def _stage(self, generation: Generation, stage: RunningStage, member: StageDefinition) -> StageStatus:
        """One of the stages that run in a query."""
        progress = stage.progress
        is_last, is_first = member.name == stage.name, member.name == stage.definition.head
        return StageStatus(
            member.kind,
            progress.batch if is_last and progress.batch >= 0 else None,
            progress.rows if is_last else 0,
            self._rate(generation.generation, stage.name, progress.rows) if is_last else 0.0,
            stage.inputs.lag if is_first and member.inputs else None,
            progress.watermark_ms if is_last else None,
            generation.held_back_by(stage.name) if is_last else None,
            generation.no_batch(member.name),
            generation.shape[member.name].has_event_time and is_last,
            None if is_last else stage.name,
            tuple(HeldInput(each.input, each.ahead_of, each.by_ms) for each in stage.inputs.holds) if is_first else (),
            progress.batches if is_last else 0,
            progress.batches_ms if is_last else 0,
            stage.inputs.lags if is_first and len(member.inputs) > 1 else {},
        )

    def _of_earlier(self, generation: Generation) -> Iterator[CheckpointStatus]:
        """Those of earlier generations. What one of them had decided, the next one shows."""
        for each in self._earlier:
            is_shown = (checkpoint_id_of(each.checkpoint) or 0) <= generation.shown_base
            yield msgspec.structs.replace(each, state="complete") if each.state == "committing" and is_shown else each

    def changed(self, changes: tuple[str, ...]) -> None:
        self.status = msgspec.structs.replace(self.status, changes=changes)

    def note(self, state: RunState, why: str | None) -> RunStatus:
        """What cannot be seen at a generation: that there is none, and why."""
        self.status = msgspec.structs.replace(
            self.status,
            updated_at=as_moment(self._clock.utc()),
            state=state,
            why=why,
            step=None,
            in_progress=(),
            due=None,
            stopping=None,
        )
        return self.status

    def begin(self, step: StartingStep) -> RunStatus:
        """The next step of a start, or of a restart."""
        self.status = msgspec.structs.replace(self.status, updated_at=step.since, step=step)
        return self.status

    def _rate(self, generation: int, name: str, rows: int) -> float:
        now = self._clock.now_ms / 1000
        then, before, rate = self._rates.setdefault((generation, name), (now, rows, 0.0))
        if now - then >= _RATE_OVER_S:
            rate = (rows - before) / (now - then)
            self._rates[generation, name] = (now, rows, rate)
        return round(rate, 1)

    def _due(self, delay: Delay | None) -> DueCheckpoint | None:
        if delay is None:
            return None
        since = timedelta(milliseconds=self._clock.now_ms - delay.since_ms)
        return DueCheckpoint(as_moment(self._clock.utc() - since), _OBSTACLES[delay.by], delay.why)


def now() -> str:
    return as_moment(datetime.now(UTC))


def as_moment(at: datetime) -> str:
    """A time as it is told everywhere."""
    return at.isoformat(timespec="milliseconds")


def moment_ms(at: str) -> int:
    """The same, in ms since 1970."""
    moment = datetime.fromisoformat(at)
    return int((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1000)


_OBSTACLES: Final[dict[coordinator.Obstacle, Obstacle]] = {
    coordinator.Obstacle.IN_PROGRESS: "in_progress",
    coordinator.Obstacle.SINKS_LAG: "sinks_lag",
    coordinator.Obstacle.PAUSE: "pause",
    coordinator.Obstacle.INSTANCE: "instance_missing",
}


_STATES: Final[dict[Phase, CheckpointState]] = {
    Phase.PREPARING: "preparing",
    Phase.PREPARED: "prepared",
    Phase.DECIDING: "deciding",
    Phase.COMPLETED: "committing",
    Phase.COMMITTED: "complete",
    Phase.ABORTED: "aborted",
}


def status_of(generation: Generation, checkpoint: Checkpoint) -> CheckpointStatus:
    """A checkpoint that this generation has begun."""
    reason = checkpoint.abort_reason
    stages = generation.parts_of(checkpoint)
    has_all = len(checkpoint.reports) == len(stages)
    course = generation.course_of(checkpoint)
    found = CheckpointStatus(
        checkpoint=checkpoint_name(checkpoint.checkpoint_id),
        state=_STATES[checkpoint.phase],
        aligned=checkpoint.is_aligned if has_all else None,
        full=checkpoint.barrier.is_full_snapshot,
        drain=checkpoint.barrier.is_drain,
        generation=checkpoint.generation,
        epoch=checkpoint.barrier.epoch,
        attempt=checkpoint.attempt,
        triggered_at=generation.triggered_at(checkpoint),
        duration_ms=generation.duration_ms(checkpoint),
        alignment_ms=max((part.alignment_ms or 0 for part in stages.values()), default=0),
        new_bytes=checkpoint.new_bytes,
        total_bytes=checkpoint.total_bytes,
        in_flight_bytes=sum(part.in_flight_bytes or 0 for part in stages.values() if part.cut_because is not None),
        min_watermark_ms=watermark_of(checkpoint.reports.values()) if has_all else None,
        why=None if reason is None else f"{reason.value}: {checkpoint.abort_detail}".removesuffix(": "),
        stages=stages,
        begun_ms=course.begun_ms,
        acks=dict(course.acks),
        prepared_ms=course.prepared_ms,
        decided_ms=course.decided_ms,
        commits=dict(course.commits),
        shown_ms=course.shown_ms,
    )
    return msgspec.structs.replace(found, waited_for=what_it_waited_for(found, generation.sinks))


def status_in(manifest: Manifest) -> CheckpointStatus:
    """A checkpoint that is complete, by what is stored of it."""
    found = CheckpointStatus(
        checkpoint=checkpoint_name(manifest.checkpoint_id),
        state="complete",
        aligned=manifest.aligned,
        full=bool(manifest.flags & Flag.FULL_SNAPSHOT),
        drain=bool(manifest.flags & Flag.DRAIN),
        generation=manifest.generation,
        epoch=manifest.epoch,
        attempt=manifest.attempt,
        triggered_at=manifest.triggered_at,
        duration_ms=manifest.duration_ms,
        alignment_ms=manifest.alignment_ms,
        new_bytes=manifest.new_bytes,
        total_bytes=manifest.total_bytes,
        in_flight_bytes=manifest.in_flight_bytes,
        min_watermark_ms=manifest.min_watermark_ms,
        stages={
            name: part_of(
                as_report(
                    name,
                    manifest.stages[name],
                    manifest.checkpoint_id,
                    manifest.attempt,
                    manifest.generation,
                    has_event_time=shape.has_event_time,
                ),
                is_asked=bool(manifest.flags & Flag.UNALIGNED),
            )
            for name, shape in manifest.shape.items()  # in the order of the pipeline
        },
    )
    sinks = [name for name, shape in manifest.shape.items() if shape.kind == "sink"]
    return msgspec.structs.replace(found, waited_for=what_it_waited_for(found, sinks))


def with_course(stored: CheckpointStatus, told: CheckpointStatus | None) -> CheckpointStatus:
    """A checkpoint by what is stored of it, and by what was told of how it went, if anything was."""
    if told is None or (told.checkpoint, told.generation) != (stored.checkpoint, stored.generation):
        return stored
    stages = {
        name: part
        if (of := told.stages.get(name)) is None
        else msgspec.structs.replace(part, **{field: getattr(of, field) for field in _COURSE_OF_PART})
        for name, part in stored.stages.items()
    }
    return msgspec.structs.replace(stored, stages=stages, **{field: getattr(told, field) for field in _COURSE})


_COURSE: Final = ("begun_ms", "acks", "prepared_ms", "decided_ms", "commits", "shown_ms", "waited_for")
_COURSE_OF_PART: Final = ("aligned_ms", "caught_up_segments", "last_barrier_from", "stored_ms")
"""What manifests do not tell: they are written before all of it is known."""


# -- a stage's part ---------------------------------------------------------------------------------


def part_before_cut(
    progress: AlignmentProgress | None, now_ms: int, arrival: Arrival | None = None, begun_ms: int | None = None
) -> StagePart:
    """Of a stage that was not cut for a checkpoint yet. `begun_ms`: when that was announced, by the same clock."""
    if progress is None:
        return StagePart(progress="waiting")
    barrier_ms = None if begun_ms is None else max(0, progress.since_ms - begun_ms)
    return StagePart(
        progress="aligning" if progress.waits_for else "catching_up",
        waits_for=tuple(sorted(progress.waits_for)),
        barrier_ms=barrier_ms,
        alignment_ms=now_ms - progress.since_ms,
        over_bound=progress.over_bound,
        in_flight_bytes=progress.inflight_bytes,
        **_arrived(arrival, barrier_ms),
    )


def _arrived(arrival: Arrival | None, barrier_ms: int | None) -> dict[str, Any]:
    if arrival is None:
        return {}
    return {
        "aligned_ms": None if barrier_ms is None else barrier_ms + arrival.after_ms,
        "caught_up_segments": arrival.unconsumed,
        "last_barrier_from": arrival.last_input,
    }


def part_after_cut(
    cut: Cut,
    progress: AlignmentProgress | None,
    captured: Iterable[InFlight],
    arrival: Arrival | None = None,
    barrier_ms: int | None = None,
    *,
    is_asked: bool,
) -> StagePart:
    """Of a stage that was cut, and has yet to capture what is in flight (`progress`), or to store its snapshot."""
    late = frozenset() if progress is None else progress.waits_for
    known_bytes = sum(each.size_bytes for each in captured)
    return StagePart(
        progress="recording" if late else "storing",
        waits_for=tuple(sorted(late)),
        cut=cut.batch,
        cut_because=_because(cut.cause, is_asked=is_asked),
        barrier_ms=barrier_ms,
        alignment_ms=cut.alignment_ms,
        over_bound=cut.over_bound,
        in_flight_bytes=known_bytes if progress is None else progress.inflight_bytes,
        **_arrived(arrival, barrier_ms),
    )


def part_of(report: StageReport, *, is_asked: bool) -> StagePart:
    """Of a stage that has done its own. `is_asked`: for an unaligned checkpoint."""
    return StagePart(
        progress="done",
        cut=report.cut,
        cut_because=_because(report.cause, is_asked=is_asked),
        barrier_ms=report.barrier_ms,
        alignment_ms=report.alignment_ms,
        over_bound=report.over_bound,
        snapshot_ms=report.snapshot_ms,
        stored_ms=report.stored_after_ms,
        new_bytes=report.new_bytes,
        total_bytes=report.total_bytes,
        in_flight_bytes=sum(each.size_bytes for each in report.in_flight),
        has_event_time=report.has_event_time,
        watermark_ms=report.watermark_ms,
        **_arrived(report.arrival, report.barrier_ms),
    )


def _because(cause: CutCause, *, is_asked: bool) -> CutBecause:
    """A stage knows that its barrier forced it, but not who has put that onto the barrier: its trigger, or a stage."""
    match cause:
        case CutCause.ALIGNED:
            return "aligned"
        case CutCause.TIMEOUT:
            return "timeout"
        case CutCause.ALWAYS:
            return "always"
        case CutCause.FORCED:
            return "asked" if is_asked else "upstream"
