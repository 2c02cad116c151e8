"""The simulated cluster at the second depth: drivers, a root, its tables, and what is checked of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from tidegate.cluster.memory import MemoryKV
from tidegate.engine.chains import as_queries, cannot_join, chains_of, may_join
from tidegate.engine.changes import TakenUp
from tidegate.engine.leading import reports_in
from tidegate.engine.requests import CancelCheckpoint, Request, StopRun, TakeCheckpoint
from tidegate.errors import DamagedCheckpoint, RecoveryRefused, SinkFailed, TidegateError
from tidegate.protocol.backpressure import BacklogBound
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.decision_log import CheckpointCompleted, GenerationOpened, decode_decision
from tidegate.sinks.contract import decode_committable
from tidegate.spark.definition import StageDefinition
from tidegate.spark.filelog import StageSource
from tidegate.storage.inspection import references
from tidegate.storage.manifest import Manifest, SourceStream, StageShape, StageSnapshot, decode_manifest
from tidegate.storage.paths import RootPaths
from tidegate.testing.played import (
    GateSource,
    Plan,
    PlayedQuery,
    PlayedRows,
    PlayedSource,
    PlayedStream,
    PlayedTable,
    StreamSource,
)
from tidegate.testing.simulator.checkers import Checkers, ExactlyOnce, SimulationFailure
from tidegate.testing.simulator.dag import Dag, again
from tidegate.testing.simulator.whole.driver import SimulatedDriver
from tidegate.testing.simulator.whole.files import Disk, Killed, SeenFiles
from tidegate.testing.simulator.whole.instances import SimulatedInstance
from tidegate.testing.simulator.whole.moving import SimulatedMover
from tidegate.testing.simulator.whole.prefix import WholePrefix
from tidegate.testing.simulator.whole.roots import FIRST, Savepoint, SimulatedRoot, TableSeen
from tidegate.testing.simulator.whole.together import Together, Trouble
from tidegate.testing.simulator.whole.users import SimulatedUser
from tidegate.testing.simulator.whole.versions import Changes, Versions
from tidegate.testing.simulator.world import Faults, World

_FAILING_CALLS: Final = frozenset(
    {"commit", "committed", "check_commit", "set_back", "was_set_back", "show_copy", "has_shown_copy"}
)


class QueryFaults(msgspec.Struct):
    """How likely a query does what Spark does when things go wrong, at a step."""

    task_fails: float = 0.0
    runs_away: float = 0.0
    dies_early: float = 0.0
    """Of a process that is started again, before it has done much."""


class WholeScenario(msgspec.Struct, frozen=True):
    """Everything that a seed decides before the first event."""

    dag: Dag
    config: CheckpointConfig
    drivers: int
    rows: dict[str, int]
    faults: Faults
    query_faults: QueryFaults
    fault_phase_ms: int
    crashes: int
    kills: int
    """Crashes right before a call of the files."""
    pauses: int
    take_overs: int
    full_disks: int
    standstills: int
    dead_queries: int
    backlog_segments: int
    window: int
    max_files: int | None
    requests: int = 0
    """Of users, for a checkpoint, for its end, or for the run's."""
    damages: int = 0
    power_losses: int = 0
    available_now: float = 0.0
    """How likely a run ends when it has consumed all that there is."""
    chains: float = 0.0
    """How likely a stage that can be is chained to its input, each time that a generation is opened."""
    set_backs: int = 0
    """How often somebody brings the pipeline and its tables back to a checkpoint, or forward."""
    savepoints: int = 0
    """How often somebody copies a checkpoint out of its root."""
    brings: int = 0
    """How often somebody brings one of these back."""
    lost_roots: int = 0
    """How often the root is lost, and one of these is brought into another."""
    forks: int = 0
    """How often the pipeline goes on on another root, with copies of its tables."""
    promotions: int = 0
    """How often these take the place of what they were made from."""
    changes: Changes = Changes()
    tables_fail: float = 0.0
    """How likely a commit fails, beside the store."""
    drift_ms: int | None = None
    """How far an input may be ahead of others in event time. Where it is set, sources have event time, and some
    stages: the number of a row is its time."""
    together: Together = Together()


class SecondLook(GateSource):
    """A gate that its stage reads for the second time."""

    def read(self, uri: str) -> PlayedRows | None:
        rows = super().read(uri)
        if rows is None:
            return None
        return PlayedRows(tuple((again(path), first, after) for path, first, after in rows.ranges), rows.time_ms)


class WholeCluster:
    def __init__(self, scenario: WholeScenario, seed: int) -> None:
        self.world = World(seed)
        self.scenario = scenario
        self.dag = scenario.dag
        self.config = scenario.config
        self.backlog = BacklogBound(max_segments=scenario.backlog_segments)
        self.window, self.max_files = scenario.window, scenario.max_files
        self.query_faults = scenario.query_faults
        self.exactly_once = ExactlyOnce(scenario.dag)
        self.lake = {name: Disk(f"lake-{name}") for name in scenario.dag.sinks}
        self._ids = random.Random(f"ids {seed}")
        rng = random.Random(f"plans {seed}")
        self._stages_rows = {name: rng.random() < 0.3 for name in scenario.dag.sinks}
        modes = ("append",) * 5 if scenario.chains else ("append", "append")
        self._modes = {name: rng.choice((*modes, "update")) for name in scenario.dag.stages}
        self.versions = Versions(scenario.dag, scenario.changes)
        self.plans = self._all_plans(rng, seed)
        self.slowness = {name: rng.choice((2, 4, 8, 16, 60)) for name in scenario.dag.stages}
        self.streams = {name: PlayedStream(f"file:///in/{name}/") for name in scenario.dag.sources}
        self._fed = dict.fromkeys(scenario.dag.sources, 0)
        self._seen = {(name, FIRST): TableSeen(scenario.dag.stages[name].paths) for name in scenario.dag.sinks}
        """By sink, and the folder of its table."""
        self.roots: list[SimulatedRoot] = []
        """All that the pipeline ever had."""
        self.root = self.new_root()
        self.exactly_once.visible = {name: self._seen[name, FIRST].visible for name in scenario.dag.sinks}
        self.savepoints: list[Savepoint] = []
        self.moves: Counter[str] = Counter()
        """What users have done with checkpoints."""
        self.is_moving = False
        """Whether the pipeline is on its way to a new root, in which nothing is decided yet."""
        self.kv = MemoryKV(lambda: self.world.now, lease_ms=scenario.together.lease_ms)
        """What instances share."""
        instances = [
            SimulatedInstance(self, f"i{index}", self._asked_for(rng)) for index in range(scenario.together.instances)
        ]
        self._trouble = Trouble(self, instances)
        alone = [SimulatedDriver(self, f"d{index}") for index in range(scenario.drivers)]
        self.drivers: Sequence[SimulatedDriver] = instances or alone
        self.refused: str | None = None
        self.crashes = self.set_back = self.aborted = self.taken_for_dead = 0
        self.killed_at: Counter[str] = Counter()
        self.is_down, self.downs = False, 0
        """Whether the machine is down, and how often it was."""
        self.users: list[SimulatedUser] = []
        self.drained: dict[str, StopRun] = {}
        """The runs that have ended in order, and what they have done for that."""
        self._stands_until = 0
        self._faults_end = False
        self.is_over = False
        """Whether nobody starts it again."""
        self._is_to_change = False

    def _asked_for(self, rng: random.Random) -> tuple[str, ...]:
        """The stages that an instance asks for."""
        return tuple(name for name in self.dag.stages if rng.random() < self.scenario.together.pinned)

    @property
    def stale(self) -> float:
        """How likely what instances share is seen as it was a moment ago."""
        return 0.0 if self._faults_end else self.scenario.together.stale

    def _all_plans(self, rng: random.Random, seed: int) -> dict[str, Plan]:
        plans = {name: self._plan(name, rng) for name in self.dag.stages}
        if self.scenario.drift_ms is None:
            return plans
        return {name: self._timed(name, plan, seed) for name, plan in plans.items()}

    def new_id(self) -> str:
        return f"{self._ids.getrandbits(128):032x}"

    def new_root(self) -> SimulatedRoot:
        """One that is empty, and is not the pipeline's yet."""
        prefixes = WholePrefix(self.dag, {name for name, plan in self.plans.items() if plan.holds_back})
        label = "root" if not self.roots else f"root-{len(self.roots) + 1}"
        root = SimulatedRoot(label, self.dag, self.world, self.config, prefixes)
        root.checkers.exactly_once = self.exactly_once
        root.disk.on_created = partial(self._on_created, root)
        root.disk.on_deleted = partial(self._on_deleted, root)
        self.roots.append(root)
        return root

    def go_to(self, root: SimulatedRoot) -> None:
        """The pipeline goes on there, with the tables of there. Who runs elsewhere knows nothing of it."""
        self.world.note("the pipeline goes to {}", root.label)
        self.root = root
        self.look_at_tables()

    @property
    def disk(self) -> Disk:
        return self.root.disk

    @property
    def checkers(self) -> Checkers:
        return self.root.checkers

    @property
    def lock(self) -> str | None:
        return self.root.lock

    @property
    def is_running(self) -> bool:
        return any(each.is_running and each.root is self.root for each in self.drivers)

    def config_now(self) -> CheckpointConfig:
        """Without faults a restart would hide that checkpoints cannot succeed."""
        return msgspec.structs.replace(self.config, tolerable_failures=10**6) if self._faults_end else self.config

    def delay_of_store(self) -> int:
        slow = 400 if self.world.chance(self.world.faults.store_is_slow) else 6
        return max(self.world.delay(slow), self._stands_until - self.world.now)

    # -- the pipeline -----------------------------------------------------------------------------

    def _plan(self, name: str, rng: random.Random) -> Plan:
        spec = self.dag.stages[name]
        writes = "files" if self._modes[name] == "append" else "folders"
        if spec.is_sink and self._stages_rows[name]:
            writes = "rows"
        has_state = rng.random() < (0.3 if self.scenario.chains else 0.6)
        if self.scenario.changes.between is not None and name == self.scenario.changes.between[1]:
            has_state = False  # else it could not read something else
        has_timers = has_state and not spec.is_source and rng.random() < 0.1
        return Plan(
            paths=spec.paths,
            has_state=has_state,
            # One that comes late has not seen the first rows of a path, and would hand them on when they are due.
            holds_back=has_state
            and not spec.is_source
            and rng.random() < 0.4
            and name not in self.scenario.changes.new,
            has_timers=has_timers,
            writes=writes,  # type: ignore[arg-type]
            retained=100 if has_timers else rng.choice((10, 20, 100)),
        )

    def _timed(self, name: str, plan: Plan, seed: int) -> Plan:
        rng = random.Random(f"time {seed} {name}")
        is_timed = rng.random() < (0.9 if self.dag.stages[name].is_source else 0.3)
        return msgspec.structs.replace(plan, is_timed=is_timed)

    def plan(self, name: str) -> Plan:
        """Of a stage, whatever it is called now."""
        return self.plans[self.versions.own(name)]

    def is_late(self, name: str) -> bool:
        """Whether a stage begins behind rows."""
        return self.versions.own(name) in self.scenario.changes.new

    @staticmethod
    def sources_of(root: SimulatedRoot, generation: int, name: str) -> list[StageSource]:
        """What the query of a stage reads. What it reads twice has two logs."""
        spec = root.stages_of[generation][name]
        return [StageSource(each, log) for log, each in enumerate((*spec.inputs, *spec.twice))]

    def played_sources(
        self, name: str, generation: int, files: Any, sources: Sequence[StageSource]
    ) -> Sequence[PlayedSource]:
        """`name`: of the stage whose query it is, or that is the first of it."""
        if not sources:
            return [StreamSource(self.streams[self.versions.own(name)], max_files=self.max_files)]
        found: list[PlayedSource] = []
        for source in sources:
            kind = SecondLook if source.input in [each.input for each in sources[: source.log]] else GateSource
            found.append(kind(files.at(RootPaths.gate(generation, name, source.input)), files, source.log))
        return found

    def shape(self, driver: SimulatedDriver) -> dict[str, StageShape]:
        """Of the pipeline as it is now, with the tables that a driver has for it."""
        return {each.name: self._shape(each) for each in self._definitions(driver)}

    def definitions(self, driver: SimulatedDriver) -> list[StageDefinition]:
        return self._definitions(driver)

    def on_opened(self, root: SimulatedRoot, generation: int, taken: TakenUp | None) -> None:
        """`taken`: what it starts from, if that is a checkpoint."""
        base = None if taken is None else taken.then
        specs = self.versions.specs()
        late = [*specs] if taken is None else taken.new
        root.stages_of[generation] = specs
        root.fed_at[generation] = dict(self._fed)
        read: dict[str, int] | None = {}
        for name in self.dag.sources:
            rows = self._rows_at(root, base, name)
            if rows is None or (base is not None and not base.aligned):
                read = None
            elif read is not None:
                read[name] = rows
            if rows is not None and (cut := self._cut_at(base, name)) is not None:
                root.rows_read[generation, name, cut] = rows
        checker, there = self.exactly_once, {self.versions.own(name) for name in specs}
        # What is held back was read before: from the beginning on, nothing was.
        held_back = frozenset[int]() if base is None else root.prefixes.held_back
        for name in late:
            if specs[name].is_sink:
                checker.begins_behind(self.versions.own(name), read, held_back)
        for name in self.dag.sinks:
            if name in there:
                checker.comes_back(name)
            else:
                is_known = self._part_of(base, name) is not None
                checker.ends_behind(name, read if is_known else None, root.prefixes.held_back)

    def _rows_at(self, root: SimulatedRoot, base: Manifest | None, source: str) -> int | None:
        """How many rows a source had read at a checkpoint; None: nobody has seen it."""
        cut = self._cut_at(base, source)
        return 0 if base is None or cut is None else root.rows_read.get((base.generation, source, cut))

    def _cut_at(self, base: Manifest | None, own: str) -> int | None:
        part = self._part_of(base, own)
        return None if part is None else part.cut

    def _part_of(self, base: Manifest | None, own: str) -> StageSnapshot | None:
        """What a checkpoint has of a stage, by whatever name."""
        stages = {} if base is None else base.stages
        return next((stages[name] for name in self.versions.names_of(own) if name in stages), None)

    def queries(
        self, driver: SimulatedDriver, base: Manifest | None, apart: frozenset[str] = frozenset()
    ) -> list[StageDefinition]:
        """What a generation from this checkpoint runs: some of the stages that can be are chained, none of `apart`."""
        definitions, rng = self._definitions(driver), self.world.random
        can_join = sorted(may_join(definitions)) if self.scenario.chains else []
        joined = {each for each in can_join if self._passes_on(each) and rng.random() < self.scenario.chains} - apart
        for query in as_queries(definitions, joined):
            if not query.inputs and self._stages_rows.get(self.versions.own(query.name)):
                joined.discard(query.name)
        if base is not None:
            joined -= cannot_join(base, chains_of(as_queries(definitions, joined)))
        return as_queries(definitions, joined)

    def _passes_on(self, name: str) -> bool:
        return not self.plan(name).has_state and not self.dag.stages[self.versions.own(name)].twice

    def plan_of(self, query: StageDefinition) -> Plan:
        """What a stage's query computes, or that of a chain."""
        first, *others = query.members
        return msgspec.structs.replace(
            self.plan(first.name),
            is_timed=any(self.plan(each.name).is_timed for each in query.members),
            chained=tuple(self.plan(each.name).paths for each in others),
            writes=self.plan(query.name).writes,
        )

    def _definitions(self, driver: SimulatedDriver | None) -> list[StageDefinition]:
        def nothing() -> None:
            raise AssertionError("no function is called here")

        found = []
        for name, spec in self.versions.specs().items():
            kind: Any = "source" if spec.is_source else "sink" if spec.is_sink else "stage"
            sink: Any = self.table(name, driver) if spec.is_sink else None
            mode: Any = self._modes[self.versions.own(name)]
            found.append(StageDefinition(name, kind, nothing, spec.inputs, spec.inputs, mode, sink))
        return found

    def table(self, sink: str, driver: SimulatedDriver | None) -> PlayedTable:
        """A sink's table, as a process sees it; or the world, that of the pipeline as it is now."""
        return self._table_at(sink, self.root.folder if driver is None else driver.folder, driver)

    def _table_at(self, sink: str, folder: str, driver: SimulatedDriver | None) -> PlayedTable:
        sink = self.versions.own(sink)
        disk = self.lake[sink]
        files: Any = disk.memory
        if driver is not None:
            files = SeenFiles(disk, self.world, driver.life, fails=False, links_last=True)
        return PlayedTable(
            files.at(folder),
            "rows" if self._stages_rows[sink] else "files",
            on_call=lambda call: self._on_call(sink, call),
            new_id=self.new_id,
            beside=files,
        )

    def _on_call(self, sink: str, call: str) -> None:
        if call in ("committed", "was_set_back", "has_shown_copy"):
            self._on_committed(sink)
        table_fails = 0.0 if self._faults_end else self.scenario.tables_fail
        fails = max(self.world.faults.store_fails, table_fails)
        if call in _FAILING_CALLS and self.world.chance(fails):
            raise SinkFailed(f"the table of {sink} failed")

    def _shape(self, definition: StageDefinition) -> StageShape:
        table = None if definition.sink is None else definition.sink.table
        streams = () if definition.inputs else (SourceStream("json", {"path": self.versions.own(definition.name)}),)
        return StageShape(
            definition.kind,
            definition.inputs,
            definition.output_mode,
            "rows",
            table,
            streams,
            has_event_time=self.plan(definition.name).holds_back or self.plan(definition.name).is_timed,
        )

    # -- what is checked --------------------------------------------------------------------------

    def _on_created(self, root: SimulatedRoot, name: str, data: bytes) -> None:
        if not name.startswith(f"{RootPaths.DECISIONS}/"):
            return
        record = decode_decision(data, name)
        before = root.checkers.take(record)
        if before is not None and isinstance(record, CheckpointCompleted):
            self._on_completed(root, record, before)
        elif before is not None and isinstance(record, GenerationOpened) and record.brings is not None:
            self._on_brought(root, record)

    def _decided(self, root: SimulatedRoot, record: CheckpointCompleted) -> Manifest:
        """What it consists of, all of which must be there."""
        data = root.disk.memory.read(record.manifest)
        if data is None:
            raise SimulationFailure("NothingNeededDeleted", f"{record.manifest} was decided and is not there")
        return decode_manifest(data, record.manifest_sha256, record.manifest)

    def _on_completed(self, root: SimulatedRoot, record: CheckpointCompleted, before: list[int]) -> None:
        decoded = self._decided(root, record)
        manifest = reports_in(decoded)
        self.world.note("checkpoint {} of generation {} is complete", record.checkpoint_id, record.generation)
        stages = root.stages_of[record.generation]
        root.checkers.on_whole(record, manifest, self._needed_by(root, decoded), before, decoded.chains, stages)
        if (record.generation, record.epoch) in root.cancelled:
            raise SimulationFailure("Requests", f"{record.checkpoint_id} was told to be cancelled, and is complete")
        root.prefixes.on_completed(record)
        self._on_retained(root, record)

    def _on_brought(self, root: SimulatedRoot, opened: GenerationOpened) -> None:
        """A checkpoint from elsewhere is one of the root's."""
        assert opened.brings is not None
        record = root.checkers.log.completed(opened.brings.checkpoint_id)
        assert record is not None
        self.world.note("checkpoint {} is brought by generation {}", record.checkpoint_id, record.generation)
        decoded = self._decided(root, record)
        for name, stage in decoded.stages.items():
            sealed = None if stage.committable is None else decode_committable(stage.committable)
            if sealed is not None and (sealed.files or sealed.batches):
                raise SimulationFailure(
                    "NothingNeededDeleted",
                    f"{record.checkpoint_id} needs what {name} has staged, which any run forgets",
                )
        root.checkers.monotone_ids.on_prepared(record.generation, record.checkpoint_id, record.epoch)
        root.checkers.on_brought(record, reports_in(decoded), self._needed_by(root, decoded), decoded.chains)
        root.stages_of[record.generation] = self.versions.specs()
        if opened.brings.ends_fork:
            root.folder = FIRST
        self._on_retained(root, record)

    def _on_retained(self, root: SimulatedRoot, record: CheckpointCompleted) -> None:
        self._note_damaged(root, record)
        memory, needed, log = root.disk.memory, root.checkers.nothing_needed_deleted, root.checkers.log
        needed.check_each(log.retained, lambda name: memory.exists(name) or name in root.damaged_files)
        root.needed = frozenset().union(*map(needed.references, log.retained))

    @staticmethod
    def _needed_by(root: SimulatedRoot, manifest: Manifest) -> frozenset[str]:
        files: Any = root.disk.memory
        try:
            return references(files, manifest)
        except DamagedCheckpoint as damage:
            raise SimulationFailure(
                "NothingNeededDeleted", f"{manifest.checkpoint_id} was decided: {damage}"
            ) from damage

    @staticmethod
    def _on_deleted(root: SimulatedRoot, name: str) -> None:
        if name in root.needed:
            raise SimulationFailure("NothingNeededDeleted", f"{name} is deleted, which a retained checkpoint needs")

    def on_batch(self, root: SimulatedRoot, generation: int, stage: str, query: PlayedQuery) -> None:
        """A query has committed a batch: what its state holds then is what a snapshot of it must hold. `stage`: the
        first one of it."""
        if self.plan(stage).has_state:
            root.states[generation, stage, query.batch] = query.seen
        stage = self.versions.own(stage)
        if self.dag.stages[stage].is_source:
            before = root.rows_read.get((generation, stage, query.batch - 1)) if query.batch else 0
            read = before if query.read_through is None else query.read_through
            if read is not None:  # else it has run away, and nobody has seen the batch before
                root.rows_read[generation, stage, query.batch] = read

    def on_drained(self, root: SimulatedRoot, run: str, generation: int, done: StopRun) -> None:
        """A run ends in order. Others may have taken over since its last checkpoint, while it was asleep."""
        own = [each for each in root.checkers.completions if each.record.generation == generation]
        if not own:
            raise SimulationFailure("Requests", f"generation {generation} has ended without a last checkpoint")
        reports = own[-1].manifest
        for name, report in reports.items():
            # Chains are told stage by stage, and between those of one nothing is ever.
            behind = {each: at for each, at in report.positions.items() if reports[each].output_sequence != at}
            if report.in_flight or behind:
                raise SimulationFailure("Drained", f"{name} has not consumed all at the end: {report}")
        self.drained[run] = done

    @staticmethod
    def check_read_all(root: SimulatedRoot, generation: int) -> None:
        """A run has ended by itself: it has consumed what there was when it began."""
        last = next(each for each in reversed(root.checkers.completions) if each.record.generation == generation)
        for source, fed in root.fed_at[generation].items():
            report = last.manifest.get(source)
            cut = None if report is None else report.cut
            read = 0 if cut is None else root.rows_read.get((generation, source, cut), fed)
            if report is not None and read < fed:
                raise SimulationFailure("Drained", f"{source} had {fed} rows, and the run has ended after {read}")

    def check_drained(self, run: str, before: int, wanted: StopRun) -> None:
        """Somebody has said that this run was stopped as it was asked to: it was, or one that has taken over from it
        was stopped, since so many had been."""
        if run not in self.drained and len(self.drained) == before:
            raise SimulationFailure("Requests", f"{run} says that it was stopped, and has taken no last checkpoint")
        if run in self.drained and (lacks := wanted.lacks(self.drained[run])):
            raise SimulationFailure("Requests", f"{run} says that it was stopped, and has not {lacks}")

    def epoch_of(self, folder: str, sink: str) -> int:
        """The newest that a table has ever shown."""
        return max((each.epoch for each in self._table_at(sink, folder, None).versions()), default=0)

    def _on_committed(self, sink: str) -> None:
        """A table has another version: what it shows is read from it, as a reader would."""
        by_id = {each.id: each for each in self.roots}
        for folder in self.lake[sink].memory.names_in():
            seen = self._seen_at(sink, folder)
            for epoch, root, visible in seen.look(self._table_at(sink, folder, None), sink, self.exactly_once):
                by_id[root].checkers.no_checkpoint_lost.on_epoch_visible(sink, epoch)
                by_id[root].prefixes.on_visible(sink, epoch, visible)
        self.exactly_once.visible[sink] = self._seen_at(sink, self.root.folder).visible

    def _seen_at(self, sink: str, folder: str) -> TableSeen:
        return self._seen.setdefault((sink, folder), TableSeen(self.dag.stages[sink].paths))

    def look_at_tables(self) -> None:
        for sink in self.lake:
            self._on_committed(sink)

    def on_refused(self, root: SimulatedRoot, refusal: RecoveryRefused) -> None:
        """Right only where all are damaged, or a table shows what only a damaged one holds; or where a sink is to go
        whose table is late: then somebody starts the version before, and removes it later. And of course where the
        pipeline is elsewhere by now, or on its way."""
        if root is not self.root or (self.is_moving and not len(root.checkers.log)):
            return
        if any(words in str(refusal) for words in ("is gone since", "cannot go on as")):
            self.on_misfit(refusal)
            return
        log, damaged = self.checkers.log, self.checkers.no_checkpoint_lost.damaged_checkpoints
        if log.setting_back is not None and log.setting_back.base in damaged:
            self.refused = str(refusal)
            return
        intact = [each for each in log.lineage() if each.checkpoint_id not in damaged]
        shown = max(self.epoch_of(root.folder, each) for each, spec in self.versions.specs().items() if spec.is_sink)
        if not damaged or (intact and shown <= intact[0].epoch):
            raise SimulationFailure("NoCheckpointLost", f"refused without damage: {refusal}")
        self.refused = str(refusal)

    def on_misfit(self, refusal: TidegateError) -> None:
        """A change is refused for now."""
        self.versions.take_back(str(refusal))
        self.world.after(50, None, self._take_over)
        if not self._is_to_change:
            self._is_to_change = True
            self.world.after(1_500, None, self._change_all)

    @property
    def is_changed(self) -> bool:
        """Whether the newest generation is of the last version of the pipeline."""
        log, stages_of = self.checkers.log, self.root.stages_of
        return not self._is_to_change and stages_of.get(log.generation) == self.versions.specs()

    @staticmethod
    def _note_damaged(root: SimulatedRoot, record: CheckpointCompleted) -> None:
        """A checkpoint that builds on a file which was lost is as damaged as the one before it."""
        checkers = root.checkers
        if not root.damaged_files.isdisjoint(checkers.nothing_needed_deleted.references(record.checkpoint_id)):
            checkers.no_checkpoint_lost.damaged_checkpoints.add(record.checkpoint_id)

    # -- time -------------------------------------------------------------------------------------

    def start(self) -> None:
        scenario, rng = self.scenario, self.world.random
        self.world.faults = msgspec.structs.replace(scenario.faults)
        if scenario.together:
            self._trouble.start()
        else:
            self.drivers[0].start()
        self.world.after(300, None, self._supervise)
        self._feed()
        for count, fault in (
            (scenario.crashes, self._crash),
            (scenario.kills, self._kill),
            (scenario.pauses, self._pause),
            (scenario.take_overs, self._take_over),
            (scenario.full_disks, self._fill_disk),
            (scenario.standstills, self._stand_still),
            (scenario.dead_queries, self._kill_query),
            (scenario.requests, self._ask),
            (scenario.damages, self._damage),
            (scenario.power_losses, self._lose_power),
            (scenario.set_backs, self._set_back),
            (scenario.savepoints, self._save),
            (scenario.brings, self._bring),
            (scenario.lost_roots, self._lose_root),
            (scenario.forks, self._fork),
            (scenario.promotions, self._promote),
        ):
            for _ in range(count):
                self.world.after(rng.randrange(scenario.fault_phase_ms), None, fault)
        for what in Changes.__struct_fields__:
            if getattr(scenario.changes, what):
                self.world.after(rng.randrange(scenario.fault_phase_ms), None, self._change, what)

    def _feed(self) -> None:
        """Rows of an external stream come in over the whole fault phase."""
        for name, total in self.scenario.rows.items():
            path = next(iter(self.dag.stages[name].paths))
            now = total if self._faults_end else min(total, total * self.world.now // self.scenario.fault_phase_ms)
            if now > self._fed[name]:
                self.streams[name].append(PlayedRows(((path, self._fed[name], now),)))
                self._fed[name] = now
        if self._fed != self.scenario.rows:
            self.world.after(60, None, self._feed)

    def end_faults(self) -> None:
        self._faults_end = True
        self.world.note("the faults end")
        self.world.faults = Faults()
        self.query_faults = QueryFaults()
        # One that is too slow for the timeout would never let a checkpoint complete.
        self.slowness = {name: min(slow, 16) for name, slow in self.slowness.items()}
        self.disk.is_full = False
        self._stands_until = 0
        for driver in self.drivers:
            driver.process.paused_until = 0
            driver.life.calls_left = None
        self._trouble.end()
        self.disk.tears = False
        self._feed()
        self.versions.change_all()
        is_another = self.root.stages_of.get(self.checkers.log.generation) != self.versions.specs()
        if is_another or self.world.random.random() < 0.5:  # else whoever runs goes on
            self.world.after(50, None, self._take_over)

    def _supervise(self) -> None:
        """What was superseded by a run that has died since is started again somewhere, sooner or later."""
        if self.refused is not None or self.is_over:
            return
        if self.scenario.together:
            self._trouble.supervise()
        elif not self.is_running:
            self._take_over()
        self.world.after(300, None, self._supervise)

    def _any_driver(self) -> SimulatedDriver:
        return self.world.random.choice(self.drivers)

    def _crash(self) -> None:
        driver = self._any_driver()
        if driver.process.alive:
            self.crashes += 1
            driver.crash()
            if isinstance(driver, SimulatedInstance):
                self._trouble.may_go(driver, 0.2)

    def _kill(self) -> None:
        """Right before one of the calls of the files that it makes next."""
        self._any_driver().life.calls_left = self.world.random.randint(0, 400)

    def _pause(self) -> None:
        """A process stops and wakes up later, knowing nothing of it."""
        driver = self._any_driver()
        until_ms = self.world.now + self.world.delay(700)
        self.world.note("{} is paused until {} ms", driver.name, until_ms)
        if isinstance(driver, SimulatedInstance):
            driver.pause(until_ms, beats=self.world.random.random() < 0.3)
            return
        driver.process.paused_until = until_ms
        self.world.after(self.world.delay(100), None, self._take_over)

    def _take_over(self) -> None:
        """Somebody starts the pipeline elsewhere, whatever the others do."""
        ready = [each for each in self.drivers if each.process.alive and each.process.paused_until <= self.world.now]
        if ready:
            driver = self.world.random.choice(ready)
            self.world.note("{} takes over", driver.name)
            driver.start()
        elif self._faults_end:
            self.world.after(50, None, self._take_over)

    def _change(self, what: str) -> None:
        """Somebody starts a new version of the pipeline."""
        self.world.note("the pipeline is changed: {}", what)
        self.versions.change(what)
        self._take_over()

    def _change_all(self) -> None:
        self._is_to_change = False
        self.world.note("the pipeline is changed once more")
        self.versions.change_all()
        self._take_over()

    def _set_back(self) -> None:
        """Somebody brings the pipeline and its tables to a checkpoint that is retained; mostly while nothing runs."""
        rng, user = self.world.random, SimulatedDriver(self, "user")
        if rng.random() < 0.7:
            self._go_down()
        damaged = self.checkers.no_checkpoint_lost.damaged_checkpoints
        intact = [each for each in self.checkers.log.retained if each not in damaged]
        if not intact:
            return
        target = rng.choice(intact)
        self.world.note("somebody restores checkpoint {}", target)
        try:
            user.set_back(target)
        except Killed:
            self.world.note("and is killed")
        except TidegateError as error:
            self.world.note("and fails: {}", error)

    # -- users who take checkpoints elsewhere -----------------------------------------------------

    def _intact(self) -> list[int]:
        damaged = self.checkers.no_checkpoint_lost.damaged_checkpoints
        return [each for each in self.checkers.log.retained if each not in damaged]

    def _later(self, act: Callable[[], None]) -> None:
        """There is nothing yet that it could be done with."""
        if not self._faults_end:
            self.world.after(100 + self.world.delay(300), None, act)

    def _tries(self, what: str, act: Callable[[SimulatedMover], None], *, dies: float = 0.5) -> bool:
        """Somebody does something, and may be killed. Returns whether it was done."""
        mover = SimulatedMover(self)
        self.world.note("somebody {}", what)
        if self.world.random.random() < dies:
            mover.dies_later()
        try:
            act(mover)
        except Killed:
            self.world.note("and is killed")
        except TidegateError as error:
            self.world.note("and fails: {}: {}", type(error).__name__, error)
        else:
            self.moves[what] += 1
            return True
        return False

    def _save(self) -> None:
        if not (intact := self._intact()):
            self._later(self._save)
        else:
            checkpoint_id = self.world.random.choice(intact)
            self._tries("makes a savepoint", lambda mover: self.savepoints.append(mover.save(checkpoint_id)), dies=0.2)

    def _bring(self) -> None:
        """Somebody brings a savepoint back; mostly while nothing runs."""
        if not self.savepoints or self.is_moving:
            self._later(self._bring)
            return
        if self.world.random.random() < 0.7:
            self._go_down()
        savepoint = self.world.random.choice(self.savepoints)
        self._tries("brings a savepoint back", lambda mover: mover.bring(savepoint, self.root))

    def _lose_root(self) -> None:
        """Nobody finds the root any more, but for a run that is still alive there, perhaps."""
        if not self._fitting_savepoints or self.is_moving or self.root.folder != FIRST:
            self._later(self._lose_root)
            return
        if self.world.random.random() < 0.5:
            self._go_down()
        self.is_moving = True
        self.look_at_tables()
        lost, folder = self.root.label, self.root.folder
        self.world.note("{} is lost", lost)
        root = self.new_root()
        root.folder = folder
        self.go_to(root)
        self._bring_to_new()

    @property
    def _fitting_savepoints(self) -> list[Savepoint]:
        """Those of the tables that there are: what a fork has shown in its own, the others never have."""
        return [each for each in self.savepoints if each.folder == self.root.folder]

    def _bring_to_new(self) -> None:
        """Until it is decided: then whoever comes next finishes it."""
        savepoint = self.world.random.choice(self._fitting_savepoints)
        root = self.root
        self._tries("brings a savepoint into a new root", lambda mover: mover.bring(savepoint, root))
        if len(root.checkers.log):
            self.is_moving = False
        else:
            self.world.after(30, None, self._bring_to_new)

    def _fork(self) -> None:
        """Somebody makes a fork, and the pipeline goes on there; who runs it elsewhere may go on, too."""
        intact = self._intact()
        if not intact or self.is_moving or self.root.folder != FIRST:
            self._later(self._fork)
            return
        if self.world.random.random() < 0.3:
            self._go_down()
        checkpoint_id = self.world.random.choice(intact)
        made = self.new_root()
        made.folder = f"of-{made.label}"
        self._tries("makes a fork", lambda mover: mover.fork(checkpoint_id, made))
        if len(made.checkers.log):  # else it is no fork, and is thrown away
            self.go_to(made)

    def _promote(self) -> None:
        """The fork takes the place of what it was made from; mostly while it does not run."""
        if self.root.folder == FIRST:
            self._later(self._promote)
            return
        if self.world.random.random() < 0.7:
            self._go_down()
        self._tries("promotes the fork", lambda mover: mover.promote())
        self.look_at_tables()

    def _fill_disk(self) -> None:
        self.world.note("the disk is full")
        self.disk.is_full = True
        self.world.after(self.world.delay(400), None, self._free_disk)

    def _free_disk(self) -> None:
        self.disk.is_full = False

    def _stand_still(self) -> None:
        """The store answers nobody for longer than anybody waits."""
        self._stands_until = self.world.now + 900
        self.world.note("the store stands still until {} ms", self._stands_until)

    def _kill_query(self) -> None:
        self._any_driver().kill_query()

    # -- what happens to the machine --------------------------------------------------------------

    def _go_down(self) -> None:
        """Every process dies, and Spark's with them."""
        self.downs += 1
        for driver in self.drivers:
            if driver.process.alive:
                self.crashes += 1
                driver.crash(leaves_orphans=False)

    def _lose_power(self) -> None:
        self.world.note("the power is lost")
        self._go_down()
        kept = [each.disk for each in self.savepoints]
        for disk in (*(root.disk for root in self.roots), *self.lake.values(), *kept):
            disk.lose_power(self.world.random)
        self._trouble.lose_power()

    def _damage(self) -> None:
        """A file of the newest checkpoint is lost or damaged while nothing runs."""
        newest = self.checkers.log.newest
        if newest is None:
            if not self._faults_end:
                self.world.after(100, None, self._damage)
            return
        self._go_down()
        rng, memory = self.world.random, self.disk.memory
        name = rng.choice(sorted(self.checkers.nothing_needed_deleted.references(newest.checkpoint_id)))
        data = memory.read(name)
        if data is None:
            return  # it is lost already
        self.world.note("{} is damaged", name)
        self.root.damaged_files.add(name)
        if rng.random() < 0.5 or not data:
            memory.delete([name])
        else:
            memory.write(name, data[: rng.randrange(len(data))])
        for checkpoint_id in self.checkers.log.retained:
            record = self.checkers.log.completed(checkpoint_id)
            if record is not None:
                self._note_damaged(self.root, record)

    # -- users ------------------------------------------------------------------------------------

    def _ask(self) -> None:
        rng = self.world.random
        full, unaligned = rng.random() < 0.3, rng.random() < 0.3
        take = TakeCheckpoint(full=full, unaligned=unaligned)
        stop = StopRun(full=full, drain=unaligned)
        self.ask(rng.choice((take, take, CancelCheckpoint(), stop)))

    def ask(self, request: Request) -> None:
        """As soon as a run is alive."""
        if self.refused is not None:
            return
        if self.lock is None:
            self.world.after(50, None, self.ask, request)
            return
        user = SimulatedUser(self, request, self.lock)
        self.world.note("{} is asked for", user)
        self.users.append(user)
        user.look()

    @property
    def waits_for_answers(self) -> bool:
        return not all(user.is_done for user in self.users)

    # -- the end ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """A user stops the run, and nobody starts it again."""
        self.is_over = True
        self.ask(StopRun())

    @property
    def has_ended(self) -> bool:
        return self.is_over and self.lock is None and not self.is_running
