"""Whether a batch costs more after 20,000 segments than after 200. They are released many at a time, not waited for."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from pathlib import Path
from typing import Final

from pyspark.sql.types import LongType, StructField, StructType

from benchmarks.measure import WrongWork
from benchmarks.spark_runs import base_session, temporary_folder
from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.spark.filelog import METADATA, is_committed, log_offset, read_offsets, trim_log
from tidegate.spark.gate import WINDOW, Gate
from tidegate.spark.queries import read_gate
from tidegate.spark.session import StageSessions
from tidegate.storage.folder import Folder

_PATIENCE_S: Final = 120.0
_SCHEMA: Final = StructType([StructField("id", LongType())])


class _Reader:
    """One query that reads a gate, with its logs trimmed as a running stage trims them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checkpoint = Folder(folder / "checkpoint")
        self._gate = Gate(Folder(folder).at("gate", durable=False), Folder(folder), 0)
        self._template = folder / "template.parquet"
        pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(pyarrow.table({"id": [1]}), self._template)
        (folder / "segments").mkdir()
        self.released = 0
        self._batch = -1
        rows = read_gate(StageSessions(base_session()).of_stages, self._gate.files, _SCHEMA)
        writer = rows.writeStream.format("parquet").option("checkpointLocation", self._checkpoint.location())
        self.query = writer.option("path", str(folder / "output")).start()

    def run_batch(self, segments: int) -> float:
        """Release that many segments at once. Returns how many seconds it took until they were committed."""
        for _ in range(segments):
            self.released += 1
            name = f"segments/{self.released:09d}.parquet"
            os.link(self._template, self._folder / name)
            self._gate.release(Segment(self.released, 0, (SegmentFile(name, self._template.stat().st_size),)))
        started = time.perf_counter()
        self._gate.flush()
        while not is_committed(self._checkpoint, self._batch + 1):
            if time.perf_counter() > started + _PATIENCE_S or not self.query.isActive:
                raise WrongWork(f"no batch came after segment {self.released}: {self.query.exception()}")
            time.sleep(0.0005)
        took = time.perf_counter() - started
        self._batch += 1
        self._gate.on_consumed(self.released)
        self._trim()
        return took

    def _trim(self) -> None:
        if self._batch % 20 == 0:
            source = read_offsets(self._checkpoint, self._batch).sources[0]
            trim_log(self._checkpoint, "sources/0", log_offset(source or "") - 5)
            trim_log(Folder(self._folder), f"output/{METADATA}", self._batch - 5)


def measure_flat(few: int, many: int) -> tuple[float, float]:
    """Median milliseconds of a batch of one segment, after few and after many segments."""
    with temporary_folder() as folder:
        reader = _Reader(folder)
        try:
            found = []
            for segments in (few, many):
                while reader.released < segments:
                    reader.run_batch(min(WINDOW, segments - reader.released))
                took = [reader.run_batch(1) for _ in range(80)]
                found.append(statistics.median(took[20:]) * 1_000)
            return found[0], found[1]
        finally:
            reader.query.stop()
