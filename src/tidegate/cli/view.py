"""What a user sees of a run: a live table in a terminal, log lines elsewhere, JSON for machines."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from tidegate.cli.text import as_bytes
from tidegate.protocol.coordinator import Checkpoint, Phase
from tidegate.protocol.recovery import checkpoint_name

if TYPE_CHECKING:
    from tidegate.spark.generation import Generation

_LAST_CHECKPOINTS = 5


def _event(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "event": "checkpoint",
        "checkpoint": checkpoint_name(checkpoint.checkpoint_id),
        "state": "aborted" if checkpoint.phase is Phase.ABORTED else "complete",
        "aligned": checkpoint.is_aligned,
        "generation": checkpoint.generation,
        "attempt": checkpoint.attempt,
        "duration_ms": checkpoint.duration_ms,
        "new_bytes": checkpoint.new_bytes,
        "total_bytes": checkpoint.total_bytes,
        "why": checkpoint.abort_detail or None,
    }


class _Ended:
    """Remembers which checkpoints were told of."""

    def __init__(self) -> None:
        self._told: set[tuple[int, int]] = set()

    def fresh(self, generation: Generation) -> list[Checkpoint]:
        found = []
        for checkpoint in generation.coordinator.history:
            key = (checkpoint.generation, checkpoint.checkpoint_id)
            if key not in self._told:
                self._told.add(key)
                found.append(checkpoint)
        return found


class View:
    def update(self, generation: Generation) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class JsonView(View):
    """One JSON object per line: each checkpoint that ended, and now and then each stage."""

    def __init__(self) -> None:
        self._ended = _Ended()
        self._told_stages_s = 0.0

    def update(self, generation: Generation) -> None:
        for checkpoint in self._ended.fresh(generation):
            self._print(_event(checkpoint))
        if time.monotonic() - self._told_stages_s >= 1:
            self._told_stages_s = time.monotonic()
            stages = {
                name: {"batch": stage.batch, "rows": stage.rows, "lag": stage.lag, "watermark_ms": stage.watermark_ms}
                for name, stage in generation.stages.items()
            }
            self._print({"event": "stages", "generation": generation.generation, "stages": stages})

    def _print(self, event: dict[str, Any]) -> None:
        print(json.dumps({"at": datetime.now(UTC).isoformat(timespec="milliseconds"), **event}), flush=True)


class LogView(View):
    """Plain lines on stderr, for where there is no terminal."""

    def __enter__(self) -> Self:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger = logging.getLogger("tidegate")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        return self

    def update(self, generation: Generation) -> None:
        """The run's own log lines say it all."""


class LiveView(View):
    """A table that changes in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=5, transient=False)
        self._rows: dict[str, tuple[float, int, float]] = {}

    def __enter__(self) -> Self:
        logger = logging.getLogger("tidegate")
        logger.addHandler(RichHandler(console=self._console, show_path=False))
        logger.setLevel(logging.WARNING)
        self._live.__enter__()
        self._live.update(Text("starting Spark…"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, generation: Generation) -> None:
        self._live.update(Group(self._stages(generation), self._progress(generation), self._checkpoints(generation)))

    def _stages(self, generation: Generation) -> Table:
        table = Table(box=box.SIMPLE_HEAD, title=f"generation {generation.generation}", title_justify="left")
        table.add_column("stage")
        for heading in ("rows/s", "rows", "batch", "lag", "watermark"):
            table.add_column(heading, justify="right")
        for name, stage in generation.stages.items():
            watermark = (
                "" if stage.watermark_ms is None else f"{datetime.fromtimestamp(stage.watermark_ms / 1000, UTC):%F %T}"
            )
            table.add_row(
                name,
                f"{self._rate(name, stage.rows):,.0f}",
                f"{stage.rows:,}",
                str(stage.batch) if stage.batch >= 0 else "",
                str(stage.lag) if stage.definition.inputs else "",
                watermark,
            )
        return table

    def _rate(self, name: str, rows: int) -> float:
        now = time.monotonic()
        then, before, rate = self._rows.get(name, (now, rows, 0.0))
        if now - then >= 1:
            rate = (rows - before) / (now - then)
            self._rows[name] = (now, rows, rate)
        else:
            self._rows.setdefault(name, (now, rows, 0.0))
        return rate

    def _progress(self, generation: Generation) -> Text:
        active = generation.coordinator.active
        if not active:
            return Text("no checkpoint in progress", style="dim")
        checkpoint = active[0]
        missing = generation.coordinator.missing(checkpoint.checkpoint_id)
        text = Text(f"{checkpoint_name(checkpoint.checkpoint_id)} {checkpoint.phase.value}: ")
        for name in generation.stages:
            text.append(f"{name} ", style="dim" if name in missing else "green")
        return text

    def _checkpoints(self, generation: Generation) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("checkpoint")
        table.add_column("state")
        for heading in ("duration", "new", "total"):
            table.add_column(heading, justify="right")
        for checkpoint in generation.coordinator.history[-_LAST_CHECKPOINTS:]:
            state = checkpoint.phase.value + ("" if checkpoint.is_aligned else ", unaligned")
            table.add_row(
                checkpoint_name(checkpoint.checkpoint_id),
                f"{state}: {checkpoint.abort_detail}" if checkpoint.abort_detail else state,
                f"{checkpoint.duration_ms} ms",
                as_bytes(checkpoint.new_bytes),
                as_bytes(checkpoint.total_bytes),
            )
        return table
