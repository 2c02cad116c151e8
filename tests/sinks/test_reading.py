"""Which version of a Delta table shows a checkpoint, and which checkpoint is read."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tests.spark.played import played
from tidegate.engine.root import Root
from tidegate.errors import CheckpointNotVisible, InvalidConfig, SinkFailed, UnknownCheckpoint
from tidegate.sinks.contract import Committable, SinkPlace, StagedFile, staged_by
from tidegate.sinks.delta.reading import TableAt, read, tables_at
from tidegate.sinks.delta.reading import table_at as find_table_at
from tidegate.sinks.delta.table import DeltaTable
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import StageShape, TableAddress
from tidegate.storage.memory import Memory
from tidegate.testing.sinks import permit

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

COLUMNS = StructType([StructField("id", LongType())])


def test_a_version_is_found_though_older_ones_were_cleaned_up(tmp_path: Path) -> None:
    sink = DeltaTable(tmp_path / "table").bind(SinkPlace("shop", "orders", Memory()))
    sink.check_table(COLUMNS, "append")
    sink.prepare_table(COLUMNS)
    staging = Path(staged_by(sink, 1).location())
    staging.mkdir(parents=True)
    for batch in range(12):
        file = staging / f"part-{batch}.parquet"
        parquet.write_table(pyarrow.table({"id": [batch]}), file)
        sink.commit(permit(batch + 1), Committable(batch, (StagedFile(batch, str(file), 100, 1),)))
        if batch == 7:
            deltalake.DeltaTable(sink.path).create_checkpoint()
    for version in range(8):
        (sink.path / "_delta_log" / f"{version:020d}.json").unlink()

    def table_at(epoch: int) -> TableAt:
        sealed = SimpleNamespace(committable=Committable(epoch - 1).encode())
        manifest: Any = SimpleNamespace(
            pipeline="shop",
            epoch=epoch,
            shown_epoch=epoch,
            counted_by=lambda root: root,
            checkpoint_id=epoch,
            stages={"orders": sealed},
        )
        return find_table_at(["orders"], sink.path, manifest)

    assert [table_at(epoch).version for epoch in (8, 9, 10, 11, 12)] == [8, 9, 10, 11, 12]
    assert table_at(9).to_arrow().num_rows == 9
    with pytest.raises(SinkFailed, match=r"table of sink 'orders' cannot be read at ckpt-000003: "):
        table_at(3)


class SharedTable:
    """A table that two sinks write to, `a` and `b`. Each batch is one row: the sink's name and the epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "table"
        self.batches = {"a": -1, "b": -1}
        table = DeltaTable(self.path)
        self.sinks = {name: table.bind(SinkPlace("shop", name, Memory())) for name in self.batches}
        self.sealed: dict[int, dict[str, Committable]] = {}
        columns = StructType([StructField("sink", StringType()), StructField("epoch", LongType())])
        for sink in self.sinks.values():
            sink.check_table(columns, "append")
        self.sinks["a"].prepare_table(columns)

    def seal(self, epoch: int, names: str) -> None:
        """A checkpoint, in which these sinks have a row."""
        self.sealed[epoch] = {}
        for name in self.batches:
            files = []
            if name in names:
                self.batches[name] += 1
                file = Path(staged_by(self.sinks[name], 1).location()) / f"{name}-{epoch}.parquet"
                file.parent.mkdir(parents=True, exist_ok=True)
                parquet.write_table(pyarrow.table({"sink": [name], "epoch": [epoch]}), file)
                files.append(StagedFile(self.batches[name], str(file), 100, 1))
            self.sealed[epoch][name] = Committable(self.batches[name], tuple(files))

    def commit(self, name: str, epoch: int) -> None:
        self.sinks[name].commit(permit(epoch), self.sealed[epoch][name])

    def shown(self, epoch: int) -> dict[str, set[tuple[str, int]]]:
        """What each sink's table shows at a checkpoint."""
        stages = {name: SimpleNamespace(committable=sealed.encode()) for name, sealed in self.sealed[epoch].items()}
        # By two names of the same folder.
        paths = {"a": self.path, "b": self.path.parent / "link"}
        if not paths["b"].exists():
            paths["b"].symlink_to(paths["a"])
        shape = {
            name: StageShape("sink", (), "append", "", TableAddress("delta", str(path))) for name, path in paths.items()
        }
        manifest: Any = SimpleNamespace(
            pipeline="shop",
            epoch=epoch,
            shown_epoch=epoch,
            counted_by=lambda root: root,
            checkpoint_id=epoch,
            aligned=True,
            shape=shape,
            stages=stages,
        )
        root: Any = SimpleNamespace(manifest=lambda _: manifest, id="")
        record: Any = SimpleNamespace(checkpoint_id=epoch)
        return {
            name: {(row["sink"], row["epoch"]) for row in table.to_arrow().to_pylist()}
            for name, table in tables_at(root, record).items()
        }


def test_two_sinks_of_one_table_are_read_at_a_version_that_shows_the_same_checkpoint_of_both(tmp_path: Path) -> None:
    table = SharedTable(tmp_path)
    for epoch, names in {4: "ab", 5: "a", 6: "ab"}.items():
        table.seal(epoch, names)
        table.commit("a", epoch)
        table.commit("b", epoch)
    at_4 = {("a", 4), ("b", 4)}
    at_5 = {*at_4, ("a", 5)}
    for epoch, rows in {4: at_4, 5: at_5, 6: {*at_5, ("a", 6), ("b", 6)}}.items():
        assert table.shown(epoch) == {"a": rows, "b": rows}


def test_where_a_later_checkpoint_of_one_sink_came_before_this_one_of_another_that_is_said(tmp_path: Path) -> None:
    table = SharedTable(tmp_path)
    for epoch in (5, 6):
        table.seal(epoch, "ab")
        table.commit("a", epoch)
    for _ in range(2):
        with pytest.raises(
            CheckpointNotVisible, match=r"ckpt-000005 .*several sinks .* rows of 'a' of a later .* before those of 'b'"
        ):
            table.shown(5)
        table.commit("b", 5)
    table.commit("b", 6)
    everything = {("a", 5), ("b", 5), ("a", 6), ("b", 6)}
    assert table.shown(6) == {"a": everything, "b": everything}


def test_where_one_of_two_sinks_of_a_table_is_late_it_does_not_show_the_checkpoint_yet(tmp_path: Path) -> None:
    table = SharedTable(tmp_path)
    table.seal(5, "ab")
    table.commit("a", 5)
    with pytest.raises(CheckpointNotVisible, match="does not show it yet; try again"):
        table.shown(5)


# -- which checkpoint is read -----------------------------------------------------------------------------


def test_a_root_without_a_checkpoint_says_that_there_is_none_yet(tmp_path: Path) -> None:
    Root(tmp_path / "root", "flat")
    with pytest.raises(UnknownCheckpoint, match="has no checkpoint yet"):
        read(tmp_path / "root")


def test_a_root_with_no_aligned_checkpoint_says_which_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Root(tmp_path / "root", "flat")
    unaligned: Any = SimpleNamespace(checkpoint_id=7, aligned=False)
    monkeypatch.setattr(InspectedRoot, "current", lambda _: [unaligned])
    with pytest.raises(UnknownCheckpoint, match="no aligned checkpoint; name one of the others: ckpt-000007"):
        read(tmp_path / "root")


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    with played(tmp_path) as pipeline:
        pipeline.table.bind(SinkPlace("flat", "table", Memory())).prepare_table(COLUMNS)
        pipeline.one_batch_each()
        pipeline.checkpoint()
        root = pipeline.root.paths.root
        asked = "retained" if named else "current"
        found = getattr(InspectedRoot, asked)
        before = [found(InspectedRoot(root))]
        for _ in range(3):
            pipeline.one_batch_each()
            pipeline.checkpoint()
    # As it was before the run removed it.
    monkeypatch.setattr(InspectedRoot, asked, lambda each: before.pop() if before else found(each))
    if named:
        with pytest.raises(UnknownCheckpoint, match="retains no ckpt-000001; it retains ckpt-000002"):
            read(root, 1)
    else:  # nothing was shown by this table
        with pytest.raises(CheckpointNotVisible, match=r"ckpt-000004 is complete, but .* does not show it yet"):
            read(root)
    assert not before


def test_what_names_neither_a_folder_nor_a_bucket_is_refused_as_what_it_is() -> None:
    with pytest.raises(InvalidConfig, match="hdfs://host/orders is not a local folder"):
        read("hdfs://host/orders")


def test_a_process_that_has_read_a_table_ends_in_peace(tmp_path: Path) -> None:
    """Six files: where pyarrow's threads call back into Python for each, two of three such processes were aborted."""
    values = ["x y", "a%b", "ü/ö", "c:d", "+e#?", "%20"]
    rows = pyarrow.table({"id": range(6), "part": values})
    deltalake.write_deltalake(tmp_path / "table", rows, partition_by=["part"])
    reading = f"""
from pathlib import Path
from tidegate.sinks.delta.reading import TableAt
read = TableAt(Path({str(tmp_path / "table")!r}), 0).to_pandas()
print(sorted(zip(read["id"], read["part"])))
"""
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", reading], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip() == str(list(enumerate(values)))
