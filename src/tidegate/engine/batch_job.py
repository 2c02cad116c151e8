"""A pipeline as one batch job over the same input: what its tables must hold once all of it is consumed.

The same functions are called, with streams read as plain tables. A watermark means nothing to a batch job: it also
has the windows that a stream would still hold open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.engine.pipeline import Pipeline
from tidegate.spark.definition import SPARK_PARAMETER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class _BatchSession:
    """A session whose streams are read as plain tables."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, "read" if name == "readStream" else name)


def batch_job(pipeline: Pipeline, session: SparkSession) -> dict[str, DataFrame]:
    """The rows of every sink's table."""
    definitions = pipeline.validated()
    frames: dict[str, DataFrame] = {}
    for definition in definitions:
        inputs = iter(definition.inputs)
        arguments: list[Any] = [
            _BatchSession(session) if parameter == SPARK_PARAMETER else frames[next(inputs)]
            for parameter in definition.parameters
        ]
        frames[definition.name] = definition.function(*arguments)
    return {each.name: frames[each.name] for each in definitions if each.kind == "sink"}
