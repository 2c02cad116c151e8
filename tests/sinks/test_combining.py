"""Small files of an epoch become few when it is committed, and a table's own in the background."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import deltalake
import pytest
from deltalake.exceptions import CommitFailedError
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from tidegate.errors import InvalidConfig, SinkFailed
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace, StagedFile, Upkeep, staged_by
from tidegate.sinks.delta.combining import Piece, bins, combine, files_wanted
from tidegate.sinks.delta.compacting import rewrite
from tidegate.sinks.delta.log import TableLog
from tidegate.sinks.delta.reading import versions_of
from tidegate.sinks.delta.table import DeltaTable
from tidegate.sinks.delta.vacuum import retention_s, unneeded_files
from tidegate.spark.session import StageSessions
from tidegate.storage.manifest import StageShape
from tidegate.storage.memory import Memory
from tidegate.storage.parquet import read_footer
from tidegate.testing.sinks import permit

# -- which files become one ----------------------------------------------------------------------------------


def piece(name: str, size: int, partition: str = "") -> Piece:
    return Piece(Path(name), size, partition)


def test_small_files_of_one_partition_become_one_and_others_are_left_alone() -> None:
    found = bins(
        [piece("a", 3, "x"), piece("large", 6, "x"), piece("b", 3, "y"), piece("c", 2, "x"), piece("alone", 1, "z")],
        10,
        5,
    )
    assert [[each.path.name for each in together] for together in found] == [["a", "c"]]


@given(sizes=st.lists(st.tuples(st.integers(0, 30), st.sampled_from("xy"))), target=st.integers(1, 40))
def test_what_was_combined_is_not_combined_again_without_something_new(sizes: list[Any], target: int) -> None:
    pieces = [piece(str(number), size, where) for number, (size, where) in enumerate(sizes)]
    found = bins(pieces, target, target // 2)
    once = Counter(each.path for together in found for each in together)
    assert set(once.values()) <= {1}
    for together in found:
        assert len(together) > 1
        assert len({each.partition for each in together}) == 1
        assert sum(each.size for each in together) <= target
    made = [piece(f"made-{n}", sum(each.size for each in one), str(one[0].partition)) for n, one in enumerate(found)]
    assert bins([each for each in pieces if each.path not in once] + made, target, target // 2) == []


def test_as_many_files_are_wanted_as_hold_it_and_at_least_one() -> None:
    assert [files_wanted(size, 10) for size in (0, 1, 10, 11, 25)] == [1, 1, 1, 2, 3]


@pytest.mark.parametrize("size", ["0MB", "many", "32"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(InvalidConfig, match="target_file_size is"):
        DeltaTable("table", target_file_size=size)


# -- at a commit ---------------------------------------------------------------------------------------------


class Staging:
    """A sink of a pipeline, whose batches are staged as Spark would."""

    def __init__(self, sink: DeltaTable, spark: SparkSession, columns: str = "id long, place string") -> None:
        self.sink = sink.bind(SinkPlace("shop", "orders", Memory(), spark, "root"))
        self.session = StageSessions(spark).of_stages
        self.batch = -1
        schema = self.session.createDataFrame([], columns).schema
        self.sink.check_table(schema, "update")
        self.sink.prepare_table(schema)
        self.sink.claim()

    def stage(self, rows: DataFrame) -> list[StagedFile]:
        """A batch."""
        self.batch += 1
        folder = Path(staged_by(self.sink, 1).location()) / f"batch-{self.batch}"
        rows.write.partitionBy(*self.sink.partition_by).parquet(str(folder))
        found = sorted(folder.rglob("*.parquet"))
        return [StagedFile(self.batch, str(each), each.stat().st_size, read_footer(each).num_rows) for each in found]

    def commit(self, files: list[StagedFile], *, epoch: int | None = None, generation: int = 1) -> CommitAnswer:
        sealed = Committable(self.batch, tuple(files))
        return self.sink.commit(permit(epoch or self.batch + 1, generation), sealed)

    def rows(self, first: int, count: int, files: int = 2) -> DataFrame:
        places = "element_at(array('a/b', '', NULL, 'ü', '%'), CAST(id % 5 + 1 AS INT)) AS place"
        return self.session.range(first, first + count, 1, files).selectExpr("id", places)

    def shown(self) -> list[tuple[int, str | None]]:
        rows = deltalake.DeltaTable(self.sink.path).to_pyarrow_table().to_pylist()
        return sorted((row["id"], row["place"]) for row in rows)

    def files(self) -> list[Path]:
        """Of the table's folder, shown or not."""
        return sorted(path for path in self.sink.path.rglob("*.parquet") if "_tidegate" not in path.parts)

    @property
    def active(self) -> int:
        return len(deltalake.DeltaTable(self.sink.path).file_uris())


def expected(count: int, first: int = 0) -> list[tuple[int, str | None]]:
    places = ("a/b", None, None, "ü", "%")
    return [(number, places[number % 5]) for number in range(first, first + count)]


@pytest.mark.spark
@pytest.mark.parametrize("by", [(), ("place",)], ids=["whole", "by place"])
def test_the_small_files_of_an_epoch_become_one_for_each_partition(
    by: tuple[str, ...], tmp_path: Path, spark: SparkSession
) -> None:
    here = Staging(DeltaTable(tmp_path / "größe 50%+", by), spark)
    staged = [file for first in (0, 20, 40) for file in here.stage(here.rows(first, 20))]
    assert here.commit(staged) is CommitAnswer.COMMITTED
    assert here.shown() == [(n, place or ("" if not by and n % 5 == 1 else None)) for n, place in expected(60)]
    assert here.active == len(here.files()) == (4 if by else 1) < len(staged)
    assert here.commit(staged) is CommitAnswer.ALREADY
    assert not list((here.sink.path / "_tidegate").rglob("merge-*"))
    # What would save a file or two is left as it is.
    alone = here.stage(here.rows(60, 3, files=3))
    here.commit(alone)
    assert {Path(file.path).name for file in alone} < {path.name for path in here.files()}


@pytest.mark.spark
def test_large_files_are_linked_and_more_than_the_target_becomes_several(tmp_path: Path, spark: SparkSession) -> None:
    here = Staging(DeltaTable(tmp_path / "table", target_file_size="100KB"), spark)
    large, *small = here.stage(here.rows(0, 5_000, files=1)) + [
        file for n in range(2) for file in here.stage(here.rows(5_000 + n * 12_000, 12_000, files=24))
    ]
    assert large.size_bytes * 16 > 100 << 10 > small[0].size_bytes * 16
    assert sum(file.size_bytes for file in small) > 100 << 10
    here.commit([large, *small])
    assert here.shown() == [(n, place or ("" if n % 5 == 1 else None)) for n, place in expected(5_000 + 2 * 12_000)]
    assert Path(large.path).samefile(here.sink.path / Path(large.path).name)
    assert 1 < here.active - 1 < len(small)


@pytest.mark.spark
def test_what_a_killed_commit_has_combined_is_neither_shown_nor_left(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Staging(DeltaTable(tmp_path / "table", "place"), spark)
    staged = here.stage(here.rows(0, 20)) + here.stage(here.rows(20, 20))

    class Killed(BaseException):
        pass

    def kill(*_: object) -> bool:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(TableLog, "transact", kill)
        with pytest.raises(Killed):
            here.commit(staged)
    assert here.files()
    # Another process goes on, which was told to leave files as they are, and another that combines them again.
    Staging(DeltaTable(tmp_path / "table", "place", target_file_size=None), spark)
    with monkeypatch.context() as patched:
        patched.setattr(TableLog, "transact", kill)
        patched.setattr(here.sink.sink, "target_size", None)
        with pytest.raises(Killed):
            here.commit(staged, generation=2)
    assert here.commit(staged, generation=3) is CommitAnswer.COMMITTED
    assert here.shown() == expected(40)
    assert len(here.files()) == here.active == 4
    assert not list((here.sink.path / "_tidegate").rglob("merge-*"))


@pytest.mark.spark
def test_a_commit_that_meets_another_writers_combines_its_files_once(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Staging(DeltaTable(tmp_path / "table", "place"), spark)
    staged = here.stage(here.rows(0, 20)) + here.stage(here.rows(20, 20))
    transact, combined, others = TableLog.transact, [], iter(range(3))

    def counted(*arguments: Any) -> list[Path]:
        combined.append(arguments)
        return combine(*arguments)

    def meanwhile(log: TableLog, *arguments: Any) -> bool:
        if next(others, None) is not None:
            deltalake.DeltaTable(log.home.address).alter.set_table_description("by another writer")
        return transact(log, *arguments)

    monkeypatch.setattr("tidegate.sinks.delta.appending.combine", counted)
    monkeypatch.setattr(TableLog, "transact", meanwhile)
    assert here.commit(staged) is CommitAnswer.COMMITTED
    assert len(combined) == 1
    assert here.shown() == expected(40)
    assert here.active == len(here.files()) == 4
    assert not list((here.sink.path / "_tidegate").rglob("merge-*"))


@pytest.mark.spark
def test_what_cannot_be_combined_is_shown_as_it_is_and_told(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = Staging(DeltaTable(tmp_path / "table"), spark)
    staged = here.stage(here.rows(0, 20, files=4))
    monkeypatch.setattr(
        "tidegate.sinks.delta.combining._rows_in",
        lambda paths: sum(1 if "_tidegate_bin" in str(path) else 9 for path in paths),
    )
    with caplog.at_level(logging.WARNING, "tidegate"):
        here.commit(staged)
    assert "small files are shown as they are" in caplog.text
    assert here.active == len(staged) == len(here.files())
    assert [n for n, _ in here.shown()] == list(range(20))


@pytest.mark.spark
def test_a_commit_by_key_writes_as_few_files_as_its_rows_need(tmp_path: Path, spark: SparkSession) -> None:
    here = Staging(DeltaTable(tmp_path / "table", key="id"), spark)
    here.commit(here.stage(here.rows(0, 50, files=4)))
    here.commit(here.stage(here.rows(25, 50, files=4)))
    assert [n for n, _ in here.shown()] == list(range(75))
    assert here.active == 1


# -- in the background ---------------------------------------------------------------------------------------


class Kept(Staging):
    """A sink whose epochs are of one small batch each, and that remembers what each of them has shown."""

    def __init__(self, sink: DeltaTable, spark: SparkSession, columns: str = "id long, place string") -> None:
        super().__init__(sink, spark, columns)
        self.sealed: dict[int, Committable] = {}

    def show(self, rows: DataFrame) -> None:
        staged = self.stage(rows)
        self.sealed[self.batch + 1] = Committable(self.batch, tuple(staged))
        self.commit(staged)

    def manifest(self, epoch: int) -> Any:
        shape = {"orders": StageShape("sink", (), "append", "", self.sink.table)}
        stages = {"orders": SimpleNamespace(committable=self.sealed[epoch].encode())}
        return SimpleNamespace(
            pipeline="shop",
            epoch=epoch,
            shown_epoch=epoch,
            counted_by=lambda root: root,
            checkpoint_id=epoch,
            shape=shape,
            stages=stages,
        )

    def keep_up(self, *retained: int, generation: int = 1) -> Upkeep | None:
        return self.sink.keep_up(generation, lambda: [self.manifest(each) for each in retained], Event())

    def at(self, epoch: int) -> list[int]:
        (version,) = versions_of(self.sink.path, "orders", [self.manifest(epoch)])
        return sorted(deltalake.DeltaTable(self.sink.path, version=version).to_pyarrow_table()["id"].to_pylist())


@pytest.mark.spark
def test_small_files_of_several_epochs_become_few_and_what_no_checkpoint_needs_is_deleted(
    tmp_path: Path, spark: SparkSession
) -> None:
    here = Kept(DeltaTable(tmp_path / "größe 50%+", "place", optimize="1h", vacuum="0s"), spark)
    for first in range(0, 60, 10):
        here.show(here.rows(first, 10, files=1))
    before = here.sink.facts()
    others = here.sink.path / "others.txt"
    others.write_text("of the user")
    fresh = here.sink.path / "just-written.parquet"
    fresh.write_bytes(b"by another writer, who is about to add it")
    assert here.sink.upkeep_due_in_ms() == 0
    done = here.keep_up(3, 6)
    assert done is not None
    assert (done.files_before, done.files_after) == (24, 4)
    assert here.active == 4
    assert here.shown() == expected(60)
    assert here.sink.facts() == before
    # Checkpoint 3 needs the files of three epochs, checkpoint 6 is shown by the newest version.
    assert done.deleted == 12 == len(here.files()) - 4 - 1
    assert here.at(3) == list(range(30))
    assert here.at(6) == list(range(60))
    with pytest.raises(Exception, match=r"not found|No such file|does not exist"):
        here.at(5)
    assert others.exists()
    assert fresh.exists()
    assert here.keep_up(3, 6) is None
    assert here.sink.upkeep_due_in_ms() > 3_000_000
    # What is shown later is compacted with what was, and nothing is shown twice.
    here.show(here.rows(60, 10, files=1))
    assert here.commit(list(here.sealed[7].files), epoch=7) is CommitAnswer.ALREADY
    done = here.keep_up(7)
    assert done is not None
    assert here.active == done.files_after == 4
    assert len(here.files()) == 4 + 1
    assert here.shown() == expected(70)


@pytest.mark.spark
def test_files_stay_for_as_long_as_was_said_by_the_sink_or_by_the_table(tmp_path: Path, spark: SparkSession) -> None:
    here = Kept(DeltaTable(tmp_path / "table", optimize="1h", vacuum="0s"), spark)
    for first in range(0, 20, 10):
        here.show(here.rows(first, 10, files=1))
    table = deltalake.DeltaTable(here.sink.path)
    assert [retention_s(table, given) for given in (0, 500, 7_200_000)] == [0, 1, 7_200]
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 2 hours"})
    table = deltalake.DeltaTable(here.sink.path)
    assert [retention_s(table, given) for given in (0, 10_000_000)] == [7_200, 10_000]
    done = here.keep_up(2)
    assert done is not None
    assert (done.files_before, done.files_after, done.deleted) == (2, 1, 0)
    # Version 3 has shown both of the files that were combined.
    assert unneeded_files(deltalake.DeltaTable(here.sink.path), here.sink.path, 0, []) != []
    assert unneeded_files(deltalake.DeltaTable(here.sink.path), here.sink.path, 0, [3]) == []
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 1 month"})
    with pytest.raises(SinkFailed, match="'interval 1 month', which is not understood, so no file is deleted"):
        here.keep_up(2)


@pytest.mark.spark
def test_upkeep_gives_way_to_another_writer_and_a_kill_of_it_changes_no_row(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Kept(DeltaTable(tmp_path / "table", optimize="1h", vacuum=None), spark)
    for first in range(0, 30, 10):
        here.show(here.rows(first, 10, files=1))

    def meanwhile(*arguments: Any) -> Any:
        written = rewrite(*arguments)
        deltalake.DeltaTable(here.sink.path).delete("id < 5")  # in one of the files
        return written

    with monkeypatch.context() as patched:
        patched.setattr("tidegate.sinks.delta.upkeep.rewrite", meanwhile)
        assert here.keep_up() is None
    assert [n for n, _ in here.shown()] == list(range(5, 30))
    assert len(here.files()) == here.active + 1 == 4

    class Killed(BaseException):
        pass

    transact = TableLog.transact

    def killed_before(*_: Any) -> bool:
        raise Killed

    def killed_after(*arguments: Any) -> bool:
        transact(*arguments)
        raise Killed

    for kill in (killed_before, killed_after):
        with monkeypatch.context() as patched:
            patched.setattr(TableLog, "transact", kill)
            with pytest.raises(Killed):
                here.keep_up()
        assert [n for n, _ in here.shown()] == list(range(5, 30))
    assert here.active == 1
    here.show(here.rows(30, 10, files=1))
    assert here.keep_up(generation=2) is not None
    assert [n for n, _ in here.shown()] == list(range(5, 40))
    # What seems to have failed may be in the table.
    write = deltalake.DeltaTable.create_write_transaction

    def without_an_answer(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        raise CommitFailedError("its answer was lost")

    here.show(here.rows(40, 10, files=1))
    with monkeypatch.context() as patched:
        patched.setattr(deltalake.DeltaTable, "create_write_transaction", without_an_answer)
        here.keep_up()
    assert here.active == 1
    assert [n for n, _ in here.shown()] == list(range(5, 50))


@pytest.mark.spark
def test_before_a_file_is_deleted_the_version_without_it_is_forced_to_the_disk_whoever_made_it(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Kept(DeltaTable(tmp_path / "table", optimize="1h", vacuum="0s"), spark)
    for first in range(0, 20, 10):
        here.show(here.rows(first, 10, files=1))
    deltalake.DeltaTable(here.sink.path).optimize.compact()
    newest = here.sink.path / "_delta_log" / f"{deltalake.DeltaTable(here.sink.path).version():020d}.json"
    forced: dict[Path, int] = {}

    def note(paths: Iterable[Path], *_known: object, **_options: object) -> frozenset[Path]:
        forced.update(dict.fromkeys(paths, len(here.files())))
        return frozenset()

    monkeypatch.setattr("tidegate.sinks.delta.log.sync", note)
    done = here.keep_up(2)
    assert done is not None
    assert done.deleted == 2
    (shown,) = deltalake.DeltaTable(here.sink.path).file_uris()
    assert forced[newest] == forced[Path(shown)] == 3, "when no file was deleted yet"


@pytest.mark.spark
def test_a_table_that_demands_what_tidegate_does_not_do_is_left_alone(tmp_path: Path, spark: SparkSession) -> None:
    here = Kept(DeltaTable(tmp_path / "table", optimize="1h"), spark)
    for first in range(0, 20, 10):
        here.show(here.rows(first, 10, files=1))
    deltalake.DeltaTable(here.sink.path).alter.add_constraint({"known": "id >= 0"})
    with pytest.raises(SinkFailed, match=r"it has the property delta\.constraints\.known, which Tidegate does not do"):
        here.keep_up(2)
    assert here.active == 2
