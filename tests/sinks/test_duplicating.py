"""A Delta table that shows what another one shows at a checkpoint: a fork's, and one whose place a fork takes."""

from __future__ import annotations

import datetime as dt
import importlib
import shutil
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import msgspec
import pytest

import tidegate as tg
from tests.sinks.test_setting_back import History, write
from tidegate.errors import ForeignTable, SinkFailed
from tidegate.sinks.contract import SinkPlace
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.sinks.delta.duplicating import as_in_log
from tidegate.storage.manifest import Manifest, Origin, TableAddress
from tidegate.storage.memory import Memory
from tidegate.testing.sinks import Rows, SinkRun, as_rows, columns

pyarrow: Any = importlib.import_module("pyarrow")


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "table", 5)


def bound(path: Path, root: str = "fork") -> BoundDeltaTable:
    sink = tg.DeltaTable(path).bind(SinkPlace("shop", "orders", Memory(), root=root))
    sink.check_table(columns(), "append")
    return sink


def in_fork(history: History, epoch: int, path: Path) -> Manifest:
    """The checkpoint as the fork's root has it."""
    manifest = history.at(epoch)
    shape = msgspec.structs.replace(manifest.shape["orders"], table=TableAddress("delta", str(path)))
    return msgspec.structs.replace(manifest, shape={"orders": shape}, origin=Origin("root", epoch, epoch))


def rows(path: Path, version: int | None = None) -> Rows:
    return as_rows(deltalake.DeltaTable(path, version=version).to_pyarrow_table().to_pylist())


def source(path: Path) -> TableAddress:
    return TableAddress("delta", str(path))


def forked(history: History, epoch: int, generation: int = 7) -> Path:
    path = history.path.with_name("forked")
    bound(path).show_copy(source(history.path), in_fork(history, epoch, path), generation, replaces=False)
    return path


def test_a_fork_shows_what_the_table_showed_at_the_checkpoint_and_goes_on_by_itself(history: History) -> None:
    path = forked(history, 3)
    assert rows(path) == history.shown[3]
    facts = bound(path).facts()
    assert (facts.committed_epoch, facts.fence, facts.next_batch) == (3, 7, 3)
    run = SinkRun(bound(path), 8, history.sealed[3], 3)
    run.stage([(70, "of the fork")])
    run.commit(9)
    history.go_on(6)
    assert rows(path) == history.shown[3] + Counter([(70, "of the fork")])
    assert rows(history.path) == history.shown[6]


def test_it_may_come_again_and_changes_nothing_then(history: History) -> None:
    path = forked(history, 3)
    version = deltalake.DeltaTable(path).version()
    forked(history, 3)
    assert deltalake.DeltaTable(path).version() == version
    assert rows(path) == history.shown[3]


def test_neither_vacuum_nor_removal_of_the_one_takes_a_row_from_the_other(history: History) -> None:
    path = forked(history, 3)
    shutil.rmtree(history.path)
    assert rows(path) == history.shown[3]
    assert all(not each.is_symlink() for each in path.rglob("*.parquet"))


def test_its_files_are_shared_and_take_no_room_of_their_own(history: History) -> None:
    path = forked(history, 5)
    shared = {each.stat().st_ino for each in history.path.rglob("*.parquet")}
    assert {each.stat().st_ino for each in path.glob("*.parquet")} <= shared


def test_a_table_that_is_there_already_is_not_taken_for_a_fork(history: History, tmp_path: Path) -> None:
    path = tmp_path / "forked"
    deltalake.DeltaTable.create(path, schema=deltalake.DeltaTable(history.path).schema())
    write(path, 1)
    with pytest.raises(SinkFailed, match="is there already; choose another place"):
        bound(path).look_at_copy(source(history.path), in_fork(history, 3, path), replaces=False)
    with pytest.raises(SinkFailed, match="is there already; choose another place"):
        forked(history, 3)
    assert len(rows(path)) == 1


def promoted(history: History, path: Path, generation: int = 20, **how: Any) -> BoundDeltaTable:
    sink = tg.DeltaTable(history.path).bind(SinkPlace("shop", "orders", Memory(), root="fork"))
    sink.show_copy(source(path), in_fork(history, 3, history.path), generation, replaces=True, **how)
    return sink


def test_a_fork_takes_the_place_of_its_original_which_keeps_its_history(history: History) -> None:
    path = forked(history, 3)
    newest = deltalake.DeltaTable(history.path).version()
    plan = (
        tg.DeltaTable(history.path)
        .bind(SinkPlace("shop", "orders", Memory(), root="fork"))
        .look_at_copy(source(path), in_fork(history, 3, history.path), replaces=True, since=newest)
    )
    assert (plan.from_version, plan.rows_removed, plan.rows_added) == (newest, 5, 3)
    assert (plan.others, plan.is_anothers) == ((), True)
    sink = promoted(history, path)
    assert rows(history.path) == history.shown[3]
    assert rows(history.path, newest) == history.shown[5]
    facts = sink.facts()
    assert (facts.committed_epoch, facts.fence, facts.next_batch) == (3, 20, 3)
    shutil.rmtree(path)
    assert rows(history.path) == history.shown[3]


def test_whoever_had_the_table_before_cannot_write_to_it_any_more(history: History) -> None:
    promoted(history, forked(history, 3))
    with pytest.raises(ForeignTable):
        history.go_on(6)
    assert rows(history.path) == history.shown[3]


def test_what_others_have_written_since_the_fork_is_not_lost_unasked(history: History) -> None:
    newest = deltalake.DeltaTable(history.path).version()
    path = forked(history, 3)
    write(history.path, 70)
    with pytest.raises(SinkFailed, match=r"others have written to it since .*--discard-others"):
        promoted(history, path, since=newest)
    assert len(rows(history.path)) == 6
    promoted(history, path)
    assert rows(history.path) == history.shown[3]


def test_columns_that_the_fork_has_more_come_along_and_the_table_stays_itself(history: History) -> None:
    deltalake.DeltaTable(history.path).alter.set_table_properties({"delta.logRetentionDuration": "interval 90 days"})
    identity = deltalake.DeltaTable(history.path).metadata().id
    path = forked(history, 3)
    deltalake.DeltaTable(path).alter.add_columns(deltalake.Field("note", deltalake.schema.PrimitiveType("string")))
    promoted(history, path)
    table = deltalake.DeltaTable(history.path)
    assert [field.name for field in table.schema().fields] == ["id", "value", "note"]
    assert table.metadata().id == identity
    assert table.metadata().configuration == {"delta.logRetentionDuration": "interval 90 days"}
    assert len(rows_with_note := table.to_pyarrow_table().to_pylist()) == 3
    assert {row["note"] for row in rows_with_note} == {None}


PARTITIONS = {
    "text": "a b/%=é",
    "day": dt.date(2026, 1, 31),
    "moment": dt.datetime(2026, 1, 31, 12, 30, 59, 123456, tzinfo=dt.UTC),
    "flag": True,
    "number": -7,
    "amount": Decimal("1.50"),
    "ratio": 0.1,
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_partition_values_of_every_type_are_kept(name: str, tmp_path: Path) -> None:
    table = pyarrow.table({"id": [1, 2], name: [PARTITIONS[name], None]})
    deltalake.write_deltalake(tmp_path / "there", table, partition_by=[name])
    there = deltalake.DeltaTable(tmp_path / "there")
    here = deltalake.DeltaTable.create(tmp_path / "here", schema=there.schema(), partition_by=[name])
    actions = pyarrow.table(there.get_add_actions()).to_pylist()
    added = [
        deltalake.transaction.AddAction(
            each["path"], each["size_bytes"], {name: as_in_log(each["partition"][name])}, 1, True, "{}"
        )
        for each in actions
    ]
    here.create_write_transaction([*added], "overwrite", there.schema(), partition_by=[name])
    found = pyarrow.table(deltalake.DeltaTable(tmp_path / "here").get_add_actions()).to_pylist()
    assert {each["partition"][name] for each in found} == {PARTITIONS[name], None}
