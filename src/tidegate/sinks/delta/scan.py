"""The files of a Delta table, read by Spark, which needs no package for Delta that way.

The value of a partition is what the table's log says, not what the name of a folder says: each writer names folders in
a way of its own, and Spark reads only its own.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import deltalake
import msgspec

from tidegate.sinks.delta.home import Shelf
from tidegate.sinks.delta.statistics import Bounds, bounds_in_log
from tidegate.sinks.staging import quoted, read_files

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

FILE: Final = "_tidegate_file"
_KNOWN: Final = "_tidegate_known"


def columns_of(schema: deltalake.Schema) -> StructType:
    """A table's columns, as Spark has them."""
    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(schema.to_json()))


class TableFile(msgspec.Struct, frozen=True):
    """A file of a table's version: its path in the table, its values of the partition columns, bounds of others."""

    path: str
    partition: dict[str, Any]
    size: int
    modified_ms: int
    bounds: dict[str, Bounds]


def active_files(table: deltalake.DeltaTable, bounded: Sequence[str] = ()) -> list[TableFile]:
    """With the bounds of these columns, as far as the log tells."""
    actions = importlib.import_module("pyarrow").table(table.get_add_actions())
    paths = (unquote(path) for path in actions.column("path").to_pylist())
    partition_by = table.metadata().partition_columns
    partitions = actions.column("partition").to_pylist() if partition_by else ({} for _ in range(actions.num_rows))
    sizes = actions.column("size_bytes").to_pylist()
    modified_ms = actions.column("modification_time").to_pylist()
    bounds = bounds_in_log(actions, partition_by, bounded)
    return [TableFile(*each) for each in zip(paths, partitions, sizes, modified_ms, bounds, strict=True)]


def scan(session: SparkSession, shelf: Shelf, schema: StructType, files: Sequence[TableFile]) -> DataFrame:
    """The rows of some files of a table. Beside the table's columns `FILE` has each row's file, see `path_of`."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    from tidegate.sinks.sessions import frame_of

    by = tuple(files[0].partition)
    shelf.bring(file.path for file in files)
    stored = StructType([field for field in schema.fields if field.name not in by])
    rows = read_files(session, stored, (shelf.at(file.path) for file in files))
    rows = rows.withColumn(FILE, file_of(rows))
    if by:
        values = {shelf.known_as(file.path): [file.partition[name] for name in by] for file in files}
        known = frame_of(
            session,
            [(as_in_rows(uri), *values[path_of(uri)]) for uri in rows.inputFiles()],
            StructType([StructField(_KNOWN, StringType()), *(StructField(name, schema[name].dataType) for name in by)]),
        )
        rows = rows.join(F.broadcast(known), F.col(FILE) == F.col(_KNOWN), "left")
        for name in by:  # rather no answer than a null for a value
            unknown = F.raise_error(F.concat(F.lit("a file that the table does not have: "), F.col(FILE)))
            value = F.when(F.col(_KNOWN).isNull(), unknown).otherwise(F.col(quoted(name)))
            rows = rows.withColumn(name, value)
    return rows.select(*(F.col(quoted(name)) for name in schema.names), FILE)


def file_of(rows: DataFrame) -> Column:
    """The address of each row's file."""
    return rows.metadataColumn("_metadata").getField("file_path")


def as_in_rows(uri: str) -> str:
    """The same address as `FILE` has it: of one on this machine, with fewer slashes."""
    return f"file:{urlsplit(uri).path}" if uri.startswith("file:") else uri


def path_of(uri: str) -> str:
    """The whole path of the file that Spark has this address for."""
    return unquote(urlsplit(uri).path)
