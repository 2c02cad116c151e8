"""Whether the dashboard's page pauses: the longest task of its thread, in a real Chromium, on a large pipeline."""

from __future__ import annotations

import atexit
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final
from urllib.parse import quote

from benchmarks.measure import Case, Target, WrongWork
from tests.dashboard.browser import Browser, PageError, find_chromium
from tests.dashboard.fake_api import serving
from tests.dashboard.fake_pipelines import World

STAGES: Final = 100
_CHECKPOINTS: Final = 1_000
_UPDATES: Final = 20
_LONG: Final = Target(at_most=50.0)
"""From where on a browser calls a task a long one: whoever types or scrolls meanwhile notices."""
_SETTLES_S: Final = 0.5
_PAGES: Final = {
    "pipeline": "",
    "checkpoints": "/checkpoints",
    "checkpoint": "/checkpoints/{newest}",
    "compare": "/compare/{before}/{newest}",
    "tables": "/tables",
    "history": "/history?kinds=",
    "settings": "/settings",
}
_LIVE: Final = ("pipeline", "checkpoints", "tables", "history")

NOTES: Final = f"""\
page: a headless Chromium on a pipeline that is made up, of {STAGES} stages. The time that the page's thread has worked on
  the longest of its tasks, from when the page is opened, with an empty cache, until it is drawn and has been still for
  half a second; live: the same on a page that is open, while {_UPDATES} changes arrive, every fifth with a checkpoint."""


class _Opened:
    """The browser, and what it looks at."""

    def __init__(self, program: str, checkpoints: int) -> None:
        self._stack = ExitStack()
        self.server = self._stack.enter_context(serving(World(many=checkpoints)))
        self.fleet = self.server.world.named("fleet <b>north</b>")
        self.browser = self._stack.enter_context(Browser(program))
        self.browser.size(1280)

    def open(self, page: str) -> None:
        before, newest = (each.checkpoint for each in self.fleet.past[-2:])
        rest = _PAGES[page].format(before=before, newest=newest)
        path = f"#/p/{quote(self.fleet.key)}{rest}"
        self.browser.open(f"{self.server.url}/{path}")
        self.browser.wait(f"document.getElementById('main').dataset.shows === {json.dumps(path)}")
        if page == "pipeline":
            self.browser.wait("document.querySelector('.dag')?.getAttribute('aria-busy') === 'false'")
        time.sleep(_SETTLES_S)

    def leave(self) -> None:
        self.browser.open("about:blank")
        self.browser.call("Network.clearBrowserCache")

    def close(self) -> None:
        self._stack.close()


def page_cases(scale: float) -> Sequence[Case]:
    """None where there is no Chromium."""
    program = find_chromium()
    if program is None:
        print("dashboard: there is no Chromium here, so pages are not measured", file=sys.stderr)
        return []
    checkpoints = max(20, round(_CHECKPOINTS * scale))
    updates = max(5, round(_UPDATES * min(1.0, scale)))
    opened: list[_Opened] = []

    def of() -> _Opened:
        if not opened:
            opened.append(_Opened(program, checkpoints))
            atexit.register(opened[0].close)
        return opened[0]

    def longest(work: Callable[[], None]) -> float:
        try:
            with of().browser.tasks_ms() as tasks:
                work()
        except PageError as error:
            raise WrongWork(str(error)) from error
        if of().browser.errors:
            raise WrongWork(f"the page says: {of().browser.errors}")
        return max(tasks)

    def opening(page: str) -> Callable[[], float]:
        def measure() -> float:
            of().leave()
            return longest(lambda: of().open(page))

        return measure

    def living(page: str) -> Callable[[], float]:
        def change() -> None:
            for number in range(updates):
                if number % 5 == 4:
                    of().fleet.finish()
                of().server.world.advance()
                time.sleep(0.1)
            time.sleep(_SETTLES_S)

        def measure() -> float:
            of().leave()
            of().open(page)
            return longest(change)

        return measure

    parameters = {"checkpoints": checkpoints}
    return [
        *(Case(f"page {page}: longest task", parameters, "ms", opening(page), _LONG) for page in _PAGES),
        *(Case(f"page {page}, live: longest task", parameters, "ms", living(page), _LONG) for page in _LIVE),
    ]
