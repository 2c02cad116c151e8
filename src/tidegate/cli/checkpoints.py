"""`tidegate checkpoints`: what a root can be restored from, and what lately became of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from tidegate.cli.options import AsJson, CheckpointId, RootFolder
from tidegate.cli.text import as_bytes, as_duration, as_time, console, plain_table
from tidegate.errors import DamagedCheckpoint, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.messages import Flag
from tidegate.protocol.recovery import checkpoint_id_of, checkpoint_name
from tidegate.spark.remote import Life, look
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest


class Listed(msgspec.Struct):
    """One line of the list. What is not known of a checkpoint that did not complete is None."""

    checkpoint: str
    kind: str
    state: str
    generation: int
    triggered_at: str | None = None
    duration_ms: int | None = None
    alignment_ms: int | None = None
    new_bytes: int | None = None
    total_bytes: int | None = None
    in_flight_bytes: int | None = None
    why: str | None = None


def checkpoints_command(root: RootFolder, checkpoint: CheckpointId = None, as_json: AsJson = False) -> None:
    """Show the checkpoints of a root, or one of them in full.

    The list holds every checkpoint that the pipeline can be restored from, those that were lately aborted, and the one
    in progress. With an ID: that one stage by stage, with the position of each source in its stream and the batch at
    which each stage was cut.

    Works beside a run that is alive, and starts no Spark.

    Example: tidegate checkpoints --root state/orders

    Example: tidegate checkpoints 42 --root state/orders --json
    """
    inspected = InspectedRoot(root)
    if checkpoint is not None:
        manifest = inspected.manifest(inspected.find(checkpoint))
        if as_json:
            typer.echo(msgspec.json.encode(_in_full(manifest)))
        else:
            _print_in_full(manifest, console())
        return
    listed = _listed(inspected)
    if as_json:
        found = {"root": str(root), "pipeline": inspected.pipeline, "checkpoints": listed}
        typer.echo(msgspec.json.encode(found))
    else:
        _print_list(inspected, listed, console())


# -- the list -------------------------------------------------------------------------------------


def _listed(inspected: InspectedRoot) -> list[Listed]:
    completed = [found for record in inspected.retained() if (found := _completed(inspected, record)) is not None]
    # By number: from the millionth on, a name has one digit more.
    return sorted([*completed, *_others(inspected)], key=lambda each: checkpoint_id_of(each.checkpoint) or 0)


def _others(inspected: InspectedRoot) -> list[Listed]:
    """What the run says of checkpoints that did not complete, or not yet: these leave nothing else behind."""
    life, status = look(inspected.paths)
    if status is None:
        return []
    aborted = [each for each in status.checkpoints if each.state == "aborted"]
    in_progress = status.in_progress if life is Life.ALIVE else ()
    return [
        Listed(
            each.checkpoint,
            "" if each.state == "aborted" else "in progress",
            each.state,
            each.generation,
            each.triggered_at,
            each.duration_ms,
            why=each.why,
        )
        for each in (*aborted, *in_progress)
    ]


def _completed(inspected: InspectedRoot, record: CheckpointCompleted) -> Listed | None:
    """A completed checkpoint; None if the run has removed it while we looked."""
    name = checkpoint_name(record.checkpoint_id)
    try:
        manifest = inspected.manifest(record)
    except UnknownCheckpoint:
        return None
    except DamagedCheckpoint as damage:
        return Listed(name, "aligned" if record.aligned else "unaligned", "damaged", record.generation, why=str(damage))
    return Listed(
        name,
        kind_of(manifest),
        "complete",
        manifest.generation,
        manifest.triggered_at,
        manifest.duration_ms,
        manifest.alignment_ms,
        manifest.new_bytes,
        manifest.total_bytes,
        manifest.in_flight_bytes,
    )


def kind_of(manifest: Manifest) -> str:
    kind = "aligned" if manifest.aligned else "unaligned"
    if manifest.flags & Flag.FULL_SNAPSHOT:
        kind += ", full"
    if manifest.flags & Flag.DRAIN:
        kind += ", drain"
    return kind


def _print_list(inspected: InspectedRoot, listed: list[Listed], out: Console) -> None:
    if not listed:
        out.print(f"pipeline {inspected.pipeline} has no checkpoint yet; a run completes one at every interval")
        return
    table = plain_table(
        ("checkpoint", "kind", "time (UTC)"),
        ("duration", "alignment", "new", "total", "in flight"),
        title=f"pipeline {inspected.pipeline}",
    )
    table.add_column("state", overflow="fold")
    for each in listed:
        table.add_row(
            each.checkpoint,
            each.kind,
            "" if each.triggered_at is None else as_time(each.triggered_at),
            *("" if ms is None else as_duration(ms) for ms in (each.duration_ms, each.alignment_ms)),
            *("" if size is None else as_bytes(size) for size in (each.new_bytes, each.total_bytes)),
            as_bytes(each.in_flight_bytes) if each.in_flight_bytes else "",
            Text(each.state if each.why is None else f"{each.state}: {each.why}"),  # a reason may hold brackets
        )
    out.print(table)


# -- one in full ----------------------------------------------------------------------------------


def _in_full(manifest: Manifest) -> dict[str, Any]:
    """The manifest, and what is summed up of it in the list."""
    return {
        "checkpoint": checkpoint_name(manifest.checkpoint_id),
        "kind": kind_of(manifest),
        **msgspec.to_builtins(manifest),
        "alignment_ms": manifest.alignment_ms,
        "new_bytes": manifest.new_bytes,
        "total_bytes": manifest.total_bytes,
        "in_flight_bytes": manifest.in_flight_bytes,
    }


def _print_in_full(manifest: Manifest, out: Console) -> None:
    out.print(f"[bold]{checkpoint_name(manifest.checkpoint_id)}[/] of pipeline {manifest.pipeline}")
    out.print(
        f"{kind_of(manifest)}, epoch {manifest.epoch}, generation {manifest.generation}, attempt {manifest.attempt}"
    )
    out.print(
        f"taken at {as_time(manifest.triggered_at)} UTC in {as_duration(manifest.duration_ms)}; "
        f"{as_bytes(manifest.new_bytes)} new of {as_bytes(manifest.total_bytes)}"
    )
    table = plain_table(("stage", "kind"), ("cut at batch", "barrier after", "aligned in", "stored in", "new", "total"))
    table.add_column("watermark (UTC)")
    table.add_column("reads", overflow="fold")
    for name, shape in manifest.shape.items():
        stage = manifest.stages[name]
        table.add_row(
            name,
            shape.kind,
            "none yet" if stage.cut is None else str(stage.cut),
            *(as_duration(ms) for ms in (stage.barrier_ms, stage.alignment_ms, stage.snapshot_ms)),
            *(as_bytes(size) for size in (stage.new_bytes, stage.total_bytes)),
            "" if stage.watermark_ms is None else as_time(stage.watermark_ms),
            ", ".join(shape.inputs),
        )
    out.print(table)
    for name, stage in manifest.stages.items():
        for position in stage.source_positions:
            out.print(f"source {name} stands at {position}", markup=False, soft_wrap=True)
        for each, segments in stage.in_flight.items():
            if segments:
                size = as_bytes(sum(segment.size_bytes for segment in segments))
                out.print(f"in flight from {each} to {name}: {len(segments)} segments, {size}")


def newest_manifest(root: Path) -> tuple[InspectedRoot, Manifest | None]:
    """A root, and the newest checkpoint of the lineage that the next run goes on from, if there is one."""
    inspected = InspectedRoot(root)
    while (newest := inspected.log().newest) is not None:
        try:
            return inspected, inspected.manifest(newest)
        except UnknownCheckpoint:
            continue  # the run has removed it meanwhile
    return inspected, None
