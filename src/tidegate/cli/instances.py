"""`tidegate run --instances 3`: several processes here that run one pipeline together, for trying it out."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import IO, Final, NoReturn

import typer

from tidegate.cli.exits import Exit
from tidegate.errors import TidegateError
from tidegate.storage.places import Place

_LOOK_EVERY_S: Final = 0.2
_STOPS_IN_S: Final = 300


def run_instances(root: Place, how_many: int, as_json: bool) -> NoReturn:
    """Start them with the command line that this process has, each under a name of its own, and wait for all.

    Ctrl-C, or SIGTERM, stops the pipeline: one of them is asked to, whichever leads. A second one kills them.
    """
    if as_json:
        raise typer.BadParameter("--json is for one instance at a time: start each with --instance")
    names = [f"i{number}" for number in range(1, how_many + 1)]
    instances = {name: _start(name) for name in names}
    tellers = [_telling(name, each.stdout) for name, each in instances.items()]
    signals = _Signals()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signals)
    asked = False
    while any(each.poll() is None for each in instances.values()):
        time.sleep(_LOOK_EVERY_S)
        if signals.count == 1 and not asked:
            asked = True
            threading.Thread(target=_ask_to_stop, args=(root,), daemon=True).start()
        elif signals.count > 1:
            for each in instances.values():
                each.kill()
    for teller in tellers:
        teller.join(5)
    codes = [each.wait() for each in instances.values()]
    raise typer.Exit(Exit.INTERRUPTED if signals.count > 1 else max(abs(code) for code in codes))


class _Signals:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _number: int, _frame: object) -> None:
        self.count += 1


def _start(name: str) -> subprocess.Popen[str]:
    """In a group of its own: Ctrl-C comes to this process only, which asks them to stop in order."""
    command = [sys.executable, "-m", "tidegate", *sys.argv[1:], "--instance", name]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def _telling(name: str, said: IO[str] | None) -> threading.Thread:
    teller = threading.Thread(target=_tell, args=(name, said), daemon=True)
    teller.start()
    return teller


def _tell(name: str, said: IO[str] | None) -> None:
    for line in said or ():
        sys.stdout.write(f"{name} | {line}")
        sys.stdout.flush()


def _ask_to_stop(root: Place) -> None:
    from tidegate.engine.requests import StopRun, ask_to_stop
    from tidegate.storage.inspection import InspectedRoot

    try:
        inspected = InspectedRoot(root)
        ask_to_stop(inspected.place, _STOPS_IN_S, StopRun(), is_awaited=False)
    except TidegateError as error:
        typer.echo(f"they could not be stopped in order: {error}; press Ctrl-C once more to kill them", err=True)
