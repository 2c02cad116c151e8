"""How a pipeline is run: every option, what it is where nobody gives it, and what of it cannot be.

Importing this brings no PySpark.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.errors import InvalidConfig
from tidegate.protocol.backpressure import BacklogBound
from tidegate.protocol.config import CheckpointConfig, as_ms, retention, size_in_bytes


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much a generation lets pile up, and how long it waits. `backlog` holds for each channel, and each table."""

    backlog: BacklogBound = BacklogBound()
    commit_ms: int = 600_000


class RunOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a pipeline is run. Times are a number with a unit: 500ms, 10s, 5m, 1h."""

    checkpoint_interval: str | None = None
    """How often to take a checkpoint. Takes the place of what `checkpoint` says of it, which is 10s by default."""
    unaligned_after: str | None = None
    """How long a stage may take to align a checkpoint, until it captures what is in flight instead; with "0s" at once.
    Without a time it always aligns. Takes the place of what `checkpoint` says of it."""
    retain: str | int | None = None
    """How many checkpoints to keep, of those that differ, such as 3; or for how long, such as "24h": then the newest 3,
    and one of every 24th part of that time. Takes the place of what `checkpoint` says of it."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    max_backlog: str = "256MB"
    """How many bytes of a channel its slowest reader may have yet to consume, until the channel's writer is held back:
    a stage gets nothing more to read, a source is paused. It goes on when they are down to half."""
    max_backlog_segments: int = 1_000
    """The same in segments: what one batch has written is one."""
    commit_timeout: str = "10m"
    """How long the commit of an epoch to a table may take, until it counts as failed."""
    available_now: bool = False
    take_over: bool = False
    restarts: int = 3
    restart_pause: str = "1s"
    fsync: bool = True
    """Whether a checkpoint is on the disk before it counts. Without it a loss of power may cost the newest ones."""
    conf: dict[str, str] = {}
    """Settings of the Spark session that is made where none is given, such as spark.jars.packages."""

    def bounds(self) -> Bounds:
        commit_ms = as_ms("commit_timeout", self.commit_timeout)
        if not commit_ms:
            raise InvalidConfig(f"commit_timeout is {self.commit_timeout!r}; it must be at least 1ms, such as 10m")
        backlog = BacklogBound(size_in_bytes("max_backlog", self.max_backlog), self.max_backlog_segments)
        return Bounds(backlog, commit_ms)

    def config(self) -> CheckpointConfig:
        config = self.checkpoint
        if self.checkpoint_interval is not None:
            interval_ms = as_ms("checkpoint_interval", self.checkpoint_interval)
            if not interval_ms:
                raise InvalidConfig(
                    f"checkpoint_interval is {self.checkpoint_interval!r}; it must be at least 1ms, such as 10s"
                )
            config = msgspec.structs.replace(config, interval_ms=interval_ms)
        if self.retain is not None:
            config = msgspec.structs.replace(config, **retention(str(self.retain)))
        if self.unaligned_after is None:
            return config
        timeout_ms = as_ms("unaligned_after", self.unaligned_after)
        alignment = msgspec.structs.replace(
            config.alignment, unaligned="on_timeout" if timeout_ms else "always", timeout_ms=timeout_ms
        )
        return msgspec.structs.replace(config, alignment=alignment)


def settings_of(options: dict[str, Any]) -> RunOptions:
    """The options as they were given, each looked at: what cannot be is refused by its name."""
    try:
        settings = msgspec.convert(options, RunOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(RunOptions.__struct_fields__)
        raise InvalidConfig(f"{error} (the options are: {known})") from error
    settings.config()
    settings.bounds()
    as_ms("restart_pause", settings.restart_pause)
    return settings
