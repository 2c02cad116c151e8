"""A DAG as an SVG picture that reads on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

from tidegate.engine.layout import DrawnStage, Place, layered

_ROW: Final = 22  # the height of a row of the layout, in pixels
_CHARACTER: Final = 8
_GAP: Final = 70
_MARGIN: Final = 12

_STYLE: Final = """
  text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #1f2933; text-anchor: middle }
  .kind { font-size: 10px; fill: #616e7c }
  rect { fill: #f5f7fa; stroke: #7b8794 }
  .source rect { fill: #e3f8ff; stroke: #2bb0ed }
  .sink rect { fill: #e3f9e5; stroke: #3f9142 }
  path { fill: none; stroke: #7b8794; stroke-width: 1.5 }
  marker path { fill: #7b8794; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb }
    .kind { fill: #9aa5b1 }
    rect { fill: #1f2933; stroke: #9aa5b1 }
    .source rect { fill: #03324a; stroke: #2bb0ed }
    .sink rect { fill: #0b3d17; stroke: #57ae5b }
    path { stroke: #9aa5b1 }
    marker path { fill: #9aa5b1 }
  }
"""
_ARROW: Final = (
    '<marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 L10 5 L0 10 z"/></marker>'
)


def as_svg(stages: Sequence[DrawnStage], title: str) -> str:
    layers = layered(stages)
    lefts: list[int] = []
    widths: list[int] = []
    right = _MARGIN
    for layer in layers:
        lefts.append(right)
        widths.append(max(_width(place) for place in layer))
        right += widths[-1] + _GAP
    places = [place for layer in layers for place in layer]
    width = right - _GAP + _MARGIN
    height = max((place.row + place.height for place in places), default=0) * _ROW + 2 * _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f"<defs>{_ARROW}</defs>",
    ]
    for place in places:
        left, size = lefts[place.layer], widths[place.layer]
        if place.stage is None:
            lines.append(f'<path d="M{left} {_middle(place.row)} h{size}"/>')
        else:
            lines.append(_stage(place, place.stage, left, size))
        lines += [_edge(place, target, left + size, lefts[target.layer]) for target in place.outputs]
    return "\n".join([*lines, "</svg>", ""])


def _width(place: Place) -> int:
    if place.stage is None:
        return 0
    words = (place.stage.name, f"{place.stage.kind} · {place.stage.note}")
    return max(len(word) for word in words) * _CHARACTER + 24


def _middle(row: int) -> int:
    return _MARGIN + row * _ROW + _ROW // 2


def _stage(place: Place, stage: DrawnStage, left: int, width: int) -> str:
    top = _MARGIN + place.row * _ROW + _ROW // 4
    height = place.height * _ROW - _ROW // 2
    center = left + width // 2
    kind = f"{stage.kind} · {stage.note}" if stage.note else stage.kind
    return (
        f'<g class="{escape(stage.kind)}"><rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6"/>'
        f'<text class="kind" x="{center}" y="{top + 14}">{escape(kind)}</text>'
        f'<text x="{center}" y="{top + height // 2 + 10}">{escape(stage.name)}</text></g>'
    )


def _edge(source: Place, target: Place, start: int, end: int) -> str:
    top, bottom = _middle(source.exit_row), _middle(target.entry_row(source))
    bend = (start + end) // 2
    arrow = "" if target.stage is None else ' marker-end="url(#arrow)"'
    return f'<path d="M{start} {top} C{bend} {top} {bend} {bottom} {end} {bottom}"{arrow}/>'
