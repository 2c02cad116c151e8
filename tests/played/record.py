"""Records what a real Spark writes, step by step, into `spark-<version>.txt` beside this.

    python -m tests.played.record        needs strace, and takes some minutes

The order is that of the system calls of Spark's process; contents are read after each step, when they still lie there.
Ids, times and sizes are replaced. Which task has written what is left out, and Hadoop's checksum beside every file.
"""

from __future__ import annotations

import datetime as dt
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from pyspark import __version__
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from tests.played.recording import Event, Normalizer, Recording, Sign, Step, told
from tests.played.scenarios import DELAY_S, SCENARIOS, Scenario
from tidegate.spark.filelog import METADATA, StageSource, restart_source_logs
from tidegate.spark.output import batch_folder, restore_output
from tidegate.spark.queries import read_gate
from tidegate.spark.session import StageSessions, own_session
from tidegate.spark.snapshot import files_at
from tidegate.storage.folder import Folder

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

SCHEMA: Final = StructType([StructField("id", LongType()), StructField("ts", TimestampType())])
_SETTINGS: Final = {
    "spark.master": "local[6]",  # queries that hang take theirs
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.stateStore.maintenanceInterval": "1h",  # it is called for
}
_CALLS: Final = "openat,close,rename,renameat,unlink,unlinkat,mkdir"
_STRACE: Final = ("strace", "-f", "--seccomp-bpf", "-qq", "-y", "-s", "4096", "-e", f"trace={_CALLS}", "-o")
_SETTLING_S: Final = 0.4
_HANGS: Final = "hangs"


class Progress(msgspec.Struct):
    """Of a scenario, over the life of several processes."""

    step: int = 0
    fed: int = 0
    attempt: int = 1
    gates: dict[str, list[str]] = {}
    hangs: bool = False


class Query:
    """One scenario's."""

    def __init__(self, root: Path, scenario: Scenario, sessions: StageSessions, progress: Progress) -> None:
        self.scenario = scenario
        self.progress = progress
        self.folder = root / scenario.name
        self.hang = self.folder / _HANGS
        self._sessions = sessions
        self._query: Any = None
        self.failure = ""
        self.folder.mkdir(exist_ok=True)
        for name in self._inputs:
            if name not in progress.gates:
                self._lay_gate(name)

    @property
    def _inputs(self) -> tuple[str, ...]:
        return ("0", "1") if self.scenario.kind == "union" else ("0",)

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"spark-{self.progress.attempt}"

    @property
    def output(self) -> Path:
        return self.folder / f"output-{self.progress.attempt}"

    def _gate(self, name: str) -> Path:
        return self.folder / f"gate-{self.progress.attempt}-{name}"

    def _lay_gate(self, name: str) -> None:
        self.progress.gates[name] = []
        (self._gate(name) / METADATA).mkdir(parents=True)
        (self._gate(name) / METADATA / "9.compact").write_text("v1", encoding="utf-8")

    # -- steps ------------------------------------------------------------------------------------

    def feed(self, name: str, seconds: str, rows: str) -> None:
        self.progress.fed += 1
        moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=int(seconds))
        table = pyarrow.table(
            {
                "id": pyarrow.array(range(int(rows)), pyarrow.int64()),
                "ts": pyarrow.array([moment] * int(rows), pyarrow.timestamp("us", tz="UTC")),
            }
        )
        path = self.folder / "in" / name / f"{self.progress.fed:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.with_name(f".{path.name}")
        parquet.write_table(table, hidden)
        os.utime(hidden, (1_700_000_000 + self.progress.fed,) * 2)
        hidden.rename(path)
        if self.scenario.kind != "source":
            self._release(name, path)

    def _release(self, name: str, path: Path) -> None:
        """All in one: here the compact entries repeat whatever was released."""
        lines = self.progress.gates[name]
        size = path.stat().st_size
        lines.append(
            f'{{"path":"file://{path}","size":{size},"isDir":false,"modificationTime":{len(lines) + 1},'
            f'"blockReplication":1,"blockSize":33554432,"action":"add"}}'
        )
        number = 9 + len(lines)
        is_compact = number % 10 == 9
        entry = self._gate(name) / METADATA / (f"{number}.compact" if is_compact else str(number))
        hidden = entry.with_name(f".{entry.name}.tmp")
        hidden.write_text("\n".join(["v1", *(lines if is_compact else lines[-1:])]), encoding="utf-8")
        hidden.rename(entry)

    def start(self, how: str = "") -> None:
        self._sessions.of_stages.conf.set(
            "spark.sql.streaming.noDataMicroBatches.enabled", str(how != "without-empty-batches").lower()
        )
        frame, mode, write = self._frame()
        writer = frame.writeStream.outputMode(mode).option("checkpointLocation", str(self.checkpoint))
        if how == "available-now":
            writer = writer.trigger(availableNow=True)
        if write is None:
            self._query = writer.format("parquet").option("path", str(self.output)).start()
        else:
            self._query = writer.foreachBatch(write).start()

    def _frame(self) -> tuple[DataFrame, str, Callable[[DataFrame, int], None] | None]:
        session = self._sessions.of_sources if self.scenario.kind == "source" else self._sessions.of_stages
        if self.scenario.kind == "source":
            stream = session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", "1")
            (self.folder / "in" / "0").mkdir(parents=True, exist_ok=True)
            return stream.parquet(str(self.folder / "in" / "0")), "append", None
        frames = [read_gate(session, Folder(self._gate(name)), SCHEMA) for name in self._inputs]
        frame = frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
        if self.scenario.name.startswith("killed"):
            frame = self._hanging(frame)
        match self.scenario.kind:
            case "totals":
                late = frame.withWatermark("ts", f"{DELAY_S} seconds")
                totals = late.groupBy(F.window("ts", f"{DELAY_S} seconds")).agg(F.count("id").alias("n"))
                return totals.select("window.start", "n"), "append", None
            case "updates":
                return frame.groupBy("id").agg(F.count("*").alias("n")), "update", self._overwrite
            case "rows":
                return frame, "append", _consume
        return frame, "append", None

    def _hanging(self, frame: DataFrame) -> DataFrame:
        hang = str(self.hang)

        @F.udf("long")
        def wait(number: int) -> int:
            while Path(hang).exists():
                time.sleep(0.05)
            return number

        return frame.withColumn("id", wait("id"))

    def _overwrite(self, batch: DataFrame, number: int) -> None:
        writing = batch.write.mode("overwrite").option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
        writing.parquet(str(self.output / batch_folder(number)))

    def idle(self) -> None:
        try:
            if self._query.isActive:
                self._query.processAllAvailable()
            self._query.awaitTermination(_SETTLING_S)
        except StreamingQueryException as error:
            self.failure = re.sub(
                r"SQLSTATE.*", "", str(error).partition("with exception: ")[2], flags=re.DOTALL
            ).strip()

    def stop(self) -> None:
        self._query.stop()

    def killed_in_the_tasks(self) -> None:
        self.hang.touch()
        before = len(list((self.checkpoint / "offsets").iterdir()))
        self.feed("0", "40", "3")
        while len(list((self.checkpoint / "offsets").iterdir())) == before:
            time.sleep(0.05)
        time.sleep(4)
        self.progress.hangs = True

    def killed_in_the_commit(self) -> None:
        """A commit log that cannot be written to fails the query there."""
        log = self.checkpoint / "commits"
        away = log.rename(log.with_name("away"))
        log.touch()
        self.feed("0", "70", "3")
        while self._query.isActive:
            time.sleep(0.05)
        log.unlink()
        away.rename(log)

    def restored(self) -> None:
        files = Folder(self.folder, fsync=False)
        old = files.at(self.checkpoint.name)
        batch = max(int(name) for name in old.names_in("commits") if name.isdigit())
        self.progress.attempt += 1
        new = files.at(self.checkpoint.name)
        reads_gates = self.scenario.kind != "source"
        for name in dict.fromkeys(files_at(old, batch, reads_gates=reads_gates)):
            new.keep(name, old, name)
        if reads_gates:
            restart_source_logs(new, batch, [StageSource(name, log) for log, name in enumerate(self._inputs)])
            for name in self._inputs:
                self._lay_gate(name)
        restore_output(files.at(self.output.name), batch)

    def maintain(self) -> None:
        jvm: Any = self._sessions.of_stages._jvm
        stores = jvm.java.lang.Class.forName("org.apache.spark.sql.execution.streaming.state.StateStore$")
        maintain = stores.getDeclaredMethod("doMaintenance", None)
        maintain.setAccessible(True)
        for _ in range(2):  # the first one after a restart may do no more than take leave of the stores before
            maintain.invoke(stores.getField("MODULE$").get(None), None)
            before: list[str] = []
            while before != (now := [str(path) for path in self.checkpoint.rglob("*")]):
                before = now
                time.sleep(2 * _SETTLING_S)

    def run(self, step: str) -> None:
        word, *arguments = step.split()
        if word == "killed":
            (self.killed_in_the_tasks if arguments[-1] == "tasks" else self.killed_in_the_commit)()
        else:
            getattr(self, word)(*arguments)

    # -- what lies there --------------------------------------------------------------------------

    def contents(self, known: set[str]) -> dict[str, str]:
        """Of files that are new since."""
        found: dict[str, str] = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and name not in known and not path.name.startswith(".") and "gate-" not in name:
                found[name] = "" if self.scenario.deletions_only else content_of(path)
                known.add(name)
        return found


def _consume(batch: DataFrame, _number: int) -> None:
    batch.collect()


def content_of(path: Path) -> str:
    """What is compared of a file; nothing of one that only Spark itself can read."""
    if path.suffix == ".changelog":
        return lineage_of(path.read_bytes())
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as zipped:
            return zipped.read("metadata").decode()
    if path.suffix in (".sst", ".parquet") or path.name == "schema":
        return ""
    return path.read_text(encoding="utf-8")


def lineage_of(data: bytes) -> str:
    """What a change log says of those that it goes on from: in its first block, behind two strings of Java's."""
    compressed, size = (int.from_bytes(data[at : at + 4], "little") for at in (9, 13))
    block = data[21 : 21 + compressed]
    if data[8] & 0xF0 == 0x20:
        block = pyarrow.decompress(block, size, codec="lz4_raw").to_pybytes()
    version = int.from_bytes(block[:2], "big")
    length = int.from_bytes(block[2 + version : 4 + version], "big")
    return block[2 : 2 + version].decode() + "\n" + block[4 + version : 4 + version + length].decode()


# -- the traced process ---------------------------------------------------------------------------------


class Noted(msgspec.Struct):
    """What a traced process tells the one that started it."""

    process: int
    progress: dict[str, Progress]
    contents: dict[str, dict[str, str]]
    """By the mark that ends the step."""


def traced(root: Path) -> None:
    """Run every scenario as far as it goes, and be killed where one hangs."""
    note = root / "noted.json"
    before = msgspec.json.decode(note.read_bytes(), type=Noted) if note.exists() else Noted(0, {}, {})
    noted = Noted(os.getpid(), before.progress, before.contents)
    session = own_session("recorded", root / "spark.log", _SETTINGS)
    sessions = StageSessions(session)
    (root / "marks").mkdir(exist_ok=True)
    for scenario in SCENARIOS:
        progress = noted.progress.setdefault(scenario.name, Progress())
        if progress.step == len(scenario.steps):
            continue
        query = Query(root, scenario, sessions, progress)
        known = {name for key, found in noted.contents.items() if key.startswith(f"{scenario.name} ") for name in found}
        query.hang.unlink(missing_ok=True)
        progress.hangs = False
        while progress.step < len(scenario.steps) and not progress.hangs:
            query.run(scenario.steps[progress.step])
            mark = f"{scenario.name} {progress.step}"
            (root / "marks" / mark).mkdir()
            noted.contents[mark] = query.contents(known)
            if query.failure:
                noted.contents[mark]["!"] = query.failure
                query.failure = ""
            progress.step += 1
        if not progress.hangs:
            query.stop()
    note.write_bytes(msgspec.json.encode(noted))
    os.kill(_process_of(session), 9)
    os._exit(0)


def _process_of(session: SparkSession) -> int:
    gateway: Any = session.sparkContext._gateway
    return int(gateway.proc.pid)


# -- from traces to a recording -------------------------------------------------------------------------

_BEGUN: Final = re.compile(r"(\d+) +(\w+\(.*) <unfinished \.\.\.>\s*")
_RESUMED: Final = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")
_CALL: Final = re.compile(r"(\d+) +(\w+)\((.*)\) += (?!-1)")
_QUOTED: Final = re.compile(r'"([^"]*)"')
_HANDLE: Final = re.compile(r"\d+<([^>]*)>")


def calls(lines: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """Thread, name and arguments of those that succeeded, in the order in which they ended."""
    begun: dict[str, str] = {}
    for line in lines:
        whole = line
        if match := _BEGUN.match(line):
            begun[match[1]] = match[2]
            continue
        if match := _RESUMED.match(line):
            whole = f"{match[1]} {begun.pop(match[1], '')}{match[2]}"
        if match := _CALL.match(whole):
            yield int(match[1]), match[2], match[3]


def files_written(root: Path, trace: Path, own: int) -> Iterator[tuple[Sign | Literal["mark"], str]]:
    """What happened to files of scenarios, and the marks between. `own`: the recorder, whose own files do not count."""
    opened: dict[str, int] = {}
    prefix = f"{root}/"
    with trace.open(encoding="utf-8", errors="replace") as lines:
        for thread, call, arguments in calls(lines):
            found = (_HANDLE if call == "close" else _QUOTED).findall(arguments)
            name = next((name.removeprefix(prefix) for name in reversed(found) if name.startswith(prefix)), None)
            if name is None:
                continue
            if call == "mkdir" and name.startswith("marks/"):
                yield "mark", name.removeprefix("marks/")
            elif thread != own:
                sign = _happened(call, thread, name, opened, is_new="O_CREAT" in arguments)
                if sign is not None:
                    yield sign, name
    for name in sorted(opened):
        yield "~", name


def _happened(call: str, thread: int, name: str, opened: dict[str, int], *, is_new: bool) -> Sign | None:
    if call.startswith("rename"):
        return "+"
    if call.startswith("unlink"):
        return "-"
    if call == "openat" and is_new:
        opened[name] = thread
    elif call == "close" and opened.get(name) == thread:  # not in a process that was forked meanwhile
        del opened[name]
        return "+"
    return None


def steps_of(root: Path, runs: int) -> Iterator[tuple[str, list[tuple[Sign, str]]]]:
    """Of all traces: the mark that ends each step, and what was written in it."""
    for number in range(1, runs + 1):
        own = int((root / f"process-{number}").read_text(encoding="utf-8"))
        found: list[tuple[Sign, str]] = []
        ended: list[str] = []
        for sign, name in files_written(root, root / f"trace-{number}", own):
            if sign == "mark":
                yield name, found
                ended.append(name)
                found = []
            elif sign == "~":
                scenario = name.partition("/")[0]
                killed = [mark for mark in ended if mark.partition(" ")[0] == scenario]
                yield killed[-1], [(sign, name)]
            else:
                found.append((sign, name))


def recorded(root: Path, runs: int) -> Recording:
    noted = msgspec.json.decode((root / "noted.json").read_bytes(), type=Noted)
    settings: dict[str, str] = next(
        msgspec.json.decode(content.splitlines()[1])["conf"]
        for found in noted.contents.values()
        for name, content in found.items()
        if "/offsets/" in name
    )
    happened: dict[str, list[tuple[Sign, str]]] = {}
    for mark, found in steps_of(root, runs):
        happened.setdefault(mark, []).extend(found)
    scenarios: dict[str, tuple[Step, ...]] = {}
    for scenario in SCENARIOS:
        normalizer = Normalizer(settings)
        steps: list[Step] = []
        early: list[Event] = []
        contents: dict[str, str] = {}
        for number, step in enumerate(scenario.steps):
            mark = f"{scenario.name} {number}"
            contents |= noted.contents[mark]
            events = early + [
                Event(sign, name.partition("/")[2])
                for sign, name in happened[mark]
                if name.startswith((f"{scenario.name}/spark-", f"{scenario.name}/output-"))
            ]
            early = []
            if step.startswith("start"):  # a query that is started may be quicker than we are
                early = [event for event in events if not event.name.endswith("/metadata")]
                events = [event for event in events if event.name.endswith("/metadata")]
            events = [Event(each.sign, each.name, contents.get(each.name, "")) for each in events]
            events += [Event("!", contents.pop("!"))] if "!" in contents else []
            steps.append(Step(step, tuple(told(scenario, normalizer.events(events)))))
        scenarios[scenario.name] = tuple(steps)
    return Recording(__version__, settings, scenarios)


def record(root: Path) -> Recording:
    for number in count(1):
        trace = root / f"trace-{number}"
        subprocess.run([*_STRACE, trace, sys.executable, "-m", "tests.played.record", str(root)], check=True)
        noted = msgspec.json.decode((root / "noted.json").read_bytes(), type=Noted)
        (root / f"process-{number}").write_text(str(noted.process), encoding="utf-8")
        if all(noted.progress[each.name].step == len(each.steps) for each in SCENARIOS):
            break
    return recorded(root, number)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        traced(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="tidegate-recorded-") as folder:
            record(Path(folder)).write(Path(__file__).with_name(f"spark-{__version__}.txt"))
