"""A pipeline as its user writes it: functions from DataFrames to DataFrames, named by what they read.

Nothing here starts anything. `Pipeline.validated` finds what is wrong with a pipeline's shape, in the words of
the one who wrote it.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from tidegate.engine.options import DEFAULTS
from tidegate.errors import InvalidPipeline
from tidegate.spark.definition import SPARK_PARAMETER, Kind, OutputMode, StageDefinition

if TYPE_CHECKING:
    import threading

    from pyspark.sql import SparkSession

    from tidegate.protocol.config import CheckpointConfig
    from tidegate.sinks.contract import Sink

Function = TypeVar("Function", bound=Callable[..., Any])

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_OUTPUT_MODES: Final = ("append", "update", "complete")


class Pipeline:
    """A named DAG of streaming queries.

    `folder` is that of the file which makes it: relative paths of its tables and sources are taken from there, wherever
    it is run. In a notebook or a shell it is the working directory.
    """

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidPipeline(
                f"the pipeline's name {name!r} must start with a letter and hold letters, digits and _ only"
            )
        self.name = name
        self.folder = _made_in(self)
        self._stages: dict[str, StageDefinition] = {}

    # -- defining ---------------------------------------------------------------------------------

    @overload
    def source(self, function: Function) -> Function: ...
    @overload
    def source(self, *, chain: bool = True) -> Callable[[Function], Function]: ...
    def source(
        self, function: Function | None = None, *, chain: bool = True
    ) -> Function | Callable[[Function], Function]:
        """A stage that reads an external stream: `spark.readStream…`. It is called with the session.

        `chain=False`: it and what reads it never run as one query.
        """

        def define(defined: Function) -> Function:
            parameters = tuple(inspect.signature(defined).parameters)
            if parameters not in ((), (SPARK_PARAMETER,)):
                raise InvalidPipeline(
                    f"source {defined.__name__!r} takes {', '.join(parameters)}; it may take `spark` and nothing else"
                )
            name = defined.__name__
            self._add(StageDefinition(name, "source", defined, (), parameters, folder=self.folder, chain=chain))
            return defined

        return define if function is None else define(function)

    @overload
    def stage(self, function: Function) -> Function: ...
    @overload
    def stage(
        self, *, inputs: Sequence[str] | None = None, output_mode: OutputMode = "append", chain: bool = True
    ) -> Callable[[Function], Function]: ...
    def stage(
        self,
        function: Function | None = None,
        *,
        inputs: Sequence[str] | None = None,
        output_mode: OutputMode = "append",
        chain: bool = True,
    ) -> Function | Callable[[Function], Function]:
        """A stage that reads other stages. A parameter names the stage it reads, unless `inputs` does.

        `chain=False`: it never runs as one query with what it reads or with what reads it.
        """

        def define(defined: Function) -> Function:
            self._add(_reading(defined, "stage", inputs, output_mode, None, chain=chain))
            return defined

        return define if function is None else define(function)

    def sink(
        self,
        sink: Sink,
        *,
        inputs: Sequence[str] | None = None,
        output_mode: OutputMode = "append",
        chain: bool = True,
    ) -> Callable[[Function], Function]:
        """A stage whose output goes to a table. `chain=False`: it never runs as one query with what it reads."""
        from tidegate.sinks.contract import Sink, SinkWithPath

        if isinstance(sink, type) or not isinstance(sink, Sink):
            given = getattr(sink, "__name__", None) or repr(sink)
            raise InvalidPipeline(
                f"a sink needs a table, not {given}: write @pipeline.sink(tidegate.DeltaTable(path)) over its function"
            )

        placed = sink.seen_from(self.folder) if isinstance(sink, SinkWithPath) else sink

        def define(defined: Function) -> Function:
            self._add(_reading(defined, "sink", inputs, output_mode, placed, chain=chain))
            return defined

        return define

    def _add(self, stage: StageDefinition) -> None:
        if not _NAME.fullmatch(stage.name):
            raise InvalidPipeline(f"stage {stage.name!r}: a name starts with a letter; a lambda has none")
        if stage.name in self._stages:
            raise InvalidPipeline(f"two stages are called {stage.name!r}; give one of them another name")
        if stage.name == SPARK_PARAMETER:
            raise InvalidPipeline("no stage can be called 'spark': that parameter is the session")
        if stage.output_mode not in _OUTPUT_MODES:
            raise InvalidPipeline(
                f"stage {stage.name!r}: output_mode is {stage.output_mode!r}, not one of {', '.join(_OUTPUT_MODES)}"
            )
        self._stages[stage.name] = stage

    @property
    def sinks(self) -> dict[str, Sink]:
        """Its tables and functions, by the names of their stages."""
        return {name: stage.sink for name, stage in self._stages.items() if stage.sink is not None}

    def with_stages(self, replace: Callable[[StageDefinition], StageDefinition]) -> Pipeline:
        """The same pipeline with another definition of each stage. This one stays as it is."""
        other = copy.copy(self)
        other._stages = {name: replace(stage) for name, stage in self._stages.items()}
        return other

    # -- what is wrong with it --------------------------------------------------------------------

    def validated(self) -> list[StageDefinition]:
        """The stages, each after those it reads; or an error that names what is wrong."""
        for stage in self._stages.values():
            self._check_inputs(stage)
        read = {name for stage in self._stages.values() for name in stage.inputs}
        if not any(stage.kind == "sink" for stage in self._stages.values()):
            raise InvalidPipeline(f"pipeline {self.name!r} has no sink: nothing would ever be seen of it")
        for stage in self._stages.values():
            if stage.kind != "sink" and stage.name not in read:
                raise InvalidPipeline(f"nothing reads {stage.kind} {stage.name!r}; add a stage that does, or remove it")
        self._check_memories()
        return self._in_order()

    def _check_memories(self) -> None:
        """Refuse one memory for two sinks: of an epoch that both have rows of, it would keep those of one."""
        from tidegate.sinks.function import Memory

        users: dict[int, str] = {}
        for stage in self._stages.values():
            if isinstance(stage.sink, Memory):
                other = users.setdefault(id(stage.sink), stage.name)
                if other != stage.name:
                    raise InvalidPipeline(
                        f"the sinks {other!r} and {stage.name!r} share one tidegate.Memory(), which would keep the "
                        f"rows of only one of them; give each its own"
                    )

    def _check_inputs(self, stage: StageDefinition) -> None:
        if stage.kind != "source" and not stage.inputs:
            raise InvalidPipeline(f"{stage.kind} {stage.name!r} reads nothing; name the stage it reads as a parameter")
        for name in stage.inputs:
            if name not in self._stages:
                known = ", ".join(sorted(self._stages))
                raise InvalidPipeline(f"{stage.kind} {stage.name!r} reads {name!r}, which is no stage ({known} are)")
            if self._stages[name].kind == "sink":
                raise InvalidPipeline(
                    f"{stage.kind} {stage.name!r} reads sink {name!r}; a sink's output is its table: make a stage of "
                    f"what both need"
                )
        if len(set(stage.inputs)) != len(stage.inputs):
            raise InvalidPipeline(f"{stage.kind} {stage.name!r} names an input twice: {', '.join(stage.inputs)}")

    def _in_order(self) -> list[StageDefinition]:
        ordered: dict[str, StageDefinition] = {}
        left = dict(self._stages)
        while left:
            ready = [stage for stage in left.values() if all(name in ordered for name in stage.inputs)]
            if not ready:
                raise InvalidPipeline(f"the stages {', '.join(sorted(left))} read one another in a cycle")
            for stage in ready:
                ordered[stage.name] = left.pop(stage.name)
        return list(ordered.values())

    # -- running ----------------------------------------------------------------------------------

    def run(  # noqa: PLR0913 - its keywords are the options of a run
        self,
        root: str | Path,
        spark: SparkSession | None = None,
        *,
        stop: threading.Event | None = None,
        checkpoint_interval: str | None = DEFAULTS.checkpoint_interval,
        min_pause: str | None = DEFAULTS.min_pause,
        checkpoint_timeout: str | None = DEFAULTS.checkpoint_timeout,
        tolerable_failures: int | None = DEFAULTS.tolerable_failures,
        max_concurrent: int | None = DEFAULTS.max_concurrent,
        retain: str | int | None = DEFAULTS.retain,
        full_snapshots: bool = DEFAULTS.full_snapshots,
        unaligned_after: str | None = DEFAULTS.unaligned_after,
        max_inflight: str | None = DEFAULTS.max_inflight,
        checkpoint: CheckpointConfig = DEFAULTS.checkpoint,
        max_backlog: str = DEFAULTS.max_backlog,
        max_backlog_segments: int = DEFAULTS.max_backlog_segments,
        max_watermark_drift: str | None = DEFAULTS.max_watermark_drift,
        commit_timeout: str = DEFAULTS.commit_timeout,
        available_now: bool = DEFAULTS.available_now,
        up_to: str | None = DEFAULTS.up_to,
        take_over: bool = DEFAULTS.take_over,
        work: str | None = DEFAULTS.work,
        restarts: int = DEFAULTS.restarts,
        restart_pause: str = DEFAULTS.restart_pause,
        chain: bool = DEFAULTS.chain,
        history_age: str = DEFAULTS.history_age,
        history_count: int = DEFAULTS.history_count,
        fsync: bool = DEFAULTS.fsync,
        rename: dict[str, str] = DEFAULTS.rename,
        allow_dropped_state: list[str] = DEFAULTS.allow_dropped_state,
        instance: str | None = DEFAULTS.instance,
        stages: list[str] = DEFAULTS.stages,
        instances: int = DEFAULTS.instances,
        coordination: str | None = DEFAULTS.coordination,
        grace: str = DEFAULTS.grace,
        lease: str = DEFAULTS.lease,
        metrics_port: int | None = DEFAULTS.metrics_port,
        metrics_host: str = DEFAULTS.metrics_host,
        traces: str | None = DEFAULTS.traces,
        master: str | None = DEFAULTS.master,
        conf: dict[str, str] = DEFAULTS.conf,
    ) -> None:
        """Run until stopped (Ctrl-C, SIGTERM, `tidegate stop`, or setting `stop`; each ends with a last checkpoint), or
        until all input is consumed. In a thread other than the main one no signal comes: there, set `stop`.

        A time is a number with a unit ("500ms", "10s", "5m", "1h", "7d"), so is a size ("500KB", "256MB", "1GB"). An
        option that would have no effect beside the others is refused.

        :param root: the folder that holds the pipeline's checkpoints
        :param spark: the session to use; without it the one of this process, or one that is made
        :param stop: ends the run, after a last checkpoint, when it is set
        :param checkpoint_interval: how often to take a checkpoint (10s)
        :param min_pause: how long to leave the pipeline alone after a checkpoint has ended, however long it took (0s)
        :param checkpoint_timeout: how long a checkpoint may take, until it is aborted (10m)
        :param tolerable_failures: how many checkpoints in a row may fail; one more counts as the failure of a stage (3)
        :param max_concurrent: how many checkpoints may be in progress at the same time (1)
        :param retain: how many checkpoints that differ to keep (3), or for how long: "24h" keeps the newest 3, and one
            of every 24th part of that time
        :param full_snapshots: store all of the state anew with every checkpoint, not only what has changed
        :param unaligned_after: how long a stage may take to align a checkpoint, until it captures what is in flight;
            "0s": at once. Without it, a stage always aligns
        :param max_inflight: how much a stage may capture of what is in flight; over that it goes on aligning (1GB)
        :param checkpoint: all of the above as one value; what is given above takes its place
        :param max_backlog: how much of a stage's output its slowest reader may be behind, until it is held back: gets
            nothing more to read, or is paused if it is a source, until its readers are down to half
        :param max_backlog_segments: the same in segments: what one batch has written is one
        :param max_watermark_drift: how far the watermark of an input may be ahead of the slowest input of the same
            stage, until it is held, so that it does not fill the stage's state. Without it, none is held
        :param commit_timeout: how long the commit of an epoch to a table may take, until it has failed
        :param available_now: stop when all input is consumed
        :param up_to: read exactly up to where the sources of another root stand, at its newest checkpoint, or at one
            that is named as "ROOT@ID"; stop when that is consumed
        :param take_over: start although another run seems alive; that one is superseded
        :param work: the folder on this machine in which Spark works, where the root is in a bucket
        :param restarts: how often to restart after a stage has failed
        :param restart_pause: how long to wait before the first restart; each further time twice as long, up to a minute
        :param chain: run stages that only pass rows on in the query of their input, where they can be
        :param history_age: how long what has happened is kept in the root (tidegate history)
        :param history_count: how many events of it are kept: checkpoints, starts, failures and all else
        :param fsync: force checkpoints to the disk; without, a loss of power may cost the newest
        :param rename: new names of stages, by those that the checkpoint knows: such a stage goes on from there
        :param allow_dropped_state: stages that are gone from the pipeline, and whose state may go too
        :param instance: the name of this process among several that run the pipeline together, each with some of its
            stages
        :param stages: stages that this instance is to run; what nobody asks for is spread over all instances
        :param instances: how many instances are to be there before the first generation is opened, for at most the
            grace
        :param coordination: where instances find each other, such as "zk://host:2181/path"; without it, in the root
        :param grace: how long an instance that is lost is waited for, until others run its stages
        :param lease: how long an instance may be silent, until it counts as lost
        :param metrics_port: the port on which the run shows metrics to Prometheus, over HTTP at /metrics; 0: any that
            is free. Without it, there are none
        :param metrics_host: the address that it listens on there; by default, nobody elsewhere can reach it
        :param traces: the collector that traces of checkpoints and starts are sent to by OTLP over HTTP, such as
            "http://127.0.0.1:4318"; without it, what the variables OTEL_EXPORTER_OTLP_… say
        :param master: the cluster that Spark runs on, where no session is given; without it, this machine
        :param conf: settings of the Spark session that is made where none is given, such as spark.jars.packages
        """
        from tidegate.engine.run import run_pipeline

        run_pipeline(
            self,
            root,
            spark,
            stop=stop,
            checkpoint_interval=checkpoint_interval,
            min_pause=min_pause,
            checkpoint_timeout=checkpoint_timeout,
            tolerable_failures=tolerable_failures,
            max_concurrent=max_concurrent,
            retain=retain,
            full_snapshots=full_snapshots,
            unaligned_after=unaligned_after,
            max_inflight=max_inflight,
            checkpoint=checkpoint,
            max_backlog=max_backlog,
            max_backlog_segments=max_backlog_segments,
            max_watermark_drift=max_watermark_drift,
            commit_timeout=commit_timeout,
            available_now=available_now,
            up_to=up_to,
            take_over=take_over,
            work=work,
            restarts=restarts,
            restart_pause=restart_pause,
            chain=chain,
            history_age=history_age,
            history_count=history_count,
            fsync=fsync,
            rename=rename,
            allow_dropped_state=allow_dropped_state,
            instance=instance,
            stages=stages,
            instances=instances,
            coordination=coordination,
            grace=grace,
            lease=lease,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            traces=traces,
            master=master,
            conf=conf,
        )


def _made_in(pipeline: Pipeline) -> Path:
    """The folder of the file whose code makes a pipeline."""
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code is _made_in.__code__ or frame.f_locals.get("self") is pipeline):
        frame = frame.f_back
    file = None if frame is None else frame.f_globals.get("__file__")
    if file is None:
        return Path.cwd()
    # What lies in an archive has folders there that are none.
    return next(folder for folder in Path(file).absolute().parents if folder.is_dir())


def _reading(
    function: Callable[..., Any],
    kind: Kind,
    inputs: Sequence[str] | None,
    output_mode: OutputMode,
    sink: Sink | None,
    *,
    chain: bool,
) -> StageDefinition:
    parameters = tuple(inspect.signature(function).parameters)
    read = tuple(name for name in parameters if name != SPARK_PARAMETER)
    if inputs is not None:
        if len(inputs) != len(read):
            raise InvalidPipeline(
                f"{kind} {function.__name__!r} takes {len(read)} inputs, but inputs names {len(inputs)}"
            )
        read = tuple(inputs)
    return StageDefinition(function.__name__, kind, function, read, parameters, output_mode, sink, chain=chain)
