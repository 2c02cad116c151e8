"""What a checkpoint costs with little and with much state, at the same rate of change."""

from __future__ import annotations

import importlib
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

import tidegate as tg
from benchmarks.measure import WrongWork
from benchmarks.spark_runs import Input, TidegateRun, base_session, derived_session, temporary_folder
from tidegate.spark.session import unload_state
from tidegate.storage.manifest import Manifest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEY_BYTES: Final = 1_000
STAGE: Final = "distinct"
_BUILDING_FILES: Final = 10
_ROWS_PER_CHANGE: Final = 100
_CHANGE_EVERY_S: Final = 0.25
# Spark uploads what it has made of the state at this interval; it may only be told so when no store is loaded.
MAINTENANCE: Final = {"spark.sql.streaming.stateStore.maintenanceInterval": "5s"}


class StateCost(msgspec.Struct, frozen=True):
    """Of the checkpoints while state changes at a fixed rate. Medians; bytes are sums over all of them."""

    checkpoints: int
    duration_ms: float
    longest_ms: float
    snapshot_ms: float
    written_bytes: int
    changed_bytes: int


def distinct_keys(source: Path, tables: Path) -> tg.Pipeline:
    """A source whose state holds every key that it has ever seen, and a sink."""
    pipeline = tg.Pipeline("keys")

    @pipeline.source
    def distinct(spark: SparkSession) -> DataFrame:
        reader = spark.readStream.schema("id long, key binary").option("maxFilesPerTrigger", 1)
        return reader.parquet(str(source)).dropDuplicates(["key"]).select("id")

    @pipeline.sink(tg.DeltaTable(tables / "ids"))
    def ids(distinct: DataFrame) -> DataFrame:
        return distinct

    return pipeline


class Keys:
    """Files of keys that occur once and cannot be compressed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numpy = importlib.import_module("numpy")
        self._pyarrow = importlib.import_module("pyarrow")
        self._parquet = importlib.import_module("pyarrow.parquet")
        self._chance = self._numpy.random.default_rng(0)
        self._files = 0
        self.rows = 0
        folder.mkdir()

    def file(self, rows: int) -> Path:
        data = self._pyarrow.py_buffer(self._chance.bytes(rows * KEY_BYTES))
        fixed = self._pyarrow.Array.from_buffers(self._pyarrow.binary(KEY_BYTES), rows, [None, data])
        ids = self._numpy.arange(self.rows, self.rows + rows, dtype="int64")
        path = self._folder / f"{self._files}.parquet"
        table = self._pyarrow.table({"id": ids, "key": fixed.cast(self._pyarrow.binary())})
        self._parquet.write_table(table, path, compression="none", use_dictionary=False)
        self._files += 1
        self.rows += rows
        return path


def measure_state(state_bytes: int, settle_s: float, counted_s: float, *, fsync: bool = True) -> StateCost:
    """Build that much state in a few large batches, then change little of it and watch the checkpoints."""
    unload_state(base_session())  # Spark reads the interval of its maintenance only when its first store is loaded
    with temporary_folder() as folder:
        source, keys = Input(folder / "input"), Keys(folder / "keys")
        pipeline = distinct_keys(source.folder, folder / "tables")
        run = TidegateRun(pipeline, folder, "1s", derived_session(MAINTENANCE), fsync=fsync)
        with run:
            for _ in range(_BUILDING_FILES):
                file = keys.file(max(1, state_bytes // _BUILDING_FILES // KEY_BYTES))
                source.offer(file)
                file.unlink()
            run.await_consumed(keys.rows)
            change(source, keys, settle_s)
            run.await_checkpoint_of_all()
            seen = change(source, keys, counted_s, run)
            before, *others = sorted(seen.values(), key=lambda each: each.written_ns)
            counted = [each for each in others if each.manifest.checkpoint_id in run.durations_ms]
            if not counted:
                raise WrongWork(f"no checkpoint of {state_bytes} bytes of state was completed in {counted_s} s")
            state = run.checkpoint_folder(STAGE) / "state"
            changed = bytes_between(state, before.written_ns, counted[-1].written_ns)
    unload_state(base_session())
    manifests = [each.manifest for each in counted]
    durations = [run.durations_ms[manifest.checkpoint_id] for manifest in manifests]
    return StateCost(
        checkpoints=len(counted),
        duration_ms=statistics.median(durations),
        longest_ms=max(durations),
        snapshot_ms=statistics.median(manifest.stages[STAGE].snapshot_ms for manifest in manifests),
        written_bytes=sum(manifest.stages[STAGE].new_bytes for manifest in manifests)
        + sum(each.size_bytes for each in counted),
        changed_bytes=changed,
    )


class _Seen(msgspec.Struct, frozen=True):
    manifest: Manifest
    size_bytes: int
    written_ns: int


def change(source: Input, keys: Keys, seconds: float, run: TidegateRun | None = None) -> dict[str, _Seen]:
    """Offer a little at a fixed rate. Returns the manifests that are there or appear meanwhile."""
    seen: dict[str, _Seen] = {}
    started = time.monotonic()
    number = 0
    while (due := started + number * _CHANGE_EVERY_S) < started + seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        file = keys.file(_ROWS_PER_CHANGE)
        source.offer(file)
        file.unlink()
        number += 1
        if run is not None:
            for path in run.manifests().glob("*.json"):
                with suppress(FileNotFoundError):  # no longer retained
                    if path.name not in seen:
                        data, written_ns = path.read_bytes(), path.stat().st_mtime_ns
                        seen[path.name] = _Seen(msgspec.json.decode(data, type=Manifest), len(data), written_ns)
    return seen


def bytes_between(state: Path, after_ns: int, until_ns: int) -> int:
    """Bytes of the files that Spark has put into its state folder in a time."""
    total = 0
    for path in state.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            if path.is_file() and not path.name.startswith(".") and after_ns < status.st_mtime_ns <= until_ns:
                total += status.st_size
    return total
