"""`tidegate status`: a run that is alive, from another terminal, or how the last one ended."""

from __future__ import annotations

from typing import Final

import typer
from rich.console import Console, Group

from tidegate.cli.answers import StatusAnswer
from tidegate.cli.exits import Exit
from tidegate.cli.notices import transfer_told
from tidegate.cli.options import AsJson, RootPlace
from tidegate.cli.speech import say
from tidegate.cli.tables import run_lines
from tidegate.cli.text import age, as_time, console, terminal_width
from tidegate.engine.control import Life, has_spoken, last_heard_of, look
from tidegate.engine.outlook import next_run, next_start
from tidegate.engine.status import RunStatus, StartingStep, as_moment
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.inspection import InspectedRoot, Outlook
from tidegate.storage.places import Place

_EXITS: Final = {Life.ALIVE: Exit.FINE, Life.HANGING: Exit.HANGING, Life.STOPPED: Exit.NOT_RUNNING}


def status_command(root: RootPlace, as_json: AsJson = False) -> None:
    """Tell whether a run is alive on a root, and what it is doing.

    Of a run that is alive: its stages, the checkpoint in progress, the last ones that ended. Of one that is not: how
    it ended, and what the next run starts from, or why it will refuse to. Exits with 0 if a run is alive, with 6 if
    none is, with 4 if none is and the next one will refuse to start, with 7 if one holds the root but has not been
    heard of for 15 seconds, or while it starts for 2 to 5 minutes, by what it is doing.

    Example: tidegate status --root state/orders
    """
    inspected = InspectedRoot(root)
    life, status = look(inspected.place)
    outlook = next_run(inspected, is_alive=life is not Life.STOPPED)
    if as_json:
        say(_answer(root, inspected, life, status, outlook))
    elif life is Life.STOPPED:
        _print_stopped(inspected, status, outlook, console())
    else:
        _print_alive(inspected, life, status, console())
    raise typer.Exit(Exit.DAMAGE if life is Life.STOPPED and outlook.is_refused else _EXITS[life])


def _answer(
    root: Place, inspected: InspectedRoot, life: Life, status: RunStatus | None, outlook: Outlook
) -> StatusAnswer:
    newest = inspected.log().newest
    is_held = life is not Life.STOPPED
    return StatusAnswer(
        root=str(root),
        pipeline=inspected.pipeline,
        life=life,
        heard_at=as_moment(last_heard_of(inspected.place, status)) if is_held else None,
        newest_checkpoint=None if newest is None else checkpoint_name(newest.checkpoint_id),
        next_start=next_start(outlook),
        run=status if not is_held or has_spoken(status) else None,
    )


def _print_alive(inspected: InspectedRoot, life: Life, status: RunStatus | None, out: Console) -> None:
    spoken = status if has_spoken(status) else None
    process = f"process {inspected.place.holder()}" if spoken is None else f"process {spoken.pid} on {spoken.host}"
    state = "starting" if spoken is None else spoken.state
    step = None if spoken is None else spoken.step
    heard = last_heard_of(inspected.place, status).isoformat()
    leads = next((each.name for each in spoken.instances if each.leads), None) if spoken is not None else None
    if life is Life.HANGING and leads is not None:
        out.print(
            f"[yellow]pipeline {inspected.pipeline} has no leader:[/] instance {leads} ({process}), which led it, was "
            f"last heard of at {as_time(heard)} UTC, {age(heard)} ago. Another one takes over, if one is there"
        )
    elif life is Life.HANGING:
        out.print(
            f"[red]pipeline {inspected.pipeline} hangs:[/] {process} holds the root, but was last heard of at "
            f"{as_time(heard)} UTC, {age(heard)} ago, when it was {state}{_doing(step)}. If it does not come back: "
            f"stop it, or start another with --take-over"
        )
    elif spoken is None:
        out.print(f"pipeline {inspected.pipeline} is starting ({process})")
    else:
        out.print(
            f"pipeline {inspected.pipeline} is [green]{state}[/] in {process}, since "
            f"{as_time(spoken.started_at)} UTC ({age(spoken.started_at)})"
        )
    if spoken is None:
        return
    if step is not None and life is Life.ALIVE:
        out.print(f"{step.told}, for {age(step.since)}", markup=False)
    if spoken.transfer is not None and not spoken.stages:  # else it is told with these
        out.print(transfer_told(spoken.transfer), markup=False)
    if spoken.why is not None:
        out.print(spoken.why, markup=False)
    for change in spoken.changes:
        out.print(f"changed: {change}", markup=False)
    if spoken.stages:
        out.print(Group(*run_lines(spoken, terminal_width())))


def _doing(step: StartingStep | None) -> str:
    return "" if step is None else f" ({step.told})"


def _print_stopped(inspected: InspectedRoot, status: RunStatus | None, outlook: Outlook, out: Console) -> None:
    out.print(f"pipeline {inspected.pipeline} is not running: {_ending(status)}", soft_wrap=True, markup=False)
    has_none = "" if outlook.checkpoint or outlook.is_refused else "it has no checkpoint yet: "
    out.print(f"{has_none}{outlook}", soft_wrap=True, markup=False)


def _ending(status: RunStatus | None) -> str:
    if status is None:
        return "no run has left word"
    at = f"{as_time(status.updated_at)} UTC"
    if status.state == "finished":
        return f"the last run ended well at {at}, because {status.why}"
    if status.state == "interrupted":
        return f"the last run was interrupted at {at}: {status.why}"
    if status.state == "failed":
        return f"the last run failed at {at}: {status.why}"
    return f"the last run (process {status.pid} on {status.host}) was killed, or its machine went down, after {at}"
