"""Stages that fail, checkpoints that are damaged: clear errors, and nothing lost."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

import tidegate as tg
from tests.cli.strict import told
from tests.spark.harness import at_most, run_to_end, stream, table_rows, write_input
from tidegate.cli.answers import EndedEvent, RestartingEvent
from tidegate.cli.view import JsonView
from tidegate.engine import planning
from tidegate.engine.run import run_pipeline
from tidegate.engine.stage import running
from tidegate.engine.status import RunStatus
from tidegate.engine.upkeep import TableUpkeep
from tidegate.errors import DataLost, RecoveryRefused, StageFailed, StoreUnavailable
from tidegate.spark.gate import Gate
from tidegate.spark.output import remove_outputs
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.manifest import Manifest, decode_manifest

pytestmark = [pytest.mark.matrix, pytest.mark.spark, pytest.mark.slow]


def failing(tmp_path: Path, *, poisoned: bool = False, seen: list[SparkSession] | None = None) -> tg.Pipeline:
    """A pipeline whose middle stage fails at one value, if it is poisoned. `seen` gets the session of that stage."""
    pipeline = tg.Pipeline("failing")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in", files_per_batch=1)

    @pipeline.stage(chain=False)
    def checked(spark: SparkSession, rows: DataFrame) -> DataFrame:
        if seen is not None:
            seen.append(spark)
        if not poisoned:
            return rows
        failed = F.raise_error(F.lit("value 120 is poisoned")).cast("long")
        return rows.withColumn("value", F.when(F.col("value") == 120, failed).otherwise(F.col("value")))

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "table"))
    def table(checked: DataFrame) -> DataFrame:
        return checked.select("id", "value")

    return pipeline


def test_a_stage_that_fails_is_restarted_and_then_reported_with_its_name_and_cause(
    tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    write_input(tmp_path / "in", 4, 50)
    with caplog.at_level(logging.WARNING, "tidegate"), pytest.raises(StageFailed) as failed:
        run_to_end(failing(tmp_path, poisoned=True), tmp_path / "root", spark, restarts=1, restart_pause="10ms")
    assert failed.value.stage == "checked"
    assert "value 120 is poisoned" in str(failed.value)
    assert len(str(failed.value)) < 600
    # At least once: a failure after a checkpoint that has come further is counted anew.
    assert any("restarting from the last checkpoint" in record.getMessage() for record in caplog.records)
    # Mended, it goes on from the last checkpoint.
    run_to_end(failing(tmp_path), tmp_path / "root", spark)
    assert table_rows(tmp_path / "lake" / "table", ["id", "value"]) == {(each, each): 1 for each in range(200)}


def test_a_query_that_somebody_stops_is_a_stage_that_failed_and_is_restarted(
    tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(tmp_path / "in", 2, 50)
    sessions: list[SparkSession] = []
    stop = threading.Event()
    pipeline = failing(tmp_path, seen=sessions)
    table = tmp_path / "lake" / "table"

    for_scripts = JsonView()

    def stop_a_query_once(status: RunStatus) -> None:
        for_scripts.update(status)
        at_most_2_minutes(status)
        found = table_rows(table, ["id", "value"]) if table.exists() else {}
        if len(found) == 100 and status.generation == 1:
            for query in sessions[0].streams.active:
                if query.name == "checked":
                    query.stop()
        elif status.generation == 2 and not list((tmp_path / "in").glob("00002.json")):
            write_input(tmp_path / "in", 1, 50, first_file=2)
        elif len(found) == 150:
            stop.set()

    at_most_2_minutes = at_most(120)
    with caplog.at_level(logging.WARNING, "tidegate"):
        run_pipeline(
            pipeline,
            tmp_path / "root",
            spark,
            view=stop_a_query_once,
            stop=stop,
            checkpoint_interval="200ms",
            restart_pause="10ms",
        )
    assert table_rows(table, ["id", "value"]) == {(each, each): 1 for each in range(150)}
    (warned,) = [each.getMessage() for each in caplog.records if "restarting" in each.getMessage()]
    assert warned.startswith("stage 'checked' failed: its query ended without an error")
    events = told(capsys.readouterr().out)
    (restarting,) = [event for event in events if isinstance(event, RestartingEvent)]
    assert warned.startswith(restarting.why)
    assert isinstance(events[-1], EndedEvent)


def test_files_that_cannot_be_used_are_failures_like_others(
    tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(tmp_path / "in", 2, 50)
    pipeline, root, table = failing(tmp_path), tmp_path / "root", tmp_path / "lake" / "table"
    flush = Gate.flush

    def flush_on_a_full_disk(gate: Gate, most: int | None = None) -> bool:
        if gate.lag:
            monkeypatch.setattr(Gate, "flush", flush)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), gate.files.location())
        return flush(gate, most)

    def remove_from_a_broken_disk(files: Files, names: list[str]) -> None:
        if names:
            monkeypatch.setattr(running, "remove_outputs", remove_outputs)
            raise OSError(errno.EIO, os.strerror(errno.EIO), files.location(names[0]))

    look_after = TableUpkeep.poll

    def look_after_a_broken_disk(upkeep: TableUpkeep, now_ms: int) -> None:
        if "stays staged" in caplog.text:
            monkeypatch.setattr(TableUpkeep, "poll", look_after)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(table))
        look_after(upkeep, now_ms)

    monkeypatch.setattr(Gate, "flush", flush_on_a_full_disk)
    monkeypatch.setattr(running, "remove_outputs", remove_from_a_broken_disk)
    monkeypatch.setattr(TableUpkeep, "poll", look_after_a_broken_disk)
    with caplog.at_level(logging.WARNING, "tidegate"):
        run_to_end(pipeline, root, spark, restarts=2, restart_pause="10ms", view=at_most(120))
    told = [each.getMessage() for each in caplog.records if "restarting" in each.getMessage()]
    assert len(told) == 2
    assert re.match(r"stage '\w+' failed: /.*/gates/\w+: No space left on device \(.* MB free .*; restarting", told[0])
    assert re.match(r"what the run keeps in files cannot be used: /.*/table: Input/output error; .*restarting", told[1])
    (dropped,) = [each.getMessage() for each in caplog.records if "stays staged" in each.getMessage()]
    assert re.match(r"stage table: what its table shows stays .*: /.*/table/_tidegate/.*: Input/output error", dropped)
    assert table_rows(table, ["id", "value"]) == {(each, each): 1 for each in range(100)}

    # A real one, that is there when the run opens: told at once.
    write_input(tmp_path / "in", 1, 50, first_file=2)
    (table / "_tidegate").rename(tmp_path / "aside")
    (table / "_tidegate").write_text("in the way", encoding="utf-8")
    with pytest.raises(StoreUnavailable, match=r"/table/_tidegate/.*: Not a directory"):
        run_to_end(pipeline, root, spark, restarts=2)
    (table / "_tidegate").unlink()

    def closed(_status: RunStatus) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    with pytest.raises(BrokenPipeError):  # what cannot be shown is no failure of what the run keeps
        run_to_end(pipeline, root, spark, restarts=2, view=closed)
    run_to_end(pipeline, root, spark, view=at_most(120))
    assert table_rows(table, ["id", "value"]) == {(each, each): 1 for each in range(150)}


LOST = """Some data may have been lost because they are not available in Kafka any more;
If you don't want your streaming query to fail on such cases, set the source option failOnDataLoss to false.
Reason: Partition orders-0 offset was changed from 500 to 300."""


class _Numbers(DataSourceStreamReader):
    """Ten of them, once the source is not away; more are lost, once it says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"next": 0}

    def latestOffset(self, *_given: object, **_named: object) -> dict[str, int]:  # noqa: N802 - Spark's name
        while (self.folder / "away").exists():
            time.sleep(0.05)
        if (self.folder / "lost").exists():
            raise RuntimeError(LOST)
        return {"next": 10}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["next"], end["next"]))]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return ((each,) for each in range(*partition.value))


def test_a_source_that_cannot_be_reached_is_told_and_goes_on_and_what_it_has_lost_ends_the_run_at_once(
    tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_WAITS_AFTER_S", 1.0)

    class Numbers(DataSource):
        @classmethod
        def name(cls) -> str:
            return "numbers"

        def schema(self) -> str:
            return "id long"

        def streamReader(self, schema: object) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's name
            return _Numbers(tmp_path)

    pipeline = tg.Pipeline("numbers")

    @pipeline.source
    def numbers(spark: SparkSession) -> DataFrame:
        spark.dataSource.register(Numbers)
        return spark.readStream.format("numbers").load()

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "table"))
    def table(numbers: DataFrame) -> DataFrame:
        return numbers

    (tmp_path / "away").touch()
    waits: list[str] = []
    in_time = at_most(120)

    def view(status: RunStatus) -> None:
        in_time(status)
        no_batch = status.stages["numbers"].no_batch
        if no_batch is not None and "getting offsets" in no_batch.why and status.checkpoints:
            waits.append(no_batch.why)
            (tmp_path / "away").unlink(missing_ok=True)
        elif waits and len(table_rows(tmp_path / "lake" / "table", ["id"])) == 10:
            (tmp_path / "lost").touch()

    with caplog.at_level(logging.WARNING, "tidegate"), pytest.raises(DataLost) as lost:
        run_to_end(pipeline, tmp_path / "root", spark, available_now=False, view=view)
    assert "stage 'numbers' failed: rows that it has yet to read are gone" in str(lost.value)
    assert "Partition orders-0 offset was changed from 500 to 300. Trying again does not" in str(lost.value)
    assert waits[0].startswith("Spark is getting offsets from ")
    messages = [each.getMessage() for each in caplog.records]
    assert any(
        re.match(r"source numbers has planned no batch for \d+ s: Spark is getting off", each) for each in messages
    )
    assert re.match(r"source numbers goes on, after \d+ s without planning a batch", messages[-1])
    assert not any("restarting" in each for each in messages)
    assert StoredDecisions(Folder(tmp_path / "root")).read().generation == 1


def newest_manifest(root: Path) -> Manifest:
    store = Folder(root)
    record = StoredDecisions(store).read().newest
    assert record is not None
    data = store.read(record.manifest)
    assert data is not None
    return decode_manifest(data, record.manifest_sha256, record.manifest)


def test_a_damaged_newest_checkpoint_whose_rows_are_visible_is_refused_with_the_way_out(
    tmp_path: Path, spark: SparkSession
) -> None:
    write_input(tmp_path / "in", 4, 50)
    pipeline = failing(tmp_path)
    run_to_end(pipeline, tmp_path / "root", spark)
    manifest = newest_manifest(tmp_path / "root")
    victim = tmp_path / "root" / manifest.stages["checked"].files.added[0].stored
    victim.write_bytes(b"damaged")
    before = table_rows(tmp_path / "lake" / "table", ["id", "value"])
    with pytest.raises(RecoveryRefused) as refused:
        run_to_end(pipeline, tmp_path / "root", spark)
    assert re.search(r"(is|are) damaged \(", str(refused.value))
    assert manifest.stages["checked"].files.added[0].stored in str(refused.value)
    assert table_rows(tmp_path / "lake" / "table", ["id", "value"]) == before
    assert newest_manifest(tmp_path / "root").checkpoint_id == manifest.checkpoint_id


def test_an_empty_root_for_a_table_that_the_pipeline_has_written_is_refused(
    tmp_path: Path, spark: SparkSession
) -> None:
    write_input(tmp_path / "in", 2, 50)
    pipeline = failing(tmp_path)
    run_to_end(pipeline, tmp_path / "root", spark)
    with pytest.raises(RecoveryRefused, match="would write its rows twice"):
        run_to_end(pipeline, tmp_path / "another root", spark)
    assert table_rows(tmp_path / "lake" / "table", ["id", "value"]) == {(each, each): 1 for each in range(100)}
    assert not (tmp_path / "another root").exists()
