"""A simulated driver process, in which everything but Spark and its tables is what runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidegate.engine.carrier import Carrier, Clock
from tidegate.engine.generation import Generation, Ground
from tidegate.engine.launching import lay_out
from tidegate.engine.opening import RootOpening
from tidegate.engine.options import Bounds
from tidegate.engine.root import Root, check_shape
from tidegate.engine.tables import address_of, check_goes_on, goes_on_from_rows
from tidegate.errors import Fenced, RecoveryRefused, Superseded, TidegateError
from tidegate.flows.opening import Opened
from tidegate.flows.requests import Claim, CommitSink, Patience
from tidegate.protocol.commit import RetryPause
from tidegate.protocol.decision_log import DecisionLog
from tidegate.sinks.contract import BoundSink, RowSink, SinkPlace
from tidegate.spark.definition import StageDefinition
from tidegate.spark.filelog import StageSource
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, StageShape
from tidegate.storage.paths import RootPaths
from tidegate.testing.played import GateSource, PlayedQuery, PlayedRows, Step, StreamSource
from tidegate.testing.simulator.whole.files import Killed, Life, SeenFiles
from tidegate.testing.simulator.world import Process, World

if TYPE_CHECKING:
    from tidegate.testing.simulator.whole.cluster import WholeCluster

T = TypeVar("T")

TICK_MS: Final = 20
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


class _OpeningClock(_SimulatedClock):
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
    """A pipeline that stays as it is."""

    def __init__(self, shape: Mapping[str, StageShape], sinks: Mapping[str, BoundSink], store: Files) -> None:
        self._shape = shape
        self._sinks = sinks
        self._store = store

    def fits(self, log: DecisionLog, base: Manifest | None) -> bool:
        schema: Any = None  # a played table takes any rows
        if base is not None:
            check_shape(base, self._shape)
        for name, sink in self._sinks.items():
            is_there = sink.check_table(schema, self._shape[name].output_mode)
            if base is not None and goes_on_from_rows(base, name):
                check_goes_on(sink, address_of(sink) if is_there else None, base, log, self._store)
            if not is_there:
                sink.prepare_table(schema)
        return True


class SimulatedDriver:
    """A process that runs the pipeline, again and again, until it is superseded or killed."""

    def __init__(self, cluster: WholeCluster, name: str) -> None:
        self.cluster = cluster
        self.world: World = cluster.world
        self.process = Process(name)
        self.name = name
        self.life = Life()
        self.generation: Generation | None = None
        self._queries: dict[str, PlayedQuery] = {}

    # -- life and death ---------------------------------------------------------------------------

    def start(self) -> None:
        self.life = Life()
        self.world.after(self.world.delay(20), self.process, self._alive, self._open)

    def crash(self) -> None:
        """The process dies. Spark's, which is another one, may go on for a moment."""
        self.world.note("{} crashes", self.name)
        self.process.crash()
        orphans, self._queries = self._queries, {}
        self.generation = None
        for query in orphans.values():
            if self.world.random.random() < 0.3:
                for _ in range(self.world.random.randint(1, 6)):
                    self.world.after(self.world.delay(40), None, self._orphan_step, query)
        self.world.after(self.world.delay(150), None, self._restart)

    def _orphan_step(self, query: PlayedQuery) -> None:
        try:
            query.step()
        except Killed:
            query.stop()

    def _restart(self) -> None:
        """Somebody starts it again, unless the pipeline runs elsewhere by now, which the lock tells."""
        if not self.process.alive:
            self.process.restart()
            self.life = Life()
            if not self.cluster.is_running:
                self.start()

    def _alive(self, act: Callable[..., None], *arguments: Any) -> None:
        """What the process does may kill it, and may fail."""
        try:
            act(*arguments)
        except Killed:
            self.cluster.crashes += 1
            self.crash()
        except RecoveryRefused as refusal:
            self.cluster.on_refused(refusal)
        except TidegateError as error:
            self._on_failed(error)

    def _on_failed(self, error: TidegateError) -> None:
        self.world.note("{} fails: {}: {}", self.name, type(error).__name__, error)
        own = self.generation
        self._drop()
        # It gives way to a generation that it has not opened itself.
        is_over = own is not None and self.cluster.checkers.log.generation > own.generation
        if not is_over and not isinstance(error, Superseded | Fenced):
            self.world.after(self.world.delay(30), self.process, self._alive, self._open)

    def _drop(self) -> None:
        if self.generation is not None:
            self.generation.carrier.stop(lambda _: 0)
            self.generation = None
        for query in self._queries.values():
            query.stop()
        self._queries = {}

    def take_over(self) -> None:
        """Somebody starts the pipeline here, though it may run here or elsewhere."""
        self._drop()
        self.world.after(self.world.delay(20), self.process, self._alive, self._open)

    def kill_query(self) -> None:
        """One of its queries dies, in the middle of whatever it does."""
        if self._queries:
            name = self.world.random.choice(list(self._queries))
            self.world.note("the query of {} at {} dies", name, self.name)
            self._queries[name].fail(f"the query of {name} has died")

    # -- opening ----------------------------------------------------------------------------------

    def files(self, *, fails: bool) -> SeenFiles:
        return SeenFiles(self.cluster.disk, self.world, self.life, fails=fails)

    def _open(self) -> None:
        store: Any = self.files(fails=True)
        root = Root(store, "simulated")
        sinks = self._sinks(store, root.id)
        shape = self.cluster.shape
        clock = _OpeningClock(self.world)
        opening = RootOpening(root, sinks, claimant=self.cluster.new_id(), clock=clock)
        opened, base = opening.open(_Fits(shape, sinks, store))
        for sink in sinks.values():
            sink.claim()
        self._run(opened, base, sinks, store)

    def _sinks(self, store: Files, root: str) -> dict[str, BoundSink]:
        return {
            each.name: each.sink.bind(SinkPlace("simulated", each.name, store.at(RootPaths.sink(each.name)), root=root))
            for each in self.cluster.definitions(self)
            if each.sink is not None
        }

    def _run(self, opened: Opened, base: Manifest | None, sinks: Mapping[str, BoundSink], store: Files) -> None:
        self.world.note("{} opened generation {} from {}", self.name, opened.generation, opened.base)
        local: Any = self.files(fails=False)
        generation = Generation(
            self.cluster.definitions(self),
            Ground("simulated", store, local, opened, base, self.cluster.shape),
            self.cluster.config_now(),
            sinks,
            Bounds(self.cluster.backlog),
            launch=self._launch,
            patience=PATIENCE,
            carrier=Carrier(_SimulatedClock(self.world), self._beside),
        )
        self.generation = generation
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
                    self.cluster.crashes += 1
                    self.crash()
                return
            except Exception as error:
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
        generation.poll()
        generation.check_queries()
        self.world.after(TICK_MS, self.process, self._alive, self._tick, generation)

    def _launch(self, generation: Generation) -> None:
        local: Any = self.files(fails=False)
        self._queries = {}
        for definition in self.cluster.definitions(self):
            sources = [StageSource(each, log) for log, each in enumerate(definition.inputs)]
            folders = lay_out(local, generation, definition, sources, window=self.cluster.window)
            start = self._starting(generation, definition)
            generation.stages[definition.name].progress.query = start(*folders)  # type: ignore[assignment]
            if not definition.inputs:
                generation.may_pause(definition.name, start)  # type: ignore[arg-type]

    def _starting(self, generation: Generation, definition: StageDefinition) -> Callable[[Files, Files], PlayedQuery]:
        cluster, name, number = self.cluster, definition.name, generation.generation
        sink = generation.sinks.get(name)
        spec = cluster.dag.stages[name]
        stage_rows = generation.stages[name].row_staging(None) if isinstance(sink, RowSink) else None  # type: ignore[arg-type]

        def stage(rows: PlayedRows, batch: int) -> None:
            assert stage_rows is not None
            stage_rows(rows, batch)  # type: ignore[arg-type]

        def on_consumed(path: int, expected: int, first: int) -> None:
            cluster.checkers.rows_in_order.on_consumed(spec, {path: expected}, path, first)

        def start(checkpoint: Files, output: Files) -> PlayedQuery:
            local: Any = self.files(fails=False)
            query = PlayedQuery(
                checkpoint,
                output,
                [
                    GateSource(local.at(RootPaths.gate(number, name, each)), local, log)
                    for log, each in enumerate(definition.inputs)
                ]
                or [StreamSource(cluster.streams[name], max_files=cluster.max_files)],
                cluster.plans[name],
                new_id=cluster.new_id,
                now_ms=lambda: self.world.now,
                stage_rows=stage,
                on_consumed=on_consumed,
            )
            self._queries[name] = query
            self._step_later(query, cluster.slowness[name])
            return query

        return start

    def _step_later(self, query: PlayedQuery, slowness_ms: int, *, times: int = 1) -> None:
        delay_ms = self.world.delay(slowness_ms * times)
        self.world.after(delay_ms, self.process, self._alive, self._step, query, slowness_ms)

    def _step(self, query: PlayedQuery, slowness_ms: int) -> None:
        if not query.isActive:
            return
        rng = self.world.random
        if rng.random() < self.cluster.query_faults.task_fails:
            query.task_fails = 1
        if rng.random() < self.cluster.query_faults.runs_away:
            query.run(120)
        step = query.step()
        if step is Step.COMMITTED and rng.random() < 0.2:
            for _ in query.maintain():
                pass
        self._step_later(query, slowness_ms, times=8 if step is Step.WAITS else 1)
