"""`tidegate checkpoints`: what a root can be restored from, and what lately became of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import typer
from rich.console import Console, Group
from rich.text import Text

from tidegate.cli.answers import CheckpointAnswer, CheckpointsAnswer, GraphStage, Table
from tidegate.cli.exits import Exit
from tidegate.cli.fitting import Column, fitted
from tidegate.cli.options import AsJson, CheckpointId, RootFolder
from tidegate.cli.outlook import next_run, next_start
from tidegate.cli.speech import say
from tidegate.cli.tables import watermark_cell, watermark_told
from tidegate.cli.text import as_bytes, as_duration, as_time, console, terminal_width
from tidegate.engine.control import Life, look
from tidegate.engine.status import CheckpointStatus, CutBecause, StagePart, status_in
from tidegate.errors import DamagedCheckpoint, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest, StageShape, StageSnapshot


def checkpoints_command(root: RootFolder, checkpoint: CheckpointId = None, as_json: AsJson = False) -> None:
    """Show the checkpoints of a root, or one of them in full.

    The list holds every checkpoint that the pipeline can be restored from, those that were lately aborted, and the one
    in progress. With an ID: that one stage by stage, with the position of each source in its stream and the batch at
    which each stage was cut.

    Of every checkpoint the manifest is read, and its files are looked at by their sizes; `tidegate verify` reads them.
    Exits with 4 if one is damaged, or the next run will refuse to start, and says what that does.

    Works beside a run that is alive, and starts no Spark.

    Example: tidegate checkpoints --root state/orders

    Example: tidegate checkpoints 42 --root state/orders --json
    """
    inspected = InspectedRoot(root)
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
        current = {each.checkpoint_id for each in inspected.current()}
        left = [each.checkpoint_id for each in inspected.retained() if each.checkpoint_id not in current]
        if left:
            names = ", ".join(map(checkpoint_name, left))
            console().print(
                f"left behind by a restore: {names}; they stay until a run has completed a checkpoint", soft_wrap=True
            )
        if is_wrong:
            console().print(str(outlook), markup=False, soft_wrap=True)
    if is_wrong:
        raise typer.Exit(Exit.DAMAGE)


def _show_one(root: Path, inspected: InspectedRoot, record: CheckpointCompleted, *, as_json: bool) -> None:
    manifest = _manifest(inspected, record)
    damage_found = inspected.damage_of(record)
    if as_json:
        say(_in_full(root, record, manifest, damage_found))
    else:
        _print_in_full(manifest, console())
    if damage_found is not None:
        if not as_json:
            console().print(f"damaged: {damage_found}\n{next_run(inspected)}", markup=False, soft_wrap=True)
        raise typer.Exit(Exit.DAMAGE)


# -- the list -------------------------------------------------------------------------------------


def _listed(inspected: InspectedRoot) -> list[CheckpointStatus]:
    told = _told(inspected)
    completed = [found for record in inspected.retained() if (found := _completed(inspected, record, told)) is not None]
    known = {each.checkpoint for each in completed}
    others = [each for each in told.values() if each.checkpoint not in known and each.state != "complete"]
    # By number: from the millionth on, a name has one digit more.
    return sorted([*completed, *others], key=lambda each: checkpoint_id_of(each.checkpoint) or 0)


def _told(inspected: InspectedRoot) -> dict[str, CheckpointStatus]:
    """What the run says of checkpoints that it has aborted, and while it is alive of those that are not complete yet:
    of these nothing else tells."""
    life, status = look(inspected.paths, inspected.files)
    if status is None:
        return {}
    found = [each for each in status.checkpoints if each.state == "aborted"]
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
        found = status_in(inspected.manifest(record))
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


def _in_full(root: Path, record: CheckpointCompleted, manifest: Manifest, damage: str | None) -> CheckpointAnswer:
    checkpoint = status_in(manifest)
    return CheckpointAnswer(
        root=str(root),
        pipeline=manifest.pipeline,
        checkpoint=checkpoint if damage is None else msgspec.structs.replace(checkpoint, state="damaged", why=damage),
        graph=graph_of(manifest),
        source_positions={
            name: stage.source_positions for name, stage in manifest.stages.items() if stage.source_positions
        },
        in_flight={name: sizes for name, stage in manifest.stages.items() if (sizes := _in_flight(stage))},
        manifest=record.manifest,
    )


def _in_flight(stage: StageSnapshot) -> dict[str, int]:
    sizes = {name: sum(each.size_bytes for each in segments) for name, segments in stage.in_flight.items()}
    return {name: size for name, size in sizes.items() if size}


def graph_of(manifest: Manifest) -> dict[str, GraphStage]:
    """The pipeline as it was at a checkpoint."""
    chained = {each: name for name, before in manifest.chains.items() for each in before}
    return {
        name: GraphStage(
            shape.kind,
            shape.inputs,
            shape.output_mode,
            None if shape.table is None else Table(shape.table.kind, shape.table.address),
            chained.get(name),
        )
        for name, shape in manifest.shape.items()
    }


def _print_in_full(manifest: Manifest, out: Console) -> None:
    checkpoint = status_in(manifest)
    out.print(f"[bold]{checkpoint_name(manifest.checkpoint_id)}[/] of pipeline {manifest.pipeline}")
    out.print(
        f"{kind_of(checkpoint)}, epoch {manifest.epoch}, generation {manifest.generation}, attempt {manifest.attempt}"
    )
    out.print(
        f"taken at {as_time(manifest.triggered_at)} UTC in {as_duration(manifest.duration_ms)}; "
        f"{as_bytes(manifest.new_bytes)} new of {as_bytes(manifest.total_bytes)}"
    )
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
    for name, stage in manifest.stages.items():
        for position in stage.source_positions:
            out.print(f"source {name} stands at {position}", markup=False, soft_wrap=True)
        for each, segments in stage.in_flight.items():
            if segments:
                size = as_bytes(sum(segment.size_bytes for segment in segments))
                count = f"{len(segments)} segment{'s' if len(segments) > 1 else ''}"
                out.print(f"in flight from {each} to {name}: {count}, {size}", markup=False)


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


def newest_manifest(root: Path) -> tuple[InspectedRoot, Manifest | None]:
    """A root, and the newest checkpoint of the lineage that the next run goes on from, if there is one."""
    inspected = InspectedRoot(root)
    while (newest := inspected.log().newest) is not None:
        try:
            return inspected, _manifest(inspected, newest)
        except UnknownCheckpoint:
            continue  # the run has removed it meanwhile
    return inspected, None
