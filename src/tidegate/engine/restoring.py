"""`tidegate restore`: a pipeline and its tables go to a checkpoint together, as one decision.

1. Look at the checkpoint's files and at every table: what cannot be done is refused before anything is changed.
2. Tell what it means, and ask.
3. Write the decision into the log. From here on it is finished by whoever comes next, this process or a run.
4. Set the tables back, one after the other.

The next run goes on from there. Newer checkpoints stay until one is complete: until then it can be undone. A checkpoint
is one that the root retains, or a savepoint: that is copied into the root first, which may be a new one, and stays its
user's. A new root takes the tables from whichever had them. Importing this brings no PySpark.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tidegate.engine.bringing import Bringing, known_origin
from tidegate.engine.copies import finish_pending
from tidegate.engine.history import record_rewind
from tidegate.engine.opening import RootOpening
from tidegate.engine.root import Root
from tidegate.engine.setting_back import PipelineTables, TableBack, first_refusal, known_tables, others_in, tables_in
from tidegate.engine.tables import bound
from tidegate.errors import DamagedCheckpoint, ForeignRoot, InvalidConfig, RecoveryRefused, StoreUnavailable
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.sinks.contract import BoundSink, Sink, SinkPlace
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.inspection import InspectedRoot, look_through, read_owner
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import Place, place_of
from tidegate.storage.savepoints import Savepoint, find_savepoint
from tidegate.storage.user_paths import plain_path

Target = int | Savepoint
"""What to restore: a checkpoint that the root retains, by its id, or a savepoint."""


class Restoration(msgspec.Struct, frozen=True):
    """What restoring a checkpoint means. `newest`: the one that the pipeline stands at; None: the root is new.
    `dropped`: those that are left behind, oldest first. `checkpoint`: its name, or that of the savepoint."""

    pipeline: str
    checkpoint: str
    triggered_at: str
    aligned: bool
    newest: str | None
    dropped: tuple[str, ...]
    tables: tuple[TableBack, ...]
    is_savepoint: bool = False
    is_new_root: bool = False

    @property
    def refused(self) -> str | None:
        """Why it cannot be done."""
        return first_refusal(self.tables)

    @property
    def others(self) -> list[str]:
        """What others have written to tables since."""
        return others_in(self.tables)


class _RootAt:
    """A root that is there, or is yet to be made: nothing is claimed or changed."""

    def __init__(self, place: Place, pipeline: str | None) -> None:
        """`pipeline`: whose it is to be, where there is none yet."""
        self.files = place.files
        owner = read_owner(self.files)
        self.is_new = owner is None
        if owner is None and pipeline is None:
            InspectedRoot(place)  # which says what is wrong
        if owner is not None and pipeline is not None and owner.pipeline != pipeline:
            raise ForeignRoot(f"{place} belongs to pipeline {owner.pipeline!r}, and the savepoint is of {pipeline!r}")
        self.pipeline = owner.pipeline if owner is not None else pipeline or ""
        self.id = uuid.uuid4().hex if owner is None else owner.root_id

    def log(self) -> DecisionLog:
        return DecisionLog() if self.is_new else StoredDecisions(self.files).read()


class Restoring:
    """Of one checkpoint, on one root: looked at, and done."""

    def __init__(
        self,
        place: Place,
        target: Target,
        left: Collection[str] = (),
        tables: Mapping[str, str] | None = None,
        sinks: Mapping[str, Sink] | None = None,
    ) -> None:
        """`left`: sinks whose tables their user sees to. `tables`: where those of sinks are, if not where the
        checkpoint says. `sinks`: the pipeline's, for tables that can only be reached by them."""
        self._place = place
        self._target = target
        self._left = tuple(sorted(left))
        self._root = _RootAt(place, target.record.pipeline if isinstance(target, Savepoint) else None)
        self._log = self._root.log()
        self._manifest = self._looked_through()
        known = known_tables(self._root.files, self._log)
        self._addresses = {**tables_in(self._manifest), **known} if isinstance(target, Savepoint) else known
        for name, address in (tables or {}).items():
            self._check_sink("--table", name)
            found = self._addresses[name]
            path = str(plain_path(address)) if found.kind == "delta" else address
            self._addresses[name] = TableAddress(found.kind, path)
        for name in self._left:
            self._check_sink("--leave", name)
        self._own = self._bound(sinks or {})
        self._tables = PipelineTables(self._root.files, self._root.pipeline, self._root.id, self._addresses, self._own)

    def _check_sink(self, option: str, name: str) -> None:
        if name not in self._addresses:
            known = ", ".join(self._addresses) or "none"
            raise InvalidConfig(f"{option} {name}: there is no sink of that name (there are: {known})")

    def _bound(self, sinks: Mapping[str, Sink]) -> dict[str, BoundSink]:
        places = {
            name: SinkPlace(self._root.pipeline, name, self._root.files.at(RootPaths.sink(name)), root=self._root.id)
            for name in sinks
        }
        return {name: bound(sink, places[name]) for name, sink in sinks.items() if name in self._addresses}

    def _looked_through(self) -> Manifest:
        if isinstance(self._target, Savepoint):
            found = self._target.looked_through()
            return msgspec.structs.replace(found, origin=known_origin(found, self._target.record.root_id))
        inspected, name = InspectedRoot(self._place), checkpoint_name(self._target)
        record = inspected.find(self._target)
        try:
            return look_through(inspected.files, record)
        except DamagedCheckpoint as damage:
            inspected.find(self._target)  # asked after the damage was seen
            raise DamagedCheckpoint(f"{name} cannot be restored, it is damaged: {damage}") from damage

    @property
    def _is_taking_over(self) -> bool:
        """Whether tables may be another root's still, which a decision before this one takes them from."""
        return (pending := self._log.setting_back) is not None and pending.takes_over

    def plan(self) -> Restoration:
        """What it means. Changes nothing, and works beside a run."""
        target, log = self._target, self._log
        is_savepoint = isinstance(target, Savepoint)
        dropped = [each for each in sorted(log.retained) if is_savepoint or each > self._manifest.checkpoint_id]
        return Restoration(
            self._root.pipeline,
            target.record.name if isinstance(target, Savepoint) else checkpoint_name(target),
            self._manifest.triggered_at,
            self._manifest.aligned,
            None if log.newest is None else checkpoint_name(log.newest.checkpoint_id),
            tuple(map(checkpoint_name, dropped)),
            tuple(self._tables.look_back(self._manifest, self._left, takes_over=is_savepoint or self._is_taking_over)),
            is_savepoint,
            self._root.is_new,
        )

    def apply(self, *, discard_others: bool) -> None:
        root = Root(self._place, self._root.pipeline, root_id=self._root.id)
        opening = RootOpening(root, self._own)
        target = self._target
        if not isinstance(target, Savepoint):
            opening.set_back(target, discards_others=discard_others, left=self._left)
            return
        tables = {name: each for name, each in self._addresses.items() if name in self._manifest.shape}
        bringing = Bringing(target.files, self._manifest, target.record.root_id, tables)
        above = bringing.above(self._tables.facts(), self._tables.staged_generation())
        opening.bring(bringing, above, discards_others=discard_others, left=self._left)


@contextmanager
def leaving_no_new_root(place: Place) -> Iterator[None]:
    """A root that was made for something which then failed, before anything was decided, is removed."""
    is_used = not place.is_empty()
    try:
        yield
    except BaseException:
        with suppress(StoreUnavailable):
            if not is_used and not place.files.list(RootPaths.DECISIONS):
                place.remove()
        raise


def restore_root(
    place: Place,
    target: Target,
    *,
    discard_others: bool = False,
    leave: Collection[str] = (),
    tables: Mapping[str, str] | None = None,
    sinks: Mapping[str, Sink] | None = None,
    take_over: bool = False,
    confirm: Callable[[Restoration], bool] = lambda _: True,
) -> Restoration | None:
    """Restore a checkpoint. Returns what was done; None: it was not confirmed."""
    with leaving_no_new_root(place), place.lock(take_over=take_over):
        owner = read_owner(place.files)
        if owner is not None:  # what was decided before is done first: the next decision would hide it
            finish_pending(Root(place, owner.pipeline), sinks or {})
        restoring = Restoring(place, target, leave, tables, sinks)
        plan = restoring.plan()
        if plan.refused is not None:
            raise RecoveryRefused(f"{plan.checkpoint} cannot be restored: {plan.refused}. Nothing was changed")
        if plan.others and not discard_others:
            raise RecoveryRefused(
                f"{plan.checkpoint} cannot be restored: others have written to tables since, which would be lost: "
                f"{'; '.join(plan.others)}. What to do: restore with --discard-others, or leave a table as it is with "
                f"--leave and its sink's name. Nothing was changed"
            )
        if not confirm(plan):
            if plan.is_new_root:
                place.remove()
            return None
        restoring.apply(discard_others=discard_others)
        if isinstance(target, Savepoint):
            record_rewind(place.files, "savepoint", str(target.folder))
        else:
            record_rewind(place.files, "restore")
        return plan


def target_of(root: Place, to: str | int) -> Target:
    """What a user names: 42, ckpt-000042, or a savepoint by its name or its folder."""
    checkpoint_id = checkpoint_id_of(str(to))
    return find_savepoint(root.beside, str(to)) if checkpoint_id is None else checkpoint_id


def restore(
    root: str | Path,
    to: str | int,
    *,
    dry_run: bool = False,
    discard_others: bool = False,
    leave: Collection[str] = (),
    tables: Mapping[str, str] | None = None,
) -> Restoration:
    """Bring a pipeline that is not running, with its tables, to a checkpoint that its root retains, or to a savepoint.

    Delta tables get a new version that shows what they showed then; functions are called again with what follows. It
    is refused, and nothing is changed, where a table cannot be set back or others have written to one since
    (`discard_others`); `leave` names sinks whose tables you see to yourself. `dry_run` only tells what would be done.

    A savepoint is named by its folder, or by its name among those beside the root. It may be restored on a new root,
    whose folder is made then. `tables` says where tables are that were moved, by the names of their sinks.
    """
    place = place_of(root)
    target = target_of(place, to)
    if dry_run:
        return Restoring(place, target, leave, tables).plan()
    if not isinstance(target, Savepoint):
        InspectedRoot(place)  # before a lock is made in a folder that is no root
    done = restore_root(place, target, discard_others=discard_others, leave=leave, tables=tables)
    assert done is not None
    return done
