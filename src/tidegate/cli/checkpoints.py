"""`tidegate checkpoints`: what a root can be restored from, and what lately became of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console, Group
from rich.text import Text

from tidegate.cli.answers import CheckpointsAnswer, SummaryAnswer
from tidegate.cli.exits import Exit
from tidegate.cli.fitting import Column, fitted
from tidegate.cli.one_checkpoint import kind_of, manifest_of, show_one, told_by_run, told_if
from tidegate.cli.options import AsJson, CheckpointId, RootPlace
from tidegate.cli.speech import say
from tidegate.cli.tables import watermark_cell
from tidegate.cli.text import as_bytes, as_duration, as_time, console, plain_table, terminal_width
from tidegate.engine.events import CheckpointEnded
from tidegate.engine.history import Past
from tidegate.engine.outlook import next_run, next_start
from tidegate.engine.status import CheckpointStatus, status_in, with_course
from tidegate.engine.summary import Spread, summary_of
from tidegate.errors import DamagedCheckpoint, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest
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
    which each stage was cut, what it waited for longest, and how long each sink took to commit it. Of one that was
    aborted, or is no longer retained, it is shown what the history of the root has (tidegate history): why, what it
    waited for, and how far each stage came.

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
        show_one(root, inspected, checkpoint, as_json=as_json)
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


# -- the list -------------------------------------------------------------------------------------


def _listed(inspected: InspectedRoot) -> list[CheckpointStatus]:
    told = told_by_run(inspected)
    records = inspected.retained()
    inspected.look_ahead(records)
    completed = [found for record in records if (found := _completed(inspected, record, told)) is not None]
    known = {each.checkpoint for each in completed}
    others = [each for each in told.values() if each.checkpoint not in known and each.state != "complete"]
    # By number: from the millionth on, a name has one digit more.
    return sorted([*completed, *others], key=lambda each: checkpoint_id_of(each.checkpoint) or 0)


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
        Column("duration", [told_if(as_duration, each.duration_ms) for each in listed], 2),
        Column("alignment", [told_if(as_duration, each.alignment_ms) for each in listed], 7),
        Column("new", [told_if(as_bytes, each.new_bytes) for each in listed], 5),
        Column("total", [told_if(as_bytes, each.total_bytes) for each in listed], 6),
        Column("in flight", [told_if(as_bytes, each.in_flight_bytes or None) for each in listed], 8),
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


def _state(checkpoint: CheckpointStatus) -> str:
    return "complete" if checkpoint.state == "committing" else checkpoint.state


def newest_manifest(root: RootGiven) -> tuple[InspectedRoot, Manifest | None]:
    """A root, and the newest checkpoint of the lineage that the next run goes on from, if there is one."""
    inspected = InspectedRoot(root)
    while (newest := inspected.log().newest) is not None:
        try:
            return inspected, manifest_of(inspected, newest)
        except UnknownCheckpoint:
            continue  # the run has removed it meanwhile
    return inspected, None
