"""From a stage's function to its Spark query."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException
from pyspark.sql.types import NullType, StructField, StructType

from tidegate.errors import InvalidPipeline
from tidegate.spark.pipeline import SPARK_PARAMETER, StageDefinition
from tidegate.spark.session import StageSessions
from tidegate.spark.stage import BATCH_FOLDER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_WATERMARK_METADATA: Final = "spark.watermarkDelayMs"

# Sequence numbers stand where Spark expects milliseconds: it forgets files that are a million segments old.
_MAX_FILE_AGE: Final = "1000s"


def stored_schema(schema: StructType) -> StructType:
    """A stage's schema as its readers see it: a watermark is each reader's own to define."""
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


def read_gate(session: SparkSession, gate: Path, schema: StructType) -> DataFrame:
    return (
        session.readStream.schema(schema)
        .option("recursiveFileLookup", "true")
        .option("maxFileAge", _MAX_FILE_AGE)
        .parquet(str(gate))
    )


def build(
    definition: StageDefinition,
    sessions: StageSessions,
    gates: dict[str, Path],
    schemas: dict[str, StructType],
) -> DataFrame:
    """Call the user's function, and check what it returns."""
    session = sessions.of_stages if definition.inputs else sessions.of_sources
    inputs = iter(definition.inputs)
    arguments: list[object] = []
    for parameter in definition.parameters:
        if parameter == SPARK_PARAMETER:
            arguments.append(session)
        else:
            name = next(inputs)
            arguments.append(read_gate(session, gates[name], schemas[name]))
    what = f"{definition.kind} {definition.name!r}"
    try:
        frame = definition.function(*arguments)
    except PySparkException as error:
        raise InvalidPipeline(f"{what} does not fit its input: {_first_line(error)}") from error
    if not hasattr(frame, "isStreaming") or not hasattr(frame, "writeStream"):
        raise InvalidPipeline(f"{what} returned {type(frame).__name__}; it must return a streaming DataFrame")
    if not frame.isStreaming:
        raise InvalidPipeline(f"{what} returned a DataFrame that is not streaming; start it from a stream it reads")
    _check_columns(what, frame.schema)
    _check_output_mode(what, definition, frame)
    result: DataFrame = frame
    return result


def _check_columns(what: str, schema: StructType) -> None:
    lowered = [name.lower() for name in schema.names]
    twice = [name for name in schema.names if lowered.count(name.lower()) > 1]
    if twice:
        raise InvalidPipeline(f"{what} has two columns called {twice[0]!r}; rename or drop one")
    for field in schema.fields:
        if isinstance(field.dataType, NullType):
            raise InvalidPipeline(f"{what}: column {field.name!r} has no type (it is always null); cast it")


def _check_output_mode(what: str, definition: StageDefinition, frame: DataFrame) -> None:
    """Ask Spark's own check, which it otherwise makes only when the query starts."""
    jvm = frame.sparkSession._jvm
    assert jvm is not None
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    mode = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[definition.output_mode]()
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    try:
        checker.checkForStreaming(frame._jdf.queryExecution().analyzed(), mode)
    except PySparkException as error:
        raise InvalidPipeline(
            f"{what} cannot have output_mode {definition.output_mode!r}: {_first_line(error)}"
        ) from error


def _first_line(error: PySparkException) -> str:
    return str(error).split("\n", 1)[0].strip()[:400]


def start(
    definition: StageDefinition, frame: DataFrame, checkpoint: Path, output: Path, *, available_now: bool
) -> StreamingQuery:
    """Start the stage's query: native Parquet files in append mode, a folder per batch in the others."""
    writer = frame.writeStream.queryName(definition.name).outputMode(definition.output_mode)
    writer = writer.option("checkpointLocation", str(checkpoint))
    if available_now:
        writer = writer.trigger(availableNow=True)
    if definition.output_mode != "append":

        def write(batch: DataFrame, batch_id: int) -> None:
            writing = batch.write.mode("overwrite").option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
            writing.parquet(str(output / f"{BATCH_FOLDER}{batch_id}"))

        return writer.foreachBatch(write).start()
    if definition.sink is not None and definition.sink.partition_by:
        writer = writer.partitionBy(*definition.sink.partition_by)
    return writer.format("parquet").option("path", str(output)).start()
