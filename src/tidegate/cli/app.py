"""The `tidegate` command."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tidegate import __version__
from tidegate.cli import checkpoints, demo, graph, interrupts, run, simulate, status, verify
from tidegate.cli.exits import Exit, code_of
from tidegate.errors import TidegateError

app = typer.Typer(
    name="tidegate",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help="Consistent, distributed checkpoints for PySpark streaming pipelines.",
)
app.command("run")(run.run_command)
app.command("status")(status.status_command)
app.command("checkpoint")(status.checkpoint_command)
app.command("checkpoints")(checkpoints.checkpoints_command)
app.command("verify")(verify.verify_command)
app.command("graph")(graph.graph_command)
app.command("demo")(demo.demo_command)
app.command("simulate")(simulate.simulate_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidegate {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version  # acted upon by its callback
    if context.invoked_subcommand != "run":  # that has yet to import Spark, and to load the pipeline
        interrupts.leave_to_python()


def main() -> None:
    """The one place where an error becomes a line on stderr and an exit code."""
    _prepare_streams()
    try:
        app(prog_name="tidegate")
    except TidegateError as error:
        logging.getLogger("tidegate").debug("the command failed", exc_info=True)
        _fail(str(error), code_of(error))
    except OSError as error:
        if not _stdout_is_broken():
            raise
        # What is left in the buffer would be tried again at the end, and end it with a code of Python's own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"the answer could not be written to stdout: {error.strerror}", Exit.FAILED)


def _fail(message: str, code: Exit) -> NoReturn:
    is_terminal = sys.stderr.isatty()
    typer.echo(f"{typer.style('error:', fg='red') if is_terminal else 'error:'} {message}", err=True)
    sys.exit(code)


def _prepare_streams() -> None:
    """Who has closed a stream wants to hear nothing on it; who reads ASCII gets a ? for what that lacks."""
    nowhere = Path(os.devnull)
    sys.stdout = sys.stdout or nowhere.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or nowhere.open("w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _stdout_is_broken() -> bool:
    """Whether the system refuses what is written there, as on a full disk. The error itself does not say where."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False
