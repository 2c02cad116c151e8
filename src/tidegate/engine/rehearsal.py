"""A rehearsal: every query of a pipeline is started on a copy of a checkpoint, with nothing to read.

The checkpoint is laid out in a scratch folder, a root of its own, and from there on all is done as at a start: the
functions are called, what they make is compared with the checkpoint and with the tables, the folders of every query are
rebuilt, and Spark takes them up. What comes of it goes with the folder: no file of the root and no table is changed.

What it proves:
- Of a stage that reads others, Spark has run one batch, on a file without rows: it has found its place in the logs, has
  loaded the state of every partition, and what is stored is what the functions keep now. What the watermark had closed
  by then is written, into the scratch folder.
- Of a source, Spark has taken up its logs, has asked what it reads from, and has either planned the next batch or found
  nothing new. No row of that batch is read, and state that it may keep is not loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from tidegate.engine.chains import by_query
from tidegate.engine.fitting import SparkFitting
from tidegate.engine.foreseeing import bound_sinks
from tidegate.engine.forks import as_run_on
from tidegate.engine.launching import rebuild_folders
from tidegate.engine.pipeline import Pipeline
from tidegate.engine.root import Root, SeenRoot
from tidegate.engine.stage.progress import Progress
from tidegate.errors import DamagedCheckpoint, PipelineChanged, StageFailed, StoreUnavailable
from tidegate.protocol.messages import SegmentFile
from tidegate.spark import queries
from tidegate.spark.causes import failure_of
from tidegate.spark.definition import StageDefinition
from tidegate.spark.gate import Gate
from tidegate.spark.snapshot import STATE_FOLDER
from tidegate.storage.file_lists import files_of
from tidegate.storage.files import Files
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest, StageSnapshot
from tidegate.storage.parquet import write_nothing
from tidegate.storage.paths import RootPaths

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Outcome = Literal["ran", "planned", "idle", "failed"]

_PY4JS_LOGGER: Final = "py4j.clientserver"
_LOOK_EVERY_S: Final = 0.05
_GIVEN_UP_AFTER_S: Final = 600.0


class Rehearsed(msgspec.Struct, frozen=True):
    """What became of a query, which runs these stages. `why` is None unless it has failed. `has_state`: it has stored
    some."""

    stages: tuple[str, ...]
    outcome: Outcome
    has_state: bool
    why: str | None = None


def rehearse(
    pipeline: Pipeline,
    root: InspectedRoot,
    base: Manifest,
    session: SparkSession,
    is_set_by_user: Callable[[str], bool],
    scratch: Files,
) -> tuple[tuple[str, ...], list[Rehearsed]]:
    """Start all queries on a checkpoint whose files were checked. Raises what a start would be refused with.

    `scratch`: an empty folder. Returns what has changed since the checkpoint, for people, and what became of each
    query.
    """
    log = root.log()
    number = log.next_generation
    copy = _copied(root, base, scratch)
    definitions = as_run_on(pipeline, root.files).validated()
    with SparkFitting(
        definitions,
        copy,
        session,
        bound_sinks(SeenRoot(root.files, pipeline.name), definitions, session),
        is_set_by_user,
        lambda *_, **__: None,
    ) as fitting:
        fitting.build(number)
        while not fitting.check(log, base):
            pass  # it was built otherwise, and is looked at again
    assert fitting.base is not None
    starts = by_query(fitting.base.stages, fitting.queries)
    tried = [_Trial(each, fitting.built[each.name], starts[each.name], copy.store, number) for each in fitting.queries]
    with _without_py4js_log():
        try:
            for trial in tried:
                trial.start()
            return fitting.changes, [trial.awaited() for trial in tried]
        finally:
            for trial in tried:
                trial.stop()


@contextmanager
def _without_py4js_log() -> Iterator[None]:
    """It tells, with a trace, that a source was stopped before it has read."""
    logger = logging.getLogger(_PY4JS_LOGGER)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _copied(root: InspectedRoot, base: Manifest, scratch: Files) -> Root:
    """A root that has what the snapshots of the checkpoint consist of, by the same names. What was in flight is not
    read."""
    try:
        for name, snapshot in base.stages.items():
            lists = [each.stored for each in snapshot.files.lists]
            for stored in (*lists, *(each.stored for each in files_of(root.files, name, snapshot.files))):
                scratch.keep(stored, root.files, stored)
    except (DamagedCheckpoint, StoreUnavailable):
        root.find(base.checkpoint_id)  # a run that is alive may have removed it
        raise
    return Root(scratch, root.pipeline, fsync=False, root_id=root.id)


class _Reached(Exception):
    """Ends the query of a source before it reads a row."""


class _Trial:
    """One query, on its folders in the scratch root."""

    def __init__(
        self, definition: StageDefinition, built: queries.Built, start: StageSnapshot, root: Files, generation: int
    ) -> None:
        self._definition = definition
        self._built = built
        self._begins_at = start
        self._root = root
        self._generation = generation
        checkpoint = root.at(RootPaths.spark_checkpoint(generation, definition.head))
        self._progress = Progress(definition, checkpoint, start.cut, start.watermark_ms)
        self._has_planned = False
        self._has_state = False
        self._failure: StageFailed | PipelineChanged | None = None

    def start(self) -> None:
        definition, built, checkpoint = self._definition, self._built, self._progress.checkpoint
        output = self._root.at(RootPaths.output(self._generation, definition.name))
        held = files_of(self._root, definition.head, self._begins_at.files)
        self._has_state = any(each.name.startswith(STATE_FOLDER) for each in held)
        rebuild_folders(definition, self._begins_at, held, self._root, checkpoint, output, built.sources)
        self._open_gates()
        # Without its sink: what it writes stays here.
        rows = None if definition.inputs else self._stop_before_reading
        start = queries.starting(definition, built.frame, None, rows, trigger=queries.UNTIL_STOPPED)
        try:
            self._progress.query = start(checkpoint, output)
        except Exception as error:
            self._failure = failure_of(definition, error)

    def _open_gates(self) -> None:
        """They hold nothing but a file without rows in the first one, which makes Spark run a batch."""
        definition, root, generation = self._definition, self._root, self._generation
        gates = {
            each: Gate(
                root.at(RootPaths.gate(generation, definition.head, each)),
                root,
                self._begins_at.positions.get(each, 0),
            )
            for each in definition.inputs
        }
        for each, gate in list(gates.items())[:1]:
            nothing = RootPaths.nothing(generation, each)
            gate.nudge(SegmentFile(nothing, write_nothing(root, nothing)))

    def _stop_before_reading(self, _batch: DataFrame, _number: int) -> None:
        """In place of what writes a source's rows: where none are asked for, none are read."""
        self._has_planned = True
        raise _Reached

    def awaited(self) -> Rehearsed:
        stages = tuple(each.name for each in self._definition.members)
        deadline = time.monotonic() + _GIVEN_UP_AFTER_S
        try:
            while (outcome := self._outcome()) is None:
                if time.monotonic() >= deadline:
                    raise StageFailed(stages[-1], f"it has run no batch in {_GIVEN_UP_AFTER_S:.0f} s: {self._doing()}")
                time.sleep(_LOOK_EVERY_S)
        except (StageFailed, PipelineChanged) as failure:
            return Rehearsed(stages, "failed", self._has_state, str(failure))
        return Rehearsed(stages, outcome, self._has_state)

    def _outcome(self) -> Outcome | None:
        """None: it is not known yet."""
        if self._failure is not None:
            raise self._failure
        if self._definition.inputs:
            if not self._progress.has_taken_up_all:
                return "ran"
        elif self._has_planned:
            return "planned"
        elif self._progress.is_idle:
            return "idle"
        self._progress.check()
        return None

    def _doing(self) -> str:
        query: Any = self._progress.query
        return f"Spark is {query.status['message']}"

    def stop(self) -> None:
        with suppress(Exception):  # of one that has failed, or does not stop: all ends with the process
            self._progress.stop()
