"""Cases, measured in interleaved rounds.

Every round measures every case once, so that whatever else the machine does falls on all of them alike, and
what is compared (`Derived`) is compared within a round. A case is told by the median of its rounds; the
smallest and the largest say how far to trust it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

CLOCK: Final = "CPU time of this process (time.process_time_ns), garbage collector on"


class WrongWork(Exception):
    """The code under measurement did not do what it was measured for: its numbers would mean nothing."""


class Target(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the median is held to. One of the two is set."""

    at_least: float | None = None
    at_most: float | None = None

    def is_met_by(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


class Case(msgspec.Struct, frozen=True, eq=False):
    """One thing to measure. `measure` does it once, and returns a value in the unit, or None if there is none."""

    name: str
    parameters: dict[str, int]
    unit: str
    measure: Callable[[], float | None]
    target: Target | None = None


Round = Mapping[Case, float]
"""Only those that have a value."""


class Derived(msgspec.Struct, frozen=True, eq=False):
    """A value that follows from those of the same round."""

    name: str
    parameters: dict[str, int]
    unit: str
    value: Callable[[Round], float | None]
    target: Target | None = None


class Benchmark(msgspec.Struct, frozen=True):
    """`notes` say how it measures, `clock` with what; they are asked for when it is over. `cases` takes the scale: the
    share of the usual work that each measurement does. `report` prints the results in a way of its own."""

    about: str
    notes: str | Callable[[], str]
    rounds: int
    cases: Callable[[float], Sequence[Case | Derived]]
    clock: str = CLOCK
    report: Callable[[Sequence[Result], str, str, Console], None] | None = None


class Result(msgspec.Struct, frozen=True):
    benchmark: str
    name: str
    parameters: dict[str, int]
    unit: str
    median: float
    min: float
    max: float
    rounds: int
    target: Target | None
    met: bool | None
    clock: str
    machine: str


def cpu_ns(work: Callable[[], object]) -> int:
    """The CPU time that `work` takes, with the garbage of whatever ran before out of its way."""
    gc.collect()
    start = time.process_time_ns()
    work()
    return time.process_time_ns() - start


def measure_rounds(cases: Sequence[Case | Derived], rounds: int) -> Iterator[dict[Case | Derived, float | None]]:
    """Yield the values of each round, in the order of the cases."""
    measurable = [case for case in cases if isinstance(case, Case)]
    for number in range(rounds):
        # There and back again: a machine that gets slower or faster meanwhile favours none.
        measured = {case: case.measure() for case in (measurable if number % 2 == 0 else measurable[::-1])}
        there = {case: value for case, value in measured.items() if value is not None}
        yield {case: measured[case] if isinstance(case, Case) else case.value(there) for case in cases}


def summarize(
    benchmark: str, machine: str, rounds: Sequence[Mapping[Case | Derived, float | None]], clock: str = CLOCK
) -> list[Result]:
    """A case without any value has no result; one with a few tells of how many rounds."""
    results: list[Result] = []
    for case in rounds[0]:
        values = [value for values in rounds if (value := values[case]) is not None]
        if not values:
            continue
        median = statistics.median(values)
        results.append(
            Result(
                benchmark,
                case.name,
                case.parameters,
                case.unit,
                median,
                min(values),
                max(values),
                len(values),
                case.target,
                None if case.target is None else case.target.is_met_by(median),
                clock,
                machine,
            )
        )
    return results
