"""Which version of a Delta table shows a checkpoint, and which checkpoint is read."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from tests.spark.played import played
from tidegate.errors import CheckpointNotVisible, SinkFailed, UnknownCheckpoint
from tidegate.sinks.contract import Committable, SinkPlace, StagedFile
from tidegate.sinks.delta import DeltaTable
from tidegate.sinks.reading import TableAt, _table_at, read
from tidegate.spark.root import Root
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import TableAddress
from tidegate.testing.sinks import permit

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

COLUMNS = StructType([StructField("id", LongType())])


def test_a_version_is_found_though_older_ones_were_cleaned_up(tmp_path: Path) -> None:
    place = SinkPlace("shop", "orders", tmp_path / "unused")
    sink = DeltaTable(tmp_path / "table")
    sink.check_table(place, COLUMNS, "append")
    sink.prepare_table(place, COLUMNS)
    staging = sink.staging_folder(place, 1)
    staging.mkdir(parents=True)
    for batch in range(12):
        file = staging / f"part-{batch}.parquet"
        parquet.write_table(pyarrow.table({"id": [batch]}), file)
        sink.commit(place, permit(batch + 1), Committable(batch, (StagedFile(batch, str(file), 100, 1),)))
        if batch == 7:
            deltalake.DeltaTable(sink.path).create_checkpoint()
    for version in range(8):
        (sink.path / "_delta_log" / f"{version:020d}.json").unlink()

    def table_at(epoch: int) -> TableAt:
        sealed = SimpleNamespace(committable=Committable(epoch - 1).encode())
        manifest: Any = SimpleNamespace(epoch=epoch, checkpoint_id=epoch, stages={"orders": sealed})
        root: Any = SimpleNamespace(pipeline="shop")
        return _table_at(root, "orders", TableAddress("delta", str(sink.path)), manifest)

    assert [table_at(epoch).version for epoch in (8, 9, 10, 11, 12)] == [8, 9, 10, 11, 12]
    assert table_at(9).to_arrow().num_rows == 9
    with pytest.raises(SinkFailed, match=r"table of sink 'orders' cannot be read at ckpt-000003: "):
        table_at(3)


# -- which checkpoint is read -----------------------------------------------------------------------------


def test_a_root_without_a_checkpoint_says_that_there_is_none_yet(tmp_path: Path) -> None:
    Root(tmp_path / "root", "flat")
    with pytest.raises(UnknownCheckpoint, match="has no checkpoint yet"):
        read(tmp_path / "root")


def test_a_root_with_no_aligned_checkpoint_says_which_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Root(tmp_path / "root", "flat")
    unaligned: Any = SimpleNamespace(checkpoint_id=7, aligned=False)
    monkeypatch.setattr(InspectedRoot, "retained", lambda _: [unaligned])
    with pytest.raises(UnknownCheckpoint, match="no aligned checkpoint; name one of the others: ckpt-000007"):
        read(tmp_path / "root")


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    with played(tmp_path) as pipeline:
        pipeline.table.prepare_table(SinkPlace("flat", "table", tmp_path / "unused"), COLUMNS)
        pipeline.one_batch_each()
        pipeline.checkpoint()
        root = pipeline.root.paths.root
        before, retained = [InspectedRoot(root).retained()], InspectedRoot.retained
        for _ in range(3):
            pipeline.one_batch_each()
            pipeline.checkpoint()
    # As it was before the run removed it.
    monkeypatch.setattr(InspectedRoot, "retained", lambda each: before.pop() if before else retained(each))
    if named:
        with pytest.raises(UnknownCheckpoint, match="retains no ckpt-000001; it retains ckpt-000002"):
            read(root, 1)
    else:  # nothing was shown by this table
        with pytest.raises(CheckpointNotVisible, match=r"ckpt-000004 is complete, but .* does not show it yet"):
            read(root)
    assert not before
