"""What may be deleted.

Guarantees:
- The newest complete checkpoint is retained, whatever failed after it.
- A file that a retained checkpoint refers to is never deleted, nor one that a checkpoint under way may come
  to refer to, nor one of a newer generation.
- If one retained checkpoint's references are not known, no file is deleted at all.
- Log records below the start of the log (`DecisionLog.first_slot`) may be deleted at any time, in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tidegate.protocol.decision_log import DecisionLog


class StoredFile(msgspec.Struct, frozen=True, order=True):
    """A file in the store, with the generation that wrote it."""

    path: str
    generation: int


def retained_after(log: DecisionLog, checkpoint_id: int, max_retained: int) -> tuple[int, ...]:
    """What the record that completes `checkpoint_id` retains: it and the newest before it, oldest first."""
    older = [record.checkpoint_id for record in log.lineage()][: max_retained - 1]
    return (*reversed(older), checkpoint_id)


def deletable(
    log: DecisionLog,
    generation: int,
    references: Mapping[int, frozenset[str]],
    stored: Iterable[StoredFile],
    in_use: frozenset[str],
) -> list[StoredFile]:
    """The stored files that the run of this generation may delete, by the log as it knows it.

    `references`: what each retained checkpoint refers to. `in_use`: what the running pipeline still needs,
    and what checkpoints under way may refer to.
    """
    if any(checkpoint_id not in references for checkpoint_id in log.retained):
        return []
    needed = in_use.union(*(references[checkpoint_id] for checkpoint_id in log.retained))
    return [file for file in stored if file.generation <= generation and file.path not in needed]
