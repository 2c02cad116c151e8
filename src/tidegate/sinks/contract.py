"""What a sink is.

A sink stage is a Spark query that writes Parquet files into the sink's staging folder, batch by batch, natively.
Nothing staged is visible. A checkpoint seals what was staged up to the stage's cut in a *committable*, JSON that
is kept in the manifest; when the checkpoint is decided, `commit` makes it visible in one atomic step.

What each call may assume, and must give:
- A committable names everything that the table does not show yet, not only the last epoch's. A commit shows what
  lies in batches after the table's own last one; so epochs may overlap, and none leaves a hole.
- `commit` comes only for decided checkpoints, and may come again for the same one, from another process too: then
  it answers `ALREADY` and changes nothing. Epochs come in order; one that is not newer than the table's is one
  that it shows already.
- `fence(generation)` makes every later commit of an older generation fail with `Fenced`.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.recovery import SinkFacts

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class StagedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file that a batch staged. `path` is absolute: a sink's table may lie anywhere."""

    batch: int
    path: str
    size_bytes: int
    rows: int


class Committable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: tuple[StagedFile, ...]
    through_batch: int


class CommitAnswer(enum.Enum):
    COMMITTED = "committed"
    ALREADY = "the table shows it already"


@runtime_checkable
class Sink(Protocol):
    """A table, as the pipeline sees it. `owner` is the pipeline's and the stage's name."""

    def describe(self) -> str:
        """The table, for people."""
        ...

    def staging_folder(self, owner: str, generation: int) -> Path:
        """Where a generation's files are staged."""
        ...

    @property
    def partition_by(self) -> tuple[str, ...]: ...

    def check_table(self, owner: str, schema: StructType) -> None:
        """Raise if the table, there or yet to be created, cannot have this schema. Changes nothing."""
        ...

    def prepare_table(self, owner: str, schema: StructType) -> None:
        """Create the table with this schema, or check that it has it."""
        ...

    def facts(self, owner: str) -> SinkFacts:
        """What the table itself says of the last epoch and the fence."""
        ...

    def fence(self, owner: str, generation: int) -> None: ...

    def commit(self, owner: str, permit: CommitPermit, committable: Committable) -> CommitAnswer: ...

    def forget_staged(self, owner: str, before_generation: int) -> None:
        """Remove what older generations have staged: what of it was decided is visible."""
        ...
