"""Launching a generation on Spark: every stage is rebuilt, then all queries are started at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import TYPE_CHECKING

from pyspark import inheritable_thread_target

from tidegate.engine.closing import next_to_close
from tidegate.engine.fitting import Begin
from tidegate.engine.generation import Generation
from tidegate.engine.kill_points import Step, reached
from tidegate.engine.pausing import StartQuery
from tidegate.engine.stage.progress import Progress
from tidegate.engine.up_to import Plans
from tidegate.spark import queries
from tidegate.spark.causes import failure_of
from tidegate.spark.definition import StageDefinition
from tidegate.spark.filelog import (
    COMPACT_INTERVAL,
    StageSource,
    begin_after,
    has_moved_watermark,
    is_begun,
    move_watermark_to_the_end,
    plan_batch,
    plan_no_data,
    restart_source_logs,
)
from tidegate.spark.gate import WINDOW
from tidegate.spark.output import restore_output
from tidegate.spark.resting import QueryRest
from tidegate.spark.snapshot import keep_first_position, note_streams, restore_checkpoint
from tidegate.storage.file_lists import SnapshotFile
from tidegate.storage.files import Files, clear
from tidegate.storage.manifest import StageSnapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger("tidegate")


class Launch:
    """None of the queries runs ahead while another stage is still being rebuilt."""

    def __init__(
        self,
        definitions: list[StageDefinition],
        built: Mapping[str, queries.Built],
        ordered: Collection[str],
        root: Files,
        session: SparkSession,
        begin: Begin,
        *,
        available_now: bool,
        closes: bool = False,
        plans: Plans | None = None,
    ) -> None:
        """`definitions`: what is to run. `ordered`: those that may read one segment a batch only. `closes`: the next
        ones whose windows are to be closed are launched so that they do. `plans`: what sources are to read, if not
        whatever there is."""
        self._definitions = definitions
        self._built = built
        self._ordered = ordered
        self._root = root
        self._session = session
        self._begin = begin
        self._available_now = available_now
        self._closes = closes
        self._plans = plans

    def __call__(self, generation: Generation) -> None:
        """Where the sources are held, they are rebuilt, and not started."""
        is_held = generation.holds_sources
        if self._closes:
            generation.closes = next_to_close(generation)
        with ThreadPoolExecutor(len(self._definitions), "tidegate-lay-out") as threads:
            laid_out = {each.name: threads.submit(self._lay_out, generation, each) for each in self._definitions}
            starts: dict[str, partial[StreamingQuery]] = {}
            for number, definition in enumerate(self._definitions, start=1):
                self._begin("laying_out", definition.name, number, len(self._definitions))
                folders = laid_out[definition.name].result()
                is_started = bool(definition.inputs) or not is_held
                start: partial[StreamingQuery] | None
                if self._plans is None or definition.inputs or is_held:
                    start = self._starting(generation, definition, *folders, is_started=is_started)
                else:
                    start = self._starting_planned(generation, definition, *folders)
                if start is not None and is_started:
                    starts[definition.name] = start
        if starts:
            self._start(generation, starts)
        reached(Step.QUERIES_STARTED)
        stages, queries_run = sum(len(each.members) for each in self._definitions), len(self._definitions)
        in_queries = "" if stages == queries_run else f" in {queries_run} queries"
        _log.info("generation %d runs %d stages%s", generation.generation, stages, in_queries)

    def _lay_out(self, generation: Generation, definition: StageDefinition) -> tuple[Files, Files]:
        """Beside the others: no stage's folders are any other's business."""
        sources = self._built[definition.name].sources
        window = 1 if definition.name in self._ordered else WINDOW
        closes = definition.name in generation.closes
        folders = lay_out(self._root, generation, definition, sources, window=window, closes=closes)
        if self._plans is not None and not definition.inputs and not generation.holds_sources:
            self._lay_plan(self._plans, generation, definition, folders[0])
        return folders

    def _lay_plan(self, plans: Plans, generation: Generation, definition: StageDefinition, checkpoint: Files) -> None:
        """Write the batch that a source is to run into Spark's log."""
        start = generation.stages[definition.name].start
        cut = None if start is None else start.cut
        batch = plans.batches[definition.head]
        if batch is not None:
            session = self._built[definition.head].frame.sparkSession
            first = queries.first_metadata(session) if cut is None else ""
            plan_batch(checkpoint, cut, batch, first, int(session.conf.get(COMPACT_INTERVAL) or 1))
        elif cut is not None and definition.head in plans.closing and has_moved_watermark(checkpoint, cut):
            plan_no_data(checkpoint, cut)

    def _starting(
        self, generation: Generation, definition: StageDefinition, checkpoint: Files, output: Files, *, is_started: bool
    ) -> partial[StreamingQuery]:
        """What starts the query on its folders. `is_started`: it is about to be."""
        name = definition.name
        stage = generation.stages[name]
        stage.progress.may_end = self._available_now and not definition.inputs
        trigger = queries.AVAILABLE_NOW if stage.progress.may_end else queries.UNTIL_STOPPED
        start = self._query(generation, definition, trigger)
        if not definition.inputs:
            generation.may_pause(name, inheritable_thread_target(self._session)(start), is_started=is_started)
        return partial(start, checkpoint, output)

    def _query(self, generation: Generation, definition: StageDefinition, trigger: Mapping[str, bool]) -> StartQuery:
        name, built = definition.name, self._built[definition.name]
        rows = generation.stages[name].row_staging(built.schema)
        return queries.starting(definition, built.frame, generation.sinks.get(name), rows, trigger=trigger)

    def _starting_planned(
        self, generation: Generation, definition: StageDefinition, checkpoint: Files, output: Files
    ) -> partial[StreamingQuery] | None:
        """The same of a source that reads what is planned; None: that is nothing. It is never paused: it has but one
        batch to run, and started again it must not find anything else to read."""
        assert self._plans is not None
        progress = generation.stages[definition.name].progress
        progress.may_end = True
        start = partial(self._query(generation, definition, queries.ONE_BATCH), checkpoint, output)
        if definition.head in self._plans.closing:
            progress.then = partial(_closing, progress, start)
        if is_begun(checkpoint, progress.batch + 1):
            return start
        progress.has_ended = True
        return None

    def _start(self, generation: Generation, starts: dict[str, partial[StreamingQuery]]) -> None:
        with ThreadPoolExecutor(max(1, len(starts)), "tidegate-start") as threads:
            started = {
                name: threads.submit(inheritable_thread_target(self._session)(start))
                for name, start in reversed(starts.items())
            }
            self._begin("starting_queries", number=1, of=len(starts))
            for done, _ in enumerate(as_completed(list(started.values())), start=1):
                self._begin("starting_queries", number=min(done + 1, len(starts)), of=len(starts))
        for name, query in started.items():
            if query.exception() is None:
                stage = generation.stages[name]
                stage.progress.query = query.result()
                if stage.definition.inputs:
                    stage.progress.rest = QueryRest(query.result(), self._session)
        for name, query in started.items():  # when all that were started can be stopped
            if (error := query.exception()) is not None:
                raise failure_of(generation.stages[name].definition, error) from error


def _closing(progress: Progress, start: Callable[[], StreamingQuery]) -> StreamingQuery | None:
    """The batch without data by which a source that keeps state writes out what its watermark has closed."""
    if not has_moved_watermark(progress.checkpoint, progress.batch):
        return None
    plan_no_data(progress.checkpoint, progress.batch)
    return start()


def lay_out(
    root: Files,
    generation: Generation,
    definition: StageDefinition,
    sources: Sequence[StageSource],
    *,
    window: int,
    closes: bool = False,
) -> tuple[Files, Files]:
    """A query's folders as of the checkpoint that it starts from, and its gates. Returns those of Spark's checkpoint
    and of its output. `closes`: its watermark is moved to the end of time."""
    name = definition.head
    stage = generation.stages[definition.name]
    checkpoint, output = generation.checkpoint_of(definition), generation.output_of(definition)
    rebuild_folders(definition, stage.start, stage.held, root, checkpoint, output, sources)
    if not definition.inputs:
        note_streams(root, generation.generation, name, generation.shape[name].streams)
        if stage.start is None or not stage.start.knows_position:
            keep_first_position(root, generation.generation, name)
    elif closes and stage.start is not None and stage.start.cut is not None:
        move_watermark_to_the_end(checkpoint, stage.start.cut)
    reached(Step.STAGE_RESTORED)
    stage.open_gates(sources, window=window)
    return checkpoint, output


def rebuild_folders(
    definition: StageDefinition,
    start: StageSnapshot | None,
    held: Iterable[SnapshotFile],
    root: Files,
    checkpoint: Files,
    output: Files,
    sources: Sequence[StageSource],
) -> None:
    """Those of Spark's checkpoint and of the output of a query, as of where it starts. `held`: the files of its
    snapshot, in the root."""
    clear(output, "")
    cut = None if start is None else start.cut
    restore_output(output, cut)
    if start is not None:
        files = list(held)
        root.bring(each.stored for each in files)
        restore_checkpoint(root, files, checkpoint)
        if cut is not None and start.files.is_empty:  # it was in the query of its input, and had none of its own
            begin_after(checkpoint, cut)
    if definition.inputs and cut is not None:
        restart_source_logs(checkpoint, cut, sources)
