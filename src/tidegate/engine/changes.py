"""A pipeline that has changed since its checkpoint: what of it may have, and what its stages start from then.

`take_up` gives the checkpoint as if it had been taken with the pipeline as it is now:
1. Stages that have another name keep all that is theirs (`renaming.py`).
2. Stages that are gone are left out, with what is in flight to them. One that keeps state only where that is allowed.
3. A stage without state may read something else, if nothing is on its way to it that it would not get any more.
4. An output may have more columns: what is in flight has null there (`columns.py`).
5. A stage that is new starts empty, behind the checkpoint's barrier: it gets what its inputs write from then on.
So all tables still show the same, but for what a new one has not seen. All else is refused, with both sides shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

import msgspec

from tidegate.engine.columns import added_columns
from tidegate.engine.renaming import renamed, to_rename
from tidegate.errors import InvalidConfig, PipelineChanged
from tidegate.protocol.aligner import CutCause
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import Committable
from tidegate.spark.definition import StageDefinition
from tidegate.spark.snapshot import STATE_FOLDER
from tidegate.storage.file_lists import SnapshotFiles, files_of
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, StageKind, StageShape, StageSnapshot

_WRITTEN: Final = ("kind", "output_mode")
"""What of a stage is known as soon as its file is loaded, and never changes."""
_HINT: Final = "What to do: start the changed pipeline on a new root with new tables, or change it back"

Change = Literal["same", "new", "renamed", "changed", "removed"]
TableChange = Literal["same", "moved", "new", "other"]


class Meant(msgspec.Struct, frozen=True):
    """What its user says of a changed pipeline: the new names of stages, by their old ones, and which state may go."""

    renames: dict[str, str] = {}
    dropped_state: tuple[str, ...] = ()

    def check_has_effect(self) -> None:
        """Refuse it where nothing was stored yet: perhaps it is another root that is meant."""
        if self.renames or self.dropped_state:
            option = "rename" if self.renames else "allow_dropped_state"
            raise InvalidConfig(
                f"{option} is given, which has no effect: the root has no checkpoint, so the run starts from the "
                f"beginning; correct the root, or leave it out"
            )


class StageChange(msgspec.Struct, frozen=True):
    """What becomes of a stage. `was`: its name in the checkpoint. `has_state`: that keeps state of it."""

    name: str
    kind: StageKind
    change: Change
    was: str | None
    has_state: bool = False
    why: str | None = None
    """What it means, for people; None: nothing."""


class TakenUp(msgspec.Struct, frozen=True):
    """`base`: the checkpoint as the pipeline that is now could have taken it. `then`: as it is."""

    then: Manifest
    base: Manifest
    stages: tuple[StageChange, ...]
    told: tuple[str, ...]
    """What has changed, and what that means, for people."""
    rewired: frozenset[str] = frozenset()
    """Those that read something else than before."""

    def those(self, change: Change, kind: StageKind | None = None) -> list[StageChange]:
        return [each for each in self.stages if each.change == change and kind in (None, each.kind)]

    @property
    def new(self) -> list[str]:
        return [each.name for each in self.those("new")]


def take_up(
    files: Files, then: Manifest, shape: Mapping[str, StageShape], meant: Meant | None = None, *, is_built: bool = True
) -> TakenUp:
    """`files`: the root's. `is_built`: the functions of the pipeline were called, so that it is known what stages write
    and sources read. Refuses what does not fit."""
    meant = Meant() if meant is None else meant
    renames, told = to_rename(meant.renames, then)
    was = {new: old for old, new in renames.items()}
    taking = _Taking(files, renamed(then, renames), shape, meant, was)
    # Those that are gone first: where one of them has another name now, that is what there is to say.
    gone = [taking.gone(name) for name in taking.base.stages if name not in shape]
    known = [taking.known(name) for name in shape if name in taking.base.stages]
    stages = [*known, *gone, *(taking.new(name) for name in shape if name not in taking.base.stages)]
    if is_built:
        taking.check_sources()
        taking.check_columns()
    told += [each.why for each in stages if each.why is not None]
    told += taking.without_effect()
    return TakenUp(then, taking.result(), tuple(stages), tuple(told), frozenset(taking.rewired))


def check_written(
    files: Files, manifest: Manifest, definitions: Iterable[StageDefinition], meant: Meant | None = None
) -> TakenUp:
    """The same of a pipeline as it is written, before its functions are called."""
    shape = {each.name: StageShape(each.kind, each.inputs, each.output_mode, "") for each in definitions}
    return take_up(files, manifest, shape, meant, is_built=False)


def keeps_state(files: Files, manifest: Manifest, stage: str) -> bool:
    """Whether a checkpoint has state of a stage. Where it does not say what, by whether there are files of it."""
    snapshot, known = manifest.stages[stage], manifest.shape[stage].state
    if snapshot.cut is None:
        return False
    if known is not None:
        return bool(known.operators)
    return any(each.name.startswith(STATE_FOLDER) for each in files_of(files, stage, snapshot.files))


class _Taking:
    """Of one checkpoint, in which stages have their new names."""

    def __init__(
        self, files: Files, base: Manifest, shape: Mapping[str, StageShape], meant: Meant, was: Mapping[str, str]
    ) -> None:
        self.base = base
        self._files = files
        self._shape = shape
        self._meant = meant
        self._was = was
        self._since = checkpoint_name(base.checkpoint_id)
        self.rewired: dict[str, StageSnapshot] = {}

    def _refusal(self, why: str, hint: str = _HINT) -> PipelineChanged:
        return PipelineChanged(f"the pipeline no longer fits {self._since}: {why}. {hint}; nothing was changed")

    def _keeps_state(self, name: str) -> bool:
        return keeps_state(self._files, self.base, name)

    # -- those that stay --------------------------------------------------------------------------

    def known(self, name: str) -> StageChange:
        then, now = self.base.shape[name], self._shape[name]
        for field in _WRITTEN:
            if getattr(then, field) != getattr(now, field):
                raise self._refusal(f"stage {name!r} had {field} {getattr(then, field)}, now {getattr(now, field)}")
        whys: list[str] = []
        if name in self._was:
            whys.append(f"goes on as what was {self._was[name]!r} at {self._since}")
        if then.inputs != now.inputs:
            self.rewired[name] = self._reading_others(name, then.inputs, now.inputs)
            whys.append(
                f"reads {', '.join(now.inputs)} since {self._since}, before {', '.join(then.inputs)}: it goes on "
                f"behind what it has read"
            )
        added = added_columns(then.schema, now.schema) if now.schema else ()
        if added:
            whys.append(
                f"has {', '.join(added)} in addition since {self._since}: what was written before is null there"
            )
        change: Change = "renamed" if name in self._was else "changed" if whys else "same"
        why = f"{now.kind} {name!r} {'; it '.join(whys)}" if whys else None
        return StageChange(name, now.kind, change, self._was.get(name, name), self._keeps_state(name), why)

    def _reading_others(self, name: str, then: tuple[str, ...], now: tuple[str, ...]) -> StageSnapshot:
        """A stage behind the barrier in what it reads now. Its query begins anew, with the batch after its last."""
        what = f"stage {name!r} had inputs {', '.join(then)}, now {', '.join(now)}"
        renamed = "".join(self._perhaps_renamed(read) for read in then if read not in self._shape)
        if self._keeps_state(name):
            raise self._refusal(f"{what}, and it keeps state, which was made of what it read", f"{_HINT}{renamed}")
        for read in then:
            if read not in now and (between := self._on_its_way(read, name)) is not None:
                raise self._refusal(
                    f"{what}, and at {self._since} something was in flight from {between[0]!r} to {between[1]!r}, "
                    f"which it would never get",
                    "What to do: start the pipeline as it was once more, and stop it (`tidegate stop`) after an "
                    f"aligned checkpoint, in which nothing is in flight (without --unaligned-after all are){renamed}",
                )
        part = self.base.stages[name]
        return msgspec.structs.replace(
            part,
            files=SnapshotFiles(),
            positions={read: part.positions.get(read, 0) if read in then else self._barrier_in(read) for read in now},
            in_flight={read: segments for read, segments in part.in_flight.items() if read in now},
            watermark_ms=None,
            new_bytes=0,
            total_bytes=0,
        )

    def _barrier_in(self, read: str) -> int:
        """Where the checkpoint's barrier stands in what a stage writes: at the start of what a new one does."""
        stage = self.base.stages.get(read)
        return 0 if stage is None else stage.output_sequence

    def _on_its_way(self, writer: str, reader: str) -> tuple[str, str] | None:
        """Where something was in flight that would have come to a stage through one that it no longer reads. A writer
        that stays hands on what comes to it, to whatever reads it now."""
        part = self.base.stages[reader]
        if part.in_flight.get(writer) or part.positions.get(writer, 0) != self._barrier_in(writer):
            return writer, reader
        if writer in self._shape:
            return None
        before = (self._on_its_way(each, writer) for each in self.base.shape[writer].inputs)
        return next((each for each in before if each is not None), None)

    def check_columns(self) -> None:
        for name, now in self._shape.items():
            then = self.base.shape.get(name)
            if then is None or then.schema == now.schema:
                continue
            what = f"stage {name!r} had schema {then.schema}, now {now.schema}"
            if added_columns(then.schema, now.schema) is None:
                raise self._refusal(what)
            if then.state is None and self._keeps_state(name):
                raise self._refusal(f"{what}, and it keeps state of which the checkpoint does not tell what it is")

    # -- those that are gone ----------------------------------------------------------------------

    def gone(self, name: str) -> StageChange:
        kind, has_state = self.base.shape[name].kind, self._keeps_state(name)
        if has_state and name not in self._meant.dropped_state:
            raise self._refusal(
                f"stage {name!r} is gone, and {self._since} has state of it",
                f"What to do: give --allow-dropped-state {name} if that may go{self._perhaps_renamed(name)}; or put "
                f"the stage back",
            )
        lost = list(self._lost_with(name, kind, has_state=has_state))
        why = f"{kind} {name!r} is gone since {self._since}: {', '.join(lost)}"
        return StageChange(name, kind, "removed", name, has_state, why)

    def _lost_with(self, name: str, kind: StageKind, *, has_state: bool) -> Iterator[str]:
        if has_state:
            yield "its state is dropped, as it was allowed"
        if kind == "source":
            yield "where it stood is forgotten"
        elif kind == "sink":
            yield "its table stays as it is"
        elif not has_state:
            yield "it has no state"
        if any(self.base.stages[name].in_flight.values()):
            yield "what was in flight to it is dropped"

    def _perhaps_renamed(self, name: str) -> str:
        kind = self.base.shape[name].kind
        new = [each for each, now in self._shape.items() if each not in self.base.stages and now.kind == kind]
        return "" if not new else f"; --rename {name}={new[0]} if that is its name now"

    def check_sources(self) -> None:
        """Refuse one that reads anew, under another name, what one that is gone has read."""
        for name in (each for each in self.base.stages if each not in self._shape):
            then = self.base.shape[name]
            if then.kind != "source" or not self.base.stages[name].knows_position:
                continue
            for new, now in self._shape.items():
                if new not in self.base.stages and now.streams and _reads(now) == _reads(then):
                    raise self._refusal(
                        f"source {name!r} is gone, and {new!r}, which is new, would read the same from where it says "
                        f"itself",
                        f"What to do: give --rename {name}={new}, to go on where {name!r} stood; or put {name!r} back",
                    )

    def without_effect(self) -> list[str]:
        """What is allowed and not needed: it may be done, so that the option stays in place without harm."""
        gone = {
            name
            for name, each in self.base.shape.items()
            if name not in self._shape and (each.kind == "sink" or self._keeps_state(name))
        }
        return [
            f"allow_dropped_state {name} has no effect: {self._since} has no state of {name!r}"
            for name in self._meant.dropped_state
            if name not in gone
        ]

    # -- those that are new -----------------------------------------------------------------------

    def new(self, name: str) -> StageChange:
        kind = self._shape[name].kind
        how = "starts where it says itself" if kind == "source" else "gets what its inputs write behind that"
        return StageChange(name, kind, "new", None, why=f"{kind} {name!r} is new since {self._since}: it {how}")

    def _before_its_first_batch(self, name: str) -> StageSnapshot:
        now = self._shape[name]
        return StageSnapshot(
            cut=None,
            cause=CutCause.ALIGNED,
            over_bound=False,
            files=SnapshotFiles(),
            positions={read: self._barrier_in(read) for read in now.inputs},
            output_sequence=0,
            in_flight={},
            source_positions=(),
            watermark_ms=None,
            committable=Committable(-1).encode() if now.kind == "sink" else None,
            barrier_ms=0,
            alignment_ms=0,
            snapshot_ms=0,
            new_bytes=0,
            total_bytes=0,
        )

    # -- all together -----------------------------------------------------------------------------

    def result(self) -> Manifest:
        base = self.base
        stages = {name: self.rewired.get(name, each) for name, each in base.stages.items() if name in self._shape}
        stages |= {name: self._before_its_first_batch(name) for name in self._shape if name not in base.stages}
        shape = {name: base.shape.get(name, now) for name, now in self._shape.items()}
        chains = {name: each for name, each in base.chains.items() if {name, *each} <= self._shape.keys()}
        return msgspec.structs.replace(base, stages=stages, shape=shape, chains=chains)


def _reads(shape: StageShape) -> list[tuple[str, dict[str, str]]]:
    return [(each.format, each.reads) for each in shape.streams]
