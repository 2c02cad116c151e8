"""Chains: several stages that run as one Spark query. A stage is what a user writes, a query is what Spark runs.

Each hop costs a query, files written and files read. A stage that only passes rows on, from one input that nobody else
reads, needs none of it: its function is called with what the one of its input returned, and the plans are one.

A chain is known by its last stage, whose channel or table it writes. What Spark keeps for it (where it reads, its
state) belongs to its first stage, the only one that may have any. So a checkpoint holds every stage, however it was
run: what a chain's query stands at is the first one's, what it has written is the last one's, and between its stages
there is nothing. A pipeline may be chained otherwise when it goes on: what it stands at goes to the query that now
holds the stage. Where something is between two stages, they stay apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from tidegate.spark.definition import StageDefinition
from tidegate.storage.file_lists import SnapshotFiles
from tidegate.storage.manifest import Manifest, StageSnapshot

Chains = Mapping[str, tuple[str, ...]]
"""By the name of the last stage, those before it, the first one first. A stage by itself is in none."""


def may_join(definitions: Sequence[StageDefinition]) -> frozenset[str]:
    """Those that may run in the query of their input, by how they are written: what they do is still to be seen."""
    by_name = {each.name: each for each in definitions}
    readers = Counter(name for each in definitions for name in each.inputs)

    def may(stage: StageDefinition) -> bool:
        if len(stage.inputs) != 1:
            return False
        read = by_name[stage.inputs[0]]
        return readers[read.name] == 1 and all(each.chain and each.output_mode == "append" for each in (stage, read))

    return frozenset(each.name for each in definitions if may(each))


def as_queries(definitions: Iterable[StageDefinition], joined: Collection[str]) -> list[StageDefinition]:
    """What Spark is to run, each after those it reads, where these stages are `joined` to their inputs."""
    by_name = {each.name: each for each in definitions}
    found: dict[str, StageDefinition] = {}
    for each in by_name.values():
        if each.name in joined:
            read = found.pop(each.inputs[0])
            found[each.name] = msgspec.structs.replace(
                each, inputs=read.inputs, folder=read.folder, chained=(*read.chained, by_name[read.name])
            )
        else:
            found[each.name] = each
    return list(found.values())


def chains_of(queries: Iterable[StageDefinition]) -> dict[str, tuple[str, ...]]:
    return {each.name: tuple(stage.name for stage in each.chained) for each in queries if each.chained}


# -- in checkpoints ---------------------------------------------------------------------------------


def by_stage(snapshots: Mapping[str, StageSnapshot], chains: Chains) -> dict[str, StageSnapshot]:
    """What a checkpoint holds of every stage, of what was stored for every query."""
    found: dict[str, StageSnapshot] = {}
    for name, snapshot in snapshots.items():
        before: str | None = None
        for stage in (*chains.get(name, ()), name):
            part = snapshot
            if stage != name:
                part = msgspec.structs.replace(part, output_sequence=0, committable=None)
            if before is not None:
                part = msgspec.structs.replace(
                    part,
                    positions={before: 0},
                    files=SnapshotFiles(),
                    in_flight={},
                    source_positions=(),
                    new_bytes=0,
                    total_bytes=0,
                )
            found[stage] = part
            before = stage
    return found


def cannot_join(base: Manifest, chains: Chains) -> frozenset[str]:
    """Those that cannot go on in the query of their input, from this checkpoint.

    There may be something in flight to them. And batches are counted by the query, while a table has recorded how many
    it has of its sink: one that the query would count anew would be taken for one that the table shows.
    """
    found: set[str] = set()
    for name, before in chains.items():
        stages = (*before, name)
        head = base.stages[stages[0]]
        for read, stage in pairwise(stages):
            part = base.stages[stage]
            is_behind = part.positions.get(read, 0) != base.stages[read].output_sequence
            if is_behind or _number(part.cut) > _number(head.cut):
                found.add(stage)
                head = part
    return frozenset(found)


def _number(cut: int | None) -> int:
    return -1 if cut is None else cut


def by_query(stages: Mapping[str, StageSnapshot], queries: Iterable[StageDefinition]) -> dict[str, StageSnapshot]:
    """What each query goes on from, of what a checkpoint holds of every stage. All of them can."""
    return {
        each.name: msgspec.structs.replace(
            stages[each.head],
            output_sequence=stages[each.name].output_sequence,
            committable=stages[each.name].committable,
        )
        for each in queries
    }
