"""What the tests of metrics and traces tell of a run."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tidegate.engine.events import CheckpointEnded
from tidegate.engine.status import CheckpointStatus, InstanceStatus, RunStatus, StageStatus

AT = "2026-01-02T03:04:05.000+00:00"
AT_S = 1_767_323_045.0
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def status(generation: int | None = 1, *, started_at: str = AT, updated_at: str = AT, **given: Any) -> RunStatus:
    return RunStatus(
        "orders", 7, "here", started_at, updated_at, **{"state": "running", **given, "generation": generation}
    )


def stage(rows: int, batches: int = 0, batches_ms: int = 0, **given: Any) -> StageStatus:
    given = {"kind": "stage", "batch": 1, "rows_per_s": 0.0, "lag": None, "watermark_ms": None, **given}
    return StageStatus(rows=rows, batches=batches, batches_ms=batches_ms, **given)


def instance(name: str, *stages: str) -> InstanceStatus:
    """One that is given these."""
    return InstanceStatus(name=name, leads=name == "a", host="here", pid=7, stages=stages, missing_since=None)


def checkpoint(number: int, state: Any = "complete", **given: Any) -> CheckpointStatus:
    given = {"generation": 1, "epoch": number, "triggered_at": AT, **given}
    return CheckpointStatus(checkpoint=f"ckpt-{number:06d}", state=state, **given)


def ended(number: int, state: Any = "complete", **given: Any) -> CheckpointEnded:
    return CheckpointEnded(at=AT, checkpoint=checkpoint(number, state, **given))


def samples_in(text: str) -> Samples:
    """What Prometheus reads there, by name and labels without those that all have."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            labels = tuple(sorted(pair for pair in each.labels.items() if pair[0] not in ("pipeline", "root")))
            assert (each.name, labels) not in found, "the same is told twice"
            found[each.name, labels] = each.value
    return found


def exposed(collector: Collector) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry).decode()
