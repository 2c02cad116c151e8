"""The `tidegate` command."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from tidegate import __version__
from tidegate.cli import checkpoints, demo, graph, run, simulate, status, verify
from tidegate.cli.exits import code_of
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
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version  # acted upon by its callback


def main() -> None:
    """The one place where an error becomes a line on stderr and an exit code."""
    try:
        app(prog_name="tidegate")
    except TidegateError as error:
        logging.getLogger("tidegate").debug("the command failed", exc_info=True)
        is_terminal = sys.stderr.isatty()
        typer.echo(f"{typer.style('error:', fg='red') if is_terminal else 'error:'} {error}", err=True)
        sys.exit(code_of(error))
