"""Tidegate on Spark against the same queries in plain PySpark, and what a checkpoint costs with much state."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Final

from benchmarks.measure import Benchmark, Case, Derived, Round, Target

if TYPE_CHECKING:
    from benchmarks.spark_chain import Feed, Throughput
    from benchmarks.spark_runs import Variant
    from benchmarks.spark_state import StateCost

# The work of one measurement at scale 1.
_LARGE_FILES: Final = 40
_LARGE_FILE_ROWS: Final = 100_000
_LARGE_FILES_PER_BATCH: Final = 4
_SMALL_FILES: Final = 30
_DEFAULT_PART: Final = 0.3
_SMALL_FILE_ROWS: Final = 100
_LATENCY_FILES: Final = 25
_RESTARTS: Final = 3
_FEW_SEGMENTS: Final = 200
_MANY_SEGMENTS: Final = 20_000
_STATE_MB: Final = (10, 100, 1_000)
_SETTLE_S: Final = 8.0
_COUNTED_S: Final = 15.0
_IDLE_S: Final = 20.0

_CLOCK: Final = "wall clock (time.perf_counter; checkpoints: the manifest's own duration_ms, and writing the decision)"

_NOTES: Final = """\
One JVM, local[*], Spark's own memory settings, UI off. All of it lies in temporary folders on a local file system.
The chain: Parquet files → orders → priced → banded → paid (rows) and totals (sums in 10 s windows): five queries,
  three hops, two sinks, a checkpoint every 5 s. Plain PySpark runs the same functions as five queries with Parquet
  folders between them and at the end; Tidegate ends in two Delta tables.
  tidegate: as five queries too (--no-chain). chained: as it is by default: orders, priced and banded are one query.
  default: nothing is set, so 200 shuffle partitions, state in memory with files on HDFS terms (version 1), checked
  log writes; slow, so measured once, in the first round, with 30 % of the input.
  tuned: the session that Tidegate gives its stages, but with Spark's own compaction of logs. It also has Hadoop's
  settings as `tidegate run` has them, without those of YARN.
  The JVM is warmed up with 24 files through both; before a run is timed, a file has passed through all its queries.
large batches: a source's batch takes 4 files of 100,000 rows. small batches: 1 file of 100 rows. Timed from the moment
  that all input is there until every query has committed all of it; no query start, no last checkpoint.
control thread: the share of a core that Generation.poll takes during the run at large or small batches.
latency: one row at a time; from its file's appearance to the commit of the batch of the last hop that wrote it, p50
  of a run, divided by 3 hops. Tidegate's rows are then staged; they are visible with the next checkpoint.
restart: all queries are stopped, a file is added, all are started; until the last query has committed its first
  batch. Median of 3 in each round.
idle: CPU time of this process and of Spark's, per second of 20 in which nothing comes, after three files have passed.
batch: of one query that reads a gate, one segment of one row at a time, with its logs trimmed as Tidegate does; the
  median of 60, once after 200 segments and once after 20,000. Measured once, in the first round.
state: a source that drops duplicates of 1,000-byte keys, at 400 new keys a second, a checkpoint every second, Spark's
  state maintenance every 5 s. Measured once, in the first round: medians over the checkpoints of 15 s.
  written: new files of the stage's snapshots (hard links on a local root) and the whole manifests. changed: what
  Spark itself has put into its state folder between the first and the last of these manifests."""


def _cases(scale: float) -> list[Case | Derived]:
    # Imported here: the other benchmarks need neither Spark nor the memory that it takes.
    from benchmarks.spark_chain import Feed

    def work(amount: int, least: int = 1) -> int:
        return max(least, round(amount * scale))

    large = Feed(_LARGE_FILES, work(_LARGE_FILE_ROWS), _LARGE_FILES_PER_BATCH)
    small = Feed(work(_SMALL_FILES, 2), _SMALL_FILE_ROWS, 1)
    return [
        *_throughput("large batches", large),
        *_throughput("small batches", small),
        *_latency(work(_LATENCY_FILES, 3)),
        *_restart(_RESTARTS if scale >= 1 else 1),
        *_idle(max(3.0, _IDLE_S * min(1.0, scale))),
        *_flat(_FEW_SEGMENTS, work(_MANY_SEGMENTS, 2 * _FEW_SEGMENTS)),
        *_state([work(size, least) for least, size in enumerate(_STATE_MB, 1)], min(1.0, scale)),
    ]


def _throughput(name: str, feed: Feed) -> list[Case | Derived]:
    from benchmarks.spark_chain import measure_throughput
    from benchmarks.spark_runs import Variant

    last: dict[Variant, Throughput] = {}

    def measure(variant: Variant) -> Callable[[], float]:
        def rows_per_s() -> float:
            # With default settings it takes minutes: once, and of a part, is enough to tell the ratio.
            if variant is Variant.DEFAULT:
                if variant not in last:
                    last[variant] = measure_throughput(variant, feed.part(_DEFAULT_PART))
            else:
                last[variant] = measure_throughput(variant, feed)
            return last[variant].rows_per_s

        return rows_per_s

    cases = {
        variant: Case(f"{name}: {variant.value}", {"rows": feed.rows}, "rows/s", measure(variant))
        for variant in Variant
    }

    def ratio(of: Variant, to: Variant, target: Target) -> Derived:
        def value(values: Round) -> float:
            return values[cases[of]] / values[cases[to]]

        return Derived(f"{name}: {of.value} / {to.value}", {}, "ratio", value, target)

    return [
        *cases.values(),
        ratio(Variant.TIDEGATE, Variant.DEFAULT, Target(at_least=1.3)),
        ratio(Variant.TIDEGATE, Variant.TUNED, Target(at_least=1.0)),
        ratio(Variant.CHAINED, Variant.TUNED, Target(at_least=1.3)),
        ratio(Variant.TIDEGATE, Variant.UNFORCED, Target(at_least=0.97)),
        Derived(f"{name}: control thread", {}, "cores", lambda _: last[Variant.TIDEGATE].control_share),
    ]


def _latency(files: int) -> list[Case | Derived]:
    from benchmarks.spark_chain import measure_latency
    from benchmarks.spark_runs import Variant

    def case(variant: Variant) -> Case:
        name = f"latency per hop: {variant.value}"
        return Case(name, {"files": files}, "ms", lambda: measure_latency(variant, files))

    plain, tidegate, chained = case(Variant.TUNED), case(Variant.TIDEGATE), case(Variant.CHAINED)

    def added(name: str, of: Case, at_most: int) -> Derived:
        return Derived(name, {}, "ms", lambda values: values[of] - values[plain], Target(at_most=at_most))

    return [
        plain,
        tidegate,
        chained,
        added("latency per hop: added", tidegate, 20),
        added("latency per hop: added, chained", chained, 0),
    ]


def _restart(restarts: int) -> list[Case | Derived]:
    from benchmarks.spark_chain import measure_restart
    from benchmarks.spark_runs import Variant

    def case(variant: Variant) -> Case:
        return Case(f"restart: {variant.value}", {}, "s", lambda: measure_restart(variant, restarts))

    plain, tidegate, chained = case(Variant.TUNED), case(Variant.TIDEGATE), case(Variant.CHAINED)

    def ratio(name: str, of: Case) -> Derived:
        return Derived(name, {}, "ratio", lambda values: values[of] / values[plain], Target(at_most=1.2))

    return [
        plain,
        tidegate,
        chained,
        ratio("restart: tidegate / plain", tidegate),
        ratio("restart: tidegate, chained / plain", chained),
    ]


def _idle(counted_s: float) -> list[Case | Derived]:
    from benchmarks.spark_chain import measure_idle
    from benchmarks.spark_runs import Variant

    def case(variant: Variant) -> Case:
        return Case(f"idle: {variant.value}", {}, "cores", lambda: measure_idle(variant, counted_s))

    plain, tidegate = case(Variant.TUNED), case(Variant.TIDEGATE)
    ratio = Derived(
        "idle: tidegate / plain", {}, "ratio", lambda values: values[tidegate] / values[plain], Target(at_most=0.6)
    )
    return [plain, tidegate, ratio]


def _flat(few: int, many: int) -> list[Case | Derived]:
    from benchmarks.spark_flat import measure_flat

    both = cache(lambda: measure_flat(few, many))
    after_few = Case("batch", {"segments before": few}, "ms", lambda: both()[0])
    after_many = Case("batch", {"segments before": many}, "ms", lambda: both()[1])

    def growth(values: Round) -> float:
        return values[after_many] / values[after_few]

    return [
        after_few,
        after_many,
        Derived("batch time growth", {"from": few, "to": many}, "ratio", growth, Target(at_most=1.2)),
    ]


def _state(sizes_mb: list[int], time_scale: float) -> list[Case | Derived]:
    from benchmarks.spark_state import measure_state

    @cache
    def cost(size_mb: int) -> StateCost:
        settle_s, counted_s = max(2.0, _SETTLE_S * time_scale), max(3.0, _COUNTED_S * time_scale)
        return measure_state(size_mb * 1_000_000, settle_s, counted_s)

    @cache
    def unforced() -> float:
        settle_s, counted_s = max(2.0, _SETTLE_S * time_scale), max(3.0, _COUNTED_S * time_scale)
        return measure_state(smallest * 1_000_000, settle_s, counted_s, fsync=False).duration_ms

    def duration(size_mb: int) -> Case:
        return Case("checkpoint", {"MB of state": size_mb}, "ms", lambda: cost(size_mb).duration_ms)

    def derived(name: str, size_mb: int, unit: str, value: Callable[[StateCost], float]) -> Derived:
        return Derived(name, {"MB of state": size_mb}, unit, lambda _: value(cost(size_mb)))

    def amplified(size_mb: int) -> Derived:
        def value(_: Round) -> float:
            return cost(size_mb).written_bytes / max(1, cost(size_mb).changed_bytes)

        return Derived("checkpoint written / changed", {"MB of state": size_mb}, "ratio", value, Target(at_most=1.3))

    smallest, largest = sizes_mb[0], sizes_mb[-1]
    durations = {size: duration(size) for size in sizes_mb}

    def growth(values: Round) -> float:
        return values[durations[largest]] / values[durations[smallest]]

    def added(values: Round) -> float:
        return values[durations[smallest]] - unforced()

    return [
        *durations.values(),
        Case("checkpoint, no fsync", {"MB of state": smallest}, "ms", unforced),
        Derived("checkpoint, fsync adds", {"MB of state": smallest}, "ms", added, Target(at_most=50)),
        Derived("checkpoint time growth", {"from": smallest, "to": largest}, "ratio", growth, Target(at_most=1.3)),
        *(derived("checkpoint, longest", size, "ms", lambda cost: cost.longest_ms) for size in sizes_mb),
        *(derived("snapshot", size, "ms", lambda cost: cost.snapshot_ms) for size in sizes_mb),
        *(
            derived("written per checkpoint", size, "kB", lambda cost: cost.written_bytes / cost.checkpoints / 1e3)
            for size in sizes_mb
        ),
        *(amplified(size) for size in sizes_mb),
    ]


BENCHMARK: Final = Benchmark("Tidegate on Spark against plain PySpark", _NOTES, 3, _cases, _CLOCK)
