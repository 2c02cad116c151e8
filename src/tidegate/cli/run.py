"""`tidegate run`: run the pipeline that a Python file defines."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, chdir, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tidegate.cli.answers import EndedEvent
from tidegate.cli.exits import Exit
from tidegate.cli.options import RootFolder
from tidegate.cli.speech import say
from tidegate.engine.status import RunStatus, StartingStep, now

if TYPE_CHECKING:
    from tidegate.cli.view import View


def run_command(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The Python file that defines it.")],
    root: RootFolder,
    checkpoint_interval: Annotated[str, typer.Option(help="How often to take a checkpoint.")] = "10s",
    unaligned_after: Annotated[
        str | None,
        typer.Option(
            help="How long a stage may take to align a checkpoint, until it captures what is in flight; 0s: at once."
        ),
    ] = None,
    retain: Annotated[
        str,
        typer.Option(
            help="How many checkpoints that differ to keep, or for how long: 24h keeps the newest 3, and one an hour."
        ),
    ] = "3",
    max_backlog: Annotated[
        str, typer.Option(help="How much of a stage's output its slowest reader may be behind, until it is held back.")
    ] = "256MB",
    max_backlog_segments: Annotated[
        int, typer.Option(min=1, help="The same in segments: what one batch has written is one.")
    ] = 1_000,
    commit_timeout: Annotated[str, typer.Option(help="How long the commit of an epoch to a table may take.")] = "10m",
    available_now: Annotated[bool, typer.Option("--available-now", help="Stop when all input is consumed.")] = False,
    pipeline: Annotated[str | None, typer.Option(help="Which one, if the file defines several.")] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Start although another run seems alive; that one is superseded.")
    ] = False,
    conf: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE", help="A setting of Spark's, such as spark.jars.packages; may be repeated."),
    ] = [],  # noqa: B006 - typer copies it
    fsync: Annotated[
        bool,
        typer.Option(
            "--fsync/--no-fsync", help="Force checkpoints to the disk; without, a loss of power may cost the newest."
        ),
    ] = True,
    restarts: Annotated[int, typer.Option(min=0, help="How often to restart after a stage has failed.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per event instead of text.")] = False,
) -> None:
    """Run a pipeline until it is stopped, or until all its input is consumed.

    Relative paths in the file are taken from its folder, those of options from where you are.

    Ctrl-C or SIGTERM stops it after a last checkpoint; a second one at once. Started again, it goes on from the
    newest checkpoint, whatever ended it.

    Example: tidegate run orders.py --root state/orders --checkpoint-interval 5s

    Example: tidegate run orders.py --root state/orders --conf spark.jars=kafka.jar --conf spark.driver.memory=4g
    """
    settings = [each.partition("=") for each in conf]
    if not all(key and equals for key, equals, _ in settings):
        raise typer.BadParameter("write KEY=VALUE, such as spark.driver.memory=4g", param_hint="--conf")
    # Not above: other commands need not wait for these.
    from rich.console import Console

    from tidegate.cli.load import load_pipeline
    from tidegate.cli.view import JsonView, LiveView, LogView
    from tidegate.engine.run import run_pipeline
    from tidegate.spark.session import in_place
    from tidegate.storage.files import plain_path

    given = in_place({key: value for key, _, value in settings})
    root = plain_path(root)
    view = JsonView() if as_json else LiveView(Console()) if sys.stdout.isatty() else LogView()
    try:
        with view, ExitStack() as here:
            show = _shown(view)
            show(StartingStep(step="loading", since=now()))
            chosen = load_pipeline(file, pipeline, to_run=True)
            here.enter_context(chdir(chosen.folder))
            run_pipeline(
                chosen,
                root,
                view=show,
                on_step=show,
                checkpoint_interval=checkpoint_interval,
                unaligned_after=unaligned_after,
                retain=retain,
                max_backlog=max_backlog,
                max_backlog_segments=max_backlog_segments,
                commit_timeout=commit_timeout,
                available_now=available_now,
                take_over=take_over,
                fsync=fsync,
                restarts=restarts,
                conf=given,
            )
    except KeyboardInterrupt as interrupt:
        _end_at_once(str(interrupt) or "stopped while it was starting", as_json)


def _end_at_once(why: str, as_json: bool) -> NoReturn:
    """Without waiting for threads, as Python does before it ends: what hangs in one was the reason to interrupt."""
    with suppress(OSError):
        if as_json:
            say(EndedEvent(state="interrupted", why=why, exit=Exit.INTERRUPTED))
        sys.stdout.flush()
        typer.echo(f"{why}; the next run goes on from the newest checkpoint, if there is one", err=True)
    os._exit(Exit.INTERRUPTED)


def _shown(view: View) -> Callable[[RunStatus | StartingStep], None]:
    """The view of a run, which goes on if what it does cannot be shown."""
    has_failed = False

    def show(what: RunStatus | StartingStep) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            if isinstance(what, StartingStep):
                view.starting(what)
            else:
                view.update(what)
        except OSError:
            raise  # there is nowhere to show it any more
        except Exception:
            has_failed = True
            logging.getLogger("tidegate").exception("what the run does cannot be shown any more; it goes on")

    return show
