"""What a run makes has the permissions that the user's umask leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_all_that_a_run_makes_follows_the_umask(tmp_path: Path) -> None:
    """One that lets the group write and others do nothing: neither is what Python, Spark or Hadoop do by themselves."""
    umask = 0o007
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.umask_pipeline", str(tmp_path), f"{umask:o}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    made: dict[str, tuple[bool, int]] = json.loads(done.stdout.splitlines()[-1])
    for name in ("lock", "status.json", "status.reserve", "spark.log", "pipeline.json", "decisions", "ids", "sinks"):
        assert f"root/{name}" in made
    assert any(name.endswith(".crc") for name in made)
    assert any(name.startswith("counted/_delta_log/") for name in made)
    wrong = {name: oct(mode) for name, (is_dir, mode) in made.items() if mode != (0o777 if is_dir else 0o666) & ~umask}
    assert wrong == {}
