"""`tidegate graph`: draw a pipeline's DAG."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.checkpoints import newest_manifest
from tidegate.cli.drawing.layout import DrawnStage
from tidegate.cli.options import check_writable
from tidegate.errors import ForeignRoot, NoRoot


class Format(enum.StrEnum):
    TEXT = "text"
    MERMAID = "mermaid"
    SVG = "svg"


def graph_command(
    target: Annotated[Path, typer.Argument(exists=True, help="A pipeline's Python file, or the root of one.")],
    form: Annotated[Format, typer.Option("--format", help="How to draw it.")] = Format.TEXT,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Write it to this file.")] = None,
    pipeline: Annotated[str | None, typer.Option(help="Which one, if the file defines several.")] = None,
) -> None:
    """Draw the stages of a pipeline and what each of them reads.

    Of a Python file it draws the pipeline as it is written there; of a root, as it was at the newest checkpoint.
    Neither starts Spark.

    Example: tidegate graph orders.py

    Example: tidegate graph state/orders --format svg --out orders.svg
    """
    name, stages = _of_root(target, pipeline) if target.is_dir() else _of_file(target, pipeline)
    drawn = _drawn(stages, form, f"pipeline {name}")
    if out is None:
        typer.echo(drawn, nl=not drawn.endswith("\n"))
    else:
        check_writable("--out", out)
        out.write_text(drawn, encoding="utf-8")


def _drawn(stages: list[DrawnStage], form: Format, title: str) -> str:
    if form is Format.MERMAID:
        from tidegate.cli.drawing.mermaid import as_mermaid

        return as_mermaid(stages)
    if form is Format.SVG:
        from tidegate.cli.drawing.svg import as_svg

        return as_svg(stages, title)
    from tidegate.cli.drawing.text import as_text

    return as_text(stages)


def _of_root(root: Path, name: str | None) -> tuple[str, list[DrawnStage]]:
    inspected, manifest = newest_manifest(root)
    if name not in (None, inspected.pipeline):
        raise ForeignRoot(f"{root} belongs to pipeline {inspected.pipeline!r}, not to {name!r}; name its own or none")
    if manifest is None:
        raise NoRoot(
            f"{root} has no checkpoint yet, so it does not say how pipeline {inspected.pipeline!r} looks; draw its "
            f"Python file instead: tidegate graph FILE"
        )
    return inspected.pipeline, [
        _stage(name, shape.kind, shape.inputs, shape.output_mode) for name, shape in manifest.shape.items()
    ]


def _of_file(file: Path, name: str | None) -> tuple[str, list[DrawnStage]]:
    from tidegate.cli.load import load_pipeline

    pipeline = load_pipeline(file, name)
    return pipeline.name, [_stage(each.name, each.kind, each.inputs, each.output_mode) for each in pipeline.validated()]


def _stage(name: str, kind: str, inputs: tuple[str, ...], output_mode: str) -> DrawnStage:
    return DrawnStage(name, kind, inputs, "" if output_mode == "append" else output_mode)
