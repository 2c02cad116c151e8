"""Stages that have another name since their checkpoint.

A stage is known by its name in all that a manifest says: its own part, where its readers stand in it, what is in flight
to them, and which stages ran as one query. All of that is said by the new name from the start on. Paths stay: what was
written under the old name is named where it lies. The next checkpoint says all of it by the new name, so the option may
stay where it is, and has no effect any more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from tidegate.errors import InvalidConfig, PipelineChanged
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.manifest import Manifest


def check_names(renames: Mapping[str, str], stages: Collection[str]) -> None:
    """Refuse what could not be meant of a pipeline that has these stages, whatever its checkpoint knows."""
    taken: dict[str, str] = {}
    for old, new in renames.items():
        given = f"rename {old}={new}"
        if new not in stages:
            raise InvalidConfig(f"{given}: the pipeline has no stage {new!r} (it has: {', '.join(stages)})")
        if old in stages:
            raise InvalidConfig(f"{given}: the pipeline still has a stage {old!r}; give that another name, or leave it")
        if other := taken.get(new):
            raise InvalidConfig(f"{given}: {other!r} was to become {new!r} too; a stage goes on from one")
        taken[new] = old


def to_rename(renames: Mapping[str, str], manifest: Manifest) -> tuple[dict[str, str], list[str]]:
    """What is yet to be renamed, old names first, and what is told of the rest: it is done."""
    since = checkpoint_name(manifest.checkpoint_id)
    left: dict[str, str] = {}
    told: list[str] = []
    for old, new in renames.items():
        is_known = new in manifest.stages
        if old not in manifest.stages:
            if not is_known:
                known = ", ".join(manifest.stages)
                raise InvalidConfig(
                    f"rename {old}={new}: {since} knows no stage {old!r} (it knows: {known}). What to do: correct the "
                    f"name, or leave it out"
                )
            told.append(f"rename {old}={new} is done: {since} knows {new!r}, so it may be left out")
        elif is_known:
            raise PipelineChanged(
                f"rename {old}={new}: {since} knows {new!r} too, which goes on from what it has itself. What to do: "
                f"take another name, or remove {new!r} first and rename when a checkpoint is complete without it"
            )
        else:
            left[old] = new
    return left, told


def renamed(manifest: Manifest, renames: Mapping[str, str]) -> Manifest:
    """The checkpoint as if the stages had had their new names, in the order that it has them in."""

    def now(name: str) -> str:
        return renames.get(name, name)

    return msgspec.structs.replace(
        manifest,
        stages={
            now(name): msgspec.structs.replace(
                each,
                positions={now(read): position for read, position in each.positions.items()},
                in_flight={now(read): segments for read, segments in each.in_flight.items()},
            )
            for name, each in manifest.stages.items()
        },
        shape={
            now(name): msgspec.structs.replace(each, inputs=tuple(map(now, each.inputs)))
            for name, each in manifest.shape.items()
        },
        chains={now(name): tuple(map(now, before)) for name, before in manifest.chains.items()},
    )
