"""`tidegate verify`: check the manifest and every file in the root of a checkpoint, and that its queries would run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tidegate.cli.answers import VerifiedCheckpoint, VerifyAnswer
from tidegate.cli.exits import Exit
from tidegate.cli.fitting import Column, fitted
from tidegate.cli.options import AsJson, CheckpointId, Conf, RootPlace, settings_in
from tidegate.cli.rehearsal import print_rehearsal, rehearsed
from tidegate.cli.speech import say
from tidegate.cli.text import as_bytes, console, terminal_width
from tidegate.engine.outlook import next_run, next_start
from tidegate.errors import DamagedCheckpoint, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import Refuse, Restore
from tidegate.storage.inspection import CheckedFile, InspectedRoot, Outlook
from tidegate.storage.manifest import Manifest

_WIDTH_OF_A_BAR: Final = 60
"""In a narrower terminal none is shown."""


def verify_command(
    root: RootPlace,
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
    quick: Annotated[
        bool, typer.Option("--quick", help="Read manifests and lists of files only, and look at the rest by its size.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check the files of every checkpoint that can be restored, or of one.

    Manifests, the files of snapshots and those in flight are read against their checksums. Of files that are staged for
    tables, those that a Delta table or a function has yet to take are looked at, by their sizes, where no run is alive.

    With --quick no file of a snapshot is read: each is there, and as large as it was. In a bucket that takes a request
    for each checkpoint and for a thousand files, and a few besides; without it, one for each file.

    Exits with 4 if anything is missing or is not what it was, or the next run will refuse to start; names each such
    file, and says what the next run does.

    With --deep the checkpoint is restored into a scratch folder, and every query is started there on nothing: stages
    run a batch without rows on their state, sources plan their next batch and read none of it. Neither the root nor any
    table is changed. Exits with 1 if a query fails. Starts Spark; what the pipeline's functions need must be there.

    Works beside a run that is alive: a checkpoint that the run removes meanwhile, because newer ones took its place, is
    not damaged.

    Example: tidegate verify --root state/orders

    Example: tidegate verify ckpt-000042 --root state/orders

    Example: tidegate verify --root s3://bucket/orders --quick

    Example: tidegate verify --root state/orders --deep orders.py
    """
    if deep is None and (pipeline is not None or conf):
        raise typer.BadParameter("--pipeline and --conf are for --deep FILE")
    if deep is not None and quick:
        raise typer.BadParameter("--deep reads what --quick leaves out")
    inspected = InspectedRoot(root)
    records = inspected.retained() if checkpoint is None else [inspected.find(checkpoint)]
    inspected.look_ahead(records)
    is_alive = root.is_held()
    with _progress(inspected, records, quiet=as_json or quick) as on_file:
        verified = [verify(inspected, each, reads=not quick, is_alive=is_alive, on_file=on_file) for each in records]
    found = zip(records, verified, strict=True)
    read = {record.checkpoint_id: next(iter(each.damage), None) for record, each in found if each.state != "removed"}
    outlook = next_run(inspected, None if quick else read, is_alive=is_alive)
    if not is_alive:
        outlook = _without_lost_rows(inspected, outlook, verified)
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


@contextmanager
def _progress(
    inspected: InspectedRoot, records: Sequence[CheckpointCompleted], *, quiet: bool
) -> Iterator[Callable[[CheckedFile], None]]:
    """How much of all is read, on a terminal. A file that several checkpoints refer to is read once."""
    columns = (
        TextColumn("reading"),
        BarColumn(),
        TextColumn("{task.fields[read]} of {task.fields[of]}"),
        TimeRemainingColumn(),
    )
    of_bytes = read_bytes = 0
    for record in records:
        with suppress(DamagedCheckpoint, UnknownCheckpoint):
            of_bytes += inspected.manifest(record).total_bytes
    out = Console(stderr=True)
    has_room = out.is_terminal and out.width >= _WIDTH_OF_A_BAR
    with Progress(*columns, console=out, disable=quiet or not has_room, transient=True) as progress:
        task = progress.add_task("files", total=of_bytes, read=as_bytes(0), of=as_bytes(of_bytes))

        def on_file(file: CheckedFile) -> None:
            nonlocal read_bytes
            read_bytes += file.size_bytes
            progress.update(task, completed=read_bytes, read=as_bytes(read_bytes))

        yield on_file


def verify(
    inspected: InspectedRoot,
    record: CheckpointCompleted,
    *,
    reads: bool = True,
    is_alive: bool = False,
    on_file: Callable[[CheckedFile], None] = lambda _: None,
) -> VerifiedCheckpoint:
    found = VerifiedCheckpoint(checkpoint_name(record.checkpoint_id), "intact" if reads else "there")
    try:
        manifest = inspected.manifest(record)
    except (DamagedCheckpoint, UnknownCheckpoint) as damage:
        found.damage.append(str(damage))
    else:
        for file in inspected.checked(manifest, reads=reads):
            on_file(file)
            if file.damage is None:
                found.files += 1
                found.bytes += file.size_bytes
            else:
                found.damage.append(file.damage)
        if not is_alive:  # else what is staged comes and goes
            found.damage += (changed for changed, _ in _damaged_stagings(inspected, manifest) if changed is not None)
    if found.damage:
        # Asked after the damage was seen: a run takes a checkpoint out of the log before it deletes a file of it.
        found.state = "damaged" if inspected.is_retained(record.checkpoint_id) else "removed"
    return found


def _damaged_stagings(inspected: InspectedRoot, manifest: Manifest) -> Iterator[tuple[str | None, str | None]]:
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
    states = {
        "damaged": Text("damaged", style="red"),
        "removed": Text("removed by the run meanwhile"),
        "there": Text("there, not read"),
    }
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
