"""Sessions of our own, derived from the user's, which is never changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

FOR_TABLES: Final = {
    # What every other reader of Parquet and Delta writes; Spark's default is a deprecated one without statistics.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Of a string's smallest and largest values, their beginnings (rounded up): Spark leaves out what is over 4 KB.
    "parquet.statistics.truncate.length": "64",
}
"""How files are written that a table may take as they are."""
PARTITIONS: Final = "spark.sql.shuffle.partitions"


def derived_session(session: SparkSession) -> SparkSession:
    """A session that keeps the user's temporary views, functions and settings, and is ours to change.

    A shuffle has as many partitions as there are cores, not Spark's 200, unless the user has set their number: to
    200 too. What was never set is not among a session's settings, though it has a value.
    """
    derived = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())
    if not has_set(derived, PARTITIONS):
        derived.conf.set(PARTITIONS, str(session.sparkContext.defaultParallelism))
    return derived


def has_set(session: SparkSession, key: str) -> bool:
    """Whether a setting is not Spark's own default. To ask for all that are set takes a call each."""
    return bool(session._jsparkSession.conf().contains(key))


def frame_of(session: SparkSession, rows: Iterable[tuple[Any, ...]], schema: StructType | str) -> DataFrame:
    """As `createDataFrame` makes it of a session. But that makes its session the active one of all of PySpark, whatever
    thread calls it: the user's own code, and the next run in this process, would find ours there."""
    columns = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    return session._create_dataframe(rows, columns, None, True)


def table_session(session: SparkSession) -> SparkSession:
    """A derived session that writes files as a table takes them: what is set for that is nobody else's business."""
    derived = derived_session(session)
    for name, value in FOR_TABLES.items():
        derived.conf.set(name, value)
    # Files are named one by one: a job of its own to look for them would take longer.
    derived.conf.set("spark.sql.sources.parallelPartitionDiscovery.threshold", "100000")
    return derived
