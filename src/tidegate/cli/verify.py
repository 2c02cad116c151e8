"""`tidegate verify`: check the manifest and every file in the root of a checkpoint, and that its queries would run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.text import Text

from tidegate.cli.answers import VerifiedCheckpoint, VerifyAnswer
from tidegate.cli.exits import Exit
from tidegate.cli.fitting import Column, fitted
from tidegate.cli.options import AsJson, CheckpointId, Conf, RootFolder, settings_in
from tidegate.cli.outlook import next_run, next_start
from tidegate.cli.rehearsal import print_rehearsal, rehearsed
from tidegate.cli.speech import say
from tidegate.cli.text import as_bytes, console, terminal_width
from tidegate.errors import DamagedCheckpoint, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import Refuse, Restore
from tidegate.storage.inspection import InspectedRoot, Outlook, check_files
from tidegate.storage.lock import is_held
from tidegate.storage.manifest import Manifest


def verify_command(
    root: RootFolder,
    checkpoint: CheckpointId = None,
    deep: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="Also start every query of this file's pipeline on a copy of the checkpoint, or of the newest.",
        ),
    ] = None,
    pipeline: Annotated[str | None, typer.Option(help="Which one, if that file defines several.")] = None,
    conf: Conf = [],  # noqa: B006 - typer copies it
    as_json: AsJson = False,
) -> None:
    """Check the files of every checkpoint that can be restored, or of one.

    Manifests, the files of snapshots and those in flight are read against their checksums. Of files that are staged for
    tables, those that a Delta table or a function has yet to take are looked at, by their sizes, where no run is alive.

    Exits with 4 if anything is missing or is not what it was, or the next run will refuse to start; names each such
    file, and says what the next run does.

    With --deep the checkpoint is restored into a scratch folder, and every query is started there on nothing: stages
    run a batch without rows on their state, sources plan their next batch and read none of it. Neither the root nor any
    table is changed. Exits with 1 if a query fails. Starts Spark; what the pipeline's functions need must be there.

    Works beside a run that is alive: a checkpoint that the run removes meanwhile, because newer ones took its place, is
    not damaged.

    Example: tidegate verify --root state/orders

    Example: tidegate verify ckpt-000042 --root state/orders

    Example: tidegate verify --root state/orders --deep orders.py
    """
    if deep is None and (pipeline is not None or conf):
        raise typer.BadParameter("--pipeline and --conf are for --deep FILE")
    inspected = InspectedRoot(root)
    records = inspected.retained() if checkpoint is None else [inspected.find(checkpoint)]
    verified = [verify(inspected, record) for record in records]
    found = zip(records, verified, strict=True)
    read = {record.checkpoint_id: next(iter(each.damage), None) for record, each in found if each.state != "removed"}
    outlook = _without_lost_rows(inspected, next_run(inspected, read), verified)
    is_wrong = outlook.is_refused or any(each.state == "damaged" for each in verified)
    rehearsal = None
    if deep is not None and not is_wrong:
        rehearsal = rehearsed(root, checkpoint, settings_in(conf), deep, pipeline)
    if as_json:
        answer = VerifyAnswer(
            root=str(root),
            pipeline=inspected.pipeline,
            checkpoints=tuple(verified),
            next_start=next_start(outlook),
            rehearsal=rehearsal,
        )
        say(answer)
    else:
        _print(inspected, verified, console())
        if is_wrong:
            console().print(str(outlook), markup=False, soft_wrap=True)
        if rehearsal is not None:
            print_rehearsal(rehearsal, console())
    if is_wrong:
        raise typer.Exit(Exit.DAMAGE)
    if rehearsal is not None and any(each.outcome == "failed" for each in rehearsal.queries):
        raise typer.Exit(Exit.FAILED)


def verify(inspected: InspectedRoot, record: CheckpointCompleted) -> VerifiedCheckpoint:
    found = VerifiedCheckpoint(checkpoint_name(record.checkpoint_id))
    try:
        manifest = inspected.manifest(record)
    except (DamagedCheckpoint, UnknownCheckpoint) as damage:
        found.damage.append(str(damage))
    else:
        for file in check_files(inspected.files, manifest):
            if file.damage is None:
                found.files += 1
                found.bytes += file.size_bytes
            else:
                found.damage.append(file.damage)
        found.damage += (changed for changed, _ in _damaged_stagings(inspected, manifest) if changed is not None)
    if found.damage:
        # Asked after the damage was seen: a run takes a checkpoint out of the log before it deletes a file of it.
        found.state = "damaged" if inspected.is_retained(record.checkpoint_id) else "removed"
    return found


def _damaged_stagings(inspected: InspectedRoot, manifest: Manifest) -> Iterator[tuple[str | None, str | None]]:
    """While a run is alive they come and go."""
    if not is_held(inspected.paths.lock):
        # It brings deltalake, which takes longer than all the rest.
        from tidegate.sinks import outside

        yield from outside.damaged_stagings(inspected, manifest)


def _without_lost_rows(inspected: InspectedRoot, outlook: Outlook, verified: list[VerifiedCheckpoint]) -> Outlook:
    """Rows that are gone, though no table shows them, are no damage that another checkpoint would help for: a run that
    would go on from theirs refuses."""
    start = outlook.start
    if not isinstance(start, Restore):
        return outlook
    manifest = inspected.manifest(start.checkpoint)
    lost = [gone for _, gone in _damaged_stagings(inspected, manifest) if gone is not None]
    if not lost:
        return outlook
    for each in verified:
        if each.checkpoint == outlook.checkpoint:
            each.damage += lost
            each.state = "damaged"
    refusal = Refuse(lost[0], "restore it, or start the pipeline on a new root with new tables")
    return msgspec.structs.replace(outlook, start=refusal)


def _print(inspected: InspectedRoot, verified: list[VerifiedCheckpoint], out: Console) -> None:
    if not verified:
        out.print(f"pipeline {inspected.pipeline} has no checkpoint yet: there is nothing to verify")
        return
    states = {"damaged": Text("damaged", style="red"), "removed": Text("removed by the run meanwhile")}
    columns = [
        Column(
            "state",
            [states.get(each.state, Text(each.state)) for each in verified],
            1,
            is_number=False,
            short=[Text(each.state) for each in verified],
        ),
        Column("files", [Text(f"{each.files:,}") for each in verified], 2),
        Column("bytes", [Text(as_bytes(each.bytes)) for each in verified], 3),
    ]
    table = fitted("checkpoint", [each.checkpoint for each in verified], columns, terminal_width())
    out.print(Group(Text(f"pipeline {inspected.pipeline}", style="bold"), *table.lines()))
    for each in verified:
        for damage in each.damage if each.state == "damaged" else ():
            out.print(f"{each.checkpoint}: {damage}", markup=False, soft_wrap=True)
