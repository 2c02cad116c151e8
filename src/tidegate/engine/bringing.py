"""Bringing a checkpoint into a root: from a savepoint, from another root, or from the root itself for other tables.

It is one decision of the root's log, as going back is (`restoring.py`): what is brought is stored under new numbers,
then a record completes it and opens a generation from it, then every table follows.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec

from tidegate.engine.kill_points import Step, reached
from tidegate.errors import DamagedCheckpoint, StoreUnavailable, UnknownCheckpoint
from tidegate.flows.opening import Above
from tidegate.flows.requests import Bring
from tidegate.protocol.decision_log import Brought, CheckpointCompleted, Copied
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import Committable, decode_committable
from tidegate.storage.carrying import Carrying, Numbers, side_by_side
from tidegate.storage.files import Files, clear
from tidegate.storage.inspection import InspectedRoot, references
from tidegate.storage.manifest import Manifest, Origin, TableAddress, encode_manifest
from tidegate.storage.paths import RootPaths


class Bringing(msgspec.Struct, frozen=True):
    """A checkpoint that is to be brought into a root, from `source`, where `root_id` has taken it. All tables show it.

    `tables`: where those of sinks are, or are to be, if not where the checkpoint says. `copies`: see `Brought`.
    """

    source: Files
    manifest: Manifest
    root_id: str
    tables: Mapping[str, TableAddress] = {}
    copies: Mapping[str, Copied] = {}
    ends_fork: bool = False
    is_within_root: bool = False

    def above(self, tables: Mapping[str, SinkFacts], staged_generation: int = 0) -> Above:
        """The numbers that are in use where it comes from, and in its tables. `staged_generation`: the largest that has
        staged for one of them."""
        fences = (facts.fence for facts in tables.values())
        epochs = (facts.committed_epoch for facts in tables.values())
        manifest = self.manifest
        return Above(
            max(manifest.checkpoint_id, manifest.epoch, manifest.shown_epoch, *epochs, 0),
            max(manifest.generation, staged_generation, *fences),
        )

    def store(self, root: Files, request: Bring) -> Brought:
        """Under the numbers that it is to have. What a try before has stored is stored again."""
        manifest = self.manifest
        origin = known_origin(manifest, self.root_id)
        numbers = Numbers(request.generation, request.checkpoint_id, request.checkpoint_id)
        carrying = Carrying(self.source, root, manifest, links=self.is_within_root)
        carried = carrying.carry(numbers, sealed_when_shown(manifest), self.tables, origin)
        data, sha256 = encode_manifest(carried)
        name = RootPaths.manifest(request.generation, request.checkpoint_id)
        root.write(name, data)
        reached(Step.CHECKPOINT_BROUGHT)
        return Brought(
            numbers.checkpoint_id,
            numbers.epoch,
            name,
            sha256,
            manifest.aligned,
            int(datetime.fromisoformat(manifest.triggered_at).timestamp() * 1000),
            dict(self.copies),
            self.ends_fork,
        )


def known_origin(manifest: Manifest, root_id: str) -> Origin:
    """Where a checkpoint was first taken, of which a root has it. What tables show of it is known by the numbers of
    that."""
    return manifest.origin or Origin(root_id, manifest.checkpoint_id, manifest.epoch)


def sealed_when_shown(manifest: Manifest) -> dict[str, str]:
    """What each sink has sealed, when its table shows all of it: nothing is staged any more."""
    sealed = {
        name: decode_committable(stage.committable)
        for name, stage in manifest.stages.items()
        if stage.committable is not None
    }
    return {
        name: Committable(each.through_batch, shown_through=each.last_with_rows).encode()
        for name, each in sealed.items()
    }


@contextmanager
def pinned(root: InspectedRoot, record: CheckpointCompleted) -> Iterator[tuple[Files, Manifest]]:
    """A checkpoint of a root that stays while it is copied, whatever the run that is alive drops: its files by second
    names. Once all have one it no longer matters whether the root retains it: what is copied is these, the manifest is
    read, and what it has sealed is asked of the tables.
    """
    folder = f"{RootPaths.PINS}/{datetime.now(UTC):%Y%m%d}-{uuid.uuid4().hex}"
    pins = root.files.at(folder, durable=False)
    # The folder is new, so that in a bucket nobody has to look whether a name is taken.
    give = pins.copy if root.place.is_far else pins.keep
    try:
        try:
            manifest = root.manifest(record)
            names = references(root.files, manifest)
            # Within a bucket nothing passes through this process.
            side_by_side(((0, partial(give, each, root.files, each)) for each in names), pins)
        except (DamagedCheckpoint, StoreUnavailable) as error:
            if root.is_retained(record.checkpoint_id):
                raise
            name = checkpoint_name(record.checkpoint_id)
            raise UnknownCheckpoint(f"{name} was dropped by the run while it was about to be copied") from error
        yield pins, manifest
    finally:
        with suppress(StoreUnavailable):
            clear(root.files, folder)
            _forget_old_pins(root)


def _forget_old_pins(root: InspectedRoot) -> None:
    """Of processes that were killed, not of those that are at it: from before yesterday."""
    yesterday = f"{datetime.now(UTC) - timedelta(days=1):%Y%m%d}"
    for each in root.files.names_in(RootPaths.PINS):
        if each.partition("-")[0] < yesterday:
            clear(root.files, f"{RootPaths.PINS}/{each}")
