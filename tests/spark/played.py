"""A pipeline whose Spark is played: files are written as Spark would write them, batch by batch, at a test's word."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from pyspark.sql import DataFrame

import tidegate as tg
from tidegate.engine.generation import Generation, Ground
from tidegate.engine.opening import RootOpening
from tidegate.engine.options import Bounds
from tidegate.engine.root import Root
from tidegate.engine.stage.running import RunningStage
from tidegate.engine.tables import address_of
from tidegate.errors import SinkFailed
from tidegate.flows.opening import Opened
from tidegate.flows.requests import Patience
from tidegate.protocol.aligner import CutCause
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.decision_log import DecisionLog
from tidegate.sinks.contract import BoundSink, CommitAnswer, Committable, SinkPlace, decode_committable
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.sinks.function import KINDS
from tidegate.spark.definition import OutputMode
from tidegate.spark.filelog import StageSource, restart_source_logs, write_log
from tidegate.spark.output import restore_output, written_files
from tidegate.storage.file_lists import SnapshotFiles
from tidegate.storage.files import Files
from tidegate.storage.inspection import retained_manifests
from tidegate.storage.manifest import (
    FORMAT,
    Manifest,
    SourceStream,
    StageShape,
    StageSnapshot,
    TableAddress,
    encode_manifest,
)
from tidegate.storage.paths import RootPaths
from tidegate.testing.played import (
    GateSource,
    Plan,
    PlayedQuery,
    PlayedRows,
    PlayedSource,
    PlayedStream,
    Step,
    TopicSource,
)

SCHEMA = "struct<id:bigint>"
READ_STREAM = SourceStream("json", {"path": "in"})
ON_DEMAND = CheckpointConfig(interval_ms=3_600_000)
_BATCH = '{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}'


def entries(folder: Path) -> int:
    """Files and folders at any depth."""
    return sum(len(folders) + len(names) for _, folders, names in os.walk(folder))


class CountingTable(tg.DeltaTable):
    """A table that shows nothing and counts what was committed to it, when it may be."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.batches: list[int] = []
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.may_check = threading.Event()
        self.may_check.set()
        self.is_checking = threading.Event()
        self.refusal = ""
        """Why it takes no rows, if it does not."""

    def bind(self, place: SinkPlace) -> BoundDeltaTable:
        return BoundCountingTable(self, place)


class BoundCountingTable(BoundDeltaTable):
    def __init__(self, sink: CountingTable, place: SinkPlace) -> None:
        super().__init__(sink, place)
        self._counting = sink

    def check_commit(self, committable: Committable) -> None:  # noqa: ARG002
        self._counting.is_checking.set()
        is_allowed = self._counting.may_check.wait(20)
        self._counting.is_checking.clear()
        assert is_allowed
        if self._counting.refusal:
            raise SinkFailed(self._counting.refusal)

    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer:  # noqa: ARG002
        assert self._counting.may_commit.wait(20)
        last = max(self._counting.batches, default=-1)
        self._counting.batches += [file.batch for file in committable.files if file.batch > last]
        return CommitAnswer.COMMITTED


class AlwaysFits:
    """Whatever a checkpoint holds, it fits."""

    def fits(self, log: DecisionLog, base: Manifest | None) -> bool:  # noqa: ARG002
        return True


def open_next(
    root: Root, sinks: Mapping[str, BoundSink] | None = None, claimant: str | None = None
) -> tuple[Opened, Manifest | None]:
    """Open the next generation on a root, from its newest checkpoint."""
    return RootOpening(root, sinks or {}, claimant=claimant).open(AlwaysFits())


class PlayedStore(NamedTuple):
    """What a generation sees of its root, but for where Spark lives, and how patient it is with it."""

    seen: Callable[[Files], Files] = lambda files: files
    patience: Patience | None = None


class Queries(msgspec.Struct, frozen=True):
    """What stages do. `times_read`: how many sources of a query read each input of its stage."""

    plans: dict[str, Plan] = {}
    """Of those that do more than pass rows on."""
    times_read: int = 1

    def of(self, stage: str) -> Plan:
        return self.plans.get(stage, Plan())


_PASS_ON = Queries()


class Played:
    """The query of one stage: each batch consumes one segment, if it reads any, and writes one file."""

    def __init__(
        self, stage: RunningStage, root: Files, checkpoint: Files, output: Files, gates: list[Files], plan: Plan
    ) -> None:
        """`gates`: one for each source of the query; none: it reads rows of its own."""
        self.stage = stage
        self.checkpoint = Path(checkpoint.location())
        self.output = Path(output.location())
        self._files = output
        self._stream = PlayedStream()
        sources: list[PlayedSource] = [GateSource(gate, root, log, max_files=1) for log, gate in enumerate(gates)]
        writes: Literal["files", "folders"] = "files" if stage.definition.output_mode == "append" else "folders"
        plan = msgspec.structs.replace(plan, writes=writes, has_checksums=False)
        self.query = PlayedQuery(checkpoint, output, sources or [TopicSource(self._stream)], plan)
        if stage.progress.batch >= 0:
            self._restore(checkpoint, stage.progress.batch, len(sources) or 1)

    def _restore(self, checkpoint: Files, batch: int, sources: int) -> None:
        """What a restore would bring of the last batch: here there is no snapshot."""
        for number in (batch - 1, batch):
            write_log(checkpoint, f"offsets/{number}", [_BATCH, '{"played":{"0":0}}'])
        checkpoint.write(f"commits/{batch}", b'v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}')
        checkpoint.write("metadata", b'{"id":"played"}')
        if self.stage.definition.inputs:
            restart_source_logs(checkpoint, batch, [StageSource("", log) for log in range(sources)])
        restore_output(self._files, batch)

    @property
    def batches(self) -> int:
        """How many it has run, in all generations."""
        return max(self.stage.progress.batch, self.query.batch) + 1

    def run_batch(self) -> Path:
        """The next batch, which there must be. Returns the file that it has written."""
        self.begin()
        assert self.query.run_batch() is Step.COMMITTED, f"stage {self.stage.name!r} has nothing to read"
        ((name, _),) = written_files(self._files, self.query.batch, self.stage.definition.output_mode)
        return self.output / name

    def begin(self) -> None:
        """Have something to read, if it is a source."""
        if not self.stage.definition.inputs:
            number = len(self._stream.files)
            self._stream.append(PlayedRows(((0, number, number + 1),)))


class PlayedPipeline:
    """A source, a stage and a sink in one generation."""

    def __init__(
        self,
        folder: Path,
        output_mode: OutputMode = "append",
        after_batches: int = 0,
        config: CheckpointConfig = ON_DEMAND,
        address: TableAddress | None = None,
        bounds: Bounds | None = None,
        queries: Queries = _PASS_ON,
        store: PlayedStore | None = None,
        *,
        may_commit: bool = True,
    ) -> None:
        """`after_batches`: how many each stage has run already.

        `address`: what its manifests say that the sink writes to, if it is not what it does write to. `may_commit`:
        else its table is late from the start, also with what the generation starts from.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # A function's rows are staged in the root.
        is_function = address is not None and address.kind in KINDS
        self.table = CountingTable(folder / ("root/sinks/table" if is_function else "lake/table"))
        if not may_commit:
            self.table.may_commit.clear()
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
        sink = self.table.bind(SinkPlace("flat", "table", self.root.store.at("sinks/table")))
        shape = {
            each.name: StageShape(
                each.kind,
                each.inputs,
                each.output_mode,
                SCHEMA,
                None if each.sink is None else address or address_of(sink),
                () if each.inputs else (READ_STREAM,),
                has_event_time=queries.of(each.name).holds_back,
            )
            for each in definitions
        }
        sinks = {"table": sink}
        opened, base = open_next(self.root, sinks)
        if after_batches:
            self._complete(opened, after_batches, shape)
            opened, base = open_next(self.root, sinks)
        store = store or PlayedStore()
        ground = Ground("flat", store.seen(self.root.store), self.root.store, opened, base, shape)
        self.generation = Generation(
            definitions, ground, config, sinks, bounds, launch=self._launch, patience=store.patience
        )
        self._queries = queries
        self.played: dict[str, Played] = {}
        self.generation.poll()

    def _launch(self, generation: Generation) -> None:
        for name, stage in generation.stages.items():
            checkpoint = self.generation.checkpoint_of(stage.definition)
            output = self.generation.output_of(stage.definition)
            sources = [
                StageSource(each, log) for each in stage.definition.inputs for log in range(self._queries.times_read)
            ]
            gates = [self.root.store.at(RootPaths.gate(generation.generation, name, each.input)) for each in sources]
            self.played[name] = Played(stage, self.root.store, checkpoint, output, gates, self._queries.of(name))
            stage.open_gates(sources)

    def _complete(self, first: Opened, batches: int, shape: dict[str, StageShape]) -> None:
        """A checkpoint that was taken when each stage had run that many batches."""
        sealed = Committable(batches - 1, shown_through=batches - 1).encode()
        stages = {
            name: StageSnapshot(
                cut=batches - 1,
                cause=CutCause.ALIGNED,
                over_bound=False,
                files=SnapshotFiles(),
                positions=dict.fromkeys(each.inputs, batches),
                output_sequence=0 if each.kind == "sink" else batches,
                in_flight={},
                source_positions=(),
                watermark_ms=None,
                committable=sealed if each.kind == "sink" else None,
                barrier_ms=0,
                alignment_ms=0,
                snapshot_ms=0,
                new_bytes=0,
                total_bytes=0,
            )
            for name, each in shape.items()
        }
        base = Manifest(FORMAT, "flat", batches, batches, 1, 1, 0, True, "2026-01-01T00:00:00", 0, None, shape, stages)
        data, sha256 = encode_manifest(base)
        name = self.root.paths.manifest(1, batches)
        self.root.store.write(name, data)
        record = first.log.completing(
            first.claimant,
            1,
            checkpoint_id=batches,
            epoch=batches,
            manifest=name,
            manifest_sha256=sha256,
            aligned=True,
            retained=(batches,),
        )
        assert self.root.decisions.create(record)

    def one_batch_each(self) -> dict[str, Path]:
        """Returns the file that each stage has written."""
        written: dict[str, Path] = {}
        for name, played in self.played.items():
            written[name] = played.run_batch()
            self.generation.poll()
        return written

    def checkpoint(self) -> None:
        """Take one, and wait until it is visible and cleaned up after, and nothing more is done beside."""
        checkpoint_id = self.generation.trigger()
        self.poll_until(lambda: self.generation.is_settled and self.generation.carrier.is_idle)
        assert self.generation.completed(checkpoint_id)

    def newest(self) -> Manifest:
        return next(retained_manifests(self.root.store, self.root.decisions.read()))

    def sealed(self) -> Committable:
        """What the newest checkpoint has sealed for the table."""
        sealed = self.newest().stages["table"].committable
        assert sealed is not None
        return decode_committable(sealed)

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
            sizes[name] = entries(folder / "generations" / f"{self.generation.generation:06d}" / name)
        for name, played in self.played.items():
            if played.stage.definition.inputs:  # that of a user's source is Spark's own
                sizes[f"source log of {name}"] = entries(played.checkpoint / "sources")
            sizes[f"output of {name}"] = entries(played.output)
            for each, gate in played.stage.inputs.gates.items():
                sizes[f"gate from {each} to {name}"] = entries(Path(gate.files.location()))
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
def played(
    folder: Path,
    output_mode: OutputMode = "append",
    after_batches: int = 0,
    config: CheckpointConfig = ON_DEMAND,
    bounds: Bounds | None = None,
    queries: Queries = _PASS_ON,
    store: PlayedStore | None = None,
    *,
    may_commit: bool = True,
) -> Iterator[PlayedPipeline]:
    pipeline = PlayedPipeline(
        folder,
        output_mode,
        after_batches,
        config,
        bounds=bounds,
        queries=queries,
        store=store,
        may_commit=may_commit,
    )
    try:
        yield pipeline
    finally:
        pipeline.table.may_check.set()  # else the stop would wait for a check and a commit that a test has left waiting
        pipeline.table.may_commit.set()
        pipeline.generation.stop()
