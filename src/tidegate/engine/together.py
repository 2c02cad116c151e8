"""Running a pipeline together with other instances: this process runs some of its stages, and leads where nobody else
does.

1. Start Spark, and join: from then on others count on it.
2. See who leads. If nobody does, try to; who leads gathers those that are there, opens a generation, and orders each of
   them to run its part.
3. Run what is ordered, until there is a newer generation, or the pipeline has ended.

Who has lost its session may have been taken for dead: it stops all that it runs, and joins anew as another incarnation.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.cluster.connect import connect, is_in_files
from tidegate.cluster.exchange import Exchange, Profile
from tidegate.cluster.post import Post
from tidegate.engine.briefing import brief, build_part, read_briefing, write_briefing
from tidegate.engine.carrier import monotonic_ms
from tidegate.engine.company import Company
from tidegate.engine.generation import Generation, Ground
from tidegate.engine.launching import Launch
from tidegate.engine.links import LeaderTold, Links
from tidegate.engine.part import Part
from tidegate.engine.requests import StopRun
from tidegate.engine.run import FINAL, Run
from tidegate.engine.status import now
from tidegate.engine.status_files import last_words
from tidegate.errors import (
    CheckpointsFailed,
    CoordinationUnavailable,
    Fenced,
    InstanceFailed,
    RootInUse,
    SessionLost,
    SinkFailed,
    SparkLost,
    StageFailed,
    StoreUnavailable,
    Superseded,
    TidegateError,
)
from tidegate.flows.instance import Cue
from tidegate.flows.opening import Opened
from tidegate.flows.requests import StartOrder
from tidegate.protocol.config import as_ms
from tidegate.protocol.decision_log import DecisionLog
from tidegate.sinks.contract import FileSink
from tidegate.sinks.staging import forget_generations
from tidegate.storage.folder import near
from tidegate.storage.manifest import Manifest
from tidegate.storage.mounted import Mounted
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import Pace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tidegate.cluster.kv import Session
    from tidegate.engine.fitting import SparkFitting

_log = logging.getLogger("tidegate")

_LOOK_EVERY_S: Final = 0.05
_LOOK_AT_QUERIES_EVERY_S: Final = 0.2
_LEAVES_IN_S: Final = 120.0
_JOINS_AGAIN_S: Final = 0.5
_TELL_EVERY_S: Final = 10.0
_LOOKS_PER_HEARING: Final = 8
_INSTANCE_SEPARATOR: Final = "#"
"""In the names under which instances claim generations, and in no other run's."""

_FAILURES: Final = (StageFailed, CheckpointsFailed, SinkFailed, StoreUnavailable, SparkLost, InstanceFailed)


class _Over(Exception):
    """The generation is over, though nothing has failed."""


class _PipelineFailed(Exception):
    """Whoever leads has given up."""


class RunTogether(Run):
    """One instance of several."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._company: Company
        self._woken = threading.Event()
        self._failures = 0
        self._followed = 0
        self._last_incarnation: str | None = None
        self._leaves_by: float | None = None
        self._why_ended: str | None = None
        self._has_ended_pipeline = False
        self._led_last = False
        """Whether it led the last generation that it had a part in."""
        self._told_awaited: tuple[str, ...] = ()

    def check_before_spark(self) -> None:
        """Whoever leads looks at all of it when a generation is opened: others may be at work now."""
        self.begin("checking")
        self._spark.check_can_start()

    def why_ended(self) -> str | None:
        return self._why_ended

    @property
    def ends_pipeline(self) -> bool:
        """Who leads when it ends tells so; others go on where this one has left."""
        return self._has_ended_pipeline

    # -- incarnations -----------------------------------------------------------------------------

    def _run(self) -> StopRun:
        while True:
            self.begin("joining")
            post = self._joined()
            try:
                return self._take_part()
            except _PipelineFailed as failed:
                raise InstanceFailed(self._company.led_by or "that led", str(failed)) from None
            except SessionLost as lost:
                self._remote.speak(False)
                _log.warning("instance %s: %s; it joins anew", self._name, lost)
            finally:
                post.close()  # and leave: what it said last is to be heard before it is seen to be gone

    def _joined(self) -> Post:
        """As a new incarnation. What it shares with the others must be there at first; later it is waited for."""
        told_s = 0.0
        while True:
            session: Session | None = None
            try:
                session = self._session()
                return self._join(session)
            except CoordinationUnavailable as error:
                if session is not None:
                    session.close()
                if self._last_incarnation is None or self._stop.wait(_JOINS_AGAIN_S):
                    raise
                if time.monotonic() - told_s > _TELL_EVERY_S:
                    told_s = time.monotonic()
                    _log.warning("instance %s cannot join: %s; it is tried again", self._name, error)

    def _check_name(self, session: Session) -> None:
        """Two of one name would take it from each other for ever."""
        other = session.present().get(self._name)
        if self._last_incarnation is not None and other is not None and other.incarnation != self._last_incarnation:
            raise RootInUse(
                f"another process has joined as instance {self._name!r}; give each of them a name of its own"
            )

    @property
    def _name(self) -> str:
        assert self._options.instance is not None
        return self._options.instance

    def _session(self) -> Session:
        """One ZooKeeper may be there for several pipelines: each root has a place of its own."""
        address = self._options.coordination
        if address is not None and address.startswith("zk://"):
            address = f"{address.rstrip('/')}/{self._root.id}"
        lease_s = as_ms("lease", self._options.lease) / 1000
        pace, is_far = self._root.pace, isinstance(self._root.work, Mounted)
        return connect(address, self._root.store, lease_s, between_looks_s=pace.between_looks_s, is_far=is_far)

    def _join(self, session: Session) -> Post:
        """As a new incarnation."""
        own = self._remote.status
        profile = Profile(tuple(self._options.stages), own.host, own.pid, now())
        files = self._root.store.at(RootPaths.COORDINATION, durable=False)
        exchange = Exchange(session, files, self._name, uuid.uuid4().hex, profile)
        self._check_name(session)
        exchange.join()
        self._last_incarnation = exchange.own.incarnation
        exchange.on_heard = self._woken.set
        how_many, grace_ms = self._options.instances, as_ms("grace", self._options.grace)
        self._company = Company(
            exchange, how_many=how_many if not self._followed else 1, grace_ms=grace_ms, pace=self._root.pace
        )
        self._company.is_leaving = self._leaves_by is not None
        post = Post(exchange, session, self._listens_s())
        post.open()
        return post

    def _listens_s(self) -> float:
        """Each time all that the others have said is looked at, which in a bucket costs."""
        looks = self._root.pace.between_looks_s if is_in_files(self._options.coordination) else Pace().between_looks_s
        return looks[1] * _LOOKS_PER_HEARING

    # -- between generations ----------------------------------------------------------------------

    def _take_part(self) -> StopRun:
        """Until the pipeline has ended, or this instance has left it."""
        company = self._company
        while True:
            done: StopRun | None = None
            cue = company.cue(monotonic_ms())
            if self._ends(company.ended()):  # before it leads, because whoever led is gone
                done = StopRun()
            elif cue is Cue.OPEN and not self._is_leaving:
                done = self._lead()
            elif (order := company.ordered()) is not None:
                done = self._follow(order)
            elif self._has_left():
                done = StopRun()
            else:
                self._tell_who_is_awaited()
                self._woken.wait(_LOOK_EVERY_S)
                self._woken.clear()
            if done is not None:
                return done

    def _tell_who_is_awaited(self) -> None:
        """Once: nobody should wonder why nothing is opened."""
        awaited = self._company.waits_for
        if awaited and awaited != self._told_awaited:
            _log.info("instance %s leads, and waits for %s (--grace)", self._name, ", ".join(awaited))
        self._told_awaited = awaited

    def _ends(self, told: LeaderTold | None) -> bool:
        """Whether the pipeline has ended, by what whoever leads it has told."""
        if told is None or told.ended is None:
            return False
        if told.has_failed:
            raise _PipelineFailed(told.ended)
        self._why_ended = told.ended
        return True

    # -- leaving ----------------------------------------------------------------------------------

    @property
    def _is_leaving(self) -> bool:
        """Whether this instance was told to stop, not the pipeline, and others are there to go on."""
        return self._stop.wanted and not self._stop.is_asked and self._company.has_others

    def _has_left(self) -> bool:
        """Whether it was told to stop, and has a part in nothing."""
        if not self._stop.wanted or not (self._is_leaving or not self._company.leads):
            return False  # alone, it has to end the pipeline
        self._why_ended = "it was told to stop, and the others go on"
        self._remote.speak(False)  # whoever leads from now on does
        return True

    def _look_whether_leaving(self, links: Links) -> None:
        if not self._is_leaving:
            return
        if self._leaves_by is None:
            _log.info("instance %s leaves after the next checkpoint", self._name)
            self._leaves_by = time.monotonic() + _LEAVES_IN_S
        self._company.is_leaving = links.is_leaving = True

    # -- leading ----------------------------------------------------------------------------------

    def _lead(self) -> StopRun | None:
        """Open a generation and lead it, until it ends. None: to be looked at again."""
        self._company.gather()
        self._look_back()
        self._remote.speak(True)
        generation: Generation | None = None
        try:
            generation = self._told(self._open)
            self._have_part_in(generation.generation)
            done = self._told(self._drive, generation)
            if not self._stop.how.lacks(done):
                self._say_ended(generation, "it was told to stop" if self._stop.wanted else "all its input is consumed")
                self._has_ended_pipeline = True
                return done
            self._holds_sources, self._is_drained = True, done.drain
            self._goes_on("windows", None)
        except _Over as why:
            _log.info("generation %d ends: %s", 0 if generation is None else generation.generation, why)
            self.chronicle.over(generation, str(why))
            self._goes_on("instances", str(why))
        except (Superseded, Fenced) as error:
            _log.warning("%s", error)
            with suppress(StoreUnavailable):  # then it is asked again when it is opened
                self._check_not_superseded()
        except _FAILURES as error:
            self._on_failed(generation, error)
        finally:
            self.chronicle.over(generation, "the run has ended")
            self._company.on_ended()
            self._end(generation)
        self._remote.speak(self._company.leads)
        return None

    def _look_back(self) -> None:
        """Before it speaks for the run: what whoever led said last, if that was another one."""
        if self._led_last:
            return
        self._led_last = True
        with suppress(TidegateError, OSError):
            found, own = last_words(self._root.store), self._remote.status
            if found is not None and (found.pid, found.started_at) != (own.pid, own.started_at):
                self.earlier = found
        if self._followed:
            self._goes_on("instances", "whoever led it has left, or was lost")

    def _on_failed(self, generation: Generation | None, error: TidegateError) -> None:
        """Restart from the last checkpoint, unless it has failed too often."""
        if generation is not None and generation.has_advanced:
            self._failures = 0
        self._failures += 1
        if isinstance(error, FINAL) or self._failures > self._options.restarts or self._stop.is_soon:
            self._tell_next(self._failures)
            self._has_ended_pipeline = True
            if generation is not None:
                self._say_ended(generation, str(error), has_failed=True)
            self._give_up(generation, error)
            raise error
        pause_s = self._pause_after(self._failures)
        self.chronicle.over(generation, str(error))
        self.chronicle.failed(error, round(pause_s * 1000))
        self._goes_on("failure", str(error))
        _log.warning("%s; restarting from the last checkpoint in %.1f s", error, pause_s)
        self._told(self._tell, self._remote.restarting(str(error)))
        self._end(generation)
        self._stop.wait(pause_s)

    @staticmethod
    def _say_ended(generation: Generation, why: str, *, has_failed: bool = False) -> None:
        if generation.links is not None:
            generation.links.ended, generation.links.has_failed = why, has_failed
            generation.links.say()

    def _end(self, generation: Generation | None) -> None:
        """Stop what runs here."""
        self._watch.stop()
        self._rereading.stop()
        self._company.exchange.on_heard = self._woken.set
        if generation is not None:
            self._stop_all(generation)
            self._company.exchange.follow(())

    def _have_part_in(self, generation: int) -> None:
        self._followed = self._company.followed = self._newest_generation = generation

    def _check_need_not_give_way(self, log: DecisionLog) -> None:
        """It is told by the others who of them leads. A run alone that somebody has let take over from all of them is
        not among them, and they are not to take the pipeline back."""
        if _INSTANCE_SEPARATOR not in log.claimant:
            super()._check_need_not_give_way(log)

    def _claimant(self) -> str:
        return f"{self._name}{_INSTANCE_SEPARATOR}{uuid.uuid4().hex}"

    def _apart(self) -> frozenset[str]:
        return super()._apart() | self._company.kept_apart(self._definitions)

    def _part(self, fitting: SparkFitting, opened: Opened) -> Part:
        part = self._company.part(fitting.queries)
        briefing = brief(
            fitting,
            part,
            self._options.config(),
            self._options.bounds().drift_ms,
            available_now=self._options.available_now,
            holds_sources=self._holds_sources,
        )
        write_briefing(self._root.store, opened.generation, briefing)
        for name, given in part.placed.items():
            _log.info("generation %d: instance %s runs %s", opened.generation, name, ", ".join(given) or "nothing")
        return part

    def _launched(
        self, generation: Generation, frames: Mapping[str, DataFrame], base: Manifest | None, *, rereads: bool = True
    ) -> Generation:
        self._company.exchange.on_heard = partial(_wake, generation)
        if generation.leads:
            self._company.on_opened(generation)
        return super()._launched(generation, frames, base, rereads=rereads)

    def _look_around(self, generation: Generation) -> None:
        """Raise if the generation is over."""
        links = generation.links
        assert links is not None
        self._look_whether_leaving(links)
        cue = self._company.cue(monotonic_ms())
        links.missing = self._company.missing
        if cue is Cue.OPEN:
            raise _Over("this instance leads from now on")
        if cue is Cue.END and not (self._is_to_end() and self._company.is_complete):
            raise _Over(self._company.why)

    def _is_to_end(self) -> bool:
        return self._stop.wanted and not self._is_leaving

    # -- following --------------------------------------------------------------------------------

    def _follow(self, order: StartOrder) -> StopRun | None:
        """Run what was ordered, until there is a newer generation."""
        self._have_part_in(order.generation)
        self._led_last = False
        self._remote.speak(False)
        generation: Generation | None = None
        try:
            generation = self._told(self._open_part, order)
            if generation is not None and self._told(self._drive_part, generation):
                return StopRun()
        except _Over as why:
            _log.info("generation %d ends: %s", order.generation, why)
        except SessionLost:
            raise
        except TidegateError as error:
            _log.warning("instance %s cannot go on in generation %d: %s", self._name, order.generation, error)
            self._say_failed(generation, order, error)
        finally:
            self._end(generation)
        return None

    def _open_part(self, order: StartOrder) -> Generation | None:
        session = self.start_spark()
        briefing = read_briefing(self._root.store, order.generation)
        if briefing is None:
            return None  # it is over
        led_by, runs = order.leader.partition(_INSTANCE_SEPARATOR)[0], ", ".join(order.stages)
        _log.info("generation %d, led by %s: instance %s runs %s", order.generation, led_by, self._name, runs)
        part = briefing.part(self._company.own_part())
        self.begin("calling_functions")
        queries, built = build_part(self._definitions, briefing, part, self._root.work, session, order.generation)
        sinks = self._sinks(session)
        for each in queries:
            if each.name in sinks and part.runs(each.name):
                sinks[each.name].check_table(built[each.name].schema, each.output_mode)
        log = self._root.decisions.read()
        opened = Opened(order.generation, order.leader, log, order.base, order.after_checkpoint)
        self._holds_sources = briefing.holds_sources
        generation = Generation(
            queries,
            Ground(self._pipeline.name, self._root.store, self._root.work, opened, briefing.base, briefing.shape),
            briefing.config,
            sinks,
            msgspec.structs.replace(self._options.bounds(), drift_ms=briefing.drift_ms),
            launch=Launch(
                [each for each in queries if part.runs(each.name)],
                built,
                briefing.in_order,
                self._root.store,
                session,
                self.begin,
                available_now=briefing.available_now,
            ),
            part=part,
        )
        generation.start_by(order)
        frames = {name: each.frame for name, each in built.items()}
        return self._launched(generation, frames, briefing.base, rereads=False)

    def _forget_here(self, generation: Generation) -> None:
        """What generations before have left on this machine: whoever leads sees what is in the bucket, and not that.
        When all stages have what they start from, and go on."""
        with suppress(StoreUnavailable):
            self._root.forget_here(generation.generation)
            for sink in generation.sinks.values():
                if isinstance(sink, FileSink) and (here := near(sink.staging)) is not sink.staging:
                    forget_generations(here, generation.generation)

    def _drive_part(self, generation: Generation) -> bool:
        """Until there is a newer generation. Tells whether the pipeline has ended, or this instance has left it."""
        looked = 0.0
        links = generation.links
        assert links is not None
        has_forgotten = False
        while True:
            self._rounds.doing("busy with what Spark has committed, with checkpoints and with the files of both")
            generation.poll()
            if generation.shown and not has_forgotten:
                has_forgotten = True
                self._forget_here(generation)
            if links.leader_told.ended is None:  # else whoever led may be gone, and nobody is to take his place
                self._look_around(generation)
            if generation.has_cleaned_up and self._ends(links.leader_told):
                return True
            if links.newer is not None:
                return False
            if self._leaves_by is not None and time.monotonic() >= self._leaves_by:
                self._why_ended = "it was told to stop, and nobody has let it go in time; the others go on without it"
                return True
            if time.monotonic() - looked >= _LOOK_AT_QUERIES_EVERY_S:
                looked = time.monotonic()
                generation.check_queries()
                self._watch.check(generation.shape)
            self._rounds.doing(None)
            self._pause(generation)

    def _say_failed(self, generation: Generation | None, order: StartOrder, error: TidegateError) -> None:
        """It stays said until there is a newer generation."""
        if generation is not None and generation.links is not None:
            generation.member.on_failed(error)
            generation.links.say()
        else:
            self._company.say_failed(order, str(error))


def _wake(generation: Generation) -> None:
    generation.has_heard = True
    generation.carrier.woken.set()
