"""The `tidegate` command."""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate import __version__
from tidegate.cli import demo, run, simulate

app = typer.Typer(
    name="tidegate",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help="Consistent, distributed checkpoints for PySpark streaming pipelines.",
)
app.command("run")(run.run_command)
app.command("simulate")(simulate.simulate_command)
app.command("demo")(demo.demo_command)


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
    app()
