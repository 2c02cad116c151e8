"""One Chromium for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dashboard.browser import Browser, find_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium here (on Debian and Ubuntu: apt-get install chromium)")
    with Browser(program) as browser:
        yield browser
