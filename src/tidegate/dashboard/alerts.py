"""What somebody should look at, told from what is known of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tidegate.dashboard.moments import age_ms, apart_ms
from tidegate.dashboard.values import Alert
from tidegate.engine.control import Life, has_spoken
from tidegate.engine.status import CheckpointStatus, RunStatus
from tidegate.errors import InvalidConfig
from tidegate.protocol.config import as_ms
from tidegate.storage.inspection import Outlook

_ABORTS_IN_A_ROW: Final = 2
_INTERVALS_WITHOUT: Final = 3
_LEAST_S: Final = 30.0
"""Below that, the lack of a checkpoint is not worth a word, however short the interval is."""


def alerts_of(
    life: Life,
    status: RunStatus | None,
    newest_first: Sequence[CheckpointStatus],
    damage: Mapping[int, str],
    outlook: Outlook | None,
    interval: str | None,
) -> tuple[Alert, ...]:
    """`newest_first`: the last checkpoints that have ended. `interval`: how often one is to be taken, if known."""
    found = [
        *_of_the_run(life, status),
        *_of_checkpoints(life, status, newest_first, interval),
        *(Alert("error", f"a checkpoint is damaged: {text}") for text in list(damage.values())[:1]),
    ]
    if life is Life.STOPPED and outlook is not None and outlook.is_refused:
        found.append(Alert("error", str(outlook)))
    if life is Life.ALIVE and status is not None:
        found += _of_stages(status)
    return tuple(sorted(found, key=lambda each: each.level != "error"))


def _of_the_run(life: Life, status: RunStatus | None) -> Iterator[Alert]:
    if life is Life.HANGING:
        since = "" if status is None else f" since {status.updated_at}"
        yield Alert("error", f"a run holds the root but has not been heard of{since}")
    elif life is Life.STOPPED and status is not None:
        if status.state == "failed":
            yield Alert("error", f"the last run failed: {status.why}")
        elif has_spoken(status):
            yield Alert("error", "the last run was killed, or its machine went down")
    elif status is not None and status.state == "restarting":
        yield Alert("warning", f"the run restarts: {status.why}")


def _of_checkpoints(
    life: Life, status: RunStatus | None, newest_first: Sequence[CheckpointStatus], interval: str | None
) -> Iterator[Alert]:
    aborted = 0
    for each in newest_first:
        if each.state != "aborted":
            break
        aborted += 1
    if aborted >= _ABORTS_IN_A_ROW:
        yield Alert(
            "warning", f"the last {aborted} checkpoints were aborted, the newest because: {newest_first[0].why}"
        )
    if life is not Life.ALIVE or status is None or status.state != "running":
        return
    if status.due is not None:
        yield Alert("warning", f"a checkpoint is due since {status.due.since}: {status.due.why}")
    elif (late := _late(status, newest_first, interval)) is not None:
        yield Alert("warning", late)


def _late(status: RunStatus, newest_first: Sequence[CheckpointStatus], interval: str | None) -> str | None:
    """That no checkpoint was completed for several intervals, if so."""
    if interval is None:
        return None
    try:
        every_s = as_ms("checkpoint_interval", interval) / 1000
    except InvalidConfig:
        return None
    done = next((each for each in newest_first if each.state in ("complete", "committing")), None)
    since = status.started_at  # a run owes nothing for the time before it
    if done is not None and done.triggered_at is not None and (apart_ms(since, done.triggered_at) or 0) > 0:
        since = done.triggered_at
    if (age_ms(since) or 0) <= max(_LEAST_S, _INTERVALS_WITHOUT * every_s) * 1000:
        return None
    return f"no checkpoint was completed since {since}, though one is to be taken every {interval}"


def _of_stages(status: RunStatus) -> Iterator[Alert]:
    for name, stage in status.stages.items():
        if stage.no_batch is not None:
            yield Alert("warning", f"source {name} plans no batch since {stage.no_batch.since}: {stage.no_batch.why}")
        if stage.held_back_by is not None:
            yield Alert("warning", f"{name} is held back by {stage.held_back_by}, which is too far behind")
    for each in status.instances:
        if each.missing_since is not None:
            yield Alert("warning", f"instance {each.name} is not seen any more since {each.missing_since}")
