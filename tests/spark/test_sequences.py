"""Random sequences of what an operator does: run, crash, checkpoint, cancel, savepoint, restore, fork, promote, change.

After each the tables are what the batch job over what was consumed says, or what was noted of the checkpoint that they
went to. Commands that are no runs are killed at their steps, by SIGKILL; a run crashes from within.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, note, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import Crash, oracle, run_to_end, stream, table_rows, write_input
from tests.spark.test_savepoints import KILLS, tidegate
from tidegate.engine.requests import TakeCheckpoint, ask_for_checkpoint, ask_to_cancel, ask_to_stop
from tidegate.engine.run import run_pipeline
from tidegate.engine.status import RunStatus
from tidegate.errors import RequestFailed
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.lock import is_held

pytestmark = [pytest.mark.spark, pytest.mark.slow]

COLUMNS = {"all_rows": ["id", "value"], "sums": ["key", "value"]}
Shown = dict[str, Counter[tuple[Any, ...]]]


class Operation(msgspec.Struct, frozen=True):
    """What somebody does. `killed_at`: a step of it, if it is killed. `choice`: of several things that it may be of."""

    kind: str
    files: int = 1
    killed_at: str | None = None
    choice: int = 0


class Operated:
    """One pipeline and what was noted of it."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.folder = folder
        self.spark = spark
        self.root = folder / "root-0"
        self.suffix = ""
        self.files = 0
        self.forks = 0
        self.is_renamed = self.was_renamed = False
        self.noted: dict[str, Shown] = {}
        """What tables show at savepoints and checkpoints of the root, by what `restore --to` calls them."""

    def pipeline(self) -> tg.Pipeline:
        """Rows, and sums of keys that are replaced. A stage between has one name or another."""
        pipeline, folder = tg.Pipeline("operated"), self.folder
        between = "renamed" if self.is_renamed else "doubled"

        @pipeline.source
        def rows(spark: SparkSession) -> DataFrame:
            return stream(spark, folder / "in", 1)

        def doubled(rows: DataFrame) -> DataFrame:
            return rows.withColumn("value", F.col("value") * 2)

        doubled.__name__ = between
        pipeline.stage(doubled)
        read = {"doubled": _all_rows, "renamed": _all_rows_renamed}[between]
        summed = {"doubled": _sums, "renamed": _sums_renamed}[between]
        pipeline.sink(tg.DeltaTable(folder / "lake" / "all_rows"))(read)
        pipeline.sink(tg.DeltaTable(folder / "lake" / "sums", key="key"), output_mode="update")(summed)
        return pipeline

    @property
    def how(self) -> dict[str, Any]:
        """What a run has to be told of the change since the last."""
        if self.is_renamed == self.was_renamed:
            return {}
        return {"rename": {"doubled": "renamed"} if self.is_renamed else {"renamed": "doubled"}}

    def shown(self, suffix: str | None = None) -> Shown:
        where = self.suffix if suffix is None else suffix
        return {name: table_rows(self.folder / "lake" / f"{name}{where}", each) for name, each in COLUMNS.items()}

    def note(self, name: str) -> None:
        self.noted[name] = self.shown()

    def newest(self) -> str:
        return checkpoint_name(InspectedRoot(self.root).newest().checkpoint_id)

    def forget_dropped(self) -> None:
        """Checkpoints that the root does not retain any more."""
        kept = {checkpoint_name(each.checkpoint_id) for each in InspectedRoot(self.root).retained()}
        self.noted = {name: each for name, each in self.noted.items() if not name.startswith("ckpt-") or name in kept}

    # -- what is done -----------------------------------------------------------------------------

    def do(self, operation: Operation) -> None:
        note(f"{operation}")
        getattr(self, operation.kind)(operation)

    def run(self, operation: Operation) -> None:
        """To the end of all input: then every table shows each row once."""
        write_input(self.folder / "in", operation.files, 10, first_file=self.files)
        self.files += operation.files
        self.finish()

    def finish(self) -> None:
        pipeline = self.pipeline()
        run_to_end(pipeline, self.root, self.spark, retain=3, **self.how)
        self.was_renamed = self.is_renamed
        expected = oracle(pipeline, self.spark)
        shown = self.shown()
        assert shown["all_rows"] == expected["all_rows"]
        assert shown["sums"] == expected["sums"]
        self.note(self.newest())
        self.forget_dropped()

    def crash(self, operation: Operation) -> None:
        write_input(self.folder / "in", operation.files, 10, first_file=self.files)
        self.files += operation.files
        seen = 0

        def view(status: RunStatus) -> None:
            nonlocal seen
            seen += bool(status.stages)
            if seen > 1 + operation.choice % 8:
                raise Crash

        with suppress(Crash):
            run_to_end(self.pipeline(), self.root, self.spark, view=view, checkpoint_interval="100ms", **self.how)
        self.finish()

    def live(self, operation: Operation) -> None:
        """A run that is alive is asked for a checkpoint, cancelled, saved, and stopped."""
        write_input(self.folder / "in", operation.files, 10, first_file=self.files)
        self.files += operation.files
        failures: list[BaseException] = []

        def run() -> None:
            try:
                run_pipeline(self.pipeline(), self.root, self.spark, checkpoint_interval="7d", restarts=0, **self.how)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        name = f"live-{self.files}-{operation.choice}"
        try:
            _wait(lambda: bool(failures) or is_held(self.root / "lock"))
            root = InspectedRoot(self.root)
            ask_for_checkpoint(root.place, 120, TakeCheckpoint())
            with suppress(RequestFailed):
                ask_to_cancel(root.place, 120)
            if operation.choice % 2:
                tg.savepoint(self.root, name)
            ask_to_stop(root.place, 120)
        finally:
            thread.join(240)
        assert not failures, failures
        assert not thread.is_alive()
        self.was_renamed = self.is_renamed
        self.finish()

    def save(self, operation: Operation) -> None:
        if not (self.root / "decisions").is_dir():
            return
        name = f"save-{self.files}-{len(self.noted)}-{operation.choice}"
        done = tidegate("savepoint", "--root", self.root, "--name", name, killed_at=_killed(operation, KILLS[:1]))
        if _was_killed(done, operation):
            done = tidegate("savepoint", "--root", self.root, "--name", f"{name}-again")
            name = f"{name}-again"
        assert done.returncode == 0, done.stderr
        self.note(name)

    def restore(self, operation: Operation) -> None:
        if not self.noted:
            return
        target = sorted(self.noted)[operation.choice % len(self.noted)]
        command = ("restore", "--root", self.root, "--to", target, "--yes")
        done = tidegate(*command, killed_at=operation.killed_at)
        if _was_killed(done, operation) and operation.choice % 2:
            done = tidegate(*command)  # else the next run finishes it
        if done.returncode == 0:
            assert self.shown() == self.noted[target], target
        else:
            assert done.returncode in (-signal.SIGKILL, 3), done.stderr
        # What a checkpoint of before knows the stage as.
        self.is_renamed = self.was_renamed = _name_at(self.root) == "renamed"
        self.finish()

    def fork(self, operation: Operation) -> None:
        """And it takes the pipeline's place, after it has run by itself."""
        if not (self.root / "decisions").is_dir():
            return
        self.forks += 1
        fork, suffix = self.folder / f"root-{self.forks}", f"_{self.forks}"
        before = self.shown()
        command = ("fork", "--root", self.root, "--to", fork, "--tables", f"suffix={suffix}")
        done = tidegate(*command, killed_at=_killed(operation, KILLS[1:]))
        killed = _was_killed(done, operation)
        assert killed or done.returncode == 0, done.stderr
        if not killed:
            assert self.shown(suffix) == before
        original, self.root, self.suffix, self.noted = self.root, fork, suffix, {}
        self.run(operation)
        assert self.shown("") == before, "the pipeline that is forked notices nothing"
        self.promote(operation, original)

    def promote(self, operation: Operation, original: Path) -> None:
        by_fork = self.shown()
        command = ("promote", "--root", self.root, "--yes")
        done = tidegate(*command, killed_at=operation.killed_at)
        if _was_killed(done, operation) and operation.killed_at == KILLS[0]:
            done = tidegate(*command)  # nothing was decided
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        self.suffix, self.noted = "", {}
        if done.returncode == 0:
            assert self.shown() == by_fork
        self.run(operation)
        refused = tidegate("verify", "--root", original)
        assert refused.returncode in (0, 4), refused.stderr

    def change(self, operation: Operation) -> None:
        """The stage between gets its other name."""
        if not (self.root / "decisions").is_dir():
            return
        self.is_renamed = not self.was_renamed
        self.run(operation)


def _all_rows(doubled: DataFrame) -> DataFrame:
    return doubled.select("id", "value")


def _all_rows_renamed(renamed: DataFrame) -> DataFrame:
    return renamed.select("id", "value")


def _sums(doubled: DataFrame) -> DataFrame:
    return doubled.groupBy("key").agg(F.sum("value").alias("value"))


def _sums_renamed(renamed: DataFrame) -> DataFrame:
    return renamed.groupBy("key").agg(F.sum("value").alias("value"))


for _function, _name in (
    (_all_rows, "all_rows"),
    (_all_rows_renamed, "all_rows"),
    (_sums, "sums"),
    (_sums_renamed, "sums"),
):
    _function.__name__ = _name


def _name_at(root: Path) -> str:
    """What the stage between is called at the newest checkpoint."""
    inspected = InspectedRoot(root)
    return "renamed" if "renamed" in inspected.manifest(inspected.newest()).shape else "doubled"


def _killed(operation: Operation, steps: list[str]) -> str | None:
    return operation.killed_at if operation.killed_at in steps else None


def _was_killed(done: Any, operation: Operation) -> bool:
    return operation.killed_at is not None and done.returncode == -signal.SIGKILL


def _wait(until: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(1200):
        if until():
            return
        waiting.wait(0.05)
    raise AssertionError("it does not come to it")


OPERATIONS = st.builds(
    Operation,
    kind=st.sampled_from(["run", "crash", "live", "save", "save", "restore", "restore", "fork", "change"]),
    files=st.integers(1, 2),
    killed_at=st.one_of(st.none(), st.sampled_from(KILLS)),
    choice=st.integers(0, 7),
)
SEQUENCES = st.lists(OPERATIONS, min_size=3, max_size=6)


def play(operations: list[Operation], folder: Path, spark: SparkSession) -> None:
    operated = Operated(folder, spark)
    operated.run(Operation("run"))
    for each in operations:
        operated.do(each)
    operated.finish()


EVERYTHING = [
    Operation("save", choice=1),
    Operation("change"),
    Operation("live", choice=1),
    Operation("restore", killed_at="table_set_back:1", choice=7),
    Operation("crash", files=2, choice=5),
    Operation("fork", killed_at="table_set_back:2"),
    Operation("save", killed_at="checkpoint_brought:1"),
    Operation("restore", choice=0),
]

_HOW: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
}


@pytest.mark.soak  # the simulator plays more of them
@settings(max_examples=1, derandomize=True, phases=(Phase.explicit,), **_HOW)
@example(operations=EVERYTHING)
@given(operations=SEQUENCES)
def test_whatever_an_operator_does_no_row_is_lost_or_doubled(
    operations: list[Operation], tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> None:
    play(operations, tmp_path_factory.mktemp("operated"), spark)


@pytest.mark.soak
@settings(max_examples=40, print_blob=True, phases=(Phase.explicit, Phase.generate), **_HOW)
@given(operations=SEQUENCES)
def test_whatever_an_operator_does_for_longer_no_row_is_lost_or_doubled(
    operations: list[Operation], tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> None:
    play(operations, tmp_path_factory.mktemp("operated"), spark)
