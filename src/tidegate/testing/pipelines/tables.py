"""What a test gets: the rows of each sink's table, after the last batch and after each.

Values are as Spark's `collect` gives them: a timestamp is a datetime without a zone, in that of the process; what is
nested in a row is a dict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.conversion import ArrowTableToRowsConversion
from pyspark.sql.types import StructType

from tidegate.sinks.delta.reading import TableAt
from tidegate.sinks.delta.scan import columns_of

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

_SHOWN: Final = 10


class Table:
    """The rows of one sink's table. They have no order of their own."""

    def __init__(self, sink: str, schema: StructType, rows: list[dict[str, Any]]) -> None:
        self.sink = sink
        self.schema = schema
        self.rows = rows

    def __repr__(self) -> str:
        return f"Table({self.sink!r}, {len(self.rows)} rows)"

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> list[str]:
        names: list[str] = self.schema.names
        return names

    def tuples(self, *columns: str) -> list[tuple[Any, ...]]:
        """The rows as tuples, of these columns or of all: for a set, a Counter, or to be sorted."""
        self._check_columns(columns)
        names = columns or self.columns
        return [tuple(row[name] for name in names) for row in self.rows]

    def to_pandas(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self.rows, columns=self.columns)

    def to_spark(self, session: SparkSession) -> DataFrame:
        return session.createDataFrame(self.tuples(), self.schema)

    def assert_rows(self, expected: Sequence[Mapping[str, Any] | Sequence[Any]]) -> None:
        """Fail unless the table has exactly these rows, in whatever order.

        A row is a tuple of all columns, or a dict. Columns that the dicts leave out are not compared.
        """
        __tracebackhide__ = True
        columns = self._compared(expected)
        wanted = [tuple(row[name] for name in columns) if isinstance(row, Mapping) else tuple(row) for row in expected]
        found, missing = Counter(map(_comparable, self.tuples(*columns))), Counter(map(_comparable, wanted))
        if found == missing:
            return
        shown = {_comparable(row): row for row in (*wanted, *self.tuples(*columns))}
        told = [
            _listed("missing", missing - found, shown),
            _listed("not expected", found - missing, shown),
        ]
        of = ", ".join(columns)
        raise AssertionError(f"the table of sink {self.sink!r} has other rows ({of}): {'; '.join(filter(None, told))}")

    def _compared(self, expected: Sequence[Mapping[str, Any] | Sequence[Any]]) -> tuple[str, ...]:
        first = expected[0] if expected else None
        columns = tuple(first) if isinstance(first, Mapping) else tuple(self.columns)
        self._check_columns(columns)
        for row in expected:
            if isinstance(row, Mapping) and set(row) != set(columns):
                raise AssertionError(
                    f"the rows that are expected of sink {self.sink!r} do not all have {columns}: {row}"
                )
            if not isinstance(row, Mapping) and len(row) != len(columns):
                raise AssertionError(f"sink {self.sink!r} has the columns {', '.join(columns)}, not so many as {row}")
        return columns

    def _check_columns(self, columns: Sequence[str]) -> None:
        for name in columns:
            if name not in self.columns:
                raise KeyError(f"sink {self.sink!r} has no column {name!r} (it has {', '.join(self.columns)})")


class Tables(Mapping[str, Table]):
    """The tables of a pipeline's sinks, by the names of these.

    `after[0]` has them as they were after the first batch, and so on: what every stage had made of the batches up to
    that one. What `close_windows` has closed in the end is in none of these.
    """

    def __init__(self, after: Sequence[Mapping[str, Table]], in_the_end: Mapping[str, Table]) -> None:
        self._tables = in_the_end
        self.after = tuple(after)

    def __getitem__(self, sink: str) -> Table:
        try:
            return self._tables[sink]
        except KeyError:
            raise KeyError(f"the pipeline has no sink {sink!r} (it has {', '.join(self._tables)})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        return f"Tables({', '.join(map(repr, self._tables.values()))})"


def read_table(sink: str, at: TableAt) -> Table:
    schema = columns_of(at.delta().schema())
    rows = ArrowTableToRowsConversion.convert(at.to_arrow().select(schema.names), schema)
    return Table(sink, schema, [row.asDict(recursive=True) for row in rows])


def _comparable(value: Any) -> Hashable:
    """Equal where values are, of NaN too, and hashable."""
    if isinstance(value, Mapping):
        return frozenset((key, _comparable(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, float) and value != value:  # noqa: PLR0124 - what only NaN is
        return "NaN"
    found: Hashable = value
    return found


def _listed(what: str, rows: Counter[Hashable], shown: Mapping[Hashable, tuple[Any, ...]]) -> str:
    if not rows:
        return ""
    each = [f"{shown[row]}{f' {count} times' if count > 1 else ''}" for row, count in rows.items()]
    more = f" and {len(each) - _SHOWN} more" if len(each) > _SHOWN else ""
    return f"{what}: {', '.join(each[:_SHOWN])}{more}"
