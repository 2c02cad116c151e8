"""Every sink that comes with Tidegate, and one that does not, passes the tests that every sink must pass."""

from __future__ import annotations

import copy
import shutil
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession

import tidegate as tg
from tests.postgres_server import PostgresServer
from tests.s3_server import S3Server
from tests.sinks import own_sink
from tidegate.sinks.contract import Sink, SinkPlace
from tidegate.storage.bucket_access import delta_options, open_bucket
from tidegate.storage.folder import Folder
from tidegate.testing.sinks import Rows, SinkConformance, as_rows


def kept(folder: Path) -> Callable[[], object]:
    """A backup of a folder. The call puts it back."""
    backup = folder.with_name(f"{folder.name}.backup")
    shutil.copytree(folder, backup)

    def put_back() -> None:
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)

    return put_back


class TestDeltaTable(SinkConformance):
    @pytest.fixture(autouse=True)
    def given(self, tmp_path: Path) -> None:
        self.lake = tmp_path

    def make_sink(self, name: str) -> Sink:
        return tg.DeltaTable(self.lake / name)

    def shown(self, name: str) -> Rows:
        return as_rows(deltalake.DeltaTable(self.lake / name).to_pyarrow_table().to_pylist())

    def keep(self, name: str) -> Callable[[], object]:
        return kept(self.lake / name)


@pytest.mark.s3
class TestDeltaTableInBucket(SinkConformance):
    """Each handle on a table is of another machine: what was staged is found in the bucket alone."""

    @pytest.fixture(autouse=True)
    def given_bucket(self, s3_server: S3Server, tmp_path: Path) -> None:
        self.server = s3_server
        self.machines = tmp_path
        self.lake = s3_server.make_bucket(f"lake-{uuid.uuid4().hex[:12]}")

    def url(self, name: str) -> str:
        return f"{self.lake}/tables/{name.replace(' ', '-')}"

    def place(self, name: str, stage: str = "orders", root: str = "root") -> SinkPlace:
        here = Folder(self.machines / f"{name}-{uuid.uuid4().hex}")
        return SinkPlace("conformance", stage, here, self.session(), root)

    def make_sink(self, name: str) -> Sink:
        return tg.DeltaTable(self.url(name), storage_options=self.server.options())

    def shown(self, name: str) -> Rows:
        options = delta_options(open_bucket(self.url(name), self.server.options()), self.server.options())
        return as_rows(deltalake.DeltaTable(self.url(name), storage_options=options).to_pyarrow_table().to_pylist())

    def keep(self, name: str) -> Callable[[], object]:
        return kept(self.server.folder / "buckets" / self.url(name).removeprefix("s3://"))


class TestOwnTable(SinkConformance):
    """One that a user wrote."""

    @pytest.fixture(autouse=True)
    def given(self) -> None:
        self.tables: dict[str, own_sink.Rows] = {}

    def make_sink(self, name: str) -> Sink:
        return own_sink.OwnTable(name, self.tables)

    def shown(self, name: str) -> Rows:
        return Counter(self.tables[name].rows)

    def keep(self, name: str) -> Callable[[], object]:
        backup = copy.deepcopy(self.tables[name])
        return lambda: self.tables.update({name: backup})


@pytest.mark.spark
@pytest.mark.slow
class TestDeltaTableByKey(TestDeltaTable):
    key = True

    @pytest.fixture(autouse=True)
    def given_spark(self, spark: SparkSession) -> None:
        self.spark = spark

    def session(self) -> SparkSession:
        return self.spark

    def make_sink(self, name: str) -> Sink:
        return tg.DeltaTable(self.lake / name, key="id")


@pytest.mark.spark
@pytest.mark.slow
class TestDeltaTableOfFewFiles(TestDeltaTable):
    @pytest.fixture(autouse=True)
    def given_spark(self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spark = spark
        monkeypatch.setattr("tidegate.sinks.delta.appending._WORTH_A_JOB", 1)

    def session(self) -> SparkSession:
        return self.spark

    def make_sink(self, name: str) -> Sink:
        return tg.DeltaTable(self.lake / name, target_file_size="1MB", optimize="1h", vacuum="0s")


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.soak  # by key it is in a folder, and in a bucket without
class TestDeltaTableInBucketByKey(TestDeltaTableInBucket):
    key = True

    @pytest.fixture(autouse=True)
    def given_spark(self, spark: SparkSession) -> None:
        self.spark = spark

    def session(self) -> SparkSession:
        return self.spark

    def make_sink(self, name: str) -> Sink:
        return tg.DeltaTable(self.url(name), key="id", storage_options=self.server.options())


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.soak  # in a folder it makes few files too
class TestDeltaTableInBucketOfFewFiles(TestDeltaTableInBucket):
    @pytest.fixture(autouse=True)
    def given_spark(self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spark = spark
        monkeypatch.setattr("tidegate.sinks.delta.appending._WORTH_A_JOB", 1)

    def session(self) -> SparkSession:
        return self.spark

    def make_sink(self, name: str) -> Sink:
        return tg.DeltaTable(
            self.url(name),
            target_file_size="1MB",
            optimize="1h",
            vacuum="0s",
            storage_options=self.server.options(),
        )


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.slow
class TestPostgresTable(SinkConformance):
    keeps_history = False

    @pytest.mark.soak  # with history it does the same, and more
    def test_a_crash_between_any_two_calls_loses_nothing_and_doubles_nothing(self) -> None:
        super().test_a_crash_between_any_two_calls_loses_nothing_and_doubles_nothing()

    @pytest.fixture(autouse=True)
    def given(self, spark: SparkSession, postgres_server: PostgresServer, request: pytest.FixtureRequest) -> None:
        self.spark = spark
        self.dsn = postgres_server.dsn
        self.prefix = f"{request.cls.__name__}.{request.node.name}".replace(".", " ")[:40]

    def session(self) -> SparkSession:
        return self.spark

    def _table(self, name: str) -> str:
        return f'{self.prefix} "{name}"'  # names are quoted, whatever they hold

    def make_sink(self, name: str) -> Sink:
        return tg.PostgresTable(self._table(name), self.dsn)

    def shown(self, name: str) -> Rows:
        quoted = self._table(name).replace('"', '""')
        with psycopg.connect(self.dsn) as connection:
            return Counter(connection.execute(f'SELECT id, value FROM "{quoted}"').fetchall())

    def keep(self, name: str) -> Callable[[], object]:
        quoted = self._table(name).replace('"', '""')
        with psycopg.connect(self.dsn) as connection:
            connection.execute(f'CREATE TABLE "kept {quoted}" AS TABLE "{quoted}"')
            record = connection.execute(
                "SELECT epoch, next_batch, table_name FROM tidegate_epochs WHERE table_name = %s", (self._table(name),)
            ).fetchone()
        assert record is not None

        def put_back() -> None:
            with psycopg.connect(self.dsn) as connection:
                connection.execute(f'TRUNCATE "{quoted}"')
                connection.execute(f'INSERT INTO "{quoted}" TABLE "kept {quoted}"')
                connection.execute(
                    "UPDATE tidegate_epochs SET epoch = %s, next_batch = %s WHERE table_name = %s", record
                )

        return put_back


@pytest.mark.soak  # with history it does the same, and more
class TestPostgresTableByKey(TestPostgresTable):
    key = True

    def make_sink(self, name: str) -> Sink:
        return tg.PostgresTable(self._table(name), self.dsn, key=["id"], check=True)


class TestPostgresTableWithHistory(TestPostgresTable):
    keeps_history = True

    def make_sink(self, name: str) -> Sink:
        return tg.PostgresTable(self._table(name), self.dsn, history="0s")


class TestPostgresTableByKeyWithHistory(TestPostgresTable):
    key = True
    keeps_history = True
    test_a_crash_between_any_two_calls_loses_nothing_and_doubles_nothing = (
        SinkConformance.test_a_crash_between_any_two_calls_loses_nothing_and_doubles_nothing
    )

    def make_sink(self, name: str) -> Sink:
        return tg.PostgresTable(self._table(name), self.dsn, key=["id"], history="7d")


@pytest.mark.spark
@pytest.mark.slow
class TestForeachBatch(SinkConformance):
    shares_table = False  # each stage has its own function, and its own record of the calls
    undoes = False
    creates_table = False

    @pytest.fixture(autouse=True)
    def given(self, spark: SparkSession) -> None:
        self.spark = spark
        self.calls: dict[str, dict[int, list[Any]]] = {}

    def session(self) -> SparkSession:
        return self.spark

    def make_sink(self, name: str) -> Sink:
        def remember(rows: DataFrame, epoch: int) -> None:
            self.calls.setdefault(name, {})[epoch] = rows.collect()  # idempotent by epoch

        return tg.ForeachBatch(remember)

    def shown(self, name: str) -> Rows:
        return as_rows(row for rows in self.calls.get(name, {}).values() for row in rows)

    def keep(self, name: str) -> Callable[[], object]:
        return kept(Path(self.place(name).files.location()))


class TestMemory(TestForeachBatch):
    @pytest.fixture(autouse=True)
    def given_tables(self) -> None:
        self.tables: dict[str, tg.Memory] = {}

    def make_sink(self, name: str) -> Sink:
        return self.tables.setdefault(name, tg.Memory())

    def shown(self, name: str) -> Rows:
        return as_rows(self.tables[name].rows)


@pytest.mark.soak  # another function for the same calls
class TestConsole(TestForeachBatch):
    @pytest.fixture(autouse=True)
    def given_output(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.capfd = capfd
        self.printed: dict[str, Rows] = {}
        self.last = ""

    def make_sink(self, name: str) -> Sink:
        self._read()
        self.last = name
        return tg.Console(rows=1000)

    def _read(self) -> None:
        """What was printed since belongs to the table that was asked for last."""
        lines = [
            line.strip("|").split("|") for line in self.capfd.readouterr().out.splitlines() if line.startswith("|")
        ]
        rows = [(int(each[0]), each[1].strip()) for each in lines if each[0].strip().isdigit()]
        self.printed.setdefault(self.last, Counter()).update(rows)

    def shown(self, name: str) -> Rows:
        self._read()
        if name == self.last:
            return self.printed[name]
        return self.printed.get(name, Counter())
