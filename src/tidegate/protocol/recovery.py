"""What a starting run does, decided from stored facts alone.

The edge gathers facts, asks `recover`, does what the answer says, and asks again where the answer was a
request for more facts. Nothing is changed by asking.

Guarantees:
- A run never starts from nothing because something could not be read.
- The newest complete checkpoint of the current lineage is restored whenever it is intact.
- A damaged one is skipped only where every sink's own record, read after the sink was fenced against older
  generations, shows that none has committed past the older one. Otherwise its rows would be doubled.
- Sinks that are ahead of the log mean that the log has lost records, or is of another pipeline: refused.
- Where it was decided to set the tables back, that is done, or done again, before anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog, GenerationOpened
from tidegate.protocol.names import checkpoint_name


class SinkFacts(msgspec.Struct, frozen=True):
    """A sink's own record: its last committed epoch (0: none), the generation that it is fenced at, and the batch after
    the last one that it shows. `is_anothers`: it is known to be of another root."""

    committed_epoch: int = 0
    fence: int = 0
    next_batch: int = 0
    is_anothers: bool = False


class Facts(msgspec.Struct, frozen=True):
    """All that is known so far. `health` maps an examined checkpoint to its damage, None if intact. `set_back`: the
    generation that all tables are known to be set back for, if that was decided."""

    log: DecisionLog
    sinks: dict[str, SinkFacts]
    health: dict[int, str | None] = {}
    unreadable: tuple[str, ...] = ()
    has_leftovers: bool = False
    set_back: int = 0


class StartFresh(msgspec.Struct, frozen=True):
    """Nothing was ever stored here: open the first generation and start from the beginning."""


class StartOver(msgspec.Struct, frozen=True):
    """Earlier runs ended before their first checkpoint: start from the beginning, no sink shows anything."""


class Examine(msgspec.Struct, frozen=True):
    """Read this checkpoint's manifest and files and ask again with what was found."""

    checkpoint_id: int


class FenceSinks(msgspec.Struct, frozen=True):
    """Fence every sink against generations below this one, read their records anew, and ask again."""

    generation: int


class SetTablesBack(msgspec.Struct, frozen=True):
    """Set every table back to the checkpoint that the log says, read their records anew, and ask again."""

    decided: GenerationOpened

    @property
    def checkpoint_id(self) -> int:
        return self.decided.base or 0


class Restore(msgspec.Struct, frozen=True):
    """Open a generation from this checkpoint, commit its epoch again, and rebuild every stage from it."""

    checkpoint: CheckpointCompleted
    skipped: tuple[int, ...] = ()


class Refuse(msgspec.Struct, frozen=True):
    """Change nothing: say what is wrong and what the user can do."""

    why: str
    way_out: str


RecoveryDecision = StartFresh | StartOver | Examine | FenceSinks | SetTablesBack | Restore | Refuse
Start = StartFresh | StartOver | SetTablesBack | Restore | Refuse
"""What needs no more facts, but for those that only a run can bring about."""

_ANEW: Final = "start the pipeline on a new root with new tables"


def _back_to(checkpoint_id: int) -> str:
    """What a user can do where a table shows more than a checkpoint that is intact."""
    return f"set the pipeline and its tables back to it: `tidegate restore --to {checkpoint_name(checkpoint_id)}`"


def in_words(start: Start, health: Mapping[int, str | None]) -> str:
    """What a run does, or the next one will: "goes on from ckpt-000042", and the like."""
    match start:
        case Refuse(why, way_out):
            return f"refuses to start: {why}. What to do: {way_out}"
        case Restore(checkpoint, skipped):
            passed_over = "".join(f"skips {_damaged(each, health[each])} and " for each in skipped)
            return f"{passed_over}goes on from {checkpoint_name(checkpoint.checkpoint_id)}"
        case SetTablesBack():
            name = checkpoint_name(start.checkpoint_id)
            return f"first sees to it that all tables are back at {name}, as was decided, and goes on from there"
        case _:
            return "starts from the beginning"


def _damaged(checkpoint_id: int, damage: str | None) -> str:
    return f"{checkpoint_name(checkpoint_id)}, which is damaged ({damage}),"


def recover(facts: Facts) -> RecoveryDecision:
    """Decide how to start."""
    if facts.unreadable:
        return Refuse(
            f"could not read {facts.unreadable[0]}",
            "make it readable and start again; nothing was changed",
        )
    if not len(facts.log):
        return _without_log(facts)
    decided = facts.log.setting_back
    if decided is not None and decided.generation != facts.set_back:
        return SetTablesBack(decided)
    return _behind_the_sinks(facts) or _from_checkpoint(facts)


def _without_log(facts: Facts) -> RecoveryDecision:
    if facts.has_leftovers and not facts.log.undecided:
        return Refuse(
            "the root holds files of a pipeline but no decision log",
            "restore the missing log from a backup, or start on an empty root",
        )
    ahead = [name for name, sink in facts.sinks.items() if sink.committed_epoch]
    if ahead:
        found = "all records of the decision log are torn" if facts.log.undecided else "the root is empty"
        return Refuse(
            f"{found}, but sink {ahead[0]!r} holds epoch {facts.sinks[ahead[0]].committed_epoch} "
            f"of this pipeline: starting from the beginning would write its rows twice",
            "start with the root that the pipeline ran on, or give the sink a new table",
        )
    return StartOver() if facts.log.undecided else StartFresh()


def _behind_the_sinks(facts: Facts) -> Refuse | None:
    known = 0 if facts.log.newest is None else facts.log.newest.epoch
    for name, sink in facts.sinks.items():
        if sink.committed_epoch > known and sink.is_anothers:
            return Refuse(
                f"sink {name!r} belongs to another root of this pipeline, which has come further: a fork was promoted, "
                f"or a savepoint was restored there",
                "run the pipeline on that root; or bring the tables back to this one with a savepoint of it: "
                "`tidegate restore --to SAVEPOINT`",
            )
        if sink.committed_epoch > known:
            torn = "".join(f", and its slot {slot} is empty or torn" for slot in facts.log.undecided)
            return Refuse(
                f"sink {name!r} holds epoch {sink.committed_epoch}, but the decision log ends at {known}{torn}",
                "the log has lost records or belongs to another pipeline; start with the root that the "
                "sink was written from",
            )
    return None


def _from_checkpoint(facts: Facts) -> RecoveryDecision:
    if facts.log.newest is None:
        return StartOver()
    skipped: list[int] = []
    for candidate in facts.log.lineage():
        checkpoint_id = candidate.checkpoint_id
        if checkpoint_id not in facts.health:
            return Examine(checkpoint_id)
        if facts.health[checkpoint_id] is not None:
            skipped.append(checkpoint_id)
            continue
        if not skipped:
            return Restore(candidate)
        return _fall_back(facts, candidate, tuple(skipped), _damage(facts, skipped))
    return Refuse(
        f"no retained checkpoint is intact: {_damage(facts, skipped)}",
        f"restore the damaged files from a backup, or {_ANEW}",
    )


def _damage(facts: Facts, damaged: Sequence[int]) -> str:
    """What is wrong with each, told once: checkpoints share files."""
    by_damage: dict[str | None, list[str]] = {}
    for checkpoint_id in damaged:
        by_damage.setdefault(facts.health[checkpoint_id], []).append(checkpoint_name(checkpoint_id))
    return "; ".join(
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} damaged ({damage})"
        for damage, names in by_damage.items()
    )


def _fall_back(facts: Facts, candidate: CheckpointCompleted, skipped: tuple[int, ...], damage: str) -> RecoveryDecision:
    name = checkpoint_name(candidate.checkpoint_id)
    past = [sink for sink, record in facts.sinks.items() if record.committed_epoch > candidate.epoch]
    if past:
        return Refuse(
            f"{damage}, and sink {past[0]!r} shows rows past {name}, the newest intact one: restoring that "
            f"alone would write these rows twice",
            f"restore the damaged files from a backup, or {_back_to(candidate.checkpoint_id)}",
        )
    fence = facts.log.next_generation
    if any(record.fence < fence for record in facts.sinks.values()):
        return FenceSinks(fence)
    return Restore(candidate, skipped)
