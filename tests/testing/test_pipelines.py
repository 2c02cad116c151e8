"""A user's own tests: rows in, tables out, on the session that the test has, and nothing else is touched."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import tidegate as tg
from tests.test_documents import ROOT, example
from tidegate.errors import InvalidPipeline, InvalidRows, NotConsumed, StageFailed
from tidegate.spark.jvm import java_class
from tidegate.testing import run_pipeline
from tidegate.testing.pipelines.rows import as_arrow
from tidegate.testing.pipelines.tables import Table

pytestmark = [pytest.mark.spark]

NOON = datetime(2026, 1, 1, 12)  # noqa: DTZ001 - as Spark gives it


def orders_of_the_readme() -> tg.Pipeline:
    """It reads and writes beside its file, where nothing is."""
    namespace: dict[str, Any] = {"__file__": str(Path(tempfile.gettempdir()) / "orders.py")}
    exec(compile(example(), "orders.py", "exec"), namespace)
    pipeline: tg.Pipeline = namespace["pipeline"]
    return pipeline


def order(number: int, minute: float, amount: int, country: str = "DE") -> dict[str, Any]:
    return {"id": number, "ts": NOON + timedelta(minutes=minute), "country": country, "amount": amount}


ORDERS = [order(1, 0, 100), order(2, 0.5, 200), order(3, 0.5, 99), order(4, 1, 300, "FR"), order(5, 1, 300, "FR")]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Whatever is temporary is gone in the end, also where a test goes wrong."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert [path for path in tmp_path.iterdir() if path.name.startswith("tidegate-test")] == []


# -- what runs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_pipeline_of_the_readme_runs_on_rows_and_its_windows_can_be_closed(
    spark: SparkSession, place: Path
) -> None:
    pipeline = orders_of_the_readme()
    before = dict(pipeline._stages)
    settings = dict(spark.conf.getAll)
    late = [order(6, 30, 1_000)]
    tables = run_pipeline(pipeline, [{"orders": ORDERS}, {"orders": late}], spark, close_windows=True)
    assert sorted(tables["large_orders"].tuples("id")) == [(1,), (2,), (4,), (5,), (6,)]
    assert tables.after[0]["revenue"].rows == [], "no watermark has passed the end of a window"
    first_minutes = [(NOON, "DE", 300), (NOON + timedelta(minutes=1), "FR", 600)]
    tables.after[1]["revenue"].assert_rows(first_minutes)
    tables["revenue"].assert_rows([*first_minutes, (NOON + timedelta(minutes=30), "DE", 1_000)])
    assert pipeline._stages == before
    assert dict(spark.conf.getAll) == settings
    assert not (place / "lake").exists()
    assert not (place / "orders").exists()
    assert set(tables) == {"large_orders", "revenue"}
    # Else its upkeep of state would make the folder anew within a minute.
    stores = java_class(spark, "org.apache.spark.sql.execution.streaming.state.StateStore$")
    assert not getattr(stores, "MODULE$").isMaintenanceRunning()


def joined_and_counted() -> tg.Pipeline:
    """Two sources; a join; counts by key in update mode, on top of one another."""
    pipeline = tg.Pipeline("shop")

    @pipeline.source
    def orders(spark: SparkSession) -> DataFrame:
        stream = (
            spark.readStream.format("kafka").option("kafka.bootstrap.servers", "nowhere:1").option("subscribe", "o")
        )
        return (
            stream.load()
            .select(F.from_json(F.col("value").cast("string"), "id long, ts timestamp").alias("o"))
            .select("o.*")
        )

    @pipeline.source
    def payments(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("id long, paid_at timestamp, cents long").csv("/not/there")

    @pipeline.stage
    def paid(orders: DataFrame, payments: DataFrame) -> DataFrame:
        ours, theirs = orders.withWatermark("ts", "1 hour"), payments.withWatermark("paid_at", "1 hour")
        near = F.expr("o.id = p.id AND paid_at BETWEEN ts AND ts + INTERVAL 10 MINUTES")
        return ours.alias("o").join(theirs.alias("p"), near).select("o.id", "cents")

    @pipeline.stage(output_mode="update")
    def totals(paid: DataFrame) -> DataFrame:
        return paid.groupBy((F.col("id") % 2).alias("odd")).agg(F.sum("cents").alias("cents"), F.count("*").alias("n"))

    @pipeline.sink(tg.PostgresTable("totals", "host=nowhere", key="odd"), output_mode="update")
    def total(totals: DataFrame) -> DataFrame:
        return totals

    @pipeline.sink(tg.ForeachBatch(not_called))
    def log(paid: DataFrame) -> DataFrame:
        return paid

    return pipeline


def not_called(_rows: DataFrame, _epoch: int) -> None:
    raise AssertionError("in a test, no sink is what it is in earnest")


@pytest.mark.slow
@pytest.mark.parametrize("restart", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_join_and_an_aggregation_by_key_go_on_from_batch_to_batch_whether_or_not_the_run_is_restarted(
    spark: SparkSession, *, restart: bool
) -> None:
    moments = [NOON + timedelta(minutes=each) for each in range(4)]
    orders = spark.createDataFrame([(moments[each], each) for each in range(4)], "ts timestamp, id long")
    batches: list[dict[str, Any]] = [
        {"orders": orders, "payments": [Row(id=1, paid_at=moments[2], cents=100)]},
        {"payments": [(2, moments[3], 20), (3, moments[3], 3)]},
        {"payments": []},
    ]
    tables = run_pipeline(joined_and_counted(), batches, spark, restart=restart)
    tables.after[0]["total"].assert_rows([{"odd": 1, "cents": 100, "n": 1}])
    for each in (tables.after[1], tables.after[2], tables):
        each["total"].assert_rows([{"odd": 1, "cents": 103, "n": 2}, {"odd": 0, "cents": 20, "n": 1}])
        each["log"].assert_rows([(1, 100), (2, 20), (3, 3)])


class Seen(StatefulProcessor):
    """Counts the rows of a key, over all batches, and says so when a timer of event time fires."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._seen = handle.getValueState("seen", "n long")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame] | Iterator[Row], timerValues: object
    ) -> Iterator[pd.DataFrame]:
        del timerValues
        stored = self._seen.get()
        seen: int = 0 if stored is None else stored[0]
        seen += sum(len(frame) for frame in rows)
        self._seen.update((seen,))
        self._handle.registerTimer(1_900_000_000_000)
        yield pd.DataFrame({"key": [key[0]], "n": [seen], "is_over": [False]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        del timerValues, expiredTimerInfo
        stored = self._seen.get()
        assert stored is not None
        yield pd.DataFrame({"key": [key[0]], "n": [stored[0]], "is_over": [True]})

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_state_of_a_processor_survives_restarts_timers_fire_in_the_end_and_odd_types_come_back_as_they_were(
    spark: SparkSession,
) -> None:
    pipeline = tg.Pipeline("odd")
    schema = (
        "key string, ts timestamp, money decimal(20, 4), local timestamp_ntz, day date, octets binary, real double, "
        "deep struct<tags: array<string>, at: timestamp, more: map<string, struct<n: int>>>"
    )

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema(schema).parquet("rows")

    @pipeline.stage(output_mode="append")
    def seen(rows: DataFrame) -> DataFrame:
        keyed = rows.withWatermark("ts", "1 minute").groupBy("key")
        return keyed.transformWithStateInPandas(Seen(), "key string, n long, is_over boolean", "append", "eventTime")

    @pipeline.sink(tg.Memory())
    def counts(seen: DataFrame) -> DataFrame:
        return seen

    @pipeline.sink(tg.DeltaTable("kept", partition_by="day"))
    def kept(rows: DataFrame) -> DataFrame:
        return rows

    moment = NOON + timedelta(microseconds=123_456)
    odd = {
        "key": "a",
        "ts": moment,
        "money": Decimal("-1234567890123456.7890"),
        "local": moment,
        "day": date(2026, 2, 28),
        "octets": b"\x00\xff",
        "real": float("nan"),
        "deep": {"tags": ["x", None], "at": moment, "more": {"k": {"n": 7}, "none": None}},
    }
    empty = {**dict.fromkeys(odd), "key": "a", "ts": moment}
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    aware = {**empty, "ts": noon}
    tables = run_pipeline(
        pipeline, [{"rows": [odd]}, {"rows": [empty, aware]}], spark, restart=True, close_windows=True
    )
    there = {**aware, "ts": noon.astimezone().replace(tzinfo=None)}
    tables["kept"].assert_rows([odd, empty, there])
    tables.after[0]["kept"].assert_rows([odd])
    tables["counts"].assert_rows([("a", 1, False), ("a", 3, False), ("a", 3, True)])
    tables.after[1]["counts"].assert_rows([{"n": 1}, {"n": 3}])
    assert tables["kept"].to_pandas()["money"].dropna().tolist() == [odd["money"]]
    assert tables["kept"].to_spark(spark).where("deep.more['k'].n = 7").count() == 1


@pytest.mark.slow
def test_windows_of_windows_are_closed_one_after_the_other(spark: SparkSession) -> None:
    """What comes out of the first must not be late at the second."""
    pipeline = tg.Pipeline("twice")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("ts timestamp, value long").json("rows")

    @pipeline.stage
    def minutes(rows: DataFrame) -> DataFrame:
        per_minute = rows.withWatermark("ts", "10 minutes").groupBy(F.window("ts", "1 minute"))
        return per_minute.agg(F.sum("value").alias("value")).select(F.col("window.start").alias("ts"), "value")

    @pipeline.sink(tg.DeltaTable("hours"))
    def hours(minutes: DataFrame) -> DataFrame:
        per_hour = minutes.withWatermark("ts", "10 minutes").groupBy(F.window("ts", "1 hour"))
        return per_hour.agg(F.max("value").alias("largest"), F.count("*").alias("minutes")).drop("window")

    given = [(NOON + timedelta(seconds=30 * each), each) for each in range(6)]
    tables = run_pipeline(pipeline, {"rows": given}, spark, close_windows=True)
    tables["hours"].assert_rows([{"largest": 4 + 5, "minutes": 3}])
    assert tables.after[0]["hours"].rows == []


# -- what goes wrong -------------------------------------------------------------------------------


def failing() -> tg.Pipeline:
    pipeline = tg.Pipeline("failing")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("id long, name string").json("rows")

    @pipeline.sink(tg.Memory())
    def table(rows: DataFrame) -> DataFrame:
        wrong = F.udf(lambda value: __import__("time").sleep(0.5) or 1 // value, "long")
        return rows.select(wrong("id").alias("id"))

    return pipeline


@pytest.mark.slow
def test_a_stage_that_fails_or_takes_too_long_fails_the_test_and_leaves_nothing(spark: SparkSession) -> None:
    with pytest.raises(StageFailed, match=r"ZeroDivisionError.*test_pipelines\.py, line"):
        run_pipeline(failing(), {"rows": [(0, "zero")]}, spark)
    with pytest.raises(NotConsumed, match=r"'failing' has not consumed batch 1 of its test within 0\.1 s"):
        run_pipeline(failing(), {"rows": [(1, "one")]}, spark, timeout="100ms")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"row": []}, r"rows: the pipeline has no source 'row' \(its sources are rows\)"),
        ([{"rows": []}, {"table": []}], r"batch 2: the pipeline has no source 'table'"),
        ({"rows": [{"id": 1}]}, "source 'rows', row 1 lacks the column 'name'; write None where"),
        ({"rows": [(1, "a"), {"id": 1, "nmae": ""}]}, "row 2: 'nmae' is no column of the source .*; 'name' is meant"),
        ({"rows": [(1,)]}, "row 1 has 1 values for the 2 columns id, name"),
        ({"rows": [("1", "a")]}, "row 1: column 'id' is bigint and cannot hold '1', of type str"),
        ({"rows": [(1, 2)]}, "row 1: column 'name' is string and cannot hold 2, of type int"),
        ({"rows": ["ab"]}, "row 1 is 'ab'; a row is a dict, a tuple or a Row"),
        ({"rows": {"id": 1}}, "a list of rows or a DataFrame is wanted, not {'id': 1}"),
        ([], "rows are given by the names of their sources"),
        ([[(1, "a")]], "rows are given by the names of their sources"),
    ],
)
def test_rows_that_do_not_fit_are_told_before_anything_runs(spark: SparkSession, rows: Any, says: str) -> None:
    with pytest.raises(InvalidRows, match=says):
        run_pipeline(failing(), rows, spark)


def test_a_dataframe_that_does_not_fit_is_told_by_the_column(spark: SparkSession) -> None:
    schema = spark.createDataFrame([], "id long, name string").schema
    frames = {
        "lacks the column 'name'": spark.range(1),
        "has 'more', which is no column": spark.range(1).selectExpr("id", "'' AS name", "1 AS more"),
        "column 'id' of the DataFrame is int, but of the source it is bigint": spark.sql("SELECT 1 AS id, '' AS name"),
    }
    for says, frame in frames.items():
        with pytest.raises(InvalidRows, match=says):
            as_arrow("source 'rows'", frame, schema)
    assert as_arrow("source 'rows'", spark.createDataFrame([], schema), schema) is None


def test_a_source_that_cannot_be_called_in_a_test_is_told_with_what_to_do(spark: SparkSession) -> None:
    pipeline = tg.Pipeline("secret")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:  # noqa: ARG001
        raise KeyError("PASSWORD")

    @pipeline.sink(tg.Memory())
    def table(rows: DataFrame) -> DataFrame:
        return rows

    with pytest.raises(
        InvalidPipeline, match=r"source 'rows' failed .*KeyError.*say them with schemas=\{'rows': '…'\}"
    ):
        run_pipeline(pipeline, {"rows": []}, spark)
    with pytest.raises(InvalidRows, match="row 1: column 'id' is bigint and cannot hold 'a'"):
        run_pipeline(pipeline, {"rows": [("a",)]}, spark, schemas={"rows": "id long"})
    with pytest.raises(InvalidRows, match="schemas: the pipeline has no source 'row'"):
        run_pipeline(pipeline, {"rows": []}, spark, schemas={"row": "id long"})


def test_what_a_table_lacks_and_has_too_much_is_told_in_the_failure(spark: SparkSession) -> None:
    schema = spark.createDataFrame([], "id long, real double").schema
    table = Table("kept", schema, [{"id": 1, "real": float("nan")}, {"id": 1, "real": float("nan")}])
    table.assert_rows([(1, float("nan")), (1, float("nan"))])
    table.assert_rows([{"id": 1}, {"id": 1}])
    wrong: dict[str, Callable[[], None]] = {
        r"'kept' has other rows (id): missing: (2,); not expected: (1,)": lambda: table.assert_rows(
            [{"id": 1}, {"id": 2}]
        ),
        r"not expected: (1, nan) 2 times": lambda: table.assert_rows([]),
        r"do not all have ('id',)": lambda: table.assert_rows([{"id": 1}, {"id": 1, "real": 2.0}]),
        r"has the columns id, real, not so many": lambda: table.assert_rows([(1,)]),
    }
    for says, fails in wrong.items():
        with pytest.raises(AssertionError, match=re.escape(says)):
            fails()
    with pytest.raises(KeyError, match="'kept' has no column 'idd'"):
        table.tuples("idd")


# -- the guide -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tests_of_the_guide_pass(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as pytest would run it, with the pipeline of the README beside it."""
    guide = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    shown: list[str] = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    module: Any = type(re)("orders")
    module.pipeline = orders_of_the_readme()
    monkeypatch.setitem(__import__("sys").modules, "orders", module)
    namespace: dict[str, Any] = {"__name__": "test_orders"}
    for each in shown:
        exec(compile(each, "testing.md", "exec"), namespace)
    tests = {name: value for name, value in namespace.items() if name.startswith("test_")}
    assert len(tests) >= 3
    for test in tests.values():
        test(spark)
