"""`tidegate fork` and `tidegate promote`: a second pipeline with the same state and tables of its own, and how it takes
the first one's place.

Forking, on a new root:
1. Look at every table: what cannot be copied is refused before anything is made.
2. Copy the checkpoint into the new root, and decide, in its log, to go on from there with copies of the tables.
3. Make the copies. The next run on the new root goes on from there.

Promoting, when neither pipeline runs:
1. Look at every table, tell what it means, and ask.
2. Decide, in the fork's log, to go on from its newest checkpoint with the tables that it was forked from.
3. Make each of these show what the fork's shows, in one step each. From then on they are the fork's: whoever runs the
   other pipeline is refused.

Both are one decision, finished by whoever comes next on that root. The pipeline that is forked notices nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tidegate.engine.bringing import Bringing, known_origin, pinned
from tidegate.engine.copies import Copies, finish_pending
from tidegate.engine.forks import Fork, ForkedTable, moved, read_fork, write_fork
from tidegate.engine.history import record_rewind
from tidegate.engine.opening import RootOpening
from tidegate.engine.requests import TakeCheckpoint, ask_for_checkpoint
from tidegate.engine.restoring import leaving_no_new_root
from tidegate.engine.root import Root
from tidegate.engine.savepoints import shown_tables
from tidegate.engine.setting_back import PipelineTables, TableBack, first_refusal, known_tables, others_in, tables_in
from tidegate.engine.status import as_moment
from tidegate.engine.tables import bound, described
from tidegate.errors import (
    InvalidConfig,
    RecoveryRefused,
    RootInUse,
    TidegateError,
)
from tidegate.protocol.decision_log import CheckpointCompleted, Copied
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.sinks import function
from tidegate.sinks.contract import ReversibleSink, Sink, SinkPlace
from tidegate.sinks.delta.home import home_of
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files
from tidegate.storage.inspection import InspectedRoot, read_owner
from tidegate.storage.manifest import Manifest, TableAddress, with_tables
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import Place, place_of
from tidegate.storage.savepoints import find_savepoint

NOW = "now"
_SUFFIX = "_next"


class Forked(msgspec.Struct, frozen=True):
    """A fork that was made. `muted`: sinks that call functions, which the fork does not."""

    pipeline: str
    made_from: str
    root: str
    tables: tuple[TableBack, ...]
    originals: dict[str, str]
    muted: tuple[str, ...]


class Promotion(msgspec.Struct, frozen=True):
    """What promoting a fork means. `left`: sinks of the pipeline that it was forked from which it does not have: their
    tables stay as they are."""

    pipeline: str
    fork: str
    replaced: str
    checkpoint: str
    tables: tuple[TableBack, ...]
    sources: dict[str, str]
    left: tuple[str, ...] = ()

    @property
    def refused(self) -> str | None:
        """Why it cannot be done."""
        return first_refusal(self.tables)

    @property
    def others(self) -> list[str]:
        return others_in(self.tables)


# -- forking --------------------------------------------------------------------------------------


class _Forked(msgspec.Struct, frozen=True):
    """What is forked: a checkpoint in files, of a root."""

    files: Files
    manifest: Manifest
    root_id: str
    name: str


@contextmanager
def _source(root: Place, of: str, timeout_s: float) -> Iterator[_Forked]:
    """What a user names: a checkpoint of a root, a savepoint, or what there is now."""
    checkpoint_id = checkpoint_id_of(of)
    if of != NOW and checkpoint_id is None:
        savepoint = find_savepoint(root.beside, of)
        yield _Forked(savepoint.files, savepoint.looked_through(), savepoint.record.root_id, savepoint.record.name)
        return
    inspected = InspectedRoot(root)
    record = _now(inspected, timeout_s) if checkpoint_id is None else inspected.find(checkpoint_id)
    with pinned(inspected, record) as (files, manifest):
        yield _Forked(files, manifest, inspected.id, checkpoint_name(record.checkpoint_id))


def _now(root: InspectedRoot, timeout_s: float) -> CheckpointCompleted:
    """Of a run that is alive, one that it takes for this."""
    if not root.place.is_held():
        return root.newest()
    taken = checkpoint_id_of(ask_for_checkpoint(root.place, timeout_s, TakeCheckpoint()).checkpoint)
    assert taken is not None
    return root.find(taken)


def fork_root(
    root: Place,
    of: str,
    to: Place,
    *,
    suffix: str = _SUFFIX,
    tables: Mapping[str, str] | None = None,
    sinks: Mapping[str, Sink] | None = None,
    timeout_s: float = 600,
) -> Forked:
    """Make a fork. `of`: a checkpoint, a savepoint, or "now". `tables`: addresses of the fork's tables by the names of
    sinks; of others it is that of the original with the suffix."""
    _check_is_free(to)
    with _source(root, of, timeout_s) as source, leaving_no_new_root(to), to.lock():
        _check_writes_there(root, source)
        made = Root(to, source.manifest.pipeline)
        addresses = _own_addresses(source.manifest, suffix, tables or {})
        originals = {name: tables_in(source.manifest)[name].address for name in addresses}
        copies = {name: Copied(original) for name, original in originals.items()}
        manifest = msgspec.structs.replace(
            with_tables(source.manifest, addresses), origin=known_origin(source.manifest, source.root_id)
        )
        copying = Copies(made.store, made.id, manifest, addresses, copies, sinks or {})
        looked = copying.look()
        for each in looked:
            if each.refused is not None:
                raise RecoveryRefused(
                    f"{source.name} cannot be forked: sink {each.sink!r}: {each.refused}. Nothing was changed"
                )
        write_fork(made.store, _as_fork(root, source, addresses, originals, sinks or {}))
        bringing = Bringing(source.files, source.manifest, source.root_id, addresses, copies)
        RootOpening(made, copying.own).bring(bringing, bringing.above({}))
        record_rewind(to.files, "fork", f"{source.name} of {root}")
        muted = [name for name, each in tables_in(manifest).items() if each.kind in function.KINDS]
        return Forked(manifest.pipeline, source.name, str(to), looked, originals, tuple(muted))


def _check_writes_there(root: Place, source: _Forked) -> None:
    """Refuse a checkpoint of before the pipeline wrote to the tables that it writes to now: the fork would stand for
    those of then."""
    owner = read_owner(root.files)
    if owner is None or owner.root_id != source.root_id:
        return
    now = known_tables(root.files, StoredDecisions(root.files).read())
    for name, then in tables_in(source.manifest).items():
        if then.kind not in function.KINDS and name in now and now[name].address != then.address:
            raise RecoveryRefused(
                f"{source.name} cannot be forked: sink {name!r} wrote to {described(then)} then, and writes to "
                f"{described(now[name])} now. What to do: fork a newer checkpoint. Nothing was changed"
            )


def _check_is_free(to: Place) -> None:
    if not to.is_empty() and not _was_never_used(to.files):
        raise InvalidConfig(f"{to} is there and is not empty; a fork gets a root of its own, which is made for it")


def _was_never_used(files: Files) -> bool:
    """Whether a root holds nothing but what somebody has left who was killed before a fork was decided there. The next
    one is made over it: what is brought gets numbers above what was left, and the first run removes that."""
    if read_owner(files) is None or files.list(RootPaths.DECISIONS):
        return False
    return files.exists(RootPaths.FORK) or not files.list(RootPaths.GENERATIONS)


def _own_addresses(manifest: Manifest, suffix: str, given: Mapping[str, str]) -> dict[str, TableAddress]:
    """The addresses of the fork's tables. Sinks that share a table share its copy."""
    found = {name: each for name, each in tables_in(manifest).items() if each.kind not in function.KINDS}
    for name in given:
        if name not in found:
            raise InvalidConfig(
                f"--table {name}: there is no table of a sink of that name (there are: {', '.join(found) or 'none'})"
            )
    by_original: dict[str, str] = {}
    for name, table in found.items():
        if name in given:
            address = home_of(given[name]).address if table.kind == "delta" else given[name]
            if by_original.setdefault(table.address, address) != address:
                raise InvalidConfig(f"--table {name}: sinks that share {table.address} share its copy, too")
    for table in found.values():
        if not suffix and table.address not in by_original:
            raise InvalidConfig("a fork has tables of its own: give them a suffix, or each an address with --table")
        by_original.setdefault(table.address, f"{table.address}{suffix}")
    taken = [each for each in by_original.values() if each in by_original]
    if taken or len(set(by_original.values())) < len(by_original):
        raise InvalidConfig(f"{(taken or [*by_original.values()])[0]} would be the table of two; give each its own")
    return {name: TableAddress(table.kind, by_original[table.address]) for name, table in found.items()}


def _as_fork(
    root: Place,
    source: _Forked,
    addresses: Mapping[str, TableAddress],
    originals: Mapping[str, str],
    sinks: Mapping[str, Sink],
) -> Fork:
    place = PipelineTables(
        root.files,
        source.manifest.pipeline,
        source.root_id,
        tables_in(source.manifest),
        {
            name: bound(sink, SinkPlace(source.manifest.pipeline, name, root.files, root=source.root_id))
            for name, sink in sinks.items()
        },
    )
    tables: dict[str, ForkedTable] = {}
    for name, address in addresses.items():
        sink = place.sink(name)
        # Where it stood when the fork was made: what others write to it later would be lost when the fork is promoted.
        version = sink.look_back(source.manifest).from_version if isinstance(sink, ReversibleSink) else None
        tables[name] = ForkedTable(address.kind, address.address, originals[name], version)
    return Fork(str(root), source.root_id, source.name, as_moment(datetime.now(UTC)), tables)


# -- promoting ------------------------------------------------------------------------------------


class _Promoting:
    """Of one fork: looked at, and done."""

    def __init__(self, place: Place, sinks: Mapping[str, Sink]) -> None:
        self._root = InspectedRoot(place)
        fork = read_fork(self._root.files)
        if fork is None:
            raise InvalidConfig(f"{place} is no fork; `tidegate fork` makes one")
        self.fork = fork
        self._record = self._root.newest()
        self._manifest = self._root.manifest(self._record)
        own = {
            name: bound(
                moved(sink, fork.own(sink.table) or sink.table.address),
                SinkPlace(self._root.pipeline, name, self._files_of(name), root=self._root.id),
            )
            for name, sink in sinks.items()
        }
        shown_tables(self._root, self._manifest, own, is_shown=False)
        found = {name: self.fork.original(each) for name, each in tables_in(self._manifest).items()}
        self._forked = {name: each for name, each in found.items() if each is not None}
        addresses = {name: TableAddress(each.kind, each.original) for name, each in self._forked.items()}
        self._copies = {
            name: Copied(each.table, replaces=True, since=each.version) for name, each in self._forked.items()
        }
        self._addresses = addresses
        manifest = with_tables(self._manifest, addresses)
        self._copying = Copies(self._root.files, self._root.id, manifest, addresses, self._copies, sinks)

    def _files_of(self, sink: str) -> Files:
        return self._root.files.at(RootPaths.sink(sink))

    def plan(self) -> Promotion:
        kept = {each.original for each in self._forked.values()}
        left = [name for name, each in self.fork.tables.items() if each.original not in kept]
        return Promotion(
            self._root.pipeline,
            str(self._root.place),
            self.fork.root,
            checkpoint_name(self._record.checkpoint_id),
            self._copying.look(),
            {name: each.table for name, each in self._forked.items()},
            tuple(left),
        )

    def apply(self, *, discard_others: bool) -> None:
        root = Root(self._root.place, self._root.pipeline)
        bringing = Bringing(
            root.store,
            self._manifest,
            root.id,
            self._addresses,
            self._copies,
            ends_fork=True,
            is_within_root=True,
        )
        tables = PipelineTables(root.store, root.pipeline, root.id, self._addresses, self._copying.own)
        above = bringing.above(tables.facts(), tables.staged_generation())
        RootOpening(root, self._copying.own).bring(bringing, above, discards_others=discard_others)


def promote_root(
    place: Place,
    *,
    discard_others: bool = False,
    sinks: Mapping[str, Sink] | None = None,
    take_over: bool = False,
    confirm: Callable[[Promotion], bool] = lambda _: True,
) -> Promotion | None:
    """Promote a fork. Returns what was done; None: it was not confirmed."""
    pipeline = InspectedRoot(place).pipeline  # before a lock is made in a folder that is no root
    with place.lock(take_over=take_over), ExitStack() as stack:
        finish_pending(Root(place, pipeline), sinks or {})
        promoting = _Promoting(place, sinks or {})
        _lock_original(promoting.fork, stack, take_over=take_over)
        plan = promoting.plan()
        if plan.refused is not None:
            raise RecoveryRefused(f"the fork cannot be promoted: {plan.refused}. Nothing was changed")
        if plan.others and not discard_others:
            raise RecoveryRefused(
                f"the fork cannot be promoted: others have written to tables since it was made, which would be lost: "
                f"{'; '.join(plan.others)}. What to do: promote with --discard-others. Nothing was changed"
            )
        if not confirm(plan):
            return None
        promoting.apply(discard_others=discard_others)
        record_rewind(place.files, "promote", plan.replaced)
        return plan


def plan_promotion(place: Place, sinks: Mapping[str, Sink] | None = None) -> Promotion:
    """What promoting would mean. Changes nothing, and works beside runs."""
    return _Promoting(place, sinks or {}).plan()


def _lock_original(fork: Fork, stack: ExitStack, *, take_over: bool) -> None:
    """Nobody may run the other pipeline meanwhile. Its root may be gone, or be another one's by now."""
    place = place_of(fork.root)
    try:
        owner = read_owner(place.files)
    except TidegateError:
        owner = None
    if owner is None or owner.root_id != fork.root_id:
        return
    try:
        stack.enter_context(place.lock(take_over=take_over))
    except RootInUse as error:
        raise RootInUse(f"the pipeline that it was forked from still runs: {error}") from error


def fork(
    root: str | Path,
    to: str | Path,
    of: str | int = NOW,
    *,
    suffix: str = _SUFFIX,
    tables: Mapping[str, str] | None = None,
    sinks: Mapping[str, Sink] | None = None,
) -> Forked:
    """Make a second pipeline with the same state, on a root of its own and with tables of its own, beside the first.

    `of`: a checkpoint of the root, a savepoint, or "now". The tables of the fork are at the addresses that `tables`
    says by the names of sinks, and else at that of the original with the suffix. `sinks` of a pipeline are needed for
    tables that only they can reach (PostgreSQL).
    """
    return fork_root(place_of(root), str(of), place_of(to), suffix=suffix, tables=tables, sinks=sinks)


def promote(root: str | Path, *, discard_others: bool = False, sinks: Mapping[str, Sink] | None = None) -> Promotion:
    """Let the tables of a fork take the place of those that it was made from, in one decision. Neither may run."""
    done = promote_root(place_of(root), discard_others=discard_others, sinks=sinks)
    assert done is not None
    return done
