"""What a sink is, and what each call may assume and must give.

What a user writes, a `Sink`, only describes a table. It is *bound* to its place, which is a stage of a pipeline: once
before Spark is started, to look at the table, and with a session for each generation. What comes of that is a
`BoundSink`, which all calls below go to.

A sink stage is a Spark query whose batches are *staged*: written where no reader sees them. A checkpoint *prepares*
what was staged up to the stage's cut: it is sealed in a `Committable`, JSON that lies in the manifest. When the
checkpoint is decided, `commit` makes it visible in one atomic step.

There are two ways to stage, and a bound sink has one of them:
- a `FileSink` names a place, and Spark's own file sink writes Parquet files there, natively;
- a `RowSink` gets each batch as a DataFrame and stages it itself, from the executors.

The rules:
- **stage** comes batch after batch, and for one batch perhaps more than once (a task or the whole batch was tried
  again): the last time counts, and nothing of the times before may stay. Batches of different generations never mix.
- **prepare** is not a call: what a batch has staged is durable when `stage` returns, so sealing it is naming it. A
  committable names everything that the table does not show yet, not only the last epoch's.
- **check_commit** is for a sink whose table may refuse rows (a `CheckingSink`): it comes for what was sealed, before
  the checkpoint may be decided. If it raises, the checkpoint is aborted, so that no other table shows it either. It
  comes on another thread than a commit, and one may be under way. It need not guarantee that the commit will succeed.
- **commit** comes only for decided checkpoints. It shows what lies in batches after the table's own last one, so epochs
  may overlap and none leaves a hole. It may come again for the same epoch, after a crash and from another process too:
  then it answers `ALREADY` and changes nothing. Epochs come in order. What it cannot show, because rows are missing or
  were staged for a sink of the other kind, it refuses with `SinkFailed`.
- A committable says after which batch it goes on (`shown_through`): rows up to there are in no committable any more. So
  **a table whose own record is below that is refused** with `TablePutBack`, at every commit, also one without rows: it
  was put back to an older state (a backup, a standby that lagged, a commit that was lost) and would keep a hole.
- **claim** makes a table the root's, for this stage of this pipeline, before anything is staged. Of two roots that
  do so at once one wins. `check_table`, `claim`, `fence` and `commit` refuse another root's with `ForeignTable` and
  change nothing: so whatever is staged under an owner's name is of one root, and `forget_staged` may go by generations.
- **abort** of a checkpoint is not a call either: what was staged stays, and the next checkpoint seals it again. What a
  lost generation has staged after the checkpoint that the pipeline was restored from is never sealed, so it is never
  shown; `forget_staged` removes it.
- **Durable** means on the disk: staged files are forced there before the checkpoint that names them is decided. What
  `commit` and `fence` have done must be durable when they return, also where they find it done already: the next
  checkpoint no longer names those rows.
- **fence** makes every later commit of an older generation fail with `Fenced`, also one that is under way.
- All that a sink must remember of its commits it keeps in the table itself, in the same transaction as the rows.
  Where a table cannot do that, the sink is at least once, and says so in `is_exactly_once`.

`tidegate.testing.sinks` has the tests that a sink must pass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import msgspec

from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.recovery import SinkFacts
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, TableAddress
from tidegate.storage.transfers import Transfers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


class Upkeep(msgspec.Struct, frozen=True):
    """What one pass of looking after a table has done to it."""

    files_before: int
    files_after: int
    deleted: int
    freed_bytes: int


class SinkPlace(msgspec.Struct, frozen=True):
    """Which stage of which pipeline a sink serves.

    `files`, in the pipeline's root, are for what the sink must remember and has no table for. `session` is there while
    the pipeline runs. `root` is the id of that root, which no other root has. `transfers` are told how far what goes to
    a bucket, or comes from one, has come.
    """

    pipeline: str
    stage: str
    files: Files
    session: SparkSession | None = None
    root: str = ""
    transfers: Transfers | None = None

    @property
    def fsync(self) -> bool:
        """Whether what a commit has shown and recorded is to survive a loss of power."""
        return self.files.fsync

    @property
    def owner(self) -> str:
        """By what name a table knows it."""
        return f"{self.pipeline}/{self.stage}"


class StagedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file that a batch staged. `path` is its location: a sink's table may lie anywhere."""

    batch: int
    path: str
    size_bytes: int
    rows: int


class StagedBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One batch that a `RowSink` staged itself."""

    batch: int
    generation: int
    rows: int


Staged = StagedFile | StagedBatch


class Committable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a table does not show yet, up to a batch.

    `shown_through` is the last batch with rows that the table had shown when this was sealed, -1 if none. With rows,
    because a table need not take notice of the others.
    """

    through_batch: int
    files: tuple[StagedFile, ...] = ()
    batches: tuple[StagedBatch, ...] = ()
    shown_through: int = -1

    @property
    def last_with_rows(self) -> int:
        """The last batch with rows that it knows of, -1 if none. Also of what it has sealed itself: a table has shown
        that since, or will, and then what was staged of it is gone."""
        staged: list[Staged] = [*self.files, *self.batches]
        return max([self.shown_through, *(each.batch for each in staged if each.rows)])

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def decode_committable(text: str) -> Committable:
    return msgspec.json.decode(text, type=Committable)


class CommitAnswer(enum.Enum):
    COMMITTED = "committed"
    ALREADY = "the table shows it already"


@runtime_checkable
class Sink(Protocol):
    """What a user writes: a table, described. It holds nothing open, and may be bound several times, in any thread."""

    @property
    def is_exactly_once(self) -> bool:
        """Whether a repeated commit can never show a row twice."""
        ...

    @property
    def table(self) -> TableAddress:
        """Where the rows are, for the manifest. Without credentials."""
        ...

    def describe(self) -> str:
        """The table, for people. Without credentials."""
        ...

    def bind(self, place: SinkPlace) -> BoundSink:
        """The table as one stage writes to it: a `FileSink` or a `RowSink`. Touches nothing.

        A class that is both may give a copy of itself that knows the place.
        """
        ...


@runtime_checkable
class SinkWithPath(Sink, Protocol):
    """A sink whose table is named by a path, which may be a relative one."""

    def seen_from(self, folder: Path) -> Self:
        """The sink with its path taken from this folder, if it is relative."""
        ...


@runtime_checkable
class MovableSink(Sink, Protocol):
    """A sink that can write to another table of its kind: that of a fork."""

    def at(self, address: str) -> Self:
        """The same sink for a table at another address, which is one as `table` says it."""
        ...


@runtime_checkable
class OrderedSink(Sink, Protocol):
    """A sink that knows whether rows must come to it in order."""

    @property
    def needs_order(self) -> bool:
        """Whether rows of a later batch take the place of those of an earlier one, so that none may overtake another.

        Then each of its batches, and of the stages before it, reads one segment of each input at most.
        """
        ...


@runtime_checkable
class BoundSink(Protocol):
    """A sink at its place: what both kinds of them have."""

    @property
    def place(self) -> SinkPlace:
        """What it was bound to."""
        ...

    @property
    def table(self) -> TableAddress:
        """As the sink says it."""
        ...

    def describe(self) -> str:
        """As the sink says it."""
        ...

    def identity(self) -> str | None:
        """What the table that is there now has and no other, not even one that takes its place at the same address.

        Without credentials. None: there is no table, or nothing that tells it from others.
        """
        ...

    def check_table(self, schema: StructType, output_mode: str) -> bool:
        """Raise if the table, there or yet to be created, cannot take this. Changes nothing.

        Returns whether the table is there already. Where none has to be created, it is. This comes before the first
        `stage` or `commit`; what the table was found to be may be different by then.
        """
        ...

    def prepare_table(self, schema: StructType) -> None:
        """Create the table with this schema, unless it is there."""
        ...

    def claim(self) -> None:
        """Make the table this root's, for this owner. May come again. Not before the root has a generation: one that
        has none may be removed again, and nobody could use the table any more."""
        ...

    def facts(self) -> SinkFacts:
        """What the table itself says of the last epoch, the fence and the batches that it shows."""
        ...

    def fence(self, generation: int) -> None: ...

    def commit(self, permit: CommitPermit, committable: Committable) -> CommitAnswer: ...

    def forget_staged(self, before_generation: int) -> None:
        """Remove what older generations have staged: what of it was decided is visible."""
        ...


@runtime_checkable
class FileSink(BoundSink, Protocol):
    """A sink whose batches Spark stages as Parquet files."""

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The columns that staged files are partitioned by."""
        ...

    @property
    def folders_by(self) -> tuple[str, ...]:
        """The columns whose values name folders, be it only in the table."""
        ...

    @property
    def staging(self) -> Files:
        """Where files are staged, and nothing else that has a number for a name: `staged_by` has a generation's."""
        ...


def staged_by(sink: FileSink, generation: int, attempt: int = 1) -> Files:
    """Where a generation's files are staged: those of a query that was paused, apart from what it had begun before."""
    folder = f"{generation:06d}"
    return sink.staging.at(folder if attempt == 1 else f"{folder}/attempt-{attempt}")


@runtime_checkable
class TellingSink(BoundSink, Protocol):
    """A sink that stages its batches itself, and can tell who has staged any."""

    def staged_generation(self) -> int:
        """The largest generation that has staged for this owner, of whatever root, and may stage yet; 0: none."""
        ...


def staged_generation(sink: BoundSink) -> int:
    """The same of any sink, as far as it can be told. Another root that takes the table over goes on above it: one that
    had it may live on, and what that stages must not meet what is staged under the same number."""
    if isinstance(sink, TellingSink):
        return sink.staged_generation()
    names = sink.staging.names_in() if isinstance(sink, FileSink) else []
    return max((int(name) for name in names if name.isdigit()), default=0)


@runtime_checkable
class RowSink(BoundSink, Protocol):
    """A sink that stages its batches itself."""

    def open_staging(self, generation: int, schema: StructType) -> None:
        """Before a generation's first batch. May come twice."""
        ...

    def stage(self, generation: int, batch: int, frame: DataFrame) -> int:
        """Stage a batch instead of whatever was staged of it before. Returns its rows."""
        ...


@runtime_checkable
class ProbingSink(BoundSink, Protocol):
    """A sink that can tell much of its table before Spark is started, so that nobody waits for that in vain."""

    def probe(self) -> bool:
        """Raise if the table cannot be reached, or could not take rows whatever their columns are. Changes nothing.

        Returns whether the table is there. `check_table`, with the columns, follows when they are known.
        """
        ...


@runtime_checkable
class CheckingSink(BoundSink, Protocol):
    """A sink that can tell before the decision whether its table takes the rows."""

    def check_commit(self, committable: Committable) -> None:
        """Raise `SinkFailed` if the table, as it is now, would refuse what was sealed. Changes nothing.

        It comes beside commits of older epochs, which may remove what they have shown.
        """
        ...


class SettingBack(msgspec.Struct, frozen=True):
    """What bringing a table to a checkpoint would do to it. Versions are None where the table has none.

    `others`: what others have written to it since, each in words. `remains`: what cannot be undone, in words.
    `is_anothers`: it belongs to another root, which could not write to it any more.
    """

    from_version: int | None = None
    to_version: int | None = None
    rows_removed: int = 0
    rows_added: int = 0
    others: tuple[str, ...] = ()
    remains: str | None = None
    is_anothers: bool = False


@runtime_checkable
class ReversibleSink(BoundSink, Protocol):
    """A sink whose table can be set back to what it showed at a checkpoint, with the records that it had then."""

    def look_back(self, to: Manifest, *, takes_over: bool = False) -> SettingBack:
        """What `set_back` would do. Raise `SinkFailed`, or `CheckpointNotVisible`, if it cannot. Changes nothing."""
        ...

    def set_back(self, to: Manifest, generation: int, *, discards_others: bool, takes_over: bool = False) -> None:
        """In one step: show what was shown at the checkpoint, also of rows that were replaced since; remember the epoch
        and the batches of then, and this generation, which older ones are fenced by. Durable when it returns.

        It may come again for the same generation: then nothing is changed. A table that a sink had not written to yet
        at the checkpoint, or that the pipeline did not have, shows nothing of it any more. `takes_over`: it becomes
        this root's in the same step, whose ever it was; otherwise another root's is refused with `ForeignTable`. The
        table knows the checkpoint by `to.shown_epoch`.
        """
        ...


@runtime_checkable
class CopyingSink(BoundSink, Protocol):
    """A sink whose table can be made to show what another one of its kind shows at a checkpoint: a fork's, when it is
    made, and the one that it was made from, when the fork takes its place.

    What another table shows is known by the checkpoint's manifest, as for a sink that is set back; the records of all
    sinks of the pipeline that write to it come along.
    """

    def look_at_copy(
        self, source: TableAddress, to: Manifest, *, replaces: bool, since: int | None = None
    ) -> SettingBack:
        """What `show_copy` would do. Raise `SinkFailed`, or `CheckpointNotVisible`, if it cannot. Changes nothing.

        `since`: what others have written to this table after that version of it is told.
        """
        ...

    def show_copy(
        self, source: TableAddress, to: Manifest, generation: int, *, replaces: bool, since: int | None = None
    ) -> None:
        """In one step: show what the other table shows at the checkpoint and nothing else, with its columns; remember
        the epoch and the batches of there, this root, and this generation, which older ones are fenced by. Durable when
        it returns.

        It may come again for the same generation: then nothing is changed. The other table stays as it is, and whatever
        becomes of it later, its deletion too, takes no row from this one. `replaces`: the table is there, and loses
        what it shows; otherwise it is made, and one that holds rows is refused. `since`: refuse where others have
        written to it after that version of it.
        """
        ...


@runtime_checkable
class KeptSink(BoundSink, Protocol):
    """A sink that looks after its table now and then, beside its commits."""

    @property
    def upkeep_every_ms(self) -> int | None:
        """How often; None: never."""
        ...

    def upkeep_due_in_ms(self) -> int:
        """How soon, by when the table was last looked after, by whatever run."""
        ...

    def keep_up(self, generation: int, retained: Callable[[], Sequence[Manifest]], is_stopping: Event) -> Upkeep | None:
        """One pass. It shows the same rows before and after, whenever it is killed, and leaves what `retained` says,
        asked after the table was looked at, as readable as it was. None: there was nothing to do."""
        ...
