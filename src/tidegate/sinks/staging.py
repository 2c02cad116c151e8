"""What sinks of different kinds have in common."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import ConflictingRows, ForeignTable, InvalidPipeline, SinkFailed, TablePutBack
from tidegate.sinks.contract import BoundSink, Committable, FileSink, SinkPlace, StagedBatch, StagedFile
from tidegate.storage.files import Files, clear

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_WITHOUT_ORDER: Final = ("array", "map", "struct", "variant", "interval", "void")
"""What types without an order that all databases share start or end with."""
_LONGEST_VALUE: Final = 60
NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"
"""How Spark names the folder of a partition whose value is null."""


def as_names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def quoted(name: str) -> str:
    """A column's name as Spark reads one, whatever it holds."""
    return "`" + name.replace("`", "``") + "`"


def as_pattern(path: Path | str) -> str:
    """A path as Spark's readers take it: they would expand a pattern."""
    return re.sub(r"([\\*?\[\]{}])", r"\\\1", str(path))


def read_files(session: SparkSession, schema: StructType, paths: Iterable[Path | str]) -> DataFrame:
    """The rows of Parquet files that were staged or shown: all of them, whatever the session skips of other files."""
    reader = session.read.schema(schema).options(ignoreCorruptFiles=False, ignoreMissingFiles=False)
    return reader.parquet(*map(as_pattern, paths))


@contextmanager
def spark_fails(what: str) -> Iterator[None]:
    """Say what of ours has failed where Spark has."""
    # It brings PySpark, which an append of files as they are does not need.
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, importlib.import_module("py4j.protocol").Py4JJavaError) as error:
        why = error if isinstance(error, PySparkException) else error.java_exception.getMessage()
        raise SinkFailed(f"{what}: {str(why).splitlines()[0]}") from error


def refuse_null_folder(rows: DataFrame, names: Iterable[str]) -> DataFrame:
    """The rows, with an error for a text that Spark names a folder as it does for null: it would become null."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType

    for name in names:
        if isinstance(rows.schema[name].dataType, StringType):
            value = F.col(quoted(name))
            why = f"{name!r} is {NULL_FOLDER!r}, by which folders of partitions mean null; replace it in the stage"
            rows = rows.withColumn(name, F.when(value == NULL_FOLDER, F.raise_error(F.lit(why))).otherwise(value))
    return rows


def check_key(table: str, key: Sequence[str], place: SinkPlace, schema: StructType, output_mode: str) -> None:
    """Refuse a key that is not there, and complete mode without one. `table` is the sink's, for people."""
    missing = [name for name in key if name not in schema.names]
    if missing:
        raise InvalidPipeline(f"{table} has the key {missing[0]!r}, which {place.owner} does not have")
    if output_mode == "complete" and not key:
        raise InvalidPipeline(
            f"{table}: {place.owner} has output_mode 'complete', which would append the whole result again in each "
            f"batch; give the table a key, or use output_mode 'update'"
        )


def check_newest_by(
    table: str, newest_by: Sequence[str], key: Sequence[str], place: SinkPlace, schema: StructType
) -> None:
    """Refuse columns to order rows by that are not there, or have no order, or order rows that nothing replaces."""
    if newest_by and not key:
        raise InvalidPipeline(
            f"{table} has newest_by={newest_by[0]!r} but no key: without one no row takes the place of another"
        )
    for name in newest_by:
        if name not in schema.names:
            raise InvalidPipeline(f"{table} has newest_by={name!r}, which {place.owner} does not have")
        kind = schema[name].dataType.typeName()
        if kind.startswith(_WITHOUT_ORDER) or kind.endswith(_WITHOUT_ORDER):
            raise InvalidPipeline(
                f"{table} cannot have newest_by={name!r} of {place.owner}, {schema[name].dataType.simpleString()}, "
                f"which has no order; take a number, a time or a string"
            )


def conflicting_rows(table: str, place: SinkPlace, key: dict[str, Any], newest_by: Sequence[str]) -> ConflictingRows:
    """The error where a batch has different rows of this key. `table` is the sink's, for people."""
    values = ", ".join(f"{name} = {_shown(value)}" for name, value in key.items())
    if newest_by:
        what = f"which newest_by ({', '.join(newest_by)}) does not tell apart; let it name a column more that does"
    else:
        what = "and nothing tells which is the newest; let newest_by=… of the table name the column that does"
    return ConflictingRows(
        f"{table}: {place.owner} has different rows of the key {values} in one batch, {what}, or write one row of each "
        f"key. Nothing was committed"
    )


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def refuse_foreign(table: str, place: SinkPlace, staged: Sequence[StagedFile] | Sequence[StagedBatch]) -> None:
    """Refuse what a sink of the other kind has staged: this one cannot show it."""
    if any(each.rows for each in staged):
        raise SinkFailed(
            f"{table}: the checkpoint holds rows that {place.owner} has staged for a sink of another kind; "
            f"take that sink, or start the pipeline on a new root with new tables"
        )


def is_staged(staging: Files, file: StagedFile) -> bool:
    """Whether it is still there, where a sink stages its files."""
    name = staging.name_at(file.path)
    return name is not None and staging.exists(name)


def damaged_staging(sink: BoundSink, committable: Committable) -> tuple[str | None, str | None]:
    """Of the files that a checkpoint has sealed and the table does not show yet, what is first found to be changed, by
    its size, and what to be gone.

    Nothing is said of a table that is gone, or was put back to an older state: that is another matter. The table is
    asked after the files were looked at: a run that is being taken over may show them meanwhile, and removes them then.
    """
    if not isinstance(sink, FileSink):
        return None, None
    found = ((file, sink.staging.name_at(file.path)) for file in committable.files if file.rows)
    names = {name: file for file, name in found if name is not None}
    sizes = sink.staging.sizes(names)
    wrong = [(file, sizes.get(name)) for name, file in names.items() if sizes.get(name) != file.size_bytes]
    if not wrong or (sink.table.kind == "delta" and sink.identity() is None):
        return None, None
    next_batch = sink.facts().next_batch
    if next_batch <= committable.shown_through:
        return None, None

    def first(what: str, *, is_there: bool) -> str | None:
        found = (file for file, size in wrong if file.batch >= next_batch and (size is not None) is is_there)
        file = next(found, None)
        staged = f"staged for {sink.describe()} of sink {sink.place.stage!r}"
        return None if file is None else f"{file.path}, {staged}, {what}"

    return first("is not what it was: size differs", is_there=True), first("is gone", is_there=False)


def refuse_gone(table: str, place: SinkPlace, staging: Files, staged: Sequence[StagedFile]) -> None:
    """Refuse to show files of which one is gone: what reads them might read on without it."""
    gone = [file.path for file in staged if not is_staged(staging, file)]
    if gone:
        raise SinkFailed(
            f"{table}: {gone[0]} is gone, which {place.owner} had staged, so nothing was committed; restore it, or "
            f"start the pipeline on a new root with new tables"
        )


def refuse_put_back(table: str, place: SinkPlace, epoch: int, next_batch: int, committable: Committable) -> None:
    """Refuse a table that shows less than it did when this was sealed. `epoch` and `next_batch` are its own record."""
    if next_batch <= committable.shown_through:
        raise TablePutBack(
            f"{table} was put back to an older state, or lost a commit: it shows {place.owner} {shown(next_batch)}, "
            f"and had shown it up to batch {committable.shown_through}. The rows between would be missing, so nothing "
            f"was committed; restore the newer state of the table, or start the pipeline on a new root with a new "
            f"table",
            epoch,
            next_batch,
        )


def shown(next_batch: int) -> str:
    """How far a table shows a stage, for people."""
    return f"up to batch {next_batch - 1}" if next_batch else "not at all"


def foreign_table(table: str, place: SinkPlace, way_out: str) -> ForeignTable:
    """What is said of a table that another root has claimed. `way_out` is for when that root is gone for good."""
    return ForeignTable(
        f"{table} belongs to another root of pipeline {place.pipeline!r}, for its sink {place.stage!r}; of two that "
        f"write to it each would delete what the other has staged. What to do: run the pipeline on that root, or give "
        f"the sink a new table. If that root is gone for good and the table holds nothing of it: {way_out}"
    )


def forget_generations(staging: Files, before: int) -> None:
    """Remove what older generations have staged."""
    for folder in staging.names_in():
        if folder.isdigit() and int(folder) < before:
            clear(staging, folder)
