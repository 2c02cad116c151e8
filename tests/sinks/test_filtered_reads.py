"""Readers skip files by what the table's log says of them: no filter may ever hide a row that it does not rule out.

Each reader is asked for the rows that a filter finds, and for all rows with what it says of the filter for each.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any

import deltalake
import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from tidegate.sinks.contract import Committable, SinkPlace, StagedFile, staged_by
from tidegate.sinks.delta.reading import TableAt
from tidegate.sinks.delta.scan import active_files
from tidegate.sinks.delta.statistics import Bounds
from tidegate.sinks.delta.table import DeltaTable
from tidegate.spark.session import StageSessions
from tidegate.storage.memory import Memory
from tidegate.storage.parquet import read_footer
from tidegate.testing.sinks import permit

pyarrow: Any = importlib.import_module("pyarrow")
dataset: Any = importlib.import_module("pyarrow.dataset")

pytestmark = [pytest.mark.spark, pytest.mark.slow]

MICROSECOND = timedelta(microseconds=1)
LAST = "\U0010ffff"
FIRST = datetime.min.replace(tzinfo=UTC)
FINAL = datetime.max.replace(tzinfo=UTC)
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
MOMENTS: list[list[datetime | None]] = [
    [FIRST, FIRST + MICROSECOND],
    [datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), NEW_YEAR + MICROSECOND, None],
    [NEW_YEAR + 1_999 * MICROSECOND, FINAL - 2_000 * MICROSECOND, FINAL],
    [NEW_YEAR + timedelta(days=1)],
]


class Values(msgspec.Struct):
    """Of one column: those of each file, and others to look for. The last file is one without bounds."""

    kind: DataType
    files: list[list[Any]]
    others: list[Any] = []


REALS: list[list[float | None]] = [[-1.5, -0.0], [0.0, 0.1, None], [1.5, 2.5], [math.nan, 7.0, math.inf, -math.inf]]
DECIMALS: list[list[str | None]] = [["-1.50", "-0.01"], ["0.00", "0.01", None], ["1.10", "2.00"], ["7.77"]]
LONG = "1234567890" * 2 + "12345678901.12"
FILES = 4
COLUMNS = {
    "octet": Values(ByteType(), [[-128, -1], [0, 1, None], [2, 3], [127]], [5]),
    "small": Values(ShortType(), [[-32768, -1], [0, 1, None], [2, 3], [32767]], [5]),
    "number": Values(IntegerType(), [[-(2**31), -1], [0, 1, None], [2, 3], [2**31 - 1]], [5]),
    "large": Values(LongType(), [[-(2**63), -1], [0, 1, None], [2**53 + 1, 2**53 + 3], [2**63 - 1]], [2**53 + 2]),
    "single": Values(FloatType(), [[-1.5, -0.0], [0.0, 0.25, None], [1.5, 16777216.0], REALS[3]], [0.1, 2.0]),
    "real": Values(DoubleType(), REALS, [0.05, 2.0, 1e300]),
    "zero": Values(DoubleType(), [[0.0], [-0.0], [0.0, -0.0, None], [math.nan]], [1.0]),
    "is_new": Values(BooleanType(), [[False], [True, None], [False, True], [True]]),
    "price": Values(DecimalType(5, 2), [[each and Decimal(each) for each in file] for file in DECIMALS]),
    "amount": Values(DecimalType(15, 2), [[each and Decimal(each) for each in file] for file in DECIMALS]),
    "sum.total": Values(
        DecimalType(38, 6),
        [
            [Decimal("-" + "9" * 32 + ".999999"), Decimal("-0.000001")],
            [Decimal(0), Decimal("0.000001"), None],
            [Decimal("12345678901234567890123456789012.123456"), Decimal("12345678901234567890123456789012.123458")],
            [Decimal("9" * 32 + ".999999")],
        ],
        [Decimal("12345678901234567890123456789012.123457")],
    ),
    "day": Values(
        DateType(),
        [[date.min, date(1066, 10, 14)], [date(1969, 12, 31), None], [date(2026, 1, 1)], [date.max]],
        [date(2025, 1, 1)],
    ),
    "moment": Values(TimestampType(), MOMENTS, [NEW_YEAR]),
    "local": Values(
        TimestampNTZType(),
        [[each and each.replace(tzinfo=None) for each in file] for file in MOMENTS],
        [NEW_YEAR.replace(tzinfo=None)],
    ),
    "text": Values(
        StringType(),
        [["", "a", "a" * 64], ["a" * 65, "b" * 100, None], ["b" * 99 + "c", "ü" * 3000], ["z"]],
        ["a" * 66, "b" * 64, "b" * 63 + "c", "c"],
    ),
    "last `text`": Values(
        StringType(),
        [
            ["x" * 63 + LAST * 2, "x" * 63 + "\ud7ff" * 2],
            [LAST * 64, LAST * 70, None],
            ["\ud7ff" * 70, "\ue000" * 70],
            [LAST * 3000],
        ],
        [LAST * 65, LAST * 71, "y", "x" * 64, "\uffff"],
    ),
    "face": Values(StringType(), [["a", "\U0001f600"], ["\U0001f600x", None], [LAST, "\U0001f601"], ["b"]], ["\uffff"]),
    "bytes": Values(BinaryType(), [[b"", b"\x00"], [b"\xff" * 100, None], [b"a"], [b"b"]], [b"c"]),
    "place": Values(StringType(), [["a"], [None], ["ü b"], ["a"]], ["", "b"]),
    "nothing": Values(LongType(), [[None], [None], [1, None], [None]], [2]),
}
INNER = StructType(
    [StructField("n.m", LongType()), StructField("t", StringType()), StructField("l", ArrayType(LongType()))]
)
EXTRA = [
    StructField("in.side", StructType([StructField("a", DoubleType()), StructField("b", INNER)])),
    StructField("list", ArrayType(LongType())),
    StructField("map", MapType(StringType(), LongType())),
]
SCHEMA = StructType(
    [StructField("id", LongType()), *(StructField(name, each.kind) for name, each in COLUMNS.items()), *EXTRA]
)


def rows_of(file: int) -> list[tuple[Any, ...]]:
    """As many as the longest column has values; a shorter one begins anew."""
    values = [each.files[file] for each in COLUMNS.values()]
    found = []
    for n in range(max(map(len, values))):
        number = file * 10 + n
        inner = None if n == 0 else (float(number), (number, f"t{number}" * 20, [number]))
        found.append((number, *(each[n % len(each)] for each in values), inner, [None, number], {"a": number}))
    return found


def make_table(path: Path, spark: SparkSession, target: str | None = None, parts: int = 1) -> deltalake.DeltaTable:
    """As a pipeline does: files of Spark's, added by a commit; in so many parts of each."""
    sink = DeltaTable(path, "place", target_file_size=target).bind(SinkPlace("shop", "orders", Memory(), spark))
    sink.check_table(SCHEMA, "append")
    sink.prepare_table(SCHEMA)
    session = StageSessions(spark).of_stages
    staged = []
    for file in range(FILES):
        folder = Path(staged_by(sink, 1).location()) / str(file)
        written = session.createDataFrame(rows_of(file), SCHEMA).repartition(parts).write
        written.partitionBy("place").parquet(str(folder))
        found = sorted(folder.rglob("*.parquet"))
        assert len(found) <= parts
        staged += [StagedFile(file, str(each), each.stat().st_size, read_footer(each).num_rows) for each in found]
    sink.commit(permit(1), Committable(FILES - 1, tuple(staged)))
    return deltalake.DeltaTable(path)


# -- filters and readers -----------------------------------------------------------------------------------

Filter = tuple[str, str, Any]
"""Column, operator, value."""
Found = list[list[int]]
"""The ids of the rows that each of some filters finds."""
COMPARED = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def filters_of(name: str) -> list[Filter]:
    known = [value for file in COLUMNS[name].files for value in file if value is not None]
    wanted = [*dict.fromkeys(known), *COLUMNS[name].others]
    return [
        *((name, how, value) for how in COMPARED for value in wanted),
        *((name, how, each) for how in ("in", "not in") for each in (wanted[:2], wanted[-2:])),
        (name, "is null", None),
        (name, "is not null", None),
    ]


FILTERS = [each for name in COLUMNS for each in filters_of(name)]


def by_arrow(table: deltalake.DeltaTable) -> tuple[Found, Found]:
    lazily = table.to_pyarrow_dataset()
    everything = lazily.to_table()

    def condition(name: str, how: str, value: Any) -> Any:
        field, kind = dataset.field(name), lazily.schema.field(name).type
        if how.startswith("is"):
            return field.is_null() if how == "is null" else field.is_valid()
        if how.endswith("in"):
            among = field.isin(pyarrow.array(value, kind))
            return among if how == "in" else ~among
        return COMPARED[how](field, pyarrow.scalar(value, kind))

    # Arrow takes NaN for the largest value where it looks at bounds, whosever they are.
    conditions = [condition(*each) for each in FILTERS if each[1] not in {"<", "<="} or each[2] == each[2]]
    found = [lazily.to_table(columns=["id"], filter=each) for each in conditions]
    return [ids(each) for each in found], [ids(everything.filter(each)) for each in conditions]


def by_pandas(table: deltalake.DeltaTable) -> tuple[Found, Found]:
    """As people write it. Few filters, because each opens the table."""
    rows = [row for file in range(FILES) for row in rows_of(file)]
    found, expected = [], []
    for position, (name, values) in enumerate(COLUMNS.items(), 1):
        for value in (each for each in values.files[0] if each is not None):
            found.append(sorted(table.to_pandas(columns=["id"], filters=[(name, "==", value)])["id"]))
            expected.append([row[0] for row in rows if row[position] == value])
    return found, expected


QUOTE = '"'


def as_sql(each: Filter, quote: str, types: Mapping[str, str]) -> str:
    """With names in these quotes, and types by the names that SQL has for them."""
    name, how, value = each
    kind = COLUMNS[name].kind.simpleString()

    def literal(value: Any) -> str:
        if isinstance(value, str):
            return f"'{value}'"
        if isinstance(value, bytes):
            return f"x'{value.hex()}'"
        return types.get(kind, f"cast('{{}}' as {kind})").format(value)

    given = ""
    if how.endswith("in"):
        given = f"({', '.join(literal(each) for each in value)})"
    elif value is not None:
        given = literal(value)
    return f"{quote}{name.replace(quote, quote * 2)}{quote} {'=' if how == '==' else how} {given}"


def by_sql(table: deltalake.DeltaTable) -> tuple[Found, Found]:
    tables = deltalake.QueryBuilder().register("t", table)
    moment = "arrow_cast('{}', 'Timestamp(Microsecond, %s)')"
    types = {"timestamp": moment % 'Some("UTC")', "timestamp_ntz": moment % "None"}
    conditions = [as_sql(each, QUOTE, types) for each in FILTERS]

    def query(text: str) -> Any:
        return pyarrow.table(tables.execute(text).read_all())

    found = [ids(query(f"select id from t where {each}")) for each in conditions]
    said = query(f"select id, {', '.join(f'{each} as c{n}' for n, each in enumerate(conditions))} from t").to_pylist()
    return found, [sorted(row["id"] for row in said if row[f"c{n}"]) for n in range(len(conditions))]


def by_spark(rows: DataFrame) -> tuple[Found, Found]:
    """One filter per column, and one query for all: Spark needs long for each."""
    conditions = [as_sql(filters_of(name)[1], "`", {}) for name in COLUMNS]
    filtered = (rows.where(each).select(F.lit(n).alias("filter"), "id") for n, each in enumerate(conditions))
    pairs = reduce(DataFrame.unionAll, filtered).collect()
    said = rows.select("id", *(F.expr(each).alias(f"c{n}") for n, each in enumerate(conditions))).collect()
    found = [sorted(row["id"] for row in pairs if row["filter"] == n) for n in range(len(conditions))]
    return found, [sorted(row["id"] for row in said if row[f"c{n}"]) for n in range(len(conditions))]


def ids(rows: Any) -> list[int]:
    return sorted(rows.column("id").to_pylist())


# -- every row is found -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> deltalake.DeltaTable:
    return make_table(tmp_path_factory.mktemp("lake") / "table", spark)


@pytest.mark.parametrize("read", [by_arrow, by_pandas, by_sql])
def test_deltalake_finds_every_row_that_a_filter_does_not_rule_out(
    read: Callable[[deltalake.DeltaTable], tuple[Found, Found]], table: deltalake.DeltaTable
) -> None:
    found, expected = read(table)
    assert found == expected
    assert len(expected) > 30
    assert any(len(each) > 3 for each in expected)


def test_spark_finds_every_row_that_a_filter_does_not_rule_out(
    table: deltalake.DeltaTable, spark: SparkSession
) -> None:
    path = Path(table.table_uri.removeprefix("file://"))
    found, expected = by_spark(TableAt(path, table.version()).to_spark(spark))
    assert found == expected
    assert sum(map(len, expected)) > 30


@pytest.fixture(scope="module")
def combined(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> deltalake.DeltaTable:
    """One file for each place."""
    return make_table(tmp_path_factory.mktemp("lake") / "combined", spark, "32MB", parts=2)


def test_files_that_were_combined_hold_every_value_as_it_was(
    combined: deltalake.DeltaTable, table: deltalake.DeltaTable, spark: SparkSession
) -> None:
    assert len(combined.file_uris()) == 3 < len(table.file_uris())

    def read(one: deltalake.DeltaTable) -> list[Any]:
        path = Path(one.table_uri.removeprefix("file://"))
        rows = TableAt(path, one.version()).to_spark(spark)
        plain = spark.read.schema(SCHEMA).parquet(*(str(path / file.path) for file in active_files(one))).drop("place")
        # As Spark's own text: Python has no time before the year 1 in another zone.
        texts = [each.orderBy("id").selectExpr("cast(struct(*) as string)").collect() for each in (rows, plain)]
        by_delta = one.to_pyarrow_table().sort_by("id")
        assert by_delta.schema == table.to_pyarrow_table().schema
        return [*texts, repr(by_delta.to_pylist())]

    assert read(combined) == read(table)
    for found, expected in (by_arrow(combined), by_sql(combined)):
        assert found == expected


def test_columns_in_a_struct_are_filtered_by(table: deltalake.DeltaTable) -> None:
    inner = dataset.field("in.side", "b", "n.m")
    assert ids(table.to_pyarrow_table(filters=(inner > 11) & (inner < 31))) == [12, 21, 22]
    tables = deltalake.QueryBuilder().register("t", table)
    for condition, wanted in {
        "\"in.side\"['b']['n.m'] > 11 and \"in.side\"['b']['n.m'] < 31": [12, 21, 22],
        "\"in.side\"['b']['t'] = '" + "t12" * 20 + "'": [12],
        "\"in.side\"['a'] is null": [0, 10, 20, 30],
    }.items():
        assert ids(pyarrow.table(tables.execute(f"select id from t where {condition}").read_all())) == wanted


def test_the_smallest_and_largest_values_are_those_of_the_rows_not_of_the_log(table: deltalake.DeltaTable) -> None:
    tables = deltalake.QueryBuilder().register("t", table)
    for name in ("text", "last `text`", "moment", "local", "sum.total", "day"):
        for where in ("", "where id < 20", f'where "{name}" is not null'):
            query = f'select min("{name}") a, max("{name}") b from t {where}'
            (row,) = pyarrow.table(tables.execute(query).read_all()).to_pylist()
            files = COLUMNS[name].files[: 2 if "20" in where else FILES]
            values = [value for file in files for value in file if value is not None]
            assert row == {"a": min(values), "b": max(values)}


def test_a_checkpoint_of_the_log_keeps_what_it_says(table: deltalake.DeltaTable) -> None:
    before = pyarrow.table(table.get_add_actions()).sort_by("path")
    table.create_checkpoint()
    again = deltalake.DeltaTable(table.table_uri)
    assert pyarrow.table(again.get_add_actions()).sort_by("path") == before


def test_files_that_a_filter_rules_out_are_not_read(tmp_path: Path, spark: SparkSession) -> None:
    table = make_table(tmp_path / "table", spark)
    for file in active_files(table, ["id"]):
        if file.bounds.get("id", Bounds(99, 99, 0)).least < 20:  # the last one has none
            (tmp_path / "table" / file.path).unlink()
    wanted = {"octet": 3, "single": 1.5, "large": 2**53 + 1, "text": "ü" * 3000, "day": date(2026, 1, 1)}
    tables = deltalake.QueryBuilder().register("t", table)
    for name, value in wanted.items():
        assert ids(table.to_pyarrow_table(filters=[(name, "==", value)])) != []
        query = f"select id from t where {as_sql((name, '==', value), QUOTE, {})}"
        assert ids(pyarrow.table(tables.execute(query).read_all())) != []
    with pytest.raises(FileNotFoundError):
        table.to_pyarrow_table(filters=[("octet", "==", 1)])
