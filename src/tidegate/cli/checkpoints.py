"""`tidegate checkpoints`: what a root can be restored from, and what lately became of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console, Group
from rich.text import Text

from tidegate.cli.answers import CheckpointAnswer, CheckpointsAnswer, SummaryAnswer
from tidegate.cli.exits import Exit
from tidegate.cli.fitting import Column, fitted
from tidegate.cli.options import AsJson, CheckpointId, RootPlace
from tidegate.cli.speech import say
from tidegate.cli.tables import watermark_cell, watermark_told
from tidegate.cli.text import as_bytes, as_duration, as_time, console, counted, plain_table, terminal_width
from tidegate.engine.control import Life, look
from tidegate.engine.critical_path import critical_path
from tidegate.engine.events import CheckpointEnded
from tidegate.engine.graph import graph_of
from tidegate.engine.history import Past
from tidegate.engine.outlook import next_run, next_start
from tidegate.engine.positions import SourcePosition, positions_of
from tidegate.engine.status import CheckpointStatus, CutBecause, SinkCommit, StagePart, status_in, with_course
from tidegate.engine.summary import Spread, summary_of
from tidegate.errors import DamagedCheckpoint, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest, StageShape, StageSnapshot
from tidegate.storage.places import Place, RootGiven


def checkpoints_command(
    root: RootPlace,
    checkpoint: CheckpointId = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="How they went, in numbers, over the history of the root.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the checkpoints of a root, or one of them in full.

    The list holds every checkpoint that the pipeline can be restored from, those that were lately aborted, and the one
    in progress. With an ID: that one stage by stage, with the position of each source in its stream and the batch at
    which each stage was cut, what it waited for longest, and how long each sink took to commit it.

    With --summary: the smallest, the average, the largest and percentiles of what all those took and stored that are in
    the history (tidegate history), whether or not they can be restored still.

    Of every checkpoint the manifest is read, and its files are looked at by their sizes; `tidegate verify` reads them.
    Exits with 4 if one is damaged, or the next run will refuse to start, and says what that does.

    Works beside a run that is alive, and starts no Spark.

    Example: tidegate checkpoints --root state/orders

    Example: tidegate checkpoints 42 --root state/orders --json

    Example: tidegate checkpoints --root state/orders --summary
    """
    inspected = InspectedRoot(root)
    if summary:
        if checkpoint is not None:
            raise typer.BadParameter("--summary is of all of them, not of one", param_hint="--summary")
        _show_summary(root, inspected, as_json=as_json)
        return
    if checkpoint is not None:
        _show_one(root, inspected, inspected.find(checkpoint), as_json=as_json)
        return
    listed = _listed(inspected)
    outlook = next_run(inspected)
    is_wrong = outlook.is_refused or any(each.state == "damaged" for each in listed)
    if as_json:
        say(
            CheckpointsAnswer(
                root=str(root),
                pipeline=inspected.pipeline,
                next_start=next_start(outlook),
                checkpoints=tuple(listed),
            )
        )
    else:
        _print_list(inspected, listed, console())
        log = inspected.log()
        current = {each.checkpoint_id for each in log.lineage()}
        left = [each for each in sorted(log.retained) if each not in current and log.completed(each) is not None]
        if left:
            names = ", ".join(map(checkpoint_name, left))
            console().print(
                f"left behind by a restore: {names}; they stay until a run has completed a checkpoint", soft_wrap=True
            )
        if is_wrong:
            console().print(str(outlook), markup=False, soft_wrap=True)
    if is_wrong:
        raise typer.Exit(Exit.DAMAGE)


def _show_summary(root: Place, inspected: InspectedRoot, *, as_json: bool) -> None:
    events = Past(inspected.files).everything()
    found = summary_of(each.checkpoint for each in events if isinstance(each, CheckpointEnded))
    if as_json:
        say(SummaryAnswer(root=str(root), pipeline=inspected.pipeline, summary=found))
        return
    out = console()
    since = "" if found.since is None else f", since {as_time(found.since)} UTC"
    out.print(f"pipeline {inspected.pipeline}: {found.complete:,} complete, {found.aborted:,} aborted{since}")
    table = plain_table(["of those that are complete"], ["min", "average", "max", "p50", "p90", "p95", "p99"])
    for name, (heading, told) in _MEASURES.items():
        spread: Spread | None = getattr(found, name)
        if spread is not None:
            row = (spread.min, spread.average, spread.max, spread.p50, spread.p90, spread.p95, spread.p99)
            table.add_row(heading, *(told(round(each)) for each in row))
    if found.complete:
        out.print(table)


_MEASURES: Final[dict[str, tuple[str, Callable[[int], str]]]] = {
    "duration_ms": ("until it was decided", as_duration),
    "alignment_ms": ("longest alignment", as_duration),
    "commit_ms": ("longest commit", as_duration),
    "shown_ms": ("until all tables showed it", as_duration),
    "new_bytes": ("new", as_bytes),
    "total_bytes": ("total", as_bytes),
    "in_flight_bytes": ("in flight", as_bytes),
}


def _show_one(root: Place, inspected: InspectedRoot, record: CheckpointCompleted, *, as_json: bool) -> None:
    manifest = _manifest(inspected, record)
    damage_found = inspected.damage_of(record)
    checkpoint = with_course(status_in(manifest), _course(inspected, manifest))
    positions = positions_of(inspected.files, manifest)
    if as_json:
        say(_in_full(root, record, manifest, checkpoint, positions, damage_found))
    else:
        _print_in_full(manifest, checkpoint, positions, console())
    if damage_found is not None:
        if not as_json:
            console().print(f"damaged: {damage_found}\n{next_run(inspected)}", markup=False, soft_wrap=True)
        raise typer.Exit(Exit.DAMAGE)


def _course(inspected: InspectedRoot, manifest: Manifest) -> CheckpointStatus | None:
    """How a checkpoint went: as the run says, if that remembers it, or by the history."""
    name = checkpoint_name(manifest.checkpoint_id)
    _, status = look(inspected.place)
    for each in () if status is None else status.checkpoints:
        if (each.checkpoint, each.generation, each.state) == (name, manifest.generation, "complete"):
            return each
    found = Past(inspected.files).checkpoint(name, manifest.triggered_at)
    return None if found is None else found.checkpoint


# -- the list -------------------------------------------------------------------------------------


def _listed(inspected: InspectedRoot) -> list[CheckpointStatus]:
    told = _told(inspected)
    records = inspected.retained()
    inspected.look_ahead(records)
    completed = [found for record in records if (found := _completed(inspected, record, told)) is not None]
    known = {each.checkpoint for each in completed}
    others = [each for each in told.values() if each.checkpoint not in known and each.state != "complete"]
    # By number: from the millionth on, a name has one digit more.
    return sorted([*completed, *others], key=lambda each: checkpoint_id_of(each.checkpoint) or 0)


def _told(inspected: InspectedRoot) -> dict[str, CheckpointStatus]:
    """What the run says of checkpoints that it has aborted, and while it is alive of those that are not complete yet:
    of these nothing else tells."""
    life, status = look(inspected.place)
    if status is None:
        return {}
    found = [each for each in status.checkpoints if each.state in ("aborted", "complete")]
    if life is Life.ALIVE:
        found += [each for each in status.checkpoints if each.state == "committing"]
        found += status.in_progress
    return {each.checkpoint: each for each in found}


def _completed(
    inspected: InspectedRoot, record: CheckpointCompleted, told: dict[str, CheckpointStatus]
) -> CheckpointStatus | None:
    """A completed checkpoint; None if the run has removed it while we looked."""
    name = checkpoint_name(record.checkpoint_id)
    try:
        found = with_course(status_in(inspected.manifest(record)), told.get(name))
        damage = inspected.damage_of(record)
    except UnknownCheckpoint:
        return None
    except DamagedCheckpoint as damaged:
        return CheckpointStatus(
            checkpoint=name,
            state="damaged",
            aligned=record.aligned,
            generation=record.generation,
            epoch=record.epoch,
            why=str(damaged),
        )
    if damage is not None:
        return msgspec.structs.replace(found, state="damaged", why=damage)
    is_late = name in told and told[name].state == "committing"
    return msgspec.structs.replace(found, state="committing") if is_late else found


def kind_of(checkpoint: CheckpointStatus, *, is_short: bool = False) -> str:
    """For people; where it is short, without why it is unaligned. Of one that was aborted, or is in progress, it is not
    known yet."""
    if checkpoint.state in ("preparing", "prepared", "deciding"):
        return "in progress"
    if checkpoint.state == "aborted":
        return ""
    kind = checkpoint.alignment.partition(" ")[0] if is_short else checkpoint.alignment
    if checkpoint.full:
        kind += ", full"
    if checkpoint.drain:
        kind += ", drain"
    return kind


def _print_list(inspected: InspectedRoot, listed: list[CheckpointStatus], out: Console) -> None:
    if not listed:
        out.print(f"pipeline {inspected.pipeline} has no checkpoint yet; a run completes one at every interval")
        return
    width = terminal_width()
    columns = [
        Column(
            "kind",
            [Text(kind_of(each)) for each in listed],
            4,
            is_number=False,
            short=[Text(kind_of(each, is_short=True)) for each in listed],
        ),
        Column("time (UTC)", [Text(as_time(each.triggered_at or "")) for each in listed], 3, is_number=False),
        Column("duration", [_told_if(as_duration, each.duration_ms) for each in listed], 2),
        Column("alignment", [_told_if(as_duration, each.alignment_ms) for each in listed], 7),
        Column("new", [_told_if(as_bytes, each.new_bytes) for each in listed], 5),
        Column("total", [_told_if(as_bytes, each.total_bytes) for each in listed], 6),
        Column("in flight", [_told_if(as_bytes, each.in_flight_bytes or None) for each in listed], 8),
        *_watermark_column(listed),
        Column(
            "state",
            [Text(_state(each) if each.why is None else f"{_state(each)}: {each.why}") for each in listed],
            1,
            is_number=False,
            short=[Text(_state(each)) for each in listed],
        ),
    ]
    table = fitted("checkpoint", [each.checkpoint for each in listed], columns, width)
    out.print(Group(Text(f"pipeline {inspected.pipeline}", style="bold"), *table.lines()))
    if not table.is_whole:
        for each in listed:
            if each.why is not None:
                out.print(f"{each.checkpoint} {_state(each)}: {each.why}", markup=False)
            elif each.aligned is False:
                out.print(f"{each.checkpoint} is {each.alignment}", markup=False)


def _watermark_column(listed: list[CheckpointStatus]) -> list[Column]:
    """The pipeline's, where it has event time."""
    timed = [any(part.has_event_time for part in each.stages.values()) for each in listed]
    cells = [
        watermark_cell(each.min_watermark_ms, has_event_time=has_event_time)
        for each, has_event_time in zip(listed, timed, strict=True)
    ]
    return [Column("watermark (UTC)", cells, 9, is_number=False)] if any(timed) else []


def _told_if(told: Callable[[int], str], value: int | None) -> Text:
    return Text("" if value is None else told(value))


def _state(checkpoint: CheckpointStatus) -> str:
    return "complete" if checkpoint.state == "committing" else checkpoint.state


# -- one in full ----------------------------------------------------------------------------------


def _in_full(
    root: Place,
    record: CheckpointCompleted,
    manifest: Manifest,
    checkpoint: CheckpointStatus,
    positions: dict[str, tuple[SourcePosition, ...]],
    damage: str | None,
) -> CheckpointAnswer:
    return CheckpointAnswer(
        root=str(root),
        pipeline=manifest.pipeline,
        checkpoint=checkpoint if damage is None else msgspec.structs.replace(checkpoint, state="damaged", why=damage),
        graph=graph_of(manifest),
        source_positions={
            name: stage.source_positions for name, stage in manifest.stages.items() if stage.source_positions
        },
        positions=positions,
        critical_path=critical_path(checkpoint),
        in_flight={name: sizes for name, stage in manifest.stages.items() if (sizes := _in_flight(stage))},
        manifest=record.manifest,
    )


def _in_flight(stage: StageSnapshot) -> dict[str, int]:
    sizes = {name: sum(each.size_bytes for each in segments) for name, segments in stage.in_flight.items()}
    return {name: size for name, size in sizes.items() if size}


def _print_in_full(
    manifest: Manifest,
    checkpoint: CheckpointStatus,
    positions: dict[str, tuple[SourcePosition, ...]],
    out: Console,
) -> None:
    out.print(f"[bold]{checkpoint_name(manifest.checkpoint_id)}[/] of pipeline {manifest.pipeline}")
    out.print(
        f"{kind_of(checkpoint)}, epoch {manifest.epoch}, generation {manifest.generation}, attempt {manifest.attempt}"
    )
    out.print(
        f"taken at {as_time(manifest.triggered_at)} UTC in {as_duration(manifest.duration_ms)}; "
        f"{as_bytes(manifest.new_bytes)} new of {as_bytes(manifest.total_bytes)}"
    )
    if checkpoint.waited_for is not None:
        # Whole in a pipe, where somebody may look for it; folded where it would not fit.
        out.print(f"what it waited for: {checkpoint.waited_for}", markup=False, soft_wrap=not out.is_terminal)
    stages = [(shape, manifest.stages[name]) for name, shape in manifest.shape.items()]
    if any(shape.has_event_time for shape, _ in stages):
        out.print(f"the pipeline's watermark: {watermark_told(manifest.min_watermark_ms)}")
    columns = [
        Column("kind", [Text(shape.kind) for shape, _ in stages], 5, is_number=False),
        Column("cut at batch", [Text("none yet" if each.cut is None else str(each.cut)) for _, each in stages], 1),
        Column("barrier after", [Text(as_duration(each.barrier_ms)) for _, each in stages], 7),
        Column("aligned in", [Text(as_duration(each.alignment_ms)) for _, each in stages], 6),
        Column("stored in", [Text(as_duration(each.snapshot_ms)) for _, each in stages], 4),
        Column("new", [Text(as_bytes(each.new_bytes)) for _, each in stages], 3),
        Column("total", [Text(as_bytes(each.total_bytes)) for _, each in stages], 2),
        Column("watermark (UTC)", [_watermark(each) for each in stages], 8, is_number=False),
        Column("reads", [Text(", ".join(shape.inputs)) for shape, _ in stages], 9, is_number=False),
    ]
    out.print(Group(*fitted("stage", list(manifest.shape), columns, terminal_width()).lines()))
    for name, part in checkpoint.stages.items():
        for line in _how_cut(name, part):
            out.print(line, markup=False, soft_wrap=True)
    for name, commit in checkpoint.commits.items():
        out.print(f"{name} {_committed(commit)}", markup=False, soft_wrap=True)
    for name, stage in manifest.stages.items():
        for position in positions.get(name, ()):
            out.print(f"source {name} stands at: {position.words}", markup=False, soft_wrap=True)
        for each, segments in stage.in_flight.items():
            if segments:
                size = as_bytes(sum(segment.size_bytes for segment in segments))
                count = f"{len(segments)} segment{'s' if len(segments) > 1 else ''}"
                out.print(f"in flight from {each} to {name}: {count}, {size}", markup=False)


def _committed(commit: SinkCommit) -> str:
    tries = "" if not commit.failures else f", after {counted(commit.failures, 'failure')}: {commit.why}"
    if commit.took_ms is None:
        return f"has not committed it{tries}"
    return f"committed it in {as_duration(commit.took_ms)}{tries}"


def _watermark(stage: tuple[StageShape, StageSnapshot]) -> Text:
    shape, snapshot = stage
    return watermark_cell(snapshot.watermark_ms, has_event_time=shape.has_event_time)


_CUT_BECAUSE: Final[dict[CutBecause, str]] = {
    "timeout": "it was not aligned by then (--unaligned-after)",
    "always": "no stage waits (--unaligned-after 0s)",
    "asked": "the checkpoint was asked for so",
    "upstream": "a stage before it was",
}


def _how_cut(name: str, part: StagePart) -> Iterator[str]:
    """What there is to say of a stage that was not just aligned."""
    after = as_duration(part.alignment_ms or 0)
    if part.cut_because is not None and part.cut_because != "aligned":
        yield f"{name} was cut unaligned after {after}: {_CUT_BECAUSE[part.cut_because]}"
    if part.over_bound:
        yield f"{name} had to keep aligning: more was in flight to it than a cut may capture (--max-inflight)"


def _manifest(inspected: InspectedRoot, record: CheckpointCompleted) -> Manifest:
    try:
        return inspected.manifest(record)
    except DamagedCheckpoint as damage:
        then = str(next_run(inspected))  # which says what is damaged, if it depends on it
        what = "" if str(damage) in then else f"{checkpoint_name(record.checkpoint_id)} is damaged: {damage}; "
        raise DamagedCheckpoint(f"{what}{then}") from damage


def newest_manifest(root: RootGiven) -> tuple[InspectedRoot, Manifest | None]:
    """A root, and the newest checkpoint of the lineage that the next run goes on from, if there is one."""
    inspected = InspectedRoot(root)
    while (newest := inspected.log().newest) is not None:
        try:
            return inspected, _manifest(inspected, newest)
        except UnknownCheckpoint:
            continue  # the run has removed it meanwhile
    return inspected, None
