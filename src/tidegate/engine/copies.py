"""Tables that show copies of others, by what a root's log has decided: a fork's, and those whose place a fork takes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidegate.engine.carrier import Clock
from tidegate.engine.forks import moved
from tidegate.engine.opening import RootOpening
from tidegate.engine.root import Root
from tidegate.engine.setting_back import PipelineTables, TableBack, manifest_to_set_back_to, tables_in
from tidegate.engine.tables import bound, described
from tidegate.errors import CheckpointNotVisible, SinkFailed
from tidegate.protocol.decision_log import Copied
from tidegate.sinks.contract import BoundSink, CopyingSink, Sink, SinkPlace
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.storage.paths import RootPaths


class Copies:
    """The tables of sinks at new addresses, and what each is to show."""

    def __init__(
        self,
        files: Files,
        root_id: str,
        manifest: Manifest,
        addresses: Mapping[str, TableAddress],
        copies: Mapping[str, Copied],
        sinks: Mapping[str, Sink],
    ) -> None:
        """`manifest`: with these addresses. `sinks`: the pipeline's, for tables that can only be reached by them."""
        self._manifest = manifest
        self._copies = copies
        self.addresses = dict(addresses)
        self.own: dict[str, BoundSink] = {}
        for name, sink in sinks.items():
            if name in copies:
                place = SinkPlace(manifest.pipeline, name, files.at(RootPaths.sink(name)), root=root_id)
                self.own[name] = bound(moved(sink, addresses[name].address), place)
        self._tables = PipelineTables(files, manifest.pipeline, root_id, self.addresses, self.own)

    def look(self) -> tuple[TableBack, ...]:
        return tuple(self._look(name, copied) for name, copied in self._copies.items())

    def _look(self, name: str, copied: Copied) -> TableBack:
        address = self.addresses[name]
        found = TableBack(name, address)
        sink = self._tables.sink(name, at_address=True)
        if not isinstance(sink, CopyingSink):
            way_out = "name the pipeline's file with --file FILE" if sink is None else "it has no copies"
            return msgspec.structs.replace(found, refused=f"{described(address)} cannot be copied to: {way_out}")
        source = TableAddress(address.kind, copied.source)
        try:
            change = sink.look_at_copy(source, self._manifest, replaces=copied.replaces, since=copied.since)
        except (SinkFailed, CheckpointNotVisible) as error:
            return msgspec.structs.replace(found, refused=str(error))
        return msgspec.structs.replace(found, change=change)


def finish_pending(root: Root, sinks: Mapping[str, Sink], clock: Clock | None = None) -> None:
    """See to it that tables are the copies that the root's log has decided, by the sinks of the pipeline at the
    addresses that were decided: until that is done, what the root tells of where they are may be of before."""
    log = root.decisions.read()
    decided = log.setting_back
    if decided is None or decided.brings is None or not (decided.brings.copies or decided.brings.ends_fork):
        return
    manifest = manifest_to_set_back_to(root.store, log, decided.brings.checkpoint_id)
    copying = Copies(root.store, root.id, manifest, tables_in(manifest), decided.brings.copies, sinks)
    RootOpening(root, copying.own, clock=clock).finish()
