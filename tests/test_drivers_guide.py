"""The commands of docs/drivers.md, and of the front page, run as they stand there."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import deltalake
import pytest

from tests.cli.harness import TIDEGATE, tidegate
from tests.test_documents import ROOT, example
from tidegate.engine.status import RunStatus
from tidegate.engine.status_files import read_status
from tidegate.storage.folder import Folder

pytestmark = [pytest.mark.spark, pytest.mark.slow]

GUIDE = ROOT / "docs" / "drivers.md"
_PATIENCE_S = 240


def commands_in(guide: Path) -> list[str]:
    fenced = re.findall(r"```sh\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in fenced for line in block.splitlines()]


def test_the_guide_to_several_drivers_is_true(tmp_path: Path) -> None:
    here, *pair, status, checkpoint, savepoint, stop = commands_in(GUIDE)
    assert here in (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "orders.py").write_text(example(), encoding="utf-8")
    (tmp_path / "orders").mkdir()
    put_orders(tmp_path, 0)
    with started(tmp_path, here) as together:
        _wait(tmp_path, lambda seen: _runs(seen, 3), together)
        for command in (status, checkpoint, savepoint):
            done = tidegate(*shlex.split(command)[1:], cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert "instance i1" in done.stdout or "complete" in done.stdout or "it is yours" in done.stdout
        together[0].send_signal(signal.SIGINT)  # Ctrl-C stops all of them
        assert together[0].wait(_PATIENCE_S) == 0, said(tmp_path)
    put_orders(tmp_path, 1)
    with started(tmp_path, *pair) as both:
        _wait(tmp_path, lambda seen: _runs(seen, 2), both)
        found = read_status(Folder(tmp_path / "state" / "orders"))
        assert found is not None
        assert {"orders", "large"} <= {name for each in found.instances if each.name == "a" for name in each.stages}
        _wait(
            tmp_path, lambda seen: any(each.new_bytes and each.state == "complete" for each in seen.checkpoints), both
        )
        done = tidegate(*shlex.split(stop)[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{done.stderr}\n{said(tmp_path)}"
        assert [process.wait(_PATIENCE_S) for process in both] == [0, 0], said(tmp_path)
    assert len(deltalake.DeltaTable(tmp_path / "lake" / "large_orders").to_pyarrow_table()) == 400


def put_orders(folder: Path, number: int) -> None:
    rows = [
        {
            "id": each,
            "ts": f"2026-01-0{number + 1}T{each // 60:02d}:{each % 60:02d}:00Z",
            "country": "DE",
            "amount": each,
        }
        for each in range(300)
    ]
    hidden = folder / "orders" / f".{number}"
    hidden.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    hidden.rename(folder / "orders" / f"{number}.json")


@contextmanager
def started(folder: Path, *commands: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """In groups of their own: whatever happens, none of them is left."""
    processes = []
    with (folder / "said").open("ab") as said:
        for command in commands:
            run = [TIDEGATE, *shlex.split(command)[1:]]
            processes.append(
                subprocess.Popen(run, cwd=folder, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
            )
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
                for pid in (*map(int, children), process.pid):
                    os.kill(pid, signal.SIGKILL)
                process.wait()


def _runs(seen: RunStatus, instances: int) -> bool:
    """Whether all of them do, and all rows of the first file are in a checkpoint."""
    running = [each for each in seen.instances if each.stages]
    is_there = len(running) == min(instances, len(seen.stages)) and seen.state == "running"
    return is_there and any(each.state == "complete" for each in seen.checkpoints)


def _has_worked(seen: RunStatus) -> bool:
    return any(each.new_bytes and each.state == "complete" for each in seen.checkpoints)


def _wait(folder: Path, is_so: Callable[[RunStatus], bool], processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while (seen := read_status(Folder(folder / "state" / "orders"))) is None or not is_so(seen):
        assert all(process.poll() is None for process in processes), said(folder)
        assert time.monotonic() < deadline, said(folder)
        time.sleep(0.1)


def said(folder: Path) -> str:
    return (folder / "said").read_text(encoding="utf-8", errors="replace")[-5000:]
