"""What a decision names is on the disk before the decision is, and that before anything acts on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import tidegate as tg
from tests.spark.harness import run_to_end, stream, table_rows, write_input
from tests.spark.power import STRACE, Disk, lose_power, read_trace
from tidegate.engine.kill_points import VARIABLE
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.sinks.contract import decode_committable
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import read_manifest, references
from tidegate.storage.paths import RootPaths

pytestmark = pytest.mark.spark

_REPOSITORY = Path(__file__).parents[2]
_PATIENCE_S = 120
_OWNER = "tidegate/powerless/order_table"
_FILES = 6
_ROWS_PER_FILE = 20


class Machine:
    """A folder with a root and tables, on which runs are traced until their power is lost."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "durable" / "root"
        self.order_table = folder / "durable" / "order_table"
        self.armed = folder / "armed"
        self._trace = folder / "trace"
        self._files = 0
        (folder / "durable").mkdir()

    def feed(self, files: int = _FILES) -> None:
        write_input(self.folder / "orders", files, _ROWS_PER_FILE, first_file=self._files)
        self._files += files

    @property
    def rows(self) -> int:
        return self._files * _ROWS_PER_FILE

    def start(self, *options: str, kill_at: str | None = None) -> subprocess.Popen[bytes]:
        """A run that is traced if it is to be killed."""
        environment = {**os.environ, "TIDEGATE_TEST_FOLDER": str(self.folder)}
        environment["PYTHONPATH"] = os.pathsep.join([str(_REPOSITORY), str(_REPOSITORY / "src")])
        command = [sys.executable, "-m", "tidegate", "run", str(Path(__file__).with_name("powerless_pipeline.py"))]
        command += ["--root", str(self.root), "--checkpoint-interval", "500ms", *options]
        if kill_at is not None:
            environment[VARIABLE] = f"{kill_at}@{self.armed}"
            command = [*STRACE, str(self._trace), *command]
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(command, env=environment, cwd=_REPOSITORY, stdout=output, stderr=output)

    def disk(self) -> Disk:
        return Disk(self.folder, read_trace(self._trace.read_text(encoding="utf-8").splitlines()))

    def versions(self) -> list[Path]:
        """Of the table that is appended to, those that show an epoch."""
        versions = sorted((self.order_table / "_delta_log").glob("*.json"))
        return [path for path in versions if f"{_OWNER}/epoch" in path.read_text(encoding="utf-8")]

    def await_versions(self, wanted: int, process: subprocess.Popen[bytes]) -> None:
        self._await(lambda: process.poll() is not None or len(self.versions()) >= wanted)
        assert process.poll() is None, self.said

    def feed_until(self, condition: Callable[[], bool]) -> None:
        def is_met() -> bool:
            self.feed(1)
            return condition()

        self._await(is_met, pause_s=0.3)

    def await_quiet(self) -> None:
        """The JVM ends a moment after the process that was killed."""
        self._await(self._is_quiet)

    def _await(self, condition: Callable[[], bool], pause_s: float = 0.05) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.said
            time.sleep(pause_s)

    def _is_quiet(self) -> bool:
        """Whether no process of a run is alive."""
        wanted = f"TIDEGATE_TEST_FOLDER={self.folder}".encode()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if wanted in environment.read_bytes():
                    return False
            except OSError:
                continue  # it has ended, or is another user's
        return True

    @property
    def said(self) -> str:
        return (self.folder / "output").read_text(encoding="utf-8")[-3000:]


def check_decisions(machine: Machine, disk: Disk) -> list[CheckpointCompleted]:
    """All that a decision names is on the disk before the decision has its name. Returns those that name state."""
    paths, store = RootPaths(machine.root), Folder(machine.root)
    checked = []
    log = StoredDecisions(store).read()
    for record in log:
        path = paths.absolute(paths.decision(record.slot))
        decided = disk.named[path].began
        assert disk.has_content(path, by=decided), f"{path} has its name before its content is on the disk"
        if not isinstance(record, CheckpointCompleted) or record.checkpoint_id not in log.retained:
            continue
        manifest = read_manifest(store, record)
        committables = [decode_committable(each.committable) for each in manifest.stages.values() if each.committable]
        named = {paths.absolute(name) for name in (record.manifest, *references(store, manifest))}
        named |= {Path(file.path) for committable in committables for file in committable.files}
        for each in named:
            assert disk.has(each, by=decided), f"{path} is there before {each} is on the disk"
        if any("/state/" in each.as_posix() for each in named):
            checked.append(record)
    return checked


def check_commits(machine: Machine, disk: Disk, decided: list[CheckpointCompleted]) -> int:
    """An epoch is decided on the disk before a table shows it, what a version adds is there before the version is, and
    the version before a checkpoint relies on it. Returns how many epochs were looked at."""
    paths = RootPaths(machine.root)
    records = {record.epoch: paths.absolute(paths.decision(record.slot)) for record in decided}
    looked_at = 0
    for version in machine.versions():
        shown = disk.named[version].began
        actions = [json.loads(line) for line in version.read_text(encoding="utf-8").splitlines()]
        added = [machine.order_table / action["add"]["path"] for action in actions if "add" in action]
        for file in added:
            assert disk.has(file, by=shown), f"{version} is there before {file} is on the disk"
        transactions = {each["txn"]["appId"]: each["txn"]["version"] for each in actions if "txn" in each}
        epoch = transactions[f"{_OWNER}/epoch"]
        if epoch in records:
            looked_at += 1
            assert disk.has(records[epoch], by=shown), (
                f"{version} shows epoch {epoch}, which is not decided on the disk"
            )
        next_batch = transactions[f"{_OWNER}/batch"]
        for record in decided:
            sealed = read_manifest(Folder(machine.root), record).stages["order_table"].committable
            assert sealed is not None
            if record.epoch > epoch and all(each.batch >= next_batch for each in decode_committable(sealed).files):
                relied_on = disk.named[records[record.epoch]].began
                assert disk.has(version, by=relied_on), f"epoch {record.epoch} relies on {version}, not on the disk"
    return looked_at


TRACE = """\
7 mkdir("/f/new", 0777) = 0
7 openat(AT_FDCWD</w>, "/f/theirs/spark", O_RDONLY) = 3</f/theirs/spark>
7 fsync(3</f>) = 0
8 fsync(4</f/writing/a> <unfinished ...>
7 mkdir("/f/new", 0777) = -1 EEXIST (File exists)
8 <... fsync resumed>) = 0
7 fsync(5</f/new>) = 0
7 link("/f/writing/a", "/f/new/a" <unfinished ...>
8 fsync(3</f/theirs/spark>) = -1 EIO (Input/output error)
7 <... link resumed>) = 0
7 fsync(5</f/new> <unfinished ...>
8 fsync(3</f/theirs>) = 0
7 <... fsync resumed>) = 0
"""


def test_what_is_on_the_disk_is_read_from_a_trace() -> None:
    disk = Disk(Path("/f"), read_trace(TRACE.splitlines()))
    linked, spark = Path("/f/new/a"), Path("/f/theirs/spark")
    assert disk.named[linked].began == 7
    assert [disk.has_content(linked, by=line) for line in (5, 6)] == [False, True], "by its other name"
    assert [disk.has_name(linked, by=line) for line in (11, 12, 13)] == [False, False, True], (
        "forced after it was given"
    )
    assert disk.has(linked)
    assert disk.has_name(spark)
    assert not disk.has_content(spark), "that failed"


@pytest.mark.slow
def test_a_run_goes_on_behind_a_record_that_is_torn_and_forces_nothing_without_fsync(
    tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = tg.Pipeline("scratch")
    memory = tg.Memory()

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.sink(tg.DeltaTable(tmp_path / "table"))
    def table(rows: DataFrame) -> DataFrame:
        return rows.select("id")

    @pipeline.sink(memory)
    def remembered(rows: DataFrame) -> DataFrame:
        return rows.select("id")

    root = tmp_path / "root"
    torn = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", None)
        for number in range(2):
            if number:
                log = StoredDecisions(Folder(root, fsync=False)).read()
                torn.append(root / RootPaths.decision(log.next_slot))
                torn[-1].write_bytes(b"")
            write_input(tmp_path / "in", 1, 10, first_file=number)
            run_to_end(pipeline, root, spark, fsync=False)
    told = [each.getMessage() for each in caplog.records if "torn" in each.getMessage()]
    assert len(told) == 1
    assert str(torn[0]) in told[0]
    ids = Counter({(each,): 1 for each in range(20)})
    assert table_rows(tmp_path / "table", ["id"]) == ids
    assert Counter((row.id,) for row in memory.rows) == ids
    assert StoredDecisions(Folder(root)).read().generation == 3, "the torn record may have opened the second"


@pytest.mark.slow
@pytest.mark.soak  # the simulator loses its power at every call
@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace (on Debian: apt-get install strace)")
def test_a_run_that_loses_its_power_goes_on_from_what_is_on_the_disk(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.feed()
    process = machine.start("--unaligned-after", "0s", "--retain", "20", kill_at="slot_claimed:2")
    try:
        for wanted in (1, 2):
            machine.await_versions(wanted, process)
            machine.feed()
        machine.armed.touch()
        # Of those that differ all are retained: on a slow machine, many checkpoints have no rows of the table.
        machine.feed_until(lambda: process.poll() is not None)
        assert process.returncode == -signal.SIGKILL, machine.said
    finally:
        process.kill()
    machine.await_quiet()
    disk = machine.disk()

    decided = check_decisions(machine, disk)
    assert len(decided) >= 2
    assert check_commits(machine, disk, decided) >= 1

    assert lose_power(disk, tmp_path / "durable") > 10
    process = machine.start("--available-now")
    try:
        assert process.wait(_PATIENCE_S) == 0, machine.said
    finally:
        process.kill()
    assert "torn" not in machine.said
    ids = Counter({(each,): 1 for each in range(machine.rows)})
    assert table_rows(machine.order_table, ["id"]) == ids
    totals = Counter(each % 5 for each in range(machine.rows))
    assert table_rows(tmp_path / "durable" / "total_table", ["key", "orders"]) == Counter(
        {(f"k{key}", orders): 1 for key, orders in totals.items()}
    )
    calls = [json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "calls").iterdir()]
    assert Counter((each,) for call in calls for each in call) == ids
