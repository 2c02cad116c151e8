"""`tidegate checkpoints ID`: one checkpoint in full, by its manifest if it is retained, else by what was told of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final

import msgspec
import typer
from rich.console import Console, Group
from rich.text import Text

from tidegate.cli.answers import CheckpointAnswer
from tidegate.cli.exits import Exit
from tidegate.cli.fitting import Column, fitted
from tidegate.cli.speech import say
from tidegate.cli.tables import watermark_cell, watermark_told
from tidegate.cli.text import as_bytes, as_duration, as_time, console, counted, terminal_width
from tidegate.engine.control import Life, look
from tidegate.engine.critical_path import critical_path
from tidegate.engine.graph import graph_of
from tidegate.engine.history import Past
from tidegate.engine.outlook import next_run
from tidegate.engine.positions import SourcePosition, positions_of
from tidegate.engine.status import CheckpointStatus, CutBecause, SinkCommit, StagePart, status_in, with_course
from tidegate.errors import DamagedCheckpoint, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest, StageSnapshot
from tidegate.storage.places import Place

_IN_PROGRESS: Final = ("preparing", "prepared", "deciding")


def show_one(root: Place, inspected: InspectedRoot, number: int, *, as_json: bool) -> None:
    try:
        _show_retained(root, inspected, inspected.find(number), as_json=as_json)
    except UnknownCheckpoint:
        told = _told_of(inspected, number)
        if told is None:
            raise
        _show_told(root, inspected, told, as_json=as_json)


def kind_of(checkpoint: CheckpointStatus, *, is_short: bool = False) -> str:
    """For people; where it is short, without why it is unaligned. Of one that was aborted, or is in progress, it is not
    known yet."""
    if checkpoint.state in _IN_PROGRESS:
        return "in progress"
    if checkpoint.state == "aborted":
        return ""
    kind = checkpoint.alignment.partition(" ")[0] if is_short else checkpoint.alignment
    if checkpoint.full:
        kind += ", full"
    if checkpoint.drain:
        kind += ", drain"
    return kind


def told_if(told: Callable[[int], str], value: int | None) -> Text:
    return Text("" if value is None else told(value))


# -- one that is retained -------------------------------------------------------------------------


def manifest_of(inspected: InspectedRoot, record: CheckpointCompleted) -> Manifest:
    """Of one that is damaged, it is told what the next run does."""
    try:
        return inspected.manifest(record)
    except DamagedCheckpoint as damage:
        then = str(next_run(inspected))  # which says what is damaged, if it depends on it
        what = "" if str(damage) in then else f"{checkpoint_name(record.checkpoint_id)} is damaged: {damage}; "
        raise DamagedCheckpoint(f"{what}{then}") from damage


def _show_retained(root: Place, inspected: InspectedRoot, record: CheckpointCompleted, *, as_json: bool) -> None:
    manifest = manifest_of(inspected, record)
    damage = inspected.damage_of(record)
    checkpoint = with_course(status_in(manifest), _course(inspected, manifest))
    positions = positions_of(inspected.files, manifest)
    if as_json:
        say(_in_full(root, record, manifest, checkpoint, positions, damage))
    else:
        _print_in_full(manifest, checkpoint, positions, console())
    if damage is not None:
        if not as_json:
            console().print(f"damaged: {damage}\n{next_run(inspected)}", markup=False, soft_wrap=True)
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
    shapes = manifest.shape.values()
    _print_head(manifest.pipeline, checkpoint, out)
    columns = [
        Column("kind", [Text(shape.kind) for shape in shapes], 5, is_number=False),
        *_stage_columns(checkpoint.stages.values()),
        Column("reads", [Text(", ".join(shape.inputs)) for shape in shapes], 9, is_number=False),
    ]
    _print_stages(checkpoint, columns, out)
    for name, stage in manifest.stages.items():
        for position in positions.get(name, ()):
            out.print(f"source {name} stands at: {position.words}", markup=False, soft_wrap=True)
        for each, segments in stage.in_flight.items():
            if segments:
                size = as_bytes(sum(segment.size_bytes for segment in segments))
                count = f"{len(segments)} segment{'s' if len(segments) > 1 else ''}"
                out.print(f"in flight from {each} to {name}: {count}, {size}", markup=False)


# -- one that is not ------------------------------------------------------------------------------


def told_by_run(inspected: InspectedRoot) -> dict[str, CheckpointStatus]:
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


def _told_of(inspected: InspectedRoot, number: int) -> CheckpointStatus | None:
    """What the history has of it or, where it is too early for that, the run says."""
    name = checkpoint_name(number)
    ended = Past(inspected.files).checkpoint(name)
    return told_by_run(inspected).get(name) if ended is None else ended.checkpoint


def _show_told(root: Place, inspected: InspectedRoot, checkpoint: CheckpointStatus, *, as_json: bool) -> None:
    if as_json:
        say(
            CheckpointAnswer(
                root=str(root),
                pipeline=inspected.pipeline,
                checkpoint=checkpoint,
                graph={},
                source_positions={},
                positions={},
                critical_path=critical_path(checkpoint),
                in_flight={},
                manifest=None,
            )
        )
        return
    out = console()
    _print_head(inspected.pipeline, checkpoint, out)
    parts = checkpoint.stages.values()
    progress = Column("came to", [Text(part.told) for part in parts], 0, is_number=False)
    _print_stages(checkpoint, [progress, *_stage_columns(parts)], out)
    out.print(_why_not_retained(checkpoint), style="dim", soft_wrap=True)


def _why_not_retained(checkpoint: CheckpointStatus) -> str:
    if checkpoint.state in _IN_PROGRESS:
        return "it is in progress; what is shown is what the run says of it"
    was = "was aborted" if checkpoint.state == "aborted" else "is no longer retained"
    return f"it {was}, so nothing can be restored from it; what is shown is what the history has of it"


# -- what is told of both -------------------------------------------------------------------------


def _print_head(pipeline: str, checkpoint: CheckpointStatus, out: Console) -> None:
    out.print(f"[bold]{checkpoint.checkpoint}[/] of pipeline {pipeline}")
    attempt = "" if checkpoint.attempt is None else f", attempt {checkpoint.attempt}"
    kind = kind_of(checkpoint) or checkpoint.state
    out.print(f"{kind}, epoch {checkpoint.epoch}, generation {checkpoint.generation}{attempt}")
    if checkpoint.triggered_at is not None:
        new, total = as_bytes(checkpoint.new_bytes or 0), as_bytes(checkpoint.total_bytes or 0)
        out.print(f"{_when(checkpoint, as_time(checkpoint.triggered_at))}; {new} new of {total}")
    # Whole in a pipe, where somebody may look for it; folded where it would not fit.
    if checkpoint.why is not None:
        out.print(f"why: {checkpoint.why}", markup=False, soft_wrap=not out.is_terminal)
    if checkpoint.waited_for is not None:
        out.print(f"what it waited for: {checkpoint.waited_for}", markup=False, soft_wrap=not out.is_terminal)
    if any(part.has_event_time for part in checkpoint.stages.values()):
        out.print(f"the pipeline's watermark: {watermark_told(checkpoint.min_watermark_ms)}")


def _when(checkpoint: CheckpointStatus, at: str) -> str:
    took = as_duration(checkpoint.duration_ms or 0)
    if checkpoint.state in _IN_PROGRESS:
        return f"begun at {at} UTC, {took} ago"
    return (
        f"begun at {at} UTC, aborted after {took}" if checkpoint.state == "aborted" else f"taken at {at} UTC in {took}"
    )


def _stage_columns(parts: Collection[StagePart]) -> list[Column]:
    return [
        Column("cut at batch", [Text(_cut(part)) for part in parts], 1),
        Column("barrier after", [told_if(as_duration, part.barrier_ms) for part in parts], 7),
        Column("aligned in", [told_if(as_duration, part.alignment_ms) for part in parts], 6),
        Column("stored in", [told_if(as_duration, part.snapshot_ms) for part in parts], 4),
        Column("new", [told_if(as_bytes, part.new_bytes) for part in parts], 3),
        Column("total", [told_if(as_bytes, part.total_bytes) for part in parts], 2),
        Column(
            "watermark (UTC)",
            [watermark_cell(part.watermark_ms, has_event_time=bool(part.has_event_time)) for part in parts],
            8,
            is_number=False,
        ),
    ]


def _cut(part: StagePart) -> str:
    if part.cut is not None:
        return str(part.cut)
    return "none yet" if part.progress == "done" else ""


def _print_stages(checkpoint: CheckpointStatus, columns: list[Column], out: Console) -> None:
    if checkpoint.stages:
        out.print(Group(*fitted("stage", list(checkpoint.stages), columns, terminal_width()).lines()))
    for name, part in checkpoint.stages.items():
        for line in _how_cut(name, part):
            out.print(line, markup=False, soft_wrap=True)
    for name, commit in checkpoint.commits.items():
        out.print(f"{name} {_committed(commit)}", markup=False, soft_wrap=True)


def _committed(commit: SinkCommit) -> str:
    tries = "" if not commit.failures else f", after {counted(commit.failures, 'failure')}: {commit.why}"
    if commit.took_ms is None:
        return f"has not committed it{tries}"
    return f"committed it in {as_duration(commit.took_ms)}{tries}"


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
