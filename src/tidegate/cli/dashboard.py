"""`tidegate dashboard`: roots, shown in a browser."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tidegate.cli.answers import DashboardAnswer
from tidegate.cli.options import AsJson
from tidegate.cli.speech import say
from tidegate.errors import InvalidConfig
from tidegate.storage.places import Place, as_given

if TYPE_CHECKING:
    from tidegate.dashboard.server import Dashboard
    from tidegate.dashboard.token import Token

PORT: Final = 8472


def dashboard_command(
    root: Annotated[
        list[Place],
        typer.Option("--root", metavar="PLACE", parser=as_given, help="A pipeline's root; may be repeated."),
    ],
    host: Annotated[str, typer.Option(help="The address that it listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port that it listens on; 0: a free one.")] = PORT,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Let whoever has the token ask runs for something.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="The file with the token; it is made, for you alone, if it is not there."),
    ] = None,
    allow_host: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="Another name by which it is reached, as behind a proxy; then everything needs the token.",
        ),
    ] = [],  # noqa: B006 - typer takes it as it is
    as_json: AsJson = False,
) -> None:
    """Show pipelines in a browser: what they do, their checkpoints, tables and history.

    It is a process of its own that only reads the roots, of folders and of buckets, so it outlives the runs, shows
    several pipelines, and opens no port in a driver. It starts no Spark. What it shows is under /api/v1 for scripts
    too, and as metrics for Prometheus under /metrics. It runs until it is stopped, by Ctrl-C or SIGTERM.

    Nobody but this machine reaches it, unless --host says so, or --allow-host that a proxy stands before it: then every
    request needs the token, and so does every action (checkpoint, savepoint, cancel, stop), which --allow-actions
    allows. The token is in --token-file, or in the variable TIDEGATE_DASHBOARD_TOKEN, or in a file under
    ~/.local/state/tidegate.

    Needs the extra: pip install 'tidegate[dashboard]'.

    Example: tidegate dashboard --root state/orders

    Example: tidegate dashboard --root state/orders --root s3://bucket/payments --port 8080 --allow-actions
    """
    board, token = open_dashboard(
        root, host, port, allow_actions=allow_actions, token_file=token_file, hosts=allow_host
    )
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with board:
        source = None if token is None else token.source
        if as_json:
            say(DashboardAnswer(url=board.url, roots=board.roots, actions_allowed=allow_actions, token=source))
        else:
            typer.echo(f"the dashboard is at {board.url}")
            if token is not None:
                typer.echo(f"its token is in {token.source}")
        while board.is_serving and not stopped.wait(0.5):
            pass


def open_dashboard(
    roots: list[Place],
    host: str = "127.0.0.1",
    port: int = PORT,
    *,
    allow_actions: bool = False,
    token_file: Path | None = None,
    hosts: list[str] | None = None,
) -> tuple[Dashboard, Token | None]:
    """One that listens; as a context it answers."""
    try:
        from tidegate.dashboard.guard import is_open
        from tidegate.dashboard.server import Dashboard
        from tidegate.dashboard.token import token_in
    except ImportError as error:
        raise InvalidConfig("for a dashboard install Tidegate with it: pip install 'tidegate[dashboard]'") from error
    needs_token = allow_actions or not is_open(host, hosts or ())
    if token_file is not None and not needs_token:
        raise InvalidConfig(
            "--token-file has no effect: on loopback only actions need a token; give --allow-actions too"
        )
    token = token_in(token_file) if needs_token else None
    board = Dashboard(roots, host, port, allow_actions=allow_actions, token=token, more_hosts=hosts or ())
    return board, token
