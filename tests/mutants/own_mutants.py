"""What this design could get wrong on its own: its guarantees, each taken away in turn."""

from __future__ import annotations

from typing import Final

import pytest

from tests.mutants import played_properties, properties, scenarios, table_properties
from tests.mutants.mutation import Edit, Mutant, Section, Simulated, Switch, rewrite
from tidegate.engine.control import Remote
from tidegate.engine.generation import Generation
from tidegate.engine.order import in_order
from tidegate.engine.pausing import PausableSource
from tidegate.engine.stage import RunningStage
from tidegate.engine.status import Observer
from tidegate.engine.tables import _last_with_rows, _moved
from tidegate.protocol import coordinator
from tidegate.protocol.aligner import Aligner
from tidegate.protocol.backpressure import Backpressure
from tidegate.protocol.coordinator import Coordinator, Event, Phase
from tidegate.protocol.decision_log import DecisionLog, is_torn
from tidegate.protocol.recovery import _fall_back
from tidegate.protocol.retention import _thinned, deletable, retained_after
from tidegate.sinks.delta import BoundDeltaTable
from tidegate.sinks.function import _Records
from tidegate.sinks.staging import refuse_put_back
from tidegate.sinks.upkeep import unneeded_files
from tidegate.spark.causes import failure_of
from tidegate.spark.gate import Gate
from tidegate.spark.snapshot import Snapshotter
from tidegate.spark.sources import going_on
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import decode_manifest
from tidegate.testing.simulator.instance import SimulatedInstance
from tidegate.testing.simulator.leader import SimulatedLeader
from tidegate.testing.simulator.stage import SimulatedStage


def deciding_may_be_aborted(*edits: Edit) -> Switch:
    def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
        aborting = {**coordinator.TRANSITIONS, (Phase.DECIDING, Event.ABORT): Phase.ABORTED}
        monkeypatch.setattr(coordinator, "TRANSITIONS", aborting)
        rewrite(*edits)(monkeypatch)

    return put_back


OWN_DEFECTS: Final = (
    # -- deciding
    Mutant(
        "a_claim_is_not_read_back",
        Section.OWN,
        "a claim counts as won because the record was created, though in a trimmed slot",
        rewrite(
            Edit(SimulatedLeader._lead, "proposed = log.opening(", "self._log = log\nproposed = log.opening("),
            Edit(
                SimulatedLeader._claim,
                "yield self._store.claim(proposed)",
                "if (yield self._store.claim(proposed)):\n"
                "    return ClaimAnswer.WON, DecisionLog.from_records([*self._log, proposed])",
            ),
        ),
        Simulated("MonotoneIds", 120, scenarios.leaders_asleep),
    ),
    Mutant(
        "a_claim_without_answer_is_lost",
        Section.OWN,
        "a claim that failed is taken for one that was not made, though the record was written",
        deciding_may_be_aborted(
            Edit(
                SimulatedLeader._decide,
                "answer, log = yield from self._claim(proposed)",
                "try:\n"
                "    yield self._store.claim(proposed)\n"
                "except StoreUnavailable:\n"
                "    reason = AbortReason.QUORUM_FAILED\n"
                '    self._execute(self._coordinator._abort(checkpoint, reason, "", self._world.now))\n'
                "    return\n"
                "answer, log = yield from self._claim(proposed)",
            )
        ),
        Simulated("Protocol", 20, scenarios.answers_lost),
    ),
    Mutant(
        "a_timeout_aborts_what_is_being_decided",
        Section.OWN,
        "a checkpoint that is being decided is aborted by its timeout",
        deciding_may_be_aborted(Edit(Coordinator.on_time, "checkpoint.phase is not Phase.DECIDING and", "")),
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
            Edit(SimulatedLeader._decide, "self._log.append(proposed)", "pass"),
            Edit(
                SimulatedLeader._decide,
                "self._commits.on_permit(permit_commit(self._log, checkpoint_id, self.generation), self._world.now)",
                "pass",
            ),
            Edit(
                SimulatedLeader._decide,
                "answer, log = yield from self._claim(proposed)",
                "self._log.append(proposed)\n"
                "self._manifests[checkpoint_id] = manifest\n"
                "permit = permit_commit(self._log, checkpoint_id, self.generation)\n"
                "self._commits.on_permit(permit, self._world.now)\n"
                "self._commit_due()\n"
                "answer, log = yield from self._claim(proposed)",
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
        "a_table_is_not_asked_whether_it_takes_the_rows",
        Section.OWN,
        "a checkpoint is decided that one of the tables then refuses, while another shows it",
        rewrite(Edit(RunningStage._check, "if part.checked is None and isinstance", "if False and isinstance")),
        played_properties.what_a_table_would_refuse_is_not_decided,
    ),
    # -- ids and announcements
    Mutant(
        "marks_are_not_checked_against_the_log",
        Section.OWN,
        "an id is announced although a newer generation may have missed that it is used",
        rewrite(Edit(SimulatedLeader._begin, "if log.generation > self.generation:", "if False:")),
        Simulated("MonotoneIds", 20),
    ),
    Mutant(
        "prepares_overtake_one_another",
        Section.OWN,
        "Prepare is announced in the order in which the ids happened to be marked",
        rewrite(
            Edit(
                SimulatedLeader._begin_all,
                "yield from self._begin(self._begins[0].barrier, self._begins[0].attempt)",
                "begin = self._begin(self._begins[0].barrier, self._begins[0].attempt)\n"
                "self._world.spawn(self._process, begin)\n"
                "yield self._world.sleep(0)",
            )
        ),
        Simulated("MonotoneIds", 60, scenarios.many_at_a_time),
    ),
    Mutant(
        "a_restarted_process_runs_its_stages_again",
        Section.OWN,
        "a process that has crashed runs the same stages a second time in one generation",
        rewrite(Edit(SimulatedInstance.on_start, "or order.incarnation != self.process.incarnation", "")),
        Simulated("Protocol", 80, scenarios.crashes_unnoticed),
    ),
    # -- cutting and storing
    Mutant(
        "gates_never_close",
        Section.OWN,
        "an input that is at its barrier goes on flowing",
        rewrite(
            Edit(Aligner.is_open, "return not self._input(name).closed", "return True"),
            Edit(Aligner.on_segment, "if source.closed or source.ended:", "if source.ended:"),
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
        rewrite(Edit(SimulatedLeader._decide, "aligned=aligned,\n", "aligned=True,\n")),
        Simulated("SourcePrefix", 20, scenarios.many_unaligned),
    ),
    Mutant(
        "the_barrier_goes_before_the_output_of_the_cut",
        Section.OWN,
        "the barrier is forwarded before the output of the batch that is the cut was appended",
        rewrite(
            Edit(
                SimulatedStage._commit_batch,
                "self.execute(self.aligner.on_committed(self._batch, positions, self._world.now))",
                "pass",
            ),
            Edit(
                SimulatedStage._commit_batch,
                "if output:",
                "self.execute(self.aligner.on_committed(self._batch, positions, self._world.now))\nif output:",
            ),
        ),
        Simulated("SourcePrefix", 15),
    ),
    Mutant(
        "a_snapshot_builds_on_one_that_was_not_stored",
        Section.OWN,
        "the chain of a snapshot names one before it that failed to upload",
        rewrite(
            Edit(
                SimulatedStage._upload,
                "for _ in range(_UPLOAD_TRIES):",
                "self._chain = part.chain\nfor _ in range(_UPLOAD_TRIES):",
            )
        ),
        Simulated("NothingNeededDeleted", 20, scenarios.failing_store),
    ),
    Mutant(
        "a_committable_covers_only_its_own_epoch",
        Section.OWN,
        "rows staged for a checkpoint that was aborted or not committed are not in the next committable",
        rewrite(
            Edit(
                SimulatedStage._begin_part,
                "self._uploads.append(part)",
                "self._uploads.append(part)\nself._staged.clear()",
            )
        ),
        Simulated("ExactlyOnce", 20),
    ),
    Mutant(
        "a_full_snapshot_stores_nothing_anew",
        Section.OWN,
        "a full snapshot refers to files of other checkpoints, and is damaged with them",
        rewrite(Edit(Snapshotter.take, "if full:", "if False:")),
        played_properties.a_full_snapshot_vouches_for_nothing_that_is_damaged,
    ),
    Mutant(
        "a_full_snapshot_looks_at_nothing_that_it_copies",
        Section.OWN,
        "a full snapshot vouches for damaged files as whole",
        rewrite(
            Edit(
                Snapshotter._copy,
                "if checksum(self._root, target) == (file.size_bytes, file.sha256):",
                "if True:",
            )
        ),
        played_properties.a_full_snapshot_vouches_for_nothing_that_is_damaged,
    ),
    # -- deleting
    Mutant(
        "only_the_newest_is_spared",
        Section.OWN,
        "files are deleted that a checkpoint needs which the log retains",
        rewrite(
            Edit(
                deletable,
                "needed = in_use.union(*(references[checkpoint_id] for checkpoint_id in log.retained))",
                "needed = in_use | references[log.retained[-1]]",
            )
        ),
        Simulated("NothingNeededDeleted", 15),
    ),
    Mutant(
        "deleting_by_a_record_in_doubt",
        Section.OWN,
        "files are deleted by a record that is not known to be in the log",
        rewrite(
            Edit(SimulatedLeader._decide, "self._log.append(proposed)", "pass"),
            Edit(
                SimulatedLeader._decide,
                "answer, log = yield from self._claim(proposed)",
                "self._log.append(proposed)\n"
                "self._manifests[checkpoint_id] = manifest\n"
                "yield from self._clean_up(checkpoint_id)\n"
                "answer, log = yield from self._claim(proposed)",
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
        rewrite(
            Edit(
                DecisionLog.has_dropped,
                " and all(record.slot != slot for record in self._completed.values())",
                "",
            )
        ),
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
                SimulatedLeader._lead,
                "sinks = yield from self._read_sinks()",
                "earlier = yield from self._read_log()",
            ),
            Edit(
                SimulatedLeader._lead,
                "log = yield from self._read_log()",
                "log, sinks = earlier, (yield from self._read_sinks())",
            ),
        ),
        Simulated("NoCheckpointLost", 80, scenarios.many_elections),
    ),
    Mutant(
        "falling_back_without_a_fence",
        Section.OWN,
        "an old leader's commit of the skipped checkpoint arrives after the fall back",
        rewrite(Edit(_fall_back, "if any(record.fence < fence for record in facts.sinks.values()):", "if False:")),
        properties.no_fall_back_before_the_sinks_are_fenced,
    ),
    # -- backpressure
    Mutant(
        "a_writer_goes_on_at_once",
        Section.OWN,
        "a writer goes on as soon as its backlog is below the bound, so a source is paused again and again",
        rewrite(
            Edit(
                Backpressure.on_backlog,
                "segments * 2 <= bound.max_segments and size_bytes * 2 <= bound.max_bytes",
                "segments <= bound.max_segments and size_bytes <= bound.max_bytes",
            )
        ),
        played_properties.a_writer_goes_on_only_when_its_readers_are_down_to_half,
    ),
    Mutant(
        "a_stage_reads_on_whoever_is_behind",
        Section.OWN,
        "a stage whose readers are too far behind gets more to read, so its output grows without bound",
        rewrite(Edit(RunningStage.poll, "if not self.is_held_back:", "if True:")),
        played_properties.a_stage_that_is_held_back_gets_nothing_more_to_read,
    ),
    Mutant(
        "a_late_table_keeps_its_sink_from_a_barrier",
        Section.OWN,
        "a sink is held back from the checkpoint that would make visible what holds it back",
        rewrite(Edit(Generation._look_at_tables, " and not is_wanted", "")),
        played_properties.a_barrier_passes_a_sink_whose_table_is_late,
    ),
    Mutant(
        "a_late_table_holds_nothing_back_while_a_checkpoint_is_stored",
        Section.OWN,
        "a sink reads on without bound while its part of a checkpoint waits for its table",
        rewrite(Edit(Generation._look_at_tables, "not stage.has_cut(checkpoint.checkpoint_id)", "True")),
        played_properties.a_sink_whose_table_is_late_waits_behind_a_barrier,
    ),
    Mutant(
        "abandoned_attempts_are_never_looked_at",
        Section.OWN,
        "what a source leaves behind at each pause stays for as long as the generation lives",
        rewrite(Edit(RunningStage.take_abandoned, "< self._live_attempt:", "< 0:")),
        played_properties.what_is_written_late_into_an_abandoned_attempt_is_removed,
    ),
    Mutant(
        "a_paused_source_goes_on_where_it_was_stopped",
        Section.OWN,
        "the batch that a pause has hit is run again in the folders in which it was tried",
        rewrite(
            Edit(PausableSource._rebuild_and_start, "self._stage.rebuild(*self._folders)", "pass"),
            Edit(
                PausableSource._rebuild_and_start,
                "return self._start(*self._folders)",
                "return self._start(self._stage.checkpoint, self._stage.output)",
            ),
        ),
        played_properties.an_interrupted_batch_is_left_behind_by_a_pause,
    ),
    # -- tables
    Mutant(
        "what_a_table_shows_is_not_remembered",
        Section.OWN,
        "a checkpoint without rows goes on from any state of a table: one that was put back keeps a hole",
        rewrite(Edit(RunningStage.on_visible, "self._shown_through = max([", "max([")),
        played_properties.a_checkpoint_goes_on_after_what_its_table_was_seen_to_show,
    ),
    Mutant(
        "a_restored_run_forgets_what_a_table_shows",
        Section.OWN,
        "after a restart a checkpoint without rows goes on from any state of a table",
        rewrite(Edit(RunningStage.__init__, "self._shown_through = restored.shown_through", "pass")),
        played_properties.a_checkpoint_goes_on_after_what_its_table_was_seen_to_show,
    ),
    Mutant(
        "a_checkpoint_counts_its_own_rows_as_shown",
        Section.OWN,
        "a checkpoint whose rows are yet to be committed refuses the table that they are for",
        rewrite(Edit(RunningStage.sealed, "self._shown_through)", "self.batch)")),
        played_properties.a_checkpoint_goes_on_after_what_its_table_was_seen_to_show,
    ),
    Mutant(
        "a_table_that_was_put_back_is_taken_for_whole",
        Section.OWN,
        "a table that lacks the rows of its last epoch is committed to",
        rewrite(
            Edit(refuse_put_back, "next_batch <= committable.shown_through", "next_batch < committable.shown_through")
        ),
        table_properties.a_table_that_was_put_back_is_refused,
    ),
    Mutant(
        "a_put_back_table_is_looked_for_only_where_there_are_rows",
        Section.OWN,
        "a checkpoint without rows passes for committed to a table that lacks an epoch",
        rewrite(
            Edit(
                BoundDeltaTable._commit,
                "refuse_put_back(self.describe(), self.place, epoch, shown, committable)",
                "if any(file.batch >= shown and file.rows for file in committable.files):\n"
                "    refuse_put_back(self.describe(), self.place, epoch, shown, committable)",
            )
        ),
        table_properties.a_table_that_was_put_back_is_refused,
    ),
    Mutant(
        "a_claim_takes_the_place_of_another",
        Section.OWN,
        "a second root claims a table that has an owner",
        rewrite(
            Edit(BoundDeltaTable.claim, "self._check_root(table)", "pass"),
            Edit(BoundDeltaTable.claim, 'self._record(table, "root") or ', ""),
        ),
        table_properties.a_table_is_of_one_root,
    ),
    Mutant(
        "a_table_that_was_found_free_is_claimed_unseen",
        Section.OWN,
        "of two roots that claim a table at once both believe to have it",
        rewrite(
            Edit(BoundDeltaTable.claim, 'self._record(table, "root") or self._transact', "self._transact"),
            Edit(BoundDeltaTable.claim, "self._check_root(table)", "pass"),
        ),
        table_properties.of_two_that_claim_a_table_one_wins,
    ),
    Mutant(
        "a_table_is_owned_only_at_start",
        Section.OWN,
        "a run goes on committing to a table that another root has claimed since",
        rewrite(Edit(BoundDeltaTable._commit, "self._check_root(table)", "pass")),
        table_properties.a_table_is_of_one_root,
    ),
    Mutant(
        "a_table_that_refuses_rows_is_no_reason_to_give_up",
        Section.OWN,
        "a run whose table never takes an epoch restarts for ever: checkpoints are completed meanwhile",
        rewrite(Edit(Generation.__init__, "self._is_base_shown = base is None", "self._is_base_shown = True")),
        played_properties.a_run_comes_no_further_while_a_table_refuses_what_it_started_from,
    ),
    Mutant(
        "a_run_that_finds_its_disk_full_leaves_no_word",
        Section.OWN,
        "a status that cannot be written whole is not written at all: the run seems to have been killed",
        rewrite(Edit(Remote._write, "self._write_in_short(status, error)", "pass")),
        played_properties.a_run_that_cannot_write_its_status_still_says_how_it_ended,
    ),
    Mutant(
        "what_the_next_run_does_is_foretold_by_the_log_alone",
        Section.OWN,
        "`status` says that the next run goes on from a checkpoint whose files are gone",
        rewrite(
            Edit(
                InspectedRoot.outlook,
                "health[checkpoint_id] = self.damage_of(self.find(checkpoint_id))",
                "health[checkpoint_id] = None",
            )
        ),
        played_properties.what_the_next_run_will_skip_is_not_said_to_be_gone_on_from,
    ),
    Mutant(
        "a_manifest_may_name_any_file",
        Section.OWN,
        "what a manifest names as in flight is deleted when it is consumed, wherever it lies",
        rewrite(Edit(decode_manifest, "if not RootPaths.is_inside(path):", "if False:")),
        played_properties.a_manifest_names_nothing_outside_of_its_root,
    ),
    # -- stages on Spark
    Mutant(
        "a_query_that_was_stopped_counts_as_done",
        Section.OWN,
        "checkpoints go on, though the input of a stage is never read again",
        rewrite(Edit(RunningStage.check_query, "not self.may_end or", "")),
        played_properties.a_query_that_was_stopped_has_failed_its_stage,
    ),
    Mutant(
        "a_nudge_is_a_segment",
        Section.OWN,
        "a stage whose first input has delivered nothing can never be restored: segments are numbered from 1",
        rewrite(
            Edit(
                Gate.nudge,
                "[self._line(self._position, nothing)]",
                "self._lines([Segment(self._position, 0, (nothing,))])",
            )
        ),
        played_properties.an_input_that_has_delivered_nothing_can_be_nudged,
    ),
    # -- order
    Mutant(
        "a_batch_reads_several_segments_where_order_matters",
        Section.OWN,
        "rows of several segments meet in one batch, and of a key any one of them stays in the table",
        rewrite(Edit(Gate.flush, "self._window - len", "WINDOW - len")),
        properties.a_batch_that_must_keep_order_sees_one_segment,
    ),
    Mutant(
        "only_the_sink_keeps_order",
        Section.OWN,
        "a stage between counts and their table mixes the counts of several batches",
        rewrite(Edit(in_order, "wanted.update(each.inputs)", "pass")),
        properties.order_is_kept_on_the_whole_way_to_a_table_with_a_key,
    ),
    Mutant(
        "an_aggregation_of_updates_takes_them_in_any_order",
        Section.OWN,
        "a stage that aggregates updates reads several of one key in one batch",
        rewrite(
            Edit(in_order, "(each.name not in aggregating or each.name in updated)", "each.name not in aggregating")
        ),
        properties.order_is_kept_on_the_whole_way_to_a_table_with_a_key,
    ),
    Mutant(
        "newest_by_is_not_believed",
        Section.OWN,
        "a table that has a column to order by holds up all stages before it",
        rewrite(Edit(in_order, " and each.sink.needs_order", "")),
        properties.order_is_kept_on_the_whole_way_to_a_table_with_a_key,
    ),
    # -- what is told
    Mutant(
        "the_moment_of_a_trigger_is_taken_at_every_look",
        Section.OWN,
        "one checkpoint was begun at two times, by its manifest and by the run",
        rewrite(Edit(Generation.triggered_at, "return self._triggered_at[checkpoint_id]", "return now()")),
        played_properties.a_checkpoint_is_told_as_its_manifest_has_it,
    ),
    Mutant(
        "stages_are_told_as_they_are_after_an_abort",
        Section.OWN,
        "of a checkpoint that was aborted nobody can tell which stage it waited for",
        rewrite(Edit(Generation._abort, "self._parts_when_aborted.setdefault(", "dict().setdefault(")),
        played_properties.an_aborted_checkpoint_tells_how_far_each_stage_had_come,
    ),
    Mutant(
        "what_was_decided_before_a_restart_is_never_complete",
        Section.OWN,
        "a checkpoint waits for its tables for ever, though the next generation has committed it",
        rewrite(Edit(Observer._of_earlier, 'each.state == "committing" and is_shown', "False")),
        played_properties.what_was_decided_before_a_restart_is_complete_once_tables_show_it,
    ),
    Mutant(
        "a_table_is_made_anew_though_the_first_rows_were_sealed_for_it",
        Section.OWN,
        "a table that is gone is created anew without the rows of the newest checkpoint",
        rewrite(
            Edit(
                _last_with_rows,
                "max([sealed.shown_through, *(each.batch for each in staged if each.rows)])",
                "sealed.shown_through",
            )
        ),
        played_properties.a_table_is_not_made_anew_where_rows_were_sealed_for_it,
    ),
    Mutant(
        "what_was_staged_stays_where_its_table_was",
        Section.OWN,
        "rows that a checkpoint has sealed are sought where the table was before it was moved",
        rewrite(Edit(_moved, "if not path.is_relative_to(then.address):", "if True:")),
        played_properties.what_was_staged_moves_with_its_table,
    ),
    Mutant(
        "a_functions_record_takes_the_place_of_a_fence",
        Section.OWN,
        "an old run's commit that was under way when it was fenced goes on, and takes the fence back",
        rewrite(Edit(_Records.follow, "self._files.create", "self._files.write")),
        table_properties.a_fence_stops_a_functions_commit_that_is_under_way,
    ),
    Mutant(
        "a_functions_record_counts_though_a_newer_one_is_there",
        Section.OWN,
        "a run that has slept until its number was empty again believes that it has followed the newest record",
        rewrite(Edit(_Records.follow, "self.newest() != (number + 1, record)", "False")),
        table_properties.a_fence_stops_a_functions_commit_that_is_under_way,
    ),
    # -- upkeep of tables
    Mutant(
        "vacuum_does_not_ask_what_is_retained",
        Section.OWN,
        "files are deleted by their age alone, though a retained checkpoint is read by them",
        rewrite(Edit(BoundDeltaTable._vacuum, "versions_of(self.path, self.place.stage, retained())", "[]")),
        table_properties.upkeep_shows_the_same_at_every_retained_checkpoint,
    ),
    Mutant(
        "vacuum_takes_what_is_not_added_yet",
        Section.OWN,
        "a file that another writer has just written is deleted before it is added",
        rewrite(Edit(unneeded_files, "max(kept_s, _UNKNOWN_FOR_S)", "kept_s")),
        table_properties.upkeep_shows_the_same_at_every_retained_checkpoint,
    ),
    Mutant(
        "upkeep_does_not_look_whether_files_are_still_shown",
        Section.OWN,
        "what was made of some files is added though another writer has replaced them meanwhile",
        rewrite(Edit(BoundDeltaTable._replace, "active.issuperset(file.path for file in each.files)", "True")),
        table_properties.upkeep_shows_the_same_at_every_retained_checkpoint,
    ),
    Mutant(
        "upkeep_unlinks_what_seems_to_have_failed",
        Section.OWN,
        "a transaction is made and its answer lost, and the files that it has added are deleted",
        rewrite(Edit(BoundDeltaTable._unlink, "if path not in shown:", "if True:")),
        table_properties.upkeep_shows_the_same_at_every_retained_checkpoint,
    ),
    # -- sources
    Mutant(
        "a_position_is_taken_up_in_another_stream",
        Section.OWN,
        "a source goes on from where it stood though it reads another topic",
        rewrite(Edit(going_on, "not all(map(_is_same, then, now))", "False")),
        properties.a_source_goes_on_only_in_what_it_read,
    ),
    Mutant(
        "a_topic_that_was_created_anew_is_taken_for_the_old_one",
        Section.OWN,
        "a source goes on from where it stood in a topic of which only the name is left",
        rewrite(Edit(going_on, "if before.ids.get(topic, found) != found:", "if False:")),
        properties.a_topic_that_was_created_anew_is_another,
    ),
    Mutant(
        "a_topics_id_is_forgotten_while_its_broker_is_away",
        Section.OWN,
        "a run that starts while the broker does not answer leaves nothing for the next one to compare",
        rewrite(Edit(going_on, "ids={**before.ids, **stream.ids}", "ids=stream.ids")),
        properties.a_topic_that_was_created_anew_is_another,
    ),
    Mutant(
        "a_topic_that_is_gone_is_waited_for",
        Section.OWN,
        "a run restarts again and again for a topic that was deleted",
        rewrite(Edit(going_on, """if found_now.ids.get(topic, "unknown") == "":""", "if False:")),
        properties.a_topic_that_is_gone_is_not_waited_for,
    ),
    Mutant(
        "what_is_lost_is_tried_again",
        Section.OWN,
        "a run restarts again and again for rows that are gone from its source",
        rewrite(Edit(failure_of, "if _LOSS.search(said) is None:", "if True:")),
        properties.what_a_source_has_lost_is_not_tried_again,
    ),
    Mutant(
        "a_torn_slot_is_claimed",
        Section.OWN,
        "the record behind a torn one is claimed where that one lies, for ever in vain",
        rewrite(
            Edit(
                DecisionLog.opening,
                "self.next_slot, claimant, self.next_generation, base, self.retained, self.first_slot, self._undecided",
                "self._end + 1, claimant, self.generation + 1, base, self.retained, self.first_slot",
            )
        ),
        Simulated("Liveness", 3, scenarios.power_lost),
    ),
    Mutant(
        "what_cannot_be_understood_was_never_decided",
        Section.OWN,
        "a record that a newer version has written is taken for one that was torn, and decided anew",
        rewrite(Edit(is_torn, "msgspec.json.decode(data)", "_decoder.decode(data)")),
        properties.a_record_that_is_whole_was_decided,
    ),
)
