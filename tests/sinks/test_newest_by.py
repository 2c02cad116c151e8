"""Tables with a key and columns that tell which row is the newest: the order is theirs, whenever a row comes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import deltalake
import psycopg
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import tidegate as tg
from tests.postgres_server import PostgresServer
from tidegate.errors import ConflictingRows, InvalidPipeline
from tidegate.sinks.contract import (
    CommitAnswer,
    Committable,
    FileSink,
    RowSink,
    Sink,
    SinkPlace,
    Staged,
    StagedBatch,
    StagedFile,
    staged_by,
)
from tidegate.storage.memory import Memory
from tidegate.testing.sinks import permit

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)

# Of each type values that grow, as Spark orders them: where PostgreSQL or Python would order them otherwise, too.
GROWING: dict[str, Sequence[Any]] = {
    "flag": [None, False, True],
    "number": [None, -(2**63), -1, 0, 2**63 - 1],
    "ratio": [None, -math.inf, -1.5, 0.0, 1.5, math.inf, math.nan],
    "amount": [None, Decimal("-1.10"), Decimal("9.90"), Decimal("10.10")],
    "text": [None, "", "A b", "Z", "a", "aB", "ab", "z", "Ä", "ä", "\U0001f600"],
    "octets": [None, b"", b"\x00", b"\x7f", b"\x80", b"\xff"],
    "day": [None, date(1, 1, 1), date(1969, 12, 31), date(2026, 1, 1)],
    "at": [None, NOON - timedelta(days=90_000), NOON, NOON + timedelta(microseconds=1)],
}
NEWEST_BY = list(GROWING)
KINDS: dict[str, DataType] = {
    "id": LongType(),
    "flag": BooleanType(),
    "number": LongType(),
    "ratio": DoubleType(),
    "amount": DecimalType(10, 2),
    "text": StringType(),
    "octets": BinaryType(),
    "day": DateType(),
    "at": TimestampType(),
    "extra": MapType(StringType(), ArrayType(MapType(StringType(), LongType()))),
    "note": StringType(),
}
SCHEMA = StructType([StructField(name, each) for name, each in KINDS.items()])
PLAIN = {
    "flag": True,
    "number": 1,
    "ratio": 1.0,
    "amount": Decimal("1.00"),
    "text": "a",
    "octets": b"a",
    "day": date(2026, 1, 1),
    "at": NOON,
    "extra": {"a": [{"b": 1}]},
}


class Table:
    """A table, its sink, and what a pipeline would do with them."""

    def __init__(self, described: Sink, spark: SparkSession, dsn: str) -> None:
        sink: Any = described.bind(SinkPlace("shop", "orders", Memory(), spark))
        self.sink = sink
        self._spark = spark
        self._dsn = dsn
        self._batch = -1
        self._staged: list[Staged] = []
        sink.check_table(SCHEMA, "append")
        sink.prepare_table(SCHEMA)
        if isinstance(sink, RowSink):
            with psycopg.connect(dsn) as connection:  # a database may order strings in a way of its own
                connection.execute('ALTER TABLE "newest of all" ALTER COLUMN text TYPE text COLLATE "und-x-icu"')
            sink.open_staging(1, SCHEMA)

    def stage(self, rows: Sequence[dict[str, Any]]) -> None:
        self._batch += 1
        given = [tuple({**PLAIN, **row}[name] for name in SCHEMA.names) for row in rows]
        frame = self._spark.createDataFrame(given, SCHEMA)
        if isinstance(self.sink, RowSink):
            self._staged.append(StagedBatch(self._batch, 1, self.sink.stage(1, self._batch, frame)))
            return
        assert isinstance(self.sink, FileSink)
        folder = Path(staged_by(self.sink, 1).location()) / str(self._batch)
        frame.repartition(2).write.parquet(str(folder))
        for path in folder.glob("*.parquet"):
            rows_there = self._spark.read.parquet(str(path)).count()
            self._staged.append(StagedFile(self._batch, str(path), path.stat().st_size, rows_there))

    def sealed(self) -> Committable:
        files = tuple(each for each in self._staged if isinstance(each, StagedFile))
        batches = tuple(each for each in self._staged if isinstance(each, StagedBatch))
        return Committable(self._batch, files, batches)

    def check(self) -> None:
        self.sink.check_commit(self.sealed())

    def commit(self, epoch: int) -> CommitAnswer:
        answer: CommitAnswer = self.sink.commit(permit(epoch), self.sealed())
        return answer

    def forget(self) -> None:
        """A batch that cannot be committed was never staged."""
        self._staged = [each for each in self._staged if each.batch != self._batch]

    def begin_to_remove(self, note: str) -> list[str]:
        """As a commit that has shown the last batch does: the file with this note goes first. Returns what is left."""
        left: list[str] = []
        for each in self._staged:
            if isinstance(each, StagedFile) and each.batch == self._batch:
                notes = [row["note"] for row in self._spark.read.parquet(each.path).collect()]
                if note in notes:
                    Path(each.path).unlink()
                else:
                    left += notes
        return left

    @property
    def epoch(self) -> int:
        epoch: int = self.sink.facts().committed_epoch
        return epoch

    def notes(self) -> dict[int, str]:
        if isinstance(self.sink, RowSink):
            with psycopg.connect(self._dsn) as connection:
                found = connection.execute('SELECT id, note FROM "newest of all"').fetchall()
        else:
            shown = deltalake.DeltaTable(self.sink.path).to_pyarrow_table(columns=["id", "note"])
            found = [(row["id"], row["note"]) for row in shown.to_pylist()]
        assert len(found) == len(dict(found))
        return dict(found)


@pytest.fixture(params=["delta", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dsn(postgres_server: PostgresServer) -> str:
    with psycopg.connect(postgres_server.dsn) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return postgres_server.dsn


def make(kind: str, folder: Path, dsn: str, **options: Any) -> Any:
    if kind == "delta":
        return tg.DeltaTable(folder / "newest", key="id", **options)
    return tg.PostgresTable("newest of all", dsn, key="id", **options)


def of_an_older_and_a_newer(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for older, newer in pairwise(GROWING[name]):
        yield {name: older}, {name: newer}


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.slow
def test_the_newest_row_of_a_key_is_shown_whenever_it_comes(
    kind: str, tmp_path: Path, spark: SparkSession, dsn: str
) -> None:
    table = Table(make(kind, tmp_path, dsn, newest_by=NEWEST_BY), spark, dsn)
    batches: list[list[dict[str, Any]]] = [[], [], []]
    late: list[dict[str, Any]] = []
    pairs = [pair for name in GROWING for pair in of_an_older_and_a_newer(name)]
    # Of several columns the first that differs decides.
    pairs += [({"flag": False, "number": 9}, {"flag": True, "number": 1}), ({"day": None, "at": NOON}, {"at": None})]
    for number, (older, newer) in enumerate(pairs):
        for case, (first, then) in enumerate([(0, 0), (0, 1), (1, 0), (0, 2), (2, 0)]):
            batches[first].append({"id": 10 * number + case, **older, "note": "older"})
            batches[then].append({"id": 10 * number + case, **newer, "note": "newer"})
            late.append({"id": 10 * number + case, **older, "note": "late"})
    equal = [(10_000, (0, 1)), (10_001, (0, 2))]
    for each, (first, then) in equal:
        batches[first].append({"id": each, "note": "older"})
        batches[then].append({"id": each, "note": "newer"})
    table.stage(batches[0])
    table.stage(batches[1])
    table.check()
    assert table.commit(1) is CommitAnswer.COMMITTED
    table.stage(batches[2])
    table.check()
    assert table.commit(2) is CommitAnswer.COMMITTED
    shown = table.notes()
    assert {each: note for each, note in shown.items() if note != "newer"} == {}
    assert len(shown) == 5 * len(pairs) + len(equal)
    table.stage(late)
    table.check()
    # All of it is older: nothing changes, but that it was shown is remembered, or it would be tried for ever.
    assert table.commit(3) is CommitAnswer.COMMITTED
    assert table.notes() == shown
    assert table.epoch == 3
    assert table.commit(3) is CommitAnswer.ALREADY


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.parametrize(
    "newest_by", [pytest.param([], marks=pytest.mark.soak), ["number", "ratio"]], ids=["by batch", "by columns"]
)
def test_different_rows_of_one_key_that_nothing_tells_apart_are_refused(
    newest_by: list[str], kind: str, tmp_path: Path, spark: SparkSession, dsn: str
) -> None:
    table = Table(make(kind, tmp_path, dsn, newest_by=newest_by), spark, dsn)
    table.stage([{"id": 1, "note": "same"}, {"id": 1, "note": "same"}, {"id": 2, "note": "a"}])
    table.check()
    table.commit(1)
    asked = r"newest_by \(number, ratio\) does not tell apart" if newest_by else "let newest_by=… of the table name"
    for one, other in (
        ({"note": "a"}, {"note": "b"}),
        ({"note": "a", "text": None}, {"note": None, "text": "a"}),
        ({"extra": {"a": [{"b": 1}]}}, {"extra": {"a": [{"b": 2}]}}),
        ({"extra": {"a": [{"b": 1}, None]}}, {"extra": {"a": [None, {"b": 1}]}}),
        ({"at": NOON}, {"at": NOON + timedelta(microseconds=1)}),
    ):
        both = [{"id": 7, "note": "", "text": "", "extra": None, "at": None, **each} for each in (one, other)]
        table.stage([*both, {**both[0], "id": 8}])
        with pytest.raises(ConflictingRows, match=rf"shop/orders has different rows of the key id = 7 in .*{asked}"):
            table.check()
        table.forget()
    assert table.epoch == 1
    if newest_by:  # of which the newest is one row
        table.stage([{"id": 7, "note": "a"}, {"id": 7, "note": "b"}, {"id": 7, "note": "c", "number": 2}])
        table.check()
        table.commit(2)
        assert table.notes()[7] == "c"
        if kind == "delta":
            table.stage([{"id": 7, "note": f"{n}"} for n in range(9)] + [{"id": 7, "note": "newest", "number": 3}])
            assert len(table.begin_to_remove("newest")) > 1
            table.check()  # what is left of a batch that is shown is no conflict


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"newest_by": "number"}, "no key"),
        ({"key": "id", "newest_by": ["number", "nope"]}, r"newest_by='nope', which shop/orders does not have"),
        ({"key": "id", "newest_by": "extra"}, r"newest_by='extra' of shop/orders, map<.*which has no order"),
    ],
)
def test_a_column_that_rows_cannot_be_ordered_by_is_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    place = SinkPlace("shop", "orders", Memory())
    for sink in (tg.DeltaTable(tmp_path / "table", **options), tg.PostgresTable("table", **options)):
        with pytest.raises(InvalidPipeline, match=why):
            sink.bind(place).check_table(SCHEMA, "append")
