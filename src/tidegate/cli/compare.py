"""`tidegate compare`: how the tables of two pipelines differ where both have read the same input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.console import Console, Group
from rich.text import Text

from tidegate.cli.answers import ColumnTypes, CompareAnswer, TableDifference
from tidegate.cli.exits import Exit
from tidegate.cli.fitting import Column, fitted
from tidegate.cli.options import AsJson, RootPlace, complete_checkpoint, parse_checkpoint
from tidegate.cli.speech import say
from tidegate.cli.text import as_time, console, terminal_width
from tidegate.storage.places import Place, as_given

if TYPE_CHECKING:
    from tidegate.engine.comparing import Comparison, TableComparison

_UTC: Final = "UTC"


def compare_command(
    root: RootPlace,
    other: Annotated[
        Place, typer.Option("--with", metavar="PLACE", parser=as_given, help="The root of the other pipeline.")
    ],
    checkpoint: Annotated[
        int | None,
        typer.Option(
            metavar="ID",
            parser=parse_checkpoint,
            autocompletion=complete_checkpoint,
            help="That one of the first root.",
        ),
    ] = None,
    with_checkpoint: Annotated[
        int | None, typer.Option(metavar="ID", parser=parse_checkpoint, help="That one of the other root.")
    ] = None,
    table: Annotated[
        list[str], typer.Option(metavar="SINK", help="Only the table of this sink; may be repeated.")
    ] = [],  # noqa: B006 - typer copies it
    limit: Annotated[int, typer.Option(min=0, help="How many rows of each kind to show.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Compare the Delta tables of two pipelines where both have read the same input.

    That is at the newest pair of retained, aligned checkpoints whose sources stand at the same positions; for file
    sources, that have read the same files. Of every sink that both have it tells how many rows only one of the tables
    holds, and shows some: - only in the first root, + only in the other. Nothing is changed in either root, and both
    runs may be alive.

    Times are in UTC. Starts Spark. Exits with 0 if all rows are equal, with 1 if some differ, with 3 if no two
    checkpoints have read the same: `tidegate run FILE --root OTHER --up-to ROOT` brings the other one there.

    Example: tidegate compare --root state/orders --with state/try

    Example: tidegate compare --root state/orders --with state/try --table revenue --limit 50 --json
    """
    # Not above: other commands need not wait for these.
    from tidegate.engine.comparing import find_pair
    from tidegate.engine.inspecting import reading_session
    from tidegate.spark.stored_state import told_of

    pair = find_pair(root, other, checkpoint, with_checkpoint, table)
    found = pair(reading_session(time_zone=_UTC))
    compared = {}
    for name, each in found.items():
        with told_of(name):
            compared[name] = _compared(each, limit)
    answer = _answer(root, other, found, compared)
    if as_json:
        say(answer)
    else:
        _print(answer, console())
    if not answer.equal:
        raise typer.Exit(Exit.FAILED)


def _compared(table: TableComparison, limit: int) -> TableDifference:
    from tidegate.spark.table_diff import some_rows

    columns = table.columns
    return TableDifference(
        path=table.table.address,
        other_path=table.other_table.address,
        equal=table.is_equal,
        only_in_root=table.only_in_root,
        only_in_other=table.only_in_other,
        in_both=table.in_both,
        columns_only_in_root=columns.only_first,
        columns_only_in_other=columns.only_second,
        types={name: ColumnTypes(*both) for name, both in columns.types.items()},
        some_only_in_root=some_rows(table.rows_only_in_root(), limit) if table.only_in_root else (),
        some_only_in_other=some_rows(table.rows_only_in_other(), limit) if table.only_in_other else (),
    )


def _answer(root: Place, other: Place, found: Comparison, tables: dict[str, TableDifference]) -> CompareAnswer:
    return CompareAnswer(
        root=str(root),
        other=str(other),
        checkpoint=found.checkpoint,
        other_checkpoint=found.other_checkpoint,
        equal=all(each.equal for each in tables.values()),
        positions=found.positions,
        apart=found.apart,
        tables=tables,
        not_compared=found.not_compared,
        sinks_only_in_root=found.sinks_only_in_root,
        sinks_only_in_other=found.sinks_only_in_other,
        sources_only_in_root=found.sources_only_in_root,
        sources_only_in_other=found.sources_only_in_other,
        watermark_ms=found.watermarks[0],
        other_watermark_ms=found.watermarks[1],
    )


def _print(answer: CompareAnswer, out: Console) -> None:
    tables = answer.tables
    columns = [
        Column("only in root", [Text(f"{each.only_in_root:,}") for each in tables.values()], 1),
        Column("only in other", [Text(f"{each.only_in_other:,}") for each in tables.values()], 1),
        Column("in both", [Text(f"{each.in_both:,}") for each in tables.values()], 1),
    ]
    title = f"{answer.checkpoint} of {answer.root}, and {answer.other_checkpoint} of {answer.other}"
    out.print(Group(Text(title, style="bold"), *fitted("table", list(tables), columns, terminal_width()).lines()))
    for line in _notes(answer):
        out.print(line, markup=False, soft_wrap=True)
    for name, each in tables.items():
        _print_rows(name, each, out)


def _notes(answer: CompareAnswer) -> list[str]:
    """What else there is to know."""
    notes = [f"source {name} is {how}: the tables show different input" for name, how in answer.apart.items()]
    for name, each in answer.tables.items():
        for column, kinds in each.types.items():
            notes.append(f"{name}: column {column} is {kinds.root} in root, {kinds.other} in other; it is not compared")
        for where, only in (("root", each.columns_only_in_root), ("other", each.columns_only_in_other)):
            if only:
                notes.append(f"{name}: only in {where}, and not compared: {', '.join(only)}")
    notes += (f"{name} is not compared: it is no Delta table ({kind})" for name, kind in answer.not_compared.items())
    for what, where, names in (
        ("sinks", "root", answer.sinks_only_in_root),
        ("sinks", "other", answer.sinks_only_in_other),
        ("sources", "root", answer.sources_only_in_root),
        ("sources", "other", answer.sources_only_in_other),
    ):
        if names:
            notes.append(f"{what} only in {where}: {', '.join(names)}")
    if answer.watermark_ms != answer.other_watermark_ms:
        times = ("none" if each is None else as_time(each) for each in (answer.watermark_ms, answer.other_watermark_ms))
        notes.append(
            f"watermarks differ, {' and '.join(times)}: what a window holds may be in one and not yet in the other"
        )
    return notes


def _print_rows(name: str, table: TableDifference, out: Console) -> None:
    for sign, where, count, some in (
        ("-", "root", table.only_in_root, table.some_only_in_root),
        ("+", "other", table.only_in_other, table.some_only_in_other),
    ):
        for row in some:
            out.print(f"{sign} {name}: {_shown(row)}", markup=False, soft_wrap=True)
        if some and count > len(some):
            out.print(f"  and {count - len(some):,} more only in {where}; --limit shows more", markup=False)


def _shown(row: dict[str, Any]) -> str:
    """A row on one line."""
    return ", ".join(f"{name} {_value(value)}" for name, value in row.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
