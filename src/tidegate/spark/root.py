"""Taking possession of a root: its lock, its owner, and the recovery of what is in it."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tidegate.errors import (
    DamagedCheckpoint,
    ForeignRoot,
    InvalidConfig,
    PipelineChanged,
    RecoveryRefused,
    RootInUse,
    Superseded,
    TidegateError,
)
from tidegate.protocol.decision_log import CheckpointCompleted, ClaimAnswer, DecisionLog
from tidegate.protocol.recovery import (
    Examine,
    Facts,
    FenceSinks,
    RecoveryDecision,
    Refuse,
    Restore,
    SinkFacts,
    checkpoint_name,
    recover,
)
from tidegate.sinks.contract import Sink, SinkPlace
from tidegate.spark.generation import Opened
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import checksum
from tidegate.storage.manifest import Manifest, StageShape, decode_manifest
from tidegate.storage.paths import RootPaths
from tidegate.storage.store import Store


class RootLock:
    """Held by the run that lives. It dies with its process, so a restart after a kill waits for nothing."""

    def __init__(self, path: Path, *, take_over: bool = False) -> None:
        self._path = path
        self._take_over = take_over
        self._file: int | None = None

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidConfig(f"the root {self._path.parent} cannot be a folder: {error}") from error
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._take_over:
                os.close(handle)
                return self  # the decision log, not the lock, keeps the other run from doing harm
            owner = os.read(handle, 100).decode(errors="replace").strip()
            os.close(handle)
            raise RootInUse(
                f"another run is alive on {self._path.parent} (process {owner or 'unknown'}); stop it first, "
                f"or take over with --take-over if it hangs"
            ) from None
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        self._file = handle
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Owner(msgspec.Struct, forbid_unknown_fields=True):
    pipeline: str


class Root:
    """A root that this process may open generations on."""

    def __init__(self, folder: Path, pipeline: str) -> None:
        self.paths = RootPaths(folder)
        self.pipeline = pipeline
        self.store = Store(folder)
        self.decisions = StoredDecisions(self.store)
        self._claim_root()

    def _claim_root(self) -> None:
        data = self.store.get(RootPaths.PIPELINE)
        if data is None:
            if self.store.list(RootPaths.DECISIONS):
                raise ForeignRoot(f"{self.paths.root} has a decision log but no {RootPaths.PIPELINE}: it is damaged")
            self.store.create(RootPaths.PIPELINE, msgspec.json.encode(_Owner(self.pipeline)))
            return
        try:
            owner = msgspec.json.decode(data, type=_Owner)
        except msgspec.MsgspecError as error:
            raise ForeignRoot(f"{self.paths.root / RootPaths.PIPELINE} cannot be read: {error}") from error
        if owner.pipeline != self.pipeline:
            raise ForeignRoot(
                f"{self.paths.root} belongs to pipeline {owner.pipeline!r}, not to {self.pipeline!r}; give this one a "
                f"root of its own"
            )

    # -- opening a generation ---------------------------------------------------------------------

    def recovered(
        self, sinks: Mapping[str, tuple[Sink, SinkPlace]], shape: Mapping[str, StageShape]
    ) -> tuple[DecisionLog, Manifest | None]:
        """What the next generation starts from. Changes nothing, but for fencing sinks before a fall-back."""
        health: dict[int, str | None] = {}
        manifests: dict[int, Manifest] = {}
        while True:
            # The sinks first: a run that was taken over may go on deciding and committing while we read.
            facts = self._sink_facts(sinks)
            log = self.decisions.read()
            decision = recover(Facts(log, facts, health, has_leftovers=self._has_leftovers()))
            match decision:
                case Examine(checkpoint_id):
                    try:
                        manifests[checkpoint_id] = self.examine(log, checkpoint_id)
                        health[checkpoint_id] = None
                    except DamagedCheckpoint as damage:
                        if self.decisions.read().next_slot == log.next_slot:
                            health[checkpoint_id] = str(damage)
                case FenceSinks(generation):
                    for sink, place in sinks.values():
                        sink.fence(place, generation)
                case _:
                    return log, self._base(decision, manifests, shape)

    def _base(
        self, decision: RecoveryDecision, manifests: dict[int, Manifest], shape: Mapping[str, StageShape]
    ) -> Manifest | None:
        if isinstance(decision, Refuse):
            raise RecoveryRefused(f"{decision.why}. What to do: {decision.way_out}")
        if not isinstance(decision, Restore):
            return None
        manifest = manifests[decision.checkpoint.checkpoint_id]
        check_shape(manifest, shape)
        return manifest

    def open(
        self,
        log: DecisionLog,
        base: Manifest | None,
        shape: dict[str, StageShape],
        claimant: str | None = None,
    ) -> Opened | None:
        """Claim the next generation. None if a checkpoint was completed meanwhile: recover again."""
        claimant = claimant or uuid.uuid4().hex
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

    def _sink_facts(self, sinks: Mapping[str, tuple[Sink, SinkPlace]]) -> dict[str, SinkFacts]:
        facts: dict[str, SinkFacts] = {}
        for name, (sink, place) in sinks.items():
            try:
                facts[name] = sink.facts(place)
            except TidegateError:
                raise
            except Exception as error:
                raise RecoveryRefused(
                    f"could not read {sink.describe()}: {error}. What to do: make it readable and start again; nothing "
                    f"was changed"
                ) from error
        return facts

    def examine(self, log: DecisionLog, checkpoint_id: int) -> Manifest:
        """Read a checkpoint whole: its manifest, and every file that it refers to, against their checksums."""
        record = log.completed(checkpoint_id)
        if record is None:
            raise DamagedCheckpoint(f"{checkpoint_name(checkpoint_id)} is not in the decision log")
        manifest = self.manifest(record)
        for stage, snapshot in manifest.stages.items():
            for file in snapshot.files:
                path = self.paths.absolute(file.stored)
                try:
                    found = checksum(path)
                except FileNotFoundError:
                    raise DamagedCheckpoint(f"{file.stored} of stage {stage!r} is gone") from None
                if found != (file.size_bytes, file.sha256):
                    raise DamagedCheckpoint(f"{file.stored} of stage {stage!r} is not what it was: checksum differs")
            for segments in snapshot.in_flight.values():
                for each in (each for segment in segments for each in segment.files):
                    with suppress(FileNotFoundError):
                        if self.paths.absolute(each.path).stat().st_size == each.size_bytes:
                            continue
                    raise DamagedCheckpoint(f"{each.path}, in flight to stage {stage!r}, is gone or cut off")
        return manifest

    def manifest(self, record: CheckpointCompleted) -> Manifest:
        data = self.store.get(record.manifest)
        if data is None:
            raise DamagedCheckpoint(f"{record.manifest} is gone")
        return decode_manifest(data, record.manifest_sha256, record.manifest)


def check_shape(manifest: Manifest, shape: Mapping[str, StageShape]) -> None:
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
        for field in ("kind", "inputs", "output_mode", "schema"):
            if getattr(then, field) != getattr(now, field):
                raise PipelineChanged(
                    f"the pipeline no longer fits {name}: stage {stage!r} had {field} {getattr(then, field)}, now "
                    f"{getattr(now, field)}; {hint}"
                )
