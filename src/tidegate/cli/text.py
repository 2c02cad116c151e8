"""How times, sizes and tables look in every command."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

_UNITS: Final = ("kB", "MB", "GB", "TB")
_NO_LIMIT: Final = 100_000
_MS_PER_YEAR: Final = 31_556_952_000


def terminal_width() -> int | None:
    """Of the terminal that answers are written to; None: they go to a file or another program, which have none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def console() -> Console:
    """For what a command answers. A file or a pipe gets every line whole."""
    return Console(highlight=False, width=terminal_width() or _NO_LIMIT)


def plain_table(left: Sequence[str], right: Sequence[str] = (), *, title: str | None = None) -> Table:
    """A table with columns of words, then columns of numbers, close together: it should fit into a small terminal."""
    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def counted(number: int, unit: str) -> str:
    """1 row, 2,000 rows."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def as_bytes(size: int) -> str:
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in _UNITS:
        value /= 1000
        if value < 1000 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}"


def as_duration(ms: int | float) -> str:
    """Milliseconds as one reads them: 850 ms, 4.2 s, 3 min 20 s, 5 h 12 min."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    minutes, seconds = divmod(round(ms / 1000), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def as_time(moment: str | int) -> str:
    """An ISO time, or milliseconds since 1970, in UTC, to the second.

    Milliseconds come from watermarks, and so from the times in a user's rows: they can be any, also of a year that no
    calendar of ours has. Of such a moment the year is told, more or less.
    """
    try:
        at = datetime.fromtimestamp(moment / 1000, UTC) if isinstance(moment, int) else datetime.fromisoformat(moment)
    except (ValueError, OverflowError, OSError):
        return f"about year {1970 + moment // _MS_PER_YEAR}" if isinstance(moment, int) else moment
    return f"{at:%Y-%m-%d %H:%M:%S}"


def age(moment: str) -> str:
    """How long ago an ISO time was."""
    return as_duration(max(0.0, (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds() * 1000))
