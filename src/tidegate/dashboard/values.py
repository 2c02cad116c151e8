"""What the dashboard answers, as values: one struct per answer, and what they consist of.

The OpenAPI document is made from what stands here (`openapi.py`). Within /api/v1 fields may be added; one that is
removed, renamed or given another meaning takes another address.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidegate.engine.events import AnyEvent
from tidegate.engine.graph import GraphStage
from tidegate.engine.outlook import NextStart
from tidegate.engine.status import CheckpointState, CheckpointStatus, Moment, RunState, RunStatus
from tidegate.storage.manifest import StageKind

Key = Annotated[str, Meta(description="by which the root is asked for here: no path")]
CheckpointName = Annotated[str, Meta(description="its name, such as `ckpt-000042`")]
NewestEvent = Annotated[str | None, Meta(description="what changes when there is more in the history")]
Mark = Annotated[
    str,
    Meta(description="what changes when the graph, the settings or what the next run does are told otherwise"),
]
Cursor = Annotated[str | None, Meta(description="what to give as `before` for the next page; null: there is none")]

ShownLife = Literal["alive", "hanging", "stopped", "unreadable"]
Level = Literal["error", "warning"]
ActionName = Literal["checkpoint", "savepoint", "cancel", "stop"]
Phase = Literal[
    "beginning", "waiting", "aligning", "catching_up", "recording", "storing", "quorum", "deciding", "committing"
]
MissingVersion = Literal["not_shown", "not_known"]
EventKind = Literal["checkpoint", "start", "failure", "end", "savepoint", "rewind"]


class Problem(msgspec.Struct, frozen=True):
    """Why there is no answer."""

    error: Annotated[str, Meta(description="what happened, to what, and what to do, for people")]


# -- pipelines --------------------------------------------------------------------------------------


class Alert(msgspec.Struct, frozen=True):
    """What somebody should look at."""

    level: Annotated[Level, Meta(description="`error`: nothing goes on, or will; `warning`: it goes on worse")]
    text: Annotated[str, Meta(description="what it is, for people")]


class LastCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint that is decided."""

    checkpoint: CheckpointName
    at: Annotated[Moment | None, Meta(description="when it was begun; null: that is not known")]
    age_ms: Annotated[int | None, Meta(description="how long ago that was")]
    duration_ms: Annotated[int | None, Meta(description="how long it took; null: that is not known")]
    state: Annotated[CheckpointState, Meta(description="`committing` until all tables show it")]


class PipelineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline at a glance. What is not known is null."""

    key: Key
    pipeline: Annotated[str | None, Meta(description="its name; null: the root cannot be read")]
    root: Annotated[str, Meta(description="the root, as the dashboard was given it")]
    life: Annotated[
        ShownLife,
        Meta(
            description="`alive`, `hanging`: a run holds the root but has not been heard of for a while, `stopped`: no "
            "run is alive, however the last one ended, `unreadable`: the root cannot be read, and `why` says why"
        ),
    ]
    state: Annotated[RunState | None, Meta(description="what the run does, or did last")]
    why: Annotated[str | None, Meta(description="why it restarts, has ended, or the root cannot be read")]
    last_checkpoint: LastCheckpoint | None
    rows_per_s: Annotated[float | None, Meta(description="what its sources deliver; null: none is alive")]
    lag: Annotated[int | None, Meta(description="how many segments its stages have yet to read, in all")]
    watermark_ms: Annotated[int | None, Meta(description="the pipeline's watermark, in ms since 1970")]
    alerts: Annotated[tuple[Alert, ...], Meta(description="the gravest first")]


class Pipelines(msgspec.Struct, frozen=True):
    """All that the dashboard shows."""

    pipelines: Annotated[tuple[PipelineSummary, ...], Meta(description="in the order in which their roots were given")]


class LayoutNode(msgspec.Struct, frozen=True):
    """Where a stage stands in a drawing."""

    stage: Annotated[str, Meta(description="which one")]
    kind: Annotated[StageKind, Meta(description="what it is")]
    column: Annotated[int, Meta(description="from the left, from 0")]
    row: Annotated[int, Meta(description="its first, from above, from 0")]
    height: Annotated[int, Meta(description="how many rows it takes")]


class LayoutPoint(msgspec.Struct, frozen=True):
    """Where an edge passes a column."""

    column: int
    row: int


class LayoutEdge(msgspec.Struct, frozen=True):
    """A channel: `points` are where it leaves, where it passes columns in between, and where it enters."""

    source: Annotated[str, Meta(description="the stage that writes it")]
    target: Annotated[str, Meta(description="the stage that reads it")]
    points: Annotated[tuple[LayoutPoint, ...], Meta(description="from left to right; at least two")]


class Layout(msgspec.Struct, frozen=True):
    """The DAG as `tidegate graph` draws it."""

    columns: Annotated[int, Meta(description="how many there are")]
    rows: Annotated[int, Meta(description="how many there are")]
    nodes: tuple[LayoutNode, ...]
    edges: tuple[LayoutEdge, ...]


class PipelineDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline: what it does, how it looks, and what the next run does."""

    summary: PipelineSummary
    status: Annotated[
        RunStatus | None,
        Meta(description="the run that holds the root, or the last one; null: none has left word"),
    ]
    graph: Annotated[
        dict[str, GraphStage],
        Meta(description="as at the newest checkpoint; before there is one, the stages without what they read"),
    ]
    layout: Layout
    outlook: Annotated[NextStart | None, Meta(description="what the next run does; null: that cannot be told")]
    outlook_told: Annotated[str | None, Meta(description="the same for people")]
    settings: Annotated[dict[str, str], Meta(description="the options that the last run was started with; no secrets")]
    actions_allowed: Annotated[bool, Meta(description="whether the dashboard was started with --allow-actions")]
    problems: Annotated[tuple[str, ...], Meta(description="what could not be read, and is therefore missing here")]
    newest_event: NewestEvent
    mark: Mark


class Live(msgspec.Struct, frozen=True):
    """What is told whenever it has changed."""

    summary: PipelineSummary
    status: RunStatus | None
    newest_event: NewestEvent
    mark: Mark


# -- checkpoints ------------------------------------------------------------------------------------


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in a list."""

    checkpoint: CheckpointStatus
    retained: Annotated[bool, Meta(description="whether the pipeline can be restored from it")]
    is_savepoint: Annotated[bool, Meta(description="whether a savepoint was made of it")]


class CheckpointCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many there were, as far as the history goes back."""

    completed: int
    failed: Annotated[int, Meta(description="that were aborted")]
    in_progress: int
    restored: Annotated[int, Meta(description="how often a run started from one")]
    savepoints: Annotated[int, Meta(description="how many savepoints were made")]


class RestoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A start from a checkpoint."""

    checkpoint: CheckpointName
    at: Annotated[Moment, Meta(description="when the run started")]
    because: Annotated[str, Meta(description="why it did, as the event tells it")]


class MadeSavepoint(msgspec.Struct, frozen=True, kw_only=True):
    """A savepoint."""

    checkpoint: CheckpointName
    name: Annotated[str, Meta(description="its own name")]
    at: Annotated[Moment, Meta(description="when it was made")]


class LatestCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The newest of each kind; null: there was none."""

    completed: CheckpointRow | None
    failed: CheckpointRow | None
    restored: RestoredCheckpoint | None
    savepoint: MadeSavepoint | None


class Checkpoints(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the checkpoints of a pipeline."""

    counts: CheckpointCounts
    latest: LatestCheckpoints
    checkpoints: Annotated[tuple[CheckpointRow, ...], Meta(description="newest first")]
    next: Cursor


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """Of all completed checkpoints that tell it. All but `count` are null where that is 0."""

    count: int
    min: float | None
    average: float | None
    max: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A completed checkpoint in a plot."""

    checkpoint: CheckpointName
    at: Annotated[Moment | None, Meta(description="when it was begun")]
    duration_ms: int | None
    alignment_ms: int | None
    new_bytes: int | None
    total_bytes: int | None
    in_flight_bytes: int | None
    commit_ms: Annotated[int | None, Meta(description="how long the slowest of its sinks took to show it")]
    state_by_stage: Annotated[dict[str, int], Meta(description="bytes of each stage's snapshot")]


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """What completed checkpoints took, by measure."""

    duration_ms: Measure
    alignment_ms: Measure
    new_bytes: Measure
    total_bytes: Measure
    in_flight_bytes: Measure
    commit_ms: Measure


class CheckpointsSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The completed checkpoints of a pipeline in numbers."""

    measures: Measures
    series: Annotated[
        tuple[Point, ...],
        Meta(description="oldest first, at most 1,000: of more, they are evenly spread, and the newest is among them"),
    ]


class StageFiles(msgspec.Struct, frozen=True):
    """Of a stage's snapshot."""

    count: int
    bytes: int


class ShownVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A sink's table at a checkpoint."""

    kind: Annotated[str, Meta(description="such as `delta` or `postgres`")]
    address: Annotated[str, Meta(description="its path or its name, without credentials")]
    version: Annotated[
        int | None, Meta(description="of a Delta table, the one that shows it; null: none, or of others")
    ]
    why: Annotated[str | None, Meta(description="why no version does, for people; or null")] = None


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage, a sink or the pipeline did for a checkpoint, from when until when after its trigger."""

    name: Annotated[str | None, Meta(description="the stage, or the sink that commits; null: all of the pipeline")]
    phase: Phase
    from_ms: int
    to_ms: int
    is_critical: Annotated[bool, Meta(description="whether the checkpoint waited for it")]


class CheckpointDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in full. What only its manifest tells is empty where that is gone: it is not retained."""

    checkpoint: CheckpointStatus
    retained: Annotated[bool, Meta(description="whether the pipeline can be restored from it")]
    is_savepoint: Annotated[bool, Meta(description="whether a savepoint was made of it")]
    positions: Annotated[dict[str, tuple[str, ...]], Meta(description="where each source stood, for people")]
    files: Annotated[dict[str, StageFiles], Meta(description="of each stage's snapshot")]
    tables: Annotated[dict[str, ShownVersion], Meta(description="by the names of the sinks")]
    gantt: Annotated[tuple[Span, ...], Meta(description="every phase of every stage, and every commit, by its start")]
    problems: Annotated[tuple[str, ...], Meta(description="what could not be read, and is therefore missing here")]


class Compared(msgspec.Struct, frozen=True):
    """A number at two checkpoints. `difference`: how much larger it is at the second; null if one is not known."""

    a: int | None
    b: int | None
    difference: int | None


class ComparedStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage at two checkpoints."""

    in_a: Annotated[bool, Meta(description="whether the first one has it")]
    in_b: Annotated[bool, Meta(description="whether the second one has it")]
    alignment_ms: Compared
    snapshot_ms: Compared
    new_bytes: Compared
    total_bytes: Compared
    in_flight_bytes: Compared
    batch: Annotated[Compared, Meta(description="at which it was cut")]
    positions_a: Annotated[tuple[str, ...], Meta(description="of a source, where it stood, for people")]
    positions_b: Annotated[tuple[str, ...], Meta(description="of a source, where it stood, for people")]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two checkpoints of a pipeline, in all and stage by stage."""

    a: CheckpointStatus
    b: CheckpointStatus
    apart_ms: Annotated[int | None, Meta(description="how much later the second one was begun")]
    duration_ms: Compared
    alignment_ms: Compared
    new_bytes: Compared
    total_bytes: Compared
    in_flight_bytes: Compared
    stages: Annotated[dict[str, ComparedStage], Meta(description="all that one of them has, by name")]
    problems: Annotated[tuple[str, ...], Meta(description="what could not be read, and is therefore missing here")]


# -- tables -----------------------------------------------------------------------------------------


class ShownTable(msgspec.Struct, frozen=True, kw_only=True):
    """A sink's table as it is now."""

    sink: Annotated[str, Meta(description="the stage that writes to it")]
    kind: Annotated[str, Meta(description="such as `delta` or `postgres`")]
    address: Annotated[str, Meta(description="its path or its name, without credentials")]
    shows: Annotated[str | None, Meta(description="the newest checkpoint that it shows; null: none, or not known")]
    since: Annotated[Moment | None, Meta(description="since when it does")]
    version: Annotated[int | None, Meta(description="of a Delta table, its newest; null of others")]
    why: Annotated[str | None, Meta(description="why it could not be asked, for people; or null")] = None


class AddedRows(msgspec.Struct, frozen=True, kw_only=True):
    """The version of a Delta table by which a checkpoint was shown."""

    version: int
    rows_added: Annotated[int | None, Meta(description="rows in the files that it added; null: its log does not say")]


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint did to each table."""

    checkpoint: CheckpointName
    versions: Annotated[
        dict[str, AddedRows | None],
        Meta(description="by the names of the sinks; null: it added nothing there, or `missing` says why"),
    ]
    missing: Annotated[
        dict[str, MissingVersion],
        Meta(
            description="of the sinks without a version, those to which it may have added something: `not_shown`: the "
            "table lacks rows of it, until it is committed, `not_known`: the table tells nothing of it, or cannot be "
            "read"
        ),
    ] = {}


class Tables(msgspec.Struct, frozen=True):
    """The tables of a pipeline, and which checkpoint each of them shows."""

    tables: tuple[ShownTable, ...]
    matrix: Annotated[tuple[TableRow, ...], Meta(description="completed checkpoints, newest first, at most 200")]
    problems: Annotated[tuple[str, ...], Meta(description="what could not be read, and is therefore missing here")]


# -- history and actions ----------------------------------------------------------------------------


class History(msgspec.Struct, frozen=True):
    """What has happened to a pipeline."""

    events: Annotated[tuple[AnyEvent, ...], Meta(description="newest first")]
    next: Cursor


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What a run can be asked for."""

    name: ActionName
    allowed: Annotated[bool, Meta(description="whether it can be asked for now, with the token")]
    says: Annotated[str, Meta(description="what it will do, for people")]
    why_not: Annotated[str | None, Meta(description="why it cannot be asked for now; null: it can")]


class Actions(msgspec.Struct, frozen=True):
    """What can be done from here."""

    actions: tuple[Action, ...]


class ActionTaken(msgspec.Struct, frozen=True):
    """What became of an action."""

    done: Annotated[bool, Meta(description="false: nothing of it, or not all of it, was done")]
    said: Annotated[str, Meta(description="how it went, for people")]
