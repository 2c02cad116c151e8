"""What runs around the choreography could get wrong, and the simulator sees where all of it runs (`--whole`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from tests.mutants.mutation import Edit, Switch, rewrite
from tidegate.engine import bringing, chains, changes, cleaning, copies, launching, renaming
from tidegate.engine import parting as partings
from tidegate.engine.bringing import Bringing
from tidegate.engine.control import Desk
from tidegate.engine.ending import Ending
from tidegate.engine.opening import RootOpening
from tidegate.engine.setting_back import PipelineTables
from tidegate.engine.stage.inputs import Inputs
from tidegate.engine.stage.output import StagedOutput
from tidegate.engine.stage.running import RunningStage
from tidegate.flows.leader import Leader
from tidegate.flows.opening import Opening
from tidegate.flows.stage import StageCheckpoints
from tidegate.protocol.config import AlignmentConfig
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.recovery import recover
from tidegate.protocol.retention import deletable
from tidegate.spark import snapshot
from tidegate.spark.gate import Gate
from tidegate.spark.snapshot import Snapshotter
from tidegate.storage.carrying import Carrying
from tidegate.storage.file_lists import FileList
from tidegate.storage.files import claim
from tidegate.storage.paths import _suffix
from tidegate.testing.simulator.dag import Dag, random_dag, random_lines
from tidegate.testing.simulator.whole import WholeScenario, random_whole_scenario


class WholeMutant(NamedTuple):
    """`checker`: who catches it, within so many seeds."""

    name: str
    defect: str
    put_back: Switch
    checker: str
    seeds: int
    scenario: Callable[[int], WholeScenario] = random_whole_scenario


def unaligned(seed: int) -> WholeScenario:
    """Everything is cut unaligned, and checkpoints are cancelled."""
    whole = random_whole_scenario(seed)
    alignment = AlignmentConfig(unaligned="always", timeout_ms=20, max_inflight_bytes=10**6)
    config = msgspec.structs.replace(whole.config, alignment=alignment, max_retained=2)
    rows = dict.fromkeys(whole.rows, 60)
    return msgspec.structs.replace(whole, config=config, rows=rows, crashes=3, requests=6, damages=0)


def drifting(seed: int) -> WholeScenario:
    """Inputs wait for the slowest in event time, and one of them may have nothing to give."""
    whole = random_whole_scenario(seed)
    return msgspec.structs.replace(whole, drift_ms=1, max_files=1, crashes=0, kills=0, damages=0)


def powerless(seed: int) -> WholeScenario:
    return msgspec.structs.replace(random_whole_scenario(seed), power_losses=4, damages=0)


def stormy(seed: int) -> WholeScenario:
    """Processes die often, and the store and the tables fail."""
    whole = random_whole_scenario(seed)
    faults = msgspec.structs.replace(whole.faults, store_fails=0.04, seems_to_exist=0.2)
    rows = dict.fromkeys(whole.rows, 60)
    return msgspec.structs.replace(whole, faults=faults, rows=rows, crashes=4, kills=4, damages=0)


def asking(seed: int) -> WholeScenario:
    whole = random_whole_scenario(seed)
    faults = msgspec.structs.replace(whole.faults, store_fails=0.2)
    return msgspec.structs.replace(
        whole, faults=faults, requests=3, crashes=0, kills=0, pauses=0, take_overs=0, damages=0, power_losses=0
    )


def fanned_out(seed: int) -> WholeScenario:
    """Outputs that several stages read, none of which is chained."""
    whole = random_whole_scenario(seed, random_dag(random.Random(f"fan {seed}"), reads_twice=0.2))
    rows = dict.fromkeys(whole.rows, 60)
    return msgspec.structs.replace(whole, rows=rows, chains=0.0, backlog_segments=1_000, crashes=3, damages=0)


def chained(seed: int) -> WholeScenario:
    """Lines of stages that are chained and parted, by processes that die."""
    whole = random_whole_scenario(seed, random_lines(random.Random(f"lines {seed}")))
    rows = dict.fromkeys(whole.rows, 60)
    return msgspec.structs.replace(whole, rows=rows, chains=0.6, crashes=3, dead_queries=2, damages=0)


def going_back(seed: int) -> WholeScenario:
    """The pipeline and its tables are brought to older checkpoints again and again."""
    whole = random_whole_scenario(seed, set_backs=4)
    return msgspec.structs.replace(
        whole,
        rows=dict.fromkeys(whole.rows, 60),
        crashes=0,
        kills=0,
        pauses=0,
        damages=0,
        power_losses=0,
        standstills=0,
    )


def moving(seed: int) -> WholeScenario:
    """Checkpoints are taken elsewhere and brought back, again and again, with much in flight."""
    whole = random_whole_scenario(seed, set_backs=0, movers=True)
    alignment = AlignmentConfig(unaligned="always", timeout_ms=20, max_inflight_bytes=10**6)
    return msgspec.structs.replace(
        whole,
        config=msgspec.structs.replace(whole.config, alignment=alignment),
        rows=dict.fromkeys(whole.rows, 60),
        savepoints=6,
        brings=3,
        lost_roots=1,
        damages=0,
        standstills=0,
    )


def forking(seed: int) -> WholeScenario:
    """Forks are made and promoted, by users who are killed."""
    whole = moving(seed)
    return msgspec.structs.replace(whole, drivers=2, brings=1, lost_roots=0, forks=2, promotions=2, crashes=0, kills=0)


def bringing_powerless(seed: int) -> WholeScenario:
    return msgspec.structs.replace(moving(seed), power_losses=4)


def changed(seed: int) -> WholeScenario:
    """Every kind of change, to a pipeline that has much in flight."""
    whole = random_whole_scenario(seed, every_change=True)
    alignment = AlignmentConfig(unaligned="always", timeout_ms=20, max_inflight_bytes=10**6)
    config = msgspec.structs.replace(whole.config, alignment=alignment)
    return msgspec.structs.replace(whole, config=config, rows=dict.fromkeys(whole.rows, 60), crashes=1, damages=0)


def parting(seed: int) -> WholeScenario:
    """A table goes, others get other names, and tables fail, so that they are late."""
    whole = random_whole_scenario(seed, every_change=True)
    renamed = {name: f"{name}_renamed" for name in whole.dag.sinks if name not in (*whole.changes.late, "early")}
    changes = msgspec.structs.replace(whole.changes, late=(), between=None, renamed=renamed)
    dag = Dag(
        {name: spec for name, spec in whole.dag.stages.items() if name not in whole.changes.new}, whole.dag.source_of
    )
    config = msgspec.structs.replace(whole.config, alignment=AlignmentConfig())
    rows = dict.fromkeys(whole.rows, 60)
    return msgspec.structs.replace(
        whole, dag=dag, config=config, rows=rows, changes=changes, crashes=1, damages=0, tables_fail=0.7
    )


def _not_carried(where: str) -> tuple[Edit, ...]:
    """Files that are named in a manifest and never arrive."""
    left_out = f"if {where}:\n    self._sha256[each.stored] = each.digest\n    return\n"
    return (
        Edit(Carrying._copy, "give = self._target", f"{left_out}give = self._target"),
        Edit(Carrying.carry, "self._target.sync(self._sha256)", "self._target.sync(self._sha256, missing_ok=True)"),
    )


WHOLE_DEFECTS: Final = (
    # -- cutting and storing
    WholeMutant(
        "a_part_of_an_aborted_checkpoint_is_finished",
        "what was in flight to a checkpoint that was aborted is looked for, and forgotten by then",
        rewrite(
            Edit(
                StageCheckpoints._finish_if_ready,
                "or part.is_finishing or not self._is_wanted(part)",
                "or part.is_finishing",
            )
        ),
        "Unexpected",
        130,
        unaligned,
    ),
    WholeMutant(
        "a_barrier_is_ahead_of_its_batch",
        "the output of the batch behind which a stage is cut comes behind the barrier",
        rewrite(
            Edit(
                RunningStage._take_up_batches,
                "written_bytes = sum(map(self._hand_on, taken))",
                "self.checkpoints.on_committed(progress.batch + len(taken), moved)\n"
                "written_bytes = sum(map(self._hand_on, taken))",
            ),
            Edit(RunningStage._take_up_batches, "self.checkpoints.on_committed(progress.batch, moved)", "pass"),
        ),
        "RowsInOrder",
        30,
        fanned_out,
    ),
    WholeMutant(
        "a_hold_does_not_yield_to_a_barrier",
        "a checkpoint waits for what is held until an input has caught up that may be silent for ever",
        rewrite(Edit(Inputs.let_through, "self._drift.yields = yields", "pass")),
        "Liveness",
        10,
        drifting,
    ),
    WholeMutant(
        "a_snapshot_omits_the_last_change_log",
        "of the state, the change log of the batch itself is left out",
        rewrite(Edit(snapshot._store_files, "if number > version or", "if number >= version or")),
        "Liveness",
        40,
    ),
    WholeMutant(
        "a_snapshot_is_not_forced",
        "a checkpoint is decided whose files are not on the disk",
        rewrite(
            Edit(
                RunningStage._sync, "self._on_disk = root.sync(self._unforced, self._on_disk, missing_ok=True)", "pass"
            )
        ),
        "NoCheckpointLost",
        60,
        powerless,
    ),
    WholeMutant(
        "what_is_in_flight_is_not_referred_to",
        "the segments in flight at a checkpoint are not among its files, and are deleted",
        rewrite(
            Edit(StageCheckpoints._report, "files=(*stored.files, *in_flight.files)", "files=stored.files"),
        ),
        "NothingNeededDeleted",
        60,
        unaligned,
    ),
    # -- reading
    WholeMutant(
        "a_gate_releases_out_of_order",
        "of what waits at a gate, the last comes first",
        rewrite(Edit(Gate.flush, "self._waiting.popleft() for", "self._waiting.pop() for")),
        "RowsInOrder",
        40,
    ),
    WholeMutant(
        "two_looks_at_one_input_are_taken_for_one",
        "a stage is cut behind a batch that has half consumed a segment",
        rewrite(Edit(Inputs.consume, "return len({", "return True or len({")),
        "RowsInOrder",
        80,
    ),
    # -- restoring
    WholeMutant(
        "source_logs_are_not_restarted",
        "a restored stage keeps its offsets in gates that are no more",
        rewrite(Edit(launching.rebuild_folders, "restart_source_logs(checkpoint, cut, sources)", "pass")),
        "Liveness",
        40,
    ),
    WholeMutant(
        "what_is_in_flight_is_not_restored",
        "a restored stage does not get what was in flight to it",
        rewrite(Edit(RunningStage.open_gates, "self.inputs.release(name, segment)", "pass")),
        "Liveness",
        10,
        unaligned,
    ),
    WholeMutant(
        "two_attempts_share_a_folder",
        "a source that was paused goes on where a batch was interrupted",
        rewrite(Edit(_suffix, '"" if attempt == 1 else f"-{attempt}"', '""')),
        "Liveness",
        80,
    ),
    WholeMutant(
        "a_torn_first_position_is_never_passed_over",
        "after a loss of power before the first checkpoint, no run can be started any more",
        rewrite(
            Edit(
                snapshot.first_position,
                "if streams is None or any(_is_torn(root, name) for name in noted.values()):",
                "if streams is None:",
            )
        ),
        "Liveness",
        60,
        powerless,
    ),
    WholeMutant(
        "a_root_is_taken_that_is_not_there",
        "a root whose owner could not be written is used, and taken for damaged later",
        rewrite(
            Edit(
                claim,
                "if (found := files.read(name)) is not None:\n            return found",
                "return files.read(name) or data",
            )
        ),
        "Liveness",
        60,
        stormy,
    ),
    # -- showing
    WholeMutant(
        "staged_rows_are_dropped_before_they_are_shown",
        "what a sink has staged is deleted one batch too early",
        rewrite(
            Edit(
                StagedOutput.on_visible,
                "done = [each for each in self._staged if each.batch <= through_batch]",
                "done = [each for each in self._staged if each.batch <= through_batch + 1]",
            )
        ),
        "NoCheckpointLost",
        40,
    ),
    # -- cleaning up
    WholeMutant(
        "what_the_next_checkpoint_drops_is_deleted_with_it",
        "what a snapshot no longer refers to is deleted before the checkpoint before it is decided",
        rewrite(
            Edit(cleaning.Leftovers.free, "file.before > visible", "file.before > visible + 1"),
            Edit(cleaning.Leftovers.free, "file.referring(ordered)", "file.referring(ordered[:-1])"),
            Edit(deletable, " and file.referring(retained) is None", ""),
        ),
        "NothingNeededDeleted",
        40,
    ),
    WholeMutant(
        "cleaning_forgets_what_stages_start_from",
        "what a stage was restored from is taken for what an older generation has left",
        rewrite(
            Edit(cleaning.Cleaning._next_walk, "known, after = self._started_from,", "known, after = frozenset(),")
        ),
        "NothingNeededDeleted",
        40,
    ),
    WholeMutant(
        "older_checkpoints_need_nothing_of_older_generations",
        "what a run finds of older generations, and does not start from, is deleted though a retained one needs it",
        rewrite(Edit(cleaning.Walk._referring, "record.generation < self.generation", "False")),
        "NothingNeededDeleted",
        40,
    ),
    WholeMutant(
        "a_run_looks_at_older_generations_once",
        "what a run that was taken over from writes later stays",
        rewrite(Edit(cleaning.Cleaning._next_walk, "visible == self._last", "False")),
        "NothingLeft",
        60,
    ),
    WholeMutant(
        "a_list_that_was_merged_stays",
        "lists of files pile up",
        rewrite(Edit(Snapshotter.take, "unneeded |= {each.stored for each in unnamed}", "pass")),
        "NothingLeft",
        40,
    ),
    WholeMutant(
        "a_list_drops_nothing",
        "a list that was merged with the one before has what that one had, though it was dropped",
        rewrite(Edit(FileList.then, "if name not in newer.dropped", "")),
        "NothingNeededDeleted",
        40,
    ),
    WholeMutant(
        "consumed_is_what_one_reader_has_consumed",
        "a segment is deleted when the fastest of its readers has consumed it",
        rewrite(
            Edit(
                cleaning.Cleaning._consumed,
                "min(position, through.get(each, position))",
                "max(stage.inputs.position(each), through.get(each, position))",
            )
        ),
        "NothingNeededDeleted",
        40,
        fanned_out,
    ),
    WholeMutant(
        "nobody_cleans_up_after_the_last_one",
        "a checkpoint that is shown while the one before it is being cleaned up after is not cleaned up after",
        rewrite(
            Edit(
                Leader._clean_up,
                "while cleaned_after < self._to_clean_after:",
                "if cleaned_after < self._to_clean_after:",
            )
        ),
        "NothingLeft",
        20,
    ),
    WholeMutant(
        "a_full_snapshot_leaves_its_links",
        "what a full snapshot was copied from stays",
        rewrite(Edit(Snapshotter.take, ".union(self._begun) - kept", " - kept")),
        "NothingLeft",
        60,
    ),
    # -- chains
    WholeMutant(
        "what_is_in_flight_between_two_stages_is_forgotten_when_they_are_chained",
        "stages are joined though there are rows between them",
        rewrite(Edit(chains.cannot_join, "if is_behind or", "if")),
        "RowsInOrder",
        60,
        chained,
    ),
    WholeMutant(
        "a_chain_forgets_what_its_sink_has_sealed",
        "rows that a table does not show yet are lost when its sink is chained to what it reads",
        rewrite(Edit(chains.by_query, "committable=stages[each.name].committable", "committable=None")),
        "Liveness",
        10,
        chained,
    ),
    WholeMutant(
        "a_stage_that_was_chained_counts_anew",
        "a table takes the batches of a sink that has a query of its own again for some that it shows",
        rewrite(Edit(launching.rebuild_folders, "begin_after(checkpoint, cut)", "pass")),
        "Liveness",
        60,
        chained,
    ),
    # -- going back
    WholeMutant(
        "tables_that_are_half_set_back_stay_so",
        "a run goes on from a checkpoint to which only some of the tables were set back, when somebody was killed",
        rewrite(Edit(recover, "decided is not None and", "False and decided is not None and")),
        "NoCheckpointLost",
        20,
        going_back,
    ),
    WholeMutant(
        "one_table_is_left_out_when_they_are_set_back",
        "of several tables only the first goes back with the pipeline",
        rewrite(Edit(PipelineTables.set_back, "reached(Step.TABLE_SET_BACK)", "break")),
        "NoCheckpointLost",
        20,
        going_back,
    ),
    WholeMutant(
        "it_is_decided_to_go_back_when_tables_have_gone",
        "who is killed between the two has set tables back that a run takes for put back by somebody else",
        rewrite(
            Edit(
                Opening._decided,
                "answer, log = await self.store.claim(proposed)",
                "from tidegate.flows.requests import ReadLog\n"
                "log = await self.store.insist(ReadLog())\n"
                "await set_tables_back(self.store, log, proposed)\n"
                "answer, log = await self.store.claim(proposed)",
            )
        ),
        "NoCheckpointLost",
        20,
        going_back,
    ),
    # -- savepoints, and roots that are lost
    WholeMutant(
        "a_checkpoint_is_brought_under_an_id_that_is_not_marked",
        "who is killed leaves files under an id that a run uses again",
        rewrite(Edit(Opening.bring, "await self.store.insist(Mark(checkpoint_id))", "pass")),
        "NothingLeft",
        30,
        moving,
    ),
    WholeMutant(
        "it_is_decided_to_bring_a_checkpoint_before_it_is_stored",
        "the log names a checkpoint whose files are not there",
        rewrite(
            Edit(
                Bringing.store,
                "carried = carrying.carry(",
                "carried = (lambda *given: manifest)(",
            ),
        ),
        "NothingNeededDeleted",
        5,
        moving,
    ),
    WholeMutant(
        "tables_are_not_taken_over",
        "those of a root that was lost cannot be set back",
        rewrite(Edit(PipelineTables._set_back, "takes_over=decided.takes_over", "takes_over=False")),
        "Liveness",
        5,
        moving,
    ),
    WholeMutant(
        "a_brought_checkpoint_names_staged_rows",
        "what is sealed of a checkpoint that all tables show is looked for, and was forgotten long ago",
        rewrite(
            Edit(
                bringing.sealed_when_shown,
                "name: Committable(each.through_batch, shown_through=each.last_with_rows).encode()",
                "name: each.encode()",
            )
        ),
        "NothingNeededDeleted",
        20,
        moving,
    ),
    WholeMutant(
        "what_is_in_flight_is_not_carried",
        "a checkpoint that was brought names files in flight that are nowhere",
        rewrite(*_not_carried("'flight' in each.what")),
        "Liveness",
        20,
        moving,
    ),
    WholeMutant(
        "what_is_in_flight_is_left_out_of_what_is_carried",
        "rows that were in flight at a savepoint are lost",
        rewrite(Edit(Carrying.carry, "self._segments(segments, to) for", "() for")),
        "Liveness",
        20,
        moving,
    ),
    WholeMutant(
        "what_is_carried_is_not_forced",
        "a checkpoint is brought whose files are not on the disk",
        rewrite(Edit(Carrying.carry, "self._target.sync(self._sha256)", "pass")),
        "NoCheckpointLost",
        30,
        bringing_powerless,
    ),
    WholeMutant(
        "a_brought_checkpoint_is_forgotten_when_the_log_is_trimmed",
        "its record counts for nothing below the start of the log, though it is retained",
        rewrite(
            Edit(
                DecisionLog._append_all,
                "and completion and",
                "and isinstance(record, CheckpointCompleted) and completion and",
            )
        ),
        "Liveness",
        5,
        moving,
    ),
    # -- forks
    WholeMutant(
        "a_promoted_fork_stays_one",
        "its runs go on with the tables of the fork, which nobody looks at any more",
        rewrite(Edit(RootOpening._set_tables_back, "root.store.delete([RootPaths.FORK])", "pass")),
        "Liveness",
        10,
        forking,
    ),
    WholeMutant(
        "copies_are_left_to_the_next_run_to_set_back",
        "tables that are to show a copy are set back to what they never showed",
        rewrite(Edit(PipelineTables.set_back, "copied = copies.get(name)", "copied = None")),
        "Liveness",
        5,
        forking,
    ),
    WholeMutant(
        "a_fork_that_is_half_made_stays_so",
        "a run on it begins with tables that are not there",
        rewrite(Edit(copies.finish_pending, "if decided is None or", "if True or decided is None or")),
        "Liveness",
        10,
        forking,
    ),
    WholeMutant(
        "a_checkpoint_within_a_root_is_not_carried",
        "what is promoted refers to the files of the checkpoint that it was, which are dropped with that",
        rewrite(*_not_carried("self._links")),
        "NothingNeededDeleted",
        10,
        forking,
    ),
    # -- changed pipelines
    WholeMutant(
        "a_new_stage_starts_at_the_beginning",
        "a stage that is new is told to stand before rows that it never gets",
        rewrite(
            Edit(
                changes._Taking._before_its_first_batch,
                "{read: self._barrier_in(read) for read in now.inputs}",
                "dict.fromkeys(now.inputs, 0)",
            )
        ),
        "Liveness",
        20,
        changed,
    ),
    WholeMutant(
        "a_table_that_is_late_may_go",
        "rows that were sealed for a sink that is gone are never shown",
        rewrite(Edit(partings._check_gone, "if rows := unshown_rows(then, name, sink.facts()):", "if rows := 0:")),
        "ExactlyOnce",
        60,
        parting,
    ),
    WholeMutant(
        "a_sink_is_renamed_though_its_table_is_late",
        "rows that were sealed under the old name are never shown",
        rewrite(Edit(partings.check_renamed, "if rows := unshown_rows(then, old, facts):", "if rows := 0:")),
        "NoCheckpointLost",
        60,
        parting,
    ),
    WholeMutant(
        "a_renamed_sink_keeps_what_was_sealed",
        "rows that its table shows by the old name are to be shown by the new one too",
        rewrite(Edit(partings.part, "base = _with_nothing_sealed(base, each.name)", "pass")),
        "Liveness",
        40,
        parting,
    ),
    WholeMutant(
        "a_stage_is_put_between_two_with_something_in_flight",
        "what is in flight to a stage that reads something else is dropped",
        rewrite(Edit(changes._Taking._on_its_way, "return writer, reader", "return None")),
        "Liveness",
        20,
        changed,
    ),
    WholeMutant(
        "a_stage_that_reads_something_else_counts_anew",
        "a table takes the batches of a sink that reads something else for some that it shows",
        rewrite(Edit(changes._Taking._reading_others, "watermark_ms=None,", "watermark_ms=None, cut=None,")),
        "Liveness",
        40,
        changed,
    ),
    WholeMutant(
        "what_is_in_flight_from_a_renamed_stage_is_forgotten",
        "rows on their way to the readers of a stage that has another name are lost",
        rewrite(
            Edit(
                renaming.renamed,
                "in_flight={now(read): segments for read, segments in each.in_flight.items()}",
                "in_flight={}",
            )
        ),
        "Liveness",
        20,
        changed,
    ),
    # -- telling, and being told
    WholeMutant(
        "an_answer_that_cannot_be_written_is_lost",
        "a store that fails once leaves a user without an answer",
        rewrite(Edit(Desk._write_answer, "self._answers.put((name, answer))", "pass")),
        "Requests",
        60,
        asking,
    ),
    WholeMutant(
        "a_run_stops_without_a_last_checkpoint",
        "what was consumed since the last checkpoint is said to be kept",
        rewrite(
            Edit(
                Ending.is_over,
                "if last is None:\n        return False",
                "if last is None:\n        return False\nif not generation.coordinator.active:\n    return True",
            )
        ),
        "NothingLeft",
        40,
    ),
)
