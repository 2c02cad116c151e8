"""`tidegate run` as a user runs it: signals, a second run, one that hangs and is taken over."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.spark.kills import KilledRuns, epoch_versions
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def wait_for_checkpoint(runs: KilledRuns, above: int = 0, seconds: float = 120) -> int:
    """The newest checkpoint once there is one above `above`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if runs.store.list("decisions"):
            newest = StoredDecisions(runs.store).read().newest
            if newest is not None and newest.checkpoint_id > above:
                return newest.checkpoint_id
        time.sleep(0.1)
    raise AssertionError("no checkpoint was completed")


def wait_for_rows(runs: KilledRuns) -> None:
    """The first checkpoints of a run may come before its first batch."""
    deadline = time.monotonic() + 120
    while not epoch_versions(runs.folder / "lake" / "order_table", "killed/order_table"):
        assert time.monotonic() < deadline, "no row was committed"
        time.sleep(0.1)


def children_of(process: int) -> list[int]:
    found = [path.read_text(encoding="utf-8").split() for path in Path(f"/proc/{process}/task").glob("*/children")]
    assert any(found), "its JVM"
    return [int(child) for children in found for child in children]


def end(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    return output


def test_a_run_that_is_told_to_stop_ends_with_a_checkpoint_and_a_second_run_is_refused(tmp_path: Path) -> None:
    runs = KilledRuns(tmp_path)
    runs.feed(8)
    first = runs.start()
    try:
        wait_for_rows(runs)
        second = runs.start()
        refused = end(second)
        assert second.returncode == 3
        assert "another run is alive" in refused
        assert f"process {first.pid}" in refused
        assert "Traceback" not in refused
        before = StoredDecisions(Folder(runs.root)).read().last_checkpoint_id
        # As `timeout` and systemd send it: to all that belongs to the run, its JVM too.
        for process in (first.pid, *children_of(first.pid)):
            os.kill(process, signal.SIGTERM)
        output = end(first)
        assert first.returncode == 0, output
        assert StoredDecisions(Folder(runs.root)).read().last_checkpoint_id > before
    finally:
        first.kill()
    assert runs.check_every_epoch() >= 1


@pytest.mark.soak  # drivers sleep and wake up in test_drivers.py
def test_a_run_that_was_stopped_and_wakes_up_after_another_took_over_does_no_harm(tmp_path: Path) -> None:
    runs = KilledRuns(tmp_path)
    runs.feed(8)
    old = runs.start()
    try:
        newest = wait_for_checkpoint(runs, above=1)
        old.send_signal(signal.SIGSTOP)
        new = runs.start("--take-over")
        try:
            taken = wait_for_checkpoint(runs, above=newest + 2)
            old.send_signal(signal.SIGCONT)
            output = end(old)
            assert old.returncode == 5, output
            assert "superseded" in output
            assert "Traceback" not in output
            # The new run goes on.
            wait_for_checkpoint(runs, above=taken + 1)
            new.send_signal(signal.SIGTERM)
            assert (said := end(new)) is not None
            assert new.returncode == 0, said
        finally:
            new.kill()
    finally:
        old.send_signal(signal.SIGCONT)
        old.kill()
    runs.run_to_the_end()
    runs.check_tables()
    runs.check_every_epoch()
