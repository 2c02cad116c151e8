"""`tidegate restore`: a pipeline and its tables go back to a checkpoint, together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tidegate.cli.answers import RestoreAnswer, RestoredTable, Table
from tidegate.cli.exits import Exit
from tidegate.cli.options import AsJson, RootFolder, complete_checkpoint, parse_checkpoint
from tidegate.cli.speech import say
from tidegate.cli.text import as_time, console, plain_table
from tidegate.errors import InvalidConfig
from tidegate.storage.inspection import InspectedRoot

if TYPE_CHECKING:
    from tidegate.engine.restoring import Restoration
    from tidegate.engine.setting_back import TableBack


def restore_command(
    root: RootFolder,
    to: Annotated[
        int,
        typer.Option(
            "--to",
            metavar="ID",
            parser=parse_checkpoint,
            autocompletion=complete_checkpoint,
            help="A checkpoint that the root retains, such as ckpt-000042 or 42.",
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    discard_others: Annotated[
        bool, typer.Option("--discard-others", help="Also lose what others have written to the tables since.")
    ] = False,
    leave: Annotated[
        list[str] | None,
        typer.Option(metavar="SINK", help="Leave this sink's table as it is: you see to it. May be repeated."),
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Although a run seems alive; that one is superseded.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a pipeline and its tables back to a checkpoint, together.

    First it tells what that means, and asks: which table goes back from which version to which, how many rows vanish,
    which checkpoints are left behind, what cannot be undone. A Delta table gets a new version that shows what it showed
    at the checkpoint; its history stays. The next run goes on from there. Until that has completed a checkpoint, the
    newer ones stay: restoring one of them undoes it.

    It is one decision. A crash in the middle is finished by the next run, or by the next restore.

    Stop the run first (tidegate stop). What cannot be done is refused with 3, and nothing is changed: others have
    written to a table since (--discard-others), a table cannot be set back (--leave). With --dry-run too.

    Example: tidegate restore --root state/orders --to ckpt-000042 --dry-run

    Example: tidegate restore --root state/orders --to ckpt-000042 --yes
    """
    # They bring deltalake, which takes longer than all the rest.
    from tidegate.engine.restoring import plan_restore, restore_root

    if as_json and not (yes or dry_run):
        raise InvalidConfig("with --json nothing is asked: give --yes, or --dry-run to see what would be done")
    left = leave or []
    inspected = InspectedRoot(root)
    if dry_run:
        plan = plan_restore(inspected, to, left)
        _tell(root, plan, as_json=as_json, is_done=False)
        if plan.refused is not None or (plan.others and not discard_others):
            raise typer.Exit(Exit.UNUSABLE_ROOT)
        return

    def confirm(plan: Restoration) -> bool:
        if not as_json:
            _print(plan, console())
        return yes or typer.confirm(f"restore {plan.checkpoint}?")

    done = restore_root(root, to, discard_others=discard_others, leave=left, take_over=take_over, confirm=confirm)
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
            newest=plan.newest,
            dropped=plan.dropped,
            tables=tuple(map(_as_answer, plan.tables)),
        )
    )


def _as_answer(each: TableBack) -> RestoredTable:
    return RestoredTable(
        sink=each.sink,
        table=Table(each.table.kind, each.table.address),
        from_version=each.change.from_version,
        to_version=each.change.to_version,
        rows_removed=each.change.rows_removed,
        rows_added=each.change.rows_added,
        others=each.change.others,
        remains=each.change.remains,
        refused=each.refused,
        is_left=each.is_left,
    )


def _print(plan: Restoration, out: Console) -> None:
    way = "stays at" if plan.newest == plan.checkpoint else f"goes from {plan.newest} to"
    unaligned = "" if plan.aligned else ", unaligned: at it one table may be ahead of another"
    out.print(
        f"pipeline {plan.pipeline} {way} {plan.checkpoint} (of {as_time(plan.triggered_at)} UTC{unaligned})",
        markup=False,
    )
    table = plain_table(["sink", "table"], ["version", "rows"])
    for each in plan.tables:
        table.add_row(each.sink, each.table.address, _versions(each), _rows(each))
    out.print(table)
    for each in plan.tables:
        if each.refused is not None:
            out.print(f"sink {each.sink}: {each.refused}", markup=False, soft_wrap=True)
        if each.change.remains is not None:
            out.print(f"sink {each.sink}: {each.change.remains}", markup=False, soft_wrap=True)
        for other in each.change.others:
            out.print(f"written to {each.table.address} by others since: {other}", markup=False, soft_wrap=True)
    if plan.dropped:
        out.print(
            f"left behind: {', '.join(plan.dropped)}; they stay until the next run has completed a checkpoint",
            markup=False,
            soft_wrap=True,
        )


def _versions(each: TableBack) -> str:
    if each.is_left:
        return "left as it is"
    if each.change.from_version is None:
        return "-"
    if each.change.from_version == each.change.to_version:
        return f"{each.change.to_version} stays"
    return f"{each.change.from_version} → {each.change.to_version}"


def _rows(each: TableBack) -> str:
    removed, added = each.change.rows_removed, each.change.rows_added
    said = [f"-{removed:,}"] if removed else []
    return " ".join([*said, *([f"+{added:,}"] if added else [])]) or "as they are"
