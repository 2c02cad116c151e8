"""Tidegate: consistent, distributed checkpoints for PySpark streaming pipelines."""

from tidegate.protocol.config import AlignmentConfig, CheckpointConfig

__version__ = "0.1.0"

__all__ = ["AlignmentConfig", "CheckpointConfig", "__version__"]
