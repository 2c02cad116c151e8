"""How a pipeline is run: every option, what holds where it is not given, and what of it is refused.

`RunOptions` is where an option and its default are written down. The keywords of `pipeline.run` and the options of
`tidegate run` are the same ones, and a test compares them. What is said of each here is what `tidegate run --help` and
docs/reference/options.md tell.

An option that would have no effect is refused, like one that cannot be: whoever gives it believes that it has one.

Importing this brings no PySpark.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Final, get_type_hints

import msgspec
from msgspec import Meta

from tidegate.cluster.connect import check_address
from tidegate.engine.changes import Meant
from tidegate.engine.history import Bounds as HistoryBounds
from tidegate.engine.renaming import check_names
from tidegate.engine.watching.otlp import url_of
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
from tidegate.protocol.drift import with_event_time
from tidegate.spark.definition import StageDefinition
from tidegate.spark.masters import MASTER

_LARGEST_PORT: Final = 65_535
_INSTANCE: Final = re.compile("[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much a generation lets pile up, and how long it waits. `backlog` holds for each channel, and each table.
    `drift_ms`: how far an input may be ahead of others in event time; None: as far as it likes."""

    backlog: BacklogBound = BacklogBound()
    commit_ms: int = 600_000
    drift_ms: int | None = None


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
    max_watermark_drift: Annotated[
        str | None,
        Meta(
            description="How far the watermark of an input may be ahead of the slowest input of the same stage, until "
            "it is held, so that it does not fill the stage's state. Without it, none is held."
        ),
    ] = None
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
    work: Annotated[
        str | None,
        Meta(
            description="The folder on this machine in which Spark works, where the root is in a bucket; by default "
            "one under the user's cache folder. Each of several instances has one of its own in it. Nothing in it "
            "outlives the run but what saves fetching it again."
        ),
    ] = None
    restarts: Annotated[int, Meta(description="How often to restart after a stage has failed.")] = 3
    restart_pause: Annotated[
        str,
        Meta(description="How long to wait before the first restart; each further time twice as long, up to a minute."),
    ] = "1s"
    chain: Annotated[
        bool, Meta(description="Run stages that only pass rows on in the query of their input, where they can be.")
    ] = True
    history_age: Annotated[
        str, Meta(description="How long what has happened is kept in the root (tidegate history).")
    ] = "30d"
    history_count: Annotated[
        int, Meta(description="How many events of it are kept: checkpoints, starts, failures and all else.")
    ] = 10_000
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
    instance: Annotated[
        str | None,
        Meta(
            description="The name of this process among several that run the pipeline together, each with some of its "
            "stages. Started again by the same name, it takes its place again."
        ),
    ] = None
    stages: Annotated[
        list[str],
        Meta(description="Stages that this instance is to run. What nobody asks for is spread over all instances."),
    ] = []
    instances: Annotated[
        int,
        Meta(
            description="How many instances are to be there before the first generation is opened, for at most the "
            "grace. Without --instance: start so many processes here, for trying it out."
        ),
    ] = 1
    coordination: Annotated[
        str | None,
        Meta(
            description="Where instances find each other: zk://HOST:PORT,HOST:PORT/PATH for ZooKeeper. Without it, in "
            "the root."
        ),
    ] = None
    grace: Annotated[
        str, Meta(description="How long an instance that is lost is waited for, until others run its stages.")
    ] = "30s"
    lease: Annotated[str, Meta(description="How long an instance may be silent, until it counts as lost.")] = "10s"
    metrics_port: Annotated[
        int | None,
        Meta(
            description="The port on which the run shows metrics to Prometheus, over HTTP at /metrics; 0: any that is "
            "free. Without it, there are none."
        ),
    ] = None
    metrics_host: Annotated[
        str, Meta(description="The address that it listens on there; by default, nobody elsewhere can reach it.")
    ] = "127.0.0.1"
    traces: Annotated[
        str | None,
        Meta(
            description="The collector that traces of checkpoints and starts are sent to by OTLP over HTTP, such as "
            "http://127.0.0.1:4318. Without it, what the variables OTEL_EXPORTER_OTLP_… say."
        ),
    ] = None
    master: Annotated[
        str | None,
        Meta(
            description="The cluster that Spark runs on, such as spark://HOST:7077, where no session is given; without "
            "it, this machine."
        ),
    ] = None
    conf: Annotated[
        dict[str, str],
        Meta(
            description="Settings of the Spark session that is made where none is given, such as spark.jars.packages."
        ),
    ] = {}

    def bounds(self) -> Bounds:
        backlog = BacklogBound(size_in_bytes("max_backlog", self.max_backlog), self.max_backlog_segments)
        return Bounds(backlog, _at_least_1ms("commit_timeout", self.commit_timeout), self._drift_ms())

    def history(self) -> HistoryBounds:
        if self.history_count < 1:
            raise InvalidConfig(f"history_count is {self.history_count}; it must be at least 1")
        return HistoryBounds(_at_least_1ms("history_age", self.history_age), self.history_count)

    def _drift_ms(self) -> int | None:
        drift = self.max_watermark_drift
        return None if drift is None else _at_least_1ms("max_watermark_drift", drift, "10m")

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
    def spark_settings(self) -> dict[str, str]:
        """Those of the Spark session that is made where none is given."""
        return self.conf if self.master is None else {**self.conf, MASTER: self.master}

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
        if self.master is not None and self.conf.get(MASTER, self.master) != self.master:
            raise _without_effect(f"{MASTER} is {self.conf[MASTER]}", f"master is {self.master}", "give one of them")
        self._check_instances()
        self._check_watching()
        if not self.restarts and self.restart_pause != DEFAULTS.restart_pause:
            raise _without_effect(f"restart_pause is {self.restart_pause}", "restarts is 0", "allow a restart")

    def _check_instances(self) -> None:
        if self.instance is not None:
            if not _INSTANCE.fullmatch(self.instance):
                raise InvalidConfig(
                    f"instance is {self.instance!r}; it is a name of letters, digits, - and _, of at most 64 characters"
                )
            if self.up_to is not None:
                raise InvalidConfig("up_to is for a run alone; leave instance out, or up_to")
            check_address(self.coordination)
            _at_least_1ms("lease", self.lease)
            as_ms("grace", self.grace)
            if self.instances < 1:
                raise InvalidConfig(f"instances is {self.instances}; it must be at least 1")
            return
        for option in ("stages", "coordination", "grace", "lease", "instances"):
            if getattr(self, option) != getattr(DEFAULTS, option):
                raise _without_effect(f"{option} is given", "it is for instances", "name this one with instance")

    def _check_watching(self) -> None:
        if self.metrics_port is None and self.metrics_host != DEFAULTS.metrics_host:
            raise _without_effect(f"metrics_host is {self.metrics_host}", "no metrics_port is given", "give one")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= _LARGEST_PORT:
            raise InvalidConfig(f"metrics_port is {self.metrics_port}; a port is between 0 and {_LARGEST_PORT}")
        if self.traces is not None:
            url_of(self.traces)

    def check_effect_on(self, stages: Sequence[StageDefinition]) -> None:
        """Refuse what would have no effect on this pipeline."""
        names = [each.name for each in stages]
        check_names(self.rename, names)
        for name in self.stages:
            if name not in names:
                raise InvalidConfig(f"stages is {name!r}; the pipeline has {', '.join(names)}")
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
        if self.max_watermark_drift is not None and not any(len(each.inputs) > 1 for each in stages):
            raise _without_effect(
                f"max_watermark_drift is {self.max_watermark_drift}", "no stage of the pipeline has several inputs"
            )

    def check_effect_on_time(self, stages: Sequence[StageDefinition], own_time: Collection[str]) -> None:
        """Refuse a drift that nothing could ever have. `own_time`: the stages that call `withWatermark`."""
        timed = with_event_time({each.name: each.inputs for each in stages}, own_time)
        is_ever_held = any(len(timed.intersection(each.inputs)) > 1 for each in stages)
        if self.max_watermark_drift is not None and not is_ever_held:
            raise _without_effect(
                f"max_watermark_drift is {self.max_watermark_drift}",
                "no stage has several inputs with event time",
                "call withWatermark in the sources that are to wait for one another, not only where they meet",
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
    settings.history()
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


def settings_told(options: RunOptions) -> dict[str, str]:
    """What a run runs with, as `tidegate run` names it, for people: what is not given has its default, and what may be
    a secret is not told."""
    told: dict[str, str] = {}
    for option in RunOptions.__struct_fields__:
        given = getattr(options, option)
        name = option.replace("_", "-")
        if isinstance(given, dict):
            told.update({f"{name} {key}": _not_secret(key, value) for key, value in given.items()})
        elif isinstance(given, list):
            told.update({name: ", ".join(given)} if given else {})
        elif isinstance(given, bool):
            told[name] = "yes" if given else "no"
        elif isinstance(given, str | int):
            told[name] = _LOGIN.sub("://…@", str(given))
    config = options.config()
    told["checkpoint-interval"] = time_as_text(config.interval_ms)
    told["min-pause"] = time_as_text(config.min_pause_ms)
    told["checkpoint-timeout"] = time_as_text(config.timeout_ms)
    told["tolerable-failures"], told["max-concurrent"] = str(config.tolerable_failures), str(config.max_concurrent)
    told.setdefault("retain", str(config.max_retained))
    return dict(sorted(told.items()))


_SECRET: Final = re.compile(
    "(?i)secret|token|key|password|passwd|passphrase|pwd|credential|auth|cert|signature|jaas|sasl|sas\\b|login"
)
_LOGIN: Final = re.compile(r"://[^/@\s]*@")


def _not_secret(name: str, value: str) -> str:
    """Java's options, for one, have names in their values."""
    return "(not told)" if _SECRET.search(name) or _SECRET.search(value) else _LOGIN.sub("://…@", value)


def description_of(option: str) -> str:
    """What it is, for people."""
    (meta,) = get_type_hints(RunOptions, include_extras=True)[option].__metadata__
    return str(meta.description)


def default_of(option: str) -> str:
    """What holds where it is not given, as users write it; empty where that is nothing."""
    default = getattr(DEFAULTS, option)
    return _OF_CHECKPOINTS.get(option, str(default) if isinstance(default, str | int) else "")


def _at_least_1ms(name: str, text: str, such_as: str = "") -> int:
    found = as_ms(name, text)
    if not found:
        raise InvalidConfig(f"{name} is {text!r}; it must be at least 1ms, such as {such_as or default_of(name)}")
    return found


def _without_effect(what: str, because: str, instead: str | None = None) -> InvalidConfig:
    instead = "" if instead is None else f"{instead}, or "
    return InvalidConfig(f"{what}, which has no effect: {because}; {instead}leave it out")
