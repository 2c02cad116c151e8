"""`tidegate restore`: a pipeline and its tables go back to a checkpoint, together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tidegate.cli.answers import RestoreAnswer
from tidegate.cli.exits import Exit
from tidegate.cli.load import sinks_in
from tidegate.cli.options import (
    AsJson,
    PipelineFileIfAny,
    PipelineName,
    RootPlace,
    Yes,
    as_pairs,
    complete_checkpoint,
    refuse_to_ask,
)
from tidegate.cli.speech import say
from tidegate.cli.table_changes import as_answer, print_tables
from tidegate.cli.text import as_time, console
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.places import place_of

if TYPE_CHECKING:
    from tidegate.engine.restoring import Restoration


def restore_command(
    root: RootPlace,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="ID|SAVEPOINT",
            autocompletion=complete_checkpoint,
            help="A checkpoint that the root retains, such as 42 or ckpt-000042; or a savepoint, by name or folder.",
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")] = False,
    yes: Yes = False,
    discard_others: Annotated[
        bool, typer.Option("--discard-others", help="Also lose what others have written to the tables since.")
    ] = False,
    leave: Annotated[
        list[str] | None,
        typer.Option(metavar="SINK", help="Leave this sink's table as it is: you see to it. May be repeated."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="SINK=PATH", help="Where the table of a sink is now, if it was moved. May be repeated."),
    ] = None,
    file: PipelineFileIfAny = None,
    pipeline: PipelineName = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Although a run seems alive; that one is superseded.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a pipeline and its tables back to a checkpoint or a savepoint, together.

    First it tells what that means, and asks: which table goes back from which version to which, how many rows vanish,
    which checkpoints are left behind, what cannot be undone. A Delta table gets a new version that shows what it showed
    at the checkpoint; its history stays. The next run goes on from there. Until that has completed a checkpoint, the
    newer ones stay: restoring one of them undoes it.

    A savepoint is copied into the root, which is made if there is none: so a pipeline moves to another machine. The
    savepoint stays yours. The tables belong to that root then, and to no other.

    It is one decision. A crash in the middle is finished by the next run, or by the next restore.

    Stop the run first (tidegate stop). What cannot be done is refused with 3, and nothing is changed: others have
    written to a table since (--discard-others), a table cannot be set back (--leave). With --dry-run too.

    Example: tidegate restore --root state/orders --to ckpt-000042 --dry-run

    Example: tidegate restore --root state/orders --to before-upgrade --yes
    """
    # They bring deltalake, which takes longer than all the rest.
    from tidegate.engine.restoring import Restoring, restore_root, target_of

    refuse_to_ask(as_json=as_json, is_answered=yes or dry_run)
    left, sinks = leave or [], sinks_in(file, pipeline, place_of(root))
    tables = as_pairs("--table", table or [], "SINK=PATH", "revenue=/data/lake/revenue")
    target = target_of(place_of(root), to)
    if isinstance(target, int):
        InspectedRoot(root)  # before a lock is made in a folder that is no root
    if dry_run:
        plan = Restoring(place_of(root), target, left, tables, sinks).plan()
        _tell(root, plan, as_json=as_json, is_done=False)
        if plan.refused is not None or (plan.others and not discard_others):
            raise typer.Exit(Exit.UNUSABLE_ROOT)
        return

    def confirm(plan: Restoration) -> bool:
        if not as_json:
            _print(plan, console())
        return yes or typer.confirm(f"restore {plan.checkpoint}?")

    done = restore_root(
        place_of(root),
        target,
        discard_others=discard_others,
        leave=left,
        tables=tables,
        sinks=sinks,
        take_over=take_over,
        confirm=confirm,
    )
    if done is None:
        typer.echo("nothing was changed")
        raise typer.Exit(Exit.FAILED)
    if as_json:
        _tell(root, done, as_json=True, is_done=True)
    else:
        typer.echo(f"restored: the next run goes on from {done.checkpoint}")


def _tell(root: object, plan: Restoration, *, as_json: bool, is_done: bool) -> None:
    if not as_json:
        _print(plan, console())
        return
    say(
        RestoreAnswer(
            root=str(root),
            pipeline=plan.pipeline,
            is_done=is_done,
            checkpoint=plan.checkpoint,
            is_savepoint=plan.is_savepoint,
            newest=plan.newest,
            dropped=plan.dropped,
            tables=tuple(map(as_answer, plan.tables)),
        )
    )


def _print(plan: Restoration, out: Console) -> None:
    way = f"goes from {plan.newest} to" if plan.newest is not None else "starts on a new root from"
    if plan.newest == plan.checkpoint:
        way = "stays at"
    name = f"savepoint {plan.checkpoint}" if plan.is_savepoint else plan.checkpoint
    unaligned = "" if plan.aligned else ", unaligned: at it one table may be ahead of another"
    out.print(
        f"pipeline {plan.pipeline} {way} {name} (of {as_time(plan.triggered_at)} UTC{unaligned})",
        markup=False,
    )
    print_tables(plan.tables, out)
    if plan.dropped:
        out.print(
            f"left behind: {', '.join(plan.dropped)}; they stay until the next run has completed a checkpoint",
            markup=False,
            soft_wrap=True,
        )
