"""Bounds of columns: files are skipped by them, but never one that holds what is looked for."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import deltalake
import pytest
from deltalake.transaction import AddAction, RemoveAction
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.sinks.delta.scan import TableFile, active_files
from tidegate.sinks.delta.statistics import Bounds, bounds_of_files, may_hold, statistics
from tidegate.storage.parquet import read_footer

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

COLUMNS: Any = pyarrow.schema(
    [
        ("number", pyarrow.int32()),
        ("day", pyarrow.date32()),
        ("moment", pyarrow.timestamp("us", "UTC")),
        ("text", pyarrow.string()),
        ("ratio", pyarrow.float64()),
        ("is_new", pyarrow.bool_()),
        ("place", pyarrow.string()),
    ]
)
KEY = COLUMNS.names


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=COLUMNS), path, row_group_size=2)
    return path


def row(**values: Any) -> dict[str, Any]:
    return {**dict.fromkeys(KEY), **values}


# -- what the log says -----------------------------------------------------------------------------


def test_bounds_of_times_are_cut_to_milliseconds_outwards(tmp_path: Path) -> None:
    rows = [
        row(moment=datetime(2026, 1, 1, 0, 0, 0, 1_999, UTC), day=date(2026, 1, 1)),
        row(moment=datetime(2026, 1, 2, 2, 0, 0, 5_001, timezone(timedelta(hours=2))), day=date(999, 1, 1)),
        row(moment=None, day=None),
    ]
    found = json.loads(statistics(read_footer(write(tmp_path / "a.parquet", rows))))
    assert found["minValues"] == {"moment": "2026-01-01T00:00:00.001Z", "day": "0999-01-01"}
    assert found["maxValues"] == {"moment": "2026-01-02T00:00:00.006Z", "day": "2026-01-01"}
    assert found["nullCount"] == {name: 1 if name in {"moment", "day"} else 3 for name in KEY}


def test_a_file_with_times_beyond_the_years_of_python_has_no_bounds(tmp_path: Path) -> None:
    far = pyarrow.table({"moment": pyarrow.array([9 * 10**17, 0], pyarrow.timestamp("us", "UTC")), "n": [1, 2]})
    parquet.write_table(far, tmp_path / "far.parquet")
    found = json.loads(statistics(read_footer(tmp_path / "far.parquet")))
    assert found == {"numRecords": 2, "nullCount": {"moment": 0, "n": 0}}
    assert bounds_of_files([tmp_path / "far.parquet"], ["moment", "n"]) == {"n": Bounds(1, 2, 0)}


def told(folder: Path, kind: Any, *values: Any) -> Any:
    """The bounds in the log of a file with these values."""
    parquet.write_table(pyarrow.table({"x": pyarrow.array(values, kind)}), folder / "one.parquet", row_group_size=1)
    found = json.loads(statistics(read_footer(folder / "one.parquet")), parse_float=Decimal)
    return (found["minValues"].get("x"), found["maxValues"].get("x")) if "minValues" in found else None


TEXTS = st.text(st.sampled_from(["a", "\ud7ff", "\ue000", "\U0010ffff"]) | st.characters(codec="utf-8"))


@settings(max_examples=60, deadline=None)
@given(value=TEXTS | st.builds(lambda start, each, n: start + each * n, TEXTS, TEXTS, st.integers(0, 80)))
def test_a_long_string_lies_between_its_bounds(value: str) -> None:
    with TemporaryDirectory() as folder:
        low, high = told(Path(folder), pyarrow.string(), value)
    assert low.encode() <= value.encode() <= high.encode()
    assert value.startswith(low)
    assert len(low) <= 64
    assert len(high) <= 64 or high == value
    assert len(value) > 64 or low == high == value


def test_bounds_of_each_type_are_as_delta_has_them(tmp_path: Path) -> None:
    large = Decimal("12345678901234567890123456789012.123456")
    assert told(tmp_path, pyarrow.decimal128(38, 6), large, Decimal("0.000001")) == (Decimal("0.000001"), large)
    assert told(tmp_path, pyarrow.bool_(), True, None) == (True, True)
    final = datetime.max.replace(tzinfo=UTC)
    assert told(tmp_path, pyarrow.timestamp("us", "UTC"), final) == (
        "9999-12-31T23:59:59.999Z",
        "9999-12-31T23:59:59.999999Z",
    )
    assert told(tmp_path, pyarrow.timestamp("us"), final.replace(tzinfo=None)) == (
        "9999-12-31T23:59:59.999",
        "9999-12-31T23:59:59.999999",
    )
    assert told(tmp_path, pyarrow.binary(), b"a") == (None, None)


def test_a_file_of_which_one_column_is_not_bounded_has_no_bounds(tmp_path: Path) -> None:
    nan = float("nan")  # which this writer leaves out of the bounds
    rows = pyarrow.table({"n": [1, 2], "inside": [{"a.b": 1.0}, {"a.b": nan}], "t": ["a", None]})
    parquet.write_table(rows, tmp_path / "nan.parquet")
    nulls = {"n": 0, "inside": {"a.b": 0}, "t": 1}
    assert json.loads(statistics(read_footer(tmp_path / "nan.parquet"))) == {"numRecords": 2, "nullCount": nulls}
    parquet.write_table(rows, tmp_path / "untold.parquet", write_statistics=["n", "inside.a.b"])
    assert json.loads(statistics(read_footer(tmp_path / "untold.parquet")))["nullCount"] == {
        "n": 0,
        "inside": {"a.b": 0},
    }
    assert bounds_of_files([tmp_path / "untold.parquet"], ["n", "t", "inside"]) == {"n": Bounds(1, 2, 0)}


def test_a_reader_that_skips_by_time_finds_its_rows(tmp_path: Path) -> None:
    moments = [datetime(2026, 1, 1, 0, 0, 0, 999_999, UTC), datetime(1960, 1, 1, 0, 0, 0, 1, UTC)]
    table = make_table(tmp_path, [[row(number=n, moment=each)] for n, each in enumerate(moments)], by_us=True)
    for n, each in enumerate(moments):
        assert [found["number"] for found in table.to_pyarrow_table(filters=[("moment", "=", each)]).to_pylist()] == [n]


# -- what is skipped -------------------------------------------------------------------------------


def make_table(folder: Path, files: Sequence[Sequence[dict[str, Any]]], by_us: bool) -> deltalake.DeltaTable:
    """A table partitioned by place, of files that we or another writer have described."""
    path = folder / "table"
    table = deltalake.DeltaTable.create(path, schema=deltalake.Schema.from_arrow(COLUMNS), partition_by=["place"])
    stored = [name for name in KEY if name != "place"]
    actions: list[AddAction | RemoveAction] = []
    for number, rows in enumerate(files):
        if by_us:
            content = pyarrow.Table.from_pylist(list(rows), schema=COLUMNS).select(stored)
            name = f"{number}.parquet"
            parquet.write_table(content, path / name, row_group_size=2)
            partition = {"place": rows[0]["place"]}
            size = (path / name).stat().st_size
            actions.append(AddAction(name, size, partition, 0, True, statistics(read_footer(path / name))))
        else:
            deltalake.write_deltalake(path, pyarrow.Table.from_pylist(list(rows), schema=COLUMNS), mode="append")
    if actions:
        table.create_write_transaction(actions, "append", table.schema(), partition_by=["place"])
    return deltalake.DeltaTable(path)


def candidates(table: deltalake.DeltaTable, staged: Path) -> list[TableFile]:
    wanted = bounds_of_files([staged], KEY)
    return [file for file in active_files(table, KEY) if may_hold(file.bounds, wanted)]


VALUES = st.fixed_dictionaries(
    {
        "number": st.none() | st.integers(-3, 3) | st.sampled_from([-(2**31), 2**31 - 1]),
        "day": st.none() | st.dates(date(2026, 1, 1), date(2026, 1, 4)) | st.just(date(1, 1, 1)),
        "moment": st.none()
        | st.sampled_from([datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)])
        | st.timedeltas(timedelta(), timedelta(seconds=1)).map(lambda each: datetime(2026, 1, 1, tzinfo=UTC) + each),
        "text": st.none() | st.text(max_size=3) | st.just("x" * 100),
        "ratio": st.none() | st.floats(),
        "is_new": st.none() | st.booleans(),
    }
)
PLACES = st.sampled_from([None, "", "a", "b", "ü"])
FILES = st.lists(
    st.tuples(PLACES.filter(lambda place: place != ""), st.lists(VALUES, min_size=1, max_size=3)), max_size=3
)


@settings(max_examples=60, deadline=None)
@given(
    files=FILES, staged=st.lists(st.tuples(PLACES, VALUES), min_size=1, max_size=3), by_us=st.booleans(), same=st.data()
)
def test_no_file_is_skipped_that_has_a_key_of_the_new_rows(
    files: list[tuple[str | None, list[dict[str, Any]]]],
    staged: list[tuple[str, dict[str, Any]]],
    by_us: bool,
    same: st.DataObject,
) -> None:
    contents = [[{**values, "place": place} for values in rows] for place, rows in files]
    rows = [{**values, "place": place} for place, values in staged]
    if contents:  # one key is surely there
        rows.append(same.draw(st.sampled_from([row for content in contents for row in content])))
    with TemporaryDirectory() as name:
        table = make_table(Path(name), contents, by_us)
        kept = {file.path for file in candidates(table, write(Path(name) / "staged.parquet", rows))}
        # Arrow's own rows: what was stored and what is looked for have then the same values, NaN among them.
        wanted = {repr({**each, "place": each["place"] or None}) for each in rows}
        for file in active_files(table):
            stored = parquet.ParquetFile(Path(name) / "table" / file.path).read().to_pylist()
            if any(repr({**each, **file.partition}) in wanted for each in stored):
                assert file.path in kept


@pytest.mark.parametrize("by_us", [True, False], ids=["by us", "by another writer"])
def test_a_file_is_skipped_that_cannot_have_a_key_of_the_new_rows(by_us: bool, tmp_path: Path) -> None:
    near = row(number=5, day=date(2026, 1, 5), moment=datetime(2026, 1, 5, tzinfo=UTC), text="b", place="here")
    others: dict[str, dict[str, Any]] = {
        "a smaller number": {"number": 4},
        "an earlier day": {"day": date(2026, 1, 4)},
        "a later time": {"moment": datetime(2026, 1, 5, 0, 0, 3, tzinfo=UTC)},
        "another place": {"place": "there"},
        "no place": {"place": None},
        "no number": {"number": None},
    }
    table = make_table(tmp_path, [[near], *([{**near, **other}] for other in others.values())], by_us)
    assert len(active_files(table)) == 1 + len(others)
    staged = write(tmp_path / "staged.parquet", [near])
    (kept,) = candidates(table, staged)
    assert parquet.ParquetFile(tmp_path / "table" / kept.path).read().to_pylist()[0]["number"] == 5
    assert kept.partition == {"place": "here"}


def test_rows_without_a_value_are_looked_for_where_there_are_nulls(tmp_path: Path) -> None:
    table = make_table(tmp_path, [[row(number=1, place="a")], [row(place="b")], [row(number=3), row()]], by_us=True)
    found = candidates(table, write(tmp_path / "staged.parquet", [row(), row(place="b")]))
    assert sorted(file.partition["place"] or "-" for file in found) == ["-", "b"]


def test_a_file_of_which_the_log_tells_nothing_is_never_skipped(tmp_path: Path) -> None:
    table = make_table(tmp_path, [[row(number=1, place="a")], [row(number=5, place="a")]], by_us=True)
    name = "untold.parquet"
    write(tmp_path / "table" / name, [row(number=9)])
    added = AddAction(name, 100, {"place": "a"}, 0, True, "{}")
    table.create_write_transaction([added], "append", table.schema(), partition_by=["place"])
    found = candidates(
        deltalake.DeltaTable(tmp_path / "table"), write(tmp_path / "staged.parquet", [row(number=5, place="a")])
    )
    assert sorted(file.path for file in found) == ["1.parquet", name]
