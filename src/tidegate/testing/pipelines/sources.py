"""Sources that read a test's rows from files, in the place of what they would read.

A source's function is called for nothing but the columns that it returns: with a session whose streams, where their
columns are known beforehand, are of a folder without files. So no broker is asked, and no path has to be there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import StructType

from tidegate.errors import InvalidPipeline, InvariantViolation
from tidegate.spark.definition import StageDefinition
from tidegate.spark.queries import frame_of, stored_schema
from tidegate.testing.pipelines.rows import Rows, as_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_KAFKA: Final = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int"
)
_KAFKA_HEADERS: Final = ", headers array<struct<key: string, value: binary>>"


class _Reader:
    """Takes down how a stream is to be read, and gives one of the same columns that reads nothing.

    What has no columns before it is read (a table, the rate source, a data source of the user's) is asked itself.
    """

    def __init__(self, session: SparkSession, nothing: Path) -> None:
        self._session = session
        self._nothing = nothing
        self._real = session.readStream
        self._format = ""
        self._schema: StructType | str | None = None
        self._options: dict[str, str] = {}

    def format(self, source: str) -> _Reader:
        self._real.format(source)
        self._format = source.lower()
        return self

    def schema(self, schema: StructType | str) -> _Reader:
        self._real.schema(schema)
        self._schema = schema
        return self

    def option(self, key: str, value: Any) -> _Reader:
        return self.options(**{key: value})

    def options(self, **options: Any) -> _Reader:
        self._real.options(**options)
        self._options |= {key.lower(): str(value).lower() for key, value in options.items()}
        return self

    def load(
        self,
        path: str | None = None,
        format: str | None = None,  # noqa: A002 - as Spark calls it
        schema: Any = None,
        **options: Any,
    ) -> DataFrame:
        if format is not None:
            self.format(format)
        self.options(**options)
        columns = schema or self._schema or self._known_columns()
        return self._real.load(path) if columns is None else self._of_nothing(columns)

    def _known_columns(self) -> str | None:
        if self._format == "kafka":
            return _KAFKA + (_KAFKA_HEADERS if self._options.get("includeheaders") == "true" else "")
        return "value string" if self._format == "text" else None

    def _of_nothing(self, columns: StructType | str) -> DataFrame:
        return self._session.readStream.schema(columns).parquet(str(self._nothing))

    def json(self, path: str, schema: Any = None, **options: Any) -> DataFrame:
        return self.load(path, "json", schema, **options)

    def csv(self, path: str, schema: Any = None, **options: Any) -> DataFrame:
        return self.load(path, "csv", schema, **options)

    def xml(self, path: str, rowTag: str | None = None, schema: Any = None, **options: Any) -> DataFrame:  # noqa: N803
        return self.load(path, "xml", schema, **options, **({} if rowTag is None else {"rowTag": rowTag}))

    def parquet(self, path: str, **options: Any) -> DataFrame:
        return self.load(path, "parquet", None, **options)

    def orc(self, path: str, **options: Any) -> DataFrame:
        return self.load(path, "orc", None, **options)

    def text(self, path: str, **options: Any) -> DataFrame:
        return self.load(path, "text", None, **options)

    def table(self, name: str) -> DataFrame:
        return self._real.table(name)


class _Session:
    """The session, but for its streams."""

    def __init__(self, session: SparkSession, nothing: Path) -> None:
        self._session = session
        self._nothing = nothing

    def __getattr__(self, name: str) -> Any:
        return _Reader(self._session, self._nothing) if name == "readStream" else getattr(self._session, name)


def _reads_nothing(name: str) -> DataFrame:
    raise InvariantViolation(f"a source has no input, not {name!r}")


def columns_of_source(
    definition: StageDefinition, session: SparkSession, folder: Path, given: Mapping[str, StructType | str]
) -> StructType:
    """What its function returns, or what the test says that it does."""
    nothing = folder / "nothing"
    nothing.mkdir(exist_ok=True)
    if definition.name in given:
        return stored_schema(session.readStream.schema(given[definition.name]).parquet(str(nothing)).schema)
    stands_in: Any = _Session(session, nothing)
    try:
        return stored_schema(frame_of(definition, stands_in, _reads_nothing).schema)
    except InvalidPipeline as error:
        raise InvalidPipeline(
            f"{error}. In a test a source is asked for its columns alone: if it cannot be asked here, say them with "
            f"schemas={{{definition.name!r}: '…'}}"
        ) from error


class FedSource:
    """A source that reads files of rows, in the order in which they are put there: each is a batch."""

    def __init__(self, name: str, schema: StructType, folder: Path) -> None:
        self.name = name
        self.schema = schema
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        self.batches = 0

    def put(self, table: Any) -> None:
        """Rows, as pyarrow has them. Spark passes over names that start with a dot."""
        hidden = self._folder / f".{self.batches:06d}"
        importlib.import_module("pyarrow.parquet").write_table(table, hidden)
        hidden.rename(self._folder / f"{self.batches:06d}.parquet")
        self.batches += 1

    def checked(self, what: str, rows: Rows) -> Any:
        """The same as `put` takes; None if there are none."""
        return as_arrow(what, rows, self.schema)

    def read(self, spark: SparkSession) -> DataFrame:
        """The function of the source in a test."""
        reader = spark.readStream.schema(self.schema).option("maxFilesPerTrigger", "1")
        return reader.parquet(str(self._folder))
