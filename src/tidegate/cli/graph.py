"""`tidegate graph`: draw a pipeline's DAG."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.answers import GraphAnswer
from tidegate.cli.checkpoints import newest_manifest
from tidegate.cli.options import AsJson, RootPlaceIfAny, check_writable
from tidegate.cli.speech import say
from tidegate.cli.text import terminal_width
from tidegate.engine.graph import GraphStage, Table, drawn_stage, graph_of
from tidegate.engine.layout import DrawnStage
from tidegate.errors import ForeignRoot, NoRoot
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.places import Place


class Format(enum.StrEnum):
    TEXT = "text"
    MERMAID = "mermaid"
    SVG = "svg"


def graph_command(
    file: Annotated[Path | None, typer.Argument(exists=True, help="The Python file that defines it.")] = None,
    root: RootPlaceIfAny = None,
    form: Annotated[Format, typer.Option("--format", help="How to draw it.")] = Format.TEXT,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Write it to this file.")] = None,
    pipeline: Annotated[str | None, typer.Option(help="Which one, if the file defines several.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the stages of a pipeline and what each of them reads.

    Of a Python file it draws the pipeline as it is written there; of a root, as it was at the newest checkpoint, also
    which stages ran in the query of another. Neither starts Spark. In a terminal that is too narrow for the drawing it
    lists the stages with what they read.

    Example: tidegate graph orders.py

    Example: tidegate graph --root state/orders --format svg --out orders.svg
    """
    graph = _graph(file, root, pipeline)
    if as_json:
        say(graph)
        return
    stages = [drawn_stage(name, each) for name, each in graph.stages.items()]
    drawn = _drawn(stages, form, f"pipeline {graph.pipeline}", None if out is not None else terminal_width())
    if out is None:
        typer.echo(drawn, nl=not drawn.endswith("\n"))
    else:
        check_writable("--out", out)
        out.write_text(drawn, encoding="utf-8")


def _graph(file: Path | None, root: Place | None, pipeline: str | None) -> GraphAnswer:
    if file is not None and root is None:
        if file.is_dir():
            raise typer.BadParameter(f"{file} is a folder; of a root: tidegate graph --root {file}", param_hint="FILE")
        return _of_file(file, pipeline)
    if file is None and root is not None:
        return _of_root(root, pipeline)
    raise typer.BadParameter("draw either a file or a root: tidegate graph FILE, or tidegate graph --root PATH")


def _drawn(stages: list[DrawnStage], form: Format, title: str, width: int | None) -> str:
    """`width`: of the terminal that it is for, if it is for one. What is wider would be broken into pieces there."""
    if form is Format.MERMAID:
        from tidegate.cli.drawing.mermaid import as_mermaid

        return as_mermaid(stages)
    if form is Format.SVG:
        from tidegate.cli.drawing.svg import as_svg

        return as_svg(stages, title)
    from tidegate.cli.drawing.listing import as_list
    from tidegate.cli.drawing.text import as_text

    drawn = as_text(stages)
    if width is None or all(len(line) <= width for line in drawn.split("\n")):
        return drawn
    return as_list(stages, width)


def _of_root(root: Place, name: str | None) -> GraphAnswer:
    inspected, manifest = newest_manifest(root)
    if name not in (None, inspected.pipeline):
        raise ForeignRoot(f"{root} belongs to pipeline {inspected.pipeline!r}, not to {name!r}; name its own or none")
    if manifest is None:
        raise NoRoot(
            f"{root} has no checkpoint yet, so it does not say how pipeline {inspected.pipeline!r} looks; draw its "
            f"Python file instead: tidegate graph FILE"
        )
    checkpoint = checkpoint_name(manifest.checkpoint_id)
    return GraphAnswer(pipeline=inspected.pipeline, checkpoint=checkpoint, stages=graph_of(manifest))


def _of_file(file: Path, name: str | None) -> GraphAnswer:
    from tidegate.cli.load import load_pipeline

    pipeline = load_pipeline(file, name)
    stages = {
        each.name: GraphStage(
            each.kind,
            each.inputs,
            each.output_mode,
            None if each.sink is None else Table(each.sink.table.kind, each.sink.table.address),
        )
        for each in pipeline.validated()
    }
    return GraphAnswer(pipeline=pipeline.name, checkpoint=None, stages=stages)
