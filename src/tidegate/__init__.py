"""Tidegate: consistent, distributed checkpoints for PySpark streaming pipelines.

The public names are loaded when they are first used: what only looks at a root must not wait for the libraries of
those who write tables.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidegate.engine.comparing import compare
    from tidegate.engine.forking import fork, promote
    from tidegate.engine.inspecting import state
    from tidegate.engine.pipeline import Pipeline
    from tidegate.engine.restoring import restore
    from tidegate.engine.savepoints import savepoint
    from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
    from tidegate.sinks.delta.reading import read
    from tidegate.sinks.delta.table import DeltaTable
    from tidegate.sinks.function import Console, ForeachBatch, Memory
    from tidegate.sinks.postgres.table import PostgresTable

__version__ = "0.1.0"

__all__ = [
    "AlignmentConfig",
    "CheckpointConfig",
    "Console",
    "DeltaTable",
    "ForeachBatch",
    "Memory",
    "Pipeline",
    "PostgresTable",
    "__version__",
    "compare",
    "fork",
    "promote",
    "read",
    "restore",
    "savepoint",
    "state",
]

_HOMES: Final = {
    "AlignmentConfig": "tidegate.protocol.config",
    "CheckpointConfig": "tidegate.protocol.config",
    "Console": "tidegate.sinks.function",
    "DeltaTable": "tidegate.sinks.delta.table",
    "ForeachBatch": "tidegate.sinks.function",
    "Memory": "tidegate.sinks.function",
    "Pipeline": "tidegate.engine.pipeline",
    "PostgresTable": "tidegate.sinks.postgres.table",
    "compare": "tidegate.engine.comparing",
    "fork": "tidegate.engine.forking",
    "promote": "tidegate.engine.forking",
    "read": "tidegate.sinks.delta.reading",
    "restore": "tidegate.engine.restoring",
    "savepoint": "tidegate.engine.savepoints",
    "state": "tidegate.engine.inspecting",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # found at once the next time
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
