"""What a checkpoint, a round and a restart cost as a pipeline grows: stages, files of state, segments in flight."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.measure import Benchmark, Case, Derived, Round, Target, cpu_ns
from benchmarks.scale_pipeline import ScaledPipeline
from tidegate.engine.status import Observer
from tidegate.protocol.messages import Flag

_STAGES: Final = (10, 100, 1_000)
_FILES: Final = (100, 10_000, 100_000)
_SEGMENTS: Final = (1, 100, 10_000)
_TAKEN: Final = 5
_POLLS: Final = 10

_NOTES: Final = """\
Spark and tables are played, the root is a folder, all else is what runs. CPU is that of all threads.
checkpoint: from its trigger until it is visible and cleaned up after, median of 5, one batch of each stage before
  each. bytes: manifests, lists of files and records that it writes. requests: calls of the root's files for it, a
  listing as one per 1,000 names. memory: what it has allocated beyond what was there before, at its peak.
files: a source, a stage and a sink; the stage's state has so many files, a hundred to a store, of which each
  checkpoint finds one more. restart: recover, check, open a generation, lay all folders out; and the first
  checkpoint after it, which looks at all that is there.
stages: chains of ten. poll: a round of the control thread with nothing new; status: what is told every 0.2 s.
segments: so many are in flight, and every checkpoint is unaligned and captures all of them."""


class _Measured:
    """Several values that are measured together, once a round."""

    def __init__(self, measure: Callable[[], Mapping[str, float]]) -> None:
        self._measure = measure
        self._left: dict[str, float] = {}

    def value(self, name: str) -> float:
        if name not in self._left:
            self._left = dict(self._measure())
        return self._left.pop(name)


@contextmanager
def _pipeline(stages: int) -> Iterator[ScaledPipeline]:
    with tempfile.TemporaryDirectory(prefix="tidegate-scale-") as folder:
        pipeline = ScaledPipeline(Path(folder), stages)
        try:
            yield pipeline
        finally:
            pipeline.stop()


def _cpu_ms(work: Callable[[], object]) -> float:
    return cpu_ns(work) / 1e6


def _checkpoints(pipeline: ScaledPipeline, before: Callable[[], None], flags: Flag = Flag.NONE) -> dict[str, float]:
    cpu_ms: list[float] = []
    written: list[int] = []
    requests: list[int] = []
    for _ in range(_TAKEN):
        before()
        pipeline.requests.clear()
        pipeline.written.clear()
        cpu_ms.append(_cpu_ms(partial(pipeline.checkpoint, flags)))
        written.append(pipeline.written.total())
        requests.append(pipeline.requests.total())
    before()
    tracemalloc.start()
    pipeline.checkpoint(flags)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "checkpoint": median(cpu_ms),
        "bytes": median(written) / 1e3,
        "requests": median(requests),
        "memory": peak / 1e6,
    }


def measure_files(files: int) -> dict[str, float]:
    with _pipeline(3) as pipeline:
        pipeline.keep_state(files)

        def change() -> None:
            pipeline.change_state()
            pipeline.run_batches()

        for _ in range(2):
            change()
            pipeline.checkpoint()
        found = _checkpoints(pipeline, change)
        pipeline.requests.clear()
        found["restart"] = _cpu_ms(pipeline.restart)
        found["restart requests"] = pipeline.requests.total()
        change()
        found["first checkpoint"] = _cpu_ms(pipeline.checkpoint)
        return found


def measure_stages(stages: int) -> dict[str, float]:
    with _pipeline(stages) as pipeline:
        pipeline.run_batches()
        pipeline.checkpoint()
        found = _checkpoints(pipeline, pipeline.run_batches)
        found["poll"] = median(_cpu_ms(pipeline.generation.poll) for _ in range(_POLLS))
        observe = partial(Observer("scaled").observe, pipeline.generation)
        found["status"] = median(_cpu_ms(observe) for _ in range(_POLLS))
        found["queries"] = median(_cpu_ms(pipeline.generation.check_queries) for _ in range(_POLLS))
        return found


def measure_segments(segments: int) -> dict[str, float]:
    with _pipeline(3) as pipeline:
        for _ in range(segments):
            pipeline.run_batches(1)
        pipeline.checkpoint(Flag.UNALIGNED)
        return _checkpoints(pipeline, partial(pipeline.run_batches, 1), Flag.UNALIGNED)


_UNITS: Final = {
    "checkpoint": "ms CPU",
    "bytes": "kB",
    "requests": "requests",
    "memory": "MB",
    "restart": "ms CPU",
    "restart requests": "requests",
    "first checkpoint": "ms CPU",
    "poll": "ms CPU",
    "status": "ms CPU",
    "queries": "ms CPU",
}
_CHECKPOINT: Final = ("checkpoint", "bytes", "requests", "memory")


def _cases(scale: float) -> Sequence[Case | Derived]:
    cases: list[Case | Derived] = []

    def add(
        what: str,
        sizes: Sequence[int],
        measure: Callable[[int], Mapping[str, float]],
        names: Sequence[str],
        targets: Mapping[str, Target],
    ) -> list[dict[str, Case]]:
        added: list[dict[str, Case]] = []
        for size in sizes:
            measured = _Measured(partial(measure, size))
            added.append(
                {
                    name: Case(
                        f"{what}: {name}",
                        {what: size},
                        _UNITS[name],
                        partial(measured.value, name),
                        targets.get(name) if size == sizes[-1] else None,
                    )
                    for name in names
                }
            )
        for name in names:
            cases.extend(each[name] for each in added)
        return added

    def scaled(sizes: Sequence[int]) -> list[int]:
        return [sizes[0], *(max(sizes[0], int(size * scale)) for size in sizes[1:])]

    files = add(
        "files",
        scaled(_FILES),
        measure_files,
        (*_CHECKPOINT, "restart", "restart requests", "first checkpoint"),
        {},
    )

    def more(name: str) -> Callable[[Round], float]:
        return lambda values: values[files[-1][name]] - values[files[0][name]]

    last = scaled(_FILES)[-1]
    cases.append(Derived("unchanged files add", {"files": last}, "ms CPU", more("checkpoint"), Target(at_most=50)))
    cases.append(Derived("unchanged files add", {"files": last}, "kB", more("bytes"), Target(at_most=100)))
    add(
        "stages",
        scaled(_STAGES),
        measure_stages,
        (*_CHECKPOINT, "poll", "status", "queries"),
        {"poll": Target(at_most=100)},
    )
    add("segments", scaled(_SEGMENTS), measure_segments, _CHECKPOINT, {})
    return cases


BENCHMARK: Final = Benchmark(
    about="what a checkpoint, a round and a restart cost as a pipeline grows",
    notes=_NOTES,
    rounds=1,
    cases=_cases,
)
