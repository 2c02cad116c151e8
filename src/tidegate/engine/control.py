"""What a live run tells, and is told, through files in its root: from another terminal, without a port.

    status.json               what the run is doing, written whole once a second, and once more when it ends
    status.reserve            the same in short, written in place where that one cannot be written: on a full disk
    requests/<id>.request     somebody asks for a checkpoint now
    requests/<id>.answer      what became of it; the asker removes both

The run's side (`Remote`) is called from its control thread and must cost nothing there: it never waits, and no failure
of it is a failure of the run. A request that comes while a checkpoint is in progress waits for its turn: the one in
progress was cut before. The one that is taken for it holds what the sources have committed by then; what has only just
arrived there, and is in no committed batch of theirs yet, comes with the next.

Importing this brings no PySpark.
"""

from __future__ import annotations

import enum
import logging
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self, TypeGuard

import msgspec

from tidegate.engine.status import CheckpointStatus, Observer, RunStatus, StartingStep, status_of
from tidegate.errors import CheckpointError, CheckpointInProgress, NotRunning, RequestFailed
from tidegate.protocol.coordinator import Phase
from tidegate.storage.local import overwrite, write_whole
from tidegate.storage.lock import RootLock, is_held
from tidegate.storage.paths import RootPaths
from tidegate.storage.system import say, told

if TYPE_CHECKING:
    from tidegate.engine.generation import Generation

_log = logging.getLogger("tidegate")

_WRITE_EVERY_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.2
_FORGET_ANSWERS_AFTER_S: Final = 60.0
_ASK_EVERY_S: Final = 0.05
# A run at work writes every second. Long enough that a busy machine is not taken for one that hangs.
_STALE_AFTER_S: Final = 15.0
# One that has not said yet what it does to start, or between two tries. Else its step has a time of its own.
_STALE_WHILE_STARTING_S: Final = 300.0
# While these last, the run waits for Spark's process, which writes to its log what it is doing.
_SPARK_SPEAKS: Final = ("starting_spark", "fetching_packages", "making_session")

# Enough for a status without its stages, whatever the reason in it is made of.
_RESERVE_BYTES: Final = 8192
_LONGEST_REASON: Final = 1000

_REQUEST: Final = ".request"
_ANSWER: Final = ".answer"


Outcome = Literal["complete", "aborted", "refused"]


class Answer(msgspec.Struct, frozen=True):
    """What became of a request. `checkpoint` is None where none was begun."""

    outcome: Outcome
    checkpoint: CheckpointStatus | None = None
    why: str | None = None


# -- the run's side -------------------------------------------------------------------------------


class Remote:
    """Of one run: as a context, from when it has the root until it gives it up."""

    def __init__(self, paths: RootPaths, pipeline: str, lock: RootLock) -> None:
        self._paths = paths
        self._lock = lock
        self._observer = Observer(pipeline)
        self._written_s = 0.0
        self._looked_s = 0.0
        self._waiting: list[str] = []
        self._begun: dict[int, list[str]] = {}
        self._begun_in = 0
        self._answered: dict[str, float] = {}
        self._is_written = True
        self.ended_because: str | None = None

    def __enter__(self) -> Self:
        _remove(*_files_in(self._paths.requests))  # of a run that is dead; an asker who is not asks again
        self._make_reserve()
        self._write(self._observer.status)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            last = self._observer.note("finished", self.ended_because)
        elif isinstance(error, KeyboardInterrupt):
            last = self._observer.note("interrupted", str(error) or "stopped while it was starting")
        else:
            last = self._observer.note("failed", say(error) or type(error).__name__)
        for names in (self._waiting, *self._begun.values()):
            for name in names:
                self._answer(name, Answer("refused", why="the run has ended"))
        self._write(last)

    def update(self, generation: Generation, *, is_stopping: bool = False) -> RunStatus:
        """Look at the run; write down what is seen if the last time was a while ago."""
        status = self._observer.observe(generation, is_stopping=is_stopping)
        now = time.monotonic()
        if now - self._written_s >= _WRITE_EVERY_S:
            with suppress(OSError):
                self._lock.take_if_free()  # a run that took over holds it once the other one is gone
            self._write(status)
        return status

    def changed(self, changes: tuple[str, ...]) -> None:
        """What is not as it was at the checkpoint that the run goes on from."""
        self._observer.changed(changes)

    def restarting(self, why: str) -> RunStatus:
        status = self._observer.note("restarting", why)
        self._write(status)
        return status

    def begin(self, step: StartingStep) -> None:
        """A step of the start: told at once, so that one that hangs is known by its name."""
        self._write(self._observer.begin(step))

    @property
    def status(self) -> RunStatus:
        """What the run said last."""
        return self._observer.status

    def _write(self, status: RunStatus) -> None:
        self._written_s = time.monotonic()
        known = read_status(self._paths)
        if known is not None and (known.generation or 0) > (status.generation or 0) and status.generation is not None:
            return  # another run took over: what it says counts
        try:
            write_whole(self._paths.status, msgspec.json.encode(status))
            self._is_written = True
        except OSError as error:
            self._write_in_short(status, error)

    def _make_reserve(self) -> None:
        """Blank, of blocks that are there. One that an earlier run has made is kept: the disk may be full by now."""
        reserve, blank = self._paths.status_reserve, b" " * _RESERVE_BYTES
        try:
            if reserve.exists() and reserve.stat().st_size == _RESERVE_BYTES:
                overwrite(reserve, blank)
            else:
                write_whole(reserve, blank)
        except OSError as error:
            _log.debug("could not make %s", told(error, reserve))

    def _write_in_short(self, status: RunStatus, error: OSError) -> None:
        """In the reserve: else a run that has failed would seem to have been killed, and one that lives to hang."""
        why = f"what it does cannot be written down: {told(error, self._paths.status)}"
        if (
            self._is_written and self._paths.root.exists()
        ):  # said once; and a run that has made nothing removes its root
            _log.warning("%s; the run goes on", why)
        self._is_written = False
        why = why if status.why is None else status.why
        short = msgspec.structs.replace(status, why=why[:_LONGEST_REASON], stages={}, in_progress=(), checkpoints=())
        data = msgspec.json.encode(short)
        try:
            overwrite(self._paths.status_reserve, data.ljust(_RESERVE_BYTES))
        except OSError as reserve_error:
            # A file system that writes nothing in place has room when it is gone.
            _log.debug("could not write %s", told(reserve_error, self._paths.status_reserve))
            _remove(self._paths.status_reserve)
            with suppress(OSError):
                write_whole(self._paths.status, data)

    # -- requests ---------------------------------------------------------------------------------

    def serve(self, generation: Generation) -> None:
        """Take up requests, begin what can be begun, answer what has ended. Called in every round of the run."""
        now = time.monotonic()
        if now - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now
            self._take_up(now)
        if self._begun_in != generation.generation:
            # What was under way in the last generation is void: those requests wait again.
            self._begun_in = generation.generation
            self._waiting += [name for names in self._begun.values() for name in names]
            self._begun.clear()
        if self._waiting:
            self._begin(generation)
        if self._begun:
            self._answer_ended(generation)

    def _take_up(self, now: float) -> None:
        for path in _files_in(self._paths.requests):
            name = path.stem
            if path.suffix == _REQUEST and name not in self._answered and not self._is_known(name):
                self._waiting.append(name)
        for name, answered_s in tuple(self._answered.items()):
            if now - answered_s > _FORGET_ANSWERS_AFTER_S:  # its asker is dead, or has removed both
                del self._answered[name]
                _remove(self._paths.requests / f"{name}{_REQUEST}", self._paths.requests / f"{name}{_ANSWER}")

    def _is_known(self, name: str) -> bool:
        return name in self._waiting or any(name in names for names in self._begun.values())

    def _begin(self, generation: Generation) -> None:
        try:
            checkpoint_id = generation.trigger()
        except CheckpointInProgress:
            return  # after it
        except CheckpointError as error:
            for name in self._waiting:
                self._answer(name, Answer("refused", why=str(error)))
        else:
            self._begun[checkpoint_id] = list(self._waiting)
        self._waiting.clear()

    def _answer_ended(self, generation: Generation) -> None:
        """A checkpoint is answered when its sinks show it, so that whoever asked can read the tables."""
        for checkpoint in generation.coordinator.history:
            if checkpoint.checkpoint_id not in self._begun:
                continue
            if checkpoint.phase in (Phase.COMMITTED, Phase.ABORTED):
                status = status_of(generation, checkpoint)
                outcome: Outcome = "complete" if checkpoint.phase is Phase.COMMITTED else "aborted"
                for name in self._begun.pop(checkpoint.checkpoint_id):
                    self._answer(name, Answer(outcome, status, status.why))

    def _answer(self, name: str, answer: Answer) -> None:
        self._answered[name] = time.monotonic()
        try:
            write_whole(self._paths.requests / f"{name}{_ANSWER}", msgspec.json.encode(answer))
        except OSError as error:
            _log.warning("a request for a checkpoint could not be answered: %s", told(error))


def _files_in(folder: Path) -> list[Path]:
    """The whole files of a folder that may not be there."""
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []


def _remove(*paths: Path) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


# -- from outside ---------------------------------------------------------------------------------


class Life(enum.Enum):
    ALIVE = "alive"
    HANGING = "hanging"
    STOPPED = "stopped"


def read_status(paths: RootPaths) -> RunStatus | None:
    """What the last run said last; None if nothing, or if it cannot be understood: of another version, or damaged."""
    # In the reserve first: of two that were written within a millisecond, that one came later.
    found = [_status_in(path) for path in (paths.status_reserve, paths.status)]
    said = [status for status in found if status is not None]
    return max(said, key=lambda status: datetime.fromisoformat(status.updated_at), default=None)


def _status_in(path: Path) -> RunStatus | None:
    try:
        status = msgspec.json.decode(path.read_bytes(), type=RunStatus)
        times = [datetime.fromisoformat(moment) for moment in (status.started_at, status.updated_at)]
    except (OSError, ValueError, msgspec.MsgspecError):  # what is not UTF-8, or no time, is a ValueError
        return None
    return status if all(moment.tzinfo is not None for moment in times) else None


def look(paths: RootPaths) -> tuple[Life, RunStatus | None]:
    """Whether a run is alive, and what it says. The lock tells; what is written may be of one that was killed."""
    is_alive = is_held(paths.lock)
    status = read_status(paths)
    if not is_alive:
        return Life.STOPPED, status
    silent_s = (datetime.now(UTC) - last_heard_of(paths, status)).total_seconds()
    return Life.HANGING if silent_s > _patience_s(status) else Life.ALIVE, status


def _patience_s(status: RunStatus | None) -> float:
    if status is not None and status.state in ("running", "stopping"):
        return _STALE_AFTER_S
    if has_spoken(status) and status.step is not None:
        return status.step.patience_s
    return _STALE_WHILE_STARTING_S


def has_spoken(status: RunStatus | None) -> TypeGuard[RunStatus]:
    """Whether a status is of the run that holds the root, and not of one that has ended before it."""
    return status is not None and status.state not in ("finished", "interrupted", "failed")


def last_heard_of(paths: RootPaths, status: RunStatus | None) -> datetime:
    """When the run that holds the root gave its last sign. One that has not spoken yet has taken the lock."""
    if has_spoken(status):
        heard = datetime.fromisoformat(status.updated_at)
        if status.step is not None and status.step.step in _SPARK_SPEAKS:
            with suppress(OSError):
                return max(heard, datetime.fromtimestamp(paths.spark_log.stat().st_mtime, UTC))
        return heard
    # The status too: one that this version cannot understand shows that the run lives.
    signs = [path.stat().st_mtime for path in (paths.lock, paths.status) if path.exists()]
    return datetime.fromtimestamp(max(signs, default=0), UTC)


def ask_for_checkpoint(paths: RootPaths, timeout_s: float) -> CheckpointStatus:
    """Ask the run that is alive for a checkpoint, and wait until its tables show it."""
    name = uuid.uuid4().hex
    request, answer = paths.requests / f"{name}{_REQUEST}", paths.requests / f"{name}{_ANSWER}"
    if not is_held(paths.lock):
        raise NotRunning(f"no run is alive on {paths.root}, so nobody can take a checkpoint; start one: tidegate run")
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            _make_request(request)
            is_alive = is_held(paths.lock)  # before looking for the answer: a run's last act is to answer
            with suppress(FileNotFoundError):
                return _taken(msgspec.json.decode(answer.read_bytes(), type=Answer))
            if not is_alive:
                raise NotRunning(f"the run on {paths.root} ended before it had taken the checkpoint")
            if time.monotonic() > deadline:
                raise RequestFailed(
                    f"the run on {paths.root} has not completed a checkpoint in {timeout_s:g} s; it may still do so: "
                    f"`tidegate status` shows how far it is and whether the run hangs"
                )
            time.sleep(_ASK_EVERY_S)
    finally:
        _remove(request, answer)


def _make_request(request: Path) -> None:
    """If it is not there, or no longer: a run that starts removes what it finds."""
    try:
        if not request.exists():
            request.parent.mkdir(exist_ok=True)
            write_whole(request, b"{}")
    except OSError as error:
        raise RequestFailed(f"the run cannot be asked for a checkpoint: {told(error, request.parent)}") from error


def _taken(answer: Answer) -> CheckpointStatus:
    if answer.outcome == "complete" and answer.checkpoint is not None:
        return answer.checkpoint
    if answer.checkpoint is not None:
        raise RequestFailed(f"{answer.checkpoint.checkpoint} was aborted: {answer.why}; the run goes on, ask again")
    raise RequestFailed(f"no checkpoint was taken: {answer.why}")
