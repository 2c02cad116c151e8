"""`tidegate restore`: a pipeline and its tables go to a retained checkpoint together, as one decision.

1. Look at the checkpoint's files and at every table: what cannot be done is refused before anything is changed.
2. Tell what it means, and ask.
3. Write the decision into the log. From here on it is finished by whoever comes next, this process or a run.
4. Set the tables back, one after the other.

The next run goes on from there. Newer checkpoints stay until one is complete: until then it can be undone.
Importing this brings no PySpark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from tidegate.engine.opening import RootOpening
from tidegate.engine.root import Root
from tidegate.engine.setting_back import PipelineTables, TableBack
from tidegate.errors import DamagedCheckpoint, InvalidConfig, RecoveryRefused, UnknownCheckpoint
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.storage.inspection import InspectedRoot, look_through
from tidegate.storage.lock import RootLock
from tidegate.storage.user_paths import plain_path


class Restoration(msgspec.Struct, frozen=True):
    """What restoring a checkpoint means. `newest`: the one that the pipeline stands at. `dropped`: those that are left
    behind, oldest first."""

    pipeline: str
    checkpoint: str
    triggered_at: str
    aligned: bool
    newest: str
    dropped: tuple[str, ...]
    tables: tuple[TableBack, ...]

    @property
    def refused(self) -> str | None:
        """Why it cannot be done."""
        for each in self.tables:
            if each.refused is not None:
                return f"sink {each.sink!r}: {each.refused}"
        return None

    @property
    def others(self) -> list[str]:
        """What others have written to tables since."""
        return [f"{each.table.address}: {other}" for each in self.tables for other in each.change.others]


def plan_restore(root: InspectedRoot, checkpoint_id: int, left: Collection[str] = ()) -> Restoration:
    """Look at everything. Changes nothing, and works beside a run."""
    log, name = root.log(), checkpoint_name(checkpoint_id)
    record = root.find(checkpoint_id)
    try:
        manifest = look_through(root.files, record)
    except DamagedCheckpoint as damage:
        root.find(checkpoint_id)  # asked after the damage was seen
        raise DamagedCheckpoint(f"{name} cannot be restored, it is damaged: {damage}") from damage
    tables = PipelineTables(root.files, root.pipeline, root.id, log)
    if unknown := set(left) - tables.addresses.keys():
        known = ", ".join(tables.addresses) or "none"
        raise InvalidConfig(f"--leave {min(unknown)}: there is no sink of that name (there are: {known})")
    newest = log.newest.checkpoint_id if log.newest is not None else checkpoint_id
    dropped = [each for each in sorted(log.retained) if each > checkpoint_id]
    return Restoration(
        root.pipeline,
        name,
        manifest.triggered_at,
        manifest.aligned,
        checkpoint_name(newest),
        tuple(map(checkpoint_name, dropped)),
        tuple(tables.look_back(manifest, left)),
    )


def restore_root(
    folder: Path,
    checkpoint_id: int,
    *,
    discard_others: bool = False,
    leave: Collection[str] = (),
    take_over: bool = False,
    confirm: Callable[[Restoration], bool] = lambda _: True,
) -> Restoration | None:
    """Restore a checkpoint. Returns what was done; None: it was not confirmed."""
    with RootLock(folder / "lock", take_over=take_over):
        inspected = InspectedRoot(folder)
        plan = plan_restore(inspected, checkpoint_id, leave)
        if plan.refused is not None:
            raise RecoveryRefused(f"{plan.checkpoint} cannot be restored: {plan.refused}. Nothing was changed")
        if plan.others and not discard_others:
            raise RecoveryRefused(
                f"{plan.checkpoint} cannot be restored: others have written to tables since, which would be lost: "
                f"{'; '.join(plan.others)}. What to do: restore with --discard-others, or leave a table as it is with "
                f"--leave and its sink's name. Nothing was changed"
            )
        if not confirm(plan):
            return None
        root = Root(folder, inspected.pipeline)
        RootOpening(root, {}).set_back(checkpoint_id, discards_others=discard_others, left=tuple(sorted(leave)))
        return plan


def restore(
    root: str | Path,
    to: str | int,
    *,
    dry_run: bool = False,
    discard_others: bool = False,
    leave: Collection[str] = (),
) -> Restoration:
    """Bring a pipeline that is not running, with its tables, to a checkpoint that its root retains.

    Delta tables get a new version that shows what they showed then; functions are called again with what follows. It
    is refused, and nothing is changed, where a table cannot be set back or others have written to one since
    (`discard_others`); `leave` names sinks whose tables you see to yourself. `dry_run` only tells what would be done.
    """
    checkpoint_id = checkpoint_id_of(str(to))
    if checkpoint_id is None:
        raise UnknownCheckpoint(f"{to!r} names no checkpoint; write 42 or {checkpoint_name(42)!r}")
    folder = plain_path(root)
    if dry_run:
        return plan_restore(InspectedRoot(folder), checkpoint_id, leave)
    InspectedRoot(folder)  # before a lock is made in a folder that is no root
    done = restore_root(folder, checkpoint_id, discard_others=discard_others, leave=leave)
    assert done is not None
    return done
