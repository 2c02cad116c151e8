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
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from tidegate.engine.catching_up import Missed, why_started
from tidegate.engine.chronicle import Chronicle
from tidegate.engine.closing import is_closed, next_to_close
from tidegate.engine.control import Desk, Remote
from tidegate.engine.copies import finish_pending
from tidegate.engine.ending import Ending
from tidegate.engine.events import StartedBecause
from tidegate.engine.feeding import Feed, Feeding
from tidegate.engine.fitting import SparkFitting
from tidegate.engine.foreseeing import bound_sinks, check_foreseen
from tidegate.engine.forks import as_run_on
from tidegate.engine.generation import Generation, Ground
from tidegate.engine.history import Recorder
from tidegate.engine.launching import Launch
from tidegate.engine.opening import RootOpening
from tidegate.engine.options import RunOptions, settings_of, settings_told
from tidegate.engine.part import Part
from tidegate.engine.pipeline import Pipeline
from tidegate.engine.requests import StopRun
from tidegate.engine.rereading import Rereading
from tidegate.engine.root import Root
from tidegate.engine.rounds import Rounds
from tidegate.engine.status import RunStatus, StartingStep, StepName, StoppingStep, now
from tidegate.engine.status_files import last_words
from tidegate.engine.stopping import Stop, stopping_by
from tidegate.engine.up_to import Target
from tidegate.engine.watching.watchers import watching
from tidegate.errors import (
    CheckpointsFailed,
    ConflictingRows,
    DataLost,
    Fenced,
    ForeignTable,
    SinkFailed,
    SparkLost,
    StageFailed,
    StoreUnavailable,
    Superseded,
    TablePutBack,
    TidegateError,
)
from tidegate.flows.opening import Opened
from tidegate.protocol.commit import RetryPause
from tidegate.protocol.config import as_ms
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import BoundSink
from tidegate.sinks.sessions import has_set
from tidegate.spark.definition import StageDefinition
from tidegate.spark.s3a import PACKAGES, prepare, with_s3a
from tidegate.spark.session import (
    RunSession,
    check_settings,
    in_place,
    master_of,
    own_session,
    scratch_folders,
)
from tidegate.spark.sharing import check_shared
from tidegate.spark.watch import TopicWatch
from tidegate.storage.lock import RootLock
from tidegate.storage.manifest import Manifest
from tidegate.storage.mounted import Mounted, is_local
from tidegate.storage.places import Place, place_for_spark
from tidegate.storage.system import explained, told
from tidegate.storage.user_paths import is_bucket_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger("tidegate")

_PAUSE_S: Final = 0.015
# Within a pause: what a query has committed is handed on at once, its readers may be at rest.
_LOOK_EVERY_S: Final = 0.003
_LOOK_AT_QUERIES_EVERY_S: Final = 0.2
_LONGEST_PAUSE_MS: Final = 60_000
# How long the end of a run waits for its history to be written.
_LAST_WORDS_S: Final = 10.0
_LAST_WORDS_WHEN_INTERRUPTED_S: Final = 2.0

# Trying again would bring the same.
FINAL: Final = (Fenced, ForeignTable, TablePutBack, ConflictingRows, DataLost)

View = Callable[[RunStatus], None]
P = ParamSpec("P")
T = TypeVar("T")


def run_pipeline(
    pipeline: Pipeline,
    root: str | Path | Place,
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
    check_settings(settings.spark_settings, spark)
    settings.check_effect_on(pipeline.validated())
    place = place_for_spark(root, work=settings.work, fsync=settings.fsync, instance=settings.instance)
    target = None if settings.up_to is None else Target(settings.up_to, place)
    # What an instance leaves behind is not its own to remove: others may have come, and go on.
    stays = settings.instance is not None or not place.is_empty()
    earlier = _last_words(place)  # before the lock is taken, which says something else in a bucket
    # What crosses machines must lie in the bucket, where the root is in one: executors are elsewhere, or other drivers.
    in_bucket = place.is_far and (settings.instance is not None or not _is_local(settings, spark))
    needs_s3a = in_bucket or (_is_any_in_a_bucket(pipeline) and not _is_local(settings, spark))
    with (
        stopping_by(stop) as stopping,
        watching(settings, pipeline.name, place) as watchers,
        _lock(place, settings) as lock,
    ):
        root_of_run = Root(place, pipeline.name, fsync=settings.fsync, is_shared=lock.is_shared, in_bucket=in_bucket)
        finish_pending(root_of_run, pipeline.sinks)
        definitions = as_run_on(pipeline, root_of_run.store).validated()
        files = root_of_run.store.at("", durable=False)
        chronicle = Chronicle(settings.instance)
        recorder = Recorder(files, settings.history(), place.pace.record_every_s)
        chronicle.observers += [recorder.note, watchers.on_event]
        with (
            _recorded(chronicle, recorder) as records,
            Remote(
                files,
                pipeline.name,
                lock,
                on_stop=stopping.ask,
                desk=partial(Desk, pace=place.pace, transfers=place.transfers, earlier=earlier),
                transfers=place.transfers,
                on_status=watchers.on_status,
                speaks=settings.instance is None,
            ) as remote,
        ):
            records.remote = remote
            conf = in_place(settings.spark_settings)
            if needs_s3a:
                conf = with_s3a(conf)
            session = RunSession(
                spark,
                lambda: own_session(
                    pipeline.name,
                    place.spark_log_of(settings.instance),
                    conf,
                    pipeline.folder,
                    partial(run.begin, "making_session"),
                ),
            )
            kind = Run if settings.instance is None else _together()
            run = kind(pipeline, definitions, root_of_run, session, settings, view, stopping, remote, on_step)
            run.feed, run.target = feed, target
            run.chronicle, run.recorder, run.earlier = chronicle, recorder, earlier
            records.run = run
            if closes_windows:
                run.close_windows()
            with _leaving_nothing(root_of_run, place, remote, recorder, stays=stays):
                run.check_before_spark()
            run.start_spark()
            with _leaving_nothing(root_of_run, place, remote, recorder, stays=stays):
                remote.ended_as = run.run()
                remote.ended_because = run.why_ended() or _why_ended(stopping, remote.ended_as, target)
        if view is not None:
            view(remote.status)


def _last_words(place: Place) -> RunStatus | None:
    """What the run before said last. That it cannot be read now stops nobody."""
    with suppress(TidegateError, OSError):
        return last_words(place.files)
    return None


class _Recorded:
    """Whose end is to be in the history."""

    run: Run | None = None
    remote: Remote | None = None


@contextmanager
def _recorded(chronicle: Chronicle, recorder: Recorder) -> Iterator[_Recorded]:
    """How a run ends is told last, when it has been said; and what is to be written is, as far as there is time."""
    records = _Recorded()
    is_interrupted = False
    try:
        yield records
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        if records.run is not None and records.remote is not None and records.run.ends_pipeline:
            chronicle.ended(records.remote.status.state, records.remote.status.why)
        recorder.close(_LAST_WORDS_WHEN_INTERRUPTED_S if is_interrupted else _LAST_WORDS_S)


def _is_any_in_a_bucket(pipeline: Pipeline) -> bool:
    """Of its tables."""
    tables = (sink.table for sink in pipeline.sinks.values())
    return any(table.kind == "delta" and is_bucket_url(table.address) for table in tables)


def _is_local(settings: RunOptions, spark: SparkSession | None) -> bool:
    return is_local(master_of(settings.spark_settings, spark))


def _lock(place: Place, settings: RunOptions) -> RootLock:
    if settings.instance is None:
        return place.lock(take_over=settings.take_over)
    return place.lock_of(settings.instance, take_over=settings.take_over)


def _together() -> type[Run]:
    """Not above: a run alone needs none of it, and it needs all of this."""
    from tidegate.engine.together import RunTogether

    return RunTogether


def _why_ended(stop: Stop, done: StopRun, target: Target | None) -> str:
    if not stop.wanted:
        return "all its input is consumed" if target is None else f"it has come to {target.name}"
    if stop.how.close_windows and done.close_windows:
        return "it was told to stop, and has closed its windows"
    return "it was told to stop, and has drained" if stop.how.drain and done.drain else "it was told to stop"


@contextmanager
def _leaving_nothing(root: Root, place: Place, remote: Remote, recorder: Recorder, *, stays: bool) -> Iterator[None]:
    """A root that was made for a run which then failed to start anything is removed. One of a run that was interrupted
    stays, and says so: nothing was wrong with it."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        with suppress(StoreUnavailable):
            if not stays and root.is_unused:
                remote.fall_silent()
                recorder.forget()
                place.remove()
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

    def __init__(self, fitting: SparkFitting, check: Callable[[DecisionLog], None]) -> None:
        """`check` raises where the run has to give way to another one."""
        self._fitting = fitting
        self._check = check

    def fits(self, log: DecisionLog, base: Manifest | None) -> bool:
        self._check(log)
        return self._fitting.fits(log, base)


class Run:
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
        self.chronicle = Chronicle(options.instance)
        """Whose observers are told of all that happens: `chronicle.observers.append(…)`."""
        self.recorder: Recorder | None = None
        self.earlier: RunStatus | None = None
        """What the run before said last."""
        self._because: tuple[StartedBecause, str | None] | None = None
        """Why the next generation is opened; None: because the run starts."""
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
        self.chronicle.begin(step)
        begun = StartingStep(step=step, since=now(), stage=stage, number=number, of=of)
        self._remote.begin(begun)
        if self._on_step is not None:
            with suppress(OSError):  # of a terminal that is gone; as soon as stages run, that ends the run
                self._on_step(begun)

    def start_spark(self) -> SparkSession:
        """Spark's session, which is started if it is not there or no longer."""
        self._stop.is_starting = True
        if not self._spark.is_there:
            fetches = PACKAGES in self._options.spark_settings or isinstance(self._root.work, Mounted)
            self.begin("fetching_packages" if fetches else "starting_spark")
        try:
            session = self._spark.started()
        except OSError as error:
            raise StoreUnavailable(f"Spark could not be started: {told(error)}") from error
        self._stop.is_starting = False
        self._check_reached(session)
        return session

    def _check_reached(self, session: SparkSession) -> None:
        """Whoever does Spark's work has to reach where it is done."""
        if isinstance(self._root.work, Mounted):
            prepare(session, self._root.work.settings())
        if is_local(master_of({}, session)):
            return
        if not isinstance(self._root.work, Mounted):
            check_shared(session, self._root.paths.root, "the root")
        tables = [sink.table.address for sink in self._pipeline.sinks.values() if sink.table.kind == "delta"]
        for folder in sorted({Path(address).parent for address in tables if not is_bucket_url(address)}):
            check_shared(session, folder, "a Delta table")

    @property
    def ends_pipeline(self) -> bool:
        """Whether with it the pipeline ends."""
        return True

    def why_ended(self) -> str | None:
        """For what other reason than those of a run alone."""
        return None

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
                self._goes_on("windows", None)
                continue
            except (StageFailed, CheckpointsFailed, SinkFailed, StoreUnavailable, SparkLost) as error:
                if isinstance(error, FINAL) or (generation is None and not failures):
                    self._give_up(generation, error)
                    raise  # what cannot be opened at first is told at once
                if isinstance(error, SparkLost) and not self._spark.can_restart:
                    self._give_up(generation, error)
                    raise
                with suppress(StoreUnavailable):  # then it is asked again when it is opened
                    self._check_not_superseded()
                if generation is not None and generation.has_advanced:
                    failures = 0  # it has come further: this is another failure, not the same again
                failures += 1
                self._is_drained = False  # a checkpoint since may have something in flight
                if failures > self._options.restarts or self._stop.is_soon:
                    self._tell_next(failures)
                    self._give_up(generation, error)
                    raise
                pause_s = self._pause_after(failures)
                self.chronicle.over(generation, str(error))
                self.chronicle.failed(error, round(pause_s * 1000))
                self._goes_on("failure", str(error))
                _log.warning("%s; restarting from the last checkpoint in %.1f s", error, pause_s)
                self._told(self._tell, self._remote.restarting(str(error)))
                failure = error
            finally:
                self._watch.stop()
                self._rereading.stop()
                self.chronicle.over(generation, "the run has ended")
                if generation is not None:
                    self._stop_all(generation)
            if self._stop.wait(pause_s):
                raise failure

    def _give_up(self, generation: Generation | None, error: TidegateError) -> None:
        """A failure after which the run does not go on. One that never ran is told by how it ended."""
        self.chronicle.over(generation, str(error))
        if generation is not None:
            self.chronicle.failed(error, None)

    def _goes_on(self, because: StartedBecause, why: str | None) -> None:
        """With another generation, for this reason."""
        self._because = because, why
        self.chronicle.restart()

    def _stop_all(self, generation: Generation) -> None:
        self._rounds.doing("stopping its queries, and waiting for snapshots and commits that are under way")
        generation.stop()
        if generation.has_stuck_queries:
            _log.warning("a query cannot be stopped: Spark's process is ended, and the next generation starts another")
            self._spark.give_up()
        self._rounds.doing(None)

    def _pause_after(self, failures: int) -> float:
        """How long to wait before the next try, in seconds."""
        first_ms = as_ms("restart_pause", self._options.restart_pause)
        return RetryPause(first_ms, max(first_ms, _LONGEST_PAUSE_MS)).after(failures) / 1000

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
        addresses = [table.address for table in tables if table.kind == "delta"]
        yield from (Path(address) for address in addresses if not is_bucket_url(address))
        yield from scratch_folders(self._spark.started())

    def _check_not_superseded(self) -> DecisionLog:
        log = self._root.decisions.read()
        self._check_need_not_give_way(log)
        return log

    def _check_need_not_give_way(self, log: DecisionLog) -> None:
        if self._newest_generation is not None and log.generation > self._newest_generation:
            raise Superseded(self._newest_generation, log.generation)

    # -- opening ----------------------------------------------------------------------------------

    def _open(self) -> Generation:
        session = self.start_spark()
        sinks = self._sinks(session)
        is_set = partial(has_set, session) if self._spark.is_given else self._options.spark_settings.__contains__
        number = self._check_not_superseded().next_generation
        examined, self._examined = self._examined, {}
        with SparkFitting(
            self._definitions,
            self._root,
            session,
            sinks,
            is_set,
            self.begin,
            meant=self._options.meant(),
            target=self.target,
            apart=self._apart(),
        ) as fitting:
            fitting.build(number)
            own_time = [name for name, each in fitting.built.items() if each.has_event_time]
            self._options.check_effect_on_time(self._definitions, own_time)
            opening = RootOpening(self._root, sinks, examined, self._claimant())
            opened, _ = opening.open(_GivingWay(fitting, self._check_need_not_give_way))
        for change in fitting.changes:
            _log.warning("%s", change)
        self._remote.changed(fitting.changes)
        for sink in sinks.values():  # now that the root stays, and before anything is staged
            sink.claim()
        for sink in fitting.parted:  # all that their tables are to show they do
            with suppress(TidegateError, OSError):
                sink.forget_staged(opened.generation)
        self._holds_sources |= self._stop.how.drain
        generation = self._generation(session, sinks, fitting, opened)
        self._tell_closed(generation)
        frames = {name: each.frame for name, each in fitting.built.items()}
        self.chronicle.follow(generation, opened)
        launched = self._launched(generation, frames, fitting.base)
        self._note_started(opened, opening.skipped)
        return launched

    def _note_started(self, opened: Opened, skipped: Sequence[int]) -> None:
        """From now on the root stays, and what happens is written."""
        because, self._because = self._because or why_started(self.earlier), None
        if self.recorder is not None:
            self.recorder.begin(Missed(self._root.store, self.earlier, opened.log, opened.largest_id))
        self.earlier = None
        self.chronicle.started(
            opened,
            because,
            run=self._remote.status,
            skipped=skipped,
            settings=settings_told(self._options),
        )

    def _generation(
        self, session: SparkSession, sinks: Mapping[str, BoundSink], fitting: SparkFitting, opened: Opened
    ) -> Generation:
        part = self._part(fitting, opened)
        ground = Ground(
            self._pipeline.name,
            self._root.store,
            self._root.work,
            opened,
            fitting.base,
            fitting.shape,
            deletes_from=self._root.pace.deletes_from,
        )
        own = [each for each in fitting.queries if part.runs(each.name)]
        return Generation(
            fitting.queries,
            ground,
            self._options.config(),
            sinks,
            self._options.bounds(),
            launch=Launch(
                own,
                fitting.built,
                fitting.in_order,
                self._root.store,
                session,
                self.begin,
                available_now=self._options.available_now,
                closes=self._is_drained and self._stop.how.close_windows,
                plans=fitting.plans,
            ),
            part=part,
        )

    def _claimant(self) -> str:
        """By what name it claims: another one each time."""
        return uuid.uuid4().hex

    def _apart(self) -> frozenset[str]:
        """Stages that must not run in the query of their input."""
        return frozenset() if self._options.chain else frozenset(each.name for each in self._definitions)

    def _part(self, fitting: SparkFitting, opened: Opened) -> Part:  # noqa: ARG002
        """What this process has to do with a generation that it leads."""
        return Part()

    def _launched(
        self, generation: Generation, frames: Mapping[str, DataFrame], base: Manifest | None, *, rereads: bool = True
    ) -> Generation:
        if self._holds_sources:
            generation.hold_sources()
        try:
            generation.poll()  # the first round launches it
            self._watch_sources(generation, frames)
            if rereads:
                self._rereading = Rereading(self._root.store, base)
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

    def _watch_sources(self, generation: Generation, frames: Mapping[str, DataFrame]) -> None:
        here = {member.name for stage in generation.stages.values() for member in stage.definition.members}
        sources = {each.name: frames[each.name] for each in self._definitions if not each.inputs and each.name in here}
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
            self._look_around(generation)
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
            if self._is_to_end() or (feeding is not None and not ending.is_begun and feeding.is_over()):
                self._begin(ending)
            if ending.is_over():
                self._show(generation, ending)
                self._check_closed(generation, ending)
                return ending.done
            self._rounds.doing(None)
            self._pause(generation)

    def _look_around(self, generation: Generation) -> None:
        """Whether the others are as they were; there are none."""

    def _is_to_end(self) -> bool:
        return self._stop.wanted

    def _pause(self, generation: Generation) -> None:
        """Until the next round, or until Spark has committed something; what flows have waited for goes on at once."""
        deadline = time.monotonic() + _PAUSE_S
        look_s = _LOOK_EVERY_S
        while (left_s := deadline - time.monotonic()) > 0:
            if generation.carrier.woken.wait(min(left_s, look_s)):
                generation.carrier.woken.clear()
                if generation.has_heard:
                    return
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
        # What was asked for since the last round is about to begin.
        is_draining = ending.is_draining if ending.is_begun else self._stop.how.drain
        step: StoppingStep = "draining" if is_draining else "last_checkpoint"
        if generation.closes if is_draining else ending.goes_on:
            step = "closing_windows"
        self._tell(self._remote.update(generation, step if self._is_to_end() else None))

    def _tell(self, status: RunStatus) -> None:
        if self._view is not None:
            try:
                self._view(status)
            except OSError as error:  # of a pipe or a terminal that is gone, not of what the run keeps
                raise _NotShown(error) from error
