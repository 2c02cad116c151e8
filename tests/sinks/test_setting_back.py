"""A Delta table that is set back to a checkpoint: by a version of its own, whatever came since."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import pytest

import tidegate as tg
from tests.sinks.test_reading import SharedTable
from tidegate.errors import SinkFailed
from tidegate.sinks.contract import Committable, SinkPlace
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.sinks.delta.reading import table_at
from tidegate.storage.manifest import Manifest, StageShape, TableAddress
from tidegate.storage.memory import Memory
from tidegate.testing.sinks import Rows, SinkRun, as_rows, columns, manifest_at

pyarrow: Any = importlib.import_module("pyarrow")


class History:
    """A table of one sink, with a checkpoint after each batch of one row."""

    def __init__(self, path: Path, epochs: int) -> None:
        self.path = path
        self.sealed: dict[int, Committable] = {}
        self.shown: dict[int, Rows] = {}
        self.run = SinkRun(self.bound(), 1)
        self.run.sink.prepare_table(columns())
        self.run.sink.claim()
        for epoch in range(1, epochs + 1):
            self.go_on(epoch)

    def bound(self) -> BoundDeltaTable:
        sink = tg.DeltaTable(self.path).bind(SinkPlace("shop", "orders", Memory(), root="root"))
        sink.check_table(columns(), "append")
        return sink

    def go_on(self, epoch: int) -> None:
        self.run.stage([(epoch, f"of generation {self.run.generation}")])
        self.sealed[epoch] = self.run.sealed()
        self.run.commit(epoch)
        self.run.on_visible(self.sealed[epoch])
        self.shown[epoch] = self.rows()

    def at(self, epoch: int) -> Manifest:
        return manifest_at(epoch, self.run.sink, self.sealed[epoch])

    def set_back(self, epoch: int, generation: int, **how: bool) -> None:
        """And another generation goes on from there."""
        self.bound().set_back(self.at(epoch), generation, **{"discards_others": False, **how})
        sealed = self.sealed[epoch]
        self.run = SinkRun(self.bound(), generation + 1, sealed, sealed.through_batch + 1)

    def rows(self, version: int | None = None) -> Rows:
        return as_rows(deltalake.DeltaTable(self.path, version=version).to_pyarrow_table().to_pylist())

    def read_at(self, epoch: int) -> Rows:
        return self.rows(table_at(["orders"], self.path, self.at(epoch)).version)


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "table", 5)


def test_where_files_were_only_added_the_version_is_pure_removes_and_the_history_stays(history: History) -> None:
    newest = deltalake.DeltaTable(history.path).version()
    plan = history.bound().look_back(history.at(2))
    assert (plan.from_version, plan.rows_removed, plan.rows_added, plan.others) == (newest, 3, 0, ())
    history.set_back(2, 7)
    log = history.path / "_delta_log" / f"{newest + 1:020d}.json"
    actions = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert not [action for action in actions if "add" in action]
    assert len([action for action in actions if "remove" in action]) == 3
    assert history.rows(newest) == history.shown[5], "what it showed before can still be read"


def test_checkpoints_of_before_and_after_are_each_read_as_they_were(history: History) -> None:
    shown = dict(history.shown)
    history.set_back(2, 7)
    for epoch in (8, 9):
        history.go_on(epoch)
    assert history.rows() == Counter(
        [(1, "of generation 1"), (2, "of generation 1"), (8, "of generation 8"), (9, "of generation 8")]
    )
    history.set_back(8, 10)
    history.go_on(12)
    for epoch in (1, 2):
        assert history.read_at(epoch) == shown[epoch]
    for epoch in (8, 9, 12):
        assert history.read_at(epoch) == history.shown[epoch], "also one that was left behind, while it is known"


def test_it_goes_forward_again_to_what_was_left_behind(history: History) -> None:
    history.set_back(2, 7)
    plan = history.bound().look_back(history.at(5))
    assert (plan.rows_removed, plan.rows_added) == (0, 3)
    history.set_back(5, 8)
    assert history.rows() == history.shown[5]
    assert history.bound().facts().next_batch == 5


def write(path: Path, *ids: int) -> None:
    """Somebody else does."""
    rows = {"id": pyarrow.array(ids, pyarrow.int64()), "value": pyarrow.array(["other"] * len(ids))}
    deltalake.write_deltalake(path, pyarrow.table(rows), mode="append")


def test_what_others_have_written_is_lost_only_if_somebody_says_so(history: History) -> None:
    write(history.path, 70, 71)
    plan = history.bound().look_back(history.at(2))
    assert len(plan.others) == 1
    assert "WRITE" in plan.others[0]
    assert plan.rows_removed == 5
    with pytest.raises(SinkFailed, match=r"others have written to it since .*--to ckpt-000002 --discard-others"):
        history.bound().set_back(history.at(2), 7, discards_others=False)
    assert history.rows() == history.shown[5] + Counter([(70, "other"), (71, "other")])
    history.set_back(2, 7, discards_others=True)
    assert history.rows() == history.shown[2]


def test_what_only_moves_rows_between_files_is_nobodys_loss(history: History) -> None:
    deltalake.DeltaTable(history.path).optimize.compact()
    plan = history.bound().look_back(history.at(3))
    assert (plan.others, plan.rows_removed, plan.rows_added) == ((), 5, 3)
    history.set_back(3, 7)
    assert history.rows() == history.shown[3]


def test_a_file_that_was_vacuumed_is_missed_before_anything_changes(history: History) -> None:
    table = deltalake.DeltaTable(history.path)
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    version = table.version()
    with pytest.raises(SinkFailed, match="cannot be set back to version"):
        history.set_back(3, 7)
    assert deltalake.DeltaTable(history.path).version() >= version
    assert history.rows() == history.shown[5]


def test_another_writer_that_is_faster_is_seen(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = deltalake.DeltaTable.restore
    raced: list[int] = []

    def late(table: deltalake.DeltaTable, *args: Any, **kwargs: Any) -> Any:
        if not raced:
            raced.append(1)
            write(history.path, 70)
        return restore(table, *args, **kwargs)

    monkeypatch.setattr(deltalake.DeltaTable, "restore", late)
    with pytest.raises(SinkFailed, match="others have written to it since"):
        history.set_back(2, 7)
    assert history.rows() == history.shown[5] + Counter([(70, "other")])


def test_of_two_sinks_that_share_a_table_both_go_back_at_once(tmp_path: Path) -> None:
    table = SharedTable(tmp_path)
    for epoch, names in {4: "ab", 5: "a", 6: "ab"}.items():
        table.seal(epoch, names)
        table.commit("a", epoch)
        table.commit("b", epoch)
    sealed = table.sealed[4]
    to: Any = SimpleNamespace(
        pipeline="shop",
        epoch=4,
        shown_epoch=4,
        counted_by=lambda root: root,
        checkpoint_id=4,
        shape={name: StageShape("sink", (), "append", "", TableAddress("delta", str(table.path))) for name in "ab"},
        stages={name: SimpleNamespace(committable=each.encode()) for name, each in sealed.items()},
    )
    for _ in range(2):
        for name in "ab":
            table.sinks[name].set_back(to, 7, discards_others=False)
            found = deltalake.DeltaTable(table.path)
            assert {(row["sink"], row["epoch"]) for row in found.to_pyarrow_table().to_pylist()} == {("a", 4), ("b", 4)}
            assert [table.sinks[each].facts().next_batch for each in "ab"] == [1, 1]
            assert [table.sinks[each].facts().fence for each in "ab"] == [7, 7]
    version = deltalake.DeltaTable(table.path).version()
    table.sinks["b"].set_back(to, 7, discards_others=False)
    assert deltalake.DeltaTable(table.path).version() == version
