"""Nothing grows with the number of batches: logs, folders, what a batch costs, what a checkpoint costs.

Counts are compared, never seconds. Spark is played by `Played`, which writes the files that Spark would write.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import run_to_end, stream, table_rows, write_input
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.sinks.contract import CommitAnswer, Committable
from tidegate.spark.channel import Channel
from tidegate.spark.filelog import METADATA, as_uri, remove_file, write_whole
from tidegate.spark.gate import Gate
from tidegate.spark.generation import Generation
from tidegate.spark.pipeline import OutputMode
from tidegate.spark.root import Root
from tidegate.spark.stage import BATCH_FOLDER, RunningStage
from tidegate.storage.manifest import StageShape

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

FEW = 200
MANY = 20_000


class Counted:
    """What Python opens and lists while a block runs."""

    current: Counter[str] | None = None

    @staticmethod
    def hook(event: str, _arguments: tuple[Any, ...]) -> None:
        if Counted.current is not None and event in ("open", "os.listdir", "os.scandir"):
            Counted.current[event] += 1

    @staticmethod
    @contextmanager
    def block() -> Iterator[Counter[str]]:
        Counted.current = Counter()
        try:
            yield Counted.current
        finally:
            Counted.current = None


sys.addaudithook(Counted.hook)


def entries(folder: Path) -> int:
    """Files and folders at any depth."""
    return sum(len(folders) + len(names) for _, folders, names in os.walk(folder))


# -- one gate, one channel --------------------------------------------------------------------------


def segment(sequence: int) -> Segment:
    path = f"generations/000001/stages/rows/output/part-{sequence:09d}.parquet"
    return Segment(sequence, sequence, (SegmentFile(path, 1_000),))


def lines_of(gate: Gate) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in (gate.folder / METADATA).iterdir())


@pytest.mark.slow
def test_a_gates_log_and_a_flush_of_it_are_the_same_after_any_number_of_segments(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", tmp_path, 0)
    found = []
    for sequence in range(1, MANY + 1):
        gate.release(segment(sequence))
        if sequence in (FEW, MANY):
            with Counted.block() as counts:
                gate.flush()
            found.append((dict(counts), entries(gate.folder), lines_of(gate), gate.lag))
        gate.flush()
        gate.on_consumed(sequence)
    assert found[0] == found[1]


def test_a_channel_holds_only_what_a_reader_has_yet_to_see() -> None:
    channel = Channel("rows", 0)
    for sequence in range(1, MANY + 1):
        channel.append_segment(segment(sequence))
        channel.forget_before(sequence)
        assert channel.at(sequence) is None
    counts: Counter[str] = Counter()
    count_held(channel, "", counts, set())
    assert counts.total() <= 1


# -- a whole generation, Spark played ---------------------------------------------------------------


class CountingTable(tg.DeltaTable):
    """A table that shows nothing and counts what was committed to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.batches: list[int] = []

    def commit(self, _owner: str, _permit: CommitPermit, committable: Committable) -> CommitAnswer:
        last = max(self.batches, default=-1)
        self.batches += [file.batch for file in committable.files if file.batch > last]
        return CommitAnswer.COMMITTED


class Played:
    """The query of one stage: each batch consumes one segment, if it reads any, and writes one file."""

    def __init__(self, stage: RunningStage, checkpoint: Path, output: Path, template: Path, root: Path) -> None:
        self.stage = stage
        self.checkpoint = checkpoint
        self.output = output
        self._template = template
        self._root = root
        self.batches = 0
        for log in ("offsets", "commits", "sources/0"):
            (checkpoint / log).mkdir(parents=True)
        (checkpoint / "metadata").write_text('{"id":"played"}', encoding="utf-8")
        (output / METADATA).mkdir(parents=True)

    def run_batch(self, consumed: Path | None = None) -> Path:
        number = self.batches
        path = self.output / f"part-{number:09d}.parquet"
        if self.stage.definition.output_mode != "append":
            path = self.output / f"{BATCH_FOLDER}{number}" / path.name
            path.parent.mkdir()
        if consumed is not None:
            entry = f'{{"path":"{as_uri(consumed)}","timestamp":{number + 1},"batchId":{number}}}'
            write_whole(self.checkpoint / "sources" / "0" / str(number), [entry])
        offsets = ['{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}', f'{{"logOffset":{number}}}']
        write_whole(self.checkpoint / "offsets" / str(number), offsets)
        os.link(self._template, path)
        if self.stage.definition.output_mode == "append":
            size = path.stat().st_size
            entry = f'{{"path":"{as_uri(path)}","size":{size},"isDir":false,"modificationTime":1,'
            entry += '"blockReplication":1,"blockSize":1,"action":"add"}'
            write_whole(self.output / METADATA / str(number), [entry])
        write_whole(self.checkpoint / "commits" / str(number), ['{"nextBatchWatermarkMs":0}'])
        for log in ("offsets", "commits"):  # as Spark does
            remove_file(self.checkpoint / log / str(number - 100))
        self.batches += 1
        return path


ON_DEMAND = CheckpointConfig(interval_ms=3_600_000)


class PlayedPipeline:
    """A source, a stage and a sink in one generation."""

    def __init__(self, folder: Path, output_mode: OutputMode = "append") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.table = CountingTable(folder / "lake" / "table")
        pipeline = tg.Pipeline("flat")

        @pipeline.source
        def rows() -> DataFrame:
            raise AssertionError("no function is called here")

        @pipeline.stage(output_mode=output_mode)
        def middle(rows: DataFrame) -> DataFrame:
            return rows

        @pipeline.sink(self.table, output_mode=output_mode)
        def table(middle: DataFrame) -> DataFrame:
            return middle

        self.root = Root(folder / "root", "flat")
        definitions = pipeline.validated()
        shape = {each.name: StageShape(each.kind, each.inputs, each.output_mode, "") for each in definitions}
        opened = self.root.open(self.root.decisions.read(), None, shape)
        assert opened is not None
        self.generation = Generation(definitions, opened, self.root.paths, self.root.store, ON_DEMAND)
        template = folder / "template.parquet"
        parquet.write_table(pyarrow.table({"id": [1]}), template)
        self.played: dict[str, Played] = {}
        for name, stage in self.generation.stages.items():
            checkpoint = self.root.paths.absolute(f"{self.root.paths.stage(1, name)}/spark")
            output = self.generation.output_of(stage.definition)
            self.played[name] = Played(stage, checkpoint, output, template, self.root.paths.root)
            stage.open_gates()

    def one_batch_each(self) -> None:
        path = None
        for played in self.played.values():
            path = played.run_batch(path)
            self.generation.poll()

    def checkpoint(self) -> None:
        """Take one, and wait until it is visible and cleaned up after."""
        checkpoint_id = self.generation.trigger()
        self.poll_until(lambda: self.generation.is_settled)
        assert self.generation.completed(checkpoint_id)

    def poll_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            self.generation.poll()
            time.sleep(0.001)

    @property
    def sizes(self) -> dict[str, int]:
        """How much there is of everything that could grow."""
        folder = self.root.paths.root
        sizes = {name: entries(folder / name) for name in ("decisions", "ids")}
        for name in ("manifests", "snapshots"):
            sizes[name] = entries(folder / "generations" / "000001" / name)
        for name, played in self.played.items():
            sizes[f"source log of {name}"] = entries(played.checkpoint / "sources")
            sizes[f"output of {name}"] = entries(played.output)
            for each, gate in played.stage.gates.items():
                sizes[f"gate from {each} to {name}"] = entries(gate.folder)
        return sizes

    @property
    def held(self) -> Counter[str]:
        """How many things are held in memory, by the attributes that lead to them."""
        counts: Counter[str] = Counter()
        count_held(self.generation, "", counts, set())
        return counts


def count_held(value: object, path: str, counts: Counter[str], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        counts[path] += len(value)
        for each in value.values() if isinstance(value, dict) else value:
            count_held(each, f"{path}[]", counts, seen)
    elif type(value).__module__.startswith("tidegate."):
        names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in {*names, *getattr(value, "__dict__", {})}:
            count_held(getattr(value, name, None), f"{path}.{name}", counts, seen)


@contextmanager
def played(folder: Path, output_mode: OutputMode = "append") -> Iterator[PlayedPipeline]:
    pipeline = PlayedPipeline(folder, output_mode)
    try:
        yield pipeline
    finally:
        pipeline.generation.stop()


@pytest.mark.slow
def test_a_batch_costs_the_same_after_many_batches_as_after_few(tmp_path: Path) -> None:
    def twenty_batches(pipeline: PlayedPipeline) -> tuple[dict[str, int], dict[str, int], Counter[str]]:
        with Counted.block() as counts:
            for _ in range(20):
                pipeline.one_batch_each()
        found = (dict(counts), pipeline.sizes, pipeline.held)
        pipeline.checkpoint()
        return found

    with played(tmp_path) as pipeline:
        found = [twenty_batches(pipeline) for _ in range(50)]
        assert found[-1] == found[19]
        assert pipeline.table.batches == list(range(50 * 20))


@pytest.mark.slow
def test_a_checkpoint_costs_the_same_after_many_checkpoints_as_after_few(tmp_path: Path) -> None:
    def a_checkpoint(pipeline: PlayedPipeline) -> int:
        pipeline.one_batch_each()
        with Counted.block() as counts:
            pipeline.checkpoint()
        return counts["os.scandir"] + counts["os.listdir"]

    with played(tmp_path) as pipeline:
        # Logs are trimmed every twenty batches: the same place in that rhythm is compared.
        few = [a_checkpoint(pipeline) for _ in range(60)][-1], pipeline.sizes, pipeline.held
        many = [a_checkpoint(pipeline) for _ in range(440)][-1], pipeline.sizes, pipeline.held
        assert many == few
        log = pipeline.root.decisions.read()
        assert log.last_checkpoint_id == 500
        assert len(log) <= 4
        assert max(many[1].values()) < 100
        assert pipeline.table.batches == list(range(500))


def test_batches_of_update_mode_leave_no_folders_behind(tmp_path: Path) -> None:
    def some_batches(pipeline: PlayedPipeline) -> dict[str, int]:
        for _ in range(20):
            pipeline.one_batch_each()
        pipeline.checkpoint()
        return pipeline.sizes

    with played(tmp_path, output_mode="update") as pipeline:
        found = [some_batches(pipeline) for _ in range(8)]
        assert found[-1] == found[3]


def test_checkpoints_that_are_aborted_leave_nothing_behind(tmp_path: Path) -> None:
    def one_in_vain_and_one_that_succeeds(pipeline: PlayedPipeline) -> Counter[str]:
        pipeline.one_batch_each()
        needed = pipeline.played["rows"].checkpoint / "offsets" / str(pipeline.played["rows"].batches - 1)
        hidden = needed.rename(needed.with_name("hidden"))  # so that the source has no snapshot to report
        in_vain = pipeline.generation.trigger()
        pipeline.poll_until(lambda: not pipeline.generation.is_under_way(in_vain))
        assert not pipeline.generation.completed(in_vain)
        hidden.rename(needed)
        pipeline.checkpoint()
        return pipeline.held

    with played(tmp_path) as pipeline:
        found = [one_in_vain_and_one_that_succeeds(pipeline) for _ in range(30)]
        for held in found:
            del held[".stages[].aligner._cancelled"]  # the last thousand are remembered
        assert found[-1] == found[19]
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
    assert [path for path in staged.rglob("*") if path.name.startswith(BATCH_FOLDER)] == []
