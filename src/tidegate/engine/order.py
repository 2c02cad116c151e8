"""Which stages must keep rows in order, for the sake of a table where a later row takes the place of an earlier one.

Within a batch rows have no order: Spark packs files into tasks by their size. Between batches they have one. So a stage
keeps the order of what it reads if each of its batches reads one segment at most. Between the inputs of a stage there
is no order to be kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tidegate.sinks.contract import OrderedSink
from tidegate.spark.definition import StageDefinition


def in_order(definitions: Sequence[StageDefinition], aggregating: Collection[str]) -> frozenset[str]:
    """Those of the stages, each given after those it reads, that may read one segment a batch only.

    They are those on the way to a sink that needs order. One that aggregates writes each of its groups once a batch,
    whatever it has read in one, so the way begins there; unless what it reads is updates, of which the last counts.
    """
    updated: set[str] = set()
    """Those that read updates, from near or far."""
    writes_updates: set[str] = set()
    for each in definitions:
        if not writes_updates.isdisjoint(each.inputs):
            updated.add(each.name)
        if each.name in updated or each.output_mode != "append":
            writes_updates.add(each.name)
    found: set[str] = set()
    wanted = {each.name for each in definitions if isinstance(each.sink, OrderedSink) and each.sink.needs_order}
    for each in reversed(definitions):
        if each.name in wanted and each.inputs and (each.name not in aggregating or each.name in updated):
            found.add(each.name)
            wanted.update(each.inputs)
    return frozenset(found)
