"""Two pipelines compared: rows of any kind, where both have read the same, and what is told where they have not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import typer
from pyspark.sql import DataFrame, SparkSession

import tidegate as tg
from tests.cli.strict import answered
from tests.spark.harness import at_most, run_to_end, stream, write_input
from tidegate.cli.answers import ColumnTypes, CompareAnswer
from tidegate.cli.compare import compare_command
from tidegate.cli.exits import Exit, code_of
from tidegate.errors import NoCommonPosition, UnknownCheckpoint, UnknownState
from tidegate.protocol.names import checkpoint_name
from tidegate.spark.table_diff import RowCounts, TableDiff, some_rows
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.places import as_given

pytestmark = [pytest.mark.spark, pytest.mark.slow]


# -- rows -------------------------------------------------------------------------------------------

ODD = (
    "n long, f double, s string, b binary, d decimal(10,2), ts timestamp, a array<map<string,int>>, "
    "m map<string,struct<x:int,y:array<int>>>, o struct<p:int,q:map<int,string>>, `a.b` int"
)
NAN = float("nan")


def odd(**changed: Any) -> tuple[Any, ...]:
    row = {
        "n": 1,
        "f": NAN,
        "s": "ä",
        "b": bytearray(b"\0\xff"),
        "d": Decimal("1.50"),
        "ts": None,
        "a": [{"x": 1, "y": 2}, None],
        "m": {"k": (1, [1, 2]), "l": None},
        "o": (1, {2: "z", 1: "y"}),
        "dotted": None,
    }
    return tuple({**row, **changed}.values())


def test_rows_of_any_type_are_equal_by_what_they_hold(spark: SparkSession) -> None:
    nothing: tuple[Any, ...] = (None,) * len(odd())
    same = odd(m={"l": None, "k": (1, [1, 2])}, a=[{"y": 2, "x": 1}, None], o=(1, {1: "y", 2: "z"}))
    first = spark.createDataFrame([odd(), odd(), nothing, odd(f=0.0)], ODD)
    second = spark.createDataFrame([same, same, nothing, odd(f=-0.0)], ODD)
    diff = TableDiff(first, second)
    assert diff.counts() == RowCounts(0, 0, 4)
    assert diff.only_first().count() == 0
    assert not diff.columns.types


@pytest.mark.parametrize(
    "changed",
    [
        {"n": None},
        {"f": 1.0},
        {"b": bytearray(b"\0")},
        {"a": [{"x": 1, "y": 3}, None]},
        {"a": [None, {"x": 1, "y": 2}]},
        {"m": {"k": (1, [2, 1]), "l": None}},
        {"m": {}},
        {"m": None},
        {"o": (1, {2: "z"})},
        {"o": None},
        {"dotted": 0},
    ],
)
def test_a_difference_of_any_type_is_seen(spark: SparkSession, changed: dict[str, Any]) -> None:
    first, second = (spark.createDataFrame([odd(), row], ODD) for row in (odd(), odd(**changed)))
    diff = TableDiff(first, second)
    assert diff.counts() == RowCounts(1, 1, 1)
    (row,) = some_rows(diff.only_second(), 5)
    assert row.keys() == {"n", "f", "s", "b", "d", "ts", "a", "m", "o", "a.b"}
    assert diff.only_second().schema["m"].dataType == second.schema["m"].dataType


def test_rows_count_as_often_as_they_are_there(spark: SparkSession) -> None:
    first = spark.createDataFrame([(1,), (1,), (1,), (2,)], "n int")
    second = spark.createDataFrame([(1,), (3,), (3,)], "n int")
    diff = TableDiff(first, second)
    assert diff.counts() == RowCounts(3, 2, 1)
    assert Counter(row.n for row in diff.only_first().collect()) == Counter({1: 2, 2: 1})
    assert Counter(row.n for row in diff.only_second().collect()) == Counter({3: 2})
    assert some_rows(diff.only_first(), 2) == ({"n": 1}, {"n": 1})
    assert TableDiff(first, first.limit(0)).counts() == RowCounts(4, 0, 0)


def test_columns_that_are_not_in_both_are_told_and_left_out(spark: SparkSession) -> None:
    first = spark.createDataFrame([(1, "a", 5)], "n int, gone string, kind int")
    second = spark.createDataFrame([(5, 2.0, 1)], "kind long, added double, n int")
    diff = TableDiff(first, second)
    assert (diff.columns.shared, diff.columns.only_first, diff.columns.only_second) == (("n",), ("gone",), ("added",))
    assert diff.columns.types == {"kind": ("int", "bigint")}
    assert diff.counts() == RowCounts(0, 0, 1)
    assert TableDiff(first.select("gone"), second).counts() == RowCounts(0, 0, 1)  # one row, of which nothing is shared


def test_a_variant_is_compared_by_what_it_holds(spark: SparkSession) -> None:
    first, second = (spark.sql(f"SELECT parse_json('{text}') v") for text in ('{"a":1,"b":2}', '{"b":2, "a":1}'))
    assert TableDiff(first, second).counts() == RowCounts(0, 0, 1)
    assert TableDiff(first, spark.sql("SELECT parse_json('[1]') v")).counts() == RowCounts(1, 1, 0)


# -- pipelines --------------------------------------------------------------------------------------


def pipeline(folder: Path, name: str, change: Callable[[DataFrame], DataFrame] = lambda rows: rows) -> tg.Pipeline:
    """Two tables, of which a new version may make one otherwise, and a function."""
    made = tg.Pipeline("compared")

    @made.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in")

    @made.sink(tg.DeltaTable(folder / name / "log", partition_by="key"))
    def log(rows: DataFrame) -> DataFrame:
        return rows

    @made.sink(tg.DeltaTable(folder / name / "changed"))
    def changed(rows: DataFrame) -> DataFrame:
        return change(rows)

    @made.sink(tg.ForeachBatch(lambda *_: None))
    def told(rows: DataFrame) -> DataFrame:
        return rows

    return made


def run(folder: Path, spark: SparkSession, name: str, made: tg.Pipeline, **options: Any) -> None:
    run_to_end(made, folder / f"root-{name}", spark, view=at_most(120), **options)


class Asking:
    """`tidegate compare --json` in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._capsys = capsys

    def __call__(self, exit_code: Exit = Exit.FINE, **options: Any) -> CompareAnswer:
        out = self.text(exit_code, as_json=True, **options)
        answer = answered(out)
        assert isinstance(answer, CompareAnswer)
        return answer

    def text(self, exit_code: Exit = Exit.FINE, **options: Any) -> str:
        self._capsys.readouterr()
        ended = Exit.FINE
        try:
            compare_command(as_given(self._folder / "root-a"), as_given(self._folder / "root-b"), **options)
        except typer.Exit as code:
            ended = Exit(code.exit_code)
        assert ended is exit_code
        return self._capsys.readouterr().out


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Asking:
    return Asking(tmp_path, capsys)


@pytest.mark.soak  # it takes long; others are in CI
def test_two_pipelines_are_compared_where_both_have_read_the_same(
    tmp_path: Path, spark: SparkSession, ask: Asking
) -> None:
    write_input(tmp_path / "in", 3, 10)
    run(tmp_path, spark, "a", pipeline(tmp_path, "a"), retain=20)
    run(tmp_path, spark, "b", pipeline(tmp_path, "b"))
    write_input(tmp_path / "in", 3, 10, first_file=3)
    run(tmp_path, spark, "a", pipeline(tmp_path, "a"), retain=20)  # that goes on
    answer = ask()
    assert answer.equal
    assert answer.positions == {"rows": "3 files read"}
    assert {name: (each.only_in_root, each.only_in_other, each.in_both) for name, each in answer.tables.items()} == {
        "log": (0, 0, 30),
        "changed": (0, 0, 30),
    }
    assert answer.not_compared == {"told": "function"}
    assert not answer.apart
    assert answer.other_checkpoint == checkpoint_name(InspectedRoot(tmp_path / "root-b").newest().checkpoint_id)

    # The new version, brought to where the other stands.
    other = pipeline(tmp_path, "b", lambda rows: rows.selectExpr("id", "key", "ts", "value + int(id % 30 = 7) value"))
    run(tmp_path, spark, "b", other, available_now=False, up_to=str(tmp_path / "root-a"))
    answer = ask(Exit.FAILED, limit=1)
    assert answer.positions == {"rows": "6 files read"}
    assert answer.tables["log"].equal
    found = answer.tables["changed"]
    assert (found.only_in_root, found.only_in_other, found.in_both) == (1, 1, 59)
    assert [each["value"] for each in (*found.some_only_in_root, *found.some_only_in_other)] == [37, 38]
    assert ask(table=["log"]).equal
    shown = ask.text(Exit.FAILED)
    assert "- changed: id 37, key k2, ts 2026-01-01T00:00:37.000Z, value 37" in shown
    assert "+ changed: id 37, key k2, ts 2026-01-01T00:00:37.000Z, value 38" in shown
    assert "told is not compared: it is no Delta table (function)" in shown

    found_here = tg.compare(tmp_path / "root-a", tmp_path / "root-b", spark=spark)
    assert not found_here.is_equal
    assert list(found_here) == ["log", "changed"]
    assert [row.value for row in found_here["changed"].rows_only_in_other().collect()] == [38]
    assert found_here["changed"].in_both == 59


@pytest.mark.soak
def test_what_only_one_of_them_has_is_told(tmp_path: Path, spark: SparkSession, ask: Asking) -> None:
    write_input(tmp_path / "in", 2, 10)
    run(tmp_path, spark, "a", pipeline(tmp_path, "a"))
    other = pipeline(tmp_path, "b", lambda rows: rows.selectExpr("id", "key", "double(value) value", "1 added"))

    @other.sink(tg.DeltaTable(tmp_path / "b" / "more"))
    def more(rows: DataFrame) -> DataFrame:
        return rows

    run(tmp_path, spark, "b", other)
    answer = ask(Exit.FAILED)
    found = answer.tables["changed"]
    assert (found.only_in_root, found.only_in_other, found.in_both, found.equal) == (0, 0, 20, False)
    assert (found.columns_only_in_root, found.columns_only_in_other) == (("ts",), ("added",))
    assert found.types == {"value": ColumnTypes("bigint", "double")}
    assert (answer.sinks_only_in_root, answer.sinks_only_in_other) == ((), ("more",))
    shown = ask.text(Exit.FAILED)
    assert "changed: column value is bigint in root, double in other; it is not compared" in shown
    assert "changed: only in other, and not compared: added" in shown
    assert "sinks only in other: more" in shown
    for wrong in ("more", "told", "nobody"):
        with pytest.raises(UnknownState, match=f"sink '{wrong}' is no Delta table of both .*; these are: log, changed"):
            ask(table=[wrong])


def test_without_a_common_position_it_says_where_each_stands_and_what_to_do(
    tmp_path: Path, spark: SparkSession, ask: Asking
) -> None:
    write_input(tmp_path / "in", 2, 10)
    run(tmp_path, spark, "b", pipeline(tmp_path, "b"))
    write_input(tmp_path / "in", 2, 10, first_file=2)
    run(tmp_path, spark, "a", pipeline(tmp_path, "a"), retain=1)
    with pytest.raises(NoCommonPosition) as refused:
        ask()
    said = str(refused.value)
    assert "root-a at ckpt-" in said
    assert "(rows: 4 files read)" in said
    assert "(rows: 2 files read)" in said
    assert "source 'rows' of the first is ahead of the other (4 files read; there 2 files read)" in said
    assert f"`tidegate run FILE --root {tmp_path / 'root-b'} --up-to {tmp_path / 'root-a'}`" in said
    assert code_of(refused.value) is Exit.UNUSABLE_ROOT

    # Those that are named are compared all the same, and it is told.
    one, other = (InspectedRoot(tmp_path / f"root-{name}").newest().checkpoint_id for name in "ab")
    answer = ask(Exit.FAILED, checkpoint=one, with_checkpoint=other)
    assert answer.apart == {"rows": "ahead of the other (4 files read; there 2 files read)"}
    assert (answer.tables["log"].only_in_root, answer.tables["log"].in_both) == (20, 20)
    assert "source rows is ahead of the other" in ask.text(Exit.FAILED, checkpoint=one, with_checkpoint=other)
    with pytest.raises(NoCommonPosition):
        ask(with_checkpoint=other)
    with pytest.raises(UnknownCheckpoint, match="retains no ckpt-000099"):
        ask(checkpoint=99)
