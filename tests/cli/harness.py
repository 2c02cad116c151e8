"""What the tests of the command line share: real processes, and roots whose Spark is played."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

from tests.spark.played import ON_DEMAND, PlayedPipeline, played
from tidegate.engine.control import Life, Remote, look
from tidegate.engine.status import CheckpointState, CheckpointStatus, RunStatus
from tidegate.engine.status_files import read_status
from tidegate.errors import CheckpointError
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.messages import Flag
from tidegate.protocol.names import checkpoint_name
from tidegate.spark.filelog import METADATA
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.lock import RootLock
from tidegate.storage.places import as_given

TIDEGATE = str(Path(sys.executable).with_name("tidegate"))


def tidegate(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [TIDEGATE, *(str(each) for each in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)


def ended_checkpoint(number: int, state: CheckpointState = "complete", why: str | None = None) -> CheckpointStatus:
    """What a run tells of one."""
    return CheckpointStatus(
        checkpoint=checkpoint_name(number),
        state=state,
        aligned=True,
        full=False,
        drain=False,
        generation=1,
        epoch=number,
        attempt=1,
        triggered_at="2026-01-02T03:04:05.000+00:00",
        duration_ms=10,
        new_bytes=1,
        total_bytes=1,
        why=why,
    )


def in_terminal(
    *arguments: str | Path, width: int, height: int = 24, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The command as it is seen in a terminal of that size: what it writes to both streams, as the terminal gets it."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [TIDEGATE, *(str(each) for each in arguments)],
        cwd=cwd,
        env={**environment, "TERM": "xterm"},
        stdin=its,
        stdout=its,
        stderr=its,
    ) as process:
        os.close(its)
        written = b""
        with suppress(OSError):  # how a terminal tells that nobody writes to it any more
            while data := os.read(ours, 65536):
                written += data
        os.close(ours)
        return subprocess.CompletedProcess(arguments, process.wait(timeout=120), written.decode().replace("\r\n", "\n"))


def make_root(folder: Path, checkpoints: int) -> Path:
    """A root that a pipeline of a source, a stage and a sink has left, with as many checkpoints taken."""
    with played(folder) as pipeline:
        _take(pipeline, checkpoints)
        return pipeline.root.paths.root


def _take(pipeline: PlayedPipeline, checkpoints: int) -> None:
    for _ in range(checkpoints):
        pipeline.one_batch_each()
        pipeline.checkpoint()


class LiveRun:
    """A played pipeline that is driven as a run drives it, in a thread, until the test has seen enough."""

    def __init__(self, pipeline: PlayedPipeline, remote: Remote, told_to_stop: threading.Event | None = None) -> None:
        self.pipeline = pipeline
        self.root = pipeline.root.paths.root
        self.remote = remote
        self._stop = threading.Event()
        self.is_told_to_stop = told_to_stop or threading.Event()
        self._last: int | None = None
        self._at_next_round: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._drive)

    def _drive(self) -> None:
        generation = self.pipeline.generation
        while not self._stop.is_set():
            if self._at_next_round is not None:
                self._at_next_round()
                self._at_next_round = None
            generation.poll()
            self.remote.serve(generation)
            self.remote.update(generation, "last_checkpoint" if self.is_told_to_stop.is_set() else None)
            if self.is_told_to_stop.is_set() and self._has_drained():
                return
            time.sleep(0.002)

    def _has_drained(self) -> bool:
        """Take a last checkpoint, as a run does that was told to stop. Tells whether it is complete."""
        generation = self.pipeline.generation
        if self._last is None or not (generation.is_under_way(self._last) or generation.completed(self._last)):
            with suppress(CheckpointError):  # one is in progress: after it
                self._last = generation.trigger(Flag.DRAIN)
        return self._last is not None and generation.completed(self._last) and generation.is_settled

    def await_end(self) -> None:
        """Until it has taken its last checkpoint."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.remote.ended_because = "it was told to stop"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Drive it no more; it still holds its root, like a run that hangs."""
        self._stop.set()
        self._thread.join()

    def next_entry(self, stage: str, name: str) -> int:
        """The one that a gate writes next."""
        return self.pipeline.generation.stages[stage].inputs.gates[name]._next

    def may_read(self, stage: str, name: str, since: int = 0) -> bool:
        """Whether a segment of an input lies before a stage, released by its gate; with this entry of it, or a later
        one."""
        gate = self.pipeline.generation.stages[stage].inputs.gates[name]
        if gate._next <= since:
            return False
        is_written = gate.files.exists(f"{METADATA}/{gate._next - 1}")
        return gate.lag == 1 and not gate._waiting and is_written

    def hold_up(self) -> Path:
        """From now on a checkpoint stays in progress: the stage does not consume what lies before the barrier."""
        entry = self.next_entry("middle", "rows")
        segment = self.pipeline.played["rows"].run_batch()
        wait_until(lambda: self.may_read("middle", "rows", entry))
        return segment

    def let_go(self) -> None:
        """Consume what has held it up."""
        entry = self.next_entry("table", "middle")
        self.pipeline.played["middle"].run_batch()
        wait_until(lambda: self.may_read("table", "middle", entry))
        self.pipeline.played["table"].run_batch()

    def in_its_thread(self, action: Callable[[], object]) -> None:
        self._at_next_round = action
        wait_until(lambda: self._at_next_round is None)

    def at_its_desk(self, action: Callable[[], object]) -> None:
        """Between two rounds of what it tells and is told, so that none of it is half written meanwhile."""
        desk = self.remote._desk
        round_of_it = desk.round
        is_done = threading.Event()

        def after_action(*, is_last: bool = False) -> None:
            if not is_done.is_set():
                action()
                is_done.set()
            round_of_it(is_last=is_last)

        with patch.object(desk, "round", after_action):
            assert is_done.wait(60)


@contextmanager
def live_run(
    folder: Path, checkpoints: int = 0, config: CheckpointConfig = ON_DEMAND, files: Files | None = None
) -> Iterator[LiveRun]:
    with played(folder, config=config) as pipeline:
        paths = pipeline.root.paths
        _take(pipeline, checkpoints)
        told_to_stop = threading.Event()
        files = files or Folder(paths.root)
        with RootLock(paths.lock) as lock, Remote(files, "flat", lock, lambda _: told_to_stop.set()) as remote:
            pipeline.one_batch_each()
            run = LiveRun(pipeline, remote, told_to_stop)
            run.start()
            try:
                yield run
            finally:
                run.stop()


def said(root: Path) -> RunStatus | None:
    """What the last run on a root said last."""
    return read_status(Folder(root))


def seen(root: Path) -> Life:
    return look(as_given(root))[0]


@contextmanager
def speaking(root: Path) -> Iterator[Remote]:
    """What a run says and hears on a root that it holds, without the run."""
    with RootLock(root / "lock") as lock, Remote(Folder(root), "flat", lock) as remote:
        yield remote


def wait_until_said(root: Path, remote: Remote) -> None:
    """Until all that was handed over is written down."""
    wait_until(lambda: said(root) == remote.status)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.005)
