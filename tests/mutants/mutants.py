"""Every defect that the seeds have, clause by clause, and how it is put back into Tidegate.

`defect` is the wording of SEEDS.md ("Defects in them that Tidegate must not have"). Where Tidegate lacks the
construct that was wrong, the mutant does what could be seen of it.
"""

from __future__ import annotations

from typing import Final

from tests.mutants import properties, scenarios
from tests.mutants.mutation import Edit, Mutant, Section, Simulated, rewrite
from tidegate.flows.leader import Leader
from tidegate.flows.member import Member
from tidegate.flows.requests import Asker
from tidegate.flows.stage import StageCheckpoints
from tidegate.protocol.aligner import Aligner, _captured
from tidegate.protocol.commit import SinkCommits
from tidegate.protocol.coordinator import Coordinator
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.injector import Injector
from tidegate.protocol.quorum import AnnouncementReader, Announcements, Quorum
from tidegate.protocol.recovery import _from_checkpoint
from tidegate.spark.gate import Gate

BARRIERS_ARE_NOT_COMPARED: Final = (
    Edit(
        Aligner.on_barrier,
        "if alignment is not None and not alignment.barrier.agrees_with(barrier):",
        "if False:",
    ),
    Edit(Aligner._overtake, "actions: Actions = []", "return []"),
)
NOTHING_IN_FLIGHT_IF_CALLED_ALIGNED: Final = Edit(
    Aligner._cut,
    "if source.unconsumed or name in alignment.missing:",
    "if cause is not CutCause.ALIGNED and (source.unconsumed or name in alignment.missing):",
)

ALIGNER: Final = (
    Mutant(
        "the_last_barrier_is_the_canonical_one",
        Section.ALIGNER,
        "the canonical barrier is whatever a hash map yields last",
        rewrite(
            BARRIERS_ARE_NOT_COMPARED[0],
            Edit(Aligner.on_barrier, "elif barrier.is_unaligned:", "else:"),
            Edit(
                Aligner.on_barrier,
                "alignment.barrier = alignment.barrier.as_unaligned()",
                "alignment.barrier = barrier",
            ),
        ),
        properties.barriers_of_one_checkpoint_must_agree,
    ),
    Mutant(
        "barriers_of_two_checkpoints_mix",
        Section.ALIGNER,
        "ids are never compared, so barriers of two checkpoints mix",
        rewrite(
            *BARRIERS_ARE_NOT_COMPARED,
            Edit(
                Aligner.on_barrier,
                "alignment = self._active(checkpoint_id)",
                "alignment = self._aligning or next(reversed(self._recording), None)",
            ),
        ),
        Simulated("ConsistentCut", 40, scenarios.many_unaligned),
    ),
    Mutant(
        "a_duplicate_barrier_counts",
        Section.ALIGNER,
        "a duplicate input counts",
        rewrite(
            Edit(
                Aligner.on_barrier,
                "return [Ignored(name, checkpoint_id, IgnoreReason.DUPLICATE)]",
                "alignment.missing.pop()\nreturn self._try_cut(now_ms)",
            )
        ),
        properties.a_repeated_barrier_does_not_count_twice,
    ),
    Mutant(
        "an_unknown_input_counts",
        Section.ALIGNER,
        "an unknown input counts",
        rewrite(
            Edit(
                Aligner.on_barrier,
                "source = self._input(name)",
                "name = name if name in self._inputs else next(iter(self._aligning.missing))\n"
                "source = self._input(name)",
            )
        ),
        properties.a_barrier_of_an_unknown_input_does_not_count,
    ),
    Mutant(
        "what_waited_during_alignment_is_cleared",
        Section.ALIGNER,
        "events arriving between alignment and completion are cleared and lost",
        rewrite(
            Edit(
                Aligner._cut,
                "positions = {",
                "for source in self._inputs.values():\n    source.position = source.last_sequence\npositions = {",
            ),
            Edit(Aligner.on_committed, "not source.position <= position <= source.last_sequence", "False"),
        ),
        Simulated("RowsInOrder", 100, scenarios.many_unaligned),
    ),
    Mutant(
        "rows_are_sorted_by_timestamp",
        Section.ALIGNER,
        "sorting by timestamp breaks each input's order",
        # Event time does not follow the order of arrival: any key that jumps shows it.
        rewrite(Edit(Gate._line, "modification_time=sequence,", "modification_time=sequence % 7,")),
        properties.segments_are_seen_in_the_order_of_their_channel,
    ),
    Mutant(
        "which_input_a_row_came_from_is_forgotten",
        Section.ALIGNER,
        "sorting forgets which input a row came from",
        rewrite(Edit(StageCheckpoints._report, "*in_flight.files)", "*sorted(in_flight.files))")),
        Simulated("Protocol", 40, scenarios.many_unaligned),
    ),
    Mutant(
        "inputs_ahead_are_buffered_without_bound",
        Section.ALIGNER,
        "the buffer is unbounded",
        rewrite(Edit(Aligner.on_segment, "if source.closed:", "if False:")),
        properties.nothing_is_taken_from_an_input_that_is_ahead,
    ),
    Mutant(
        "a_silent_input_blocks",
        Section.ALIGNER,
        "one silent input blocks for ever",
        rewrite(
            Edit(
                Aligner._unaligned_cause,
                "if now_ms - alignment.started_ms >= self._config.timeout_ms:",
                "if False:",
            )
        ),
        properties.a_silent_input_does_not_block_for_ever,
    ),
)

COORDINATOR: Final = (
    Mutant(
        "no_abort",
        Section.COORDINATOR,
        "no abort in one",
        rewrite(
            Edit(
                Coordinator._abort,
                "checkpoint.phase = step(TRANSITIONS, checkpoint.phase, Event.ABORT)",
                "return []",
            )
        ),
        Simulated("Liveness", 30),
    ),
    Mutant(
        "a_timeout_waits_for_a_report",
        Section.COORDINATOR,
        "an operator timeout noticed only when another operator reports in the other",
        rewrite(
            Edit(
                Coordinator.on_time,
                "now_ms >= checkpoint.deadline_ms:",
                "now_ms >= checkpoint.deadline_ms and checkpoint.reports:",
            )
        ),
        properties.silence_is_noticed_by_time_alone,
    ),
    Mutant(
        "a_duplicate_report_counts_twice",
        Section.COORDINATOR,
        "duplicate reports counted twice",
        rewrite(
            Edit(Coordinator._judge, "said.stage in checkpoint.reports or", ""),
            Edit(
                Coordinator.on_report,
                "checkpoint.reports[report.stage]",
                'checkpoint.reports[report.stage + "again" * (report.stage in checkpoint.reports)]',
            ),
        ),
        properties.a_stage_that_reports_twice_counts_once,
    ),
    Mutant(
        "an_unknown_stage_is_accepted",
        Section.COORDINATOR,
        "unknown operators accepted",
        rewrite(Edit(Coordinator._judge, "if said.stage not in self._stages:", "if False:")),
        properties.a_stranger_does_not_count_as_a_stage,
    ),
    Mutant(
        "reports_carry_no_id",
        Section.COORDINATOR,
        "reports carry no id",
        rewrite(
            Edit(
                Coordinator._judge,
                "self._active.get(said.checkpoint_id)",
                "next(iter(self._active.values()), None)",
            ),
            Edit(
                Coordinator.on_report,
                "self._active[report.checkpoint_id]",
                "next(iter(self._active.values()))",
            ),
        ),
        properties.a_report_counts_for_its_own_checkpoint,
    ),
    Mutant(
        "source_positions_are_not_filled",
        Section.COORDINATOR,
        "stream positions never filled",
        rewrite(
            Edit(StageCheckpoints._report, "source_position=part.standing.source_position", "source_position=None")
        ),
        Simulated("SourcePrefix", 5),
    ),
    Mutant(
        "ids_start_again",
        Section.COORDINATOR,
        "ids start again at 1 after a restart",
        rewrite(
            Edit(Coordinator.__init__, "after_checkpoint + 1", "1"),
            Edit(Coordinator.__init__, "after_epoch + 1", "1"),
        ),
        Simulated("MonotoneIds", 15),
    ),
    Mutant(
        "nothing_is_durable",
        Section.COORDINATOR,
        "nothing durable",
        rewrite(
            Edit(StageCheckpoints._store, "part.stored = await request", 'part.stored = Stored(("in memory alone",))')
        ),
        Simulated("NothingNeededDeleted", 5),
    ),
    Mutant(
        "failures_evict_the_last_good_checkpoint",
        Section.COORDINATOR,
        "retention can evict the last good checkpoint after failures",
        rewrite(
            Edit(
                Leader._remove_unneeded,
                "records = {",
                "failed = sum(each.abort_reason is not None for each in self.coordinator.history)\n"
                "retained = retained[failed:]\n"
                "records = {",
            )
        ),
        Simulated("NothingNeededDeleted", 20),
    ),
)

INJECTOR: Final = (
    Mutant(
        "ids_of_32_bits",
        Section.INJECTOR,
        "ids cut to 32 bits",
        rewrite(
            Edit(
                Injector.inject,
                "self._pending.append(barrier)",
                "self._pending.append(Barrier(barrier.checkpoint_id % 2**32, barrier.epoch, barrier.flags))",
            )
        ),
        properties.an_id_keeps_its_64_bits,
    ),
    Mutant(
        "sources_share_one_handle",
        Section.INJECTOR,
        "one shared handle means only one source gets the barrier",
        rewrite(Edit(Member._prepare, "stage.inject(barrier)", "stage.inject(barrier)\nbreak")),
        Simulated("Liveness", 30),
    ),
    Mutant(
        "an_unread_barrier_is_replaced",
        Section.INJECTOR,
        "an unread barrier is silently replaced, so sources can disagree about the checkpoint",
        rewrite(Edit(Injector.inject, "if len(waiting) >= self._max_pending:", "self._pending.clear()\nif False:")),
        properties.no_barrier_takes_the_place_of_another,
    ),
    Mutant(
        "the_epoch_is_the_pollers",
        Section.INJECTOR,
        "the epoch comes from the poller",
        rewrite(
            Edit(
                Injector.poll,
                "return self._pending.popleft()",
                "barrier = self._pending.popleft()\nreturn Barrier(barrier.checkpoint_id, 1, barrier.flags)",
            )
        ),
        properties.the_epoch_is_the_coordinators,
    ),
)

UNALIGNED: Final = (
    Mutant(
        "dropped_on_the_aligned_path",
        Section.UNALIGNED,
        "buffered events are dropped on the aligned path",
        rewrite(
            Edit(
                Aligner._try_cut,
                "if not alignment.missing and not self._unconsumed:",
                "if not alignment.missing:",
            ),
            NOTHING_IN_FLIGHT_IF_CALLED_ALIGNED,
        ),
        Simulated("ConsistentCut", 10),
    ),
    Mutant(
        "dropped_on_overflow",
        Section.UNALIGNED,
        "buffered events are dropped on overflow",
        rewrite(
            Edit(
                Aligner._try_cut,
                "if alignment.said_over_bound:",
                "alignment.missing.clear()\n"
                "return self._cut(alignment, CutCause.ALIGNED, now_ms)\n"
                "if alignment.said_over_bound:",
            ),
            NOTHING_IN_FLIGHT_IF_CALLED_ALIGNED,
        ),
        Simulated("ConsistentCut", 40),
    ),
    Mutant(
        "dropped_on_an_unknown_input",
        Section.UNALIGNED,
        "buffered events are dropped on an unknown input",
        rewrite(
            Edit(
                Aligner.on_segment,
                "source = self._input(name)",
                "if name not in self._inputs:\n    return ()\nsource = self._input(name)",
            )
        ),
        properties.no_segment_of_an_unknown_input_vanishes,
    ),
    Mutant(
        "captured_data_is_empty",
        Section.UNALIGNED,
        "the captured channel data is empty",
        rewrite(Edit(_captured, "checkpoint_id, ranges", "checkpoint_id, ()")),
        Simulated("ConsistentCut", 10, scenarios.many_unaligned),
    ),
    Mutant(
        "nothing_is_recorded_after_the_cut",
        Section.UNALIGNED,
        "nothing is recorded after the snapshot until late barriers come",
        rewrite(Edit(Aligner.on_segment, "if self._recording:", "if False:")),
        Simulated("ConsistentCut", 60),
    ),
    Mutant(
        "a_new_barrier_is_swallowed",
        Section.UNALIGNED,
        "a new checkpoint's barrier is swallowed while waiting",
        rewrite(
            *BARRIERS_ARE_NOT_COMPARED,
            Edit(
                Aligner.on_barrier,
                "alignment = self._active(checkpoint_id)",
                "alignment = next(iter(self._recording), self._active(checkpoint_id))",
            ),
        ),
        Simulated("ConsistentCut", 40, scenarios.many_unaligned),
    ),
    Mutant(
        "at_most_128_inputs",
        Section.UNALIGNED,
        "at most 128 inputs",
        rewrite(Edit(Aligner._start, "set(self._inputs)", "set(list(self._inputs)[:128])")),
        properties.every_input_is_waited_for_however_many,
    ),
    Mutant(
        "never_is_ignored",
        Section.UNALIGNED,
        "`enabled` is ignored",
        rewrite(Edit(Aligner.__init__, 'and config.unaligned != "never"', "")),
        Simulated("InFlightAllowed", 100),
    ),
    Mutant(
        "always_by_timeout",
        Section.UNALIGNED,
        '"triggered by timeout" is always true',
        rewrite(Edit(Aligner._unaligned_cause, "CutCause.FORCED", "CutCause.TIMEOUT")),
        properties.a_forced_cut_is_not_called_a_timeout,
    ),
)

CLUSTER: Final = (
    Mutant(
        "one_overwritten_announcement",
        Section.CLUSTER,
        "one overwritten slot, so Prepare(n+1) can hide Commit(n)",
        rewrite(
            Edit(
                Announcements.announce,
                "self._kept.append(announcement)",
                "self._kept.clear()\nself._kept.append(announcement)",
            ),
            Edit(
                AnnouncementReader.take,
                "if announcement.sequence == self._seen + 1:",
                "if announcement.sequence > self._seen:\n    self._seen = announcement.sequence - 1",
            ),
        ),
        Simulated("AnnouncementsInOrder", 30),
    ),
    Mutant(
        "acks_without_id",
        Section.CLUSTER,
        "acks carry no id",
        rewrite(Edit(Quorum._judge, "if ack.checkpoint_id != self._checkpoint_id:", "if False:")),
        properties.an_ack_of_another_checkpoint_does_not_count,
    ),
    Mutant(
        "acks_without_attempt",
        Section.CLUSTER,
        "acks carry no attempt",
        rewrite(Edit(Quorum._judge, "if ack.attempt != self._attempt:", "if False:")),
        properties.an_ack_of_another_attempt_does_not_count,
    ),
    Mutant(
        "acks_without_fencing_token",
        Section.CLUSTER,
        "acks carry no fencing token",
        rewrite(Edit(Quorum._judge, "if ack.generation != self._generation:", "if False:")),
        properties.an_ack_of_another_generation_does_not_count,
    ),
    Mutant(
        "a_member_named_twice_is_two",
        Section.CLUSTER,
        "duplicates in the expected set can never reach quorum",
        rewrite(
            Edit(Quorum.__init__, "self._deadline_ms =", "self._expected = len(members)\nself._deadline_ms ="),
            Edit(Quorum.on_time, "elif not self._missing:", "elif len(self._watermarks) == self._expected:"),
        ),
        properties.a_member_that_is_named_twice_acknowledges_once,
    ),
    Mutant(
        "an_unset_watermark_is_infinite",
        Section.CLUSTER,
        "an unset watermark counts as infinity, so windows close too early on a fresh node",
        rewrite(Edit(Quorum._min_watermark_ms, "return None", "continue")),
        Simulated("WatermarkHeldBack", 30),
    ),
    Mutant(
        "a_write_cannot_fail",
        Section.CLUSTER,
        "a KV write cannot fail",
        rewrite(
            Edit(
                Leader._begin,
                "await self._marks.insist(Mark(barrier.checkpoint_id))",
                "try:\n    await Mark(barrier.checkpoint_id)\nexcept StoreUnavailable:\n    pass",
            )
        ),
        Simulated("MonotoneIds", 40),
    ),
    Mutant(
        "acks_are_polled",
        Section.CLUSTER,
        "50 ms polling",
        rewrite(Edit(Leader.on_ack, "self._decide_if_ready()", "pass")),
        properties.the_last_ack_decides_at_once,
    ),
    Mutant(
        "a_lost_member_is_waited_for",
        Section.CLUSTER,
        "membership changes during the wait are ignored",
        rewrite(Edit(Quorum.on_lost, "if instance in self._missing and self._outcome is None:", "if False:")),
        properties.a_lost_instance_fails_the_quorum_at_once,
    ),
)

AROUND: Final = (
    Mutant(
        "start_fresh_with_a_warning",
        Section.AROUND,
        'recovery that falls back to "start fresh" with a warning',
        rewrite(
            Edit(_from_checkpoint, "return Refuse(", "return StartOver()\nreturn Refuse("),
            # Also the log's own guard, which would not let the generation be opened.
            Edit(DecisionLog._wrong_opening, "if record.base is None and self.retained:", "if False:"),
        ),
        Simulated("ExactlyOnce", 60, scenarios.only_checkpoint_damaged),
    ),
    Mutant(
        "a_failed_sink_is_given_up",
        Section.AROUND,
        "sinks marked failed and never driven again",
        rewrite(Edit(SinkCommits.on_failed, "now_ms + self._pause.after(sink.failures)", "10**15")),
        Simulated("Liveness", 20),
    ),
    Mutant(
        "an_aborted_checkpoint_looks_valid",
        Section.AROUND,
        "aborted checkpoints that look valid",
        rewrite(
            Edit(Coordinator._abort, "checkpoint.phase = step(TRANSITIONS, checkpoint.phase, Event.ABORT)", ""),
            Edit(
                Coordinator._end,
                "del self._active[checkpoint.checkpoint_id]",
                "if checkpoint.abort_reason is None:\n    del self._active[checkpoint.checkpoint_id]",
            ),
        ),
        properties.an_aborted_checkpoint_is_never_decided,
    ),
    Mutant(
        "nobody_checks_the_fencing_token",
        Section.AROUND,
        "a leader without a fencing token that anyone checks",
        rewrite(
            Edit(
                Asker.claim,
                "if answer is not ClaimAnswer.RETRY:",
                "if answer is ClaimAnswer.SUPERSEDED and isinstance(proposed, CheckpointCompleted):\n"
                "    from msgspec.structs import replace\n"
                "    proposed = replace(proposed, slot=log.next_slot)\n"
                "    continue\n"
                "if answer is not ClaimAnswer.RETRY:",
            )
        ),
        Simulated("DecisionLog", 60, scenarios.many_elections),
    ),
)

SEED_DEFECTS: Final = (*ALIGNER, *COORDINATOR, *INJECTOR, *UNALIGNED, *CLUSTER, *AROUND)
