"""`python -m benchmarks [NAME…]`: run the benchmarks of these names, or all."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TextIO

from rich.console import Console

from benchmarks import bucket, cluster, dashboard, protocol, scale, spark, unaligned
from benchmarks.measure import Benchmark, Result, WrongWork, measure_rounds, summarize
from benchmarks.peers import benchmark as peers
from benchmarks.report import describe_load, describe_machine, print_table, write_json_lines

BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    "protocol": protocol.BENCHMARK,
    "scale": scale.BENCHMARK,
    "spark": spark.BENCHMARK,
    "unaligned": unaligned.BENCHMARK,
    "bucket": bucket.BENCHMARK,
    "cluster": cluster.BENCHMARK,
    "dashboard": dashboard.BENCHMARK,
    "peers": peers.BENCHMARK,
}

_PIPED_WIDTH: Final = 128
_QUICK_SCALE: Final = 0.1
_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 whether or not targets are met, 1 if something could not be measured, 130 after Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.scale = options.rounds or 1, options.scale * _QUICK_SCALE
    _check(options, parser)
    benchmarks = {"peers": peers.of_peers(options.peer)} if options.peer else BENCHMARKS
    if options.cluster:
        benchmarks = {"bucket": bucket.ON_CLUSTER}
    with ExitStack() as stack:
        out: TextIO | None = None
        if options.out is not None:
            try:
                out = stack.enter_context(options.out.open("w", encoding="utf-8"))
            except OSError as error:
                parser.error(f"cannot write {options.out}: {error.strerror}")
        try:
            for name in options.names or benchmarks:
                _run(name, benchmarks[name], options, out)
        except WrongWork as error:
            print(f"benchmarks: {name} was not measured: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"benchmarks: {name} was interrupted before a round was whole", file=sys.stderr)
            return _INTERRUPTED
    return 0


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends with 2 if it makes no sense."""
    for name in options.names:
        if name not in BENCHMARKS:
            parser.error(f"there is no benchmark {name!r}; there is: {', '.join(BENCHMARKS)}")
    if options.peer and options.names != ["peers"]:
        parser.error("--peer chooses among those of the benchmark peers: ./dev bench peers --peer NAME")
    if options.cluster and options.names != ["bucket"]:
        parser.error("--cluster is of the benchmark bucket: ./dev bench bucket --cluster")
    for name in options.peer:
        if name not in peers.NAMES:
            parser.error(f"there is no peer {name!r}; there is: {', '.join(peers.NAMES)}")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not 0 < options.scale < math.inf:
        parser.error("--scale must be a number above 0")


def _run(name: str, benchmark: Benchmark, options: argparse.Namespace, out: TextIO | None) -> None:
    machine = describe_machine()
    header = f"{name}: {machine}, {describe_load()}, scale {options.scale:g}"
    results = _measure(name, benchmark, options.rounds or benchmark.rounds, options.scale, machine)
    if out is not None:
        write_json_lines(results, out)
    if options.json:
        write_json_lines(results, sys.stdout)
        return
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    notes = benchmark.notes if isinstance(benchmark.notes, str) else benchmark.notes()
    (benchmark.report or print_table)(results, notes, header, console)


def _measure(name: str, benchmark: Benchmark, rounds: int, scale: float, machine: str) -> list[Result]:
    measured = []
    try:
        for values in measure_rounds(benchmark.cases(scale), rounds):
            measured.append(values)
            # A line a round, not a progress bar: its thread would be measured too.
            print(f"{name}: round {len(measured)} of {rounds}", file=sys.stderr)
    except KeyboardInterrupt:
        # Who has waited for an hour wants to see what the whole rounds have shown.
        if not measured:
            raise
        print(f"{name}: interrupted after {len(measured)} of {rounds} rounds", file=sys.stderr)
    results = summarize(name, machine, measured, benchmark.clock)
    if not results:
        raise WrongWork("no case has a value")
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./dev bench",
        description="Measure Tidegate. Targets are reported as met or missed; missing one is no error.",
        epilog="benchmarks: " + "; ".join(f"{name} ({each.about})" for name, each in BENCHMARKS.items()),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the benchmarks to run (default: all)")
    parser.add_argument("--rounds", type=int, help="how often each case is measured (default: its own)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual work per measurement (default: 1)")
    parser.add_argument("--quick", action="store_true", help="one round of a tenth of that work")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="PEER",
        help=f"of the benchmark peers only this one; may be repeated: {', '.join(peers.NAMES)}",
    )
    parser.add_argument(
        "--cluster", action="store_true", help="of the benchmark bucket only what runs on a Spark cluster"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines, one per case, and no table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON lines into this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
