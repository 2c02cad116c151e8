"""A real Chromium without a window, driven through a pair of pipes by its own protocol: no driver, no port, no package.

`Browser` is one browser with one tab. It keeps what the page says on the console, and the address of every request.
What it does is what a user does: keys and clicks go in as events of the browser, not as calls of the page's functions.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_SECONDS: Final = 30
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Chromium takes its pipes as descriptors 3 and 4, whatever they are here.
_LAUNCHER: Final = """
import os, sys
a, b = os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2]))
a, b = os.dup2(a, 100), os.dup2(b, 101)
os.dup2(a, 3); os.dup2(b, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_TASKS: Final = "disabled-by-default-devtools.timeline"
_KEYS: Final = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    " ": ("Space", 32, " "),
}


def find_chromium() -> str | None:
    """Its command; None: there is none here."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class PageError(Exception):
    """What the browser, or a script in the page, says has gone wrong."""


class Browser:
    def __init__(self, program: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tidegate-chromium-"))
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        options = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self._folder}", "--no-first-run"]
        options += [
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-extensions",
        ]
        options += ["--disable-component-update", "--disable-sync", "--no-default-browser-check", "--lang=en-US"]
        options += ["--no-sandbox"] * (os.geteuid() == 0)  # as root its sandbox does not start
        command = [sys.executable, "-c", _LAUNCHER, str(to_read), str(to_write), program, *options, "about:blank"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(to_read, to_write)
            )
        os.close(to_read)
        os.close(to_write)
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived = threading.Condition()
        self._count = 0
        self._is_over = False
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._traced: list[dict[str, Any]] = []
        self._is_traced = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        tab = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(_SECONDS)
        except (PageError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(_SECONDS)
        os.close(self._to)
        self._reader.join(_SECONDS)
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the protocol -------------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        with self._arrived:
            if not self._arrived.wait_for(lambda: number in self._answers or self._is_over, _SECONDS):
                raise PageError(f"Chromium does not answer {method}")
            if number not in self._answers:
                log = (self._folder / "log").read_text(encoding="utf-8", errors="replace")
                raise PageError(f"Chromium has ended at {method}: {log[-2000:]}")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._from, 1 << 20):
            *messages, rest = (rest + data).split(b"\0")
            for each in messages:
                self._take(json.loads(each))
        with self._arrived:
            self._is_over = True
            self._arrived.notify_all()

    def _take(self, message: Mapping[str, Any]) -> None:
        if "id" in message:
            with self._arrived:
                self._answers[message["id"]] = dict(message)
                self._arrived.notify_all()
            return
        params = message["params"]
        match message["method"]:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning", "assert"}:
                self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in {"error", "warning"}:
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Tracing.dataCollected":
                self._traced += params["value"]
            case "Tracing.tracingComplete":
                self._is_traced.set()

    # -- looking ------------------------------------------------------------------------------------

    def see(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise PageError(f"{script}: {details.get('exception', {}).get('description', details['text'])}")
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = _SECONDS) -> Any:
        """Until an expression is true in the page; what it is then."""
        until = time.monotonic() + seconds
        while not (found := self.see(script)):
            if time.monotonic() > until:
                text = self.see("document.body.innerText")
                raise PageError(f"this did not become true: {script}\nerrors: {self.errors}\nthe page says:\n{text}")
            time.sleep(0.02)
        return found

    def text(self, selector: str = "body") -> str:
        return str(self.see(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait_text(self, text: str, selector: str = "body") -> None:
        self.wait(f"(document.querySelector({json.dumps(selector)})?.innerText ?? '').includes({json.dumps(text)})")

    @contextmanager
    def tasks_ms(self) -> Iterator[list[float]]:
        """What the page's own thread does meanwhile: the time that it has worked on each task, when it is over. Nothing
        that is done by a user comes in between: a task that is over 50 ms lets them wait."""
        found: list[float] = []
        self._traced.clear()
        self._is_traced.clear()
        self.call("Tracing.start", transferMode="ReportEvents", traceConfig={"includedCategories": [_TASKS]})
        yield found
        self.call("Tracing.end")
        if not self._is_traced.wait(_SECONDS):
            raise PageError("Chromium does not say what it has done")
        names = [each for each in self._traced if each["name"] == "thread_name"]
        own = {(each["pid"], each["tid"]) for each in names if each["args"]["name"] == "CrRendererMain"}
        tasks = [each for each in self._traced if each["name"] == "RunTask" and (each["pid"], each["tid"]) in own]
        found += [each["tdur"] / 1000 for each in tasks if "tdur" in each]

    # -- doing --------------------------------------------------------------------------------------

    def size(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`: what the system would say."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def press(self, key: str, *, shift: bool = False) -> None:
        code, number, text = _KEYS[key]
        event = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """In the middle of the first element that it names, where a user would see it."""
        self.wait(f"document.querySelector({json.dumps(selector)}) !== null")
        self._click(f"document.querySelector({json.dumps(selector)})")

    def click_text(self, text: str, selector: str = "a, button") -> None:
        """The same of the first whose text it is."""
        among = f"[...document.querySelectorAll({json.dumps(selector)})]"
        found = f"{among}.find(e => e.innerText.trim() === {json.dumps(text)})"
        self.wait(f"{found} !== undefined")
        self._click(found)

    def _click(self, element: str) -> None:
        x, y = self.see(
            f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            " const r = e.getClientRects()[0]; return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page; `whole`: also of what is further down."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
