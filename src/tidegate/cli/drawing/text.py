"""A DAG drawn with box characters, from left to right.

How it reads, and what the tests follow: a line leaves a stage in the middle of its right side and may fork; each of
its ends, an arrow, is one reader. Lines of different stages never join. Where two cross, the vertical one goes over
the other (`─│─`); `┼` is a fork of one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tidegate.engine.layout import DrawnStage, Place, layered

_LEFT, _RIGHT, _UP, _DOWN = 1, 2, 4, 8
_LINES: Final = {
    _LEFT | _RIGHT: "─",
    _UP | _DOWN: "│",
    _RIGHT | _DOWN: "┌",
    _LEFT | _DOWN: "┐",
    _RIGHT | _UP: "└",
    _LEFT | _UP: "┘",
    _UP | _DOWN | _RIGHT: "├",
    _UP | _DOWN | _LEFT: "┤",
    _LEFT | _RIGHT | _DOWN: "┬",
    _LEFT | _RIGHT | _UP: "┴",
    _LEFT | _RIGHT | _UP | _DOWN: "┼",
}
_ARROW: Final = "▶"


def as_text(stages: Sequence[DrawnStage]) -> str:
    layers = layered(stages)
    canvas = _Canvas()
    left = 0
    for layer in layers:
        width = max(_width(place) for place in layer)
        for place in layer:
            if place.stage is None:
                canvas.across(place.output_of, place.row, left - 1, left + width)
            else:
                _draw_stage(canvas, place, place.stage, left, width)
        left += width
        if layer is not layers[-1]:
            left += _draw_gap(canvas, layer, left)
    return canvas.text()


def _width(place: Place) -> int:
    if place.stage is None:
        return 1
    return max(len(place.stage.name), len(place.stage.kind) + 2, len(place.stage.note) + 2) + 4


def _draw_stage(canvas: _Canvas, place: Place, stage: DrawnStage, left: int, width: int) -> None:
    inner = width - 2
    bottom = place.row + place.height - 1
    canvas.write(place.row, left, f"┌{f' {stage.kind} ':─^{inner}}┐")
    for row in range(place.row + 1, bottom):
        said = stage.name if row == place.exit_row else ""
        canvas.write(row, left, f"│{said:^{inner}}│")
    note = f" {stage.note} " if stage.note else ""
    canvas.write(bottom, left, f"└{note:─^{inner}}┘")


# -- the lines between two layers -----------------------------------------------------------------


class _Line(msgspec.Struct, eq=False):
    """The line of one output through a gap: the row where it starts, and those where its readers take it up."""

    output_of: str
    start: int
    ends: list[int]

    @property
    def is_straight(self) -> bool:
        return self.ends == [self.start]


class _Stroke(msgspec.Struct, eq=False):
    """A vertical stroke of a line. Nearly every line has one; a line that needs two goes on `after` its first."""

    line: _Line
    enters: int
    leaves: list[int]
    column: int = 0
    after: _Stroke | None = None


def _draw_gap(canvas: _Canvas, layer: Sequence[Place], left: int) -> int:
    """Draw what lies between a layer and the next. Returns how many columns it takes."""
    sources = [place for place in layer if place.outputs]
    lines = [
        _Line(place.output_of, place.exit_row, [target.entry_row(place) for target in place.outputs])
        for place in sources
    ]
    strokes = _strokes(lines)
    for index, stroke in enumerate(strokes):
        stroke.column = left + 2 + 2 * index
    width = 4 + 2 * len(strokes)
    right = left + width
    for line in lines:
        if line.is_straight:
            canvas.across(line.output_of, line.start, left - 1, right)
    for stroke in strokes:
        name = stroke.line.output_of
        start = left - 1 if stroke.after is None else stroke.after.column
        canvas.across(name, stroke.enters, start, stroke.column)
        canvas.down(name, stroke.column, [stroke.enters, *stroke.leaves])
        if stroke.leaves == stroke.line.ends:
            for row in stroke.leaves:
                canvas.across(name, row, stroke.column, right)
    for place in sources:
        for target in place.outputs:
            if target.stage is not None:
                canvas.write(target.entry_row(place), right - 1, _ARROW)
    return width


def _strokes(lines: Sequence[_Line]) -> list[_Stroke]:
    """The vertical strokes, from left to right, so that no two lines lie on one row.

    Where a line ends at the row at which another starts, the other must have turned off before: its stroke stands
    further left. If lines ask that of one another in a circle, one of them takes a detour over a free row.
    """
    strokes: list[_Stroke] = []
    detours: list[_Stroke] = []
    used = {row for line in lines for row in (line.start, *line.ends)}
    left = [line for line in lines if not line.is_straight]
    while left:
        free = [line for line in left if not any(other.start in line.ends for other in left if other is not line)]
        line = free[0] if free else left[0]
        left.remove(line)
        if free:
            strokes.append(_Stroke(line, line.start, line.ends))
            continue
        row = _free_row(line.start, used)
        used.add(row)
        first = _Stroke(line, line.start, [row])
        strokes.append(first)
        detours.append(_Stroke(line, row, line.ends, after=first))
    return strokes + detours


def _free_row(near: int, used: set[int]) -> int:
    """The free row that is nearest; below all others there is always one."""
    candidates = (row for row in range(max(used) + 2) if row not in used)
    return min(candidates, key=lambda row: abs(row - near))


class _Canvas:
    """Characters at rows and columns. Lines are kept as the directions in which they leave each cell, so that corners
    and forks come out by themselves."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, int], str] = {}
        self._lines: dict[tuple[int, int], dict[str, int]] = {}

    def write(self, row: int, column: int, text: str) -> None:
        for offset, character in enumerate(text):
            self._written[row, column + offset] = character

    def across(self, line: str, row: int, left: int, right: int) -> None:
        for column in range(left, right + 1):
            self._add(line, row, column, (_LEFT if column > left else 0) | (_RIGHT if column < right else 0))

    def down(self, line: str, column: int, rows: Sequence[int]) -> None:
        top, bottom = min(rows), max(rows)
        for row in range(top, bottom + 1):
            self._add(line, row, column, (_UP if row > top else 0) | (_DOWN if row < bottom else 0))

    def _add(self, line: str, row: int, column: int, directions: int) -> None:
        lines = self._lines.setdefault((row, column), {})
        lines[line] = lines.get(line, 0) | directions

    def _character(self, row: int, column: int) -> str:
        written = self._written.get((row, column))
        if written is not None:
            return written
        lines = self._lines.get((row, column))
        if lines is None:
            return " "
        if len(lines) > 1:
            return _LINES[_UP | _DOWN]  # they cross: the vertical one goes over the other
        return _LINES[next(iter(lines.values()))]

    def text(self) -> str:
        cells = [*self._written, *self._lines]
        height = max((row for row, _ in cells), default=-1) + 1
        width = max((column for _, column in cells), default=-1) + 1
        rows = ("".join(self._character(row, column) for column in range(width)) for row in range(height))
        return "\n".join(row.rstrip() for row in rows)
