"""Taking possession of a root: its owner, and the recovery of what is in it."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tidegate.errors import DamagedCheckpoint, ForeignRoot
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import BoundSink, FileSink, SinkPlace, decode_committable
from tidegate.sinks.delta.home import Home, home_of
from tidegate.sinks.staging import damaged_staging
from tidegate.spark.snapshot import first_position
from tidegate.spark.sources import existing, going_on
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files
from tidegate.storage.inspection import RootOwner, claim_root, read_owner
from tidegate.storage.manifest import Manifest, StageShape
from tidegate.storage.mounted import Mounted
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import Pace, Place, RootGiven, as_given
from tidegate.storage.transfers import Transfers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("tidegate")


class SeenRoot:
    """A root as a pipeline finds it: nothing is claimed or changed, and there may be none yet."""

    def __init__(self, store: Files, pipeline: str) -> None:
        self.pipeline = pipeline
        self.store = store
        self.work = store
        """Where Spark lives, by the same names."""
        self.transfers: Transfers | None = None
        """Of a run that lives on it: how far what goes to a bucket has come, the root's or a table's."""
        self.decisions = StoredDecisions(store)
        owner = read_owner(store)
        if owner is not None:
            self._check_own(owner)
        self.id = "" if owner is None else owner.root_id

    def place_of(self, sink: str, session: SparkSession | None = None) -> SinkPlace:
        """Where a sink of this name is bound to."""
        files = self.store.at(RootPaths.sink(sink))
        return SinkPlace(self.pipeline, sink, files, session, self.id, self.transfers)

    def _check_own(self, owner: RootOwner) -> None:
        if owner.pipeline != self.pipeline:
            raise ForeignRoot(
                f"{self.store.location()} belongs to pipeline {owner.pipeline!r}, not to {self.pipeline!r}; give this "
                f"one a root of its own"
            )


class Root(SeenRoot):
    """A root that this process may open generations on."""

    def __init__(
        self,
        place: RootGiven | Files,
        pipeline: str,
        *,
        fsync: bool = True,
        root_id: str | None = None,
        is_shared: bool = False,
        in_bucket: bool = False,
    ) -> None:
        """`place`: where it is; files of any kind do for one that nobody else comes to. `root_id`: of a root that is
        made now. `is_shared`: others may be alive on it, and write. `in_bucket`: see `Place.for_run`."""
        found: Place | None = None
        if isinstance(place, str | os.PathLike | Place):
            found = as_given(place)
            store, work = found.for_run(fsync=fsync, in_bucket=in_bucket)
        else:
            store = work = place
        if not is_shared:
            store.forget_unwritten()
        super().__init__(store, pipeline)
        self.work = work
        self._place = found
        self.id = self._claim_root(root_id or uuid.uuid4().hex)
        self.pace = Pace() if found is None else found.pace
        if found is not None:
            self.transfers = found.transfers
            found.claimed(self.id)

    def _claim_root(self, root_id: str) -> str:
        """Make the root this pipeline's, under that id unless it has one. Returns the one that it has."""
        owner = read_owner(self.store)
        if owner is None:
            if self.store.list(RootPaths.DECISIONS):
                raise ForeignRoot(
                    f"{self.store.location()} has a decision log but no {RootPaths.PIPELINE}: it is damaged"
                )
            owner = claim_root(self.store, RootOwner(self.pipeline, root_id))
        self._check_own(owner)
        self.store.sync(
            [RootPaths.PIPELINE], missing_ok=True
        )  # the run that made it may have been killed before it had done so
        return owner.root_id

    @property
    def paths(self) -> RootPaths:
        """What lies on this machine of it: the lock, Spark's log."""
        return RootPaths(Path(self.work.location())) if self._place is None else self._place.paths

    @property
    def is_unused(self) -> bool:
        """Whether nothing was ever decided on it."""
        return not self.store.list(RootPaths.DECISIONS)

    def forget_here(self, before: int) -> None:
        """What lies on this machine, and nowhere else, of generations before one."""
        if isinstance(self.work, Mounted):
            self.work.forget_here(before)

    def claim_anew(self) -> None:
        """A run that failed beside this one may have removed the root that it had made."""
        if self._claim_root(self.id) != self.id:
            raise ForeignRoot(f"{self.store.location()} was removed and made anew by another run; start this one again")


def check_staged(manifest: Manifest, sinks: Mapping[str, BoundSink]) -> None:
    """What a sink has staged lies where it stages, or its table was then: it is linked and, once shown, deleted. What
    its table does not show yet is as large as it was."""
    for name, sink in sinks.items():
        stage, shape = manifest.stages.get(name), manifest.shape.get(name)
        if stage is None or shape is None or stage.committable is None:
            continue
        places: list[Files | Home] = [sink.place.files]
        if isinstance(sink, FileSink):
            places.append(sink.staging)
        if shape.table is not None and shape.table.kind == "delta":
            places.append(home_of(shape.table.address))
        try:
            sealed = decode_committable(stage.committable)
        except msgspec.MsgspecError as error:
            raise DamagedCheckpoint(f"what sink {name!r} has sealed cannot be read: {error}") from error
        for file in sealed.files:
            names = [each for place in places if (each := place.name_at(file.path)) is not None]
            if not any(map(RootPaths.is_inside, names)):
                where = sink.table.address if shape.table is None else shape.table.address
                raise DamagedCheckpoint(f"{file.path}, staged for sink {name!r}, is not where that stages: {where}")
        changed, _ = damaged_staging(sink, sealed)  # one that is gone is looked for when the table is known
        if changed is not None:
            raise DamagedCheckpoint(changed)


def check_sources(
    root: Files, generation: int, base: Manifest | None, shape: Mapping[str, StageShape]
) -> dict[str, StageShape]:
    """A source may go on only in what it read. Returns the shape with what was known before of what is read.

    Where the checkpoint knows no position of a source, it goes on from where it first stood, if that is known.
    """
    known = dict(shape)
    for name, now in shape.items():
        if now.inputs:
            continue
        if base is not None and base.stages[name].knows_position:
            then, since = base.shape[name].streams, f"at {checkpoint_name(base.checkpoint_id)}"
        elif (first := first_position(root, generation, name)) is not None:
            then, since = first.streams, "when it first started"
        else:
            known[name] = msgspec.structs.replace(now, streams=tuple(map(existing, now.streams)))
            continue
        known[name] = msgspec.structs.replace(now, streams=going_on(name, since, then, now.streams))
    return known
