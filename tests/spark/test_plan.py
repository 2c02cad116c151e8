"""What a stage keeps as state, read from real plans; and pipelines that were changed while they had state."""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import tidegate as tg
from tests.spark.harness import run_to_end, stream, table_rows, write_rows
from tidegate.engine.status import RunStatus
from tidegate.errors import PipelineChanged
from tidegate.sinks.sessions import PARTITIONS
from tidegate.spark.plan import states_of
from tidegate.spark.state import _Comparison
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder
from tidegate.storage.manifest import StageState

pytestmark = [pytest.mark.matrix, pytest.mark.spark, pytest.mark.slow]

Made = Callable[[DataFrame, DataFrame], DataFrame]


class Totals(StatefulProcessor):
    """Asks for one variable of each kind."""

    def __init__(self, of_type: str = "n long", ttl_ms: int | None = 1000) -> None:
        self._type = of_type
        self._ttl_ms = ttl_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", self._type)
        self._seen = handle.getListState("seen", "id long", self._ttl_ms)
        self._by = handle.getMapState("by", "day string", "n long")

    def handleInputRows(self, key: Any, rows: Any, _timers: Any) -> Iterator[Row]:
        yield Row(id=len(list(rows)), key=key)

    def close(self) -> None:
        pass


class Unwilling(Totals):
    def init(self, handle: StatefulProcessorHandle) -> None:
        raise RuntimeError(f"only in a worker, not with {handle}")


class Leaving(Totals):
    def init(self, handle: StatefulProcessorHandle) -> None:
        sys.exit(f"no file of a worker's, not with {handle}")


def late(frame: DataFrame, delay: str = "5 minutes") -> DataFrame:
    return frame.withWatermark("ts", delay)


def windowed(length: str, *more: str, then: str = "start") -> Made:
    def made(a: DataFrame, _b: DataFrame) -> DataFrame:
        renamed = late(a).withColumnRenamed("country", "land").where("tax > 0")
        counted = renamed.groupBy(F.window("ts", length, *more), F.lower("land").alias("c"))
        return counted.agg(F.sum("amount").alias("s"), F.max("tax").alias("m"), F.avg("tax")).select(
            f"window.{then}", "c", "s", "m"
        )

    return made


def joined(how: str = "inner", stored: str = "a.amount", hours: int = 1) -> Made:
    on = f"a.id = b.order and b.ts between a.ts and a.ts + interval {hours} hours"

    def made(a: DataFrame, b: DataFrame) -> DataFrame:
        return late(a).alias("a").join(late(b, "3 minutes").alias("b"), F.expr(on), how).select("a.id", stored)

    return made


def transformed(processor: StatefulProcessor) -> Made:
    return lambda a, _b: a.groupBy("country").transformWithState(processor, "id long", "Append", "ProcessingTime")


def summed(*columns: str) -> Made:
    return lambda a, _b: (
        a.groupBy("country").agg(F.sum("amount").alias("s"), F.max("amount").alias("m")).select(*columns)
    )


def described(tmp_path: Path, spark: SparkSession, made: dict[str, Made]) -> dict[str, StageState]:
    orders, paid = tmp_path / "gates" / "orders", tmp_path / "gates" / "paid"
    for gate in (orders, paid):
        gate.mkdir(parents=True, exist_ok=True)
    a = spark.readStream.schema("id long, ts timestamp, country string, amount long, tax long").parquet(str(orders))
    b = spark.readStream.schema("order long, ts timestamp, amount long").parquet(str(paid))
    with states_of({name: each(a, b) for name, each in made.items()}) as asked:
        found = {name: asked(name) for name in made}
    assert None not in found.values()
    return {name: each for name, each in found.items() if each is not None}


def all_states(tmp_path: Path, spark: SparkSession) -> dict[str, StageState]:
    upper = F.udf(lambda text: text.upper(), "string")
    made: dict[str, Made] = {
        "window": windowed("1 minute"),
        "longer": windowed("5 minutes"),
        "sliding": windowed("10 minutes", "5 minutes"),
        "session": lambda a, _b: late(a).groupBy(F.session_window("ts", "10 minutes"), "country").count(),
        "start": lambda a, _b: late(a).groupBy(F.window("ts", "1 minute").start.alias("s")).count(),
        "days": lambda a, _b: a.groupBy(F.to_date("ts"), upper("country")).agg(F.collect_list("id"), F.stddev("tax")),
        "dedup": lambda a, _b: a.dropDuplicates(["country", "id"]),
        "other order": lambda a, _b: a.dropDuplicates(["id", "country"]),
        "within": lambda a, _b: late(a).dropDuplicatesWithinWatermark(["id"]),
        "distinct": lambda a, _b: a.select("country").distinct(),
        "join": joined(),
        "outer join": joined("leftOuter"),
        "join of other columns": joined(stored="a.tax"),
        "join for longer": joined(hours=2),
        "aggregated join": lambda a, b: joined()(a, b).groupBy("id").agg(F.sum("amount")),
        "variables": transformed(Totals()),
        "other variables": transformed(Totals("n string", None)),
        "unwilling": transformed(Unwilling()),
        "leaving": transformed(Leaving()),
        "pandas": lambda a, _b: a.groupBy("country").applyInPandasWithState(
            lambda _key, rows, _state: rows, "id long", "n long", "append", GroupStateTimeout.NoTimeout
        ),
        "limit": lambda a, _b: a.limit(5),
        "with a table": lambda a, _b: a.join(a.sparkSession.createDataFrame([(1, "x")], "id long, n string"), "id"),
        "stateless": lambda a, _b: a.where("amount > 3").select("id"),
        "sums": summed("country", "s", "m"),
        "sums in another order": summed("country", "m", "s"),
        "sums as they are": lambda a, b: summed("*")(a, b).where("s > 3"),
        "other expression": lambda a, _b: a.groupBy("country").agg(F.sum(F.coalesce("amount", F.lit(0)))),
        "unsteady": lambda a, _b: a.groupBy(
            F.floor(F.rand() * 4),
            F.datediff(F.current_date(), "ts"),
            F.transform(F.split("country", ","), F.upper),
        ).agg(F.sum(F.when(F.col("ts") < F.current_timestamp(), 1))),
        "counted where": lambda a, _b: a.groupBy("country").agg(F.expr("count(*) filter (where tax > 3)")),
    }  # fmt: skip
    return described(tmp_path, spark, made)


def test_every_operator_is_described_by_what_it_keeps(tmp_path: Path, spark: SparkSession) -> None:
    states = all_states(tmp_path, spark)
    assert all_states(tmp_path, spark) == states  # no numbers of expressions, nothing of the order they were made in

    def keys(name: str) -> list[tuple[str, str, str]]:
        return [(each.name, each.type, each.detail) for each in states[name].operators[0].keys]

    def values(name: str, operator: int = 0) -> list[tuple[str, str, str]]:
        return [(each.name, each.type, each.detail) for each in states[name].operators[operator].values or ()]

    window = "struct<start:timestamp,end:timestamp>"
    assert keys("window") == [("window(ts)", window, "1 minute"), ("lower(country)", "string", "")]
    assert values("window") == [("sum(amount)", "bigint", ""), ("max(tax)", "bigint", "")]  # nobody reads the average
    assert keys("longer")[0] == ("window(ts)", window, "5 minutes")
    assert keys("sliding")[0] == ("window(ts)", window, "10 minutes every 5 minutes")
    assert keys("session")[0] == ("session_window(ts)", window, "10 minutes")
    assert keys("start") == [("window(ts).start", "timestamp", "every 1 minute")]
    assert [(each.column, each.delay) for each in states["window"].watermarks] == [("ts", "5 minutes")]
    assert keys("days") == [("cast(ts as date)", "date", ""), ("<lambda>(country)", "string", "")]
    assert values("days")[0][:2] == ("collect_list(id)", "array<bigint>")
    assert values("days")[1][:2] == ("stddev_samp(tax)", "3 times double")
    assert (states["days"].time_zone, states["window"].time_zone) == ("UTC", None)
    assert keys("dedup") == [("country", "string", ""), ("id", "bigint", "")]
    assert keys("other order") == [*reversed(keys("dedup"))]
    assert keys("within") == [("id", "bigint", "")]
    assert keys("distinct") == [("country", "string", "")]
    assert values("join") == [
        ("left orders.id", "bigint", ""),
        ("left orders.ts", "timestamp", ""),
        ("left orders.amount", "bigint", ""),
        ("right paid.order", "bigint", ""),
        ("right paid.ts", "timestamp", ""),
    ]
    join = states["join"].operators[0]
    assert join.settings == {"type": "Inner", "on": "orders.id = paid.order"}
    assert states["outer join"].operators[0].settings["type"] == "LeftOuter"
    assert values("join of other columns")[2] == ("left orders.tax", "bigint", "")
    assert states["join for longer"].operators[0].details != join.details
    assert [each.kind for each in states["aggregated join"].operators] == ["aggregation", "join"]
    assert keys("variables") == [("country", "string", "")]
    assert values("variables") == [
        ("by", "map of day:string to n:bigint", ""),
        ("seen", "list of id:bigint, with a time to live", "1000 ms"),
        ("total", "value of n:bigint", ""),
    ]
    assert values("other variables")[1:] == [("seen", "list of id:bigint", ""), ("total", "value of n:string", "")]
    assert states["variables"].operators[0].settings == {"time mode": "ProcessingTime", "output mode": "Append"}
    assert states["unwilling"].operators[0].values is states["leaving"].operators[0].values is None
    assert (keys("pandas"), values("pandas")) == ([("country", "string", "")], [("n", "bigint", "")])
    assert [each.kind for each in states["limit"].operators] == ["limit"]
    assert states["with a table"].operators == states["stateless"].operators == ()
    assert values("sums") == [("sum(amount)", "bigint", ""), ("max(amount)", "bigint", "")]
    assert values("sums in another order") == [*reversed(values("sums"))]  # so does Spark store them
    assert states["sums as they are"] == states["sums"]
    assert values("other expression") == [("sum(amount)", "bigint", "sum(coalesce(amount, 0))")]
    assert [name for name, _, _ in keys("unsteady")] == [
        "floor((rand() * 4.0))",
        "date_diff(…, cast(ts as date))",
        "array_transform(string_split(country, ',', -1), lambda_function(upper(x), x))",
    ]
    assert values("counted where") == [("count(*)", "bigint", "count(*) where (tax > 3)")]


def test_what_differs_from_start_to_start_is_no_other_state(tmp_path: Path, spark: SparkSession) -> None:
    def run_id() -> Column:
        return F.lit(str(uuid.uuid4()))

    made: dict[str, Made] = {
        "age": lambda a, _b: a.groupBy(
            F.year(F.current_date()) - F.col("amount"), F.floor((F.unix_timestamp() - F.unix_timestamp("ts")) / 3600)
        ).agg(F.sum(F.unix_timestamp() - F.col("tax"))),
        "bytes": lambda a, _b: a.groupBy(F.concat(F.encode("country", "utf-8"), F.lit(b"x"))).agg(F.max(F.lit(b"y"))),
        "as json": lambda a, _b: a.groupBy(F.to_json(F.struct("country", "tax"))).count(),
        "named run": lambda a, b: joined(stored="a.run")(a.withColumn("run", run_id()), b),
        "named by run": lambda a, b: joined(stored="a.run")(a.withColumn("run", F.concat(run_id(), "country")), b),
        "once per run": lambda a, _b: a.withColumn("run", run_id()).dropDuplicates(["run", "id"]),
    }
    then, now = (described(tmp_path, spark, made) for _ in range(2))
    told = [change for name, each in then.items() for change in _Comparison(name, "before").changes(each, now[name])]
    concat, once = "concat(…, orders.country)", "stage 'once per run': its deduplication has the constant … in its key"
    assert [re.sub(r"'[0-9a-f-]{36}'", "…", each) for each in told] == [
        f"stage 'named by run': {concat} was {concat} at before: rows that are stored keep what they have",
        f"{once}, was … at before: no row finds what is stored with the old one",
    ]
    of_time, of_join = then["age"].operators[0], then["named run"].operators[0]
    assert [each.name for each in of_time.keys] == [
        "(… - amount)",
        "floor((cast((… - unix_timestamp(ts, 'yyyy-MM-dd HH:mm:ss')) as double) / 3600.0))",
    ]
    assert [each.detail for each in of_time.values or ()] == ["sum((… - tax))"]
    assert [each.name for each in of_join.values or ()][2] == "left a constant"
    assert then["as json"].time_zone == "UTC"
    assert "UTC" not in then["as json"].operators[0].keys[0].name  # so another zone is told, not refused


def test_a_plan_that_cannot_be_read_is_told_and_keeps_nobody_from_running(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    class NoFrame:
        sparkSession = spark  # noqa: N815 - Spark's

    broken: Any = NoFrame()
    with states_of({"odd": broken}) as asked:
        assert asked("odd") is None
    assert "stage 'odd': what it keeps as state cannot be read from its plan (AttributeError" in caplog.text


# -- real runs ------------------------------------------------------------------------------------


def counted(folder: Path, change: str = "") -> tg.Pipeline:
    """Rows per window, and the highest value of each key."""
    pipeline = tg.Pipeline("counted")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in", files_per_batch=100)

    @pipeline.stage
    def windows(rows: DataFrame) -> DataFrame:
        length = "30 seconds" if change == "window" else "10 seconds"
        on_time = late(rows, "20 seconds" if change == "window" else "10 seconds")
        grouped = on_time.groupBy(F.window("ts", length), *(["key"] if change == "key" else []))
        return grouped.agg(F.count("*").alias("n")).select("window.start", "window.end", "n")

    @pipeline.stage(output_mode="update")
    def highest(rows: DataFrame) -> DataFrame:
        function = F.min if change == "function" else F.max
        return rows.groupBy("key").agg(function("value").alias("value"))

    @pipeline.sink(tg.DeltaTable(folder / "windows"))
    def window_table(windows: DataFrame) -> DataFrame:
        return windows

    @pipeline.sink(tg.DeltaTable(folder / "highest"))
    def highest_table(highest: DataFrame) -> DataFrame:
        return highest

    return pipeline


def test_changed_state_is_refused_before_anything_changes_and_changed_windows_are_told(
    tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    write_rows(tmp_path / "in", 0, range(40), key_count=2)
    of_a_larger_machine, here = spark.newSession(), spark.newSession()
    for session in (of_a_larger_machine, here):
        session.conf.set("spark.sql.session.timeZone", "UTC")
    of_a_larger_machine.conf.set(PARTITIONS, "3")
    here.conf.unset(PARTITIONS)
    run_to_end(counted(tmp_path), root, of_a_larger_machine)
    said = ("lock", "status.json", "status.reserve")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file() and path.name not in said}
    decided = list(StoredDecisions(Folder(root)).read())
    refused = {
        "key": "stage 'windows' cannot go on with its state of .*: its aggregation has key key: string in addition. "
        r"Then: aggregation by window\(ts\) of 10 seconds storing count\(\*\): bigint. Now: aggregation by "
        r"window\(ts\) of 10 seconds, key: string storing count\(\*\): bigint. What to do: ",
        "function": r"stage 'highest' .* aggregate min\(value\): bigint in the place of max\(value\): bigint",
    }
    for change, words in refused.items():
        with pytest.raises(PipelineChanged, match=words):
            run_to_end(counted(tmp_path, change), root, spark)
    assert list(StoredDecisions(Folder(root)).read()) == decided
    assert {path: path.stat().st_mtime_ns for path in before} == before

    write_rows(tmp_path / "in", 1, range(40, 130), key_count=2)
    derived = spark.newSession()
    derived.conf.set("spark.sql.session.timeZone", "UTC")
    derived.conf.set("spark.sql.shuffle.partitions", "7")
    with pytest.raises(
        PipelineChanged, match=r"stages 'windows', 'highest' cannot go on .* Then: 3\. Now: 7\. What to"
    ):
        run_to_end(counted(tmp_path, "window"), root, derived)
    derived.conf.set("spark.sql.shuffle.partitions", "3")
    shown: list[RunStatus] = []
    caplog.clear()
    run_to_end(counted(tmp_path, "window"), root, derived, view=shown.append)
    told = [
        "stage 'windows': window(ts) is 30 seconds, was 10 seconds at ckpt-",
        "stage 'windows': rows may be 20 seconds late by ts, were 10 seconds at ckpt-",
    ]
    assert [each for each, words in zip(shown[-1].changes, told, strict=True) if not each.startswith(words)] == []
    assert all(each in caplog.text for each in shown[-1].changes)
    counts = table_rows(tmp_path / "windows", ["start", "end", "n"])
    found = sorted((start.minute * 60 + start.second, (end - start).seconds, n) for start, end, n in counts)
    # Those that were open are written as they are; the first new one lacks what was counted in them.
    assert found == [(0, 10, 10), (10, 10, 10), (20, 10, 10), (30, 10, 10), (30, 30, 20), (60, 30, 30)]

    caplog.clear()
    run_to_end(counted(tmp_path, "window"), root, here, view=shown.append)
    assert shown[-1].changes == ()  # since the last checkpoint nothing has, and here nobody has set partitions
    assert "window(ts)" not in caplog.text
