"""What an attempt of a Delta table has written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tidegate as tg
from tidegate.sinks.delta.staged import Staged
from tidegate.storage.folder import Folder

ATTEMPT = "000001/merge-3-7-abcdef01"
LEFT = f"{ATTEMPT}/_temporary/0/_temporary/attempt_1_m_000000_7/part-0.parquet"


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    place: Any = SimpleNamespace(owner="_me")
    log: Any = SimpleNamespace(files=Folder(tmp_path))
    return Staged(tg.DeltaTable(tmp_path), place, log)


def test_what_a_lost_task_has_left_in_an_attempt_does_not_come_into_the_table(staged: Staged) -> None:
    written = [f"{ATTEMPT}/day=1/part-0.parquet", f"{ATTEMPT}/part-0.parquet"]
    for name in (*written, LEFT):
        staged.files.write(name, b"rows")
    assert staged.written(ATTEMPT) == written
    assert staged.written_here(ATTEMPT) == written
    assert staged.linked([ATTEMPT]) == ["day=1/part-0.parquet", "part-0.parquet"]


def test_it_goes_with_its_attempt(staged: Staged) -> None:
    staged.files.write(LEFT, b"rows")
    staged.take_back([ATTEMPT], newest=7)
    assert staged.files.list() == []
