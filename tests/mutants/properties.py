"""What holds of the real code and not of a mutant, where no checker of the simulator can see the difference.

Each returns on the real code, and raises AssertionError under the mutant that it is there for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

import tidegate as tg
from tests.mutants.scenarios import quiet
from tests.protocol.logs import complete, log_with
from tests.spark.definitions import stage
from tidegate.engine.order import in_order
from tidegate.errors import (
    BarrierConflict,
    CheckpointInProgress,
    DamagedLog,
    DataLost,
    NoCheckpointInProgress,
    PipelineChanged,
    ProtocolViolation,
    RecoveryRefused,
    TidegateError,
    UnknownInput,
)
from tidegate.protocol.aligner import Action, Aligner, Cut, CutCause
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.protocol.coordinator import Abort, AbortReason, Coordinator, ReportAnswer, StageReport
from tidegate.protocol.decision_log import DecisionLog, decode_decision, encode_decision, is_torn
from tidegate.protocol.injector import Injector
from tidegate.protocol.messages import MAX_U64, Barrier, Flag, Segment, SegmentFile
from tidegate.protocol.quorum import (
    Ack,
    AckAnswer,
    Failed,
    Member,
    Quorum,
    Reached,
    Waiting,
)
from tidegate.protocol.recovery import Facts, FenceSinks, Restore, SinkFacts, recover
from tidegate.protocol.retention import PARTS
from tidegate.spark.causes import failure_of
from tidegate.spark.filelog import METADATA, SinkLogEntry
from tidegate.spark.gate import Gate
from tidegate.spark.snapshot import Snapshotter
from tidegate.spark.sources import going_on
from tidegate.storage.folder import Folder
from tidegate.storage.manifest import SourceStream
from tidegate.storage.memory import Memory
from tidegate.storage.paths import RootPaths
from tidegate.testing.simulator.cluster import Cluster

FIRST = Barrier(1, 1)
SECOND = Barrier(2, 2)


def refused(error: type[TidegateError], call: Callable[..., object], *arguments: object) -> None:
    try:
        answer = call(*arguments)
    except error:
        return
    raise AssertionError(f"answered {answer!r} where {error.__name__} was due")


def cuts(actions: Sequence[Action]) -> list[Cut]:
    return [action for action in actions if isinstance(action, Cut)]


def aligner(*inputs: str, config: AlignmentConfig | None = None, is_sink: bool = False) -> Aligner:
    return Aligner("stage", inputs, config or AlignmentConfig(), is_sink=is_sink)


# -- the aligner ------------------------------------------------------------------------------------


def barriers_of_one_checkpoint_must_agree() -> None:
    stage = aligner("left", "right")
    stage.on_barrier("left", FIRST, 0)
    refused(BarrierConflict, stage.on_barrier, "right", Barrier(1, 7), 0)
    (cut,) = cuts(stage.on_barrier("right", FIRST, 0))
    assert cut.barrier == FIRST


def a_repeated_barrier_does_not_count_twice() -> None:
    stage = aligner("left", "right")
    stage.on_barrier("left", FIRST, 0)
    assert not cuts(stage.on_barrier("left", FIRST, 0))
    assert stage.waiting_for(1) == {"right"}


def a_barrier_of_an_unknown_input_does_not_count() -> None:
    stage = aligner("left", "right")
    stage.on_barrier("left", FIRST, 0)
    refused(UnknownInput, stage.on_barrier, "stranger", FIRST, 0)
    assert stage.waiting_for(1) == {"right"}


def nothing_is_taken_from_an_input_that_is_ahead() -> None:
    stage = aligner("left", "right")
    stage.on_barrier("left", FIRST, 0)
    assert not stage.is_open("left")
    refused(ProtocolViolation, stage.on_segment, "left", 1, 10)


def a_silent_input_does_not_block_for_ever() -> None:
    stage = aligner("left", "silent", config=AlignmentConfig(unaligned="on_timeout", timeout_ms=50))
    stage.on_barrier("left", FIRST, 0)
    assert not cuts(stage.on_time(49))
    assert [cut.cause for cut in cuts(stage.on_time(50))] == [CutCause.TIMEOUT]
    assert stage.is_open("left")


def no_segment_of_an_unknown_input_vanishes() -> None:
    refused(UnknownInput, aligner("left").on_segment, "stranger", 1, 10)


def every_input_is_waited_for_however_many() -> None:
    names = [f"input{number}" for number in range(200)]
    stage = aligner(*names)
    for name in names[:-1]:
        assert not cuts(stage.on_barrier(name, FIRST, 0))
    assert cuts(stage.on_barrier(names[-1], FIRST, 0))


def a_forced_cut_is_not_called_a_timeout() -> None:
    stage = aligner("left", "silent", config=AlignmentConfig(unaligned="on_timeout", timeout_ms=50))
    assert [cut.cause for cut in cuts(stage.on_barrier("left", FIRST.as_unaligned(), 0))] == [CutCause.FORCED]


def nothing_flows_after_a_drain() -> None:
    stage = aligner("left")
    assert cuts(stage.on_barrier("left", Barrier(1, 1, int(Flag.DRAIN)), 0))
    assert stage.is_drained
    assert not stage.is_open("left")


# -- the coordinator --------------------------------------------------------------------------------


def coordinator(*stages: str, max_concurrent: int = 1) -> Coordinator:
    config = CheckpointConfig(interval_ms=1_000, timeout_ms=100, max_concurrent=max_concurrent)
    return Coordinator(stages, config, generation=1, now_ms=0)


def report(stage: str, checkpoint_id: int = 1) -> StageReport:
    return StageReport(stage, checkpoint_id, attempt=1, generation=1, cut=0)


def silence_is_noticed_by_time_alone() -> None:
    leader = coordinator("source", "sink")
    leader.trigger(0)
    assert [type(action) for action in leader.on_time(100)] == [Abort]


def a_stage_that_reports_twice_counts_once() -> None:
    leader = coordinator("source", "sink")
    leader.trigger(0)
    leader.on_report(report("source"))
    assert leader.on_report(report("source")) is ReportAnswer.DUPLICATE
    assert leader.ready_to_decide() is None


def a_stranger_does_not_count_as_a_stage() -> None:
    leader = coordinator("source", "sink")
    leader.trigger(0)
    leader.on_report(report("source"))
    assert leader.on_report(report("stranger")) is ReportAnswer.UNKNOWN_STAGE
    assert leader.ready_to_decide() is None


def a_report_counts_for_its_own_checkpoint() -> None:
    leader = coordinator("source", "sink", max_concurrent=2)
    leader.trigger(0)
    leader.trigger(0)
    leader.on_report(report("source", checkpoint_id=1))
    leader.on_report(report("sink", checkpoint_id=2))
    assert leader.missing(1) == {"sink"}
    assert leader.missing(2) == {"source"}


def an_aborted_checkpoint_is_never_decided() -> None:
    leader = coordinator("source")
    leader.trigger(0)
    leader.on_report(report("source"))
    leader.abort(1, AbortReason.QUORUM_FAILED, "an instance was lost", 0)
    assert leader.ready_to_decide() is None
    refused(NoCheckpointInProgress, leader.decide, 1)


def sinks_that_lag_hold_checkpoints_back() -> None:
    leader = coordinator("source")
    for checkpoint_id in (1, 2):
        leader.trigger(0)
        leader.on_report(report("source", checkpoint_id))
        leader.decide(checkpoint_id)
        leader.on_slot_won(checkpoint_id, 0)
    refused(CheckpointInProgress, leader.trigger, 0)
    assert not leader.on_time(3_600_000)
    leader.on_sinks_committed(1)
    leader.trigger(0)


# -- the injector -----------------------------------------------------------------------------------


def an_id_keeps_its_64_bits() -> None:
    source = Injector("source")
    source.inject(Barrier(MAX_U64, 1))
    assert source.poll() == Barrier(MAX_U64, 1)


def the_epoch_is_the_coordinators() -> None:
    source = Injector("source")
    source.inject(Barrier(3, 9))
    assert source.poll() == Barrier(3, 9)


def no_barrier_takes_the_place_of_another() -> None:
    source = Injector("source", max_pending=2)
    source.inject(FIRST)
    source.inject(SECOND)
    assert source.pending == (FIRST, SECOND)
    refused(CheckpointInProgress, source.inject, Barrier(3, 3))


# -- the quorum -------------------------------------------------------------------------------------


def quorum(*members: str) -> Quorum:
    return Quorum(SECOND, 2, 5, [Member(name) for name in members], deadline_ms=100)


def ack(instance: str, *, checkpoint_id: int = 2, attempt: int = 2, generation: int = 5) -> Ack:
    return Ack(instance, checkpoint_id, attempt, generation, watermark_ms=1)


def an_ack_of_another_checkpoint_does_not_count() -> None:
    assert quorum("follower").on_ack(ack("follower", checkpoint_id=1)) is AckAnswer.WRONG_CHECKPOINT


def an_ack_of_another_attempt_does_not_count() -> None:
    assert quorum("follower").on_ack(ack("follower", attempt=1)) is AckAnswer.WRONG_ATTEMPT


def an_ack_of_another_generation_does_not_count() -> None:
    assert quorum("follower").on_ack(ack("follower", generation=4)) is AckAnswer.WRONG_GENERATION


def a_member_that_is_named_twice_acknowledges_once() -> None:
    waiting = quorum("follower", "follower")
    waiting.on_ack(ack("follower"))
    assert isinstance(waiting.on_time(0), Reached)


def a_lost_instance_fails_the_quorum_at_once() -> None:
    waiting = quorum("follower", "other")
    waiting.on_ack(ack("other"))
    assert isinstance(waiting.on_time(0), Waiting)
    waiting.on_lost("follower")
    assert isinstance(waiting.on_time(0), Failed)


def the_last_ack_decides_at_once() -> None:
    """At no millisecond's end does a checkpoint wait that everybody has acknowledged."""
    cluster = Cluster(quiet(0), 0)
    cluster.start()
    for now_ms in range(1_000):
        cluster.world.run(now_ms)
        leader = None if cluster.leader is None else cluster.leader.leader
        ready = None if leader is None else leader.coordinator.ready_to_decide()
        if leader is not None and ready is not None:
            quorum = leader._quorums[ready.checkpoint_id]
            assert not isinstance(quorum.on_time(now_ms), Reached), f"one waits at {now_ms} ms"
    assert cluster.checkers.completions


# -- commits and recovery ---------------------------------------------------------------------------


def log_of_two_checkpoints() -> DecisionLog:
    log = DecisionLog()
    log.append(log.opening("leader", None))
    for number in (1, 2):
        log.append(
            log.completing(
                "leader",
                1,
                checkpoint_id=number,
                epoch=number,
                manifest=f"manifest-{number}",
                manifest_sha256="",
                aligned=True,
                retained=tuple(range(1, number + 1)),
            )
        )
    return log


def no_fall_back_before_the_sinks_are_fenced() -> None:
    log = log_of_two_checkpoints()
    health = {2: "a file is gone", 1: None}
    assert recover(Facts(log, {"table": SinkFacts(1, fence=1)}, health)) == FenceSinks(2)
    fenced = recover(Facts(log, {"table": SinkFacts(1, fence=2)}, health))
    assert isinstance(fenced, Restore)
    assert fenced.skipped == (2,)


# -- order ------------------------------------------------------------------------------------------


def a_batch_that_must_keep_order_sees_one_segment() -> None:
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(Folder(folder).at("gate", durable=False), Folder(folder), 0, window=1)
        for sequence in (1, 2, 3):
            gate.release(Segment(sequence, sequence, (SegmentFile(f"{sequence}.parquet", 10),)))
            gate.flush()
        shown = [line for log in gate.files.list(METADATA) for line in (gate.files.read(log) or b"").splitlines()[1:]]
        assert len(shown) == 1, "rows of several segments have no order in a batch"


def segments_are_seen_in_the_order_of_their_channel() -> None:
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(Folder(folder).at("gate", durable=False), Folder(folder), 0)
        names = [f"{sequence:02}.parquet" for sequence in range(1, 21)]
        for sequence, name in enumerate(names, start=1):
            gate.release(Segment(sequence, sequence, (SegmentFile(name, 10),)))
            gate.flush()
        lines = [line for log in gate.files.list(METADATA) for line in (gate.files.read(log) or b"").splitlines()[1:]]
        entries = {msgspec.json.decode(line, type=SinkLogEntry) for line in lines}
        seen = sorted(entries, key=lambda entry: entry.modification_time)
        assert [entry.path.rpartition("/")[2] for entry in seen] == names


def stages_in_order(newest_by: Sequence[str] = ()) -> frozenset[str]:
    """Of counts that go through a stage, and sums of them, into a table each."""
    pipeline = tg.Pipeline("counting")
    table = tg.DeltaTable("/lake/table", key="key", newest_by=newest_by)

    def define(name: str, decorate: Callable[..., Any], reads: str, **options: Any) -> None:
        def function(_frame: Any) -> Any:
            raise AssertionError("no function is called here")

        function.__name__ = name
        decorate(inputs=[reads], **options)(function)

    @pipeline.source
    def rows() -> Any:
        raise AssertionError("no function is called here")

    define("clean", pipeline.stage, "rows")
    define("counts", pipeline.stage, "clean", output_mode="update")
    define("relay", pipeline.stage, "counts")
    define("sums", pipeline.stage, "relay", output_mode="update")
    define("table", lambda **options: pipeline.sink(table, **options), "relay")
    define("sums_table", lambda **options: pipeline.sink(table, **options), "sums")
    define("log", lambda **options: pipeline.sink(tg.DeltaTable("/lake/log"), **options), "relay")
    return in_order(pipeline.validated(), {"counts", "sums"})


def order_is_kept_on_the_whole_way_to_a_table_with_a_key() -> None:
    assert stages_in_order() == {"relay", "table", "sums", "sums_table"}
    assert stages_in_order(newest_by=["n"]) == frozenset()


# -- sources ----------------------------------------------------------------------------------------


def _topic(name: str, **ids: str) -> tuple[SourceStream, ...]:
    return (SourceStream("kafka", {"kafka.bootstrap.servers": "one:9092", "subscribe": name}, ids),)


def a_source_goes_on_only_in_what_it_read() -> None:
    going_on("rows", "then", _topic("orders"), _topic("orders"))
    refused(PipelineChanged, going_on, "rows", "then", _topic("orders"), _topic("returns"))


def what_a_source_has_lost_is_not_tried_again() -> None:
    said = "set the source option failOnDataLoss to false.\nReason: Partition a-0 offset was changed from 500 to 300."
    assert isinstance(failure_of(stage("orders"), said), DataLost)


def a_topic_that_is_gone_is_not_waited_for() -> None:
    reads = {"subscribe": "orders", "kafka.bootstrap.servers": "broker:9092"}
    known, gone = SourceStream("kafka", reads, {"orders": "a"}), SourceStream("kafka", reads, {"orders": ""})
    refused(RecoveryRefused, going_on, "rows", "then", (known,), (gone,))
    never_there = SourceStream("kafka", reads)
    assert going_on("rows", "then", (never_there,), (gone,)) == (never_there,)


def a_topic_that_was_created_anew_is_another() -> None:
    """Also where the broker was away when the run in between was started."""
    in_between = going_on("rows", "then", _topic("orders", orders="1"), _topic("orders"))
    refused(RecoveryRefused, going_on, "rows", "then", in_between, _topic("orders", orders="2"))


def a_record_that_is_whole_was_decided() -> None:
    assert is_torn(b"")
    assert not is_torn(b'{"type": "of a newer version"}')


def a_record_that_was_changed_is_damage() -> None:
    data = encode_decision(log_with(1).opening("me", 1))
    for changed in (data.replace(b'"generation":2', b'"generation":3'), data.replace(b'"base":', b'"base";')):
        assert changed != data
        assert not is_torn(changed)
        refused(DamagedLog, decode_decision, changed, "slot")


def what_is_retained_by_time_has_a_bound() -> None:
    for step in (1_000, -(10**6)):
        log = log_with()
        for checkpoint_id in range(1, 200):
            at_ms = 10**12 + step * checkpoint_id
            complete(log, checkpoint_id, retain_ms=10**6, content=str(checkpoint_id), at_ms=at_ms)
        assert len(log.retained) <= 3 + PARTS + 1


def a_snapshot_of_a_source_without_a_batch_has_where_it_stood() -> None:
    root: Any = Memory("root")
    checkpoint = root.at(RootPaths.spark_checkpoint(1, "rows"))
    checkpoint.write("sources/0/0", b'v1\n{"topic":{"0":7}}')
    taken = Snapshotter(root, 1, "rows", None, reads_gates=False).take(checkpoint, 1, None, full=False)
    assert [file.name for file in taken.files.added] == ["sources/0/0"]
