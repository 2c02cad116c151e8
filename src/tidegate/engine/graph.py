"""A pipeline's DAG as it was at a checkpoint, and what a drawing says of it.

Importing this brings no PySpark.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tidegate.engine.layout import DrawnStage
from tidegate.storage.manifest import Manifest, StageKind


class Table(msgspec.Struct, frozen=True):
    """Where the rows of a sink are."""

    kind: Annotated[str, Meta(description="such as `delta` or `postgres`")]
    address: Annotated[str, Meta(description="its path or its name, without credentials")]


class GraphStage(msgspec.Struct, frozen=True):
    """A stage of a pipeline's DAG."""

    kind: Annotated[StageKind, Meta(description="what it is")]
    inputs: Annotated[tuple[str, ...], Meta(description="the stages that it reads")]
    output_mode: Annotated[str, Meta(description="Spark's: `append`, `update` or `complete`")]
    table: Annotated[Table | None, Meta(description="of a sink; null of other stages")] = None
    chained_into: Annotated[
        str | None,
        Meta(
            description="the stage in whose query it ran; null: it had its own, or was the last of those in it, or "
            "that is not known, as of a file: it is decided when a run starts"
        ),
    ] = None


def graph_of(manifest: Manifest) -> dict[str, GraphStage]:
    """The pipeline as it was at a checkpoint."""
    chained = {each: name for name, before in manifest.chains.items() for each in before}
    return {
        name: GraphStage(
            shape.kind,
            shape.inputs,
            shape.output_mode,
            None if shape.table is None else Table(shape.table.kind, shape.table.address),
            chained.get(name),
        )
        for name, shape in manifest.shape.items()
    }


def drawn_stage(name: str, stage: GraphStage) -> DrawnStage:
    """What a drawing says of it."""
    note = "" if stage.output_mode == "append" else stage.output_mode
    if stage.chained_into is not None:
        note = f"in {stage.chained_into}"
    return DrawnStage(name, stage.kind, stage.inputs, note, stage.chained_into)
