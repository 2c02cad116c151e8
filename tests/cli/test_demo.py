"""The verdict of the demo can be a bad one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tidegate.cli.answers import ComparedTable
from tidegate.cli.demo import Rows, compare, demo_command, take_open_windows
from tidegate.cli.exits import Exit
from tidegate.errors import InvalidConfig

WANTED: Rows = Counter({(1, "DE"): 1, (2, "FR"): 2, (3, "IT"): 1})


def test_what_is_as_it_should_be_has_no_difference() -> None:
    assert compare(WANTED, Counter(WANTED)) == ComparedTable(4, 4, 0, 0, 0)


def test_a_row_that_is_lost_doubled_or_made_up_is_counted_as_such() -> None:
    assert compare(WANTED, WANTED - Counter({(2, "FR"): 1})) == ComparedTable(4, 3, 1, 0, 0)
    assert compare(WANTED, WANTED + Counter({(2, "FR"): 3})) == ComparedTable(4, 7, 0, 3, 0)
    assert compare(WANTED, WANTED + Counter({(9, "PL"): 2})) == ComparedTable(4, 6, 0, 0, 2)


def test_only_windows_that_the_watermark_has_not_passed_are_still_open() -> None:
    noon = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
    revenue: Rows = Counter(
        {(noon, "DE", 1): 1, (noon.replace(minute=1), "DE", 2): 1, (noon.replace(hour=13), "DE", 3): 1}
    )
    at_12_01 = int(noon.replace(minute=1).timestamp() * 1000)
    assert take_open_windows(revenue, at_12_01) == 2
    assert revenue == {(noon, "DE", 1): 1}


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.cli.demo._Teller", None)  # nothing is even said
    with pytest.raises(InvalidConfig, match=r"--svg .*/missing/demo.svg cannot be written: No such file or directory"):
        demo_command(svg=tmp_path / "missing" / "demo.svg")


@pytest.mark.slow
def test_whoever_ends_the_demo_ends_its_run_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidegate", "demo", "--files", "4"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # by which its run is known
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
        until = time.monotonic() + 120
        while not runs_under(tmp_path):
            assert demo.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        demo.terminate()
        assert demo.wait(120) == Exit.INTERRUPTED
    assert runs_under(tmp_path) == []


def runs_under(folder: Path) -> list[str]:
    """Processes of runs that have their root there."""
    found = subprocess.run(
        ["pgrep", "-f", f"tidegate run .*--root {folder}"], capture_output=True, text=True, check=False
    )
    return found.stdout.split()
