"""A simulated driver process, in which everything but Spark and its tables is what runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidegate.engine.carrier import Carrier, Clock
from tidegate.engine.changes import Meant, TakenUp, take_up
from tidegate.engine.control import Desk, Remote
from tidegate.engine.copies import finish_pending
from tidegate.engine.ending import Ending
from tidegate.engine.forks import read_fork
from tidegate.engine.generation import Generation, Ground
from tidegate.engine.launching import lay_out
from tidegate.engine.opening import RootOpening
from tidegate.engine.options import Bounds
from tidegate.engine.part import Part
from tidegate.engine.parting import Reach, part
from tidegate.engine.requests import StopRun
from tidegate.engine.root import Root
from tidegate.engine.setting_back import PipelineTables, known_tables
from tidegate.engine.tables import address_of, check_goes_on, check_shows_nothing, goes_on_from_rows
from tidegate.errors import (
    Fenced,
    PipelineChanged,
    RecoveryRefused,
    Superseded,
    TidegateError,
    UnknownCheckpoint,
)
from tidegate.flows.opening import Opened
from tidegate.flows.requests import Claim, CommitSink, Patience
from tidegate.protocol.commit import RetryPause
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.coordinator import AbortReason, Checkpoint
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.messages import Barrier
from tidegate.sinks.contract import BoundSink, RowSink, SinkPlace
from tidegate.spark.definition import StageDefinition
from tidegate.spark.filelog import StageSource
from tidegate.storage.files import Files
from tidegate.storage.inspection import look_through
from tidegate.storage.manifest import Manifest, StageShape, TableAddress
from tidegate.storage.paths import RootPaths
from tidegate.testing.played import PlayedQuery, PlayedRows, Step
from tidegate.testing.simulator.checkers import SimulationFailure
from tidegate.testing.simulator.whole.files import Killed, Life, SeenFiles
from tidegate.testing.simulator.whole.roots import FIRST, SimulatedRoot
from tidegate.testing.simulator.world import Process, World

if TYPE_CHECKING:
    from tidegate.testing.simulator.whole.cluster import WholeCluster

T = TypeVar("T")

TICK_MS: Final = 20
_LOOKS_EVERY: Final = 5
_DESK_MS: Final = 60
# Few: stages have a handful of files, and lists are to be written, merged and cleaned up.
_MOST_IN_A_MANIFEST: Final = 4
_LANDS_ANYWAY: Final = tuple(f"tidegate-{kind.__name__}" for kind in (Claim, CommitSink))
"""What takes effect though its sender is dead or asleep by then."""

PATIENCE: Final = Patience(
    give_up_ms=600,
    pause=RetryPause(first_ms=5, longest_ms=60),
    sink_pause=RetryPause(first_ms=5, longest_ms=60),
)


class _SimulatedClock(Clock):
    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def now_ms(self) -> int:
        return self._world.now

    def utc(self) -> datetime:
        """It jumps, now and then."""
        jumped = self._world.random.choice((0, 0, 0, 0, 0, 0, 500, -500, 10**9))
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(milliseconds=self._world.now + jumped)


class OpeningClock(_SimulatedClock):
    """All of an opening happens at one moment, but for the time that it sleeps, which nobody else notices."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._slept_ms = 0

    @property
    def now_ms(self) -> int:
        return super().now_ms + self._slept_ms

    def sleep(self, delay_ms: int) -> None:
        self._slept_ms += delay_ms


class _Fits:
    """A pipeline that may have changed since its checkpoint."""

    def __init__(
        self,
        definitions: list[StageDefinition],
        shape: Mapping[str, StageShape],
        meant: Meant,
        sinks: Mapping[str, BoundSink],
        root: Root,
        reach: Reach,
    ) -> None:
        self._definitions = definitions
        self._shape = shape
        self._meant = meant
        self._sinks = sinks
        self._root = root
        self._reach = reach
        self.base: Manifest | None = None
        self.taken: TakenUp | None = None
        self.parted: tuple[BoundSink, ...] = ()

    def fits(self, log: DecisionLog, base: Manifest | None) -> bool:
        schema: Any = None  # a played table takes any rows
        new: list[str] = []
        self.taken = None
        if base is not None:
            self.taken = take_up(self._root.store, base, self._shape, self._meant)
            parted = part(self.taken, self._definitions, self._root, log, self._meant, self._reach)
            base, self.parted = parted.base, parted.before
            new = self.taken.new
        for name, sink in self._sinks.items():
            is_there = sink.check_table(schema, self._shape[name].output_mode)
            if base is not None and is_there and name in new:
                check_shows_nothing(sink, base)
            if base is not None and goes_on_from_rows(base, name):
                check_goes_on(sink, address_of(sink) if is_there else None, base, log, self._root.store)
            if not is_there:
                sink.prepare_table(schema)
        self.base = base
        return True


class SimulatedDesk(Desk):
    """Worked at in simulated time, by its driver."""

    def _start_working(self) -> None:
        self.begin()

    def _end_working(self, patience_s: float) -> None:  # noqa: ARG002
        self.round(is_last=True)


class PlayedLock:
    """Of one root, as one process sees it."""

    is_shared = False
    carries_words = False

    def __init__(self, root: SimulatedRoot, run: str) -> None:
        self._root = root
        self._run = run

    def speak(self, is_ours: bool) -> None:
        """As a lock of a folder: what is said lies in a file."""

    def take_if_free(self) -> bool:
        if self._root.lock is None:
            self._root.lock = self._run
        return self._root.lock == self._run

    def release(self) -> None:
        if self._root.lock == self._run:
            self._root.lock = None


class _SimulatedGeneration(Generation):
    """Is looked at by what counts and checks."""

    cluster: WholeCluster
    root: SimulatedRoot

    def on_begun(self, checkpoint: Checkpoint) -> None:
        self.root.checkers.monotone_ids.on_prepared(self.generation, checkpoint.checkpoint_id, checkpoint.barrier.epoch)
        super().on_begun(checkpoint)

    def on_aborted(self, barrier: Barrier, reason: AbortReason, detail: str) -> None:
        self.cluster.aborted += 1
        super().on_aborted(barrier, reason, detail)


class SimulatedDriver:
    """A process that runs the pipeline, again and again, until it is superseded, stopped or killed."""

    def __init__(self, cluster: WholeCluster, name: str) -> None:
        self.cluster = cluster
        self.world: World = cluster.world
        self.process = Process(name)
        self.name = name
        self.life = Life()
        self.generation: _SimulatedGeneration | None = None
        self._ending: Ending | None = None
        self._queries: dict[str, PlayedQuery] = {}
        self.root = cluster.root
        """Where it runs, or ran last."""
        self.folder = self.root.folder
        """Where the tables are that it writes to."""
        self._runs = self._tries = 0
        self._lock: PlayedLock | None = None
        self._remote: Remote | None = None
        self._stop: StopRun | None = None
        self._is_bounded = False

    # -- life and death ---------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self.process.alive and self._remote is not None

    @property
    def run(self) -> str:
        """The one that it runs, or has run last."""
        return f"{self.name} {self.process.incarnation} {self._runs}"

    def start(self) -> None:
        """Somebody starts the pipeline here, though it may run elsewhere; what runs here is interrupted."""
        if self._remote is not None:
            self._end(KeyboardInterrupt("another one is started"))
        self.world.after(self.world.delay(20), self.process, self._alive, self._begin)

    def crash(self, *, leaves_orphans: bool = True) -> None:
        """The process dies. Spark's, which is another one, may go on for a moment."""
        self.world.note("{} crashes", self.name)
        self.process.crash()
        orphans, self._queries = self._queries, {}
        self.generation = self._remote = None
        if self._lock is not None:
            self._lock.release()
        for query in orphans.values():
            if leaves_orphans and self.world.random.random() < 0.3:
                self.life.calls_left = None
                for _ in range(self.world.random.randint(1, 6)):
                    self.world.after(self.world.delay(40), None, self._orphan_step, query, self.cluster.downs)
        self.world.after(self.world.delay(150), None, self._restart)

    def _orphan_step(self, query: PlayedQuery, downs: int) -> None:
        if query.isActive and downs == self.cluster.downs:  # else its machine was down since
            with suppress(Killed):  # whoever kills the process that is dead already
                query.step()

    def _restart(self) -> None:
        """Somebody starts it again, unless the pipeline runs elsewhere by now, which the lock tells."""
        if not self.process.alive and not self.cluster.is_down:
            self.process.restart()
            self.life = Life()
            if self.world.chance(self.cluster.query_faults.dies_early):
                self.life.calls_left = self.world.random.randint(0, 150)
            if not self.cluster.is_running:
                self.start()

    def _alive(self, act: Callable[..., None], *arguments: Any) -> None:
        """What the process does may kill it, and may fail."""
        try:
            act(*arguments)
        except Killed:
            self.killed_at(act.__name__)
        except RecoveryRefused as refusal:
            self._end(refusal)
            self.cluster.on_refused(self.root, refusal)
        except PipelineChanged as misfit:
            self._end(misfit)
            self.cluster.on_misfit(misfit)
        except TidegateError as error:
            self._on_failed(error)

    def killed_at(self, what: str) -> None:
        self.cluster.killed_at[what] += 1
        self.cluster.crashes += 1
        self.crash()

    def _on_failed(self, error: TidegateError) -> None:
        self.world.note("{} fails: {}: {}", self.name, type(error).__name__, error)
        own = self.generation
        self._drop()
        # It gives way to a generation that it has not opened itself.
        is_over = own is not None and self.root.checkers.log.generation > own.generation
        is_soon = self._stop is not None and not self._stop.drain
        if is_over or self.root is not self.cluster.root or is_soon or isinstance(error, Superseded | Fenced):
            self._end(error)
        elif self._remote is not None:
            self._remote.restarting(str(error))
            self.world.after(self.world.delay(30), self.process, self._alive, self._open, self._runs)

    def _drop(self) -> None:
        if self.generation is not None:
            self.generation.carrier.stop(lambda _: 0)
            self.generation = None
        for query in self._queries.values():
            query.stop()
            self._maintain_later(query)
        self._queries = {}

    def kill_query(self) -> None:
        """One of its queries dies, in the middle of whatever it does."""
        if self._queries:
            name = self.world.random.choice(list(self._queries))
            self.world.note("the query of {} at {} dies", name, self.name)
            self._queries[name].fail(f"the query of {name} has died")

    # -- a run ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A process begins to run the pipeline, and takes over from whoever does."""
        if self._remote is not None:
            return
        self._runs += 1
        self._stop = None
        self.root, self.folder = self.cluster.root, self.cluster.root.folder
        self.find_tables()
        self._is_bounded = self.world.chance(self.cluster.scenario.available_now)
        self._lock = self._new_lock()
        self._lock.take_if_free()
        lock: Any = self._lock
        desks: list[SimulatedDesk] = []

        def desk(*arguments: Any) -> SimulatedDesk:
            desks.append(SimulatedDesk(*arguments))
            return desks[0]

        files: Any = self.files(fails=True, forces=False)
        self._remote = Remote(files, "simulated", lock, self._on_stop, clock=self._clock(), desk=desk)
        self._remote.__enter__()
        self._work_at(desks[0], self._runs)
        self._enter()

    def _new_lock(self) -> PlayedLock:
        return PlayedLock(self.root, self.run)

    def _enter(self) -> None:
        """It has the root."""
        self._open(self._runs)

    def find_tables(self) -> None:
        """Those that the pipeline is written for, unless the root is a fork's. Whoever decides anything finishes first
        what was decided of a fork: the next decision would not."""
        if not self.cluster.scenario.forks:
            return
        store: Any = self.files(fails=True)
        root = Root(store, "simulated", root_id=self.cluster.new_id())
        self.folder = FIRST
        finish_pending(root, self.tables(), OpeningClock(self.world))
        fork = read_fork(store)
        if fork is not None:
            self.folder = next(iter(fork.tables.values())).table.rpartition("/")[2]

    def tables(self) -> dict[str, Any]:
        """Of all sinks, as it finds them now."""
        return {each.name: each.sink for each in self.cluster.definitions(self) if each.sink is not None}

    def _clock(self) -> Clock:
        return _SimulatedClock(self.world)

    def _on_stop(self, how: StopRun) -> None:
        self.world.note("{} is asked to stop: {}", self.name, how)
        self._stop = how if self._stop is None else self._stop.and_also(how)

    @property
    def _is_to_stop(self) -> bool:
        return self._stop is not None

    def _work_at(self, desk: SimulatedDesk, run: int) -> None:
        if self._remote is not None and run == self._runs:
            desk.round()
            self.world.after(_DESK_MS, self.process, self._alive, self._work_at, desk, run)

    def _end(self, error: BaseException | None) -> None:
        """The run is over: it says how, and lets go of the root."""
        self._drop()
        remote, self._remote = self._remote, None
        if remote is not None:
            self.world.note("the run of {} has ended: {}", self.name, error)
            try:
                remote.__exit__(None if error is None else type(error), error, None)
            except Killed:
                self.killed_at("_end")
        if self._lock is not None:
            self._lock.release()

    # -- opening ----------------------------------------------------------------------------------

    def files(self, *, fails: bool, forces: bool = True) -> SeenFiles:
        return SeenFiles(self.root.disk, self.world, self.life, fails=fails, forces=forces)

    def _open(self, run: int) -> None:
        if self._remote is None or run != self._runs:
            return
        store: Any = self.files(fails=True)
        root = Root(store, "simulated", root_id=self.cluster.new_id())
        sinks = self.sinks(store, root.id)
        shape = self.cluster.shape(self)
        clock = OpeningClock(self.world)
        opening = RootOpening(root, sinks, claimant=self._claimant(), clock=clock)
        definitions = self.cluster.definitions(self)
        fitting = _Fits(definitions, shape, self.cluster.versions.meant, sinks, root, self._reach_table)
        opened, _ = opening.open(fitting)
        self.cluster.on_opened(self.root, opened.generation, fitting.taken)
        for sink in sinks.values():
            sink.claim()
        for sink in fitting.parted:
            sink.forget_staged(opened.generation)
        self._run(opened, fitting.base, sinks, store)

    def _claimant(self) -> str:
        return self.cluster.new_id()

    def set_back(self, checkpoint_id: int) -> None:
        """As `tidegate restore` does, which is no run. Raises if it cannot be done."""
        self.find_tables()
        store: Any = self.files(fails=True)
        root = Root(store, "simulated", root_id=self.cluster.new_id())
        sinks = self.sinks(store, root.id)
        log = root.decisions.read()
        record = log.completed(checkpoint_id)
        if record is None:
            raise UnknownCheckpoint(f"{checkpoint_id} is gone")
        addresses = known_tables(store, log)
        tables = PipelineTables(store, "simulated", root.id, addresses, sinks).look_back(look_through(store, record))
        if any(each.refused is not None for each in tables):
            raise RecoveryRefused(f"{tables}")
        if self.world.random.random() < 0.5:
            self.life.calls_left = self.world.random.randint(0, 50)  # killed in the midst of what changes anything
        clock = OpeningClock(self.world)
        RootOpening(root, sinks, claimant=self.cluster.new_id(), clock=clock).set_back(checkpoint_id)
        self.cluster.set_back += 1

    def _reach_table(self, _table: TableAddress, place: SinkPlace) -> BoundSink:
        return self.cluster.table(place.stage, self).bind(place)

    def sinks(self, store: Files, root: str) -> dict[str, BoundSink]:
        return {
            each.name: each.sink.bind(SinkPlace("simulated", each.name, store.at(RootPaths.sink(each.name)), root=root))
            for each in self.cluster.definitions(self)
            if each.sink is not None
        }

    def _run(self, opened: Opened, base: Manifest | None, sinks: Mapping[str, BoundSink], store: Files) -> None:
        self.world.note("{} opened generation {} from {}", self.name, opened.generation, opened.base)
        queries = self.cluster.queries(self, base, self._apart())
        ground = self._ground(opened, base, store)
        config = self.cluster.config_now()
        generation = self._generation(queries, ground, config, sinks, self._part(queries, ground, config))
        if self._stop is not None and self._stop.drain:
            generation.hold_sources()
        self._take_up(generation)

    def _apart(self) -> frozenset[str]:
        """Stages that must not run in the query of their input."""
        return frozenset()

    def _part(self, queries: Sequence[StageDefinition], ground: Ground, config: CheckpointConfig) -> Part:  # noqa: ARG002
        """What this process has to do with a generation that it leads."""
        return Part()

    def _ground(self, opened: Opened, base: Manifest | None, store: Files) -> Ground:
        local: Any = self.files(fails=False)
        deletes_from = 1 + opened.generation % 2 * 3
        shape = self.cluster.shape(self)
        return Ground("simulated", store, local, opened, base, shape, _MOST_IN_A_MANIFEST, deletes_from)

    def _generation(
        self,
        queries: Sequence[StageDefinition],
        ground: Ground,
        config: CheckpointConfig,
        sinks: Mapping[str, BoundSink],
        part: Part,
    ) -> _SimulatedGeneration:
        generation = _SimulatedGeneration(
            queries,
            ground,
            config,
            sinks,
            Bounds(self.cluster.backlog, drift_ms=self.cluster.scenario.drift_ms),
            launch=partial(self._launch, [each for each in queries if part.runs(each.name)]),
            patience=PATIENCE,
            carrier=Carrier(_SimulatedClock(self.world), self._beside),
            part=part,
        )
        generation.cluster, generation.root = self.cluster, self.root
        return generation

    def _take_up(self, generation: _SimulatedGeneration) -> None:
        self.generation, self._ending = generation, Ending(generation)
        self._ticks = 0
        self._tries += 1
        self._tick(generation)

    # -- running ----------------------------------------------------------------------------------

    def _beside(self, name: str, call: Callable[[], T], /) -> Future[T]:
        future: Future[T] = Future()
        world, process, incarnation = self.world, self.process, self.process.incarnation
        lands_anyway = name in _LANDS_ANYWAY

        def act() -> None:
            try:
                answer: Any = call()
                failure: BaseException | None = None
            except Killed:
                if process.incarnation == incarnation:
                    self.killed_at(name.removeprefix("tidegate-"))
                return
            except Exception as error:
                if (verdict := _verdict_in(error)) is not None:
                    raise verdict from error  # what a checker has found is nothing that a run could try again
                answer, failure = None, error
            world.after(world.delay(4), process, resolve, answer, failure)

        def resolve(answer: Any, failure: BaseException | None) -> None:
            if failure is None:
                future.set_result(answer)
            else:
                future.set_exception(failure)

        there_ms = self.cluster.delay_of_store()
        world.after(there_ms, None if lands_anyway else process, act)
        return future

    def _tick(self, generation: Generation) -> None:
        if generation is not self.generation:
            return
        assert self._ending is not None
        assert self._remote is not None
        ending, remote = self._ending, self._remote
        generation.poll()
        remote.serve(generation)
        self._ticks += 1
        if self._ticks % _LOOKS_EVERY == 0:
            generation.check_queries()
            remote.update(generation, "draining" if ending.is_draining else None)
            if self._is_bounded or ending.is_draining:
                ending.look()
            if self._is_bounded and not ending.is_begun and ending.has_consumed_all:
                ending.begin(self._stop or StopRun())
        if self._stop is not None:
            ending.begin(self._stop)
        if ending.is_over():
            self._end_in_order(generation, remote, ending.done)
            return
        self._tick_later(generation)

    def _tick_later(self, generation: Generation) -> None:
        self.world.after(TICK_MS, self.process, self._alive, self._tick, generation)

    def _end_in_order(self, generation: Generation, remote: Remote, done: StopRun) -> None:
        """Somebody may have asked for more when it was too late: he is told so."""
        self.cluster.on_drained(self.root, self.run, generation.generation, done)
        if self._is_bounded and not self._is_to_stop:
            self.cluster.check_read_all(self.root, generation.generation)
        remote.ended_as = done
        remote.ended_because = "all its input is consumed" if self._stop is None else "it was told to stop"
        self._end(None)

    def _launch(self, queries: Sequence[StageDefinition], generation: Generation) -> None:
        local: Any = self.files(fails=False)
        is_held = generation.holds_sources
        self._queries = {}
        starts: dict[str, Callable[[], PlayedQuery]] = {}
        for definition in queries:
            sources = self.cluster.sources_of(self.root, generation.generation, definition.head)
            folders = lay_out(local, generation, definition, sources, window=self.cluster.window)
            stage = generation.stages[definition.name]
            stage.progress.may_end = self._is_bounded and not definition.inputs
            start = self._starting(generation, definition, sources)
            is_started = bool(definition.inputs) or not is_held
            if is_started:
                starts[definition.name] = partial(start, *folders)
            if not definition.inputs:
                generation.may_pause(definition.name, start, is_started=is_started)  # type: ignore[arg-type]
        for name, begin in starts.items():
            generation.stages[name].progress.query = begin()  # type: ignore[assignment]

    def _starting(
        self, generation: Generation, definition: StageDefinition, sources: Sequence[StageSource]
    ) -> Callable[[Files, Files], PlayedQuery]:
        cluster, name, number = self.cluster, definition.name, generation.generation
        runner = f"{self.run}, its try {self._tries}"
        sink = generation.sinks.get(name)
        root = self.root
        spec = root.stages_of[number][definition.head]
        is_late = cluster.is_late(definition.head)
        stage_rows = generation.stages[name].row_staging(None) if isinstance(sink, RowSink) else None  # type: ignore[arg-type]

        def stage(rows: PlayedRows, batch: int) -> None:
            assert stage_rows is not None
            stage_rows(rows, batch)  # type: ignore[arg-type]

        def on_consumed(path: int, expected: int, first: int) -> None:
            # A run that wakes up when another has taken over reads what that one may have deleted.
            if number >= root.checkers.log.generation and not (is_late and not expected):
                root.checkers.rows_in_order.on_consumed(spec, {path: expected}, path, first)

        def start(checkpoint: Files, output: Files) -> PlayedQuery:
            query = PlayedQuery(
                checkpoint,
                output,
                cluster.played_sources(definition.head, number, self.files(fails=False), sources),
                cluster.plan_of(definition),
                available_now=generation.stages[name].progress.may_end,
                new_id=cluster.new_id,
                now_ms=lambda: self.world.now,
                stage_rows=stage,
                on_consumed=on_consumed,
            )
            if name in self._queries:
                self._maintain_later(self._queries[name])
            self._queries[name] = query
            root.on_started(number, name, runner)
            self._step_later(query, definition.head, number)
            return query

        return start

    def _step_later(self, query: PlayedQuery, name: str, generation: int, *, times: int = 1) -> None:
        delay_ms = self.world.delay(self.cluster.slowness[self.cluster.versions.own(name)] * times)
        self.world.after(delay_ms, self.process, self._alive, self._step, query, name, generation)

    def _step(self, query: PlayedQuery, name: str, generation: int) -> None:
        if not query.isActive:
            return
        rng, faults = self.world.random, self.cluster.query_faults
        if faults.task_fails and rng.random() < faults.task_fails:
            query.task_fails = 1
        if faults.runs_away and rng.random() < faults.runs_away:
            self.world.note("the query of {} runs away", name)
            query.run(120)
        step = query.step()
        if step is Step.COMMITTED:
            self.cluster.on_batch(self.root, generation, name, query)
            if rng.random() < 0.2:
                for _ in query.maintain():
                    pass
        self._step_later(query, name, generation, times=8 if step is Step.WAITS else 1)

    def _maintain_later(self, query: PlayedQuery) -> None:
        """Spark looks after the state of a query for a while after it was stopped."""
        if self.world.random.random() < 0.3:
            self.world.after(self.world.delay(200), self.process, self._alive, self._maintain, query)

    def _maintain(self, query: PlayedQuery) -> None:
        for _ in query.maintain():
            pass


def _verdict_in(error: BaseException | None) -> SimulationFailure | None:
    """What a checker has found, also where whoever met it has told it in words of its own."""
    while error is not None and not isinstance(error, SimulationFailure):
        error = error.__cause__
    return error
