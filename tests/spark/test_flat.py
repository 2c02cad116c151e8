"""Nothing grows with the number of batches: logs, folders, what a batch costs, what a checkpoint costs.

Counts are compared, never seconds. Spark is played.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import run_to_end, stream, table_rows, write_input
from tests.spark.played import PlayedPipeline, count_held, entries, played
from tidegate.engine.channel import Channel
from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.spark.filelog import METADATA
from tidegate.spark.gate import Gate
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import examine

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

FEW = 200
MANY = 20_000


class Counted:
    """What Python opens and lists while a block runs, on all threads or on the one that runs the block: what was shown
    is dropped beside it, whenever that comes."""

    current: Counter[str] | None = None
    thread: int | None = None

    @staticmethod
    def hook(event: str, _arguments: tuple[Any, ...]) -> None:
        if Counted.current is None or event not in ("open", "os.listdir", "os.scandir"):
            return
        if Counted.thread in (None, threading.get_ident()):
            Counted.current[event] += 1

    @staticmethod
    @contextmanager
    def block(*, own_thread: bool = False) -> Iterator[Counter[str]]:
        Counted.current = Counter()
        Counted.thread = threading.get_ident() if own_thread else None
        try:
            yield Counted.current
        finally:
            Counted.current = None


sys.addaudithook(Counted.hook)


# -- one gate, one channel --------------------------------------------------------------------------


def segment(sequence: int) -> Segment:
    path = f"generations/000001/stages/rows/output/part-{sequence:09d}.parquet"
    return Segment(sequence, sequence, (SegmentFile(path, 1_000),))


def lines_of(gate: Gate) -> int:
    return sum((gate.files.read(name) or b"").count(b"\n") for name in gate.files.list(METADATA))


@pytest.mark.slow
def test_a_gates_log_and_a_flush_of_it_are_the_same_after_any_number_of_segments(tmp_path: Path) -> None:
    gate = Gate(Folder(tmp_path).at("gate", durable=False), Folder(tmp_path), 0)
    found = []
    for sequence in range(1, MANY + 1):
        gate.release(segment(sequence))
        if sequence in (FEW, MANY):
            with Counted.block() as counts:
                gate.flush()
            found.append((dict(counts), entries(Path(gate.files.location())), lines_of(gate), gate.lag))
        gate.flush()
        gate.on_consumed(sequence)
    assert found[0] == found[1]


def test_a_channel_holds_only_what_a_reader_has_yet_to_see_or_to_consume() -> None:
    channel = Channel("rows", 0)
    for sequence in range(1, MANY + 1):
        channel.append_segment(segment(sequence))
        channel.forget_before(sequence)
        channel.on_consumed(sequence)
        assert channel.at(sequence) is None
    counts: Counter[str] = Counter()
    count_held(channel, "", counts, set())
    assert counts.total() <= 1


# -- a whole generation, Spark played ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.soak  # what each of its parts costs is counted by the next ones
def test_a_batch_costs_the_same_after_many_batches_as_after_few(tmp_path: Path) -> None:
    def twenty_batches(pipeline: PlayedPipeline) -> tuple[dict[str, int], dict[str, int], Counter[str]]:
        with Counted.block(own_thread=True) as counts:
            for _ in range(20):
                pipeline.one_batch_each()
        found = (dict(counts), pipeline.sizes, pipeline.held)
        pipeline.checkpoint()
        return found

    with played(tmp_path / "few", after_batches=FEW) as pipeline:
        few = [twenty_batches(pipeline) for _ in range(20)]
        assert few[-1] == few[-3]
    with played(tmp_path / "many", after_batches=MANY) as pipeline:
        many = [twenty_batches(pipeline) for _ in range(20)]
        assert many[-1] == few[-1]
        assert pipeline.table.batches == list(range(MANY, MANY + 20 * 20))


@pytest.mark.slow
@pytest.mark.soak
def test_a_checkpoint_costs_the_same_after_many_checkpoints_as_after_few(tmp_path: Path) -> None:
    def a_checkpoint(pipeline: PlayedPipeline) -> int:
        pipeline.one_batch_each()
        with Counted.block() as counts:
            pipeline.checkpoint()
        return counts["os.scandir"] + counts["os.listdir"]

    def after_sixty(folder: Path, batches: int) -> tuple[int, dict[str, int], Counter[str]]:
        # Logs are trimmed every twenty batches: the same place in that rhythm is compared.
        with played(folder, after_batches=batches) as pipeline:
            found = [a_checkpoint(pipeline) for _ in range(60)][-1], pipeline.sizes, pipeline.held
            log = pipeline.root.decisions.read()
            assert log.last_checkpoint_id == batches + 60
            assert len(log) <= 4
            assert pipeline.table.batches == list(range(batches, batches + 60))
        return found

    few = after_sixty(tmp_path / "few", FEW)
    assert after_sixty(tmp_path / "many", MANY) == few
    assert max(few[1].values()) < 100


def test_batches_of_update_mode_leave_no_folders_behind(tmp_path: Path) -> None:
    def some_batches(pipeline: PlayedPipeline) -> dict[str, int]:
        for _ in range(20):
            pipeline.one_batch_each()
        pipeline.checkpoint()
        return pipeline.sizes

    with played(tmp_path, output_mode="update") as pipeline:
        found = [some_batches(pipeline) for _ in range(8)]
        assert found[-1] == found[3]


@pytest.mark.parametrize("stage", ["rows", "middle", "table"])
def test_checkpoints_that_are_aborted_leave_nothing_behind(tmp_path: Path, stage: str) -> None:
    def one_in_vain_and_one_that_succeeds(pipeline: PlayedPipeline) -> Counter[str]:
        pipeline.one_batch_each()
        needed = pipeline.played[stage].checkpoint / "offsets" / str(pipeline.played[stage].batches - 1)
        hidden = needed.rename(needed.with_name("hidden"))  # so that the stage has no snapshot to report
        in_vain = pipeline.generation.trigger()
        pipeline.poll_until(lambda: not pipeline.generation.is_under_way(in_vain))
        assert not pipeline.generation.completed(in_vain)
        hidden.rename(needed)
        pipeline.checkpoint()
        return pipeline.held

    with played(tmp_path) as pipeline:
        found = [one_in_vain_and_one_that_succeeds(pipeline) for _ in range(30)]
        # What is remembered of the last thousand cancelled, and of the last few with as much as was reported of them.
        remembered = ("._aligner._cancelled", ".coordinator._history[]")
        kept = [{path: n for path, n in held.items() if not any(map(path.__contains__, remembered))} for held in found]
        assert kept[-1] == kept[19]
        assert pipeline.table.batches == list(range(30))


# -- real Spark -------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.slow
def test_a_sink_in_update_mode_shows_its_rows_and_leaves_nothing_staged(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "in", 6, 20)
    pipeline = tg.Pipeline("updates")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in", files_per_batch=1)

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "totals", partition_by=["key"]), output_mode="update")
    def totals(rows: DataFrame) -> DataFrame:
        return rows.groupBy("key").agg(F.count("*").alias("n"))

    run_to_end(pipeline, tmp_path / "root", spark)
    shown = table_rows(tmp_path / "lake" / "totals", ["key", "n"])
    assert {key for key, _ in shown} == {f"k{number}" for number in range(5)}
    assert {key: max(count for each, count in shown if each == key) for key, _ in shown} == {
        f"k{number}": 24 for number in range(5)
    }
    staged = tmp_path / "lake" / "totals" / "_tidegate"
    assert [path for path in staged.rglob("*") if path.name.startswith("batch-")] == []


def test_checkpoints_in_which_nothing_changes_push_out_no_other_and_leave_nothing_behind(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        for _ in range(3):
            pipeline.one_batch_each()
            pipeline.checkpoint()
        sizes = []
        for _ in range(30):
            pipeline.checkpoint()
            sizes.append(pipeline.sizes)
        assert sizes[-1] == sizes[12]
        log = pipeline.root.decisions.read()
        assert log.retained == (1, 2, 33)
        for checkpoint_id in log.retained:
            examine(pipeline.root.store, log, checkpoint_id)
        pipeline.one_batch_each()
        pipeline.checkpoint()
        assert pipeline.root.decisions.read().retained == (2, 33, 34)
