"""From a stage's function to its Spark query."""

from __future__ import annotations

import importlib
import re
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import NullType, StructField, StructType

from tidegate.errors import InvalidPipeline, TidegateError, first_line
from tidegate.sinks.contract import BoundSink, FileSink
from tidegate.sinks.staging import refuse_null_folder
from tidegate.spark.causes import objection_of, without_pysparks_log
from tidegate.spark.chaining import children_of, only_passes_on, sealed_off
from tidegate.spark.definition import SPARK_PARAMETER, StageDefinition
from tidegate.spark.filelog import StageSource
from tidegate.spark.gate import COMPACT_EVERY, WINDOW
from tidegate.spark.jvm import java_class
from tidegate.spark.output import batch_folder
from tidegate.spark.s3a import mount
from tidegate.spark.session import StageSessions
from tidegate.spark.sources import (
    STREAM_V1,
    check_folder,
    log_numbers,
    stream_leaves,
    streams_read,
    without_secrets,
    working_folder,
)
from tidegate.storage.files import Files
from tidegate.storage.manifest import SourceStream
from tidegate.storage.mounted import for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_Py4JError: Any = importlib.import_module("py4j.protocol").Py4JError  # it has no types

_WATERMARK_METADATA: Final = "spark.watermarkDelayMs"
_WITHOUT_WATERMARK: Final = re.compile("without (a )?watermark")
_WATERMARK_ADVICE: Final = (
    "call withWatermark in this stage, even if one before it has: a watermark is each stage's own"
)
_KAFKA_ADVICE: Final = (
    "that is Spark's connector: give --conf spark.jars.packages=org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0 to "
    "tidegate run, or take a session that has it"
)

UNTIL_STOPPED: Final[Mapping[str, bool]] = {}
AVAILABLE_NOW: Final[Mapping[str, bool]] = {"availableNow": True}
ONE_BATCH: Final[Mapping[str, bool]] = {"once": True}
"""Until when a query runs."""

# Sequence numbers stand where Spark expects milliseconds: it forgets files that are this many segments old. Those
# that it may meet again, in a gate's log since the last compaction, are an eighth of them at most.
_MAX_FILE_AGE: Final = f"{8 * WINDOW * COMPACT_EVERY}ms"


def stored_schema(schema: StructType) -> StructType:
    """A schema without watermarks, and with nullable columns, which is how files are read."""
    return StructType(
        [
            StructField(
                field.name,
                field.dataType,
                True,
                {key: value for key, value in field.metadata.items() if key != _WATERMARK_METADATA},
            )
            for field in schema.fields
        ]
    )


def read_gate(session: SparkSession, gate: Files, schema: StructType) -> DataFrame:
    return (
        session.readStream.schema(schema)
        .option("recursiveFileLookup", "true")
        .option("maxFileAge", _MAX_FILE_AGE)
        .parquet(for_spark(gate))
    )


class Built(msgspec.Struct, frozen=True):
    """A stage's DataFrame, and its sources in Spark's order, where they read other stages.

    `streams` are those that it reads otherwise. `aggregates`: all that it reads goes into groups. `has_event_time`: a
    stream in it has a watermark, of its own, because those of inputs end with them.
    """

    frame: DataFrame
    sources: tuple[StageSource, ...]
    streams: tuple[SourceStream, ...] = ()
    aggregates: bool = False
    has_event_time: bool = False

    @property
    def schema(self) -> StructType:
        """As the stage's readers see it: a watermark is each reader's own to define."""
        return stored_schema(self.frame.schema)


def build(
    definition: StageDefinition,
    sessions: StageSessions,
    gates: dict[str, Files],
    schemas: dict[str, StructType],
) -> Built:
    """Call the user's function, and check what it returns."""
    session = sessions.of_stages if definition.inputs else sessions.of_sources
    frame = frame_of(definition, session, lambda name: read_gate(session, gates[name], schemas[name]))
    what = _what(definition)
    plan = frame._jdf.queryExecution().analyzed()
    if not gates:
        _check_source(what, frame)
        if definition.folder is not None:
            check_folder(what, frame, definition.folder)
        return Built(frame, (), streams_read(definition.name, frame), has_event_time=_has_watermark(plan))
    return Built(frame, _sources(what, frame, gates), aggregates=_aggregates(plan), has_event_time=_has_watermark(plan))


def build_onto(definition: StageDefinition, read: Built, *, is_sealed_off: bool) -> Built | None:
    """The same in the query of its input; None if it cannot be there. `is_sealed_off`: that has state of its own."""
    input_name = definition.inputs[0]
    frame = sealed_off(read.frame, input_name) if is_sealed_off else read.frame
    try:
        built = frame_of(definition, read.frame.sparkSession, lambda _: frame)
    except InvalidPipeline:
        return None  # it is called by itself, and will say what is wrong
    return Built(built, read.sources, has_event_time=read.has_event_time) if only_passes_on(built, frame) else None


def _what(definition: StageDefinition) -> str:
    return f"{definition.kind} {definition.name!r}"


def frame_of(definition: StageDefinition, session: SparkSession, read: Callable[[str], DataFrame]) -> DataFrame:
    """What a stage's function returns, where it is something that can run."""
    inputs = iter(definition.inputs)
    arguments = [session if parameter == SPARK_PARAMETER else read(next(inputs)) for parameter in definition.parameters]
    what = _what(definition)
    try:
        with without_pysparks_log():
            frame = definition.function(*arguments)
    except TidegateError:
        raise
    except (PySparkException, _Py4JError) as error:
        raise InvalidPipeline(_refused(what, definition, error, session)) from error
    except Exception as error:
        raise InvalidPipeline(f"{what} failed{_where(error)}: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(frame, DataFrame):
        raise InvalidPipeline(f"{what} returned {type(frame).__name__}; it must return a streaming DataFrame")
    if not frame.isStreaming:
        raise InvalidPipeline(f"{what} returned a DataFrame that is not streaming; start it from a stream it reads")
    _check_columns(what, frame)
    _check_output_mode(what, definition, frame)
    return frame


def _refused(what: str, definition: StageDefinition, error: Exception, session: SparkSession) -> str:
    """What Spark refuses to a stage's function, in words that say what to do where those of Spark do not."""
    condition = error.getCondition() if isinstance(error, PySparkException) else None
    if isinstance(error, PySparkException) and condition == "PATH_NOT_FOUND":
        path = (error.getMessageParameters() or {}).get("path", "")
        will_do = "" if definition.inputs else ", an empty folder will do"
        return (
            f"{what} reads {without_secrets(path)}, which is not there{_where(error)}: create it{will_do}; or correct "
            f"the path (relative paths are taken from {working_folder(session).getPath()})"
        )
    verb = "does not fit its input" if definition.inputs else "failed"
    advice = f"; {_KAFKA_ADVICE}" if condition == "KAFKA_DATA_SOURCE_NOT_ENABLED" else ""
    return f"{what} {verb}{_where(error)}: {objection_of(error)}{advice}"


def _aggregates(plan: Any) -> bool:
    """Whether every stream below comes through an aggregation."""
    if plan.nodeName() == "Aggregate" or not plan.isStreaming():
        return True
    children = children_of(plan)
    return bool(children) and all(map(_aggregates, children))


def _has_watermark(plan: Any) -> bool:
    """Whether a stream below has event time."""
    if not plan.isStreaming():
        return False
    return plan.nodeName() == "EventTimeWatermark" or any(map(_has_watermark, children_of(plan)))


def _option(frame: DataFrame, leaf: Any, name: str) -> str | None:
    """An option of a stream, if it is of a file source."""
    if leaf.nodeName() != STREAM_V1:
        return None
    options = java_class(frame.sparkSession, "org.apache.spark.sql.catalyst.util.CaseInsensitiveMap")
    found = options(leaf.dataSource().options()).get(name)
    return str(found.get()) if found.isDefined() else None


def _check_source(what: str, frame: DataFrame) -> None:
    """A source must be able to go back to a checkpoint, though Spark has committed batches since."""
    for leaf in stream_leaves(frame):
        cleaning = _option(frame, leaf, "cleanSource") or "off"
        if cleaning.lower() != "off":
            raise InvalidPipeline(
                f"{what} has cleanSource={cleaning}: files of a batch would be gone that a restart reads again; leave "
                f"the option out, and remove old files otherwise"
            )


def _sources(what: str, frame: DataFrame, gates: dict[str, Files]) -> tuple[StageSource, ...]:
    """The streaming sources, as Spark orders and numbers them: by the plan's leaves, equal ones being one source."""
    names = {for_spark(gate): name for name, gate in gates.items()}
    found: list[StageSource] = []
    for leaf, log in zip(stream_leaves(frame), log_numbers(frame), strict=True):
        name = names.get(_option(frame, leaf, "path") or "")
        if name is None:
            raise InvalidPipeline(f"{what} reads a stream of its own; make a source of it, and take that as an input")
        found.append(StageSource(name, log))
    unread = gates.keys() - {source.input for source in found}
    if unread:
        raise InvalidPipeline(f"{what} takes {min(unread)!r} but does not read it; use it, or leave it out")
    return tuple(found)


def _check_columns(what: str, frame: DataFrame) -> None:
    schema = frame.schema
    lowered = [name.lower() for name in schema.names]
    twice = [name for name in schema.names if lowered.count(name.lower()) > 1]
    if twice:
        raise InvalidPipeline(f"{what} has two columns called {twice[0]!r}; rename or drop one")
    for field in schema.fields:
        if isinstance(field.dataType, NullType):
            raise InvalidPipeline(f"{what}: column {field.name!r} has no type (it is always null); cast it")
    format_of = java_class(frame.sparkSession, "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat")
    parquet = format_of()
    types = frame._jdf.schema()
    if parquet.supportDataType(types):
        return
    for index, field in enumerate(schema.fields):
        if not parquet.supportDataType(types.apply(index).dataType()):
            kind = field.dataType.simpleString()
            raise InvalidPipeline(f"{what}: column {field.name!r} is {kind}, which Parquet cannot hold; cast it")


def _check_output_mode(what: str, definition: StageDefinition, frame: DataFrame) -> None:
    """Ask Spark's own check, which it otherwise makes only when the query starts."""
    modes = java_class(frame.sparkSession, "org.apache.spark.sql.streaming.OutputMode")
    mode = getattr(modes, definition.output_mode.capitalize())()
    checker = java_class(frame.sparkSession, "org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker")
    try:
        checker.checkForStreaming(frame._jdf.queryExecution().analyzed(), mode)
    except PySparkException as error:
        said = objection_of(error)
        advice = f"; {_WATERMARK_ADVICE}" if _WITHOUT_WATERMARK.search(said) else ""
        mode_given = f"output_mode {definition.output_mode!r}"
        raise InvalidPipeline(f"{what} cannot run as a stream in {mode_given}: {said}{advice}") from error


def _where(error: Exception) -> str:
    """The last line of the user's that was reached: of the file that the function, which we have called, is in."""
    called = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in called if frame.filename == called[0].filename]
    return f" at {own[-1].filename}, line {own[-1].lineno}" if own else ""


def starting(
    definition: StageDefinition,
    frame: DataFrame,
    sink: BoundSink | None,
    stage_rows: Callable[[DataFrame, int], None] | None,
    *,
    trigger: Mapping[str, bool],
) -> Callable[[Files, Files], StreamingQuery]:
    """What starts the stage's query on folders for Spark's checkpoint and for its output, as often as it is called.

    It writes native Parquet files in append mode, a folder per batch in the others. `stage_rows` stages the batches of
    a `sink` that does so itself. `trigger`: until when it runs, as Spark takes it; until it is stopped where it is
    empty.
    """
    partition_by: tuple[str, ...] = ()
    if isinstance(sink, FileSink):
        frame = refuse_null_folder(frame, sink.folders_by)
        partition_by = sink.partition_by

    def start(checkpoint: Files, output: Files) -> StreamingQuery:
        mount(frame.sparkSession, checkpoint, output)
        writer = frame.writeStream.queryName(definition.name).outputMode(definition.output_mode)
        writer = writer.option("checkpointLocation", for_spark(checkpoint))
        if trigger:
            writer = writer.trigger(**trigger)
        if stage_rows is not None:
            return writer.foreachBatch(stage_rows).start()
        if definition.output_mode != "append":

            def write(batch: DataFrame, batch_id: int) -> None:
                writing = batch.write.mode("overwrite")
                writing = writing.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
                writing.partitionBy(*partition_by).parquet(for_spark(output, batch_folder(batch_id)))

            return writer.foreachBatch(write).start()
        if partition_by:
            writer = writer.partitionBy(*partition_by)
        return writer.format("parquet").option("path", for_spark(output)).start()

    return start


def first_metadata(session: SparkSession) -> str:
    """What Spark notes beside where a first batch reads to: the settings that the query goes on with ever after."""
    noting = java_class(session, "org.apache.spark.sql.execution.streaming.checkpointing.OffsetSeqMetadata")
    noted = msgspec.json.decode(noting.apply(0, time.time_ns() // 1_000_000, session._jsparkSession.conf()).json())
    # What is set for each query by itself has no value yet: it is what the session has by that name.
    settings = {key: session.conf.get(key) if value is None else value for key, value in noted["conf"].items()}
    return msgspec.json.encode({**noted, "conf": settings}).decode()
