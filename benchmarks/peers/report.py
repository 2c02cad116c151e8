"""A table per work with a line per peer: that is how they are compared. Targets are judged as everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.measure import Result
from benchmarks.report import print_verdict, written

# What a column is called, and of which value.
_COLUMNS: Final = {
    "rows/s": "rows/s",
    "rows/CPU s": "rows/CPU s",
    "checkpoint p50": "checkpoint p50 ms",
    "checkpoint p99": "p99 ms",
    "checkpoints": "number",
    "recovery": "recovery s",
    "lost": "lost",
    "doubled": "doubled",
}


def print_matrix(results: Sequence[Result], notes: str, header: str, console: Console) -> None:
    console.print(escape(header), style="bold")
    works = dict.fromkeys(result.name.split(": ")[0] for result in results)
    for work in works:
        console.print(_matrix(work, [each for each in results if each.name.startswith(f"{work}: ")]))
    for result in results:
        if result.unit == "ratio":
            console.print(f"{result.name}: {written(result.median)} ({_spread(result)})", highlight=False)
    console.print(
        f"Medians of {max(result.rounds for result in results)} rounds; beneath them the smallest and the largest.\n"
        f"Clock: {results[0].clock}.",
        highlight=False,
    )
    console.print(notes, highlight=False, markup=False)
    print_verdict(results, console)


def _matrix(work: str, results: Sequence[Result]) -> Table:
    table = Table(title=escape(work), title_justify="left", title_style="bold")
    table.add_column("peer", no_wrap=True)
    for heading in _COLUMNS.values():
        table.add_column(heading, justify="right")
    found = {tuple(result.name.split(": ")[1:]): result for result in results if result.unit != "ratio"}
    for peer in dict.fromkeys(key[0] for key in found):
        table.add_row(peer, *(_cell(found.get((peer, what))) for what in _COLUMNS))
    return table


def _cell(result: Result | None) -> str:
    """Nothing is shown as nothing: a peer that keeps no record has no number."""
    if result is None:
        return "-"
    if result.min == result.max:
        return written(result.median)
    return f"{written(result.median)}\n[dim]{_spread(result)}[/]"


def _spread(result: Result) -> str:
    return f"{written(result.min)} … {written(result.max)}"
