"""Whether what is to run fits what it would start from: its functions are called, shape, state and tables checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from tidegate.engine.chains import as_queries, cannot_join, chains_of, may_join
from tidegate.engine.changes import Meant, TakenUp, take_up
from tidegate.engine.order import in_order
from tidegate.engine.parting import part
from tidegate.engine.root import SeenRoot, check_sources
from tidegate.engine.status import StepName
from tidegate.engine.tables import (
    address_of,
    check_all_shown,
    check_goes_on,
    check_shows_nothing,
    goes_on_from_rows,
    with_staged_in,
)
from tidegate.engine.up_to import Plans, Target, planned
from tidegate.errors import PipelineChanged
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import BoundSink, RowSink
from tidegate.sinks.sessions import PARTITIONS
from tidegate.spark import queries
from tidegate.spark.definition import StageDefinition
from tidegate.spark.plan import has_state, states_of
from tidegate.spark.session import StageSessions
from tidegate.spark.snapshot import first_position
from tidegate.spark.state import check_state, settings_not_taken
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, StageShape, StageState, TableAddress
from tidegate.storage.mounted import Mounted
from tidegate.storage.paths import RootPaths

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Begin(Protocol):
    """Tells everybody what is done next to start."""

    def __call__(
        self, step: StepName, stage: str | None = None, number: int | None = None, of: int | None = None
    ) -> None: ...


class SparkFitting:
    """The stages of a pipeline, built against the gates that the next generation will have. A context: what looks at
    their plans does so beside the look at the checkpoint."""

    def __init__(
        self,
        definitions: list[StageDefinition],
        root: SeenRoot,
        session: SparkSession,
        sinks: Mapping[str, BoundSink],
        is_set_by_user: Callable[[str], bool],
        begin: Begin,
        *,
        meant: Meant | None = None,
        gates: Files | None = None,
        target: Target | None = None,
        apart: frozenset[str] = frozenset(),
    ) -> None:
        """`is_set_by_user`: whether a setting of the session is not Spark's own default. `meant`: what the user says of
        changes. `gates`: where they are to be, by the names that they have in the root, if not there. `target`: up to
        where sources read. `apart`: stages that must not run in the query of their input."""
        self._definitions = definitions
        self._root = root
        self._session = session
        self._sessions = StageSessions(session, keeps_state=isinstance(root.work, Mounted))
        self._sinks = sinks
        self._is_set_by_user = is_set_by_user
        self._begin = begin
        self._number = 0
        self._looking = ExitStack()
        self._state: Callable[[str], StageState | None] = lambda _: None
        self._meant = Meant() if meant is None else meant
        self._gates = root.work if gates is None else gates
        self._target = target
        self._apart = apart
        """Those that cannot be joined to their inputs, because of the checkpoint too."""
        self._joined: set[str] = set()
        self._called: dict[str, tuple[queries.Built | None, queries.Built]] = {}
        """What each function has returned, and what it was joined to."""
        self.built: dict[str, queries.Built] = {}
        self.queries: list[StageDefinition] = []
        """What Spark is to run: stages, and chains of them."""
        self.shape: dict[str, StageShape] = {}
        self._base: Manifest | None = None
        self.taken: TakenUp | None = None
        """The checkpoint as the pipeline takes it up; None: there is none."""
        self.parted: tuple[BoundSink, ...] = ()
        """Sinks that are gone, or by their old names."""
        self.tables: dict[str, TableAddress] = {}
        """Those that are there."""
        self.changes: tuple[str, ...] = ()
        self.plans: Plans | None = None
        """What sources are to read; None: whatever there is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._looking.__exit__(kind, error, trace)

    def build(self, number: int) -> None:
        """Call the functions. Until it is opened, a generation's folder is nobody's: another run may be about to open
        the same. So what is made there before, which is empty folders, stays there if it comes to nothing."""
        self._looking.close()
        self._number = number
        self._joined = set(may_join(self._definitions)) - self._apart
        self._called = {}
        while True:
            self._build()
            if not (refused := self._refused()):
                break
            self._joined -= refused
        self.queries = as_queries(self._definitions, self._joined)
        self._begin("reading_checkpoint")
        frames = {name: each.frame for name, each in self.built.items() if name not in self._joined}
        self._state = self._looking.enter_context(states_of(frames))

    def _build(self) -> None:
        """Build every stage, onto its input where it is joined to that, unless that is found to be impossible."""
        self.built = {}
        for index, definition in enumerate(self._definitions, start=1):
            self._begin("calling_functions", definition.name, index, len(self._definitions))
            read = self.built[definition.inputs[0]] if definition.name in self._joined else None
            called_with, built = self._called.get(definition.name, (None, None))
            if built is None or called_with is not read:
                built = None if read is None else self._build_onto(definition, read)
                if built is None:
                    self._joined.discard(definition.name)
                    read, built = None, self._build_apart(definition)
                self._called[definition.name] = read, built
            self.built[definition.name] = built

    def _build_apart(self, definition: StageDefinition) -> queries.Built:
        names = {each: RootPaths.gate(self._number, definition.name, each) for each in definition.inputs}
        for folder in names.values():
            self._gates.make_folder(folder)  # which Spark looks for
        gates = {each: self._gates.at(folder) for each, folder in names.items()}
        schemas = {each: self.built[each].schema for each in definition.inputs}
        return queries.build(definition, self._sessions, gates, schemas)

    def _build_onto(self, definition: StageDefinition, read: queries.Built) -> queries.Built | None:
        is_head = definition.inputs[0] not in self._joined
        return queries.build_onto(definition, read, is_sealed_off=is_head and has_state(read.frame))

    def _refused(self) -> set[str]:
        """Those that cannot be joined to their inputs after all, which only shows when all are built."""
        refused = self._joined & self.in_order
        for query in as_queries(self._definitions, self._joined - refused):
            # What a paused source has staged must not be replaced by what is still on its way there.
            if query.chained and not query.inputs and isinstance(self._sinks.get(query.name), RowSink):
                refused.add(query.name)
            if query.chained and has_state(self.built[query.head].frame):
                heads = {each: self.built[each].frame for each in (query.head, query.name)}
                with states_of(heads) as state:
                    # None: what is kept cannot be told, so not whether it is the same either.
                    if state(query.head) is None or state(query.head) != state(query.name):
                        refused.add(query.members[1].name)
        return refused

    @property
    def joined(self) -> tuple[str, ...]:
        """The stages that run in the query of their input."""
        return tuple(sorted(self._joined))

    @property
    def in_order(self) -> frozenset[str]:
        """Those that may read one segment a batch only."""
        return in_order(self._definitions, {name for name, each in self.built.items() if each.aggregates})

    @property
    def base(self) -> Manifest | None:
        """What the pipeline starts from; None: from the beginning."""
        return None if self._base is None else with_staged_in(self.tables, self._base)

    def fits(self, log: DecisionLog, base: Manifest | None) -> bool:
        """Besides, tables are created, and told of other columns: none before all are checked."""
        if not self.check(log, base):
            return False
        changed = {each.name for each in self.taken.stages if each.change != "same"} if self.taken is not None else ()
        for name, sink in self._sinks.items():
            if name not in self.tables or name in changed:
                sink.prepare_table(self.built[name].schema)
                self._found(name, address_of(sink))
        return True

    def check(self, log: DecisionLog, base: Manifest | None) -> bool:
        """The same without changing anything. Answers whether that was all: else everything is to be looked at again,
        because the functions had to be called anew."""
        if log.next_generation != self._number:
            self.build(log.next_generation)
            return False
        shape = self._shape()
        taken: TakenUp | None = None
        told: tuple[str, ...] = ()
        if base is None:
            self._meant.check_has_effect()
        else:
            taken = take_up(self._root.store, base, shape, self._meant)
            self._check_rewired(taken)
            self._check_first_positions(taken)
            if apart := cannot_join(taken.base, chains_of(self.queries)):
                self._apart |= apart
                self.build(self._number)
                return False
            parted = part(taken, self._definitions, self._root, log, self._meant)
            base, told, self.parted = parted.base, parted.told, parted.before
        shape = check_sources(self._root.store, self._number, base, shape)
        if self._target is not None:
            self.plans = planned(self._target, self._root.store, self._number, base, shape, self.built)
            base = self.plans.base
        shape = {name: msgspec.structs.replace(each, state=self._state_of(name)) for name, each in shape.items()}
        if taken is not None and base is not None:
            told = (*taken.told, *told, *self._check_state(base, shape))
        self.changes, self.taken = told, taken
        self.shape, self._base, self.tables = shape, base, {}
        for name, table in self._check_tables(base, log, taken).items():
            self._found(name, table)
        return True

    def _found(self, sink: str, table: TableAddress) -> None:
        """The table of a sink is there, by this address."""
        self.tables[sink] = table
        self.shape[sink] = msgspec.structs.replace(self.shape[sink], table=table)

    def _check_rewired(self, taken: TakenUp) -> None:
        for name in taken.rewired:
            if has_state(self.built[name].frame):
                raise PipelineChanged(
                    f"stage {name!r} reads {', '.join(taken.base.stages[name].positions)} since "
                    f"{checkpoint_name(taken.base.checkpoint_id)}, and keeps state, which it did not before. What to "
                    f"do: change one after the other, with a checkpoint between, or give the stage that keeps state "
                    f"another name; nothing was changed"
                )

    def _check_first_positions(self, taken: TakenUp) -> None:
        """Refuse another name for a source that has noted where it first stood, but for no checkpoint yet."""
        for each in taken.those("renamed", "source"):
            is_known = taken.base.stages[each.name].knows_position
            if not is_known and first_position(self._root.store, self._number, each.was or "") is not None:
                raise PipelineChanged(
                    f"rename {each.was}={each.name}: {checkpoint_name(taken.base.checkpoint_id)} does not know yet "
                    f"where source {each.was!r} stands. What to do: run the pipeline with the old name until one "
                    f"does; nothing was changed"
                )

    def _state_of(self, name: str) -> StageState | None:
        return StageState(self._session.version) if name in self._joined else self._state(name)

    def _shape(self) -> dict[str, StageShape]:
        return {
            each.name: StageShape(
                each.kind,
                each.inputs,
                each.output_mode,
                self.built[each.name].schema.simpleString(),
                None if each.sink is None else each.sink.table,
                self.built[each.name].streams,
                has_event_time=self.built[each.name].has_event_time,
            )
            for each in self._definitions
        }

    def _check_state(self, base: Manifest, shape: dict[str, StageShape]) -> tuple[str, ...]:
        """Whether the stages can go on with their state. Returns what has changed since, though they can."""

        def setting(key: str) -> str | None:
            # By default it is how many cores there are: on another machine nobody has set anything else.
            is_default = key == PARTITIONS and not self._is_set_by_user(key)
            return None if is_default else self._session.conf.get(key, None)

        return (*check_state(base, shape), *settings_not_taken(self._root.store, base, shape, setting))

    def _check_tables(self, base: Manifest | None, log: DecisionLog, taken: TakenUp | None) -> dict[str, TableAddress]:
        """Whether the tables can take what the stages write, and hold what the checkpoint goes on from. Those are
        returned that need not be created: where no row was ever sealed for a table, any other will do."""
        modes = {each.name: each.output_mode for each in self._definitions}
        tables: dict[str, TableAddress] = {}
        for number, (name, sink) in enumerate(self._sinks.items(), start=1):
            self._begin("checking_tables", name, number, len(self._sinks))
            is_there = sink.check_table(self.built[name].schema, modes[name])
            if base is None or taken is None:
                continue
            if is_there:
                tables[name] = address_of(sink)
                if name in taken.new:
                    check_shows_nothing(sink, base)
                if isinstance(sink, RowSink) and base.shape[name].schema != self.shape[name].schema:
                    check_all_shown(sink, base)
            if goes_on_from_rows(base, name):
                check_goes_on(sink, tables.get(name), base, log, self._root.store)
        return tables
