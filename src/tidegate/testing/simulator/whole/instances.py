"""A simulated driver process that runs the pipeline together with others: what `engine/together.py` does on threads, it
does in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from tidegate.cluster.exchange import Exchange, Profile
from tidegate.engine.briefing import Briefing, check_same, read_briefing, write_briefing
from tidegate.engine.chains import as_queries
from tidegate.engine.company import Company
from tidegate.engine.control import Remote
from tidegate.engine.ending import Ending
from tidegate.engine.generation import Generation, Ground
from tidegate.engine.links import LeaderTold, Links
from tidegate.engine.part import Part
from tidegate.engine.requests import StopRun
from tidegate.engine.root import Root
from tidegate.errors import (
    CheckpointsFailed,
    CoordinationUnavailable,
    Fenced,
    InstanceFailed,
    SessionLost,
    SinkFailed,
    StageFailed,
    StoreUnavailable,
    Superseded,
    TidegateError,
)
from tidegate.flows.instance import Cue
from tidegate.flows.opening import Opened
from tidegate.flows.requests import StartOrder
from tidegate.protocol.config import CheckpointConfig
from tidegate.spark.definition import StageDefinition
from tidegate.storage.paths import RootPaths
from tidegate.testing.simulator.checkers import SimulationFailure
from tidegate.testing.simulator.whole.driver import TICK_MS, PlayedLock, SimulatedDriver
from tidegate.testing.simulator.whole.files import Killed
from tidegate.testing.simulator.whole.roots import SimulatedRoot
from tidegate.testing.simulator.whole.session import SimulatedSession

if TYPE_CHECKING:
    from tidegate.testing.simulator.whole.cluster import WholeCluster

_LOOKS_EVERY: Final = 5
_LEAVES_IN_MS: Final = 4_000
_FAILURES: Final = (StageFailed, CheckpointsFailed, SinkFailed, StoreUnavailable, InstanceFailed)
TOGETHER: Final = "the instances"
"""Who holds a root, where several do."""


class PlayedShare(PlayedLock):
    """Of one of several processes that hold a root together."""

    def __init__(self, root: SimulatedRoot, run: str) -> None:
        super().__init__(root, run)
        self.is_shared = bool(root.shares)

    def take_if_free(self) -> bool:
        self._root.shares.add(self._run)
        self._root.lock = TOGETHER
        return True

    def release(self) -> None:
        self._root.shares.discard(self._run)
        if not self._root.shares:
            self._root.lock = None


class SimulatedInstance(SimulatedDriver):
    """One of several. It joins, leads or follows, and joins anew when others may have taken it for dead."""

    def __init__(self, cluster: WholeCluster, name: str, stages: tuple[str, ...]) -> None:
        """`stages`: that it asks for."""
        super().__init__(cluster, name)
        self._stages = stages
        self.session: SimulatedSession | None = None
        self._company: Company | None = None
        self._is_leading = False
        """Whether it opens a generation, or leads one."""
        self._order: StartOrder | None = None
        """What it runs, where another one leads."""
        self._followed = 0
        self._is_told = False
        self._leaves_by: int | None = None
        self.is_gone = False
        """Whether nobody starts it again."""
        self._cut_off_until = 0
        self._drained_before = 0

    # -- life and death ---------------------------------------------------------------------------

    def crash(self, *, leaves_orphans: bool = True) -> None:
        if self.session is not None:
            self.session.session.cut_off()
        self._forget()
        super().crash(leaves_orphans=leaves_orphans)

    def _forget(self) -> None:
        self._company = self.session = self._order = None
        self._is_leading = False

    def _restart(self) -> None:
        """Somebody starts it again, whatever the others do; unless it is gone for good."""
        if not self.process.alive and not self.cluster.is_over:
            super()._restart()
            if not self.is_gone and self._remote is None:
                self.start()

    def tell(self) -> None:
        """This process is told to stop, by a signal: not the pipeline."""
        self.world.note("{} is told to leave", self.name)
        self._is_told = True

    # -- what goes wrong between it and the others ------------------------------------------------

    def pause(self, until_ms: int, *, beats: bool) -> None:
        """It stops, and wakes up later. `beats`: others see it all the while."""
        self.process.paused_until = until_ms
        if not beats:
            self.cut_off(until_ms)

    def cut_off(self, until_ms: int) -> None:
        """From what the instances share."""
        self._cut_off_until = max(until_ms, self._cut_off_until)
        if self.session is not None:
            self.session.session.cut_off()
        self.world.after(until_ms - self.world.now, None, self._heal)

    def cut_off_from_store(self, until_ms: int) -> None:
        life = self.life
        life.is_cut_off = True

        def heal() -> None:
            life.is_cut_off = False

        self.world.after(until_ms - self.world.now, None, heal)

    def _heal(self) -> None:
        if self.session is not None and self._cut_off_until <= self.world.now:
            self.session.session.heal()

    def heal(self) -> None:
        """All that is wrong with it ends."""
        self._cut_off_until = 0
        self.life.is_cut_off = False
        if self.session is not None:
            self.session.stale = 0.0
            self.session.session.heal()

    # -- incarnations -----------------------------------------------------------------------------

    def _new_lock(self) -> PlayedLock:
        return PlayedShare(self.root, self.run)

    def _enter(self) -> None:
        self._followed, self._is_told, self._leaves_by = 0, False, None
        assert self._remote is not None
        self._remote.speak(False)
        self._join(self._runs)

    def _join(self, run: int) -> None:
        if self._remote is None or run != self._runs:
            return
        together, cluster = self.cluster.scenario.together, self.cluster
        session = SimulatedSession(cluster.kv.open(), self.world, self.cluster.stale)
        if self._cut_off_until > self.world.now:
            session.session.cut_off()
        files: Any = self.files(fails=True, forces=False).at(RootPaths.COORDINATION)
        incarnation = cluster.new_id()
        exchange = Exchange(session, files, self.name, incarnation, Profile(self._stages), together.most_bytes)
        try:
            exchange.join()
        except CoordinationUnavailable as error:
            session.close()
            self._end(error)
            return
        self.world.note("{} joins as {}", self.name, incarnation)
        self.session = session
        self._drained_before = len(cluster.drained)
        how_many = together.how_many if not self._followed else 1
        company = self._company = Company(exchange, how_many=how_many, grace_ms=together.grace_ms)
        company.is_leaving = self._leaves_by is not None
        self._send(company)
        self._listen(company)
        self._look(company)

    def _drop(self) -> None:
        if self.generation is not None and self._company is not None:
            self._company.exchange.follow(())
        super()._drop()

    def _leave(self) -> None:
        """What was said before is sent, if that is possible at once."""
        company = self._company
        self._drop()
        if company is not None:
            if self._is_leading:
                company.on_ended()
            with suppress(CoordinationUnavailable, StoreUnavailable):
                company.exchange.send()
            company.exchange.close()
        self._forget()

    def _end(self, error: BaseException | None) -> None:
        try:
            self._leave()
        except Killed:
            self.killed_at("_leave")
            return
        super()._end(error)

    # -- its post ---------------------------------------------------------------------------------

    def _send(self, company: Company) -> None:
        if company is not self._company:
            return
        exchange, pause_ms = company.exchange, 20
        if exchange.said.is_set() and not self._try(exchange.send):
            exchange.said.set()
            pause_ms = 100
        self.world.after(self.world.delay(pause_ms), self.process, self._alive, self._send, company)

    def _listen(self, company: Company) -> None:
        """Notices come late, are missed, and come for nothing."""
        if company is not self._company:
            return
        self._try(company.exchange.receive)
        pause_ms = self.world.delay(200 if self.world.chance(self.cluster.stale) else 30)
        self.world.after(pause_ms, self.process, self._alive, self._listen, company)

    @staticmethod
    def _try(act: Callable[[], None]) -> bool:
        try:
            act()
        except (CoordinationUnavailable, StoreUnavailable):
            return False
        except TidegateError as error:
            raise SimulationFailure("Exchange", f"it cannot be tried again: {error}") from error
        return True

    # -- between generations ----------------------------------------------------------------------

    def _look_later(self, company: Company, delay_ms: int = TICK_MS) -> None:
        self.world.after(delay_ms, self.process, self._alive, self._look, company)

    def _look(self, company: Company) -> None:
        """What is to be done, until the pipeline has ended, or this instance has left it."""
        if company is not self._company or self.generation is not None:
            return
        cue = company.cue(self.world.now)
        if (told := company.ended()) is not None:
            self._end_as_told(told)
        elif cue is Cue.OPEN and not self._is_leaving:
            self._lead(company)
        elif (order := company.ordered()) is not None:
            self._follow(company, order)
        elif self._has_left(company):
            self._end(None)
        else:
            self._look_later(company)

    def _end_as_told(self, told: LeaderTold) -> None:
        """The pipeline has ended, by what whoever leads it has told."""
        if told.has_failed:
            self._end(InstanceFailed("that leads", told.ended or ""))
            return
        if len(self.cluster.drained) == self._drained_before:
            raise SimulationFailure(
                "Requests", f"{self.name} was told that the pipeline has ended, and it has not since it has joined"
            )
        self._end(None)

    @property
    def _is_leaving(self) -> bool:
        """Whether this instance was told to stop, not the pipeline, and others are there to go on."""
        return self._is_told and self._stop is None and self._company is not None and self._company.has_others

    @property
    def _is_to_stop(self) -> bool:
        return self._is_told or self._stop is not None

    def _has_left(self, company: Company) -> bool:
        return self._is_to_stop and (self._is_leaving or not company.leads)

    # -- leading ----------------------------------------------------------------------------------

    def _lead(self, company: Company) -> None:
        company.gather()
        assert self._remote is not None
        self._remote.speak(True)
        self._is_leading = True
        self._open(self._runs)

    def _claimant(self) -> str:
        return f"{self.name}#{self.cluster.new_id()}"

    def _apart(self) -> frozenset[str]:
        assert self._company is not None
        return self._company.kept_apart(self.cluster.definitions(self))

    def _part(self, queries: Sequence[StageDefinition], ground: Ground, config: CheckpointConfig) -> Part:
        assert self._company is not None
        part = self._company.part(queries)
        briefing = Briefing(
            shape=ground.shape,
            base=ground.base,
            joined=tuple(sorted(stage.name for query in queries for stage in query.members[1:])),
            schemas={},
            in_order=(),
            placed=dict(part.placed),
            incarnations=dict(part.incarnations),
            config=config,
            available_now=self._is_bounded,
            holds_sources=self._stop is not None and self._stop.drain,
        )
        write_briefing(ground.root, ground.opened.generation, briefing)
        for name, given in part.placed.items():
            self.world.note("generation {}: {} runs {}", ground.opened.generation, name, ", ".join(given) or "nothing")
        self._followed = self._company.followed = ground.opened.generation
        return part

    def _take_up(self, generation: Any) -> None:
        assert self._company is not None
        if generation.leads:
            self._company.on_opened(generation)
        super()._take_up(generation)

    def _tick(self, generation: Generation) -> None:
        company, remote = self._company, self._remote
        if generation is not self.generation or company is None or remote is None:
            return
        generation.poll()
        links = generation.links
        assert links is not None
        if links.leader_told.ended is None and self._is_over(company, links):
            return
        self._ticks += 1
        assert self._ending is not None
        if generation.leads:
            self._lead_on(generation, self._ending, remote)
        else:
            self._follow_on(generation, company, links)
        if generation is self.generation:
            self._tick_later(generation)

    def _is_over(self, company: Company, links: Links) -> bool:
        """Whether the generation is, by what is seen of the others."""
        if self._is_leaving:
            if self._leaves_by is None:
                self._leaves_by = self.world.now + _LEAVES_IN_MS
            company.is_leaving = links.is_leaving = True
        cue = company.cue(self.world.now)
        links.missing = company.missing
        if cue not in (Cue.OPEN, Cue.END):
            return False
        self._stop_running(company, company.why or "this instance leads from now on")
        return True

    def _stop_running(self, company: Company, why: str) -> None:
        self.world.note("{} ends its generation: {}", self.name, why)
        assert self._remote is not None
        self._drop()
        self._order = None
        if self._is_leading:
            self._is_leading = False
            company.on_ended()
            self._remote.speak(company.leads)
        self._look_later(company)

    def _lead_on(self, generation: Generation, ending: Ending, remote: Remote) -> None:
        remote.serve(generation)
        if self._ticks % _LOOKS_EVERY == 0:
            generation.check_queries()
            remote.update(generation, "draining" if ending.is_draining else None)
            if self._is_bounded or ending.is_draining:
                ending.look()
            if self._is_bounded and not ending.is_begun and ending.has_consumed_all:
                ending.begin(self._stop or StopRun())
        if self._is_to_stop and not self._is_leaving:
            ending.begin(self._stop or StopRun())
        if ending.is_over():
            self._say_ended(generation, "it has ended in order")
            self._end_in_order(generation, remote, ending.done)

    @staticmethod
    def _say_ended(generation: Generation, why: str, *, has_failed: bool = False) -> None:
        if generation.links is not None:
            generation.links.ended, generation.links.has_failed = why, has_failed
            generation.links.say()

    # -- following --------------------------------------------------------------------------------

    def _follow(self, company: Company, order: StartOrder) -> None:
        self._followed = company.followed = order.generation
        self._order = order
        assert self._remote is not None
        self._remote.speak(False)
        store: Any = self.files(fails=True)
        briefing = read_briefing(store, order.generation)
        if briefing is None:
            self._order = None
            self._look_later(company)
            return
        self.world.note("{} runs {} of generation {}", self.name, ", ".join(order.stages), order.generation)
        own, definitions = company.own, self.cluster.definitions(self)
        part = briefing.part(Part(own.instance, own.incarnation, leads=False, exchange=company.exchange))
        check_same(definitions, briefing)
        queries = as_queries(definitions, briefing.joined)
        root = Root(store, "simulated", root_id=self.cluster.new_id(), is_shared=True)
        log = root.decisions.read()
        opened = Opened(order.generation, order.leader, log, order.base, order.after_checkpoint)
        stages = {stage.name for query in queries if part.runs(query.name) for stage in query.members}
        ground = self._ground(opened, briefing.base, self._own_files(stages))
        self._is_bounded = briefing.available_now
        generation = self._generation(queries, ground, briefing.config, self.sinks(store, root.id), part)
        generation.start_by(order)
        if briefing.holds_sources:
            generation.hold_sources()
        self._take_up(generation)

    def _own_files(self, stages: set[str]) -> Any:
        """A root in which it may delete what its own stages have stored, and nothing else."""

        def check(name: str) -> None:
            if not name.startswith(f"{RootPaths.GENERATIONS}/") or RootPaths.stage_of(name) not in stages:
                raise SimulationFailure("OwnStages", f"{self.name} runs {sorted(stages)} and deletes {name}")

        store = self.files(fails=True)
        store.on_delete = check
        return store

    def _follow_on(self, generation: Generation, company: Company, links: Links) -> None:
        told = links.leader_told
        if generation.has_cleaned_up and told.ended is not None:
            self._end_as_told(told)
        elif links.newer is not None:
            self._stop_running(company, "there is a newer one")
        elif self._leaves_by is not None and self.world.now >= self._leaves_by:
            self._end(None)
        elif self._ticks % _LOOKS_EVERY == 0:
            generation.check_queries()

    # -- failures ---------------------------------------------------------------------------------

    def _on_failed(self, error: TidegateError) -> None:
        self.world.note("{} fails: {}: {}", self.name, type(error).__name__, error)
        company, generation, order = self._company, self.generation, self._order
        if company is None or self._remote is None:
            self._end(error)
        elif isinstance(error, SessionLost):
            self.cluster.taken_for_dead += 1
            self._remote.speak(False)
            self._leave()
            self.world.after(self.world.delay(30), self.process, self._alive, self._join, self._runs)
        elif self._is_leading:
            self._on_failed_leading(company, generation, error)
        elif order is None:
            self._end(error)
        else:
            if generation is not None and generation.links is not None:
                generation.member.on_failed(error)
                generation.links.say()
            else:
                company.say_failed(order, str(error))
            self._stop_running(company, "it has failed")

    def _on_failed_leading(self, company: Company, generation: Generation | None, error: TidegateError) -> None:
        is_soon = self._is_to_stop and not (self._stop is not None and self._stop.drain)
        if isinstance(error, Superseded | Fenced):
            self._stop_running(company, "it has given way")
        elif not isinstance(error, _FAILURES) or is_soon:
            if generation is not None:
                self._say_ended(generation, str(error), has_failed=True)
            self._end(error)
        else:
            assert self._remote is not None
            self._remote.restarting(str(error))
            self._stop_running(company, "it has failed")
