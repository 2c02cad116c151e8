"""The critical path of a checkpoint: what it waited for, from its trigger until all tables showed it.

Walked from the end: a checkpoint is shown when the last sink has committed it, which begins when it is decided, which
takes the word of the last stage, which was cut when it had consumed what came before its last barrier, which its input
had sent when it was cut, … down to a source. Whatever else was done meanwhile did not make it any longer.

Of a checkpoint that is under way, or was aborted, the walk begins at the stage that the others wait for.

Importing this brings no PySpark.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from tidegate.engine.status import CheckpointStatus, StagePart

PathPhase = Literal[
    "beginning", "waiting", "aligning", "catching_up", "recording", "storing", "quorum", "deciding", "committing"
]


class PathStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint waited for, for a while."""

    phase: Annotated[
        PathPhase,
        Meta(
            description="`beginning`: its id is marked; of a stage: `waiting` for its first barrier, `aligning`: for "
            "the others, `catching_up`: consuming what came before them, `recording` what is in flight until late "
            "barriers come, `storing` its part; `quorum`: not every instance has said that it is ready; `deciding`: it "
            "is written to the decision log; `committing`: a sink makes it visible"
        ),
    ]
    of: Annotated[str | None, Meta(description="the stage, sink or instance; null: of none")] = None
    from_ms: Annotated[int, Meta(description="since when, after the trigger")]
    to_ms: Annotated[int, Meta(description="until when, after the trigger")]
    waits_for: Annotated[str | None, Meta(description="the stage whose barrier is awaited, if that is known")] = None
    segments: Annotated[int | None, Meta(description="`catching_up`: how many segments were to be consumed")] = None

    @property
    def took_ms(self) -> int:
        return self.to_ms - self.from_ms


def critical_path(status: CheckpointStatus) -> tuple[PathStep, ...]:
    """What it waited for, one after the other, without a gap: from the trigger until all tables showed it, or as far as
    it has come."""
    return tuple(_Walk(status).steps())


def what_it_waited_for(status: CheckpointStatus, sinks: Collection[str] = ()) -> str | None:
    """For people: what took longest of that. None: it took no time, or nothing is known of it. `sinks`: which of its
    stages are."""
    path = critical_path(status)
    longest = max(path, key=lambda step: step.took_ms, default=None)
    if longest is None:
        return None
    return f"{told_ms(longest.took_ms)} of {told_ms(path[-1].to_ms)}: {in_words(longest, sinks)}"


def in_words(step: PathStep, sinks: Collection[str] = ()) -> str:
    """For people."""
    stage = f"sink {step.of}" if step.of in sinks else f"{step.of}"
    count = "what came before its barriers" if step.segments is None else _segments(step.segments)
    aligning = "aligning" if step.waits_for is None else f"waiting for the barrier of {step.waits_for}"
    instance = "an instance" if step.of is None else f"instance {step.of}"
    words: dict[PathPhase, str] = {
        "beginning": "marking its number in the root",
        "waiting": f"waiting for a barrier to reach {stage}",
        "aligning": f"{stage} {aligning}",
        "catching_up": f"{stage} working off {count}",
        "recording": f"{stage} waiting for the late barrier of {step.waits_for}",
        "storing": f"storing the snapshot of {stage}",
        "quorum": f"{instance} had not said that it was ready",
        "deciding": "writing its manifest and its record",
        "committing": f"committing sink {step.of}",
    }
    return words[step.phase]


def _segments(count: int) -> str:
    return "1 segment" if count == 1 else f"{count:,} segments"


def told_ms(duration_ms: int) -> str:
    if duration_ms < 1000:
        return f"{duration_ms} ms"
    if duration_ms < 60_000:
        return f"{duration_ms / 1000:.1f} s"
    minutes, seconds = divmod(round(duration_ms / 1000), 60)
    return f"{minutes} min {seconds} s"


_HOW_FAR: Final = ("declined", "storing", "recording", "catching_up", "aligning", "waiting", "done")
"""Of stages that are not done, the others wait for the one that comes first here."""


class _Walk:
    """Backwards, from the end."""

    def __init__(self, status: CheckpointStatus) -> None:
        self._status = status
        self._begun_ms = status.begun_ms or 0
        self._steps: list[PathStep] = []
        known = (status.shown_ms, status.decided_ms, status.prepared_ms, status.duration_ms)
        self._at_ms = next((each for each in known if each is not None), 0)

    def _back_to(
        self,
        from_ms: int,
        phase: PathPhase,
        of: str | None = None,
        waits_for: str | None = None,
        segments: int | None = None,
    ) -> None:
        """Clocks of other processes, and rounding, may have it the other way round: then it took no time."""
        from_ms = max(0, from_ms)
        if from_ms < self._at_ms:
            self._steps.append(
                PathStep(phase=phase, of=of, from_ms=from_ms, to_ms=self._at_ms, waits_for=waits_for, segments=segments)
            )
            self._at_ms = from_ms

    def steps(self) -> list[PathStep]:
        status = self._status
        if status.shown_ms is not None and status.decided_ms is not None:
            ends = {sink: each.begun_ms + (each.took_ms or 0) for sink, each in status.commits.items()}
            self._back_to(status.decided_ms, "committing", max(ends, key=ends.__getitem__) if ends else None)
        if status.prepared_ms is not None:
            self._back_to(status.prepared_ms, "deciding")
        if status.stages:
            last = self._last_stage()
            part = status.stages[last]
            if part.progress == "done" and status.prepared_ms is not None:
                self._back_to(self._cut_ms(part) + (part.stored_ms or part.snapshot_ms or 0), "quorum", self._late())
            self._walk(last)
        self._back_to(0, "beginning")
        return self._steps[::-1]

    def _late(self) -> str | None:
        """The instance that was ready last."""
        acks = self._status.acks
        return max(acks, key=acks.__getitem__) if acks else None

    def _last_stage(self) -> str:
        """The one that was ready last, or that others wait for."""
        stages = self._status.stages
        undone = {name: part for name, part in stages.items() if part.progress != "done"}
        if undone:
            # Of several, the one that got its barrier first: it takes longest.
            return min(undone, key=lambda name: (_HOW_FAR.index(undone[name].progress), undone[name].barrier_ms or 0))
        ends = {name: self._cut_ms(part) + (part.stored_ms or part.snapshot_ms or 0) for name, part in stages.items()}
        return max(ends, key=ends.__getitem__)

    def _barrier_ms(self, part: StagePart) -> int:
        """When its first barrier came. Of one elsewhere that is not cut yet, only how long ago that was is known."""
        if part.barrier_ms is not None:
            return self._begun_ms + part.barrier_ms
        return max(self._begun_ms, (self._status.duration_ms or 0) - (part.alignment_ms or 0))

    def _cut_ms(self, part: StagePart) -> int:
        return self._barrier_ms(part) + (part.alignment_ms or 0)

    def _walk(self, stage: str) -> None:
        stages, seen = self._status.stages, set[str]()
        part = stages[stage]
        if part.progress == "waiting":
            self._back_to(self._begun_ms, "waiting", stage)
            return
        if part.progress == "recording":
            self._back_to(self._cut_ms(part), "recording", stage, ", ".join(part.waits_for) or None)
        elif part.progress not in ("aligning", "catching_up"):
            self._back_to(self._cut_ms(part) + part.recorded_ms, "storing", stage)
            stage = self._past_late_barriers(stage)
        while stage not in seen:
            seen.add(stage)
            part = stages[stage]
            sender = part.last_barrier_from
            if part.aligned_ms is None or self._was_cut_before_all_came(part) or sender not in stages:
                break
            self._back_to(self._begun_ms + part.aligned_ms, "catching_up", stage, segments=part.caught_up_segments)
            self._back_to(self._cut_ms(stages[sender]), "aligning", stage, sender)
            stage = sender
        self._to_its_barrier(stage)

    def _past_late_barriers(self, stage: str) -> str:
        """Where it waited for the last of them: the stage to go on from, which is who sent it, if it was cut later."""
        stages = self._status.stages
        part, sender = stages[stage], stages[stage].last_barrier_from
        if not part.recorded_ms or sender not in stages:
            return stage
        cut_ms, sent_ms = self._cut_ms(part), self._cut_ms(stages[sender])
        self._back_to(max(cut_ms, sent_ms), "recording", stage, sender)
        return sender if sent_ms > cut_ms else stage

    def _was_cut_before_all_came(self, part: StagePart) -> bool:
        return part.alignment_ms is not None and self._begun_ms + (part.aligned_ms or 0) > self._cut_ms(part)

    def _to_its_barrier(self, stage: str) -> None:
        """Of a source, of one that was cut before all barriers were there, or of which nobody tells how they came."""
        part = self._status.stages[stage]
        if part.aligned_ms is not None:
            self._back_to(self._begun_ms + part.aligned_ms, "catching_up", stage, segments=part.caught_up_segments)
        self._back_to(self._barrier_ms(part), "aligning", stage, ", ".join(part.waits_for) or None)
        self._back_to(self._begun_ms, "waiting", stage)
