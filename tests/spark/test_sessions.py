"""The user's session: used where it is given, seen by the stages, and left exactly as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.spark.harness import START, at_most, oracle, run_to_end, stream, table_rows, write_input
from tidegate.engine.run import run_pipeline
from tidegate.engine.status import RunStatus
from tidegate.errors import InvalidConfig, InvalidPipeline
from tidegate.sinks.sessions import derived_session
from tidegate.spark.session import StageSessions, own_session
from tidegate.spark.spark_log import rotate

pytestmark = [pytest.mark.matrix, pytest.mark.spark, pytest.mark.slow]


def settings_of(spark: SparkSession) -> dict[str, object]:
    """Everything of a session that a run could change."""
    return {
        "context": sorted(spark.sparkContext.getConf().getAll()),
        "session": dict(spark.conf.getAll),
        "effective": {row["key"]: row["value"] for row in spark.sql("SET -v").collect()},
        "queries": [query.name for query in spark.streams.active],
        "active": SparkSession.getActiveSession(),
    }


def session_with(spark: SparkSession, **settings: str) -> SparkSession:
    """A user's session with settings of its own. In their names `__` stands for a dot."""
    session = spark.newSession()
    for name, value in settings.items():
        session.conf.set(f"spark.sql.{name.replace('__', '.')}", value)
    return session


def shop(folder: Path) -> tg.Pipeline:
    """Uses a view and a function of the user's, in every kind of stage."""
    pipeline = tg.Pipeline("shop")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in").join(spark.table("names"), "key")

    @pipeline.stage
    def shouted(rows: DataFrame) -> DataFrame:
        return rows.withColumn("name", F.expr("shout(name)"))

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "named"))
    def named(spark: SparkSession, shouted: DataFrame) -> DataFrame:
        return shouted.join(spark.table("names").withColumnRenamed("name", "plain"), "key").select(
            "id", "name", "plain"
        )

    # Which makes frames, of what it has staged and of what it has shown.
    @pipeline.sink(
        tg.DeltaTable(folder / "lake" / "newest", key=["key", "name"], newest_by="id", partition_by=["name"])
    )
    def newest(shouted: DataFrame) -> DataFrame:
        return shouted.select("key", "name", "id")

    return pipeline


def test_a_run_sees_the_users_views_and_functions_and_changes_nothing_of_the_session(
    tmp_path: Path, spark: SparkSession
) -> None:
    write_input(tmp_path / "in", 4, 10)
    # Settings of the user's that a run has other ideas about.
    unlike = {
        "shuffle__partitions": "3",
        "streaming__pollingDelay": "7ms",
        "streaming__stateStore__checkpointFormatVersion": "1",
        "streaming__fileSink__log__compactInterval": "5",
    }
    session = session_with(spark, **unlike)
    names = [(f"k{each}", f"name {each}") for each in range(5)]
    session.createDataFrame(names, "key string, name string").createOrReplaceTempView("names")
    session.udf.register("shout", lambda name: name.upper() + "!")
    before = settings_of(session)
    run_to_end(shop(tmp_path), tmp_path / "root", session)
    assert settings_of(session) == before
    assert session.conf.get("spark.sql.shuffle.partitions") == "3"
    expected = {(each, f"NAME {each % 5}!", f"name {each % 5}"): 1 for each in range(40)}
    assert table_rows(tmp_path / "lake" / "named", ["id", "name", "plain"]) == expected


def test_a_run_that_is_refused_changes_nothing_of_the_session_either(tmp_path: Path, spark: SparkSession) -> None:
    (tmp_path / "in").mkdir()
    session = session_with(spark)
    before = settings_of(session)
    with pytest.raises(InvalidPipeline, match=r"source 'rows'.*TABLE_OR_VIEW_NOT_FOUND"):
        run_to_end(shop(tmp_path), tmp_path / "root", session)
    assert settings_of(session) == before


def test_sessions_of_stages_keep_what_the_user_has_set(spark: SparkSession) -> None:
    session = session_with(spark, shuffle__partitions="3", session__timeZone="Asia/Tokyo", ansi__enabled="false")
    sessions = StageSessions(session)
    for derived in (sessions.of_sources, sessions.of_stages):
        assert derived.conf.get("spark.sql.shuffle.partitions") == "3"
        assert derived.conf.get("spark.sql.session.timeZone") == "Asia/Tokyo"
        assert derived.conf.get("spark.sql.ansi.enabled") == "false"
        assert derived.sparkContext is session.sparkContext


def test_a_users_own_file_source_keeps_its_log_as_spark_keeps_it(spark: SparkSession) -> None:
    setting = "spark.sql.streaming.fileSource.log.compactInterval"
    sessions = StageSessions(spark)
    assert sessions.of_sources.conf.get(setting) == spark.conf.get(setting)
    assert sessions.of_stages.conf.get(setting) != spark.conf.get(setting)


def test_a_session_that_the_user_has_but_did_not_give_is_not_changed(tmp_path: Path, spark: SparkSession) -> None:
    before = settings_of(spark)
    found = own_session("another name", tmp_path / "spark.log")
    assert found.sparkContext is spark.sparkContext
    assert settings_of(spark) == before


def in_a_thread(action: Callable[[], object]) -> None:
    """What it raises is raised here."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(action).result(timeout=120)


def test_a_session_that_the_user_has_is_seen_from_any_thread_and_not_changed(
    tmp_path: Path, spark: SparkSession
) -> None:
    spark.conf.set("spark.sql.shuffle.partitions", "7")
    before = settings_of(spark)
    found: list[SparkSession] = []
    in_a_thread(lambda: found.append(own_session("another name", tmp_path / "spark.log")))
    try:
        assert found[0]._jsparkSession.equals(spark._jsparkSession)
        assert settings_of(spark) == before
        assert spark.conf.get("spark.sql.shuffle.partitions") == "7"
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", str(os.cpu_count()))


def test_settings_that_come_too_late_are_refused_in_any_thread(tmp_path: Path, spark: SparkSession) -> None:
    assert spark.sparkContext is not None
    with pytest.raises(InvalidConfig, match="a Spark session already"):
        in_a_thread(lambda: shop(tmp_path).run(tmp_path / "root", conf={"spark.driver.memory": "4g"}))


def test_a_run_in_a_thread_is_stopped_by_its_event_after_a_last_checkpoint(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "in", 2, 10)
    memory = tg.Memory()
    pipeline = tg.Pipeline("threaded")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.sink(memory)
    def table(rows: DataFrame) -> DataFrame:
        return rows.select("id")

    stop = threading.Event()

    def stop_when_rows_are_through(status: RunStatus) -> None:
        if status.stages["table"].rows == 20:
            stop.set()

    def run() -> None:
        run_pipeline(
            pipeline, tmp_path / "root", spark, stop_when_rows_are_through, stop, checkpoint_interval="1h", restarts=0
        )

    in_a_thread(run)
    assert len(memory.rows) == 20  # only a checkpoint shows them, and none was due
    assert "it was told to stop" in (tmp_path / "root" / "status.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(("given", "used"), [("200", "200"), ("3", "3"), (None, "cores")])
def test_a_number_of_shuffle_partitions_that_the_user_has_set_is_kept_whatever_it_is(
    spark: SparkSession, given: str | None, used: str
) -> None:
    session = spark.newSession()
    if given is None:
        session.conf.unset("spark.sql.shuffle.partitions")
    else:
        session.conf.set("spark.sql.shuffle.partitions", given)
    before = dict(session.conf.getAll)
    wanted = str(spark.sparkContext.defaultParallelism) if used == "cores" else used
    sessions = StageSessions(session)
    for derived in (sessions.of_sources, sessions.of_stages, derived_session(session)):
        assert derived.conf.get("spark.sql.shuffle.partitions") == wanted
    assert dict(session.conf.getAll) == before


TALKATIVE = """
import pathlib, sys, time
import tidegate.spark.session as s
from tidegate.spark import spark_log
spark_log.rotate.__defaults__ = (20_000,)
spark_log._LOOK_EVERY_S = 0.05
log = pathlib.Path(sys.argv[1])
spark = s.own_session("odd", log)
print("rows:", spark.range(3).count())
for number in range(10):  # past Spark's own log, as Python functions do
    for _ in range(5):
        spark._jvm.java.lang.System.err.println(f"{number} " * 4000)
    deadline = time.monotonic() + 30
    while log.stat().st_size > 20_000 and time.monotonic() < deadline:
        time.sleep(0.01)
spark._jvm.org.slf4j.LoggerFactory.getLogger("a.b.last").warn("words")
"""


def test_a_session_of_our_own_starts_whatever_letters_the_root_has_and_its_log_stays_short(tmp_path: Path) -> None:
    log = tmp_path / "größe 50% a+b it's" / "root" / "spark.log"
    environment = {**os.environ, "PYTHONPATH": str(Path(own_session.__code__.co_filename).parents[2])}
    command = [sys.executable, "-c", TALKATIVE, str(log)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "rows: 3" in ended.stdout, ended.stderr[-2000:]
    assert " WARN last: words" in log.read_text()
    found = sorted(log.parent.glob("spark.log*"))
    assert [path.name for path in found] == ["spark.log", "spark.log.1", "spark.log.2"]
    assert log.stat().st_size < 20_000
    assert "9 9 " in found[1].read_text(), "the newest; what was left of the one before may stand before it"
    assert found[2].stat().st_size > 20_000


def test_who_appends_to_the_log_goes_on_in_it_when_it_was_emptied(tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    with log.open("ab", buffering=0) as file:
        for number in range(5):
            file.write(b"%d" % number * 10)
            rotate(log, longest=10)  # which it is not longer than
            file.write(b"!")
            rotate(log, longest=10)
            assert log.read_bytes() == b""
        file.write(b"last")
    assert log.read_bytes() == b"last"
    assert (tmp_path / "spark.log.1").read_bytes() == b"4" * 10 + b"!"
    assert (tmp_path / "spark.log.2").read_bytes() == b"3" * 10 + b"!"
    assert len(list(tmp_path.iterdir())) == 3


def test_in_any_time_zone_and_with_odd_partitions_a_table_holds_what_a_batch_job_would_write(
    tmp_path: Path, spark: SparkSession
) -> None:
    write_input(tmp_path / "in", 2, 12)
    pipeline = tg.Pipeline("zones")
    names = ["a/b", "ü", "=", "%", "a b", "a:b", "日本", "a+b", "'", "#"]

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "days", partition_by=["day", "odd name"]))
    def days(rows: DataFrame) -> DataFrame:
        # An index past the end is null.
        odd = F.get(F.array(*(F.lit(name) for name in names)), (F.col("id") % (len(names) + 1)).cast("int"))
        shifted = F.col("ts") + F.expr("make_dt_interval(0, CAST(id AS INT))")
        return rows.select("id", shifted.alias("ts"), F.to_date(shifted).alias("day"), odd.alias("odd name"))

    session = session_with(spark, session__timeZone="America/New_York")
    run_to_end(pipeline, tmp_path / "root", session)
    expected = oracle(pipeline, session)["days"]
    shown = table_rows(tmp_path / "lake" / "days", ["id", "ts", "day", "odd name"])
    assert shown == expected
    assert {moment for _, moment, _, _ in shown} == {START + timedelta(seconds=each, hours=each) for each in range(24)}


def test_settings_of_the_user_that_would_blind_a_stage_do_not_reach_it(tmp_path: Path, spark: SparkSession) -> None:
    write_input(tmp_path / "in", 2, 12)
    pipeline = tg.Pipeline("blind")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "table"))
    def table(rows: DataFrame) -> DataFrame:
        return rows.select("id")

    session = session_with(
        spark,
        streaming__fileStreamSink__ignoreMetadata="true",
        files__ignoreMissingFiles="true",
        streaming__offsetLog__formatVersion="2",
    )
    run_to_end(pipeline, tmp_path / "root", session, view=at_most(60))
    assert len(table_rows(tmp_path / "lake" / "table", ["id"])) == 24
    assert session.conf.get("spark.sql.streaming.fileStreamSink.ignoreMetadata") == "true"


def test_a_table_is_not_partitioned_by_a_moment(tmp_path: Path, spark: SparkSession) -> None:
    """Spark names the folder in the session's time zone, and a Delta table is read in UTC."""
    (tmp_path / "in").mkdir()
    pipeline = tg.Pipeline("moments")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "table", partition_by=["ts"]))
    def table(rows: DataFrame) -> DataFrame:
        return rows

    session = session_with(spark, session__timeZone="America/New_York")
    with pytest.raises(InvalidPipeline, match=r"moments/table.*'ts'"):
        run_to_end(pipeline, tmp_path / "root", session)
    assert not (tmp_path / "lake").exists()


def test_settings_reach_the_session_that_a_run_makes_for_itself(tmp_path: Path) -> None:
    program = "import sys, pathlib, tidegate.spark.session as s; "
    program += "made = s.own_session('odd', pathlib.Path(sys.argv[1]), {'spark.sql.shuffle.partitions': '3', "
    program += "'spark.master': 'local[1]'}); "
    program += "print('set:', made.conf.get('spark.sql.shuffle.partitions'), made.sparkContext.master)"
    command = [sys.executable, "-c", program, str(tmp_path / "spark.log")]
    environment = {**os.environ, "PYTHONPATH": str(Path(own_session.__code__.co_filename).parents[2])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "set: 3 local[1]" in ended.stdout, ended.stderr[-2000:]


@pytest.mark.parametrize("given", [True, False])
def test_settings_that_come_too_late_are_refused(tmp_path: Path, spark: SparkSession, given: bool) -> None:
    with pytest.raises(InvalidConfig, match=r"a Spark session already: spark\.driver\.memory cannot be set"):
        shop(tmp_path).run(tmp_path / "root", spark if given else None, conf={"spark.driver.memory": "4g"})
    assert not (tmp_path / "root").exists()
