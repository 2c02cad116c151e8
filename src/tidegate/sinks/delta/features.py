"""What a Delta table may demand of its readers and writers that Tidegate does not do: then it keeps its hands off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import deltalake

FORGETTING: Final = "delta.setTransactionRetentionDuration"
"""Lets a table forget the application transactions that it has not seen for that long."""
_READ: Final = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "columnMapping"}
"""What any reader of files does. Column mapping is switched on by a property."""
_WRITTEN: Final = _READ | {
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "generatedColumns",
    "identityColumns",
    "invariants",
}
"""These too are switched on by a property, of the table or of a column."""


def unreadable(table: deltalake.DeltaTable) -> str | None:
    """What stands against reading the files of this version as they are."""
    unknown = sorted(set(table.protocol().reader_features or ()) - _READ)
    if unknown:
        return f"the table feature {unknown[0]}"
    properties = table.metadata().configuration
    if properties.get("delta.columnMapping.mode", "none") != "none":
        return "column mapping (delta.columnMapping.mode)"
    return None


def unwritable(table: deltalake.DeltaTable, *, replaces: bool) -> str | None:
    """What stands against adding files to the table and, where it `replaces` rows, removing some."""
    found = unreadable(table)
    if found is not None:
        return found
    unknown = sorted(set(table.protocol().writer_features or ()) - _WRITTEN)
    if unknown:
        return f"the table feature {unknown[0]}"
    properties = table.metadata().configuration
    demands = [name for name in properties if name.startswith("delta.constraints.")]
    if replaces:
        switches = ("delta.appendOnly", "delta.enableChangeDataFeed")
        demands += [name for name in switches if properties.get(name, "").lower() == "true"]
    # Generated and identity columns, invariants, types that were widened.
    demands += sorted(name for name in _of_columns(json.loads(table.schema().to_json())) if name.startswith("delta."))
    return f"the property {demands[0]}" if demands else None


def _of_columns(schema: Any) -> Iterator[str]:
    """The names of all properties that columns have, nested ones too."""
    if isinstance(schema, dict):
        yield from schema.get("metadata", ())
        for each in schema.values():
            yield from _of_columns(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _of_columns(each)
