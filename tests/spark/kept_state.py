"""Runs stateful queries whose state Spark has every reason to clean up, and tells what it has deleted of it.

In a process of its own: how often Spark looks after state is set for all of it. For each of the two settings it prints
how many files of state were ever there, and which of them are gone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tests.spark.harness import stream, write_rows
from tidegate.spark.session import StageSessions, own_session

BATCHES = 9
EAGER = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.streaming.stateStore.maintenanceInterval": "100ms",
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "1",
    "spark.sql.streaming.stateStore.rocksdb.compactOnCommit": "true",
}


class Counting(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: ARG002
        before = self._count.get()
        count = (0 if before is None else int(before[0])) + sum(len(each) for each in rows)
        self._count.update((count,))
        yield pd.DataFrame({"key": [key[0]], "n": [count]})

    def close(self) -> None:
        pass


def frames(session: SparkSession, folder: Path) -> dict[str, DataFrame]:
    def read(watermark: str = "1 hour") -> DataFrame:
        return stream(session, folder / "in", files_per_batch=1).withWatermark("ts", watermark)

    ours, theirs = read().alias("o"), read().alias("t")
    return {
        "summed": read().groupBy("key").agg(F.sum("value").alias("value")),
        "joined": ours.join(theirs, F.expr("o.id = t.id AND o.ts = t.ts")).select("o.id"),
        "counted": read().groupBy("key").transformWithStateInPandas(Counting(), "key string, n long", "Update", "None"),
    }


def _consume(batch: DataFrame, _number: int) -> None:
    batch.collect()


def run(base: SparkSession, folder: Path, *, keeps_state: bool) -> tuple[int, list[str]]:
    """How many files of state there ever were, and those of them that are gone."""
    session = StageSessions(base, keeps_state=keeps_state).of_sources
    session.conf.set("spark.sql.streaming.minBatchesToRetain", "2")
    (folder / "in").mkdir(parents=True)
    started = [
        frame.writeStream.outputMode("append" if name == "joined" else "update")
        .foreachBatch(_consume)
        .option("checkpointLocation", str(folder / name))
        .start()
        for name, frame in frames(session, folder).items()
    ]
    seen: set[Path] = set()
    for number in range(BATCHES):
        write_rows(folder / "in", number, range(number * 20, number * 20 + 20))
        for query in started:
            query.processAllAvailable()
        deadline = time.monotonic() + 0.6  # some rounds of upkeep
        while time.monotonic() < deadline:
            for name in ("summed", "joined", "counted"):
                found = (folder / name / "state").rglob("*")
                seen.update(path for path in found if not path.name.startswith(".") and path.is_file())
            time.sleep(0.1)
    for query in started:
        query.stop()
    return len(seen), sorted(str(path.relative_to(folder)) for path in seen if not path.exists())


def main() -> None:
    folder = Path(sys.argv[1])
    session = own_session("kept state", folder / "spark.log", EAGER)
    print(json.dumps({str(keeps): run(session, folder / str(keeps), keeps_state=keeps) for keeps in (True, False)}))


if __name__ == "__main__":
    main()
