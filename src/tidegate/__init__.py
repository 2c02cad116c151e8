"""Tidegate: consistent, distributed checkpoints for PySpark streaming pipelines.

The public names are loaded when they are first used: what only looks at a root must not wait for the libraries of
those who write tables.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
    from tidegate.sinks.delta import DeltaTable
    from tidegate.spark.pipeline import Pipeline

__version__ = "0.1.0"

__all__ = ["AlignmentConfig", "CheckpointConfig", "DeltaTable", "Pipeline", "__version__"]

_HOMES: Final = {
    "AlignmentConfig": "tidegate.protocol.config",
    "CheckpointConfig": "tidegate.protocol.config",
    "DeltaTable": "tidegate.sinks.delta",
    "Pipeline": "tidegate.spark.pipeline",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # found at once the next time
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
