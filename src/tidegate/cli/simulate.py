"""`tidegate simulate`: search simulated runs for a broken guarantee."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tidegate.cli.answers import FailedSeed, ReplayAnswer, SimulateAnswer
from tidegate.cli.options import AsJson
from tidegate.cli.speech import say

if TYPE_CHECKING:
    from tidegate.testing.simulator import Dag, Outcome

_CHUNK = 25


class Depth(enum.Enum):
    """How much of what runs is simulated."""

    PROTOCOL = "the protocol"
    WHOLE = "all but Spark and tables"
    TOGETHER = "the same, by several instances"


class Tally(msgspec.Struct):
    """What the seeds of one search did together."""

    seeds: int = 0
    failures: list[FailedSeed] = []
    checkpoints: int = 0
    unaligned: int = 0
    aborted: int = 0
    generations: int = 0
    crashes: int = 0
    refused: int = 0
    steps: int = 0

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.checkpoints += len(outcome.completions)
        self.unaligned += outcome.unaligned
        self.aborted += outcome.aborted
        self.generations += outcome.generations
        self.crashes += outcome.crashes
        self.refused += outcome.refused is not None
        self.steps += outcome.steps
        if outcome.failure is not None:
            self.failures.append(FailedSeed(outcome.seed, outcome.failure, outcome.replay))

    def merge(self, other: Tally) -> None:
        for field in self.__struct_fields__:
            setattr(self, field, getattr(self, field) + getattr(other, field))


def simulate_command(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Replay this one seed, with all that happens.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0 means one per core.")] = 0,
    whole: Annotated[
        bool, typer.Option("--whole", help="Run all that runs, but for Spark and tables, over files in memory.")
    ] = False,
    together: Annotated[
        bool, typer.Option("--together", help="The same as --whole, with several instances that run one pipeline.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the checkpoint protocol on simulated clusters full of faults, and check every guarantee.

    One seed is one run: a random DAG over several simulated driver processes, with lost messages, crashes,
    changes of leader, old leaders that come back, and a store that fails, also after having written. A seed
    that breaks a guarantee is printed with the command that replays it. Exits with 1 if there was one.

    With --whole the queries are not simulated but played, file by file as Spark writes them, and everything
    else is what runs: a root in memory, its snapshots, gates, restore and cleaning up, with kills between any
    two calls of its files. That takes longer for each seed. With --together several instances run each of these
    pipelines, are cut off from each other and from the root, and are taken for dead.

    Example: tidegate simulate --seeds 5000
    Example: tidegate simulate --whole --seeds 200
    """
    depth = Depth.TOGETHER if together else Depth.WHOLE if whole else Depth.PROTOCOL
    if seed is not None:
        _replay(seed, as_json, depth)
        return
    started = time.monotonic()
    tally = _search(first, seeds, jobs or os.cpu_count() or 1, depth, quiet=as_json)
    seconds = time.monotonic() - started
    if as_json:
        found = {**msgspec.structs.asdict(tally), "failures": tuple(tally.failures)}
        say(SimulateAnswer(**found, seconds=round(seconds, 3)))
    else:
        _print_tally(tally, seconds)
    if tally.failures:
        raise typer.Exit(1)


def _simulator(depth: Depth) -> Callable[..., Outcome]:
    """Other commands need not wait for it, nor one of the depths for the others."""
    if depth is Depth.PROTOCOL:
        from tidegate.testing.simulator import simulate

        return simulate
    from tidegate.testing.simulator.whole import simulate_together, simulate_whole

    return simulate_together if depth is Depth.TOGETHER else simulate_whole


def run_chunk(first: int, count: int, *, depth: Depth = Depth.PROTOCOL) -> Tally:
    """Run some seeds in this process."""
    run = _simulator(depth)
    tally = Tally()
    for seed in range(first, first + count):
        tally.add(run(seed))
    return tally


def _search(first: int, seeds: int, jobs: int, depth: Depth, *, quiet: bool) -> Tally:
    total = Tally()
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[found]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as progress:
        task = progress.add_task("seeds", total=seeds, found="")
        for tally in _tallies(first, seeds, jobs, depth):
            total.merge(tally)
            found = f"[red]{len(total.failures)} failed" if total.failures else ""
            progress.update(task, completed=total.seeds, found=found)
    return total


def _tallies(first: int, seeds: int, jobs: int, depth: Depth) -> Iterator[Tally]:
    chunks = [(start, min(_CHUNK, first + seeds - start)) for start in range(first, first + seeds, _CHUNK)]
    if jobs == 1 or len(chunks) == 1:
        yield from (run_chunk(start, count, depth=depth) for start, count in chunks)
        return
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(run_chunk, depth=depth), *zip(*chunks, strict=True))


def _print_tally(tally: Tally, seconds: float) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{tally.seeds:,} seeds, {tally.steps:,} events in {seconds:.1f} s")
    console.print(
        f"{tally.checkpoints:,} checkpoints completed ({tally.unaligned:,} unaligned), {tally.aborted:,} aborted"
    )
    console.print(
        f"{tally.crashes:,} crashes, {tally.generations:,} generations, "
        f"{tally.refused:,} recoveries refused because a checkpoint was damaged"
    )
    for failure in tally.failures[:20]:
        console.print(f"[red]seed {failure.seed}[/]: {escape(failure.failure)}")
        console.print(f"    replay it with: {failure.replay}")
    if len(tally.failures) > 20:
        console.print(f"… and {len(tally.failures) - 20} more")
    if tally.failures:
        console.print(f"[red]{len(tally.failures)} of {tally.seeds} seeds broke a guarantee")
    else:
        console.print("[green]nothing lost, nothing twice, every guarantee held")


def _replay(seed: int, as_json: bool, depth: Depth) -> None:
    outcome = _simulator(depth)(seed, trace=True)
    if as_json:
        say(ReplayAnswer(seed=seed, failure=outcome.failure, steps=outcome.steps, trace=tuple(outcome.trace)))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for line in (*_told_of(seed, depth), *outcome.trace):
            console.print(line, markup=False)
        verdict = f"[red]{escape(outcome.failure)}" if outcome.failure else "[green]every guarantee held"
        console.print(verdict)
    if outcome.failure:
        raise typer.Exit(1)


def _told_of(seed: int, depth: Depth) -> tuple[str, str]:
    """What the seed has decided before anything happens."""
    if depth is not Depth.PROTOCOL:
        from tidegate.testing.simulator.whole import random_together_scenario, random_whole_scenario

        is_together = depth is Depth.TOGETHER
        played = random_together_scenario(seed) if is_together else random_whole_scenario(seed)
        where = f"on {played.together.instances} instances" if is_together else f"on {played.drivers} driver(s)"
        return _shape(seed, played.dag, where), repr(played)
    from tidegate.testing.simulator import random_scenario

    scenario = random_scenario(seed)
    where = f"on {scenario.instances} instance(s)"
    return _shape(seed, scenario.dag, where), f"rows: {scenario.rows}; {scenario.config}; {scenario.faults}"


def _shape(seed: int, dag: Dag, where: str) -> str:
    stages = (f"{name} ← {' + '.join(spec.inputs)}" if spec.inputs else name for name, spec in dag.stages.items())
    return f"seed {seed}: {', '.join(stages)}, {where}"
