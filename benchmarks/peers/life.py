"""One measurement: a peer is started, warmed up, measured, killed in the middle of work, started again and compared."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.measure import WrongWork
from benchmarks.peers.job import CHAIN, COUNTS, Job
from benchmarks.peers.outputs import Shown, read_counts, read_ids, read_totals
from benchmarks.peers.peer import CHECKPOINT_S, ROOT, Peer, Taken, cores
from benchmarks.peers.processes import Processes
from benchmarks.peers.work import (
    Answer,
    Feed,
    Work,
    compare_counts,
    compare_paid,
    compare_totals,
    shown_rows,
    true_counts,
    true_totals,
    write_closing_file,
    write_files,
)

_PATIENCE_S: Final = 240.0
# Often enough to be told from a checkpoint's second, seldom enough to leave the cores to the peer.
_LOOK_EVERY_S: Final = 0.05
_SETTLE_S: Final = 2.0


class Measured(msgspec.Struct, frozen=True):
    """What one life of a peer has shown. `checkpoints_ms` are those that ended while it was measured."""

    rows: int
    elapsed_s: float
    cpu_s: float
    checkpoints_ms: list[float] | None
    recovery_s: float
    lost: int
    doubled: int


def live(peer: Peer, work: Work, folder: Path, files_folder: Path) -> Measured:
    """`folder` is empty, and may be deleted afterwards."""
    files = write_files(work, files_folder)
    closing = write_closing_file(work, files_folder)
    feed = Feed(folder / "input", files)
    job = Job(
        work=work.name,
        input=str(feed.folder),
        output=str(folder / "output"),
        state=str(folder / "state"),
        record=str(folder / "log"),
        files_per_batch=work.files_per_batch,
        cores=cores(),
        checkpoint_s=CHECKPOINT_S,
        port=_free_port(),
    )
    peer.prepare(job)
    watched = _Watched(peer, job, work)
    try:
        watched.start(job)
        return _measure(watched, feed, closing)
    finally:
        watched.kill()


class _Watched:
    """A peer at work, and its output."""

    def __init__(self, peer: Peer, job: Job, work: Work) -> None:
        self.peer, self.job, self.work = peer, job, work
        self.processes: Processes | None = None
        self.shown = self._look()

    def _look(self) -> Shown:
        return Shown(self.job.work, lambda table: self.peer.visible(self.job, table))

    def start(self, job: Job) -> None:
        self.shown = self._look()
        commands, environment = self.peer.commands(job), self.peer.environment(job)
        self.processes = Processes(commands, environment, ROOT, Path(job.record))

    def kill(self) -> None:
        if self.processes is not None:
            self.processes.kill()

    def cpu_s(self) -> float:
        assert self.processes is not None
        return self.processes.cpu_s()

    def await_files(self, files: int) -> None:
        wanted = shown_rows(self.work.name, files * self.work.rows_per_file)
        self.await_that(lambda: self.shown.rows() >= wanted, f"the rows of {files} files")

    def await_that(self, condition: Callable[[], bool], what: str) -> None:
        assert self.processes is not None
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            self.processes.check()
            if time.monotonic() > deadline:
                raise WrongWork(f"{what} did not come within {_PATIENCE_S:.0f} s; {self.processes.last_words()}")
            time.sleep(_LOOK_EVERY_S)


def _measure(watched: _Watched, feed: Feed, closing: Path) -> Measured:
    work, job = watched.work, watched.job
    _warm_up(watched, feed)

    cpu_before, began, began_ms = watched.cpu_s(), time.perf_counter(), time.time() * 1_000
    feed.offer(work.measured_files)
    watched.await_files(feed.offered)
    elapsed_s, cpu_s = time.perf_counter() - began, watched.cpu_s() - cpu_before
    ended_ms = time.time() * 1_000
    taken = watched.peer.checkpoints(job)

    recovery_s = _kill_and_restart(watched, feed)
    watched.await_files(feed.offered)
    answer = _compare(watched, feed, closing)
    return Measured(
        work.measured_files * work.rows_per_file,
        elapsed_s,
        cpu_s,
        _within(taken, began_ms, ended_ms),
        recovery_s,
        answer.lost,
        answer.doubled,
    )


def _warm_up(watched: _Watched, feed: Feed) -> None:
    """In halves: the second finds code that is compiled already, and is waited for like what is measured."""
    first = watched.work.warm_up_files // 2
    for files in (first, watched.work.warm_up_files - first):
        feed.offer(files)
        watched.await_files(feed.offered)
    time.sleep(_SETTLE_S)


def _kill_and_restart(watched: _Watched, feed: Feed) -> float:
    """Killed as soon as the output shows a part of new input. Returns the seconds from the restart until it shows more
    than it did when it was killed; a file that appears meanwhile makes sure that there is more."""
    before = watched.shown.rows()
    feed.offer(watched.work.killed_files)
    watched.await_that(lambda: watched.shown.rows() > before, "an output that grows")
    watched.kill()
    feed.offer(1)
    began = time.perf_counter()
    watched.start(watched.peer.restored(watched.job))
    left = watched.shown.rows()
    watched.await_that(lambda: watched.shown.rows() > left, "an output that grows again")
    return time.perf_counter() - began


def _compare(watched: _Watched, feed: Feed, closing: Path) -> Answer:
    """With what the input demands. What comes late, and would be too much, is given the time of two checkpoints."""
    peer, job, work = watched.peer, watched.job, watched.work
    files = feed.offered
    if work.name == COUNTS:
        time.sleep(2 * CHECKPOINT_S + _SETTLE_S)
        return compare_counts(read_counts(peer.visible(job, "counts")), true_counts(files, work.rows_per_file))
    assert work.name == CHAIN
    expected = true_totals(files, work.rows_per_file)
    wanted = sum(orders for orders, _ in expected.values())
    feed.close(closing)
    watched.await_that(lambda: _orders(peer, job) >= wanted, "the totals of all windows")
    time.sleep(2 * CHECKPOINT_S + _SETTLE_S)
    totals = read_totals(peer.visible(job, "totals"))
    _check_revenue(totals, expected)
    of_rows = compare_paid(read_ids(peer.visible(job, "paid")), files * work.rows_per_file)
    of_totals = compare_totals(totals, expected)
    return Answer(of_rows.lost + of_totals.lost, of_rows.doubled + of_totals.doubled)


def _orders(peer: Peer, job: Job) -> int:
    return sum(orders for orders, _ in read_totals(peer.visible(job, "totals")).values())


def _check_revenue(
    found: dict[tuple[str, str], tuple[int, float]], expected: dict[tuple[str, str], tuple[int, float]]
) -> None:
    """Where as many orders came as should, their sum is right too: else it did other work."""
    for group, (orders, revenue) in expected.items():
        came, sum_of_them = found.get(group, (0, 0.0))
        if came == orders and abs(sum_of_them - revenue) > 1e-6 * revenue:
            raise WrongWork(f"the revenue of {group} is {sum_of_them}, not {revenue}")


def _within(taken: list[Taken] | None, began_ms: float, ended_ms: float) -> list[float] | None:
    if taken is None:
        return None
    return [each.took_ms for each in taken if began_ms <= each.ended_ms <= ended_ms]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])
