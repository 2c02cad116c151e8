"""Removing what no retained checkpoint refers to. A leader does so after its own stages and after older generations,
every other member after its own stages: each knows best what these have stored.

Guarantees:
- Nothing is deleted but by what is known to be in the log, and nothing that a retained checkpoint refers to.
- A member whose generation is over deletes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from tidegate.flows.requests import Asker, Delete, ListStored, ReadLog, ReadReports
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.retention import deletable

Reports = Mapping[str, StageReport]


async def remove_unneeded(
    store: Asker,
    generation: int,
    visible: int,
    at_visible: Reports,
    retained: Mapping[int, CheckpointCompleted | None],
    reports_of: Callable[[CheckpointCompleted], Awaitable[Reports | None]],
) -> None:
    """`visible`: a checkpoint that all tables show, and what the stages have reported for it. `retained`: what the log
    retains, with the records of it that are known."""
    references: dict[int, frozenset[str]] = {}
    for checkpoint_id, record in retained.items():
        reports = None if record is None else await reports_of(record)
        if record is not None and reports is not None:
            files = {file for report in reports.values() for file in report.files}
            references[checkpoint_id] = frozenset({*files, record.manifest})
    stored = await store.insist(ListStored(visible, at_visible, retained))
    unneeded = deletable(frozenset(retained), generation, references, stored)
    if unneeded:
        await store.insist(Delete(tuple(unneeded)))


async def clean_up_own(store: Asker, generation: int, visible: int) -> None:
    """What a member does when all tables show a checkpoint."""
    log = await store.insist(ReadLog())
    record = log.completed(visible)
    if log.generation != generation or record is None or record.generation != generation:
        return  # a newer one has begun, or none of this generation's own is shown yet

    async def reports_of(record: CheckpointCompleted) -> Reports | None:
        return await store.insist(ReadReports(record))

    at_visible = await reports_of(record)
    if at_visible is not None:
        records = {checkpoint_id: log.completed(checkpoint_id) for checkpoint_id in log.retained}
        await remove_unneeded(store, generation, visible, at_visible, records, reports_of)
