"""What a run on Spark could get wrong around the choreography: its guarantees, each taken away in turn."""

from __future__ import annotations

from typing import Final

from tests.mutants import control_properties, played_properties, properties, table_properties
from tests.mutants.mutation import Edit, Mutant, Section, rewrite
from tests.spark import state_in_place
from tidegate.engine.cleaning import Cleaning
from tidegate.engine.control import Desk, Remote
from tidegate.engine.generation import Generation
from tidegate.engine.leading import Leading
from tidegate.engine.order import in_order
from tidegate.engine.pausing import PausableSource
from tidegate.engine.requests import Asked
from tidegate.engine.stage.output import StagedOutput
from tidegate.engine.stage.progress import Progress
from tidegate.engine.stage.running import RunningStage
from tidegate.engine.status import Observer
from tidegate.engine.status_files import StatusFiles
from tidegate.engine.tables import _last_with_rows, _moved
from tidegate.flows.stage import StageCheckpoints
from tidegate.protocol.aligner import Aligner
from tidegate.protocol.backpressure import Backpressure
from tidegate.protocol.quorum import watermark_of
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.sinks.delta.upkeep import Keeper
from tidegate.sinks.delta.vacuum import unneeded_files
from tidegate.sinks.function import _Records
from tidegate.sinks.staging import refuse_put_back
from tidegate.spark import snapshot
from tidegate.spark.causes import failure_of
from tidegate.spark.gate import Gate
from tidegate.spark.snapshot import Snapshotter
from tidegate.spark.sources import going_on
from tidegate.storage.file_lists import check_inside
from tidegate.storage.inspection import InspectedRoot

OWN_DEFECTS: Final = (
    # -- deciding
    Mutant(
        "a_table_is_not_asked_whether_it_takes_the_rows",
        Section.OWN,
        "a checkpoint is decided that one of the tables then refuses, while another shows it",
        rewrite(Edit(RunningStage.checking_sealed, "if isinstance(sink, CheckingSink):", "if False:")),
        played_properties.what_a_table_would_refuse_is_not_decided,
    ),
    # -- cutting and storing
    Mutant(
        "a_source_without_a_batch_has_no_snapshot",
        Section.OWN,
        "where a source first stood is not on the disk: after a loss of power it starts where its stream is by then",
        rewrite(Edit(snapshot._unshared_files_at, "return [] if reads_gates else", "return [] if True else")),
        properties.a_snapshot_of_a_source_without_a_batch_has_where_it_stood,
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
                "if found is not None and is_same(found, file.size_bytes, file.sha256):",
                "if True:",
            )
        ),
        played_properties.a_full_snapshot_vouches_for_nothing_that_is_damaged,
    ),
    # -- what lies where Spark has written it
    Mutant(
        "what_is_swept_is_told_with_its_checkpoints_but_once",
        Section.OWN,
        "state that a retained checkpoint names is deleted by the sweep after the one that told of it",
        rewrite(
            Edit(
                Snapshotter._swept,
                "self._in_place.get(stored) or StoredFile(stored, self._generation)",
                "self._in_place.pop(stored, None) or StoredFile(stored, self._generation)",
            ),
            Edit(Snapshotter._swept, "if file.path not in self._told", "if True"),
        ),
        state_in_place.nothing_that_a_retained_checkpoint_names_is_swept,
    ),
    Mutant(
        "what_is_swept_is_not_kept_in_place",
        Section.OWN,
        "state that a retained checkpoint names is deleted with the attempt that wrote it",
        rewrite(
            Edit(
                Snapshotter.in_place,
                "frozenset(tuple(self._in_place))",
                "frozenset(tuple(self._in_place)) - self._told",
            )
        ),
        state_in_place.nothing_that_a_retained_checkpoint_names_goes_with_its_attempt,
    ),
    Mutant(
        "what_abandoned_attempts_have_left_is_not_swept",
        Section.OWN,
        "state that nobody needs stays as long as its generation, of each time that a source was paused",
        rewrite(Edit(Snapshotter._parted_elsewhere, "if file.before is not None and", "if False and")),
        state_in_place.nothing_that_a_retained_checkpoint_names_goes_with_its_attempt,
    ),
    Mutant(
        "a_full_snapshot_that_was_tried_in_vain_makes_what_was_before_it_stale",
        Section.OWN,
        "Spark cannot load the state of a restored stage again",
        rewrite(Edit(snapshot.stale_state, "oldest = min(oldest, begins_at.get(folder, 0))", "pass")),
        state_in_place.what_a_restored_stage_builds_upon_is_not_swept,
    ),
    # -- backpressure
    Mutant(
        "a_writer_goes_on_at_once",
        Section.OWN,
        "a writer goes on as soon as its backlog is below the bound, so a source is paused again and again",
        rewrite(
            Edit(
                Backpressure.on_backlog,
                "segments * 2 <= max_segments and size_bytes * 2 <= bound.max_bytes",
                "segments <= max_segments and size_bytes <= bound.max_bytes",
            )
        ),
        played_properties.a_writer_goes_on_only_when_its_readers_are_down_to_half,
    ),
    Mutant(
        "a_stage_reads_on_whoever_is_behind",
        Section.OWN,
        "a stage whose readers are too far behind gets more to read, so its output grows without bound",
        rewrite(Edit(RunningStage.flush, "if not self.is_held_back and", "if")),
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
        rewrite(Edit(Generation._look_at_tables, "not stage.checkpoints.has_cut(each)", "True")),
        played_properties.a_sink_whose_table_is_late_waits_behind_a_barrier,
    ),
    Mutant(
        "abandoned_attempts_are_never_looked_at",
        Section.OWN,
        "what a source leaves behind at each pause stays for as long as the generation lives",
        rewrite(Edit(Cleaning._left_by, "< attempts.before:", "< 0:")),
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
                "return self._start(self._stage.progress.checkpoint, self._stage.output_folder)",
            ),
        ),
        played_properties.an_interrupted_batch_is_left_behind_by_a_pause,
    ),
    # -- tables
    Mutant(
        "what_a_table_shows_is_not_remembered",
        Section.OWN,
        "a checkpoint without rows goes on from any state of a table: one that was put back keeps a hole",
        rewrite(Edit(StagedOutput.on_visible, "self._shown_through = max([", "max([")),
        played_properties.a_checkpoint_goes_on_after_what_its_table_was_seen_to_show,
    ),
    Mutant(
        "a_restored_run_forgets_what_a_table_shows",
        Section.OWN,
        "after a restart a checkpoint without rows goes on from any state of a table",
        rewrite(Edit(StagedOutput.__init__, "self._shown_through = sealed.shown_through", "self._shown_through = -1")),
        played_properties.a_checkpoint_goes_on_after_what_its_table_was_seen_to_show,
    ),
    Mutant(
        "a_checkpoint_counts_its_own_rows_as_shown",
        Section.OWN,
        "a checkpoint whose rows are yet to be committed refuses the table that they are for",
        rewrite(Edit(StagedOutput.sealed, "self._shown_through)", "through_batch)")),
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
            Edit(BoundDeltaTable.claim, "self._log.check_root(table)", "pass"),
            Edit(BoundDeltaTable.claim, 'self._log.recorded(table, "root") or ', ""),
        ),
        table_properties.a_table_is_of_one_root,
    ),
    Mutant(
        "a_table_that_was_found_free_is_claimed_unseen",
        Section.OWN,
        "of two roots that claim a table at once both believe to have it",
        rewrite(
            Edit(
                BoundDeltaTable.claim, 'self._log.recorded(table, "root") or self._log.transact', "self._log.transact"
            ),
            Edit(BoundDeltaTable.claim, "self._log.check_root(table)", "pass"),
        ),
        table_properties.of_two_that_claim_a_table_one_wins,
    ),
    Mutant(
        "a_table_is_owned_only_at_start",
        Section.OWN,
        "a run goes on committing to a table that another root has claimed since",
        rewrite(Edit(BoundDeltaTable._commit, "self._log.check_root(table)", "pass")),
        table_properties.a_table_is_of_one_root,
    ),
    Mutant(
        "a_table_that_refuses_rows_is_no_reason_to_give_up",
        Section.OWN,
        "a run whose table never takes an epoch restarts for ever: checkpoints are completed meanwhile",
        rewrite(Edit(Generation.__init__, "self._is_base_shown = ground.base is None", "self._is_base_shown = True")),
        played_properties.a_run_comes_no_further_while_a_table_refuses_what_it_started_from,
    ),
    Mutant(
        "a_run_that_finds_its_disk_full_leaves_no_word",
        Section.OWN,
        "a status that cannot be written whole is not written at all: the run seems to have been killed",
        rewrite(Edit(StatusFiles.write, "self._write_in_short(status, error)", "pass")),
        control_properties.a_run_that_cannot_write_its_status_still_says_how_it_ended,
    ),
    Mutant(
        "a_status_is_written_by_the_control_thread",
        Section.OWN,
        "a store that stands still holds up batches and barriers",
        rewrite(Edit(Desk.say, "self._said = status", "self._status_files.write(status)")),
        control_properties.the_control_thread_does_not_wait_for_the_store,
    ),
    Mutant(
        "a_run_takes_up_what_was_asked_of_one_before_it",
        Section.OWN,
        "a run that was started again after a kill stops, because the one before it was asked to",
        rewrite(Edit(Desk._forget_older, "self._files.delete(", "list(")),
        control_properties.a_request_that_is_older_than_the_run_is_not_for_it,
    ),
    Mutant(
        "a_request_is_made_to_whoever_runs",
        Section.OWN,
        "what a run has died upon is asked of the next one too",
        rewrite(Edit(Asked._make, 'not in (self.process, "")', "is None")),
        control_properties.a_request_is_not_made_again_to_another_run,
    ),
    Mutant(
        "a_request_survives_the_generation_that_it_killed",
        Section.OWN,
        "one request for a checkpoint fails every generation, until the run gives up",
        rewrite(
            Edit(
                Remote._answer_void,
                'self._answer(names, Answer("failed", why))',
                "self._waiting += [(name, TakeCheckpoint()) for name in names]",
            )
        ),
        control_properties.a_checkpoint_that_a_generation_died_upon_is_not_begun_in_the_next,
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
        rewrite(Edit(check_inside, "if not RootPaths.is_inside(path):", "if False:")),
        played_properties.a_manifest_names_nothing_outside_of_its_root,
    ),
    # -- stages on Spark
    Mutant(
        "a_query_that_was_stopped_counts_as_done",
        Section.OWN,
        "checkpoints go on, though the input of a stage is never read again",
        rewrite(Edit(Progress.check, "not self.may_end or", "")),
        played_properties.a_query_that_was_stopped_has_failed_its_stage,
    ),
    Mutant(
        "a_barrier_is_something_to_consume",
        Section.OWN,
        "a run with available_now goes on for as long as checkpoints follow closely",
        rewrite(
            Edit(
                RunningStage.__dict__["has_consumed_all"].fget,
                "self.inputs.lag == 0",
                "all(each.at(self.inputs.cursor(name)) is None for name, each in self.inputs._channels.items())",
            )
        ),
        played_properties.a_barrier_is_nothing_to_consume,
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
        rewrite(Edit(Gate.flush, "min(self.room, len", "min(WINDOW, len")),
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
        "a_stage_without_a_watermark_yet_counts_as_infinity",
        Section.OWN,
        "the pipeline's watermark runs ahead of a stage that has seen no row with a time yet",
        rewrite(Edit(watermark_of, "if len(known) == len(own) else None", "")),
        played_properties.the_pipelines_watermark_is_held_back_by_those_with_event_time,
    ),
    Mutant(
        "a_stage_without_event_time_holds_the_watermark_back",
        Section.OWN,
        "the pipeline has no watermark, because one of its stages never will",
        rewrite(Edit(watermark_of, "if stage.has_event_time", "")),
        played_properties.the_pipelines_watermark_is_held_back_by_those_with_event_time,
    ),
    Mutant(
        "every_cut_is_called_aligned",
        Section.OWN,
        "nobody can tell why a checkpoint is unaligned",
        rewrite(Edit(StageCheckpoints._report, "cause=cut.cause", "cause=type(cut.cause).ALIGNED")),
        played_properties.why_a_stage_was_cut_unaligned_is_told_by_its_manifest,
    ),
    Mutant(
        "that_the_bound_was_passed_is_forgotten_at_the_cut",
        Section.OWN,
        "a stage that kept aligning because too much was in flight seems to have been slow",
        rewrite(Edit(Aligner._cut, "alignment_ms, alignment.said_over_bound)", "alignment_ms)")),
        played_properties.that_a_stage_keeps_aligning_over_the_bound_is_told,
    ),
    Mutant(
        "the_moment_of_a_trigger_is_taken_at_every_look",
        Section.OWN,
        "one checkpoint was begun at two times, by its manifest and by the run",
        rewrite(
            Edit(Leading.triggered_at, "if checkpoint_id not in self._triggered_at:", "if True:"),
            Edit(Leading.triggered_at, "self._clock.utc() - ago", "self._clock.utc()"),
        ),
        played_properties.a_checkpoint_is_told_as_its_manifest_has_it,
    ),
    Mutant(
        "stages_are_told_as_they_are_after_an_abort",
        Section.OWN,
        "of a checkpoint that was aborted nobody can tell which stage it waited for",
        rewrite(Edit(Generation.on_aborted, "self._parts_when_aborted[checkpoint_id] = parts", "pass")),
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
                "sealed.last_with_rows",
                "sealed.shown_through",
            )
        ),
        played_properties.a_table_is_not_made_anew_where_rows_were_sealed_for_it,
    ),
    Mutant(
        "what_was_staged_stays_where_its_table_was",
        Section.OWN,
        "rows that a checkpoint has sealed are sought where the table was before it was moved",
        rewrite(Edit(_moved, "if not file.path.startswith(", "if True or not file.path.startswith(")),
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
        rewrite(
            Edit(Keeper._vacuum, "versions_of(self._sink.home, self._place.stage, retained(), self._place.root)", "[]")
        ),
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
        rewrite(Edit(Keeper._replace, "active.issuperset(file.path for file in each.files)", "True")),
        table_properties.upkeep_shows_the_same_at_every_retained_checkpoint,
    ),
    Mutant(
        "upkeep_unlinks_what_seems_to_have_failed",
        Section.OWN,
        "a transaction is made and its answer lost, and the files that it has added are deleted",
        rewrite(Edit(Keeper._unlink, "if name not in shown)", "if True)")),
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
)
