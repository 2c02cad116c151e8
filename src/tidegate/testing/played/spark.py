"""A played Spark query: it writes what Spark 4.1 to 4.3 write, file by file, in order, and takes up what it finds.

It has no time and no thread of its own: each call of `step` does the next thing that Spark would do and that outlives a
kill, so a caller interleaves queries, and kills one between any two steps by letting go of it. What is started again on
its folders goes on as Spark would. `tests/played` compares it with what a real Spark was seen to write.

What it writes goes through `Files`:

- `metadata`; per batch `sources/<log>/<offset>`, `offsets/<batch>`, `commits/<batch>`; `state/…` (see `state.py`);
- output in append mode: files, then `_spark_metadata/<batch>`, and a batch that this log has is skipped; in another
  mode a folder per batch; or, where the sink stages rows itself, nothing but a call;
- beside each file Hadoop's checksum, which nobody reads and somebody must delete.

Rows are ranges (see `rows.py`). They pass through or, with `holds_back`, wait in the state for the watermark, as those
of an aggregation do: then it takes a batch without data to hand on the last of them.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from tidegate.errors import StoreUnavailable
from tidegate.spark.filelog import METADATA, SinkLogEntry
from tidegate.spark.output import batch_folder
from tidegate.storage.files import Files
from tidegate.testing.played.rows import PlayedRows, encode_rows, joined
from tidegate.testing.played.sources import OpenedSource, PlayedSource
from tidegate.testing.played.state import Count, Counts, PlayedFailure, PlayedStore

RETAINED: Final = 100
"""`spark.sql.streaming.minBatchesToRetain`, as Tidegate sets it."""
_WAITING: Final = "Waiting for data to arrive"
_RUNNING: Final = "Processing new data"
_BLOCK_BYTES: Final = 33_554_432

SETTINGS: Final = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.dropDuplicates.deterministicKeyOrder.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.mergeOperatorVersion": "2",
    "spark.sql.streaming.stateStore.rocksdb.formatVersion": "5",
    "spark.sql.streaming.queryEvolution.enableSourceEvolution": "false",
    "spark.sql.streaming.stateStore.encodingFormat": "unsaferow",
    "spark.sql.streaming.statefulOperator.useStrictDistribution": "true",
    "spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion": "2",
    "spark.sql.streaming.multipleWatermarkPolicy": "min",
    "spark.sql.streaming.stateStore.rowChecksum.enabled": "false",
    "spark.sql.streaming.statefulOperator.alwaysNullableOutput.enabled": "true",
    "spark.sql.streaming.aggregation.stateFormatVersion": "2",
    "spark.sql.function.protobufExtensions.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.join.stateFormatVersion": "2",
    "spark.sql.streaming.stateStore.compression.codec": "lz4",
    "spark.sql.optimizer.pruneFiltersCanPruneStreamingSubplan": "false",
}
"""What Spark keeps in every entry of its offset log."""


class Step(enum.Enum):
    """What a played query has just done. Whatever it is, the process may be killed now."""

    STARTED = "its id is written"
    LOOKED = "a source has found nothing new, and the next one is yet to look"
    TOOK_UP = "a source has noted what it reads next"
    BEGAN = "where the batch reads to is written"
    PURGED = "entries of old batches are deleted"
    PREPARED = "what the state looks like is written"
    OPENED = "a file of the output is there, and empty"
    CHANGED = "a task has written its change log of the state"
    WROTE = "a file of the output is whole, or the rows of the batch are staged"
    LOGGED = "the sink's log has the batch"
    COMMITTED = "the batch is committed"
    WAITS = "there is nothing to do, for now"
    ENDED = "there is nothing to do, and it was to end then; or it was stopped"
    FAILED = "it has failed"


class _BatchMetadata(msgspec.Struct, frozen=True, rename="camel"):
    batch_watermark_ms: int
    batch_timestamp_ms: int
    conf: dict[str, str]


class _CommitMetadata(msgspec.Struct, frozen=True, rename="camel"):
    next_batch_watermark_ms: int
    state_unique_ids: dict[str, list[list[str]]] = {}


_batch_decoder: Final = msgspec.json.Decoder(_BatchMetadata)
_commit_decoder: Final = msgspec.json.Decoder(_CommitMetadata)


class Plan(msgspec.Struct, frozen=True):
    """What a query computes, and what becomes of it.

    `paths`: under which path it hands on the rows of a path of its inputs; None: the same.
    `chained`: the same of the stages that are chained to it, one after the other; its state knows nothing of them.
    `has_state`: it counts the rows of each path, in a store per partition.
    `holds_back`: it has a watermark, and hands on rows only when that has passed them; it needs state for that.
    `is_timed`: it has a watermark, and hands on rows as they come.
    `delay_ms`: how far the watermark is behind the newest event time, where rows have one. Where they have none, their
    number is their time, and every batch with rows moves the watermark.
    `has_timers`: in processing time, for which it runs one batch after the other, with data or without.
    `writes`: files, a folder of files per batch (as in update mode), or rows that a sink stages (see `stage_rows`).
    `partitions`: of the state. `retained`: how many batches Spark can go back. `empty_batches`: it runs a batch without
    data when the watermark has moved. `has_checksums`: Hadoop writes one beside each file. `stores_first`: maintenance
    of the state stores a full snapshot and then deletes what that has made needless, as those of
    Spark 4.1 and 4.2 do; 4.3 does the two apart, and was seen to delete first.
    """

    paths: Mapping[int, int] | None = None
    chained: tuple[Mapping[int, int], ...] = ()
    has_state: bool = False
    holds_back: bool = False
    is_timed: bool = False
    delay_ms: int = 0
    has_timers: bool = False
    writes: Literal["files", "folders", "rows"] = "files"
    partitions: int = 2
    retained: int = RETAINED
    empty_batches: bool = True
    has_checksums: bool = True
    stores_first: bool = False


class _Batch(msgspec.Struct):
    """One that is being run: where its sources stood before and stand at its end."""

    number: int
    start: list[int | None]
    end: list[int | None]
    watermark_ms: int


def _on_consumed(path: int, expected: int, first: int) -> None:
    if first != expected:
        what = "lost" if first > expected else "doubled"
        raise AssertionError(f"{expected} rows of path {path} were consumed, and now those from {first}: {what}")


def _no_rows_sink(_rows: PlayedRows, _batch: int) -> None:
    raise AssertionError("no sink stages the rows of this query")


class PlayedQuery:
    """A query, from its start. Called as PySpark's `StreamingQuery` where the engine does so."""

    def __init__(
        self,
        checkpoint: Files,
        output: Files,
        sources: Sequence[PlayedSource],
        plan: Plan,
        *,
        available_now: bool = False,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
        now_ms: Callable[[], int] = lambda: 0,
        stage_rows: Callable[[PlayedRows, int], None] = _no_rows_sink,
        on_consumed: Callable[[int, int, int], None] = _on_consumed,
    ) -> None:
        """`checkpoint`, `output`: of these folders. Nothing is read or written before the first step.

        `sources`: in the order of the plan. `available_now`: it ends when it has read what was there at its start.
        `new_id`, `now_ms`: of the world that it lives in. `stage_rows`: called with the rows and the number of a batch
        whose sink stages them. `on_consumed`: with a path of the query's own, how many of its rows the state has seen,
        and which come now; it may raise whatever it likes.
        """
        self._checkpoint = checkpoint.at("", durable=False)
        self._output = output.at("", durable=False)
        self._sources = tuple(sources)
        self._plan = plan
        self._available_now = available_now
        self._new_id = new_id
        self._now_ms = now_ms
        self._stage_rows = stage_rows
        self._on_consumed = on_consumed
        self._logs: dict[int, OpenedSource] = {}
        self._stores: list[PlayedStore] = []
        self._ids: list[str] = []
        self._committed: list[int | None] = [None] * len(self._sources)
        self._watermark_ms = 0
        self._ran: _Batch | None = None
        """The last batch that this process has run."""
        self.read_through: int | None = None
        """Of a path, up to which row the last batch has read; None: it has read none."""
        self._next = 0
        self._purged_below = 0
        self._logged = -1
        """The last batch that the sink's log has."""
        self._running = self._run()
        self._last: Step | None = None
        self._error: BaseException | None = None
        self.task_fails = 0
        """How many tasks of batches to come fail when they have written all, and are tried again. A caller's to set."""
        self.runId = new_id()

    # -- for a caller -----------------------------------------------------------------------------

    def step(self) -> Step:
        """Do the next thing. When there is nothing to do, it looks again the next time."""
        if self.isActive:
            try:
                self._last = next(self._running, Step.ENDED)
            except (PlayedFailure, StoreUnavailable) as error:
                self._error, self._last = error, Step.FAILED
        assert self._last is not None
        return self._last

    def run_batch(self) -> Step:
        """Steps until a batch is committed, or there is none."""
        while self.step() not in _PAUSES:
            pass
        assert self._last is not None
        return self._last

    def run(self, batches: int | None = None) -> int:
        """So many batches at most, as long as there are any. Returns how many were committed."""
        count = 0
        while (batches is None or count < batches) and self.run_batch() is Step.COMMITTED:
            count += 1
        return count

    def maintain(self) -> Iterator[str]:
        """Spark's maintenance of the state, which runs now and then beside the batches, and also a while after a query
        was stopped. Each `next` deletes an old file or stores one of a full snapshot, and names it as it lies under
        `state`."""
        parts = (lambda store: store.clean_up(self._plan.retained), PlayedStore.upload)
        for each in reversed(parts) if self._plan.stores_first else parts:
            for number, store in enumerate(self._stores):
                for name in each(store):
                    yield f"0/{number}/{name}"

    @property
    def batch(self) -> int:
        """The last one that it has committed or found committed; -1: none."""
        return self._next - 1

    @property
    def seen(self) -> dict[int, int]:
        """How many rows of each path its state holds."""
        return {path: count.seen for store in self._stores for path, count in store.counts.items()}

    def take_up(self) -> None:
        """Load what is there, as the first step would, and do nothing."""
        self._open_logs()
        self._recover()
        if self._plan.has_state:
            self._load_state(self._next)

    @property
    def error(self) -> BaseException | None:
        """What it has failed with."""
        return self._error

    # -- as PySpark's -----------------------------------------------------------------------------

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        return self._last not in (Step.ENDED, Step.FAILED)

    @property
    def status(self) -> dict[str, Any]:
        return {"message": _WAITING if self._last is Step.WAITS else _RUNNING}

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        return None if self._ran is None else {"batchId": self._ran.number, "timestamp": str(self._ran.number)}

    def exception(self) -> Any:
        if self._error is None:
            return None
        from pyspark.errors import StreamingQueryException

        said = f"[STREAM_FAILED] Query terminated with exception: {self._error}"
        return StreamingQueryException(message=said)

    def fail(self, why: str) -> None:
        """At once, wherever it stands: what a batch has begun stays as it is."""
        if self.isActive:
            self._error, self._last = PlayedFailure(why), Step.FAILED
            self._running.close()

    def stop(self) -> None:
        """At once, wherever it stands: what a batch has begun stays as it is."""
        if self.isActive:
            self._last = Step.ENDED
            self._running.close()

    # -- what it does -----------------------------------------------------------------------------

    def _run(self) -> Generator[Step, None, None]:
        if not self._checkpoint.exists("metadata"):
            self._write(self._checkpoint, "metadata", msgspec.json.encode({"id": self._new_id()}))
            yield Step.STARTED
        self._open_logs()
        batch = self._recover()
        if self._available_now:
            for log in self._logs.values():
                log.freeze()
        while True:
            batch = batch or (yield from self._planned())
            if batch is not None:
                yield from self._execute(batch)
                batch = None
            elif self._available_now:
                return
            else:
                yield Step.WAITS

    def _open_logs(self) -> None:
        for source in self._sources:
            if source.log not in self._logs:
                log = self._checkpoint.at(f"sources/{source.log}")
                self._logs[source.log] = source.opened(log, self._write)
        if self._plan.writes == "files":
            self._logged = max(_numbers(self._output, METADATA), default=-1)
        self._purged_below = min(_numbers(self._checkpoint, "offsets"), default=0)

    def _recover(self) -> _Batch | None:
        """Take up what is there. Returns a batch that was begun and not committed: it is run again as it was."""
        begun = max(_numbers(self._checkpoint, "offsets"), default=None)
        if begun is None:
            return None
        done = max(_numbers(self._checkpoint, "commits"), default=-1)
        before: list[int | None] = [None] * len(self._sources)
        if begun > 0:
            _, before = self._read_offsets(begun - 1)
        watermark_ms, end = self._read_offsets(begun)
        for source, start, stop in zip(self._sources, before, end, strict=True):
            if stop is not None:
                self._logs[source.log].resume(stop)
                # Spark asks for the last batch's files, though it is committed.
                self._logs[source.log].rows_between(-1 if start is None else start, stop)
        if begun > done:
            self._committed, self._next = before, begun
            if begun > 0:
                self._take_up_commit(begun - 1)
            return _Batch(begun, before, end, watermark_ms)
        self._committed, self._next = end, begun + 1
        self._take_up_commit(begun)
        return None

    def _read_offsets(self, batch: int) -> tuple[int, list[int | None]]:
        data = self._checkpoint.read(f"offsets/{batch}")
        if data is None:
            raise PlayedFailure(f"batch {batch} doesn't exist")
        _, metadata, *lines = data.split(b"\n")
        if len(lines) != len(self._sources):
            raise PlayedFailure(f"batch {batch} has {len(lines)} sources, the query {len(self._sources)}")
        end = [
            None if line == b"-" else self._logs[source.log].decode(line)
            for source, line in zip(self._sources, lines, strict=True)
        ]
        return _batch_decoder.decode(metadata).batch_watermark_ms, end

    def _take_up_commit(self, batch: int) -> None:
        data = self._checkpoint.read(f"commits/{batch}")
        if data is None:
            raise PlayedFailure(f"batch {batch} was not committed, and a later one was begun")
        commit = _commit_decoder.decode(data.split(b"\n")[1])
        self._watermark_ms = commit.next_batch_watermark_ms
        self._ids = [ids[0] for ids in commit.state_unique_ids.get("0", ())]

    def _planned(self) -> Generator[Step, None, _Batch | None]:
        """Look for what is new; if there is anything to do, begin the next batch."""
        for left, log in zip(range(len(self._logs) - 1, -1, -1), self._logs.values(), strict=True):
            if log.take_up():
                yield Step.TOOK_UP
            elif left:
                yield Step.LOOKED
        end = [None if (offset := self._logs[each.log].offset) < 0 else offset for each in self._sources]
        if end == self._committed and not self._closes:
            return None
        batch = _Batch(self._next, self._committed, end, self._watermark_ms)
        metadata = _BatchMetadata(batch.watermark_ms, self._now_ms(), SETTINGS)
        lines = [
            b"-" if offset is None else self._logs[source.log].encode(offset)
            for source, offset in zip(self._sources, end, strict=True)
        ]
        self._write(
            self._checkpoint, f"offsets/{batch.number}", b"\n".join((b"v1", msgspec.json.encode(metadata), *lines))
        )
        yield Step.BEGAN
        if self._purge(batch.number - self._plan.retained):
            yield Step.PURGED
        return batch

    @property
    def _closes(self) -> bool:
        """Whether the watermark has moved since the last batch, and there is state to close. Not before the first one
        of a process."""
        return (
            self._plan.empty_batches
            and self._ran is not None
            and (self._plan.has_timers or (self._plan.has_state and self._watermark_ms > self._ran.watermark_ms))
        )

    def _purge(self, below: int) -> bool:
        """Of the batches before, first where they read to: of one that was, only its commit may be left."""
        if below <= self._purged_below:
            return False
        for log in ("offsets", "commits"):
            for number in range(self._purged_below, below):
                self._delete(self._checkpoint, f"{log}/{number}")
        self._purged_below = below
        return True

    # -- one batch --------------------------------------------------------------------------------

    def _execute(self, batch: _Batch) -> Iterator[Step]:
        if batch.number > self._logged:
            yield from self._run_tasks(batch)
        elif self._plan.has_state:
            raise PlayedFailure(f"assertion failed: CheckpointInfo length: 0, numPartitions: {self._plan.partitions}")
        ids = {"0": [[each] for each in self._ids]} if self._plan.has_state else {}
        commit = msgspec.json.encode(_CommitMetadata(self._watermark_ms, ids))
        self._write(self._checkpoint, f"commits/{batch.number}", b"v2\n" + commit)
        self._committed, self._next, self._ran = batch.end, batch.number + 1, batch
        for source, end in zip(self._sources, batch.end, strict=True):
            if end is not None:
                self._logs[source.log].forget(end)
        yield Step.COMMITTED

    def _run_tasks(self, batch: _Batch) -> Iterator[Step]:
        if self._plan.has_state:
            yield from self._prepare_state()
            self._load_state(batch.number)
        rows = self._own(self._rows_of(batch))
        self.read_through = max((after for _, _, after in rows.ranges), default=None)
        handed_on, changed = self._counted(rows, batch)
        written: list[SinkLogEntry] = []
        self._ids = []
        for paths in self._plan.chained:
            handed_on = [_renamed(each, paths) for each in handed_on]
        for partition, (own, counts) in enumerate(zip(handed_on, changed, strict=True)):
            for is_last in self._tries():
                entry, unique = yield from self._run_task(partition, own, counts)
                if entry is not None and is_last:
                    written.append(entry)
                if unique is not None:
                    self._end_try(partition, counts, unique, is_last=is_last)
        yield from self._end_tasks(batch.number, joined(handed_on), written)
        if self._plan.holds_back or self._plan.is_timed:
            self._move_watermark(rows)

    def _end_try(self, partition: int, counts: Counts, unique: str, *, is_last: bool) -> None:
        if is_last:
            self._stores[partition].keep(counts, unique)
            self._ids.append(unique)
        else:
            self._stores[partition].give_up(counts, unique)

    def _end_tasks(self, batch: int, rows: PlayedRows, written: list[SinkLogEntry]) -> Iterator[Step]:
        if self._plan.writes == "rows":
            for _ in self._tries():
                self._stage_rows(rows, batch)
                yield Step.WROTE
        elif self._plan.writes == "folders":
            yield from self._move_into_folder(rows, batch)
        else:
            lines = [b"v1", *map(msgspec.json.encode, written)]
            self._write(self._output, f"{METADATA}/{batch}", b"\n".join(lines))
            self._logged = batch
            yield Step.LOGGED

    def _tries(self) -> Iterator[bool]:
        """How often something is tried; the last time counts."""
        if self.task_fails:
            self.task_fails -= 1
            yield False
        yield True

    def _run_task(
        self, partition: int, rows: PlayedRows, changed: Counts
    ) -> Generator[Step, None, tuple[SinkLogEntry | None, str | None]]:
        """One try. Of the files in a folder of the output only the last one's are moved there, when all are done."""
        name = f"part-{partition:05d}-{self._new_id()}-c000.snappy.parquet"
        writes = self._plan.writes == "files" and (partition == 0 or rows.count > 0)
        if writes:
            self._write(self._output, name, b"")
            yield Step.OPENED
        unique = None
        if self._plan.has_state:
            unique = self._stores[partition].commit(changed)
            yield Step.CHANGED
        if not writes:
            return None, unique
        data = encode_rows(rows)
        self._write(self._output, name, data)
        yield Step.WROTE
        uri = self._output.uri(name)
        entry = SinkLogEntry(uri, len(data), False, self._now_ms(), 1, _BLOCK_BYTES, "add")
        return entry, unique

    def _move_into_folder(self, rows: PlayedRows, batch: int) -> Iterator[Step]:
        folder = batch_folder(batch)
        for name in self._output.names_in(folder):
            self._output.delete([f"{folder}/{name}"])
        self._write(self._output, f"{folder}/part-00000-{self._new_id()}-c000.snappy.parquet", encode_rows(rows))
        yield Step.WROTE

    # -- rows and state ---------------------------------------------------------------------------

    def _rows_of(self, batch: _Batch) -> PlayedRows:
        found: list[PlayedRows] = []
        for log, start, end in {
            source.log: (self._logs[source.log], start, end)
            for source, start, end in zip(self._sources, batch.start, batch.end, strict=True)
        }.values():
            if end is not None:
                found += log.rows_between(-1 if start is None else start, end)
        return joined(found)

    def _own(self, rows: PlayedRows) -> PlayedRows:
        return rows if self._plan.paths is None else _renamed(rows, self._plan.paths)

    def _counted(self, rows: PlayedRows, batch: _Batch) -> tuple[list[PlayedRows], list[Counts]]:
        """What each task hands on, and how it changes its state."""
        if not self._plan.has_state:
            return [PlayedRows(rows.ranges)], [{}]
        handed_on: list[list[tuple[int, int, int]]] = [[] for _ in self._stores]
        changed: list[Counts] = [{} for _ in self._stores]
        if self._plan.holds_back:
            for store, ranges, changes in zip(self._stores, handed_on, changed, strict=True):
                for path, count in store.counts.items():
                    if count.seen > count.emitted and batch.watermark_ms > count.since:
                        ranges.append((path, count.emitted, count.seen))
                        changes[path] = Count(count.seen, count.seen, count.since)
        for path, first, after in rows.ranges:
            partition = path % len(self._stores)
            before = changed[partition].get(path) or self._stores[partition].counts.get(path) or Count()
            self._on_consumed(path, before.seen, first)
            if self._plan.holds_back:
                changed[partition][path] = Count(after, before.emitted, batch.watermark_ms)
            else:
                handed_on[partition].append((path, first, after))
                changed[partition][path] = Count(after, after)
        return [PlayedRows(tuple(ranges)) for ranges in handed_on], changed

    def _move_watermark(self, rows: PlayedRows) -> None:
        if rows.time_ms is not None:
            reached = rows.time_ms - self._plan.delay_ms
        elif rows.count and not self._plan.has_state:
            reached = max(after for _, _, after in rows.ranges)
        elif rows.count:
            reached = sum(count.seen for store in self._stores for count in store.counts.values())
        else:
            return
        self._watermark_ms = max(self._watermark_ms, reached)

    def _prepare_state(self) -> Iterator[Step]:
        if self._checkpoint.exists("state/0/_metadata/metadata"):
            return
        self._write(self._checkpoint, "state/0/0/_metadata/schema", b"played")
        yield Step.PREPARED
        store = {"storeName": "default", "numColsPrefixKey": 0, "numPartitions": self._plan.partitions}
        operator = {"operatorId": 0, "operatorName": "stateStoreSave"}
        metadata = msgspec.json.encode({"operatorInfo": operator, "stateStoreInfo": [store]})
        self._write(self._checkpoint, "state/0/_metadata/metadata", b"v1\n" + metadata)
        yield Step.PREPARED

    def _load_state(self, version: int) -> None:
        if not self._stores:
            folders = [self._checkpoint.at(f"state/0/{number}") for number in range(self._plan.partitions)]
            self._stores = [PlayedStore(folder, self._new_id, self._write, self._delete) for folder in folders]
        if version and len(self._ids) != self._plan.partitions:
            raise PlayedFailure(
                f"assertion failed: CheckpointInfo length: {len(self._ids)}, numPartitions: {self._plan.partitions}"
            )
        for number, store in enumerate(self._stores):
            if store.version != version:
                store.load(version, self._ids[number] if version else None)

    # -- files ------------------------------------------------------------------------------------

    def _write(self, files: Files, name: str, data: bytes) -> None:
        files.write(name, data)
        if self._plan.has_checksums:
            files.write(_checksum_of(name), b"")

    def _delete(self, files: Files, name: str) -> None:
        files.delete([name, _checksum_of(name)])


_PAUSES: Final = frozenset({Step.COMMITTED, Step.WAITS, Step.ENDED, Step.FAILED})


def _renamed(rows: PlayedRows, paths: Mapping[int, int]) -> PlayedRows:
    return PlayedRows(tuple((paths[path], first, after) for path, first, after in rows.ranges), rows.time_ms)


def _checksum_of(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}.{last}.crc"


def _numbers(files: Files, log: str) -> list[int]:
    return sorted(int(name) for name in files.names_in(log) if name.isdigit())
