"""What must always hold, one checker per concern. Each sees the truth, not what a process believes.

A checker raises `SimulationFailure` with its own name, so that a test can tell who caught a defect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from tidegate.errors import TidegateError
from tidegate.flows.leader import Assignment
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.protocol.coordinator import AbortReason, StageDecline, StageReport
from tidegate.protocol.decision_log import CheckpointCompleted, Decision, DecisionLog, GenerationOpened
from tidegate.protocol.messages import Barrier
from tidegate.protocol.quorum import Ack
from tidegate.protocol.retention import PARTS
from tidegate.testing.simulator.dag import Dag, Ranges, StageSpec
from tidegate.testing.simulator.world import World

Manifest = dict[str, StageReport]
UNKNOWN: Final = -1
"""Behind which row a table that came later begins, where that cannot be told."""


class SimulationFailure(Exception):
    """A checker found what must never be."""

    def __init__(self, checker: str, detail: str) -> None:
        super().__init__(f"{checker}: {detail}")
        self.checker = checker
        self.detail = detail


class RowsInOrder:
    """Each stage consumes the rows of each path once, in order."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag

    def on_consumed(self, spec: StageSpec, state: Mapping[int, int], path: int, first: int) -> None:
        if first != state[path]:
            what = "lost" if first > state[path] else "doubled"
            raise SimulationFailure(
                "RowsInOrder",
                f"stage {spec.name} had {state[path]} rows of path {path} and got rows from {first}: {what}",
            )


class ExactlyOnce:
    """Every sink shows each row once: nothing is doubled or skipped, and in the end all are there."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self.visible = {name: dict.fromkeys(dag.stages[name].paths.values(), 0) for name in dag.sinks}
        self._gone: set[str] = set()

    def begins_behind(self, sink: str, read: Mapping[str, int] | None, held_back: Collection[int]) -> None:
        """A table that has come to the pipeline, and shows nothing yet, is to begin behind so many rows of each source.

        None: what is on its way to it is not known, nor is it of paths on which rows are held back.
        """
        for path in self.visible[sink]:
            source = self._dag.source_of[path]
            self.visible[sink][path] = UNKNOWN if read is None or path in held_back else read[source]

    def ends_behind(self, sink: str, read: Mapping[str, int] | None, held_back: Collection[int]) -> None:
        """A table goes from the pipeline, and is to show so many rows of each source at least, as far as that is known:
        where a damaged checkpoint was passed over, it may show more."""
        self._gone.add(sink)
        for path, count in self.visible[sink].items():
            expected = UNKNOWN if read is None or path in held_back else read[self._dag.source_of[path]]
            if UNKNOWN not in (expected, count) and count < expected:
                raise SimulationFailure(
                    "ExactlyOnce", f"{sink} is gone, and shows {count} rows of path {path} of {expected}"
                )

    def comes_back(self, sink: str) -> None:
        """The generation that was without it has come to nothing."""
        self._gone.discard(sink)

    def on_rows_visible(self, sink: str, rows: Ranges) -> None:
        visible = self.visible[sink]
        for path, first, after in rows:
            if visible[path] not in (first, UNKNOWN):
                what = "skipped" if first > visible[path] else "doubled"
                raise SimulationFailure(
                    "ExactlyOnce",
                    f"{sink} shows {visible[path]} rows of path {path}, then from {first}: {what}",
                )
            visible[path] = after

    def shows_all(self, totals: Mapping[str, int]) -> bool:
        return all(
            count in (totals[self._dag.source_of[path]], UNKNOWN)
            for sink, counts in self.visible.items()
            for path, count in counts.items()
            if sink not in self._gone
        )


class ConsistentCut:
    """No row is after the cut downstream and before it upstream: every reader stands, with what is in flight
    to it, exactly where the writer's barrier stands."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag

    def on_completed(
        self, checkpoint_id: int, manifest: Manifest, stages: Mapping[str, StageSpec] | None = None
    ) -> None:
        """`stages`: those that the pipeline had, if not all of the DAG."""
        stages = self._dag.stages if stages is None else stages
        if manifest.keys() != stages.keys():
            missing = sorted(manifest.keys() ^ stages.keys())
            raise SimulationFailure("ConsistentCut", f"checkpoint {checkpoint_id} lacks {missing}")
        for name, spec in stages.items():
            report = manifest[name]
            in_flight = {found.input: found for found in report.in_flight}
            for read in spec.inputs:
                if read not in report.positions:
                    raise SimulationFailure("ConsistentCut", f"{name} does not say where it stands in {read}")
                stands = report.positions[read]
                flying = in_flight.get(read)
                if flying is not None and flying.after != stands:
                    raise SimulationFailure("ConsistentCut", f"{name} stands at {stands}, in flight: {flying}")
                reached = stands if flying is None else flying.through
                barrier_at = manifest[read].output_sequence
                if reached != barrier_at:
                    raise SimulationFailure(
                        "ConsistentCut",
                        f"checkpoint {checkpoint_id}: {read} cut after segment {barrier_at}, {name} holds "
                        f"segments up to {reached}",
                    )


class InFlightAllowed:
    """What is in flight is what the config allows: nothing at a sink, nothing where no stage may cut
    unaligned, and never more than the bound."""

    def __init__(self, dag: Dag, config: AlignmentConfig) -> None:
        self._dag = dag
        self._config = config

    def on_completed(
        self, checkpoint_id: int, manifest: Manifest, stages: Mapping[str, StageSpec] | None = None
    ) -> None:
        stages = self._dag.stages if stages is None else stages
        for name, report in manifest.items():
            may_cut_unaligned = not stages[name].is_sink and self._config.unaligned != "never"
            if report.in_flight and not may_cut_unaligned:
                raise SimulationFailure("InFlightAllowed", f"checkpoint {checkpoint_id}: {name} was cut unaligned")
            size_bytes = sum(found.size_bytes for found in report.in_flight)
            if size_bytes > self._config.max_inflight_bytes:
                raise SimulationFailure(
                    "InFlightAllowed", f"checkpoint {checkpoint_id}: {name} has {size_bytes} bytes in flight"
                )


class AnnouncementsInOrder:
    """Every instance takes every announcement of its generation once, in order."""

    def __init__(self) -> None:
        self._taken: dict[tuple[int, str], int] = {}

    def on_taken(self, generation: int, instance: str, sequence: int) -> None:
        taken = self._taken.get((generation, instance), 0)
        if sequence != taken + 1:
            raise SimulationFailure("AnnouncementsInOrder", f"{instance} took announcement {sequence} after {taken}")
        self._taken[generation, instance] = sequence


class SourcePrefix:
    """An aligned checkpoint shows, at every stage, exactly the rows that its sources had read."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag

    def on_completed(self, record: CheckpointCompleted, manifest: Manifest, states: dict[str, dict[int, int]]) -> None:
        has_in_flight = any(report.in_flight for report in manifest.values())
        if record.aligned == has_in_flight:
            raise SimulationFailure("SourcePrefix", f"checkpoint {record.checkpoint_id} is marked wrongly")
        read = {name: next(iter(states[name].values())) for name in self._dag.sources}
        for name, count in read.items():
            if manifest[name].source_position != str(count):
                said = manifest[name].source_position
                raise SimulationFailure("SourcePrefix", f"{name} read {count} rows and says {said}")
        if not record.aligned:
            return
        for name, state in states.items():
            for path, count in state.items():
                if count != read[self._dag.source_of[path]]:
                    raise SimulationFailure(
                        "SourcePrefix",
                        f"aligned checkpoint {record.checkpoint_id}: {name} has {count} rows of path {path}, "
                        f"its source had read {read[self._dag.source_of[path]]}",
                    )


class MonotoneIds:
    """No checkpoint id is used by two runs, and each run's ids and epochs only grow."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._last: dict[int, tuple[int, int]] = {}

    def on_prepared(self, generation: int, checkpoint_id: int, epoch: int) -> None:
        if self._used.setdefault(checkpoint_id, generation) != generation:
            raise SimulationFailure(
                "MonotoneIds",
                f"generation {generation} uses id {checkpoint_id}, used by {self._used[checkpoint_id]}",
            )
        last_id, last_epoch = self._last.get(generation, (0, 0))
        if checkpoint_id <= last_id or epoch <= last_epoch:
            raise SimulationFailure("MonotoneIds", f"{checkpoint_id}/{epoch} after {last_id}/{last_epoch}")
        self._last[generation] = (checkpoint_id, epoch)


class NothingNeededDeleted:
    """Whatever a retained checkpoint refers to is in the store."""

    def __init__(self) -> None:
        self._references: dict[int, frozenset[str]] = {}

    def on_completed(self, record: CheckpointCompleted, files: Iterable[str]) -> None:
        self._references[record.checkpoint_id] = frozenset({*files, record.manifest})

    def references(self, checkpoint_id: int) -> frozenset[str]:
        return self._references[checkpoint_id]

    def check_each(self, retained: Collection[int], is_there: Callable[[str], bool]) -> None:
        for checkpoint_id in retained:
            for path in self._references[checkpoint_id]:
                if not is_there(path):
                    raise SimulationFailure(
                        "NothingNeededDeleted", f"checkpoint {checkpoint_id} needs {path}, which is gone"
                    )

    def check(self, retained: Collection[int], stored: Collection[str], damaged: Collection[str], who: str) -> None:
        for checkpoint_id in retained:
            for path in self._references[checkpoint_id]:
                if path not in stored and path not in damaged:
                    raise SimulationFailure(
                        "NothingNeededDeleted",
                        f"{who}: checkpoint {checkpoint_id} needs {path}, which is gone",
                    )


class NoCheckpointLost:
    """What was completed is what the next generation starts from; sinks show only what was completed. And the newest
    ones that differ stay, as many as are to be retained, whatever a clock says, and the newest aligned one; how many
    stay in all has a bound."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._epochs: set[int] = set()
        self._reached: dict[int, object] = {}
        self._aligned: set[int] = set()
        self.damaged_checkpoints: set[int] = set()

    def on_completed(
        self,
        record: CheckpointCompleted,
        manifest: Manifest,
        before: list[int],
        chains: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`before`: what its lineage had retained, newest first. `chains`: what has run in one query."""
        self._epochs.add(record.epoch)
        reached = self._as_reached(manifest, {} if chains is None else chains)
        self._reached[record.checkpoint_id] = reached
        newest_aligned = [each for each in before if each in self._aligned][:1]
        if before and self._reached[before[0]] == reached:
            before = before[1:]
        wanted = before[: self._config.max_retained - 1]
        if record.aligned:
            self._aligned.add(record.checkpoint_id)
        else:
            wanted += newest_aligned
        lost = [each for each in wanted if each not in record.retained]
        if lost:
            raise SimulationFailure("NoCheckpointLost", f"checkpoint {record.checkpoint_id} pushes out {lost[0]}")
        if len(record.retained) > self._config.max_retained + 1 + (PARTS + 1 if self._config.retain_ms else 0):
            raise SimulationFailure("NoCheckpointLost", f"{len(record.retained)} checkpoints are retained")

    @staticmethod
    def _as_reached(manifest: Manifest, chains: Mapping[str, Sequence[str]]) -> object:
        """What has run in one query has come as far as its first stage."""
        within = {name for before_last in chains.values() for name in before_last}
        first = {name: manifest[chains[name][0] if name in chains else name] for name in manifest.keys() - within}
        return {name: (each.cut, each.positions, each.source_position, each.in_flight) for name, each in first.items()}

    def on_brought(self, record: CheckpointCompleted, manifest: Manifest, chains: Mapping[str, Sequence[str]]) -> None:
        """It comes with what tables show. Its epoch is committed as any other's, and adds nothing to that."""
        self._epochs.add(record.epoch)
        self._reached[record.checkpoint_id] = self._as_reached(manifest, chains)
        if record.aligned:
            self._aligned.add(record.checkpoint_id)

    def on_opened(self, record: GenerationOpened, log: DecisionLog) -> None:
        if record.sets_back:
            return  # somebody wants it so
        lineage = [each.checkpoint_id for each in log.lineage()]
        skipped = lineage[: lineage.index(record.base)] if record.base in lineage else lineage
        lost = [checkpoint_id for checkpoint_id in skipped if checkpoint_id not in self.damaged_checkpoints]
        if lost:
            raise SimulationFailure(
                "NoCheckpointLost",
                f"generation {record.generation} starts from {record.base} although {lost[0]} is intact",
            )

    def on_epoch_visible(self, sink: str, epoch: int) -> None:
        if epoch not in self._epochs:
            raise SimulationFailure("NoCheckpointLost", f"{sink} shows epoch {epoch}, which was never decided")


class WatermarkHeldBack:
    """The watermark that goes out with a commit is not ahead of any source that has event time."""

    def on_announced(self, min_watermark_ms: int | None, watermarks: Mapping[str, int | None]) -> None:
        if min_watermark_ms is None:
            return
        for name, watermark_ms in watermarks.items():
            if watermark_ms is None or watermark_ms < min_watermark_ms:
                raise SimulationFailure(
                    "WatermarkHeldBack", f"{min_watermark_ms} was announced, but {name} is at {watermark_ms}"
                )


class AllAcknowledged:
    """A checkpoint is decided when every member has acknowledged it, not when all stages have reported."""

    def __init__(self) -> None:
        self._acked: set[tuple[int, int, str]] = set()

    def on_ack(self, ack: Ack) -> None:
        """It has reached a leader."""
        self._acked.add((ack.generation, ack.checkpoint_id, ack.instance))

    def on_decided(self, record: CheckpointCompleted, members: Collection[str]) -> None:
        silent = [each for each in members if (record.generation, record.checkpoint_id, each) not in self._acked]
        if silent:
            raise SimulationFailure(
                "AllAcknowledged", f"checkpoint {record.checkpoint_id} was decided without {', '.join(silent)}"
            )


class RightlyBlamed:
    """An abort names who is to blame: a stage only if one has declined, the store only if nothing was announced."""

    def __init__(self) -> None:
        self._announced: set[tuple[int, int]] = set()
        self._declined: set[tuple[int, int]] = set()

    def on_announced(self, generation: int, checkpoint_id: int) -> None:
        self._announced.add((generation, checkpoint_id))

    def on_decline(self, decline: StageDecline) -> None:
        self._declined.add((decline.generation, decline.checkpoint_id))

    def on_aborted(self, generation: int, checkpoint_id: int, reason: AbortReason) -> None:
        is_announced = (generation, checkpoint_id) in self._announced
        match reason:
            case AbortReason.STAGE_DECLINED:
                is_right = (generation, checkpoint_id) in self._declined
            case AbortReason.TIMED_OUT | AbortReason.QUORUM_FAILED:
                is_right = is_announced
            case AbortReason.STORE_FAILED:
                is_right = not is_announced
            case _:
                is_right = True
        if not is_right:
            raise SimulationFailure("RightlyBlamed", f"checkpoint {checkpoint_id} was aborted: {reason.value}")


class NothingAfterDrain:
    """A stage that was cut by a DRAIN barrier begins no batch, unless that is cancelled."""

    def __init__(self) -> None:
        self._drained: dict[tuple[int, str], int] = {}

    def on_barrier(self, generation: int, stage: str, barrier: Barrier) -> None:
        if barrier.is_drain and not barrier.is_cancel:
            self._drained[generation, stage] = barrier.checkpoint_id
        elif barrier.is_cancel and self._drained.get((generation, stage)) == barrier.checkpoint_id:
            del self._drained[generation, stage]

    def on_batch(self, generation: int, stage: str) -> None:
        if (generation, stage) in self._drained:
            raise SimulationFailure("NothingAfterDrain", f"{stage} begins a batch in generation {generation}")


class RunOnce:
    """Every stage of a generation is ordered once, from one incarnation, and that one runs it, once; nobody else obeys
    what is announced there."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self._ordered: dict[tuple[int, str], tuple[str, str]] = {}
        self._members: dict[int, set[tuple[str, str]]] = {}
        self._run: set[tuple[int, str]] = set()

    def on_ordered(self, generation: int, members: Mapping[str, Assignment]) -> None:
        stages = [stage for each in members.values() for stage in each.stages]
        if sorted(stages) != sorted(self._dag.stages):
            raise SimulationFailure("RunOnce", f"generation {generation} orders {stages}")
        self._members[generation] = {(name, each.incarnation) for name, each in members.items()}
        for name, each in members.items():
            for stage in each.stages:
                self._ordered[generation, stage] = (name, each.incarnation)

    def on_run(self, generation: int, stages: Iterable[str], instance: str, incarnation: str) -> None:
        for stage in stages:
            if self._ordered.get((generation, stage)) != (instance, incarnation):
                raise SimulationFailure(
                    "RunOnce", f"{instance} as {incarnation} runs {stage} in generation {generation} unasked"
                )
            if (generation, stage) in self._run:
                raise SimulationFailure("RunOnce", f"{stage} is run twice in generation {generation}")
            self._run.add((generation, stage))

    def on_obeyed(self, generation: int, instance: str, incarnation: str) -> None:
        """What is announced in a generation."""
        if (instance, incarnation) not in self._members.get(generation, ()):
            raise SimulationFailure("RunOnce", f"{instance} as {incarnation} obeys generation {generation}")


class EntriesOnce:
    """What a channel holds reaches every process that reads it, each entry once, in order and in its own generation,
    and is let go of when all have taken it."""

    def __init__(self) -> None:
        self._appended: dict[tuple[int, str], list[object]] = {}
        self._taken: dict[tuple[int, str, str], int] = {}
        self._heard: dict[tuple[int, str, str], int] = {}

    def on_appended(self, generation: int, stage: str, message: object) -> None:
        self._appended.setdefault((generation, stage), []).append(message)

    def on_taken(self, generation: int, stage: str, instance: str, message: object, own_generation: int) -> None:
        taken = self._taken.get((generation, stage, instance), 0)
        appended = self._appended.get((generation, stage), [])
        if taken >= len(appended) or appended[taken] != message:
            raise SimulationFailure("EntriesOnce", f"{instance} took {message} as entry {taken} of {stage}")
        if generation != own_generation:
            raise SimulationFailure("EntriesOnce", f"{instance} took an entry of {generation} in {own_generation}")
        self._taken[generation, stage, instance] = taken + 1

    def on_heard(self, generation: int, stage: str, instance: str, count: int) -> None:
        """It has so many of them in memory, and needs no entry of these again."""
        self._heard[generation, stage, instance] = count

    def on_trimmed(self, generation: int, stage: str, indices: range, readers: Iterable[str]) -> None:
        for reader in readers:
            if indices.stop > self._heard.get((generation, stage, reader), 0):
                raise SimulationFailure("EntriesOnce", f"entries of {stage} are let go of before {reader} took them")


class NothingAfterSteppingDown:
    """A leader that has stepped down begins nothing more, and says nothing more."""

    def on_begun(self, leader: str) -> None:
        raise SimulationFailure("NothingAfterSteppingDown", f"{leader} goes on")


class Completion(msgspec.Struct, frozen=True):
    """A checkpoint that was completed, as it stands in the store."""

    record: CheckpointCompleted
    manifest: Manifest


class Checkers:
    """All of them, and the true decision log that they judge by."""

    def __init__(self, dag: Dag, world: World, config: CheckpointConfig) -> None:
        self.log = DecisionLog()
        self.completions: list[Completion] = []
        self._world = world
        self.damaged_files: set[str] = set()
        self.rows_in_order = RowsInOrder(dag)
        self.exactly_once = ExactlyOnce(dag)
        self.consistent_cut = ConsistentCut(dag)
        self.in_flight_allowed = InFlightAllowed(dag, config.alignment)
        self.announcements_in_order = AnnouncementsInOrder()
        self.source_prefix = SourcePrefix(dag)
        self.monotone_ids = MonotoneIds()
        self.nothing_needed_deleted = NothingNeededDeleted()
        self.no_checkpoint_lost = NoCheckpointLost(config)
        self.watermark_held_back = WatermarkHeldBack()
        self.all_acknowledged = AllAcknowledged()
        self.rightly_blamed = RightlyBlamed()
        self.nothing_after_drain = NothingAfterDrain()
        self.run_once = RunOnce(dag)
        self.entries_once = EntriesOnce()
        self.nothing_after_stepping_down = NothingAfterSteppingDown()

    def on_claimed(self, record: Decision, objects: Mapping[str, Any]) -> None:
        """A record was created in the store."""
        before = self.take(record)
        if before is not None and isinstance(record, CheckpointCompleted):
            self._on_completed(record, objects, before)

    def take(self, record: Decision) -> list[int] | None:
        """Into the true log. Returns its lineage before, newest first; None: below the start it means nothing."""
        if record.slot < self.log.first_slot:
            return None
        if isinstance(record, GenerationOpened):
            self.no_checkpoint_lost.on_opened(record, self.log)
        before = [each.checkpoint_id for each in self.log.lineage()]
        try:
            self.log.append(record)
        except TidegateError as error:
            raise SimulationFailure("DecisionLog", str(error)) from error
        return before

    def _on_completed(self, record: CheckpointCompleted, objects: Mapping[str, Any], before: list[int]) -> None:
        manifest: Manifest = objects[record.manifest].value
        self.completions.append(Completion(record, manifest))
        self._world.note("checkpoint {} of generation {} is complete", record.checkpoint_id, record.generation)
        self.nothing_needed_deleted.on_completed(
            record, (file for report in manifest.values() for file in report.files)
        )
        if not self.damaged_files.isdisjoint(file for report in manifest.values() for file in report.files):
            # It builds on a file that was lost since: it is as damaged as the one before it.
            self.no_checkpoint_lost.damaged_checkpoints.add(record.checkpoint_id)
        self.on_deleted(record.generation, objects.keys())
        states = {name: objects[report.files[0]].value for name, report in manifest.items()}
        self.consistent_cut.on_completed(record.checkpoint_id, manifest)
        self.in_flight_allowed.on_completed(record.checkpoint_id, manifest)
        self.source_prefix.on_completed(record, manifest, states)
        self.no_checkpoint_lost.on_completed(record, manifest, before)

    def on_whole(
        self,
        record: CheckpointCompleted,
        manifest: Manifest,
        files: Iterable[str],
        before: list[int],
        chains: Mapping[str, Sequence[str]],
        stages: Mapping[str, StageSpec],
    ) -> None:
        """The same of a real root, of which the state of stages cannot be looked into. `files`: all that it needs.
        `stages`: those that the pipeline had."""
        self.completions.append(Completion(record, manifest))
        self.nothing_needed_deleted.on_completed(record, files)
        self.consistent_cut.on_completed(record.checkpoint_id, manifest, stages)
        self.in_flight_allowed.on_completed(record.checkpoint_id, manifest, stages)
        self.no_checkpoint_lost.on_completed(record, manifest, before, chains)

    def on_brought(
        self, record: CheckpointCompleted, manifest: Manifest, files: Iterable[str], chains: Mapping[str, Sequence[str]]
    ) -> None:
        """A checkpoint was brought into a real root."""
        self.nothing_needed_deleted.on_completed(record, files)
        self.no_checkpoint_lost.on_brought(record, manifest, chains)

    def on_deleted(self, by_generation: int, stored: Collection[str]) -> None:
        who = f"after generation {by_generation}"
        self.nothing_needed_deleted.check(self.log.retained, stored, self.damaged_files, who)

    def on_rows_visible(self, sink: str, rows: Ranges) -> None:
        self.exactly_once.on_rows_visible(sink, rows)

    def on_epoch_visible(self, sink: str, permit: CommitPermit) -> None:
        self.no_checkpoint_lost.on_epoch_visible(sink, permit.epoch)
