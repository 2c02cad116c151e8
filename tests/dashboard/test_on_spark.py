"""The dashboard beside a pipeline on Spark: what is seen is what has happened, and its actions are done."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.harness import TIDEGATE
from tests.cli.test_live import RUN, put
from tests.dashboard.harness import BEARER, Client, served
from tests.test_documents import example


def eventually(condition: Callable[[], bool]) -> None:
    """Spark takes its time, on a machine that has other things to do; whoever looks all the time takes it away."""
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.1)


def act(client: Client, name: str) -> str:
    done = client.ask("POST", f"{client.one}/actions/{name}", BEARER).value
    assert done["done"] is True, done
    return str(done["said"])


@pytest.mark.slow
@pytest.mark.spark
def test_a_pipeline_is_seen_from_its_start_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(example(), encoding="utf-8")
    (tmp_path / "orders").mkdir()
    put(tmp_path, 0)
    command = [TIDEGATE, *shlex.split(RUN)[1:], "--checkpoint-interval", "1h", "--retain", "5"]
    with (
        served(tmp_path / "state" / "orders", allow_actions=True) as client,
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run,
    ):
        try:
            assert client.get("/api/v1/pipelines").value["pipelines"][0]["life"] == "unreadable"
            eventually(lambda: client.get(client.one).code == 200)
            eventually(lambda: client.value()["summary"]["state"] == "running")
            eventually(lambda: (client.value()["status"]["stages"].get("large_orders") or {}).get("rows") == 100)
            name = act(client, "checkpoint").split()[0]
            put(tmp_path, 100)
            eventually(lambda: client.value()["status"]["stages"]["large_orders"]["rows"] == 200)
            assert "is yours" in act(client, "savepoint")
            check(client, name, tmp_path)
            assert "stopping" in act(client, "stop")
            assert run.wait(120) == 0
        finally:
            run.kill()
        eventually(lambda: client.value()["summary"]["life"] == "stopped")
        eventually(lambda: client.value("/history")["events"][0]["event"] == "end")
        assert client.value()["summary"]["alerts"] == []
        assert client.value()["outlook"]["decision"] == "goes_on"


def check(client: Client, name: str, folder: Path) -> None:
    one = client.value(f"/checkpoints/{name}")
    assert one["checkpoint"]["state"] == "complete"
    assert one["checkpoint"]["waited_for"]
    assert {"storing", "deciding", "committing"} <= {span["phase"] for span in one["gantt"]}
    assert any(span["is_critical"] for span in one["gantt"])
    (position,) = one["positions"]["orders"]
    assert position.startswith("1 file read, the last: ")
    assert one["tables"]["large_orders"]["version"] is not None
    assert one["problems"] == []
    tables = {each["sink"]: each for each in client.value("/tables")["tables"]}
    assert tables["large_orders"]["address"] == str(folder / "lake" / "large_orders")
    eventually(lambda: _newest_row(client)["large_orders"] is not None)
    assert _newest_row(client)["large_orders"]["rows_added"] == 100
    eventually(lambda: client.value("/checkpoints")["counts"]["savepoints"] == 1)
    start = client.value("/history?kinds=start")["events"][0]
    assert start["because"] == "first"
    assert client.value()["settings"] == start["settings"]
    assert start["settings"]["retain"] == "5"
    both = client.value(f"/compare/{name}/ckpt-000002")
    assert both["stages"]["orders"]["positions_b"][0].startswith("2 files read")


def _newest_row(client: Client) -> dict[str, dict[str, int]]:
    versions: dict[str, dict[str, int]] = client.value("/tables")["matrix"][0]["versions"]
    return versions
