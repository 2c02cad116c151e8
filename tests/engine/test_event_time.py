"""How event time comes from Spark's logs into channels, and what a gate shows of an input that is held."""

from __future__ import annotations

from typing import Any, Final

from tidegate.engine.channel import Channel
from tidegate.engine.stage.inputs import Inputs, InputTime
from tidegate.protocol.messages import Barrier, Segment, SegmentFile, Watermark
from tidegate.spark.filelog import METADATA, StageSource, has_moved_watermark, watermark_behind
from tidegate.spark.gate import Gate
from tidegate.storage.memory import Memory


def segment(sequence: int, watermark_ms: int | None = None) -> Segment:
    file = SegmentFile(f"generations/000001/stages/rows/output/{sequence}.parquet", 1)
    return Segment(sequence, sequence - 1, (file,), watermark_ms)


def test_a_channel_tells_a_watermark_only_where_nothing_has_told_as_much() -> None:
    channel = Channel("rows", 0)
    channel.append_watermark(5)
    channel.append_watermark(5)
    channel.append_segment(segment(1, 9))
    channel.append_barrier(Barrier(1, 1))
    channel.append_watermark(7)
    channel.append_watermark(10)
    told = [channel.at(cursor) for cursor in range(channel.end)]
    assert told == [Watermark(5), segment(1, 9), Barrier(1, 1), Watermark(10)]
    assert channel.sequence == 1, "it has no number of its own"


def test_a_channel_that_a_reader_holds_has_a_smaller_bound() -> None:
    channel = Channel("rows", 0)
    for sequence in range(1, 11):
        channel.append_segment(segment(sequence))
    seen = [channel.is_held_back]
    channel.hold(True)
    seen.append(channel.is_held_back)
    channel.on_consumed(8)
    seen.append(channel.is_held_back)
    for sequence in range(11, 15):
        channel.append_segment(segment(sequence))
    seen.append(channel.is_held_back)
    channel.hold(False)
    seen.append(channel.is_held_back)
    assert seen == [False, True, False, True, False]


def test_what_a_batch_has_reached_is_in_its_commit_and_where_it_reads_to_has_what_it_started_with() -> None:
    files = Memory("spark")
    files.write("offsets/3", b'v1\n{"batchWatermarkMs":5,"batchTimestampMs":1,"conf":{}}\n{"logOffset":3}')
    files.write("commits/3", b'v1\n{"nextBatchWatermarkMs":9}')
    files.write("commits/4", b'v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}')
    assert watermark_behind(files, 3) == 9
    assert has_moved_watermark(files, 3)
    assert watermark_behind(files, 4) is None, "none yet"
    assert watermark_behind(files, 5) is None, "gone"


def test_a_gate_shows_as_many_segments_as_it_is_told_to_and_the_next_ones_later() -> None:
    files = Memory("root")
    gate = Gate(files.at("gate"), files, 0, window=3)
    for sequence in range(1, 6):
        gate.release(segment(sequence))
    assert gate.room == 3
    assert not gate.flush(0)
    assert gate.flush(2)
    assert gate.room == 1
    assert gate.flush()
    assert gate.room == 0
    assert not gate.flush(2)
    shown = [files.read(f"gate/{METADATA}/{entry}") or b"" for entry in (10, 11)]
    assert [each.count(b"parquet") for each in shown] == [2, 1]
    assert b'"modificationTime":3' in shown[1]


class AlwaysOpen:
    """A stage's part in checkpoints, of which there are none."""

    is_under_way: Final = False

    def is_open(self, _name: str) -> bool:
        return True

    def on_segment(self, _name: str, _sequence: int, _size_bytes: int) -> None: ...


def test_the_watermark_that_a_restored_writer_starts_with_stands_behind_what_was_in_flight() -> None:
    files = Memory("root")
    open_: Any = AlwaysOpen()
    channel = Channel("rows", 3)
    channel.append_watermark(30)
    inputs = Inputs("middle", {"rows": channel}, {"rows": 1}, open_, InputTime(("rows",), 10))
    inputs.read()
    inputs.open(files, 1, [StageSource("rows", 0)], 256)
    for each in (segment(2, 10), segment(3, 20)):
        inputs.release("rows", each)
    inputs.read()
    assert inputs.cursor("rows") == 1
    assert inputs.reached_ms is None, "none of it is consumed yet"
    assert inputs.flush()
