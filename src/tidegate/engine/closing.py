"""Closing windows: at the end of a pipeline's life what is still open is written out, with no row more to come.

A query closes what its watermark has passed. So when all is consumed, and while no source reads, watermarks are moved
to the end of time: first of the queries that no other query with event time comes before, then of what reads them,
because what comes out of one must not be late at the next. A watermark is moved where a query is rebuilt, so each such
*level* is a generation of its own. It drains, so that what came out is consumed, and ends with a checkpoint like any
other.

What is closed already is told by the checkpoint itself: the watermark of a stage is at the end of time. So whoever goes
on, after a failure too, closes what is left; and a run that is told nothing of it goes on with those watermarks, by
which every row that comes later is late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.protocol.messages import END_OF_TIME_MS

if TYPE_CHECKING:
    from tidegate.engine.generation import Generation
    from tidegate.engine.stage.running import RunningStage


def next_to_close(generation: Generation) -> frozenset[str]:
    """The queries whose watermarks are to be moved next: none, if nothing is open any more.

    One that has yet to run its first batch has nothing open; where what comes before it is closed, it may.
    """
    depths: dict[str, int] = {}
    for name, stage in generation.stages.items():  # each after those it reads
        before = max((depths.get(each, 0) for each in stage.definition.inputs), default=0)
        depths[name] = before + (stage.has_event_time and bool(stage.definition.inputs))
    is_open = [name for name, stage in generation.stages.items() if _is_open(stage)]
    level = min((depths[name] for name in is_open), default=0)
    return frozenset(name for name in is_open if depths[name] == level)


def _is_open(stage: RunningStage) -> bool:
    has_run = bool(stage.definition.inputs) and stage.progress.batch >= 0
    return has_run and stage.has_event_time and not is_closed(stage)


def is_closed(stage: RunningStage) -> bool:
    """Whether a row that it reads would be late, whatever its time."""
    return stage.has_event_time and (stage.progress.watermark_ms or 0) >= END_OF_TIME_MS


def cannot_close(generation: Generation) -> str | None:
    """Why windows cannot be closed, if they cannot: those of a source would be, only by a batch of it."""
    if generation.elsewhere:
        return (
            "several instances run the pipeline, and windows are closed by a run alone: stop them, start it without "
            "--instance, and ask that to"
        )
    for name, shape in generation.shape.items():
        if shape.kind == "source" and shape.has_event_time and (shape.state is None or shape.state.operators):
            return (
                f"source {name!r} has windows, or other state by event time, of its own, and cannot close them without "
                f"reading on; make a stage of that part of it"
            )
    return None
