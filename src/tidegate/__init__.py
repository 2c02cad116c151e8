"""Tidegate: consistent, distributed checkpoints for PySpark streaming pipelines."""

from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.sinks.delta import DeltaTable
from tidegate.sinks.function import Console, ForeachBatch, Memory
from tidegate.sinks.postgres import PostgresTable
from tidegate.spark.pipeline import Pipeline

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
]
