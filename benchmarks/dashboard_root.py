"""A root with a long past, made by hand: a decision log, manifests, Delta tables, a history of many attempts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from tidegate.engine.chronicle import ended
from tidegate.engine.events import AnyEvent, SavepointTaken, Started
from tidegate.engine.history import as_data
from tidegate.engine.root import Root
from tidegate.engine.status import CheckpointStatus, Observer, SinkCommit, StagePart, StageStatus, as_moment
from tidegate.protocol.aligner import CutCause
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import Committable
from tidegate.sinks.delta.log import number_of
from tidegate.storage.file_lists import SnapshotFile, SnapshotFiles
from tidegate.storage.history import StoredHistory, as_event, parted
from tidegate.storage.inspection import read_owner
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

PIPELINE: Final = "long"
EVERY: Final = timedelta(seconds=10)
_FAILS_EVERY: Final = 25
_RESTARTS_EVERY: Final = 500
_SAVED_EVERY: Final = 1_000
_MB: Final = 1_000_000


class LongPast:
    """A pipeline of `chains` of a source, two stages and a sink, of which `attempts` checkpoints were tried.

    `is_killed`: when the last of them was decided, and only the first table showed it. `are_joined`: the two stages, as
    they are where Spark runs them as one query.
    """

    def __init__(
        self,
        folder: Path,
        attempts: int,
        retained: int = 100,
        chains: int = 3,
        *,
        is_killed: bool = False,
        are_joined: bool = False,
    ) -> None:
        self.root = folder / "root"
        self.lake = folder / "lake"
        self.attempts = attempts
        self.is_killed = is_killed
        self.are_joined = are_joined
        self.retained = min(retained, attempts)
        self._names = [(f"rows_{each}", f"clean_{each}", f"sum_{each}", f"table_{each}") for each in range(chains)]
        self._start = datetime.now(UTC) - attempts * EVERY
        self._opened = Root(self.root, PIPELINE)
        owner = read_owner(self._opened.store)
        assert owner is not None
        self._root_number = number_of(owner.root_id)
        self._write_log()
        self._write_tables()
        self._write_history()
        self.write_status()

    @property
    def sinks(self) -> list[str]:
        return [names[-1] for names in self._names]

    def at(self, number: int) -> str:
        return as_moment(self._start + number * EVERY)

    def fails(self, number: int) -> bool:
        return number % _FAILS_EVERY == 0 and number <= self.attempts - self.retained

    # -- what a run leaves ------------------------------------------------------------------------

    def _write_log(self) -> None:
        decisions = self._opened.decisions
        assert decisions.create(decisions.read().opening("bench", None))
        log = decisions.read()
        kept: tuple[int, ...] = ()
        for number in range(self.attempts - self.retained + 1, self.attempts + 1):
            kept = (*kept, number)
            name = RootPaths.manifest(1, number)
            data, sha256 = encode_manifest(self._manifest(number))
            self._opened.store.write(name, data)
            record = log.completing(
                "bench",
                1,
                checkpoint_id=number,
                epoch=number,
                manifest=name,
                manifest_sha256=sha256,
                aligned=True,
                retained=kept,
            )
            assert decisions.create(record)
            log.append(record)

    def _manifest(self, number: int) -> Manifest:
        shape: dict[str, StageShape] = {}
        stages: dict[str, StageSnapshot] = {}
        for source, clean, total, sink in self._names:
            stream = SourceStream("kafka", {"subscribe": source})
            shape[source] = StageShape("source", (), "append", "struct<id:bigint>", streams=(stream,))
            shape[clean] = StageShape("stage", (source,), "append", "struct<id:bigint>")
            shape[total] = StageShape("stage", (clean,), "append", "struct<id:bigint>", has_event_time=True)
            address = TableAddress("delta", str(self.lake / sink))
            shape[sink] = StageShape("sink", (total,), "append", "struct<id:bigint>", address)
        for name, each in shape.items():
            stages[name] = self._snapshot(number, name, each)
        took_ms = 900 + number % 100
        joined: dict[str, tuple[str, ...]] = {}
        if self.are_joined:
            joined = {total: (clean,) for _, clean, total, _ in self._names}
            stages |= {name: msgspec.structs.replace(stages[name], files=SnapshotFiles()) for name in joined}
        return Manifest(
            FORMAT, PIPELINE, number, number, 1, 1, 0, True, self.at(number), took_ms, None, shape, stages, joined
        )

    def _snapshot(self, number: int, name: str, shape: StageShape) -> StageSnapshot:
        stored = RootPaths.snapshot_file(1, name, number, "offsets/0")
        file = self._opened.paths.absolute(stored)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 10)
        sealed = Committable(number, shown_through=number).encode()
        return StageSnapshot(
            cut=number,
            cause=CutCause.ALIGNED,
            over_bound=False,
            files=SnapshotFiles(added=(SnapshotFile("offsets/0", stored, 10, "0" * 64),)),
            positions=dict.fromkeys(shape.inputs, number),
            output_sequence=0 if shape.kind == "sink" else number,
            in_flight={},
            source_positions=(json.dumps({name: {"0": number * 100}}),) if shape.kind == "source" else (),
            watermark_ms=None,
            committable=sealed if shape.kind == "sink" else None,
            barrier_ms=10,
            alignment_ms=200,
            snapshot_ms=300,
            new_bytes=_MB,
            total_bytes=_MB * 5,
        )

    def _write_tables(self) -> None:
        """A version a checkpoint, of those that are retained and some before."""
        for sink in self.sinks:
            log = self.lake / sink / "_delta_log"
            log.mkdir(parents=True)
            schema = '{"type":"struct","fields":[{"name":"id","type":"long","nullable":true,"metadata":{}}]}'
            first: list[dict[str, Any]] = [
                {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
                {
                    "metaData": {
                        "id": sink,
                        "format": {"provider": "parquet", "options": {}},
                        "schemaString": schema,
                        "partitionColumns": [],
                        "configuration": {},
                        "createdTime": 0,
                    }
                },
            ]
            lacks_last = self.is_killed and sink != self.sinks[0]
            numbers = range(max(1, self.attempts - 2 * self.retained + 1), self.attempts + 1 - lacks_last)
            for version, number in enumerate(numbers):
                actions = [*(first if version == 0 else ()), *self._commit(sink, number)]
                text = "\n".join(map(json.dumps, actions)) + "\n"
                (log / f"{version:020d}.json").write_text(text, encoding="utf-8")

    def _commit(self, sink: str, number: int) -> Iterator[dict[str, Any]]:
        at_ms = int((self._start + number * EVERY).timestamp() * 1000)
        yield {"commitInfo": {"timestamp": at_ms, "operation": "WRITE"}}
        for kind, value in (("epoch", number), ("batch", number + 1), ("root", self._root_number)):
            yield {"txn": {"appId": f"tidegate/{PIPELINE}/{sink}/{kind}", "version": value, "lastUpdated": at_ms}}
        yield {
            "add": {
                "path": f"part-{number}.parquet",
                "partitionValues": {},
                "size": 100,
                "modificationTime": at_ms,
                "dataChange": True,
                "stats": json.dumps({"numRecords": 250}),
            }
        }

    def _write_history(self) -> None:
        store = StoredHistory(self._opened.store)
        events = [as_event(as_data(each)) for each in self._events()]
        for page in parted(events, 512, 1 << 20):
            store.write_whole(page)

    def _events(self) -> Iterator[AnyEvent]:
        settings = {"checkpoint-interval": "10s", "retain": str(self.retained)}
        for number in range(1, self.attempts + 1):
            if number % _RESTARTS_EVERY == 1:
                base = None if number == 1 else checkpoint_name(number - 1)
                yield Started(
                    at=self.at(number),
                    because="first" if base is None else "killed",
                    base=base,
                    took_ms=9_000,
                    settings=settings,
                )
            if not (self.is_killed and number == self.attempts):
                yield ended(self._ended(number), at=self.at(number))
            if number % _SAVED_EVERY == 0:
                name = checkpoint_name(number)
                yield SavepointTaken(at=self.at(number), checkpoint=name, name=f"kept-{number}", place="savepoints")

    def _ended(self, number: int) -> CheckpointStatus:
        fails = self.fails(number)
        parts = {
            name: StagePart(
                progress="done",
                cut=number,
                cut_because="aligned",
                barrier_ms=10 * column,
                aligned_ms=10 * column + 40,
                alignment_ms=200,
                caught_up_segments=number % 7,
                snapshot_ms=100 + number % 50,
                new_bytes=_MB,
                total_bytes=_MB * (5 + number % 3),
                in_flight_bytes=0,
            )
            for names in self._names
            for column, name in enumerate(names)
            if not (self.are_joined and name == names[1])
        }
        return CheckpointStatus(
            checkpoint=checkpoint_name(number),
            state="aborted" if fails else "complete",
            aligned=True,
            full=False,
            drain=False,
            generation=1,
            epoch=number,
            attempt=1,
            triggered_at=self.at(number),
            duration_ms=900 + number % 100,
            alignment_ms=200,
            new_bytes=_MB * len(parts),
            total_bytes=5 * _MB * len(parts),
            in_flight_bytes=0,
            why="timeout: stage 'sum_0' had not reported" if fails else None,
            stages=parts,
            prepared_ms=None if fails else 600,
            commits={} if fails else {sink: SinkCommit(begun_ms=950, took_ms=80 + number % 30) for sink in self.sinks},
            shown_ms=None if fails else 1_100,
            waited_for="0.4 s of 1.0 s: storing the snapshot of sum_0",
        )

    def write_status(self) -> None:
        """As a run does that is alive."""
        kinds: tuple[Any, ...] = ("source", "stage", "stage", "sink")
        stages = {
            name: StageStatus(kind, self.attempts, 1_000, 25.0, None if kind == "source" else 2, None)
            for names in self._names
            for name, kind in zip(names, kinds, strict=True)
        }
        last = [self._ended(number) for number in range(max(1, self.attempts - 7), self.attempts + 1)]
        if self.is_killed:
            last[-1] = msgspec.structs.replace(last[-1], state="committing", commits={}, shown_ms=None)
        said = Observer(PIPELINE).status
        status = msgspec.structs.replace(said, state="running", generation=1, stages=stages, checkpoints=tuple(last))
        self._opened.store.write(RootPaths.STATUS, msgspec.json.encode(status))
