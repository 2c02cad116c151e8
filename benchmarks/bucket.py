"""What a root in a bucket costs, on one machine and on a Spark cluster: against a root on the disk, and against plain
Spark with its checkpoints on s3a."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from benchmarks.measure import Benchmark, Case, Derived, Round, Target

if TYPE_CHECKING:
    from benchmarks.bucket_runs import Kind, Measured, Purpose

_CLOCK: Final = "wall clock (time.perf_counter; checkpoints: from trigger to decision, by the run's own clock)"

_SETTING: Final = """\
An S3 server on this machine (versitygw), behind a proxy that adds 20 ms to every request. Each measurement is a process
  of its own, with a JVM that is warmed up with 8 files (fewer for less work) of the same run."""

_NOTES: Final = """\
One machine: local[*], UI off.
small batches: the chain of `./dev bench spark` (five stages, three hops, two sinks), a source's batch takes one file of
  100 rows, a checkpoint every 2 s. Timed from the moment that all input is there until every query has committed it.
  local: the root is a folder, forced to the disk. bucket: the root is in the bucket, the work folder on the disk. Both
  as by default: orders, priced and banded are one query. not chained: five queries.
  plain: five queries of plain PySpark with the settings that Tidegate gives its stages; their checkpointLocation is on
  s3a with its usual settings (hadoop-aws 3.5.0), their output and input on the disk.
checkpoint: the median of those of the run. Plain Spark has none of the whole pipeline.
requests: those of the run while the rows pass.
uploaded / changed: a source that drops duplicates of 1,000-byte keys, 20 MB of them, at 400 new keys a second, a
  checkpoint every 2 s, for 20 s. uploaded: all bytes that were put under generations/, manifests too. changed: what
  Spark has put into its state folder meanwhile."""

_CLUSTER_NOTES: Final = """\
cluster: the same stages, rows and interval on a standalone master and two workers of two cores each, on this machine;
  executors are another user where the benchmark is run by root. Input and tables lie in a folder that all share.
  cluster: the root is in the bucket, as by default (three queries). not chained: five queries.
  plain: five queries of plain PySpark with the settings that Tidegate gives its stages (so it renames: fewer requests
  than by Spark's default); s3a as it comes. Their checkpoints, and what they hand on, lie in the bucket.
per batch: all requests that were made while the rows passed, those of Tidegate's checkpoints and of its lease too, by
  the batches that all queries have committed meanwhile. per file: the same by the files that were put in, of 100 rows.
  plain's checkpoints: without what its queries ask of the output of the one before, at which they look all the
  time. state, rows handed on, the rest: what they were for, by the folder of Spark's that they name."""


class _Cases:
    """What is measured once of each kind, and all that follows from it."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._last: dict[Kind, Measured] = {}
        self._cases: dict[Kind, Case] = {}

    def measured(self, kind: Kind) -> Measured:
        from benchmarks.bucket_runs import measure

        self._last[kind] = found = measure(kind, self._scale)
        return found

    def rows(self, *kinds: Kind) -> list[Case | Derived]:
        def per_s(kind: Kind) -> Callable[[], float]:
            return lambda: self.measured(kind).rows_per_s

        self._cases.update((kind, Case(f"small batches: {kind}", {}, "rows/s", per_s(kind))) for kind in kinds)
        return [self._cases[kind] for kind in kinds]

    def ratio(self, of: Kind, to: Kind, target: Target | None = None) -> Derived:
        def value(values: Round) -> float:
            return values[self._cases[of]] / values[self._cases[to]]

        return Derived(f"small batches: {of} / {to}", {}, "ratio", value, target)

    def derived(
        self, name: str, kind: Kind, unit: str, value: Callable[[Measured], float], target: Target | None = None
    ) -> Derived:
        return Derived(name, {}, unit, lambda _: value(self._last[kind]), target)

    def checkpoint(self, kind: Kind) -> Derived:
        return self.derived(f"checkpoint: {kind}", kind, "ms", lambda found: found.checkpoint_ms)

    def requests(self, kind: Kind) -> Derived:
        return self.derived(f"requests: {kind}", kind, "count", lambda found: found.requests)

    def requests_per_batch(self, kind: Kind, *purposes: Purpose, called: str = "") -> Derived:
        """Of all purposes, or of some."""

        def value(found: Measured) -> float:
            return found.requests_per_batch(*purposes)

        return self.derived(f"per batch: {kind}{called}", kind, "requests", value)

    def fewer_requests(self, of: Kind, to: Kind, called: str, *purposes: Purpose) -> Derived:
        """How many of those per batch that the other makes, of all purposes or of some."""

        def value(found: Measured) -> float:
            return found.requests_per_batch() / self._last[to].requests_per_batch(*purposes)

        return self.derived(f"per batch: {of} / {called}", of, "ratio", value, Target(at_most=1))


def _on_one_machine(scale: float) -> list[Case | Derived]:
    of = _Cases(scale)

    def uploaded() -> float:
        found = of.measured("state")
        return found.uploaded_bytes / found.changed_bytes

    return [
        *of.rows("local", "bucket", "bucket, not chained", "plain"),
        of.ratio("bucket", "local"),
        of.ratio("bucket", "plain", Target(at_least=1.5)),
        of.ratio("bucket, not chained", "plain", Target(at_least=1.5)),
        of.checkpoint("local"),
        of.checkpoint("bucket"),
        of.checkpoint("bucket, not chained"),
        of.requests("bucket"),
        of.requests("bucket, not chained"),
        of.requests("plain"),
        Case("bytes: uploaded / changed", {}, "ratio", uploaded, Target(at_most=1.3)),
        of.derived("bytes: uploaded", "state", "MB", lambda found: found.uploaded_bytes / 1e6),
        of.derived("bytes: changed", "state", "MB", lambda found: found.changed_bytes / 1e6),
    ]


def _on_a_cluster(scale: float) -> list[Case | Derived]:
    of = _Cases(scale)
    ours: tuple[Kind, ...] = ("cluster", "cluster, not chained")
    plain: Kind = "cluster, plain"
    kinds = (*ours, plain)
    purposes: tuple[Purpose, ...] = ("state", "rows handed on", "the rest")
    checkpoints: tuple[Purpose, ...] = ("state", "the rest")
    return [
        *of.rows(*kinds),
        *(of.ratio(kind, plain) for kind in ours),
        *(of.checkpoint(kind) for kind in ours),
        *(of.requests_per_batch(kind) for kind in kinds),
        *(of.fewer_requests(kind, plain, "plain") for kind in ours),
        *(of.fewer_requests(kind, plain, "plain's checkpoints", *checkpoints) for kind in ours),
        *(of.requests_per_batch(kind, each, called=f", {each}") for kind in kinds for each in purposes),
        *(of.derived(f"per file: {kind}", kind, "requests", lambda found: found.requests_per_file) for kind in kinds),
        *(of.derived(f"batches: {kind}", kind, "count", lambda found: found.batches) for kind in kinds),
    ]


def _on_both(scale: float) -> list[Case | Derived]:
    return [*_on_one_machine(scale), *_on_a_cluster(scale)]


_ROUNDS: Final = 3
BENCHMARK: Final = Benchmark(
    "a root in a bucket, 20 ms away, and plain Spark on s3a; on one machine and on a Spark cluster",
    f"{_SETTING}\n{_NOTES}\n{_CLUSTER_NOTES}",
    _ROUNDS,
    _on_both,
    _CLOCK,
)
ON_CLUSTER: Final = Benchmark(BENCHMARK.about, f"{_SETTING}\n{_CLUSTER_NOTES}", _ROUNDS, _on_a_cluster, _CLOCK)
"""Only what runs on a cluster."""
