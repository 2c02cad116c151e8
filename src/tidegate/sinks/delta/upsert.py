"""Upserts into a Delta table, by Spark: which files a commit replaces, and with what. Rows never leave Spark.

Files that hold a key of the epoch's are written again without it, together with the epoch's rows; the others stay as
they are. Which ones those are is first asked of the bounds that the table's log has, then of the key columns. Where
the bounds leave little, all of that is written again: looking would cost more, and small files become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructType

from tidegate.sinks.contract import StagedFile
from tidegate.sinks.delta.combining import files_wanted
from tidegate.sinks.delta.home import Shelf
from tidegate.sinks.delta.scan import FILE, TableFile, path_of, scan
from tidegate.sinks.delta.statistics import Bounds, bounds_of_files, may_hold
from tidegate.sinks.sessions import frame_of, table_session
from tidegate.sinks.staging import quoted, read_files, refuse_null_folder

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

_BATCH: Final = "_tidegate_batch"
_ROW: Final = "_tidegate_row"
_LITTLE_BYTES: Final = 1 << 20


class Upsert:
    """One commit's: the rows of some staged files into a table."""

    def __init__(
        self,
        session: SparkSession,
        shelf: Shelf,
        schema: StructType,
        files: Sequence[TableFile],
        key: Sequence[str],
        partition_by: Sequence[str],
        newest_by: Sequence[str] = (),
        target: int | None = None,
    ) -> None:
        """`target`: how large the files are to be that it writes."""
        self._session = table_session(session)
        self._shelf = shelf
        self._key = tuple(key)
        self._partition_by = tuple(partition_by)
        self._newest_by = tuple(newest_by)
        self._schema = schema
        self._files = files
        self._target = target

    def write(
        self, fresh: Sequence[StagedFile], folder: Path | str, keys: dict[str, Bounds] | None = None
    ) -> list[str]:
        """Write what the table shows next, of the keys' files, to a folder. Returns the files that it replaces. `keys`:
        the bounds of those that were staged, where these files are not on this machine.

        Nothing is written where all that the table has is newer.
        """
        latest = self._latest(fresh).cache()
        cached = [latest]
        try:
            replaced = self._candidates(fresh, keys)
            if self._newest_by and replaced:
                latest = self._not_older(latest, replaced).cache()
                cached.append(latest)
                if latest.isEmpty():
                    return []
            if sum(file.size for file in replaced) > _LITTLE_BYTES:
                replaced = self._with_a_key_of(latest, replaced)
            result = latest
            if replaced:
                rows = self._read(replaced).drop(FILE).alias("rows")
                result = rows.join(latest.alias("latest"), self._same_key("rows", "latest"), "left_anti")
                result = result.unionByName(latest)
            result = refuse_null_folder(result, self._partition_by)  # another writer may have written one
            if self._target is not None:
                size = sum(file.size for file in replaced) + sum(file.size_bytes for file in fresh)
                result = result.coalesce(files_wanted(size, self._target))
            writing = result.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
            writing.partitionBy(*self._partition_by).parquet(str(folder))
            return [file.path for file in replaced]
        finally:
            for frame in cached:
                frame.unpersist()

    def _latest(self, fresh: Sequence[StagedFile]) -> DataFrame:
        """Of each key, the newest row; of equally new ones that of the last batch."""
        order = F.struct(*self._columns(self._newest_by), F.col(_BATCH))
        newest = F.max_by(F.struct(*self._columns(self._schema.names)), order).alias(_ROW)
        return self._staged(fresh).groupBy(*self._columns(self._key)).agg(newest).select(f"{_ROW}.*")

    def conflict(self, fresh: Sequence[StagedFile]) -> dict[str, Any] | None:
        """A key of which a batch has different rows that are the newest; None: there is none."""
        rows = self._staged(fresh)
        by = (F.col(_BATCH), *self._columns(self._key))
        # The key columns alone are read first, and most often that is all.
        if rows.groupBy(*by).count().where(F.col("count") > 1).isEmpty():
            return None
        newest = F.struct(F.lit(0), *self._columns(self._newest_by))
        rivals = rows.withColumn(_ROW, newest == F.max(newest).over(Window.partitionBy(*by))).where(_ROW)
        row = F.struct(*(_comparable(F.col(quoted(field.name)), field.dataType) for field in self._schema.fields))
        different = rivals.groupBy(*by).agg((F.min(row) < F.max(row)).alias(_ROW)).where(_ROW)
        found = different.select(*self._columns(self._key)).first()
        return None if found is None else found.asDict()

    def _not_older(self, latest: DataFrame, files: Sequence[TableFile]) -> DataFrame:
        """Those of the rows that are at least as new as what these files have of their keys."""
        rows = self._read(files).alias("rows")
        newer = self._newest_of("rows") > self._newest_of("latest")
        return latest.alias("latest").join(rows, self._same_key("rows", "latest") & newer, "left_anti")

    def _newest_of(self, alias: str) -> Column:
        """By what rows are ordered: a null comes before all values, NaN after them."""
        return F.struct(*(F.col(f"{alias}.{quoted(name)}").alias(f"c{n}") for n, name in enumerate(self._newest_by)))

    def _columns(self, names: Sequence[str]) -> list[Column]:
        return [F.col(quoted(name)) for name in names]

    def _staged(self, fresh: Sequence[StagedFile]) -> DataFrame:
        """The rows of some files, each with its batch."""
        batches = frame_of(
            self._session,
            [(Path(file.path).name, file.batch) for file in fresh],
            f"{FILE} string, {_BATCH} long",
        )
        staged = read_files(self._session, self._schema, (file.path for file in fresh))
        named = staged.withColumn(FILE, staged.metadataColumn("_metadata").getField("file_name"))
        for name in self._partition_by:
            if isinstance(self._schema[name].dataType, StringType):
                # The value of a partition cannot be empty: the table shows null, which is then the key.
                named = named.withColumn(name, F.nullif(F.col(quoted(name)), F.lit("")))
        return named.join(F.broadcast(batches), FILE)

    def _candidates(self, fresh: Sequence[StagedFile], keys: dict[str, Bounds] | None) -> list[TableFile]:
        """The table's files that may hold a key of these rows, by their bounds."""
        wanted = bounds_of_files((Path(file.path) for file in fresh), self._key) if keys is None else keys
        return [file for file in self._files if may_hold(file.bounds, wanted)]

    def _with_a_key_of(self, latest: DataFrame, files: Sequence[TableFile]) -> list[TableFile]:
        """Those of the files that hold a key of these rows."""
        by_path = {self._shelf.known_as(file.path): file for file in files}
        rows = self._read(files).alias("rows")
        hit = rows.join(latest.alias("latest"), self._same_key("rows", "latest"), "left_semi")
        return [by_path[path_of(row[FILE])] for row in hit.select(FILE).distinct().collect()]

    def _read(self, files: Sequence[TableFile]) -> DataFrame:
        return scan(self._session, self._shelf, self._schema, files)

    def _same_key(self, left: str, right: str) -> Column:
        condition = F.lit(True)
        for name in self._key:  # null is a key like any other
            condition = condition & F.col(f"{left}.{quoted(name)}").eqNullSafe(F.col(f"{right}.{quoted(name)}"))
        return condition


def _comparable(column: Column, kind: DataType) -> Column:
    """A column as a value that Spark can compare: a map as its entries, which have no order of their own."""
    if isinstance(kind, MapType):
        key, value = kind.keyType, kind.valueType
        entries = F.transform(
            F.map_entries(column),
            lambda entry: F.struct(_comparable(entry["key"], key), _comparable(entry["value"], value)),
        )
        return F.sort_array(entries)
    if isinstance(kind, ArrayType):
        inner = kind.elementType
        return F.transform(column, lambda each: _comparable(each, inner))
    if isinstance(kind, StructType):
        fields = (_comparable(column.getField(field.name), field.dataType) for field in kind.fields)
        return F.when(column.isNotNull(), F.struct(*fields))
    return column
