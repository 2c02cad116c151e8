"""A short run under a umask. Prints the modes of all that it has made, but for what it has made in passing."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

import tidegate as tg
from tidegate.engine.run import run_pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def make_pipeline(folder: Path) -> tg.Pipeline:
    pipeline = tg.Pipeline("orders")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("id long, day string").option("maxFilesPerTrigger", 1).json(str(folder / "in"))

    @pipeline.sink(tg.DeltaTable(folder / "kept", partition_by="day"))
    def kept(rows: DataFrame) -> DataFrame:
        return rows

    @pipeline.sink(tg.DeltaTable(folder / "counted", key="day"), output_mode="update")
    def counted(rows: DataFrame) -> DataFrame:
        return rows.groupBy("day").agg(F.count("id").alias("n"))

    @pipeline.sink(tg.ForeachBatch(lambda rows, _: rows.count()))
    def called(rows: DataFrame) -> DataFrame:
        return rows

    return pipeline


def main(folder: Path, umask: int) -> None:
    (folder / "in").mkdir()
    for number in range(3):
        (folder / "in" / f"{number}.json").write_text(json.dumps({"id": number, "day": "mon"}), encoding="utf-8")
    os.umask(umask)
    run_pipeline(make_pipeline(folder), folder / "root", available_now=True, checkpoint_interval="1s")
    found = {}
    for made in ("root", "kept", "counted"):
        for path in ((folder / made), *(folder / made).rglob("*")):
            mode = stat.S_IMODE(path.stat().st_mode)
            found[str(path.relative_to(folder))] = [path.is_dir(), mode]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2], 8))
