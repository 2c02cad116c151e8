"""What shows of a start before Spark is: whether a pipeline as it is written fits a checkpoint and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tidegate.engine.changes import Meant, check_written
from tidegate.engine.parting import part
from tidegate.engine.root import SeenRoot
from tidegate.engine.tables import address_of, bound, check_goes_on, goes_on_from_rows
from tidegate.protocol.decision_log import DecisionLog
from tidegate.sinks.contract import BoundSink, ProbingSink
from tidegate.spark.definition import StageDefinition
from tidegate.storage.manifest import Manifest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def bound_sinks(
    root: SeenRoot, definitions: Iterable[StageDefinition], session: SparkSession | None = None
) -> dict[str, BoundSink]:
    """The sinks of a pipeline at their places."""
    return {
        each.name: bound(each.sink, root.place_of(each.name, session)) for each in definitions if each.sink is not None
    }


def check_foreseen(
    root: SeenRoot,
    definitions: Sequence[StageDefinition],
    sinks: Mapping[str, BoundSink],
    meant: Meant,
    log: DecisionLog,
    base: Manifest | None,
) -> None:
    """Refuse what shows already. All of it is looked at again when functions were called, which is what counts."""
    if base is not None:
        taken = check_written(root.store, base, definitions, meant)
        base = part(taken, definitions, root, log, meant).base
    elif log.newest is None:  # else it has yet to be seen which checkpoint it is
        meant.check_has_effect()
    for name, sink in sinks.items():
        is_there = sink.probe() if isinstance(sink, ProbingSink) else True
        if base is not None and goes_on_from_rows(base, name):
            check_goes_on(sink, address_of(sink) if is_there else None, base, log, root.store)
