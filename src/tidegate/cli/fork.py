"""`tidegate fork` and `tidegate promote`: a new version of a job is tried beside the old one, and takes its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tidegate.cli.answers import ForkAnswer, PromoteAnswer
from tidegate.cli.exits import Exit
from tidegate.cli.load import sinks_in
from tidegate.cli.options import (
    AsJson,
    PipelineFileIfAny,
    PipelineName,
    RootPlace,
    Yes,
    as_pairs,
    refuse_to_ask,
)
from tidegate.cli.speech import say
from tidegate.cli.table_changes import as_answer, print_tables
from tidegate.cli.text import console
from tidegate.protocol.config import as_ms
from tidegate.storage.places import Place, as_given, place_of

if TYPE_CHECKING:
    from tidegate.engine.forking import Promotion


def fork_command(
    root: RootPlace,
    to: Annotated[
        Place, typer.Option("--to", metavar="PLACE", parser=as_given, help="The root of the fork, which is made.")
    ],
    of: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="ID|SAVEPOINT|now",
            help="A checkpoint, a savepoint by its name or folder, or what there is now.",
        ),
    ] = "now",
    tables: Annotated[
        str,
        typer.Option(metavar="suffix=TEXT", help="What the addresses of the fork's tables have more than the others'."),
    ] = "suffix=_next",
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="SINK=PATH", help="Where the fork's table of a sink is to be. May be repeated."),
    ] = None,
    file: PipelineFileIfAny = None,
    pipeline: PipelineName = None,
    timeout: Annotated[str, typer.Option(help="How long to wait for a checkpoint of the run.")] = "10m",
    as_json: AsJson = False,
) -> None:
    """Make a second pipeline with the same state, and tables of its own, beside the first.

    The one that runs notices nothing, but that it may be asked for a checkpoint. The fork's root is made with a copy of
    the checkpoint. Its Delta tables share the files of the others by hard links (on another file system they are
    copied): neither vacuum nor removal of the one takes a row from the other.

    Run a new version of the pipeline on the fork's root as it is: what its file would write to the tables of the first
    goes to the fork's, and no function (ForeachBatch) is called. Then compare (tidegate compare), and let it take the
    other's place (tidegate promote), or delete its root and tables.

    Example: tidegate fork --root state/orders --to state/orders-next

    Example: tidegate fork --root state/orders --from before-upgrade --to state/try --table revenue=lake/try_revenue
    """
    from tidegate.engine.forking import fork_root

    key, _, suffix = tables.partition("=")
    if key != "suffix" or not suffix:
        raise typer.BadParameter("write suffix=TEXT, such as suffix=_next", param_hint="--tables")
    made = fork_root(
        place_of(root),
        of,
        place_of(to),
        suffix=suffix,
        tables=as_pairs("--table", table or [], "SINK=PATH", "revenue=lake/revenue_next"),
        sinks=sinks_in(file, pipeline, place_of(root)),
        timeout_s=as_ms("timeout", timeout) / 1000,
    )
    if as_json:
        say(
            ForkAnswer(
                root=str(to),
                forked_root=str(root),
                pipeline=made.pipeline,
                made_from=made.made_from,
                tables=tuple(as_answer(each, made.originals[each.sink]) for each in made.tables),
                muted=made.muted,
            )
        )
        return
    out = console()
    out.print(f"pipeline {made.pipeline} is forked from {made.made_from} of {root}", markup=False, soft_wrap=True)
    print_tables(made.tables, out, made.originals)
    if made.muted:
        out.print(f"not called in the fork: {', '.join(made.muted)}", markup=False, soft_wrap=True)
    typer.echo(f"run it with: tidegate run FILE --root {to}")


def promote_command(
    root: RootPlace,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")] = False,
    yes: Yes = False,
    discard_others: Annotated[
        bool,
        typer.Option("--discard-others", help="Also lose what others have written to the tables since the fork."),
    ] = False,
    file: PipelineFileIfAny = None,
    pipeline: PipelineName = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Although a run seems alive, of either; that one is superseded.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let the tables of a fork take the place of those that it was made from.

    Neither pipeline may run. First it tells what that means, and asks. Each table gets a new version that shows what
    the fork's shows at its newest checkpoint; its history stays. From then on the fork is no fork any more: run it on
    its root, and it writes to these tables. The other pipeline can not: whoever starts it is refused.

    It is one decision, all tables or none. A crash in the middle is finished by the next run of the fork.

    Example: tidegate promote --root state/orders-next --dry-run

    Example: tidegate promote --root state/orders-next --yes
    """
    from tidegate.engine.forking import plan_promotion, promote_root

    refuse_to_ask(as_json=as_json, is_answered=yes or dry_run)
    sinks = sinks_in(file, pipeline, place_of(root))
    if dry_run:
        plan = plan_promotion(place_of(root), sinks)
        _tell(plan, as_json=as_json, is_done=False)
        if plan.refused is not None or (plan.others and not discard_others):
            raise typer.Exit(Exit.UNUSABLE_ROOT)
        return

    def confirm(plan: Promotion) -> bool:
        if not as_json:
            _print(plan, console())
        return yes or typer.confirm("promote the fork?")

    done = promote_root(
        place_of(root), discard_others=discard_others, sinks=sinks, take_over=take_over, confirm=confirm
    )
    if done is None:
        typer.echo("nothing was changed")
        raise typer.Exit(Exit.FAILED)
    if as_json:
        _tell(done, as_json=True, is_done=True)
    else:
        typer.echo(f"promoted: run the pipeline on {root} from now on; {done.replaced} can be deleted")


def _tell(plan: Promotion, *, as_json: bool, is_done: bool) -> None:
    if not as_json:
        _print(plan, console())
        return
    say(
        PromoteAnswer(
            root=plan.fork,
            replaced_root=plan.replaced,
            pipeline=plan.pipeline,
            is_done=is_done,
            checkpoint=plan.checkpoint,
            tables=tuple(as_answer(each, plan.sources[each.sink]) for each in plan.tables),
            left=plan.left,
        )
    )


def _print(plan: Promotion, out: Console) -> None:
    out.print(
        f"pipeline {plan.pipeline} on {plan.fork} takes the place of {plan.replaced}, at {plan.checkpoint}",
        markup=False,
        soft_wrap=True,
    )
    print_tables(plan.tables, out, plan.sources)
    for name in plan.left:
        out.print(f"sink {name}: the fork does not have it; its table stays as it is", markup=False, soft_wrap=True)
