"""Recovering a root and opening the next generation on it.

Guarantees:
- Tables are asked before the log is read: a run that was taken over may go on deciding and committing meanwhile.
- A checkpoint counts as damaged only if the log has not moved on since it was looked at: a run that still lives may
  have dropped it.
- Nothing is changed before a generation is opened, but for fences, and tables that are created for it. And for tables
  that are set back: that was decided before, and is finished by whoever comes next.
"""

from __future__ import annotations

import msgspec

from tidegate.errors import DamagedLog, Superseded, UnknownCheckpoint
from tidegate.flows.requests import (
    Asker,
    Bring,
    Examine,
    Fence,
    Fit,
    HasLeftovers,
    Host,
    LargestMarked,
    Mark,
    Patience,
    ReadLog,
    ReadSinks,
    SetTablesBack,
)
from tidegate.protocol import recovery
from tidegate.protocol.decision_log import CheckpointCompleted, ClaimAnswer, DecisionLog, GenerationOpened
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import Facts, FenceSinks, RecoveryDecision, Refuse, Restore, recover


class Opened(msgspec.Struct, frozen=True):
    """A generation that was opened in the log. `largest_id`: the largest checkpoint id that was ever marked as used."""

    generation: int
    claimant: str
    log: DecisionLog
    base: CheckpointCompleted | None
    largest_id: int


class Above(msgspec.Struct, frozen=True):
    """The largest numbers that are in use elsewhere: no checkpoint and no generation here may have one of these."""

    checkpoint_id: int = 0
    generation: int = 0


class Judgement(msgspec.Struct, frozen=True):
    """What recovery has decided, by which log, and what was found of the checkpoints that it had to look at."""

    log: DecisionLog
    decision: RecoveryDecision
    health: dict[int, str | None]

    @property
    def skipped(self) -> dict[int, str | None]:
        skipped = self.decision.skipped if isinstance(self.decision, Restore) else ()
        return {checkpoint_id: self.health.get(checkpoint_id) for checkpoint_id in skipped}

    @property
    def base(self) -> CheckpointCompleted | None:
        return self.decision.checkpoint if isinstance(self.decision, Restore) else None


class Opening:
    """How a run comes to a generation of its own. Each run claims under a name of its own."""

    def __init__(self, host: Host, claimant: str, patience: Patience) -> None:
        self._claimant = claimant
        self.store = Asker(host, patience)
        self.health: dict[int, str | None] = {}
        """What was found of the checkpoints that recovery had to look at: the damage, None if whole."""

    async def open(self) -> Opened | Refuse:
        """Until a generation is opened, or recovery refuses. Raises `Superseded` if another run was first."""
        while True:
            judgement = await self.recover()
            if isinstance(judgement.decision, Refuse):
                return judgement.decision
            log, base = judgement.log, judgement.base
            if not await Fit(log, base, judgement.skipped):
                continue
            proposed = log.opening(self._claimant, None if base is None else base.checkpoint_id)
            answer, log = await self.store.claim(proposed)
            if answer is ClaimAnswer.SUPERSEDED:
                raise Superseded(proposed.generation, log.generation)
            if answer is ClaimAnswer.WON:
                largest = await self.store.insist(LargestMarked())
                return Opened(proposed.generation, self._claimant, log, base, largest)

    async def recover(self, *, may_change: bool = True) -> Judgement:
        """What to start from, by all that is stored. Changes nothing but fences, and those only if it may."""
        health = self.health
        health.clear()
        set_back = 0
        while True:
            sinks = await self.store.insist(ReadSinks())
            log = await self.store.insist(ReadLog())
            has_leftovers = await self._has_leftovers(log)
            decision = recover(Facts(log, sinks, health, has_leftovers=has_leftovers, set_back=set_back))
            if isinstance(decision, recovery.Examine):
                await self._examine(log, decision.checkpoint_id, health)
            elif isinstance(decision, FenceSinks) and may_change:
                await self.store.insist(Fence(decision.generation))
            elif isinstance(decision, recovery.SetTablesBack) and may_change:
                await set_tables_back(self.store, log, decision.decided)
                set_back = decision.decided.generation
            else:
                return Judgement(log, decision, health)

    async def set_back(
        self, checkpoint_id: int, *, discards_others: bool = False, left: tuple[str, ...] = ()
    ) -> GenerationOpened:
        """Decide that the pipeline and its tables go to a retained checkpoint, and see to it.

        It is one decision: a record in the log before the first table changes. Raises `Superseded` if another run was
        first, `UnknownCheckpoint` if the log does not retain it any more.
        """
        while True:
            log = await self.store.insist(ReadLog())
            if checkpoint_id not in log.retained:
                raise UnknownCheckpoint(f"{checkpoint_name(checkpoint_id)} is not retained any more")
            proposed = log.opening(
                self._claimant, checkpoint_id, sets_back=True, discards_others=discards_others, left=left
            )
            if await self._decided(proposed):
                return proposed

    async def bring(
        self, above: Above, *, discards_others: bool = False, left: tuple[str, ...] = ()
    ) -> GenerationOpened:
        """Decide that the pipeline and its tables go to a checkpoint from elsewhere, and see to it.

        Its id is marked before anything is stored by its name, and everything is stored before it is decided. `above`:
        numbers that are in use where it comes from, and in the tables. Raises `Superseded` if another run was first.
        """
        while True:
            log = await self.store.insist(ReadLog())
            largest = await self.store.insist(LargestMarked())
            checkpoint_id = max(largest, log.last_checkpoint_id, log.last_epoch, above.checkpoint_id) + 1
            await self.store.insist(Mark(checkpoint_id))
            generation = max(log.next_generation, above.generation + 1)
            brought = await self.store.insist(Bring(generation, checkpoint_id))
            proposed = log.opening(
                self._claimant,
                checkpoint_id,
                sets_back=True,
                discards_others=discards_others,
                left=left,
                brings=brought,
                generation=generation,
            )
            if await self._decided(proposed):
                return proposed

    async def _decided(self, proposed: GenerationOpened) -> bool:
        """Claim what sets tables back, and see to it. False: all is to be looked at again."""
        answer, log = await self.store.claim(proposed)
        if answer is ClaimAnswer.SUPERSEDED:
            raise Superseded(proposed.generation, log.generation)
        if answer is ClaimAnswer.WON:
            await set_tables_back(self.store, log, proposed)
        return answer is ClaimAnswer.WON

    async def _has_leftovers(self, log: DecisionLog) -> bool:
        """Whether there is something that no log tells of. Of what another run writes the log tells by then."""
        if len(log) or not await self.store.insist(HasLeftovers()):
            return False
        log = await self.store.insist(ReadLog())
        return not len(log)

    async def _examine(self, log: DecisionLog, checkpoint_id: int, health: dict[int, str | None]) -> None:
        record = log.completed(checkpoint_id)
        if record is None:
            damage: str | None = "its record is gone"
        else:
            damage = await self.store.insist(Examine(record))
        if damage is None or (await self.store.insist(ReadLog())).next_slot == log.next_slot:
            health[checkpoint_id] = damage


async def set_tables_back(store: Asker, log: DecisionLog, decided: GenerationOpened) -> None:
    record = None if decided.base is None else log.completed(decided.base)
    if record is None:
        raise DamagedLog(f"slot {decided.slot} of the decision log sets tables back to a checkpoint that it lacks")
    await store.insist(SetTablesBack(record, decided))
