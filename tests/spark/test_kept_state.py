"""Where checkpoints refer to state where Spark has written it, Spark deletes none of it, though it is time to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.matrix, pytest.mark.only_matrix, pytest.mark.spark, pytest.mark.slow]


def test_spark_deletes_no_state_that_a_checkpoint_may_name_and_would_without_the_setting(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.spark.kept_state", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    (kept, gone), (left_to_spark, deleted) = found["True"], found["False"]
    assert not gone
    assert kept > 50
    # The same run, without the setting: else this test would see nothing.
    assert {Path(name).suffix for name in deleted} >= {".zip", ".changelog", ".sst"}, (left_to_spark, deleted[:5])
