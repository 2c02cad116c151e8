"""A pipeline of any size whose Spark is played and whose root is a folder: all else is what runs."""

from __future__ import annotations

import io
import time
import uuid
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.measure import WrongWork
from tidegate.engine.generation import Generation, Ground
from tidegate.engine.launching import lay_out
from tidegate.engine.opening import RootOpening
from tidegate.engine.options import Bounds
from tidegate.engine.root import Root
from tidegate.engine.tables import address_of
from tidegate.protocol.backpressure import BacklogBound
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.messages import Flag
from tidegate.sinks.contract import BoundSink, SinkPlace
from tidegate.spark.definition import StageDefinition
from tidegate.spark.filelog import StageSource
from tidegate.spark.gate import WINDOW
from tidegate.storage.files import AtHand, Files
from tidegate.storage.folder import Folder
from tidegate.storage.manifest import Manifest, StageShape
from tidegate.storage.memory import Memory
from tidegate.storage.paths import RootPaths
from tidegate.testing.played import (
    GateSource,
    Plan,
    PlayedQuery,
    PlayedRows,
    PlayedSource,
    PlayedStream,
    PlayedTable,
    TopicSource,
)

_PER_CHAIN: Final = 10
_PER_STORE: Final = 100
_PAUSE_S: Final = 0.015
_PATIENCE_S: Final = 600.0
_ON_DEMAND: Final = CheckpointConfig(
    interval_ms=3_600_000,
    timeout_ms=3_600_000,
    alignment=AlignmentConfig("on_timeout", timeout_ms=3_600_000, max_inflight_bytes=1 << 50),
)
_UNBOUNDED: Final = Bounds(BacklogBound(max_bytes=1 << 50, max_segments=1 << 30))
_STATEFUL: Final = "counted"
_NAMES_A_PAGE: Final = 1_000


class CountedFiles(AtHand):
    """The files of a root, and what is asked of them. Listing counts as many requests as a bucket has pages of it."""

    def __init__(self, files: Files, requests: Counter[str], written: Counter[str]) -> None:
        self._files = files
        self.requests = requests
        self.written = written

    def at(self, folder: str, *, durable: bool = True) -> Any:
        return CountedFiles(self._files.at(folder, durable=durable), self.requests, self.written)

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._files, name)
        if name in ("read", "open", "exists", "size", "names_in", "overwrite"):
            self.requests[name] += 1
        return called

    def write(self, name: str, data: bytes) -> None:
        self._count("write", name, data)
        self._files.write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._count("create", name, data)
        return self._files.create(name, data)

    def _count(self, request: str, name: str, data: bytes) -> None:
        self.requests[request] += 1
        self.written[name] += len(data)

    def keep(self, name: str, source: Any, source_name: str) -> None:
        self.requests["keep"] += 1
        self._files.keep(name, source._files if isinstance(source, CountedFiles) else source, source_name)

    def delete(self, names: Iterable[str]) -> None:
        listed = list(names)
        self.requests["delete"] += len(listed)
        self._files.delete(listed)

    def sync(self, names: Iterable[str], *args: Any, **kwargs: Any) -> frozenset[object]:
        return self._files.sync(names, *args, **kwargs)

    def list(self, *args: Any, **kwargs: Any) -> list[str]:
        found = self._files.list(*args, **kwargs)
        self.requests["list"] += 1 + len(found) // _NAMES_A_PAGE
        return found


class _AlwaysFits:
    def fits(self, log: DecisionLog, base: Manifest | None) -> bool:  # noqa: ARG002
        return True


def _nothing() -> None:
    raise AssertionError("no function is called here")


def _definitions(stages: int) -> list[StageDefinition]:
    """Chains of a source, stages that keep state and a sink, ten in a chain."""
    found: list[StageDefinition] = []
    for number in range(0, stages, _PER_CHAIN):
        names = [f"rows_{number}", *(f"{_STATEFUL}_{number + each}" for each in range(1, _PER_CHAIN - 1))]
        names = [*names[: stages - number - 1], f"table_{number}"]
        for index, name in enumerate(names):
            inputs = (names[index - 1],) if index else ()
            is_sink = index == len(names) - 1
            sink: Any = PlayedTable(Memory(name)) if is_sink else None
            kind = "sink" if is_sink else "stage" if index else "source"
            found.append(StageDefinition(name, kind, _nothing, inputs, inputs, sink=sink))  # type: ignore[arg-type]
    return found


class ScaledPipeline:
    """One generation after the other on one root."""

    def __init__(self, folder: Path, stages: int) -> None:
        self._folder = folder
        self.definitions = _definitions(stages)
        self.requests: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.queries: dict[str, PlayedQuery] = {}
        self.streams = {each.name: PlayedStream() for each in self.definitions if not each.inputs}
        self._store: Any = CountedFiles(Folder(folder), self.requests, self.written)
        self.root = Root(self._store, "scaled")
        self._rows = 0
        self.generation = self.open()

    def open(self) -> Generation:
        """From the newest checkpoint; with all that a run does for that, but for Spark."""
        sinks: dict[str, BoundSink] = {
            each.name: each.sink.bind(
                SinkPlace("scaled", each.name, self._store.at(RootPaths.sink(each.name)), root=self.root.id)
            )
            for each in self.definitions
            if each.sink is not None
        }
        opened, base = RootOpening(self.root, sinks).open(_AlwaysFits())
        for sink in sinks.values():
            sink.prepare_table(None)  # type: ignore[arg-type]
            sink.claim()
        shape = {
            each.name: StageShape(
                each.kind,
                each.inputs,
                each.output_mode,
                "struct<id:bigint>",
                address_of(sinks[each.name]) if each.name in sinks else None,
            )
            for each in self.definitions
        }
        ground = Ground("scaled", self._store, self._store, opened, base, shape)
        generation = Generation(self.definitions, ground, _ON_DEMAND, sinks, _UNBOUNDED, launch=self._launch)
        generation.poll()
        return generation

    def _launch(self, generation: Generation) -> None:
        for definition in self.definitions:
            name = definition.name
            sources = [StageSource(each, 0) for each in definition.inputs]
            checkpoint, output = lay_out(self._store, generation, definition, sources, window=WINDOW)
            gates = [self._store.at(RootPaths.gate(generation.generation, name, each)) for each in definition.inputs]
            played: list[PlayedSource] = [GateSource(gate, self._store, 0) for gate in gates]
            played = played or [TopicSource(self.streams[name])]
            query = PlayedQuery(checkpoint, output, played, Plan(has_checksums=False))
            self.queries[name] = query
            generation.stages[name].progress.query = query  # type: ignore[assignment]

    # -- what happens to it -----------------------------------------------------------------------

    def keep_state(self, files: int) -> None:
        """Lay so many files of state, as full snapshots lie: a hundred files that each one shares, and change logs."""
        checkpoint = self._checkpoint()
        for store in range(files // _PER_STORE):
            folder = f"state/0/{store}"
            names = [f"{each:06d}-{uuid.uuid4()}.sst" for each in range(_PER_STORE)]
            for each in names:
                checkpoint.write(f"{folder}/SSTs/{each}", each.encode())
            checkpoint.write(f"{folder}/1.zip", _zipped(names))

    def change_state(self) -> None:
        """One more file of state, that belongs to the next batch."""
        version = self.generation.stages[self._stateful()].progress.batch + 2
        self._checkpoint().write(f"state/0/0/{version}_{uuid.uuid4()}.changelog", b"v2")

    def _checkpoint(self) -> Files:
        return self.generation.stages[self._stateful()].progress.checkpoint

    def _stateful(self) -> str:
        return next(each.name for each in self.definitions if each.name.startswith(_STATEFUL))

    def run_batches(self, stages: int | None = None) -> None:
        """One batch of each source, and of what reads it as far as so many stages of its chain."""
        self._rows += 1
        for stream in self.streams.values():
            stream.append(PlayedRows(((0, self._rows - 1, self._rows),)))
        for index in range(_PER_CHAIN if stages is None else stages):
            for definition in self.definitions:
                if len(self._before(definition)) == index:
                    self.queries[definition.name].run_batch()
            self.generation.poll()

    def _before(self, definition: StageDefinition) -> list[str]:
        known = {each.name: each for each in self.definitions}
        found: list[str] = []
        while definition.inputs:
            found.append(definition.inputs[0])
            definition = known[definition.inputs[0]]
        return found

    def checkpoint(self, flags: Flag = Flag.NONE) -> None:
        """Take one, and wait until it is visible and cleaned up after, with pauses as a run makes them."""
        generation = self.generation
        checkpoint_id = generation.trigger(flags)
        deadline = time.monotonic() + _PATIENCE_S
        while not (generation.is_settled and generation.carrier.is_idle):
            generation.poll()
            if time.monotonic() > deadline:
                raise WrongWork(f"checkpoint {checkpoint_id} did not end")
            if generation.carrier.woken.wait(_PAUSE_S):
                generation.carrier.woken.clear()
                generation.go_on()
        if not generation.completed(checkpoint_id):
            raise WrongWork(f"checkpoint {checkpoint_id} was not completed")

    def restart(self) -> None:
        self.generation.stop()
        self.generation = self.open()

    def stop(self) -> None:
        self.generation.stop()


def _zipped(names: list[str]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as zipped:
        files = [{"localFileName": name, "dfsSstFileName": name, "sizeBytes": len(name)} for name in names]
        zipped.writestr("metadata", b"v1\n" + msgspec.json.encode({"sstFiles": files}))
    return written.getvalue()
