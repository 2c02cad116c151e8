"""The page, in a real Chromium, as the dashboard itself serves it beside a run: both mean the same by every answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.dashboard_root import LongPast
from tests.cli.harness import live_run, make_root
from tests.dashboard.browser import Browser
from tests.dashboard.harness import TOKEN, go, open_page, served

pytestmark = pytest.mark.slow

EACH = [
    "",
    "/checkpoints",
    "/checkpoints?state=aborted",
    "/tables",
    "/history",
    "/history?kinds=",
    "/settings",
    "/actions",
]


def test_every_page_is_drawn_of_what_the_server_tells(tmp_path: Path, browser: Browser) -> None:
    with live_run(tmp_path / "played", checkpoints=3) as run, served(run.root, allow_actions=True) as client:
        own = f"http://127.0.0.1:{client.board.port}/"
        browser.errors.clear()
        browser.requests.clear()
        pages = [*EACH, "/checkpoints/ckpt-000003", "/compare/ckpt-000002/ckpt-000003"]
        browser.size(1280)
        browser.open(own)
        browser.wait_text("Healthy", "main")
        for path in pages:
            go(browser, client, path)
            assert browser.text(".problem") == "", path
            for width in (1280, 360):
                browser.size(width)
                browser.see("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
                assert browser.see("document.documentElement.scrollWidth") <= width, path
        browser.size(1280)
        go(browser, client, "")
        stages = client.value()["graph"]
        browser.wait(f"document.querySelectorAll('.graph .node').length === {len(stages)}")
        go(browser, client, "/checkpoints/ckpt-000003")
        waited_for = client.value("/checkpoints/ckpt-000003")["checkpoint"]["waited_for"]
        assert waited_for is None or browser.text(".waited") == waited_for
        browser.open("about:blank")
        assert [each for each in browser.requests if not each.startswith((own, "about:", "data:"))] == []
        assert browser.errors == []


def test_one_goes_back_through_the_whole_history(tmp_path: Path, browser: Browser) -> None:
    past = LongPast(tmp_path, 120, retained=5, chains=1)
    with served(past.root) as client:
        browser.errors.clear()
        browser.size(1280)
        open_page(browser, client, "/history?kinds=checkpoint")
        names = "[...document.querySelectorAll('.events > li a')].map(link => link.innerText)"
        seen: list[str] = []
        for page, count in enumerate((50, 50, 20), 1):
            browser.wait(f"document.querySelectorAll('.events > li').length === {count}")
            if page > 1:
                browser.wait_text(f"Page {page}", ".pager")
            seen += browser.see(names)
            if page < 3:
                browser.click_text("Older")
                browser.wait(f"!{names}.includes({seen[-1]!r})")
        assert seen == [f"ckpt-{number:06d}" for number in range(120, 0, -1)]
        assert browser.see("document.querySelector('[data-go=older]')") is None
        browser.open("about:blank")
        assert browser.errors == []


def test_an_action_is_done_and_seen_without_reload(tmp_path: Path, browser: Browser) -> None:
    with live_run(tmp_path / "played", checkpoints=1) as run, served(run.root, allow_actions=True) as client:
        browser.errors.clear()
        browser.size(1280)
        open_page(browser, client, "/actions")
        browser.see("window.isTheSame = true")
        browser.click("[data-action=checkpoint]")
        browser.wait("document.activeElement.name === 'token'")
        browser.type(TOKEN.secret.decode())
        browser.press("Enter")
        browser.wait_text("ckpt-000002 is complete", ".said")
        browser.wait_text("ckpt-000002", "#strip")
        browser.click_text("Checkpoints")
        browser.wait_text("ckpt-000002", "main table")
        browser.click_text("Actions")
        browser.click("[data-action=stop]")
        browser.click("dialog button.main")
        browser.wait_text("stopping", ".said")
        run.await_end()
        assert browser.see("window.isTheSame")
        browser.open("about:blank")
        assert browser.errors == []


def test_the_checkpoint_that_somebody_waits_for_is_cancelled_and_the_run_goes_on(
    tmp_path: Path, browser: Browser
) -> None:
    with live_run(tmp_path / "played", checkpoints=1) as run, served(run.root, allow_actions=True) as client:
        browser.errors.clear()
        browser.size(1280)
        open_page(browser, client, "/actions")
        browser.see("window.isTheSame = true")
        # It may be drawn before it is known that the run lives.
        browser.wait("document.querySelector('[data-action=cancel]')?.disabled === true")
        run.hold_up()
        browser.click("[data-action=checkpoint]")
        browser.wait("document.activeElement.name === 'token'")
        browser.type(TOKEN.secret.decode())
        browser.press("Enter")
        browser.wait("document.querySelector('[data-action=cancel]')?.disabled === false")
        assert browser.see("document.querySelector('[data-action=checkpoint]').disabled")
        assert "Cancel ckpt-000002" in browser.text("main")
        browser.click("[data-action=cancel]")
        browser.click("dialog button.main")
        browser.wait_text("ckpt-000002 cancelled; the run goes on", ".said")
        browser.wait_text("ckpt-000002 was aborted", ".said")
        browser.wait("document.querySelector('[data-action=cancel]').disabled")
        browser.click_text("Checkpoints")
        browser.wait(
            "[...document.querySelectorAll('main table.stacks tbody tr')]"
            ".some(row => row.innerText.includes('ckpt-000002') && row.innerText.includes('Aborted'))"
        )
        run.let_go()
        browser.click_text("Actions")
        browser.click("[data-action=checkpoint]")
        browser.click("dialog button.main")
        browser.wait_text("ckpt-000003 is complete", ".said")
        assert browser.see("window.isTheSame")
        browser.open("about:blank")
        assert browser.errors == []


def test_a_root_that_cannot_be_read_is_told_and_shown_when_it_can_be(tmp_path: Path, browser: Browser) -> None:
    with served(tmp_path / "state") as client:
        browser.open("about:blank")
        browser.open(f"http://127.0.0.1:{client.board.port}/")
        browser.wait_text("The root cannot be read", "main")
        browser.see(f"location.hash = '#/p/{client.key}'")
        browser.wait_text("There is no folder", ".problem")
        browser.errors.clear()  # the browser itself tells of every 503
        make_root(tmp_path, checkpoints=1).rename(tmp_path / "state")
        browser.wait_text("Stages and channels", "main")
        browser.open("about:blank")
