"""Results as JSON lines, for programs, and as a table, for people."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import TextIO

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.measure import Result, Target


def describe_machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{cores} cores, {python}, {platform.system()} {platform.machine()}"


def describe_load() -> str:
    return f"load {os.getloadavg()[0]:.1f} before the run" if hasattr(os, "getloadavg") else "load unknown"


def write_json_lines(results: Sequence[Result], file: TextIO) -> None:
    file.writelines(msgspec.json.encode(result).decode() + "\n" for result in results)
    file.flush()


def print_table(results: Sequence[Result], notes: str, header: str, console: Console) -> None:
    """What was found, how it was found, and which targets are met and which are not."""
    table = Table(title=escape(header), title_justify="left", title_style="bold")
    table.add_column("case", no_wrap=True)
    for heading in ("median", "min", "max", "spread"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("unit", "target", "verdict"):
        table.add_column(heading, no_wrap=True)
    for result in results:
        table.add_row(
            _title(result),
            *(written(value) for value in (result.median, result.min, result.max)),
            f"{(result.max - result.min) / abs(result.median or 1):.0%}",
            result.unit,
            "" if result.target is None else _wanted(result.target),
            {None: "", True: "[green]met[/]", False: "[bold red]MISSED[/]"}[result.met],
        )
    console.print(table)
    console.print(f"Clock: {results[0].clock}. Median of {results[0].rounds} interleaved rounds.", highlight=False)
    console.print(notes, highlight=False, markup=False)
    print_verdict(results, console)


def print_verdict(results: Sequence[Result], console: Console) -> None:
    for line in _verdict(results):
        console.print(line, highlight=False, markup=False, style="bold")


def _verdict(results: Sequence[Result]) -> list[str]:
    judged = [result for result in results if result.target is not None]
    missed = [result for result in judged if not result.met]
    if not judged:
        return []
    if not missed:
        return [f"All {len(judged)} targets are met."]
    return [
        f"{len(missed)} of {len(judged)} targets are NOT met:",
        *(
            f"  {_title(result)}: {written(result.median)} {result.unit}, wanted {_wanted(result.target)}"
            for result in missed
            if result.target is not None
        ),
    ]


def _title(result: Result) -> str:
    parameters = result.parameters
    if "from" in parameters:
        return f"{result.name}, {parameters['from']:,} → {parameters['to']:,}"
    return ", ".join((result.name, *(f"{value:,} {name}" for name, value in parameters.items())))


def _wanted(target: Target) -> str:
    if target.at_least is not None:
        return f"≥ {written(target.at_least)}"
    return "" if target.at_most is None else f"≤ {written(target.at_most)}"


def written(value: float) -> str:
    """A number as people read it."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
