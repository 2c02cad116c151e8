"""What the choreography and its machines could get wrong: their guarantees, each taken away in turn."""

from __future__ import annotations

from typing import Final

import pytest

from tests.mutants import flow_properties, properties, scenarios
from tests.mutants.mutation import Edit, Mutant, Section, Simulated, Switch, rewrite
from tidegate.flows.leader import Leader
from tidegate.flows.member import Member
from tidegate.flows.opening import Opening
from tidegate.flows.requests import Asker
from tidegate.flows.stage import StageCheckpoints
from tidegate.protocol import coordinator
from tidegate.protocol.aligner import Aligner
from tidegate.protocol.coordinator import Coordinator, Event, Phase
from tidegate.protocol.decision_log import DecisionLog, decode_decision, is_torn
from tidegate.protocol.quorum import watermark_of
from tidegate.protocol.recovery import _fall_back
from tidegate.protocol.retention import _thinned, deletable, retained_after

is_drained: Final = StageCheckpoints.__dict__["is_drained"].fget


def deciding_may_be_aborted(*edits: Edit) -> Switch:
    def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
        aborting = {**coordinator.TRANSITIONS, (Phase.DECIDING, Event.ABORT): Phase.ABORTED}
        monkeypatch.setattr(coordinator, "TRANSITIONS", aborting)
        rewrite(*edits)(monkeypatch)

    return put_back


FLOW_DEFECTS: Final = (
    # -- deciding
    Mutant(
        "a_claim_is_not_read_back",
        Section.OWN,
        "a claim counts as won because the record was created, though in a trimmed slot",
        rewrite(
            Edit(
                Asker.claim,
                "is_durable = await Claim(proposed)",
                "is_durable = await Claim(proposed)\nif is_durable:\n    return ClaimAnswer.WON, None",
            ),
            Edit(
                Opening.open,
                "answer, log = await self.store.claim(proposed)",
                "answer, found = await self.store.claim(proposed)\n"
                "log = DecisionLog.from_records([*log, proposed]) if found is None else found",
            ),
        ),
        Simulated("Protocol", 20, scenarios.leaders_asleep),
    ),
    Mutant(
        "a_claim_without_answer_is_lost",
        Section.OWN,
        "a claim that failed is taken for one that was not made, though the record was written",
        deciding_may_be_aborted(
            Edit(
                Leader._decide,
                "answer, log = await self._store.claim(proposed)",
                "from tidegate.flows.requests import Claim\n"
                "try:\n"
                "    await Claim(proposed)\n"
                "except StoreUnavailable:\n"
                "    reason = AbortReason.QUORUM_FAILED\n"
                '    self._execute(self.coordinator._abort(checkpoint, reason, "", self._host.now_ms))\n'
                "    return\n"
                "answer, log = await self._store.claim(proposed)",
            )
        ),
        Simulated("Protocol", 20, scenarios.answers_lost),
    ),
    Mutant(
        "a_slot_that_is_said_to_be_taken_is_lost",
        Section.OWN,
        "a leader believes that another one has its slot, and steps down, though nobody has",
        rewrite(
            Edit(
                Asker.claim,
                "answer = judge_claim(proposed, log)",
                "answer = judge_claim(proposed, log) if is_durable else ClaimAnswer.SUPERSEDED",
            )
        ),
        Simulated("Protocol", 20),
    ),
    Mutant(
        "a_manifest_that_cannot_be_written_ends_the_leader",
        Section.OWN,
        "a store that fails once makes the whole pipeline go back to its last checkpoint",
        rewrite(Edit(Leader._decide, "await self._store.insist(WriteManifest", "await (WriteManifest")),
        Simulated("Patience", 40),
    ),
    Mutant(
        "the_coordinator_decides_without_the_quorum",
        Section.OWN,
        "a checkpoint is decided when all stages have reported, though a member has yet to acknowledge it",
        rewrite(
            Edit(Leader._decide_if_ready, "if isinstance(outcome, Reached):", "if True:"),
            Edit(Leader._decide_if_ready, "outcome.min_watermark_ms", "None"),
        ),
        Simulated("AllAcknowledged", 60, scenarios.messages_lost),
    ),
    Mutant(
        "a_timeout_aborts_what_is_being_decided",
        Section.OWN,
        "a checkpoint that is being decided is aborted by its timeout",
        deciding_may_be_aborted(
            Edit(Coordinator.on_time, "checkpoint.phase is not Phase.DECIDING and", ""),
            Edit(Leader._decide, "del self._quorums[checkpoint_id]", "self._quorums.pop(checkpoint_id, None)"),
        ),
        Simulated("Protocol", 40, scenarios.slow_store),
    ),
    Mutant(
        "checkpoints_are_decided_in_any_order",
        Section.OWN,
        "a newer checkpoint is decided before an older one",
        rewrite(
            Edit(
                Coordinator.ready_to_decide,
                "next(iter(self._active.values()), None)",
                "next((each for each in self._active.values() if each.phase is Phase.PREPARED), None)",
            ),
            Edit(Coordinator.decide, "if oldest != checkpoint_id:", "if False:"),
        ),
        Simulated("Protocol", 10, scenarios.many_unaligned),
    ),
    Mutant(
        "sinks_commit_before_the_decision",
        Section.OWN,
        "sinks are committed when all have prepared, before the slot is claimed",
        rewrite(
            Edit(Leader._decide, "self.log.append(proposed)", "pass"),
            Edit(Leader._decide, "self._permit(checkpoint_id)", "pass"),
            Edit(
                Leader._decide,
                "answer, log = await self._store.claim(proposed)",
                "self.log.append(proposed)\n"
                "self._reports[checkpoint_id] = reports\n"
                "self._permit(checkpoint_id)\n"
                "self._commit_due()\n"
                "answer, log = await self._store.claim(proposed)",
            ),
        ),
        Simulated("NoCheckpointLost", 20),
    ),
    Mutant(
        "sinks_that_lag_hold_nothing_back",
        Section.OWN,
        "checkpoints are completed without end that no sink has committed",
        rewrite(Edit(Coordinator._obstacle, "if under_way > most", "if False")),
        properties.sinks_that_lag_hold_checkpoints_back,
    ),
    Mutant(
        "what_holds_a_checkpoint_back_is_not_seen",
        Section.OWN,
        "a checkpoint is begun where what is told of it says that it is held back",
        rewrite(Edit(Coordinator.held_back, "if obstacle is Obstacle.SINKS_LAG:", "if False:")),
        properties.sinks_that_lag_hold_checkpoints_back,
    ),
    Mutant(
        "a_sink_is_tried_for_ever",
        Section.OWN,
        "a table that takes no epoch is tried again for ever, while all else goes on",
        rewrite(Edit(Leader._commit, "if failures < self._patience.sink_tries:", "if True:")),
        flow_properties.a_sink_is_tried_again_with_pauses_until_the_leader_steps_down,
    ),
    Mutant(
        "a_sink_is_tried_once",
        Section.OWN,
        "a commit that fails once makes the whole pipeline go back to its last checkpoint",
        rewrite(Edit(Leader._commit, "if failures < self._patience.sink_tries:", "if False:")),
        flow_properties.a_sink_is_tried_again_with_pauses_until_the_leader_steps_down,
    ),
    Mutant(
        "the_restored_epoch_is_the_coordinators",
        Section.OWN,
        "the commit of the checkpoint that a generation starts from is taken for one of its own",
        rewrite(
            Edit(
                Leader._on_shown,
                "if self._opened.base is None or checkpoint_id != self._opened.base.checkpoint_id:",
                "if True:",
            )
        ),
        Simulated("Protocol", 10),
    ),
    Mutant(
        "what_was_staged_is_dropped_before_it_is_shown",
        Section.OWN,
        "staged rows are removed when their checkpoint is decided, before their table shows them",
        rewrite(
            Edit(
                Leader._commit,
                "try:",
                "for member in self._members:\n"
                "    self._host.send(member.instance, Visible(self.generation, sink, report.cut or 0))\n"
                "try:",
            )
        ),
        Simulated("NothingNeededDeleted", 30),
    ),
    # -- ids and announcements
    Mutant(
        "marks_are_not_checked_against_the_log",
        Section.OWN,
        "an id is announced although a newer generation may have missed that it is used",
        rewrite(Edit(Leader._begin, "self._check_still_open(log)", "pass")),
        Simulated("MonotoneIds", 20),
    ),
    Mutant(
        "an_id_that_cannot_be_marked_is_a_stages_fault",
        Section.OWN,
        "a checkpoint whose id cannot be marked at once is aborted, because a stage declined",
        rewrite(
            Edit(
                Leader._begin,
                "await self._marks.insist(Mark(barrier.checkpoint_id))",
                "try:\n"
                "    await Mark(barrier.checkpoint_id)\n"
                "except StoreUnavailable as error:\n"
                "    self._abort(barrier.checkpoint_id, AbortReason.STAGE_DECLINED, str(error))\n"
                "    return",
            )
        ),
        Simulated("RightlyBlamed", 20),
    ),
    Mutant(
        "a_store_that_does_not_answer_is_a_stages_fault",
        Section.OWN,
        "a checkpoint that nobody has heard of times out, because stages have not reported",
        rewrite(Edit(Leader.on_time, "self._give_up_beginning()", "pass")),
        Simulated("RightlyBlamed", 40),
    ),
    Mutant(
        "prepares_overtake_one_another",
        Section.OWN,
        "Prepare is announced in the order in which the ids happened to be marked",
        rewrite(
            Edit(
                Leader._begin_all,
                "await self._begin(self._begins[0])",
                "self._start(self._begin(self._begins[0]))",
            )
        ),
        Simulated("MonotoneIds", 60, scenarios.many_at_a_time),
    ),
    Mutant(
        "a_restarted_process_runs_its_stages_again",
        Section.OWN,
        "a process that has crashed runs the same stages a second time in one generation",
        rewrite(Edit(Member.on_start, "or order.incarnation != self._host.incarnation", "")),
        Simulated("RunOnce", 10, scenarios.crashes_unnoticed),
    ),
    Mutant(
        "a_member_that_failed_says_nothing",
        Section.OWN,
        "the query of a stage has died, and nobody goes back to the last checkpoint",
        rewrite(
            Edit(Member._fail, "self._host.send(self._leader, self._failure)", "pass"),
            Edit(Member.on_time, "if self._failure is not None:", "if False:"),
        ),
        Simulated("Liveness", 10),
    ),
    Mutant(
        "a_member_that_failed_says_so_once",
        Section.OWN,
        "the leader never hears that a query has died, if the word of it gets lost",
        rewrite(Edit(Member.on_time, "if self._failure is not None:", "if False:")),
        flow_properties.what_gets_lost_is_said_again,
    ),
    # -- cutting and storing
    Mutant(
        "gates_never_close",
        Section.OWN,
        "an input that is at its barrier goes on flowing",
        rewrite(
            Edit(Aligner.is_open, "return not self._input(name).closed", "return True"),
            Edit(Aligner.on_segment, "if source.closed:", "if False:"),
        ),
        Simulated("ConsistentCut", 20),
    ),
    Mutant(
        "an_abort_leaves_gates_closed",
        Section.OWN,
        "an input that was closed for a checkpoint stays closed when that is aborted",
        rewrite(Edit(Aligner._abandon, "self._reopen(actions)", "pass")),
        Simulated("Liveness", 30),
    ),
    Mutant(
        "a_drained_stage_goes_on",
        Section.OWN,
        "a stage takes what comes after the last barrier before a stop",
        rewrite(Edit(Aligner._cut, "if barrier.is_drain:", "if False:")),
        properties.nothing_flows_after_a_drain,
    ),
    Mutant(
        "a_drained_stage_begins_batches",
        Section.OWN,
        "a source reads on after the last barrier before a stop",
        rewrite(Edit(is_drained, "self._aligner.is_drained", "False")),
        Simulated("NothingAfterDrain", 40, scenarios.drained),
    ),
    Mutant(
        "a_watermark_that_is_not_set_is_skipped",
        Section.OWN,
        "a stage that has yet to see event time does not hold the watermark of its member back",
        rewrite(Edit(watermark_of, " if len(known) == len(own) else None", "")),
        Simulated("WatermarkHeldBack", 30),
    ),
    Mutant(
        "a_part_is_reported_though_its_table_refuses_it",
        Section.OWN,
        "a checkpoint is decided that one of the tables then refuses, while another shows it",
        rewrite(Edit(StageCheckpoints._finish, "await CheckSealed(self.name, committable)", "pass")),
        flow_properties.what_a_table_refuses_is_declined,
    ),
    Mutant(
        "a_snapshot_is_stored_beside_another",
        Section.OWN,
        "a snapshot builds on one before it that is yet to be stored, and may never be",
        rewrite(Edit(StageCheckpoints._begin, "if not self._is_storing:", "if True:")),
        flow_properties.snapshots_are_stored_one_after_the_other,
    ),
    Mutant(
        "in_flight_bytes_are_not_bounded",
        Section.OWN,
        "an unaligned cut pins any amount of data",
        rewrite(
            Edit(Aligner._try_cut, "self._unconsumed_bytes > self._config.max_inflight_bytes", "False"),
            Edit(Aligner._record, "alignment.inflight_bytes > self._config.max_inflight_bytes", "False"),
        ),
        Simulated("InFlightAllowed", 60),
    ),
    Mutant(
        "a_sink_is_cut_unaligned",
        Section.OWN,
        "a sink is cut before it has all the rows of its checkpoint",
        rewrite(Edit(Aligner.__init__, "not is_sink and", "")),
        Simulated("InFlightAllowed", 30),
    ),
    Mutant(
        "an_unaligned_checkpoint_is_called_aligned",
        Section.OWN,
        "readers who want one source prefix in all tables are given a checkpoint that has several",
        rewrite(Edit(Leader._decide, "aligned=aligned,\n", "aligned=True,\n")),
        Simulated("SourcePrefix", 20, scenarios.many_unaligned),
    ),
    # -- deleting
    Mutant(
        "only_the_newest_is_spared",
        Section.OWN,
        "files are deleted that a checkpoint needs which the log retains",
        rewrite(
            Edit(
                deletable,
                "needed = frozenset().union(*(references[checkpoint_id] for checkpoint_id in retained))",
                "needed = references[retained[-1]]",
            )
        ),
        Simulated("NothingNeededDeleted", 15),
    ),
    Mutant(
        "deleting_by_a_record_in_doubt",
        Section.OWN,
        "files are deleted by a record that is not known to be in the log",
        rewrite(
            Edit(Leader._decide, "self.log.append(proposed)", "pass"),
            Edit(
                Leader._decide,
                "answer, log = await self._store.claim(proposed)",
                "self.log.append(proposed)\n"
                "self._reports[checkpoint_id] = reports\n"
                "await self._remove_unneeded(checkpoint_id)\n"
                "answer, log = await self._store.claim(proposed)",
            ),
        ),
        Simulated("NothingNeededDeleted", 15),
    ),
    Mutant(
        "files_of_newer_generations_are_deleted",
        Section.OWN,
        "a run that was superseded deletes what the run after it has written",
        rewrite(Edit(deletable, "file.generation <= generation and", "")),
        Simulated("NothingNeededDeleted", 20, scenarios.leaders_asleep),
    ),
    Mutant(
        "an_idle_checkpoint_pushes_out_others",
        Section.OWN,
        "a night in which nothing happens leaves nothing but checkpoints that are all the same",
        rewrite(Edit(retained_after, "if older and content and older[0].content == content:", "if False:")),
        Simulated("NoCheckpointLost", 10, scenarios.soon_idle),
    ),
    Mutant(
        "no_aligned_checkpoint_is_retained",
        Section.OWN,
        "under steady backpressure all retained checkpoints are unaligned, and no two tables can be read alike",
        rewrite(Edit(retained_after, "if not aligned:", "if False:")),
        Simulated("NoCheckpointLost", 20, scenarios.many_unaligned),
    ),
    Mutant(
        "a_clock_that_jumps_deletes",
        Section.OWN,
        "a clock that jumps makes all checkpoints but one look old, and they are deleted",
        rewrite(
            Edit(
                retained_after,
                "kept = older[: config.max_retained - 1]",
                "kept = [each for each in older[: config.max_retained - 1] if at_ms - each.at_ms < config.retain_ms]",
            )
        ),
        Simulated("NoCheckpointLost", 10, scenarios.soon_idle),
    ),
    Mutant(
        "a_record_far_back_is_trimmed_with_the_log",
        Section.OWN,
        "the record of a retained checkpoint is deleted, because the log no longer reaches back to it",
        rewrite(Edit(Leader._remove_unneeded, "log.kept_before_start", "frozenset()")),
        Simulated("Protocol", 10, scenarios.soon_idle),
    ),
    Mutant(
        "nothing_is_thinned_out",
        Section.OWN,
        "every checkpoint of the time is retained, and each record names thousands of them",
        rewrite(
            Edit(_thinned, "record.at_ms * PARTS // retain_ms", "record.checkpoint_id"),
            Edit(_thinned, "[: PARTS + 1]", ""),
        ),
        properties.what_is_retained_by_time_has_a_bound,
    ),
    Mutant(
        "a_clock_that_jumps_lets_what_is_retained_grow",
        Section.OWN,
        "what a clock that was ahead has dated is retained without bound",
        rewrite(Edit(_thinned, "[: PARTS + 1]", "")),
        properties.what_is_retained_by_time_has_a_bound,
    ),
    # -- recovering
    Mutant(
        "the_log_is_read_before_the_sinks",
        Section.OWN,
        "a sink that an old leader committed meanwhile looks as if it were ahead of the log",
        rewrite(
            Edit(
                Opening.recover,
                "log = await self.store.insist(ReadLog())",
                "log, sinks = earlier, await self.store.insist(ReadSinks())",
            ),
            Edit(
                Opening.recover,
                "sinks = await self.store.insist(ReadSinks())",
                "earlier = await self.store.insist(ReadLog())",
            ),
        ),
        Simulated("NoCheckpointLost", 60, scenarios.slow_recovery),
    ),
    Mutant(
        "what_another_run_writes_is_left_over",
        Section.OWN,
        "a run refuses a root because of what another one has begun to write there meanwhile",
        rewrite(Edit(Opening._has_leftovers, "log = await self.store.insist(ReadLog())", "return True")),
        Simulated("NoCheckpointLost", 120, scenarios.opened_at_once),
    ),
    Mutant(
        "falling_back_without_a_fence",
        Section.OWN,
        "an old leader's commit of the skipped checkpoint arrives after the fall back",
        rewrite(Edit(_fall_back, "if any(record.fence < fence for record in facts.sinks.values()):", "if False:")),
        properties.no_fall_back_before_the_sinks_are_fenced,
    ),
    # -- sources
    Mutant(
        "a_torn_slot_is_claimed",
        Section.OWN,
        "the record behind a torn one is claimed where that one lies, for ever in vain",
        rewrite(
            Edit(DecisionLog.opening, "self.next_slot,", "self._end + 1,"),
            Edit(DecisionLog.opening, "self.next_generation,", "self.generation + 1,"),
            Edit(DecisionLog.opening, "self._undecided,", "0,"),
        ),
        Simulated("Liveness", 3, scenarios.power_lost),
    ),
    Mutant(
        "what_cannot_be_understood_was_never_decided",
        Section.OWN,
        "a record that a newer version has written is taken for one that was torn, and decided anew",
        rewrite(
            Edit(is_torn, "msgspec.json.decode(data)", "_decoder.decode(data)"),
            Edit(is_torn, 'data.endswith(b"}") or ', ""),
        ),
        properties.a_record_that_is_whole_was_decided,
    ),
    Mutant(
        "what_was_changed_was_never_decided",
        Section.OWN,
        "the last record of the log, of which a bit was flipped, is passed over with the checkpoint that it completed",
        rewrite(Edit(is_torn, 'data.endswith(b"}") or ', "")),
        properties.a_record_that_was_changed_is_damage,
    ),
    Mutant(
        "the_checksum_of_a_record_is_not_compared",
        Section.OWN,
        "a number that was edited in a record is believed",
        rewrite(Edit(decode_decision, "if not fits:", "if not data:")),
        properties.a_record_that_was_changed_is_damage,
    ),
)
