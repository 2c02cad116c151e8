"""Whether what is to run fits what it would start from: its functions are called, shape, state and tables checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from tidegate.engine.chains import as_queries, cannot_join, chains_of, may_join
from tidegate.engine.changes import check_shape, new_stages, told_of_new, with_new_stages
from tidegate.engine.order import in_order
from tidegate.engine.root import Root, check_sources
from tidegate.engine.status import StepName
from tidegate.engine.tables import address_of, check_goes_on, check_shows_nothing, goes_on_from_rows, with_staged_in
from tidegate.protocol.decision_log import DecisionLog
from tidegate.sinks.contract import BoundSink, RowSink
from tidegate.sinks.sessions import PARTITIONS
from tidegate.spark import queries
from tidegate.spark.definition import StageDefinition
from tidegate.spark.plan import has_state, states_of
from tidegate.spark.session import StageSessions
from tidegate.spark.state import check_state, settings_not_taken
from tidegate.storage.manifest import Manifest, StageShape, StageState, TableAddress
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
        root: Root,
        session: SparkSession,
        sinks: Mapping[str, BoundSink],
        is_set_by_user: Callable[[str], bool],
        begin: Begin,
        *,
        may_chain: bool = True,
        creates_tables: bool = True,
    ) -> None:
        """`is_set_by_user`: whether a setting of the session is not Spark's own default. `creates_tables`: those that
        are yet to be, once all else is found to fit."""
        self._definitions = definitions
        self._root = root
        self._session = session
        self._sessions = StageSessions(session)
        self._sinks = sinks
        self._is_set_by_user = is_set_by_user
        self._begin = begin
        self._number = 0
        self._looking = ExitStack()
        self._state: Callable[[str], StageState | None] = lambda _: None
        self._may_chain = may_chain
        self._creates_tables = creates_tables
        self._apart: frozenset[str] = frozenset()
        """Those that cannot be joined to their inputs, because of the checkpoint."""
        self._joined: set[str] = set()
        self._called: dict[str, tuple[queries.Built | None, queries.Built]] = {}
        """What each function has returned, and what it was joined to."""
        self.built: dict[str, queries.Built] = {}
        self.queries: list[StageDefinition] = []
        """What Spark is to run: stages, and chains of them."""
        self.shape: dict[str, StageShape] = {}
        self.base: Manifest | None = None
        self.changes: tuple[str, ...] = ()

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
        self._joined = set(may_join(self._definitions)) - self._apart if self._may_chain else set()
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
            self._root.store.make_folder(folder)  # which Spark looks for
        gates = {each: self._root.store.at(folder) for each, folder in names.items()}
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
    def in_order(self) -> frozenset[str]:
        """Those that may read one segment a batch only."""
        return in_order(self._definitions, {name for name, each in self.built.items() if each.aggregates})

    def fits(self, log: DecisionLog, base: Manifest | None) -> bool:
        if log.next_generation != self._number:
            self.build(log.next_generation)
            return False
        shape = self._shape()
        told: list[str] = []
        new: list[str] = []
        if base is not None:
            check_shape(base, shape)
            told, new = told_of_new(base, shape), new_stages(base, shape)
            base = with_new_stages(base, shape)
            if apart := cannot_join(base, chains_of(self.queries)):
                self._apart |= apart
                self.build(self._number)
                return False
        shape = check_sources(self._root.store, self._number, base, shape)
        shape = {name: msgspec.structs.replace(each, state=self._state_of(name)) for name, each in shape.items()}
        self.changes = () if base is None else (*told, *self._check_state(base, shape))
        tables = self._check_tables(base, log, new)
        for name, sink in self._sinks.items():  # none is created before all are checked
            if name not in tables and self._creates_tables:
                sink.prepare_table(self.built[name].schema)
                tables[name] = address_of(sink)
        self.shape = {
            **shape,
            **{name: msgspec.structs.replace(shape[name], table=table) for name, table in tables.items()},
        }
        self.base = None if base is None else with_staged_in(tables, base)
        return True

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

    def _check_tables(self, base: Manifest | None, log: DecisionLog, new: Collection[str]) -> dict[str, TableAddress]:
        """Whether the tables can take what the stages write, and hold what the checkpoint goes on from. Those are
        returned that need not be created: where no row was ever sealed for a table, any other will do. `new`: stages
        that the checkpoint does not know."""
        modes = {each.name: each.output_mode for each in self._definitions}
        tables: dict[str, TableAddress] = {}
        for number, (name, sink) in enumerate(self._sinks.items(), start=1):
            self._begin("checking_tables", name, number, len(self._sinks))
            is_there = sink.check_table(self.built[name].schema, modes[name])
            if base is None:
                continue
            if is_there:
                tables[name] = address_of(sink)
                if name in new:
                    check_shows_nothing(sink, base)
            if goes_on_from_rows(base, name):
                check_goes_on(sink, tables.get(name), base, log, self._root.store)
        return tables
