"""What the next run on a root does: the same in every command that tells of it."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.cli.answers import NextStart
from tidegate.protocol.recovery import Refuse, Restore, SetTablesBack
from tidegate.storage.inspection import InspectedRoot, Outlook, SeenSinks
from tidegate.storage.lock import is_held
from tidegate.storage.manifest import Manifest


def next_run(inspected: InspectedRoot, known: Mapping[int, str | None] | None = None) -> Outlook:
    """`known`: the health of checkpoints whose files were read already."""

    def look_at_sinks(manifest: Manifest) -> SeenSinks:
        # It brings deltalake, which takes longer than all the rest.
        from tidegate.sinks import outside

        return outside.look_at_sinks(inspected, manifest)

    return inspected.outlook(look_at_sinks, known, is_alive=is_held(inspected.paths.lock))


def next_start(outlook: Outlook) -> NextStart:
    match outlook.start:
        case Refuse():
            return NextStart("refuses", why=str(outlook))
        case Restore(skipped=skipped):
            return NextStart("skips" if skipped else "goes_on", outlook.checkpoint, str(outlook) if skipped else None)
        case SetTablesBack():
            return NextStart("goes_on", outlook.checkpoint, str(outlook))
        case _:
            return NextStart("fresh")
