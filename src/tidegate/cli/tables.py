"""How a run looks to people: the same in the live view and in `tidegate status`."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tidegate.cli.text import age, as_bytes, as_duration, as_time, plain_table
from tidegate.spark.status import CheckpointStatus, DueCheckpoint, RunStatus, StagePart

_SHOWN_CHECKPOINTS = 5


def run_tables(status: RunStatus) -> Group:
    """The stages, the checkpoint in progress stage by stage, and the last ones that ended."""
    shown = Group(_stages(status), *_held_back(status), *_in_progress(status), _last_checkpoints(status))
    if status.state == "stopping":
        shown.renderables.append(Text("stopping after a last checkpoint", style="yellow"))
    return shown


def _stages(status: RunStatus) -> Table:
    """One row per stage, with how far each is with the checkpoint in progress."""
    title = f"pipeline {status.pipeline}, generation {status.generation}"
    table = plain_table(("stage",), ("rows/s", "rows", "batch", "lag"), title=title)
    # Wide enough for all that comes there, so that the table does not jump.
    table.add_column("watermark (UTC)", min_width=19, no_wrap=True)
    table.add_column("checkpoint", min_width=11, overflow="fold")
    progress = status.in_progress[0].stages if status.in_progress else {}
    for name, stage in status.stages.items():
        table.add_row(
            name,
            f"{stage.rows_per_s:,.0f}",
            f"{stage.rows:,}",
            "" if stage.batch is None else f"{stage.batch:,}",
            "" if stage.lag is None else f"{stage.lag:,}",
            "" if stage.watermark_ms is None else as_time(stage.watermark_ms),
            _stage_progress(progress.get(name)),
        )
    return table


def _held_back(status: RunStatus) -> list[Text]:
    """A line for each stage that has to wait: for those behind it, or for what it reads from."""
    lines = []
    for name, stage in status.stages.items():
        if stage.held_back_by is not None:
            lines.append(f"{name} is held back by {stage.held_back_by}")
        if stage.no_batch is not None:
            lines.append(f"{name} has planned no batch for {age(stage.no_batch.since)}: {stage.no_batch.why}")
    return [Text(line, style="yellow") for line in lines]


def due_line(due: DueCheckpoint) -> str:
    return f"the next checkpoint is due for {age(due.since)}: {due.why}"


def _in_progress(status: RunStatus) -> list[Text]:
    due = [] if status.due is None else [Text(due_line(status.due), style="yellow")]
    if not status.in_progress:
        return [Text("no checkpoint in progress", style="dim"), *due]
    active = status.in_progress[0]
    line = f"{active.checkpoint} in progress for {as_duration(active.duration_ms or 0)}: {active.state}"
    return [Text(line), *due]


def _stage_progress(part: StagePart | None) -> Text:
    if part is None:
        return Text("")
    return Text(part.told, style={"done": "green", "waiting": "dim"}.get(part.progress, "yellow"))


def _last_checkpoints(status: RunStatus) -> Table | Text:
    if not status.checkpoints:
        return Text("no checkpoint has ended yet", style="dim")
    table = plain_table(("last checkpoints", "time (UTC)"), ("duration", "new", "total"))
    table.add_column("state", overflow="fold")
    for each in status.checkpoints[-_SHOWN_CHECKPOINTS:]:
        table.add_row(
            each.checkpoint,
            as_time(each.triggered_at or ""),
            as_duration(each.duration_ms or 0),
            as_bytes(each.new_bytes or 0),
            as_bytes(each.total_bytes or 0),
            _state(each),
        )
    return table


def _state(checkpoint: CheckpointStatus) -> Text:
    if checkpoint.state == "aborted":
        return Text(f"aborted: {checkpoint.why}", style="red")
    said = "complete, tables follow" if checkpoint.state == "committing" else "complete"
    return Text(said if checkpoint.aligned is not False else f"{said}, unaligned", style="green")
