"""An instance: a driver process among others. It tells when to try to lead, when to open a generation, and when to end
one.

Guarantees:
- It opens a generation only while it is seen to lead, and with those that it sees: all that are expected, or whoever is
  there when the grace is over. And only by what was heard since its last one has ended: who is cut off from the others,
  and not from the log, would else take the pipeline back from whoever leads by now, again and again.
- While it leads one, a member that is not seen any more aborts the checkpoint at once. What becomes of the generation
  says the crew (protocol/membership.py).
- It ends its generation when another one is seen to lead. That this is right is for the log to say: who believes it
  wrongly costs a restart.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence

from tidegate.errors import CheckpointError
from tidegate.flows.boards import LeaderBoard, MemberBoard
from tidegate.flows.leader import Leader
from tidegate.protocol.membership import Attendances, Crew, Gathering, LeaderClaim, Standing, standing, staying
from tidegate.protocol.placement import Placeable, place


class Cue(enum.Enum):
    WAIT = "nothing is to be done but what it does"
    CAMPAIGN = "nobody leads: try to"
    OPEN = "open a generation"
    END = "end the generation"


class Instance:
    def __init__(self, own: LeaderClaim, *, how_many: int, grace_ms: int) -> None:
        """`how_many`: are to be there before it opens its first generation."""
        self.own = own
        self._how_many = how_many
        self._grace_ms = grace_ms
        self._gathering: Gathering | None = None
        self._leader: Leader | None = None
        self._crew: Crew | None = None
        self._members: frozenset[str] = frozenset()
        self._queries: Sequence[Placeable] = ()
        self._lost: set[str] = set()
        self._hearing = 0
        self._ended_at = -1
        self.standing = Standing.FOLLOWS
        self.why = ""
        """Why the generation is to end."""

    @property
    def missing(self) -> Mapping[str, int]:
        """Those of its members that are not seen any more, and since when."""
        return {} if self._crew is None else self._crew.missing

    def waits_for(self, present: Attendances) -> tuple[str, ...]:
        """Who is expected before a generation is opened, by name."""
        return () if self._gathering is None else self._gathering.missing(present)

    def look(
        self,
        present: Attendances,
        claim: LeaderClaim | None,
        now_ms: int,
        expected: Collection[str] = (),
        hearing: int | None = None,
    ) -> Cue:
        """What it sees. `expected`: those that had a part in the generation before. `hearing`: how often it has looked
        to see that, None if it is by itself."""
        self.standing = standing(self.own, claim, present)
        self._hearing = self._hearing + 1 if hearing is None else hearing
        if self._leader is not None and self._crew is not None:
            return self._look_at_crew(self._leader, self._crew, present, now_ms)
        if self.standing is not Standing.LEADS:
            self._gathering = None
            return Cue.CAMPAIGN if self.standing is Standing.CAMPAIGNS else Cue.WAIT
        if self._hearing <= self._ended_at:
            return Cue.WAIT
        if self._gathering is None:
            self._gathering = Gathering(expected, self._how_many, self._grace_ms, now_ms)
        return Cue.OPEN if self._gathering.is_over(present, now_ms) else Cue.WAIT

    def _look_at_crew(self, leader: Leader, crew: Crew, present: Attendances, now_ms: int) -> Cue:
        if self.standing is Standing.FOLLOWS:
            self.why = "another instance leads"
            return Cue.END
        completed = leader.completed
        crew.on_present(present, now_ms, completed, self._useful(present))
        for instance in sorted(crew.missing.keys() - self._lost):
            leader.on_lost(instance)
        for instance in sorted(self._lost - crew.missing.keys()):
            leader.on_back(instance)
        self._lost = set(crew.missing)
        if crew.wants_checkpoint(completed):
            self._ask_for_checkpoint(leader)
        why = crew.why_reopen(now_ms, completed)
        self.why = why or ""
        if why is not None:
            return Cue.END
        # Whoever took its place is gone, and nobody else has to: it leads on.
        return Cue.CAMPAIGN if self.standing is Standing.CAMPAIGNS else Cue.WAIT

    def _useful(self, present: Attendances) -> frozenset[str]:
        """Those that would be given something to run."""
        if present.keys() <= self._members:
            return frozenset()
        placed = place(self._queries, {name: each.stages for name, each in staying(present).items()})
        return frozenset(name for name, queries in placed.items() if queries)

    @staticmethod
    def _ask_for_checkpoint(leader: Leader) -> None:
        try:
            leader.trigger()
        except CheckpointError:
            return  # one is in progress, or cannot be: the next one will do

    def on_opened(self, leader: Leader, members: Mapping[str, str], queries: Sequence[Placeable]) -> None:
        """It leads a generation. `members`: the incarnations of those that have a part in it."""
        self._gathering = None
        self._how_many = 1
        self._leader, self._crew = leader, Crew(members, self._grace_ms)
        self._members, self._queries, self._lost = frozenset(members), queries, set()

    def on_ended(self) -> None:
        """Its generation is over, or was not opened."""
        self._ended_at = self._hearing
        self._leader = self._crew = self._gathering = None


def had_part(leaders: Mapping[str, LeaderBoard], members: Mapping[str, MemberBoard]) -> frozenset[str]:
    """By name, those that have a part in the newest generation that a board tells of, but for who has said that it
    leaves: nobody needs to wait for that one."""
    newest = max(leaders.values(), key=lambda board: board.generation, default=None)
    if newest is None:
        return frozenset()
    return frozenset(
        name
        for name, order in newest.orders.items()
        if (said := members.get(name)) is None or said.incarnation != order.incarnation or not said.is_leaving
    )
