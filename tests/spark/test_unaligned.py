"""Unaligned checkpoints on real Spark: what is in flight is captured, and read again by the run that is restored."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.cli.strict import answered
from tests.spark.harness import Crash, oracle, run_to_end, stream, table_rows, write_input
from tidegate.cli.answers import RowsAnswer
from tidegate.cli.inspect import inspect_command
from tidegate.engine.generation import Generation
from tidegate.errors import DamagedCheckpoint
from tidegate.protocol.aligner import CutCause
from tidegate.storage.inspection import InspectedRoot, references
from tidegate.storage.places import as_given

pytestmark = [pytest.mark.spark, pytest.mark.slow]

UNALIGNED = tg.CheckpointConfig(alignment=tg.AlignmentConfig(unaligned="always"))


def backlogged(folder: Path) -> tg.Pipeline:
    """A fast source before a slow join of it with itself, so that segments pile up at the join's gates."""
    pipeline = tg.Pipeline("backlogged")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in", files_per_batch=1)

    @pipeline.stage
    def slow(rows: DataFrame) -> DataFrame:
        left = rows.withWatermark("ts", "1 day").alias("left")
        right = rows.withWatermark("ts", "1 day").alias("right")
        same = left.join(right, F.expr("left.id = right.id AND left.ts = right.ts"))
        work = F.length(F.sha2(F.repeat(F.col("left.key"), 1_000_000), 512))
        return same.select("left.id", work.alias("digits"))

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "table"))
    def table(slow: DataFrame) -> DataFrame:
        return slow

    return pipeline


def check_rows_in_flight(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every segment is of one file of 20 rows, and they come in the order of their ids."""
    inspected = InspectedRoot(root)
    segments = inspected.manifest(inspected.newest()).stages["slow"].in_flight["rows"]
    first, last = segments[0].sequence, segments[-1].sequence
    capsys.readouterr()
    inspect_command(as_given(root), stage="slow", in_flight=True, limit=1000, as_json=True)
    answer = answered(capsys.readouterr().out)
    assert isinstance(answer, RowsAnswer)
    assert (answer.operator, answer.part) == (None, "rows")
    assert [row["id"] for row in answer.rows] == list(range((first - 1) * 20, last * 20))
    inspect_command(as_given(root))
    assert f"{len(segments)} segment" in capsys.readouterr().out
    cut = root / segments[-1].files[0].path
    whole = cut.read_bytes()
    try:
        cut.write_bytes(whole[:-1])
        with pytest.raises(DamagedCheckpoint, match=f"{segments[-1].files[0].path}, in flight to stage 'slow', is not"):
            inspect_command(as_given(root), stage="slow", in_flight=True)
    finally:
        cut.write_bytes(whole)


def test_what_is_in_flight_at_a_crash_arrives_once(
    tmp_path: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = backlogged(tmp_path)
    root = tmp_path / "root"
    captured = 0

    def crash_when_something_is_in_flight(_generation: Generation) -> None:
        nonlocal captured
        retained = InspectedRoot(root).retained() if (root / "pipeline.json").exists() else []
        if retained and not retained[-1].aligned:
            manifest = InspectedRoot(root).manifest(retained[-1])
            assert manifest.stages["slow"].cause is CutCause.ALWAYS
            captured = sum(len(segments) for segments in manifest.stages["slow"].in_flight.values())
            raise Crash

    for first_file in (0, 10):
        captured = 0
        write_input(tmp_path / "in", 10, 20, first_file=first_file)
        with pytest.raises(Crash):
            run_to_end(
                pipeline,
                root,
                spark,
                checkpoint=UNALIGNED,
                checkpoint_interval="200ms",
                view=crash_when_something_is_in_flight,
            )
        assert captured > 0
        check_rows_in_flight(root, capsys)
    run_to_end(pipeline, root, spark, checkpoint=UNALIGNED)
    assert table_rows(tmp_path / "lake" / "table", ["id", "digits"]) == oracle(pipeline, spark)["table"]
    # What was in flight is no longer needed by anything that is retained, but for what the last ones refer to.
    inspected = InspectedRoot(root)
    needed = frozenset().union(
        *(references(inspected.files, inspected.manifest(record)) for record in inspected.retained())
    )
    old = [path for path in (root / "generations").iterdir() if path.name < "000003"]
    found = {path.relative_to(root).as_posix() for each in old for path in each.rglob("*") if path.is_file()}
    assert {name for name in found if "/output/" in name} <= needed
