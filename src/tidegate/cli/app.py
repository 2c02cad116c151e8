"""The `tidegate` command."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup

from tidegate import __version__
from tidegate.cli import (
    checkpoints,
    compare,
    dashboard,
    demo,
    diff,
    fork,
    graph,
    history,
    inspect,
    interrupts,
    plan,
    requests,
    restore,
    run,
    savepoint,
    simulate,
    speech,
    status,
    verify,
)
from tidegate.cli.exits import Exit, code_of
from tidegate.errors import TidegateError
from tidegate.storage.system import say, told

# What typer raises of a command line that is wrong. It has no public name for it.
_WRONG_USAGE: Final[Any] = typer.BadParameter.__base__


class _Commands(TyperGroup):
    """Tells wrong usage to a script too: typer itself tells it to people and ends the process."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _wrong_usage_told():
            return super().make_context(*args, **kwargs)

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        with _wrong_usage_told():
            return super().invoke(*args, **kwargs)


@contextmanager
def _wrong_usage_told() -> Iterator[None]:
    try:
        yield
    except _WRONG_USAGE as error:
        if speech.is_wanted(sys.argv[1:]):
            of = "tidegate" if error.ctx is None else error.ctx.command_path
            message = f"{error.format_message().rstrip('.')}; see {of} --help"
            speech.say_error(sys.argv[1:], "WrongUsage", message, Exit.WRONG_USAGE)
        raise


app = typer.Typer(
    name="tidegate",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help="Consistent, distributed checkpoints for PySpark streaming pipelines.",
)
app.command("run")(run.run_command)
app.command("plan")(plan.plan_command)
app.command("status")(status.status_command)
app.command("checkpoint")(requests.checkpoint_command)
app.command("cancel")(requests.cancel_command)
app.command("stop")(requests.stop_command)
app.command("checkpoints")(checkpoints.checkpoints_command)
app.command("history")(history.history_command)
app.command("verify")(verify.verify_command)
app.command("restore")(restore.restore_command)
app.add_typer(savepoint.app, name="savepoint")
app.command("savepoints")(savepoint.savepoints_command)
app.command("fork")(fork.fork_command)
app.command("promote")(fork.promote_command)
app.command("inspect")(inspect.inspect_command)
app.command("diff")(diff.diff_command)
app.command("compare")(compare.compare_command)
app.command("graph")(graph.graph_command)
app.command("dashboard")(dashboard.dashboard_command)
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
    """The one place where an error becomes a line on stderr and an exit code, and an answer where JSON is wanted."""
    _prepare_streams()
    wants_json = speech.is_wanted(sys.argv[1:])
    if wants_json:
        speech.reserve_stdout()
    try:
        _run_command(wants_json)
    except OSError as error:
        if not _stdout_is_broken():
            logging.getLogger("tidegate").debug("the command failed", exc_info=True)
            _fail(told(error), Exit.FAILED)
        # What is left in the buffer would be tried again at the end, and end it with a code of Python's own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), speech.stream().fileno())
        _fail(f"the answer could not be written to stdout: {error.strerror}", Exit.FAILED)


def _run_command(wants_json: bool) -> None:
    try:
        app(prog_name="tidegate")
    except TidegateError as error:
        logging.getLogger("tidegate").debug("the command failed", exc_info=True)
        code = code_of(error)
        if wants_json:
            name = type(error).__name__
            speech.say_error(sys.argv[1:], name, str(error), code, retry_helps=error.retry_helps)
        _fail(str(error), code)
    except Exception as error:
        # Nobody has foreseen it: its trace follows on stderr, unless it is of the system's.
        if wants_json and not (isinstance(error, OSError) and _stdout_is_broken()):
            name = type(error).__name__
            speech.say_error(sys.argv[1:], name, say(error) or name, Exit.FAILED)
        raise


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
        print(end="" if speech.is_reserved() else "\n", file=speech.stream(), flush=True)
    except OSError:
        return True
    return False
