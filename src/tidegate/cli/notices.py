"""What a run has to tell besides numbers: who waits for whom, and what went wrong. One line each, the gravest first.

Every view takes its notices from here: the live one and `tidegate status` show them with the stages, the plain log
tells each now and then.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidegate.cli.text import age, as_bytes, as_duration, counted
from tidegate.engine.status import HeldInput, RunStatus, TransferStatus


class Notice(msgspec.Struct, frozen=True):
    """`about`: what stays the same as long as it is the same notice, while times in its text go on. `stages`: those
    that it is about, which are shown before others where there is no room for all. `is_logged`: the run itself has
    written it to its log."""

    text: str
    about: str
    stages: frozenset[str] = frozenset()
    is_logged: bool = False


def notices(status: RunStatus) -> list[Notice]:
    return [*_due(status), *_waiting(status), *_over_bound(status), *_transfer(status), *_first_batch(status)]


def _due(status: RunStatus) -> Iterator[Notice]:
    """A checkpoint that ought to have been begun."""
    if status.due is not None:
        text = f"the next checkpoint has been due for {age(status.due.since)}: {status.due.why}"
        yield Notice(text, f"due {status.due.held_back_by}")


def _waiting(status: RunStatus) -> Iterator[Notice]:
    """A stage that has to wait: for those behind it, or for what it reads from."""
    for name, stage in status.stages.items():
        if stage.held_back_by is not None:
            text = f"{name} is held back by {stage.held_back_by}"
            yield Notice(text, text, frozenset((name, stage.held_back_by)))
        for held in stage.held:
            text = f"{held.input} is held at {name}: it is {_ahead(held)}"
            yield Notice(text, f"{name} held {held.input}", frozenset((name, held.input, held.ahead_of)))
        if stage.no_batch is not None:
            text = f"{name} has planned no batch for {age(stage.no_batch.since)}: {stage.no_batch.why}"
            yield Notice(text, f"{name} no batch", frozenset((name,)), is_logged=True)


def _ahead(held: HeldInput) -> str:
    if held.by_ms is None:
        return f"ahead of {held.ahead_of}, which has no watermark yet"
    return f"{as_duration(held.by_ms)} ahead of {held.ahead_of}"


def _over_bound(status: RunStatus) -> Iterator[Notice]:
    """A stage that was to be cut unaligned, and is not."""
    for checkpoint in status.in_progress:
        for name, part in checkpoint.stages.items():
            if part.over_bound and part.cut_because is None:
                lasts, in_flight = as_duration(part.alignment_ms or 0), as_bytes(part.in_flight_bytes or 0)
                text = (
                    f"{name} keeps aligning for {checkpoint.checkpoint}, for {lasts} now: {in_flight} are in flight, "
                    f"more than --max-inflight allows"
                )
                yield Notice(text, f"{name} over bound {checkpoint.checkpoint}", frozenset((name,)), is_logged=True)


def _transfer(status: RunStatus) -> Iterator[Notice]:
    if status.transfer is not None:
        yield Notice(
            transfer_told(status.transfer), status.transfer.doing, is_logged=status.transfer.doing == "downloading"
        )


def transfer_told(transfer: TransferStatus) -> str:
    """uploading 120 of 300 files, 1.2 GB of 3.4 GB."""
    told = f"{transfer.doing} {transfer.files:,} of {counted(transfer.of_files, 'file')}"
    return f"{told}, {as_bytes(transfer.bytes)} of {as_bytes(transfer.of_bytes)}" if transfer.of_bytes else told


def _first_batch(status: RunStatus) -> Iterator[Notice]:
    """What a run that has just started shows is nothing but zeros, which may look as if it did nothing."""
    is_told = any(stage.no_batch is not None for stage in status.stages.values())
    none_yet = status.stages and all(stage.batch is None for stage in status.stages.values())
    if status.state == "running" and none_yet and not is_told:
        text = "no batch is committed yet: Spark works on the first, or there is no input"
        yield Notice(text, text)
