"""`tidegate savepoint`, `savepoints` and `savepoint delete`: checkpoints that their user owns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.answers import (
    SavedTableAnswer,
    SavepointAnswer,
    SavepointDeletedAnswer,
    SavepointMadeAnswer,
    SavepointsAnswer,
)
from tidegate.cli.exits import Exit
from tidegate.cli.load import sinks_in
from tidegate.cli.options import (
    AsJson,
    PipelineFileIfAny,
    PipelineName,
    RootPlaceIfAny,
    Yes,
    parse_checkpoint,
    refuse_to_ask,
)
from tidegate.cli.requests import tell_what_closing_means
from tidegate.cli.speech import say
from tidegate.cli.text import as_bytes, as_time, console, plain_table
from tidegate.engine.graph import Table
from tidegate.errors import DamagedCheckpoint, InvalidConfig
from tidegate.protocol.config import as_ms
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.places import Place, place_of
from tidegate.storage.savepoints import Savepoint, delete_savepoint, find_savepoint, savepoints_in
from tidegate.storage.user_paths import folder_or_bucket

SavepointPlace = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="PLACE",
        help="The folder to make it in, or the URL of one in a bucket; by default one beside the root.",
    ),
]
SavepointFolder = Annotated[
    str | None,
    typer.Option(
        "--in",
        metavar="PLACE",
        help="The folder that they are in, or its URL in a bucket, if it is not beside the root.",
    ),
]

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)


@app.callback()
def savepoint_command(
    context: typer.Context,
    root: RootPlaceIfAny = None,
    name: Annotated[str | None, typer.Option(help="Its name; by default that of the checkpoint.")] = None,
    to: SavepointPlace = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="ID", parser=parse_checkpoint, help="Of this checkpoint, which the root retains."),
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the run with it.")] = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="Stop the run when every row that its sources have read is in the tables.")
    ] = False,
    close_windows: Annotated[
        bool,
        typer.Option(
            "--close-windows", help="Drain, and write out what is still open too: rows that come later are late."
        ),
    ] = False,
    file: PipelineFileIfAny = None,
    pipeline: PipelineName = None,
    timeout: Annotated[str, typer.Option(help="How long to wait for the run.")] = "10m",
    as_json: AsJson = False,
) -> None:
    """Make a savepoint: a checkpoint that is yours, in a folder that refers to nothing outside of itself.

    The run that is alive takes a full checkpoint, which is copied when all tables show it; it goes on meanwhile. Where
    no run is alive, it is made of the newest checkpoint. Retention never deletes a savepoint, and it stays whole when
    its folder is moved or copied, or the root is deleted. tidegate restore and tidegate fork start from it.

    With --stop it is the last thing that the run does, with --drain after all rows that are in flight have reached the
    tables. --close-windows besides moves all watermarks to the end of time: windows that are still open are written,
    and whatever comes for them later is late, and dropped. That is for the end of a stream.

    Example: tidegate savepoint --root state/orders --name before-upgrade

    Example: tidegate savepoint --root state/orders --to /backup/orders --drain
    """
    if context.invoked_subcommand is not None:
        return
    from tidegate.engine.requests import StopRun
    from tidegate.engine.root import SeenRoot
    from tidegate.engine.savepoints import make_savepoint
    from tidegate.engine.tables import bound

    if root is None:
        raise typer.BadParameter("say of which root, with --root", param_hint="--root")
    ends = stop or drain or close_windows
    if ends and checkpoint is not None:
        raise InvalidConfig("--checkpoint is of one that is there; --stop, --drain and --close-windows make another")
    inspected = InspectedRoot(place_of(root))
    own = {
        each: bound(sink, SeenRoot(inspected.files, inspected.pipeline).place_of(each))
        for each, sink in sinks_in(file, pipeline, place_of(root)).items()
    }
    how = StopRun(full=True, drain=drain, close_windows=close_windows) if ends else None
    if how is not None:
        tell_what_closing_means(how, as_json=as_json)
    place = None if to is None else folder_or_bucket(to)
    seconds = as_ms("timeout", timeout) / 1000
    made = make_savepoint(inspected, name, place, stop=how, checkpoint_id=checkpoint, timeout_s=seconds, own=own)
    if as_json:
        say(SavepointMadeAnswer(root=str(root), savepoint=_as_answer(made)))
        return
    record = made.record
    typer.echo(f"savepoint {record.name} of {checkpoint_name(record.checkpoint_id)}, {as_bytes(record.size_bytes)}")
    typer.echo(f"it is yours: {made.folder}")
    if ends:
        typer.echo(f"pipeline {record.pipeline} has stopped with it")


def savepoints_command(
    root: RootPlaceIfAny = None,
    place: SavepointFolder = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file of them against its checksum.")] = False,
    as_json: AsJson = False,
) -> None:
    """List savepoints: those beside a root, or in a folder.

    With --verify it ends with 4 if one is damaged.

    Example: tidegate savepoints --root state/orders

    Example: tidegate savepoints --in /backup/orders --verify
    """
    folder = _place(root, place)
    found = [(each, _damage(each) if verify else None) for each in savepoints_in(folder)]
    if as_json:
        say(SavepointsAnswer(place=str(folder), savepoints=tuple(_as_answer(*each) for each in found)))
    elif not found:
        typer.echo(f"there are no savepoints in {folder}")
    else:
        table = plain_table(["savepoint", "checkpoint", "made at (UTC)", "kind"], ["size"])
        for each, _ in found:
            said = each.record
            kind = "last of its run" if said.drained else "while it ran"
            kind += "" if said.aligned else ", unaligned"
            name = checkpoint_name(said.checkpoint_id)
            table.add_row(said.name, name, as_time(said.made_at), kind, as_bytes(said.size_bytes))
        console().print(table)
        console().print(f"in {folder}", markup=False, soft_wrap=True)
    for _, damage in found:
        if damage is not None and not as_json:
            typer.echo(damage, err=True)
    if any(damage is not None for _, damage in found):
        raise typer.Exit(Exit.DAMAGE)


@app.command("delete")
def savepoint_delete_command(
    name: Annotated[str, typer.Argument(metavar="SAVEPOINT", help="Its name beside the root, or its folder.")],
    root: RootPlaceIfAny = None,
    place: SavepointFolder = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete a savepoint. Nothing else ever does.

    Example: tidegate savepoint delete before-upgrade --root state/orders --yes
    """
    refuse_to_ask(as_json=as_json, is_answered=yes)
    folder = Path.cwd() if root is None and place is None else _place(root, place)
    savepoint = find_savepoint(folder, name)
    if not yes and not typer.confirm(f"delete {savepoint} in {savepoint.folder}?"):
        typer.echo("nothing was changed")
        raise typer.Exit(Exit.FAILED)
    delete_savepoint(savepoint)
    if as_json:
        say(SavepointDeletedAnswer(name=savepoint.record.name, folder=str(savepoint.folder)))
    else:
        typer.echo(f"{savepoint} is deleted")


def _place(root: Place | None, place: str | None) -> Path | str:
    if place is not None:
        return folder_or_bucket(place)
    if root is None:
        raise typer.BadParameter("say whose, with --root, or where, with --in", param_hint="--root")
    return place_of(root).savepoints()


def _damage(savepoint: Savepoint) -> str | None:
    try:
        savepoint.looked_through()
    except DamagedCheckpoint as damage:
        return str(damage)
    return None


def _as_answer(savepoint: Savepoint, damage: str | None = None) -> SavepointAnswer:
    said = savepoint.record
    return SavepointAnswer(
        name=said.name,
        folder=str(savepoint.folder),
        pipeline=said.pipeline,
        checkpoint=checkpoint_name(said.checkpoint_id),
        triggered_at=said.triggered_at,
        made_at=said.made_at,
        aligned=said.aligned,
        drained=said.drained,
        size_bytes=said.size_bytes,
        tables={
            name: SavedTableAnswer(table=Table(each.table.kind, each.table.address), version=each.version)
            for name, each in said.tables.items()
        },
        damage=damage,
    )
