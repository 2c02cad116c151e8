"""The state variables of a `transformWithState`, before Spark runs it.

They are known only when the processor's `init` asks for them. Spark calls it on the driver for that, when it plans the
first batch; here it is called the same way before anything is started, on a copy of the processor, with a handle behind
which nobody is but one who writes down what is asked for.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle
from pyspark.sql.types import StructType

from tidegate.storage.manifest import StateColumn


def state_variables(function: Any) -> tuple[StateColumn, ...] | None:
    """Those of the processor in a Python function of the plan. None where its `init` does not tell outside of Spark.

    `function` is the JVM's, and holds what Spark sends to its workers.
    """
    asked: Any = _Asked()
    try:
        called, *_ = pickle.loads(bytes(function.command().unsafeArray()))
        processor = called.__self__._stateful_processor
        processor.init(StatefulProcessorHandle(asked))
    except (Exception, SystemExit):  # of the user's own code, which may need what only a worker has
        return None
    with suppress(Exception, SystemExit):
        processor.close()  # what it has opened
    return tuple(asked.variables[name] for name in sorted(asked.variables))


class _Asked:
    """Stands in for the client by which a handle talks to the JVM."""

    def __init__(self) -> None:
        self.variables: dict[str, StateColumn] = {}

    def get_value_state(self, name: str, schema: StructType | str, ttl_ms: int | None) -> None:
        self._note("value", name, _shown(schema), ttl_ms)

    def get_list_state(self, name: str, schema: StructType | str, ttl_ms: int | None) -> None:
        self._note("list", name, _shown(schema), ttl_ms)

    def get_map_state(
        self, name: str, key_schema: StructType | str, schema: StructType | str, ttl_ms: int | None
    ) -> None:
        self._note("map", name, f"{_shown(key_schema)} to {_shown(schema)}", ttl_ms)

    def delete_if_exists(self, name: str) -> None:
        self.variables.pop(name, None)

    def _parse_string_schema(self, schema: str) -> StructType:
        return _parsed(schema)

    def _note(self, kind: str, name: str, of_type: str, ttl_ms: int | None) -> None:
        # Spark stores when a value ends beside it, so with a time to live it is of another type.
        lives, for_ms = ("", "") if ttl_ms is None else (", with a time to live", f"{ttl_ms} ms")
        self.variables[name] = StateColumn(name, f"{kind} of {of_type}{lives}", for_ms)


def _parsed(schema: StructType | str) -> StructType:
    if isinstance(schema, StructType):
        return schema
    parsed = StructType.fromDDL(schema)
    assert isinstance(parsed, StructType)
    return parsed


def _shown(schema: StructType | str) -> str:
    return _parsed(schema).simpleString().removeprefix("struct<").removesuffix(">")
