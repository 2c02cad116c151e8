"""Gates: what their log holds, and what Spark's own file source sees through them."""

from __future__ import annotations

import importlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import LongType, StructField, StructType

from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.spark.filelog import METADATA, is_committed, log_offset, read_offsets, read_source_log
from tidegate.spark.gate import COMPACT_EVERY, WINDOW, Gate
from tidegate.spark.queries import read_gate
from tidegate.spark.session import StageSessions
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.memory import Memory

pytestmark = pytest.mark.matrix

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

ROWS_PER_SEGMENT = 3


# -- what the log holds -----------------------------------------------------------------------------


def named(sequence: int, files: int = 1) -> Segment:
    """A segment whose files nobody reads."""
    return Segment(
        sequence, sequence, tuple(SegmentFile(f"{sequence}-{number}.parquet", 10) for number in range(files))
    )


def entries(gate: Gate) -> dict[str, list[int]]:
    """The sequence numbers in every file of the gate's log."""
    found: dict[str, list[int]] = {}
    for name in sorted(gate.files.names_in(METADATA), key=lambda name: int(name.removesuffix(".compact"))):
        version, *lines = (gate.files.read(f"{METADATA}/{name}") or b"").decode().split("\n")
        assert version == "v1"
        found[name] = [int(line.split('"')[3].rpartition("/")[2].split("-")[0]) for line in lines]
    return found


def seen_by_spark(gate: Gate) -> list[int]:
    """What Spark reads: the last compact file and all after it, without a gap."""
    log = entries(gate)
    numbers = [int(name.removesuffix(".compact")) for name in log]
    start = max(int(name.removesuffix(".compact")) for name in log if name.endswith(".compact"))
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert (start + 1) % COMPACT_EVERY == 0
    return [each for name, found in log.items() if int(name.removesuffix(".compact")) >= start for each in found]


@pytest.fixture
def gate() -> Gate:
    files = Memory()
    return Gate(files.at("gate"), files, 0)


def test_a_new_gate_shows_nothing_and_tells_spark_its_interval(gate: Gate) -> None:
    assert entries(gate) == {f"{COMPACT_EVERY - 1}.compact": []}
    assert gate.lag == 0


def test_nothing_is_seen_before_the_flush(gate: Gate) -> None:
    gate.release(named(1))
    assert seen_by_spark(gate) == []
    assert gate.lag == 1
    gate.flush()
    assert seen_by_spark(gate) == [1]


def test_a_flush_with_nothing_new_writes_nothing(gate: Gate) -> None:
    gate.release(named(1))
    gate.flush()
    before = entries(gate)
    gate.flush()
    assert entries(gate) == before


def test_what_was_released_since_is_one_entry(gate: Gate) -> None:
    for sequence in (1, 2, 3):
        gate.release(named(sequence, files=2))
    gate.flush()
    assert entries(gate)["10"] == [1, 1, 2, 2, 3, 3]


def test_a_compact_entry_repeats_all_that_is_not_consumed(gate: Gate) -> None:
    for sequence in range(1, 11):
        gate.release(named(sequence))
        gate.flush()
    assert entries(gate)["19.compact"] == list(range(1, 11))


def test_a_compact_entry_leaves_out_what_is_consumed(gate: Gate) -> None:
    for sequence in range(1, 10):
        gate.release(named(sequence))
        gate.flush()
    gate.on_consumed(7)
    gate.release(named(10))
    gate.flush()
    assert entries(gate)["19.compact"] == [8, 9, 10]


def test_whatever_the_reader_does_it_sees_all_that_it_has_not_consumed(gate: Gate) -> None:
    consumed = 0
    for sequence in range(1, 400):
        gate.release(named(sequence))
        gate.flush()
        if sequence % 37 == 0:
            consumed = sequence - sequence % 5
            gate.on_consumed(consumed)
        assert set(range(consumed + 1, sequence + 1)) <= set(seen_by_spark(gate))


def test_the_log_stays_short_while_the_reader_follows(gate: Gate) -> None:
    longest = 0
    for sequence in range(1, 1_001):
        gate.release(named(sequence))
        gate.flush()
        gate.on_consumed(sequence)
        log = entries(gate)
        longest = max(longest, len(log))
        assert max(len(found) for found in log.values()) <= 1
    assert longest <= 2 * COMPACT_EVERY + 1


def test_a_reader_that_listed_the_log_before_a_compaction_still_finds_what_it_listed(gate: Gate) -> None:
    for sequence in range(1, 100):
        before = set(entries(gate))
        last_compact = max(int(name.removesuffix(".compact")) for name in before if name.endswith(".compact"))
        gate.release(named(sequence))
        gate.flush()
        gate.on_consumed(sequence)
        needed = {name for name in before if int(name.removesuffix(".compact")) >= last_compact}
        assert needed <= set(entries(gate))


def test_no_more_than_the_window_stands_in_the_log(gate: Gate) -> None:
    for sequence in range(1, 3 * WINDOW):
        gate.release(named(sequence))
        gate.flush()
    assert seen_by_spark(gate)[-1] == WINDOW
    assert gate.lag == 3 * WINDOW - 1
    longest = max(len(found) for found in entries(gate).values())
    assert longest <= WINDOW


def test_a_full_window_opens_by_what_was_consumed(gate: Gate) -> None:
    for sequence in range(1, 2 * WINDOW + 1):
        gate.release(named(sequence))
    gate.flush()
    gate.on_consumed(10)
    gate.flush()
    assert seen_by_spark(gate)[-1] == WINDOW + 10
    assert gate.lag == 2 * WINDOW - 10


def test_with_a_window_of_one_each_batch_sees_one_whole_segment(tmp_path: Path) -> None:
    gate = Gate(Folder(tmp_path).at("gate", durable=False), Folder(tmp_path), 0, window=1)
    for sequence in range(1, 40):
        gate.release(named(sequence, files=2))
    consumed = 0
    while gate.lag:
        for _ in range(2):
            gate.flush()
        assert [each for each in seen_by_spark(gate) if each > consumed] == [consumed + 1, consumed + 1]
        consumed += 1
        gate.on_consumed(consumed)
    assert consumed == 39


def test_a_gate_of_a_restored_reader_starts_behind_its_position(tmp_path: Path) -> None:
    gate = Gate(Folder(tmp_path).at("gate", durable=False), Folder(tmp_path), 41)
    gate.release(named(42))
    gate.flush()
    assert seen_by_spark(gate) == [42]
    assert gate.lag == 1
    gate.on_consumed(42)
    assert gate.lag == 0


# -- what Spark sees --------------------------------------------------------------------------------


class Channel:
    """Segments on disk, under a root whose name has every kind of letter."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "größe 50% a+b k=v"
        self.written = 0

    def write(self) -> Segment:
        self.written += 1
        name = f"generations/000001/stages/rows/output/day=1/a b/part-{self.written}.parquet"
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        first = (self.written - 1) * ROWS_PER_SEGMENT
        parquet.write_table(pyarrow.table({"id": list(range(first, first + ROWS_PER_SEGMENT))}), path)
        return Segment(self.written, self.written - 1, (SegmentFile(name, path.stat().st_size),))

    def gate(self) -> Gate:
        return Gate(Folder(self.root).at("gates/rows", durable=False), Folder(self.root), 0)

    @property
    def rows(self) -> Counter[int]:
        return Counter(range(self.written * ROWS_PER_SEGMENT))


class Reader:
    """A query that reads a gate into memory."""

    def __init__(self, query: StreamingQuery, session: SparkSession, checkpoint: Path) -> None:
        self._query = query
        self._session = session
        self._checkpoint = checkpoint

    def follow(self) -> int:
        """Consume what the gate shows. Returns the position that Spark's own log tells."""
        self._query.processAllAvailable()
        return max(self.positions(), default=0)

    def positions(self) -> list[int]:
        """The sequence numbers of everything consumed, in the order of batches."""
        found: list[int] = []
        batch = 0
        while is_committed(Folder(self._checkpoint), batch):
            (source,) = read_offsets(Folder(self._checkpoint), batch).sources
            assert source is not None
            taken = read_source_log(Folder(self._checkpoint), 0, log_offset(source))
            assert taken is not None
            found += [entry.timestamp for entry in taken]
            batch += 1
        return found

    @property
    def batches(self) -> int:
        return len(list((self._checkpoint / "commits").glob("[0-9]*")))

    def rows(self) -> Counter[int]:
        table = self._session.table(str(self._query.name))
        return Counter(row["id"] for row in table.collect())


@contextmanager
def reading(spark: SparkSession, gate: Gate, folder: Path) -> Iterator[Reader]:
    session = StageSessions(spark).of_stages
    rows = read_gate(session, gate.files, StructType([StructField("id", LongType())]))
    writer = rows.writeStream.option("checkpointLocation", str(folder / "spark")).queryName("seen_through_the_gate")
    query = writer.format("memory").start()
    try:
        yield Reader(query, session, folder / "spark")
    finally:
        query.stop()


@pytest.mark.spark
@pytest.mark.slow
def test_spark_follows_a_gate_over_many_compactions(tmp_path: Path, spark: SparkSession) -> None:
    channel = Channel(tmp_path)
    gate = channel.gate()
    with reading(spark, gate, tmp_path) as reader:
        for flushed in range(1, 45):
            for _ in range(1 + flushed % 3):
                gate.release(channel.write())
            gate.flush()
            if flushed % 4 == 0:
                gate.on_consumed(reader.follow())
        assert reader.follow() == channel.written
        assert reader.positions() == list(range(1, channel.written + 1))
        assert reader.rows() == channel.rows
        assert reader.batches > 10


@pytest.mark.soak  # it takes long; shapes and kills are in CI
@pytest.mark.spark
@pytest.mark.slow
def test_a_reader_that_comes_late_loses_nothing(tmp_path: Path, spark: SparkSession) -> None:
    """Far more is released than the window and several compactions hold, before the reader has seen any of it."""
    channel = Channel(tmp_path)
    gate = channel.gate()
    for _ in range(WINDOW + 150):
        gate.release(channel.write())
        gate.flush()
    with reading(spark, gate, tmp_path) as reader:
        assert reader.follow() == WINDOW
        while gate.lag:
            gate.on_consumed(reader.follow())
            gate.flush()
        assert reader.positions() == list(range(1, channel.written + 1))
        assert reader.rows() == channel.rows


class ForgetfulGate(Gate):
    """What the prototype did: a compact entry holds what is new, and not what still waits to be consumed."""

    def __init__(self, files: Files, root: Files, position: int) -> None:
        super().__init__(files, root, position)
        self._written: set[int] = set()

    def _lines(self, segments: deque[Segment] | list[Segment]) -> list[str]:
        fresh = [segment for segment in segments if segment.sequence not in self._written]
        self._written.update(segment.sequence for segment in fresh)
        return super()._lines(fresh)


@pytest.mark.spark
@pytest.mark.slow
def test_a_gate_that_did_not_repeat_what_waits_would_lose_it(tmp_path: Path, spark: SparkSession) -> None:
    channel = Channel(tmp_path)
    gate = ForgetfulGate(Folder(channel.root).at("gates/rows", durable=False), Folder(channel.root), 0)
    for _ in range(25):
        gate.release(channel.write())
        gate.flush()
    with reading(spark, gate, tmp_path) as reader:
        reader.follow()
        assert reader.positions() == list(range(20, 26))
        assert reader.rows() < channel.rows
