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
    chain: bool = True
    """Whether it may run in one query with the stages beside it."""
    chained: tuple[StageDefinition, ...] = ()
    """Of a chain, which has the name and the output of its last stage and the inputs of its first: those before the
    last, in order."""

    @property
    def members(self) -> tuple[StageDefinition, ...]:
        """The stages that run in its query."""
        return (*self.chained, self)

    @property
    def head(self) -> str:
        """Its first stage: what Spark keeps for the query is kept by this name."""
        return self.members[0].name
