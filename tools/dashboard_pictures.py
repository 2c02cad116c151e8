"""`python -m tools.dashboard_pictures URL`: the pictures of README.md, of the first pipeline that a dashboard shows.

`./dev demo --dashboard` has one, which goes on after the verdict. Of its checkpoints the longest is shown.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote
from urllib.request import urlopen

from tests.dashboard.browser import Browser, find_chromium

_DOCS: Final = Path(__file__).parents[1] / "docs"
_WIDTH: Final = 1100


def _asked(url: str) -> Any:
    with urlopen(url, timeout=30) as answer:
        return json.load(answer)


def main() -> int:
    program = find_chromium()
    if program is None or len(sys.argv) != 2:
        raise SystemExit("usage: python -m tools.dashboard_pictures URL; it needs Chromium")
    url = sys.argv[1].rstrip("/")
    key = _asked(f"{url}/api/v1/pipelines")["pipelines"][0]["key"]
    rows = _asked(f"{url}/api/v1/pipelines/{quote(key)}/checkpoints?state=complete&limit=50")["checkpoints"]
    complete = [each["checkpoint"] for each in rows]
    longest = max(complete, key=lambda each: each["duration_ms"] or 0)["checkpoint"]
    with Browser(program) as browser:
        for name, path, height, drawn in (
            ("pipeline", "", 640, "document.querySelector('.dag')?.getAttribute('aria-busy') === 'false'"),
            ("checkpoint", f"/checkpoints/{longest}", 800, "document.querySelector('.gantt .bar') !== null"),
        ):
            browser.size(_WIDTH, height)
            shown = f"#/p/{quote(key)}{path}"
            browser.open(f"{url}/{shown}")
            browser.wait(f"document.getElementById('main').dataset.shows === {json.dumps(shown)}")
            browser.wait_text("Live", "#connection")
            browser.wait(drawn)
            browser.picture(_DOCS / f"dashboard-{name}.png", whole=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
