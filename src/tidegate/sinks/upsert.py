"""Upserts into a Delta table, by Spark: which files a commit replaces, and with what. Rows never leave Spark.

Of the table only the key columns are read whole. Files that hold a key of the epoch's are written again without it,
together with the epoch's rows; the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlparse

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from tidegate.sinks.contract import StagedFile

if TYPE_CHECKING:
    from pyspark.sql import Column

_NAME: Final = "_tidegate_name"
_BATCH: Final = "_tidegate_batch"
_ROW: Final = "_tidegate_row"
_DEFAULT_SHUFFLE_PARTITIONS: Final = "200"


class Upsert:
    """One commit's: the rows of some staged files into a table."""

    def __init__(
        self,
        session: SparkSession,
        path: Path,
        schema: StructType,
        files: Sequence[str],
        key: Sequence[str],
        partition_by: Sequence[str],
    ) -> None:
        """`files`: those of the table, by their path in it."""
        # A session of our own: what must be set for the table is nobody else's business.
        self._session = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())
        self._session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        if self._session.conf.get("spark.sql.shuffle.partitions") == _DEFAULT_SHUFFLE_PARTITIONS:
            self._session.conf.set("spark.sql.shuffle.partitions", str(session.sparkContext.defaultParallelism))
        self._path = path
        self._key = tuple(key)
        self._partition_by = tuple(partition_by)
        self._schema = schema
        self._files = files

    def write(self, fresh: Sequence[StagedFile], folder: Path) -> list[str]:
        """Write what the table shows next, of the keys' files, to a folder. Returns the files that it replaces."""
        latest = self._latest(fresh).cache()
        try:
            replaced = self._files_with(latest)
            result = latest
            if replaced:
                rows = self._read(replaced).alias("rows")
                result = rows.join(latest.alias("latest"), self._same_key("rows", "latest"), "left_anti")
                result = result.unionByName(latest)
            writing = result.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
            writing.partitionBy(*self._partition_by).parquet(str(folder))
            return replaced
        finally:
            latest.unpersist()

    def _latest(self, fresh: Sequence[StagedFile]) -> DataFrame:
        """Of each key, the row of the last batch."""
        batches = self._session.createDataFrame(
            [(Path(file.path).name, file.batch) for file in fresh], f"{_NAME} string, {_BATCH} long"
        )
        staged = self._session.read.schema(self._schema).parquet(*(file.path for file in fresh))
        named = staged.withColumn(_NAME, F.element_at(F.split("_metadata.file_path", "/"), -1))
        newest = F.max_by(F.struct(*(F.col(f"`{name}`") for name in self._schema.names)), F.col(_BATCH)).alias(_ROW)
        grouped = named.join(F.broadcast(batches), _NAME).groupBy(*(F.col(f"`{name}`") for name in self._key))
        return grouped.agg(newest).select(f"{_ROW}.*")

    def _files_with(self, latest: DataFrame) -> list[str]:
        """The table's files that hold a key of these rows."""
        if not self._files:
            return []
        rows = self._read(self._files).withColumn(_NAME, F.col("_metadata.file_path")).alias("rows")
        hit = rows.join(latest.alias("latest"), self._same_key("rows", "latest"), "left_semi")
        uris = [row[_NAME] for row in hit.select(_NAME).distinct().collect()]
        return [Path(unquote(urlparse(uri).path)).relative_to(self._path).as_posix() for uri in uris]

    def _read(self, files: Sequence[str]) -> DataFrame:
        reader = self._session.read.schema(self._schema).option("basePath", str(self._path))
        return reader.parquet(*(str(self._path / name) for name in files))

    def _same_key(self, left: str, right: str) -> Column:
        condition = F.lit(True)
        for name in self._key:  # null is a key like any other
            condition = condition & F.col(f"{left}.`{name}`").eqNullSafe(F.col(f"{right}.`{name}`"))
        return condition
