"""What the one that leads a generation tells each instance of it: which queries there are, what they start from, and
who runs which. It is a file in the generation's folder, written before anybody is ordered to run anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql.types import StructType

from tidegate.engine.chains import as_queries
from tidegate.engine.part import Part
from tidegate.errors import DamagedCheckpoint, PipelineChanged, StageFailed
from tidegate.protocol.config import CheckpointConfig
from tidegate.spark import queries
from tidegate.spark.definition import StageDefinition
from tidegate.spark.plan import has_state
from tidegate.spark.session import StageSessions
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, StageShape
from tidegate.storage.mounted import Mounted
from tidegate.storage.paths import RootPaths

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidegate.engine.fitting import SparkFitting


class Briefing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`base` is what the pipeline starts from, as it is now; `joined`, the stages that run in the query of their input;
    `schemas`, of what each stage writes, as Spark's JSON; `in_order`, those that read one segment a batch."""

    shape: dict[str, StageShape]
    base: Manifest | None
    joined: tuple[str, ...]
    schemas: dict[str, str]
    in_order: tuple[str, ...]
    placed: dict[str, tuple[str, ...]]
    incarnations: dict[str, str]
    config: CheckpointConfig
    drift_ms: int | None = None
    available_now: bool = False
    holds_sources: bool = False

    def part(self, own: Part) -> Part:
        """What this process has to do with it."""
        return msgspec.structs.replace(own, placed=self.placed, incarnations=self.incarnations)


_decoder: Final = msgspec.json.Decoder(Briefing)


def brief(fitting: SparkFitting, part: Part, config: CheckpointConfig, drift_ms: int | None, **how: bool) -> Briefing:
    return Briefing(
        shape=fitting.shape,
        base=fitting.base,
        joined=fitting.joined,
        schemas={name: each.schema.json() for name, each in fitting.built.items()},
        in_order=tuple(sorted(fitting.in_order)),
        placed=dict(part.placed),
        incarnations=dict(part.incarnations),
        config=config,
        drift_ms=drift_ms,
        **how,
    )


def write_briefing(root: Files, generation: int, briefing: Briefing) -> None:
    root.at("", durable=False).write(RootPaths.briefing(generation), msgspec.json.encode(briefing))


def read_briefing(root: Files, generation: int) -> Briefing | None:
    """None: the generation is over, and cleaned up."""
    data = root.read(RootPaths.briefing(generation))
    try:
        return None if data is None else _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise DamagedCheckpoint(f"{root.location(RootPaths.briefing(generation))} cannot be read: {error}") from error


def check_same(definitions: Sequence[StageDefinition], briefing: Briefing) -> None:
    """Refuse to run a part of another pipeline than the one that the leader has."""
    own = {each.name: (each.kind, each.inputs, each.output_mode) for each in definitions}
    told = {name: (each.kind, each.inputs, each.output_mode) for name, each in briefing.shape.items()}
    if own != told:
        differing = sorted(name for name in own.keys() | told.keys() if own.get(name) != told.get(name))
        raise PipelineChanged(
            f"the pipeline here is not the one of the instance that leads: {', '.join(differing)} differ. What to do: "
            f"start all instances with the same version of it"
        )


def build_part(
    definitions: Sequence[StageDefinition],
    briefing: Briefing,
    part: Part,
    work: Files,
    session: SparkSession,
    number: int,
) -> tuple[list[StageDefinition], dict[str, queries.Built]]:
    """The queries of a generation, and what those functions return whose stages run here."""
    check_same(definitions, briefing)
    found = as_queries(definitions, briefing.joined)
    sessions = StageSessions(session, keeps_state=isinstance(work, Mounted))
    schemas = {name: StructType.fromJson(json.loads(text)) for name, text in briefing.schemas.items()}
    by_name = {each.name: each for each in definitions}  # in a chain, the last one reads what the first one does
    built: dict[str, queries.Built] = {}
    for query in found:
        if not part.runs(query.name):
            continue
        for stage in (by_name[each.name] for each in query.members):
            if stage.name not in briefing.joined:
                gates = {each: work.at(RootPaths.gate(number, stage.name, each)) for each in stage.inputs}
                for each in stage.inputs:
                    work.make_folder(RootPaths.gate(number, stage.name, each))  # which Spark looks for
                built[stage.name] = queries.build(
                    stage, sessions, gates, {each: schemas[each] for each in stage.inputs}
                )
            else:
                built[stage.name] = _joined(stage, built[stage.inputs[0]], briefing)
            _check_schema(stage, built[stage.name], briefing)
    return found, built


def _joined(stage: StageDefinition, read: queries.Built, briefing: Briefing) -> queries.Built:
    is_head = stage.inputs[0] not in briefing.joined
    built = queries.build_onto(stage, read, is_sealed_off=is_head and has_state(read.frame))
    if built is None:
        raise StageFailed(stage.name, "it does not run in the query of its input here, as it does where it is led from")
    return built


def _check_schema(stage: StageDefinition, built: queries.Built, briefing: Briefing) -> None:
    own, told = built.schema.simpleString(), briefing.shape[stage.name].schema
    if own != told:
        raise PipelineChanged(
            f"stage {stage.name!r} returns {own} here, and {told} at the instance that leads. What to do: start all "
            f"instances with the same version of the pipeline"
        )
