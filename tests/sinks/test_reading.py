"""Which version of a Delta table shows a checkpoint."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from tidegate.errors import SinkFailed
from tidegate.sinks.contract import Committable, SinkPlace, StagedFile
from tidegate.sinks.delta import DeltaTable
from tidegate.sinks.reading import TableAt, _table_at
from tidegate.storage.manifest import TableAddress
from tidegate.testing.sinks import permit

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")


def test_a_version_is_found_though_older_ones_were_cleaned_up(tmp_path: Path) -> None:
    place = SinkPlace("shop", "orders", tmp_path / "unused")
    columns = StructType([StructField("id", LongType())])
    sink = DeltaTable(tmp_path / "table")
    sink.check_table(place, columns, "append")
    sink.prepare_table(place, columns)
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
