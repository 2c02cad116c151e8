"""Ctrl-C and SIGTERM before a command has begun anything."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Final

from tidegate.cli.exits import Exit

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def end_at_once(_number: int, _frame: FrameType | None) -> None:
    """Without an exception: what is being imported may swallow it, or tell it in a page of trace."""
    os._exit(Exit.INTERRUPTED)


def expect() -> None:
    """From here on both end the process at once and without a word: nothing is begun that would have to be ended."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_at_once)


def leave_to_python() -> None:
    """For a command that has children or files to take care of: Ctrl-C is an exception again."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is end_at_once:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
