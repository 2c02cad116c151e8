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
from typing import IO

import psycopg

from tests.spark.harness import table_rows, write_input
from tidegate.engine.kill_points import VARIABLE, Step
from tidegate.spark.filelog import checked_by
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files
from tidegate.storage.inspection import read_manifest, references
from tidegate.storage.places import as_given

ROOT = Path(__file__).parents[2]
ROWS_PER_FILE = 40
_RUN_SECONDS = 300

# How often a run has passed each when it is killed there. Each of them may leave files, or tables, that differ. The
# simulator kills at every call of the files, and `./dev soak` at every step.
STEPS = {
    Step.STAGE_RESTORED: 2,
    Step.QUERIES_STARTED: 1,
    Step.STAGE_CUT: 2,
    Step.MANIFEST_WRITTEN: 2,
    Step.SLOT_CLAIMED: 1,
    Step.SINK_COMMITTED: 2,
    Step.ALL_SINKS_COMMITTED: 1,
}


def at_steps(times: Mapping[Step, int]) -> list[str]:
    """As runs are told where to kill themselves."""
    return [f"{step.value}:{each}" for step, each in times.items()]


class KilledRuns:
    """One root, and the runs on it that are killed one after the other."""

    pipeline = "killed"
    files_per_run = 2
    prefixes: tuple[str, ...] = ("order_table", "unique_table")
    """Delta tables that derive from one source alone."""

    def __init__(self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.arguments = arguments
        self._environment = dict(environment or {})
        self.root: Path | str = folder / "root"
        self.python = Path(sys.executable)
        """With another one: on the Spark of that environment."""
        self.umask = -1
        """Of the runs; -1: of the tests."""
        self.output: list[str] = []
        self._files = 0
        self._started = 0

    @property
    def rows(self) -> int:
        return self._files * ROWS_PER_FILE

    @property
    def store(self) -> Files:
        """What is in the root, for whoever looks."""
        return as_given(self.root).files

    @property
    def lake(self) -> Path:
        """What its tables really hold."""
        return self.folder / "lake"

    def feed(self, files: int | None = None) -> None:
        """More input."""
        files = self.files_per_run if files is None else files
        for name in ("orders", "payments"):
            write_input(self.folder / name, files, ROWS_PER_FILE, first_file=self._files)
        self._files += files

    def start(
        self, *arguments: str, kill_at: str | None = None, said: IO[bytes] | None = None
    ) -> subprocess.Popen[str]:
        """A run that ends when it is told to, or kills itself at a step. `said`: where what it says goes, if not into a
        pipe."""
        environment = {**os.environ, "PYSPARK_PYTHON": str(self.python), **self._environment}
        environment |= {"TIDEGATE_TEST_FOLDER": str(self.folder), "PYSPARK_DRIVER_PYTHON": str(self.python)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        environment.pop(VARIABLE, None)
        if kill_at is not None:
            environment[VARIABLE] = kill_at
        file = Path(__file__).with_name(f"{self.pipeline}_pipeline.py")
        command = [str(self.python), "-m", "tidegate", "run", str(file), "--root", str(self.root)]
        command += ["--checkpoint-interval", "700ms", *self.arguments, *arguments]
        self._started += 1
        if self._started % 2:
            command.append("--no-chain")
        return subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=said or subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=self.umask,
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

    def _wait_for_more_than(self, epochs: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + _RUN_SECONDS
        while self.epochs_shown() <= epochs:
            if process.poll() is not None:
                self.finish(process)
                raise AssertionError(f"the run has ended by itself:\n{self.output[-1][-3000:]}")
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill_at_step(self, step: str) -> None:
        """Run until the step is reached and the process kills itself."""
        assert self.finish(self.start(kill_at=step)) == -signal.SIGKILL, self.output[-1][-3000:]

    def kill_after(self, seconds: float) -> None:
        """Kill a run that long after it has shown rows: what comes before are steps, however slow the machine is."""
        before = self.epochs_shown()
        process = self.start()
        self._wait_for_more_than(before, process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()
        assert self.finish(process) == -signal.SIGKILL, self.output[-1][-3000:]

    def run_to_the_end(self) -> None:
        assert self.finish(self.start("--available-now")) == 0, self.output[-1][-3000:]

    def epochs_shown(self) -> int:
        """How many epochs have added rows to a table of one source."""
        name = self.prefixes[0]
        return len(epoch_versions(self.lake / name, f"{self.pipeline}/{name}"))

    # -- what must hold ---------------------------------------------------------------------------

    def check_tables(self) -> None:
        lake = self.lake
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
            table = self.lake / name
            counts = {0: 0}
            for epoch, version in epoch_versions(table, f"{self.pipeline}/{name}").items():
                rows = table_rows(table, ["id"], version=version)
                assert rows == Counter({(each,): 1 for each in range(len(rows))}), f"{name} at epoch {epoch}"
                counts[epoch] = len(rows)
            shown.append(counts)
        if "--unaligned-after" not in self.arguments:
            self._check_together(*shown)
        return len(shown[0].keys() | shown[1].keys()) - 1

    def _check_together(self, one: Mapping[int, int], other: Mapping[int, int]) -> None:
        """Whoever is killed with two checkpoints decided may have shown the older one in one table only. Whoever opens
        the next generation shows the newer one in all: no version of the other table is the older one, and nobody is
        given it as that. It happens once for a generation at most."""
        overtaken: set[int] = set()
        for epoch in sorted(one.keys() | other.keys()):
            at = [counts[max(each for each in counts if each <= epoch)] for counts in (one, other)]
            if at[0] != at[1]:
                behind = one if at[0] < at[1] else other
                later = min((each for each in behind if each > epoch), default=None)
                assert later is not None, f"at epoch {epoch}: {at}"
                assert behind[later] >= max(at), f"at epoch {epoch}: {at}, then {behind[later]} at {later}"
                overtaken.add(later)
        assert len(overtaken) < StoredDecisions(self.store).read().generation, f"{one} and {other}"

    def check_no_orphans(self) -> None:
        """After the last clean-up the root holds what retained checkpoints refer to, and the last generation."""
        store = self.store
        log = StoredDecisions(store).read()
        needed: set[str] = set()
        for checkpoint_id in log.retained:
            record = log.completed(checkpoint_id)
            assert record is not None
            needed |= {record.manifest} | references(store, read_manifest(store, record))
        self._check_needed(store, needed, log.generation)
        for table in self.lake.iterdir():
            staged = [path for path in (table / "_tidegate").rglob("*.parquet") if path.is_file()]
            assert not staged, staged[:5]

    def _check_needed(self, store: Files, needed: set[str], generation: int) -> None:
        found, last = store.list("generations"), f"generations/{generation:06d}/"
        assert {checked_by(name) for name in found if not name.startswith(last)} <= needed
        kept = {checked_by(name) for name in found if name.startswith((f"{last}snapshots/", f"{last}manifests/"))}
        assert kept <= needed, sorted(kept - needed)[:5]
        segments = {name for name in found if name.startswith(last) and re.search(r"/output(-\d+)?/part-", name)}
        assert segments <= needed, sorted(segments)[:5]


class SlowRuns(KilledRuns):
    """Of the pipeline whose sinks are slow; `environment` says how its PostgreSQL server is reached."""

    pipeline = "slow"
    files_per_run = 5
    prefixes = ("order_table", "slow_table")

    def check_tables(self) -> None:
        lake, dsn = self.lake, self._environment["TIDEGATE_TEST_DSN"]
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
