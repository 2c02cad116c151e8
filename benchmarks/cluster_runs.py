"""What the benchmark of several drivers measures: a quorum of members without Spark, a hop, and a failover."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.cluster_members import CONFIG, Host, opened_exchange, stage_of
from benchmarks.measure import WrongWork
from tests.spark.drivers import Drivers
from tests.zookeeper_server import ZooKeeperServer
from tidegate.engine.leading import deciding
from tidegate.errors import TidegateError
from tidegate.flows import requests
from tidegate.flows.boards import LeaderSays, ToMember
from tidegate.flows.leader import Assignment, Leader
from tidegate.flows.member import MemberFailed, Seen
from tidegate.flows.opening import Opened
from tidegate.flows.requests import Patience
from tidegate.protocol.coordinator import StageDecline, StageReport
from tidegate.protocol.quorum import Ack
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder

_PROCESSES: Final = 4
_PATIENCE_S: Final = 120.0
_LEADER: Final = "leader"
_BETWEEN_S: Final = 0.1
# A gate begins with what is behind it: the first entry of a segment is this one.
_FIRST_ENTRY: Final = 10


@contextmanager
def coordination(kind: str) -> Iterator[str]:
    """The address of what the members share."""
    if kind == "files":
        yield "files"
        return
    server = ZooKeeperServer()
    try:
        yield f"zk://{server.servers}/bench"
    finally:
        server.remove()


class _BenchLeader(Host):
    """Leads members that are there already."""

    def __init__(self, address: str, root: Folder, names: list[str], stack: ExitStack) -> None:
        super().__init__()
        self._woken = self.carrier.woken
        self.failed: TidegateError | None = None
        decisions = StoredDecisions(root)
        log = decisions.read()
        decisions.create(log.opening(_LEADER, None))
        log = decisions.read()
        self._says = LeaderSays(log.generation, _LEADER)
        self.carrier.handle(
            {
                **deciding(decisions),
                requests.WriteManifest: lambda request: lambda: _write(root, request),
                requests.CommitSink: lambda _: lambda: None,
                requests.ReadReports: lambda _: dict,
                requests.ListStored: lambda _: list,
                requests.Delete: lambda _: lambda: None,
                requests.ForgetStaged: lambda _: lambda: None,
            }
        )
        self._exchange, post = opened_exchange(address, root, _LEADER, self._woken.set)
        stack.callback(post.close)
        members = {name: Assignment(f"{name}-1", (stage_of(name),), False) for name in names}
        opened = Opened(log.generation, _LEADER, log, None, 0)
        stages = list(map(stage_of, names))
        self.leader = Leader(self, opened, stages, stages[:1], members, CONFIG, None, Patience())
        self._handed_over: dict[str, object] = {}

    def send(self, instance: str, message: ToMember) -> None:
        self._says.say(instance, message)

    def __getattr__(self, name: str) -> Any:
        """What is told of checkpoints, which nobody wants to hear here."""
        if name.startswith("on_"):
            return lambda *_: None
        raise AttributeError(name)

    def on_stepped_down(self, why: TidegateError) -> None:
        self.failed = why

    def poll(self) -> None:
        for instance, board in self._exchange.heard.members.items():
            if board.generation != self.leader.generation or self._handed_over.get(instance) is board:
                continue
            self._handed_over[instance] = board
            for message in board.for_leader():
                match message:
                    case Seen(_, name, sequence):
                        self.leader.on_seen(name, sequence)
                    case StageReport():
                        self.leader.on_report(message)
                    case Ack():
                        self.leader.on_ack(message)
                    case StageDecline() | MemberFailed():
                        raise WrongWork(f"{instance}: {message}")
        self.leader.on_time()
        self.carrier.poll()
        self._says.seen_by_all(self.leader.seen_by_all)
        self._exchange.lead(self._says.board())
        if self.failed is not None:
            raise WrongWork(str(self.failed))

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not is_so():
            if time.monotonic() > deadline:
                raise WrongWork("the members have not answered in time")
            self._woken.wait(0.01)
            self._woken.clear()
            self.poll()

    def hears(self, names: list[str]) -> bool:
        """Whether all of these have said that they run what they were ordered to."""
        boards = self._exchange.heard.members
        return all(name in boards and boards[name].generation == self.leader.generation for name in names)

    def checkpoint_ms(self) -> float:
        """From the trigger until it is decided."""
        began = time.perf_counter()
        checkpoint_id = self.leader.trigger()
        self.poll()
        self.until(lambda: self.leader.log.completed(checkpoint_id) is not None)
        took_ms = (time.perf_counter() - began) * 1000
        self.until(lambda: self.leader.is_settled)
        return took_ms


def _write(root: Folder, request: requests.WriteManifest) -> requests.Written:
    name = f"manifests/{request.checkpoint.checkpoint_id}.json"
    root.write(name, msgspec.json.encode(sorted(request.checkpoint.reports)))
    return requests.Written(name, "", 0)


def measure_quorum(kind: str, members: int, checkpoints: int) -> float:
    """The median of so many checkpoints, in milliseconds."""
    names = [f"m{number:03d}" for number in range(members)]
    with ExitStack() as stack:
        address = stack.enter_context(coordination(kind))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        root = Folder(folder)
        _start_members(address, folder, members, stack)
        leader = _BenchLeader(address, root, names, stack)
        leader.until(lambda: leader.hears(names))
        leader.checkpoint_ms()  # the first one finds everything cold
        return statistics.median(leader.checkpoint_ms() for _ in range(checkpoints))


def _start_members(address: str, folder: Path, members: int, stack: ExitStack) -> None:
    processes = min(_PROCESSES, members)
    shares = [members // processes + (index < members % processes) for index in range(processes)]
    started, first = [], 0
    for share in shares:
        command = [sys.executable, "-m", "benchmarks.cluster_members", address, str(folder), str(first), str(share)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(_end, process)
        started.append(process)
        first += share
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "joined":
            raise WrongWork("a process with members has ended")


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Watch(threading.Thread):
    """Notes when Spark has committed the batches of a source, and when what each has written is shown to its reader."""

    def __init__(self, stages: Path) -> None:
        super().__init__(daemon=True)
        self._commits = stages / "rows" / "spark" / "commits"
        self._gate = stages / "table" / "gates" / "rows" / "_spark_metadata"
        self._committed: dict[int, int] = {}
        self._shown: dict[int, int] = {}
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.02):
            _note(self._commits, self._committed)
            _note(self._gate, self._shown, first=_FIRST_ENTRY)

    @property
    def hops(self) -> int:
        return len(self._shown)

    def end(self) -> list[float]:
        """In milliseconds. The first ones find everything cold."""
        self._is_over.set()
        self.join()
        both = sorted(self._committed.keys() & self._shown.keys())[5:]
        return [(self._shown[each] - self._committed[each]) / 1e6 for each in both]


def _note(folder: Path, times: dict[int, int], first: int = 0) -> None:
    with suppress(FileNotFoundError):
        for each in folder.iterdir():
            name = each.name.removesuffix(".compact")  # every tenth one of a gate
            number = int(name) - first if name.isdigit() else -1
            if number >= 0 and number not in times:
                with suppress(FileNotFoundError):
                    times[number] = each.stat().st_mtime_ns


def measure_hop(processes: int, batches: int) -> float:
    """From Spark's commit of a batch until its reader is shown what it wrote, in milliseconds: the median."""
    with _folder() as folder, ExitStack() as stack:
        (folder / "rows").mkdir()
        _put(folder, 0)
        arguments = [()] if processes == 1 else [("--instance", each, "--instances", "2") for each in ("a", "b")]
        for each in arguments:
            stack.callback(_kill, _run(folder, *each))
        watch = _Watch(folder / "root" / "generations" / "000001" / "stages")
        watch.start()
        for number in range(1, batches + 6):
            _wait(lambda: watch.hops >= number)  # noqa: B023 - it is called before the next round
            time.sleep(_BETWEEN_S)
            _put(folder, number)
        _wait(lambda: watch.hops >= batches + 6)
        found = watch.end()
        if len(found) < batches // 2:
            raise WrongWork(f"only {len(found)} of {batches} hops were seen")
        return statistics.median(found)


def _put(folder: Path, number: int) -> None:
    hidden = folder / "rows" / f".{number}"
    hidden.write_text(f'{{"id": {number}}}\n', encoding="utf-8")
    hidden.rename(folder / "rows" / f"{number:05d}.json")


def _run(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    file = Path(__file__).with_name("cluster_pipeline.py")
    command = [sys.executable, "-m", "tidegate", "run", str(file), "--root", str(folder / "root"), "--no-chain"]
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(
            [*command, *arguments],
            env={**os.environ, "TIDEGATE_BENCH_FOLDER": str(folder)},
            stdout=said,
            stderr=subprocess.STDOUT,
        )


def _kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise WrongWork("it has not come to it in time")
        time.sleep(0.01)


# -- failover -------------------------------------------------------------------------------------


def measure_restart() -> float:
    """A process is killed and started again: from the kill until the next checkpoint is complete, in seconds."""
    with _folder() as folder, Drivers(folder, names=()) as drivers:
        drivers.feed()
        first = _started_alone(drivers, 0)
        before = drivers.completed()
        killed_s = time.monotonic()
        _kill(first)
        drivers.feed()
        _kill(_started_alone(drivers, before))
        return time.monotonic() - killed_s


def _started_alone(drivers: Drivers, before: int) -> subprocess.Popen[Any]:
    """A run that has completed more than so many checkpoints."""
    with (drivers.folder / "alone").open("ab") as said:
        run = drivers.start(said=said)
    try:
        _wait(lambda: drivers.completed() > before + 1)
    except BaseException:
        _kill(run)
        raise
    return run


def measure_failover(lease: str) -> float:
    """Of three, the one that leads is killed, and another goes on: the same. Nobody is waited for."""
    with _folder() as folder, Drivers(folder, lease=lease, grace="0s") as drivers:
        drivers.begin_all()
        drivers.feed_until_shown()
        leader, before = drivers.wait_for_leader(), drivers.completed()
        killed_s = time.monotonic()
        drivers.kill(leader)
        drivers.feed()
        _wait(lambda: drivers.completed() > before + 1)
        return time.monotonic() - killed_s


@contextmanager
def _folder() -> Iterator[Path]:
    """A JVM whose driver was killed may go on writing for a moment."""
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)
