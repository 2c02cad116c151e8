"""Sinks that a pipeline parts with: those that are gone, and those that go on under another name.

A table's record of a sink, and what is staged for it, are known by the sink's name. So it must show all that the
checkpoint has sealed before another name counts, which then has a record of its own: whichever version of the pipeline
is started next, and whatever crashes meanwhile, no row is shown twice or left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from tidegate.engine.changes import Meant, TakenUp
from tidegate.engine.root import SeenRoot
from tidegate.engine.tables import address_of, bound, check_goes_on, described, goes_on_from_rows, has_log, unshown_rows
from tidegate.errors import RecoveryRefused
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks import outside
from tidegate.sinks.contract import BoundSink, Committable, ProbingSink, SinkPlace, decode_committable
from tidegate.sinks.staging import shown
from tidegate.spark.definition import StageDefinition
from tidegate.storage.manifest import Manifest, TableAddress

_ONCE_MORE: Final = (
    "start the pipeline as it was once more and stop it when its tables show its last checkpoint (`tidegate stop`, or "
    "`--available-now`, does)"
)


class Parted(msgspec.Struct, frozen=True):
    """`base`: what the pipeline starts from, with what sinks of another name do. `before`: what it has parted with, as
    far as it can be reached."""

    base: Manifest
    before: tuple[BoundSink, ...]
    told: tuple[str, ...]


Reach = Callable[[TableAddress, SinkPlace], BoundSink | None]
"""A sink that the pipeline has no more, by what the checkpoint knows of it; None: that is not enough."""


def part(
    taken: TakenUp,
    definitions: Iterable[StageDefinition],
    root: SeenRoot,
    log: DecisionLog,
    meant: Meant,
    reach: Reach = outside.sink_at,
) -> Parted:
    """Refuse to part with a sink whose table does not show all that was sealed for it."""
    base, before, told = taken.base, list[BoundSink](), list[str]()
    for each in taken.those("removed", "sink"):
        table = taken.then.shape[each.name].table
        sink = None if table is None else reach(table, root.place_of(each.name))
        if sink is None:
            told += _gone_unseen(taken.then, each.name, meant)
        elif table is None or table.kind != "delta" or has_log(table.address):  # else its table is gone as well
            _check_gone(taken.then, sink)
            before.append(sink)
    described = {each.name: each.sink for each in definitions if each.sink is not None}
    for each in taken.those("renamed", "sink"):
        then, now = (bound(described[each.name], root.place_of(name)) for name in (each.was or "", each.name))
        check_renamed(taken.then, then, now, log, root)
        base = _with_nothing_sealed(base, each.name)
        before.append(then)
    return Parted(base, tuple(before), tuple(told))


def _check_gone(then: Manifest, sink: BoundSink) -> None:
    name, since = sink.place.stage, checkpoint_name(then.checkpoint_id)
    if rows := unshown_rows(then, name, sink.facts()):
        raise RecoveryRefused(
            f"sink {name!r} is gone since {since}, but {rows} rows that were sealed for it {sink.describe()} does not "
            f"show yet, and would never show. What to do: {_ONCE_MORE}, and remove it then; nothing was changed"
        )


def _gone_unseen(then: Manifest, name: str, meant: Meant) -> list[str]:
    """Of a table that cannot be asked any more: its credentials were in the pipeline."""
    since, table = checkpoint_name(then.checkpoint_id), then.shape[name].table
    rows = unshown_rows(then, name, SinkFacts())
    if not rows:
        return []
    what = (
        f"sink {name!r} is gone since {since}, and whether {'its table' if table is None else described(table)} shows "
        f"the last {rows} rows that were sealed for it cannot be asked without it"
    )
    if name not in meant.dropped_state:
        raise RecoveryRefused(
            f"{what}. What to do: {_ONCE_MORE}, then give --allow-dropped-state {name}; nothing was changed"
        )
    return [f"{what}: that was allowed"]


def check_renamed(then: Manifest, before: BoundSink, now: BoundSink, log: DecisionLog, root: SeenRoot) -> None:
    """`before`, `now`: the sink by its old name and by its new one. `then`: the checkpoint, which knows the old one."""
    old, new, since = before.place.stage, now.place.stage, checkpoint_name(then.checkpoint_id)
    what = f"sink {old!r} cannot go on as {new!r}"
    if log.newest is None or log.newest.checkpoint_id != then.checkpoint_id:
        raise RecoveryRefused(
            f"{what} from {since}, which is not the newest checkpoint: a run that still lives could commit a newer one "
            f"under the old name. What to do: start the pipeline as it was, and rename the sink when a checkpoint "
            f"of it is complete; nothing was changed"
        )
    if goes_on_from_rows(then, old):
        is_there = before.probe() if isinstance(before, ProbingSink) else True
        check_goes_on(before, address_of(before) if is_there else None, then, log, root.store)
    facts, own = before.facts(), now.facts()
    if rows := unshown_rows(then, old, facts):
        raise RecoveryRefused(
            f"{what}: {rows} rows that {since} has sealed for it {before.describe()} does not show yet, and what it "
            f"shows is recorded by the sink's name. What to do: {_ONCE_MORE}, and rename it then; nothing was changed"
        )
    cut = then.stages[old].cut
    if facts.committed_epoch > then.epoch or own.committed_epoch > then.epoch or own.next_batch > _next(cut):
        raise RecoveryRefused(
            f"{what}: {before.describe()} shows {old!r} {shown(facts.next_batch)} and {new!r} {shown(own.next_batch)}, "
            f"but {since} has come to batch {cut}. What to do: give the sink another name; nothing was changed"
        )


def _next(cut: int | None) -> int:
    return 0 if cut is None else cut + 1


def _with_nothing_sealed(base: Manifest, name: str) -> Manifest:
    """All that was sealed is shown, by the record of another name."""
    stage = base.stages[name]
    through = -1 if stage.committable is None else decode_committable(stage.committable).through_batch
    stages = {**base.stages, name: msgspec.structs.replace(stage, committable=Committable(through).encode())}
    return msgspec.structs.replace(base, stages=stages)
