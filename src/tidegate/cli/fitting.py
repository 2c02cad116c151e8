"""Tables and lines that fit a terminal: whole columns are left out, never a part of a number.

Nothing here knows what it shows. A width of None is that of a file or a pipe: there is no limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

_GAP: Final = 1
_WIDE_GAP: Final = 2
_SHORTEST_NAME: Final = 12
_CUT: Final = "…"


class Column(msgspec.Struct, frozen=True):
    """A column beside the one of names.

    `rank`: the lower, the longer it stays where there is little room. `short`: what its cells say where not all columns
    have room as they are. `least`: how wide it is at least, so that the table does not jump when its cells change.
    """

    heading: str
    cells: Sequence[Text]
    rank: int
    is_number: bool = True
    short: Sequence[Text] | None = None
    least: int = 0

    @property
    def width(self) -> int:
        return max(self.least, cell_len(self.heading), *(cell.cell_len for cell in self.cells), 0)

    def shortened(self) -> Column:
        return (
            self
            if self.short is None
            else Column(self.heading, self.short, self.rank, self.is_number, least=self.least)
        )


class FittedTable(msgspec.Struct, frozen=True):
    """`is_whole`: nothing was left out or shortened but names."""

    heading: str
    names: Sequence[str]
    name_width: int
    columns: Sequence[Column]
    is_whole: bool
    gap: int = _GAP

    @property
    def width(self) -> int:
        return self.name_width + sum(self.gap + column.width for column in self.columns)

    def head(self, *, ruled: bool) -> list[Text]:
        line = Text(style="bold")
        line.append(_padded(Text(self.heading), self.name_width, is_number=False))
        for column in self.columns:
            line.append(" " * self.gap)
            line.append(_padded(Text(column.heading), column.width, is_number=column.is_number))
        line.rstrip()
        return [line, Text("─" * self.width)] if ruled else [line]

    def rows(self, which: Iterable[int] | None = None) -> list[Text]:
        """The rows of these numbers, or all."""
        lines = []
        for index in range(len(self.names)) if which is None else which:
            line = _padded(Text(self.names[index]), self.name_width, is_number=False)
            for column in self.columns:
                line.append(" " * self.gap)
                line.append(_padded(column.cells[index].copy(), column.width, is_number=column.is_number))
            line.rstrip()
            lines.append(line)
        return lines

    def lines(self) -> list[Text]:
        return [*self.head(ruled=True), *self.rows()]


def _padded(text: Text, width: int, *, is_number: bool) -> Text:
    missing = " " * (width - text.cell_len)
    return Text.assemble(missing, text) if is_number else Text.assemble(text, missing)


def fitted(heading: str, names: Sequence[str], columns: Sequence[Column], width: int | None) -> FittedTable:
    """The table as it fits: with all columns, or with those of the lowest ranks, and names shortened if need be."""
    longest = max(cell_len(heading), *(cell_len(name) for name in names), 0)
    if width is None:
        return FittedTable(heading, names, longest, columns, is_whole=True, gap=_WIDE_GAP)
    for gap in (_WIDE_GAP, _GAP):
        whole = FittedTable(heading, names, longest, columns, is_whole=True, gap=gap)
        if whole.width <= width:
            return whole
    least = min(longest, max(_SHORTEST_NAME, width // 3))
    chosen: list[Column] = []
    room = width - least
    for column in sorted((each.shortened() for each in columns), key=lambda each: each.rank):
        if _GAP + column.width <= room:
            chosen.append(column)
            room -= _GAP + column.width
    shown = [column for each in columns if (column := each.shortened()) in chosen]
    name_width = min(longest, least + room)
    return FittedTable(
        shortened([heading], name_width)[0], shortened(names, name_width), name_width, shown, is_whole=False
    )


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Each name in at most that many characters, without its middle if need be, so that none stands for another."""
    return [
        name if len(name) <= width else _without_middle(name, number, names, width)
        for number, name in enumerate(names, start=1)
    ]


def _without_middle(name: str, number: int, names: Sequence[str], width: int) -> str:
    kept = max(0, width - len(_CUT))
    # The two ends as alike as possible.
    for head in sorted(range(kept + 1), key=lambda each: abs(each - (kept + 1) // 2)):
        start, end = name[:head], name[len(name) - (kept - head) :]
        if [start, end] != ["", ""] and not any(_may_be(other, start, end) for other in names if other != name):
            return f"{start}{_CUT}{end}"
    marked = f"{_CUT}{number}"  # no two have the same place
    return f"{name[: max(0, width - len(marked))]}{marked}"


def _may_be(name: str, start: str, end: str) -> bool:
    return len(name) >= len(start) + len(end) and name.startswith(start) and name.endswith(end)


def first_that_fits(width: int | None, *candidates: str) -> str:
    """The first of several ways to say something that has room on a line; the last one if none has."""
    return next((each for each in candidates if width is None or cell_len(each) <= width), candidates[-1])


def wrapped(text: Text, width: int | None) -> list[Text]:
    """A text on as many lines as it takes; words stay whole where they can."""
    if width is None:
        return [Text(" ".join(text.plain.splitlines()), style=text.style)]
    lines = text.wrap(Console(width=width), width, overflow="fold")
    for line in lines:
        line.rstrip()
    return list(lines)


def cut_off(lines: Sequence[Text], count: int, width: int) -> list[Text]:
    """The first of these lines; where that is not all, the last one says so."""
    if len(lines) <= count:
        return list(lines)
    shown = [line.copy() for line in lines[:count]]
    words = shown[-1].plain.split(" ")
    while len(words) > 1 and cell_len(" ".join([*words, _CUT])) > width:
        words.pop()
    shown[-1] = Text(set_cell_size(" ".join(words), min(cell_len(" ".join(words)), width - 2)), style=shown[-1].style)
    shown[-1].append(f" {_CUT}")
    return shown
