"""What a run that is alive can be asked for from another terminal, and how to ask it.

    requests/<id>.request     what is wanted: a small object with its `kind`
    requests/<id>.answer      what became of it; the asker removes both

A request is for the run that holds the root when it is made. One that a run finds when it starts is older than it, and
is removed; whoever still waits for an answer makes it again, unless another process holds the root by then. So a
request that a run dies upon does not kill the next one too.

The run's side is `control.py`. Importing this brings no PySpark.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Literal

import msgspec

from tidegate.engine.status import CheckpointStatus, RunStatus
from tidegate.engine.status_files import read_status
from tidegate.errors import NotRunning, RequestFailed, StoreUnavailable
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import Place

REQUEST: Final = ".request"
ANSWER: Final = ".answer"


class TakeCheckpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="checkpoint"):
    """A checkpoint now. `full`: it stores all anew. `unaligned`: no stage waits for alignment, but sinks."""

    full: bool = False
    unaligned: bool = False


class CancelCheckpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="cancel"):
    """That the checkpoint which is being prepared is aborted."""


class StopRun(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind", tag="stop"
):
    """That the run ends, after a last checkpoint; also what was done of that in the end.

    `full`: that one stores all anew. `drain`: sources read no more, and what they have read is consumed by every stage
    first. `close_windows`: after that, whatever a watermark would close is closed and written out.

    What is not wanted is left out of the request: a run of an older version understands a plain stop.
    """

    full: bool = False
    drain: bool = False
    close_windows: bool = False

    def __post_init__(self) -> None:
        if self.close_windows and not self.drain:
            msgspec.structs.force_setattr(self, "drain", True)

    def and_also(self, other: StopRun) -> StopRun:
        """What satisfies both."""
        return StopRun(
            full=self.full or other.full,
            drain=self.drain or other.drain,
            close_windows=self.close_windows or other.close_windows,
        )

    def lacks(self, done: StopRun) -> tuple[str, ...]:
        """What of this was not done, in words."""
        wanted = (
            (self.full, done.full, "stored all anew"),
            (self.drain, done.drain, "drained"),
            (self.close_windows, done.close_windows, "closed its windows"),
        )
        return tuple(what for is_wanted, is_done, what in wanted if is_wanted and not is_done)


Request = TakeCheckpoint | CancelCheckpoint | StopRun

_requests: Final = msgspec.json.Decoder(Request)


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of a request: it was `heard`, and is about to be done; it is `done`; it was begun, and has `failed`;
    or it was `refused`, so that nothing has changed.

    `checkpoints` are those that were taken, aborted or cancelled for it.
    """

    outcome: Literal["heard", "done", "failed", "refused"]
    why: str | None = None
    checkpoints: tuple[CheckpointStatus, ...] = ()


def decode_request(data: bytes) -> Request:
    """Raise `RequestFailed`, in words for whoever asked, if this run cannot do it."""
    try:
        request: Request = _requests.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestFailed(
            f"the run does not understand what it is asked for: {error}; is the command of another version?"
        ) from error
    return request


# -- asking -----------------------------------------------------------------------------------------


class Asked:
    """One request to the run that is alive on a root, as a context: in the end its files are removed."""

    def __init__(self, place: Place, request: Request, what: str, timeout_s: float) -> None:
        """`what`: the request in words, such as "take a checkpoint"."""
        self._place = place
        self._files = place.files
        self._request = request
        self._what = what
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        name = uuid.uuid4().hex
        self._request_name = f"{RootPaths.REQUESTS}/{name}{REQUEST}"
        self._answer_name = f"{RootPaths.REQUESTS}/{name}{ANSWER}"
        self._has_failed = False
        self.process = ""
        """The one that was asked."""

    def __enter__(self) -> Asked:
        if not self._place.is_held():
            raise NotRunning(f"no run is alive on {self._place}, so there is none to {self._what}")
        self.process = self._place.holder()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(StoreUnavailable):
            self._files.delete([self._request_name, self._answer_name])

    def answer(self, *, is_heard_enough: bool = False) -> Answer | None:
        """What the run says, when it does. None: it has ended, or was killed, and has not said how."""
        while True:
            self._make()
            is_alive = self._place.is_held()  # before looking for the answer: a run's last act is to answer
            found = self._read()
            if found is not None and (found.outcome != "heard" or is_heard_enough):
                return found
            if not is_alive:
                return None
            self._pause(
                f"has not answered in {self._timeout_s:g} s when it was asked to {self._what}; it may still do it"
            )

    def await_end(self) -> None:
        """Until the run that was asked holds the root no more."""
        while self._place.is_held() and self._place.holder() == self.process:
            self._pause(f"has said how it ended, but still holds the root after {self._timeout_s:g} s")

    def how_it_ended(self) -> RunStatus | None:
        """What the run that was asked said last, if it was that one."""
        status = read_status(self._files)
        return status if status is not None and str(status.pid) == self.process else None

    def _make(self) -> None:
        """If it is not there, or no longer: a run that starts removes what it finds."""
        try:
            if self._files.exists(self._request_name):
                return
            if self._place.holder() not in (self.process, "") and self._read() is None:
                raise NotRunning(
                    f"the run on {self._place} ended before it could {self._what}, and another one has started; "
                    f"ask again if you mean that one"
                )
            self._files.at("", durable=False).write(self._request_name, msgspec.json.encode(self._request))
        except StoreUnavailable as error:
            if self._has_failed:
                raise RequestFailed(f"the run cannot be asked to {self._what}: {error}") from error
            self._has_failed = True  # once: a run that starts removes what is half written
        else:
            self._has_failed = False

    def _read(self) -> Answer | None:
        try:
            data = self._files.read(self._answer_name)
            return None if data is None else msgspec.json.decode(data, type=Answer)
        except StoreUnavailable:
            return None  # it is looked for again
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestFailed(f"the run's answer cannot be understood: {error}; is it of another version?") from error

    def _pause(self, late: str) -> None:
        if time.monotonic() > self._deadline:
            raise RequestFailed(
                f"the run on {self._place} {late}; `tidegate status` shows how far it is and whether it hangs"
            )
        time.sleep(self._place.pace.ask_every_s)


def ask_for_checkpoint(place: Place, timeout_s: float, request: TakeCheckpoint | None = None) -> CheckpointStatus:
    """Ask for a checkpoint, and wait until the tables show it."""
    with Asked(place, request or TakeCheckpoint(), "take a checkpoint", timeout_s) as asked:
        answer = asked.answer()
    if answer is None:
        raise NotRunning(f"the run on {place} ended before it had taken the checkpoint")
    if answer.outcome == "done":
        (taken,) = answer.checkpoints
        return taken
    if answer.outcome == "refused":
        raise RequestFailed(f"no checkpoint was taken: {answer.why}")
    names = ", ".join(each.checkpoint for each in answer.checkpoints) or "the checkpoint"
    raise RequestFailed(f"{names} was aborted: {answer.why}; the run goes on, ask again")


def ask_to_cancel(place: Place, timeout_s: float) -> Answer:
    """Ask that what is being prepared is cancelled. The answer may name none: none was."""
    with Asked(place, CancelCheckpoint(), "cancel a checkpoint", timeout_s) as asked:
        answer = asked.answer()
    if answer is None:
        raise NotRunning(f"the run on {place} ended, and whatever checkpoint it was preparing with it")
    if answer.outcome != "done":
        raise RequestFailed(f"no checkpoint was cancelled: {answer.why}")
    return answer


def ask_to_stop(
    place: Place,
    timeout_s: float,
    request: StopRun | None = None,
    *,
    is_awaited: bool = True,
) -> str | None:
    """Ask the run to end after a last checkpoint. Returns why it has ended; None, where that is not waited for.

    One that has ended, but not as it was asked to, has not ended well.
    """
    wanted = request or StopRun()
    with Asked(place, wanted, "stop", timeout_s) as asked:
        answer = asked.answer(is_heard_enough=not is_awaited)
        if answer is not None and answer.outcome == "refused":
            raise RequestFailed(f"the run was not stopped: {answer.why}")
        if answer is not None and answer.outcome == "heard":
            return None
        if answer is not None:
            asked.await_end()
            has_ended_well, why = answer.outcome == "done", answer.why
        else:
            last = asked.how_it_ended()
            is_told = last is not None and last.state in ("finished", "interrupted", "failed")
            has_ended_well = last is not None and last.state == "finished"
            why = last.why if is_told and last is not None else "it was killed, or its machine went down"
            if has_ended_well and (lacks := wanted.lacks(StopRun())):
                has_ended_well, why = False, ended_without(why, lacks)
    if not has_ended_well:
        raise RequestFailed(f"the run on {place} has not ended well: {why}")
    return why or ""


def ended_without(why: str | None, lacks: Sequence[str]) -> str:
    """Of a run that has ended in order, but not as somebody had asked it to."""
    return f"it ended after a last checkpoint, because {why}, but has not {' or '.join(lacks)}"
