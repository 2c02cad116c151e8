"""The same queries, run by plain PySpark and by Tidegate, watched in the same way.

A `Pipeline` is what both run: plain PySpark starts each of its functions as a query of its own that reads the Parquet
files of the query before it, as a user without Tidegate would write it.
"""

from __future__ import annotations

import atexit
import enum
import os
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from unittest import mock

from pyspark.sql import DataFrame, SparkSession

from benchmarks.measure import WrongWork
from tidegate.engine.generation import Generation
from tidegate.engine.pipeline import Pipeline
from tidegate.engine.run import run_pipeline
from tidegate.protocol.coordinator import Checkpoint
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.spark.definition import SPARK_PARAMETER
from tidegate.spark.queries import stored_schema
from tidegate.spark.session import StageSessions, forget_yarn

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

_PATIENCE_S: Final = 300.0
_LOOK_EVERY_S: Final = 0.001
# Only Tidegate's trimming makes these safe: a plain chain with them would read ever more files each batch.
_NOT_FOR_PLAIN: Final = ("spark.sql.streaming.fileSink.log.compactInterval",)


class Variant(enum.Enum):
    DEFAULT = "plain, default settings"
    TUNED = "plain, tuned settings"
    TIDEGATE = "tidegate"
    CHAINED = "tidegate, chained"
    UNFORCED = "tidegate, no fsync"


# -- one session, one folder, both gone at exit ----------------------------------------------------


@cache
def workspace() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tidegate-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=workspace(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


EXTRA_SETTINGS: Final[dict[str, str]] = {}
"""What the session of this process has besides, if it is said before it is made: jars cannot be added later."""


@cache
def base_session() -> SparkSession:
    """Spark's defaults; only that it shows no UI, and where it keeps its temporary files."""
    session = (
        SparkSession.builder.master("local[*]")
        .config(map=dict(EXTRA_SETTINGS))
        .appName("tidegate-bench")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.local.dir", str(workspace() / "spark"))
        .config("spark.sql.warehouse.dir", str(workspace() / "warehouse"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    atexit.register(session.stop)  # before the folder goes
    return session


def cpu_s() -> float:
    """Seconds that this process, Spark's and all that those have started took of the cores, in user and system mode."""
    gateway: Any = base_session().sparkContext._gateway
    return time.process_time() + sum(_cpu_s_of(each) for each in _with_children(gateway.proc.pid))


def _with_children(process: int) -> list[int]:
    found = [process]
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it has just ended
            found += [each for child in task.read_text().split() for each in _with_children(int(child))]
    return found


def _cpu_s_of(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def derived_session(settings: dict[str, str] | None = None) -> SparkSession:
    base = base_session()
    derived = SparkSession(base.sparkContext, base._jsparkSession.cloneSession())
    for key, value in (settings or {}).items():
        derived.conf.set(key, value)
    return derived


def plain_session(variant: Variant) -> SparkSession:
    if variant is Variant.DEFAULT:
        return derived_session()
    tuned = StageSessions(base_session()).of_sources
    for key in _NOT_FOR_PLAIN:
        tuned.conf.unset(key)
    return tuned


# -- input -----------------------------------------------------------------------------------------


class Input:
    """The folder that a pipeline's source reads. A file appears in it whole, at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = count()
        folder.mkdir(parents=True, exist_ok=True)

    def offer(self, file: Path) -> None:
        os.link(file, self.folder / f"{next(self._numbers):06d}.parquet")


# -- runs ------------------------------------------------------------------------------------------


class Run(ABC):
    """A pipeline that runs. Leaving it stops its queries at once, without a last checkpoint."""

    def __init__(self, pipeline: Pipeline, folder: Path) -> None:
        self.definitions = pipeline.validated()
        self.pipeline = pipeline
        self.folder = folder

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def checkpoint_folder(self, stage: str) -> Path:
        """Spark's own, of one query."""

    @abstractmethod
    def await_consumed(self, source_rows: int, handed_on: int | None = None) -> None:
        """Wait until every query has consumed all that its source was ever offered: this many rows. `handed_on`: how
        many of them pass the stages that may be chained to it; None: all."""

    @property
    def query_names(self) -> list[str]:
        return [each.name for each in self.definitions]

    @abstractmethod
    def rows_at(self, sink: str) -> int:
        """Rows that a sink's query has written."""

    @abstractmethod
    def check(self) -> None:
        """Raise if it runs no more."""

    def last_batch(self, stage: str) -> int:
        folder = self.checkpoint_folder(stage) / "commits"
        if not folder.is_dir():
            return -1
        return max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=-1)

    def await_batch(self, stage: str, batch: int) -> None:
        path = self.checkpoint_folder(stage) / "commits" / str(batch)
        self.await_that(path.exists)

    def await_that(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        next_check = 0.0
        while not condition():
            now = time.monotonic()
            if now > next_check:
                self.check()
                next_check = now + 0.5
            if now > deadline:
                raise WrongWork(f"nothing came within {_PATIENCE_S:.0f} s")
            time.sleep(_LOOK_EVERY_S)


class PlainRun(Run):
    """`outputs` names the folders of stages whose output is to lie elsewhere than the others'."""

    def __init__(
        self, pipeline: Pipeline, folder: Path, variant: Variant, outputs: Mapping[str, Path] | None = None
    ) -> None:
        super().__init__(pipeline, folder)
        self._session = plain_session(variant)
        self._outputs = outputs or {}
        self.queries: dict[str, StreamingQuery] = {}

    def start(self) -> None:
        schemas: dict[str, StructType] = {}
        for definition in self.definitions:
            inputs = iter(definition.inputs)
            arguments: list[SparkSession | DataFrame] = []
            for parameter in definition.parameters:
                if parameter == SPARK_PARAMETER:
                    arguments.append(self._session)
                else:
                    name = next(inputs)
                    reader = self._session.readStream.schema(schemas[name])
                    arguments.append(reader.parquet(self.output_location(name)))
            frame: DataFrame = definition.function(*arguments)
            schemas[definition.name] = stored_schema(frame.schema)
            self.make_output(definition.name)
            writer = frame.writeStream.format("parquet").outputMode(definition.output_mode)
            writer = writer.option("checkpointLocation", self.checkpoint_location(definition.name))
            self.queries[definition.name] = writer.option("path", self.output_location(definition.name)).start()

    def stop(self) -> None:
        for query in self.queries.values():
            query.stop()

    def _output(self, stage: str) -> Path:
        return self._outputs.get(stage, self.folder / "output" / stage)

    def make_output(self, stage: str) -> None:
        self._output(stage).mkdir(parents=True, exist_ok=True)

    def output_location(self, stage: str) -> str:
        """As Spark is told."""
        return str(self._output(stage))

    def checkpoint_folder(self, stage: str) -> Path:
        return self.folder / "checkpoints" / stage

    def checkpoint_location(self, stage: str) -> str:
        """As Spark is told."""
        return str(self.checkpoint_folder(stage))

    def await_consumed(self, source_rows: int, handed_on: int | None = None) -> None:
        del source_rows, handed_on  # each query knows when it has caught up with the one before
        for query in self.queries.values():
            query.processAllAvailable()

    def rows_at(self, sink: str) -> int:
        return self._session.read.parquet(self.output_location(sink)).count()

    def check(self) -> None:
        for name, query in self.queries.items():
            if not query.isActive:
                raise WrongWork(f"query {name} ended: {query.exception()}")


class _Enough(Exception):
    """Stops a run of Tidegate from within, as a kill would."""


class TidegateRun(Run):
    """`poll_s` is the time that the control thread was busy, `durations_ms` how long each checkpoint took."""

    def __init__(
        self,
        pipeline: Pipeline,
        folder: Path,
        checkpoint_interval: str,
        session: SparkSession | None = None,
        *,
        fsync: bool = True,
        chain: bool = False,
    ) -> None:
        super().__init__(pipeline, folder)
        self.root: Path | str = folder / "root"
        self._chain = chain
        self._session = derived_session() if session is None else session
        self._options: dict[str, Any] = {
            "checkpoint_interval": checkpoint_interval, "fsync": fsync, "chain": chain, "restarts": 0,
        }  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="tidegate-run")
        self._stopping = False
        self._error: BaseException | None = None
        self._generation: Generation | None = None
        self._all_consumed_of = -1
        self.is_settled = False
        self.poll_s = 0.0
        self._is_busy = False
        self.durations_ms: dict[int, int] = {}

    @property
    def generation(self) -> Generation:
        self.await_that(lambda: self._generation is not None)
        assert self._generation is not None
        return self._generation

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()

    def _run(self) -> None:
        plain_poll, plain_go_on, plain_completed = Generation.poll, Generation.go_on, Generation.on_completed

        def completed(
            generation: Generation, record: CheckpointCompleted, checkpoint: Checkpoint, min_watermark_ms: int | None
        ) -> None:
            plain_completed(generation, record, checkpoint, min_watermark_ms)
            self.durations_ms[record.checkpoint_id] = (checkpoint.ended_ms or 0) - checkpoint.triggered_ms

        def poll(generation: Generation) -> None:
            if self._stopping:
                raise _Enough
            with self._busy():
                plain_poll(generation)
            self._look(generation)

        def go_on(generation: Generation) -> None:
            with self._busy():
                plain_go_on(generation)

        try:
            with mock.patch.multiple(Generation, poll=poll, go_on=go_on, on_completed=completed):
                run_pipeline(self.pipeline, self.root, self._session, **self._options)
        except _Enough:
            pass
        except BaseException as error:
            self._error = error

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Whatever it does within it is counted once."""
        was_busy, self._is_busy = self._is_busy, True
        began = time.perf_counter()
        yield
        self._is_busy = was_busy
        self.poll_s += 0.0 if was_busy else time.perf_counter() - began

    def _look(self, generation: Generation) -> None:
        """On the control thread, so that what is seen belongs together."""
        stages = generation.stages.values()
        if all(stage.has_consumed_all for stage in stages):
            self._all_consumed_of = sum(stage.progress.rows for stage in stages if not stage.definition.inputs)
        self.is_settled = generation.is_settled
        self._generation = generation

    def checkpoint_folder(self, stage: str) -> Path:
        return self._generation_folder() / "stages" / self.generation.stages[stage].definition.head / "spark"

    @property
    def query_names(self) -> list[str]:
        return list(self.generation.stages)

    def manifests(self) -> Path:
        return self._generation_folder() / "manifests"

    @property
    def spark_root(self) -> Path:
        """Where Spark lives."""
        return Path(self.root)

    def _generation_folder(self) -> Path:
        return self.spark_root / "generations" / f"{self.generation.generation:06d}"

    def await_consumed(self, source_rows: int, handed_on: int | None = None) -> None:
        awaited = source_rows if handed_on is None or not self._chain else handed_on
        self.await_that(lambda: self._all_consumed_of >= awaited)

    def rows_at(self, sink: str) -> int:
        return self.generation.stages[sink].progress.rows

    def restored_batch(self, stage: str) -> int:
        start = self.generation.stages[stage].start
        return -1 if start is None or start.cut is None else start.cut

    def await_checkpoint_of_all(self) -> None:
        """Wait for a checkpoint that was triggered from now on, and until the tables show it."""
        for _ in range(2):  # the first may have been triggered before
            self._await_manifest_after(self._last_manifest())
        self.await_that(lambda: self.is_settled)

    def _await_manifest_after(self, last: str) -> None:
        self.await_that(lambda: self._last_manifest() > last)

    def _last_manifest(self) -> str:
        return max((path.name for path in self.manifests().glob("*.json")), default="")

    def check(self) -> None:
        if not self._thread.is_alive():
            raise WrongWork(f"the pipeline ended: {self._error}") from self._error


def _set_hadoop(variant: Variant) -> None:
    """Hadoop's settings are the process's: as they come for default settings, as `tidegate run` has them for others."""
    if variant is Variant.DEFAULT:
        context: Any = base_session().sparkContext
        context._jsc.hadoopConfiguration().reloadConfiguration()
    else:
        forget_yarn(base_session())


def open_run(variant: Variant, pipeline: Pipeline, folder: Path, checkpoint_interval: str = "5s") -> Run:
    _set_hadoop(variant)
    if variant in (Variant.DEFAULT, Variant.TUNED):
        return PlainRun(pipeline, folder, variant)
    return TidegateRun(
        pipeline,
        folder,
        checkpoint_interval,
        fsync=variant is not Variant.UNFORCED,
        chain=variant is Variant.CHAINED,
    )
