"""A PostgreSQL table as a sink, against a real server: types, names, credentials, and a server that goes away."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

import tidegate as tg
from tests.postgres_server import Link, PostgresServer
from tests.spark.harness import oracle, run_to_end, stream, table_rows, write_input
from tidegate.errors import (
    CheckpointsFailed,
    ConflictingRows,
    ForeignTable,
    InvalidConfig,
    InvalidPipeline,
    RecoveryRefused,
    SinkFailed,
    StageFailed,
)
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace, StagedBatch
from tidegate.sinks.postgres.bound import BoundPostgresTable
from tidegate.sinks.postgres.connection import scrubbed
from tidegate.sinks.postgres.copying import copier
from tidegate.storage.memory import Memory
from tidegate.testing.sinks import SinkRun, columns, permit

pyarrow: Any = importlib.import_module("pyarrow")

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

SECRET = "very-secret"


@pytest.fixture
def server(postgres_server: PostgresServer) -> PostgresServer:
    """The server with nothing in it."""
    with psycopg.connect(postgres_server.dsn) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return postgres_server


def rows_of(server: PostgresServer, query: str) -> Counter[tuple[Any, ...]]:
    with psycopg.connect(server.dsn) as connection:
        return Counter(connection.execute(query.encode()).fetchall())


def place(session: SparkSession | None = None, root: str = "") -> SinkPlace:
    return SinkPlace("shop", "orders", Memory(), session, root)


def bound(name: str, dsn: str, session: SparkSession | None = None, **options: Any) -> BoundPostgresTable:
    return tg.PostgresTable(name, dsn, **options).bind(place(session))


# -- the table ----------------------------------------------------------------------------------------


@pytest.mark.spark
def test_every_type_arrives_as_it_is(server: PostgresServer, spark: SparkSession) -> None:
    names = "b boolean, y byte, s short, i int, l long, f float, d double, t string, n decimal(20,4), x binary,"
    schema = (
        names + " day date, at timestamp, local timestamp_ntz, tags array<string>, `more``s.` struct<a:int,b:string>"
    )
    moment = datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=UTC)
    full = (True, 1, 2, 3, 2**62, 0.5, 1e300, 'a "b", c\n\\N', Decimal("-1.5000"), b"\x00\xff", date(2026, 1, 2))
    rows = [
        (*full, moment, moment.replace(tzinfo=None), ["x", "y"], (1, None)),
        tuple([None] * 15),
        (False, 0, 0, 0, 0, float("nan"), float("-inf"), "", Decimal(0), b"", date(1, 1, 1), None, None, [], None),
    ]
    frame = spark.createDataFrame(rows, schema)
    sink = bound("all_types", server.dsn, spark)
    sink.check_table(frame.schema, "append")
    sink.prepare_table(frame.schema)
    sink.check_table(frame.schema, "append")  # what it created fits
    sink.open_staging(1, frame.schema)
    assert sink.stage(1, 0, frame) == 3
    sink.commit(permit(1), Committable(0, (), (StagedBatch(0, 1, 3),)))
    with psycopg.connect(server.dsn) as connection:
        found = connection.execute("SELECT * FROM all_types ORDER BY l NULLS LAST").fetchall()
    assert found[1] == (*full, moment, moment.replace(tzinfo=None), ["x", "y"], {"a": 1, "b": None})
    assert found[2] == tuple([None] * 15)
    assert str(found[0][5]) == "nan"
    assert found[0][6:11] == (float("-inf"), "", Decimal(0), b"", date(1, 1, 1))


@pytest.mark.spark
def test_nested_values_arrive_to_the_microsecond_whatever_the_session_says(
    server: PostgresServer, spark: SparkSession
) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    moments = ["0001-01-01", "1582-10-10", "2026-03-29", "9999-12-31", "+10000-01-01", "-0005-06-07"]
    rows = ", ".join(
        f"({number}, timestamp'{day} 23:30:00.123456Z', timestamp_ntz'{day} 23:30:00.123456', date'{day}')"
        for number, day in enumerate(moments)
    )
    fields = "'utc', at, 'local', here, 'day', day, 'x', X'00ff', 'n', 1.50BD, 'nan', float('NaN'), 'none', null"
    frame = session.sql(
        f"SELECT id, named_struct({fields}) AS s, array(at, null) AS a, map(id, at, -1, null) AS m"
        f" FROM VALUES {rows} AS t (id, at, here, day)"
    )
    sink = bound("nested", server.dsn, session)
    sink.check_table(frame.schema, "append")
    sink.prepare_table(frame.schema)
    sink.open_staging(1, frame.schema)
    sink.commit(permit(1), Committable(0, (), (StagedBatch(0, 1, sink.stage(1, 0, frame)),)))
    with psycopg.connect(server.dsn) as connection:
        found = connection.execute("SELECT s, a, m FROM nested ORDER BY id").fetchall()
    for number, (day, row) in enumerate(zip(moments, found, strict=True)):
        utc, local = f"{day}T23:30:00.123456Z", f"{day}T23:30:00.123456"
        others = {"x": "AP8=", "n": 1.5, "nan": "NaN", "none": None}
        assert row == ({"utc": utc, "local": local, "day": day, **others}, [utc, None], {str(number): utc, "-1": None})


@pytest.mark.spark
def test_nested_moments_that_are_a_microsecond_apart_are_two_keys(server: PostgresServer, spark: SparkSession) -> None:
    frame = spark.range(51).selectExpr("named_struct('at', timestamp_micros(id)) AS k", "array(id) AS value")
    sink = bound("keyed", server.dsn, spark, key="k")
    sink.prepare_table(frame.schema)
    sink.open_staging(1, frame.schema)
    sink.commit(permit(1), Committable(0, (), (StagedBatch(0, 1, sink.stage(1, 0, frame)),)))
    assert rows_of(server, "SELECT count(*) FROM keyed") == Counter([(51,)])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (MapType(BinaryType(), LongType()), "a key of a map may not be binary: cast it to string"),
        (MapType(TimestampType(), LongType()), "a key of a map may not be timestamp: cast it to string"),
        (ArrayType(MapType(DateType(), LongType())), "a key of a map may not be date: cast it to string"),
        (MapType(StructType([StructField("a", LongType())]), LongType()), "may not be struct<a:bigint>: cast it"),
        (StructType([StructField("a", LongType())] * 2), "of two fields 'a' one would be lost: rename it"),
        (ArrayType(VariantType()), "because of variant in it: cast that"),
        (StructType([StructField("t", DayTimeIntervalType())]), "because of interval day to second in it"),
        (VariantType(), "; cast it"),
    ],
)
def test_a_nested_value_that_json_would_garble_is_refused(server: PostgresServer, kind: DataType, why: str) -> None:
    written = StructType([StructField("id", LongType()), StructField("c", kind)])
    with pytest.raises(InvalidPipeline, match=f"column 'c' is .* which PostgreSQL table public.t cannot hold.*{why}"):
        bound("t", server.dsn).check_table(written, "append")


@pytest.mark.spark
def test_a_session_by_which_former_days_in_nested_values_become_others_is_refused(
    server: PostgresServer, spark: SparkSession
) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.legacy.timeParserPolicy", "LEGACY")
    sink = bound("t", server.dsn, session)
    days = StructType([StructField("days", ArrayType(DateType()))])
    with pytest.raises(InvalidPipeline, match=r"set spark\.sql\.legacy\.timeParserPolicy to CORRECTED"):
        sink.check_table(days, "append")
    assert not bound("t", server.dsn, spark).check_table(days, "append")
    assert not sink.check_table(StructType([StructField("day", DateType())]), "append")


def test_a_table_of_other_columns_or_without_the_key_is_refused(server: PostgresServer) -> None:
    with psycopg.connect(server.dsn) as connection:
        connection.execute("CREATE TABLE other (id text)")
        connection.execute("CREATE TABLE keyless (id bigint, value text)")
        connection.execute("CREATE TABLE keyed (id bigint NOT NULL UNIQUE, value text)")
    with pytest.raises(SinkFailed, match=r"has the columns id text, but shop/orders writes id bigint, value text"):
        bound("other", server.dsn).check_table(columns(), "append")
    with pytest.raises(SinkFailed, match=r"no primary key or unique index on \(id\)"):
        bound("keyless", server.dsn, key="id").check_table(columns(), "update")
    bound("keyed", server.dsn, key="id").check_table(columns(), "update")
    with pytest.raises(InvalidPipeline, match="'complete'"):
        bound("keyless", server.dsn).check_table(columns(), "complete")
    with pytest.raises(InvalidPipeline, match="has the key 'nope'"):
        bound("keyed", server.dsn, key="nope").check_table(columns(), "update")
    reserved = StructType([StructField("id", LongType()), StructField("tidegate_batch", StringType())])
    with pytest.raises(InvalidPipeline, match="a name that Tidegate needs"):
        bound("new", server.dsn).check_table(reserved, "append")


@pytest.mark.parametrize(
    ("column", "fits"),
    [
        ("bigint GENERATED ALWAYS AS (length(value)) STORED", False),
        ("bigint GENERATED ALWAYS AS IDENTITY", False),
        ("bigint GENERATED BY DEFAULT AS IDENTITY", True),
        ("bigint DEFAULT 7", True),
    ],
)
def test_a_column_that_takes_no_value_from_outside_is_refused(server: PostgresServer, column: str, fits: bool) -> None:
    with psycopg.connect(server.dsn) as connection:
        connection.execute(f"CREATE TABLE t (id {column}, value text)".encode())
    sink = bound("t", server.dsn)
    if fits:
        assert sink.check_table(columns(), "append")
    else:
        with pytest.raises(SinkFailed, match=r"makes the values of 'id' itself \(GENERATED ALWAYS\)"):
            sink.check_table(columns(), "append")


class Slow(BoundPostgresTable):
    """Its transactions end when they may."""

    def __init__(self, table: str, dsn: str) -> None:
        super().__init__(tg.PostgresTable(table, dsn), place())
        self.is_about_to_end, self.may_end = threading.Event(), threading.Event()

    @contextmanager
    def _connected(self, if_refused: str = "", *, sees_one_moment: bool = False) -> Iterator[psycopg.Connection[Any]]:
        with super()._connected(if_refused, sees_one_moment=sees_one_moment) as connection:
            yield connection
            self.is_about_to_end.set()
            assert self.may_end.wait(20)


def test_pipelines_that_start_together_in_a_new_schema_create_its_tables_one_after_the_other(
    server: PostgresServer,
) -> None:
    slow = Slow("first", server.dsn)
    with ThreadPoolExecutor(2) as threads:
        try:
            first = threads.submit(slow.prepare_table, columns())
            assert slow.is_about_to_end.wait(20)
            second = threads.submit(bound("second", server.dsn).prepare_table, columns())
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            deadline = time.monotonic() + 20
            while rows_of(server, waiting) != Counter([(1,)]):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            slow.may_end.set()
        first.result()
        second.result()
    found = rows_of(server, "SELECT tablename::text FROM pg_tables WHERE schemaname = 'public'")
    assert found == Counter([("first",), ("second",), ("tidegate_epochs",)])


@pytest.mark.parametrize(
    ("made", "fits"),
    [
        ("CREATE UNIQUE INDEX ON t (value)", False),
        ("ALTER TABLE t ADD UNIQUE (id)", True),
        ("ALTER TABLE t ALTER id DROP NOT NULL, ADD UNIQUE (id)", False),
        ("ALTER TABLE t ALTER id DROP NOT NULL, ADD UNIQUE NULLS NOT DISTINCT (id)", True),
        ("ALTER TABLE t ADD UNIQUE (id) DEFERRABLE", False),
        ("CREATE UNIQUE INDEX ON t (id, lower(value))", False),
        ("CREATE UNIQUE INDEX ON t (id) WHERE value > 'a'", False),
        ("CREATE UNIQUE INDEX ON t (id) INCLUDE (value)", True),
    ],
)
def test_a_key_needs_an_index_by_which_every_row_is_found(server: PostgresServer, made: str, fits: bool) -> None:
    with psycopg.connect(server.dsn) as connection:
        connection.execute("CREATE TABLE t (id bigint NOT NULL, value text)")
        connection.execute(made.encode())
    sink = bound("t", server.dsn, key="id")
    if fits:
        assert sink.check_table(columns(), "update")
    else:
        with pytest.raises(SinkFailed, match=r"no primary key or unique index on \(id\).*NOT NULL"):
            sink.check_table(columns(), "update")


def test_names_that_the_server_would_cut_off_are_refused(server: PostgresServer) -> None:
    long = StructType([StructField("ä" * 32, LongType())])
    with pytest.raises(InvalidPipeline, match=r"would cut 'ä+' off at 63 bytes"):
        bound("t", server.dsn).check_table(long, "append")
    with pytest.raises(InvalidPipeline, match=r"would cut 't+' off at 63 bytes"):
        bound("t" * 64, server.dsn).check_table(columns(), "append")


class Staged:
    """A table, and what an executor does for it, without Spark."""

    def __init__(self, server: PostgresServer, name: str, kinds: StructType, key: str = "") -> None:
        self.sink = bound(name, server.dsn, key=[key] if key else [])
        self.server = server
        self.sink.check_table(kinds, "update")
        self.sink.prepare_table(kinds)
        self.sink.open_staging(1, kinds)
        self.staging = self.sink._staging(1)

    def stage(self, rows: Any) -> int:
        copy = copier(self.sink.sink.server(), "public", self.staging, 0, tuple(rows.column_names))
        return sum(each.column(0)[0].as_py() for each in copy(iter(rows.to_batches())))

    def commit(self, rows: int) -> CommitAnswer:
        return self.sink.commit(permit(1), Committable(0, (), (StagedBatch(0, 1, rows),)))


@pytest.mark.parametrize("key", ["", "100%s"])
def test_a_percent_sign_in_a_name_is_no_placeholder(server: PostgresServer, key: str) -> None:
    kinds = StructType([StructField("100%s", LongType()), StructField("5%", StringType())])
    table = Staged(server, "sales 5%", kinds, key)
    assert table.commit(table.stage(pyarrow.table({"100%s": [1], "5%": ["a"]}))) is CommitAnswer.COMMITTED
    table.sink.fence(2)
    assert table.sink.facts() == SinkFacts(1, 2, 1)
    assert rows_of(server, 'SELECT * FROM "sales 5%"') == Counter([(1, "a")])


def test_moments_of_former_times_arrive_to_the_second(server: PostgresServer) -> None:
    """Berlin was 53 minutes and 28 seconds ahead."""
    table = Staged(server, "moments", StructType([StructField("at", TimestampType())]))
    moments = [datetime(1850, 1, 1, 0, 0, 1, tzinfo=UTC), datetime(2026, 7, 1, tzinfo=UTC), None]
    at = pyarrow.array(moments, pyarrow.timestamp("us", "Europe/Berlin"))
    table.commit(table.stage(pyarrow.table({"at": at})))
    assert rows_of(server, "SELECT at FROM moments") == Counter((each,) for each in moments)


def test_a_year_that_would_arrive_as_another_is_refused(server: PostgresServer) -> None:
    kinds = StructType([StructField("at", TimestampType()), StructField("day", DateType())])
    table = Staged(server, "years", kinds)
    first, last = -719_162, 11_248_737

    def rows(day: int) -> Any:
        at = pyarrow.array([day * 86_400_000_000], pyarrow.timestamp("us", "UTC"))
        return pyarrow.table({"at": at, "day": pyarrow.array([day], pyarrow.int32()).cast(pyarrow.date32())})

    for day in (first, last):
        assert table.stage(rows(day)) == 1
    assert rows_of(server, f"SELECT extract(year FROM day) FROM {table.staging}") == Counter([(32767,)])
    for day in (first - 1, last + 1):
        for name in ("at", "day"):
            with pytest.raises(RuntimeError, match=rf"column '{name}' holds a year before 1 or after 32767"):
                table.stage(rows(day).select([name]))


def test_rows_that_were_staged_and_are_not_there_are_missed(server: PostgresServer) -> None:
    table = Staged(server, "missing", columns())
    staged = table.stage(pyarrow.table({"id": [1, 2, 3], "value": ["a", "b", "c"]}))
    with psycopg.connect(server.dsn) as connection:
        connection.execute(f"DELETE FROM {table.staging} WHERE id = 2".encode())
    with pytest.raises(SinkFailed, match=r"missing: 3 rows were staged in .*, but 2 are there"):
        table.commit(staged)
    assert rows_of(server, "SELECT * FROM missing") == Counter()
    assert table.sink.facts() == SinkFacts(0, 0)


def test_a_name_is_a_table_or_a_schema_and_a_table() -> None:
    assert tg.PostgresTable("sales.orders").describe() == "PostgreSQL table sales.orders"
    for name in ("", "a.b.c", "a."):
        with pytest.raises(InvalidPipeline, match=r"'name' or 'schema\.name'"):
            tg.PostgresTable(name)


def test_a_transaction_that_hangs_is_not_waited_for_for_ever(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.sinks.postgres.connection._LOCK_SECONDS", 1)
    sink = bound("locked", server.dsn)
    sink.prepare_table(columns())
    sink.commit(permit(1), Committable(0))
    with psycopg.connect(server.dsn) as hanging:
        hanging.execute("SELECT * FROM tidegate_epochs FOR UPDATE")
        with pytest.raises(SinkFailed, match="perhaps of an old run that hangs"):
            sink.commit(permit(2), Committable(1))
    assert sink.commit(permit(2), Committable(1)) is CommitAnswer.COMMITTED


# -- a server that crashes ----------------------------------------------------------------------------


@contextmanager
def lazy(server: PostgresServer) -> Iterator[None]:
    """The server tells that it has committed before anything is on its disk, and brings it there much later."""
    settings = {"synchronous_commit": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}

    def change(commands: Iterable[str]) -> None:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            for command in commands:
                connection.execute(command.encode())
            connection.execute("SELECT pg_reload_conf()")

    change(f"ALTER SYSTEM SET {name} TO '{value}'" for name, value in settings.items())
    server.crash()  # the writer of the log sleeps from now on
    server.start()
    try:
        yield
    finally:
        change(f"ALTER SYSTEM RESET {name}" for name in settings)


def test_what_was_staged_and_committed_survives_a_crash_of_a_server_that_is_set_to_lose_it(
    server: PostgresServer,
) -> None:
    with lazy(server):
        table = Staged(server, "kept", columns())
        staged = table.stage(pyarrow.table({"id": [1], "value": ["a"]}))
        server.crash()
        server.start()
        assert table.commit(staged) is CommitAnswer.COMMITTED
        server.crash()
        server.start()
        assert table.sink.facts() == SinkFacts(1, 0, next_batch=1)
        assert rows_of(server, "SELECT * FROM kept") == Counter([(1, "a")])
        table.sink.fence(7)
        server.crash()
        server.start()
        assert table.sink.facts() == SinkFacts(1, 7, next_batch=1)


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("on", "on"), ("remote_apply", "remote_apply")],
)
def test_a_commit_is_never_less_durable_than_the_server_is_told_to_make_it(
    server: PostgresServer, setting: str, wanted: str
) -> None:
    sink = bound("kept", f"{server.dsn} options='-c synchronous_commit={setting}'")
    with sink._connected() as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == (wanted,)


@pytest.mark.parametrize(
    "made",
    [
        ["CREATE UNLOGGED TABLE t (id bigint, value text)"],
        [
            "CREATE TABLE t (id bigint, value text) PARTITION BY RANGE (id)",
            "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (9)",
            "CREATE UNLOGGED TABLE high PARTITION OF t FOR VALUES FROM (9) TO (99)",
        ],
    ],
)
def test_a_table_that_a_crash_would_empty_is_refused(server: PostgresServer, made: list[str]) -> None:
    with psycopg.connect(server.dsn) as connection:
        for command in made:
            connection.execute(command.encode())
    with pytest.raises(SinkFailed, match=r"public\.(t|high) is UNLOGGED.*SET LOGGED"):
        bound("t", server.dsn).check_table(columns(), "append")
    with pytest.raises(SinkFailed, match=r"public\.(t|high) is UNLOGGED.*SET LOGGED"):
        bound("t", server.dsn).probe()


# -- a server that is silent --------------------------------------------------------------------------


@pytest.fixture
def link(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr("tidegate.sinks.postgres.connection._SLACK_SECONDS", 0.5)
    with Link(server) as link:
        end = threading.Timer(60, link.restore)  # so that who waits for ever does not
        end.start()
        yield link
        end.cancel()
        end.join()


def assert_told(failed: pytest.ExceptionInfo[Exception], what: str) -> None:
    told = str(failed.value)
    assert what in told
    assert "\n" not in told
    assert SECRET not in told


class Dropping(BoundPostgresTable):
    """The link is dropped after the rows were moved, before the transaction is committed."""

    def __init__(self, link: Link) -> None:
        super().__init__(tg.PostgresTable("t", link.dsn, timeout="1s"), place())
        self._link: Link | None = link

    def _move(self, *args: Any) -> None:
        super()._move(*args)
        if self._link is not None:
            self._link.drop()
            self._link = None


def test_a_link_that_is_dropped_in_the_middle_of_a_commit_is_an_error_and_another_try_commits(
    server: PostgresServer, link: Link
) -> None:
    table = Staged(server, "t", columns())
    staged = table.stage(pyarrow.table({"id": [1], "value": ["a"]}))
    table.sink = Dropping(link)
    with pytest.raises(SinkFailed) as failed:
        table.commit(staged)
    assert_told(failed, "PostgreSQL table public.t: the server has not answered for 2 s; it hangs, or the link")
    with pytest.raises(SinkFailed) as failed:
        bound("t", f"{link.dsn} connect_timeout=2").facts()
    assert_told(failed, "timeout")
    link.restore()
    assert table.commit(staged) is CommitAnswer.COMMITTED
    assert rows_of(server, "SELECT * FROM t") == Counter([(1, "a")])


@pytest.mark.parametrize("rows", [1, 2_000_000], ids=["when all is written", "while it is written"])
def test_a_link_that_is_dropped_in_the_middle_of_a_copy_is_an_error(
    server: PostgresServer, link: Link, rows: int
) -> None:
    table = Staged(server, "t", StructType([StructField("id", LongType())]))
    table.sink = bound("t", link.dsn, timeout="1s")

    def parts() -> Iterator[Any]:
        yield from pyarrow.table({"id": [1]}).to_batches()
        link.drop()
        yield from pyarrow.table({"id": pyarrow.array(range(rows))}).to_batches()

    copy = copier(table.sink.sink.server(), "public", table.staging, 0, ("id",))
    with pytest.raises(RuntimeError) as failed:
        list(copy(parts()))
    assert_told(failed, f"could not copy into public.{table.staging}: the server has not answered for 2 s")
    link.restore()
    assert table.stage(pyarrow.table({"id": [1, 2]})) == 2
    assert rows_of(server, f"SELECT id FROM {table.staging}") == Counter([(1,), (2,)])


def test_a_transaction_whose_client_is_gone_without_a_word_is_ended_by_the_server(
    server: PostgresServer, link: Link
) -> None:
    """Else the locks that it holds would outlive every other try."""
    table = Staged(server, "t", columns())
    staged = table.stage(pyarrow.table({"id": [1], "value": ["a"]}))
    table.sink = Dropping(link)
    with pytest.raises(SinkFailed, match="has not answered"):
        table.commit(staged)
    table.sink = bound("t", server.dsn)
    assert table.commit(staged) is CommitAnswer.COMMITTED
    assert rows_of(server, "SELECT * FROM t") == Counter([(1, "a")])


def test_a_statement_that_takes_too_long_is_ended_but_not_a_copy_whose_rows_come_slowly(server: PostgresServer) -> None:
    table = Staged(server, "t", columns())
    table.sink = bound("t", server.dsn, timeout="300ms")

    def slowly() -> Iterator[Any]:
        for number in range(3):
            time.sleep(0.3)
            yield from pyarrow.table({"id": [number], "value": ["a"]}).to_batches()

    copy = copier(table.sink.sink.server(), "public", table.staging, 0, ("id", "value"))
    assert [each.column(0)[0].as_py() for each in copy(slowly())] == [3]
    with psycopg.connect(server.dsn) as connection:
        connection.execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); RETURN new; END'"
        )
        connection.execute("CREATE TRIGGER slow BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION slow()")
    with pytest.raises(SinkFailed) as failed:
        table.commit(3)
    assert_told(failed, "PostgresTable(timeout=…) says how long one may take")


def test_what_the_connection_string_says_of_times_is_left_as_it_is(server: PostgresServer) -> None:
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    query = "SELECT " + ", ".join(f"current_setting('{name}')" for name in names)

    def found(dsn: str, timeout: str = "10m") -> tuple[Any, dict[str, str]]:
        with bound("t", dsn, timeout=timeout)._connected() as connection:
            return connection.execute(query.encode()).fetchone(), connection.info.get_parameters()

    settings, parameters = found(server.dsn, timeout="90s")
    assert settings == ("90s", "30s", "90s")
    assert [parameters[name] for name in ("connect_timeout", "keepalives_idle", "tcp_user_timeout")] == [
        "10",
        "30",
        "60000",
    ]
    own = f"{server.dsn} keepalives_idle=7 connect_timeout=3 options='-c statement_timeout=2h -c lock_timeout=3s'"
    settings, parameters = found(own)
    assert settings == ("2h", "3s", "10min")
    assert (parameters["connect_timeout"], parameters["keepalives_idle"]) == ("3", "7")


def test_each_statement_sees_what_was_committed_before_it_whatever_the_server_is_set_to(server: PostgresServer) -> None:
    """Else a commit, having got its lock, would still see the table as it was before."""
    sink = bound("t", f"{server.dsn} options='-c default_transaction_isolation=serializable'")
    with sink._connected() as connection:
        assert connection.execute("SHOW transaction_isolation").fetchone() == ("read committed",)


@pytest.mark.parametrize("timeout", ["0s", "soon"])
def test_a_timeout_is_a_time(timeout: str) -> None:
    with pytest.raises(InvalidConfig, match="timeout is"):
        tg.PostgresTable("t", timeout=timeout)


# -- a table that somebody changes during a run -------------------------------------------------------

PRICES = StructType([StructField("id", LongType()), StructField("price", DecimalType(10, 2))])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("ALTER COLUMN price TYPE integer", r"price is integer, not numeric\(10,2\)"),
        ("ALTER COLUMN price TYPE numeric(10,1)", r"price is numeric\(10,1\), not numeric\(10,2\)"),
        ("ALTER COLUMN value TYPE varchar(3)", r"value is character varying\(3\), not text"),
        ("ALTER COLUMN at TYPE timestamptz(0)", r"at is timestamp\(0\) with time zone, not timestamp with time zone"),
        ("DROP COLUMN value", r"value is gone"),
        ("RENAME value TO other", r"value is gone, other is new"),
        ("ADD COLUMN note text DEFAULT 'x'", r"note is new"),
        (
            "DROP CONSTRAINT t_pkey, ALTER id DROP NOT NULL, ADD UNIQUE (id)",
            r"no primary key or unique index on \(id\)",
        ),
        ("ALTER id ADD GENERATED ALWAYS AS IDENTITY", r"makes the values of 'id' itself"),
        ("SET UNLOGGED", r"is UNLOGGED"),
    ],
)
def test_a_table_that_was_changed_after_rows_were_staged_is_refused_at_commit(
    server: PostgresServer, change: str, told: str
) -> None:
    kinds = StructType([*PRICES.fields, StructField("value", StringType()), StructField("at", TimestampType())])
    table = Staged(server, "t", kinds, "id")
    row = {"id": [1], "value": ["abcdef"], "price": [Decimal("1.75")]}
    at = pyarrow.array([datetime(2026, 1, 1, 0, 0, 0, 700000, tzinfo=UTC)], pyarrow.timestamp("us", "UTC"))
    staged = table.stage(pyarrow.table({**row, "at": at}))
    with psycopg.connect(server.dsn) as connection:
        connection.execute(f"ALTER TABLE t {change}".encode())
    with pytest.raises(SinkFailed, match=told) as refused:
        table.commit(staged)
    assert "\n" not in str(refused.value)
    assert table.sink.facts() == SinkFacts(0, 0)
    assert rows_of(server, "SELECT count(*) FROM t") == Counter([(0,)])
    assert rows_of(server, f"SELECT price FROM {table.staging}") == Counter([(Decimal("1.75"),)])


def test_a_table_that_is_changed_before_anything_is_staged_is_refused_too(server: PostgresServer) -> None:
    sink = bound("t", server.dsn)
    sink.prepare_table(PRICES)
    sink.check_table(PRICES, "append")
    with psycopg.connect(server.dsn) as connection:
        connection.execute("ALTER TABLE t ALTER price TYPE numeric(10,1)")
    with pytest.raises(SinkFailed, match=r"price is numeric\(10,1\), not numeric\(10,2\)"):
        sink.open_staging(1, PRICES)


class ChangedMeanwhile(BoundPostgresTable):
    """Somebody wants to change the table while its rows are being moved."""

    def __init__(self, dsn: str) -> None:
        super().__init__(tg.PostgresTable("t", dsn), place())
        self._dsn = dsn
        self.seen = ""

    def _move(self, connection: psycopg.Connection[Any], *args: Any) -> None:
        with psycopg.connect(self._dsn) as other:
            other.execute("SET lock_timeout TO '200ms'")
            try:
                other.execute("ALTER TABLE t ALTER price TYPE integer")
            except psycopg.errors.LockNotAvailable as error:
                self.seen = str(error)
        super()._move(connection, *args)


def test_nobody_changes_a_table_between_the_look_at_it_and_the_commit(server: PostgresServer) -> None:
    table = Staged(server, "t", PRICES)
    staged = table.stage(pyarrow.table({"id": [1], "price": [Decimal("1.75")]}))
    table.sink = changed = ChangedMeanwhile(server.dsn)
    assert table.commit(staged) is CommitAnswer.COMMITTED
    assert "lock timeout" in changed.seen
    assert rows_of(server, "SELECT * FROM t") == Counter([(1, Decimal("1.75"))])


# -- a row that the table refuses ---------------------------------------------------------------------

REFUSALS = pytest.mark.parametrize(
    ("made", "told", "mended"),
    [
        (
            ["ALTER TABLE t ADD UNIQUE (value)", "INSERT INTO t VALUES (7, 'a')"],
            'unique constraint "t_value_key" DETAIL: Key (value)=(a) already exists.',
            "DELETE FROM t",
        ),
        (
            ["ALTER TABLE t ADD UNIQUE (value) DEFERRABLE INITIALLY DEFERRED", "INSERT INTO t VALUES (7, 'a')"],
            "Key (value)=(a) already exists.",
            "DELETE FROM t",
        ),
        (
            ["ALTER TABLE t ADD CHECK (id > 1)"],
            "Failing row contains (1, a).",
            "ALTER TABLE t DROP CONSTRAINT t_id_check",
        ),
        (
            ["CREATE TABLE o (id bigint PRIMARY KEY)", "ALTER TABLE t ADD FOREIGN KEY (id) REFERENCES o"],
            'Key (id)=(1) is not present in table "o".',
            "INSERT INTO o VALUES (1), (2)",
        ),
        (
            ["ALTER TABLE t ALTER value SET NOT NULL"],
            "Failing row contains (2, null).",
            "ALTER TABLE t ALTER value DROP NOT NULL",
        ),
        (
            [
                "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''never %'', new.id; END'",
                "CREATE TRIGGER no BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION no()",
            ],
            "never 1",
            "DROP TRIGGER no ON t",
        ),
    ],
    ids=["unique", "deferred", "check", "foreign key", "not null", "trigger"],
)


class Refusing:
    """A table that takes no part of what is staged for it, until it is mended."""

    def __init__(self, server: PostgresServer, made: list[str], *, check: bool) -> None:
        self.server = server
        self.table = Staged(server, "t", columns())
        self.table.sink = bound("t", server.dsn, check=check)
        self.sealed = Committable(0, (), (StagedBatch(0, 1, 2),))
        assert self.table.stage(pyarrow.table({"id": [1, 2], "value": ["a", None]})) == 2
        self.run(*made)

    def run(self, *commands: str) -> None:
        with psycopg.connect(self.server.dsn) as connection:
            for command in commands:
                connection.execute(command.encode())

    @property
    def state(self) -> list[Counter[tuple[Any, ...]]]:
        tables = ("t", self.table.staging, "tidegate_epochs")
        return [rows_of(self.server, f"SELECT * FROM {name}") for name in tables]

    def check(self) -> None:
        self.table.sink.check_commit(self.sealed)


@REFUSALS
def test_a_row_that_the_table_refuses_is_told_with_the_ways_out(
    server: PostgresServer, made: list[str], told: str, mended: str
) -> None:
    refusing = Refusing(server, made, check=False)
    before = refusing.state
    refusing.check()  # not asked for, so nothing is tried
    with pytest.raises(SinkFailed) as refused:
        refusing.table.commit(2)
    assert_told(refused, told)
    for way in ("change or delete the row", "drop the constraint", "give PostgresTable a key", "a new root"):
        assert way in str(refused.value)
    assert refusing.state == before
    refusing.run(mended)
    assert refusing.table.commit(2) is CommitAnswer.COMMITTED


@REFUSALS
def test_a_check_tells_the_same_before_and_changes_nothing(
    server: PostgresServer, made: list[str], told: str, mended: str
) -> None:
    refusing = Refusing(server, made, check=True)
    before = refusing.state
    with pytest.raises(SinkFailed) as refused:
        refusing.check()
    assert_told(refused, told)
    assert "all tables stay at the one before" in str(refused.value)
    assert refusing.state == before
    refusing.run(mended)
    before = refusing.state
    refusing.check()
    assert refusing.state == before
    assert refusing.table.commit(2) is CommitAnswer.COMMITTED
    assert rows_of(server, "SELECT * FROM t") == Counter([(1, "a"), (2, None)])
    refusing.check()  # what the table shows already is not tried again


class SlowToMove(BoundPostgresTable):
    """Its commit has moved the rows and waits."""

    def __init__(self, dsn: str) -> None:
        super().__init__(tg.PostgresTable("t", dsn, check=True), place())
        self.has_moved, self.may_go_on = threading.Event(), threading.Event()

    def _move(self, *args: Any) -> None:
        super()._move(*args)
        self.has_moved.set()
        assert self.may_go_on.wait(20)


@pytest.mark.parametrize("is_same", [True, False], ids=["of one process", "of two"])
def test_a_check_during_a_commit_of_an_earlier_epoch_does_not_take_its_rows_for_others(
    server: PostgresServer, is_same: bool
) -> None:
    table = Staged(server, "t", columns())
    with psycopg.connect(server.dsn) as connection:
        connection.execute("ALTER TABLE t ADD UNIQUE (id)")
    table.sink = slow = SlowToMove(server.dsn)
    assert table.stage(pyarrow.table({"id": [1], "value": ["a"]})) == 1
    copy = copier(slow.sink.server(), "public", table.staging, 1, ("id", "value"))
    list(copy(iter(pyarrow.table({"id": [2], "value": ["b"]}).to_batches())))
    both = Committable(1, (), (StagedBatch(0, 1, 1), StagedBatch(1, 1, 1)))
    checking = slow if is_same else bound("t", server.dsn, check=True)
    with ThreadPoolExecutor(2) as threads:
        try:
            commit = threads.submit(table.commit, 1)
            assert slow.has_moved.wait(20)
            check = threads.submit(checking.check_commit, both)
            time.sleep(0.3)
            assert not check.done()
        finally:
            slow.may_go_on.set()
        assert commit.result() is CommitAnswer.COMMITTED
        check.result()
    assert slow.commit(permit(2), both) is CommitAnswer.COMMITTED
    assert rows_of(server, "SELECT * FROM t") == Counter([(1, "a"), (2, "b")])


def test_a_commit_that_takes_long_holds_up_neither_a_look_for_conflicts_nor_the_next_run(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.sinks.postgres.connection._LOCK_SECONDS", 1)
    table = Staged(server, "t", columns(), key="id")
    table.sink.claim()
    assert table.stage(pyarrow.table({"id": [1, 1], "value": ["a", "b"]})) == 2
    sealed = Committable(0, (), (StagedBatch(0, 1, 2),))
    with psycopg.connect(server.dsn) as committing:
        committing.execute("SELECT * FROM tidegate_epochs FOR UPDATE")
        with pytest.raises(ConflictingRows, match="id = 1"):
            table.sink.check_commit(sealed)
        bound("t", server.dsn, key="id").claim()
    with psycopg.connect(server.dsn) as connection:  # by somebody who has taken the table for their own
        connection.execute("DROP TABLE tidegate_epochs")
    with pytest.raises(ConflictingRows, match="id = 1"):
        table.sink.check_commit(sealed)


@pytest.mark.spark
def test_a_row_that_a_checked_table_refuses_keeps_every_table_at_the_checkpoint_before(
    server: PostgresServer, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = tg.Pipeline("shop")

    @pipeline.source
    def orders(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.sink(tg.PostgresTable("order_log", server.dsn, check=True))
    def order_log(orders: DataFrame) -> DataFrame:
        return orders.select("id", "key")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake"))
    def lake(orders: DataFrame) -> DataFrame:
        return orders.select("id", "key")

    def shown() -> list[Counter[tuple[Any, ...]]]:
        kept = rows_of(server, "SELECT id, key FROM order_log WHERE key <> 'in the way'")
        return [kept, table_rows(tmp_path / "lake", ["id", "key"])]

    with psycopg.connect(server.dsn) as connection:
        connection.execute("CREATE TABLE order_log (id bigint UNIQUE, key text)")
        connection.execute("INSERT INTO order_log VALUES (30, 'in the way')")
    write_input(tmp_path / "in", 2, 10)
    run_to_end(pipeline, tmp_path / "root", spark)
    before = shown()
    assert before == [oracle(pipeline, spark)["lake"]] * 2
    write_input(tmp_path / "in", 2, 10, first_file=2)
    for _ in range(2):
        with pytest.raises(
            CheckpointsFailed, match=r"order_log refuses a row: .*Key \(id\)=\(30\) already exists"
        ) as no:
            run_to_end(pipeline, tmp_path / "root", spark)
        assert_told(no, "all tables stay at the one before. What to do: change or delete the row")
        assert shown() == before
    with psycopg.connect(server.dsn) as connection:
        connection.execute("DELETE FROM order_log WHERE key = 'in the way'")
    run_to_end(pipeline, tmp_path / "root", spark)
    assert shown() == [oracle(pipeline, spark)["lake"]] * 2


# -- credentials --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://me:{SECRET}@127.0.0.1:1/db",
        f"host=127.0.0.1 port=1 password={SECRET}",
        f"host=127.0.0.1 port=1 password='{SECRET}",  # cannot be read
        f"postgresql://me:{SECRET}@[::1/db",
        f"nonsense={SECRET}",
        f"postgresql://me:p@{SECRET}@127.0.0.1:1/db",  # @ and / belong escaped
        f"postgresql://me:p/{SECRET}@127.0.0.1:1/db",
    ],
)
def test_no_error_tells_a_password(dsn: str) -> None:
    sink = bound("orders", dsn)
    with pytest.raises(SinkFailed) as refused:
        sink.facts()
    assert SECRET not in str(refused.value)
    assert SECRET not in repr(sink) + sink.describe() + repr(sink.table)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_a_message_is_scrubbed_of_the_whole_string_and_of_the_password_alone() -> None:
    dsn = f"host=x password={SECRET}"
    assert scrubbed(f"bad: {dsn}\n  and {SECRET}", dsn) == "bad: *** and ***"
    assert scrubbed("not p%40ss, nor p@ss", "postgresql://me:p%40ss@host/db") == "not ***, nor ***"


# -- another process ----------------------------------------------------------------------------------


def _commit_elsewhere(dsn: str, sealed: Committable, answer: Any) -> None:
    found = bound("moved", dsn).commit(permit(1, generation=2), sealed)
    answer.put(found.name)


@pytest.mark.spark
def test_what_one_process_has_staged_another_commits(server: PostgresServer, spark: SparkSession) -> None:
    sink = bound("moved", server.dsn, spark)
    sink.prepare_table(columns())
    run = SinkRun(sink, 1)
    run.stage([(1, "a")])
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=_commit_elsewhere, args=(server.dsn, run.sealed(), answer))
    child.start()
    assert answer.get(timeout=60) == "COMMITTED"
    child.join(60)
    assert run.commit(1) is CommitAnswer.ALREADY
    assert rows_of(server, "SELECT id, value FROM moved") == Counter([(1, "a")])


# -- in a pipeline ------------------------------------------------------------------------------------


def shop(folder: Path, dsn: str, orders_table: tg.PostgresTable | None = None) -> tg.Pipeline:
    """One table of rows, one of totals by key."""
    pipeline = tg.Pipeline("shop")

    @pipeline.source
    def orders(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / "in")

    @pipeline.sink(orders_table or tg.PostgresTable("order_log", dsn))
    def order_log(orders: DataFrame) -> DataFrame:
        return orders.select("id", "key", "ts")

    @pipeline.sink(tg.PostgresTable("totals", dsn, key="key"), output_mode="update")
    def totals(orders: DataFrame) -> DataFrame:
        return orders.groupBy("key").agg(F.count("*").alias("orders"), F.sum("value").alias("value"))

    return pipeline


def check_shop(server: PostgresServer, pipeline: tg.Pipeline, spark: SparkSession) -> None:
    expected = oracle(pipeline, spark)
    assert rows_of(server, "SELECT id, key, ts FROM order_log") == expected["order_log"]
    assert rows_of(server, "SELECT key, orders, value::bigint FROM totals") == expected["totals"]


@pytest.mark.spark
def test_a_pipeline_appends_and_updates_and_goes_on_where_it_was(
    server: PostgresServer, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    pipeline = shop(tmp_path, server.dsn)
    for first_file in (0, 6):
        write_input(tmp_path / "in", 6, 30, first_file=first_file)
        run_to_end(pipeline, tmp_path / "root", spark)
        check_shop(server, pipeline, spark)
    with psycopg.connect(server.dsn) as connection:
        left = connection.execute("SELECT tablename FROM pg_tables WHERE tablename LIKE 'tidegate_staging%'").fetchall()
        assert len(left) == 2, "one per sink, of the last generation"
        for (name,) in left:
            assert connection.execute(f'SELECT count(*) FROM "{name}"'.encode()).fetchone() == (0,)
        records = connection.execute("SELECT pipeline, sink, generation FROM tidegate_epochs ORDER BY sink").fetchall()
    assert records == [("shop", "order_log", 2), ("shop", "totals", 2)]
    kept = [path.read_bytes() for path in (tmp_path / "root").rglob("*") if path.is_file()]
    assert kept
    assert not any(SECRET.encode() in each for each in kept)
    assert SECRET not in caplog.text


class Disturbed(tg.PostgresTable):
    """Something happens to the server at the second commit."""

    def __init__(self, dsn: str, disturb: Callable[[], None]) -> None:
        super().__init__("order_log", dsn)
        self.disturb = disturb
        self.commits = 0

    def bind(self, place: SinkPlace) -> BoundPostgresTable:
        return BoundDisturbed(self, place)


class BoundDisturbed(BoundPostgresTable):
    def __init__(self, sink: Disturbed, place: SinkPlace) -> None:
        super().__init__(sink, place)
        self._disturbed = sink

    def _move(self, connection: psycopg.Connection[Any], *args: Any) -> None:
        super()._move(connection, *args)
        self._disturbed.commits += 1
        if self._disturbed.commits == 2:
            self._disturbed.disturb()  # the rows are moved, the transaction is not committed


@pytest.mark.spark
def test_a_server_that_crashes_in_the_middle_of_a_commit_and_comes_back_is_no_loss(
    server: PostgresServer, spark: SparkSession, tmp_path: Path
) -> None:
    def crash_and_come_back() -> None:
        server.stop(signal.SIGQUIT)
        server.start()

    disturbed = Disturbed(server.dsn, crash_and_come_back)
    pipeline = shop(tmp_path, server.dsn, disturbed)
    write_input(tmp_path / "in", 20, 30)
    run_to_end(pipeline, tmp_path / "root", spark, restarts=5)
    assert disturbed.commits > 2
    check_shop(server, pipeline, spark)


@pytest.mark.spark
def test_a_server_that_is_away_for_a_while_is_waited_for_by_restarts(
    server: PostgresServer, spark: SparkSession, tmp_path: Path
) -> None:
    back: list[threading.Timer] = []

    def go_away() -> None:
        server.stop(signal.SIGQUIT)
        back.append(threading.Timer(5, server.start))
        back[0].start()

    pipeline = shop(tmp_path, server.dsn, Disturbed(server.dsn, go_away))
    write_input(tmp_path / "in", 20, 30)
    try:
        run_to_end(pipeline, tmp_path / "root", spark, restarts=4)
    finally:
        for timer in back:
            timer.join()
    check_shop(server, pipeline, spark)


@pytest.mark.spark
@pytest.mark.soak  # one that comes back is in CI
def test_a_server_that_stays_away_is_an_error_that_says_so_and_the_next_run_goes_on(
    server: PostgresServer, spark: SparkSession, tmp_path: Path
) -> None:
    disturbed = Disturbed(server.dsn, lambda: server.stop(signal.SIGQUIT))
    pipeline = shop(tmp_path, server.dsn, disturbed)
    write_input(tmp_path / "in", 20, 30)
    try:
        with pytest.raises((SinkFailed, StageFailed, RecoveryRefused)) as failed:
            run_to_end(pipeline, tmp_path / "root", spark, restarts=1)
        assert "order_log" in str(failed.value) or "totals" in str(failed.value)
        assert SECRET not in str(failed.value)
    finally:
        server.start()
    run_to_end(pipeline, tmp_path / "root", spark)
    check_shop(server, pipeline, spark)


@pytest.mark.spark
def test_a_table_of_the_same_name_in_another_database_is_refused_if_it_holds_nothing_of_the_pipeline(
    server: PostgresServer, spark: SparkSession, tmp_path: Path
) -> None:
    write_input(tmp_path / "in", 2, 10)
    pipeline = shop(tmp_path, server.dsn)
    run_to_end(pipeline, tmp_path / "root", spark)
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS other")
        connection.execute("CREATE DATABASE other")
    moved = tg.PostgresTable("order_log", server.dsn.replace("dbname=postgres", "dbname=other"))
    written = spark.createDataFrame([], "id long, key string, ts timestamp").schema
    somebody = moved.bind(SinkPlace("somebody", "else", Memory()))
    somebody.prepare_table(written)
    somebody.commit(permit(7), Committable(0))
    with pytest.raises(RecoveryRefused, match=r"order_log of sink 'order_log' is not the one that it wrote to") as no:
        run_to_end(shop(tmp_path, server.dsn, moved), tmp_path / "root", spark)
    assert SECRET not in str(no.value)
    write_input(tmp_path / "in", 2, 10, first_file=2)
    run_to_end(pipeline, tmp_path / "root", spark)
    check_shop(server, pipeline, spark)


@pytest.mark.spark
def test_a_table_may_be_renamed_before_its_first_row_and_not_later(
    server: PostgresServer, spark: SparkSession, tmp_path: Path
) -> None:
    def rename(old: str, new: str) -> tg.Pipeline:
        with psycopg.connect(server.dsn) as connection:
            connection.execute(f"ALTER TABLE {old} RENAME TO {new}".encode())
        return shop(tmp_path, server.dsn, tg.PostgresTable(new, server.dsn))

    (tmp_path / "in").mkdir()
    run_to_end(shop(tmp_path, server.dsn), tmp_path / "root", spark)
    write_input(tmp_path / "in", 2, 10)
    run_to_end(rename("order_log", "all_orders"), tmp_path / "root", spark)
    assert rows_of(server, "SELECT count(*) FROM all_orders") == Counter([(20,)])
    renamed = rename("all_orders", "order_log")
    told = (
        r"'order_log' wrote to PostgreSQL table public.all_orders, which was renamed and now is PostgreSQL table public"
    )
    with pytest.raises(RecoveryRefused, match=rf"{told}.order_log\..*ckpt-.*give it its old name again"):
        run_to_end(renamed, tmp_path / "root", spark)
    run_to_end(rename("order_log", "all_orders"), tmp_path / "root", spark)
    assert rows_of(server, "SELECT count(*) FROM all_orders") == Counter([(20,)])


def test_a_table_is_known_by_its_server_its_database_and_itself(server: PostgresServer) -> None:
    sink = bound("known", server.dsn)
    assert sink.identity() is None
    sink.prepare_table(columns())
    known = sink.identity()
    assert known == bound("public.known", server.dsn).identity()
    with psycopg.connect(server.dsn) as connection:
        connection.execute("DROP TABLE known")
    sink.prepare_table(columns())
    assert sink.identity() not in (None, known)


def test_a_table_is_known_also_where_the_server_does_not_tell_its_own_number(server: PostgresServer) -> None:
    bound("known", server.dsn).prepare_table(columns())
    with psycopg.connect(server.dsn) as connection:
        connection.execute("DROP ROLE IF EXISTS nobody")
        connection.execute("CREATE ROLE nobody LOGIN")
        connection.execute("GRANT USAGE ON SCHEMA public TO public")
        connection.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM public")
    try:
        found = bound("known", server.dsn.replace("user=tester", "user=nobody")).identity()
    finally:
        with psycopg.connect(server.dsn) as connection:
            connection.execute("GRANT EXECUTE ON FUNCTION pg_control_system() TO public")
    assert found is not None
    assert str(server.folder) in found
    assert SECRET not in found


def test_a_record_that_was_made_before_tables_had_owners_gets_one(server: PostgresServer) -> None:
    sink = bound("sales", server.dsn)
    sink.prepare_table(columns())
    with psycopg.connect(server.dsn) as connection:
        connection.execute("ALTER TABLE tidegate_epochs DROP COLUMN root")
        connection.execute(
            "INSERT INTO tidegate_epochs (pipeline, sink, table_name, epoch, next_batch, fence)"
            " VALUES ('shop', 'orders', 'sales', 4, 7, 2)"
        )
    assert sink.check_table(columns(), "append")
    assert sink.facts() == SinkFacts(4, 2, 7)
    sink.claim()
    assert sink.facts() == SinkFacts(4, 2, 7)
    with pytest.raises(ForeignTable):
        sink.sink.bind(place(root="another")).claim()


def test_a_record_that_has_outlived_its_root_and_table_is_removed_as_the_error_says(server: PostgresServer) -> None:
    table = tg.PostgresTable("sales", server.dsn)
    gone, sink = (table.bind(SinkPlace("it's", "orders", Memory(), root=root)) for root in ("gone", "here"))
    gone.prepare_table(columns())
    gone.claim()
    with psycopg.connect(server.dsn) as connection:
        connection.execute("DROP TABLE sales")
    with pytest.raises(ForeignTable) as refused:
        sink.check_table(columns(), "append")
    statement = str(refused.value).rpartition(": ")[2]
    assert statement.startswith('DELETE FROM "public"."tidegate_epochs" WHERE')
    with psycopg.connect(server.dsn) as connection:
        assert connection.execute(statement.encode()).rowcount == 1
    assert not sink.check_table(columns(), "append")
    sink.prepare_table(columns())
    sink.claim()
