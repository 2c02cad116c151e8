"""Played tables pass the tests that every sink must pass, and show their rows to whoever checks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import pytest

from tidegate.errors import SinkFailed
from tidegate.sinks.contract import Committable, CopyingSink, FileSink, ReversibleSink, SinkPlace, StagedFile
from tidegate.storage.files import clear
from tidegate.storage.manifest import TableAddress
from tidegate.storage.memory import Memory
from tidegate.testing.played import PlayedRows, PlayedTable, encode_rows
from tidegate.testing.played.tables import Call, OwnerRecord
from tidegate.testing.sinks import Row, Rows, SinkConformance, as_rows, manifest_at, permit

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")


class TestPlayedFileTable(SinkConformance):
    @pytest.fixture(autouse=True)
    def given(self) -> None:
        self.lake = Memory("lake")

    def make_sink(self, name: str) -> PlayedTable:
        return PlayedTable(self.lake.at(name), beside=self.lake)

    def shown(self, name: str) -> Rows:
        files = (parquet.read_table(BytesIO(data)).to_pylist() for data in self.make_sink(name).data)
        return as_rows([row for file in files for row in file])

    def keep(self, name: str) -> Callable[[], object]:
        table = self.lake.at(name)
        backup = {each: table.read(each) or b"" for each in table.list()}

        def put_back() -> None:
            clear(table, "")
            for each, data in backup.items():
                table.write(each, data)

        return put_back


class Frame(NamedTuple):
    """What a session makes of rows, in place of a DataFrame."""

    rows: Sequence[Row]

    def count(self) -> int:  # type: ignore[override]
        return len(self.rows)

    def encoded(self) -> bytes:
        written = BytesIO()
        columns = {
            "id": pyarrow.array([each for each, _ in self.rows], pyarrow.int64()),
            "value": pyarrow.array([value for _, value in self.rows], pyarrow.string()),
        }
        parquet.write_table(pyarrow.table(columns), written)
        return written.getvalue()


class Session:
    def createDataFrame(self, rows: Sequence[Row], _schema: object) -> Frame:  # noqa: N802 - Spark's name
        return Frame(rows)


class TestPlayedRowTable(TestPlayedFileTable):
    def make_sink(self, name: str) -> PlayedTable:
        return PlayedTable(self.lake.at(name), "rows", encode=Frame.encoded, beside=self.lake)

    def session(self) -> Any:
        return Session()


def bound_to(table: PlayedTable) -> FileSink:
    place = SinkPlace("played", "sink", Memory(), root="root")
    bound = table.bind(place)
    assert isinstance(bound, FileSink)
    bound.prepare_table(None)  # type: ignore[arg-type]
    bound.claim()
    return bound


def staged(files: Memory, rows: PlayedRows) -> Committable:
    data = encode_rows(rows)
    files.write("staged/played/sink/000001/part-0.parquet", data)
    path = files.location("staged/played/sink/000001/part-0.parquet")
    return Committable(0, (StagedFile(0, path, len(data), rows.count),))


def test_a_checker_sees_the_rows_epochs_and_fences_of_a_table_in_memory() -> None:
    files = Memory("lake")
    table = PlayedTable(files)
    bound = bound_to(table)
    bound.commit(permit(3), staged(files, PlayedRows(((0, 0, 5), (1, 0, 2)))))
    bound.fence(4)
    assert table.visible().ranges == ((0, 0, 5), (1, 0, 2))
    assert [(each.epoch, each.generation) for each in table.versions()] == [(0, 0), (0, 0), (3, 1), (0, 4)]
    newest = PlayedTable(files).newest()
    assert newest is not None
    assert newest.owners == {"played/sink": OwnerRecord("root", 4, 3, 1)}


@pytest.mark.parametrize("when", ["commit", "committed"])
def test_a_table_fails_at_a_callers_word_before_or_after_it_shows_the_rows(when: Call) -> None:
    files = Memory("lake")
    table = PlayedTable(files)
    bound = bound_to(table)
    sealed = staged(files, PlayedRows(((0, 0, 5),)))

    def fail(call: Call) -> None:
        if call == when:
            raise SinkFailed("for a test")

    table.on_call = fail
    with pytest.raises(SinkFailed, match="for a test"):
        bound.commit(permit(1), sealed)
    assert table.visible().ranges == (() if when == "commit" else ((0, 0, 5),))


def test_a_copy_shows_the_rows_of_the_other_table_and_none_of_its_own_and_goes_back_to_them() -> None:
    lake = Memory("lake")
    first, second = (PlayedTable(lake.at(name), beside=lake) for name in ("first", "second"))
    one, other = bound_to(first), bound_to(second)
    sealed = staged(lake.at("first"), PlayedRows(((0, 0, 5), (1, 0, 2))))
    one.commit(permit(3), sealed)
    other.commit(permit(4), staged(lake.at("second"), PlayedRows(((0, 0, 9),))))
    assert isinstance(other, CopyingSink)
    assert isinstance(other, ReversibleSink)
    to = manifest_at(3, other, sealed)
    other.show_copy(first.table, to, 7, replaces=True)
    assert second.visible().ranges == ((0, 0, 5), (1, 0, 2))
    newest = second.newest()
    assert newest is not None
    assert (newest.copies, second.rows_of(newest)) == (first.table.address, first.visible())
    assert newest.owners == {"played/sink": OwnerRecord("root", 7, 3, 1, 7)}
    other.set_back(manifest_at(4, other, None), 8, discards_others=False)
    assert second.visible().ranges == ()
    other.set_back(to, 9, discards_others=False)
    assert second.visible().ranges == ((0, 0, 5), (1, 0, 2))


def test_a_copy_of_a_table_that_is_nowhere_is_refused() -> None:
    table = PlayedTable(Memory("lake"))
    bound = bound_to(table)
    assert isinstance(bound, CopyingSink)
    with pytest.raises(SinkFailed, match="knows of no table at memory://elsewhere"):
        bound.look_at_copy(TableAddress("played", "memory://elsewhere"), manifest_at(1, bound, None), replaces=True)
