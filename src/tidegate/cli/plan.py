"""`tidegate plan`: what a run would do if it were started now, changing nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console, Group
from rich.text import Text

from tidegate.cli.answers import KeptState, PlanAnswer, PlannedStage, PlannedTable, Refusal
from tidegate.cli.exits import Exit, code_of
from tidegate.cli.fitting import Column, fitted
from tidegate.cli.options import (
    AsJson,
    Conf,
    DroppedState,
    PipelineFile,
    PipelineName,
    Renames,
    RootPlace,
    of_run,
    renames_in,
    settings_in,
)
from tidegate.cli.speech import say
from tidegate.cli.text import console, terminal_width
from tidegate.engine.options import DEFAULTS
from tidegate.engine.outlook import NextStart
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import Restore
from tidegate.storage.places import Place, place_of

if TYPE_CHECKING:
    from tidegate.engine.changes import StageChange
    from tidegate.engine.preview import Preview

_CHANGES: Final = {"same": "goes on", "changed": "goes on, changed", "new": "starts empty", "removed": "is gone"}
_TABLES: Final = {
    "same": "the same table",
    "moved": "the table of before, at another address",
    "new": "no table yet: it would be created",
    "other": "another table than before, for which no row was ever sealed",
}


def plan_command(
    file: PipelineFile,
    root: RootPlace,
    pipeline: PipelineName = None,
    chain: Annotated[bool, of_run("chain", "--chain/--no-chain")] = DEFAULTS.chain,
    rename: Renames = [],  # noqa: B006 - typer copies it
    allow_dropped_state: DroppedState = [],  # noqa: B006 - the same
    conf: Conf = [],  # noqa: B006 - the same
    as_json: AsJson = False,
) -> None:
    """Say what `tidegate run` would do with the same options, changing nothing: neither root nor tables.

    From which checkpoint it would go on; which stages go on, are new, renamed, changed or gone, and whose state is kept
    or dropped; which tables are the same, moved or yet to be created; which stages would run as one query; what it
    would tell of; and what it would refuse, and why. It starts Spark, to call the functions of stages.

    Exits with 0 if the run would start, whatever it would tell of, and otherwise with what the run would end with.
    Works beside a run that is alive, and then goes by its newest checkpoint.

    Example: tidegate plan orders.py --root state/orders

    Example: tidegate plan orders.py --root state/orders --rename large=large_orders --json
    """
    settings, renames = settings_in(conf), renames_in(rename)
    # Not above: other commands need not wait for these.
    from tidegate.cli.load import load_pipeline
    from tidegate.engine.preview import preview
    from tidegate.spark.session import in_place

    given, root = in_place(settings), place_of(root)
    chosen = load_pipeline(file, pipeline, to_run=True)
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-plan-", ignore_cleanup_errors=True) as scratch,
        chdir(chosen.folder),
    ):
        found = preview(
            chosen,
            root,
            Path(scratch),
            chain=chain,
            rename=renames,
            allow_dropped_state=allow_dropped_state,
            conf=given,
        )
    if as_json:
        say(_answer(root, found))
    else:
        _print(found, console())
    raise typer.Exit(Exit.FINE if found.refused is None else code_of(found.refused))


def _answer(root: Place, found: Preview) -> PlanAnswer:
    refused = found.refused
    return PlanAnswer(
        root=str(root),
        pipeline=found.pipeline,
        is_alive=found.is_alive,
        start=_start(found),
        stages=tuple(PlannedStage(each.name, each.kind, each.change, each.was, _state(each)) for each in found.stages),
        tables={
            name: PlannedTable(each.table.kind, each.table.address, each.change) for name, each in found.tables.items()
        },
        chains=found.chains,
        changes=found.told,
        refused=None if refused is None else Refusal(type(refused).__name__, str(refused), code_of(refused)),
    )


def _start(found: Preview) -> NextStart:
    number = found.checkpoint_id
    checkpoint = None if number is None else checkpoint_name(number)
    if found.refused is not None:
        return NextStart("refuses", checkpoint, str(found.refused))
    if not isinstance(found.start, Restore):
        return NextStart("fresh")
    is_skipping = bool(found.start.skipped)
    return NextStart("skips" if is_skipping else "goes_on", checkpoint, found.starts if is_skipping else None)


def _state(stage: StageChange) -> KeptState:
    if not stage.has_state:
        return "none"
    return "dropped" if stage.change == "removed" else "kept"


def _print(found: Preview, out: Console) -> None:
    def line(text: str) -> None:
        out.print(text, markup=False, highlight=False, soft_wrap=True)

    out.print(Text(f"pipeline {found.pipeline}", style="bold"))
    if found.is_alive:
        line("a run is alive on this root: what follows is of one that is started when it has ended as things are now")
    if found.refused is not None:
        line(f"a run {f'{found.starts}, but ' if found.starts else ''}refuses to start: {found.refused}")
        return
    line(f"a run {found.starts}")
    columns = [
        Column("what becomes of it", [Text(_told(each)) for each in found.stages], 1, is_number=False),
        Column("state", [Text(_state(each)) for each in found.stages], 2, is_number=False),
    ]
    out.print(Group(*fitted("stage", [each.name for each in found.stages], columns, terminal_width()).lines()))
    for text in _lines(found):
        line(text)


def _told(stage: StageChange) -> str:
    return f"goes on as what was {stage.was}" if stage.change == "renamed" else _CHANGES[stage.change]


def _lines(found: Preview) -> Iterator[str]:
    for name, each in found.tables.items():
        yield f"table of {name}: {each.table.kind} {each.table.address}".rstrip() + f", {_TABLES[each.change]}"
    for last, before in found.chains.items():
        yield f"one query: {', '.join((*before, last))}"
    yield from found.told or ("nothing has changed",)
