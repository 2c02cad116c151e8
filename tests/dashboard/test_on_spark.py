"""The dashboard beside a pipeline on Spark: what is seen has happened, and what is pressed is done."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.harness import TIDEGATE
from tests.cli.test_live import RUN, put
from tests.dashboard.browser import Browser
from tests.dashboard.harness import TOKEN, Client, open_page, served
from tests.test_documents import example

_PATIENCE_S = 240
HELD = """

@pipeline.sink(tg.DeltaTable("lake/held_orders"))
def held_orders(large):
    from pathlib import Path
    from time import sleep

    hold = Path("hold").absolute()

    def when_let_go(amount):
        while hold.exists():
            sleep(0.05)
        return amount

    return large.withColumn("amount", F.udf(when_let_go, "long")("amount"))
"""


def eventually(condition: Callable[[], bool]) -> None:
    """Spark takes its time, on a machine that has other things to do; whoever looks all the time takes it away."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.1)


def press(page: Browser, name: str) -> None:
    """As a user does: the button, the token if it is asked for, and yes."""
    page.wait(f"document.querySelector('[data-action={name}]')?.disabled === false", _PATIENCE_S)
    page.click(f"[data-action={name}]")
    page.wait("document.querySelector('dialog[open]') !== null")
    if page.see("document.querySelector('dialog input[name=token]') !== null"):
        page.see("document.querySelector('dialog input').focus()")
        page.type(TOKEN.secret.decode())
    page.click("dialog button.main")


def told(page: Browser, words: str) -> str:
    """What the page says when it has been done."""
    return str(
        page.wait(
            f"[...document.querySelectorAll('.said p')].find(e => e.innerText.includes({words!r}))?.innerText",
            _PATIENCE_S,
        )
    )


def rows_of(client: Client, sink: str) -> int:
    return int((client.value()["status"]["stages"].get(sink) or {}).get("rows") or 0)


@pytest.mark.slow
@pytest.mark.spark
def test_a_pipeline_is_seen_from_its_start_to_its_end(tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "orders.py").write_text(example() + HELD, encoding="utf-8")
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
            eventually(lambda: rows_of(client, "large_orders") == rows_of(client, "held_orders") == 100)
            browser.errors.clear()
            browser.size(1280)
            open_page(browser, client, "/actions")
            browser.see("window.isTheSame = true")
            press(browser, "checkpoint")
            name = told(browser, "is complete").split()[0]
            cancel(client, browser, tmp_path)
            press(browser, "savepoint")
            told(browser, "of ckpt-000003 is yours")
            check(client, name, tmp_path)
            press(browser, "stop")
            told(browser, "run is stopping")
            assert run.wait(_PATIENCE_S) == 0
        finally:
            run.kill()
        browser.wait("document.querySelector('#strip').innerText.includes('Finished')", _PATIENCE_S)
        assert browser.see("window.isTheSame")
        assert browser.errors == []
        browser.open("about:blank")
        eventually(lambda: client.value()["summary"]["life"] == "stopped")
        eventually(lambda: client.value("/history")["events"][0]["event"] == "end")
        assert client.value()["summary"]["alerts"] == []
        assert client.value()["outlook"]["decision"] == "goes_on"


def cancel(client: Client, page: Browser, folder: Path) -> None:
    """While a checkpoint is under way that cannot get on: the barrier is behind rows that a sink does not get past."""
    (folder / "hold").touch()
    put(folder, 100)
    eventually(lambda: rows_of(client, "large_orders") == 200)
    press(page, "checkpoint")
    page.wait("document.querySelector('#strip').innerText.includes('ckpt-000002')", _PATIENCE_S)
    press(page, "cancel")
    told(page, "ckpt-000002 cancelled; the run goes on")
    told(page, "ckpt-000002 was aborted")
    page.click_text("Checkpoints")
    page.wait(
        "[...document.querySelectorAll('main table.stacks tbody tr')]"
        ".some(row => row.innerText.includes('ckpt-000002') && row.innerText.includes('Aborted'))",
        _PATIENCE_S,
    )
    assert rows_of(client, "held_orders") == 100, "it was held all the time"
    (folder / "hold").unlink()
    eventually(lambda: rows_of(client, "held_orders") == 200)
    page.click_text("Actions")


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
    both = client.value(f"/compare/{name}/ckpt-000003")
    assert both["stages"]["orders"]["positions_b"][0].startswith("2 files read")


def _newest_row(client: Client) -> dict[str, dict[str, int]]:
    versions: dict[str, dict[str, int]] = client.value("/tables")["matrix"][0]["versions"]
    return versions
