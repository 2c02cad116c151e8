"""What the dashboard's server would answer of pipelines that are made up: each has to be one of its own structs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from tests.dashboard.fake_pipelines import FakePipeline, Shape, World, hash_of
from tidegate.dashboard import values
from tidegate.dashboard.attempts import Happened
from tidegate.dashboard.routes import KINDS, ROUTES, WrongQuery, query_of
from tidegate.engine import events
from tidegate.engine.layout import DrawnStage, Place, layered
from tidegate.engine.status import CheckpointStatus, moment_ms

_HISTORY: Final = next(each for each in ROUTES if each.type is values.History)


def checked(answer: Any, kind: Any) -> Any:
    """What is made up here has to be what the server could say."""
    return msgspec.to_builtins(msgspec.convert(answer, kind))


class Refused(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def row(pipeline: FakePipeline, checkpoint: CheckpointStatus) -> dict[str, Any]:
    retained = checkpoint.state == "complete" and checkpoint.epoch > len(pipeline.past) - 10
    is_savepoint = checkpoint.checkpoint in pipeline.savepoints
    return {"checkpoint": msgspec.to_builtins(checkpoint), "retained": retained, "is_savepoint": is_savepoint}


def detail(pipeline: FakePipeline, world: World) -> dict[str, Any]:
    told = pipeline.status().stages
    shape: Shape = pipeline.known_shape or {name: (stage.kind, ()) for name, stage in told.items()}
    graph = {
        name: {
            "kind": kind,
            "inputs": inputs,
            "output_mode": "append",
            "table": {"kind": "delta", "address": f"lake/{name}"} if kind == "sink" else None,
            "chained_into": pipeline.chained_into.get(name),
        }
        for name, (kind, inputs) in shape.items()
    }
    settings = {"interval": "10s", "timeout": "60s", "max-inflight": "64MB", "retain": "10", "unaligned-after": "off"}
    return {
        "summary": pipeline.summary(),
        "status": msgspec.to_builtins(pipeline.status()),
        "graph": graph,
        "layout": layout(shape),
        "outlook": {"decision": "goes_on", "checkpoint": pipeline.past[-1].checkpoint, "why": None}
        if pipeline.past
        else {"decision": "fresh", "checkpoint": None, "why": None},
        "outlook_told": pipeline.outlook,
        "problems": [],
        "settings": settings,
        "actions_allowed": world.allows_actions,
        "newest_event": pipeline.newest_event,
        "mark": pipeline.mark,
    }


def layout(shape: Shape) -> dict[str, Any]:
    layers = layered([DrawnStage(name, kind, inputs) for name, (kind, inputs) in shape.items()])
    places = [place for layer in layers for place in layer]

    def ways(place: Place, points: list[dict[str, int]]) -> Iterator[tuple[str, list[dict[str, int]]]]:
        for target in place.outputs:
            if target.stage is None:
                yield from ways(target, [*points, {"column": target.layer, "row": target.row}])
            else:
                yield target.stage.name, [*points, {"column": target.layer, "row": target.entry_row(place)}]

    return {
        "columns": len(layers),
        "rows": max((place.row + place.height for place in places), default=0),
        "nodes": [
            {"stage": p.stage.name, "kind": p.stage.kind, "column": p.layer, "row": p.row, "height": p.height}
            for p in places
            if p.stage
        ],
        "edges": [
            {"source": p.stage.name, "target": target, "points": points}
            for p in places
            if p.stage
            for target, points in ways(p, [{"column": p.layer, "row": p.exit_row}])
        ],
    }


def checkpoints(pipeline: FakePipeline, query: Mapping[str, str]) -> dict[str, Any]:
    live = list(pipeline.status().in_progress)
    everything = [*pipeline.past, *live]
    states = set(query["state"].split(",")) if query.get("state") else None
    found = [each for each in reversed(everything) if states is None or each.state in states]
    if "before" in query:
        found = [each for each in found if each.epoch < int(query["before"])]
    limit = int(query.get("limit", "50"))
    shown = found[:limit]
    complete = [each for each in pipeline.past if each.state == "complete"]
    failed = [each for each in pipeline.past if each.state == "aborted"]
    restored = [each for each in pipeline.events if isinstance(each, events.Started) and each.base]
    savepoints = [each for each in pipeline.events if isinstance(each, events.SavepointTaken)]

    def last(some: Sequence[CheckpointStatus]) -> dict[str, Any] | None:
        return row(pipeline, some[-1]) if some else None

    return {
        "counts": {
            "completed": len(complete),
            "failed": len(failed),
            "in_progress": len(live),
            "restored": len(restored),
            "savepoints": len(savepoints),
        },
        "latest": {
            "completed": last(complete),
            "failed": last(failed),
            "restored": next(
                ({"checkpoint": e.base, "at": e.at, "because": e.because} for e in reversed(restored)), None
            ),
            "savepoint": next(
                ({"checkpoint": e.checkpoint, "name": e.name, "at": e.at} for e in reversed(savepoints)), None
            ),
        },
        "checkpoints": [row(pipeline, each) for each in shown],
        "next": str(shown[-1].epoch) if len(found) > limit else None,
    }


def summary(pipeline: FakePipeline) -> dict[str, Any]:
    done = [each for each in pipeline.past if each.state == "complete"]

    def commit_ms(each: CheckpointStatus) -> int:
        return max((c.took_ms or 0 for c in each.commits.values()), default=0)

    of: dict[str, Callable[[CheckpointStatus], int | None]] = {
        "duration_ms": lambda each: each.duration_ms,
        "alignment_ms": lambda each: each.alignment_ms,
        "new_bytes": lambda each: each.new_bytes,
        "total_bytes": lambda each: each.total_bytes,
        "in_flight_bytes": lambda each: each.in_flight_bytes,
        "commit_ms": commit_ms,
    }
    measures = {}
    for name, get in of.items():
        values = sorted(get(each) or 0 for each in done)
        if not values:
            measures[name] = {"count": 0} | dict.fromkeys(["min", "average", "max", "p50", "p90", "p95", "p99"])
            continue
        ranks = {f"p{p}": values[min(len(values) - 1, len(values) * p // 100)] for p in (50, 90, 95, 99)}
        average = sum(values) / len(values)
        measures[name] = {"count": len(values), "min": values[0], "average": average, "max": values[-1], **ranks}
    series = [
        {"checkpoint": each.checkpoint, "at": each.triggered_at}
        | {name: get(each) for name, get in of.items()}
        | {
            "state_by_stage": {
                stage: part.total_bytes for stage, part in each.stages.items() if part.total_bytes is not None
            }
        }
        for each in done[-1000:]
    ]
    return {"measures": measures, "series": series}


def find(pipeline: FakePipeline, name: str) -> CheckpointStatus:
    for each in (*pipeline.past, *pipeline.status().in_progress):
        if each.checkpoint == name:
            return each
    raise Refused(404, f"there is no checkpoint {name} in this root")


def positions(pipeline: FakePipeline, checkpoint: CheckpointStatus) -> dict[str, list[str]]:
    number = checkpoint.epoch
    words = {
        0: lambda name: [
            f"Kafka topic {name}: partition 0 at offset {number * 1200}",
            f"partition 1 at offset {number * 1180}",
        ],
        1: lambda name: [f"{number * 3} files, the last is {name}/part-{number:05}.json"],
    }
    sources = [name for name, (kind, _) in pipeline.shape.items() if kind == "source"]
    return {name: words[i % 2](name) for i, name in enumerate(sources)}


def gantt(pipeline: FakePipeline, checkpoint: CheckpointStatus) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(name: str | None, phase: str, begin: int, end: int, *, is_critical: bool = False) -> None:
        found.append({"name": name, "phase": phase, "from_ms": begin, "to_ms": end, "is_critical": is_critical})

    ends = {
        name: (part.barrier_ms or 0) + (part.alignment_ms or 0) + (part.snapshot_ms or 0)
        for name, part in checkpoint.stages.items()
    }
    last = max(ends, key=lambda name: ends[name])
    critical = {last}
    while inputs := pipeline.shape[last][1]:
        last = inputs[-1]
        critical.add(last)
    for name, part in checkpoint.stages.items():
        barrier, aligned = part.barrier_ms or 0, part.aligned_ms or 0
        cut = barrier + (part.alignment_ms or 0)
        if barrier:
            add(name, "waiting", 0, barrier)
        if part.alignment_ms:
            add(name, "aligning", barrier, aligned or cut, is_critical=name in critical)
        if aligned and cut > aligned:
            add(name, "catching_up", aligned, cut, is_critical=name in critical)
        if part.snapshot_ms:
            add(name, "storing", cut, cut + part.snapshot_ms, is_critical=name in critical)
    if checkpoint.prepared_ms is not None and checkpoint.duration_ms is not None:
        add(None, "quorum", max(ends.values()), checkpoint.prepared_ms + 10, is_critical=True)
        add(None, "deciding", checkpoint.prepared_ms + 10, checkpoint.duration_ms, is_critical=True)
    for sink, commit in checkpoint.commits.items():
        end = commit.begun_ms + (commit.took_ms or 0)
        add(sink, "committing", commit.begun_ms, end, is_critical=end == checkpoint.shown_ms)
    return found


def one(pipeline: FakePipeline, name: str) -> dict[str, Any]:
    found = find(pipeline, name)
    versions = pipeline.versions.get(name, {})
    return row(pipeline, found) | {
        "positions": positions(pipeline, found),
        "files": {
            stage: {"count": 1 + hash_of(stage) % 9, "bytes": part.total_bytes}
            for stage, part in found.stages.items()
            if part.total_bytes is not None
        },
        "tables": {
            sink: {
                "kind": "delta",
                "address": f"lake/{sink}",
                "version": versions[sink][0] if sink in versions else None,
                "why": None if sink in versions else "it was never shown",
            }
            for sink in pipeline.sinks
        },
        "problems": [],
        "gantt": gantt(pipeline, found),
    }


def compare(pipeline: FakePipeline, a: str, b: str) -> dict[str, Any]:
    one, other = find(pipeline, a), find(pipeline, b)

    def compared(x: float | None, y: float | None) -> dict[str, Any]:
        return {"a": x, "b": y, "difference": None if x is None or y is None else y - x}

    totals = ("duration_ms", "alignment_ms", "new_bytes", "total_bytes", "in_flight_bytes")
    parts = ("alignment_ms", "snapshot_ms", "new_bytes", "total_bytes", "in_flight_bytes", "cut")
    before, after = positions(pipeline, one), positions(pipeline, other)
    apart = datetime.fromisoformat(other.triggered_at or "") - datetime.fromisoformat(one.triggered_at or "")
    whole = {name: compared(getattr(one, name), getattr(other, name)) for name in totals}
    return whole | {
        "a": msgspec.to_builtins(one),
        "b": msgspec.to_builtins(other),
        "apart_ms": int(apart.total_seconds() * 1000),
        "stages": {
            stage: {
                "batch" if name == "cut" else name: compared(getattr(one.stages[stage], name), getattr(part, name))
                for name in parts
            }
            | {"in_a": True, "in_b": True, "positions_a": before.get(stage, []), "positions_b": after.get(stage, [])}
            for stage, part in other.stages.items()
        },
        "problems": [],
    }


def tables(pipeline: FakePipeline) -> dict[str, Any]:
    newest = list(pipeline.versions)[-1] if pipeline.versions else None
    older = list(pipeline.versions)[-2] if len(pipeline.versions) > 1 else newest
    shows = {sink: older if i == len(pipeline.sinks) - 1 else newest for i, sink in enumerate(pipeline.sinks)}
    kinds = {sink: "delta" if i % 3 else "postgres" for i, sink in enumerate(pipeline.sinks)}
    at = {each.checkpoint: each.triggered_at for each in pipeline.past}
    return {
        "tables": [
            {
                "sink": sink,
                "kind": kinds[sink],
                "address": f"lake/{sink}",
                "shows": shows[sink],
                "since": at.get(shows[sink] or ""),
                "version": pipeline.versions[name][sink][0]
                if (name := shows[sink]) and kinds[sink] == "delta"
                else None,
            }
            for sink in pipeline.sinks
        ],
        "matrix": [
            {
                "checkpoint": name,
                "versions": {
                    sink: None if sink in missing or added == 0 else {"version": version, "rows_added": added}
                    for sink, (version, added) in versions.items()
                },
                "missing": missing,
            }
            for name, versions in list(reversed(pipeline.versions.items()))[:200]
            for missing in [
                {sink: "not_known" for sink, kind in kinds.items() if kind != "delta"}
                | ({pipeline.sinks[-1]: "not_shown"} if name == newest else {})
            ]
        ],
        "problems": [],
    }


def history(pipeline: FakePipeline, query: Mapping[str, str]) -> dict[str, Any]:
    try:
        asked = query_of(list(query.items()), _HISTORY.parameters)
    except WrongQuery as wrong:
        raise Refused(400, str(wrong)) from wrong
    kinds = None if "kinds" not in asked else [KINDS[each] for each in asked["kinds"]]
    newest_first = sorted(pipeline.events, key=lambda each: (moment_ms(each.at), each.id), reverse=True)
    found, cursor = Happened(newest_first).page(kinds, asked.get("before"), asked.get("limit", 50))
    return {"events": msgspec.to_builtins(found), "next": cursor}


SAYS: Final = {
    "checkpoint": "Takes a checkpoint now. The run goes on; the next one comes after the usual interval.",
    "savepoint": "Takes a checkpoint and copies it out of the root, beside it. Nobody deletes it but you.",
    "cancel": "Aborts the checkpoint that is being prepared. No table shows it; the next one holds the same rows.",
    "stop": "Ends the run after a last checkpoint. Nothing starts it again but you.",
}


def actions(pipeline: FakePipeline, world: World) -> dict[str, Any]:
    why = None
    if not world.allows_actions:
        why = "the dashboard was started without --allow-actions"
    elif pipeline.life != "alive":
        why = "no run is alive"
    return {
        "actions": [{"name": name, "allowed": why is None, "says": says, "why_not": why} for name, says in SAYS.items()]
    }


def act(pipeline: FakePipeline, name: str, world: World) -> dict[str, Any]:
    if name not in SAYS:
        raise Refused(404, f"there is no action {name}")
    if name == "checkpoint":
        return {"done": True, "said": f"{pipeline.finish()} is complete: all tables show it"}
    if name == "savepoint":
        taken = pipeline.finish()
        pipeline._savepoint(taken, datetime.now(UTC))
        return {"done": True, "said": f"savepoint {taken} is in {pipeline.root}-savepoints"}
    if name == "cancel":
        return {"done": False, "said": "no checkpoint is being prepared: there is nothing to cancel"}
    pipeline.life, pipeline.state = "stopped", "finished"
    world.tell()
    return {"done": True, "said": "the run has ended after ckpt-000061"}


def answer(world: World, parts: list[str], query: Mapping[str, str]) -> Any:
    """`parts`: of the address, behind /api/v1."""
    if parts == ["pipelines"]:
        return checked({"pipelines": [each.summary() for each in world.pipelines]}, values.Pipelines)
    pipeline = find_pipeline(world, parts[1])
    kind: Any
    match parts[2:]:
        case []:
            found, kind = detail(pipeline, world), values.PipelineDetail
        case ["checkpoints"]:
            found, kind = checkpoints(pipeline, query), values.Checkpoints
        case ["checkpoints", "summary"]:
            found, kind = summary(pipeline), values.CheckpointsSummary
        case ["checkpoints", name]:
            found, kind = one(pipeline, name), values.CheckpointDetail
        case ["compare", a, b]:
            found, kind = compare(pipeline, a, b), values.Comparison
        case ["tables"]:
            found, kind = tables(pipeline), values.Tables
        case ["history"]:
            found, kind = history(pipeline, query), values.History
        case ["actions"]:
            found, kind = actions(pipeline, world), values.Actions
        case _:
            raise Refused(404, "there is nothing here")
    return checked(found, kind)


def live(world: World, key: str | None) -> tuple[str, Any]:
    """An event: what it is called, and what it tells. `key`: of one pipeline; None: of all."""
    if key is None:
        return "pipelines", answer(world, ["pipelines"], {})
    pipeline = find_pipeline(world, key)
    told = {
        "summary": pipeline.summary(),
        "status": msgspec.to_builtins(pipeline.status()),
        "newest_event": pipeline.newest_event,
        "mark": pipeline.mark,
    }
    return "status", checked(told, values.Live)


def find_pipeline(world: World, key: str) -> FakePipeline:
    found = world.by_key.get(key)
    if found is None:
        raise Refused(404, f"there is no pipeline {key}")
    return found
