"""A pipeline that has changed since its checkpoint: what of it may have, and what stages that are new start from.

A stage that is new starts empty, behind the checkpoint's barrier: it gets what its inputs write from then on. So all
tables still show the same, but for what a new one has not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tidegate.errors import PipelineChanged
from tidegate.protocol.aligner import CutCause
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import Committable
from tidegate.spark.definition import StageDefinition
from tidegate.storage.file_lists import SnapshotFiles
from tidegate.storage.manifest import Manifest, StageShape, StageSnapshot

_WRITTEN: Final = ("kind", "inputs", "output_mode")
"""What of a stage is known as soon as its file is loaded."""


def check_shape(
    manifest: Manifest, shape: Mapping[str, StageShape], compared: tuple[str, ...] = (*_WRITTEN, "schema")
) -> None:
    """Refuse a pipeline that lacks stages of its checkpoint, or in which one of them has become another."""
    name = checkpoint_name(manifest.checkpoint_id)
    hint = "start the changed pipeline on a new root with new tables, or change it back"
    if gone := manifest.shape.keys() - shape.keys():
        raise PipelineChanged(f"the pipeline no longer fits {name}: stage {min(gone)!r} is gone; {hint}")
    for stage, then in manifest.shape.items():
        now = shape[stage]
        for field in compared:
            if getattr(then, field) != getattr(now, field):
                raise PipelineChanged(
                    f"the pipeline no longer fits {name}: stage {stage!r} had {field} {getattr(then, field)}, now "
                    f"{getattr(now, field)}; {hint}"
                )


def check_written(manifest: Manifest, definitions: Iterable[StageDefinition]) -> None:
    """The same of a pipeline as it is written, before its functions are called."""
    shape = {each.name: StageShape(each.kind, each.inputs, each.output_mode, "") for each in definitions}
    check_shape(manifest, shape, _WRITTEN)


def new_stages(manifest: Manifest, shape: Mapping[str, StageShape]) -> list[str]:
    """Those that the checkpoint does not know, in the order of the pipeline."""
    return [name for name in shape if name not in manifest.stages]


def told_of_new(manifest: Manifest, shape: Mapping[str, StageShape]) -> list[str]:
    """What that means, for people."""
    since = checkpoint_name(manifest.checkpoint_id)
    return [
        f"{shape[name].kind} {name!r} is new since {since}: it "
        + ("starts where it says itself" if shape[name].kind == "source" else "gets what its inputs write behind that")
        for name in new_stages(manifest, shape)
    ]


def with_new_stages(manifest: Manifest, shape: Mapping[str, StageShape]) -> Manifest:
    """The checkpoint as if it had been taken with the stages that are new, each before its first batch."""
    known = manifest.stages
    new = {
        name: _before_its_first_batch(
            {each: known[each].output_sequence if each in known else 0 for each in shape[name].inputs},
            is_sink=shape[name].kind == "sink",
        )
        for name in new_stages(manifest, shape)
    }
    return msgspec.structs.replace(
        manifest,
        stages={**known, **new},
        shape={**manifest.shape, **{name: shape[name] for name in new}},
    )


def _before_its_first_batch(positions: dict[str, int], *, is_sink: bool) -> StageSnapshot:
    return StageSnapshot(
        cut=None,
        cause=CutCause.ALIGNED,
        over_bound=False,
        files=SnapshotFiles(),
        positions=positions,
        output_sequence=0,
        in_flight={},
        source_positions=(),
        watermark_ms=None,
        committable=Committable(-1).encode() if is_sink else None,
        barrier_ms=0,
        alignment_ms=0,
        snapshot_ms=0,
        new_bytes=0,
        total_bytes=0,
    )
