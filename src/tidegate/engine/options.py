"""How a pipeline is run: every option, what holds where it is not given, and what of it is refused.

`RunOptions` is where an option and its default are written down. The keywords of `pipeline.run` and the options of
`tidegate run` are the same ones, and a test compares them. What is said of each here is what `tidegate run --help` and
docs/reference/options.md tell.

An option that would have no effect is refused, like one that cannot be: whoever gives it believes that it has one.

Importing this brings no PySpark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, get_type_hints

import msgspec
from msgspec import Meta

from tidegate.engine.changes import Meant
from tidegate.engine.renaming import check_names
from tidegate.errors import InvalidConfig
from tidegate.protocol.backpressure import BacklogBound
from tidegate.protocol.config import (
    AlignmentConfig,
    CheckpointConfig,
    as_ms,
    retention,
    size_as_text,
    size_in_bytes,
    time_as_text,
)
from tidegate.spark.definition import StageDefinition


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much a generation lets pile up, and how long it waits. `backlog` holds for each channel, and each table."""

    backlog: BacklogBound = BacklogBound()
    commit_ms: int = 600_000


class RunOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a pipeline is run. A time is a number with a unit, such as 500ms, 10s, 5m, 1h or 7d; so is a size, such as
    500KB, 256MB or 1GB. Where one is None, what `checkpoint` says of it counts."""

    checkpoint_interval: Annotated[str | None, Meta(description="How often to take a checkpoint.")] = None
    min_pause: Annotated[
        str | None,
        Meta(description="How long to leave the pipeline alone after a checkpoint has ended, however long it took."),
    ] = None
    checkpoint_timeout: Annotated[
        str | None, Meta(description="How long a checkpoint may take, until it is aborted.")
    ] = None
    tolerable_failures: Annotated[
        int | None,
        Meta(description="How many checkpoints in a row may fail; one more counts as the failure of a stage."),
    ] = None
    max_concurrent: Annotated[
        int | None, Meta(description="How many checkpoints may be in progress at the same time.")
    ] = None
    retain: Annotated[
        str | int | None,
        Meta(
            description="How many checkpoints that differ to keep, or for how long: 24h keeps the newest 3, and one an "
            "hour."
        ),
    ] = None
    full_snapshots: Annotated[
        bool, Meta(description="Store all of the state anew with every checkpoint, not only what has changed.")
    ] = False
    unaligned_after: Annotated[
        str | None,
        Meta(
            description="How long a stage may take to align a checkpoint, until it captures what is in flight; 0s: at "
            "once. Without it, a stage always aligns."
        ),
    ] = None
    max_inflight: Annotated[
        str | None,
        Meta(description="How much a stage may capture of what is in flight; over that it goes on aligning."),
    ] = None
    checkpoint: Annotated[
        CheckpointConfig, Meta(description="All of the above as one value; what is given above takes its place.")
    ] = CheckpointConfig()
    max_backlog: Annotated[
        str, Meta(description="How much of a stage's output its slowest reader may be behind, until it is held back.")
    ] = "256MB"
    max_backlog_segments: Annotated[
        int, Meta(description="The same in segments: what one batch has written is one.")
    ] = 1_000
    commit_timeout: Annotated[
        str, Meta(description="How long the commit of an epoch to a table may take, until it has failed.")
    ] = "10m"
    available_now: Annotated[bool, Meta(description="Stop when all input is consumed.")] = False
    up_to: Annotated[
        str | None,
        Meta(
            description="Read exactly up to where the sources of another root stand, at its newest checkpoint, or at "
            "one that is named as ROOT@ID; stop when that is consumed."
        ),
    ] = None
    take_over: Annotated[bool, Meta(description="Start although another run seems alive; that one is superseded.")] = (
        False
    )
    restarts: Annotated[int, Meta(description="How often to restart after a stage has failed.")] = 3
    restart_pause: Annotated[
        str,
        Meta(description="How long to wait before the first restart; each further time twice as long, up to a minute."),
    ] = "1s"
    chain: Annotated[
        bool, Meta(description="Run stages that only pass rows on in the query of their input, where they can be.")
    ] = True
    fsync: Annotated[
        bool, Meta(description="Force checkpoints to the disk; without, a loss of power may cost the newest.")
    ] = True
    rename: Annotated[
        dict[str, str],
        Meta(description="New names of stages, by those that the checkpoint knows: such a stage goes on from there."),
    ] = {}
    allow_dropped_state: Annotated[
        list[str], Meta(description="Stages that are gone from the pipeline, and whose state may go too.")
    ] = []
    conf: Annotated[
        dict[str, str],
        Meta(
            description="Settings of the Spark session that is made where none is given, such as spark.jars.packages."
        ),
    ] = {}

    def bounds(self) -> Bounds:
        backlog = BacklogBound(size_in_bytes("max_backlog", self.max_backlog), self.max_backlog_segments)
        return Bounds(backlog, _at_least_1ms("commit_timeout", self.commit_timeout))

    def config(self) -> CheckpointConfig:
        """What `checkpoint` says, with all that is given beside it in its place."""
        given: dict[str, Any] = {}
        if self.checkpoint_interval is not None:
            given["interval_ms"] = _at_least_1ms("checkpoint_interval", self.checkpoint_interval)
        if self.min_pause is not None:
            given["min_pause_ms"] = as_ms("min_pause", self.min_pause)
        if self.checkpoint_timeout is not None:
            given["timeout_ms"] = _at_least_1ms("checkpoint_timeout", self.checkpoint_timeout)
        if self.tolerable_failures is not None:
            given["tolerable_failures"] = self.tolerable_failures
        if self.max_concurrent is not None:
            given["max_concurrent"] = self.max_concurrent
        if self.retain is not None:
            given |= retention(str(self.retain))
        if self.full_snapshots:
            given["incremental"] = False
        return msgspec.structs.replace(self.checkpoint, **given, alignment=self._alignment())

    def _alignment(self) -> AlignmentConfig:
        given: dict[str, Any] = {}
        if self.unaligned_after is not None:
            timeout_ms = as_ms("unaligned_after", self.unaligned_after)
            given["unaligned"] = "on_timeout" if timeout_ms else "always"
            given["timeout_ms"] = timeout_ms or _ALIGNMENT.timeout_ms
        if self.max_inflight is not None:
            given["max_inflight_bytes"] = size_in_bytes("max_inflight", self.max_inflight)
        return msgspec.structs.replace(self.checkpoint.alignment, **given)

    @property
    def ends(self) -> bool:
        """Whether it stops by itself."""
        return self.available_now or self.up_to is not None

    def meant(self) -> Meant:
        """What is said of a pipeline that has changed since its checkpoint."""
        return Meant(self.rename, tuple(self.allow_dropped_state))

    def check_effect(self) -> None:
        """Refuse what would have no effect beside the rest."""
        config = self.config()
        alignment = config.alignment
        after, timeout = time_as_text(alignment.timeout_ms), time_as_text(config.timeout_ms)
        at_most = size_as_text(alignment.max_inflight_bytes)
        bounds_inflight = self.max_inflight is not None or alignment.max_inflight_bytes != _ALIGNMENT.max_inflight_bytes
        if alignment.unaligned == "never" and bounds_inflight:
            raise _without_effect(f"max_inflight is {at_most}", "every stage aligns", "give unaligned_after too")
        if alignment.unaligned != "never" and not alignment.max_inflight_bytes:
            raise _without_effect(
                "unaligned_after is given", "max_inflight is 0B, so that every stage goes on aligning", "allow more"
            )
        if alignment.unaligned != "on_timeout" and alignment.timeout_ms != _ALIGNMENT.timeout_ms:
            raise _without_effect(
                f"timeout_ms of the alignment is {alignment.timeout_ms}",
                f"unaligned is {alignment.unaligned!r}",
                "set unaligned to 'on_timeout'",
            )
        if alignment.unaligned == "on_timeout" and alignment.timeout_ms >= config.timeout_ms:
            raise _without_effect(
                f"unaligned_after is {after}",
                f"a checkpoint is aborted after {timeout} (checkpoint_timeout)",
                "make it shorter than that",
            )
        if self.available_now and self.up_to is not None:
            raise _without_effect("available_now is given", f"the run reads up to {self.up_to}, and stops there")
        if not self.restarts and self.restart_pause != DEFAULTS.restart_pause:
            raise _without_effect(f"restart_pause is {self.restart_pause}", "restarts is 0", "allow a restart")

    def check_effect_on(self, stages: Sequence[StageDefinition]) -> None:
        """Refuse what would have no effect on this pipeline."""
        names = [each.name for each in stages]
        check_names(self.rename, names)
        for name in self.allow_dropped_state:
            if name in names:
                raise _without_effect(
                    f"allow_dropped_state is {name}", f"the pipeline still has {name!r}, which keeps its state"
                )
        if self.config().alignment.unaligned != "never" and not any(each.kind == "stage" for each in stages):
            raise _without_effect(
                "unaligned_after is given",
                "the pipeline has no stage between its sources and its sinks, and these are always cut aligned",
            )


DEFAULTS: Final = RunOptions()
_CHECKPOINT: Final = DEFAULTS.checkpoint
_ALIGNMENT: Final = _CHECKPOINT.alignment


def settings_of(options: dict[str, Any]) -> RunOptions:
    """The options as they were given, each looked at: what cannot be is refused by its name."""
    try:
        settings = msgspec.convert(options, RunOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(RunOptions.__struct_fields__)
        raise InvalidConfig(f"{error} (the options are: {known})") from error
    settings.bounds()
    as_ms("restart_pause", settings.restart_pause)
    settings.check_effect()
    return settings


# What holds of each option that is None where nobody gives `checkpoint` either.
_OF_CHECKPOINTS: Final = {
    "checkpoint_interval": time_as_text(_CHECKPOINT.interval_ms),
    "min_pause": time_as_text(_CHECKPOINT.min_pause_ms),
    "checkpoint_timeout": time_as_text(_CHECKPOINT.timeout_ms),
    "tolerable_failures": str(_CHECKPOINT.tolerable_failures),
    "max_concurrent": str(_CHECKPOINT.max_concurrent),
    "retain": str(_CHECKPOINT.max_retained),
    "max_inflight": size_as_text(_ALIGNMENT.max_inflight_bytes),
}


def description_of(option: str) -> str:
    """What it is, for people."""
    (meta,) = get_type_hints(RunOptions, include_extras=True)[option].__metadata__
    return str(meta.description)


def default_of(option: str) -> str:
    """What holds where it is not given, as users write it; empty where that is nothing."""
    default = getattr(DEFAULTS, option)
    return _OF_CHECKPOINTS.get(option, str(default) if isinstance(default, str | int) else "")


def _at_least_1ms(name: str, text: str) -> int:
    found = as_ms(name, text)
    if not found:
        raise InvalidConfig(f"{name} is {text!r}; it must be at least 1ms, such as {default_of(name)}")
    return found


def _without_effect(what: str, because: str, instead: str | None = None) -> InvalidConfig:
    instead = "" if instead is None else f"{instead}, or "
    return InvalidConfig(f"{what}, which has no effect: {because}; {instead}leave it out")
