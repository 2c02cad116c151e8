"""Running a pipeline: recover, open a generation, start its queries, drive it, and stop it cleanly.

1. Check the pipeline's shape, before anything is touched.
2. Take the root's lock, and refuse what needs no Spark to be seen, before that is started.
3. Recover: decide from the sinks' records, the decision log and the newest checkpoint's files what to start from.
4. Call the user's functions against the next generation's gates; check what they return, the shape and the tables.
5. Create the tables if no checkpoint goes with them yet, then open the generation in the log.
6. Rebuild every stage from its snapshot, start the queries, and commit the restored checkpoint's epoch again.
7. Drive it until it is stopped, has consumed all, or fails; a stage that fails starts again from step 3.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from tidegate.engine.closing import is_closed, next_to_close
from tidegate.engine.control import Remote
from tidegate.engine.copies import finish_pending
from tidegate.engine.ending import Ending
from tidegate.engine.feeding import Feed, Feeding
from tidegate.engine.fitting import SparkFitting
from tidegate.engine.foreseeing import bound_sinks, check_foreseen
from tidegate.engine.forks import as_run_on
from tidegate.engine.generation import Generation, Ground
from tidegate.engine.launching import Launch
from tidegate.engine.opening import RootOpening
from tidegate.engine.options import RunOptions, settings_of
from tidegate.engine.pipeline import Pipeline
from tidegate.engine.requests import StopRun
from tidegate.engine.rereading import Rereading
from tidegate.engine.root import Root
from tidegate.engine.rounds import Rounds
from tidegate.engine.status import RunStatus, StartingStep, StepName, StoppingStep, now
from tidegate.engine.stopping import Stop, stopping_by
from tidegate.engine.up_to import Target
from tidegate.errors import (
    CheckpointsFailed,
    ConflictingRows,
    DataLost,
    Fenced,
    ForeignTable,
    InvalidConfig,
    SinkFailed,
    SparkLost,
    StageFailed,
    StoreUnavailable,
    Superseded,
    TablePutBack,
    TidegateError,
)
from tidegate.protocol.commit import RetryPause
from tidegate.protocol.config import as_ms
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import BoundSink
from tidegate.sinks.sessions import has_set
from tidegate.spark.definition import StageDefinition
from tidegate.spark.session import (
    RunSession,
    check_settings,
    in_place,
    local_session,
    scratch_folders,
)
from tidegate.spark.watch import TopicWatch
from tidegate.storage.lock import RootLock
from tidegate.storage.manifest import Manifest
from tidegate.storage.system import explained, told
from tidegate.storage.user_paths import plain_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("tidegate")

_PAUSE_S: Final = 0.015
# Within a pause: what a query has committed is handed on at once, its readers may be at rest.
_LOOK_EVERY_S: Final = 0.003
_LOOK_AT_QUERIES_EVERY_S: Final = 0.2
_LONGEST_PAUSE_MS: Final = 60_000
_PATTERN_CHARACTERS: Final = frozenset("*?[]{}\\")

# Trying again would bring the same.
_FINAL: Final = (Fenced, ForeignTable, TablePutBack, ConflictingRows, DataLost)

View = Callable[[RunStatus], None]
P = ParamSpec("P")
T = TypeVar("T")


def run_pipeline(
    pipeline: Pipeline,
    root: str | Path,
    spark: SparkSession | None = None,
    view: View | None = None,
    stop: threading.Event | None = None,
    on_step: Callable[[StartingStep], None] | None = None,
    feed: Feed | None = None,
    closes_windows: bool = False,
    **options: Any,
) -> None:
    """Run a pipeline on a root until it is stopped or, with `available_now`, until all input is consumed; with `up_to`,
    until all is consumed that another root has read.

    `on_step` is called with each step of the start, and of every restart. With a `feed` it runs until what that puts in
    last is consumed; it is not to be restarted. `closes_windows`: it reads nothing, closes what is open, and ends: the
    run before it has consumed all.
    `stop` stops it, when it is set, after a last checkpoint, as Ctrl-C does. Signals reach the main thread only. `view`
    is shown what the run does, several times a second, and in the end that it has finished.
    """
    settings = settings_of(options)
    check_settings(settings.conf, spark)
    settings.check_effect_on(pipeline.validated())
    folder = root_folder(root)
    target = None if settings.up_to is None else Target(settings.up_to, str(folder))
    existed = os.path.exists(folder)  # noqa: PTH110 - of a name that is too long it says no; the lock then says why
    with stopping_by(stop) as stopping, RootLock(folder / "lock", take_over=settings.take_over) as lock:
        root_of_run = Root(folder, pipeline.name, fsync=settings.fsync)
        finish_pending(root_of_run, pipeline.sinks)
        definitions = as_run_on(pipeline, root_of_run.store).validated()
        files = root_of_run.store.at("", durable=False)
        with Remote(files, pipeline.name, lock, on_stop=stopping.ask) as remote:
            conf = in_place(settings.conf)
            session = RunSession(
                spark,
                lambda: local_session(
                    pipeline.name,
                    root_of_run.paths.spark_log,
                    conf,
                    pipeline.folder,
                    partial(run.begin, "making_session"),
                ),
            )
            run = _Run(pipeline, definitions, root_of_run, session, settings, view, stopping, remote, on_step)
            run.feed, run.target = feed, target
            if closes_windows:
                run.close_windows()
            with _leaving_nothing(root_of_run, remote, existed=existed):
                run.check_before_spark()
            run.start_spark()
            with _leaving_nothing(root_of_run, remote, existed=existed):
                remote.ended_as = run.run()
                remote.ended_because = _why_ended(stopping, remote.ended_as, target)
        if view is not None:
            view(remote.status)


def _why_ended(stop: Stop, done: StopRun, target: Target | None) -> str:
    if not stop.wanted:
        return "all its input is consumed" if target is None else f"it has come to {target.name}"
    if stop.how.close_windows and done.close_windows:
        return "it was told to stop, and has closed its windows"
    return "it was told to stop, and has drained" if stop.how.drain and done.drain else "it was told to stop"


def root_folder(root: str | Path) -> Path:
    """The folder of a root as a user names it."""
    folder = plain_path(root)
    if found := set(str(folder)) & _PATTERN_CHARACTERS:
        raise InvalidConfig(
            f"the root {folder} holds {min(found)!r}, which Spark takes for a pattern; rename the folder"
        )
    return folder


@contextmanager
def _leaving_nothing(root: Root, remote: Remote, *, existed: bool) -> Iterator[None]:
    """A root that was made for a run which then failed to start anything is removed. One of a run that was interrupted
    stays, and says so: nothing was wrong with it."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        with suppress(StoreUnavailable):
            if not existed and root.is_unused:
                remote.fall_silent()
                shutil.rmtree(root.paths.root, ignore_errors=True)
        raise


class _NotShown(Exception):
    """The view has failed with an error of the system's."""

    def __init__(self, why: OSError) -> None:
        super().__init__(str(why))
        self.why = why


def _unusable(error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"what the run keeps in files cannot be used: {told(error)}")


class _GivingWay:
    """Fits if the pipeline does, and no other run has opened a generation meanwhile."""

    def __init__(self, fitting: SparkFitting, newest: int | None) -> None:
        """`newest`: the newest generation that this run need not give way to; None: it gives way to nobody."""
        self._fitting = fitting
        self._newest = newest

    def fits(self, log: DecisionLog, base: Manifest | None) -> bool:
        if self._newest is not None and log.generation > self._newest:
            raise Superseded(self._newest, log.generation)
        return self._fitting.fits(log, base)


class _Run:
    def __init__(
        self,
        pipeline: Pipeline,
        definitions: list[StageDefinition],
        root: Root,
        spark: RunSession,
        options: RunOptions,
        view: View | None,
        stop: Stop,
        remote: Remote,
        on_step: Callable[[StartingStep], None] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._definitions = definitions
        self._root = root
        self._spark = spark
        self._options = options
        self._view = view
        self._stop = stop
        self._remote = remote
        self._on_step = on_step
        self.feed: Feed | None = None
        self.target: Target | None = None
        self._watch = TopicWatch({})
        self._rereading = Rereading(root.store, None)
        self._rounds = Rounds()
        self._holds_sources = False
        """Whether no generation's sources are to read any more: what they have read is consumed, and the run ends."""
        self._is_drained = False
        """Whether all that was read is consumed, at the checkpoint that the next generation goes on from."""
        # The newest one that this run knows of and need not give way to. One that takes over gives way to nobody before
        # it has opened one itself.
        self._newest_generation = None if options.take_over else root.decisions.read().generation
        self._examined: dict[int, Manifest] = {}

    def close_windows(self) -> None:
        """Do nothing else. All is consumed."""
        self._stop.ask(StopRun(close_windows=True))
        self._is_drained = True

    def check_before_spark(self) -> None:
        """Refuse at once what needs no Spark to be seen: its start takes a while, and would be for nothing.

        It is all looked at again when a generation is opened, which is what counts.
        """
        self.begin("checking")
        self._spark.check_can_start()
        try:
            self._foresee()
        except OSError as error:
            raise _unusable(error) from error

    def _foresee(self) -> None:
        sinks = self._sinks(None)
        log, base = RootOpening(self._root, sinks, self._examined).foreseen()
        check_foreseen(self._root, self._definitions, sinks, self._options.meant(), log, base)

    def begin(self, step: StepName, stage: str | None = None, number: int | None = None, of: int | None = None) -> None:
        """Tell everybody what is done next to start."""
        self._stop.check_not_interrupted()
        begun = StartingStep(step=step, since=now(), stage=stage, number=number, of=of)
        self._remote.begin(begun)
        if self._on_step is not None:
            with suppress(OSError):  # of a terminal that is gone; as soon as stages run, that ends the run
                self._on_step(begun)

    def start_spark(self) -> SparkSession:
        """Spark's session, which is started if it is not there or no longer."""
        self._stop.is_starting = True
        if not self._spark.is_there:
            self.begin("fetching_packages" if "spark.jars.packages" in self._options.conf else "starting_spark")
        try:
            session = self._spark.started()
        except OSError as error:
            raise StoreUnavailable(f"Spark could not be started: {told(error)}") from error
        self._stop.is_starting = False
        return session

    def run(self) -> StopRun:
        """Until it ends in order. Returns what was done, of what those may have wanted who asked it to stop."""
        with self._rounds:
            return self._run()

    def _run(self) -> StopRun:
        failures = 0
        while True:
            generation: Generation | None = None
            try:
                generation = self._told(self._open)
                self._newest_generation = generation.generation
                done = self._told(self._drive, generation)
                if not self._stop.how.lacks(done):
                    return done
                # Windows are left to close; or somebody has asked for more when it was too late for this one.
                self._holds_sources, self._is_drained, failures = True, done.drain, 0
                continue
            except (StageFailed, CheckpointsFailed, SinkFailed, StoreUnavailable, SparkLost) as error:
                if isinstance(error, _FINAL) or (generation is None and not failures):
                    raise  # what cannot be opened at first is told at once
                if isinstance(error, SparkLost) and not self._spark.can_restart:
                    raise
                with suppress(StoreUnavailable):  # then it is asked again when it is opened
                    self._check_not_superseded()
                if generation is not None and generation.has_advanced:
                    failures = 0  # it has come further: this is another failure, not the same again
                failures += 1
                self._is_drained = False  # a checkpoint since may have something in flight
                if failures > self._options.restarts or self._stop.is_soon:
                    self._tell_next(failures)
                    raise
                first_ms = as_ms("restart_pause", self._options.restart_pause)
                pause_s = RetryPause(first_ms, max(first_ms, _LONGEST_PAUSE_MS)).after(failures) / 1000
                _log.warning("%s; restarting from the last checkpoint in %.1f s", error, pause_s)
                self._told(self._tell, self._remote.restarting(str(error)))
                failure = error
            finally:
                self._watch.stop()
                self._rereading.stop()
                if generation is not None:
                    self._rounds.doing("stopping its queries, and waiting for snapshots and commits that are under way")
                    generation.stop()
                    self._rounds.doing(None)
            if self._stop.wait(pause_s):
                raise failure

    def _tell_next(self, failures: int) -> None:
        with suppress(StoreUnavailable):
            newest = self._root.decisions.read().newest
            goes_on = (
                "starts from the beginning"
                if newest is None
                else f"goes on from {checkpoint_name(newest.checkpoint_id)}"
            )
            times = "a failure" if failures == 1 else f"{failures} failures in a row"
            _log.error("given up after %s; the next run %s", times, goes_on)

    def _told(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do it. What fails beneath it, in files or in Spark's process, is told as a failure like others."""
        try:
            return act(*args, **kwargs)
        except _NotShown as error:
            raise error.why from None
        except (Fenced, Superseded):
            raise
        except Exception as error:
            self._spark.check(error)
            if isinstance(error, OSError):
                raise _unusable(error) from error
            if isinstance(error, StageFailed | SinkFailed):
                error.args = (explained(str(error), self._folders()),)
            raise

    def _folders(self) -> Iterator[Path]:
        """Where the run and its tables write, and Spark beside them."""
        yield self._root.paths.root
        tables = [each.sink.table for each in self._definitions if each.sink is not None]
        yield from (Path(table.address) for table in tables if table.kind == "delta")
        yield from scratch_folders(self._spark.started())

    def _check_not_superseded(self) -> DecisionLog:
        log = self._root.decisions.read()
        if self._newest_generation is not None and log.generation > self._newest_generation:
            raise Superseded(self._newest_generation, log.generation)
        return log

    # -- opening ----------------------------------------------------------------------------------

    def _open(self) -> Generation:
        session = self.start_spark()
        sinks = self._sinks(session)
        is_set = partial(has_set, session) if self._spark.is_given else self._options.conf.__contains__
        number = self._check_not_superseded().next_generation
        examined, self._examined = self._examined, {}
        with SparkFitting(
            self._definitions,
            self._root,
            session,
            sinks,
            is_set,
            self.begin,
            may_chain=self._options.chain,
            meant=self._options.meant(),
            target=self.target,
        ) as fitting:
            fitting.build(number)
            opened, _ = RootOpening(self._root, sinks, examined).open(_GivingWay(fitting, self._newest_generation))
        for change in fitting.changes:
            _log.warning("%s", change)
        self._remote.changed(fitting.changes)
        for sink in sinks.values():  # now that the root stays, and before anything is staged
            sink.claim()
        for sink in fitting.parted:  # all that their tables are to show they do
            with suppress(TidegateError, OSError):
                sink.forget_staged(opened.generation)
        closes = self._is_drained and self._stop.how.close_windows
        generation = Generation(
            fitting.queries,
            Ground(self._pipeline.name, self._root.store, self._root.store, opened, fitting.base, fitting.shape),
            self._options.config(),
            sinks,
            self._options.bounds(),
            launch=Launch(
                fitting.queries,
                fitting.built,
                fitting.in_order,
                self._root.store,
                session,
                self.begin,
                available_now=self._options.available_now,
                closes=closes,
                plans=fitting.plans,
            ),
        )
        self._tell_closed(generation)
        self._holds_sources |= self._stop.how.drain
        if self._holds_sources:
            generation.hold_sources()
        try:
            generation.poll()  # the first round launches it
            self._watch_sources(generation, fitting)
            self._rereading = Rereading(self._root.store, fitting.base)
            self._rereading.start()
        except KeyboardInterrupt:
            generation.abandon()
            raise
        except BaseException:
            generation.stop()
            raise
        return generation

    def _tell_closed(self, generation: Generation) -> None:
        """Nobody should wonder where the rows are that a stage drops, because its windows were closed for good."""
        closed = [name for name, stage in generation.stages.items() if is_closed(stage)]
        if closed and not self._stop.how.close_windows:
            _log.warning(
                "windows were closed (tidegate stop --close-windows): every row that comes from now on is late, and is "
                "dropped, at %s; tidegate restore goes back to a checkpoint before that",
                ", ".join(closed),
            )

    def _watch_sources(self, generation: Generation, fitting: SparkFitting) -> None:
        sources = {each.name: fitting.built[each.name].frame for each in self._definitions if not each.inputs}
        self._watch = TopicWatch(sources)
        generation.watch_planning(self._watch.why_unreachable)

    def _sinks(self, session: SparkSession | None) -> dict[str, BoundSink]:
        return bound_sinks(self._root, self._definitions, session)

    # -- driving ----------------------------------------------------------------------------------

    def _drive(self, generation: Generation) -> StopRun:
        try:
            return self._drive_to_the_end(generation)
        except KeyboardInterrupt:
            generation.abandon()
            raise

    def _drive_to_the_end(self, generation: Generation) -> StopRun:
        looked = 0.0
        ending = Ending(generation)
        feeding = None if self.feed is None else Feeding(generation, self.feed)
        while True:
            self._rounds.doing("busy with what Spark has committed, with checkpoints and with the files of both")
            generation.poll()
            self._remote.serve(generation)
            now = time.monotonic()
            if now - looked >= _LOOK_AT_QUERIES_EVERY_S:
                looked = now
                self._rounds.doing("waiting for Spark to tell of its queries")
                generation.check_queries()
                self._watch.check(generation.shape)
                self._rounds.doing("busy with showing what it does")
                self._look_whether_consumed(ending)
                self._show(generation, ending)
            if self._stop.wanted or (feeding is not None and not ending.is_begun and feeding.is_over()):
                self._begin(ending)
            if ending.is_over():
                self._show(generation, ending)
                self._check_closed(generation, ending)
                return ending.done
            self._rounds.doing(None)
            self._pause(generation)

    def _pause(self, generation: Generation) -> None:
        """Until the next round, or until Spark has committed something; what flows have waited for goes on at once."""
        deadline = time.monotonic() + _PAUSE_S
        look_s = _LOOK_EVERY_S
        while (left_s := deadline - time.monotonic()) > 0:
            if generation.carrier.woken.wait(min(left_s, look_s)):
                generation.carrier.woken.clear()
                generation.go_on()
                continue
            began = time.monotonic()
            if generation.has_news:
                return
            look_s = max(_LOOK_EVERY_S, 10 * (time.monotonic() - began))  # of many stages it takes a while

    def _check_closed(self, generation: Generation, ending: Ending) -> None:
        """What was to be closed is, or it would be tried for ever."""
        left = generation.closes & next_to_close(generation)
        if left and ending.has_consumed_all:
            raise StageFailed(min(left), "its windows could not be closed: its watermark is not at the end of time")

    def _look_whether_consumed(self, ending: Ending) -> None:
        if self._options.ends or ending.is_draining:
            ending.look()
        if self._options.ends and not ending.is_begun and ending.has_consumed_all:
            self._begin(ending)

    def _begin(self, ending: Ending) -> None:
        how = self._stop.how
        self._holds_sources |= how.drain  # also those of a restart
        ending.begin(how)

    def _show(self, generation: Generation, ending: Ending) -> None:
        step: StoppingStep = "draining" if ending.is_draining else "last_checkpoint"
        if generation.closes if ending.is_draining else ending.goes_on:
            step = "closing_windows"
        self._tell(self._remote.update(generation, step if self._stop.wanted else None))

    def _tell(self, status: RunStatus) -> None:
        if self._view is not None:
            try:
                self._view(status)
            except OSError as error:  # of a pipe or a terminal that is gone, not of what the run keeps
                raise _NotShown(error) from error
