"""Whether a sink's table still shows what a checkpoint goes on from, and which checkpoint would fit if it does not."""

from __future__ import annotations

from tidegate.errors import RecoveryRefused
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.recovery import SinkFacts, checkpoint_name
from tidegate.sinks.contract import Committable, Staged, decode_committable
from tidegate.sinks.staging import shown
from tidegate.storage.inspection import retained_manifests
from tidegate.storage.manifest import Manifest
from tidegate.storage.store import Store


def check_not_put_back(table: str, sink: str, facts: SinkFacts, base: Manifest, log: DecisionLog, store: Store) -> None:
    """Refuse a table that was put back to an older state, or lost a commit, before anything is changed.

    The facts must have been read after the log: a run that was taken over may still be committing and deciding.
    """
    goes_on = _sealed(base, sink)
    if goes_on is None or facts.next_batch > goes_on.shown_through:
        return
    would_fit = what_would_fit(sink, facts.committed_epoch, facts.next_batch, log, store)
    raise RecoveryRefused(
        f"{table} of sink {sink!r} was put back to an older state, or lost a commit: it shows the sink "
        f"{shown(facts.next_batch)}, but {checkpoint_name(base.checkpoint_id)} goes on after batch "
        f"{goes_on.shown_through}, so the rows between would be missing. What to do: restore the newer state of the "
        f"table, or start the pipeline on a new root with a new table; {would_fit}; nothing was changed"
    )


def what_would_fit(sink: str, epoch: int, next_batch: int, log: DecisionLog, store: Store) -> str:
    """The newest retained checkpoint all of whose rows, and no later ones, a table shows; for people."""
    for manifest in retained_manifests(store, log):
        sealed = _sealed(manifest, sink)
        if sealed is not None and epoch <= manifest.epoch and _last_with_rows(sealed) < next_batch:
            name = checkpoint_name(manifest.checkpoint_id)
            return f"{name} would fit this table, but a pipeline cannot be set back to an older checkpoint yet"
    return "no retained checkpoint would fit it"


def _sealed(manifest: Manifest, sink: str) -> Committable | None:
    sealed = manifest.stages[sink].committable
    return None if sealed is None else decode_committable(sealed)


def _last_with_rows(sealed: Committable) -> int:
    # Also what it has sealed itself: the table has shown it since, and what was staged of it is gone.
    staged: list[Staged] = [*sealed.files, *sealed.batches]
    return max([sealed.shown_through, *(each.batch for each in staged if each.rows)])
