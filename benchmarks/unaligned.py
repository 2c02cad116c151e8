"""How long a checkpoint takes behind a backlog: aligned, and unaligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from benchmarks.measure import Benchmark, Case, Derived, Round, Target

if TYPE_CHECKING:
    from benchmarks.unaligned_runs import Behind

# Seconds of work that lie before the slow stage when a checkpoint is triggered, at scale 1.
_BACKLOGS_S: Final = (5, 20, 60)
_WANTED_AT_S: Final = 60

_CLOCK: Final = "wall clock of the run (checkpoints: the run's own clock; rows: time.perf_counter)"

_NOTES: Final = """\
One JVM, local[*], fsync on. Parquet files → rows → slow → digits → table: a source, two stages and a Delta table, each
  a query of its own (--no-chain). slow sleeps 50 ms a row, one row at a time: that many seconds of its work lie before
  it, in 20 segments, when a checkpoint is triggered. It is the only one under way.
aligned: every stage waits for its barrier (the default). unaligned: none but sinks does (--unaligned-after 0s).
checkpoint: from the trigger until it is decided.
stages: until the last stage that may cut has reported: it has cut, and stored its snapshot and what was in flight to
  it. Seen by the control thread, within a round of 15 ms.
sinks: what the checkpoint takes beyond that: the table's query, which always aligns, reads what digits had written
  before the barrier; then the decision.
rows/s: of slow, from the trigger until the table's query has all rows.
in flight: bytes that the unaligned checkpoint has captured, read once for their checksums and forced to the disk."""


def _cases(scale: float) -> list[Case | Derived]:
    found: list[Case | Derived] = []
    for backlog_s in _BACKLOGS_S:
        found += _behind(backlog_s, max(1, round(backlog_s * scale)))
    return found


def _behind(nominal_s: int, backlog_s: int) -> list[Case | Derived]:
    from benchmarks.unaligned_runs import measure_behind

    last: dict[bool, Behind] = {}
    parameters = {"s of work": backlog_s}

    def measure(*, unaligned: bool) -> Callable[[], float]:
        def checkpoint_ms() -> float:
            last[unaligned] = measure_behind(backlog_s, unaligned=unaligned)
            return last[unaligned].checkpoint_ms

        return checkpoint_ms

    aligned = Case("checkpoint: aligned", parameters, "ms", measure(unaligned=False))
    unaligned = Case("checkpoint: unaligned", parameters, "ms", measure(unaligned=True))

    def derived(name: str, unit: str, value: Callable[[Round], float], target: Target | None = None) -> Derived:
        return Derived(name, parameters, unit, value, target)

    wanted = Target(at_most=0.05) if nominal_s == _WANTED_AT_S else None
    return [
        aligned,
        unaligned,
        derived("checkpoint: unaligned / aligned", "ratio", lambda values: values[unaligned] / values[aligned]),
        derived("stages: aligned", "ms", lambda _: last[False].stages_ms),
        derived("stages: unaligned", "ms", lambda _: last[True].stages_ms),
        derived("stages: unaligned / aligned", "ratio", lambda _: last[True].stages_ms / last[False].stages_ms, wanted),
        derived("sinks add: aligned", "ms", lambda _: last[False].sinks_add_ms),
        derived("sinks add: unaligned", "ms", lambda _: last[True].sinks_add_ms),
        derived("rows: aligned", "rows/s", lambda _: last[False].rows_per_s),
        derived("rows: unaligned", "rows/s", lambda _: last[True].rows_per_s),
        derived("in flight", "kB", lambda _: last[True].in_flight_bytes / 1e3),
    ]


BENCHMARK: Final = Benchmark("checkpoints behind a backlog, aligned and unaligned", _NOTES, 3, _cases, _CLOCK)
