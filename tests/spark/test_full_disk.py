"""A run on a disk that fills up: what it says, what is seen of it from outside, and that it loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.full_disk import needs_a_small_disk, on_small_disk
from tests.spark.full_disk_pipeline import ROWS


@pytest.mark.slow
@needs_a_small_disk
@pytest.mark.soak  # it takes long; stores that fail are in CI without Spark
def test_a_run_whose_disk_is_full_says_so_everywhere_and_goes_on_when_it_is_not(tmp_path: Path) -> None:
    disk, rows = tmp_path / "disk", tmp_path / "rows"
    rows.mkdir()
    found = on_small_disk(disk, "8m", "tests.spark.full_disk_pipeline", [str(rows)])
    full = "No space left on device"
    room = f"(0.0 MB free on the disk at {disk}"
    for said in (found["error"], *(each for each in found["told"] if "restarting" in each), found["status"]):
        assert full in said
        assert room in said
        assert "; free some space there" in said
    assert any("restarting from the last checkpoint" in said for said in found["told"])
    assert any("given up after 2 failures in a row; the next run goes on from ckpt-" in said for said in found["told"])
    assert "is not running: the last run failed at" in found["status"]
    restarting = [why for life, state, why in found["seen"] if (life, state) == ("alive", "restarting")]
    assert restarting
    assert all(full in why for why in restarting)
    assert found["ids"] == list(range(ROWS))
    assert "the last run ended well" in found["status after"]
