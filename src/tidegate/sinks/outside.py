"""The sinks of a pipeline from outside: asked, and set back, without Spark and without a pipeline's file.

Delta tables and functions can be asked by what a manifest knows of them. A database cannot: its credentials are in the
pipeline alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec

from tidegate.errors import TidegateError
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks import function
from tidegate.sinks.contract import ReversibleSink, SinkPlace, decode_committable
from tidegate.sinks.delta.table import DeltaTable
from tidegate.sinks.staging import damaged_staging
from tidegate.storage.inspection import InspectedRoot, SeenSinks
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.storage.paths import RootPaths

REACHED: Final = frozenset(("delta", *function.KINDS))
"""The kinds of tables that a manifest knows enough of."""


def look_at_sinks(root: InspectedRoot, manifest: Manifest) -> SeenSinks:
    facts: dict[str, SinkFacts] = {}
    unseen: list[str] = []
    for name, sink in _sinks(root, manifest):
        found = _facts(sink)
        if found is None:
            unseen.append(name)
        else:
            facts[name] = found
    return SeenSinks(facts, tuple(unseen))


def damaged_stagings(root: InspectedRoot, manifest: Manifest) -> Iterator[tuple[str | None, str | None]]:
    """What of the rows that a checkpoint has sealed, and tables do not show yet, was changed, and what is gone: of each
    table that can be asked."""
    for name, sink in _sinks(root, manifest):
        sealed = manifest.stages[name].committable
        if sink is not None and sealed is not None:
            with suppress(TidegateError, OSError, msgspec.MsgspecError):  # the run will say why it cannot be read
                yield damaged_staging(sink, decode_committable(sealed))


def _sinks(root: InspectedRoot, manifest: Manifest) -> Iterator[tuple[str, ReversibleSink | None]]:
    """The sinks of a pipeline, by name; None: it cannot be asked."""
    for name, shape in manifest.shape.items():
        if shape.table is not None:
            place = SinkPlace(root.pipeline, name, root.files.at(RootPaths.sink(name)), root=root.id)
            yield name, sink_at(shape.table, place)


def _facts(sink: ReversibleSink | None) -> SinkFacts | None:
    try:
        return None if sink is None else sink.facts()
    except (TidegateError, OSError):
        return None  # a run that has the sink will say why it cannot be read


def sink_at(table: TableAddress, place: SinkPlace) -> ReversibleSink | None:
    """A sink by what a manifest knows of it; None: that is not enough."""
    if table.kind == "delta":
        return DeltaTable(table.address).bind(place)
    return function.ForeachBatch(print).bind(place) if table.kind in function.KINDS else None
