"""What happens to a pipeline while it runs, made into events, for everybody who wants to know.

All of it is called from the run's control thread. An observer is given each event, and must not wait: what it has to do
that takes time, it does elsewhere. Whatever fails here, or in one of them, is no failure of the run.

Importing this brings no PySpark.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidegate.engine.events import (
    AnyEvent,
    CheckpointEnded,
    Ended,
    Failed,
    Started,
    StartedBecause,
    StepTaken,
)
from tidegate.engine.status import CheckpointStatus, RunState, RunStatus, StepName, now, status_of
from tidegate.protocol.coordinator import Phase
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name

if TYPE_CHECKING:
    from tidegate.engine.generation import Generation
    from tidegate.engine.leading import Course
    from tidegate.flows.opening import Opened

_log = logging.getLogger("tidegate")

Observer = Callable[[AnyEvent], None]


class Chronicle:
    def __init__(self, instance: str | None = None) -> None:
        """`instance`: this process, where several run the pipeline."""
        self.observers: list[Observer] = []
        self._instance = instance
        self._generation: int | None = None
        self._steps: list[tuple[StepName, float]] = []
        self._told: set[int] = set()
        self._unshown: dict[int, CheckpointStatus] = {}
        """Checkpoints that earlier generations of this run have decided, and that not every table was seen to show."""
        self._undecided: dict[int, CheckpointStatus] = {}
        """Those of which only the log tells how they ended."""

    def tell(self, event: AnyEvent) -> None:
        """Everybody, whatever one of them makes of it."""
        for observer in self.observers:
            try:
                observer(event)
            except Exception:
                _log.exception("what has happened could not be told to %r; the run goes on", observer)

    # -- starting ---------------------------------------------------------------------------------

    def begin(self, step: StepName) -> None:
        """A step of a start. What is done for one stage after the other is one step."""
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append((step, time.monotonic()))

    def restart(self) -> None:
        """Steps count from now on."""
        self._steps = []

    def follow(self, generation: Generation, opened: Opened) -> None:
        """From now on, before it is launched."""
        self._generation = generation.generation
        self._told = set()
        generation.listener = self
        self._settle(opened)

    def started(
        self,
        opened: Opened,
        because: tuple[StartedBecause, str | None],
        *,
        run: RunStatus,
        skipped: Sequence[int] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Its queries run. `run`: what is known of it besides."""
        ends = [*(since for _, since in self._steps[1:]), time.monotonic()]
        steps = [
            StepTaken(step, round((end - since) * 1000)) for (step, since), end in zip(self._steps, ends, strict=True)
        ]
        took_s = ends[-1] - self._steps[0][1] if self._steps else 0.0
        self._steps = []
        self.tell(
            Started(
                at=now(),
                generation=opened.generation,
                instance=self._instance,
                because=because[0],
                why=because[1],
                base=None if opened.base is None else checkpoint_name(opened.base.checkpoint_id),
                skipped=tuple(map(checkpoint_name, skipped)),
                steps=tuple(steps),
                took_ms=round(took_s * 1000),
                changes=run.changes,
                host=run.host,
                pid=run.pid,
                settings=dict(settings or {}),
            )
        )

    def _settle(self, opened: Opened) -> None:
        """By the log, which tells how those ended that were being decided when their generation ended."""
        undecided, self._undecided = self._undecided, {}
        for checkpoint_id, status in undecided.items():
            if opened.log.completed(checkpoint_id) is not None:
                self._unshown[checkpoint_id] = msgspec.structs.replace(status, state="committing", why=None)
            else:
                self._ended(msgspec.structs.replace(status, state="aborted"))

    # -- checkpoints ------------------------------------------------------------------------------

    def on_ended(self, status: CheckpointStatus) -> None:
        self._told.add(checkpoint_id_of(status.checkpoint) or 0)
        self._ended(status)

    def _ended(self, status: CheckpointStatus) -> None:
        self.tell(ended(status, self._instance))

    def on_base_shown(self, checkpoint_id: int, course: Course) -> None:
        """What is sealed in one is so in all that come after it: with it, all before it are shown."""
        for unshown, status in sorted(self._unshown.items()):
            if unshown <= checkpoint_id:
                del self._unshown[unshown]
                commits = course.commits if unshown == checkpoint_id else status.commits
                shown_ms = course.shown_ms if unshown == checkpoint_id else status.shown_ms
                self._ended(msgspec.structs.replace(status, state="complete", commits=dict(commits), shown_ms=shown_ms))

    # -- failing and ending -----------------------------------------------------------------------

    def over(self, generation: Generation | None, why: str) -> None:
        """A generation has ended: what it had under way is void, but for what is in the log."""
        if generation is None or generation.generation != self._generation or not generation.leads:
            return
        try:
            coordinator = generation.coordinator
            for checkpoint in (*coordinator.history, *coordinator.active):
                if checkpoint.checkpoint_id in self._told or checkpoint.phase is Phase.COMMITTED:
                    continue
                self._told.add(checkpoint.checkpoint_id)
                status = status_of(generation, checkpoint)
                if checkpoint.phase is Phase.COMPLETED:
                    self._unshown[checkpoint.checkpoint_id] = status
                elif checkpoint.phase is Phase.ABORTED:
                    self._ended(status)
                else:
                    status = msgspec.structs.replace(status, why=f"the generation ended: {why}")
                    if checkpoint.phase is Phase.DECIDING:
                        self._undecided[checkpoint.checkpoint_id] = status
                    else:
                        self._ended(msgspec.structs.replace(status, state="aborted"))
        except Exception:
            _log.exception("what became of the last checkpoints could not be told; the run goes on")

    def failed(self, error: BaseException, retried_in_ms: int | None) -> None:
        """A generation could not go on, or none could be opened."""
        stage = getattr(error, "stage", None)
        self.tell(
            Failed(
                at=now(),
                generation=self._generation,
                instance=self._instance,
                why=str(error),
                stage=stage if isinstance(stage, str) else None,
                retried_in_ms=retried_in_ms,
            )
        )

    def ended(self, state: RunState, why: str | None) -> None:
        """The run has. What it has decided and was not seen to be shown stays so until another one shows it."""
        for status in self._unshown.values():
            self._ended(status)
        self._unshown = {}
        self.tell(Ended(at=now(), generation=self._generation, instance=self._instance, state=state, why=why))


def ended(status: CheckpointStatus, instance: str | None = None, at: str | None = None) -> CheckpointEnded:
    """The event of a checkpoint. It has one id, whoever tells of it: a later word takes the place of an earlier one."""
    return CheckpointEnded(
        at=now() if at is None else at,
        id=f"{status.checkpoint}.{status.generation}",
        generation=status.generation,
        instance=instance,
        checkpoint=status,
    )
