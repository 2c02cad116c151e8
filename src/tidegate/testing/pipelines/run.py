"""`run_pipeline`: a pipeline in a test, rows in, tables out.

The pipeline runs as it is, its chains, gates, checkpoints, state and commits too, in a temporary folder that is gone
when the test has its tables. Two things are others: what its sources read, and the tables that its sinks write to, so
that nothing outside of that folder is read or changed. The pipeline that is given stays as it is.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import deltalake
import msgspec

from tidegate.engine.feeding import Fed
from tidegate.engine.run import run_pipeline as run
from tidegate.errors import InvalidRows, NotConsumed
from tidegate.protocol.config import as_ms
from tidegate.sinks.delta.reading import TableAt
from tidegate.sinks.delta.table import DeltaTable
from tidegate.sinks.sessions import PARTITIONS, derived_session, has_set
from tidegate.spark.definition import SPARK_PARAMETER, StageDefinition
from tidegate.spark.session import existing_session, own_session, unload_state
from tidegate.testing.pipelines.rows import Rows
from tidegate.testing.pipelines.sources import FedSource, columns_of_source
from tidegate.testing.pipelines.tables import Tables, read_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from tidegate.engine.pipeline import Pipeline
    from tidegate.engine.status import RunStatus

Batch = Mapping[str, Rows]
"""Rows of each source, by its name. Of one that is left out there are none."""

# Two, so that keys are spread as they are in earnest; more would only take longer.
_PARTITIONS: Final = 2
_FUNCTIONS: Final = ("function", "console", "memory")


def run_pipeline(
    pipeline: Pipeline,
    rows: Batch | Sequence[Batch],
    spark: SparkSession | None = None,
    *,
    restart: bool = False,
    close_windows: bool = False,
    schemas: Mapping[str, StructType | str] | None = None,
    chain: bool = True,
    timeout: str = "2m",
) -> Tables:
    """Run a pipeline on these rows, until it has consumed them, and give the rows of its tables.

    :param rows: rows of each source, by its name; or a list of such batches. A batch of a source is one micro-batch,
        and everything that comes of it is in the tables before the next one is read. A row is a dict, a Row or a tuple
        with the columns that the source's function returns; a DataFrame will do too.
    :param spark: the session to use; without it the one of this process, or one that is made
    :param restart: end the run after each batch, and start the next one from its last checkpoint
    :param close_windows: in the end, move the watermark of each stage that has one to the end of time, so that what is
        still open is written out: first of those that no other such stage comes before, then of what reads them
    :param schemas: the columns of sources whose functions cannot be called in the test
    :param chain: as in `pipeline.run`
    :param timeout: how long a batch may take until every table shows it
    """
    timeout_s = as_ms("timeout", timeout) / 1000
    batches = _as_batches(rows)
    definitions = pipeline.validated()
    session = _session(spark)
    folder = Path(tempfile.mkdtemp(prefix="tidegate-test-"))
    try:
        named = schemas or {}
        _check_names(named, definitions, "schemas")
        sources = {
            each.name: FedSource(each.name, columns_of_source(each, session, folder, named), folder / "sources")
            for each in definitions
            if each.kind == "source"
        }
        tables = _tables(definitions, folder / "tables")
        steps = [_checked(batch, number, len(batches), sources) for number, batch in enumerate(batches, start=1)]
        in_test = pipeline.with_stages(lambda each: _replaced(each, sources, tables))
        test = _Run(in_test, folder / "root", session, sources, tables, chain=chain, timeout_s=timeout_s)
        for part in [[step] for step in steps] if restart else [steps]:
            test.feed(part)
        if close_windows:
            test.close_windows()
        return test.read()
    finally:
        with suppress(Exception):  # where Spark is gone, that is told by what has failed
            unload_state(session)
        shutil.rmtree(folder, ignore_errors=True)
        # Where other queries run in Spark's process, its upkeep of state may make a part of it anew.
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _as_batches(rows: Batch | Sequence[Batch]) -> list[Batch]:
    batches = [rows] if isinstance(rows, Mapping) else list(rows)
    if not batches or not all(isinstance(each, Mapping) for each in batches):
        raise InvalidRows(
            "rows are given by the names of their sources, {'orders': [...]}, or as a list of such batches with one at "
            "least"
        )
    return batches


def _check_names(named: Mapping[str, object], definitions: Sequence[StageDefinition], where: str) -> None:
    known = [each.name for each in definitions if each.kind == "source"]
    for name in named:
        if name not in known:
            raise InvalidRows(f"{where}: the pipeline has no source {name!r} (its sources are {', '.join(known)})")


def _checked(batch: Batch, number: int, of: int, sources: Mapping[str, FedSource]) -> dict[str, Any]:
    """The rows of a batch as Arrow tables: all are looked at before anything runs."""
    where = "rows" if of == 1 else f"batch {number}"
    for name in batch:
        if name not in sources:
            raise InvalidRows(f"{where}: the pipeline has no source {name!r} (its sources are {', '.join(sources)})")
    found = {
        name: sources[name].checked(f"source {name!r}" if of == 1 else f"source {name!r}, batch {number}", rows)
        for name, rows in batch.items()
    }
    return {name: table for name, table in found.items() if table is not None}


def _tables(definitions: Sequence[StageDefinition], folder: Path) -> dict[str, DeltaTable]:
    """A table in the folder for each sink. Those that share one in earnest share one here."""
    found: dict[str, DeltaTable] = {}
    shared: dict[object, Path] = {}
    for each in definitions:
        if each.sink is None:
            continue
        address = each.sink.table
        own = folder / each.name
        path = own if address.kind in _FUNCTIONS else shared.setdefault(address, own)
        found[each.name] = DeltaTable(
            path,
            getattr(each.sink, "partition_by", ()),
            key=getattr(each.sink, "key", ()),
            newest_by=getattr(each.sink, "newest_by", ()),
            target_file_size=None,
        )
    return found


def _replaced(
    definition: StageDefinition, sources: Mapping[str, FedSource], tables: Mapping[str, DeltaTable]
) -> StageDefinition:
    """The stage in a test. What is no source and no sink is itself."""
    if definition.kind == "source":
        read = sources[definition.name].read
        return msgspec.structs.replace(definition, function=read, parameters=(SPARK_PARAMETER,), folder=None)
    if definition.kind == "sink":
        return msgspec.structs.replace(definition, sink=tables[definition.name])
    return definition


def _session(given: SparkSession | None) -> SparkSession:
    """Derived from the user's, which keeps its views and functions and is never changed. One that is made stays: the
    next test need not wait for it."""
    session = given or existing_session()
    if session is None:
        logs = Path(tempfile.mkdtemp(prefix="tidegate-test-spark-"))
        atexit.register(shutil.rmtree, logs, ignore_errors=True)
        session = own_session("tidegate-test", logs / "spark.log")
    derived = derived_session(session)
    if not has_set(session, PARTITIONS):
        derived.conf.set(PARTITIONS, str(_PARTITIONS))
    return derived


class _Run:
    """The runs of one test, on one root."""

    def __init__(
        self,
        pipeline: Pipeline,
        root: Path,
        session: SparkSession,
        sources: Mapping[str, FedSource],
        tables: Mapping[str, DeltaTable],
        *,
        chain: bool,
        timeout_s: float,
    ) -> None:
        self._pipeline = pipeline
        self._root = root
        self._session = session
        self._sources = sources
        self._tables = tables
        self._chain = chain
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._versions: list[dict[str, int]] = []
        """Of each table, after each batch."""
        self._closed: dict[str, int] | None = None
        self._status: RunStatus | None = None

    def feed(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Run until these are consumed."""
        left = list(steps)
        given = 0

        def next_step() -> Fed:
            nonlocal given
            if given:
                self._versions.append(self._versions_now())
            self._deadline = time.monotonic() + self._timeout_s
            step = left.pop(0) if left else {}
            given += 1
            for name, table in step.items():
                self._sources[name].put(table)
            return Fed({name: each.batches for name, each in self._sources.items()}, is_last=not left)

        self._run(feed=next_step)
        self._versions.append(self._versions_now())

    def _run(self, **options: Any) -> None:
        self._deadline = time.monotonic() + self._timeout_s
        run(
            self._pipeline,
            self._root,
            self._session,
            view=self._watch,
            checkpoint_interval="7d",
            checkpoint_timeout="7d",
            restarts=0,
            chain=self._chain,
            fsync=False,
            **options,
        )

    def close_windows(self) -> None:
        """Close what is open, as `tidegate stop --close-windows` does."""
        self._run(closes_windows=True)
        self._closed = self._versions_now()

    def _watch(self, status: RunStatus) -> None:
        if status.stages:
            self._status = status
        if time.monotonic() > self._deadline:
            behind = [f"{name} has {stage.lag} segments to read" for name, stage in status.stages.items() if stage.lag]
            raise NotConsumed(
                f"pipeline {status.pipeline!r} has not consumed batch {len(self._versions) + 1} of its test within "
                f"{self._timeout_s:g} s{': ' if behind else ''}{', '.join(behind)}; give it more with timeout="
            )

    def _versions_now(self) -> dict[str, int]:
        return {name: deltalake.DeltaTable(each.path).version() for name, each in self._tables.items()}

    def read(self) -> Tables:
        """The tables of all versions that were noted, each read once."""
        noted = [*self._versions, self._closed or self._versions[-1]]
        known = {
            (name, version): read_table(name, TableAt(self._tables[name].path, version))
            for name, version in {each for versions in noted for each in versions.items()}
        }
        *after, in_the_end = [{name: known[name, version] for name, version in each.items()} for each in noted]
        return Tables(after, in_the_end)
