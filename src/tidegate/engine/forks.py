"""What makes a root a fork: it is told so by a file, which says which tables it has of its own.

A fork runs the pipeline as its file defines it, a newer version of it perhaps, but what that would write to a table of
the pipeline that it was made from goes to the fork's own, and no function is called: that one calls them. So the file
need not be changed, neither for the fork nor when it takes the other's place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.errors import ForeignRoot, InvalidPipeline, RecoveryRefused
from tidegate.sinks import function
from tidegate.sinks.contract import MovableSink, Sink
from tidegate.sinks.delta.home import home_of
from tidegate.storage.files import Files
from tidegate.storage.manifest import TableAddress
from tidegate.storage.paths import RootPaths

if TYPE_CHECKING:
    from tidegate.engine.pipeline import Pipeline
    from tidegate.spark.definition import StageDefinition

_CALLED: Final = "function"
"""The kind of sinks that do something which nobody can take back."""


class ForkedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a fork, and the one that it was made from. `version`: the newest that had then, where it has any."""

    kind: str
    table: str
    original: str
    version: int | None = None


class Fork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a fork was made from: a checkpoint or savepoint, by its name, of a root. `tables`: by the names of sinks."""

    root: str
    root_id: str
    made_from: str
    made_at: str
    tables: dict[str, ForkedTable] = {}

    def own(self, table: TableAddress) -> str | None:
        """The address of the fork's table that stands for one of the pipeline's; None: there is none."""
        return next((each.table for each in self.tables.values() if _is_at(table, each.original)), None)

    def original(self, table: TableAddress) -> ForkedTable | None:
        """The other way round."""
        return next((each for each in self.tables.values() if _is_at(table, each.table)), None)


def _is_at(table: TableAddress, address: str) -> bool:
    if table.kind == "delta":
        return home_of(table.address).same == home_of(address).same
    return table.address == address


def write_fork(files: Files, fork: Fork) -> None:
    files.write(RootPaths.FORK, msgspec.json.format(msgspec.json.encode(fork), indent=1))


def read_fork(files: Files) -> Fork | None:
    """None: the root is no fork, or no longer."""
    data = files.read(RootPaths.FORK)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=Fork)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ForeignRoot(
            f"{files.location(RootPaths.FORK)} cannot be read, it is damaged or of another version of Tidegate: "
            f"{error}. What to do: restore it from a backup, or make the fork anew"
        ) from error


def as_run_on(pipeline: Pipeline, root: Files) -> Pipeline:
    """A pipeline as it is run on a root: that of a fork writes to the fork's own tables."""
    fork = read_fork(root)
    if fork is None:
        return pipeline
    if not root.list(RootPaths.DECISIONS):
        # Run all the same, it would begin with nothing and write to tables of which nobody has heard.
        raise RecoveryRefused(
            f"{root.location()} was to be a fork of {fork.root}, and has no decision log: whoever made it was stopped "
            f"before the fork was decided, or the log is gone. What to do: make it again with `tidegate fork`, or "
            f"restore the folder {RootPaths.DECISIONS} from a backup if it ever ran"
        )
    return pipeline.with_stages(lambda each: _redirected(each, fork))


def _redirected(definition: StageDefinition, fork: Fork) -> StageDefinition:
    sink = definition.sink
    if sink is None:
        return definition
    if sink.table.kind == _CALLED:
        return msgspec.structs.replace(definition, sink=function.ForeachBatch(_do_nothing))
    address = fork.own(sink.table)
    return definition if address is None else msgspec.structs.replace(definition, sink=moved(sink, address))


def moved(sink: Sink, address: str) -> Sink:
    """The same sink for the table at an address."""
    if sink.table.address == address:
        return sink
    if not isinstance(sink, MovableSink):
        raise InvalidPipeline(f"{sink.describe()} cannot be forked: it has no method `at` that gives it another table")
    return sink.at(address)


def _do_nothing(_rows: Any, _epoch: int) -> None:
    """What a fork does where the pipeline calls a function."""
