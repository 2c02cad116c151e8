"""What is counted of pipelines, as metrics of Prometheus: every name, what it means, and which labels it has.

Every metric has the labels `pipeline` and `root`. Others name stages and sinks of the pipeline, or have values that are
written down here: no label grows with time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, get_args

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from tidegate.engine.status import RunState, RunStatus, StageStatus
from tidegate.engine.watching.counts import (
    COMMIT_OUTCOMES,
    Counted,
    Distribution,
    cumulated,
    decided_s,
    seconds_of,
)
from tidegate.protocol.messages import END_OF_TIME_MS

_STATES: Final[tuple[RunState, ...]] = get_args(RunState)
_AT_WORK: Final = ("running", "stopping")


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a pipeline on a root at one moment. What is None is not known, and is not shown."""

    pipeline: str
    root: str
    counted: Counted = Counted()
    is_alive: bool | None = None
    """Whether a run is alive there, and gives a sign now and then."""
    is_readable: bool = True
    interval_s: float | None = None
    """How often it takes a checkpoint."""
    room: tuple[int, int] | None = None
    """The bytes that may still be written where the root is, and how many there are in all."""
    requests: Mapping[str, int] | None = None
    """What was asked of the store, by kind."""
    failed_requests: int | None = None

    @property
    def status(self) -> RunStatus | None:
        return self.counted.status

    @property
    def stages(self) -> Mapping[str, StageStatus]:
        """As they are now; none while none runs."""
        status = self.status
        return status.stages if status is not None and status.state in _AT_WORK and self.is_alive is not False else {}


Values = Iterator[tuple[tuple[str, ...], float]]
_Made = Callable[[Shown], Values]


class _Family(msgspec.Struct, frozen=True):
    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    says: str
    labels: tuple[str, ...]
    made: _Made


class _Spread(msgspec.Struct, frozen=True):
    """One that tells how often something took how long."""

    name: str
    says: str
    labels: tuple[str, ...]
    made: Callable[[Shown], Iterator[tuple[tuple[str, ...], Distribution]]]


# -- what each is made of -------------------------------------------------------------------------


def _one(value: float | None) -> Values:
    if value is not None:
        yield (), value


def _states(shown: Shown) -> Values:
    if shown.status is not None:
        yield from (((state,), float(shown.status.state == state)) for state in _STATES)


def _started_s(shown: Shown) -> Values:
    return _one(None if shown.status is None else seconds_of(shown.status.started_at))


def _in_progress(shown: Shown) -> Values:
    return _one(None if shown.status is None or shown.is_alive is False else len(shown.status.in_progress))


def _bytes(shown: Shown) -> Values:
    last = shown.counted.last
    if last is not None:
        sizes = {"new": last.new_bytes, "total": last.total_bytes, "in_flight": last.in_flight_bytes}
        yield from (((kind,), size) for kind, size in sizes.items() if size is not None)


def _last_s(shown: Shown) -> Values:
    return _one(None if shown.counted.last is None else decided_s(shown.counted.last))


def _rows(shown: Shown) -> Values:
    return (((name,), each.rows) for name, each in shown.counted.stages.items())


def _lag(shown: Shown) -> Values:
    return (((name,), each.lag) for name, each in shown.stages.items() if each.lag is not None)


def _watermarks(shown: Shown) -> Values:
    for name, each in shown.stages.items():
        if each.watermark_ms is not None and each.watermark_ms < END_OF_TIME_MS:
            yield (name,), each.watermark_ms / 1000


def _held_back(shown: Shown) -> Values:
    own = ((name, each) for name, each in shown.stages.items() if each.chained_into is None)
    return (((name,), float(each.held_back_by is not None)) for name, each in own)


def _commits(shown: Shown) -> Values:
    for sink, each in shown.counted.sinks.items():
        yield from (((sink, outcome), getattr(each, outcome)) for outcome in COMMIT_OUTCOMES)


def _requests(shown: Shown) -> Values:
    return (((operation,), count) for operation, count in sorted((shown.requests or {}).items()))


_FAMILIES: Final = (
    _Family(
        "tidegate_run_alive",
        GaugeMetricFamily,
        "Whether a run is alive on the root and gives a sign now and then (1), or not (0).",
        (),
        lambda shown: _one(None if shown.is_alive is None else float(shown.is_alive)),
    ),
    _Family(
        "tidegate_root_readable",
        GaugeMetricFamily,
        "Whether the root could be read just now (1), or not (0): then nothing else is told of it.",
        (),
        lambda shown: _one(float(shown.is_readable)),
    ),
    _Family(
        "tidegate_run_state",
        GaugeMetricFamily,
        "What the run does, or how it ended: 1 for that state, 0 for all others.",
        ("state",),
        _states,
    ),
    _Family(
        "tidegate_run_start_timestamp_seconds",
        GaugeMetricFamily,
        "When the run was started, in seconds since 1970.",
        (),
        _started_s,
    ),
    _Family(
        "tidegate_checkpoint_interval_seconds",
        GaugeMetricFamily,
        "How often the run is to take a checkpoint.",
        (),
        lambda shown: _one(shown.interval_s),
    ),
    _Family(
        "tidegate_checkpoints",
        CounterMetricFamily,
        "Checkpoints that have ended: complete, and shown by all tables, or aborted.",
        ("outcome",),
        lambda shown: (((outcome,), count) for outcome, count in shown.counted.checkpoints.items()),
    ),
    _Family(
        "tidegate_checkpoints_in_progress",
        GaugeMetricFamily,
        "Checkpoints that are under way.",
        (),
        _in_progress,
    ),
    _Family(
        "tidegate_checkpoints_aborted_in_a_row",
        GaugeMetricFamily,
        "Checkpoints that were aborted since the last one that is complete.",
        (),
        lambda shown: _one(shown.counted.aborted_in_a_row),
    ),
    _Family(
        "tidegate_checkpoint_bytes",
        GaugeMetricFamily,
        "Size of the newest complete checkpoint: what was new in it, all of it, what was captured in flight.",
        ("kind",),
        _bytes,
    ),
    _Family(
        "tidegate_last_checkpoint_timestamp_seconds",
        GaugeMetricFamily,
        "When the newest complete checkpoint was decided, in seconds since 1970.",
        (),
        _last_s,
    ),
    _Family(
        "tidegate_stage_rows",
        CounterMetricFamily,
        "Rows that a stage has written; those that were written again after a failure count again.",
        ("stage",),
        _rows,
    ),
    _Family(
        "tidegate_stage_lag_segments",
        GaugeMetricFamily,
        "Segments of its inputs that a stage has yet to read.",
        ("stage",),
        _lag,
    ),
    _Family(
        "tidegate_stage_watermark_seconds",
        GaugeMetricFamily,
        "The watermark of a stage: event time in seconds since 1970.",
        ("stage",),
        _watermarks,
    ),
    _Family(
        "tidegate_stage_held_back",
        GaugeMetricFamily,
        "Whether a stage is held back (1), because a reader of its output or its table is too far behind.",
        ("stage",),
        _held_back,
    ),
    _Family(
        "tidegate_sink_commits",
        CounterMetricFamily,
        "Commits of checkpoints to tables: committed, or failed, each try that did.",
        ("sink", "outcome"),
        _commits,
    ),
    _Family(
        "tidegate_recoveries",
        CounterMetricFamily,
        "Starts from a checkpoint that nobody asked for: after a failure, after the run before was killed, or because "
        "an instance came, left or was lost.",
        ("because",),
        lambda shown: (((because,), count) for because, count in shown.counted.recoveries.items()),
    ),
    _Family(
        "tidegate_failures",
        CounterMetricFamily,
        "Generations that could not go on.",
        (),
        lambda shown: _one(shown.counted.failures),
    ),
    _Family(
        "tidegate_store_requests",
        CounterMetricFamily,
        "What the run has asked of the store that its root is in.",
        ("operation",),
        _requests,
    ),
    _Family(
        "tidegate_store_errors",
        CounterMetricFamily,
        "What that store has failed.",
        (),
        lambda shown: _one(shown.failed_requests),
    ),
    _Family(
        "tidegate_disk_free_bytes",
        GaugeMetricFamily,
        "Bytes that may still be written where the root is, or the work folder of a root in a bucket.",
        (),
        lambda shown: _one(None if shown.room is None else shown.room[0]),
    ),
    _Family(
        "tidegate_disk_size_bytes",
        GaugeMetricFamily,
        "Bytes of that file system.",
        (),
        lambda shown: _one(None if shown.room is None else shown.room[1]),
    ),
)
_SPREADS: Final = (
    _Spread(
        "tidegate_checkpoint_duration_seconds",
        "From the trigger of a checkpoint until it was decided, of those that are complete.",
        (),
        lambda shown: iter([((), shown.counted.durations)]),
    ),
    _Spread(
        "tidegate_checkpoint_alignment_seconds",
        "How long the stage took that took longest to align, of checkpoints that are complete.",
        (),
        lambda shown: iter([((), shown.counted.alignments)]),
    ),
    _Spread(
        "tidegate_sink_commit_duration_seconds",
        "From the begin of a commit until the table showed the checkpoint, failed tries included.",
        ("sink",),
        lambda shown: (((sink,), each.durations) for sink, each in shown.counted.sinks.items()),
    ),
)
_BATCHES: Final = "tidegate_stage_batch_duration_seconds"


def families(all_shown: Iterable[Shown]) -> Iterator[Metric]:
    """All metrics of some pipelines, each family once, as Prometheus wants it."""
    found = list(all_shown)
    readable = [each for each in found if each.is_readable]
    for family in _FAMILIES:
        metric = family.kind(family.name, family.says, labels=("pipeline", "root", *family.labels))
        for shown in found if family.name == "tidegate_root_readable" else readable:
            for labels, value in family.made(shown):
                metric.add_metric((shown.pipeline, shown.root, *labels), value)
        yield metric
    for spread in _SPREADS:
        histogram = HistogramMetricFamily(spread.name, spread.says, labels=("pipeline", "root", *spread.labels))
        for shown in readable:
            for labels, each in spread.made(shown):
                buckets = [("+Inf" if math.isinf(bound) else str(bound), count) for bound, count in cumulated(each)]
                histogram.add_metric((shown.pipeline, shown.root, *labels), buckets, each.total)
        yield histogram
    says = "Batches of a stage, each from when Spark planned it until its commit was seen."
    batches = SummaryMetricFamily(_BATCHES, says, labels=("pipeline", "root", "stage"))
    for shown in readable:
        for name, stage in shown.counted.stages.items():
            batches.add_metric((shown.pipeline, shown.root, name), stage.batches, stage.batches_ms / 1000)
    yield batches


NAMES: Final = frozenset((*(each.name for each in (*_FAMILIES, *_SPREADS)), _BATCHES))
"""The names of all families; those of counters without `_total`."""
