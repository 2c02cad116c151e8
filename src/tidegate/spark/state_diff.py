"""How two states of one kind differ: keys that were added, removed, and those for which something else is stored.

A key may have several rows, as the rows that wait on one side of a join: then all of them, in whatever order, are what
is stored for it. Where in Spark's partitions a key lies is of no meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql import functions as F

from tidegate.errors import InvalidConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_KEY: Final = "key"
_PARTITION: Final = "partition_id"
_BEFORE: Final = "before"
_AFTER: Final = "after"
_CHANGE: Final = "change"
_CHANGES: Final = ("added", "removed", "changed")


class KeyChange(msgspec.Struct, frozen=True):
    """A key, and the rows that were and are stored for it, as JSON would have them. None: the key was not there."""

    key: dict[str, Any]
    before: tuple[dict[str, Any], ...] | None
    after: tuple[dict[str, Any], ...] | None


class StateDiff(msgspec.Struct, frozen=True):
    """How many keys were added, removed and changed, how many stayed, and some of those that did not."""

    added: int
    removed: int
    changed: int
    unchanged: int
    some: dict[str, tuple[KeyChange, ...]]


def difference(before: DataFrame, after: DataFrame, limit: int) -> StateDiff:
    """`limit`: how many of each kind of change are told."""
    if _types(before) != _types(after):
        raise InvalidConfig(f"the two states are not of one kind: then {_types(before)}, later {_types(after)}")
    old, new = _by_key(before, _BEFORE), _by_key(after, _AFTER)
    joined = old.join(new, old[_KEY].eqNullSafe(new[_KEY]), "full_outer")
    change = (
        F.when(F.col(_BEFORE).isNull(), "added")
        .when(F.col(_AFTER).isNull(), "removed")
        .when(F.col(_BEFORE) != F.col(_AFTER), "changed")
        .otherwise("unchanged")
    )
    key = F.to_json(F.struct(F.coalesce(old[_KEY], new[_KEY]).alias(_KEY)), {"ignoreNullFields": "false"})
    told = joined.select(key.alias(_KEY), _BEFORE, _AFTER, change.alias(_CHANGE)).cache()
    try:
        counts = {row[_CHANGE]: int(row["count"]) for row in told.groupBy(_CHANGE).count().collect()}
        some = {
            kind: tuple(_told(row) for row in told.where(F.col(_CHANGE) == kind).orderBy(_KEY).limit(limit).collect())
            for kind in _CHANGES
            if counts.get(kind) and limit
        }
    finally:
        told.unpersist()
    added, removed, changed, unchanged = (counts.get(kind, 0) for kind in (*_CHANGES, "unchanged"))
    return StateDiff(added, removed, changed, unchanged, some)


def _types(frame: DataFrame) -> str:
    return frame.drop(_PARTITION).schema.simpleString()


def _by_key(frame: DataFrame, name: str) -> DataFrame:
    """One row a key, with all that is stored for it, in an order of its own. A sum over all rows has no key."""
    if _KEY not in frame.columns:
        frame = frame.withColumn(_KEY, F.struct(F.lit("all rows").alias(_KEY)))
    stored = [column for column in frame.columns if column not in (_KEY, _PARTITION)]
    value = F.to_json(F.struct(*stored), {"ignoreNullFields": "false"}) if stored else F.lit("{}")
    return frame.groupBy(_KEY).agg(F.array_sort(F.collect_list(value)).alias(name))


def _told(row: Any) -> KeyChange:
    key = msgspec.json.decode(row[_KEY])[_KEY]
    before, after = (None if row[name] is None else tuple(map(_value, row[name])) for name in (_BEFORE, _AFTER))
    return KeyChange(key, before, after)


def _value(text: str) -> dict[str, Any]:
    """A row that is stored for a key: without the name of its column, where that is a struct by itself."""
    found = msgspec.json.decode(text, type=dict[str, Any])
    only = next(iter(found.values()), None)
    return only if len(found) == 1 and isinstance(only, dict) else found
