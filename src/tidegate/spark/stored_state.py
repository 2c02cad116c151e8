"""The state of a stage, read from Spark's checkpoint folder by Spark's own reader of state.

What Spark calls an operator keeps its state in one *part*, or in several: a join has `left` and `right`, the rows that
wait on each side; `transformWithState` has one for each of its variables, and `timers`. Each is read by itself, because
each has columns of its own: `key`, what is stored for it, and `partition_id`.

The folder must stay as long as a frame of it may be read: Spark reads it anew for each action.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import NullType, StructField, StructType

from tidegate.errors import StageFailed, UnknownState
from tidegate.spark.causes import cause_of, without_pysparks_log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidegate.storage.files import Files

_Py4JError: Any = importlib.import_module("py4j.protocol").Py4JError  # it has no types

TIMERS: Final = "timers"
_READER: Final = "statestore"
_CATALOG: Final = "state-metadata"
_JOIN: Final = "symmetricHashJoin"
_SIDES: Final = ("left", "right")
_WITHOUT_TIME: Final = "none"
_OWN: Final = "$"
"""What Spark keeps for itself beside the variables of a `transformWithState`: timers, times to live, counts."""


@contextmanager
def told_of(stage: str) -> Iterator[None]:
    """What Spark cannot read of a stage, or is asked for and cannot do, in words instead of its trace."""
    try:
        with without_pysparks_log():
            yield
    except (PySparkException, _Py4JError) as error:
        raise StageFailed(stage, f"its rows cannot be read: {cause_of(error)}") from error


class StatePart(msgspec.Struct, frozen=True):
    """`name` is None where the operator has but one. `options`: what makes Spark's reader read it. `is_list`: it is the
    elements of lists, whose order counts."""

    name: str | None
    options: dict[str, str]
    is_list: bool = False


class StoredOperator(msgspec.Struct, frozen=True):
    """An operator by the number that Spark gives it in its query, and the name."""

    number: int
    name: str
    parts: tuple[StatePart, ...]

    def part(self, name: str | None) -> StatePart:
        """The part of that name, or the only one."""
        if name is None and len(self.parts) == 1:
            return self.parts[0]
        for each in self.parts:
            if name is not None and each.name == name:
                return each
        names = ", ".join(each.name for each in self.parts if each.name is not None)
        if not names:
            raise UnknownState(f"operator {self.number} has no part {name!r}: its state is in one piece; leave it out")
        asked = "keeps several" if name is None else f"has no part {name!r}"
        raise UnknownState(f"operator {self.number} {asked}; name one of: {names}")


class _Variable(msgspec.Struct, rename="camel"):
    state_name: str
    state_variable_type: str = ""


class _Properties(msgspec.Struct, rename="camel"):
    """What Spark notes of a `transformWithState`."""

    time_mode: str = _WITHOUT_TIME
    state_variables: list[_Variable] = []


class StoredState:
    """What a query has stored at a batch."""

    def __init__(self, session: SparkSession, checkpoint: Files, batch: int) -> None:
        """`session`: one that has the settings of stages."""
        self._session = session
        self._folder = checkpoint.location()
        self._batch = str(batch)

    def operators(self) -> list[StoredOperator]:
        """Those that keep state, as Spark has noted them."""
        rows = self._session.read.format(_CATALOG).option("batchId", self._batch).load(self._folder).collect()
        found: dict[int, StoredOperator] = {}
        for row in rows:
            number = int(row["operatorId"])
            name = str(row["operatorName"])
            found.setdefault(number, StoredOperator(number, name, _parts(name, row["operatorProperties"])))
        return [found[number] for number in sorted(found)]

    def frame(self, operator: StoredOperator, part: StatePart, *, flat: bool = True) -> DataFrame:
        """What a part holds. `flat`: a row for each element of a list or a map, not one for all of a key's."""
        reader = self._session.read.format(_READER).option("batchId", self._batch)
        reader = reader.option("operatorId", str(operator.number)).options(**part.options)
        if "stateVarName" in part.options:
            reader = reader.option("flattenCollectionTypes", str(flat).lower())
        return _named_apart(reader.load(self._folder))


def _parts(operator: str, properties: str | None) -> tuple[StatePart, ...]:
    if operator == _JOIN:
        return tuple(StatePart(side, {"joinSide": side}) for side in _SIDES)
    if not properties:
        return (StatePart(None, {}),)
    noted = msgspec.json.decode(properties, type=_Properties)
    variables = sorted(
        (each for each in noted.state_variables if not each.state_name.startswith(_OWN)),
        key=lambda each: each.state_name,
    )
    parts = [
        StatePart(each.state_name, {"stateVarName": each.state_name}, each.state_variable_type == "ListState")
        for each in variables
    ]
    if noted.time_mode.lower() != _WITHOUT_TIME and TIMERS not in {each.name for each in parts}:
        parts.append(StatePart(TIMERS, {"readRegisteredTimers": "true"}))
    return tuple(parts)


# -- columns ----------------------------------------------------------------------------------------


def _named_apart(frame: DataFrame) -> DataFrame:
    """The same with names that tell columns apart, and without a column that holds nothing.

    Spark calls what is stored for two sums `sum` and `sum`: the second becomes `sum_2`. Where a key alone is stored,
    the value is one of no type, which no file can hold.
    """
    kept = []
    for field in frame.schema.fields:
        column = F.col(f"`{field.name}`")
        if isinstance(field.dataType, StructType):
            inside = field.dataType.fields
            if all(isinstance(each.dataType, NullType) for each in inside):
                continue
            names = _told_apart(field.dataType.names)
            if names != field.dataType.names:
                by_place = [
                    StructField(name, each.dataType, each.nullable) for name, each in zip(names, inside, strict=True)
                ]
                column = column.cast(StructType(by_place)).alias(field.name)
        kept.append(column)
    return frame.select(*kept)


def _told_apart(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        taken = {each.lower() for each in found}
        unique, number = name, 1
        while unique.lower() in taken:
            number += 1
            unique = f"{name}_{number}"
        found.append(unique)
    return found
