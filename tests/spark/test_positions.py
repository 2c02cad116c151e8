"""Positions of sources: equal exactly if the same input was read, and ordered where that can be told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tidegate.errors import DamagedCheckpoint, UnknownState
from tidegate.spark.filelog import (
    PlannedBatch,
    SourceLogEntry,
    _compacted_every,
    log_place,
    plan_batch,
    plan_no_data,
    read_offsets,
    source_entries,
    write_log,
)
from tidegate.spark.positions import (
    Order,
    Position,
    StreamPosition,
    batch_between,
    compared,
    entries_beyond,
    first_at,
    position_at,
    told,
)
from tidegate.spark.sources import are_same
from tidegate.storage.file_lists import SnapshotFile
from tidegate.storage.folder import Folder
from tidegate.storage.manifest import SourceStream

FILES = SourceStream("json", {"path": "file:/in"})
OTHERS = SourceStream("json", {"path": "file:/others"})
KAFKA = SourceStream("kafka", {"kafka.bootstrap.servers": "b:9092", "subscribe": "t"}, {"t": "id-1"})
RATE = SourceStream("rate", {"rowsPerSecond": "1"})
METADATA = json.dumps({"batchWatermarkMs": 5, "batchTimestampMs": 1, "conf": {"a": "b"}})


def snapshot(folder: Folder) -> list[SnapshotFile]:
    """All files of Spark's folder, as if a checkpoint had kept them."""
    found = []
    for name in folder.list():
        data = folder.read(name) or b""
        found.append(SnapshotFile(name, name, len(data), hashlib.sha256(data).hexdigest()))
    return found


def entry(folder: Folder, log: int, number: int | str, files: Iterable[tuple[str, int]]) -> None:
    """`files`: names, and the offsets at which they were read."""
    lines = [json.dumps({"path": f"file:/in/{name}", "timestamp": 7, "batchId": at}) for name, at in files]
    write_log(folder, f"sources/{log}/{number}", lines)


def offsets(folder: Folder, batch: int, *lines: str) -> None:
    write_log(folder, f"offsets/{batch}", [METADATA, *lines])


def at(offset: Any, *, first: Any = None, stream: SourceStream = KAFKA) -> Position:
    """In a stream that is not of files."""
    begun = None if first is None else b"\0v1\n" + json.dumps(first).encode()
    return (StreamPosition(stream, 0, None if offset is None else json.dumps(offset), first=begun),)


def having_read(*names: str, offset: int = 0) -> Position:
    files = {(f"file:/in/{name}", 7): 0 for name in names}
    return (StreamPosition(FILES, 0, f'{{"logOffset":{offset}}}' if names else None, files if names else None),)


@pytest.mark.parametrize(
    ("one", "other", "order"),
    [
        (having_read("a", "b", offset=4), having_read("b", "a", offset=1), Order.SAME),
        (having_read("a"), having_read("a", "b"), Order.BEHIND),
        (having_read(), having_read("a"), Order.BEHIND),
        (having_read("a"), having_read(), Order.AHEAD),
        (having_read("a"), having_read("b"), Order.APART),
        (having_read(), having_read(), Order.SAME),
        (at({"t": {"0": 3, "1": 4}}), at({"t": {"1": 4, "0": 3}}), Order.SAME),
        (at({"t": {"0": 3, "1": 4}}), at({"t": {"0": 3, "1": 5}}), Order.BEHIND),
        (at({"t": {"0": 3}}), at({"t": {"0": 3, "1": 0}}), Order.BEHIND),  # a partition was added
        (at({"t": {"0": 3, "1": 0}}), at({"t": {"0": 4}}), Order.APART),
        (at({"t": {"0": 9, "1": 4}}), at({"t": {"0": 3, "1": 5}}), Order.APART),
        (at({"t": {"0": 9}}), at({"t": {"0": 3}}), Order.AHEAD),
        (at({"t": {"0": 9}}, first={"t": {"0": 0}}), at({"t": {"0": 9}}, first={"t": {"0": 5}}), Order.APART),
        (at(None, first={"t": {"0": 0}}), at({"t": {"0": 9}}, first={"t": {"0": 0}}), Order.BEHIND),
        (at(None, first={"t": {"0": 1}}), at({"t": {"0": 9}}, first={"t": {"0": 0}}), Order.APART),
        (at(None), at({"t": {"0": 9}}, first={"t": {"0": 0}}), Order.BEHIND),
        (at(None), at(None, first={"t": {"0": 0}}), Order.SAME),  # neither has read anything
        (at(3, stream=RATE), at(5, stream=RATE), Order.BEHIND),
        (at(3, stream=RATE), at(3, stream=RATE), Order.SAME),
        (at({"version": 3}, stream=RATE), at({"version": 4}, stream=RATE), Order.UNKNOWN),
        (at({"a": 1, "b": 2}, stream=RATE), at({"b": 2, "a": 1}, stream=RATE), Order.SAME),
    ],
)
def test_positions_are_compared_by_what_was_read(one: Position, other: Position, order: Order) -> None:
    assert compared(one, other) is order
    back = {Order.BEHIND: Order.AHEAD, Order.AHEAD: Order.BEHIND}
    assert compared(other, one) is back.get(order, order)


def test_of_several_streams_all_count() -> None:
    behind, ahead, unknown = (having_read("a"), having_read("a", "b")), (at(5), at(3)), (at("x"), at("y"))
    assert compared(behind[0] + at(3), behind[1] + at(3)) is Order.BEHIND
    assert compared(behind[0] + ahead[0], behind[1] + ahead[1]) is Order.APART
    assert compared(behind[0] + unknown[0], behind[1] + unknown[1]) is Order.UNKNOWN
    assert told(having_read("a") + at(5) + at(None)) == "1 files read, 5, nothing read yet"


def test_a_file_that_was_written_anew_is_another_one() -> None:
    changed = (StreamPosition(FILES, 0, '{"logOffset":0}', {("file:/in/a", 8): 0}),)
    assert compared(having_read("a"), changed) is Order.APART


def test_the_files_of_a_snapshot_are_those_up_to_its_batch(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    entry(folder, 0, "1.compact", [("a", 0), ("b", 1)])
    entry(folder, 0, 2, [("c", 2)])
    entry(folder, 0, 3, [("begun", 3)])
    entry(folder, 1, 0, [("z", 0)])
    offsets(folder, 4, '{"logOffset":2}', '{"logOffset":0}')
    position = position_at(folder, "rows", snapshot(folder), 4, (FILES, OTHERS))
    assert [sorted(path for path, _ in each.files or {}) for each in position] == [
        ["file:/in/a", "file:/in/b", "file:/in/c"],
        ["file:/in/z"],
    ]
    assert entries_beyond(position, folder.list()) == {"sources/0/3"}
    folder.delete(["sources/0/2"])
    with pytest.raises(DamagedCheckpoint, match="entry 2 of what source 'rows' has read"):
        position_at(folder, "rows", snapshot(folder), 4, (FILES, OTHERS))


def test_what_is_damaged_is_not_taken_for_a_position(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    entry(folder, 0, 0, [("a", 0)])
    offsets(folder, 0, '{"logOffset":0}')
    files = snapshot(folder)
    entry(folder, 0, 0, [("b", 0)])
    with pytest.raises(DamagedCheckpoint, match=r"sources/0/0 of source 'rows' is gone, or not what it was"):
        position_at(folder, "rows", files, 0, (FILES,))
    with pytest.raises(DamagedCheckpoint, match="offsets/1 is not in the snapshot"):
        position_at(folder, "rows", snapshot(folder), 1, (FILES,))
    with pytest.raises(DamagedCheckpoint, match="reads 2 streams, but its batch 0 names 1 positions"):
        position_at(folder, "rows", snapshot(folder), 0, (FILES, FILES))


def test_a_stream_that_is_read_twice_has_one_log(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    entry(folder, 0, 0, [("a", 0)])
    entry(folder, 1, 0, [("z", 0)])
    offsets(folder, 0, *['{"logOffset":0}'] * 3)
    assert [each.log for each in position_at(folder, "s", snapshot(folder), 0, (FILES, FILES, OTHERS))] == [0, 0, 1]
    folder.delete(["sources/1/0"])
    with pytest.raises(UnknownState, match="3 streams are read by 1 logs"):
        position_at(folder, "s", snapshot(folder), 0, (FILES, FILES, OTHERS))


def test_where_a_source_first_stood_counts_but_not_files_of_a_batch_that_was_begun(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("sources/0/0", b'\0v1\n{"t":{"0":5}}')
    entry(folder, 1, 0, [("begun", 0)])
    position = position_at(folder, "rows", snapshot(folder), None, (KAFKA, FILES))
    assert [each.first for each in position] == [b'\0v1\n{"t":{"0":5}}', None]
    assert entries_beyond(position, folder.list()) == {"sources/1/0"}
    assert first_at(folder, ["sources/0/0"], (KAFKA, FILES), (0, 1)) == position
    assert compared(position[:1], at({"t": {"0": 9}}, first={"t": {"0": 5}})) is Order.BEHIND


def test_streams_are_the_same_whatever_is_known_of_them_first() -> None:
    more = SourceStream("kafka", {**KAFKA.reads, "subscribe": "t,u"}, {"t": "id-1", "u": "id-2"})
    assert are_same((KAFKA,), (more,))
    assert are_same((more,), (KAFKA,))
    anew = SourceStream("kafka", KAFKA.reads, {"t": "id-9"})
    assert not are_same((KAFKA,), (anew,))
    assert not are_same((FILES,), (OTHERS,))
    assert not are_same((FILES,), (FILES, FILES))


# -- the batch between two of them ----------------------------------------------------------------


def test_a_batch_takes_up_exactly_what_is_missing() -> None:
    own = having_read("a", offset=6) + at(None)
    target = having_read("b", "a", "c", offset=1) + at({"t": {"0": 9}}, first={"t": {"0": 5}})
    batch = batch_between(own, target, (0, 1))
    assert batch.sources == ('{"logOffset":7}', '{"t": {"0": 9}}')
    assert batch.entries == {0: tuple(SourceLogEntry(f"file:/in/{name}", 7, 7) for name in "bc")}
    assert batch.firsts == {1: b'\0v1\n{"t": {"0": 5}}'}
    same = batch_between(own[:1], having_read("a", offset=99), (0,))
    assert same == PlannedBatch(('{"logOffset":6}',))


def test_a_batch_is_written_as_spark_would_have_begun_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    offsets(folder, 3, '{"logOffset":0}', "-")
    folder.write("commits/3", b'v2\n{"nextBatchWatermarkMs":99,"stateUniqueIds":{}}')
    entry(folder, 0, 0, [("a", 0)])
    added = SourceLogEntry("file:/in/b", 7, 1)
    plan_batch(folder, 3, PlannedBatch(('{"logOffset":1}', None), {0: (added,)}), "", 10)
    assert read_offsets(folder, 4).watermark_ms == 99
    assert read_offsets(folder, 4).sources == ('{"logOffset":1}', None)
    noted = json.loads((folder.read("offsets/4") or b"").splitlines()[1])
    assert noted["conf"] == {"a": "b"}
    assert noted["batchTimestampMs"] > 1_700_000_000_000
    assert source_entries(folder, "sources/0/1") == [added]
    folder.write("commits/4", b'v2\n{"nextBatchWatermarkMs":120,"stateUniqueIds":{}}')
    plan_no_data(folder, 4)
    assert read_offsets(folder, 5).sources == read_offsets(folder, 4).sources
    assert read_offsets(folder, 5).watermark_ms == 120


def test_a_first_batch_has_a_query_and_a_beginning(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    plan_batch(folder, None, PlannedBatch(('{"t":{"0":9}}',), {}, {0: b"v1\n5"}), METADATA, 10)
    assert folder.list() == ["metadata", "offsets/0", "sources/0/0"]
    assert folder.read("sources/0/0") == b"v1\n5"
    assert read_offsets(folder, 0).watermark_ms == 5


@pytest.mark.parametrize(("interval", "compact"), [(3, []), (3, [2])])
def test_an_entry_that_spark_would_compact_holds_all_before_it(
    tmp_path: Path, interval: int, compact: list[int]
) -> None:
    folder = Folder(tmp_path)
    number = 5 if compact else 2
    for each in range(number):
        if each not in compact:
            entry(folder, 0, each, [(f"f{each}", each)])
    for each in compact:
        entry(folder, 0, f"{each}.compact", [(f"f{number}", number) for number in range(each + 1)])
    offsets(folder, 7, f'{{"logOffset":{number - 1}}}')
    added = SourceLogEntry(f"file:/in/f{number}", 7, number)
    plan_batch(folder, 7, PlannedBatch((f'{{"logOffset":{number}}}',), {0: (added,)}), "", interval)
    found = source_entries(folder, f"sources/0/{number}.compact") or []
    assert [each.path for each in found] == [f"file:/in/f{each}" for each in range(number + 1)]
    assert [each.batch_id for each in found] == list(range(number + 1))
    folder.delete([f"sources/0/{number}.compact", f"sources/0/{number - 1}"])
    with pytest.raises(DamagedCheckpoint, match="is missing, though entries after it are there"):
        plan_batch(folder, 7, PlannedBatch(("{}",), {0: (added,)}), "", interval)


@pytest.mark.parametrize(
    ("default", "compact", "every"),
    [
        (10, [], 10),
        (10, [9], 10),
        (10, [9, 19], 10),
        (5, [11], 6),
        (10, [2], 3),
        (4, [19], 4),
        (7, [9], 10),
        (3, [6], 7),
    ],
)
def test_a_log_is_compacted_as_often_as_spark_does_it(default: int, compact: list[int], every: int) -> None:
    assert _compacted_every(default, compact) == every


def test_an_entry_is_known_by_its_name() -> None:
    assert log_place("sources/0/12") == (0, 12, False)
    assert log_place("sources/3/9.compact") == (3, 9, True)
    for name in ("offsets/3", "sources/0/.9.crc", "sources/a/1", "sources/0", "state/0/0/1.zip"):
        assert log_place(name) is None
