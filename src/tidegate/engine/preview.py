"""What a run would do if it were started now, found out without changing anything.

It is all that a run does until it would create tables and open a generation: the log, the checkpoint's files and the
tables are looked at, functions are called, what has changed is taken up, and what does not fit is refused in the very
words of the run. Gates, which Spark looks for when functions are called, lie in a scratch folder. No lock is taken: a
run may be alive meanwhile, and then it is told what would happen if it ended with its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tidegate.engine.chains import chains_of
from tidegate.engine.changes import StageChange, TableChange
from tidegate.engine.fitting import SparkFitting
from tidegate.engine.foreseeing import bound_sinks, check_foreseen
from tidegate.engine.forks import as_run_on
from tidegate.engine.opening import RootOpening
from tidegate.engine.options import RunOptions, settings_of
from tidegate.engine.pipeline import Pipeline
from tidegate.engine.root import SeenRoot
from tidegate.engine.status import StartingStep, StepName, now
from tidegate.engine.tables import table_change
from tidegate.errors import TidegateError
from tidegate.flows.opening import Judgement
from tidegate.protocol.recovery import Restore, Start, StartFresh, StartOver, in_words
from tidegate.sinks.sessions import has_set
from tidegate.spark.definition import StageDefinition
from tidegate.spark.session import RunSession, check_settings, in_place, own_session
from tidegate.storage.folder import Folder
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.storage.places import RootGiven, place_for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class TablePreview(msgspec.Struct, frozen=True):
    """Where a sink's rows would go. `moved`: the table of before, at another address. `other`: another one, which may
    be, because no row was ever sealed for the one before."""

    table: TableAddress
    change: TableChange


class Preview(msgspec.Struct):
    """As far as it was found out before something is `refused`."""

    pipeline: str
    is_alive: bool
    """Whether a run holds the root."""
    start: Start | None = None
    starts: str = ""
    """The same for people."""
    stages: tuple[StageChange, ...] = ()
    tables: dict[str, TablePreview] = {}
    chains: dict[str, tuple[str, ...]] = {}
    told: tuple[str, ...] = ()
    refused: TidegateError | None = None

    @property
    def checkpoint_id(self) -> int | None:
        return self.start.checkpoint.checkpoint_id if isinstance(self.start, Restore) else None


def preview(
    pipeline: Pipeline,
    root: RootGiven,
    scratch: Path,
    spark: SparkSession | None = None,
    on_step: Callable[[StartingStep], object] = lambda _: None,
    **options: Any,
) -> Preview:
    """`scratch`: a folder that is there for this alone. The options are those of a run."""
    place = place_for_spark(root)
    found = Preview(pipeline.name, is_alive=place.is_held())
    try:
        settings = settings_of(options)
        check_settings(settings.spark_settings, spark)
        definitions = as_run_on(pipeline, place.files).validated()
        settings.check_effect_on(definitions)
        looking = _Looking(pipeline, definitions, SeenRoot(place.files, pipeline.name), settings, on_step)
        looking.look(found, scratch, spark)
    except TidegateError as refusal:
        found.refused = refusal
    return found


class _Looking:
    def __init__(
        self,
        pipeline: Pipeline,
        definitions: list[StageDefinition],
        root: SeenRoot,
        options: RunOptions,
        on_step: Callable[[StartingStep], object],
    ) -> None:
        self._pipeline = pipeline
        self._definitions = definitions
        self._root = root
        self._options = options
        self._on_step = on_step

    def look(self, found: Preview, scratch: Path, spark: SparkSession | None) -> None:
        self._begin("checking")
        conf = in_place(self._options.spark_settings)
        making = partial(self._begin, "making_session")
        name, folder = self._pipeline.name, self._pipeline.folder
        session = RunSession(spark, lambda: own_session(name, scratch / "spark.log", conf, folder, making))
        session.check_can_start()
        examined: dict[int, Manifest] = {}
        sinks, meant = bound_sinks(self._root, self._definitions), self._options.meant()
        opening = RootOpening(self._root, sinks, examined)
        judgement = opening.judged(as_if_fenced=True)
        self._note(found, judgement)
        check_foreseen(self._root, self._definitions, sinks, meant, judgement.log, opening.base(judgement.base))
        if not session.is_there:
            self._begin("starting_spark")
        started = session.started()
        is_set = partial(has_set, started) if session.is_given else self._options.spark_settings.__contains__
        sinks = bound_sinks(self._root, self._definitions, started)
        with SparkFitting(
            self._definitions,
            self._root,
            started,
            sinks,
            is_set,
            self._begin,
            apart=frozenset() if self._options.chain else frozenset(each.name for each in self._definitions),
            meant=meant,
            gates=Folder(scratch, fsync=False),
        ) as fitting:
            fitting.build(judgement.log.next_generation)
            while True:
                opening = RootOpening(self._root, sinks, examined)
                judgement = opening.judged(as_if_fenced=True)
                self._note(found, judgement)
                if fitting.check(judgement.log, opening.base(judgement.base)):
                    break
            self._take(found, fitting)

    def _begin(
        self, step: StepName, stage: str | None = None, number: int | None = None, of: int | None = None
    ) -> None:
        self._on_step(StartingStep(step=step, since=now(), stage=stage, number=number, of=of))

    def _note(self, found: Preview, judgement: Judgement) -> None:
        decision = judgement.decision
        assert isinstance(decision, StartFresh | StartOver | Restore)  # it was judged to the end, and not refused
        found.start = decision
        found.starts = in_words(decision, judgement.health)

    def _take(self, found: Preview, fitting: SparkFitting) -> None:
        taken = fitting.taken
        found.told = fitting.changes
        found.stages = taken.stages if taken is not None else tuple(_from_the_beginning(self._definitions))
        found.chains = chains_of(fitting.queries)
        for name, shape in fitting.shape.items():
            if shape.table is not None:
                then = None if taken is None or name in taken.new else taken.base.shape[name].table
                found.tables[name] = TablePreview(shape.table, table_change(then, fitting.tables.get(name)))


def _from_the_beginning(definitions: Iterable[StageDefinition]) -> Iterable[StageChange]:
    return (StageChange(each.name, each.kind, "new", None) for each in definitions)
