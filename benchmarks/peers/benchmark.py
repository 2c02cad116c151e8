"""Rounds of all peers: every round runs each of them once per work, and what is compared is compared within a round."""

from __future__ import annotations

import atexit
import shutil
import statistics
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from benchmarks.measure import Benchmark, Case, Derived, Round, Target, WrongWork
from benchmarks.peers.environments import CannotRun, say
from benchmarks.peers.job import COUNTS
from benchmarks.peers.report import print_matrix

if TYPE_CHECKING:
    from benchmarks.peers.life import Measured
    from benchmarks.peers.peer import Peer
    from benchmarks.peers.work import Work

NAMES: Final = ("tidegate", "spark", "flink", "flink-unaligned", "bytewax", "declarative")
ROUNDS: Final = 5
_AGAINST_FLINK: Final = Target(at_least=3)

_CLOCK: Final = (
    "wall clock; CPU: user and system time of all processes of a peer (/proc), JVM, compiler and garbage collection too"
)

_NOTES: Final = """\
Input: the same Parquet files for all, hard-linked into the folder that a peer watches. Every peer is a process tree of
  its own on all cores; peers run one after the other, in an order that is turned around every round.
counts: how many rows each of 1,000 keys has had so far. Output: a changelog, a row per key and change, exactly once:
  the newest row of a key is its count. Files of 250,000 rows; a micro-batch takes 4.
chain: the one of ./dev bench spark: priced → banded → paid (rows) and totals (sums in windows of 10 s), but with a
  watermark of a day: Flink and Bytewax take files in no order, and would drop rows as late with its 10 s. Files of
  100,000 rows.
rows/s: from the moment that all files are there until the committed output shows all their rows (of the chain: paid).
  Before it the same process has worked through a quarter as many files or more, and rested for 2 s. rows/CPU s: over
  the same time.
checkpoint: those that ended in that time, p50 and p99 of a round; the number of them is told. With 10 to 20 a round,
  p99 is the longest.
recovery: files are added, all processes are killed (SIGKILL) as soon as the output shows the first of their rows, and
  started again: seconds until it shows more. A new process, and for most a new JVM, is part of that.
lost, doubled: at the end of each round the output is compared with the input; of counts the sums of all differences."""


class _Lives:
    """Runs a peer through a work, once per round, and remembers what it has found."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.failures: dict[tuple[str, str], list[str]] = {}
        self.last: dict[tuple[str, str], Measured | None] = {}

    def live(self, peer: Peer, work: Work) -> Measured | None:
        from benchmarks.peers.life import live

        found: Measured | None = None
        say(f"{work.name}: {peer.name}…")
        try:
            with _folder() as folder:
                found = live(peer, work.part(self.scale * peer.share), folder, _files_folder() / work.name)
            say(f"{work.name}: {peer.name}: {_in_short(found)}")
        except (WrongWork, OSError, subprocess.SubprocessError) as error:
            # One peer that fails in one round must not cost the numbers of all others; the report tells it.
            self.failures.setdefault((work.name, peer.name), []).append(str(error))
            say(f"{work.name}: {peer.name} failed: {error}")
        self.last[work.name, peer.name] = found
        return found


def _in_short(found: Measured) -> str:
    """A round takes minutes: each number is told as soon as it is there."""
    times = found.checkpoints_ms
    checkpoints = "" if not times else f"{len(times)} checkpoints, p50 {statistics.median(times):.0f} ms, "
    return (
        f"{found.rows / found.elapsed_s:,.0f} rows/s, {_cpu_rate(found):,.0f} rows/CPU s, {checkpoints}"
        f"recovery {found.recovery_s:.1f} s, {found.lost} lost, {found.doubled} doubled"
    )


@cache
def _workspace() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tidegate-peers-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _files_folder() -> Path:
    return _workspace() / "files"


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=_workspace(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def make_peers() -> list[Peer]:
    # Imported here: the other benchmarks need none of it.
    from benchmarks.peers.bytewax import Bytewax
    from benchmarks.peers.declarative import Declarative
    from benchmarks.peers.flink import Flink, UnalignedFlink
    from benchmarks.peers.plain_spark import PlainSpark
    from benchmarks.peers.tidegate import Tidegate

    return [Tidegate(), PlainSpark(), Flink(), UnalignedFlink(), Bytewax(), Declarative()]


class Told(msgspec.Struct):
    """What the report says besides numbers, gathered while it is measured."""

    settings: dict[str, str] = msgspec.field(default_factory=dict)
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    lives: _Lives | None = None

    def notes(self) -> str:
        lines = [_NOTES, "settings:"]
        lines += [_entry(name, told) for name, told in self.settings.items()]
        lines += [_entry(f"{name} is skipped", reason) for name, reason in self.skipped.items()]
        failures = {} if self.lives is None else self.lives.failures
        for (work, name), reasons in failures.items():
            lines.append(_entry(f"{work}: {name} failed in {len(reasons)} rounds", reasons[-1]))
        return "\n".join(lines)


def _entry(name: str, text: str) -> str:
    return textwrap.fill(f"{name}: {text}", 118, initial_indent="  ", subsequent_indent="    ")


def cases_of(peers: Sequence[Peer], works: Sequence[Work], scale: float, told: Told) -> list[Case | Derived]:
    """The cases of all peers that can be installed; what was skipped, and why, is told."""
    lives = told.lives = _Lives(scale)
    able: list[Peer] = []
    for peer in peers:
        try:
            peer.install()
            told.settings[f"{peer.name} ({peer.version()})"] = peer.settings()
        except CannotRun as reason:
            told.skipped[peer.name] = str(reason)
            say(f"{peer.name} is skipped: {reason}")
        else:
            able.append(peer)
    cases: list[Case | Derived] = []
    for work in works:
        running: list[str] = []
        for peer in able:
            if (refusal := peer.refuses(work.name)) is not None:
                told.skipped[f"{peer.name} ({work.name})"] = refusal
                say(f"{work.name}: {peer.name} is skipped: {refusal}")
                continue
            cases += _cases_of_peer(lives, peer, work)
            running.append(peer.name)
        cases += _ratios(work, running, lives)
    return cases


def _cases_of_peer(lives: _Lives, peer: Peer, work: Work) -> list[Case | Derived]:
    rows = work.part(lives.scale * peer.share).measured_files * work.rows_per_file

    def rows_per_s() -> float | None:
        found = lives.live(peer, work)
        return None if found is None else found.rows / found.elapsed_s

    def derived(what: str, unit: str, value: Callable[[Measured], float | None]) -> Derived:
        def of_last(_: Round) -> float | None:
            last = lives.last[work.name, peer.name]
            return None if last is None else value(last)

        return Derived(f"{work.name}: {peer.name}: {what}", {}, unit, of_last)

    return [
        Case(f"{work.name}: {peer.name}: rows/s", {"rows": rows}, "rows/s", rows_per_s),
        derived("rows/CPU s", "rows/CPU s", lambda found: found.rows / found.cpu_s),
        derived("checkpoint p50", "ms", lambda found: percentile(found.checkpoints_ms, 50)),
        derived("checkpoint p99", "ms", lambda found: percentile(found.checkpoints_ms, 99)),
        derived("checkpoints", "number", lambda f: None if f.checkpoints_ms is None else len(f.checkpoints_ms)),
        derived("recovery", "s", lambda found: found.recovery_s),
        derived("lost", "rows", lambda found: found.lost),
        derived("doubled", "rows", lambda found: found.doubled),
    ]


def _ratios(work: Work, running: Sequence[str], lives: _Lives) -> list[Derived]:
    """Tidegate's rows per CPU second over everybody else's, of the same round."""

    def ratio(other: str) -> Callable[[Round], float | None]:
        def value(_: Round) -> float | None:
            ours, theirs = lives.last[work.name, "tidegate"], lives.last[work.name, other]
            return None if ours is None or theirs is None else _cpu_rate(ours) / _cpu_rate(theirs)

        return value

    if "tidegate" not in running:
        return []
    return [
        Derived(
            f"{work.name}: tidegate / {other}, rows/CPU s",
            {},
            "ratio",
            ratio(other),
            _AGAINST_FLINK if (work.name, other) == (COUNTS, "flink") else None,
        )
        for other in running
        if other != "tidegate"
    ]


def _cpu_rate(found: Measured) -> float:
    return found.rows / found.cpu_s


def percentile(values: Sequence[float] | None, percent: int) -> float | None:
    """The smallest value that at least so many percent of them do not exceed."""
    if not values:
        return None
    if percent == 50:
        return statistics.median(values)
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def of_peers(names: Sequence[str]) -> Benchmark:
    """The benchmark of these peers, or of all."""
    told = Told()

    def cases(scale: float) -> list[Case | Derived]:
        from benchmarks.peers.work import WORKS

        chosen = [peer for peer in make_peers() if not names or peer.name in names]
        return cases_of(chosen, WORKS, scale, told)

    return Benchmark(
        "Tidegate against plain Spark, Flink, Bytewax and Declarative Pipelines",
        told.notes,
        ROUNDS,
        cases,
        _CLOCK,
        print_matrix,
    )


BENCHMARK: Final = of_peers(())
