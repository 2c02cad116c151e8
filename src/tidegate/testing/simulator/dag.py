"""A random DAG, and rows that can be followed through it.

A row is known by the *path* that it took and its offset in its source. Rows keep their order along a path,
so a stage's state is one count per path, and a range that does not start at the count shows at once that
rows were lost (it starts later) or doubled (earlier).
"""

from __future__ import annotations

import random
from collections.abc import Collection

import msgspec

Ranges = tuple[tuple[int, int, int], ...]
"""Rows as (path, first offset, offset after the last)."""


class StageSpec(msgspec.Struct, frozen=True):
    """One stage. `paths` maps a path of an input to the path that it continues as here."""

    name: str
    inputs: tuple[str, ...]
    is_sink: bool
    paths: dict[int, int]
    twice: tuple[str, ...] = ()
    """Inputs that it reads twice, as a join with itself does: the second time, their paths are `again` others."""

    @property
    def is_source(self) -> bool:
        return not self.inputs


def again(path: int) -> int:
    """A path of an input, where that is read for the second time."""
    return -1 - path


class Dag(msgspec.Struct, frozen=True):
    stages: dict[str, StageSpec]
    source_of: dict[int, str]
    """Which source the rows of a path come from."""

    @property
    def sources(self) -> list[str]:
        return [name for name, spec in self.stages.items() if spec.is_source]

    @property
    def sinks(self) -> list[str]:
        return [name for name, spec in self.stages.items() if spec.is_sink]

    def readers(self, name: str) -> list[str]:
        return [reader for reader, spec in self.stages.items() if name in spec.inputs]


class DagBuilder:
    def __init__(self, dag: Dag | None = None) -> None:
        """`dag`: what there is already."""
        self._stages: dict[str, StageSpec] = {} if dag is None else dict(dag.stages)
        self._source_of: dict[int, str] = {} if dag is None else dict(dag.source_of)

    def source(self, name: str) -> DagBuilder:
        path = len(self._source_of)
        self._source_of[path] = name
        self._stages[name] = StageSpec(name, (), False, {path: path})
        return self

    def stage(self, name: str, *inputs: str, is_sink: bool = False, twice: tuple[str, ...] = ()) -> DagBuilder:
        paths: dict[int, int] = {}
        for read in inputs:
            for path in self._stages[read].paths.values():
                for taken in (path, again(path)) if read in twice else (path,):
                    paths[taken] = len(self._source_of)
                    self._source_of[paths[taken]] = self._source_of[path]
        self._stages[name] = StageSpec(name, inputs, is_sink, paths, twice)
        return self

    def build(self) -> Dag:
        return Dag(self._stages, self._source_of)


def random_dag(rng: random.Random, reads_twice: float = 0.0) -> Dag:
    """One to three sources, up to three stages between, one or two sinks; every output is read. `reads_twice`: how
    likely a stage between reads its first input twice."""
    builder = DagBuilder()
    names = [f"source{index}" for index in range(rng.randint(1, 3))]
    for name in names:
        builder.source(name)
    unread = set(names)
    for index in range(rng.randint(0, 3)):
        inputs = rng.sample(names, rng.randint(1, min(3, len(names))))
        twice = inputs[:1] if reads_twice and rng.random() < reads_twice else []
        builder.stage(f"stage{index}", *inputs, twice=tuple(twice))
        unread -= set(inputs)
        names.append(f"stage{index}")
        unread.add(f"stage{index}")
    sinks = rng.randint(1, 2)
    for index in range(sinks):
        # The last sink reads all that nothing else does, so that no stage works in vain.
        rest = sorted(unread) if index == sinks - 1 else []
        inputs = sorted({*rest, rng.choice(names)})
        builder.stage(f"sink{index}", *inputs, is_sink=True)
        unread -= set(inputs)
    return builder.build()


def random_lines(rng: random.Random) -> Dag:
    """One or two lines of stages, which may meet in one of the sinks: most outputs have one reader, most stages one
    input."""
    builder = DagBuilder()
    ends: list[str] = []
    for line in range(rng.randint(1, 2)):
        end = f"source{line}"
        builder.source(end)
        for index in range(rng.randint(0, 3)):
            builder.stage(f"stage{line}{index}", end)
            end = f"stage{line}{index}"
        ends.append(end)
    if rng.random() < 0.3:
        builder.stage("met", *ends)
        ends = ["met"]
    for index, end in enumerate(ends):
        builder.stage(f"sink{index}", end, is_sink=True)
    if rng.random() < 0.2:
        builder.stage("both", *ends, is_sink=True)
    return builder.build()


def with_late_stages(dag: Dag, rng: random.Random) -> tuple[Dag, tuple[str, ...]]:
    """The same with a table more, of something that it has, perhaps with a stage between. Returns what was added."""
    builder = DagBuilder(dag)
    read = rng.choice([name for name, spec in dag.stages.items() if not spec.is_sink])
    late: tuple[str, ...] = ("late",)
    if rng.random() < 0.5:
        builder.stage("late_stage", read)
        read, late = "late_stage", ("late_stage", "late")
    return builder.stage("late", read, is_sink=True).build(), late


def with_early_stages(dag: Dag, rng: random.Random, late: Collection[str]) -> tuple[Dag, tuple[str, ...]]:
    """The same with a table more, which is to go, perhaps with a stage between and a source of its own. None of the
    `late` ones is read. Returns what was added."""
    builder = DagBuilder(dag)
    inputs = [rng.choice([name for name, spec in dag.stages.items() if not spec.is_sink and name not in late])]
    early: list[str] = []
    if rng.random() < 0.3:
        builder.source("early_source")
        inputs.append("early_source")
        early.append("early_source")
    if rng.random() < 0.5:
        builder.stage("early_stage", *inputs)
        inputs = ["early_stage"]
        early.append("early_stage")
    return builder.stage("early", *inputs, is_sink=True).build(), (*early, "early")


def with_stage_between(dag: Dag, rng: random.Random, but: frozenset[str]) -> tuple[Dag, tuple[str, str] | None]:
    """The same with a stage that is put before one which reads nothing else, and reads what that does: its rows take
    the path on that those take which come directly. None `but` others. Returns both; None: there is no such stage."""
    readers = [
        spec
        for spec in dag.stages.values()
        if len(spec.inputs) == 1 and not spec.twice and but.isdisjoint((spec.name, *spec.inputs))
    ]
    if not readers:
        return dag, None
    reader = rng.choice(readers)
    source_of = dict(dag.source_of)
    passing: dict[int, int] = {}
    for path in reader.paths:
        passing[path] = len(source_of)
        source_of[passing[path]] = source_of[path]
    on = {passing[path]: after for path, after in reader.paths.items()}
    stages: dict[str, StageSpec] = {}
    for name, spec in dag.stages.items():
        if name == reader.name:
            stages["between"] = StageSpec("between", spec.inputs, False, passing)
            stages[name] = msgspec.structs.replace(spec, paths={**spec.paths, **on})
        else:
            stages[name] = spec
    return Dag(stages, source_of), ("between", reader.name)


def example_dag() -> Dag:
    """Two sources that meet in a join, an aggregation behind it, and two tables: a diamond."""
    builder = DagBuilder().source("orders").source("payments")
    builder.stage("paid", "orders", "payments").stage("totals", "paid")
    builder.stage("paid_table", "paid", is_sink=True)
    builder.stage("revenue_table", "totals", "paid", is_sink=True)
    return builder.build()
