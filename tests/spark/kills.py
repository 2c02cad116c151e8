"""Running the killed pipeline in processes of its own until its input is consumed, and looking at what it left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psycopg

from tests.spark.harness import table_rows, write_input
from tidegate.engine.kill_points import VARIABLE
from tidegate.engine.status_files import read_status
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import read_manifest, references

ROOT = Path(__file__).parents[2]
ROWS_PER_FILE = 40
_RUN_SECONDS = 300


class KilledRuns:
    """One root, and the runs on it that are killed one after the other."""

    pipeline = "killed"
    files_per_run = 2
    prefixes = ("order_table", "unique_table")
    """Delta tables that derive from one source alone."""

    def __init__(self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.arguments = arguments
        self._environment = dict(environment or {})
        self.root = folder / "root"
        self.output: list[str] = []
        self._files = 0
        self._started = 0

    @property
    def rows(self) -> int:
        return self._files * ROWS_PER_FILE

    def feed(self, files: int | None = None) -> None:
        """More input."""
        files = self.files_per_run if files is None else files
        for name in ("orders", "payments"):
            write_input(self.folder / name, files, ROWS_PER_FILE, first_file=self._files)
        self._files += files

    def start(self, *arguments: str, kill_at: str | None = None) -> subprocess.Popen[str]:
        """A run that ends when it is told to, or kills itself at a step."""
        environment = {**os.environ, **self._environment, "TIDEGATE_TEST_FOLDER": str(self.folder)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        environment.pop(VARIABLE, None)
        if kill_at is not None:
            environment[VARIABLE] = kill_at
        file = Path(__file__).with_name(f"{self.pipeline}_pipeline.py")
        command = [sys.executable, "-m", "tidegate", "run", str(file), "--root", str(self.root)]
        command += ["--checkpoint-interval", "700ms", *self.arguments, *arguments]
        self._started += 1
        if self._started % 2:
            command.append("--no-chain")
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(self, process: subprocess.Popen[str]) -> int:
        try:
            output, _ = process.communicate(timeout=_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"the run did not end:\n{output[-3000:]}") from None
        self.output.append(output)
        return process.returncode

    def kill_at_step(self, step: str) -> None:
        """Run until the step is reached and the process kills itself."""
        assert self.finish(self.start(kill_at=step)) == -signal.SIGKILL, self.output[-1][-3000:]

    def kill_after(self, seconds: float) -> None:
        """Kill a run that long after its queries were started: what comes before are steps."""
        process = self.start()
        deadline = time.monotonic() + _RUN_SECONDS
        files = Folder(self.root)
        while not ((status := read_status(files)) and status.pid == process.pid and status.state == "running"):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()
        assert self.finish(process) == -signal.SIGKILL, self.output[-1][-3000:]

    def run_to_the_end(self) -> None:
        assert self.finish(self.start("--available-now")) == 0, self.output[-1][-3000:]

    # -- what must hold ---------------------------------------------------------------------------

    def check_tables(self) -> None:
        lake = self.folder / "lake"
        ids = Counter({(each,): 1 for each in range(self.rows)})
        assert table_rows(lake / "order_table", ["id"]) == ids
        assert table_rows(lake / "unique_table", ["id"]) == ids
        expected = Counter({(each, f"k{each % 5}", each): 1 for each in range(self.rows)})
        assert table_rows(lake / "paid_table", ["id", "key", "value"]) == expected
        totals = {f"k{key}": range(key, self.rows, 5) for key in range(5)}
        assert table_rows(lake / "total_table", ["key", "orders", "value"]) == Counter(
            (key, len(values), sum(values)) for key, values in totals.items()
        )

    def check_every_epoch(self) -> int:
        """At every epoch each of two tables that derive from one source shows a prefix of it, and both the same unless
        checkpoints are cut unaligned. Returns how many epochs show rows."""
        shown: list[dict[int, int]] = []
        for name in self.prefixes:
            table = self.folder / "lake" / name
            counts = {}
            for epoch, version in epoch_versions(table, f"{self.pipeline}/{name}").items():
                rows = table_rows(table, ["id"], version=version)
                assert rows == Counter({(each,): 1 for each in range(len(rows))}), f"{name} at epoch {epoch}"
                counts[epoch] = len(rows)
            shown.append(counts)
        assert shown[0] == shown[1] or "--unaligned-after" in self.arguments
        return len(shown[0].keys() | shown[1].keys())

    def check_no_orphans(self) -> None:
        """After the last clean-up the root holds what retained checkpoints refer to, and the last generation."""
        store = Folder(self.root)
        log = StoredDecisions(store).read()
        needed: set[str] = set()
        for checkpoint_id in log.retained:
            record = log.completed(checkpoint_id)
            assert record is not None
            needed |= {record.manifest} | references(store, read_manifest(store, record))
        last = f"generations/{log.generation:06d}/"
        found = {
            path.relative_to(self.root).as_posix() for path in (self.root / "generations").rglob("*") if path.is_file()
        }
        assert {name for name in found if not name.startswith(last)} <= needed
        kept = {name for name in found if name.startswith((f"{last}snapshots/", f"{last}manifests/"))}
        assert kept <= needed, sorted(kept - needed)[:5]
        segments = {name for name in found if name.startswith(last) and re.search(r"/output(-\d+)?/part-", name)}
        assert segments <= needed, sorted(segments)[:5]
        for table in (self.folder / "lake").iterdir():
            staged = [path for path in (table / "_tidegate").rglob("*.parquet") if path.is_file()]
            assert not staged, staged[:5]


class SlowRuns(KilledRuns):
    """Of the pipeline whose sinks are slow; `environment` says how its PostgreSQL server is reached."""

    pipeline = "slow"
    files_per_run = 5
    prefixes = ("order_table", "slow_table")

    def check_tables(self) -> None:
        lake, dsn = self.folder / "lake", self._environment["TIDEGATE_TEST_DSN"]
        ids = Counter({(each,): 1 for each in range(self.rows)})
        totals = {f"k{key}": range(key, self.rows, 5) for key in range(5)}
        expected = Counter((key, len(values), sum(values)) for key, values in totals.items())
        assert table_rows(lake / "order_table", ["id"]) == ids
        assert table_rows(lake / "slow_table", ["id", "value"]) == Counter((each, each) for each in range(self.rows))
        assert table_rows(lake / "total_table", ["key", "orders", "value"]) == expected
        with psycopg.connect(dsn) as connection:
            assert Counter(connection.execute("SELECT id FROM order_table").fetchall()) == ids
            assert Counter(connection.execute("SELECT key, orders, value FROM total_table").fetchall()) == expected


def epoch_versions(table: Path, owner: str) -> dict[int, int]:
    """Which version of a table shows which epoch, from the application transactions in its log."""
    found: dict[int, int] = {}
    for path in sorted((table / "_delta_log").glob("*.json")):
        for line in path.read_text(encoding="utf-8").splitlines():
            transaction = json.loads(line).get("txn")
            if transaction and transaction["appId"] == f"tidegate/{owner}/epoch":
                found[transaction["version"]] = int(path.stem)
    return found


def kill_often(runs: KilledRuns, steps: Sequence[str], random_kills: int, seed: int) -> int:
    """Kill a run at every step given and at random moments, then let one end. Returns the number of kills.

    Before each run there is more input, so that all of them have something to lose.
    """
    rng = random.Random(seed)
    plan: list[str | float] = [*steps, *(rng.uniform(0, 3) for _ in range(random_kills))]
    rng.shuffle(plan)
    for number, each in enumerate(plan, 1):
        started = time.monotonic()
        runs.feed()
        if isinstance(each, str):
            runs.kill_at_step(each)
        else:
            runs.kill_after(each)
        what = each if isinstance(each, str) else f"after {each:.1f} s"
        print(f"kill {number}/{len(plan)}: {what}, {time.monotonic() - started:.1f} s in all", flush=True)
    runs.run_to_the_end()
    return len(plan)
