"""A DAG as a list of its stages and what each of them reads: for where a drawing has no room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tidegate.engine.layout import DrawnStage

_READS: Final = "◀ "
_GAP: Final = "  "


def as_list(stages: Sequence[DrawnStage], width: int) -> str:
    """One stage below the other, each after those it reads, and no line wider than `width`, unless a name is."""
    heads = [_GAP.join((f"{_kind(stage):<{max(len(_kind(each)) for each in stages)}}", stage.name)) for stage in stages]
    beside = max((len(head) for head in heads), default=0) + len(_GAP)
    widest = max((len(name) for stage in stages for name in stage.inputs), default=0) + len(_READS) + 1
    if beside + widest <= width:
        blocks = [list(_beside(head, stage.inputs, beside, width)) for head, stage in zip(heads, stages, strict=True)]
    else:
        blocks = [_below(head, stage, width) for head, stage in zip(heads, stages, strict=True)]
    return "\n".join(line.rstrip() for block in blocks for line in block)


def _kind(stage: DrawnStage) -> str:
    return f"{stage.kind} ({stage.note})" if stage.note else stage.kind


def _beside(head: str, inputs: Sequence[str], column: int, width: int) -> Iterator[str]:
    """What a stage reads stands to its right, on as many lines as it takes."""
    line = f"{head:<{column}}{_READS if inputs else ''}"
    for index, name in enumerate(inputs):
        word = name if index == len(inputs) - 1 else f"{name}, "
        if len(line) + len(word.rstrip()) > width:
            yield line
            line = " " * (column + len(_READS))
        line += word
    yield line


def _below(head: str, stage: DrawnStage, width: int) -> list[str]:
    """What a stage reads stands under it, where names are too long to stand side by side."""
    heads = [head] if len(head) <= width else [_kind(stage), f"{_GAP}{stage.name}"]
    return [*heads, *(f"{_GAP}{_READS}{name}" for name in stage.inputs)]
