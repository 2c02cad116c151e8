"""`tidegate history`: what has happened to a pipeline, newest first."""

from __future__ import annotations

import re
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from tidegate.cli.answers import HistoryAnswer
from tidegate.cli.options import AsJson, RootPlace
from tidegate.cli.speech import say
from tidegate.cli.text import as_bytes, as_duration, as_time, console, counted
from tidegate.engine.events import (
    AnyEvent,
    CheckpointEnded,
    Ended,
    Failed,
    Rewound,
    SavepointTaken,
    Started,
    StartedBecause,
)
from tidegate.engine.history import Past, cursor_of
from tidegate.engine.status import CheckpointStatus
from tidegate.errors import InvalidConfig
from tidegate.storage.inspection import InspectedRoot

_KINDS: Final[dict[str, tuple[type[AnyEvent], ...]]] = {
    "checkpoints": (CheckpointEnded,),
    "aborts": (CheckpointEnded,),
    "failures": (Failed,),
    "starts": (Started,),
    "recoveries": (Started,),
    "ends": (Ended,),
    "savepoints": (SavepointTaken,),
    "rewinds": (Rewound,),
}
_AT_ONCE: Final = 200
_BECAUSE: Final[dict[StartedBecause, str]] = {
    "first": "started",
    "again": "started again",
    "killed": "started again, after the run before was killed",
    "failure": "recovered from a failure",
    "instances": "went on with other instances",
    "windows": "went on to close its windows",
}
_HOW: Final = {
    "restore": "restored to",
    "savepoint": "restored from a savepoint, as",
    "fork": "made as a fork, as",
    "promote": "promoted, as",
}


def history_command(
    root: RootPlace,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help=f"Only these: {', '.join(_KINDS)}. May be repeated.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 20,
    before: Annotated[
        str | None, typer.Option(metavar="CURSOR", help="Those before what an earlier answer ended with.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what has happened to a pipeline, newest first.

    Checkpoints, aborts with who was late and why, failures, starts and recoveries with the checkpoint that they went on
    from and how long that took, savepoints, and what restore, fork and promote did. It is kept in the root, and
    outlives the runs: --history-age and --history-count of tidegate run say how long, and how much.

    Works beside a run that is alive, and starts no Spark. What a run has just done may follow within a second, in a
    bucket within half a minute.

    Example: tidegate history --root state/orders

    Example: tidegate history --root state/orders --only aborts --only failures --limit 100
    """
    wanted = only or []
    for each in wanted:
        if each not in _KINDS:
            raise typer.BadParameter(f"{each} is none of {', '.join(_KINDS)}", param_hint="--only")
    if before is not None and not re.fullmatch(r"\d+-.+", before):
        raise InvalidConfig(f"before is {before!r}; it is what an earlier answer said as `next`")
    inspected = InspectedRoot(root)
    events, cursor = _wanted(Past(inspected.files), wanted, limit, before)
    if as_json:
        say(HistoryAnswer(root=str(root), pipeline=inspected.pipeline, events=tuple(events), next=cursor))
        return
    out = console()
    if not events:
        what = "nothing of that kind" if wanted else "nothing"
        earlier = "" if before is None else " before that"
        out.print(f"the history of pipeline {inspected.pipeline} has {what}{earlier}")
        return
    for event in events:
        _print(event, out)
    if cursor is not None:
        out.print(f"there is more: --limit {2 * limit}, or --before {cursor}", style="dim", soft_wrap=True)


def _wanted(past: Past, wanted: list[str], limit: int, before: str | None) -> tuple[list[AnyEvent], str | None]:
    kinds = {kind for each in wanted for kind in _KINDS[each]} or None
    found: list[AnyEvent] = []
    cursor = before
    while True:
        events, cursor = past.newest(max(limit, _AT_ONCE) if wanted else limit, cursor, kinds)
        for number, event in enumerate(events):
            if not wanted or any(_is(event, each) for each in wanted):
                found.append(event)
            if len(found) == limit:
                is_last = number == len(events) - 1 and cursor is None
                return found, None if is_last else cursor_of(event)
        if cursor is None:
            return found, None


def _is(event: AnyEvent, kind: str) -> bool:
    if not isinstance(event, _KINDS[kind]):
        return False
    if kind == "aborts":
        return isinstance(event, CheckpointEnded) and event.checkpoint.state == "aborted"
    if kind == "recoveries":
        return isinstance(event, Started) and event.because in ("failure", "killed", "instances")
    return True


# -- for people -------------------------------------------------------------------------------------


def _print(event: AnyEvent, out: Console) -> None:
    said, style, more = told(event)
    where = "" if event.instance is None else f" (instance {event.instance})"
    out.print(Text(f"{as_time(event.at)}  ").append(f"{said}{where}", style=style), soft_wrap=True)
    for line in more:
        out.print(Text(f"{'':21}{line}", style="dim"), soft_wrap=True)


def told(event: AnyEvent) -> tuple[str, str, list[str]]:
    """What happened, for people: in a line, in which colour, and what there is to say besides."""
    match event:
        case CheckpointEnded():
            return _checkpoint(event.checkpoint)
        case Started():
            return _started(event)
        case Failed():
            then = "it gave up" if event.retried_in_ms is None else f"again in {as_duration(event.retried_in_ms)}"
            return f"failed: {event.why}; {then}", "red", []
        case Ended():
            why = "" if event.why is None else f": {event.why}"
            return f"{event.state}{why}", "red" if event.state == "failed" else "", []
        case SavepointTaken():
            return f"savepoint {event.name} of {event.checkpoint} was made", "", [event.place]
        case Rewound():
            of = "" if event.source is None else f", from {event.source}"
            return f"{_HOW[event.how]} {event.checkpoint}{of}", "yellow", []


def _checkpoint(status: CheckpointStatus) -> tuple[str, str, list[str]]:
    more = [] if status.waited_for is None else [status.waited_for]
    took = "" if status.duration_ms is None else f" after {as_duration(status.duration_ms)}"
    if status.state == "aborted":
        return f"{status.checkpoint} aborted{took}: {status.why}", "red", more
    took = took.replace(" after ", " in ")
    stored = "" if status.new_bytes is None else f", {as_bytes(status.new_bytes)} new"
    stored += "" if status.total_bytes is None else f" of {as_bytes(status.total_bytes)}"
    kind = "" if status.aligned is not False else f", {status.alignment}"
    tables = ", not shown by every table" if status.state == "committing" else ""
    failed = [
        f"{sink} failed {counted(each.failures, 'time')}: {each.why}"
        for sink, each in status.commits.items()
        if each.failures
    ]
    return f"{status.checkpoint} complete{took}{stored}{kind}{tables}", "", [*more, *failed]


def _started(event: Started) -> tuple[str, str, list[str]]:
    base = "from the beginning" if event.base is None else f"from {event.base}"
    said = f"{_BECAUSE[event.because]} {base} in {as_duration(event.took_ms)}, generation {event.generation}"
    more = [] if event.why is None else [event.why]
    if event.skipped:
        more.append(f"passed over, because damaged: {', '.join(event.skipped)}")
    longest = sorted(event.steps, key=lambda each: -each.took_ms)[:3]
    if longest:
        steps = (f"{each.step.replace('_', ' ')} {as_duration(each.took_ms)}" for each in longest if each.took_ms)
        more += [line] if (line := ", ".join(steps)) else []
    return said, "yellow" if event.because in ("failure", "killed") else "green", [*more, *event.changes]
