"""What the next run on a root does: the same wherever it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidegate.protocol.recovery import Refuse, Restore, SetTablesBack
from tidegate.storage.inspection import InspectedRoot, Outlook, SeenSinks
from tidegate.storage.manifest import Manifest


class NextStart(msgspec.Struct, frozen=True):
    """What the next run on a root does."""

    decision: Annotated[
        Literal["fresh", "goes_on", "skips", "refuses"],
        Meta(
            description="`fresh`: it starts from the beginning, `goes_on` from the newest checkpoint, `skips` what is "
            "damaged and goes on from an older one, `refuses` to start"
        ),
    ]
    checkpoint: Annotated[str | None, Meta(description="the one that it goes on from; null: none")] = None
    why: Annotated[str | None, Meta(description="why it skips one or refuses; otherwise null")] = None


def next_run(
    inspected: InspectedRoot, known: Mapping[int, str | None] | None = None, *, is_alive: bool | None = None
) -> Outlook:
    """`known`: the health of checkpoints whose files were read already. `is_alive`: whether a run is, if that is known:
    to ask costs a request where the root is in a bucket."""

    def look_at_sinks(manifest: Manifest) -> SeenSinks:
        # It brings deltalake, which takes longer than all the rest.
        from tidegate.sinks import outside

        return outside.look_at_sinks(inspected, manifest)

    is_held = inspected.place.is_held() if is_alive is None else is_alive
    return inspected.outlook(look_at_sinks, known, is_alive=is_held)


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
