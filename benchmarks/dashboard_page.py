"""Whether the dashboard's page pauses: the longest task of its thread, in a real Chromium, on a large pipeline."""

from __future__ import annotations

import atexit
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Final
from urllib.parse import quote

from benchmarks.measure import Case, Target, WrongWork
from tests.dashboard.browser import Browser, PageError, find_chromium
from tests.dashboard.fake_api import Server, serving
from tests.dashboard.fake_pipelines import FakePipeline, World

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
page: a headless Chromium on a pipeline that is made up, of {STAGES} stages. The time that the page's thread has worked
  on the longest of its tasks, from when the page is opened, with an empty cache, until it is drawn and has been still
  for half a second; live: the same on a page that is open, while {_UPDATES} changes arrive, every fifth with a
  checkpoint."""


class _Pages:
    """The browser, and what it looks at: made when they are first needed."""

    def __init__(self, program: str, checkpoints: int, updates: int) -> None:
        self._program = program
        self._checkpoints = checkpoints
        self._updates = updates
        self._stack = ExitStack()
        atexit.register(self._stack.close)

    @cached_property
    def _server(self) -> Server:
        return self._stack.enter_context(serving(World(many=self._checkpoints)))

    @cached_property
    def _browser(self) -> Browser:
        browser = self._stack.enter_context(Browser(self._program))
        browser.size(1280)
        return browser

    @property
    def _fleet(self) -> FakePipeline:
        return self._server.world.named("fleet <b>north</b>")

    def opening(self, page: str) -> float:
        self._leave()
        return self._longest_ms(lambda: self._open(page))

    def living(self, page: str) -> float:
        self._leave()
        self._open(page)
        return self._longest_ms(self._change)

    def _leave(self) -> None:
        self._browser.open("about:blank")
        self._browser.call("Network.clearBrowserCache")

    def _open(self, page: str) -> None:
        before, newest = (each.checkpoint for each in self._fleet.past[-2:])
        path = f"#/p/{quote(self._fleet.key)}{_PAGES[page].format(before=before, newest=newest)}"
        self._browser.open(f"{self._server.url}/{path}")
        self._browser.wait(f"document.getElementById('main').dataset.shows === {json.dumps(path)}")
        if page == "pipeline":
            self._browser.wait("document.querySelector('.dag')?.getAttribute('aria-busy') === 'false'")
        time.sleep(_SETTLES_S)

    def _change(self) -> None:
        for number in range(self._updates):
            if number % 5 == 4:
                self._fleet.finish()
            self._server.world.advance()
            time.sleep(0.1)
        time.sleep(_SETTLES_S)

    def _longest_ms(self, work: Callable[[], None]) -> float:
        try:
            with self._browser.tasks_ms() as tasks:
                work()
        except PageError as error:
            raise WrongWork(str(error)) from error
        if self._browser.errors:
            raise WrongWork(f"the page says: {self._browser.errors}")
        return max(tasks)


def page_cases(scale: float) -> list[Case]:
    """None where there is no Chromium."""
    program = find_chromium()
    if program is None:
        print("dashboard: there is no Chromium here, so pages are not measured", file=sys.stderr)
        return []
    checkpoints = max(20, round(_CHECKPOINTS * scale))
    pages = _Pages(program, checkpoints, max(5, round(_UPDATES * min(1.0, scale))))
    parameters = {"checkpoints": checkpoints}
    return [
        *(Case(f"page {page}: longest task", parameters, "ms", partial(pages.opening, page), _LONG) for page in _PAGES),
        *(
            Case(f"page {page}, live: longest task", parameters, "ms", partial(pages.living, page), _LONG)
            for page in _LIVE
        ),
    ]
