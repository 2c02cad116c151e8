"""How a run looks to people: the same in the live view and in `tidegate status`.

In a terminal all of it fits, however small that is: see `run_lines` for what gives way to what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from rich.text import Text

from tidegate.cli.fitting import Column, FittedTable, cut_off, first_that_fits, fitted, wrapped
from tidegate.cli.notices import Notice, notices
from tidegate.cli.text import as_bytes, as_duration, as_time
from tidegate.engine.status import (
    CheckpointStatus,
    InstanceStatus,
    Progress,
    RunStatus,
    StagePart,
    StageStatus,
    StoppingStep,
)

_SHOWN_CHECKPOINTS: Final = 5
_PREFERRED_CHECKPOINTS: Final = 3
_NOT_SET: Final = "not set yet"
_SHOWS_ALL: Final = "tidegate status shows all"
_STOPPING: Final[dict[StoppingStep | None, str]] = {
    "draining": "draining: what the sources have read is consumed, then it stops after a last checkpoint",
    "closing_windows": "closing windows: what is open is written out, then it stops after a last checkpoint",
}
_LAST_CHECKPOINT: Final = "stopping after a last checkpoint"
_TOLD_ALIGNMENT_MS: Final = 1_000
_TOLD_WAIT_MS: Final = 1_000
"""As long as it takes less, there is no need to tell."""


def run_lines(
    status: RunStatus,
    width: int | None,
    height: int | None = None,
    *,
    titles: Sequence[str] = (),
    footer: str = "",
) -> list[Text]:
    """The stages, what there is to notice, the checkpoint in progress stage by stage, and the last ones that ended.

    No line is wider than `width`, nor are there more than `height`. What is always there: the title, a part of the
    notices, the checkpoint in progress and the newest that ended. Stages that have no room are summed up in a line.
    `titles`: ways to say what it is of, the longest first.
    """
    told = notices(status)
    stages, checkpoints = _stages(status, width), _checkpoints(status, width)
    if checkpoints is not None and not checkpoints.is_whole:
        # The table has no room for reasons. Where there is no room for all of them either, only the newest matters.
        newest = status.checkpoints[-(1 if height is not None else _SHOWN_CHECKPOINTS) :]
        told += [Notice(f"{each.checkpoint} was aborted: {each.why}", each.checkpoint) for each in newest if each.why]
        told += [
            Notice(f"{each.checkpoint} is {each.alignment}", each.checkpoint)
            for each in newest
            if each.aligned is False and each.state != "aborted"
        ]
    titles = titles or (f"pipeline {status.pipeline}, generation {status.generation}",)
    title = first_that_fits(width, *(f"{each}{_watermark(status)}" for each in titles[:1]), *titles)
    top = wrapped(Text(title, style="bold"), width)
    together = _instances(status, width, height)
    progress = _in_progress(status, width)
    bottom = [line for text in _ending(status, footer) for line in wrapped(text, width)]
    noticed = [wrapped(Text(each.text, style="yellow"), width) for each in told]
    ended = len(status.checkpoints[-_SHOWN_CHECKPOINTS:])
    if height is None:
        plan = _Plan(sum(map(len, noticed)), len(status.stages), ended, is_ruled=True, is_spaced=True)
    else:
        room = height - len(top) - len(together) - len(progress) - len(bottom)
        plan = _planned(room, sum(map(len, noticed)), len(status.stages), ended)
    blocks = [
        top,
        together,
        _stage_lines(status, stages, plan, told, width),
        _notice_lines(noticed, plan.notices, width),
        progress,
        _checkpoint_lines(checkpoints, plan, width),
        bottom,
    ]
    return _joined(blocks, is_spaced=plan.is_spaced)


def _instances(status: RunStatus, width: int | None, height: int | None) -> list[Text]:
    """Who runs what, where several processes do: one line each, or one in all where there is little room."""
    told = [_instance(each) for each in status.instances]
    if height is None or not told:
        return [line for each in told for line in wrapped(each, width)]
    return cut_off(wrapped(Text("; ").join(told), width), 1, width or 0)


def _instance(instance: InstanceStatus) -> Text:
    runs = f"runs {', '.join(instance.stages)}" if instance.stages else "runs nothing"
    what = f"instance {instance.name} {'leads and ' if instance.leads else ''}{runs}"
    if instance.missing_since is not None:
        return Text(f"{what}, and is missing since {as_time(instance.missing_since)} UTC", style="yellow")
    where = "" if instance.pid is None else f" (process {instance.pid} on {instance.host})"
    return Text(f"{what}{where}")


def _watermark(status: RunStatus) -> str:
    """The pipeline's, where it has event time."""
    if not any(stage.has_event_time for stage in status.stages.values()):
        return ""
    return f", watermark {watermark_told(status.min_watermark_ms)}"


def watermark_told(watermark_ms: int | None) -> str:
    """Of who has event time."""
    return _NOT_SET if watermark_ms is None else f"{as_time(watermark_ms)} UTC"


def _joined(blocks: Sequence[list[Text]], *, is_spaced: bool) -> list[Text]:
    """With an empty line after the tables, where there is room."""
    lines: list[Text] = []
    shown = [block for block in blocks if block]
    for before, block in zip([[], *shown], shown, strict=False):
        if is_spaced and lines and before is not blocks[0] and max(len(before), len(block)) > 1:
            lines.append(Text())
        lines += block
    return lines


class _Plan(msgspec.Struct, frozen=True):
    """How many lines of notices, and rows of stages and of checkpoints, there is room for."""

    notices: int
    stages: int
    checkpoints: int
    is_ruled: bool = False
    is_spaced: bool = False


_SPACES: Final = 4
"""Empty lines at most, where there is room for them."""


def _planned(room: int, notices: int, stages: int, checkpoints: int) -> _Plan:
    """Who gets how many lines of those that are left for notices, stages and checkpoints.

    Notices up to a third; of the checkpoints the newest, and the newest three where that leaves most for the stages; a
    table has one line for its head, and where not all stages are shown, one sums up the others.
    """
    noticed = min(notices, max(2, room // 3))
    room -= noticed
    rows = min(checkpoints, max(1, min(_PREFERRED_CHECKPOINTS, room // 5)))
    for_checkpoints = 1 + rows if checkpoints else 1
    room -= for_checkpoints
    shown = room - 1
    if shown < stages:
        shown = max(0, shown - 1)  # for the line that sums up the rest
        return _Plan(noticed, shown, rows)
    room -= 1 + stages
    more = min(room, checkpoints - rows)
    room -= more
    return _Plan(noticed, stages, rows + more, is_ruled=room >= 2, is_spaced=room >= 2 + _SPACES)


# -- stages ---------------------------------------------------------------------------------------


def _stages(status: RunStatus, width: int | None) -> FittedTable:
    """One row per stage, with how far each is with the checkpoint in progress."""
    progress = status.in_progress[0].stages if status.in_progress else {}
    stages = status.stages.values()
    parts = [progress.get(name) for name in status.stages]
    columns = [
        Column("rows/s", [Text("" if each.chained_into else f"{each.rows_per_s:,.0f}") for each in stages], 1),
        Column("rows", [Text("" if each.chained_into else f"{each.rows:,}") for each in stages], 4),
        Column("batch", [Text("" if each.batch is None else f"{each.batch:,}") for each in stages], 6),
        Column("lag", [Text("" if each.lag is None else f"{each.lag:,}") for each in stages], 3),
        Column(
            "watermark (UTC)",
            [watermark_cell(each.watermark_ms, has_event_time=each.has_event_time) for each in stages],
            5,
            is_number=False,
            least=19,
        ),
        Column(
            "checkpoint",
            [_stage_progress(each, part, is_short=False) for each, part in zip(stages, parts, strict=True)],
            2,
            is_number=False,
            short=[_stage_progress(each, part, is_short=True) for each, part in zip(stages, parts, strict=True)],
            least=11,
        ),
    ]
    return fitted("stage", list(status.stages), columns, width)


def watermark_cell(watermark_ms: int | None, *, has_event_time: bool) -> Text:
    """Of a column whose heading says that times are in UTC."""
    if watermark_ms is not None:
        return Text(as_time(watermark_ms))
    return Text(_NOT_SET if has_event_time else "", style="dim")


_SHORT: Final[dict[Progress, str]] = {"aligning": "waiting", "recording": "recording"}


def _stage_progress(stage: StageStatus, part: StagePart | None, *, is_short: bool) -> Text:
    """Where there is little room, without the inputs that it waits for, and without what is in flight to it."""
    if stage.chained_into is not None:
        return Text(f"in {stage.chained_into}" if is_short else f"chained into {stage.chained_into}", style="dim")
    if part is None:
        return Text("")
    said = _SHORT.get(part.progress, part.told) if is_short else part.told
    if part.in_flight_bytes and part.progress != "done" and not is_short:
        said += f", {as_bytes(part.in_flight_bytes)} in flight"
    return Text(said, style={"done": "green", "waiting": "dim"}.get(part.progress, "yellow"))


def _stage_lines(
    status: RunStatus, table: FittedTable, plan: _Plan, told: Sequence[Notice], width: int | None
) -> list[Text]:
    names = list(status.stages)
    if plan.stages >= len(names):
        return [*table.head(ruled=plan.is_ruled), *table.rows()]
    told_of = frozenset().union(*(each.stages for each in told))
    by_interest = sorted(range(len(names)), key=lambda each: (*_interest(status, names[each], told_of), each))
    shown = sorted(by_interest[: plan.stages])
    others = [status.stages[names[each]] for each in by_interest[plan.stages :]]
    rate = f"{sum(each.rows_per_s for each in others):,.0f} rows/s"
    count = f"{len(others)} more stage{'s' if len(others) > 1 else ''}" if shown else f"{len(others)} stages"
    summed = first_that_fits(
        width, f"and {count}, {rate}; {_SHOWS_ALL}", f"and {count}, {rate}", f"and {count}", f"+{len(others)}"
    )
    head = table.head(ruled=False) if shown else []
    return [*head, *table.rows(shown), Text(summed, style="dim")]


def _interest(status: RunStatus, name: str, told_of: frozenset[str]) -> tuple[bool, bool, int]:
    """The lower, the more a stage has to tell: there is a notice of it, the checkpoint waits for it, it is late."""
    part = status.in_progress[0].stages.get(name) if status.in_progress else None
    holds_up = part is not None and part.progress not in ("waiting", "done")
    lag = status.stages[name].lag or 0
    # In powers of two, and not by a few segments: else rows would take one another's place with every look.
    return name not in told_of, not holds_up, -(lag // 8).bit_length()


# -- notices, and the checkpoint in progress --------------------------------------------------------


def _notice_lines(noticed: Sequence[list[Text]], count: int, width: int | None) -> list[Text]:
    """As many whole notices as there is room for; of the first one, if need be, a part."""
    lines = [line for each in noticed for line in each]
    if len(lines) <= count or width is None:
        return lines
    shown: list[Text] = []
    for number, each in enumerate(noticed):
        if len(shown) + len(each) > count - 1:
            left = len(noticed) - number
            break
        shown += each
    if not shown:
        shown, left = cut_off(noticed[0], max(1, count - 1), width), len(noticed) - 1
    if left:
        more = f"and {left} more to notice"
        shown.append(Text(first_that_fits(width, f"{more}; {_SHOWS_ALL}", more), style="yellow"))
    return shown[:count]


def _in_progress(status: RunStatus, width: int | None) -> list[Text]:
    if not status.in_progress:
        nothing, last = "no checkpoint in progress", _last_waited(status)
        return wrapped(Text(first_that_fits(width, f"{nothing}{last}", nothing), style="dim"), width)
    active = status.in_progress[0]
    lasts = as_duration(active.duration_ms or 0)
    longest_ms = max((each.alignment_ms or 0 for each in active.stages.values() if each.cut_because is None), default=0)
    aligning = f", aligning for {as_duration(longest_ms)}" if longest_ms >= _TOLD_ALIGNMENT_MS else ""
    waits = "" if (active.duration_ms or 0) < _TOLD_WAIT_MS else f", {active.waited_for}"
    said = first_that_fits(
        width,
        *([f"{active.checkpoint} in progress for {lasts}: {active.state}{waits}"] if waits else []),
        f"{active.checkpoint} in progress for {lasts}: {active.state}{aligning}",
        f"{active.checkpoint} in progress for {lasts}: {active.state}",
        f"{active.checkpoint}: {active.state}, {lasts}",
    )
    return wrapped(Text(said), width)


def _last_waited(status: RunStatus) -> str:
    """What the last one that ended waited for, if it took so long that one wonders."""
    last = status.checkpoints[-1] if status.checkpoints else None
    if last is None or last.waited_for is None or max(last.duration_ms or 0, last.shown_ms or 0) < _TOLD_WAIT_MS:
        return ""
    return f"; {last.checkpoint} took {last.waited_for}"


def _ending(status: RunStatus, footer: str) -> list[Text]:
    said = _STOPPING.get(status.stopping, _LAST_CHECKPOINT)
    stopping = [Text(said, style="yellow")] if status.state == "stopping" else []
    return [*stopping, *([Text(footer, style="dim")] if footer else [])]


# -- checkpoints ------------------------------------------------------------------------------------


def _checkpoints(status: RunStatus, width: int | None) -> FittedTable | None:
    shown = status.checkpoints[-_SHOWN_CHECKPOINTS:]
    if not shown:
        return None
    columns = [
        Column("time (UTC)", [Text(as_time(each.triggered_at or "")) for each in shown], 4, is_number=False),
        Column("duration", [Text(as_duration(each.duration_ms or 0)) for each in shown], 2),
        Column("new", [Text(as_bytes(each.new_bytes or 0)) for each in shown], 3),
        Column("total", [Text(as_bytes(each.total_bytes or 0)) for each in shown], 5),
        *_alignment(shown),
        Column(
            "state",
            [_state(each) for each in shown],
            1,
            is_number=False,
            short=[_short_state(each) for each in shown],
        ),
    ]
    names = [each.checkpoint for each in shown]
    table = fitted("last checkpoints", names, columns, width)
    return table if table.is_whole else fitted("checkpoint", names, columns, width)


def _alignment(checkpoints: Sequence[CheckpointStatus]) -> list[Column]:
    """Where there is something to tell of it."""
    if not any(each.aligned is False or (each.alignment_ms or 0) >= _TOLD_ALIGNMENT_MS for each in checkpoints):
        return []
    return [
        Column("alignment", [Text(as_duration(each.alignment_ms or 0)) for each in checkpoints], 6),
        Column("in flight", [Text(as_bytes(each.in_flight_bytes or 0)) for each in checkpoints], 7),
    ]


def _checkpoint_lines(table: FittedTable | None, plan: _Plan, width: int | None) -> list[Text]:
    if table is None:
        return wrapped(Text("no checkpoint has ended yet", style="dim"), width)
    newest = range(len(table.names) - plan.checkpoints, len(table.names))
    return [*table.head(ruled=plan.is_ruled), *table.rows(newest)]


def _state(checkpoint: CheckpointStatus) -> Text:
    if checkpoint.state == "aborted":
        return Text(f"aborted: {checkpoint.why}", style="red")
    said = "complete, tables follow" if checkpoint.state == "committing" else "complete"
    return Text(said if checkpoint.aligned is not False else f"{said}, {checkpoint.alignment}", style="green")


def _short_state(checkpoint: CheckpointStatus) -> Text:
    if checkpoint.state == "aborted":
        return Text("aborted", style="red")
    return Text("complete" if checkpoint.aligned is not False else "unaligned", style="green")
