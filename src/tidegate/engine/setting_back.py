"""Setting the tables of a pipeline back to a checkpoint: which they are, what it would do to each, and doing it.

All tables that a retained checkpoint knows go back together, also one whose sink the pipeline no longer has: else it
would show more than the others. They are reached by what manifests know of them, so no pipeline's file is needed;
where the pipeline itself does it, by its own sinks. A table that is left to its user is looked at by the next run,
which refuses it if it does not fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from tidegate.engine.kill_points import Step, reached
from tidegate.engine.tables import described
from tidegate.errors import CheckpointNotVisible, DamagedCheckpoint, RecoveryRefused, SinkFailed
from tidegate.protocol.decision_log import Copied, DecisionLog, GenerationOpened
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import (
    BoundSink,
    CopyingSink,
    ReversibleSink,
    SettingBack,
    SinkPlace,
    staged_generation,
)
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


def first_refusal(tables: Iterable[TableBack]) -> str | None:
    """Why it cannot be done to all of them."""
    return next((f"sink {each.sink!r}: {each.refused}" for each in tables if each.refused is not None), None)


def others_in(tables: Iterable[TableBack]) -> list[str]:
    """What others have written to any of them since."""
    return [f"{each.table.address}: {other}" for each in tables for other in each.change.others]


def known_tables(root: Files, log: DecisionLog) -> dict[str, TableAddress]:
    """Where the tables of a root's sinks are. Of each the newest checkpoint that knows it says so."""
    addresses: dict[str, TableAddress] = {}
    for manifest in retained_manifests(root, log):
        for name, table in tables_in(manifest).items():
            addresses.setdefault(name, table)
    return addresses


def tables_in(manifest: Manifest) -> dict[str, TableAddress]:
    """Where the tables of a checkpoint's sinks were."""
    return {name: shape.table for name, shape in manifest.shape.items() if shape.table is not None}


class PipelineTables:
    """Of all sinks that a root knows."""

    def __init__(
        self,
        root: Files,
        pipeline: str,
        root_id: str,
        addresses: Mapping[str, TableAddress],
        own: Mapping[str, BoundSink] | None = None,
    ) -> None:
        """`own`: the sinks of the pipeline that is to run, where there is one."""
        self._root = root
        self._pipeline = pipeline
        self._root_id = root_id
        self._own = own or {}
        self.addresses = addresses

    def sink(self, name: str, *, at_address: bool = False) -> BoundSink | None:
        """None: it cannot be reached without the pipeline. `at_address`: the pipeline's own only if its table is where
        this says, not where that was moved to."""
        own = self._own.get(name)
        if own is not None and (not at_address or own.table.address == self.addresses[name].address):
            return own
        place = SinkPlace(self._pipeline, name, self._root.at(RootPaths.sink(name)), root=self._root_id)
        return sink_at(self.addresses[name], place)

    def facts(self) -> dict[str, SinkFacts]:
        """Of those that can be reached."""
        sinks = {name: self.sink(name) for name in self.addresses}
        return {name: sink.facts() for name, sink in sinks.items() if sink is not None}

    def staged_generation(self) -> int:
        """The largest generation that has staged for any of those that can be reached."""
        sinks = (self.sink(name) for name in self.addresses)
        return max((staged_generation(sink) for sink in sinks if sink is not None), default=0)

    def look_back(self, to: Manifest, left: Collection[str] = (), *, takes_over: bool = False) -> list[TableBack]:
        """What setting each of them back would do. `left`: those that their user sees to."""
        return [
            self._look(name, is_left=name in left, look=lambda sink: sink.look_back(to, takes_over=takes_over))
            for name in self.addresses
        ]

    def _look(self, name: str, *, is_left: bool, look: Callable[[ReversibleSink], SettingBack]) -> TableBack:
        found = TableBack(name, self.addresses[name], is_left=is_left)
        if is_left:
            return found
        sink = self.sink(name)
        if not isinstance(sink, ReversibleSink):
            return msgspec.structs.replace(found, refused=self._why_not(name, sink))
        try:
            return msgspec.structs.replace(found, change=look(sink))
        except (SinkFailed, CheckpointNotVisible) as error:
            return msgspec.structs.replace(found, refused=str(error))

    def _why_not(self, name: str, sink: BoundSink | None) -> str:
        """Why a table cannot be set back."""
        table = described(self.addresses[name])
        if sink is None:
            return (
                f"{table} can only be reached by the pipeline: name its file with --file FILE, or put the table "
                f"back yourself, and say so with --leave {name}"
            )
        return f"{table} cannot be set back: put it back yourself, and say so with --leave {name}"

    def set_back(self, to: Manifest, decided: GenerationOpened) -> None:
        """One after the other, each in one step. What is done already is as good."""
        copies = {} if decided.brings is None else decided.brings.copies
        for name in {**self.addresses, **self._own}:
            if name in decided.left:
                continue
            copied = copies.get(name)
            try:
                done = (
                    self._set_back(name, to, decided) if copied is None else self._show_copy(name, to, decided, copied)
                )
            except CheckpointNotVisible as error:
                raise SinkFailed(f"the table of sink {name!r} cannot be set back: {error}") from error
            if done is not None:
                _log.info("sink %s: %s is at %s", name, done.describe(), checkpoint_name(to.checkpoint_id))
                reached(Step.TABLE_SET_BACK)

    def _set_back(self, name: str, to: Manifest, decided: GenerationOpened) -> BoundSink | None:
        """None: there was nothing to do."""
        sink = self.sink(name)
        if not isinstance(sink, ReversibleSink):
            return None
        if name not in self.addresses and not sink.facts().committed_epoch:
            return None  # it is new, and has written nothing
        sink.set_back(to, decided.generation, discards_others=decided.discards_others, takes_over=decided.takes_over)
        return sink

    def _show_copy(self, name: str, to: Manifest, decided: GenerationOpened, copied: Copied) -> BoundSink:
        sink, address = self.sink(name, at_address=True), self.addresses[name]
        if not isinstance(sink, CopyingSink):
            raise SinkFailed(
                f"{described(address)} of sink {name!r} is to show what {copied.source} does, and can only be reached "
                f"by the pipeline; name its file with --file FILE"
            )
        source = TableAddress(address.kind, copied.source)
        since = None if decided.discards_others else copied.since
        sink.show_copy(source, to, decided.generation, since=since, replaces=copied.replaces)
        return sink


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
