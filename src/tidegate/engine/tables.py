"""Whether a sink's table still shows what a checkpoint goes on from, and which checkpoint would fit if it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from tidegate.engine.changes import TableChange
from tidegate.errors import InvalidConfig, InvalidPipeline, RecoveryRefused, StoreUnavailable
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks import function
from tidegate.sinks.contract import (
    BoundSink,
    Committable,
    FileSink,
    RowSink,
    Sink,
    SinkPlace,
    Staged,
    StagedFile,
    decode_committable,
)
from tidegate.sinks.delta.home import LOG, home_of
from tidegate.sinks.staging import is_staged, shown
from tidegate.storage.files import Files
from tidegate.storage.inspection import retained_manifests
from tidegate.storage.manifest import Manifest, TableAddress

_KINDS: Final = {"delta": "Delta table", "postgres": "PostgreSQL table"}


def bound(sink: Sink, place: SinkPlace) -> BoundSink:
    """A sink at its place. Refuse one that could not be written to: users may write their own."""
    found = sink.bind(place)
    if not isinstance(found, FileSink | RowSink):
        raise InvalidPipeline(
            f"{sink.describe()} of sink {place.stage!r} was bound to {type(found).__name__}, which has not all that a "
            f"sink needs; tidegate.sinks.contract says what that is, and tidegate.testing.sinks has "
            f"the tests for one"
        )
    return found


def address_of(sink: BoundSink) -> TableAddress:
    """Where a sink's table is, and which one it is that is there now."""
    return msgspec.structs.replace(sink.table, identity=sink.identity())


def goes_on_from_rows(base: Manifest, sink: str) -> bool:
    """Whether a checkpoint, or one before it, has sealed rows for a sink. If not, no table lacks any of them."""
    return _last_with_rows(_sealed(base, sink)) >= 0


def unshown_rows(base: Manifest, sink: str, facts: SinkFacts) -> int:
    """How many rows of those that a checkpoint has sealed for a sink its table does not show."""
    sealed = _sealed(base, sink)
    staged: list[Staged] = [] if sealed is None else [*sealed.files, *sealed.batches]
    return sum(each.rows for each in staged if each.batch >= facts.next_batch)


def check_goes_on(sink: BoundSink, now: TableAddress | None, base: Manifest, log: DecisionLog, store: Files) -> None:
    """Refuse a table that does not hold what the checkpoint goes on from. `now`: what is there; None: no table is."""
    table, name = sink.describe(), sink.place.stage
    then = base.shape[name].table
    known = f"{checkpoint_name(base.checkpoint_id)} goes on from what a table already holds"
    before = "" if then is None else described(then)
    is_elsewhere = then is not None and not _is_at(then, sink.table)
    way_out = "start the pipeline on a new root with new tables; nothing was changed"
    if now is None:
        if is_elsewhere:
            raise RecoveryRefused(
                f"sink {name!r} wrote to {before}. Now it would write to {table}, where there is none, but {known}. "
                f"What to do: move the table there, or change the sink back, or {way_out}"
            )
        raise RecoveryRefused(f"{table} of sink {name!r} is gone, but {known}. What to do: restore it, or {way_out}")
    facts = sink.facts()
    is_same = then is None or _is_same(then, now)
    lacks_rows = facts.next_batch <= _last_with_rows(_sealed(base, name))
    if is_same and is_elsewhere and not isinstance(sink, FileSink) and lacks_rows:
        raise RecoveryRefused(
            f"sink {name!r} wrote to {before}, which was renamed and now is {table}. What it shows of the pipeline is "
            f"recorded under its old name, and {known}. What to do: give it its old name again and change the sink "
            f"back, or {way_out}"
        )
    if is_same or facts.committed_epoch:
        check_not_put_back(table, name, facts, base, log, store)
        check_staged_is_there(sink, facts, now, base, log, store)
    elif is_elsewhere:
        raise RecoveryRefused(
            f"sink {name!r} wrote to {before}. Now it would write to {table}, which is another and holds nothing of "
            f"this sink, but {known}. What to do: change the sink back, or put the table of before in the place of "
            f"this one, or {way_out}"
        )
    else:
        raise RecoveryRefused(
            f"{table} of sink {name!r} is not the one that it wrote to: it lies elsewhere or was created anew, and "
            f"holds nothing of this sink, but {known}. What to do: restore the table or go back to the server and "
            f"database that it is in, or {way_out}"
        )


def check_shows_nothing(sink: BoundSink, base: Manifest) -> None:
    """Refuse a table that has a record of a sink which the checkpoint does not know. Batches of a sink are counted from
    the first one on: those that the record has would be taken for shown."""
    facts = sink.facts()
    if facts.next_batch:  # an epoch without any batch may be of a run that was killed before its first checkpoint
        raise RecoveryRefused(
            f"sink {sink.place.stage!r} is new since {checkpoint_name(base.checkpoint_id)}, but {sink.describe()} "
            f"shows it {shown(facts.next_batch)}: an earlier sink of this name wrote there. What to do: give the sink "
            f"another name or another table; nothing was changed"
        )


def check_all_shown(sink: BoundSink, base: Manifest) -> None:
    """Refuse to go on with other columns than those of rows that are staged: these could not be shown any more."""
    if rows := unshown_rows(base, sink.place.stage, sink.facts()):
        raise RecoveryRefused(
            f"sink {sink.place.stage!r} has other columns since {checkpoint_name(base.checkpoint_id)}, but "
            f"{sink.describe()} does not show {rows} rows yet that were staged with those of before. What to do: start "
            f"the pipeline as it was once more until it does, and change it then; nothing was changed"
        )


def table_change(then: TableAddress | None, now: TableAddress | None) -> TableChange:
    """What became of a sink's table; None: there was, or is, none."""
    if then is None or now is None:
        return "new"
    if not _is_same(then, now):
        return "other"
    return "same" if _is_at(then, now) else "moved"


def _is_same(then: TableAddress, now: TableAddress) -> bool:
    """Whether a sink's table is the one that it wrote to. By what it is known by, where that was known then: it may
    have been moved, and another one may be where it was."""
    if then.kind != now.kind or then.identity is None:
        return _is_at(then, now)
    return then.identity == now.identity


def _is_at(then: TableAddress, now: TableAddress) -> bool:
    """Whether a sink's table is where it was."""
    if {then.kind, now.kind} <= function.KINDS:
        return True  # the record of its calls lies in the root: it goes on from there under any name
    return (then.kind, then.address) == (now.kind, now.address)


def described(table: TableAddress) -> str:
    name = f"{_KINDS.get(table.kind, table.kind)} {table.address}"
    if table.kind != "delta":
        return name
    return f"{name} ({'still' if has_log(table.address) else 'no longer'} there)"


def has_log(address: str) -> bool:
    try:
        return bool(home_of(address).files().names_in(LOG))
    except (StoreUnavailable, InvalidConfig):
        return False


def with_staged_in(tables: Mapping[str, TableAddress], base: Manifest) -> Manifest:
    """The checkpoint with what it has staged named by where it lies now: what lies in a table moves with it."""
    stages = dict(base.stages)
    for name, now in tables.items():
        then, sealed = base.shape[name].table, _sealed(base, name)
        if then is not None and sealed is not None and then.address != now.address:
            files = tuple(_moved(each, then, now) for each in sealed.files)
            sealed = msgspec.structs.replace(sealed, files=files)
            stages[name] = msgspec.structs.replace(stages[name], committable=sealed.encode())
    return msgspec.structs.replace(base, stages=stages)


def _moved(file: StagedFile, then: TableAddress, now: TableAddress) -> StagedFile:
    if not file.path.startswith(f"{then.address}/"):
        return file
    return msgspec.structs.replace(file, path=now.address + file.path.removeprefix(then.address))


def check_not_put_back(table: str, sink: str, facts: SinkFacts, base: Manifest, log: DecisionLog, store: Files) -> None:
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


def check_staged_is_there(
    sink: BoundSink, facts: SinkFacts, now: TableAddress, base: Manifest, log: DecisionLog, store: Files
) -> None:
    """Refuse a table that neither shows rows which the checkpoint has sealed, nor has them staged: one that was put
    back has lost both, where the checkpoint was sealed before the table was known to show them."""
    name = sink.place.stage
    sealed, then = _sealed(base, name), base.shape[name].table
    files = [] if sealed is None else [each for each in sealed.files if each.rows and each.batch >= facts.next_batch]
    here = [each if then is None else _moved(each, then, now) for each in files]
    gone = [] if not isinstance(sink, FileSink) else [each for each in here if not is_staged(sink.staging, each)]
    # Asked once more: a run that was taken over may have shown it meanwhile, and then removed it.
    if not gone or gone[-1].batch < (facts := sink.facts()).next_batch:
        return
    would_fit = what_would_fit(name, facts.committed_epoch, facts.next_batch, log, store)
    raise RecoveryRefused(
        f"{sink.describe()} of sink {name!r} was put back to an older state, or what was staged for it was deleted: it "
        f"shows the sink {shown(facts.next_batch)}, and {gone[-1].path}, which {checkpoint_name(base.checkpoint_id)} "
        f"goes on from, is gone. What to do: restore the newer state of the table, or start the pipeline on a new root "
        f"with a new table; {would_fit}; nothing was changed"
    )


def what_would_fit(sink: str, epoch: int, next_batch: int, log: DecisionLog, store: Files) -> str:
    """The newest retained checkpoint all of whose rows, and no later ones, a table shows; for people."""
    for manifest in retained_manifests(store, log):
        sealed = _sealed(manifest, sink)
        if sealed is not None and epoch <= manifest.epoch and _last_with_rows(sealed) < next_batch:
            name = checkpoint_name(manifest.checkpoint_id)
            return (
                f"{name} would fit this table: `tidegate restore --to {name} --leave {sink}` brings the pipeline and "
                f"its other tables there"
            )
    return "no retained checkpoint would fit it"


def _sealed(manifest: Manifest, sink: str) -> Committable | None:
    """What a checkpoint has sealed for a sink; None if it does not know it."""
    stage = manifest.stages.get(sink)
    return None if stage is None or stage.committable is None else decode_committable(stage.committable)


def _last_with_rows(sealed: Committable | None) -> int:
    return -1 if sealed is None else sealed.last_with_rows
