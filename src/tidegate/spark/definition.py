"""A stage as its user has defined it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

if TYPE_CHECKING:
    from tidegate.sinks.contract import Sink

OutputMode = Literal["append", "update", "complete"]
Kind = Literal["source", "stage", "sink"]

SPARK_PARAMETER: Final = "spark"


class StageDefinition(msgspec.Struct, frozen=True):
    """One stage. `parameters` names what its function is called with: inputs, and `spark` for the session."""

    name: str
    kind: Kind
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    output_mode: OutputMode = "append"
    sink: Sink | None = None
    folder: Path | None = None
    """From where a source's relative paths are to be taken."""
