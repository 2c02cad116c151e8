"""A DAG as a Mermaid flowchart, for documents that render those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidegate.engine.layout import DrawnStage

_SHAPES: Final = {"source": ("([", "])"), "sink": ("[(", ")]")}
_ESCAPED: Final = str.maketrans({'"': "#quot;", "<": "#lt;", ">": "#gt;", "#": "#35;"})


def as_mermaid(stages: Sequence[DrawnStage]) -> str:
    # Stages are numbered: some names, such as `end`, mean something to Mermaid.
    numbers = {stage.name: f"s{index}" for index, stage in enumerate(stages)}
    lines = ["flowchart LR"]
    for stage in stages:
        opening, closing = _SHAPES.get(stage.kind, ("[", "]"))
        lines.append(f'    {numbers[stage.name]}{opening}"{stage.name.translate(_ESCAPED)}"{closing}')
    queries = {stage.name: stage.chained_into or stage.name for stage in stages}
    for stage in stages:
        # Within a query no rows are written on the way.
        arrows = {name: "==>" if queries[name] == queries[stage.name] else "-->" for name in stage.inputs}
        lines += [f"    {numbers[name]} {arrow} {numbers[stage.name]}" for name, arrow in arrows.items()]
    return "\n".join(lines) + "\n"
