"""The same work as a dataflow of Bytewax. `python -m bytewax.run benchmarks.peers.jobs.bytewax_job:flow`."""

from __future__ import annotations

import importlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.peers.job import COUNTS, DELAY_S, WINDOW_S, read_job

JOB = read_job()
ROWS_AT_ONCE = 10_000
COLUMNS = {"counts": ["key"], "chain": ["id", "country", "amount", "ts"]}

# Bytewax lives in an environment of its own: here its classes have no types.
inputs: Any = importlib.import_module("bytewax.inputs")
operators: Any = importlib.import_module("bytewax.operators")
windows = importlib.import_module("bytewax.operators.windowing")
files = importlib.import_module("bytewax.connectors.files")
dataflow = importlib.import_module("bytewax.dataflow")
parquet = importlib.import_module("pyarrow.parquet")


class Reader(inputs.StatefulSourcePartition):  # type: ignore[misc]
    """Every n-th file of a folder that grows, by name. Its state: the file, and how many of its batches are read."""

    def __init__(self, first: int, step: int, state: tuple[str, int] | None) -> None:
        self._first, self._step = first, step
        self._file, self._read = state or ("", 0)
        self._batches: Any = None
        if self._file and self._read >= 0:
            self._open(self._file, self._read)

    def _open(self, name: str, skip: int) -> None:
        source = parquet.ParquetFile(Path(JOB.input) / name)
        self._batches = source.iter_batches(ROWS_AT_ONCE, columns=COLUMNS[JOB.work])
        for _ in range(skip):
            next(self._batches)
        self._file, self._read = name, skip

    def next_batch(self) -> list[Any]:
        if self._batches is None:
            names = sorted(path.name for path in Path(JOB.input).glob("*.parquet"))
            later = [n for n in names if n > self._file and int(n.split(".")[0]) % self._step == self._first]
            if not later:
                return []
            self._open(later[0], 0)
        batch = next(self._batches, None)
        if batch is None:
            self._batches, self._read = None, -1
            return []
        self._read += 1
        rows: list[Any] = (batch.column("key") if JOB.work == COUNTS else batch).to_pylist()
        return rows

    def next_awake(self) -> datetime | None:
        # Not at once where there was nothing: an idle reader would take a core.
        return None if self._batches is not None else datetime.now(UTC) + timedelta(milliseconds=20)

    def snapshot(self) -> tuple[str, int]:
        return self._file, self._read


class Folder(inputs.FixedPartitionedSource):  # type: ignore[misc]
    def list_parts(self) -> list[str]:
        return [str(number) for number in range(JOB.cores)]

    def build_part(self, _step_id: str, for_part: str, resume_state: tuple[str, int] | None) -> Reader:
        return Reader(int(for_part), JOB.cores, resume_state)


class Count(operators.StatefulBatchLogic):  # type: ignore[misc]
    def __init__(self, state: int | None) -> None:
        self._n = state or 0

    def on_batch(self, values: list[Any]) -> tuple[list[int], bool]:
        self._n += len(values)
        return [self._n], False

    def snapshot(self) -> int:
        return self._n


def write(name: str, rows: Any) -> None:
    """Rows with a key, as lines into a file per core."""
    sink = files.DirSink(Path(JOB.table(name)), JOB.cores, lambda i, n: f"{i}-of-{n}.jsonl", hash_of)
    operators.output(f"write_{name}", rows, sink)


def hash_of(key: str) -> int:
    # The same in every process, which Python's own is not.
    return sum(key.encode())


def counting(flow: Any) -> None:
    keys = operators.input("keys", flow, Folder())
    keyed = operators.key_on("by_key", keys, str)
    counts = operators.stateful_batch("count", keyed, Count)
    lines = operators.map("line", counts, lambda each: (each[0], f'{{"key":{each[0]},"n":{each[1]}}}'))
    write("counts", lines)


def price(row: dict[str, Any]) -> dict[str, Any]:
    row["price"] = round(row.pop("amount") * 1.19, 2)
    return row


def band(row: dict[str, Any]) -> dict[str, Any]:
    row["band"] = "high" if row["price"] > 500 else "low"
    return row


def line_of(row: dict[str, Any]) -> tuple[str, str]:
    return row["country"], json.dumps({**row, "ts": row["ts"].isoformat()})


def total_line(each: tuple[str, tuple[int, tuple[int, float]]]) -> tuple[str, str]:
    group, (_window, (orders, revenue)) = each
    country, of_band = group.split("|")
    return group, json.dumps({"country": country, "band": of_band, "revenue": revenue, "orders": orders})


def add(total: tuple[int, float], row: dict[str, Any]) -> tuple[int, float]:
    return total[0] + 1, total[1] + row["price"]


def merge(one: tuple[int, float], other: tuple[int, float]) -> tuple[int, float]:
    return one[0] + other[0], one[1] + other[1]


def chaining(flow: Any) -> None:
    orders = operators.input("orders", flow, Folder())
    kept = operators.filter("kept", orders, lambda row: row["id"] % 10 != 9)
    banded = operators.map("banded", operators.map("priced", kept, price), band)
    write("paid", operators.map("paid_line", banded, line_of))
    keyed = operators.key_on("by_group", banded, lambda row: f"{row['country']}|{row['band']}")
    clock = windows.EventClock(lambda row: row["ts"].replace(tzinfo=UTC), timedelta(seconds=DELAY_S))
    start = datetime(2026, 1, 1, tzinfo=UTC)
    tumbling = windows.TumblingWindower(length=timedelta(seconds=WINDOW_S), align_to=start)
    # Sums need no order. In order, every row would wait for the watermark, and be part of every snapshot until then.
    sums = windows.fold_window("totals", keyed, clock, tumbling, lambda: (0, 0.0), add, merge, ordered=False)
    write("totals", operators.map("total_line", sums.down, total_line))


flow = dataflow.Dataflow(JOB.work)
(counting if JOB.work == COUNTS else chaining)(flow)
