"""What a user sees of a run: a live table in a terminal, log lines elsewhere, JSON for machines."""

from __future__ import annotations

import logging
import sys
import time
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from tidegate.cli.answers import (
    ChangedEvent,
    CheckpointEvent,
    EndedEvent,
    RestartingEvent,
    StagesEvent,
    StartingEvent,
    StoppingEvent,
)
from tidegate.cli.exits import Exit
from tidegate.cli.fitting import first_that_fits
from tidegate.cli.notices import notices
from tidegate.cli.speech import say
from tidegate.cli.tables import run_lines
from tidegate.cli.text import as_duration
from tidegate.engine.status import RunStatus, StartingStep

_TELL_AGAIN_AFTER_S: Final = 60.0


class View:
    def starting(self, step: StartingStep) -> None:
        """The run is about to do this, to start or to restart."""

    def update(self, status: RunStatus) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class JsonView(View):
    """One JSON object per line: see `Event`. Whatever is told, it is told once, but for the stages: once a second."""

    def __init__(self) -> None:
        self._told: set[tuple[int, str, str]] = set()
        self._told_stages_s = 0.0
        self._state: tuple[str, str | None] | None = None
        self._told_changes_of: int | None = None

    def update(self, status: RunStatus) -> None:
        if status.changes and status.generation != self._told_changes_of:
            self._told_changes_of = status.generation
            say(ChangedEvent(changes=status.changes))
        ended = {(each.generation, each.checkpoint, each.state): each for each in status.checkpoints}
        for key, checkpoint in ended.items():
            if key not in self._told:
                say(CheckpointEvent(checkpoint=checkpoint))
        self._told = set(ended)  # no more than that: what has left the list does not come back
        if (status.state, status.stopping) != self._state:
            self._state = status.state, status.stopping
            self._tell_state(status)
        if status.state in ("running", "stopping") and time.monotonic() - self._told_stages_s >= 1:
            self._told_stages_s = time.monotonic()
            say(StagesEvent(generation=status.generation, stages=status.stages, due=status.due))

    def starting(self, step: StartingStep) -> None:
        if step.step != "loading":  # what cannot be a run has no events but the error
            say(StartingEvent(step=step))

    def _tell_state(self, status: RunStatus) -> None:
        why = status.why or ""
        if status.state == "stopping":
            say(StoppingEvent(doing=status.stopping or "last_checkpoint"))
        elif status.state == "restarting":
            say(RestartingEvent(why=why))
        elif status.state == "finished":
            say(EndedEvent(state="finished", why=why, exit=Exit.FINE))


def _in_utc() -> logging.Formatter:
    """Times as those of every other view are, wherever the machine stands."""
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    formatter.converter = time.gmtime
    formatter.default_msec_format = "%s.%03dZ"
    return formatter


def _time_of_day(local: datetime) -> Text:
    return Text(f"{local.astimezone(UTC):%H:%M:%SZ}")


class LogView(View):
    """Plain lines on stderr, for where there is no terminal."""

    def __init__(self) -> None:
        self._told_s: dict[str, float] = {}
        self._step = ""

    def __enter__(self) -> Self:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_in_utc())
        logger = logging.getLogger("tidegate")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        return self

    def starting(self, step: StartingStep) -> None:
        # The first two are over at once, unless they end in an error: that is to be the only line.
        if step.step not in ("loading", "checking") and step.words != self._step:
            self._step = step.words
            logging.getLogger("tidegate").info("%s", step.words)

    def update(self, status: RunStatus) -> None:
        """The run's own log lines say all but what there is to notice: that may come and go, so now and then."""
        now = time.monotonic()
        self._told_s = {about: told_s for about, told_s in self._told_s.items() if now - told_s < _TELL_AGAIN_AFTER_S}
        for each in notices(status):
            if not each.is_logged and each.about not in self._told_s:
                self._told_s[each.about] = now
                logging.getLogger("tidegate").info("%s", each.text)


class _Shown:
    """A run, in the size that the terminal has when it is drawn."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status

    def __rich_console__(self, console: Console, _options: ConsoleOptions) -> RenderResult:
        status = self._status
        width, height = console.size
        yield from run_lines(
            status,
            width,
            height,
            titles=(
                f"pipeline {status.pipeline} is {status.state}, generation {status.generation}",
                f"{status.pipeline} is {status.state}, generation {status.generation}",
                f"{status.pipeline} is {status.state}",
            ),
            footer=_footer(status),
        )


def _footer(status: RunStatus) -> str:
    if status.state != "stopping":
        return ""
    if status.stopping in ("draining", "closing_windows"):
        return "Ctrl-C skips that, and takes the last checkpoint now"
    return "Ctrl-C once more stops it at once"


class _Start:
    """The steps of a start so far, and for how long each of them lasted."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[float, StartingStep]] = {}

    def begin(self, step: StartingStep) -> None:
        """What is done for one stage after the other is one step."""
        begun_s, _ = self._begun.get(step.words, (time.monotonic(), step))
        self._begun[step.words] = begun_s, step

    def __rich_console__(self, console: Console, _options: ConsoleOptions) -> RenderResult:
        width, height = console.size
        begun = list(self._begun.values())  # the run may begin the next one meanwhile
        ends = [*(begun_s for begun_s, _ in begun[1:]), time.monotonic()]
        yield Text("starting", style="bold")
        shown = [*zip(begun, ends, strict=False)][-max(1, height - 1) :]
        for (begun_s, step), end_s in shown:
            is_last = step is begun[-1][1]
            said = step.told if is_last else step.words
            lasted = as_duration((end_s - begun_s) * 1000)
            yield Text(
                first_that_fits(width, f"  {said}, {lasted}", f"  {step.words}, {lasted}", f"  {lasted}"),
                style="" if is_last else "dim",
            )


class LiveView(View):
    """What changes in place, and always fits the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._size = console.size
        self._start = _Start()
        self._live = Live(console=console, refresh_per_second=5, transient=False)

    def starting(self, step: StartingStep) -> None:
        self._start.begin(step)
        self._live.update(self._start)

    def __enter__(self) -> Self:
        logger = logging.getLogger("tidegate")
        logger.addHandler(RichHandler(console=self._console, show_path=False, log_time_format=_time_of_day))
        logger.setLevel(logging.WARNING)
        # A run that is told to stop while it still opens has no table yet that could show it.
        logging.getLogger("tidegate.stopping").setLevel(logging.INFO)
        # In place already: what the JVM writes while it starts goes to its log.
        self._live.update(self._start)
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, status: RunStatus) -> None:
        if self._console.size != self._size:
            # The terminal has broken what was there into other lines: nobody knows how many are to be drawn over.
            self._size = self._console.size
            self._console.clear()
        self._live.update(_Shown(status))
        self._start = _Start()
