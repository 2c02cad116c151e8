"""A Delta table as a sink: what a reader of the table sees after every call."""

from __future__ import annotations

import importlib
import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import deltalake
import pytest
from deltalake.exceptions import CommitFailedError
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DayTimeIntervalType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    TimeType,
    VariantType,
    YearMonthIntervalType,
)

from tidegate.errors import Fenced, InvalidPipeline, SinkFailed
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, FileSink, SinkPlace, StagedFile, staged_by
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.sinks.delta.home import Shelf
from tidegate.sinks.delta.log import TableLog
from tidegate.sinks.delta.reading import TableAt
from tidegate.sinks.delta.scan import TableFile
from tidegate.sinks.delta.statistics import statistics
from tidegate.sinks.delta.table import DeltaTable
from tidegate.storage.memory import Memory
from tidegate.testing.sinks import permit

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

PLACE = SinkPlace("shop", "orders", Memory())
RETURNS = SinkPlace("shop", "returns", Memory())


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


IDS = schema(id=LongType())


def prepare(table: DeltaTable, columns: StructType, place: SinkPlace = PLACE) -> BoundDeltaTable:
    """As a pipeline does: checked, then created."""
    sink = table.bind(place)
    sink.check_table(columns, "append")
    sink.prepare_table(columns)
    return sink


class Table:
    """A sink's table in a temporary folder, and what Spark would stage for it."""

    def __init__(self, folder: Path, columns: StructType = IDS, partition_by: Sequence[str] = ()) -> None:
        self.path = folder
        self.sink = prepare(DeltaTable(folder, list(partition_by)), columns)

    def stage(
        self, batch: int, ids: Sequence[int], *, generation: int = 1, folder: str = "", **columns: Sequence[Any]
    ) -> StagedFile:
        path = (
            Path(staged_by(self.sink, generation).location())
            / folder
            / f"part-{batch:05d}-{len(self.staged())}.parquet"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table({"id": pyarrow.array(ids, pyarrow.int64()), **columns}), path)
        return StagedFile(batch, str(path), path.stat().st_size, len(ids))

    def staged(self) -> list[Path]:
        return sorted((self.path / "_tidegate").rglob("*.parquet"))

    def commit(self, epoch: int, files: Sequence[StagedFile], through: int, generation: int = 1) -> CommitAnswer:
        return self.sink.commit(permit(epoch, generation), Committable(through, tuple(files)))

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = deltalake.DeltaTable(self.path).to_pyarrow_table().to_pylist()
        return found

    def ids(self) -> list[int]:
        return sorted(row["id"] for row in self.rows())

    def version(self) -> int:
        return deltalake.DeltaTable(self.path).version()

    def statistics(self) -> dict[str, Any]:
        """Of the only file that the table's last version added."""
        (added,) = self.logged(self.version(), "add")
        found: dict[str, Any] = json.loads(added["stats"])
        return found

    def logged(self, version: int, kind: str) -> list[dict[str, Any]]:
        """The actions of a kind that made a version."""
        log = self.path / "_delta_log" / f"{version:020d}.json"
        actions = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        return [action[kind] for action in actions if kind in action]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "table")


# -- preparing --------------------------------------------------------------------------------------


def test_it_is_a_sink(tmp_path: Path) -> None:
    assert isinstance(DeltaTable(tmp_path).bind(PLACE), FileSink)
    assert str(tmp_path) in DeltaTable(tmp_path).describe()


def test_a_table_is_created_with_the_stages_columns(tmp_path: Path) -> None:
    columns = schema(id=LongType(), key=StringType(), ts=TimestampType(), tags=ArrayType(StringType()))
    table = Table(tmp_path / "a" / "b" / "table", columns, ["key"])
    found = deltalake.DeltaTable(table.path)
    assert [field.name for field in found.schema().fields] == ["id", "key", "ts", "tags"]
    assert found.metadata().partition_columns == ["key"]
    assert table.rows() == []


def test_a_table_that_fits_is_left_as_it_is(tmp_path: Path) -> None:
    columns = schema(id=LongType(), tags=ArrayType(StringType()))
    table = Table(tmp_path / "table", columns)
    prepare(table.sink.sink, columns)
    assert table.version() == 0


@pytest.mark.parametrize(
    "other",
    [
        schema(id=StringType()),
        schema(id=LongType(), more=LongType()),
        schema(other=LongType()),
    ],
    ids=["a type", "one more", "a name"],
)
def test_a_table_with_other_columns_is_refused_and_both_are_named(table: Table, other: StructType) -> None:
    said = r"has the columns id long, but shop/orders writes .*change the stage, or write to a new table"
    with pytest.raises(SinkFailed, match=said):
        prepare(table.sink.sink, other)
    assert table.version() == 0


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            schema(id=LongType(), more=LongType()),
            r"add more long to the table yourself \(in SQL: ALTER TABLE delta\.`/",
        ),
        (schema(more=LongType(), id=LongType()), "let more long come last in the stage"),
    ],
    ids=["last", "first"],
)
def test_a_column_more_is_its_owners_to_add(table: Table, other: StructType, said: str) -> None:
    with pytest.raises(SinkFailed, match=said):
        prepare(table.sink.sink, other)
    assert table.version() == 0


@pytest.mark.parametrize(("then", "now"), [((), ("key",)), (("key",), ()), (("key",), ("day",))])
def test_a_table_with_other_partitions_is_refused(tmp_path: Path, then: tuple[str, ...], now: tuple[str, ...]) -> None:
    columns = schema(id=LongType(), key=StringType(), day=StringType())
    Table(tmp_path / "table", columns, then)
    with pytest.raises(SinkFailed, match=r"is partitioned by .*, not by ") as refused:
        Table(tmp_path / "table", columns, now)
    assert all(name in str(refused.value) for name in (*then, *now, str(tmp_path / "table")))


def test_a_partition_column_that_the_stage_does_not_have_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    with pytest.raises(InvalidPipeline, match=r"partitioned by 'day', which shop/orders does not have"):
        Table(tmp_path / "table", IDS, ["day"])
    assert not (tmp_path / "table").exists()


def test_one_partition_column_may_be_given_as_its_name(tmp_path: Path) -> None:
    name: Any = "key"
    assert DeltaTable(tmp_path, partition_by=name).partition_by == ("key",)


def test_a_type_that_a_delta_table_cannot_hold_is_refused_with_the_stages_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidPipeline, match=r"shop/orders.*time"):
        Table(tmp_path / "table", schema(id=LongType(), at=TimeType()))


@pytest.mark.parametrize(
    "kind",
    [DayTimeIntervalType(), YearMonthIntervalType(), ArrayType(VariantType())],
    ids=["days", "months", "variant"],
)
def test_a_type_that_readers_of_the_table_do_not_know_is_refused(tmp_path: Path, kind: DataType) -> None:
    with pytest.raises(InvalidPipeline, match=r"cannot hold 'v' of shop/orders, .*; cast it"):
        Table(tmp_path / "table", schema(id=LongType(), v=kind))


def test_a_partition_column_of_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidPipeline, match=r"cannot be partitioned by 'v', which is binary"):
        Table(tmp_path / "table", schema(id=LongType(), v=BinaryType()), ["v"])


def test_a_column_with_a_name_that_tidegate_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidPipeline, match=r"shop/orders has a column '_Tidegate_file', a name that Tidegate needs"):
        Table(tmp_path / "table", schema(id=LongType(), _Tidegate_file=StringType()))


def test_a_map_in_the_key_is_refused(tmp_path: Path) -> None:
    columns = schema(id=ArrayType(MapType(StringType(), StringType())))
    with pytest.raises(InvalidPipeline, match=r"cannot have the key 'id' of shop/orders.*maps"):
        DeltaTable(tmp_path / "table", key="id").bind(PLACE).check_table(columns, "update")


def test_a_path_that_goes_back_is_the_one_that_spark_stages_in(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    assert DeltaTable(tmp_path / "job" / ".." / "lake" / "table").path == tmp_path / "lake" / "table"


def test_a_path_that_holds_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkFailed, match=r"Delta table .*file is a file; a Delta table is a folder"):
        Table(tmp_path / "file")
    with pytest.raises(SinkFailed, match=r"Delta table .*table cannot be created: "):
        Table(tmp_path / "file" / "table")
    log = tmp_path / "damaged" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020d}.json").write_text("{no")
    with pytest.raises(SinkFailed, match=r"Delta table .*damaged cannot be opened: .*"):
        Table(tmp_path / "damaged")


# -- tables that demand what Tidegate does not do ---------------------------------------------------

DEMANDS: dict[str, Callable[[Path], object]] = {
    "deletionVectors": lambda path: create(path, {"delta.enableDeletionVectors": "true"}),
    "delta.columnMapping.mode": lambda path: create(path, {"delta.columnMapping.mode": "name"}),
    "delta.constraints.small": lambda path: create(path).alter.add_constraint({"small": "id < 10"}),
    "delta.invariants": lambda path: create(
        path, metadata={"delta.invariants": '{"expression": {"expression": "id < 10"}}'}
    ),
}


def create(
    path: Path, configuration: dict[str, str] | None = None, *, nullable: bool = True, **metadata: Any
) -> deltalake.DeltaTable:
    columns = StructType([StructField("id", LongType(), nullable, **metadata)])
    wanted = deltalake.Schema.from_json(columns.json())
    return deltalake.DeltaTable.create(path, schema=wanted, configuration=configuration, mode="overwrite")


@pytest.mark.parametrize("demand", DEMANDS)
def test_a_table_that_demands_what_tidegate_does_not_do_is_refused(tmp_path: Path, demand: str) -> None:
    DEMANDS[demand](tmp_path / "table")
    with pytest.raises(SinkFailed, match=rf"Delta table .*table has .*{demand}.*; take it off, or write to a new"):
        Table(tmp_path / "table")


@pytest.mark.parametrize("demand", DEMANDS)
def test_a_table_that_comes_to_demand_it_is_refused_by_the_next_commit(table: Table, demand: str) -> None:
    table.commit(1, [table.stage(0, [1])], through=0)
    DEMANDS[demand](table.path)
    version = table.version()
    with pytest.raises(SinkFailed, match=demand):
        table.commit(2, [table.stage(1, [100])], through=1)
    assert table.version() == version


FORGETTING = "delta.setTransactionRetentionDuration"


def test_a_table_that_would_forget_its_epochs_is_refused(table: Table, tmp_path: Path) -> None:
    create(tmp_path / "other", {FORGETTING: "interval 1000 weeks"})
    with pytest.raises(
        SinkFailed, match=rf"has the property {FORGETTING}: after that time .* it would forget .* take the property off"
    ):
        Table(tmp_path / "other")
    files = [table.stage(0, [1])]
    table.commit(1, files, through=0)
    deltalake.DeltaTable(table.path).alter.set_table_properties({FORGETTING: "interval 1 seconds"})
    time.sleep(1.1)
    assert deltalake.DeltaTable(table.path).transaction_version("tidegate/shop/orders/epoch") is None
    for epoch in (1, 2):
        with pytest.raises(SinkFailed, match=FORGETTING):
            table.commit(epoch, files, through=0)
    assert table.ids() == [1]


def test_records_of_epochs_tell_when_they_were_made(table: Table) -> None:
    before_ms = time.time_ns() // 1_000_000
    table.sink.fence(1)
    table.commit(1, [table.stage(0, [1])], through=0)
    records = [record for version in (1, 2) for record in table.logged(version, "txn")]
    assert {record["appId"].rpartition("/")[2] for record in records} >= {"fence", "epoch", "batch"}
    assert all(before_ms <= record["lastUpdated"] <= time.time_ns() // 1_000_000 for record in records)


@pytest.mark.parametrize("demand", ["deletionVectors", "delta.columnMapping.mode"])
def test_a_table_whose_files_say_only_half_is_not_read_by_spark(tmp_path: Path, demand: str) -> None:
    DEMANDS[demand](tmp_path / "table")
    with pytest.raises(SinkFailed, match=rf"has .*{demand}.*, which to_spark cannot read"):
        TableAt(tmp_path / "table", 0).to_spark(cast("SparkSession", None))


@pytest.mark.parametrize("demand", ["delta.appendOnly", "delta.enableChangeDataFeed"])
def test_a_table_of_which_nothing_can_be_removed_takes_no_key(tmp_path: Path, demand: str) -> None:
    create(tmp_path / "table", {demand: "true"})
    Table(tmp_path / "table")
    with pytest.raises(SinkFailed, match=rf"has the property {demand}"):
        prepare(DeltaTable(tmp_path / "table", key="id"), IDS)


def test_a_column_that_takes_no_null_is_refused_where_the_stage_may_write_one(tmp_path: Path) -> None:
    create(tmp_path / "table", nullable=False)
    with pytest.raises(SinkFailed, match=r"takes no null in 'id', but shop/orders may write one"):
        Table(tmp_path / "table")
    Table(tmp_path / "table", StructType([StructField("id", LongType(), nullable=False)]))


def test_a_commit_that_is_refused_for_another_reason_is_no_conflict(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CommitFailedError("the log is full\n  0: <unknown>")

    monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", refuse)
    with pytest.raises(SinkFailed, match=r"table cannot be written: the log is full$"):
        table.commit(1, [table.stage(0, [1])], through=0)
    with pytest.raises(SinkFailed, match=r"table cannot be written: the log is full$"):
        table.sink.fence(2)


# -- committing -------------------------------------------------------------------------------------


def test_staged_rows_are_not_seen_before_the_commit(table: Table) -> None:
    staged = table.stage(0, [1, 2])
    assert table.rows() == []
    assert table.commit(1, [staged], through=0) is CommitAnswer.COMMITTED
    assert table.ids() == [1, 2]


def test_a_commit_is_one_version_however_many_files(table: Table) -> None:
    files = [table.stage(batch, [batch]) for batch in range(5)]
    table.commit(1, files, through=4)
    assert table.version() == 1
    assert table.ids() == [0, 1, 2, 3, 4]


def test_an_idle_pipeline_makes_no_versions_of_its_tables(table: Table) -> None:
    table.commit(1, [table.stage(0, [1])], through=0)
    for epoch in range(2, 6):
        assert table.commit(epoch, [], through=epoch) is CommitAnswer.COMMITTED
    assert table.version() == 1
    assert table.sink.facts() == SinkFacts(1, 0, 1)


def test_an_epoch_that_has_nothing_new_makes_no_version(table: Table) -> None:
    files = [table.stage(0, [1])]
    table.commit(1, files, through=0)
    assert table.commit(2, [*files, table.stage(1, [])], through=1) is CommitAnswer.COMMITTED
    assert table.version() == 1
    assert table.ids() == [1]


def test_rows_that_a_killed_run_has_shown_are_forced_to_the_disk_also_by_a_later_epoch_without_new_ones(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [table.stage(0, [1])]
    table.commit(1, files, through=0)
    forced: set[Path] = set()

    def note(paths: Iterable[Path], *_known: object, **_options: object) -> frozenset[Path]:
        forced.update(paths)
        return frozenset()

    monkeypatch.setattr("tidegate.sinks.delta.log.sync", note)
    table.sink = DeltaTable(table.path).bind(PLACE)  # of the next run, which goes on from the second checkpoint
    assert table.commit(2, files, through=1) is CommitAnswer.COMMITTED
    assert table.path / "_delta_log" / f"{1:020d}.json" in forced


def test_a_file_without_rows_is_not_added(table: Table) -> None:
    table.commit(1, [table.stage(0, []), table.stage(0, [1])], through=0)
    assert len(deltalake.DeltaTable(table.path).file_uris()) == 1


def test_a_repeated_commit_says_so_and_changes_nothing(table: Table) -> None:
    files = [table.stage(0, [1, 2])]
    table.commit(1, files, through=0)
    before = sorted(table.path.rglob("*"))
    assert table.commit(1, files, through=0) is CommitAnswer.ALREADY
    assert table.version() == 1
    assert sorted(table.path.rglob("*")) == before
    assert table.ids() == [1, 2]


def test_a_repeated_commit_by_the_next_generation_changes_nothing(table: Table) -> None:
    files = [table.stage(0, [1, 2])]
    table.commit(1, files, through=0)
    assert table.commit(1, files, through=0, generation=2) is CommitAnswer.ALREADY
    assert table.ids() == [1, 2]


def test_the_next_generation_commits_what_the_last_one_decided(table: Table) -> None:
    assert table.commit(1, [table.stage(0, [1, 2])], through=0, generation=2) is CommitAnswer.COMMITTED
    assert table.ids() == [1, 2]


def test_an_older_epoch_is_shown_already(table: Table) -> None:
    first, second = table.stage(0, [1]), table.stage(1, [2])
    table.commit(2, [first, second], through=1)
    assert table.commit(1, [first], through=0) is CommitAnswer.ALREADY
    assert table.version() == 1
    assert table.ids() == [1, 2]


def test_committables_that_overlap_show_each_row_once(table: Table) -> None:
    files = [table.stage(batch, [batch]) for batch in range(6)]
    table.commit(1, files[:3], through=2)
    table.commit(2, files[:5], through=4)
    assert table.ids() == [0, 1, 2, 3, 4]
    table.commit(3, files[2:], through=5)
    assert table.ids() == [0, 1, 2, 3, 4, 5]


def test_an_epoch_that_was_never_committed_is_shown_by_the_next(table: Table) -> None:
    files = [table.stage(batch, [batch]) for batch in range(4)]
    table.commit(1, files[:1], through=0)
    table.commit(3, files[1:], through=3)
    assert table.ids() == [0, 1, 2, 3]


def test_an_epoch_without_rows_does_not_hide_what_comes_after_it(table: Table) -> None:
    table.commit(1, [table.stage(0, [1])], through=0)
    table.commit(2, [], through=7)
    table.commit(3, [table.stage(8, [2])], through=8)
    assert table.ids() == [1, 2]


def test_an_epoch_in_which_the_stage_has_run_no_batch_hides_nothing(table: Table) -> None:
    table.commit(1, [], through=-1)
    table.commit(2, [table.stage(0, [1])], through=0)
    assert table.ids() == [1]


def test_a_table_that_is_gone_is_no_empty_table(tmp_path: Path) -> None:
    lost = DeltaTable(tmp_path / "table").bind(PLACE)
    with pytest.raises(SinkFailed, match="is gone"):
        lost.commit(permit(1), Committable(0))
    assert not (tmp_path / "table").exists()


def test_two_stages_may_write_one_table(table: Table) -> None:
    table.commit(1, [table.stage(0, [1])], through=0)
    returns = prepare(table.sink.sink, IDS, RETURNS)
    path = Path(staged_by(returns, 1).location()) / "part-0.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.table({"id": [2]}), path)
    theirs = Committable(0, (StagedFile(0, str(path), path.stat().st_size, 1),))
    assert returns.commit(permit(1), theirs) is CommitAnswer.COMMITTED
    assert table.ids() == [1, 2]


def test_a_batch_of_update_mode_is_committed_from_its_folder(table: Table) -> None:
    """In update and complete mode each batch is a folder of its own."""
    table.commit(1, [table.stage(0, [1], folder="batch-0"), table.stage(1, [2], folder="batch-1")], through=1)
    assert table.ids() == [1, 2]


# -- other writers ----------------------------------------------------------------------------------


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Something happens once, after a commit has looked at the table and before it has written."""
    left = [happens]

    def described(footer: Any) -> str:
        if left:
            left.pop()()
        return statistics(footer)

    monkeypatch.setattr("tidegate.sinks.delta.staged.statistics", described)


def append(table: Table, ids: list[int]) -> None:
    deltalake.write_deltalake(table.path, pyarrow.table({"id": ids}), mode="append")


def test_another_writer_of_the_table_is_met_and_both_are_shown(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, lambda: append(table, [100]))
    assert table.commit(1, [table.stage(0, [1])], through=0) is CommitAnswer.COMMITTED
    assert table.ids() == [1, 100]


def test_of_two_that_commit_one_epoch_at_once_one_does(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [table.stage(0, [1])]
    meanwhile(monkeypatch, lambda: table.commit(1, files, through=0, generation=2))
    assert table.commit(1, files, through=0) is CommitAnswer.ALREADY
    assert table.ids() == [1]


def test_a_fence_that_comes_while_an_old_run_commits_stops_it(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, lambda: table.sink.fence(2))
    with pytest.raises(Fenced, match="generation 2"):
        table.commit(1, [table.stage(0, [1])], through=0)
    assert table.rows() == []


def test_a_table_that_others_never_leave_alone_fails_and_shows_nothing_twice(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(footer: Any) -> str:
        append(table, [100])
        return statistics(footer)

    monkeypatch.setattr("tidegate.sinks.delta.staged.statistics", described)
    with pytest.raises(SinkFailed, match="met another writer"):
        table.commit(1, [table.stage(0, [1])], through=0)
    monkeypatch.undo()
    assert 1 not in table.ids()
    assert table.sink.facts() == SinkFacts(0, 0)


def test_a_table_that_another_writer_gave_other_columns_is_refused(table: Table) -> None:
    table.commit(1, [table.stage(0, [1])], through=0)
    other = pyarrow.table({"id": ["x"], "more": [1.5]})
    deltalake.write_deltalake(table.path, other, mode="overwrite", schema_mode="overwrite")
    with pytest.raises(SinkFailed, match=r"has the columns id string, more double, but shop/orders writes id long"):
        table.commit(2, [table.stage(1, [2])], through=1)
    assert [row["id"] for row in table.rows()] == ["x"]


def test_a_table_that_another_writer_partitioned_is_refused(tmp_path: Path) -> None:
    table = Table(tmp_path / "table", schema(id=LongType(), key=StringType()))
    other = pyarrow.table({"id": [1], "key": ["a"]})
    deltalake.write_deltalake(table.path, other, mode="overwrite", schema_mode="overwrite", partition_by=["key"])
    with pytest.raises(SinkFailed, match=r"is partitioned by \('key',\), not by nothing"):
        table.commit(1, [table.stage(0, [2], key=["b"])], through=0)
    assert table.ids() == [1]


# -- fencing and facts ------------------------------------------------------------------------------


def test_a_table_that_is_not_there_knows_nothing(tmp_path: Path) -> None:
    sink = DeltaTable(tmp_path / "table").bind(PLACE)
    assert sink.facts() == SinkFacts(0, 0)
    sink.fence(3)
    assert not (tmp_path / "table").exists()


def test_facts_are_the_last_epoch_and_the_fence_of_this_owner(table: Table) -> None:
    table.commit(4, [table.stage(0, [1])], through=0)
    table.sink.fence(3)
    assert table.sink.facts() == SinkFacts(4, 3, 1)
    assert table.sink.sink.bind(RETURNS).facts() == SinkFacts(0, 0)


def test_facts_outlive_a_checkpoint_and_a_vacuum_of_the_table(table: Table) -> None:
    table.commit(4, [table.stage(0, [1])], through=0)
    found = deltalake.DeltaTable(table.path)
    found.create_checkpoint()
    found.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert table.sink.facts() == SinkFacts(4, 0, 1)
    assert table.ids() == [1]


def test_after_a_fence_an_older_generation_commits_nothing_more(table: Table) -> None:
    files = [table.stage(0, [1])]
    table.sink.fence(3)
    with pytest.raises(Fenced, match=r"table.* was fenced by generation 3"):
        table.commit(1, files, through=0, generation=2)
    with pytest.raises(Fenced, match=r"table.* was fenced by generation 3"):
        table.commit(1, [], through=0, generation=2)
    assert table.rows() == []
    assert table.commit(1, files, through=0, generation=3) is CommitAnswer.COMMITTED
    assert table.commit(2, [], through=1, generation=4) is CommitAnswer.COMMITTED


def test_a_fence_never_goes_back(table: Table) -> None:
    table.sink.fence(3)
    version = table.version()
    table.sink.fence(3)
    table.sink.fence(2)
    assert table.version() == version
    assert table.sink.facts().fence == 3


# -- what a reader can skip by ----------------------------------------------------------------------


def test_statistics_hold_count_ends_and_nulls(tmp_path: Path) -> None:
    columns = schema(id=LongType(), name=StringType(), at=TimestampType())
    table = Table(tmp_path / "table", columns)
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    at = pyarrow.array([moment, None, None], pyarrow.timestamp("us", "UTC"))
    table.commit(1, [table.stage(0, [7, 3, 5], name=["b", None, "a"], at=at)], through=0)
    found = table.statistics()
    assert found["numRecords"] == 3
    assert found["nullCount"] == {"id": 0, "name": 1, "at": 2}
    assert found["minValues"] == {"id": 3, "name": "a", "at": "2026-01-01T00:00:00.000Z"}
    assert found["maxValues"] == {"id": 7, "name": "b", "at": "2026-01-01T00:00:00.000Z"}


def test_statistics_of_long_text_are_cut_and_those_of_lists_left_out(tmp_path: Path) -> None:
    columns = schema(id=LongType(), text=StringType(), tags=ArrayType(StringType()))
    table = Table(tmp_path / "table", columns)
    table.commit(1, [table.stage(0, [1, 2], text=["x" * 1000, "y"], tags=[["a"], None])], through=0)
    found = table.statistics()
    assert found["minValues"] == {"id": 1, "text": "x" * 64}
    assert found["maxValues"] == {"id": 2, "text": "y"}
    assert found["nullCount"].keys() == {"id", "text"}


def test_statistics_of_a_column_of_nulls_have_no_ends(tmp_path: Path) -> None:
    table = Table(tmp_path / "table", schema(id=LongType(), name=StringType()))
    table.commit(1, [table.stage(0, [1, 2], name=pyarrow.array([None, None], pyarrow.string()))], through=0)
    assert table.statistics()["nullCount"] == {"id": 0, "name": 2}
    assert table.statistics()["minValues"] == {"id": 1}


def test_a_file_with_text_that_is_no_text_has_no_bounds(tmp_path: Path) -> None:
    """Kafka's values cast to strings may hold any bytes."""
    table = Table(tmp_path / "table", schema(id=LongType(), text=StringType()))
    octets = pyarrow.array([b"\xff\xfe", b"fine"], pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(2, *octets.buffers()[1:])
    assert table.commit(1, [table.stage(0, [1, 2], text=text)], through=0) is CommitAnswer.COMMITTED
    assert table.statistics() == {"numRecords": 2, "nullCount": {"id": 0, "text": 0}}


def test_a_reader_that_skips_by_statistics_finds_its_rows(table: Table) -> None:
    table.commit(1, [table.stage(0, [1, 2]), table.stage(1, [10, 11])], through=1)
    found = deltalake.DeltaTable(table.path).to_pyarrow_table(filters=[("id", ">=", 10)])
    assert sorted(found.to_pydict()["id"]) == [10, 11]


# -- partitions -------------------------------------------------------------------------------------

# As Spark names the folders of these values.
PARTITIONS = {
    "plain": "plain",
    "a/b": "a%2Fb",
    "ü": "ü",
    "=": "%3D",
    "100 %": "100 %25",
    "a b": "a b",
    "a+b": "a+b",
    "a#b?c": "a%23b%3Fc",
    "%2F": "%252F",
    "日本": "日本",
    None: "__HIVE_DEFAULT_PARTITION__",
}


def test_partition_values_are_read_back_whatever_they_are(tmp_path: Path) -> None:
    table = Table(tmp_path / "größe 50%+", schema(id=LongType(), key=StringType()), ["key"])
    files = [
        table.stage(0, [number, number + 100], folder=f"key={folder}")
        for number, folder in enumerate(PARTITIONS.values())
    ]
    table.commit(1, files, through=0)
    found = {(row["id"], row["key"]) for row in table.rows()}
    assert found == {(number + more, key) for number, key in enumerate(PARTITIONS) for more in (0, 100)}


def test_a_reader_that_asks_for_a_partition_gets_it_alone(tmp_path: Path) -> None:
    table = Table(tmp_path / "table", schema(id=LongType(), key=StringType()), ["key"])
    table.commit(
        1, [table.stage(0, [number], folder=f"key={each}") for number, each in enumerate(PARTITIONS.values())], 0
    )
    found = deltalake.DeltaTable(table.path).to_pyarrow_table(filters=[("key", "=", "a/b")])
    assert found.to_pylist() == [{"id": 1, "key": "a/b"}]


def test_the_name_of_a_partition_column_is_read_back_whatever_it_is(tmp_path: Path) -> None:
    table = Table(tmp_path / "table", schema(**{"id": LongType(), "a:b": StringType()}), ["a:b"])
    table.commit(1, [table.stage(0, [1], folder="a%3Ab=x")], through=0)
    assert table.rows() == [{"id": 1, "a:b": "x"}]


def test_partitions_by_several_columns_and_types(tmp_path: Path) -> None:
    columns = schema(id=LongType(), day=StringType(), number=LongType())
    table = Table(tmp_path / "table", columns, ["day", "number"])
    folders = ["day=2026-01-01/number=3", "day=2026-01-01/number=__HIVE_DEFAULT_PARTITION__"]
    table.commit(1, [table.stage(0, [index], folder=folder) for index, folder in enumerate(folders)], through=0)
    assert sorted(table.rows(), key=lambda row: int(row["id"])) == [
        {"id": 0, "day": "2026-01-01", "number": 3},
        {"id": 1, "day": "2026-01-01", "number": None},
    ]


# -- what is staged ---------------------------------------------------------------------------------


def test_what_an_aborted_epoch_staged_is_shown_with_the_next_one(table: Table) -> None:
    files = [table.stage(0, [1]), table.stage(1, [2])]  # epoch 1 sealed the first, and was aborted
    assert table.rows() == []
    table.commit(2, files, through=1)
    assert table.ids() == [1, 2]


def test_what_a_dead_generation_staged_and_nothing_decided_is_never_shown(table: Table) -> None:
    lost = table.stage(0, [1], generation=1)
    table.commit(1, [table.stage(0, [1], generation=2)], through=0, generation=2)
    assert table.ids() == [1]
    table.sink.forget_staged(before_generation=2)
    assert not Path(lost.path).exists()
    assert table.ids() == [1]


def test_forgetting_keeps_this_generation_and_what_is_shown(table: Table) -> None:
    files = [table.stage(0, [generation], generation=generation) for generation in (1, 2, 3)]
    table.commit(1, files, through=0, generation=3)
    table.sink.forget_staged(before_generation=3)
    assert [str(path) for path in table.staged()] == [files[2].path]
    assert table.ids() == [1, 2, 3]


def test_forgetting_leaves_other_owners_alone_and_needs_no_folder(table: Table) -> None:
    table.stage(0, [1])
    table.sink.sink.bind(RETURNS).forget_staged(before_generation=9)
    assert len(table.staged()) == 1


def test_what_is_shown_outlives_its_staged_file(table: Table) -> None:
    staged = table.stage(0, [1, 2])
    table.commit(1, [staged], through=0)
    Path(staged.path).unlink()
    assert table.ids() == [1, 2]


def test_a_commit_that_was_interrupted_after_linking_is_made_again(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [table.stage(0, [1]), table.stage(1, [2])]

    def die() -> None:
        raise KeyboardInterrupt

    meanwhile(monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        table.commit(1, files, through=1)
    assert table.rows() == []
    assert table.commit(1, files, through=1) is CommitAnswer.COMMITTED
    assert table.ids() == [1, 2]


# -- upserts ----------------------------------------------------------------------------------------


class MergedWithoutSpark:
    """What `Upsert` does, for rows of an id and a name: one file, which replaces all."""

    def __init__(
        self, _session: object, shelf: Shelf, _schema: object, files: Sequence[TableFile], *_names: object
    ) -> None:
        self._shelf = shelf
        self._files = [file.path for file in files]

    def conflict(self, _fresh: Sequence[StagedFile]) -> None:
        return None

    def write(self, fresh: Sequence[StagedFile], into: str, _keys: object = None) -> list[str]:
        folder = Path(into)
        old = [self._shelf.folder / name for name in self._files]
        new = [Path(file.path) for file in sorted(fresh, key=lambda file: file.batch)]
        rows = {row["id"]: row for path in (*old, *new) for row in parquet.ParquetFile(path).read().to_pylist()}
        folder.mkdir(parents=True)
        parquet.write_table(pyarrow.Table.from_pylist(list(rows.values())), folder / f"part-{uuid.uuid4()}.parquet")
        return self._files


class KeyedTable(Table):
    """A table with a key, whose merges the tests do without Spark."""

    def __init__(self, folder: Path, columns: StructType) -> None:
        self.path = folder
        place = SinkPlace("shop", "orders", Memory(), cast("SparkSession", object()))
        self.sink = prepare(DeltaTable(folder, key="id"), columns, place)

    def on_disk(self) -> set[str]:
        return {path.name for path in self.path.glob("*.parquet")}

    def ever_shown(self) -> set[str]:
        versions = range(self.version() + 1)
        found = [deltalake.DeltaTable(self.path, version=each).file_uris() for each in versions]
        return {Path(uri).name for uris in found for uri in uris}


@pytest.fixture
def keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyedTable:
    monkeypatch.setattr("tidegate.sinks.delta.upsert.Upsert", MergedWithoutSpark)
    return KeyedTable(tmp_path / "keyed", schema(id=LongType(), name=StringType()))


class Landed(Exception):
    """The transaction is in the log, but whoever made it was told otherwise."""


def lose_the_answer(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Once, right after a transaction was made."""
    transact = TableLog.transact

    def lost(*arguments: Any) -> bool:
        monkeypatch.setattr(TableLog, "transact", transact)
        made = transact(*arguments)
        then()
        return made

    monkeypatch.setattr(TableLog, "transact", lost)


def test_what_a_commit_showed_whose_answer_was_lost_stays_for_readers_of_its_version(
    keyed: KeyedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise Landed

    first, second = keyed.stage(0, [1, 2], name=["a", "b"]), keyed.stage(1, [2], name=["B"])
    lose_the_answer(monkeypatch, lost)
    with pytest.raises(Landed):
        keyed.commit(1, [first], through=0)
    assert keyed.commit(1, [first], through=0) is CommitAnswer.ALREADY
    assert keyed.commit(2, [first, second], through=1) is CommitAnswer.COMMITTED
    assert keyed.ids() == [1, 2]
    assert deltalake.DeltaTable(keyed.path, version=1).to_pyarrow_table().num_rows == 2
    assert keyed.on_disk() == keyed.ever_shown()


def test_a_file_that_another_writer_replaces_right_after_the_commit_stays_for_readers_of_its_version(
    keyed: KeyedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_answer(monkeypatch, lambda: deltalake.DeltaTable(keyed.path).delete("id = 1"))
    keyed.commit(1, [keyed.stage(0, [1, 2], name=["a", "b"])], through=0)
    assert keyed.ids() == [2]
    assert deltalake.DeltaTable(keyed.path, version=1).to_pyarrow_table().num_rows == 2


def test_an_old_run_that_wakes_up_leaves_a_newer_runs_attempt_alone(
    keyed: KeyedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = keyed.stage(0, [1], name=["a"]), keyed.stage(1, [2], name=["b"], generation=2)

    def the_newer_run_attempts() -> None:
        """It has linked its files, and is about to make its transaction when the old run goes on."""
        transact = TableLog.transact

        def pause(*arguments: Any) -> None:
            attempted.append(arguments)
            monkeypatch.setattr(TableLog, "transact", transact)
            raise Landed

        monkeypatch.setattr(TableLog, "transact", pause)
        with pytest.raises(Landed):
            keyed.commit(2, [first, second], through=1, generation=2)

    attempted: list[tuple[Any, ...]] = []
    lose_the_answer(monkeypatch, the_newer_run_attempts)
    assert keyed.commit(1, [first], through=0) is CommitAnswer.COMMITTED
    TableLog.transact(*attempted[0])
    assert keyed.ids() == [1, 2]


def test_what_attempts_in_vain_have_linked_is_removed_by_the_commit_that_follows(
    keyed: KeyedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    first, second = keyed.stage(0, [1], name=["a"]), keyed.stage(1, [2], name=["b"])
    for epoch, generation in ((1, 1), (2, 1), (2, 2)):
        with monkeypatch.context() as killed:
            killed.setattr(TableLog, "transact", die)
            with pytest.raises(KeyboardInterrupt):
                keyed.commit(epoch, [first, second][:epoch], through=epoch - 1, generation=generation)
    assert len(keyed.on_disk()) == 3
    assert keyed.commit(2, [first, second], through=1, generation=2) is CommitAnswer.COMMITTED
    assert keyed.ids() == [1, 2]
    assert keyed.on_disk() == keyed.ever_shown()
    assert not list((keyed.path / "_tidegate").rglob("merge-*"))
