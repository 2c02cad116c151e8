"""Taking possession of a root: its owner, and the recovery of what is in it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from tidegate.engine.generation import Opened
from tidegate.errors import (
    DamagedCheckpoint,
    ForeignRoot,
    PipelineChanged,
    RecoveryRefused,
    Superseded,
    TidegateError,
)
from tidegate.protocol.decision_log import ClaimAnswer, DecisionLog
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import (
    Examine,
    Facts,
    FenceSinks,
    RecoveryDecision,
    Refuse,
    Restore,
    SinkFacts,
    in_words,
    recover,
)
from tidegate.sinks.contract import BoundSink, FileSink, decode_committable
from tidegate.spark.definition import StageDefinition
from tidegate.spark.snapshot import first_position
from tidegate.spark.sources import existing, going_on
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import RootOwner, examine, owner_record, read_owner
from tidegate.storage.manifest import Manifest, StageShape
from tidegate.storage.paths import RootPaths

_log = logging.getLogger("tidegate")


class Root:
    """A root that this process may open generations on."""

    def __init__(self, folder: Path, pipeline: str, *, fsync: bool = True) -> None:
        self.paths = RootPaths(folder)
        self.pipeline = pipeline
        self.store: Files = Folder(folder, fsync=fsync)
        self.store.forget_unwritten()
        self.decisions = StoredDecisions(self.store)
        self.id = self._claim_root(uuid.uuid4().hex)
        self._health: dict[int, str | None] = {}
        self._manifests: dict[int, Manifest] = {}

    def _claim_root(self, root_id: str) -> str:
        """Make the root this pipeline's, under that id unless it has one. Returns the one that it has."""
        owner = read_owner(self.store)
        if owner is None:
            if self.store.list(RootPaths.DECISIONS):
                raise ForeignRoot(f"{self.paths.root} has a decision log but no {RootPaths.PIPELINE}: it is damaged")
            self.store.create(RootPaths.PIPELINE, owner_record(RootOwner(self.pipeline, root_id)))
            # Another run may have been first.
            owner = read_owner(self.store) or RootOwner(self.pipeline, root_id)
        if owner.pipeline != self.pipeline:
            raise ForeignRoot(
                f"{self.paths.root} belongs to pipeline {owner.pipeline!r}, not to {self.pipeline!r}; give this one a "
                f"root of its own"
            )
        self.store.sync(
            [RootPaths.PIPELINE], missing_ok=True
        )  # the run that made it may have been killed before it had done so
        return owner.root_id

    @property
    def is_unused(self) -> bool:
        """Whether nothing was ever decided on it."""
        return not self.store.list(RootPaths.DECISIONS)

    # -- opening a generation ---------------------------------------------------------------------

    def recovered(
        self, sinks: Mapping[str, BoundSink], shape: Mapping[str, StageShape]
    ) -> tuple[DecisionLog, Manifest | None]:
        """What the next generation starts from. Changes nothing, but for fencing sinks before a fall-back."""
        log, decision = self._decide(sinks)
        while isinstance(decision, FenceSinks):
            self._fence(sinks, decision.generation)
            log, decision = self._decide(sinks)
        for slot in log.undecided:
            _log.warning(
                "%s is empty or torn, as a loss of power leaves it: it was never decided, and is passed over",
                self.paths.absolute(RootPaths.decision(slot)),
            )
        if isinstance(decision, Restore) and decision.skipped:
            _log.warning("this run %s; no table shows rows past it", in_words(decision, self._health))
        base = self._base(decision)
        self._forget_examined()
        if base is not None:
            check_shape(base, shape)
        return log, base

    def foreseen(self, sinks: Mapping[str, BoundSink]) -> tuple[DecisionLog, Manifest | None]:
        """What `recovered` will say, as far as nothing has to be changed for that.

        What was looked through for this, every file of a checkpoint, the next `recovered` does not look through again.
        """
        self._forget_examined()
        log, decision = self._decide(sinks)
        return log, None if isinstance(decision, FenceSinks) else self._base(decision)

    def _decide(self, sinks: Mapping[str, BoundSink]) -> tuple[DecisionLog, RecoveryDecision]:
        while True:
            # The sinks first: a run that was taken over may go on deciding and committing while we read.
            facts = self._sink_facts(sinks)
            log = self.decisions.read()
            decision = recover(Facts(log, facts, self._health, has_leftovers=self._has_leftovers()))
            if not isinstance(decision, Examine):
                return log, decision
            examined = decision.checkpoint_id
            try:
                self._manifests[examined] = examine(self.store, log, examined)
                check_staged(self._manifests[examined], sinks)
                self._health[examined] = None
            except DamagedCheckpoint as damage:
                if self.decisions.read().next_slot == log.next_slot:
                    self._health[examined] = str(damage)

    def _forget_examined(self) -> None:
        self._health.clear()
        self._manifests.clear()

    def _fence(self, sinks: Mapping[str, BoundSink], generation: int) -> None:
        for sink in sinks.values():
            sink.fence(generation)
        # A table that is gone has nothing to keep a fence in, and another time it would not have either.
        for name, facts in self._sink_facts(sinks).items():
            if facts.fence < generation:
                raise RecoveryRefused(
                    f"the newest checkpoint is damaged, and {sinks[name].describe()} of sink {name!r} is gone or "
                    f"keeps no fence, so an old run could still commit to it what is lost. What to do: restore the "
                    f"table, or start the pipeline on a new root; no checkpoint was restored"
                )

    def _base(self, decision: RecoveryDecision) -> Manifest | None:
        if isinstance(decision, Refuse):
            raise RecoveryRefused(f"{decision.why}. What to do: {decision.way_out}")
        if not isinstance(decision, Restore):
            return None
        return self._manifests[decision.checkpoint.checkpoint_id]

    def open(
        self,
        log: DecisionLog,
        base: Manifest | None,
        shape: dict[str, StageShape],
        claimant: str | None = None,
    ) -> Opened | None:
        """Claim the next generation. None if a checkpoint was completed meanwhile: recover again."""
        claimant = claimant or uuid.uuid4().hex
        # A run that failed beside this one may have removed the root that it had made.
        if self._claim_root(self.id) != self.id:
            raise ForeignRoot(f"{self.paths.root} was removed and made anew by another run; start this one again")
        proposed = log.opening(claimant, None if base is None else base.checkpoint_id)
        answer, log = self.decisions.claim(proposed)
        if answer is ClaimAnswer.RECONSIDER:
            return None
        if answer is ClaimAnswer.SUPERSEDED:
            raise Superseded(proposed.generation, log.generation)
        return Opened(
            self.pipeline,
            proposed.generation,
            claimant,
            log,
            base,
            self.decisions.largest_used(),
            dict(shape),
        )

    # -- facts ------------------------------------------------------------------------------------

    def _has_leftovers(self) -> bool:
        return bool(self.store.list(RootPaths.GENERATIONS))

    def _sink_facts(self, sinks: Mapping[str, BoundSink]) -> dict[str, SinkFacts]:
        facts: dict[str, SinkFacts] = {}
        for name, sink in sinks.items():
            try:
                facts[name] = sink.facts()
            except TidegateError:
                raise
            except Exception as error:
                raise RecoveryRefused(
                    f"could not read {sink.describe()}: {error}. What to do: make it readable and start again; nothing "
                    f"was changed"
                ) from error
        return facts


def check_staged(manifest: Manifest, sinks: Mapping[str, BoundSink]) -> None:
    """What a sink has staged lies where it stages, or its table was then: it is linked and, once shown, deleted."""
    for name, sink in sinks.items():
        stage, shape = manifest.stages.get(name), manifest.shape.get(name)
        if stage is None or shape is None or stage.committable is None:
            continue
        folders = [Path(sink.place.files.location())]
        if isinstance(sink, FileSink):
            folders.append(Path(sink.staging.location()))
        if shape.table is not None and shape.table.kind == "delta":
            folders.append(Path(shape.table.address))
        try:
            staged = decode_committable(stage.committable).files
        except msgspec.MsgspecError as error:
            raise DamagedCheckpoint(f"what sink {name!r} has sealed cannot be read: {error}") from error
        for path in (Path(file.path) for file in staged):
            if ".." in path.parts or not any(path.is_relative_to(folder) for folder in folders):
                raise DamagedCheckpoint(f"{path}, staged for sink {name!r}, is not where that stages: {folders[-1]}")


_WRITTEN: Final = ("kind", "inputs", "output_mode")
"""What of a stage is known as soon as its file is loaded."""


def check_shape(
    manifest: Manifest, shape: Mapping[str, StageShape], compared: tuple[str, ...] = (*_WRITTEN, "schema")
) -> None:
    """A pipeline may be restored only from a checkpoint of the same shape."""
    name = checkpoint_name(manifest.checkpoint_id)
    hint = "start the changed pipeline on a new root, or change it back"
    gone = manifest.shape.keys() - shape.keys()
    new = shape.keys() - manifest.shape.keys()
    if gone or new:
        what = f"stage {min(gone)!r} is gone" if gone else f"stage {min(new)!r} is new"
        raise PipelineChanged(f"the pipeline no longer fits {name}: {what}; {hint}")
    for stage, now in shape.items():
        then = manifest.shape[stage]
        for field in compared:
            if getattr(then, field) != getattr(now, field):
                raise PipelineChanged(
                    f"the pipeline no longer fits {name}: stage {stage!r} had {field} {getattr(then, field)}, now "
                    f"{getattr(now, field)}; {hint}"
                )


def check_written(manifest: Manifest, definitions: Iterable[StageDefinition]) -> None:
    """The same of a pipeline as it is written, before its functions are called."""
    shape = {each.name: StageShape(each.kind, each.inputs, each.output_mode, "") for each in definitions}
    check_shape(manifest, shape, _WRITTEN)


def check_sources(
    root: Files, generation: int, base: Manifest | None, shape: Mapping[str, StageShape]
) -> dict[str, StageShape]:
    """A source may go on only in what it read. Returns the shape with what was known before of what is read.

    Where no checkpoint has seen a batch of a source, it goes on from where it first stood, if that is known.
    """
    known = dict(shape)
    for name, now in shape.items():
        if now.inputs:
            continue
        if base is not None and base.stages[name].cut is not None:
            then, since = base.shape[name].streams, f"at {checkpoint_name(base.checkpoint_id)}"
        elif (first := first_position(root, generation, name)) is not None:
            then, since = first.streams, "when it first started"
        else:
            known[name] = msgspec.structs.replace(now, streams=tuple(map(existing, now.streams)))
            continue
        known[name] = msgspec.structs.replace(now, streams=going_on(name, since, then, now.streams))
    return known
