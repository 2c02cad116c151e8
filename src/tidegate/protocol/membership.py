"""Who leads, and who is there to run the stages of a generation.

Guarantees:
- Whoever is seen to hold the claim and to be present leads; a claim of somebody who is not present, or of an earlier
  incarnation of somebody, is void, and anybody may take its place. Two may believe to lead for a while: the decision
  log tells which of them is right, and nothing here does.
- A member that is not seen any more is missing from then on. If the same incarnation is seen again in time, it has gone
  on all the while, and nothing has to be done. Another incarnation has lost what the first one ran: a new generation is
  due at once; after the grace it is due without it.
- Somebody who comes to a generation that is complete has no part in it. The next one is due for its sake once a
  checkpoint was completed since, and so it is for the sake of somebody who wants to leave, unless all want to: then
  nobody would be left to run anything.
- No clock of anybody else is looked at.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

import msgspec


class Attendance(msgspec.Struct, frozen=True):
    """An instance that is present: which incarnation, and the stages that it has asked for."""

    incarnation: str
    stages: tuple[str, ...] = ()
    is_leaving: bool = False
    is_sure: bool = True
    """Whether it was seen to live. Who was there at the first look may be dead since before that: a lease tells."""


Attendances = Mapping[str, Attendance]


class LeaderClaim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the shared key says of who leads."""

    instance: str
    incarnation: str

    def is_valid(self, present: Attendances) -> bool:
        there = present.get(self.instance)
        return there is not None and there.incarnation == self.incarnation


def staying(present: Attendances) -> Attendances:
    """Those that may be given something to run: not who is about to leave, unless that is everybody."""
    found = {name: each for name, each in present.items() if not each.is_leaving}
    return found or present


class Standing(enum.Enum):
    LEADS = "it leads"
    FOLLOWS = "another one leads"
    CAMPAIGNS = "nobody leads: it tries to"


def standing(own: LeaderClaim, claim: LeaderClaim | None, present: Attendances) -> Standing:
    """What an instance has to do, by what it sees. One that does not see itself neither leads nor tries to."""
    if claim is not None and claim.is_valid(present):
        return Standing.LEADS if claim == own else Standing.FOLLOWS
    return Standing.CAMPAIGNS if own.is_valid(present) else Standing.FOLLOWS


class Gathering:
    """Before a generation is opened: who is to have a part in it. All that are expected are waited for, but no longer
    than the grace."""

    def __init__(self, expected: Collection[str], how_many: int, grace_ms: int, now_ms: int) -> None:
        """`expected`: by name, those that had a part in the generation before. `how_many`: are to be there at least."""
        self._expected = frozenset(expected)
        self._how_many = how_many
        self._until_ms = now_ms + grace_ms

    def missing(self, present: Attendances) -> tuple[str, ...]:
        return tuple(sorted(self._expected - present.keys()))

    def is_over(self, present: Attendances, now_ms: int) -> bool:
        """Who is about to leave is not waited for, nor does it count. Where it is not known yet whether somebody lives,
        that is waited for: who is dead would be given stages for nothing."""
        if not all(each.is_sure for each in present.values()):
            return False
        is_complete = len(staying(present)) >= self._how_many and not self.missing(present)
        return bool(present) and (is_complete or now_ms >= self._until_ms)


class Crew:
    """The members of a generation, as its leader sees them."""

    def __init__(self, members: Mapping[str, str], grace_ms: int) -> None:
        """`members`: the incarnation of each that has a part in it. Those who have none are never missed."""
        self._members = dict(members)
        self._grace_ms = grace_ms
        self._missing: dict[str, int] = {}
        self._replaced: set[str] = set()
        self._changing: dict[str, int] = {}
        """Who has come or wants to leave, and how many checkpoints were complete by then."""

    @property
    def missing(self) -> Mapping[str, int]:
        """Who is not seen any more, and since when."""
        return self._missing

    def on_present(self, present: Attendances, now_ms: int, completed: int, useful: Collection[str] = ()) -> None:
        """Who is seen now. `completed`: how many checkpoints this generation has completed. `useful`: those of the
        others who would be given something to run."""
        for name, incarnation in self._members.items():
            there = present.get(name)
            if there is not None and there.incarnation == incarnation:
                self._missing.pop(name, None)
            else:
                self._missing.setdefault(name, now_ms)
                if there is not None:
                    self._replaced.add(name)
        come = {name for name in present if name not in self._members and name in useful}
        leaving = {name for name in self._members if name in present and name not in staying(present)}
        self._changing = {name: self._changing.get(name, completed) for name in sorted(come | leaving)}

    def wants_checkpoint(self, completed: int) -> bool:
        """Whether somebody waits for one in order to come or to leave."""
        return any(since == completed for since in self._changing.values())

    def why_reopen(self, now_ms: int, completed: int) -> str | None:
        """Why another generation is due; None: it is not."""
        if self._replaced:
            return _said(self._replaced, "was started again", "were started again")
        over = [name for name, since in self._missing.items() if now_ms - since >= self._grace_ms]
        if over:
            return f"{_said(over, 'is missing', 'are missing')} for {self._grace_ms / 1000:g} s"
        ready = [name for name, since in self._changing.items() if completed > since]
        if ready and len(ready) == len(self._changing):
            come = [name for name in ready if name not in self._members]
            left = [name for name in ready if name in self._members]
            changes = [_said(come, "has come", "have come")] * bool(come) + [_said(left, "leaves", "leave")] * bool(
                left
            )
            return ", ".join(changes)
        return None


def _said(instances: Collection[str], of_one: str, of_several: str) -> str:
    names = sorted(instances)
    if len(names) == 1:
        return f"instance {names[0]} {of_one}"
    return f"instances {', '.join(names)} {of_several}"
