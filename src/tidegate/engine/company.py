"""The other instances, as one of them sees them: what is to be done about who leads, what was ordered, and who runs
which query of a generation that this one opens.

It decides nothing that the flows do not decide (`flows/instance.py`), and waits for nothing: a run asks it in every
round, and so does the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from tidegate.cluster.exchange import Exchange, Heard
from tidegate.engine.links import LeaderTold
from tidegate.engine.part import Part
from tidegate.errors import SessionLost
from tidegate.flows.boards import LeaderBoard, MemberBoard
from tidegate.flows.instance import Cue, Instance, had_part
from tidegate.flows.requests import StartOrder
from tidegate.protocol.membership import Attendances, Standing, staying
from tidegate.protocol.placement import Placeable, kept_apart, place
from tidegate.spark.definition import StageDefinition
from tidegate.storage.places import Pace

if TYPE_CHECKING:
    from tidegate.engine.generation import Generation

CAMPAIGN_EVERY_MS: Final = 500
_TIDY_EVERY_MS: Final = 500
"""At least, however short the grace is: so long may others see what was shared before."""


class Company:
    """Of one incarnation of an instance. All of it is called from its control thread."""

    def __init__(self, exchange: Exchange, *, how_many: int, grace_ms: int, pace: Pace | None = None) -> None:
        """`pace`: of the root that they share."""
        self._pace = Pace() if pace is None else pace
        self.exchange = exchange
        self.own = exchange.own
        self._instance = Instance(exchange.own, how_many=how_many, grace_ms=grace_ms)
        self._tidies_every_ms = max(grace_ms, _TIDY_EVERY_MS)
        self._tidied_ms: int | None = None
        self._tidied = 0
        """How often, in the generation that it leads."""
        self._led: Part | None = None
        self._led_generation = 0
        self._campaigned_ms: int | None = None
        self._members: Attendances = {}
        self._seen_leading: set[str] = set()
        self.followed = 0
        """The newest generation that this incarnation has had a part in."""
        self.is_leaving = False
        """Whether it wants to have no part in the next generation."""
        exchange.listen_to(())
        self.say_idle()

    @property
    def heard(self) -> Heard:
        """What was heard last. Raises `SessionLost` where nobody listens to this incarnation any more, and what else
        keeps it from being heard, or from hearing the others."""
        self.exchange.check()
        heard = self.exchange.heard
        if heard.is_lost:
            raise SessionLost("others may have taken this process for dead")
        return heard

    @property
    def has_others(self) -> bool:
        """Whether somebody else is there who stays. Who leads hears of all that are about to leave: where that is
        everybody, it is the one that ends the pipeline."""
        present = self.exchange.heard.present
        return any(not each.is_leaving for name, each in present.items() if name != self.own.instance)

    @property
    def why(self) -> str:
        """Why the generation that it leads is to end."""
        return self._instance.why

    @property
    def leads(self) -> bool:
        return self._instance.standing is Standing.LEADS

    @property
    def led_by(self) -> str | None:
        """Who leads the newest generation, by what is heard."""
        board = _newest(self.exchange.heard)
        return None if board is None else _name_of(board)

    @property
    def is_complete(self) -> bool:
        """Whether all that have a part in what it leads are there, whoever else comes or goes."""
        return not self._instance.missing

    @property
    def missing(self) -> Mapping[str, int]:
        """Those of the members that it leads that are not seen any more, and since when."""
        return self._instance.missing

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Who is expected before a generation is opened, by name."""
        return self._instance.waits_for(self.exchange.heard.present)

    def say_idle(self) -> None:
        """It has a part in no generation."""
        self.exchange.follow_up(MemberBoard(0, self.own.instance, self.own.incarnation, is_leaving=self.is_leaving))

    def say_failed(self, order: StartOrder, why: str) -> None:
        """It cannot even begin what it was ordered to run."""
        own = self.own
        self.exchange.follow_up(MemberBoard(order.generation, own.instance, own.incarnation, failed=why))

    # -- between generations ----------------------------------------------------------------------

    def cue(self, now_ms: int) -> Cue:
        """What is to be done. It tries to lead by itself, where that is the cue."""
        heard = self.heard
        self._note_leaders(heard)
        cue = self._instance.look(
            heard.present, heard.claim, now_ms, self._expected(heard), hearing=self.exchange.hearings
        )
        if self._instance.standing is not Standing.FOLLOWS:
            self.exchange.listen_to(None)  # who wants to lead has to know who is about to leave
        is_due = self._campaigned_ms is None or now_ms - self._campaigned_ms >= CAMPAIGN_EVERY_MS
        if cue is Cue.CAMPAIGN and is_due:
            self._campaigned_ms = now_ms
            self.exchange.campaign(heard)
        if self._led is not None and self.leads:
            self._tidy(self._led, heard, now_ms)
        return cue

    def _tidy(self, led: Part, heard: Heard, now_ms: int) -> None:
        """Let go of what instances have said that do not come back: twice in each generation, for what nobody has heard
        of, and as long as there is something."""
        if self._tidied_ms is not None and now_ms - self._tidied_ms < self._tidies_every_ms:
            return
        members = led.incarnations.keys() | led.placed.keys()
        if self._tidied < 2 or not heard.leaders.keys() | heard.members.keys() <= members | heard.present.keys():
            self._tidied_ms = now_ms
            self._tidied += 1
            self.exchange.forget_boards(self._led_generation, but=members)

    def _expected(self, heard: Heard) -> frozenset[str]:
        """Those that had a part in the last generation that anybody speaks of, unless that has ended. Where this one
        has led it, who was missing was waited for already."""
        board = _newest(heard)
        if board is None or board is heard.leaders.get(self.own.instance):
            return frozenset()
        return frozenset() if _told(board).ended is not None else had_part(heard.leaders, heard.members)

    def _note_leaders(self, heard: Heard) -> None:
        """Who was seen to lead while this one is here: boards of others are of runs before, and so is one that says how
        it has ended, before whoever leads now has opened a generation."""
        claim = heard.claim
        board = None if claim is None else heard.leaders.get(claim.instance)
        if board is not None and claim is not None and claim.is_valid(heard.present) and _told(board).ended is None:
            self._seen_leading.add(board.leader)

    def ordered(self) -> StartOrder | None:
        """What somebody has ordered this very incarnation to run, if it is newer than what it has run."""
        board = _newest(self.heard)
        order = None if board is None else board.orders.get(self.own.instance)
        if order is None or order.generation <= self.followed:
            return None
        return order if order.incarnation == self.own.incarnation else None

    def ended(self) -> LeaderTold | None:
        """How the pipeline has ended, while this one had no part in it; None: it has not."""
        board = _newest(self.heard)
        if board is None or board.leader not in self._seen_leading:
            return None
        told = _told(board)
        return None if told.ended is None else told

    # -- leading ----------------------------------------------------------------------------------

    def gather(self) -> None:
        """Whoever is there now has a part in the generation that is opened next."""
        self._members = staying(self.heard.present)

    def kept_apart(self, definitions: Iterable[StageDefinition]) -> frozenset[str]:
        """The stages that must not run in the query of their input, because instances have asked for them apart."""
        return kept_apart({each.name: each.inputs for each in definitions}, self._wanted)

    @property
    def _wanted(self) -> dict[str, tuple[str, ...]]:
        return {name: each.stages for name, each in self._members.items()}

    def part(self, queries: Iterable[StageDefinition]) -> Part:
        """Who runs which query. This one leads."""
        placed = place(_placeable(queries), self._wanted)
        members = {name: self._members[name].incarnation for name, given in placed.items() if given}
        own = self.own
        incarnations = members | {own.instance: own.incarnation}
        return msgspec.structs.replace(self.own_part(), leads=True, placed=placed, incarnations=incarnations)

    def own_part(self) -> Part:
        """Of this process in a generation that another one leads; which queries it runs is not known yet."""
        own, pace = self.own, self._pace
        return Part(
            own.instance,
            own.incarnation,
            leads=False,
            exchange=self.exchange,
            tell_every_ms=pace.tell_every_ms,
            tell_status_every_ms=pace.tell_status_every_ms,
        )

    def on_opened(self, generation: Generation) -> None:
        """It leads this generation from now on."""
        part = self._led = generation.part
        self._led_generation, self._tidied = generation.generation, 0
        members = {name: part.incarnations[name] for name, given in part.placed.items() if given}
        self._instance.on_opened(generation.leader, members, _placeable(generation.queries))

    def on_ended(self) -> None:
        """The generation that it led is over."""
        self._led = None
        self._instance.on_ended()
        self.say_idle()


def _newest(heard: Heard) -> LeaderBoard | None:
    return max(heard.leaders.values(), key=lambda each: each.generation, default=None)


def _name_of(board: LeaderBoard) -> str:
    """Of the instance that leads: it claims under more than that."""
    return board.leader.partition("#")[0]


def _told(board: LeaderBoard) -> LeaderTold:
    return LeaderTold() if board.told is None else msgspec.convert(board.told, LeaderTold)


def _placeable(queries: Iterable[StageDefinition]) -> list[Placeable]:
    return [Placeable(each.name, tuple(stage.name for stage in each.members), each.inputs) for each in queries]
