"""Setting the tables of a pipeline back to a checkpoint: which they are, what it would do to each, and doing it.

All tables that a retained checkpoint knows go back together, also one whose sink the pipeline no longer has: else it
would show more than the others. They are reached by what manifests know of them, so no pipeline's file is needed;
where the pipeline itself does it, by its own sinks. A table that is left to its user is looked at by the next run,
which refuses it if it does not fit.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import msgspec

from tidegate.engine.kill_points import Step, reached
from tidegate.errors import CheckpointNotVisible, DamagedCheckpoint, RecoveryRefused, SinkFailed
from tidegate.protocol.decision_log import DecisionLog, GenerationOpened
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import BoundSink, ReversibleSink, SettingBack, SinkPlace
from tidegate.sinks.outside import sink_at
from tidegate.storage.files import Files
from tidegate.storage.inspection import read_manifest, retained_manifests
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.storage.paths import RootPaths

_log = logging.getLogger("tidegate")


class TableBack(msgspec.Struct, frozen=True):
    """A sink's table, and what is to become of it. `refused`: why it cannot be set back; `is_left`: its user sees to
    it."""

    sink: str
    table: TableAddress
    change: SettingBack = SettingBack()
    refused: str | None = None
    is_left: bool = False


class PipelineTables:
    """Of all sinks that a root knows."""

    def __init__(
        self, root: Files, pipeline: str, root_id: str, log: DecisionLog, own: Mapping[str, BoundSink] | None = None
    ) -> None:
        """`own`: the sinks of the pipeline that is to run, where there is one."""
        self._root = root
        self._pipeline = pipeline
        self._root_id = root_id
        self._own = own or {}
        # The newest says where a table is.
        self.addresses: dict[str, TableAddress] = {}
        for manifest in retained_manifests(root, log):
            for name, shape in manifest.shape.items():
                if shape.table is not None:
                    self.addresses.setdefault(name, shape.table)

    def _sink(self, name: str) -> BoundSink | None:
        if name in self._own:
            return self._own[name]
        place = SinkPlace(self._pipeline, name, self._root.at(RootPaths.sink(name)), root=self._root_id)
        return sink_at(self.addresses[name], place)

    def look_back(self, to: Manifest, left: Collection[str] = ()) -> list[TableBack]:
        """What setting each of them back would do. `left`: those that their user sees to."""
        return [self._look_back(to, name, is_left=name in left) for name in self.addresses]

    def _look_back(self, to: Manifest, name: str, *, is_left: bool) -> TableBack:
        found = TableBack(name, self.addresses[name], is_left=is_left)
        if is_left:
            return found
        sink = self._sink(name)
        if not isinstance(sink, ReversibleSink):
            kind = self.addresses[name].kind
            refused = f"a table of kind {kind} cannot be set back: put it back yourself, and say so with --leave {name}"
            return msgspec.structs.replace(found, refused=refused)
        try:
            return msgspec.structs.replace(found, change=sink.look_back(to))
        except (SinkFailed, CheckpointNotVisible) as error:
            return msgspec.structs.replace(found, refused=str(error))

    def set_back(self, to: Manifest, decided: GenerationOpened) -> None:
        """One after the other, each in one step. What is done already is as good."""
        for name in {**self.addresses, **self._own}:
            sink = self._sink(name)
            if name in decided.left or not isinstance(sink, ReversibleSink):
                continue
            if name not in self.addresses and not sink.facts().committed_epoch:
                continue  # it is new, and has written nothing
            try:
                sink.set_back(to, decided.generation, discards_others=decided.discards_others)
            except CheckpointNotVisible as error:
                raise SinkFailed(f"{sink.describe()} of sink {name!r} cannot be set back: {error}") from error
            _log.info("sink %s: %s is at %s", name, sink.describe(), checkpoint_name(to.checkpoint_id))
            reached(Step.TABLE_SET_BACK)


def manifest_to_set_back_to(root: Files, log: DecisionLog, checkpoint_id: int) -> Manifest:
    record = log.completed(checkpoint_id)
    name = checkpoint_name(checkpoint_id)
    try:
        if record is None:
            raise DamagedCheckpoint("its record is gone")
        return read_manifest(root, record)
    except DamagedCheckpoint as damage:
        raise RecoveryRefused(
            f"it was decided to set the tables back to {name}, which is damaged since: {damage}. What to do: restore "
            f"the damaged file from a backup, or decide for another one: `tidegate restore --to`"
        ) from damage
