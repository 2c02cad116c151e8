"""`tidegate checkpoint`, `cancel` and `stop`: what a run that is alive is asked for from another terminal."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from tidegate.cli.answers import CancelledAnswer, StoppedAnswer, TakenAnswer
from tidegate.cli.options import AsJson, RootPlace
from tidegate.cli.speech import say
from tidegate.cli.text import as_bytes, as_duration
from tidegate.engine.requests import StopRun, TakeCheckpoint, ask_for_checkpoint, ask_to_cancel, ask_to_stop
from tidegate.engine.stopping import before_the_end
from tidegate.protocol.config import as_ms
from tidegate.storage.inspection import InspectedRoot

_CLOSING: Final = (
    "closing windows: what is open is written out as it is, though rows may be missing in it, and rows that come later "
    "are dropped by the stages that held it, also by the next run; `tidegate restore` goes back to a checkpoint before"
)


def checkpoint_command(
    root: RootPlace,
    full: Annotated[
        bool, typer.Option("--full", help="Store all of the state anew, not only what has changed.")
    ] = False,
    unaligned: Annotated[
        bool, typer.Option("--unaligned", help="Let stages capture what is in flight at once, instead of aligning.")
    ] = False,
    timeout: Annotated[str, typer.Option(help="How long to wait for it.")] = "60s",
    as_json: AsJson = False,
) -> None:
    """Have a checkpoint taken now by the run that is alive on a root.

    Ends when the checkpoint is complete and every table shows it. It holds what the sources had committed when it was
    begun; rows that had just arrived may be in the next one. If one is in progress when you ask, the one after it is
    taken for you. Exits with 6 if no run is alive, with 1 if it was aborted.

    With --full it refers to no file of another checkpoint. With --unaligned it does not wait for slow stages; only a
    run that was started with --unaligned-after takes one like that.

    Example: tidegate checkpoint --root state/orders

    Example: tidegate checkpoint --root state/orders --full --timeout 10m
    """
    inspected = InspectedRoot(root)
    wanted = TakeCheckpoint(full=full, unaligned=unaligned)
    taken = ask_for_checkpoint(inspected.place, _seconds(timeout), wanted)
    if as_json:
        say(TakenAnswer(root=str(root), pipeline=inspected.pipeline, checkpoint=taken))
    else:
        typer.echo(
            f"{taken.checkpoint} complete in {as_duration(taken.duration_ms or 0)}, {as_bytes(taken.new_bytes or 0)} "
            f"new of {as_bytes(taken.total_bytes or 0)}{'' if taken.aligned else f', {taken.alignment}'}"
        )


def cancel_command(
    root: RootPlace,
    timeout: Annotated[str, typer.Option(help="How long to wait for the run to answer.")] = "60s",
    as_json: AsJson = False,
) -> None:
    """Cancel the checkpoint that is in progress in the run that is alive on a root.

    The run goes on, and takes the next one when it is due; a cancelled one does not count as a failure. One that is
    being decided cannot be cancelled any more. Exits with 0 if one was cancelled, or none was in progress, with 6 if no
    run is alive, with 1 if it was too late.

    Example: tidegate cancel --root state/orders
    """
    inspected = InspectedRoot(root)
    answer = ask_to_cancel(inspected.place, _seconds(timeout))
    if as_json:
        say(CancelledAnswer(root=str(root), pipeline=inspected.pipeline, checkpoints=answer.checkpoints))
        return
    for each in answer.checkpoints:
        typer.echo(f"{each.checkpoint} cancelled{'; the run is stopping, and takes another' if each.drain else ''}")
    if not answer.checkpoints:
        typer.echo("no checkpoint is in progress, so none was cancelled")


def stop_command(
    root: RootPlace,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it has ended, and exit by how it did.")
    ] = True,
    full: Annotated[
        bool, typer.Option("--full", help="Let the last checkpoint store all of the state anew, not only what changed.")
    ] = False,
    drain: Annotated[
        bool,
        typer.Option("--drain", help="Let the sources read no more, and every stage consume what they have, first."),
    ] = False,
    close_windows: Annotated[
        bool,
        typer.Option(
            "--close-windows",
            help="Drain, then close and write out what is open: windows, sessions, joins. For the end of its life.",
        ),
    ] = False,
    timeout: Annotated[str, typer.Option(help="How long to wait for it.")] = "10m",
    as_json: AsJson = False,
) -> None:
    """Stop the run that is alive on a root, after a last checkpoint, as Ctrl-C does.

    Ends when the run has ended and has given up the root: with 0 if it did well, with 1 if not, or if it has not done
    what was asked for. A run that is starting stops as soon as it has started. With --no-wait it ends when the run has
    heard. Exits with 6 if no run is alive.

    With --drain the sources stop at once, and the last checkpoint is taken when every stage has consumed what they have
    read, batches without data included. It takes as long as that takes; Ctrl-C or SIGTERM to the run skips the rest of
    it. With --close-windows, which drains too, watermarks are then moved to the end of time, so that what is open is
    written out as it is. That is for good: a run that goes on from there drops all rows that come later at those
    stages, for they are late. With --full the last checkpoint refers to no file of another.

    Example: tidegate stop --root state/orders

    Example: tidegate stop --root state/orders --timeout 1h && tidegate run orders.py --root state/orders

    Example: tidegate stop --root state/orders --drain --full

    Example: tidegate stop --root state/orders --close-windows
    """
    inspected = InspectedRoot(root)
    wanted = StopRun(full=full, drain=drain, close_windows=close_windows)
    tell_what_closing_means(wanted, as_json=as_json)
    why = ask_to_stop(inspected.place, _seconds(timeout), wanted, is_awaited=wait)
    if as_json:
        say(
            StoppedAnswer(
                root=str(root),
                pipeline=inspected.pipeline,
                state="stopping" if why is None else "finished",
                why=why,
            )
        )
    elif why is None:
        typer.echo(f"pipeline {inspected.pipeline} is stopping, after {before_the_end(wanted)}")
    else:
        typer.echo(f"pipeline {inspected.pipeline} has ended well, because {why}")


def tell_what_closing_means(wanted: StopRun, *, as_json: bool) -> None:
    """To a person at a terminal, before it is asked for."""
    if wanted.close_windows and sys.stderr.isatty() and not as_json:
        typer.echo(_CLOSING, err=True)


def _seconds(timeout: str) -> float:
    return as_ms("timeout", timeout) / 1000
