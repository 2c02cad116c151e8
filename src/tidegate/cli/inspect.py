"""`tidegate inspect`: what a checkpoint holds of its stages: their state, and what was in flight to them."""

from __future__ import annotations

import csv
import enum
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.console import Group
from rich.text import Text

from tidegate.cli.answers import HeldStage, HeldState, InFlightRows, InspectAnswer, RowsAnswer
from tidegate.cli.fitting import Column, fitted
from tidegate.cli.options import (
    LATEST,
    AsJson,
    OperatorNumber,
    RootPlace,
    check_writable,
    checkpoint_or_latest,
    complete_stage,
)
from tidegate.cli.speech import say
from tidegate.cli.text import as_bytes, console, counted, plain_table, terminal_width
from tidegate.errors import InvalidConfig
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.places import Place, place_of
from tidegate.storage.scratch import scratch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidegate.engine.inspecting import CheckpointInside
    from tidegate.storage.folder import Folder

_SHOWN: Final = 20
_UTC: Final = "UTC"


class Format(enum.StrEnum):
    TABLE = "table"
    CSV = "csv"
    PARQUET = "parquet"


class _Question(msgspec.Struct, frozen=True):
    """Which rows are wanted, and how."""

    stage: str
    operator: int | None
    part: str | None
    in_flight: bool
    where: str | None
    form: Format
    out: Path | None
    limit: int | None


class _Found(msgspec.Struct, frozen=True):
    """The rows, what they are for people, and which operator and part they are of."""

    frame: DataFrame
    told: str
    operator: int | None
    part: str | None


def inspect_command(
    root: RootPlace,
    checkpoint: Annotated[str, checkpoint_or_latest()] = LATEST,
    stage: Annotated[
        str | None,
        typer.Option(autocompletion=complete_stage, help="The stage to look into; without it, all are listed."),
    ] = None,
    operator: OperatorNumber = None,
    part: Annotated[
        str | None,
        typer.Option(
            help="Which part: left or right of a join; a state variable of a transformWithState, or timers; with "
            "--in-flight, the stage that wrote the rows."
        ),
    ] = None,
    in_flight: Annotated[
        bool,
        typer.Option("--in-flight", help="The rows that an unaligned checkpoint has captured in flight to the stage."),
    ] = False,
    where: Annotated[
        str | None, typer.Option(metavar="SQL", help="Only rows of which this is true, such as key.country = 'DE'.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How to give them.")] = Format.TABLE,
    out: Annotated[
        Path | None, typer.Option(help="Write them there: csv as a file, parquet as a folder that is yet to be made.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many rows at most; a table and --json have 20 without it, files all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look into a checkpoint: the state of its stages, and what was in flight to them.

    Without --stage it lists all stages, with the operators that keep state, by which keys, how many rows each has
    stored, and what was in flight. With --stage it gives the rows of a stage's state, read by Spark's own state reader
    from a copy of the stage's files. Where there is a choice, it says of what.

    Times are in UTC. Starts Spark, unless nothing is stored; changes nothing in the root, and works beside a run that
    is alive. Exits with 2 if the stage keeps no state, with 4 if a file of it is damaged.

    Example: tidegate inspect --root state/orders

    Example: tidegate inspect 42 --root state/orders --stage revenue --where "key.country = 'DE'"

    Example: tidegate inspect latest --root state/orders --stage revenue --format parquet --out revenue-state
    """
    # Not above: other commands need not wait for these.
    from tidegate.engine.inspecting import CheckpointInside

    if stage is None:
        if (
            in_flight
            or form is not Format.TABLE
            or any(each is not None for each in (operator, part, where, out, limit))
        ):
            raise typer.BadParameter("rows are of one stage: name it with --stage")
        _list(root, CheckpointInside(InspectedRoot(place_of(root)), checkpoint), as_json=as_json)
        return
    question = _Question(stage, operator, part, in_flight, where, form, out, limit)
    _check(question, as_json=as_json)
    _give(root, CheckpointInside(InspectedRoot(place_of(root)), checkpoint), question, as_json=as_json)


# -- all stages -------------------------------------------------------------------------------------


def _list(root: Place, inside: CheckpointInside, *, as_json: bool) -> None:
    stages = {name: _held(inside, name, ()) for name in inside.stages}
    if with_state := [name for name in stages if inside.holder_of(name) == name and inside.has_state(name)]:
        from tidegate.engine.inspecting import reading_session

        session = reading_session(time_zone=_UTC)
        for name in with_state:
            with scratch() as files:
                stages[name] = _held(inside, name, tuple(_counted(inside, name, session, files)))
    if as_json:
        say(InspectAnswer(root=str(root), pipeline=inside.pipeline, checkpoint=inside.name, stages=stages))
    else:
        _print_list(inside, stages)


def _held(inside: CheckpointInside, stage: str, state: tuple[HeldState, ...]) -> HeldStage:
    holder = inside.holder_of(stage)
    flying = {} if holder != stage else inside.in_flight(stage)
    return HeldStage(
        kind=inside.manifest.shape[stage].kind,
        in_query_of=None if holder == stage else holder,
        state=state,
        in_flight={
            name: InFlightRows(len(segments), sum(each.size_bytes for each in segments))
            for name, segments in flying.items()
        },
    )


def _counted(inside: CheckpointInside, stage: str, session: SparkSession, files: Folder) -> Iterator[HeldState]:
    from tidegate.spark.stored_state import told_of

    described = inside.described(stage)
    with told_of(stage):
        stored = inside.stored(stage, session, files)
        for each in stored.operators():
            known = described.get(each.number)
            yield HeldState(
                operator=each.number,
                kind=each.name if known is None else known.kind,
                keys=() if known is None else tuple(key.name for key in known.keys),
                rows={part.name or "": stored.frame(each, part).count() for part in each.parts},
            )


def _print_list(inside: CheckpointInside, stages: dict[str, HeldStage]) -> None:
    lines = [(name, *line) for name, stage in stages.items() for line in _lines(stage)]
    columns = [
        Column("operator", [Text(each[1]) for each in lines], 2, is_number=False),
        Column("by", [Text(each[2]) for each in lines], 4, is_number=False),
        Column("part", [Text(each[3]) for each in lines], 3, is_number=False),
        Column("rows", [Text(each[4]) for each in lines], 1),
        Column("in flight", [Text(each[5]) for each in lines], 5, is_number=False),
    ]
    out = console()
    title = Text(f"{inside.name} of pipeline {inside.pipeline}", style="bold")
    out.print(Group(title, *fitted("stage", [each[0] for each in lines], columns, terminal_width()).lines()))


def _lines(stage: HeldStage) -> Iterator[tuple[str, str, str, str, str]]:
    """Of each part of its state one line; of a stage without any, one that says so."""
    flying = "; ".join(
        f"{counted(each.segments, 'segment')} from {name}, {as_bytes(each.bytes)}"
        for name, each in stage.in_flight.items()
    )
    if not stage.state:
        keeps = "no state" if stage.in_query_of is None else f"in the query of {stage.in_query_of}"
        yield keeps, "", "", "", flying
    for state in stage.state:
        for part, rows in state.rows.items():
            yield f"{state.operator} {state.kind}", ", ".join(state.keys), part, f"{rows:,}", flying
            flying = ""


# -- one stage --------------------------------------------------------------------------------------


def _check(question: _Question, *, as_json: bool) -> None:
    """Refuse at once what cannot be given."""
    if question.form is Format.PARQUET and question.out is None:
        raise typer.BadParameter("--format parquet needs --out PATH, the folder to write")
    if question.out is not None and question.form is Format.TABLE:
        raise typer.BadParameter("--out is for --format csv and parquet")
    if as_json and question.form is not Format.TABLE and question.out is None:
        raise typer.BadParameter("--json and --format csv cannot both be on stdout: leave one out, or give --out PATH")
    if question.in_flight and question.operator is not None:
        raise typer.BadParameter("rows in flight are of no operator: leave --operator out, or --in-flight")
    if question.out is None:
        return
    if question.form is Format.CSV:
        check_writable("--out", question.out)
    elif question.out.exists():
        raise InvalidConfig(f"--out {question.out} is there already; name a folder that is yet to be made")


def _give(root: Place, inside: CheckpointInside, question: _Question, *, as_json: bool) -> None:
    from tidegate.engine.inspecting import reading_session
    from tidegate.spark.rows import as_objects, filtered, ordered
    from tidegate.spark.stored_state import told_of

    stage = question.stage
    if question.in_flight:  # what cannot be is told before Spark is started
        inside.input_in_flight(stage, question.part)
    else:
        inside.check_has_state(stage)
    session = reading_session(time_zone=_UTC)
    with scratch() as files, told_of(stage):
        found = _found(inside, question, session, files)
        frame = filtered(found.frame, question.where)
        if question.form is not Format.TABLE:
            _write(frame, question)
            if as_json:
                say(_answer(root, inside, question, found, frame.count()))
            else:
                typer.echo(found.told, err=True)
            return
        shown = ordered(frame).limit(question.limit or _SHOWN)
        if as_json:
            say(_answer(root, inside, question, found, frame.count(), *as_objects(shown)))
        else:
            _print_table(shown, found.told, frame.count(), question)


def _answer(
    root: Place, inside: CheckpointInside, question: _Question, found: _Found, count: int, *rows: dict[str, Any]
) -> RowsAnswer:
    return RowsAnswer(
        root=str(root),
        pipeline=inside.pipeline,
        checkpoint=inside.name,
        stage=question.stage,
        held_by=inside.holder_of(question.stage),
        operator=found.operator,
        part=found.part,
        count=count,
        rows=rows,
        out=None if question.out is None else str(question.out),
    )


def _found(inside: CheckpointInside, question: _Question, session: SparkSession, files: Folder) -> _Found:
    from tidegate.engine.inspecting import chosen_operator

    stage = question.stage
    holder = inside.holder_of(stage)
    shared = "" if holder == stage else f"; {stage} ran in one query with {holder}, which holds what Spark keeps for it"
    if question.in_flight:
        written_by = inside.input_in_flight(stage, question.part)
        frame = inside.rows_in_flight(stage, written_by, session, files)
        return _Found(frame, f"in flight from {written_by} to {holder} at {inside.name}{shared}", None, written_by)
    stored = inside.stored(stage, session, files)
    operator, part = chosen_operator(stored, question.operator, question.part, f"stage {stage!r}")
    known = inside.described(stage).get(operator.number)
    kind = operator.name if known is None else known.kind
    which = f"{kind} (operator {operator.number}{'' if part.name is None else f', {part.name}'})"
    told = f"state of {holder} at {inside.name}: {which}{shared}"
    return _Found(stored.frame(operator, part), told, operator.number, part.name)


def _print_table(shown: DataFrame, told: str, count: int, question: _Question) -> None:
    from tidegate.spark.rows import flattened, texts

    flat = flattened(shown)
    table = plain_table(flat.columns)
    rows = 0
    for row in texts(flat):
        table.add_row(*(Text("null", style="dim") if value is None else Text(value) for value in row))
        rows += 1
    out = console()
    out.print(told, style="bold", markup=False, soft_wrap=True)
    if rows:
        out.print(table)
    of = counted(count, "row") + ("" if question.where is None else f" where {question.where}")
    out.print(of if rows == count else f"the first {rows:,} of {of}; --limit shows more", markup=False, soft_wrap=True)


def _write(frame: DataFrame, question: _Question) -> None:
    from tidegate.spark.rows import flattened, ordered, texts

    chosen = frame if question.limit is None else ordered(frame).limit(question.limit)
    if question.form is Format.PARQUET and question.out is not None:
        chosen.write.parquet(str(question.out.absolute()))
        return
    flat = flattened(ordered(chosen))
    file = nullcontext(sys.stdout) if question.out is None else question.out.open("w", encoding="utf-8", newline="")
    with file as open_file:
        writer = csv.writer(open_file, lineterminator="\n")
        writer.writerow(flat.columns)
        writer.writerows(texts(flat))
