"""How long the dashboard takes to answer on a root with a long past, request by request; whether its page pauses."""

from __future__ import annotations

import atexit
import http.client
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

from benchmarks.dashboard_page import NOTES as PAGE_NOTES
from benchmarks.dashboard_page import page_cases
from benchmarks.dashboard_root import LongPast
from benchmarks.measure import Benchmark, Case, Derived, Target, WrongWork
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.lock import RootLock

_ATTEMPTS: Final = 10_000
_REQUESTS: Final = 100
_TARGET: Final = Target(at_most=100.0)
_CLOCK: Final = "GET: wall clock of the client, the 95th percentile of 100 requests; page: CPU time of its own thread"

_NOTES: Final = f"""\
GET: a root in a folder, made by hand: 12 stages, 3 Delta tables, 100 checkpoints retained, a history of so many
  attempts, of which every 25th was aborted. A run is played beside: it holds the root, and says something new every
  second.
The dashboard is a process of its own, as `tidegate dashboard` starts it. One client asks for one thing after the other
  over one connection of loopback; which checkpoint, page or pair is chosen by chance, from all of the past. Before it
  is measured, each is asked for once: what was never read has to be.
{PAGE_NOTES}"""


class _Served:
    """The root, the run that is played on it, and the dashboard: made when they are first needed."""

    def __init__(self, attempts: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tidegate-dashboard-")
        self.past = LongPast(Path(self._folder.name), attempts)
        self._stop = threading.Event()
        self._run = threading.Thread(target=self._play, daemon=True)
        self._run.start()
        command = [
            sys.executable,
            "-m",
            "tidegate",
            "dashboard",
            "--root",
            str(self.past.root),
            "--port",
            "0",
            "--json",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = json.loads(self._process.stdout.readline() or "{}")
        if "url" not in said:
            raise WrongWork("the dashboard has not started")
        (key,) = said["roots"]
        self.one = f"/api/v1/pipelines/{key}"
        address = urlsplit(said["url"])
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        atexit.register(self.close)

    def _play(self) -> None:
        with RootLock(self.past.root / "lock"):
            while not self._stop.wait(1.0):
                self.past.write_status()

    def reconnect(self) -> None:
        """A connection that was idle for long is closed by the server."""
        self._connection.close()

    def get(self, path: str) -> bytes:
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise WrongWork(f"{path} was answered with {answer.status}: {data[:200]!r}")
        return data

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.wait(20)
        self._stop.set()
        self._run.join()
        self._folder.cleanup()


def _cases(scale: float) -> Sequence[Case | Derived]:
    attempts = max(10, round(_ATTEMPTS * scale))
    requests = max(5, round(_REQUESTS * min(1.0, scale)))
    chance = random.Random(17)
    made: list[_Served] = []

    def served() -> _Served:
        if not made:
            made.append(_Served(attempts))
        return made[0]

    def name() -> str:
        return checkpoint_name(chance.randint(1, attempts))

    def kept() -> str:
        return checkpoint_name(attempts - chance.randrange(served().past.retained))

    def events_before() -> str:
        before = json.loads(served().get(f"{served().one}/history?limit=500"))["next"]
        return "" if before is None else f"&before={quote(before)}"

    routes: dict[str, Callable[[], str]] = {
        "pipelines": lambda: "/api/v1/pipelines",
        "pipeline": lambda: served().one,
        "checkpoints": lambda: f"{served().one}/checkpoints",
        "checkpoints, anywhere": lambda: f"{served().one}/checkpoints?before={chance.randint(2, attempts)}&limit=50",
        "checkpoints, aborted": lambda: f"{served().one}/checkpoints?state=aborted&limit=200",
        "summary": lambda: f"{served().one}/checkpoints/summary",
        "checkpoint": lambda: f"{served().one}/checkpoints/{name()}",
        "checkpoint, retained": lambda: f"{served().one}/checkpoints/{kept()}",
        "compare": lambda: f"{served().one}/compare/{name()}/{name()}",
        "tables": lambda: f"{served().one}/tables",
        "history": lambda: f"{served().one}/history",
        "history, starts": lambda: f"{served().one}/history?kinds=start,savepoint",
        "actions": lambda: f"{served().one}/actions",
        "metrics": lambda: "/metrics",
        "openapi": lambda: "/api/v1/openapi.json",
    }

    def p95(path: Callable[[], str]) -> Callable[[], float]:
        def measure() -> float:
            served().reconnect()
            served().get(path())
            took: list[float] = []
            for _ in range(requests):
                wanted = path()
                begun = time.perf_counter()
                served().get(wanted)
                took.append((time.perf_counter() - begun) * 1000)
            return sorted(took)[math.ceil(len(took) * 0.95) - 1]

        return measure

    def deep() -> float:
        served().reconnect()
        suffix = events_before()
        return p95(lambda: f"{served().one}/history?limit=50{suffix}")()

    cases = [Case(f"GET {what}", {"attempts": attempts}, "ms", p95(path), _TARGET) for what, path in routes.items()]
    cases.append(Case("GET history, deep", {"attempts": attempts}, "ms", deep, _TARGET))
    return [*cases, *page_cases(scale)]


BENCHMARK: Final = Benchmark("what the dashboard takes to answer, whether its page pauses", _NOTES, 3, _cases, _CLOCK)
