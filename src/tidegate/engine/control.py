"""What a live run tells, and is told, through files in its root: from another terminal, without a port.

Its files (`status_files.py`, `requests.py`) are read and written on one thread of their own, the *desk*, however long
the store takes: the control thread hands over values and takes what was asked for. What it hands over carries its time,
so a fresh status shows that the control thread is alive. No failure of the desk is a failure of the run.

A request for a checkpoint that comes while one is in progress waits for its turn: that one was cut before. The one that
is taken for it holds what the sources have committed by then; what has only just arrived there, and is in no committed
batch of theirs yet, comes with the next.

Importing this brings no PySpark.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeGuard

import msgspec

from tidegate.engine.carrier import Clock
from tidegate.engine.closing import cannot_close
from tidegate.engine.requests import (
    ANSWER,
    REQUEST,
    Answer,
    CancelCheckpoint,
    Request,
    StopRun,
    TakeCheckpoint,
    decode_request,
    ended_without,
)
from tidegate.engine.status import Observer, RunStatus, StartingStep, StoppingStep, status_of, transfer_now
from tidegate.engine.status_files import StatusFiles, last_word, read_status
from tidegate.errors import CheckpointError, CheckpointInProgress, RequestFailed, StoreUnavailable
from tidegate.protocol.coordinator import Phase
from tidegate.protocol.messages import Flag
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.files import Files
from tidegate.storage.lock import RootLock
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import Pace, Place
from tidegate.storage.system import say
from tidegate.storage.transfers import Transfers

if TYPE_CHECKING:
    from tidegate.engine.generation import Generation

_log = logging.getLogger("tidegate")

_FORGET_ANSWERS_AFTER_MS: Final = 60_000
# How long the end of a run waits for its last words to be written.
_LAST_WORDS_S: Final = 30.0
_LAST_WORDS_WHEN_INTERRUPTED_S: Final = 5.0
# A run at work says something every second. Long enough that a busy machine is not taken for one that hangs.
_STALE_AFTER_S: Final = 15.0
# One that has not said yet what it does to start, or between two tries. Else its step has a time of its own.
_STALE_WHILE_STARTING_S: Final = 300.0
# While these last, the run waits for Spark's process, which writes to its log what it is doing.
_SPARK_SPEAKS: Final = ("starting_spark", "fetching_packages", "making_session")


# -- the run's side -------------------------------------------------------------------------------


class Remote:
    """Of one run: as a context, from when it has the root until it gives it up. For the control thread."""

    def __init__(
        self,
        files: Files,
        pipeline: str,
        lock: RootLock,
        on_stop: Callable[[StopRun], None] | None = None,
        *,
        clock: Clock | None = None,
        desk: Callable[[Files, RootLock, Callable[[StopRun], None], Clock], Desk] | None = None,
        transfers: Transfers | None = None,
        on_status: Callable[[RunStatus | None], None] | None = None,
        speaks: bool = True,
    ) -> None:
        """`on_stop` is called, on another thread, when somebody asks the run to stop, with how. `desk`: makes
        another than one that is worked at on a thread of its own, at the pace of a folder. `transfers`: those between
        the root and this machine. `on_status` is called with all that the run says, and with None when another process
        speaks for it. `speaks`: not from the beginning, where another process may do so."""
        self._on_status = on_status or _ignore_status
        self._speaks = speaks
        self._transfers = Transfers() if transfers is None else transfers
        clock = Clock() if clock is None else clock
        self._observer = Observer(pipeline, clock)
        self._on_stop = on_stop or _ignore
        self._lock = lock
        self._desk = (desk or partial(Desk, transfers=self._transfers))(files, lock, self._on_stop, clock)
        self._desk.speaks = speaks
        self._waiting: list[tuple[str, TakeCheckpoint]] = []
        self._begun: dict[int, list[str]] = {}
        self._begun_in = 0
        self.ended_because: str | None = None
        self.ended_as = StopRun()
        """What was done, of what those may have wanted who asked it to stop."""

    def __enter__(self) -> Self:
        try:
            self._desk.open(self._observer.status)
        except BaseException as error:  # by a signal, while its thread starts
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_interrupted = isinstance(error, KeyboardInterrupt)
        if error is None:
            last = self._observer.note("finished", self.ended_because)
        elif is_interrupted:
            last = self._observer.note("interrupted", str(error) or "stopped while it was starting")
        else:
            last = self._observer.note("failed", say(error) or type(error).__name__)
        self._tell(last)
        patience_s = _LAST_WORDS_WHEN_INTERRUPTED_S if is_interrupted else _LAST_WORDS_S
        self._desk.close(last, patience_s, self.ended_as)

    def speak(self, is_ours: bool) -> None:
        """Whether this process speaks for the run, and hears what is asked of it: of several instances, the one that
        leads."""
        self._lock.speak(is_ours)
        self._speaks = self._desk.speaks = is_ours
        if not is_ours:
            self._on_status(None)

    def _tell(self, status: RunStatus) -> None:
        """Those who watch the run from inside."""
        if self._speaks:
            self._on_status(status)

    def fall_silent(self) -> None:
        """Write nothing any more: the root is about to be removed."""
        self._desk.close(None, _LAST_WORDS_S)

    def update(self, generation: Generation, stopping: StoppingStep | None = None) -> RunStatus:
        """Look at the run, and say what is seen. `stopping`: what it does to stop, if it was told to."""
        status = self._observer.observe(generation, stopping)
        self._desk.say(status)
        self._tell(status)
        return msgspec.structs.replace(status, transfer=transfer_now(self._transfers))

    def changed(self, changes: tuple[str, ...]) -> None:
        """What is not as it was at the checkpoint that the run goes on from."""
        self._observer.changed(changes)

    def restarting(self, why: str) -> RunStatus:
        status = self._observer.note("restarting", why)
        self._desk.say(status, at_once=True)
        self._tell(status)
        return status

    def begin(self, step: StartingStep) -> None:
        """A step of the start: told at once, so that one that hangs is known by its name."""
        status = self._observer.begin(step)
        self._desk.say(status, at_once=True)
        self._tell(status)

    @property
    def status(self) -> RunStatus:
        """What the run said last."""
        return self._observer.status

    # -- requests ---------------------------------------------------------------------------------

    def serve(self, generation: Generation) -> None:
        """Take up requests, begin what can be begun, answer what has ended. Called in every round of the run."""
        if self._begun_in != generation.generation:
            self._begun_in = generation.generation
            self._answer_void()
        cancels = []
        for name, request in self._desk.asked():
            match request:
                case TakeCheckpoint():
                    self._waiting.append((name, request))
                case CancelCheckpoint():
                    cancels.append(name)
                case StopRun():
                    self._stop(generation, name, request)
        if cancels:  # before one is begun that was asked for at the same time
            self._cancel(generation, cancels)
        if self._waiting:
            self._begin(generation)
        if self._begun:
            self._answer_ended(generation)

    def _stop(self, generation: Generation, name: str, request: StopRun) -> None:
        """One that has to be looked at first. Others were heard as soon as they came."""
        why_not = cannot_close(generation)
        if why_not is None:
            self._on_stop(request)
        self._answer([name], Answer("heard") if why_not is None else Answer("refused", why_not))

    def _answer_void(self) -> None:
        """What was under way in the last generation is void, and not tried again: it may have been why that failed."""
        for checkpoint_id, names in self._begun.items():
            why = f"the run restarted before {checkpoint_name(checkpoint_id)} was complete"
            self._answer(names, Answer("failed", why))
        self._begun.clear()

    def _begin(self, generation: Generation) -> None:
        wanted = self._waiting[0][1]
        names = [name for name, request in self._waiting if request == wanted]
        try:
            checkpoint_id = generation.trigger(_flags(wanted))
        except CheckpointInProgress:
            return  # after it
        except CheckpointError as error:
            self._answer(names, Answer("refused", str(error)))
        else:
            self._begun[checkpoint_id] = names
        self._waiting = [each for each in self._waiting if each[0] not in names]

    def _cancel(self, generation: Generation, names: list[str]) -> None:
        cancelled = generation.cancel()
        ended = [each for each in generation.coordinator.history if each.checkpoint_id in cancelled]
        deciding = [checkpoint_name(each.checkpoint_id) for each in generation.coordinator.active]
        if deciding and not cancelled:
            why = f"{', '.join(deciding)} is being decided and cannot be cancelled any more"
            self._answer(names, Answer("refused", why))
        else:
            told = tuple(status_of(generation, each) for each in ended)
            self._answer(names, Answer("done", checkpoints=told))

    def _answer_ended(self, generation: Generation) -> None:
        """A checkpoint is answered when its sinks show it, so that whoever asked can read the tables."""
        for checkpoint in generation.coordinator.history:
            if checkpoint.checkpoint_id in self._begun and checkpoint.phase in (Phase.COMMITTED, Phase.ABORTED):
                status = status_of(generation, checkpoint)
                is_taken = checkpoint.phase is Phase.COMMITTED
                names = self._begun.pop(checkpoint.checkpoint_id)
                self._answer(names, Answer("done" if is_taken else "failed", status.why, (status,)))

    def _answer(self, names: list[str], answer: Answer) -> None:
        for name in names:
            self._desk.answer(name, answer)


def _ignore(_how: StopRun) -> None:
    """Nobody is there to be told."""


def _ignore_status(_status: RunStatus | None) -> None:
    """The same."""


def _flags(request: TakeCheckpoint) -> Flag:
    flags = Flag.FULL_SNAPSHOT if request.full else Flag.NONE
    return flags | Flag.UNALIGNED if request.unaligned else flags


class Desk:
    """Writes down what is handed over and takes up what is asked for, on a thread of its own.

    `say`, `asked` and `answer` are for the control thread, and never wait. All else happens in `round`.
    """

    def __init__(
        self,
        files: Files,
        lock: RootLock,
        on_stop: Callable[[StopRun], None],
        clock: Clock,
        pace: Pace | None = None,
        transfers: Transfers | None = None,
        earlier: RunStatus | None = None,
    ) -> None:
        """`earlier`: what the run before said last."""
        self._transfers = Transfers() if transfers is None else transfers
        self._pace = Pace() if pace is None else pace
        self._files = files
        self._lock = lock
        self._on_stop = on_stop
        self._clock = clock
        self._status_files = StatusFiles(files, lock, earlier)
        self._said: RunStatus | None = None
        self._is_urgent = False
        self._written: RunStatus | None = None
        self._written_ms: int | None = None
        self._asked: SimpleQueue[tuple[str, Request]] = SimpleQueue()
        self._answers: SimpleQueue[tuple[str, Answer]] = SimpleQueue()
        self._open: dict[str, Request] = {}
        self._answered: dict[str, int] = {}
        # No event: a signal that interrupts the control thread inside of one could leave it locked.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._is_closing = False
        self.speaks = True
        """Whether it writes and takes up anything."""
        self._ended_as = StopRun()
        self._thread: threading.Thread | None = None

    # -- for the control thread -------------------------------------------------------------------

    def open(self, status: RunStatus) -> None:
        self.say(status, at_once=True)
        self._start_working()

    def _start_working(self) -> None:
        self._thread = threading.Thread(target=self._work, name="tidegate-desk", daemon=True)
        self._thread.start()

    def say(self, status: RunStatus, *, at_once: bool = False) -> None:
        """What the run says now. It takes the place of what was said before and is not written yet."""
        self._said = status
        if at_once:
            self._is_urgent = True
            self._bell.put(None)

    def asked(self) -> Iterator[tuple[str, Request]]:
        """What was asked for since the last time, by the names of the requests."""
        with suppress(Empty):
            while True:
                yield self._asked.get_nowait()

    def answer(self, name: str, answer: Answer) -> None:
        self._answers.put((name, answer))
        self._bell.put(None)

    def close(self, last: RunStatus | None, patience_s: float, ended_as: StopRun | None = None) -> None:
        """Say how the run has ended, to everybody who waits for something; None: say nothing. `ended_as`: what was done
        of what those may have wanted who asked it to stop."""
        self._said, self._is_urgent = last, last is not None
        self._ended_as = StopRun() if ended_as is None else ended_as
        self._is_closing = True
        self._end_working(patience_s)

    def _end_working(self, patience_s: float) -> None:
        """Do a last round, and wait for that."""
        if self._thread is None:
            return
        self._bell.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            _log.warning("how the run ended is not written down yet, after %.0f s", patience_s)
        self._thread = None

    # -- on its own thread ------------------------------------------------------------------------

    def _work(self) -> None:
        self.begin()
        while True:
            is_last = self._is_closing  # before the round: what was handed over until now is in it
            self.round(is_last=is_last)
            if is_last:
                return
            with suppress(Empty):
                self._bell.get(timeout=self._pace.look_every_s)

    def begin(self) -> None:
        self._status_files.make_reserve()
        if not self._lock.is_shared:  # else whoever leads now does what was asked of whoever led before
            self._guarded(self._forget_older)

    def round(self, *, is_last: bool = False) -> None:
        """Do all that there is to do."""
        if not self.speaks:
            return
        self._guarded(self._write_status)
        if not is_last:
            self._guarded(self._take_up)
        self._guarded(self._write_answers)
        if is_last:
            self._guarded(self._answer_all)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except StoreUnavailable as error:
            _log.debug("what is told and asked through files waits: %s", error)
        except Exception:
            _log.exception("what is told and asked through files has failed; the run goes on")

    def _forget_older(self) -> None:
        """Requests to a run before this one. Whoever still waits for an answer asks again."""
        self._files.delete([f"{RootPaths.REQUESTS}/{name}" for name in self._files.names_in(RootPaths.REQUESTS)])

    def _write_status(self) -> None:
        is_urgent, self._is_urgent = self._is_urgent, False  # before it is looked at what was said
        said, now_ms = self._said, self._clock.now_ms
        if said is None or (self._has_just_written(now_ms) and not is_urgent):
            return
        # Looked at here and now: while a run starts, the control thread may be the one that waits for it.
        transfer = transfer_now(self._transfers)
        if said is self._written and transfer is None:
            return
        self._written_ms, self._written = now_ms, said
        said = msgspec.structs.replace(said, transfer=transfer)
        with suppress(OSError):
            self._lock.take_if_free()  # a run that took over holds it once the other one is gone
        self._status_files.write(said, at_once=is_urgent)

    def _has_just_written(self, now_ms: int) -> bool:
        return self._written_ms is not None and now_ms - self._written_ms < self._pace.say_every_ms

    def _take_up(self) -> None:
        found = [
            each.removesuffix(REQUEST) for each in self._files.names_in(RootPaths.REQUESTS) if each.endswith(REQUEST)
        ]
        new = [name for name in found if name not in self._open and name not in self._answered]
        generation = None if self._said is None else self._said.generation
        if new and not self._status_files.is_of_another_run(generation):
            for name in new:
                data = self._files.read(_files_of(name)[0])
                if data is not None:  # else its asker has given up
                    self._take(name, data)
        now_ms = self._clock.now_ms
        for name, answered_ms in tuple(self._answered.items()):
            if now_ms - answered_ms > _FORGET_ANSWERS_AFTER_MS:  # its asker is dead, or has removed both
                del self._answered[name]
                self._files.delete(_files_of(name))

    def _take(self, name: str, data: bytes) -> None:
        try:
            request = decode_request(data)
        except RequestFailed as error:
            self._answers.put((name, Answer("refused", str(error))))
            self._answered[name] = self._clock.now_ms
            return
        self._open[name] = request
        if isinstance(request, StopRun) and not request.close_windows:  # else it is looked at whether they can be
            self._on_stop(request)
            self._answers.put((name, Answer("heard")))
        else:
            self._asked.put((name, request))

    def _write_answers(self) -> None:
        for _ in range(self._answers.qsize()):  # not those that are put back
            self._write_answer(*self._answers.get_nowait())

    def _answer_all(self) -> None:
        """The run has ended: nothing more comes of what is still open."""
        last = self._said
        if last is None:
            return
        for name, request in tuple(self._open.items()):
            told = self._how(last, request) if isinstance(request, StopRun) else Answer("refused", "the run has ended")
            self._write_answer(name, told)

    def _how(self, last: RunStatus, wanted: StopRun) -> Answer:
        """How it has ended, for somebody who wanted it to: done is only what he has asked for."""
        if last.state != "finished":
            return Answer("failed", last.why)
        lacks = wanted.lacks(self._ended_as)
        return Answer("failed", ended_without(last.why, lacks)) if lacks else Answer("done", last.why)

    def _write_answer(self, name: str, answer: Answer) -> None:
        if answer.outcome != "heard":
            self._open.pop(name, None)
            self._answered[name] = self._clock.now_ms
        request_name, answer_name = _files_of(name)
        try:
            if self._files.exists(request_name):  # else its asker waits no more
                self._files.write(answer_name, msgspec.json.encode(answer))
        except StoreUnavailable as error:
            _log.debug("a request could not be answered, and is in the next round: %s", error)
            self._answers.put((name, answer))


def _files_of(name: str) -> list[str]:
    return [f"{RootPaths.REQUESTS}/{name}{suffix}" for suffix in (REQUEST, ANSWER)]


# -- from outside ---------------------------------------------------------------------------------


class Life(enum.Enum):
    ALIVE = "alive"
    HANGING = "hanging"
    STOPPED = "stopped"


def look(place: Place) -> tuple[Life, RunStatus | None]:
    """Whether a run is alive, and what it says. The lock tells; what is written may be of one that was killed."""
    is_alive = place.is_held()
    status = read_status(place.files)
    if not is_alive:
        return Life.STOPPED, status
    return Life.HANGING if is_silent(place, status) else Life.ALIVE, status


def is_silent(place: Place, status: RunStatus | None) -> bool:
    """Whether the run that holds the root, and said that last, has given no sign for longer than it should take."""
    silent_s = (datetime.now(UTC) - last_heard_of(place, status)).total_seconds()
    return silent_s > _patience_s(status)


def _patience_s(status: RunStatus | None) -> float:
    if has_spoken(status) and status.step is not None:
        return status.step.patience_s
    if status is not None and status.state in ("running", "stopping"):
        return _STALE_AFTER_S
    return _STALE_WHILE_STARTING_S


def has_spoken(status: RunStatus | None) -> TypeGuard[RunStatus]:
    """Whether a status is of the run that holds the root, and not of one that has ended before it."""
    return status is not None and status.state not in ("finished", "interrupted", "failed")


def last_heard_of(place: Place, status: RunStatus | None) -> datetime:
    """When the run that holds the root gave its last sign. One that has not spoken yet has taken the lock."""
    if has_spoken(status):
        heard = datetime.fromisoformat(status.updated_at)
        if status.step is not None and status.step.step in _SPARK_SPEAKS:
            with suppress(OSError):
                return max(heard, datetime.fromtimestamp(place.paths.spark_log.stat().st_mtime, UTC))
        return heard
    # One that this version cannot understand shows that the run lives, too.
    taken = place.held_since()
    return max(taken, last_word(place.files) or taken)
