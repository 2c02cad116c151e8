"""Saying an answer, or an event of a run, to the script that asked with `--json`.

Stdout is for these alone: what a user's own functions print, and Spark, goes to stderr.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

import msgspec

from tidegate.cli.answers import Answer, ErrorAnswer, ErrorEvent, Event
from tidegate.cli.exits import Exit

_reserved: list[TextIO] = []


def is_wanted(arguments: list[str]) -> bool:
    """Whether somebody wants JSON. Asked of the words themselves: those that cannot be parsed are answered too."""
    return "--json" in arguments[: arguments.index("--") if "--" in arguments else None]


def reserve_stdout() -> None:
    """From here on stdout is stderr to all but `say`."""
    sys.stdout.flush()
    _reserved.append(os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def is_reserved() -> bool:
    return bool(_reserved)


def stream() -> TextIO:
    """Where answers go."""
    return _reserved[-1] if _reserved else sys.stdout


def say(what: Answer | Event) -> None:
    print(msgspec.json.encode(what).decode(), file=stream(), flush=True)


def say_error(arguments: list[str], error: str, message: str, code: Exit, *, retry_helps: bool = False) -> None:
    """An error in place of an answer; of a run it is the last event."""
    command = next((each for each in arguments if not each.startswith("-")), None)
    kind = ErrorEvent if command == "run" else ErrorAnswer
    say(kind(error=error, message=message, retry_helps=retry_helps, exit=code))
