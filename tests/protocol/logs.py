"""Decision logs to test with."""

from __future__ import annotations

from typing import Any

from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog, GenerationOpened
from tidegate.protocol.retention import retained_after


def open_generation(log: DecisionLog, base: int | None = None, claimant: str = "leader") -> GenerationOpened:
    """Append the opening of the next generation."""
    record = log.opening(claimant, base)
    log.append(record)
    return record


def propose(
    log: DecisionLog,
    checkpoint_id: int,
    *,
    generation: int | None = None,
    epoch: int | None = None,
    retained: tuple[int, ...] | None = None,
    max_retained: int = 3,
    retain_ms: int = 0,
    aligned: bool = True,
    claimant: str = "leader",
    **facts: Any,
) -> CheckpointCompleted:
    """The completion of a checkpoint, by the generation that is open unless another is named.

    `facts`: its `content` and when it was triggered, `at_ms`.
    """
    if retained is None:
        config = CheckpointConfig(max_retained=max_retained, retain_ms=retain_ms)
        retained = retained_after(log, checkpoint_id, config, aligned=aligned, **facts)
    return log.completing(
        claimant,
        log.generation if generation is None else generation,
        checkpoint_id=checkpoint_id,
        epoch=checkpoint_id if epoch is None else epoch,
        manifest=f"manifest-{checkpoint_id}",
        manifest_sha256="0" * 64,
        aligned=aligned,
        retained=retained,
        **facts,
    )


def complete(
    log: DecisionLog,
    checkpoint_id: int,
    *,
    epoch: int | None = None,
    retained: tuple[int, ...] | None = None,
    max_retained: int = 3,
    claimant: str = "leader",
    **settings: Any,
) -> CheckpointCompleted:
    """Append the completion of a checkpoint by the generation that is open."""
    record = propose(
        log, checkpoint_id, epoch=epoch, retained=retained, max_retained=max_retained, claimant=claimant, **settings
    )
    log.append(record)
    return record


def log_with(*checkpoint_ids: int, max_retained: int = 3) -> DecisionLog:
    """A log of one generation that has completed these checkpoints; the epoch is the id."""
    log = DecisionLog()
    open_generation(log)
    for checkpoint_id in checkpoint_ids:
        complete(log, checkpoint_id, max_retained=max_retained)
    return log
