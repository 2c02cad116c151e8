"""Runs on a root in a bucket that are really killed, on two machines by turns, behind a network that fails: nothing
lost, nothing twice, nothing left in the bucket."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.s3_server import S3Server
from tests.spark.bucket_runs import BucketRuns
from tests.spark.harness import table_rows
from tests.spark.kills import STEPS, at_steps, kill_often
from tidegate.cli.exits import Exit
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.inspection import check_files, read_manifest, references

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.s3]


def test_runs_on_a_bucket_that_are_killed_lose_and_double_nothing(tmp_path: Path, s3_server: S3Server) -> None:
    with BucketRuns(tmp_path, s3_server, "--unaligned-after", "3s", seed=16) as runs:
        steps = at_steps(STEPS)
        assert kill_often(runs, steps, random_kills=3, seed=16) == 10
        runs.check_tables()
        assert runs.check_every_epoch() >= 3
        runs.check_no_orphans()
        plan = runs.proxy.plan
        assert plan is not None
        assert plan.happened.total() > 10, "the network has hardly failed"


@pytest.mark.soak  # it takes long; in a folder it is in CI
def test_a_run_that_sleeps_while_another_takes_over_does_nothing_more(tmp_path: Path, s3_server: S3Server) -> None:
    with BucketRuns(tmp_path, s3_server, seed=17) as runs:
        runs.feed()
        with ExitStack() as stack:
            old = runs.start()
            stack.callback(old.kill)
            _wait_until(lambda: _shows_rows(runs), old)
            old.send_signal(signal.SIGSTOP)
            runs.feed()
            before = StoredDecisions(runs.store).read().generation
            new = super(BucketRuns, runs).start("--work", str(runs.work("there")), "--take-over")
            stack.callback(new.kill)
            _wait_until(lambda: StoredDecisions(runs.store).read().generation > before, new)
            old.send_signal(signal.SIGCONT)
            assert runs.finish(old) == Exit.SUPERSEDED, runs.output[-1][-3000:]
            new.send_signal(signal.SIGTERM)
            assert runs.finish(new) == 0, runs.output[-1][-3000:]
        runs.run_to_the_end()
        runs.check_tables()
        runs.check_every_epoch()
        runs.check_no_orphans()


@pytest.mark.soak  # it takes long; damage of every kind is in CI without Spark
def test_a_damaged_object_is_told_of_and_no_row_is_lost_or_doubled_for_it(tmp_path: Path, s3_server: S3Server) -> None:
    with BucketRuns(tmp_path, s3_server, seed=18) as runs:
        for _ in range(2):
            runs.feed()
            runs.run_to_the_end()
        store = runs.store
        log = StoredDecisions(store).read()
        newest = log.newest
        assert newest is not None
        older = [each for each in log.retained if each < newest.checkpoint_id]
        assert older
        others: set[str] = set()
        for each in older:
            record = log.completed(each)
            assert record is not None
            others |= references(store, read_manifest(store, record))
        name = min(references(store, read_manifest(store, newest)) - others)
        store.write(name, (store.read(name) or b"") + b"more than was written")
        checked = check_files(store, read_manifest(store, newest), reads=False)
        assert [each.path for each in checked if each.damage is not None] == [name]
        runs.feed()
        code = runs.finish(runs.start("--available-now"))
        assert f"{name} of stage" in runs.output[-1]
        assert "size differs" in runs.output[-1]
        if code == Exit.FINE:  # no table showed more than the one before it
            runs.check_tables()
        else:
            assert code == Exit.UNUSABLE_ROOT, runs.output[-1][-3000:]
            assert StoredDecisions(store).read().next_slot == log.next_slot


def _shows_rows(runs: BucketRuns) -> bool:
    lake = runs.folder / "lake" / "paid_table"
    return lake.exists() and bool(table_rows(lake, ["id"]))


def _wait_until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not is_so():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.5)
