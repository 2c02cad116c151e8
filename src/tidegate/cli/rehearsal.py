"""`tidegate verify --deep`: whether the queries of a pipeline would run from a checkpoint."""

from __future__ import annotations

from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from tidegate.cli.answers import Rehearsal, RehearsedQuery
from tidegate.errors import ForeignRoot
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.places import Place, place_of
from tidegate.storage.scratch import scratch

_OUTCOMES: Final = {
    "ran": "would run: it has run a batch without rows",
    "planned": "would run: it has planned its next batch, and was stopped before it read any",
    "idle": "would run: it has taken up its place, where there is nothing new to read",
}


def rehearsed(root: Place, checkpoint: int | None, conf: dict[str, str], file: Path, name: str | None) -> Rehearsal:
    """The queries of a file's pipeline, started on a copy of a checkpoint whose files were read, or of the newest."""
    # Not above: who does without need not wait for these.
    from tidegate.cli.load import load_pipeline
    from tidegate.engine.changes import check_written
    from tidegate.engine.inspecting import session_beside_runs
    from tidegate.engine.rehearsal import rehearse
    from tidegate.sinks.sessions import has_set
    from tidegate.spark.session import existing_session, in_place

    settings = in_place(conf)
    pipeline = load_pipeline(file, name, to_run=True)
    inspected = InspectedRoot(place_of(root))
    if pipeline.name != inspected.pipeline:
        raise ForeignRoot(f"{root} is the root of pipeline {inspected.pipeline!r}, not of {pipeline.name!r}")
    record = inspected.newest() if checkpoint is None else inspected.find(checkpoint)
    base = inspected.manifest(record)
    check_written(inspected.files, base, pipeline.validated())
    is_given = existing_session() is not None
    with chdir(pipeline.folder), scratch() as files:
        session = session_beside_runs(settings, pipeline.folder, pipeline.name)
        is_set = partial(has_set, session) if is_given else settings.__contains__
        changes, queries = rehearse(pipeline, inspected, base, session, is_set, files)
    told = tuple(RehearsedQuery(each.stages, each.outcome, each.has_state, each.why) for each in queries)
    return Rehearsal(checkpoint_name(record.checkpoint_id), changes, told)


def print_rehearsal(rehearsal: Rehearsal, out: Console) -> None:
    out.print(f"queries started on a copy of {rehearsal.checkpoint}, to read nothing", style="bold", markup=False)
    for change in rehearsal.changes:
        out.print(change, markup=False, soft_wrap=True)
    for query in rehearsal.queries:
        names = " → ".join(query.stages)
        said = _OUTCOMES.get(query.outcome, f"failed: {query.why}")
        if query.outcome == "ran" and query.has_state:
            said += ", on its state"
        out.print(f"{names} {said}", style=None if query.why is None else "red", markup=False, soft_wrap=True)
