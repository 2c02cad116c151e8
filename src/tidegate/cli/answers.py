"""What every command answers with `--json`, as values: one schema, of one version.

A command prints one object, an `Answer`; `run` prints one `Event` per line. Both are tagged unions: a new kind is one
more struct and its name in the union. docs/reference/json.md is made from what stands here: `./dev docs`.

Within a version fields and kinds may be added. A field that is removed, renamed or given another meaning raises it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from tidegate.engine.changes import Change, TableChange
from tidegate.engine.control import Life
from tidegate.engine.critical_path import PathStep
from tidegate.engine.events import AnyEvent
from tidegate.engine.graph import GraphStage, Table
from tidegate.engine.outlook import NextStart
from tidegate.engine.positions import SourcePosition
from tidegate.engine.status import (
    CheckpointStatus,
    DueCheckpoint,
    Moment,
    RunStatus,
    StageStatus,
    StartingStep,
    StoppingStep,
    now,
)
from tidegate.engine.summary import Summary
from tidegate.storage.manifest import StageKind

VERSION: Final = 1
Version = Annotated[Literal[1], Meta(description="of this schema")]

KeptState = Literal["none", "kept", "dropped"]
Root = Annotated[str, Meta(description="the root, as it was given")]
PipelineName = Annotated[str, Meta(description="the name of the pipeline")]


class _Answer(msgspec.Struct, tag_field="answer", kw_only=True):
    version: Version = VERSION


class _Event(msgspec.Struct, tag_field="event", kw_only=True):
    version: Version = VERSION
    at: Annotated[Moment, Meta(description="when it was told")] = msgspec.field(default_factory=now)


# -- what several tell ------------------------------------------------------------------------------


class VerifiedCheckpoint(msgspec.Struct):
    """What was found of the files of one checkpoint."""

    checkpoint: Annotated[str, Meta(description="its name")]
    state: Annotated[
        Literal["intact", "there", "damaged", "removed"],
        Meta(
            description="`intact`: all was read; `there`: all is, by its size, and was not read (--quick); "
            "`removed`: by the run that is alive, while it was looked at; that is no damage"
        ),
    ] = "intact"
    files: Annotated[int, Meta(description="how many are what they were")] = 0
    bytes: Annotated[int, Meta(description="of these")] = 0
    damage: Annotated[list[str], Meta(description="each file that is not, and what is wrong with it")] = []


class RehearsedQuery(msgspec.Struct, frozen=True):
    """What became of a query that was started on a copy of a checkpoint."""

    stages: Annotated[tuple[str, ...], Meta(description="the stages that it runs, in order")]
    outcome: Annotated[
        Literal["ran", "planned", "idle", "failed"],
        Meta(
            description="`ran`: a batch without rows, on its state; of a source: `planned` its next batch, or is "
            "`idle` because there is nothing new; or it has `failed`"
        ),
    ]
    has_state: Annotated[bool, Meta(description="whether it has stored any")]
    why: Annotated[str | None, Meta(description="why it has failed; otherwise null")] = None


class Rehearsal(msgspec.Struct, frozen=True):
    """The queries of a pipeline, started on a copy of a checkpoint."""

    checkpoint: Annotated[str, Meta(description="the one that was restored")]
    changes: Annotated[
        tuple[str, ...], Meta(description="what of the pipeline has changed since, and what that means, for people")
    ]
    queries: Annotated[tuple[RehearsedQuery, ...], Meta(description="all of them")]


class InFlightRows(msgspec.Struct, frozen=True):
    """What was in flight between two stages at an unaligned cut."""

    segments: Annotated[int, Meta(description="how many")]
    bytes: Annotated[int, Meta(description="of all of them")]


class HeldState(msgspec.Struct, frozen=True):
    """What an operator of a stage has stored, in one part or in several."""

    operator: Annotated[int, Meta(description="its number in the query, as Spark has it")]
    kind: Annotated[str, Meta(description="such as `aggregation`, `join` or `deduplication`")]
    keys: Annotated[tuple[str, ...], Meta(description="what its state goes by, as far as that is known")]
    rows: Annotated[
        dict[str, int],
        Meta(
            description="how many are stored, by the names of the parts: `left` and `right` of a join, variables and "
            "`timers` of a `transformWithState`; by an empty one where there is but one part"
        ),
    ]


class HeldStage(msgspec.Struct, frozen=True):
    """What a checkpoint holds of a stage beside its position."""

    kind: Annotated[StageKind, Meta(description="what it is")]
    in_query_of: Annotated[
        str | None,
        Meta(description="the first stage of the chain that it ran in, which holds their state; null: itself"),
    ]
    state: Annotated[tuple[HeldState, ...], Meta(description="what its operators have stored; none: it keeps no state")]
    in_flight: Annotated[dict[str, InFlightRows], Meta(description="by the stage that wrote it, where there was any")]


class ChangedKey(msgspec.Struct, frozen=True):
    """A key of a stage's state, and the rows that were and are stored for it."""

    key: Annotated[dict[str, Any], Meta(description="its columns")]
    before: Annotated[
        tuple[dict[str, Any], ...] | None, Meta(description="at the first checkpoint; null: the key was not there")
    ]
    after: Annotated[
        tuple[dict[str, Any], ...] | None, Meta(description="at the second one; null: the key was not there any more")
    ]


class ColumnTypes(msgspec.Struct, frozen=True):
    """A column that two tables have by different types."""

    root: Annotated[str, Meta(description="its type in the first root's table")]
    other: Annotated[str, Meta(description="its type in the other's")]


class TableDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How the tables of one sink, of two pipelines, differ: without columns that only one has, or of other types."""

    path: Annotated[str, Meta(description="where the table of the first root is")]
    other_path: Annotated[str, Meta(description="where that of the other one is")]
    equal: Annotated[bool, Meta(description="no row differs, and no column has another type")]
    only_in_root: Annotated[int, Meta(description="rows that only the first table has, or has more often")]
    only_in_other: Annotated[int, Meta(description="rows that only the other table has, or has more often")]
    in_both: Annotated[int, Meta(description="rows that both have")]
    columns_only_in_root: Annotated[tuple[str, ...], Meta(description="they are not compared")]
    columns_only_in_other: Annotated[tuple[str, ...], Meta(description="they are not compared")]
    types: Annotated[
        dict[str, ColumnTypes], Meta(description="columns that have different types, with both: not compared")
    ]
    some_only_in_root: Annotated[
        tuple[dict[str, Any], ...], Meta(description="the first of these rows, as many as `--limit` allows")
    ]
    some_only_in_other: Annotated[tuple[dict[str, Any], ...], Meta(description="the same of the other table")]


class PlannedStage(msgspec.Struct, frozen=True):
    """What would become of a stage."""

    name: Annotated[str, Meta(description="in the pipeline; of one that is gone, in the checkpoint")]
    kind: Annotated[StageKind, Meta(description="what it is")]
    change: Annotated[
        Change,
        Meta(
            description="`same`: it goes on as it was; `changed`: so it does, but reads or writes something else; "
            "`renamed`: it goes on under another name; `new`: it starts empty; `removed`: it is gone"
        ),
    ]
    was: Annotated[str | None, Meta(description="its name in the checkpoint; null: that does not know it")]
    state: Annotated[KeptState, Meta(description="what becomes of the state that the checkpoint has of it")]


class PlannedTable(msgspec.Struct, frozen=True):
    """Where the rows of a sink would go."""

    kind: Annotated[str, Meta(description="such as `delta` or `postgres`")]
    address: Annotated[str, Meta(description="its path or its name, without credentials")]
    change: Annotated[
        TableChange,
        Meta(
            description="`same`: the one of before; `moved`: that one, at another address; `new`: there is none yet, "
            "or the sink is new; `other`: another one, which may be, because no row was ever sealed for the one before"
        ),
    ]


class Refusal(msgspec.Struct, frozen=True):
    """Why a run would not start."""

    error: Annotated[str, Meta(description="its class, one of `tidegate.errors`")]
    message: Annotated[str, Meta(description="what does not fit, and what to do")]
    exit: Annotated[int, Meta(description="what the run would end with, and this command ends with")]


class FailedSeed(msgspec.Struct, frozen=True):
    """A simulated run that broke a guarantee."""

    seed: Annotated[int, Meta(description="which one")]
    failure: Annotated[str, Meta(description="what was broken")]
    replay: Annotated[str, Meta(description="the command that replays it")]


class ComparedTable(msgspec.Struct, frozen=True):
    """A table of the demo against what a batch job over the same input gives."""

    expected: Annotated[int, Meta(description="rows that it must hold")]
    found: Annotated[int, Meta(description="rows that it holds")]
    lost: Annotated[int, Meta(description="rows that it lacks")]
    duplicated: Annotated[int, Meta(description="rows that it has too often")]
    unexpected: Annotated[int, Meta(description="rows that it has though nothing gives them")]


# -- answers ----------------------------------------------------------------------------------------


class StatusAnswer(_Answer, tag="status", kw_only=True):
    """`tidegate status`. Its exit code says whether a run is alive: 0, 6 if none is, 7 if it hangs."""

    root: Root
    pipeline: PipelineName
    life: Annotated[
        Life,
        Meta(
            description="`hanging`: a run holds the root but has not been heard of for a while; `stopped`: no run is "
            "alive, however the last one ended"
        ),
    ]
    heard_at: Annotated[
        Moment | None, Meta(description="when the run that holds the root was last heard of; null: none does")
    ]
    newest_checkpoint: Annotated[str | None, Meta(description="the newest that is complete; null: none yet")]
    next_start: NextStart
    run: Annotated[
        RunStatus | None,
        Meta(
            description="the run that holds the root, null while it has not spoken yet; if none does, the last one, "
            "null if that has left no word"
        ),
    ]


class CheckpointsAnswer(_Answer, tag="checkpoints", kw_only=True):
    """`tidegate checkpoints`."""

    root: Root
    pipeline: PipelineName
    next_start: NextStart
    checkpoints: Annotated[
        tuple[CheckpointStatus, ...],
        Meta(
            description="all that are retained, those that the run has lately aborted, and what it has in progress, in "
            "the order of their numbers"
        ),
    ]


class CheckpointAnswer(_Answer, tag="checkpoint", kw_only=True):
    """`tidegate checkpoints ID`: one checkpoint in full. Of one that is not retained, what the history has of it, or
    what the run says that has it in progress: the graph, positions and what was in flight are empty then."""

    root: Root
    pipeline: PipelineName
    checkpoint: CheckpointStatus
    graph: Annotated[dict[str, GraphStage], Meta(description="the pipeline as it was then, by the names of its stages")]
    source_positions: Annotated[
        dict[str, tuple[str, ...]],
        Meta(description="per source, where it stood in each of its streams, in Spark's words for that kind of stream"),
    ]
    positions: Annotated[
        dict[str, tuple[SourcePosition, ...]],
        Meta(description="the same in words, and by topics and files where it is of these"),
    ]
    critical_path: Annotated[
        tuple[PathStep, ...],
        Meta(
            description="what it waited for, one after the other: from the trigger until all tables showed it, or "
            "until it was decided where no more is known"
        ),
    ]
    in_flight: Annotated[
        dict[str, dict[str, int]],
        Meta(description="per stage and input, bytes that were in flight at an unaligned cut; where there were any"),
    ]
    manifest: Annotated[
        str | None,
        Meta(
            description="the file in the root that lists all it consists of; null: it was aborted, is in progress, or "
            "is no longer retained, so that nothing can be restored from it"
        ),
    ]


class SummaryAnswer(_Answer, tag="summary", kw_only=True):
    """`tidegate checkpoints --summary`: how checkpoints went, over the history of the root."""

    root: Root
    pipeline: PipelineName
    summary: Summary


class HistoryAnswer(_Answer, tag="history", kw_only=True):
    """`tidegate history`: what has happened."""

    root: Root
    pipeline: PipelineName
    events: Annotated[
        tuple[AnyEvent, ...],
        Meta(
            description="newest first, as many as `--limit` allows. What each is, its `event` tells: `checkpoint`, "
            "`start`, `failure`, `end`, `savepoint`, `rewind`"
        ),
    ]
    next: Annotated[
        str | None, Meta(description="what `--before` takes to ask for those before them; null: there are none")
    ]


class TakenAnswer(_Answer, tag="taken", kw_only=True):
    """`tidegate checkpoint`: the one that was taken. Every table shows it."""

    root: Root
    pipeline: PipelineName
    checkpoint: CheckpointStatus


class CancelledAnswer(_Answer, tag="cancelled", kw_only=True):
    """`tidegate cancel`: what was in progress is aborted, and the run goes on."""

    root: Root
    pipeline: PipelineName
    checkpoints: Annotated[
        tuple[CheckpointStatus, ...], Meta(description="those that were cancelled; none, if none was in progress")
    ]


class StoppedAnswer(_Answer, tag="stopped", kw_only=True):
    """`tidegate stop`. A run that has not ended well is an error instead."""

    root: Root
    pipeline: PipelineName
    state: Annotated[
        Literal["stopping", "finished"],
        Meta(description="`stopping`: the run has heard, and that it has ended was not waited for; `finished`"),
    ]
    why: Annotated[str | None, Meta(description="why it has ended; null while it is stopping")]


class VerifyAnswer(_Answer, tag="verify", kw_only=True):
    """`tidegate verify`. Exits with 4 if any of them is damaged, or the next run will refuse to start; with 1 if a
    query has failed on a copy of a checkpoint."""

    root: Root
    pipeline: PipelineName
    checkpoints: Annotated[tuple[VerifiedCheckpoint, ...], Meta(description="those that were read, oldest first")]
    next_start: NextStart
    rehearsal: Annotated[Rehearsal | None, Meta(description="with `--deep`: how its queries start; otherwise null")] = (
        None
    )


class InspectAnswer(_Answer, tag="inspect", kw_only=True):
    """`tidegate inspect` without `--stage`: what a checkpoint holds of every stage."""

    root: Root
    pipeline: PipelineName
    checkpoint: Annotated[str, Meta(description="its name")]
    stages: Annotated[dict[str, HeldStage], Meta(description="by their names")]


class RowsAnswer(_Answer, tag="rows", kw_only=True):
    """`tidegate inspect --stage`: rows of a stage's state, or that were in flight to it."""

    root: Root
    pipeline: PipelineName
    checkpoint: Annotated[str, Meta(description="its name")]
    stage: Annotated[str, Meta(description="the one that was asked for")]
    held_by: Annotated[
        str, Meta(description="the stage that holds it: the first one, where it ran in one query with others")
    ]
    operator: Annotated[int | None, Meta(description="whose state it is; null of rows in flight")]
    part: Annotated[
        str | None,
        Meta(
            description="which part of the state; of rows in flight, the stage that wrote them; null: there is but one"
        ),
    ]
    count: Annotated[int, Meta(description="how many rows there are, of those that `--where` lets through")]
    rows: Annotated[
        tuple[dict[str, Any], ...],
        Meta(description="the first of them, as many as `--limit` allows; none with `--out`"),
    ]
    out: Annotated[str | None, Meta(description="where they were written to; otherwise null")]


class DiffAnswer(_Answer, tag="diff", kw_only=True):
    """`tidegate diff`: how the state of a stage differs from one checkpoint to another."""

    root: Root
    pipeline: PipelineName
    before: Annotated[str, Meta(description="the name of the first checkpoint")]
    after: Annotated[str, Meta(description="the name of the second one")]
    stage: Annotated[str, Meta(description="the one that was asked for")]
    held_by: Annotated[
        str, Meta(description="the stage that holds the state: the first one, where it ran in one query with others")
    ]
    operator: Annotated[int, Meta(description="whose state it is")]
    part: Annotated[str | None, Meta(description="which part of it; null: there is but one")]
    added: Annotated[int, Meta(description="keys that only the second one has")]
    removed: Annotated[int, Meta(description="keys that only the first one has")]
    changed: Annotated[int, Meta(description="keys for which something else is stored")]
    unchanged: Annotated[int, Meta(description="keys for which the same is stored")]
    some: Annotated[
        dict[str, tuple[ChangedKey, ...]],
        Meta(description="by `added`, `removed` and `changed`: the first of these keys, as many as `--limit` allows"),
    ]


class CompareAnswer(_Answer, tag="compare", kw_only=True):
    """`tidegate compare`. Exits with 0 if no row differs, with 1 if some do."""

    root: Root
    other: Annotated[str, Meta(description="the root of the other pipeline")]
    checkpoint: Annotated[str, Meta(description="the name of the one of the first root")]
    other_checkpoint: Annotated[str, Meta(description="the name of the one of the other root")]
    equal: Annotated[bool, Meta(description="of all tables that were compared")]
    positions: Annotated[
        dict[str, str], Meta(description="where the sources of the first root stand, by their names, for people")
    ]
    apart: Annotated[
        dict[str, str],
        Meta(description="sources that do not stand there in the other, and how, where both checkpoints were named"),
    ]
    tables: Annotated[dict[str, TableDifference], Meta(description="by the names of their sinks")]
    not_compared: Annotated[
        dict[str, str], Meta(description="sinks of both that are no Delta tables, with what they are")
    ]
    sinks_only_in_root: Annotated[tuple[str, ...], Meta(description="by their names")]
    sinks_only_in_other: Annotated[tuple[str, ...], Meta(description="by their names")]
    sources_only_in_root: Annotated[tuple[str, ...], Meta(description="by their names")]
    sources_only_in_other: Annotated[tuple[str, ...], Meta(description="by their names")]
    watermark_ms: Annotated[int | None, Meta(description="of the first pipeline; null: none")]
    other_watermark_ms: Annotated[int | None, Meta(description="of the other one; null: none")]


class PlanAnswer(_Answer, tag="plan", kw_only=True):
    """`tidegate plan`. Exits with 0 if a run would start, otherwise with what the run would end with."""

    root: Root
    pipeline: PipelineName
    is_alive: Annotated[
        bool, Meta(description="whether a run holds the root: another one starts when that has ended, or takes over")
    ]
    start: Annotated[
        NextStart, Meta(description="what it would start from; `refuses` if it would not, whatever it would start from")
    ]
    stages: Annotated[tuple[PlannedStage, ...], Meta(description="of the pipeline, then those that are gone")]
    tables: Annotated[dict[str, PlannedTable], Meta(description="by the names of their sinks")]
    chains: Annotated[
        dict[str, tuple[str, ...]],
        Meta(description="stages that would run as one query: by the last one, those before it, in order"),
    ]
    changes: Annotated[
        tuple[str, ...], Meta(description="what the run would tell of at its start, and what that means, for people")
    ]
    refused: Annotated[
        Refusal | None, Meta(description="null: the run would start; otherwise stages and tables are not told")
    ] = None


class GraphAnswer(_Answer, tag="graph", kw_only=True):
    """`tidegate graph`."""

    pipeline: PipelineName
    checkpoint: Annotated[
        str | None, Meta(description="of a root, the checkpoint that the pipeline is shown at; null: as a file has it")
    ]
    stages: Annotated[dict[str, GraphStage], Meta(description="by their names, each after those that it reads")]


class SimulateAnswer(_Answer, tag="simulate", kw_only=True):
    """`tidegate simulate`. Exits with 1 if a seed failed."""

    seeds: Annotated[int, Meta(description="how many were run")]
    failures: Annotated[tuple[FailedSeed, ...], Meta(description="those that broke a guarantee")]
    checkpoints: Annotated[int, Meta(description="that were completed")]
    unaligned: Annotated[int, Meta(description="of these")]
    aborted: Annotated[int, Meta(description="checkpoints that were aborted")]
    generations: Annotated[int, Meta(description="that were opened")]
    crashes: Annotated[int, Meta(description="of simulated processes")]
    refused: Annotated[int, Meta(description="recoveries that were refused because a checkpoint was damaged")]
    steps: Annotated[int, Meta(description="events in all")]
    seconds: Annotated[float, Meta(description="how long it took")]


class ReplayAnswer(_Answer, tag="replay", kw_only=True):
    """`tidegate simulate --seed N`. Exits with 1 if it failed."""

    seed: Annotated[int, Meta(description="which one")]
    failure: Annotated[str | None, Meta(description="the guarantee that it broke, or null")]
    steps: Annotated[int, Meta(description="events in all")]
    trace: Annotated[tuple[str, ...], Meta(description="what happened, for people")]


class DemoAnswer(_Answer, tag="demo", kw_only=True):
    """`tidegate demo`. Exits with 1 if a row is lost or there twice."""

    tables: Annotated[dict[str, ComparedTable], Meta(description="by their names")]
    checkpoints: Annotated[int, Meta(description="that were taken")]
    kills: Annotated[int, Meta(description="that were survived")]


class DashboardAnswer(_Answer, tag="dashboard", kw_only=True):
    """`tidegate dashboard`, as soon as it answers requests; it goes on until it is stopped."""

    url: Annotated[str, Meta(description="where it is")]
    roots: Annotated[dict[str, str], Meta(description="the roots as they were given, by their keys in the API")]
    actions_allowed: Annotated[bool, Meta(description="whether runs can be asked for something over it")]
    token: Annotated[str | None, Meta(description="the file or variable that its token is in; null: none is used")]


class RestoredTable(msgspec.Struct, frozen=True, kw_only=True):
    """A sink's table, and what restoring a checkpoint, forking or promoting does to it."""

    sink: Annotated[str, Meta(description="the stage that writes to it")]
    table: Table
    from_version: Annotated[int | None, Meta(description="of a Delta table; null of others")]
    to_version: Annotated[int | None, Meta(description="the one that shows the checkpoint; null where none is")]
    rows_removed: Annotated[int, Meta(description="how many rows it no longer shows, as far as its log tells")]
    rows_added: Annotated[int, Meta(description="how many rows it shows again")]
    others: Annotated[tuple[str, ...], Meta(description="what others have written to it since, for people")] = ()
    remains: Annotated[str | None, Meta(description="what is not undone, for people; or null")] = None
    refused: Annotated[str | None, Meta(description="why it cannot be set back, for people; or null")] = None
    is_left: Annotated[bool, Meta(description="whether it is left as it is, as was asked for")] = False
    copy_of: Annotated[str | None, Meta(description="the address of the table that it shows a copy of; or null")] = None
    is_anothers: Annotated[
        bool, Meta(description="whether it belongs to another root, which cannot write to it any more then")
    ] = False


class RestoreAnswer(_Answer, tag="restore", kw_only=True):
    """`tidegate restore`."""

    root: Root
    pipeline: PipelineName
    is_done: Annotated[bool, Meta(description="false: this is what would be done")]
    checkpoint: Annotated[str, Meta(description="the one that the pipeline and its tables go to, or the savepoint")]
    is_savepoint: Annotated[bool, Meta(description="whether that is a savepoint")]
    newest: Annotated[str | None, Meta(description="the one that the pipeline stood at; null: the root is a new one")]
    dropped: Annotated[tuple[str, ...], Meta(description="the newer ones, which are left behind, oldest first")]
    tables: Annotated[tuple[RestoredTable, ...], Meta(description="of every sink")]


class SavedTableAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A sink's table when a savepoint was made."""

    table: Table
    version: Annotated[int | None, Meta(description="of a Delta table, the one that showed it; null of others")]


class SavepointAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A savepoint."""

    name: Annotated[str, Meta(description="that of its folder when it was made")]
    folder: Annotated[str, Meta(description="where it is")]
    pipeline: PipelineName
    checkpoint: Annotated[str, Meta(description="the checkpoint that it was made from")]
    triggered_at: Annotated[str, Meta(description="when that was begun")]
    made_at: Annotated[str, Meta(description="when the savepoint was made")]
    aligned: Annotated[bool, Meta(description="whether nothing was in flight")]
    drained: Annotated[bool, Meta(description="whether the run has ended with it")]
    size_bytes: Annotated[int, Meta(description="of all its files")]
    tables: Annotated[dict[str, SavedTableAnswer], Meta(description="by the names of the sinks")]
    damage: Annotated[str | None, Meta(description="what is wrong with it, for people; or null")] = None


class SavepointMadeAnswer(_Answer, tag="savepoint", kw_only=True):
    """`tidegate savepoint`."""

    root: Root
    savepoint: SavepointAnswer


class SavepointsAnswer(_Answer, tag="savepoints", kw_only=True):
    """`tidegate savepoints`."""

    place: Annotated[str, Meta(description="the folder that was looked into")]
    savepoints: Annotated[tuple[SavepointAnswer, ...], Meta(description="the oldest first")]


class SavepointDeletedAnswer(_Answer, tag="savepoint_deleted", kw_only=True):
    """`tidegate savepoint delete`."""

    name: Annotated[str, Meta(description="of the savepoint that is gone")]
    folder: Annotated[str, Meta(description="where it was")]


class ForkAnswer(_Answer, tag="fork", kw_only=True):
    """`tidegate fork`."""

    root: Annotated[str, Meta(description="that of the fork")]
    forked_root: Annotated[str, Meta(description="that of the pipeline which was forked")]
    pipeline: PipelineName
    made_from: Annotated[str, Meta(description="the checkpoint or savepoint")]
    tables: Annotated[tuple[RestoredTable, ...], Meta(description="the fork's own")]
    muted: Annotated[tuple[str, ...], Meta(description="sinks whose functions the fork does not call")]


class PromoteAnswer(_Answer, tag="promote", kw_only=True):
    """`tidegate promote`."""

    root: Annotated[str, Meta(description="that of the fork")]
    replaced_root: Annotated[str, Meta(description="that of the pipeline whose place it takes")]
    pipeline: PipelineName
    is_done: Annotated[bool, Meta(description="false: this is what would be done")]
    checkpoint: Annotated[str, Meta(description="the fork's newest, which all tables show then")]
    tables: Annotated[tuple[RestoredTable, ...], Meta(description="those that show what the fork's do")]
    left: Annotated[
        tuple[str, ...], Meta(description="sinks that the fork does not have: their tables stay as they are")
    ]


class ErrorAnswer(_Answer, tag="error", kw_only=True):
    """Any command that could not do what it was asked for, in place of its answer."""

    error: Annotated[
        str,
        Meta(
            description="its class: one of `tidegate.errors`; `WrongUsage` of the command line; `RunFailed` of a run "
            "of the demo; or any other of Python's, which is a defect in Tidegate or in the pipeline's file"
        ),
    ]
    message: Annotated[str, Meta(description="what happened, to what, and what to do")]
    retry_helps: Annotated[bool, Meta(description="whether the same command may succeed later")]
    exit: Annotated[int, Meta(description="what the command ends with")]


Answer = (
    StatusAnswer
    | CheckpointsAnswer
    | CheckpointAnswer
    | SummaryAnswer
    | HistoryAnswer
    | TakenAnswer
    | CancelledAnswer
    | StoppedAnswer
    | VerifyAnswer
    | InspectAnswer
    | RowsAnswer
    | DiffAnswer
    | CompareAnswer
    | PlanAnswer
    | GraphAnswer
    | SimulateAnswer
    | ReplayAnswer
    | DemoAnswer
    | DashboardAnswer
    | RestoreAnswer
    | SavepointMadeAnswer
    | SavepointsAnswer
    | SavepointDeletedAnswer
    | ForkAnswer
    | PromoteAnswer
    | ErrorAnswer
)


# -- what a run tells -------------------------------------------------------------------------------


class ChangedEvent(_Event, tag="changed", kw_only=True):
    """The pipeline is not as it was at the checkpoint that the run goes on from, and goes on all the same. Told at the
    start, and after a restart."""

    changes: Annotated[tuple[str, ...], Meta(description="what has changed, and what that means, for people")]


class CheckpointEvent(_Event, tag="checkpoint", kw_only=True):
    """A checkpoint was decided (`committing`), is shown by every table (`complete`; this may come alone), or was
    `aborted`."""

    checkpoint: CheckpointStatus


class StagesEvent(_Event, tag="stages", kw_only=True):
    """What the stages are doing, once a second."""

    generation: Annotated[int | None, Meta(description="the one they are of")]
    stages: Annotated[dict[str, StageStatus], Meta(description="by their names")]
    due: Annotated[
        DueCheckpoint | None, Meta(description="the next checkpoint, if it is due and not begun; otherwise null")
    ] = None


class StoppingEvent(_Event, tag="stopping", kw_only=True):
    """The run was told to stop: one for each thing that it does to do so."""

    doing: Annotated[
        StoppingStep,
        Meta(description="`draining`, `closing_windows`, `last_checkpoint`: as in a run's status"),
    ] = "last_checkpoint"


class StartingEvent(_Event, tag="starting", kw_only=True):
    """A step of the start, or of a restart, has begun."""

    step: StartingStep


class RestartingEvent(_Event, tag="restarting", kw_only=True):
    """Something failed; the run starts again from its last checkpoint."""

    why: Annotated[str, Meta(description="what failed")]


class EndedEvent(_Event, tag="ended", kw_only=True):
    """The last line of a run that ended without an error."""

    state: Annotated[
        Literal["finished", "interrupted"],
        Meta(description="`finished` with a last checkpoint, or `interrupted` without one"),
    ]
    why: Annotated[str, Meta(description="for people")]
    exit: Annotated[int, Meta(description="what the command ends with")]


class ErrorEvent(_Event, tag="error", kw_only=True):
    """The last line of a run that failed or could not start. The fields are those of the answer of that name."""

    error: Annotated[str, Meta(description="its class")]
    message: Annotated[str, Meta(description="what happened, to what, and what to do")]
    retry_helps: Annotated[bool, Meta(description="whether the same command may succeed later")]
    exit: Annotated[int, Meta(description="what the command ends with")]


Event = (
    StartingEvent
    | ChangedEvent
    | CheckpointEvent
    | StagesEvent
    | StoppingEvent
    | RestartingEvent
    | EndedEvent
    | ErrorEvent
)
